"""Row 7: how much four processes save at once."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import closing
from multiprocessing.connection import Connection

import psycopg2

from benchmarks.floor import BARE, bare_save, save
from benchmarks.measure import OURS, Work
from benchmarks.ours import open_store
from benchmarks.peers import LANGCHAIN_POSTGRES, open_peers
from benchmarks.rows import Result, Spread, Target
from benchmarks.setting import Setting

_COUNT = 4
_TARGET = Target(0.85, at_most=False)
_PATIENCE_SECONDS = 120.0


def measure(setting: Setting) -> Iterator[Result]:
    """Measure the row."""
    seconds = 0.5 if setting.quick else 2.0
    context = multiprocessing.get_context("spawn")
    workers = []
    ends = []
    try:
        for _ in range(_COUNT):
            end, other_end = context.Pipe()
            worker = context.Process(target=_work, args=(other_end, setting), daemon=True)
            worker.start()
            other_end.close()
            workers.append(worker)
            ends.append(end)
        _answers(ends)  # each is ready
        rates: dict[str, list[float]] = {name: [] for name in (OURS, BARE, LANGCHAIN_POSTGRES)}
        for repetition in range(setting.repetitions(9)):
            for name in rates if repetition % 2 == 0 else reversed(list(rates)):
                for end in ends:
                    end.send((name, seconds))
                rates[name].append(sum(_answers(ends)))
    finally:
        for end in ends:
            end.close()
        for worker in workers:
            worker.join(_PATIENCE_SECONDS)
    medians = {name: Spread.of(values).median for name, values in rates.items()}
    yield Result(
        7,
        "BufferMemory",
        _TARGET,
        Spread.of_ratios(rates[OURS], rates[BARE]),
        f"{OURS} {medians[OURS]:,.0f}, {BARE} {medians[BARE]:,.0f} saves a second",
        {LANGCHAIN_POSTGRES: Spread.of_ratios(rates[LANGCHAIN_POSTGRES], rates[BARE])},
    )


def _answers(ends: list[Connection]) -> list[float]:
    answers = []
    for end in ends:
        assert end.poll(_PATIENCE_SECONDS), "a process does not answer"
        answers.append(end.recv())
    return answers


def _work(orders: Connection, setting: Setting) -> None:
    """Save as ordered: (what, for how many seconds); answer with the saves a second. Ends when nobody orders more."""
    said = setting.dialogues.said
    with (
        open_store(setting.dsn) as store,
        open_peers(setting.dsn) as peers,
        closing(psycopg2.connect(setting.dsn)) as connection,
    ):
        connection.autocommit = True
        peer = peers.langchain_postgres()
        works: dict[str, Work] = {
            OURS: save(store, said),
            BARE: bare_save(connection, setting.dsn, said),
            LANGCHAIN_POSTGRES: lambda: peer.save(*said[0]),
        }
        for work in works.values():
            work()
        orders.send(0.0)
        while True:
            try:
                name, seconds = orders.recv()
            except EOFError:
                return
            orders.send(_rate(works[name], seconds))


def _rate(work: Work, seconds: float) -> float:
    began = now = time.perf_counter()
    count = 0
    while now < began + seconds:
        work()
        count += 1
        now = time.perf_counter()
    return count / (now - began)
