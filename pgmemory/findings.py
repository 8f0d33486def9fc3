"""Frozen records of what looking at a store finds: messages and where they stand, hits of a search, what was counted.

Nothing here knows LangChain or SQL.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, datetime
from typing import NamedTuple

from pgmemory.models import ConversationKey, StoredMessage


class FoundMessage(NamedTuple):
    """A message, and the conversation in which it stands."""

    key: ConversationKey
    message: StoredMessage


@dataclass(frozen=True, slots=True)
class Hit:
    """A message in which a text was found.

    Attributes:
        tenant_id: Its tenant, or ''.
        user_id: Its user, or ''.
        session_id: Its conversation's name.
        message_index: Its number in the conversation.
        role: As `StoredMessage.role`.
        created_at: When it was stored (aware).
        excerpt: The first place where its content holds the text, with what stands around it.
        found_at: Where in the excerpt the text begins.
        found_length: How long it is there.
        is_start: Whether the excerpt begins as the content does.
        is_end: Whether it ends as the content does.
    """

    tenant_id: str
    user_id: str
    session_id: str
    message_index: int
    role: str
    created_at: datetime
    excerpt: str
    found_at: int
    found_length: int
    is_start: bool
    is_end: bool


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What a search has found.

    Attributes:
        hits: Newest first.
        searched: In how many conversations was searched.
        encrypted: How many conversations were left out because they are encrypted.
    """

    hits: tuple[Hit, ...]
    searched: int
    encrypted: int


@dataclass(frozen=True, slots=True)
class DayOfGrowth:
    """What came on a day, in UTC: conversations that were made, and messages; of both those that are still there."""

    day: date
    conversations: int
    messages: int


@dataclass(frozen=True, slots=True)
class TableSize:
    """How many bytes of disk a table takes, with its large values, and its indexes."""

    name: str
    table_bytes: int
    index_bytes: int


@dataclass(frozen=True, slots=True)
class Statistics:
    """How much is stored.

    Attributes:
        conversations: How many, the logs that agents keep beside them included.
        users: How many users have one; conversations without a user are nobody's.
        messages: How many messages they hold.
        turns: How many of them are human: each begins a turn.
        tokens: Their tokens, as far as they were counted, whatever with.
        uncounted_messages: How many messages bear no count.
        held: How many conversations are held.
        expired: How many have outlived their own time to live, and are not held.
        encrypted: Of how many new messages are encrypted.
        days: The last days, oldest first, the current one included.
        tables: Tables of the schema, largest first: of all tenants together.
    """

    conversations: int
    users: int
    messages: int
    turns: int
    tokens: int
    uncounted_messages: int
    held: int
    expired: int
    encrypted: int
    days: tuple[DayOfGrowth, ...]
    tables: tuple[TableSize, ...]
