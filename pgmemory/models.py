"""Frozen records: rows as typed, immutable values, and what a store tells of its work.

Nothing here knows LangChain or SQL.
"""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any, NamedTuple

# The namespace of every id that is derived from names; changing it would orphan all stored rows.
_NAMESPACE = uuid.UUID("6f1f4c1e-6d0c-5c4e-9d5e-0b1f6a7f3d52")


AFTER_ALL = 2**31 - 1
"""An index above every message's."""

BEFORE_AGENT = "#agent:"
"""Stands between a session id and the name of an agent that keeps a log of its own beside the conversation."""

# PostgreSQL's text cannot hold NUL, and UTF-8 cannot encode surrogates.
_NOT_TEXT = re.compile("[\x00\ud800-\udfff]")


def readable(text: str) -> str:
    """Return a text as PostgreSQL can keep it: what it cannot becomes U+FFFD."""
    if "\x00" not in text:
        try:
            text.encode()
            return text
        except UnicodeEncodeError:
            pass
    return _NOT_TEXT.sub("\N{REPLACEMENT CHARACTER}", text)


@dataclass(frozen=True)
class ConversationKey:
    """The three names that make a conversation: nobody reaches another user's with a session id alone."""

    tenant_id: str
    user_id: str
    session_id: str

    @cached_property
    def id(self) -> uuid.UUID:
        """The conversation's primary key: UUID version 5 (RFC 9562) of the three names."""
        # JSON keeps ("a", "b:c") and ("a:b", "c") apart, which joining with any separator would not.
        return uuid.uuid5(_NAMESPACE, json.dumps([self.tenant_id, self.user_id, self.session_id]))

    def of_agent(self, name: str) -> ConversationKey:
        """Return the key of the log that an agent keeps beside this conversation."""
        return ConversationKey(self.tenant_id, self.user_id, f"{self.session_id}{BEFORE_AGENT}{name}")

    def write_id(self, idempotency_key: str) -> uuid.UUID:
        """Return the write id that stands for a caller's own key in this conversation."""
        return uuid.uuid5(self.id, idempotency_key)


class StoredMessage(NamedTuple):
    """One message as its row holds it. A tuple, which is made several times as fast as a frozen dataclass.

    Attributes:
        role: LangChain's message type: ``human``, ``ai``, ``system``, ``tool``, ``function``, ``chat`` or ``remove``.
        content: What a person reads.
        additional_kwargs: JSON text of the message's ``additional_kwargs``, or None if it has none.
        extra: JSON text of everything else that `content` cannot carry exactly, or None for a plain message.
        tags: Keywords found in the turn; None if no relevant turn was recognised here.
        judged_by: Fingerprint of the rule that `tags` come from, or None.
        token_count: Tokens of this message under `token_encoding`, or None if it was not counted.
        token_encoding: Name of the encoding `token_count` was made with, or None.
        message_index: Its number in the conversation (gapless when written), or None before it is stored.
        created_at: When the server stored it (aware), or None before it is stored.
        is_erased: Its content is gone, for the key that encrypted it was erased: role, number, tokens and times are
            left.
    """

    role: str
    content: str
    additional_kwargs: str | None = None
    extra: str | None = None
    tags: tuple[str, ...] | None = None
    judged_by: str | None = None
    token_count: int | None = None
    token_encoding: str | None = None
    message_index: int | None = None
    created_at: datetime | None = None
    is_erased: bool = False


@dataclass(frozen=True, slots=True)
class StoredSummary:
    """The newest summary of a conversation.

    Attributes:
        content: Its text.
        covers_through: Index of the last message that it covers.
        created_at: When it took effect (aware).
    """

    content: str
    covers_through: int
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Window:
    """What one read of a conversation found, all of it in the order of the log.

    Attributes:
        system: System messages of the preamble, which every window shows.
        messages: Other messages, neighbours in the log, except that turns which the query left out are missing.
        complete: Nothing further lies in the direction of the read: towards older messages, or, for what is still
            to be summarised, towards newer ones.
        summary: The newest summary, if the query asks for it and there is one.
        state: What a summary's taking effect is compared with, if the query asks for it; None without a conversation.
    """

    system: tuple[StoredMessage, ...]
    messages: tuple[StoredMessage, ...]
    complete: bool
    summary: StoredSummary | None = None
    state: str | None = None


@dataclass(frozen=True, slots=True)
class LogState:
    """A conversation as it was when a turn had been said.

    Attributes:
        message: The last message of the turn, or of what stands before the first one: when it was stored is when.
        summary: The newest summary that covers nothing beyond it; None if there is none.
    """

    message: StoredMessage
    summary: StoredSummary | None

    @property
    def message_index(self) -> int:
        """The number of its last message, at which it can be forked and read."""
        assert self.message.message_index is not None, "it is stored"
        return self.message.message_index


