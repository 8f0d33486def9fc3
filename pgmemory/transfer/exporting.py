"""Exporting: conversations as JSON Lines, exactly, or as OpenAI's chat messages; a page of messages in memory."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any, BinaryIO, Literal

from pgmemory.errors import ConfigurationError
from pgmemory.models import StoredMessage
from pgmemory.store import ConversationStore
from pgmemory.store.base import FIRST_ID
from pgmemory.store.transfer import Entry, Scope, Snapshot

FORMAT = "pgmemory conversations"
VERSION = 1

Format = Literal["jsonl", "openai"]


@dataclass(slots=True)
class ExportReport:
    """What was exported.

    Attributes:
        conversations: How many.
        messages: How many in them.
        left_out: Messages that the format has no form for, and those whose key was erased.
    """

    conversations: int = 0
    messages: int = 0
    left_out: int = 0


def export_conversations(
    store: ConversationStore,
    file: BinaryIO,
    *,
    format: Format = "jsonl",
    user_id: str | int | uuid.UUID | None = None,
    session_id: str | int | uuid.UUID | None = None,
    all_tenants: bool = False,
    on_progress: Callable[[int, int | None], object] | None = None,
) -> ExportReport:
    """Write conversations to a file as JSON Lines, in clear text, whether they are encrypted in the database or not.

    ``jsonl`` is exact: a header line; then each conversation's row, its summaries and its messages, a line each; then a
    line that says that this is all. Imported into an empty store and exported again, it is the same, byte for byte.

    ``openai`` is one line a conversation: ``{"session_id", "user_id", "messages"}``, the messages in OpenAI's chat
    form. Lost are ids, times, usage, other metadata, artifacts, tags, summaries and what such messages have no field
    for; RemoveMessages are left out.

    Items are not exported, in neither form.

    A conversation of up to a thousand messages is written as it was at one moment. Of a longer one that holds for its
    row and summaries; later turns are not among its messages, but what is deleted, edited or pruned while it is being
    written may be missing.

    Args:
        store: Where they are.
        file: Where to; opened for writing bytes.
        format: ``jsonl`` or ``openai``.
        user_id: Only this user's; None for everybody's, '' for those without a user.
        session_id: Only this conversation, of the user or of none, and the logs that agents keep beside it.
        all_tenants: Those of every tenant, not only the store's.
        on_progress: Called after each page with how many messages were passed, about, and how many there are.

    Raises:
        ConfigurationError: An argument is wrong.
        StoreError: The database refused or could not be reached; what was written is not whole.
    """
    if format not in ("jsonl", "openai"):
        raise ConfigurationError(f"format must be 'jsonl' or 'openai', not {format!r}")
    names: dict[str, str] = {}
    if session_id is not None:
        key = store.key(session_id, user_id)
        names = {"session_id": key.session_id, "user_id": key.user_id}
    elif user_id is not None:
        names["user_id"] = store.key("any", user_id).user_id
    scope = store.read_scope(all_tenants=all_tenants, **names)
    report = ExportReport()
    write = _write_exactly if format == "jsonl" else _openai_writer(with_tenant=all_tenants)
    passed = 0
    if format == "jsonl":
        file.write(to_line({"format": FORMAT, "version": VERSION}))
    for id in conversation_ids(store, scope):
        snapshot = store.read_snapshot(scope, id)
        if snapshot is None:
            continue

        def pages(id: str = id, snapshot: Snapshot = snapshot, before: int = passed) -> Iterator[list[Entry]]:
            page = snapshot.page
            while True:
                yield page.entries
                if on_progress is not None and page.entries:
                    on_progress(before + page.entries[-1].number + 1, scope.numbers)
                if page.rest_from is None:
                    return
                page = store.read_entries(scope, id, page.rest_from, snapshot.state.next_message_index)

        write(file, snapshot, pages(), report)
        report.conversations += 1
        passed += snapshot.state.next_message_index
    if format == "jsonl":
        file.write(to_line({"end": {"conversations": report.conversations, "messages": report.messages}}))
    return report


def conversation_ids(store: ConversationStore, scope: Scope) -> Iterator[str]:
    """Yield the ids of a scope's conversations, in order; read in pages."""
    after = FIRST_ID
    while ids := store.read_ids(scope, after):
        yield from ids
        after = ids[-1]


def to_line(value: Any) -> bytes:
    """Return a line of JSON Lines."""
    return _to_json(value) + b"\n"


def to_time(time: datetime | None) -> str | None:
    """Return a time as ISO 8601 in UTC, with microseconds."""
    return None if time is None else time.astimezone(timezone.utc).isoformat(timespec="microseconds")


def _to_json(value: Any) -> bytes:
    # Half a surrogate pair becomes what it is in JSON: an escape.
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace")


def _write_exactly(file: BinaryIO, snapshot: Snapshot, pages: Iterator[list[Entry]], report: ExportReport) -> None:
    file.write(to_line({"conversation": asdict(snapshot.state)}))
    for summary in snapshot.summaries:
        form = {
            "covers_through": summary.covers_through,
            "content": summary.content,
            "created_at": to_time(summary.created_at),
        }
        file.write(to_line({"summary": form}))
    for entries in pages:
        readable = [entry for entry in entries if not entry.message.is_erased]
        file.writelines(to_line({"message": _exact_form(entry)}) for entry in readable)
        report.messages += len(readable)
        report.left_out += len(entries) - len(readable)


def _exact_form(entry: Entry) -> dict[str, Any]:
    message = entry.message
    return {
        "message_index": message.message_index,
        "role": message.role,
        "content": message.content,
        "additional_kwargs": message.additional_kwargs,
        "extra": message.extra,
        "tags": message.tags,
        "judged_by": message.judged_by,
        "token_count": message.token_count,
        "token_encoding": message.token_encoding,
        "write_id": entry.write_id,
        "created_at": to_time(message.created_at),
    }


def _openai_writer(*, with_tenant: bool) -> Callable[[BinaryIO, Snapshot, Iterator[list[Entry]], ExportReport], None]:
    from pgmemory.transfer.messages import to_openai

    def forms(stored: list[StoredMessage], report: ExportReport) -> Iterator[bytes]:
        for message in stored:
            form = None if message.is_erased else to_openai(message)
            if form is None:
                report.left_out += 1
            else:
                report.messages += 1
                yield _to_json(form)

    def write(file: BinaryIO, snapshot: Snapshot, pages: Iterator[list[Entry]], report: ExportReport) -> None:
        state = snapshot.state
        names = {"tenant_id": state.tenant_id} if with_tenant else {}
        names |= {"session_id": state.session_id, "user_id": state.user_id}
        file.write(_to_json(names)[:-1] + b', "messages": [')
        separator = b""
        for entries in pages:
            for form in forms([entry.message for entry in entries], report):
                file.write(separator + form)
                separator = b", "
        file.write(b"]}\n")

    return write
