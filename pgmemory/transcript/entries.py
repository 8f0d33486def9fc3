"""What there is to read of a conversation, before it is text or a page. Knows rows, not LangChain.

A row that another program wrote, or that is damaged, is no error: what cannot be understood is shown as it is stored.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from pgmemory.models import ConversationRecord, StoredMessage, StoredSummary

_LABELS = {
    "human": "Human",
    "ai": "AI",
    "system": "System",
    "tool": "Tool",
    "function": "Function",
    "chat": "Chat",
    "remove": "Removal",
}
_RESULTS = ("tool", "function")
# Said by the model, yet not in the content.
_SAID_BESIDE_THE_CONTENT = ("refusal", "audio", "reasoning_content")
# Content blocks that repeat a tool call, which is shown once.
_CALL_BLOCKS = ("tool_use", "tool_call", "function_call")
# Enough to see what a picture's or a document's block is; its data are nothing to read.
_BLOCK_CHARACTERS = 1000


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model asked for.

    Attributes:
        name: Of the tool, or of the function in the older form.
        arguments: JSON, indented; or the text as it is stored, where it is no JSON.
        id: What its result bears, or None.
        error: Why the call could not be understood, or None.
    """

    name: str
    arguments: str
    id: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Detail:
    """Something of a message beside its text: a content block, a refusal, or a column that cannot be understood."""

    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Entry:
    """What a person reads of one message. Every text may hold any character: it is not yet safe to be shown.

    Attributes:
        index: The message's number in the conversation, or None if it has none.
        role: As it is stored.
        label: What to call who speaks: ``Human``, ``AI``, ``System``, ``Tool``, …, or the role of a chat message.
        time: When it was stored, in UTC, or None.
        text: What was said; another content block than text stands as its type in brackets.
        name: Who speaks, or the tool whose result it is, or None.
        tool_calls: The calls in it.
        tool_call_id: The call whose result it is, or None.
        status: Of a tool's result, such as ``error``, or None.
        details: What else was in it.
        tags: Keywords found in its turn.
        token_count: Its tokens, or None.
    """

    index: int | None
    role: str
    label: str
    time: datetime | None
    text: str
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    status: str | None = None
    details: tuple[Detail, ...] = ()
    tags: tuple[str, ...] = ()
    token_count: int | None = None


def entries(messages: Iterable[StoredMessage]) -> Iterator[Entry]:
    """Yield what a person reads of each message, one at a time. No message is an error."""
    for message in messages:
        yield _entry(message)


def with_summary(shown: Iterable[Entry], summary: StoredSummary | None) -> Iterator[Entry | StoredSummary]:
    """Yield the entries, and the summary right after the last message that it covers."""
    for entry in shown:
        if summary is not None and (entry.index is None or entry.index > summary.covers_through):
            yield summary
            summary = None
        yield entry
    if summary is not None:
        yield summary


def facts(record: ConversationRecord) -> list[tuple[str, str | datetime]]:
    """Return what stands above a transcript, apart from the session id and the metadata: terms and values."""
    found: list[tuple[str, str | datetime]] = []
    if record.tenant_id:
        found.append(("Tenant", record.tenant_id))
    if record.user_id:
        found.append(("User", record.user_id))
    found += [
        ("Started", in_utc(record.created_at)),
        ("Last turn", in_utc(record.updated_at)),
        ("Messages", f"{record.message_count:,}"),
    ]
    if record.time_to_live is not None:
        found.append(("Kept after its last turn for", str(record.time_to_live)))
    if record.held_at is not None:
        found.append(("Held since", in_utc(record.held_at)))
    if record.hold_reason is not None:
        found.append(("Reason", record.hold_reason))
    if record.is_encrypted:
        found.append(("Encrypted", "yes"))
    return found


def in_utc(time: datetime) -> datetime:
    """Return a time in UTC, or unchanged where the calendar ends."""
    try:
        return time.astimezone(timezone.utc)
    except OverflowError:
        return time


