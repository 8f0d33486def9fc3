"""The store: order, exactly once, pruning, clearing, summaries, conversations, life; against a real server."""

from __future__ import annotations

import asyncio
import copy
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psycopg2
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from psycopg2 import sql
from psycopg2.extensions import connection as Connection
from psycopg2.extensions import cursor as Cursor
from psycopg2.extensions import make_dsn
from psycopg2.pool import ThreadedConnectionPool
from waiting import wait_until

from pgmemory import (
    ConfigurationError,
    ConversationStore,
    MessageNotStorableError,
    PgMemoryError,
    PoolClosedError,
    StoredMessage,
    StoreError,
)
from pgmemory.models import ConversationKey

PROJECT = Path(__file__).resolve().parents[1]
PATIENCE_SECONDS = 30.0
READ_MUCH = 10**9


def turn(name: object, *, results: int = 0) -> list[StoredMessage]:
    """A turn of two messages, and two more for each tool call's result."""
    calls = [StoredMessage(role, f"{role} {name}.{n}") for n in range(results) for role in ("ai", "tool")]
    return [StoredMessage("human", f"q {name}"), *calls, StoredMessage("ai", f"a {name}")]


def write(store: ConversationStore, key: ConversationKey, messages: Sequence[StoredMessage], **options: Any) -> None:
    store.append(key, messages, **{"write_id": uuid.uuid4(), **options})


def contents(store: ConversationStore, key: ConversationKey) -> list[str]:
    return [message.content for message in store.read_all(key)]


def indexes(store: ConversationStore, key: ConversationKey) -> list[int | None]:
    return [message.message_index for message in store.read_all(key)]


def said(*turns: Sequence[StoredMessage]) -> list[str]:
    return [message.content for messages in turns for message in messages]


def ask(admin: Connection, statement: str, schema: str = "", **parameters: Any) -> list[tuple[Any, ...]]:
    """Run one statement; `{schema}` stands for the test's schema."""
    with admin.cursor() as cursor:
        cursor.execute(sql.SQL(statement).format(schema=sql.Identifier(schema)), parameters or None)
        return cursor.fetchall() if cursor.description else []


def at_once(*functions: Callable[[], Any]) -> list[Any]:
    """Run functions in threads that start together; return their results or raise what one of them raised."""
    barrier = threading.Barrier(len(functions))

    def run(function: Callable[[], Any]) -> Any:
        barrier.wait(PATIENCE_SECONDS)
        return function()

    with ThreadPoolExecutor(len(functions)) as executor:
        return [future.result() for future in [executor.submit(run, function) for function in functions]]


class NotingCursor(Cursor):
    """A cursor that notes the SQLSTATE of each error, which the store may have made good by trying again."""

    connection: NotingConnection

    def execute(self, query: Any, vars: Any = None) -> None:
        try:
            super().execute(query, vars)
        except psycopg2.Error as error:
            self.connection.sqlstates.append(error.pgcode)
            raise


class NotingConnection(Connection):
    def __init__(self, dsn: str, *, sqlstates: list[str | None]) -> None:
        super().__init__(dsn)
        self.sqlstates = sqlstates

    def cursor(self, *args: Any, **kwargs: Any) -> Any:
        return super().cursor(*args, **{**kwargs, "cursor_factory": NotingCursor})


@contextmanager
def noting_store(dsn: str, schema: str) -> Iterator[tuple[ConversationStore, list[str | None]]]:
    """A store, and the SQLSTATEs of all errors on its connections."""
    sqlstates: list[str | None] = []
    pool = ThreadedConnectionPool(8, 8, dsn, connection_factory=partial(NotingConnection, sqlstates=sqlstates))
    try:
        yield ConversationStore(pool, schema=schema), sqlstates
    finally:
        pool.closeall()


# --- Order -----------------------------------------------------------------------------------------------------------


def test_appended_messages_are_neighbours_with_gapless_numbers(store: ConversationStore) -> None:
    key, other = store.key("one"), store.key("other")
    for number in range(5):
        write(store, key, turn(number, results=number))
        write(store, other, turn("x"))
    assert contents(store, key) == said(*(turn(number, results=number) for number in range(5)))
    assert indexes(store, key) == list(range(30))
    assert indexes(store, other) == list(range(10))


def test_the_order_is_that_of_the_numbers_even_where_all_times_are_equal(
    store: ConversationStore, admin: Connection
) -> None:
    key = store.key("s")
    for number in range(20):
        write(store, key, turn(number))
    rewrite = "update {schema}.conversation_messages set created_at = '2024-01-01' where message_index % 3 = %(rest)s"
    for rest in (2, 0, 1):  # also shuffles the rows on their pages
        ask(admin, rewrite.replace("% 3", "%% 3"), store.schema, rest=rest)
    expected = said(*(turn(number) for number in range(20)))
    assert contents(store, key) == expected
    for window in (
        store.read_last_turns(key, turns=20),
        store.read_last_tokens(key, budget=READ_MUCH, encoding=None),
        store.read_relevant_turns(key, turns=20, rule=None),
        store.read_summary_window(key, budget=READ_MUCH, encoding=None),
        store.read_unsummarized(key, budget=READ_MUCH, encoding=None),
    ):
        assert [message.content for message in window.messages] == expected


