"""Memories over processes: forked, sent to others, preforked, killed, and copied."""

from __future__ import annotations

import asyncio
import atexit
import copy
import gc
import multiprocessing
import os
import pickle
import random
import select
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import IO, Any

import psycopg2
import pytest
from conftest import PROJECT
from conversations import ai, calling, human, result
from fakes import FakeChat
from langchain_core.messages import BaseMessage
from psycopg2 import sql
from psycopg2.extensions import connection as Connection
from psycopg2.pool import ThreadedConnectionPool
from waiting import wait_until

from pgmemory import (
    BufferMemory,
    ConversationStore,
    Operation,
    PostgresChatMemory,
    RelevantTurnMemory,
    StoreUnavailableError,
    SummaryMemory,
    TokenWindowMemory,
    as_xml,
    token_encodings,
)

PATIENCE_SECONDS = 60.0
# From Python 3.12 on, where there are other threads. That is what these tests are about.
FORK_NOTICE = "This process "
SOURCES = os.pathsep.join([str(PROJECT), str(Path(__file__).parent)])
CLASSES = ["buffer", "token window", "relevant turns", "summary"]

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")


def summarise(messages: list[BaseMessage]) -> str:
    return "a summary"


def every_memory(store: ConversationStore, **fields: Any) -> list[PostgresChatMemory]:
    """Return one memory of each class, which can all be pickled, of the same conversation."""
    fields = {"session_id": "shared", "store": store, **fields}
    return [
        BufferMemory(k=500, **fields),
        TokenWindowMemory(max_token_limit=50_000, **fields),
        RelevantTurnMemory(keywords=["question"], **fields),
        SummaryMemory(llm=FakeChat(answer=summarise), max_token_limit=50_000, **fields),
    ]


def save(memory: PostgresChatMemory, name: str) -> None:
    memory.save_context({"input": f"question {name}"}, {"output": f"answer {name}"})


def said(*names: str) -> list[str]:
    """Return what is said in the turns of these names."""
    return [text for name in names for text in (f"question {name}", f"answer {name}")]


def loaded(memory: PostgresChatMemory) -> list[str]:
    return [str(message.content) for message in memory.buffer_as_messages]


def log(store: ConversationStore, session_id: str = "shared") -> list[str]:
    """Return what a conversation holds, whose messages must be numbered without a gap."""
    messages = store.list_messages(session_id)
    assert [message.message_index for message in messages] == list(range(len(messages)))
    return [message.content for message in messages]


def names_in(contents: list[str]) -> list[str]:
    """Return the names of the turns in a log that must consist of whole turns."""
    names = [content.removeprefix("question ") for content in contents[::2]]
    assert contents == said(*names)
    return names


def session_of(store: ConversationStore) -> int:
    """Return the server's process for the connection that was used last and is used next."""
    return int(store._database.execute("select pg_backend_pid()")[0][0])


def sessions(admin: Connection, application: str, *, waiting: bool = False) -> set[int]:
    """Return the server's processes for an application's connections, or for those that wait for a lock."""
    query = "select pid from pg_stat_activity where application_name = %s and (wait_event_type = 'Lock' or not %s)"
    with admin.cursor() as cursor:
        cursor.execute(query, (application, waiting))
        return {pid for (pid,) in cursor.fetchall()}


@contextmanager
def locked(dsn: str, schema: str) -> Iterator[None]:
    """Hold the locks on the rows of all conversations, so that whoever saves must wait."""
    connection = psycopg2.connect(dsn)
    try:
        with connection.cursor() as cursor:
            statement = sql.SQL("select 1 from {}.conversations for update").format(sql.Identifier(schema))
            cursor.execute(statement)
        yield
    finally:
        connection.close()


class Child:
    """A forked child that runs a function, tells its parent lines, and ends without ceremony.

    Args:
        run: The function; what it is given sends a line to the parent. Its exception becomes the last line.
    """

    def __init__(self, run: Callable[[Callable[[str], None]], object]) -> None:
        reading, writing = os.pipe()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", FORK_NOTICE, DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(reading)
                run(lambda line: _write_line(writing, line))
            except BaseException as error:
                _write_line(writing, f"{type(error).__name__}: {error}")
            finally:
                os._exit(0)
        os.close(writing)
        self._pipe: IO[bytes] = open(reading, "rb", buffering=0)

    def line(self) -> str | None:
        """Return the next line, or None if it has ended."""
        answered = select.select([self._pipe], [], [], PATIENCE_SECONDS)[0]
        assert answered, "the child hangs"
        line = self._pipe.readline()
        return line.decode().rstrip("\n") if line else None

    def lines(self) -> list[str]:
        """Return all further lines; it must end."""
        return list(iter(self.line, None))

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        os.waitpid(self.pid, 0)
        self._pipe.close()


