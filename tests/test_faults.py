"""The exchange with the server breaks at each message of the protocol: what was said is there once, whole, in order."""

from __future__ import annotations

import re
import socket
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, NamedTuple, get_args

import psycopg2
import pytest
import sqlalchemy
from fakes import FakeChat
from fault_proxy import Fault, FaultProxy, How, Message, Place
from langchain_core.messages import BaseMessage
from psycopg2 import sql
from psycopg2.extensions import make_dsn
from psycopg2.pool import ThreadedConnectionPool

from pgmemory import BufferMemory, ConversationStore, StoreUnavailableError, SummaryMemory
from pgmemory.memory.base import PostgresChatMemory

PATIENCE_SECONDS = 60.0
SHORT_SECONDS = 0.8  # longer than a statement takes on a busy machine
# Broken connections and those in their place: a server has a hundred by default, and two of these tests may run.
POINTS_AT_ONCE = 20
SECRET = "horse-battery-staple"
MARKER = re.compile(r"[qa]-[\w.]+")

HOWS = get_args(How)
PLACES = get_args(Place)
warmth = pytest.mark.parametrize("warm", [True, False], ids=["warm", "fresh"])


def save(memory: PostgresChatMemory, name: str) -> None:
    memory.save_context({"input": f"q-{name}"}, {"output": f"a-{name}"})


def said(*names: str) -> list[str]:
    """Return what is said in the turns of these names."""
    return [content for name in names for content in (f"q-{name}", f"a-{name}")]


def loaded(memory: PostgresChatMemory) -> list[str]:
    """Return what is said in the turns of the window, or was before it was summarised, in order."""
    return MARKER.findall(memory.load_memory_variables({})["history"])


@contextmanager
def through_a_proxy(server_dsn: str, schema: str, **options: Any) -> Iterator[tuple[FaultProxy, ConversationStore]]:
    # Two seconds are the least that libpq waits for a connection.
    with FaultProxy(make_dsn(server_dsn, connect_timeout=2)) as proxy:
        with ConversationStore(proxy.dsn, schema=schema, retry_seconds=PATIENCE_SECONDS, **options) as store:
            yield proxy, store


def timeouts(how: How) -> dict[str, Any]:
    """Return the options for a store whose exchange breaks in this way."""
    return {"query_timeout_seconds": SHORT_SECONDS} if how == "stall" else {}


# --- The walk --------------------------------------------------------------------------------------------------------


def walk(
    visit: Callable[[Fault], object], messages: Sequence[Message], how: How, places: Sequence[Place] = PLACES
) -> None:
    """Visit every place of an exchange, many at the same time, and fail with a list of those where it went wrong."""
    failures: list[str] = []
    turnstile = threading.Semaphore(POINTS_AT_ONCE)

    def run(fault: Fault, point: str) -> None:
        with turnstile:
            try:
                visit(fault)
            except Exception as error:
                last = traceback.extract_tb(error.__traceback__)[-1]
                failures.append(f"{point}: {type(error).__name__} in {last.name}:{last.lineno}: {error}")

    points = {}
    for number, (sender, kind) in enumerate(messages):
        for place in places:
            point = f"{how} {place} message {number} of {len(messages)} ({sender} {kind})"
            # Daemons: one that hangs must not keep the tests from ending.
            points[point] = threading.Thread(target=run, args=(Fault(number, place, how), point), daemon=True)
    deadline = time.monotonic() + PATIENCE_SECONDS
    for thread in points.values():
        thread.start()
    for thread in points.values():
        thread.join(max(0.0, deadline - time.monotonic()))
    failures += [f"{point}: hangs" for point, thread in points.items() if thread.is_alive()]
    assert not failures, f"{len(failures)} of {len(points)} points:\n" + "\n".join(failures)


class Operation(NamedTuple):
    """What is broken off.

    Args:
        memory: Makes the memory of a session in a store.
        run: The operation.
        leaves: The turns that are there when it is done, and "later" was saved behind it.
        first_index: Number of the first message of those.
    """

    memory: Callable[[str, ConversationStore], PostgresChatMemory]
    run: Callable[[PostgresChatMemory], None]
    leaves: tuple[str, ...]
    first_index: int = 0


def buffer(session: str, store: ConversationStore) -> BufferMemory:
    return BufferMemory(session_id=session, store=store)