@dataclass(frozen=True, slots=True)
class Edit:
    """A change of messages that were stored.

    Attributes:
        deleted: The numbers of messages that go, ascending.
        put: Messages, with their numbers, that take the place of those of these numbers, or are new.
        moved_from: From this number on what follows moves up, to make room for new ones.
        moved_by: By how much.
    """

    deleted: tuple[int, ...] = ()
    put: tuple[StoredMessage, ...] = ()
    moved_from: int = AFTER_ALL
    moved_by: int = 0


@dataclass(frozen=True, slots=True)
class ConversationRecord:
    """A conversation as its row holds it.

    Attributes:
        session_id: Its name in the application.
        user_id: Its user, or ''.
        tenant_id: Its tenant, or ''.
        metadata: The application's own notes about it.
        created_at: When it was created (aware).
        updated_at: When its last turn was stored (aware).
        message_count: How many messages it holds now.
        next_message_index: The number that its next message gets.
        summarized_through: Index of the last message that a summary covers or a clearing removed; -1 if none.
        time_to_live: How long after its last turn pruning removes it, or None.
        held_at: Since when it is held, so that nothing of it is deleted or changed (aware), or None.
        hold_reason: Why, or None.
        is_encrypted: Whether new messages are encrypted.
        size_bytes: How many bytes the content of its messages takes as stored, compressed; None if not asked for.
    """

    session_id: str
    user_id: str
    tenant_id: str
    metadata: dict[str, Any]
    created_at: datetime
    updated_at: datetime
    message_count: int
    next_message_index: int
    summarized_through: int
    time_to_live: timedelta | None
    held_at: datetime | None
    hold_reason: str | None
    is_encrypted: bool
    size_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Item:
    """A JSON object that is kept under a namespace and a key.

    Attributes:
        namespace: Where it is kept, from the outermost label to the innermost.
        key: Its name there.
        value: The object.
        created_at: When it was first put (aware).
        updated_at: When it was last put (aware).
        expires_at: When it expires if it is neither read nor put before (aware); None for never.
        score: How well a search found it, the larger the better, by meaning the cosine similarity; None if no text was
            searched for, or its meaning is not known.
    """

    namespace: tuple[str, ...]
    key: str
    value: dict[str, Any]
    created_at: datetime
    updated_at: datetime
    expires_at: datetime | None = None
    score: float | None = None


@dataclass(frozen=True, slots=True)
class Pruned:
    """What pruning has deleted, or would delete.

    Attributes:
        conversations: Whole conversations.
        messages: Messages in them.
        summaries: Summaries of them.
        held: Conversations that are idle too, but held, and so are kept.
        items: Items: those of these conversations, and those that have expired.
    """

    conversations: int
    messages: int
    summaries: int
    held: int
    items: int = 0


@dataclass(frozen=True, slots=True)
class ErasedConversation:
    """One conversation that is gone, and how much it held."""

    session_id: str
    messages: int
    summaries: int
    items: int = 0


@dataclass(frozen=True, slots=True)
class Erased:
    """The receipt of an erasure.

    Attributes:
        tenant_id: The tenant, or ''.
        user_id: The user, or ''.
        session_id: The one conversation that was to be erased, or None for all of the user's.
        conversations: What was erased, agents' logs among them.
        held: Session ids of those that are held, and so were kept.
        items: Items that belonged to none of these conversations: the user's own, or of a session without messages.
    """

    tenant_id: str
    user_id: str
    session_id: str | None
    conversations: tuple[ErasedConversation, ...]
    held: tuple[str, ...]
    items: int = 0


@dataclass(frozen=True, slots=True)
class Operation:
    """What a store has just done, as `on_operation` is told.

    Attributes:
        name: Which: the name of a method of the store, such as ``append``, or a part of `setup`.
        seconds: How long it took, with waiting for a connection and with retries.
        rows: Rows that its last statement read or wrote; 0 if it failed.
        retries: How often it was tried again.
        error: What it ended with, or None.
    """

    name: str
    seconds: float
    rows: int
    retries: int
    error: BaseException | None


@dataclass(frozen=True, slots=True)
class PoolStats:
    """How the connections of a pool are used, and what has happened since it was made.

    Attributes:
        max_connections: How many there are at most.
        connections: How many there are: idle, in use, or being opened.
        idle: How many of them are free.
        in_use: How many of them are lent.
        waiting: Callers that wait for one now.
        opened: Connections opened so far.
        lost: Connections that broke so far.
        waits: Times that a caller had to wait for a connection.
        waited_seconds: How long they waited, together.
        timeouts: How many of them waited in vain.
    """

    max_connections: int
    connections: int
    idle: int
    in_use: int
    waiting: int
    opened: int
    lost: int
    waits: int
    waited_seconds: float
    timeouts: int
