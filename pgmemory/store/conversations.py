"""Conversations as records: finding them, and what applications keep about them."""

from __future__ import annotations

import json
import uuid
from datetime import timedelta
from typing import Any, Literal

from pgmemory.errors import ConfigurationError, MessageNotStorableError
from pgmemory.models import BEFORE_AGENT, ConversationRecord
from pgmemory.names import check_span
from pgmemory.pool import StoreError
from pgmemory.queries import conversations
from pgmemory.rows import names_of, to_conversation
from pgmemory.store.base import StoreBase

WHOLE_STORE_SECONDS = 3600.0
"""How long a statement may take that reads all messages of a store: somebody waits for it, and may end it."""

_NO_JSON_TEXT = ("22P05", "22P02")  # untranslatable_character, invalid_text_representation
_UNRESTRICTED = dict.fromkeys(
    ("user_id", "session_id", "before_agent", "id", "older_than", "newer_than", "min_messages", "held", "limit")
) | {"offset": 0}


class ConversationOperations(StoreBase):
    """What applications look up: each takes a session id."""

    def list_conversations(
        self,
        *,
        user_id: str | int | uuid.UUID | None = None,
        session_id: str | int | uuid.UUID | None = None,
        older_than: timedelta | None = None,
        newer_than: timedelta | None = None,
        min_messages: int | None = None,
        held: bool | None = None,
        all_tenants: bool = False,
        sort: Literal["updated", "created", "messages", "size"] = "updated",
        with_sizes: bool = False,
        limit: int | None = None,
        offset: int = 0,
    ) -> list[ConversationRecord]:
        """Return this tenant's conversations, last used first.

        Args:
            user_id: Only this user's ('' for those without a user); None for everybody's.
            session_id: Only this conversation and the logs that agents keep beside it; None for all.
            older_than: Only those without a turn for so long.
            newer_than: Only those with a turn since then.
            min_messages: Only those that hold at least so many messages.
            held: Only those that are held, or only those that are not.
            all_tenants: Those of every tenant, not only the store's.
            sort: What comes first: the last used, the last created, the longest or the largest. For the longest and
                the largest, as for `min_messages`, the messages of all conversations are looked at, which may take
                minutes.
            with_sizes: Read their `size_bytes` too.
            limit: At most this many; None for all.
            offset: Leave out this many first.
        """
        for name, value in (("limit", limit), ("offset", offset), ("min_messages", min_messages)):
            if value is not None and (type(value) is not int or not 0 <= value < 2**63):
                raise ConfigurationError(f"{name} must be a whole number from 0, not {value!r}")
        if sort not in conversations.SORTS:
            raise ConfigurationError(f"sort must be one of {', '.join(conversations.SORTS)}, not {sort!r}")
        return self._conversations(
            sort,
            with_sizes=with_sizes or sort == "size",
            tenant_id=self._scope(all_tenants),
            user_id=None if user_id is None else self.key("any", user_id).user_id,
            session_id=None if session_id is None else self.key(session_id).session_id,
            before_agent=BEFORE_AGENT,
            older_than=check_span("older_than", older_than),
            newer_than=check_span("newer_than", newer_than),
            min_messages=min_messages,
            held=held,
            limit=limit,
            offset=offset,
        )

    def find_conversations(
        self, session_id: str | int | uuid.UUID, *, limit: int | None = None
    ) -> list[ConversationRecord]:
        """Return every user's conversation of this name, without the logs that agents keep beside it, last used first.

        Looks at all conversations of the tenant; with its user, `get_conversation` goes straight to the one.
        """
        return self._conversations(session_id=self.key(session_id).session_id, limit=limit)

    def get_conversation(
        self, session_id: str | int | uuid.UUID, *, user_id: str | int | uuid.UUID | None = None
    ) -> ConversationRecord | None:
        """Return one conversation's record, or None if there is no such conversation."""
        found = self._conversations(id=str(self.key(session_id, user_id).id))
        return found[0] if found else None

    def get_metadata(
        self, session_id: str | int | uuid.UUID, *, user_id: str | int | uuid.UUID | None = None
    ) -> dict[str, Any]:
        """Return a conversation's metadata; empty if it has none or there is no such conversation."""
        rows = self._execute("get_metadata", conversations.READ_METADATA, {"id": str(self.key(session_id, user_id).id)})
        metadata: dict[str, Any] = json.loads(rows[0][0]) if rows else {}
        return metadata

    def set_metadata(
        self,
        session_id: str | int | uuid.UUID,
        metadata: dict[str, Any],
        *,
        user_id: str | int | uuid.UUID | None = None,
    ) -> None:
        """Replace a conversation's metadata; the conversation is made if it isn't there.

        Args:
            session_id: The conversation.
            metadata: A JSON object; values that JSON lacks are stored as `pgmemory.serialization` says.
            user_id: Its user.

        Raises:
            MessageNotStorableError: A value has no JSON form, or a text holds NUL or half a surrogate pair.
        """
        from pgmemory.serialization import to_json_text  # imports LangChain, which looking at a store does not need

        if not isinstance(metadata, dict):
            raise ConfigurationError(f"metadata must be a dict, not {type(metadata).__name__}")
        key = self.key(session_id, user_id)
        try:
            parameters = names_of(key) | {
                "metadata": to_json_text(metadata, path="metadata"),
                "time_to_live": self.time_to_live,
            }
            written = self._execute("set_metadata", conversations.SET_METADATA, parameters)
        except StoreError as error:
            if error.sqlstate in _NO_JSON_TEXT:
                raise MessageNotStorableError("metadata", "it holds NUL or half a surrogate pair") from error
            raise
        if not written:
            self._refuse_taken(key)

    def _conversations(
        self, sort: str = "updated", *, with_sizes: bool = False, **given: Any
    ) -> list[ConversationRecord]:
        parameters = _UNRESTRICTED | {"tenant_id": self.tenant_id} | given
        statement = conversations.read_conversations(sort, with_sizes=with_sizes)
        if with_sizes or sort == "messages" or given.get("min_messages"):
            # Reads messages, maybe of all conversations.
            rows = self._transact(
                "list_conversations", lambda execute: execute(statement, parameters), seconds=WHOLE_STORE_SECONDS
            )
        else:
            rows = self._execute("list_conversations", statement, parameters)
        return [to_conversation(row) for row in rows]