def test_times_are_the_servers_whatever_the_clients_time_zone(
    store: ConversationStore, server_dsn: str, admin: Connection
) -> None:
    program = """
import sys, uuid
from pgmemory import ConversationStore, StoredMessage
with ConversationStore(sys.argv[1], schema=sys.argv[2]) as store:
    store.append(store.key("s"), [StoredMessage("human", "q")], write_id=uuid.uuid4())
    (message,) = store.list_messages("s")
    print(message.created_at.timestamp(), message.created_at.utcoffset() is not None)
"""
    dsn = make_dsn(server_dsn, options="-c TimeZone=Asia/Tokyo")
    environment = {**os.environ, "TZ": "Asia/Tokyo", "PYTHONPATH": str(PROJECT)}
    command = [sys.executable, "-c", program, dsn, store.schema]
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.split()
    times = "select extract(epoch from now())::float8, extract(epoch from created_at)::float8 "
    ((now, stored),) = ask(admin, times + "from {schema}.conversation_messages", store.schema)
    assert abs(now - stored) < 5
    assert abs(float(output[0]) - stored) < 0.001
    assert output[1] == "True"
    conversation = store.get_conversation("s")
    assert conversation is not None
    for moment in (conversation.created_at, conversation.updated_at):
        assert abs(moment.timestamp() - now) < 5


def test_times_never_run_backwards_where_many_write_at_once(store: ConversationStore, admin: Connection) -> None:
    key = store.key("s")

    def writer() -> None:
        for _ in range(20):
            write(store, key, turn(0))

    at_once(*[writer] * 8)
    backwards = """
        select count(*) from (
            select created_at < lag(created_at) over (order by message_index) as back
            from {schema}.conversation_messages) m
        where back"""
    assert ask(admin, backwards, store.schema) == [(0,)]
    conversation = store.get_conversation("s")
    assert conversation is not None
    newest = store.read_all(key)[-1].created_at
    assert newest is not None
    assert conversation.created_at <= conversation.updated_at <= newest


def test_where_transactions_are_repeatable_read_by_default_concurrent_writes_all_succeed_at_the_first_try(
    store: ConversationStore, server_dsn: str
) -> None:
    dsn = make_dsn(server_dsn, options="-c default_transaction_isolation=repeatable\\ read")
    with noting_store(dsn, store.schema) as (strict, sqlstates):
        key = strict.key("s")

        def writer(number: int) -> None:
            for _ in range(15):
                write(strict, key, turn(number), max_messages=50)
                strict.append_and_read_unsummarized(
                    strict.key("t"), turn(number), write_id=uuid.uuid4(), budget=10, encoding=None
                )

        at_once(*(partial(writer, number) for number in range(6)), *[lambda: strict.clear(key)] * 2)
    assert sqlstates == []
    assert len(indexes(store, store.key("t"))) == 6 * 15 * 2


# --- All or nothing, exactly once ------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", range(4))
def test_a_message_that_the_server_refuses_leaves_nothing_of_its_turn(
    store: ConversationStore, admin: Connection, place: int
) -> None:
    key = store.key("s")
    messages = turn(1, results=1)
    messages[place] = StoredMessage("ai", "x", extra="{no json")
    with pytest.raises(StoreError):
        write(store, key, messages)
    assert store.read_all(key) == []
    assert store.get_conversation("s") is None
    write(store, key, turn(2))
    assert indexes(store, key) == [0, 1]


def test_a_write_that_is_repeated_is_stored_once(store: ConversationStore) -> None:
    key, other = store.key("s"), store.key("other")
    write_id = uuid.uuid4()
    for _ in range(3):
        write(store, key, turn(1), write_id=write_id)
    # The same id in another conversation is another write.
    write(store, other, turn(1), write_id=write_id)
    write(store, key, turn(2))
    write(store, key, turn(1), write_id=write_id, max_messages=2)
    assert contents(store, key) == said(turn(1), turn(2))
    assert indexes(store, key) == [0, 1, 2, 3], "a repetition takes no number"
    assert contents(store, other) == said(turn(1))


def test_a_repeated_write_returns_the_same_unsummarised_turns(store: ConversationStore) -> None:
    key, write_id = store.key("s"), uuid.uuid4()
    windows = [
        store.append_and_read_unsummarized(key, turn(1), write_id=write_id, budget=READ_MUCH, encoding=None)
        for _ in range(2)
    ]
    assert windows[0] == windows[1]
    assert [message.content for message in windows[1].messages] == said(turn(1))
    assert windows[1].state is not None


def test_eight_threads_with_one_write_id_store_it_once(store: ConversationStore) -> None:
    key = store.key("s")
    for number in range(10):
        at_once(*[partial(write, store, key, turn(number), write_id=uuid.uuid5(key.id, str(number)))] * 8)
    assert contents(store, key) == said(*(turn(number) for number in range(10)))
    assert indexes(store, key) == list(range(20))


def test_a_write_id_lives_as_long_as_its_turn(store: ConversationStore) -> None:
    key, write_id = store.key("s"), uuid.uuid4()
    write(store, key, turn(1), write_id=write_id)
    store.clear(key)
    write(store, key, turn(1), write_id=write_id)
    assert indexes(store, key) == [2, 3]