def written(value: Any) -> str:
    """Write what JSON text held for a person to read: text as it is, everything else as indented JSON."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, indent=2, default=str)
    except (ValueError, RecursionError):
        return "(nested too deeply to be shown)"


def _entry(message: StoredMessage) -> Entry:
    details: list[Detail] = []
    extra = _columns(message.extra, "extra", details)
    kwargs = _columns(message.additional_kwargs, "additional_kwargs", details)
    calls = _tool_calls(extra, kwargs, details)
    is_result = message.role in _RESULTS
    label = extra.get("role") if message.role == "chat" else None
    content = extra.get("content")
    text = _text(content if isinstance(content, (str, list)) else message.content, calls, details)
    if message.is_erased:
        text = "(its key was erased)"
    for name in _SAID_BESIDE_THE_CONTENT:
        if kwargs.get(name):
            details.append(Detail(name, _shortened(written(kwargs[name]))))
    return Entry(
        index=message.message_index,
        role=message.role,
        label=_word(label) or _LABELS.get(message.role) or message.role or "(no role)",
        time=None if message.created_at is None else in_utc(message.created_at),
        text=text,
        name=_word(extra.get("name")),
        tool_calls=tuple(calls),
        tool_call_id=_word(extra.get("tool_call_id")) if is_result else None,
        status=_word(extra.get("status")) if is_result else None,
        details=tuple(details),
        tags=tuple(str(tag) for tag in message.tags or ()),
        token_count=message.token_count,
    )


def _columns(stored: str | None, name: str, details: list[Detail]) -> dict[str, Any]:
    """Return the object in a column of JSON; what is none becomes a detail, as it is stored."""
    if stored is None:
        return {}
    try:
        value = json.loads(stored)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        return value
    details.append(Detail(f"{name}, as stored", stored))
    return {}


def _text(content: str | list[Any], calls: list[ToolCall], details: list[Detail]) -> str:
    if isinstance(content, str):
        return content
    ids = {call.id for call in calls}
    parts = []
    for block in content:
        if isinstance(block, dict):
            kind = _word(block.get("type")) or "block"
            if kind == "text" and isinstance(block.get("text"), str):
                parts.append(block["text"])
            elif kind not in _CALL_BLOCKS or _word(block.get("id")) not in ids:
                parts.append(f"[{kind}]")
                details.append(Detail(kind, _shortened(written(block))))
        else:
            parts.append(written(block))
    return "\n".join(parts)


def _tool_calls(extra: dict[str, Any], kwargs: dict[str, Any], details: list[Detail]) -> list[ToolCall]:
    """Return a message's calls: LangChain's, else the provider's own form of them, else the older function call."""
    calls = []
    for name in ("tool_calls", "invalid_tool_calls"):
        calls += _call_list(extra.get(name), name, details)
    if not calls:
        calls = _call_list(kwargs.get("tool_calls"), "tool_calls", details)
    if not calls and kwargs.get("function_call"):
        calls = [_call(kwargs["function_call"])]
    return calls


def _call_list(value: Any, name: str, details: list[Detail]) -> list[ToolCall]:
    if isinstance(value, list):
        return [_call(call) for call in value]
    if value is not None:
        details.append(Detail(f"{name}, as stored", written(value)))
    return []


def _call(call: Any) -> ToolCall:
    if not isinstance(call, dict):
        return ToolCall("(no name)", written(call))
    function = call.get("function")
    inner = function if isinstance(function, dict) else call
    arguments = inner.get("args", inner.get("arguments"))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            pass  # a model may write arguments that are no JSON
    error = _word(call.get("error"))
    return ToolCall(_word(inner.get("name")) or "(no name)", written(arguments), _word(call.get("id")), error)


def _word(value: Any) -> str | None:
    return None if value is None else written(value)


def _shortened(text: str) -> str:
    if len(text) <= _BLOCK_CHARACTERS:
        return text
    return f"{text[:_BLOCK_CHARACTERS]}… ({len(text):,} characters in all)"
