"""Rows 5 and 6, and the floor that they stand on: the same statements on a bare psycopg2 connection."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from itertools import cycle

import psycopg2
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage

from benchmarks.dialogues import Said
from benchmarks.measure import OURS, Timings, Work, append, result_over, side_by_side
from benchmarks.ours import fill, open_store, statement_of
from benchmarks.peers import LANGGRAPH, open_peers
from benchmarks.rows import Result, Target
from benchmarks.setting import Setting
from pgmemory import BufferMemory, ConversationStore

BARE = "bare psycopg2"

_LOAD_TARGET = Target(1.25)
_SAVE_TARGET = Target(1.4)
_SESSION = "floor"
_TURNS = 20
_LOGGED_TURNS = 50
_CLASSES: dict[str, type[BaseMessage]] = {"human": HumanMessage, "ai": AIMessage}


def measure(setting: Setting) -> Iterator[Result]:
    """Measure both rows."""
    said = setting.dialogues.ending(_LOGGED_TURNS)
    calls = 10 if setting.quick else 50
    loads: Timings = {}
    saves: Timings = {}
    with open_store(setting.dsn) as store:
        fill(store, _SESSION, said)
    with open_peers(setting.dsn) as peers:
        loading, saving = peers.all(k=_TURNS), peers.all()
        for peer in loading.values():
            for turn in said:
                peer.save(*turn)
        # With new connections each time: one session of the server may be a tenth faster than another.
        for _ in range(2 if setting.quick else 12):
            with open_store(setting.dsn) as store, closing(psycopg2.connect(setting.dsn)) as connection:
                connection.autocommit = True
                works = _loads(setting.dsn, store, connection) | {name: peer.load for name, peer in loading.items()}
                append(loads, side_by_side(works, repetitions=4, calls=calls))
                peers.end_transactions()
                works = {OURS: save(store, setting.dialogues.said)}
                works[BARE] = bare_save(connection, setting.dsn, setting.dialogues.said)
                for name, peer in saving.items():
                    works[name] = _each_turn(peer.save, setting.dialogues.said)
                # A thread of langgraph's grows slower with each turn, and the others would wait for it.
                each = dict.fromkeys(works, calls) | {LANGGRAPH: 2}
                append(saves, side_by_side(works, repetitions=4, calls=each))
    yield result_over(5, "BufferMemory(k=20)", _LOAD_TARGET, loads, BARE)
    yield result_over(6, "BufferMemory", _SAVE_TARGET, saves, BARE)


def save(store: ConversationStore, said: list[Said]) -> Work:
    """Return what saves the next turn to a new conversation."""
    memory = BufferMemory(session_id=uuid.uuid4(), store=store)
    return _each_turn(lambda human, ai: memory.save_context({"input": human}, {"output": ai}), said)


def bare_save(connection: psycopg2.extensions.connection, dsn: str, said: list[Said]) -> Work:
    """Return what runs the statement of `save` for the next turn, to a new conversation, and nothing more."""
    session_id = uuid.uuid4()
    statement, recorded = statement_of(
        dsn,
        lambda store: BufferMemory(session_id=session_id, store=store).save_context({"input": "a"}, {"output": "b"}),
    )

    def work(human: str, ai: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute(statement, {**recorded, "write_id": str(uuid.uuid4()), "contents": [human, ai]})

    return _each_turn(work, said)


def _loads(dsn: str, store: ConversationStore, connection: psycopg2.extensions.connection) -> dict[str, Work]:
    """Return what loads the window: ours, and its statement with nothing but the building of the messages."""
    memory = BufferMemory(session_id=_SESSION, store=store, k=_TURNS, return_messages=True)
    statement, parameters = statement_of(
        dsn,
        lambda store: BufferMemory(session_id=_SESSION, store=store, k=_TURNS).load_memory_variables({}),
    )

    def bare() -> list[BaseMessage]:
        with connection.cursor() as cursor:
            cursor.execute(statement, parameters)
            return [_CLASSES[role](content=content) for _, _, role, content, *_ in cursor.fetchall()]

    ours = partial(memory.load_memory_variables, {})
    assert ours()["history"] == bare(), "both build the same messages"
    return {OURS: ours, BARE: bare}


def _each_turn(work: Callable[[str, str], object], said: list[Said]) -> Work:
    turns = cycle(said)
    return lambda: work(*next(turns))
