"""A memory as LangChain's chat message history: its window to read, the whole log to write."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from langchain_core.chat_history import BaseChatMessageHistory
from langchain_core.messages import BaseMessage, HumanMessage

from pgmemory.history import PostgresChatMessageHistory, as_list
from pgmemory.said import STEPS


class _Memory(Protocol):
    """What is needed of a memory: its own module imports this one."""

    chat_memory: PostgresChatMessageHistory
    input_key: str | None
    output_key: str | None

    @property
    def buffer_as_messages(self) -> list[BaseMessage]: ...
    async def abuffer_as_messages(self) -> list[BaseMessage]: ...
    def save_context(self, inputs: dict[str, Any], outputs: dict[str, Any]) -> None: ...
    async def asave_context(self, inputs: dict[str, Any], outputs: dict[str, Any]) -> None: ...
    def save_messages(self, messages: list[BaseMessage]) -> None: ...
    async def asave_messages(self, messages: list[BaseMessage]) -> None: ...
    def clear(self) -> None: ...
    async def aclear(self) -> None: ...


class WindowHistory(BaseChatMessageHistory):
    """What `as_history` of a memory returns, for RunnableWithMessageHistory.

    `messages` is what the memory shows, without a chain's inputs; `add_messages` stores as the memory does.
    """

    def __init__(self, memory: _Memory) -> None:
        self._memory = memory

    @property
    def messages(self) -> list[BaseMessage]:  # type: ignore[override]  # LangChain declares an attribute
        """The memory's window, oldest first, read anew each time."""
        return self._memory.buffer_as_messages

    async def aget_messages(self) -> list[BaseMessage]:
        """Return the memory's window without blocking the event loop."""
        return await self._memory.abuffer_as_messages()

    def add_messages(self, messages: Sequence[BaseMessage]) -> None:
        """Store messages as the memory stores a turn: by its `turn_messages`, counted, judged, summarised.

        Where they are no turn (nothing a human said, or nothing in answer) they are stored as they are.

        Raises:
            MessageNotStorableError: A message holds a value without a JSON form; nothing was written.
            StoreError: As for saving a turn. Any error is logged too, since RunnableWithMessageHistory swallows it.
        """
        with self._logging_errors():
            if turn := self._as_turn(messages):
                self._memory.save_context(*turn)
            else:
                self._memory.save_messages(as_list(messages))

    async def aadd_messages(self, messages: Sequence[BaseMessage]) -> None:
        """Store messages as `add_messages` does, without blocking the event loop."""
        with self._logging_errors():
            if turn := self._as_turn(messages):
                await self._memory.asave_context(*turn)
            else:
                await self._memory.asave_messages(as_list(messages))

    @contextmanager
    def _logging_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._memory.chat_memory.log_unsaved(error)
            raise

    def _as_turn(self, messages: Sequence[BaseMessage]) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Return messages as a chain's inputs and outputs: up to what humans said first, and what followed.

        None if either is missing.
        """
        rest = as_list(messages)
        humans = [isinstance(message, HumanMessage) for message in rest]
        if not any(humans):
            return None
        end = next((end for end in range(humans.index(True), len(rest)) if not humans[end]), len(rest))
        said, answered = rest[:end], rest[end:]
        if not answered:
            return None
        inputs = {self._memory.input_key or "input": said[0] if len(said) == 1 else said}
        # A runnable passes messages on, and not an agent's steps.
        outputs = {self._memory.output_key or "output": answered[0] if len(answered) == 1 else answered, STEPS: []}
        return inputs, outputs

    def add_message(self, message: BaseMessage) -> None:
        """Store one message."""
        self.add_messages([message])

    def clear(self) -> None:
        """Delete the conversation's messages and summaries."""
        self._memory.clear()

    async def aclear(self) -> None:
        """Clear as `clear` does, without blocking the event loop."""
        await self._memory.aclear()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._memory!r})"
