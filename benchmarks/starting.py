"""Rows 10 and 11: what it costs to import pgmemory, to start its command, and to build a memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.measure import OURS, Work, as_milliseconds, over, seconds_of, side_by_side
from benchmarks.rows import Result, Spread, Target
from benchmarks.setting import Setting
from pgmemory import BufferMemory, ConversationStore, PostgresChatMessageHistory

_IMPORT_TARGET = Target(1.1)
_COMMAND_TARGET = Target(1 / 3)
_BUILD_TARGET = Target(100, unit=" µs", decimals=0)

_STOCK = "langchain_classic.memory"
_PEER = "langchain_postgres"
_COMMAND = f"{OURS} --version"


def measure(setting: Setting) -> Iterator[Result]:
    """Measure both rows."""
    times = side_by_side(
        {
            OURS: _python("import pgmemory; from pgmemory import BufferMemory"),
            _COMMAND: _process([Path(sys.executable).parent / "pgmemory", "--version"]),
            _STOCK: _python(f"import {_STOCK}"),
            _PEER: _python(f"import {_PEER}"),
        },
        repetitions=setting.repetitions(15),
    )
    ratios = over(times, _STOCK)
    peers = {_PEER: ratios[_PEER]}
    yield Result(10, "import", _IMPORT_TARGET, ratios[OURS], as_milliseconds(times, OURS, _STOCK), peers)
    yield Result(10, "--version", _COMMAND_TARGET, ratios[_COMMAND], as_milliseconds(times, _COMMAND, _STOCK))

    calls = 100 if setting.quick else 1000
    seconds_of(lambda: _build(setting.dsn), calls)
    seconds = [seconds_of(lambda: _build(setting.dsn), calls) for _ in range(setting.repetitions(15))]
    stats = _build(setting.dsn).store.pool_stats()
    assert stats is not None and stats.opened == 0, "nothing was connected to"
    yield Result(11, "all three", _BUILD_TARGET, Spread.of(value * 1e6 for value in seconds))


def _build(dsn: str) -> BufferMemory:
    store = ConversationStore(dsn)
    return BufferMemory(chat_memory=PostgresChatMessageHistory("session", store))


def _python(code: str) -> Work:
    return _process([sys.executable, "-c", code])


def _process(command: Sequence[str | Path]) -> Work:
    return lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