def test_a_write_is_there_once_though_its_first_try_was_still_waiting_when_the_connection_broke(
    server_dsn: str, store: ConversationStore, admin: Connection
) -> None:
    """The server goes on with a statement whose client is gone, so both tries are under way at the same time."""
    key = store.key("s")
    write(store, key, turn(0))
    # The client's sockets are shut here, which the server does not notice while it waits for a lock.
    opened: list[Connection] = []

    class Opened(Connection):
        def __init__(self, dsn: str) -> None:
            super().__init__(dsn)
            opened.append(self)

    pool = ThreadedConnectionPool(0, 2, server_dsn, connection_factory=Opened)
    remote = ConversationStore(pool, schema=store.schema)
    assert contents(remote, key) == said(turn(0))
    opened.clear()  # that connection is closed again
    waiting = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and pid = any(%(pids)s)"

    def waiting_sessions() -> int:
        (row,) = ask(admin, waiting, pids=[connection.info.backend_pid for connection in opened])
        return int(row[0])

    locker = psycopg2.connect(server_dsn)
    ask(locker, "select 1 from {schema}.conversations for update", store.schema)
    with ThreadPoolExecutor(1) as executor, closing(locker):  # unlocked before the executor waits
        writing: Future[None] = executor.submit(write, remote, key, turn(1))
        wait_until(lambda: len(opened) == 1 and waiting_sessions() == 1, "the first try waits for the row")
        pids = [opened[0].info.backend_pid]  # a connection that was closed no longer knows it
        with socket.socket(fileno=os.dup(opened[0].fileno())) as first:
            first.shutdown(socket.SHUT_RDWR)
        wait_until(lambda: len(opened) == 2, "the second try connects")
        pids.append(opened[1].info.backend_pid)
        wait_until(lambda: ask(admin, waiting, pids=pids) == [(2,)], "both tries wait for the row")
        locker.rollback()
        locker.close()
        writing.result(PATIENCE_SECONDS)
    gone = "select count(*) from pg_stat_activity where pid = %(pid)s"
    wait_until(lambda: ask(admin, gone, pid=pids[0]) == [(0,)], "the first try ends")
    pool.closeall()
    assert contents(store, key) == said(turn(0), turn(1))
    assert indexes(store, key) == [0, 1, 2, 3]


def test_killed_sessions_are_replaced(
    server_dsn: str, store: ConversationStore, admin: Connection
) -> None:
    def ended(pids: set[int]) -> bool:
        return not sessions(admin, store.schema) & pids

    with ConversationStore(server_dsn, schema=store.schema, application_name=store.schema, min_connections=4) as other:
        key = other.key("s")
        write(other, key, turn(1))
        at_once(*[partial(other.read_all, key)] * 4)
        for number in (2, 3):
            pids = sessions(admin, store.schema)
            ask(admin, "select pg_terminate_backend(pid) from unnest(%(pids)s) pid", pids=list(pids))
            wait_until(partial(ended, pids), "the sessions end")
            assert len(other.read_all(key)) == 2 * (number - 1)
            write(other, key, turn(number))
        assert contents(other, key) == said(turn(1), turn(2), turn(3))


def test_no_state_of_a_session_is_relied_on(server_dsn: str, store: ConversationStore) -> None:
    """As behind pgbouncer, where the next statement may run in another session."""
    with ConversationStore(server_dsn, schema=store.schema, max_connections=1) as other:
        other._database.execute("discard all")
        other._database.execute("set search_path = pg_catalog")
        use = partial(other.append_and_read_unsummarized, other.key("s"), budget=READ_MUCH, encoding=None)
        for number in range(3):
            other._database.execute("discard all")
            window = use(turn(number), write_id=uuid.uuid4(), max_messages=100)
        assert [message.content for message in window.messages] == said(turn(0), turn(1), turn(2))
        left_behind = """
            select name from pg_settings where source = 'session' and name !~ '^transaction_'
            union all select name from pg_prepared_statements
            union all select mode from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()"""
        assert other._database.execute(left_behind) == []


def test_a_session_that_may_only_read_since_its_server_was_demoted_is_replaced(
    server_dsn: str, store: ConversationStore
) -> None:
    with ConversationStore(server_dsn, schema=store.schema, max_connections=1) as other:
        key = other.key("s")
        other._database.execute("set default_transaction_read_only = on")
        write(other, key, turn(1))
        assert contents(other, key) == said(turn(1))


# --- The log against a model of it -----------------------------------------------------------------------------------


@dataclass
class Model:
    """What a conversation should hold: (index, role) of its messages, and the fields of its row."""

    log: list[tuple[int, str]] = field(default_factory=list)
    next_index: int = 0
    watermark: int = -1
    keeps_summary: bool = False

    def append(self, roles: Sequence[str], max_messages: int | None, summarizing: bool) -> None:
        self.log += [(self.next_index + position, role) for position, role in enumerate(roles)]
        self.next_index += len(roles)
        self.keeps_summary = self.keeps_summary or summarizing
        if max_messages is not None and len(self.log) > max_messages:
            kept = self.kept(max_messages)
            self.log = [
                message
                for message in self.log
                if message in kept or (self.keeps_summary and message[0] > self.watermark)
            ]

    def kept(self, max_messages: int) -> list[tuple[int, str]]:
        """The preamble's system messages, and as many newest whole turns as fit beside them, but at least one.

        A log without turns keeps its newest messages instead, likewise.
        """
        parts = self.turns()
        system = [message for message in parts[0] if message[1] == "system"]
        room = max_messages - len(system)
        if len(parts) == 1:
            others = [message for message in self.log if message not in system]
            return [*system, *others[max(0, len(others) - max(room, 1)) :]]
        kept = parts[-1]
        for part in parts[-2:0:-1]:
            if len(part) + len(kept) > room:
                break
            kept = part + kept
        return system + kept

    def turns(self) -> list[list[tuple[int, str]]]:
        """What stands before the first human message, then the turns."""
        parts: list[list[tuple[int, str]]] = [[]]
        for message in self.log:
            if message[1] == "human":
                parts.append([])
            parts[-1].append(message)
        return parts

    def clear(self) -> None:
        self.log, self.watermark, self.keeps_summary = [], self.next_index - 1, False


