"""A transcript as lines of plain text, safe to print on a terminal.

Lines that begin in the first column are the transcript's own; what was said is indented, so that it cannot pass for
another message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime

from pgmemory.models import ConversationRecord, StoredMessage, StoredSummary
from pgmemory.transcript.entries import Entry, entries, facts, in_utc, with_summary, written
from pgmemory.transcript.visible import visible

_INDENT = "    "


def as_text(
    record: ConversationRecord, messages: Iterable[StoredMessage], summary: StoredSummary | None
) -> Iterator[str]:
    """Yield a transcript's lines, without line ends, message by message.

    No line holds a control character but tabs, nor one that changes the direction of text: they stand as their code
    points, such as ``<U+001B>``. A message begins with a line ``#7 AI …``, its text and its calls are indented.

    Args:
        record: The conversation.
        messages: Those to show, in order; read one at a time.
        summary: The newest one, or None. It stands after the last message that it covers.
    """
    yield f"Conversation {visible(record.session_id, one_line=True)}"
    for term, value in facts(record):
        yield f"{term}: {_time(value) if isinstance(value, datetime) else visible(value, one_line=True)}"
    if record.metadata:
        yield "Metadata:"
        yield from _indented(written(record.metadata))
    for part in with_summary(entries(messages), summary):
        yield ""
        if isinstance(part, StoredSummary):
            yield f"== The summary covers the messages up to here (#{part.covers_through}) =="
            yield f"Summary of {_time(in_utc(part.created_at))}:"
            yield from _indented(part.content)
        else:
            yield from _message(part)


def _message(entry: Entry) -> Iterator[str]:
    heading = [f"#{'?' if entry.index is None else entry.index}", entry.label]
    if entry.name is not None:
        heading.append(entry.name)
    notes = []
    if entry.status is not None:
        notes.append(entry.status)
    if entry.tool_call_id is not None:
        notes.append(f"result of {entry.tool_call_id}")
    if entry.time is not None:
        notes.append(_time(entry.time))
    if entry.token_count is not None:
        notes.append(f"{entry.token_count:,} tokens")
    if entry.tags:
        notes.append(f"tags: {', '.join(entry.tags)}")
    yield visible(" · ".join([" ".join(heading), *notes]), one_line=True)
    yield from _indented(entry.text)
    for call in entry.tool_calls:
        of = "" if call.id is None else f" ({call.id})"
        yield f"{_INDENT}calls {visible(call.name + of, one_line=True)}"
        yield from _indented(call.arguments, 2)
        if call.error is not None:
            yield from _indented(f"not understood: {call.error}", 2)
    for detail in entry.details:
        yield f"{_INDENT}{visible(detail.title, one_line=True)}:"
        yield from _indented(detail.text, 2)


def _indented(text: str, depth: int = 1) -> Iterator[str]:
    if text:
        for line in visible(text).split("\n"):
            yield _INDENT * depth + line


def _time(time: datetime) -> str:
    return time.isoformat(" ", "seconds").replace("+00:00", " UTC")
