"""Rows to records and back: what the columns of `queries`' statements mean. It runs no statement."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

from pgmemory.models import ConversationKey, ConversationRecord, StoredMessage, StoredSummary, Window
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
) -> dict[str, Any]:
    """Return the parameters of `queries.log.APPEND` and `PRUNE`."""
    return names_of(key) | {
        "message_count": len(messages),
        "keeps_summary": keeps_summary,
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
