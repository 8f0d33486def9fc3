"""Conversations as records: finding them, and what applications keep about them."""

from __future__ import annotations

import json
import uuid
from typing import Any

from pgmemory.errors import ConfigurationError, MessageNotStorableError
from pgmemory.models import BEFORE_AGENT, ConversationRecord
from pgmemory.pool import StoreError
from pgmemory.queries import conversations
from pgmemory.rows import names_of, to_conversation
from pgmemory.store.base import StoreBase

_NO_JSON_TEXT = ("22P05", "22P02")  # untranslatable_character, invalid_text_representation


class ConversationOperations(StoreBase):
    """What applications look up: each takes a session id."""

    def list_conversations(
        self,
        *,
        user_id: str | int | uuid.UUID | None = None,
        session_id: str | int | uuid.UUID | None = None,
        limit: int | None = None,
        offset: int = 0,
    ) -> list[ConversationRecord]:
        """Return this tenant's conversations, last used first.

        Args:
            user_id: Only this user's ('' for those without a user); None for everybody's.
            session_id: Only this conversation and the logs that agents keep beside it; None for all.
            limit: At most this many; None for all.
            offset: Leave out this many first.
        """
        for name, value in (("limit", limit), ("offset", offset)):
            if value is not None and (type(value) is not int or not 0 <= value < 2**63):
                raise ConfigurationError(f"{name} must be a whole number from 0, not {value!r}")
        user = None if user_id is None else self.key("any", user_id).user_id
        session = None if session_id is None else self.key(session_id).session_id
        return self._conversations(user_id=user, session_id=session, limit=limit, offset=offset)

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
            parameters = names_of(key) | {"metadata": to_json_text(metadata, path="metadata")}
            self._execute("set_metadata", conversations.SET_METADATA, parameters)
        except StoreError as error:
            if error.sqlstate in _NO_JSON_TEXT:
                raise MessageNotStorableError("metadata", "it holds NUL or half a surrogate pair") from error
            raise

    def _conversations(
        self,
        *,
        user_id: str | None = None,
        session_id: str | None = None,
        id: str | None = None,
        limit: int | None = None,
        offset: int = 0,
    ) -> list[ConversationRecord]:
        parameters = {
            "tenant_id": self.tenant_id,
            "user_id": user_id,
            "session_id": session_id,
            "before_agent": BEFORE_AGENT,
            "id": id,
            "limit": limit,
            "offset": offset,
        }
        rows = self._execute("list_conversations", conversations.READ_CONVERSATIONS, parameters)
        return [to_conversation(row) for row in rows]