def _write_line(descriptor: int, line: str) -> None:
    # One write, so that a killed child leaves whole lines.
    os.write(descriptor, (" ".join(line.split("\n")) + "\n").encode())


def in_fresh_interpreter(program: Callable[..., None], *arguments: str) -> str:
    """Run a function of this module in an interpreter of its own, where warnings are errors; return what it printed.

    Here a forked child could not end as it does in an application: pytest would go on in it.
    """
    command = f"import sys, {__name__} as programs; programs.{program.__name__}(*sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", f"ignore:{FORK_NOTICE}:DeprecationWarning", "-c", command, *arguments],
        env={**os.environ, "PYTHONPATH": SOURCES},
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_SECONDS,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


# --- Forks -----------------------------------------------------------------------------------------------------------


def fork_children(dsn: str, schema: str) -> None:
    """Fork children that end in several ways; use every memory before, in the child, and afterwards."""
    operations: list[Operation] = []
    store = ConversationStore(dsn, schema=schema, application_name=schema, on_operation=operations.append)
    atexit.register(store.close)  # in the children too
    memories = every_memory(store)
    names: list[str] = []

    def use_all(where: str) -> None:
        for number, memory in enumerate(memories):
            save(memory, f"{where}.{number}")
            inputs, outputs = {"input": f"question {where}.{number}a"}, {"output": f"answer {where}.{number}a"}
            asyncio.run(memory.asave_context(inputs, outputs))
            names.extend([f"{where}.{number}", f"{where}.{number}a"])
            assert loaded(memory) == said(*names)
            assert len(asyncio.run(memory.aload_memory_variables({}))["history"].splitlines()) == 2 * len(names)

    def open_sessions() -> list[Any]:
        statement = "select pid from pg_stat_activity where application_name = %(name)s"
        return [pid for (pid,) in store._database.execute(statement, {"name": schema})]

    def end(way: str) -> None:
        gc.collect()
        if way == "os-exit":
            os._exit(7)
        if way == "error":
            sys.excepthook = lambda *_: None
            raise ZeroDivisionError
        sys.exit(0)

    for way, code in (("sys-exit", 0), ("os-exit", 7), ("error", 1)):
        use_all(f"before-{way}")
        mine = session_of(store)
        pid = os.fork()
        if pid == 0:
            use_all(f"child-{way}")
            assert sorted(open_sessions()) == sorted([mine, session_of(store)])
            end(way)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code, way
        names += [f"child-{way}.{number}{call}" for number in range(len(memories)) for call in ("", "a")]
        use_all(f"after-{way}")
        assert session_of(store) == mine
        wait_until(lambda: open_sessions() == [mine], "the child's session ends")  # noqa: B023
    assert all(operation.error is None and operation.retries == 0 for operation in operations)
    print(*names)


def test_parent_and_child_go_on_with_sessions_of_their_own_however_the_child_ends(
    server_dsn: str, store: ConversationStore
) -> None:
    names = in_fresh_interpreter(fork_children, server_dsn, store.schema).split()
    assert len(names) == 3 * 3 * 4 * 2
    assert log(store) == said(*names)


def test_a_fork_in_the_middle_of_a_save_disturbs_neither_side(
    server_dsn: str, store: ConversationStore, admin: Connection
) -> None:
    operations: list[Operation] = []
    with ConversationStore(
        server_dsn, schema=store.schema, application_name=store.schema, on_operation=operations.append
    ) as shared:
        memory = BufferMemory(session_id="shared", store=shared)
        save(memory, "1")

        def child(tell: Callable[[str], None]) -> None:
            other = memory.for_session("other")
            save(other, "child")
            tell(str([loaded(memory), loaded(other)]))
            shared.close()

        with ThreadPoolExecutor(1) as executor:
            with locked(server_dsn, store.schema):
                saving = executor.submit(save, memory, "2")
                wait_until(lambda: sessions(admin, store.schema, waiting=True), "the save waits for the lock")
                with Child(child) as forked:
                    assert forked.lines() == [str([said("1"), said("child")])]
                assert not saving.done()
            saving.result(PATIENCE_SECONDS)
        save(memory, "3")
        assert loaded(memory) == said("1", "2", "3")
    assert log(store) == said("1", "2", "3")
    assert [operation.retries for operation in operations if operation.name == "append"] == [0, 0, 0]


