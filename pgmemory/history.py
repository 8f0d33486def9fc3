"""A conversation's log as LangChain's chat message history: the log itself, exactly, never a view of it."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from traceback import walk_tb

from langchain_core.chat_history import BaseChatMessageHistory
from langchain_core.messages import BaseMessage

from pgmemory import edits
from pgmemory.errors import (
    ConfigurationError,
    EncryptionError,
    MessageNotStorableError,
    PgMemoryError,
    SchemaError,
    UnsavedTurn,
)
from pgmemory.logged import to_logged, to_stored_messages
from pgmemory.models import AFTER_ALL, LogState
from pgmemory.names import text_id
from pgmemory.pool import StoreError
from pgmemory.serialization import to_message
from pgmemory.store import ConversationStore

_logger = logging.getLogger(__name__)

SAVE_ERRORS = (StoreError, SchemaError, EncryptionError, MessageNotStorableError)
"""What a save fails with though it was asked for rightly; each carries the turn."""


class PostgresChatMessageHistory(BaseChatMessageHistory):
    """All messages of one conversation, in the order in which they were stored.

    Building one does no I/O and costs microseconds: make one per request. Nothing is kept between calls, so every
    worker sees what the others wrote. Safe to use from several threads. In a running event loop use the ``a…``
    methods: the others block it.

    Args:
        session_id: The conversation's name in the application: any non-empty text, an int or a UUID.
        store: Where it is kept.
        user_id: Its user; another user's conversation of the same name is another one.
        max_messages: Keep at most this many messages: with each write, oldest whole turns are deleted. The newest
            turn is kept whole even if it is longer, and so are system messages before the first turn and what a
            summary has yet to cover. None keeps everything.

    Raises:
        ConfigurationError: An argument is wrong.
    """

    def __init__(
        self,
        session_id: str | int | uuid.UUID,
        store: ConversationStore,
        *,
        user_id: str | int | uuid.UUID | None = None,
        max_messages: int | None = None,
    ) -> None:
        if not isinstance(store, ConversationStore):
            raise ConfigurationError(f"store must be a ConversationStore, not {type(store).__name__}")
        if max_messages is not None and (type(max_messages) is not int or max_messages < 1):
            raise ConfigurationError(f"max_messages must be a whole number from 1, or None, not {max_messages!r}")
        self.store = store
        self.key = store.key(session_id, user_id)
        self.max_messages = max_messages
        self.before = AFTER_ALL  # above the newest message that is read; see `as_of`

    @property
    def session_id(self) -> str:
        """The conversation's name, as text."""
        return self.key.session_id

    @property
    def user_id(self) -> str:
        """Its user, as text; '' for none."""
        return self.key.user_id

    @property
    def messages(self) -> list[BaseMessage]:  # type: ignore[override]  # LangChain declares an attribute
        """All messages, oldest first, read anew each time; a new list that may be changed freely.

        Messages whose key was erased are left out.
        """
        records = self.store.read_all(self.key, before=self.before)
        return [to_message(stored) for stored in records if not stored.is_erased]

    async def aget_messages(self) -> list[BaseMessage]:
        """Return all messages, oldest first, without blocking the event loop."""
        return await self.store.run_in_worker(lambda: self.messages)

    def add_messages(self, messages: Sequence[BaseMessage], *, idempotency_key: str | None = None) -> None:
        """Append messages in one transaction and one round trip: all of them, as neighbours, or none.

        Args:
            messages: In the order in which they were said; none is no write.
            idempotency_key: The caller's name for this write. While the messages stored under it are kept, writing
                again under the same key in this conversation stores nothing.

        Raises:
            MessageNotStorableError: A message holds a value without a JSON form, or the store's `redact` failed;
                nothing was written.
            StoreError: The database refused, and nothing was written, or could not be reached. Like every error of
                saving it carries the turn as `unsaved_turn`. It is logged too, since RunnableWithMessageHistory
                swallows it.
        """
        try:
            said = self.redacted(messages)
            if not said:
                return
            with self.saving(said, idempotency_key) as write_id:
                stored = to_stored_messages(said)
                self.store.append(self.key, stored, write_id=write_id, max_messages=self.max_messages)
        except SAVE_ERRORS as error:
            self.log_unsaved(error)
            raise

    async def aadd_messages(self, messages: Sequence[BaseMessage], *, idempotency_key: str | None = None) -> None:
        """Append messages as `add_messages` does, without blocking the event loop."""
        await self.store.run_in_worker(self.add_messages, messages, idempotency_key=idempotency_key)

    def add_message(self, message: BaseMessage) -> None:
        """Append one message."""
        self.add_messages([message])

    def clear(self) -> None:
        """Delete the conversation's messages and summaries; its metadata and its numbering stay."""
        self.check_writable()
        self.store.clear(self.key)

    async def aclear(self) -> None:
        """Clear as `clear` does, without blocking the event loop."""
        await self.store.run_in_worker(self.clear)

    def clear_with_agents(self) -> None:
        """Clear this conversation and the logs that agents keep beside it, in one transaction."""
        self.check_writable()
        self.store.clear_with_agents(self.key)

    def delete_messages(self, which: Sequence[int | str]) -> list[int]:
        """Delete messages, each with what stands and falls with it.

        A human message goes with its turn, a tool call with its results, a result with its call. Summaries that cover
        what is deleted are dropped with it, and what is left of what they covered is summarised again. One transaction.

        Args:
            which: Numbers of messages in the log (`StoredMessage.message_index`), or the ids that messages bear; those
                that are not there are passed over.

        Returns:
            The numbers of the messages that were deleted, ascending.

        Raises:
            ConversationHeldError: The conversation is held; nothing was deleted.
            StoreError: The database refused, and nothing was deleted, or could not be reached.
        """
        return self._delete(which, whole_turns=False)

    def delete_turns(self, which: Sequence[int | str]) -> list[int]:
        """Delete the turns in which messages stand; else as `delete_messages`. Nothing of the preamble is deleted."""
        return self._delete(which, whole_turns=True)

    def delete_last_turn(self) -> list[int]:
        """Undo the last turn: delete the newest one; else as `delete_messages`."""
        self.check_writable()
        return list(self.store.edit_turns(self.key, [AFTER_ALL - 1], edits.last_turn).deleted)

    def replace_message(self, which: int | str, message: BaseMessage | str) -> None:
        """Put a message in another's place; its number, its time and the id of its write stay.

        Args:
            which: The other's number in the log, or the id that it bears.
            message: Of the same role, and with the same tool calls, or the answer to the same call; or a text, which
                becomes the other's content, with all else of it as it was.

        Raises:
            ConfigurationError: There is no such message, or the new one would tear apart what belongs together.
            MessageNotStorableError: The new one holds a value without a JSON form; nothing was changed.
            ConversationHeldError: The conversation is held; nothing was changed.
            StoreError: The database refused, and nothing was changed, or could not be reached.
        """
        self.check_writable()
        index = self._number(which)
        decide = partial(edits.replacement, index=index, message=message, rewrite=self.redacted)
        self.store.edit_turns(self.key, [index], decide)

    def replace_turn(self, which: int | str, messages: Sequence[BaseMessage]) -> None:
        """Put other messages in the place of a turn's; those that follow move up if they are more.

        Args:
            which: The number in the log, or the id, of one of the turn's messages.
            messages: The new turn, oldest first: a human message and no other one.

        Raises:
            ConfigurationError: There is no such turn, or `messages` are none; else as `replace_message`.
        """
        said = self.redacted(messages)
        index = self._number(which)
        self.store.edit_turns(self.key, [index], lambda stored: edits.turn_replacement(stored, index, said))

    def _delete(self, which: Sequence[int | str], *, whole_turns: bool) -> list[int]:
        self.check_writable()
        indexes = self._numbers(which)
        if not indexes:
            return []
        decide = partial(edits.deletion, indexes=indexes, whole_turns=whole_turns)
        return list(self.store.edit_turns(self.key, indexes, decide).deleted)

    def _numbers(self, which: Sequence[int | str]) -> list[int]:
        """Return the numbers of messages; for ids the whole log is read."""
        if isinstance(which, str) or not all(type(one) in (int, str) for one in which):
            raise ConfigurationError("give a list of messages' numbers or ids")
        numbers = {one for one in which if isinstance(one, int)}
        if ids := {one for one in which if isinstance(one, str)}:
            logged = (to_logged(stored) for stored in self.store.read_all(self.key))
            numbers |= {one.message_index for one in logged if one.message.id in ids}
        return sorted(number for number in numbers if 0 <= number < AFTER_ALL)

    def _number(self, which: int | str) -> int:
        numbers = self._numbers([which])
        if len(numbers) != 1:
            raise ConfigurationError(f"session {self.session_id!r} has {len(numbers)} messages {which!r}, not one")
        return numbers[0]

    def for_agent(self, name: str) -> PostgresChatMessageHistory:
        """Return the history of the log that one of several agents keeps for itself beside this conversation. No I/O.

        It is the conversation ``session_id#agent:name`` of the same user. `clear_with_agents` clears them together, and
        ``store.list_conversations(session_id=…)`` lists them together: all whose names begin so. Both walk through
        the user's conversations.

        Raises:
            ConfigurationError: The name is not usable.
        """
        return self.for_session(self.key.of_agent(text_id("agent's name", name)).session_id, user_id=self.user_id)

    def for_session(
        self, session_id: str | int | uuid.UUID, *, user_id: str | int | uuid.UUID | None = None
    ) -> PostgresChatMessageHistory:
        """Return a history of the same kind of another conversation in the same store. No I/O."""
        return type(self)(session_id, self.store, user_id=user_id, max_messages=self.max_messages)

    # Branches and time

    def as_of(self, message_index: int) -> PostgresChatMessageHistory:
        """Return this history as it was when a message was the last one, to be read only. No I/O.

        It shows what is there now up to that message, and of the summaries those that cover nothing beyond it: just
        what would be left if all that follows were deleted.

        Args:
            message_index: The message's number, as `states` or records have it; -1 for before the first one.
        """
        if type(message_index) is not int or not -1 <= message_index < AFTER_ALL:
            raise ConfigurationError(f"as_of needs a message's number, or -1, not {message_index!r}")
        past = copy(self)
        past.before = min(self.before, message_index + 1)
        return past

    def fork(self, session_id: str | int | uuid.UUID, *, at: int | str | None = None) -> PostgresChatMessageHistory:
        """Make a new conversation that begins with this one's messages, and return its history.

        Of the same user; see `ConversationStore.fork` for what is copied, and for forking again.

        Args:
            session_id: The new conversation's name; an agent's log may bear that of an agent's log, too.
            at: Number of the last message that is copied, or the id that it bears; -1 for none. None for all, or all
                that a history `as_of` a message shows. To let the human say something else, the last one before.

        Raises:
            ConfigurationError: There is no such conversation or message, already a conversation of the new name, or it
                is that of an agent's log.
            StoreError: The database refused, and nothing was written, or could not be reached.
        """
        through = self._number(at) if isinstance(at, str) else at
        if self.before < AFTER_ALL:
            through = self.before - 1 if through is None else min(through, self.before - 1)
        self.store.fork(self.key, session_id, at=through)
        return self.for_session(session_id, user_id=self.user_id)

    def states(self) -> Iterator[LogState]:
        """Yield the conversation's states, newest first: its last message after each turn, and the summary then.

        A hundred for each round trip, made when they are asked for.
        """
        return self.store.read_states(self.key, before=self.before)

    def check_writable(self) -> None:
        """Raise ConfigurationError if this is a history `as_of` a message, which can only be read."""
        if self.before < AFTER_ALL:
            raise ConfigurationError(
                f"session {self.session_id!r} as of message {self.before - 1} can only be read: "
                "go on from there in a fork of it"
            )

    def redacted(self, messages: Iterable[BaseMessage]) -> list[BaseMessage]:
        """Return the messages of one write as the store's `redact` rewrites them; as they are if it has none.

        Each write passes here once, before anything else is done with its messages.

        Raises:
            ConfigurationError: This is a history `as_of` a message.
            MessageNotStorableError: The function failed or returned no messages. The error holds nothing of them, and
                carries no `unsaved_turn`.
        """
        self.check_writable()
        said = as_list(messages)
        if self.store.redact is None or not said:
            return said
        try:
            rewritten = list(self.store.redact(said))
        except Exception as error:
            origin = _origin(error)
        else:
            for position, message in enumerate(rewritten):
                if not isinstance(message, BaseMessage):
                    raise MessageNotStorableError(
                        f"messages[{position}]", f"redact must return messages, not a {type(message).__name__}"
                    )
            return rewritten
        # Not while the function's error is handled: its text may quote what was said, and tracebacks show the context.
        raise MessageNotStorableError("messages", f"redact failed: {origin}")

    @contextmanager
    def saving(self, messages: Sequence[BaseMessage], idempotency_key: str | None) -> Iterator[uuid.UUID]:
        """Give one write its id: a new one, or the one that a caller's key stands for.

        An error of saving that leaves the block carries the turn, unless a store that redacts was given an object that
        cannot be stored: that one could not be redacted either.

        Raises:
            ConfigurationError: The key is not usable.
        """
        key = uuid.uuid4().hex if idempotency_key is None else idempotency_key
        if not isinstance(key, str) or not key:
            raise ConfigurationError(f"idempotency_key must be non-empty text or None, not {key!r}")
        try:
            write_id = self.key.write_id(key)
        except UnicodeEncodeError:
            raise ConfigurationError(f"idempotency_key {key!r} holds half a surrogate pair") from None
        try:
            yield write_id
        except SAVE_ERRORS as error:
            if self.store.redact is None or not isinstance(error, MessageNotStorableError):
                error.unsaved_turn = UnsavedTurn(self.session_id, self.user_id, tuple(messages), key)
            raise

    def log_unsaved(self, error: Exception) -> None:
        """Log at level ERROR that a turn was not saved; the record has it as its attribute `unsaved_turn`."""
        turn = error.unsaved_turn if isinstance(error, PgMemoryError) else None
        reason = error if isinstance(error, PgMemoryError) else repr(error)
        _logger.error("session %r: a turn was not saved: %s", self.session_id, reason, extra={"unsaved_turn": turn})

    def __repr__(self) -> str:
        if "key" not in self.__dict__:
            return f"<{type(self).__name__} that was not built>"  # as error trackers show the frame of __init__
        user = f", user_id={self.user_id!r}" if self.user_id else ""
        limit = f", max_messages={self.max_messages}" if self.max_messages else ""
        past = f".as_of({self.before - 1})" if self.before < AFTER_ALL else ""
        return f"PostgresChatMessageHistory({self.session_id!r}, {self.store!r}{user}{limit}){past}"


def as_list(messages: Iterable[BaseMessage]) -> list[BaseMessage]:
    """Return messages as a list.

    Raises:
        ConfigurationError: It is a single message.
    """
    if isinstance(messages, BaseMessage):
        raise ConfigurationError(f"give a list of messages, not a single {type(messages).__name__}")
    return list(messages)


def _origin(error: Exception) -> str:
    """Return an error's type and the place where it was raised, without its text."""
    *_, (frame, line) = walk_tb(error.__traceback__)
    return f"{type(error).__name__} at {frame.f_code.co_filename}:{line}"