roles = st.lists(st.sampled_from(["human", "ai", "human", "ai", "tool", "system"]), min_size=1, max_size=5)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("append"), roles, st.none() | st.integers(1, 8), st.just(False)),
        st.tuples(st.just("append"), roles, st.none() | st.integers(1, 8), st.booleans()),
        st.tuples(st.just("repeat"), st.none() | st.integers(1, 8)),
        st.tuples(st.just("clear")),
        st.tuples(st.just("summarize"), st.integers(0, 3)),
    ),
    max_size=12,
)


def test_any_sequence_of_writes_repetitions_clearings_and_summaries_leaves_what_the_model_says(
    store: ConversationStore,
) -> None:
    @settings(max_examples=120)
    @example([("append", ["ai", "ai", "system", "system"], 1, False)])  # the newest are all kept system messages
    @example([("append", ["ai", "system", "ai", "system", "system"], 3, False)])
    @given(operations)
    def campaign(operations: list[tuple[Any, ...]]) -> None:
        name = uuid.uuid4()
        key, model = store.key(name), Model()
        last: tuple[uuid.UUID, list[StoredMessage], int] | None = None
        for operation, *arguments in operations:
            if operation == "append":
                roles, max_messages, summarizing = arguments
                messages = [StoredMessage(role, f"{model.next_index + n}") for n, role in enumerate(roles)]
                last = uuid.uuid4(), messages, model.next_index
                options = {"write_id": last[0], "max_messages": max_messages}
                if summarizing:
                    store.append_and_read_unsummarized(key, messages, **options, budget=1, encoding=None)
                else:
                    store.append(key, messages, **options)
                model.append(roles, max_messages, summarizing)
            elif operation == "repeat":
                # A write is known while its first message is there.
                if last is not None and any(index == last[2] for index, _ in model.log):
                    store.append(key, last[1], write_id=last[0], max_messages=arguments[0])
            elif operation == "clear":
                store.clear(key)
                model.clear()
            else:
                window = store.read_unsummarized(key, budget=READ_MUCH, encoding=None)
                ends = [part[-1][0] for part in model.turns()[1:] if part[-1][0] > model.watermark]
                if window.state is not None and ends:
                    covers = ends[min(arguments[0], len(ends) - 1)]
                    assert store.record_summary(key, content="s", covers_through=covers, state=window.state)
                    model.watermark, model.keeps_summary = covers, True
            found = store.read_all(key)
            assert [(message.message_index, message.role) for message in found] == model.log
            conversation = store.get_conversation(name)
            if conversation is not None:
                row = conversation.message_count, conversation.next_message_index, conversation.summarized_through
                assert row == (len(model.log), model.next_index, model.watermark)
        assert all(message.content == str(message.message_index) for message in store.read_all(key))

    campaign()


# --- max_messages ----------------------------------------------------------------------------------------------------


def test_the_oldest_whole_turns_are_pruned_and_the_preambles_system_messages_kept(store: ConversationStore) -> None:
    key = store.key("s")
    system, greeting = StoredMessage("system", "be kind"), StoredMessage("ai", "welcome")
    write(store, key, [system, greeting], max_messages=6)
    write(store, key, turn(1), max_messages=6)
    write(store, key, turn(2), max_messages=6)
    assert contents(store, key) == said([system, greeting], turn(1), turn(2))
    write(store, key, turn(3), max_messages=6)
    assert contents(store, key) == said([system], turn(2), turn(3))
    write(store, key, turn(4, results=1), max_messages=6)
    assert contents(store, key) == said([system], turn(4, results=1))


def test_a_turn_that_is_longer_than_the_limit_stays_whole(store: ConversationStore) -> None:
    key = store.key("s")
    write(store, key, turn(1), max_messages=3)
    write(store, key, turn(2, results=5), max_messages=3)
    assert contents(store, key) == said(turn(2, results=5))
    write(store, key, turn(3), max_messages=3)
    assert contents(store, key) == said(turn(3))


def test_a_lowered_limit_takes_effect_with_the_next_write(store: ConversationStore) -> None:
    key = store.key("s")
    for number in range(50):
        write(store, key, turn(number))
    write(store, key, turn(50), max_messages=4)
    assert contents(store, key) == said(turn(49), turn(50))


def test_what_a_summary_has_yet_to_cover_is_not_pruned(store: ConversationStore) -> None:
    key = store.key("s")
    for number in range(6):
        window = store.append_and_read_unsummarized(
            key, turn(number), write_id=uuid.uuid4(), budget=READ_MUCH, encoding=None, max_messages=4
        )
    assert contents(store, key) == said(*(turn(number) for number in range(6)))
    assert [message.content for message in window.messages] == contents(store, key)
    assert window.state is not None
    assert store.record_summary(key, content="0 and 1", covers_through=3, state=window.state)
    # Also a view without a summary, which shares the log, spares it.
    write(store, key, turn(6), max_messages=4)
    assert contents(store, key) == said(*(turn(number) for number in range(2, 7)))


