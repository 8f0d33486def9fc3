"""What an import takes conversations from."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from pgmemory.models import StoredSummary
from pgmemory.store.transfer import ConversationState, Entry

if TYPE_CHECKING:
    from langchain_core.messages import BaseMessage

Id = str | int | uuid.UUID
"""What a session's or a user's name may be."""

Redact = Callable[[Sequence["BaseMessage"]], Sequence["BaseMessage"]]
"""What rewrites messages before they are stored."""

Skip = Callable[[str, str], object]
"""Told where something stands that cannot be imported, and why; the reason quotes no message."""


@dataclass(frozen=True, slots=True)
class SourceConversation:
    """A conversation to import.

    Attributes:
        place: Where it stands in the source, for reports.
        session_id: Its name.
        user_id: Its user, or None for none.
        messages: Its messages in the order of their numbers; to be read before the next conversation.
        state: All of its row, from an exact source.
        summaries: Its summaries, from an exact source.
    """

    place: str
    session_id: Any
    user_id: Any
    messages: Iterator[Entry]
    state: ConversationState | None = None
    summaries: Sequence[StoredSummary] = ()


class Source(Protocol):
    """What an import takes conversations from.

    Attributes:
        done: How much of it was read, in units of its own.
        total: How much there is, or None while that is not known.
        rows: How many messages, or rows that should hold one, were read.
    """

    rows: int
    done: int
    total: int | None

    def conversations(self, skip: Skip, redact: Redact | None) -> Generator[SourceConversation, None, None]:
        """Yield the conversations; those whose messages are not read to the end are passed over. Is closed at the end.

        Args:
            skip: Told of each message, or row, that cannot be read.
            redact: Applied to each message, which is left out if nothing comes of it; exact sources leave them as they
                are.

        Raises:
            ConfigurationError: The source is not what it should be: the text says where.
        """
