"""What is said: the turns of real dialogues where they are there, else made-up ones of the same size."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage

_FOLDER = Path(__file__).resolve().parents[2] / "shared" / "data"

Dialogue = list[list[BaseMessage]]  # turns


class Said(NamedTuple):
    """A turn of two texts."""

    human: str
    ai: str

    def messages(self) -> list[BaseMessage]:
        """Return it as messages."""
        return [HumanMessage(self.human), AIMessage(self.ai)]


class Dialogues:
    """The dialogues.

    Attributes:
        origin: What they are, in words.
        all: Each divided into turns, with tool calls and their results.
        said: The turns of all of them that are one text and one answer, or are so without their tool calls.
    """

    def __init__(self) -> None:
        files = sorted(_FOLDER.glob("*_dialogues.jsonl"))
        self.all: list[Dialogue] = [_turns(messages) for file in files for messages in _read(file)]
        self.origin = "real dialogues (Action-Based Conversations, Schema-Guided Dialogue)"
        if not self.all:
            self.all = [_turns(messages) for messages in _made_up()]
            self.origin = "made-up dialogues of the size of real ones"
        self.said = [said for turn in chain.from_iterable(self.all) if (said := _said(turn))]

    def ending(self, turns: int, *, of: int = 1) -> list[Said]:
        """Return so many turns, over and over the same ones; whatever the number, the last ones are the same.

        Args:
            turns: How many.
            of: How many real turns are joined to make one of them.
        """
        joined = [
            Said(*(" ".join(texts) for texts in zip(*self.said[first : first + of], strict=True)))
            for first in range(0, len(self.said), of)
        ]
        backwards = list(islice(cycle(joined[::-1]), turns))
        return backwards[::-1]


def _read(file: Path) -> Iterator[list[BaseMessage]]:
    for line in file.read_text(encoding="utf-8").splitlines():
        yield [_message(given) for given in json.loads(line)["messages"]]


def _message(given: dict[str, Any]) -> BaseMessage:
    content = given["content"]
    if given["role"] == "human":
        return HumanMessage(content)
    if given["role"] == "tool":
        return ToolMessage(content, tool_call_id=given["tool_call_id"], name=given.get("name"))
    return AIMessage(content, tool_calls=given.get("tool_calls") or [])


def _made_up() -> Iterator[list[BaseMessage]]:
    generator = random.Random(1)
    words = [first + second for first in ("or", "re", "par", "in", "ad") for second in ("der", "cel", "voice", "to")]

    def text() -> str:
        return " ".join(generator.choices(words, k=generator.randint(3, 24)))

    for number in range(60):
        dialogue: list[BaseMessage] = []
        for turn in range(7):
            dialogue.append(HumanMessage(text()))
            if turn % 5 == 1:
                call_id = f"call_{number}_{turn}"
                call = {"name": "Find", "args": {"text": text()}, "id": call_id}
                dialogue += [AIMessage("", tool_calls=[call]), ToolMessage(text(), tool_call_id=call_id, name="Find")]
            dialogue.append(AIMessage(text()))
        yield dialogue


def _turns(messages: list[BaseMessage]) -> Dialogue:
    turns: Dialogue = []
    for message in messages:
        if isinstance(message, HumanMessage) or not turns:
            turns.append([])
        turns[-1].append(message)
    return turns


def _said(turn: list[BaseMessage]) -> Said | None:
    first, last = turn[0], turn[-1]
    if isinstance(first, HumanMessage) and isinstance(last, AIMessage) and last.content:
        return Said(str(first.content), str(last.content))
    return None