def test_with_eight_writers_at_once_the_limit_is_never_passed(
    server_dsn: str, store: ConversationStore, admin: Connection
) -> None:
    limit, system = 10, StoredMessage("system", "be kind")
    look = """
        select c.next_message_index, array_agg(m.message_index order by m.message_index),
               array_agg(m.role order by m.message_index), array_agg(m.content order by m.message_index)
        from {schema}.conversations c join {schema}.conversation_messages m on m.conversation_id = c.id
        group by c.next_message_index"""
    with noting_store(server_dsn, store.schema) as (noted, sqlstates):
        key = noted.key("s")
        write(noted, key, [system], max_messages=limit)

        def writer(number: int) -> None:
            for turn_number in range(20):
                write(noted, key, turn(f"{number}.{turn_number}", results=turn_number % 3), max_messages=limit)

        samples = []
        with ThreadPoolExecutor(8) as executor:
            writers = [executor.submit(writer, number) for number in range(8)]
            while not all(future.done() for future in writers):
                samples += ask(admin, look, store.schema)
            for future in writers:
                future.result()
        samples += ask(admin, look, store.schema)
    assert len(samples) > 10
    for next_index, numbers, kinds, texts in samples:
        assert len(numbers) <= limit
        assert (kinds[0], texts[0]) == ("system", "be kind")
        assert numbers[1:] == list(range(next_index - len(numbers) + 1, next_index))
        assert len(numbers) == 1 or (kinds[1], kinds[-1]) == ("human", "ai")
        sizes = Counter(tuple(text.split(" ")[1].split(".")[:2]) for text in texts[1:])
        assert all(size == 2 + 2 * (int(turn_number) % 3) for (_, turn_number), size in sizes.items()), texts
    assert sqlstates == []


# --- Clearing --------------------------------------------------------------------------------------------------------


def test_after_clearing_the_numbering_goes_on_and_the_conversations_row_stays(store: ConversationStore) -> None:
    key = store.key("s")
    store.set_metadata("s", {"plan": "pro"})
    write(store, key, turn(1))
    store.clear(key)
    assert store.read_all(key) == []
    write(store, key, turn(2))
    assert (contents(store, key), indexes(store, key)) == (said(turn(2)), [2, 3])
    assert store.get_metadata("s") == {"plan": "pro"}


def test_clearing_what_is_not_there_does_nothing(store: ConversationStore) -> None:
    store.clear(store.key("s"))
    assert store.list_conversations() == []


def test_clearing_beside_four_writers_takes_all_that_was_there_and_nothing_later_and_never_deadlocks(
    server_dsn: str, store: ConversationStore, admin: Connection
) -> None:
    begun: dict[str, float] = {}
    ended: dict[str, float] = {}
    clears: list[tuple[float, float, int]] = []
    survivors = """
        select count(*) filter (where m.message_index <= c.summarized_through), max(c.summarized_through)
        from {schema}.conversations c left join {schema}.conversation_messages m on m.conversation_id = c.id"""
    with noting_store(server_dsn, store.schema) as (noted, sqlstates):
        key = noted.key("s")

        def writer(number: int) -> None:
            for turn_number in range(40):
                name = f"{number}.{turn_number}"
                begun[name] = time.monotonic()
                write(noted, key, turn(name), max_messages=200 if number % 2 else None)
                ended[name] = time.monotonic()

        with ThreadPoolExecutor(4) as executor:
            writers = [executor.submit(writer, number) for number in range(4)]
            wait_until(lambda: ended, "the first turn is there")
            while not all(future.done() for future in writers):
                before = time.monotonic()
                noted.clear(key)
                after = time.monotonic()
                ((below, watermark),) = ask(admin, survivors, store.schema)
                assert below == 0, "a turn survives below the watermark"
                clears.append((before, after, watermark))
            for future in writers:
                future.result()
        left = noted.read_all(key)
    assert sqlstates == []
    assert len(clears) > 5
    numbers = [message.message_index for message in left]
    assert numbers == list(range(clears[-1][2] + 1, 4 * 40 * 2))
    names = {message.content.split(" ")[1] for message in left}
    assert not {name for name, moment in ended.items() if moment < clears[-1][0]} & names
    assert {name for name, moment in begun.items() if moment > clears[-1][1]} <= names


# --- Summaries -------------------------------------------------------------------------------------------------------


def state_of(store: ConversationStore, key: ConversationKey) -> str:
    state = store.read_unsummarized(key, budget=READ_MUCH, encoding=None).state
    assert state is not None
    return state


def summary_of(store: ConversationStore, key: ConversationKey) -> tuple[str, int] | None:
    summary = store.read_summary_window(key, budget=READ_MUCH, encoding=None).summary
    return None if summary is None else (summary.content, summary.covers_through)


def test_a_summary_takes_effect_and_its_turns_are_read_no_more(store: ConversationStore) -> None:
    key = store.key("s")
    for number in range(3):
        write(store, key, turn(number))
    assert store.record_summary(key, content="first", covers_through=1, state=state_of(store, key))
    assert summary_of(store, key) == ("first", 1)
    window = store.read_unsummarized(key, budget=READ_MUCH, encoding=None)
    assert [message.content for message in window.messages] == said(turn(1), turn(2))
    assert store.record_summary(key, content="second", covers_through=3, state=state_of(store, key))
    assert summary_of(store, key) == ("second", 3)
    assert contents(store, key) == said(turn(0), turn(1), turn(2)), "a summary deletes nothing"
    conversation = store.get_conversation("s")
    assert conversation is not None
    assert conversation.summarized_through == 3


