"""What a memory chose of a log, and what it says of the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from langchain_core.messages import BaseMessage

from pgmemory.history import PostgresChatMessageHistory
from pgmemory.tokens import CustomCounter, EncodingCounter
from pgmemory.turns import LoggedMessage, Turn


class SummaryMessage(LoggedMessage):
    """The message that shows a summary; its index is that of the last message that the summary covers."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Selection:
    """The messages that a memory shows.

    Attributes:
        head: What stands before the turns.
        turns: The turns as they are shown, oldest first; empty ones for turns of which nothing is shown.
        limit: The token limit that they were chosen by, or a function of the head's tokens that returns it.
        elsewhere: By the `id` of each message that is not of this conversation's log: the session id of its own.
    """

    head: list[LoggedMessage]
    turns: list[Turn]
    limit: int | Callable[[int], int] | None = None
    elsewhere: Mapping[int, str] = field(default_factory=dict)


Code = Literal[
    "kept",
    "summary",
    "added",
    "beyond_k",
    "beyond_limit",
    "irrelevant",
    "summarized",
    "preamble",
    "empty",
    "unpaired_call",
    "unpaired_result",
    "removal",
    "erased",
    "left_out",
]


class Verdict(NamedTuple):
    """Why messages are shown or are not: a word for scripts, and a sentence."""

    code: Code
    reason: str


class Explainable(Protocol):
    """What a memory says of its choice: the part of `PostgresChatMemory` that explaining asks."""

    chat_memory: PostgresChatMessageHistory
    _noted: list[tuple[Explainable, Selection]] | None

    @property
    def _explaining_counter(self) -> EncodingCounter | CustomCounter: ...

    def select_messages(self, inputs: dict[str, Any]) -> list[BaseMessage]:
        """Return the messages that the model is shown, and note what was chosen."""

    def _verdict_on_head(self, system: Sequence[LoggedMessage], selection: Selection) -> Verdict: ...

    def _verdicts(self, turns: Sequence[Turn], selection: Selection) -> list[Verdict]: ...

    def _settings(self, selection: Selection) -> dict[str, Any]: ...

    def _resolved_limit(self, selection: Selection) -> int | None: ...


def beyond_k(k: int, turns: str = "turns") -> Verdict:
    """Return the verdict on what is older than the last `k` turns."""
    return Verdict("beyond_k", f"Older than the last {k} {turns}." if k else "k is 0, which shows no turn.")
