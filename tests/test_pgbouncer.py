"""Behind pgbouncer in transaction mode, where each transaction may run in another session than the one before."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg2
import pytest
from fakes import scripted
from psycopg2.extensions import connection as Connection
from psycopg2.extensions import make_dsn
from psycopg2.pool import ThreadedConnectionPool
from servers import Pgbouncer, find_pgbouncer, new_folder, query
from test_concurrency import check, eight_threads

from pgmemory import (
    BufferMemory,
    ConversationStore,
    RelevantTurnMemory,
    StoreUnavailableError,
    SummaryMemory,
    TokenWindowMemory,
)

POOL_SIZE = 2
PATIENCE_SECONDS = 30

# What pgbouncer itself sets in a server's session, to what the client in front of it wants.
CLIENT_SETTINGS = ("application_name", "client_encoding", "DateStyle", "TimeZone", "standard_conforming_strings")


@pytest.fixture(scope="module")
def pgbouncer(server_dsn: str) -> Iterator[Pgbouncer]:
    """A pgbouncer in front of the run's server, with fewer sessions than clients."""
    if find_pgbouncer() is None:
        pytest.skip("pgbouncer is not installed: apt-get install pgbouncer")
    with Pgbouncer(new_folder("pgbouncer"), server_dsn, pool_size=POOL_SIZE) as pgbouncer:
        yield pgbouncer


def use_everything(store: ConversationStore) -> dict[str, Any]:
    """Use every operation of a store and return what was read."""
    read: dict[str, Any] = {"applied": store.setup(), "applied again": store.setup()}
    read["fits"] = store.schema_status().fits
    common: dict[str, Any] = {"store": store, "user_id": "u", "return_messages": False}
    memories = [
        BufferMemory(session_id="buffer", max_messages=6, **common),
        TokenWindowMemory(session_id="tokens", max_token_limit=60, **common),
        RelevantTurnMemory(session_id="relevant", keywords=["odd"], **common),
        SummaryMemory(session_id="summary", llm=scripted("the summary"), max_token_limit=60, **common),
    ]
    for memory in memories:
        for number in range(5):
            parity = "odd" if number % 2 else "even"
            memory.save_context({"input": f"question {number}"}, {"output": f"answer {number} is {parity}"})
        read[memory.session_id] = memory.load_memory_variables({})
        read[f"{memory.session_id}, last"] = memory.for_session("buffer", user_id="u").load_memory_variables({})
    once = BufferMemory(session_id="buffer", idempotency_key="key", **common)
    for _ in range(2):
        once.save_context({"input": "said once"}, {"output": "stored once"})
    read["log"] = [str(message.content) for message in once.chat_memory.messages]
    store.set_metadata("tokens", {"plan": "gold"}, user_id="u")
    read["metadata"] = store.get_metadata("tokens", user_id="u")
    memories[2].clear()
    read["listed"] = [(found.session_id, found.message_count) for found in store.list_conversations(user_id="u")]
    conversation = store.get_conversation("relevant", user_id="u")
    read["cleared"] = conversation and (conversation.message_count, conversation.next_message_index)
    return read


@pytest.fixture
def expected(server_dsn: str, schema_name: str) -> dict[str, Any]:
    """What `use_everything` reads over plain connections to the server."""
    with ConversationStore(server_dsn, schema=schema_name) as store:
        expected = use_everything(store)
    query(server_dsn, f"drop schema {schema_name} cascade")
    assert expected["applied"] and "the summary" in expected["summary"]["history"]
    assert expected["log"][-2:] == ["said once", "stored once"]
    return expected


def test_every_operation_works_behind_it(pgbouncer: Pgbouncer, schema_name: str, expected: dict[str, Any]) -> None:
    with ConversationStore(pgbouncer.dsn, schema=schema_name) as store:
        assert use_everything(store) == expected


class ForgetfulPool(ThreadedConnectionPool):
    """A pool whose connections have lost all that the session held, each time they are lent."""

    def getconn(self, key: object = None) -> Any:
        connection = super().getconn(key)
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute("discard all")
        return connection


def test_every_operation_works_where_sessions_forget_everything_in_between(
    server_dsn: str, schema_name: str, expected: dict[str, Any]
) -> None:
    pool = ForgetfulPool(1, 1, server_dsn)
    with ConversationStore(pool, schema=schema_name) as store:
        assert use_everything(store) == expected
    pool.closeall()


def test_several_who_set_up_at_once_behind_it_all_succeed(pgbouncer: Pgbouncer, schema_name: str) -> None:
    def set_up(_: int) -> list[str]:
        with ConversationStore(pgbouncer.dsn, schema=schema_name) as store:
            return store.setup()

    with ThreadPoolExecutor(8) as executor:
        applied = [name for names in executor.map(set_up, range(8)) for name in names]
    assert applied and len(applied) == len(set(applied))


def test_eight_threads_behind_it_lose_double_and_mix_up_nothing(pgbouncer: Pgbouncer, store: ConversationStore) -> None:
    writers = eight_threads(pgbouncer.dsn, store)
    check(store.list_messages("shared"), writers)


def state(connection: Connection) -> dict[str, Any]:
    """Return what the session of an open transaction holds."""
    with connection.cursor() as cursor:
        cursor.execute("select name, setting from pg_settings where name <> all(%s)", (list(CLIENT_SETTINGS),))
        settings = dict(cursor.fetchall())
        cursor.execute(
            """select 'lock', mode from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()
            union all select 'statement', name from pg_prepared_statements
            union all select 'channel', pg_listening_channels()
            union all select 'table', relname from pg_class where relnamespace = pg_my_temp_schema()"""
        )
        return settings | {"left behind": cursor.fetchall()}


def test_it_leaves_nothing_of_its_own_in_the_sessions_that_others_use_next(
    server_dsn: str, pgbouncer: Pgbouncer, schema_name: str, admin: Connection
) -> None:
    with ConversationStore(pgbouncer.dsn, schema=schema_name) as store:
        use_everything(store)
        eight_threads(pgbouncer.dsn, store)
        untouched = state(admin)
        # As many transactions at once as there are sessions: each of them is looked at.
        others = [psycopg2.connect(pgbouncer.dsn) for _ in range(POOL_SIZE)]
        try:
            assert [state(other) for other in others] == [untouched] * POOL_SIZE
        finally:
            for other in others:
                other.close()


def test_a_paused_one_fails_calls_in_time_and_afterwards_the_same_objects_go_on(
    pgbouncer: Pgbouncer, store: ConversationStore
) -> None:
    limits: dict[str, Any] = {"query_timeout_seconds": 1, "retry_seconds": 1}
    with (
        ConversationStore(make_dsn(pgbouncer.dsn, connect_timeout=2), schema=store.schema, **limits) as paused,
        ThreadPoolExecutor(1) as executor,
    ):
        memory = BufferMemory(session_id="s", store=paused)
        memory.save_context({"input": "q 0"}, {"output": "a 0"})
        pgbouncer.pause()
        try:
            saving = executor.submit(memory.save_context, {"input": "q 1"}, {"output": "a 1"})
            error: Any = saving.exception(PATIENCE_SECONDS)
        finally:
            pgbouncer.resume()
        assert isinstance(error, StoreUnavailableError)
        turn = error.unsaved_turn
        for _ in range(2):
            memory.chat_memory.add_messages(turn.messages, idempotency_key=turn.idempotency_key)
        memory.save_context({"input": "q 2"}, {"output": "a 2"})
        log = paused.list_messages("s")
    assert [message.content for message in log] == ["q 0", "a 0", "q 1", "a 1", "q 2", "a 2"]
