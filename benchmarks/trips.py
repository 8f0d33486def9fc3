"""Rows 1 and 2: round trips of saving and loading, by the time they take where each lasts 10 ms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import partial

import psycopg2

from benchmarks.delay_proxy import DelayProxy
from benchmarks.measure import Work, over, side_by_side
from benchmarks.ours import five_memories, open_store
from benchmarks.peers import open_peers
from benchmarks.rows import Result, Target
from benchmarks.setting import Setting
from benchmarks.standin import StandIn
from pgmemory import ConversationStore, SummaryMemory

ROUND_TRIP_SECONDS = 0.01

_BARE = "select 1"
_CALLS = 2
_LOADED_TURNS = 5
_TARGET = Target(1.2)


def measure(setting: Setting) -> Iterator[Result]:
    """Measure both rows."""
    human, ai = setting.dialogues.said[0]
    with open_store(setting.dsn) as store:
        _summarise(store)
    with (
        DelayProxy(setting.dsn, ROUND_TRIP_SECONDS) as proxy,
        open_store(proxy.dsn) as store,
        open_peers(proxy.dsn) as peers,
        closing(psycopg2.connect(proxy.dsn)) as connection,
        connection.cursor() as cursor,
    ):
        connection.autocommit = True
        memories, others = five_memories(store, "trips"), peers.all()
        bare = {_BARE: partial(cursor.execute, "select 1")}
        repetitions = setting.repetitions(9)  # few, for windows shall stay short: trips are measured, not work
        turn = {"input": human}, {"output": ai}
        saves = {name: partial(memory.save_context, *turn) for name, memory in memories.items()}
        their_saves = {name: partial(peer.save, human, ai) for name, peer in others.items()}
        yield _line(1, bare | saves | their_saves, set(saves), repetitions)
        memories, others = five_memories(store, "trips loads"), peers.all()
        for _ in range(_LOADED_TURNS):
            for memory in memories.values():
                memory.save_context(*turn)
            for peer in others.values():
                peer.save(human, ai)
        loads = {name: partial(memory.load_memory_variables, {}) for name, memory in memories.items()}
        assert "word word" in memories["SummaryMemory"].buffer_as_str, "its summary is loaded"
        their_loads = {name: peer.load for name, peer in others.items()}
        yield _line(2, bare | loads | their_loads, set(loads), repetitions)


def _line(row: int, works: Mapping[str, Work], ours: set[str], repetitions: int) -> Result:
    ratios = over(side_by_side(works, repetitions=repetitions, calls=_CALLS), _BARE)
    slowest = max(ours, key=lambda name: ratios[name].median)
    peers = {name: ratio for name, ratio in ratios.items() if name not in ours}
    return Result(row, f"{slowest}, the slowest of {len(ours)}", _TARGET, ratios[slowest], "", peers)


def _summarise(store: ConversationStore) -> None:
    """Give the conversation of the summary memory a summary."""
    memory = SummaryMemory(session_id="trips loads summary", store=store, llm=StandIn(), max_token_limit=100)
    for number in range(10):
        memory.save_context({"input": f"question {number} " * 20}, {"output": "answer " * 20})