def words(messages: Sequence[BaseMessage]) -> int:
    return sum(len(str(message.content).split()) for message in messages)


def folding(session: str, store: ConversationStore) -> SummaryMemory:
    """Return a memory that folds all turns but the newest, with a model that says again what was said."""
    model = FakeChat(answer=lambda messages: " ".join(MARKER.findall(str(messages[0].content))))
    return SummaryMemory(session_id=session, store=store, llm=model, max_token_limit=3, token_counter=words)


def load(memory: PostgresChatMemory) -> None:
    assert loaded(memory) == said("earlier")


OPERATIONS = {
    "save": Operation(buffer, partial(save, name="new"), ("earlier", "new", "later")),
    "load": Operation(buffer, load, ("earlier", "later")),
    "clear": Operation(buffer, lambda memory: memory.clear(), ("later",), first_index=2),
    "save and fold": Operation(folding, partial(save, name="new"), ("earlier", "new", "later")),
}


def exchange(
    operation: Operation, server_dsn: str, store: ConversationStore, *, warm: bool, fault: Fault | None, how: How
) -> list[Message]:
    """Run an operation between two turns, check what it leaves, and return its messages up to the fault."""
    session = uuid.uuid4().hex
    save(buffer(session, store), "earlier")
    with through_a_proxy(server_dsn, store.schema, **timeouts(how)) as (proxy, remote):
        memory = operation.memory(session, remote)
        if warm:
            remote.get_conversation(session)
        proxy.arm(fault)
        operation.run(memory)
        messages, fired = proxy.messages[: fault.message + 1 if fault else None], proxy.fired
        save(memory, "later")
        assert fired == (fault is not None), "the exchange was not broken"
        assert loaded(memory) == said(*operation.leaves)
    stored = [(message.message_index, message.content) for message in store.list_messages(session)]
    assert stored == list(enumerate(said(*operation.leaves), operation.first_index))
    return messages


def walk_along(name: str, server_dsn: str, store: ConversationStore, how: How, *, warm: bool) -> None:
    operation = OPERATIONS[name]
    run = partial(exchange, operation, server_dsn, store, warm=warm, how=how)
    messages = run(fault=None)
    assert messages[0] == ("client", "Q" if warm else "startup")
    assert messages[-1] == ("server", "Z")

    def visit(fault: Fault) -> None:
        assert run(fault=fault) == messages[: fault.message + 1], "another message was broken than was meant"

    walk(visit, messages, how)


@warmth
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("operation", ["save", "load"])
def test_an_exchange_that_breaks_at_any_message_is_made_good(
    server_dsn: str, store: ConversationStore, operation: str, how: How, warm: bool
) -> None:
    walk_along(operation, server_dsn, store, how, warm=warm)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("operation", ["clear", "save and fold"])
def test_a_clear_and_a_summary_that_break_at_any_message_are_made_good(
    server_dsn: str, store: ConversationStore, operation: str, how: How
) -> None:
    walk_along(operation, server_dsn, store, how, warm=True)


@pytest.mark.parametrize("how", HOWS)
def test_a_save_that_breaks_at_any_message_beside_other_writers_is_made_good(
    server_dsn: str, store: ConversationStore, how: How
) -> None:
    acknowledged: dict[str, int] = {}  # turns of each writer
    over = threading.Event()

    def write_on(writer: str) -> None:
        while not over.is_set() and acknowledged.get(writer, 0) < 1000:
            number = acknowledged.get(writer, 0)
            save(buffer("shared", store), f"{writer}.{number}")
            acknowledged[writer] = number + 1

    def write_broken(fault: Fault | None) -> list[Message]:
        writer = uuid.uuid4().hex
        with through_a_proxy(server_dsn, store.schema, **timeouts(how)) as (proxy, remote):
            memory = BufferMemory(session_id="shared", store=remote, k=1)
            remote.get_conversation("shared")
            proxy.arm(fault)
            save(memory, f"{writer}.0")
            messages = proxy.messages.copy()
            assert proxy.fired == (fault is not None), "the exchange was not broken"
            save(memory, f"{writer}.1")
            acknowledged[writer] = 2
            window = loaded(memory)
        assert len(window) == 2
        assert window[0][1:] == window[1][1:], "the newest turn is shown whole"
        return messages

    messages = write_broken(None)
    with ThreadPoolExecutor(3) as executor:
        writers = [executor.submit(write_on, f"w{number}") for number in range(3)]
        try:
            walk(write_broken, messages, how)
        finally:
            over.set()
        for writer in writers:
            writer.result()

    found = store.list_messages("shared")
    assert [message.message_index for message in found] == list(range(len(found)))
    names = [message.content.removeprefix("q-") for message in found[::2]]
    assert [message.content for message in found] == said(*names), "turns are whole, and not one within another"
    by_writer: dict[str, list[int]] = {}
    for name in names:
        writer_name, number = name.split(".")
        by_writer.setdefault(writer_name, []).append(int(number))
    assert by_writer == {name: list(range(turns)) for name, turns in acknowledged.items()}


