"""Many writers of one conversation, in threads and in processes: nothing is lost, doubled, mixed up or out of order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import psycopg2
import pytest
from conftest import run_together
from langchain_core.messages import AIMessage, HumanMessage
from psycopg2 import sql
from psycopg2.extensions import make_dsn

from pgmemory import ConversationStore, PostgresChatMessageHistory, StoredMessage

TURNS = 25
PATIENCE_SECONDS = 60

WRITER = """
import os, sys
from langchain_core.messages import AIMessage, HumanMessage
from pgmemory import ConversationStore, PostgresChatMessageHistory
with ConversationStore(os.environ["DSN"], schema=sys.argv[1]) as store:
    history = PostgresChatMessageHistory("shared", store)
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(int(sys.argv[3])):
        name = f"{sys.argv[2]}.{number}"
        history.add_messages([HumanMessage(f"q {name}"), AIMessage(f"a {name}")])
"""


def eight_threads(server_dsn: str, store: ConversationStore) -> int:
    """Write from eight threads that share a store with fewer connections, each with its own history object."""
    barrier = threading.Barrier(8)

    def write(writer: int) -> None:
        history = PostgresChatMessageHistory("shared", shared)
        barrier.wait(PATIENCE_SECONDS)
        for number in range(TURNS):
            name = f"{writer}.{number}"
            history.add_messages([HumanMessage(f"q {name}"), AIMessage(f"a {name}")])

    with ConversationStore(server_dsn, schema=store.schema, max_connections=5) as shared:
        with ThreadPoolExecutor(8) as executor:
            list(executor.map(write, range(8)))
    return 8


def four_processes(server_dsn: str, store: ConversationStore) -> int:
    """Write from four processes."""
    arguments = [[store.schema, str(writer), str(TURNS)] for writer in range(4)]
    assert run_together(WRITER, arguments, server_dsn) == [""] * 4
    return 4


def check(found: list[StoredMessage], writers: int) -> None:
    """Assert that a log holds every writer's turns, each once, whole and in its writer's order, numbered gaplessly."""
    assert [message.message_index for message in found] == list(range(writers * TURNS * 2))
    assert [message.role for message in found] == ["human", "ai"] * (writers * TURNS)
    questions = [message.content.removeprefix("q ") for message in found[::2]]
    answers = [message.content.removeprefix("a ") for message in found[1::2]]
    assert questions == answers, "a turn's messages are neighbours"
    by_writer = {str(writer): [] for writer in range(writers)}  # type: dict[str, list[int]]
    for name in questions:
        writer, number = name.split(".")
        by_writer[writer].append(int(number))
    assert by_writer == {str(writer): list(range(TURNS)) for writer in range(writers)}


@pytest.mark.parametrize("write", [eight_threads, four_processes], ids=["eight threads", "four processes"])
def test_writers_of_one_conversation_lose_double_and_mix_up_nothing(
    server_dsn: str, store: ConversationStore, write: Callable[[str, ConversationStore], int]
) -> None:
    writers = write(server_dsn, store)
    found = store.list_messages("shared")
    check(found, writers)
    times = [message.created_at.timestamp() for message in found if message.created_at is not None]
    assert times == sorted(times)
    conversation = store.get_conversation("shared")
    assert conversation is not None
    assert (conversation.message_count, conversation.next_message_index) == (len(found), len(found))
    order = [message.content.split(" ")[1].split(".")[0] for message in found[::2]]
    assert sum(one != next_one for one, next_one in zip(order, order[1:], strict=False)) > writers, "they wrote at once"


@pytest.mark.parametrize(
    "harm",
    [
        lambda log: log[2:],
        lambda log: [*log, *log[:2]],
        lambda log: [log[0], log[3], log[2], log[1], *log[4:]],
        lambda log: [*log[2:4], *log[:2], *log[4:]],
        lambda log: [log[1], log[0], *log[2:]],
    ],
    ids=["lost", "doubled", "interleaved", "out of order", "turned round"],
)
def test_the_check_sees_each_kind_of_harm(harm: Callable[[list[tuple[str, str]]], list[tuple[str, str]]]) -> None:
    log = list(
        chain.from_iterable(
            [("human", f"q {writer}.{number}"), ("ai", f"a {writer}.{number}")]
            for writer in range(2)
            for number in range(TURNS)
        )
    )

    def records(log: list[tuple[str, str]]) -> list[StoredMessage]:
        return [StoredMessage(role, content, message_index=index) for index, (role, content) in enumerate(log)]

    check(records(log), 2)
    with pytest.raises(AssertionError):
        check(records(harm(log)), 2)


def test_writers_of_many_conversations_do_not_wait_for_each_other(server_dsn: str, store: ConversationStore) -> None:
    """A conversation whose row is locked holds up nobody else."""
    # Who waits all the same gives up in the end, so that this fails rather than hangs.
    impatient = ConversationStore(make_dsn(server_dsn, options="-c lock_timeout=8s"), schema=store.schema)
    PostgresChatMessageHistory("locked", store).add_message(HumanMessage("q"))
    locker = psycopg2.connect(server_dsn)
    with locker.cursor() as cursor:
        lock = "select 1 from {schema}.conversations for update"
        cursor.execute(sql.SQL(lock).format(schema=sql.Identifier(store.schema)))
    with impatient, ThreadPoolExecutor(1) as executor:
        waiting = executor.submit(PostgresChatMessageHistory("locked", store).add_message, HumanMessage("q2"))
        try:
            for number in range(20):
                other = PostgresChatMessageHistory(f"free {number % 3}", impatient, max_messages=4)
                other.add_message(HumanMessage("q"))
                assert other.messages
                # Reading waits for no lock at all.
                assert len(PostgresChatMessageHistory("locked", impatient).messages) == 1
            assert not waiting.done()
        finally:
            locker.close()
        waiting.result(PATIENCE_SECONDS)
    assert len(store.list_messages("locked")) == 2
