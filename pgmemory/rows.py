"""Rows to records and back: what the columns of `queries`' statements mean. It runs no statement."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from pgmemory.models import ConversationKey, ConversationRecord, Edit, StoredMessage, StoredSummary, Window
from pgmemory.queries import windows


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
) -> dict[str, Any]:
    """Return the parameters of `queries.log.APPEND` and `PRUNE`."""
    return names_of(key) | {
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


def to_message(row: Sequence[Any]) -> StoredMessage:
    """Return the message in the columns of a statement that reads messages."""
    message = StoredMessage._make(row)
    return message if message.tags is None else message._replace(tags=tuple(message.tags))


def to_window(rows: Sequence[Sequence[Any]]) -> Window:
    """Return the window in the rows of a statement that reads one."""
    system: list[StoredMessage] = []
    messages: list[StoredMessage] = []
    complete = True
    summary = state = None
    for part, done, *columns in rows:
        message = to_message(columns)
        complete = complete and not done
        if part == windows.PART_PREAMBLE:
            system.append(message)
        elif part == windows.PART_WINDOW:
            messages.append(message)
        elif part == windows.PART_SUMMARY:
            summary = StoredSummary(message.content, columns[-2], columns[-1])
        else:
            state = message.content
    return Window(tuple(system), tuple(messages), complete, summary, state)


def to_conversation(row: Sequence[Any]) -> ConversationRecord:
    """Return the conversation in a row of `queries.conversations.READ_CONVERSATIONS`."""
    session_id, user, tenant, metadata, *others = row
    return ConversationRecord(session_id, user, tenant, json.loads(metadata), *others)
