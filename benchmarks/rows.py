"""What is measured and how, with the targets, and the arithmetic of ratios. Needs nothing that is not in Python."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Target:
    """What a figure must keep to.

    Attributes:
        limit: The figure.
        at_most: Whether it must not be passed; else it must be reached.
        unit: What stands behind a figure.
        decimals: How many are shown.
    """

    limit: float
    at_most: bool = True
    unit: str = "×"
    decimals: int = 2

    def met_by(self, value: float) -> bool:
        """Tell whether a figure keeps to it."""
        return value <= self.limit if self.at_most else value >= self.limit

    def show(self, value: float) -> str:
        """Return a figure as text."""
        return f"{value:,.{self.decimals}f}{self.unit}"

    def __str__(self) -> str:
        return f"{'≤' if self.at_most else '≥'} {self.show(self.limit)}"


@dataclass(frozen=True)
class Spread:
    """Repetitions of one measurement: their median, the least and the greatest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Return the spread of some figures.

        Raises:
            ValueError: There are none.
        """
        listed = list(values)
        if not listed:
            raise ValueError("nothing was measured")
        return cls(statistics.median(listed), min(listed), max(listed))

    @classmethod
    def of_ratios(cls, ours: Iterable[float], base: Iterable[float]) -> Spread:
        """Return the spread of the ratios of neighbours: each of ours over the one that was measured beside it."""
        return cls.of(mine / other for mine, other in zip(ours, base, strict=True))


@dataclass(frozen=True)
class Result:
    """One line of the table.

    Attributes:
        row: Number of the row that it belongs to.
        case: What exactly was measured.
        target: What it must keep to.
        measured: The ratio, or the figure where the target is one.
        absolute: The figures behind it, as text.
        peers: The same of others, by name.
    """

    row: int
    case: str
    target: Target
    measured: Spread
    absolute: str = ""
    peers: Mapping[str, Spread] = field(default_factory=dict)

    @property
    def met(self) -> bool:
        """Whether the median keeps to the target."""
        return self.target.met_by(self.measured.median)


@dataclass(frozen=True)
class Row:
    """One thing that is measured.

    Attributes:
        title: What, in short.
        how: How, and against what.
    """

    title: str
    how: str


ROWS: dict[int, Row] = {
    1: Row(
        "Round trips of a save",
        "Time of `save_context` behind a proxy that makes every round trip last 10 ms, over the time of `select 1` "
        "there; the slowest of the five memories, in a conversation of some ten turns. The others save the same turn "
        "through LangChain's `ConversationBufferMemory`; langgraph runs one turn of a thread, which loads and saves.",
    ),
    2: Row(
        "Round trips of a load",
        "The same for loading a window of five turns, the one with a summary included; the slowest of the five. The "
        "others load through `ConversationBufferWindowMemory`, langgraph with `get_state`.",
    ),
    3: Row(
        "A window does not grow with its log",
        "Loading from a long conversation over loading from one of 100 messages that ends with the same turns. "
        "Beside it, LangChain's window over langchain-postgres.",
    ),
    4: Row(
        "Against a buffer that reads everything",
        "Loading from 10,000 messages by LangChain's `ConversationTokenBufferMemory` over langchain-postgres (it loads "
        "the whole log: a database gives it a fresh list to prune), over the same by ours. Three turns make one "
        "here, so that a message has about 45 tokens.",
    ),
    5: Row(
        "Loading 40 messages against bare psycopg2",
        "`BufferMemory(k=20)` over the same SQL with the same parameters on a bare psycopg2 connection and building "
        "the same messages from its rows, over new connections now and then. The others load their window of 40 from "
        "the same 100 messages.",
    ),
    6: Row(
        "Saving a turn against bare psycopg2",
        "`save_context` over the same SQL on a bare psycopg2 connection, with parameters prepared by hand and a new "
        "write id each time. Batches of each in turn, to conversations of their own, over new connections now and "
        "then. The others save the same turns.",
    ),
    7: Row(
        "Saving in four processes at once",
        "Saves a second of four processes over those of four processes that loop over the bare statement of row 6; "
        "conversations of their own, the same processes for all. Where two cores serve "
        "clients and server, all work counts: beside the bare loop's a save builds LangChain's messages, their records "
        "and ids, and holds a deadline.",
    ),
    8: Row(
        "Bytes on disk",
        "Tables with their indexes, after VACUUM FULL, for each message of the dialogues with their tool calls, a "
        "conversation each, saved turn by turn; over langchain-postgres. langgraph stores each dialogue once.",
    ),
    9: Row(
        "Asking the model for summaries",
        "200 turns through `SummaryMemory` over the same through LangChain's `ConversationSummaryBufferMemory` in "
        "memory. A word is a token; the stand-in for a model answers 100 words each time.",
    ),
    10: Row(
        "Starting",
        "Whole fresh processes: importing pgmemory and a memory of it over importing `langchain_classic.memory`, and "
        "`pgmemory --version` over the same.",
    ),
    11: Row(
        "Building",
        "A store, a history and a memory, without any I/O.",
    ),
}
