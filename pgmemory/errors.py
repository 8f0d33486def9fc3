"""The errors that pgmemory raises, apart from those of the database.

    PgMemoryError
    ├── ConfigurationError       an argument or an environment variable is wrong (also a ValueError)
    │   └── EncryptionError      what is stored is encrypted, and the store's keyring is missing or does not open it
    ├── ConversationHeldError    the conversation is held: nothing of it is deleted or changed
    ├── MessageNotStorableError  a message holds a value with no JSON form (also a ValueError)
    ├── SchemaError              the database's schema is missing, too old or too new
    ├── SummaryError             the language model gave no summary
    ├── LocalServerError         the embedded PostgreSQL cannot be used: see pgmemory.embedded (also a RuntimeError)
    └── StoreError               the database refused or could not be reached: see pgmemory.pool

A memory's wrong field is pydantic's ValidationError, a ValueError that holds our text.

This module knows nothing of psycopg2, so errors that are also psycopg2's stand in `pgmemory.pool`.
No error text ever holds a password or a whole connection string.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from langchain_core.messages import BaseMessage


@dataclass(frozen=True, slots=True)
class UnsavedTurn:
    """What was to be saved when an error came, for the caller to keep.

    Its write may have taken effect all the same, where only the answer was lost. So save it later under its own key,
    which stores nothing if it is there::

        history.add_messages(turn.messages, idempotency_key=turn.idempotency_key)

    Attributes:
        session_id: The conversation's name.
        user_id: Its user, or ''.
        messages: The messages, oldest first.
        idempotency_key: The caller's name for this write, or one that was made for it.
    """

    session_id: str
    user_id: str
    # Not shown: what people say has no place in logs.
    messages: Sequence[BaseMessage] = field(repr=False)
    idempotency_key: str


class PgMemoryError(Exception):
    """Base of every error that pgmemory raises on purpose.

    Attributes:
        unsaved_turn: What was not saved, if this error ended a save; else None.
    """

    unsaved_turn: UnsavedTurn | None = None


class ConfigurationError(PgMemoryError, ValueError):
    """An argument is wrong: the text says which one, what it was and what is accepted."""


class EncryptionError(ConfigurationError):
    """What is stored is encrypted, and the store has no keyring, or one that does not open it; nothing was written."""


class MessageNotStorableError(PgMemoryError, ValueError):
    """A message holds a value that has no JSON form, or `redact` failed; nothing of its turn was written.

    Attributes:
        path: Where the value sits, for example ``additional_kwargs['client']``.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"cannot store {self.path}: {self.reason}"


class ConversationHeldError(PgMemoryError):
    """A conversation is held, so nothing of it is deleted or changed: the text names it and the reason."""


class SchemaError(PgMemoryError):
    """The schema does not fit this version of pgmemory: the text names the command that mends it."""


class SummaryError(PgMemoryError):
    """The language model gave no summary; nothing was folded."""


class EmbeddingError(PgMemoryError):
    """The embedder failed, or has made what is no vector of its own kind; what was to be made of it waits."""
