"""Rows 3 and 4, and how loading and saving grow with a conversation."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial

from langchain_classic.memory import ConversationTokenBufferMemory

from benchmarks.measure import OURS, Timings, Work, as_milliseconds, side_by_side
from benchmarks.ours import fill, open_store
from benchmarks.peers import LANGCHAIN_POSTGRES, LANGGRAPH, Peers, open_peers, quietly
from benchmarks.rows import Result, Spread, Target
from benchmarks.server import run
from benchmarks.setting import Curve, Setting
from benchmarks.standin import StandIn
from pgmemory import BufferMemory, ConversationStore, PostgresChatMemory, TokenWindowMemory

# So that a message has about 45 tokens, as where people write sentences.
_JOINED = 3
_SHORT, _LONG, _LONGEST = 100, 10_000, 100_000
_FLAT = Target(1.3)
_FASTER = Target(100, at_most=False, decimals=0)

_BUFFER = f"{OURS} BufferMemory(k=5)"
_TOKENS = f"{OURS} TokenWindowMemory(2000)"
_STOCK = f"window over {LANGCHAIN_POSTGRES}"
_STOCK_TOKENS = f"token buffer over {LANGCHAIN_POSTGRES}"

# langgraph stores a whole thread with each turn.
_LONGEST_THREAD = _LONG


def measure(setting: Setting) -> Iterator[Result | Curve]:
    """Measure both rows and both curves."""
    lengths = [_SHORT, 1_000, _LONG] if setting.quick else [_SHORT, 1_000, _LONG, _LONGEST]
    with open_store(setting.dsn) as store, open_peers(setting.dsn) as peers:
        loads: dict[str, Work] = {}
        saves: dict[str, Work] = {}
        calls: dict[str, int] = {}
        for length in lengths:
            _prepare(setting, store, peers, length, loads, saves, calls)
        # What was written just now is settled, as what was written yesterday is.
        peers.end_transactions()
        run(setting.dsn, "vacuum analyze")
        times = side_by_side(loads, repetitions=setting.repetitions(15), calls=calls)
        peers.end_transactions()

        longest = lengths[-1]
        for ours in (_BUFFER, _TOKENS):
            yield _growth(times, ours, longest)
            yield _advantage(times, ours)
        yield Curve(
            "load", "Loading a window", "messages in the conversation", "milliseconds", _series(times, lengths)
        )
        times = side_by_side(saves, repetitions=setting.repetitions(7), calls=calls)
        yield Curve("save", "Saving a turn", "messages in the conversation", "milliseconds", _series(times, lengths))


def _prepare(
    setting: Setting,
    store: ConversationStore,
    peers: Peers,
    length: int,
    loads: dict[str, Work],
    saves: dict[str, Work],
    calls: dict[str, int],
) -> None:
    """Fill conversations of a length, and add what is to be measured on them."""
    said = setting.dialogues.ending(length // 2, of=_JOINED)
    human, ai = said[-1]
    messages = [message for turn in said for message in turn.messages()]

    def add(whose: str, load: Work | None, save: Work | None, times: int) -> None:
        name = _at(whose, length)
        calls[name] = times
        if load is not None:
            loads[name] = load
        if save is not None:
            saves[name] = save

    # What is saved while saving is measured shall not change what is loaded.
    for purpose in ("load", "save"):
        fill(store, f"{purpose} {length}", said)
    build: Callable[..., PostgresChatMemory]
    for whose, build in ((_BUFFER, partial(BufferMemory, k=5)), (_TOKENS, TokenWindowMemory)):
        loaded, saved = (build(session_id=f"{purpose} {length}", store=store) for purpose in ("load", "save"))
        add(
            whose,
            partial(loaded.load_memory_variables, {}),
            partial(saved.save_context, {"input": human}, {"output": ai}),
            4 if setting.quick else 20,
        )
    few = max(1, 2000 // length)
    stock, stock_saved = peers.langchain_postgres(), peers.langchain_postgres()
    for each in (stock, stock_saved):
        each.add(messages)
    add(_STOCK, stock.load, None, few)
    add(LANGCHAIN_POSTGRES, None, partial(stock_saved.save, human, ai), 20)
    if length == _LONG:
        memory = quietly(ConversationTokenBufferMemory, chat_memory=stock.history, llm=StandIn())
        add(_STOCK_TOKENS, partial(memory.load_memory_variables, {}), None, few)
    if length <= _LONGEST_THREAD:
        thread = peers.thread()
        thread.fill(messages)
        add(LANGGRAPH, thread.load, partial(thread.save, human, ai), few)


def _at(whose: str, length: int) -> str:
    return f"{whose} at {length:,}"


def _growth(times: Timings, ours: str, longest: int) -> Result:
    def ratio(whose: str) -> Spread:
        return Spread.of_ratios(times[_at(whose, longest)], times[_at(whose, _SHORT)])

    names = [_at(ours, longest), _at(ours, _SHORT)]
    case = f"{ours.removeprefix(OURS).strip()}, {longest:,} messages"
    return Result(3, case, _FLAT, ratio(ours), as_milliseconds(times, *names), {_STOCK: ratio(_STOCK)})


def _advantage(times: Timings, ours: str) -> Result:
    names = [_at(_STOCK_TOKENS, _LONG), _at(ours, _LONG)]
    ratio = Spread.of_ratios(times[names[0]], times[names[1]])
    return Result(4, ours.removeprefix(OURS).strip(), _FASTER, ratio, as_milliseconds(times, *names))


def _series(times: Timings, lengths: list[int]) -> dict[str, list[tuple[float, float]]]:
    """Return the medians, in milliseconds, of everything that was measured at more than one length."""
    series: dict[str, list[tuple[float, float]]] = {}
    for name, values in times.items():
        whose, _, length = name.rpartition(" at ")
        series.setdefault(whose, []).append((int(length.replace(",", "")), statistics.median(values) * 1000))
    return {whose: points for whose, points in series.items() if len(points) > 1}