def test_a_setup_that_breaks_off_between_any_two_messages_is_made_good(server_dsn: str, schema_name: str) -> None:
    names: list[str] = []

    def set_up(fault: Fault | None) -> list[Message]:
        name = f"{schema_name}_{fault.message if fault else 'whole'}"
        names.append(name)
        with through_a_proxy(server_dsn, name) as (proxy, remote):
            assert not remote.schema_status().fits
            proxy.arm(fault)
            remote.setup()
            messages = proxy.messages.copy()
            assert proxy.fired == (fault is not None), "the exchange was not broken"
            assert remote.schema_status().fits
            save(buffer("s", remote), "new")
            assert loaded(buffer("s", remote)) == said("new")
        return messages

    try:
        walk(set_up, set_up(None), "close", places=["before"])
    finally:
        with closing(psycopg2.connect(server_dsn)) as connection, connection.cursor() as cursor:
            cursor.execute("set client_min_messages = warning")
            for name in names:
                cursor.execute(sql.SQL("drop schema if exists {} cascade").format(sql.Identifier(name)))
                connection.commit()


# --- Peers that do not answer ----------------------------------------------------------------------------------------


def test_a_peer_that_never_answers_is_an_error_that_names_it_without_the_password() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=16) as listener:
        port = listener.getsockname()[1]
        dsn = f"postgresql://me:{SECRET}@127.0.0.1:{port}/db?connect_timeout=2&sslmode=disable&gssencmode=disable"
        with ConversationStore(dsn, retry_seconds=0.5) as store, ThreadPoolExecutor(2) as executor:
            memory = buffer("s", store)
            errors = [
                call.exception(PATIENCE_SECONDS)
                for call in [executor.submit(save, memory, "new"), executor.submit(loaded, memory)]
            ]
    for error in errors:
        assert isinstance(error, StoreUnavailableError)
        assert "127.0.0.1" in str(error)
        assert str(port) in str(error)
        assert SECRET not in "".join(traceback.format_exception(error))


@contextmanager
def pool_of_two(dsn: str) -> Iterator[ThreadedConnectionPool]:
    pool = ThreadedConnectionPool(2, 4, dsn)
    yield pool
    pool.closeall()


@contextmanager
def engine_of_two(dsn: str) -> Iterator[sqlalchemy.Engine]:
    engine = sqlalchemy.create_engine(
        "postgresql+psycopg2://", creator=lambda: psycopg2.connect(dsn), pool_size=2, max_overflow=0
    )
    loans = [engine.raw_connection() for _ in range(2)]
    for loan in loans:
        loan.close()
    yield engine
    engine.dispose()


@pytest.mark.parametrize("source_of_two", [pool_of_two, engine_of_two], ids=["pool", "engine"])
def test_connections_of_an_application_that_answer_no_more_are_replaced(
    server_dsn: str, store: ConversationStore, source_of_two: Callable[[str], Any]
) -> None:
    with ThreadPoolExecutor(1) as executor, FaultProxy(server_dsn) as proxy, source_of_two(proxy.dsn) as source:
        given = ConversationStore(source, schema=store.schema, query_timeout_seconds=SHORT_SECONDS)
        memory = buffer("s", given)
        save(memory, "earlier")
        assert proxy.cut_all("stall") == 2
        try:
            executor.submit(save, memory, "new").result(PATIENCE_SECONDS / 4)
            assert loaded(memory) == said("earlier", "new")
        finally:
            proxy.cut_all("close")
        given.close()
    assert [message.content for message in store.list_messages("s")] == said("earlier", "new")