def recreate(store: ConversationStore, key: ConversationKey, admin: Connection) -> None:
    ask(admin, "delete from {schema}.conversations where id = %(id)s", store.schema, id=str(key.id))
    write(store, key, turn("new"))


def clear_and_reuse(store: ConversationStore, key: ConversationKey, admin: Connection) -> None:
    store.clear(key)
    write(store, key, turn("new"))


def clear_and_step_back(store: ConversationStore, key: ConversationKey, admin: Connection) -> None:
    """As a deletion of covered messages may: the watermark is where it was."""
    clear_and_reuse(store, key, admin)
    back = "update {schema}.conversations set summarized_through = -1 where id = %(id)s"
    ask(admin, back, store.schema, id=str(key.id))


CHANGES: dict[str, Callable[[ConversationStore, ConversationKey, Connection], object]] = {
    "a clearing": lambda store, key, admin: store.clear(key),
    "a clearing and new turns": clear_and_reuse,
    "a clearing with the watermark set back": clear_and_step_back,
    "another summary": lambda store, key, admin: store.record_summary(
        key, content="another", covers_through=1, state=state_of(store, key)
    ),
    "deletion and re-creation of the conversation": recreate,
    "deletion of the conversation": lambda store, key, admin: ask(
        admin, "delete from {schema}.conversations", store.schema
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_summary_made_before_a_change_has_no_effect(store: ConversationStore, admin: Connection, change: str) -> None:
    key = store.key("s")
    write(store, key, turn(1))
    stale = state_of(store, key)
    CHANGES[change](store, key, admin)
    log, summary = store.read_all(key), summary_of(store, key)
    conversation = store.get_conversation("s")
    assert not store.record_summary(key, content="late", covers_through=1, state=stale)
    assert (store.read_all(key), summary_of(store, key)) == (log, summary)
    assert store.get_conversation("s") == conversation


def test_a_summary_made_before_a_new_turn_takes_effect(store: ConversationStore) -> None:
    key = store.key("s")
    write(store, key, turn(1))
    state = state_of(store, key)
    write(store, key, turn(2))
    assert store.record_summary(key, content="first", covers_through=1, state=state)
    window = store.read_summary_window(key, budget=READ_MUCH, encoding=None)
    assert [message.content for message in window.messages] == said(turn(2))


def test_a_summary_that_holds_what_text_in_the_database_cannot_takes_effect(store: ConversationStore) -> None:
    """A model may answer anything; a summary that is refused would be asked for again at every save."""
    key = store.key("s")
    write(store, key, turn(1))
    said_by_model = "hi 😀 \ud83d x\0y"
    assert store.record_summary(key, content=said_by_model, covers_through=1, state=state_of(store, key))
    assert summary_of(store, key) == ("hi 😀 \ufffd x\ufffdy", 1)


def test_of_eight_summaries_at_once_one_takes_effect(store: ConversationStore) -> None:
    key = store.key("s")
    for covers in (1, 3, 5):
        write(store, key, turn(covers))
        record = partial(store.record_summary, key, covers_through=covers, state=state_of(store, key))
        results = at_once(*(partial(record, content=f"{covers} by {number}") for number in range(8)))
        assert results.count(True) == 1
        assert summary_of(store, key) == (f"{covers} by {results.index(True)}", covers)


def test_clearing_takes_the_summaries_too(store: ConversationStore, admin: Connection) -> None:
    key = store.key("s")
    write(store, key, turn(1))
    assert store.record_summary(key, content="secret", covers_through=1, state=state_of(store, key))
    store.clear(key)
    write(store, key, turn(2))
    assert summary_of(store, key) is None
    assert ask(admin, "select count(*) from {schema}.conversation_summaries", store.schema) == [(0,)]
    window = store.read_unsummarized(key, budget=READ_MUCH, encoding=None)
    assert [message.content for message in window.messages] == said(turn(2))


def test_a_summary_beside_writers_and_clears_never_deadlocks(server_dsn: str, store: ConversationStore) -> None:
    with noting_store(server_dsn, store.schema) as (noted, sqlstates):
        key = noted.key("s")

        def summarise() -> int:
            taken = 0
            for _ in range(25):
                window = noted.append_and_read_unsummarized(
                    key, turn(1), write_id=uuid.uuid4(), budget=READ_MUCH, encoding=None, max_messages=8
                )
                last = window.messages[-1].message_index if window.messages else None
                if last is not None and window.state is not None:
                    taken += noted.record_summary(key, content="s", covers_through=last, state=window.state)
            return taken

        def clear() -> int:
            for _ in range(25):
                noted.clear(key)
            return 0

        assert sum(at_once(summarise, summarise, summarise, clear)) > 0
        numbers = indexes(noted, key)
        conversation = noted.get_conversation("s")
    assert sqlstates == []
    assert conversation is not None
    assert conversation.next_message_index == 3 * 25 * 2
    assert numbers == list(range(150 - len(numbers), 150))


# --- Conversations ---------------------------------------------------------------------------------------------------


def names(found: Sequence[Any]) -> list[tuple[str, str]]:
    return [(conversation.session_id, conversation.user_id) for conversation in found]


def test_conversations_are_listed_last_used_first_by_user_and_in_pages(store: ConversationStore) -> None:
    for session, user in [("a", "u1"), ("b", None), ("c", "u2"), ("a", "u2"), ("d", "")]:
        write(store, store.key(session, user), turn(1))
    write(store, store.key("a", "u1"), turn(2))  # used again
    everything = [("a", "u1"), ("d", ""), ("a", "u2"), ("c", "u2"), ("b", "")]
    assert names(store.list_conversations()) == everything
    assert names(store.list_conversations(user_id="u2")) == [("a", "u2"), ("c", "u2")]
    assert names(store.list_conversations(user_id="")) == [("d", ""), ("b", "")]
    assert store.list_conversations(user_id="nobody") == []
    assert names(store.list_conversations(limit=2)) == everything[:2]
    assert names(store.list_conversations(limit=2, offset=1)) == everything[1:3]
    assert names(store.list_conversations(offset=4)) == everything[4:]
    assert store.list_conversations(limit=0) == store.list_conversations(offset=5) == []
    assert names(store.list_conversations(user_id="u2", limit=1, offset=1)) == [("c", "u2")]


def test_pages_neither_repeat_nor_miss_a_conversation_where_all_were_used_at_the_same_time(
    store: ConversationStore, admin: Connection
) -> None:
    for number in range(30):
        write(store, store.key(number), turn(1))
    ask(admin, "update {schema}.conversations set updated_at = '2024-01-01'", store.schema)
    pages = [store.list_conversations(limit=7, offset=offset) for offset in range(0, 30, 7)]
    assert sorted(int(found.session_id) for page in pages for found in page) == list(range(30))


@pytest.mark.parametrize("arguments", [{"limit": -1}, {"offset": -1}, {"user_id": True}, {"user_id": b"u"}])
def test_a_listing_that_makes_no_sense_is_refused(store: ConversationStore, arguments: dict[str, Any]) -> None:
    with pytest.raises(PgMemoryError, match=f"(?i){next(iter(arguments))}.* must "):
        store.list_conversations(**arguments)


def test_a_conversations_record_tells_what_its_row_holds(store: ConversationStore) -> None:
    tenant = ConversationStore(store._database._source._pool, schema=store.schema, tenant_id="acme")
    key = tenant.key("s", "u")
    assert tenant.get_conversation("s", user_id="u") is None
    for number in range(3):
        write(tenant, key, turn(number), max_messages=4)
    tenant.set_metadata("s", {"a": 1}, user_id="u")
    found = tenant.get_conversation("s", user_id="u")
    assert found is not None
    assert (found.session_id, found.user_id, found.tenant_id, found.metadata) == ("s", "u", "acme", {"a": 1})
    assert (found.message_count, found.next_message_index, found.summarized_through) == (4, 6, -1)
    assert found.time_to_live is None
    assert found.updated_at > found.created_at
    assert tenant.list_conversations() == [found]
    tenant.clear(key)
    cleared = tenant.get_conversation("s", user_id="u")
    assert cleared is not None
    assert (cleared.message_count, cleared.next_message_index, cleared.summarized_through) == (0, 6, 5)


def test_messages_are_listed_as_records(store: ConversationStore) -> None:
    message = StoredMessage(
        "ai", "hello", additional_kwargs='{"b": 1e22, "a": 2}', extra='{"id": "x"}', token_count=3, token_encoding="e"
    )
    write(store, store.key("s", 7), [StoredMessage("human", "q"), message], tags=["k"], judged_by="rule")
    first, second = store.list_messages("s", user_id="7")
    assert (first.tags, first.judged_by, first.message_index) == (("k",), "rule", 0)
    assert second == StoredMessage(
        **message._asdict() | {"judged_by": "rule"}
        | {"message_index": 1, "created_at": second.created_at}
    )
    assert second.created_at is not None and second.created_at.utcoffset() is not None
    assert store.list_messages("s") == store.list_messages("other", user_id=7) == []


# --- Metadata --------------------------------------------------------------------------------------------------------

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab%{}'", max_size=3), inner, max_size=3),
    max_leaves=6,
)


def test_metadata_comes_back_as_it_was_set(store: ConversationStore) -> None:
    @settings(max_examples=50)
    @given(st.dictionaries(st.text("ab%s{}'\\", max_size=4), json_values, max_size=3))
    def campaign(metadata: dict[str, Any]) -> None:
        store.set_metadata("s", metadata)
        assert store.get_metadata("s") == metadata

    campaign()


def test_metadata_belong_to_a_conversation_that_need_not_be_there_yet(store: ConversationStore) -> None:
    assert store.get_metadata("s") == {}
    store.set_metadata("s", {"title": "Invoices"}, user_id="u")
    assert store.get_metadata("s", user_id="u") == {"title": "Invoices"}
    assert store.get_metadata("s") == {}
    assert names(store.list_conversations()) == [("s", "u")]
    write(store, store.key("s", "u"), turn(1))
    assert indexes(store, store.key("s", "u")) == [0, 1]
    assert store.get_metadata("s", user_id="u") == {"title": "Invoices"}
    store.set_metadata("s", {}, user_id="u")
    assert store.get_metadata("s", user_id="u") == {}


@pytest.mark.parametrize(
    "value", ["\0", "a\0b", "\ud800", "half \udc00", {"key\0": 1}, {"\ud83d": 1}, object(), [lambda: 0]]
)
def test_metadata_that_cannot_be_stored_are_named_and_change_nothing(store: ConversationStore, value: Any) -> None:
    store.set_metadata("s", {"a": 1})
    with pytest.raises(MessageNotStorableError, match="metadata"):
        store.set_metadata("s", {"ok": 1, "value": value})
    assert store.get_metadata("s") == {"a": 1}


@pytest.mark.parametrize("metadata", [None, [], "text", 1, [("a", 1)]])
def test_metadata_that_are_no_dict_are_refused(store: ConversationStore, metadata: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"metadata must be a dict, not {type(metadata).__name__}"):
        store.set_metadata("s", metadata)
    assert store.get_conversation("s") is None


# --- Life ------------------------------------------------------------------------------------------------------------


def sessions(admin: Connection, application: str) -> set[int]:
    rows = ask(admin, "select pid from pg_stat_activity where application_name = %(name)s", name=application)
    return {pid for (pid,) in rows}


def test_building_a_store_connects_to_nothing() -> None:
    store = ConversationStore("host=192.0.2.1 dbname=nowhere password=only-for-tests")
    key = store.key("s")
    assert (key.tenant_id, key.user_id, key.session_id) == ("", "", "s")
    store.close()


def test_closing_ends_the_sessions_and_later_use_says_that_the_store_is_closed(
    server_dsn: str, store: ConversationStore, admin: Connection
) -> None:
    with ConversationStore(server_dsn, schema=store.schema, application_name=store.schema) as other:
        key = other.key("s")
        write(other, key, turn(1))
        assert len(sessions(admin, store.schema)) == 1
    wait_until(lambda: not sessions(admin, store.schema), "the session ends")
    other.close()  # again
    for use in (partial(write, other, key, turn(2)), partial(other.read_all, key), other.setup, other.schema_status):
        with pytest.raises(PoolClosedError, match="closed"):
            use()
    assert contents(store, key) == said(turn(1))


def test_closing_waits_for_calls_that_run_and_for_those_in_line(
    server_dsn: str, store: ConversationStore, admin: Connection
) -> None:
    """Two asynchronous saves over one connection: the first waits for a lock, the second for the first."""
    other = ConversationStore(server_dsn, schema=store.schema, application_name=store.schema, max_connections=1)
    key = other.key("s")
    write(other, key, turn(0))
    locker = psycopg2.connect(server_dsn)
    ask(locker, "select 1 from {schema}.conversations for update", store.schema)
    waiting = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and application_name = %(name)s"

    async def save_both() -> None:
        await asyncio.gather(*(other.run_in_worker(write, other, key, turn(number)) for number in (1, 2)))

    with ThreadPoolExecutor(2) as executor, closing(locker):
        saving = executor.submit(asyncio.run, save_both())
        wait_until(lambda: ask(admin, waiting, name=store.schema) == [(1,)], "the first save waits for the row")
        wait_until(lambda: len(other._workers._calls) == 2, "the second save stands in line")
        ending = executor.submit(other.close, PATIENCE_SECONDS)
        wait_until(lambda: other._workers._executor is None, "the store is closing")
        assert not ending.done()
        locker.rollback()
        saving.result(PATIENCE_SECONDS)
        ending.result(PATIENCE_SECONDS)
    assert contents(store, key) == said(turn(0), turn(1), turn(2))
    with pytest.raises(PoolClosedError):
        other.read_all(key)


def test_a_store_closes_also_when_its_block_ends_with_an_error(server_dsn: str, store: ConversationStore) -> None:
    with pytest.raises(ZeroDivisionError), ConversationStore(server_dsn, schema=store.schema) as other:
        1 / 0  # noqa: B018
    with pytest.raises(PoolClosedError):
        other.list_conversations()


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda store: pickle.loads(pickle.dumps(store))], ids=["deepcopy", "pickle"]
)
def test_a_copy_works_and_shares_no_connection(
    server_dsn: str, store: ConversationStore, admin: Connection, copied: Callable[[Any], ConversationStore]
) -> None:
    with ConversationStore(
        server_dsn, schema=store.schema, tenant_id="acme", application_name=store.schema, max_connections=3
    ) as original:
        key = original.key("s")
        write(original, key, turn(1))
        first = sessions(admin, store.schema)
        other = copied(original)
        assert repr(other) == repr(original)
        assert other.key("s") == key
        assert contents(other, key) == said(turn(1))
        assert len(sessions(admin, store.schema) - first) == 1
        other.close()
        assert contents(original, key) == said(turn(1))
        wait_until(lambda: sessions(admin, store.schema) == first, "the copy's session ends and no other")


