"""Rows to records and back: what the columns of `queries`' statements mean. It runs no statement."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

from pgmemory.models import ConversationKey, ConversationRecord, Edit, StoredMessage, StoredSummary, Window
from pgmemory.queries import windows


class WrappedKey(Protocol):
    """A conversation's key as `encryption` wraps it."""

    @property
    def master_key_name(self) -> str:
        """The master key that opens it."""

    @property
    def wrapped_key(self) -> bytes:
        """The key, encrypted."""


class Opener(Protocol):
    """What opens encrypted content, as `encryption` makes it."""

    def message(self, message: StoredMessage, sealed_with: Sequence[str]) -> StoredMessage:
        """Return a message in clear text."""

    def summary(self, content: str, sealed_with: Sequence[str]) -> str | None:
        """Return a summary's text, None if its key was erased."""


def names_of(key: ConversationKey) -> dict[str, Any]:
    """Return the parameters that name a conversation that may have to be made."""
    return {"id": str(key.id), "tenant_id": key.tenant_id, "user_id": key.user_id, "session_id": key.session_id}


def append_parameters(
    key: ConversationKey,
    messages: Sequence[StoredMessage],
    write_id: uuid.UUID,
    *,
    tags: Sequence[str] | None = None,
    judged_by: str | None = None,
    max_messages: int | None = None,
    keeps_summary: bool = False,
    time_to_live: timedelta | None = None,
    data_key: WrappedKey | None = None,
) -> dict[str, Any]:
    """Return the parameters of `queries.log.APPEND`, of those for encrypted messages, and `PRUNE`."""
    return names_of(key) | {
        "key_id": None,
        "master_key_name": data_key and data_key.master_key_name,
        "wrapped_key": data_key and data_key.wrapped_key,
        "message_count": len(messages),
        "keeps_summary": keeps_summary,
        "time_to_live": time_to_live,
        "write_id": str(write_id),
        "tags": None if tags is None else list(tags),
        "judged_by": judged_by,
        "max_messages": max_messages,
        "roles": [message.role for message in messages],
        "contents": [message.content for message in messages],
        "additional_kwargs": [message.additional_kwargs for message in messages],
        "extras": [message.extra for message in messages],
        "token_counts": [message.token_count for message in messages],
        "token_encodings": [message.token_encoding for message in messages],
    }


def edit_parameters(key: ConversationKey, edit: Edit, turns: Sequence[StoredMessage]) -> dict[str, Any]:
    """Return the parameters of `queries.editing.APPLY_EDIT` for an edit of these turns."""
    changed = [*edit.deleted, *(message.message_index for message in edit.put if message.message_index is not None)]
    return {
        "id": str(key.id),
        "tenant_id": key.tenant_id,
        "deleted": list(edit.deleted),
        "moved_from": edit.moved_from,
        "moved_by": edit.moved_by,
        "first": turns[0].message_index,
        "last": turns[-1].message_index,
        "edited_from": min(changed),
        "indexes": [message.message_index for message in edit.put],
        "roles": [message.role for message in edit.put],
        "contents": [message.content for message in edit.put],
        "additional_kwargs": [message.additional_kwargs for message in edit.put],
        "extras": [message.extra for message in edit.put],
        "times": [message.created_at for message in edit.put],
    }


def to_message(row: Sequence[Any], opener: Opener) -> StoredMessage:
    """Return the message in the columns of a statement that reads messages, in clear text."""
    *columns, sealed_with = row
    message = StoredMessage(*columns)
    if sealed_with is not None:
        return opener.message(message, sealed_with)
    return message if message.tags is None else message._replace(tags=tuple(message.tags))


def to_summary(row: Sequence[Any], opener: Opener) -> StoredSummary | None:
    """Return the summary in a row of the columns of a message, in clear text; None if its key was erased."""
    _, content, *_, covers_through, created_at, sealed_with = row
    content = content if sealed_with is None else opener.summary(content, sealed_with)
    return None if content is None else StoredSummary(content, covers_through, created_at)


def to_window(rows: Sequence[Sequence[Any]], opener: Opener) -> Window:
    """Return the window in the rows of a statement that reads one, in clear text."""
    system: list[StoredMessage] = []
    messages: list[StoredMessage] = []
    complete = True
    summary = state = None
    for part, done, *columns in rows:
        complete = complete and not done
        if part == windows.PART_PREAMBLE:
            system.append(to_message(columns, opener))
        elif part == windows.PART_WINDOW:
            messages.append(to_message(columns, opener))
        elif part == windows.PART_SUMMARY:
            summary = to_summary(columns, opener)
        else:
            state = columns[1]
    return Window(tuple(system), tuple(messages), complete, summary, state)


def to_conversation(row: Sequence[Any]) -> ConversationRecord:
    """Return the conversation in a row of `queries.conversations.READ_CONVERSATIONS`."""
    session_id, user, tenant, metadata, *others = row
    return ConversationRecord(session_id, user, tenant, json.loads(metadata), *others)
