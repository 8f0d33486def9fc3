"""What every memory of the family has in common: fields, what a turn is made of, text or messages, sync and async.

A memory is a view: it appends to the log and chooses what to show of it, and never deletes but in `clear`. It holds
nothing of the conversation between calls.
"""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from pydantic import ConfigDict, Field, PrivateAttr, model_validator

from pgmemory._compat import BaseChatMemory
from pgmemory.errors import ConfigurationError, MessageNotStorableError
from pgmemory.formats import as_text
from pgmemory.history import SAVE_ERRORS, PostgresChatMessageHistory, as_list
from pgmemory.logged import to_stored_messages
from pgmemory.memory.explanation import Explanation, explain_memory
from pgmemory.memory.selection import Explainable, Selection, Verdict
from pgmemory.memory.window_history import WindowHistory
from pgmemory.said import STEPS, said_key, steps_to_messages, to_messages
from pgmemory.store import ConversationStore
from pgmemory.tokens import CustomCounter, EncodingCounter
from pgmemory.turns import LoggedMessage, Turn

Memory = TypeVar("Memory", bound="PostgresChatMemory")

_SHORTHAND = ("session_id", "store", "user_id", "max_messages")


def _refuse_to_do_without() -> PostgresChatMessageHistory:
    raise ConfigurationError("a memory needs chat_memory=PostgresChatMessageHistory(…), or session_id and store")