def test_an_overdue_statement_is_ended_by_its_deadline_in_parent_and_child(
    server_dsn: str, store: ConversationStore, admin: Connection
) -> None:
    with ConversationStore(
        server_dsn, schema=store.schema, application_name=store.schema, query_timeout_seconds=0.5, retry_seconds=0
    ) as impatient:
        memory = BufferMemory(session_id="shared", store=impatient)

        def be_late(tell: Callable[[str], None]) -> None:
            try:
                # Not by the memory's own methods: the server ends those.
                impatient._database.execute("select pg_sleep(60)")
            except StoreUnavailableError as error:
                tell(str(error))

        def child(tell: Callable[[str], None]) -> None:
            be_late(tell)
            save(memory, "child")

        save(memory, "parent")
        said_in_parent: list[str] = []
        with ThreadPoolExecutor(1) as executor:
            # The fork comes while the deadline is watched.
            in_parent = executor.submit(be_late, said_in_parent.append)
            wait_until(lambda: sessions(admin, store.schema), "the statement runs")
            with Child(child) as forked:
                said_in_child = forked.lines()
            in_parent.result(PATIENCE_SECONDS)
        for texts in (said_in_parent, said_in_child):
            assert len(texts) == 1 and "within 0.5 s (query_timeout_seconds)" in texts[0]
        assert loaded(memory) == said("parent", "child")
    for pid in sessions(admin, store.schema):  # they would sleep on
        with admin.cursor() as cursor:
            cursor.execute("select pg_terminate_backend(%s)", (pid,))


