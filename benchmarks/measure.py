"""Measuring things beside each other: each repetition measures all of them, one after the other."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping

from benchmarks.rows import Result, Spread, Target

OURS = "pgmemory"

Work = Callable[[], object]
Timings = dict[str, list[float]]


def seconds_of(work: Work, calls: int) -> float:
    """Return how long one of so many calls takes on average."""
    began = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - began) / calls


def side_by_side(works: Mapping[str, Work], *, repetitions: int, calls: int | Mapping[str, int] = 1) -> Timings:
    """Return the seconds of a call of each work in each repetition; every second one goes through them backwards.

    Each work is warmed up first. The garbage collector runs as it always does, and once before each measurement, so
    that nobody pays for what another one left; what was there before everything began is kept out of its way.

    Args:
        works: What to measure, by name.
        repetitions: How often.
        calls: How many calls one measurement is the average of, for all or by name.
    """
    each = dict.fromkeys(works, calls) if isinstance(calls, int) else calls
    for name, work in works.items():
        seconds_of(work, max(1, each[name] // 4))
    gc.collect()
    gc.freeze()
    timings: Timings = {name: [] for name in works}
    for repetition in range(repetitions):
        for name in works if repetition % 2 == 0 else reversed(list(works)):
            gc.collect()
            timings[name].append(seconds_of(works[name], each[name]))
    gc.unfreeze()
    return timings


def append(timings: Timings, more: Timings) -> None:
    """Add further repetitions of the same works."""
    for name, values in more.items():
        timings.setdefault(name, []).extend(values)


def over(timings: Timings, base: str) -> dict[str, Spread]:
    """Return how many times as long as `base` each of the others took."""
    return {name: Spread.of_ratios(values, timings[base]) for name, values in timings.items() if name != base}


def as_milliseconds(timings: Timings, *names: str) -> str:
    """Return the medians of some works as text."""
    return ", ".join(f"{name} {statistics.median(timings[name]) * 1000:,.3f} ms" for name in names)


def result_over(row: int, case: str, target: Target, timings: Timings, base: str) -> Result:
    """Return the line of a table that compares ours, and the peers, with `base`."""
    ratios = over(timings, base)
    return Result(row, case, target, ratios.pop(OURS), as_milliseconds(timings, OURS, base), ratios)