def test_a_store_over_a_given_pool_says_why_it_cannot_be_copied(server_dsn: str, store: ConversationStore) -> None:
    with noting_store(server_dsn, store.schema) as (given_pool, _):
        for copied in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="build it from a DSN"):
                copied(given_pool)


def test_an_embedded_store_keeps_its_data_and_its_server_ends_with_the_last_that_uses_it() -> None:
    folder = Path(os.environ["PGMEMORY_TEST_RUN_FOLDER"]) / f"embedded-{uuid.uuid4().hex}"
    pid_file = folder / "pgdata" / "postmaster.pid"
    with ConversationStore.embedded(folder, schema="chat", tenant_id="acme") as store:
        assert store.schema_status().fits
        write(store, store.key("s"), turn(1))
        with copy.deepcopy(store) as other:
            assert contents(other, other.key("s")) == said(turn(1))
        write(store, store.key("s"), turn(2))
        assert pid_file.exists()
    assert not pid_file.exists()
    with ConversationStore.embedded(folder, schema="chat", tenant_id="acme") as store:
        assert contents(store, store.key("s")) == said(turn(1), turn(2))
    with pytest.raises(ConfigurationError):
        ConversationStore.embedded(folder, schema="chat", max_connections=0)
    assert not pid_file.exists(), "a store that could not be built leaves no server behind"