class PostgresChatMemory(BaseChatMemory):
    """Base of the memories. To make one of your own, subclass one of them or this and override `select_messages`
    (what the model sees) or `turn_messages` (what is stored of a turn); text and messages, sync and async then work.

    The history is given as `chat_memory`, or made from the shorthand ``session_id=…, store=…[, user_id=…]
    [, max_messages=…]``. Unknown fields are refused.

    Attributes:
        chat_memory: The conversation's log.
        memory_key: The prompt's variable that `load_memory_variables` fills.
        input_key: The chain's input that the human said; None if there is one besides the memory's variables.
        output_key: The chain's output that the AI said; None if there is one, or one named ``output``.
        return_messages: Fill the variable with messages, else with text.
        human_prefix: How text calls the human.
        ai_prefix: How text calls the AI.
        formatter: Makes the text: a function of the messages and the two prefixes, such as `as_text`, `as_xml`,
            `as_json`.
        idempotency_key: The caller's name for the one turn that this object saves: saving it again stores nothing
            while the turn is kept. For memories that live for one request, see `for_session`.
        save_intermediate_steps: Store an agent's tool calls and their results between what the human said and the
            answer. The AgentExecutor must have ``return_intermediate_steps=True``.
        on_save_error: What to do when a turn cannot be saved: ``"raise"``, so that the chain fails, or ``"log"`` an
            ERROR and let the model's answer through. The error, or the log's record, has the turn as its attribute
            `unsaved_turn`.
    """

    model_config = ConfigDict(
        arbitrary_types_allowed=True, extra="forbid", hide_input_in_errors=True, validate_assignment=True
    )

    # Excluded from dumps, which end up in traces: an application's objects are of no use there.
    chat_memory: PostgresChatMessageHistory = Field(default_factory=_refuse_to_do_without, exclude=True)
    memory_key: str = "history"
    human_prefix: str = "Human"
    ai_prefix: str = "AI"
    formatter: Callable[[Sequence[BaseMessage], str, str], str] = Field(default=as_text, exclude=True, repr=False)
    idempotency_key: str | None = None
    save_intermediate_steps: bool = False
    on_save_error: Literal["raise", "log"] = "raise"

    # Where a copy that explains notes what it and copies of it choose.
    _noted: list[tuple[Explainable, Selection]] | None = PrivateAttr(default=None)

    if TYPE_CHECKING:
        # The shorthand, which type checkers take for fields.
        session_id: str | int | uuid.UUID = ""
        store: ConversationStore = ConversationStore()
        user_id: str | int | uuid.UUID | None = None
        max_messages: int | None = None
    else:
        session_id = property(lambda self: self.chat_memory.session_id)
        store = property(lambda self: self.chat_memory.store)
        user_id = property(lambda self: self.chat_memory.user_id)
        max_messages = property(lambda self: self.chat_memory.max_messages)

    @model_validator(mode="before")
    @classmethod
    def _make_history(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        shorthand = {name: values[name] for name in _SHORTHAND if name in values}
        others = {name: value for name, value in values.items() if name not in shorthand}
        if "chat_memory" in others:
            if shorthand:
                raise ConfigurationError(f"give either chat_memory or {', '.join(shorthand)}, not both")
        elif "session_id" in shorthand and "store" in shorthand:
            others["chat_memory"] = PostgresChatMessageHistory(**shorthand)
        elif unknown := sorted(others.keys() - cls.model_fields.keys()):
            raise ConfigurationError(f"{cls.__name__} has no fields {unknown}")
        return others

    def __setattr__(self, name: str, value: Any) -> None:
        fields, given = self.__dict__.copy(), self.__pydantic_fields_set__.copy()
        try:
            super().__setattr__(name, value)
        except Exception:
            # pydantic leaves a value in place that a validator of the whole model refuses.
            object.__setattr__(self, "__dict__", fields)
            object.__setattr__(self, "__pydantic_fields_set__", given)
            raise

    # What the model sees

    def select_messages(self, inputs: dict[str, Any]) -> list[BaseMessage]:
        """Return the messages that the model is shown, oldest first. Override to make a view of your own.

        Args:
            inputs: The chain's inputs of this call; empty where there is no call, as for `buffer`.
        """
        selection = self._select(inputs)
        if self._noted is not None:
            self._noted.append((self, selection))
        return messages_of([selection.head, *selection.turns])

    def _select(self, inputs: dict[str, Any]) -> Selection:
        raise NotImplementedError(f"{type(self).__name__} must override select_messages(inputs)")

    @property
    def memory_variables(self) -> list[str]:
        """The prompt variables that this memory fills."""
        return [self.memory_key]

    def load_memory_variables(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the window as messages or text under `memory_key`. In a running event loop this blocks it.

        Raises:
            StoreError: The database could not be asked.
        """
        messages = self.select_messages(inputs)
        return {self.memory_key: messages if self.return_messages else self._as_text(messages)}

    async def aload_memory_variables(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return what `load_memory_variables` returns, without blocking the event loop."""
        return await self._store.run_in_worker(self.load_memory_variables, inputs)

    @property
    def buffer(self) -> Any:
        """The window, as messages or as text like `load_memory_variables`."""
        return self.buffer_as_messages if self.return_messages else self.buffer_as_str

    @property
    def buffer_as_str(self) -> str:
        """The window as text."""
        return self._as_text(self.buffer_as_messages)

    @property
    def buffer_as_messages(self) -> list[BaseMessage]:
        """The window as messages."""
        return self.select_messages({})

    async def abuffer(self) -> Any:
        """Return `buffer` without blocking the event loop."""
        return await self._store.run_in_worker(lambda: self.buffer)

    async def abuffer_as_str(self) -> str:
        """Return `buffer_as_str` without blocking the event loop."""
        return await self._store.run_in_worker(lambda: self.buffer_as_str)

    async def abuffer_as_messages(self) -> list[BaseMessage]:
        """Return `buffer_as_messages` without blocking the event loop."""
        return await self._store.run_in_worker(lambda: self.buffer_as_messages)

    # Explaining what the model sees

    def explain(self, inputs: dict[str, Any] | None = None) -> Explanation:
        """Tell of every message whether the model would be shown it now, why, and what it costs. For operators.

        Asks no language model for an answer and writes nothing. Functions of one's own (a counter, a limit,
        `is_relevant`, `select_messages`) are called as for loading, counters once a message besides. Reads the whole
        log: three round trips more than loading takes, and all of them again if the conversation was changed meanwhile.

        Args:
            inputs: The chain's inputs of the call to explain.

        Raises:
            PgMemoryError: The conversation was changed during each of five tries.
            StoreError: The database could not be asked.
        """
        return explain_memory(self.model_copy(), {} if inputs is None else inputs)

    async def aexplain(self, inputs: dict[str, Any] | None = None) -> Explanation:
        """Explain as `explain` does, without blocking the event loop."""
        return await self._store.run_in_worker(self.explain, inputs)

    # What is stored

    def turn_messages(self, inputs: dict[str, Any], outputs: dict[str, Any]) -> list[BaseMessage]:
        """Return the messages to store of one turn, oldest first; none to store nothing. Override to change them.

        The human and the AI may have said text, a message, content blocks, or a list of messages, each of which is
        stored as it is; anything else is stored as its JSON text. With `save_intermediate_steps` the tool calls and
        results of an agent stand between them.

        Args:
            inputs: The chain's inputs, the memory's variables among them.
            outputs: The chain's outputs.

        Raises:
            ConfigurationError: It cannot be told which input or output was said; the text names those there are.
        """
        said = self._input_said(inputs)
        memory = type(self).__name__
        answered = said_key(memory, "output_key", self.output_key, outputs, without={STEPS}, fallback="output")
        return [
            *self._to_messages(inputs[said], HumanMessage, f"inputs[{said!r}]"),
            *(self._step_messages(outputs) if self.save_intermediate_steps else []),
            *self._to_messages(outputs[answered], AIMessage, f"outputs[{answered!r}]"),
        ]

    def _input_said(self, inputs: dict[str, Any]) -> str:
        """Return the key of the input that the human said."""
        nobodys = {*self.memory_variables, "stop"}
        return said_key(type(self).__name__, "input_key", self.input_key, inputs, without=nobodys)

    def _to_messages(
        self, said: Any, message_class: type[HumanMessage] | type[AIMessage], place: str
    ) -> list[BaseMessage]:
        """Return what was said as messages; an error names no keys in it that are yet to be redacted."""
        try:
            return to_messages(said, message_class, place)
        except MessageNotStorableError as error:
            if self._store.redact is None or error.path == place:
                raise
            reason = error.reason
        raise MessageNotStorableError(f"{place}[…]", reason)

    def _step_messages(self, outputs: dict[str, Any]) -> list[BaseMessage]:
        """Return an agent's steps as messages; warn if the chain does not return them."""
        if STEPS in outputs:
            return steps_to_messages(outputs[STEPS], f"outputs[{STEPS!r}]")
        warnings.warn(
            f"{type(self).__name__} has save_intermediate_steps=True, but the chain returns no intermediate steps: "
            "give the AgentExecutor return_intermediate_steps=True, or leave this out",
            stacklevel=2,
        )
        return []

    def save_context(self, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
        """Store a turn: one round trip, one transaction, all of it or nothing. In a running event loop this blocks it.

        Raises:
            ConfigurationError: It cannot be told which input or output was said.
            MessageNotStorableError: Something that was said has no JSON form, or the store's `redact` failed.
            StoreError: The database refused or could not be reached. `unsaved_turn` of this error and the one before
                is the turn, if it could be made and, in a store that redacts, if all of it could be redacted. With
                ``on_save_error="log"`` they are logged instead.
        """
        messages: list[BaseMessage] = []
        with self._handling_save_errors():
            messages = as_list(self.turn_messages(inputs, outputs))
        self.save_messages(messages)

    async def asave_context(self, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
        """Store a turn as `save_context` does, without blocking the event loop."""
        await self._store.run_in_worker(self.save_context, inputs, outputs)

    def save_messages(self, messages: list[BaseMessage]) -> None:
        """Store messages as `save_context` stores those of a turn; none is no write. Raises as that does."""
        with self._handling_save_errors():
            if said := self.chat_memory.redacted(messages):
                self._save_turn(said)

    async def asave_messages(self, messages: list[BaseMessage]) -> None:
        """Store messages as `save_messages` does, without blocking the event loop."""
        await self._store.run_in_worker(self.save_messages, messages)

    def as_history(self) -> WindowHistory:
        """Return this memory as a chat message history, for RunnableWithMessageHistory. No I/O.

        Its `messages` are what this memory shows; what is added to it is stored as `save_context` stores a turn.
        """
        return WindowHistory(self)

    def clear(self) -> None:
        """Delete the conversation's messages and summaries."""
        self.chat_memory.clear()

    async def aclear(self) -> None:
        """Clear as `clear` does, without blocking the event loop."""
        await self._store.run_in_worker(self.clear)

    def for_session(
        self: Memory,
        session_id: str | int | uuid.UUID,
        *,
        user_id: str | int | uuid.UUID | None = None,
        idempotency_key: str | None = None,
    ) -> Memory:
        """Return the same view of another conversation in the same store, for one request. No I/O."""
        history = self.chat_memory.for_session(session_id, user_id=user_id)
        return self.model_copy(update={"chat_memory": history, "idempotency_key": idempotency_key})

    def for_agent(self: Memory, name: str) -> Memory:
        """Return the same view of the log that one of several agents keeps for itself beside this conversation. No I/O.

        See `PostgresChatMessageHistory.for_agent`.
        """
        return self.model_copy(update={"chat_memory": self.chat_memory.for_agent(name)})

    def as_of(self: Memory, message_index: int) -> Memory:
        """Return this view of the conversation as it was when a message was the last one, to be read only. No I/O.

        Saving into it raises ConfigurationError. See `PostgresChatMessageHistory.as_of`.
        """
        return self.model_copy(update={"chat_memory": self.chat_memory.as_of(message_index)})

    # For the memories of this package

    @property
    def _store(self) -> ConversationStore:
        return self.chat_memory.store

    @contextmanager
    def _handling_save_errors(self) -> Iterator[None]:
        """Raise or log what saving fails with, as `on_save_error` says."""
        try:
            yield
        except SAVE_ERRORS as error:
            if self.on_save_error == "raise":
                raise
            self.chat_memory.log_unsaved(error)

    def _save_turn(self, messages: list[BaseMessage]) -> None:
        self._append(messages)

    def _append(
        self,
        messages: list[BaseMessage],
        *,
        counter: EncodingCounter | None = None,
        tags: list[str] | None = None,
        judged_by: str | None = None,
    ) -> None:
        with self.chat_memory.saving(messages, self.idempotency_key) as write_id:
            self._store.append(
                self.chat_memory.key,
                to_stored_messages(messages, counter),
                write_id=write_id,
                tags=tags,
                judged_by=judged_by,
                max_messages=self.chat_memory.max_messages,
            )

    # For each kind of memory to say

    @property
    def _explaining_counter(self) -> EncodingCounter | CustomCounter:
        return EncodingCounter()

    def _verdict_on_head(self, system: Sequence[LoggedMessage], selection: Selection) -> Verdict:
        """Say whether and why the system messages before the first turn are shown."""
        return Verdict("kept", "A system message from before the first turn.")

    def _verdicts(self, turns: Sequence[Turn], selection: Selection) -> list[Verdict]:
        """Say of every turn of the log whether and why it is shown, apart from what no model accepts."""
        name = type(self).__name__
        chosen = {logged.message_index for logged in chain.from_iterable(selection.turns)}
        shown, left_out = Verdict("kept", f"Shown by {name}."), Verdict("left_out", f"Left out by {name}.")
        return [shown if any(logged.message_index in chosen for logged in turn) else left_out for turn in turns]

    def _settings(self, selection: Selection) -> dict[str, Any]:
        """Return the settings that decided, of which the limit is what it came to."""
        return {}

    def _resolved_limit(self, selection: Selection) -> int | None:
        return None

    def _as_text(self, messages: list[BaseMessage]) -> str:
        return self.formatter(messages, self.human_prefix, self.ai_prefix)


def messages_of(parts: Sequence[Sequence[LoggedMessage]]) -> list[BaseMessage]:
    """Return the messages of turns and other parts of a window, in their order."""
    return [logged.message for logged in chain.from_iterable(parts)]