def test_a_child_that_is_forked_while_an_encoding_is_loaded_is_not_stuck(
    server_dsn: str, store: ConversationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, loading, go_on = token_encodings._load, threading.Event(), threading.Event()

    def load_slowly(name: str) -> Any:
        loading.set()
        go_on.wait(PATIENCE_SECONDS)
        return load(name)

    def child(tell: Callable[[str], None]) -> None:
        token_encodings._load = load
        with ConversationStore(server_dsn, schema=store.schema) as own:
            memory = TokenWindowMemory(session_id="shared", store=own)
            save(memory, "child")
            tell(str(loaded(memory)))

    monkeypatch.setattr(token_encodings, "_outcomes", {})
    monkeypatch.setattr(token_encodings, "_load", load_slowly)
    with ThreadPoolExecutor(1) as executor:
        in_parent = executor.submit(save, TokenWindowMemory(session_id="shared", store=store), "parent")
        try:
            assert loading.wait(PATIENCE_SECONDS)
            with Child(child) as forked:
                assert forked.lines() == [str(said("child"))]
        finally:
            go_on.set()
        in_parent.result(PATIENCE_SECONDS)
    assert log(store) == said("child", "parent")


# --- Worker processes ------------------------------------------------------------------------------------------------

TURNS = 10


def write_turns(memories: list[PostgresChatMemory], writer: str) -> None:
    """Save turns by each memory in turn, in a process of its own."""
    for number in range(TURNS):
        save(memories[number % len(memories)], f"{writer}.{number}")
    assert set(said(*(f"{writer}.{number}" for number in range(TURNS)))) <= set(loaded(memories[0]))


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_worker_processes_save_to_one_conversation_with_the_memories_that_they_are_given(
    server_dsn: str,
    store: ConversationStore,
    admin: Connection,
    method: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "warnoptions", ["error"])  # warnings are errors in new interpreters too
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        # As an application would, so that not every worker must import everything anew.
        monkeypatch.setenv("PYTHONPATH", SOURCES)
        context.set_forkserver_preload([__name__])
    with ConversationStore(server_dsn, schema=store.schema, application_name=store.schema) as shared:
        memories = every_memory(shared)
        save(memories[0], "before")
        first = sessions(admin, store.schema)
        given = {"a": memories[:2], "b": memories[2:]}
        workers = [context.Process(target=write_turns, args=(given[writer], writer)) for writer in given]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", FORK_NOTICE, DeprecationWarning)
            for worker in workers:
                worker.start()
        for worker in workers:
            worker.join(PATIENCE_SECONDS)
        assert [worker.exitcode for worker in workers] == [0, 0], capfd.readouterr().err
        assert capfd.readouterr().err == ""
        save(memories[0], "after")
        wait_until(lambda: sessions(admin, store.schema) == first, "the workers' sessions end, and no other")
    names = names_in(log(store))
    assert (names[0], names[-1], len(names)) == ("before", "after", 2 + 2 * TURNS)
    for writer in given:
        assert [name for name in names if name.startswith(writer + ".")] == [f"{writer}.{n}" for n in range(TURNS)]


# Prefork: how many workers, their threads, and the requests of each thread.
WORKERS, THREADS, REQUESTS = 3, 2, 4


def serve_preforked(dsn: str, schema: str) -> None:
    """Serve in the prefork style: load the application, which uses its store, then fork workers and more workers.

    A thread of the master saves all the time, so that every fork comes in the middle of something.
    """
    store = ConversationStore(dsn, schema=schema, max_connections=4, application_name=schema)
    configured_once = BufferMemory(session_id="shared", store=store)
    save(configured_once, "master.first.0")

    beats: list[str] = []
    stop = threading.Event()

    def beat() -> None:
        memory = configured_once.for_session("heartbeat")
        while not stop.is_set():
            save(memory, str(len(beats)))
            beats.append("saved")

    def serve(worker: int) -> None:
        def requests(thread: int) -> None:
            for number in range(REQUESTS):
                memory = configured_once.for_session("shared")
                assert "master.first.0" in memory.buffer
                save(memory, f"{worker}.{thread}.{number}")

        with ThreadPoolExecutor(THREADS) as executor:
            list(executor.map(requests, range(THREADS)))

    def fork_worker(worker: int) -> int:
        pid = os.fork()
        if pid == 0:
            serve(worker)
            sys.exit(0)
        return pid

    heart = threading.Thread(target=beat, daemon=True)
    heart.start()
    for workers in (range(2), range(2, WORKERS)):
        pids = [fork_worker(worker) for worker in workers]
        assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * len(pids)
    stop.set()
    heart.join(PATIENCE_SECONDS)
    assert not heart.is_alive()
    save(configured_once, "master.last.0")
    stats = store.pool_stats()
    assert stats is not None and stats.lost == 0
    store.close()
    print(len(beats))


def test_preforked_workers_serve_with_a_store_that_their_master_has_used(
    server_dsn: str, store: ConversationStore
) -> None:
    saved = int(in_fresh_interpreter(serve_preforked, server_dsn, store.schema))
    assert log(store, "heartbeat") == said(*map(str, range(saved)))
    names = names_in(log(store))
    assert (names[0], names[-1]) == ("master.first.0", "master.last.0")
    by_thread: dict[str, list[str]] = {}
    for name in names[1:-1]:
        thread, number = name.rsplit(".", 1)
        by_thread.setdefault(thread, []).append(number)
    threads = [f"{worker}.{thread}" for worker in range(WORKERS) for thread in range(THREADS)]
    assert by_thread == dict.fromkeys(threads, list(map(str, range(REQUESTS))))


# --- Killed writers --------------------------------------------------------------------------------------------------


def nth_turn(number: int) -> list[BaseMessage]:
    """Return the writer's turn of this number: every other one with two calls of tools, five messages in all."""
    messages: list[BaseMessage] = [human(f"question {number}"), ai(f"answer {number}")]
    if number % 2:
        first, second = f"{number}a", f"{number}b"
        between = calling(first, second, text=f"calls {number}"), result(first, first), result(second, second)
        messages[1:1] = between
    return messages


def turns_through(number: int) -> list[str]:
    """Return what the log holds once the writer has saved so many turns."""
    return [str(message.content) for message in chain.from_iterable(map(nth_turn, range(number)))]


@contextmanager
def writer_to_kill(dsn: str, schema: str) -> Iterator[Child]:
    """A process that saves turn after turn and acknowledges each by a line."""

    def write(acknowledge: Callable[[str], None]) -> None:
        with ConversationStore(dsn, schema=schema, application_name=schema) as store:
            memory = BufferMemory(session_id="shared", store=store)
            for number in range(100_000):
                question, *answers = nth_turn(number)
                memory.save_context({"input": question}, {"output": answers})
                acknowledge(str(number))

    with Child(write) as child:
        yield child


def check_after_the_kill(store: ConversationStore, admin: Connection, acknowledged: int) -> None:
    """Assert that every acknowledged turn is there, at most one more, and that the next writer goes on behind them."""
    # The server finishes a statement whose client is dead.
    wait_until(lambda: not sessions(admin, store.schema), "the killed writer's session ends")
    found = log(store)
    assert found in (turns_through(acknowledged), turns_through(acknowledged + 1))
    memory = BufferMemory(session_id="shared", store=store)
    save(memory, "later")
    assert log(store) == loaded(memory) == [*found, *said("later")]


@pytest.mark.parametrize("seed", range(4))
def test_a_writer_that_is_killed_leaves_whole_turns_and_all_that_it_acknowledged(
    server_dsn: str, store: ConversationStore, admin: Connection, seed: int
) -> None:
    chance = random.Random(seed)
    with writer_to_kill(server_dsn, store.schema) as writer:
        lines = [writer.line() for _ in range(chance.randint(1, 40))]
        # It waits for nothing: this makes the kill fall anywhere in a save.
        time.sleep(chance.uniform(0, 0.005))
        writer.kill()
        lines += writer.lines()
    assert lines == [str(number) for number in range(len(lines))]
    check_after_the_kill(store, admin, len(lines))


@pytest.mark.parametrize("number", [2, 3], ids=["two messages", "five messages"])
def test_a_writer_that_is_killed_while_the_server_works_leaves_that_turn_whole(
    server_dsn: str, store: ConversationStore, admin: Connection, number: int
) -> None:
    with writer_to_kill(server_dsn, store.schema) as writer:
        writer.line()
        with locked(server_dsn, store.schema):
            wait_until(lambda: sessions(admin, store.schema, waiting=True), "the save waits for the lock")
            writer.kill()
            lines = writer.lines()
    check_after_the_kill(store, admin, 1 + len(lines))


# --- Copies ----------------------------------------------------------------------------------------------------------


def by_pickle(memory: Any) -> Any:
    return pickle.loads(pickle.dumps(memory))


@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("position", range(4), ids=CLASSES)
def test_a_copy_of_a_used_memory_keeps_its_fields_and_carries_no_connection(
    server_dsn: str, store: ConversationStore, admin: Connection, copied: Callable[[Any], Any], position: int
) -> None:
    fields = {"memory_key": "past", "human_prefix": "Q", "ai_prefix": "A", "formatter": as_xml, "on_save_error": "log"}
    with ConversationStore(server_dsn, schema=store.schema, application_name=store.schema) as used:
        memory = every_memory(used, user_id="u", max_messages=90, idempotency_key="request 1", **fields)[position]
        save(memory, "1")
        before = memory.load_memory_variables({})
        first = sessions(admin, store.schema)
        twin = copied(memory)
        assert type(twin) is type(memory)
        for name in set(type(memory).model_fields) - {"chat_memory"}:
            assert getattr(twin, name) == getattr(memory, name), name
        assert (twin.chat_memory.key, twin.max_messages) == (memory.chat_memory.key, 90)
        assert twin.store.pool_stats().connections == 0
        assert sessions(admin, store.schema) == first
        assert twin.load_memory_variables({}) == before
        save(twin, "1")  # under the same key, so it is there already
        twin.idempotency_key = None
        save(twin, "2")
        assert loaded(memory) == said("1", "2")
        assert len(sessions(admin, store.schema) - first) == 1
        twin.store.close()
        assert loaded(memory) == said("1", "2")


@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle], ids=["deepcopy", "pickle"])
def test_a_memory_over_a_given_pool_says_why_it_cannot_be_copied(
    server_dsn: str, store: ConversationStore, copied: Callable[[Any], Any]
) -> None:
    pool = ThreadedConnectionPool(1, 2, server_dsn)
    memories = every_memory(ConversationStore(pool, schema=store.schema))
    for original in (*memories, memories[0].chat_memory):
        with pytest.raises(TypeError, match="cannot copy or pickle .* over a pool .*build it from a DSN"):
            copied(original)
    for memory in memories:
        save(memory, "1")
    pool.closeall()
