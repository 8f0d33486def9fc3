"""What a store tells of its work: each operation to a hook, its connections as numbers."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import psycopg2
import pytest
from psycopg2.extensions import connection as Connection
from psycopg2.pool import ThreadedConnectionPool
from test_schema import OPERATIONS
from waiting import wait_until

from pgmemory import (
    BufferMemory,
    ConversationStore,
    Operation,
    PoolStats,
    SchemaError,
    StoreError,
    StoreUnavailableError,
)

PATIENCE_SECONDS = 20.0

# What a method is told as where that is not its own name.
TOLD_AS = {
    "list_messages": {"read_all"},
    "get_conversation": {"list_conversations"},
    "find_conversations": {"list_conversations"},
    "read_pages": {"read_page"},
    "require_schema": {"schema_status"},
    "items": {"get_items"},
    "fork": {"append", "fork"},
    "follow": {"follow", "newest"},
    "erase_conversation": {"erase"},
    "erase_user": {"erase"},
    "rotate_keys": {"read_keys"},
    "read_snapshot": {"read_for_transfer"},
    "read_entries": {"read_for_transfer"},
}


def save(store: ConversationStore, name: str, session_id: str = "s") -> None:
    BufferMemory(session_id=session_id, store=store).save_context({"input": f"q {name}"}, {"output": f"a {name}"})


# --- The hook --------------------------------------------------------------------------------------------------------


def test_every_operation_is_told_with_its_name_its_rows_and_no_retries(server_dsn: str, schema_name: str) -> None:
    told: list[Operation] = []
    with ConversationStore(server_dsn, schema=schema_name, on_operation=told.append) as store:
        store.setup()
        names = [operation.name for operation in told]
        assert set(names) == {"schema_status", "migrate"}
        key = store.key("session")
        for name, operation in OPERATIONS.items():
            told.clear()
            operation(store, key)
            method = name.split(" ")[0]
            assert {one.name for one in told} == TOLD_AS.get(method, {method})
            assert [(one.retries, one.error) for one in told] == [(0, None)] * len(told)
            assert all(one.seconds > 0 for one in told)
    assert {"append", "read_last_tokens", "clear", "set_metadata"} <= {name.split(" ")[0] for name in OPERATIONS}


def test_rows_are_those_that_were_written_or_read(server_dsn: str, store: ConversationStore) -> None:
    told: list[Operation] = []
    with ConversationStore(server_dsn, schema=store.schema, on_operation=told.append) as other:
        for number in range(3):
            save(other, str(number))
        other.list_messages("s")
        other.list_conversations()
        BufferMemory(session_id="s", store=other, k=2).load_memory_variables({})
        other.clear(other.key("s"))
    assert [(operation.name, operation.rows) for operation in told] == [
        ("schema_status", 3),
        ("append", 2),
        ("append", 2),
        ("append", 2),
        ("read_all", 6),
        ("list_conversations", 1),
        ("read_last_turns", 4),
        ("clear", 0),
    ]


def test_retries_are_counted_and_told_once(
    server_dsn: str, store: ConversationStore, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[Operation] = []
    with ConversationStore(
        server_dsn, schema=store.schema, max_connections=1, on_operation=told.append, query_timeout_seconds=0.5
    ) as other:
        save(other, "0")
        told.clear()
        with psycopg2.connect(server_dsn) as locker, locker.cursor() as cursor, ThreadPoolExecutor(1) as executor:
            cursor.execute(f'select 1 from "{store.schema}".conversations for update')
            saving = executor.submit(save, other, "1")
            blocked = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and query ~ %s"
            with psycopg2.connect(server_dsn) as watcher, watcher.cursor() as looking:
                seen = set()

                def another_try_waits() -> bool:
                    looking.execute(f"{blocked.replace('count(*)', 'query_start')}", (store.schema,))
                    seen.update(looking.fetchall())
                    watcher.commit()
                    return len(seen) > 1

                wait_until(another_try_waits, "the save is tried again")
            locker.rollback()
            saving.result(PATIENCE_SECONDS)
        locker.close()
        watcher.close()
    (append,) = told
    assert append.name == "append" and append.retries >= 1 and append.error is None and append.rows == 2
    assert append.seconds > 0.4
    # A lock that was held for long is no lost connection.
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert [message.content for message in store.list_messages("s")] == ["q 0", "a 0", "q 1", "a 1"]


def test_an_operation_that_fails_is_told_with_its_error() -> None:
    told: list[Operation] = []
    dsn = "postgresql://127.0.0.1:1/db"
    with ConversationStore(dsn, retry_seconds=0.2, on_operation=told.append) as store:
        with pytest.raises(StoreUnavailableError, match=r"tried \d+ times in") as caught:
            store.list_messages("s")
    (operation,) = told
    assert operation.error is caught.value
    assert operation.retries >= 1 and operation.rows == 0


def test_an_operation_that_is_refused_is_told_and_not_tried_again(server_dsn: str, schema_name: str) -> None:
    told: list[Operation] = []
    with ConversationStore(server_dsn, schema=schema_name, on_operation=told.append) as store:
        with pytest.raises(SchemaError):
            store.list_messages("s")
    (operation,) = told
    assert isinstance(operation.error, StoreError) and operation.error.sqlstate in ("42P01", "3F000")
    assert operation.retries == 0


def test_a_hook_that_fails_is_logged_and_disturbs_nothing(
    server_dsn: str, store: ConversationStore, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(operation: Operation) -> None:
        raise ZeroDivisionError

    with ConversationStore(server_dsn, schema=store.schema, on_operation=fail) as other:
        save(other, "0")
        assert len(other.list_messages("s")) == 2
    assert "on_operation failed" in caplog.text and "'append'" in caplog.text


def test_a_hook_hears_of_an_operation_in_the_thread_that_asked_for_it(
    server_dsn: str, store: ConversationStore
) -> None:
    threads: list[int] = []
    with ConversationStore(
        server_dsn, schema=store.schema, on_operation=lambda _: threads.append(threading.get_ident())
    ) as other:
        save(other, "0")
    assert set(threads) == {threading.get_ident()}


# --- The pool --------------------------------------------------------------------------------------------------------


def stats_of(store: ConversationStore) -> PoolStats:
    stats = store.pool_stats()
    assert stats is not None
    return stats


def test_the_pools_numbers_follow_what_happens(server_dsn: str, store: ConversationStore, admin: Connection) -> None:
    name = store.schema
    with ConversationStore(
        server_dsn, schema=store.schema, max_connections=2, timeout_seconds=0.2, application_name=name
    ) as other:
        assert stats_of(other) == PoolStats(2, 0, 0, 0, 0, 0, 0, 0, 0.0, 0)
        save(other, "0")
        used = stats_of(other)
        assert (used.connections, used.idle, used.in_use, used.opened) == (1, 1, 0, 1)
        with other._database.transaction(), other._database.transaction():
            held = stats_of(other)
            assert (held.connections, held.idle, held.in_use, held.opened) == (2, 0, 2, 2)
            with ThreadPoolExecutor(1) as executor:
                waiting = executor.submit(save, other, "late")
                wait_until(lambda: stats_of(other).waiting == 1, "a caller waits")
                assert isinstance(waiting.exception(PATIENCE_SECONDS), StoreError)
        after = stats_of(other)
        assert (after.waiting, after.waits, after.timeouts, after.lost) == (0, 1, 1, 0)
        assert after.waited_seconds > 0.1
        with admin.cursor() as cursor:
            cursor.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where application_name = %s", (name,)
            )
            wait_until(lambda: _sessions(admin, name) == 0, "the sessions end")
        save(other, "1")
        healed = stats_of(other)
        assert (healed.connections, healed.lost, healed.opened) == (1, 2, 3)
    assert stats_of(other).connections == 0


def _sessions(admin: Connection, name: str) -> int:
    with admin.cursor() as cursor:
        cursor.execute("select count(*) from pg_stat_activity where application_name = %s", (name,))
        (row,) = cursor.fetchall()
        return int(row[0])


def test_a_pool_of_the_applications_counts_for_itself(server_dsn: str, store: ConversationStore) -> None:
    pool = ThreadedConnectionPool(1, 2, server_dsn)
    with ConversationStore(pool, schema=store.schema) as other:
        assert other.pool_stats() is None
    pool.closeall()
