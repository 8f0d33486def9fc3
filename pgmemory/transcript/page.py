"""A transcript as one page: HTML that asks for nothing and runs nothing, whatever was said.

Everything of a conversation is escaped, and only ever the text of an element or a quoted attribute. The page's policy
allows its own style sheet, known by its hash, and nothing else: no script, no picture, no frame, no request.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Iterator
from datetime import date, datetime
from html import escape

from pgmemory.models import ConversationRecord, StoredMessage, StoredSummary
from pgmemory.transcript.entries import Entry, ToolCall, entries, facts, in_utc, with_summary, written
from pgmemory.transcript.style import STYLE
from pgmemory.transcript.visible import DECEPTIVE, code_point, visible, with_newlines

_STYLE_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
_POLICY = f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; form-action 'none'"
_KNOWN_ROLES = ("human", "ai", "system", "tool", "function")


def as_html(
    record: ConversationRecord, messages: Iterable[StoredMessage], summary: StoredSummary | None
) -> Iterator[str]:
    """Yield a transcript's page in parts, message by message, to be written as UTF-8 one after the other.

    Times are UTC. Characters that deceive a reader stand as their code points; links are text.

    Args:
        record: The conversation.
        messages: Those to show, in order; read one at a time.
        summary: The newest one, or None. It stands after the last message that it covers.
    """
    yield _head(record, summary)
    day: date | None = None
    count = 0
    yield '<main id="messages">\n'
    for part in with_summary(entries(messages), summary):
        if isinstance(part, StoredSummary):
            yield _summary(part)
            continue
        if part.time is not None and part.time.date() != day:
            day = part.time.date()
            yield f'<h2 class="day"><time datetime="{day.isoformat()}">{_long_date(day)}</time></h2>\n'
        yield _message(part)
        count += 1
    yield "</main>\n"
    of = "" if count == record.message_count else f" of {record.message_count:,}"
    yield f"<footer><p>{count:,}{of} messages. All times are UTC.</p></footer>\n</body>\n</html>\n"


def _head(record: ConversationRecord, summary: StoredSummary | None) -> str:
    title = escape(visible(record.session_id, one_line=True))
    terms = [(term, _value(value)) for term, value in facts(record)]
    if summary is not None:
        terms.append(("Summary", f'<a href="#summary">covers the messages up to #{summary.covers_through}</a>'))
    facts_list = "".join(f"<div><dt>{term}</dt><dd>{value}</dd></div>\n" for term, value in terms)
    metadata = _folded("Metadata", written(record.metadata)) if record.metadata else ""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<meta name="robots" content="noindex, nofollow">
<meta name="color-scheme" content="light dark">
<title>Transcript of {title}</title>
<style>{STYLE}</style>
</head>
<body>
<header>
<p class="kind">Transcript</p>
<h1>{_isolated(record.session_id)}</h1>
<dl>
{facts_list}</dl>
{metadata}</header>
"""


def _summary(summary: StoredSummary) -> str:
    return (
        '<section id="summary" aria-labelledby="summary-title">\n'
        f'<p class="here">The summary covers the messages up to here (#{summary.covers_through})</p>\n'
        '<header><h3 id="summary-title">Summary</h3>'
        f'<p class="notes">{_value(in_utc(summary.created_at))}</p></header>\n'
        f"{_said(summary.content)}</section>\n"
    )


def _message(entry: Entry) -> str:
    kind = entry.role if entry.role in _KNOWN_ROLES else "other"
    name = "" if entry.name is None else f' <span class="name">{_isolated(entry.name)}</span>'
    anchor = "" if entry.index is None else f' id="m{entry.index}"'
    notes = []
    if entry.status is not None:
        notes.append(f'<span class="status">{_isolated(entry.status)}</span>')
    if entry.tool_call_id is not None:
        notes.append(f"result of <code>{_isolated(entry.tool_call_id)}</code>")
    if entry.token_count is not None:
        notes.append(f"{entry.token_count:,} tokens")
    if entry.time is not None:
        notes.append(f'<time datetime="{entry.time.isoformat()}">{entry.time:%H:%M:%S}</time>')
    if entry.index is not None:
        notes.append(f'<a href="#m{entry.index}">#{entry.index}</a>')
    tags = "".join(f"<li>{_isolated(tag)}</li>" for tag in entry.tags)
    return (
        f'<article class="{kind}"{anchor}>\n'
        f'<header><h3><span class="label">{_isolated(entry.label)}</span>{name}</h3>'
        f'<p class="notes">{" · ".join(notes)}</p></header>\n'
        + (_said(entry.text) if entry.text else "")
        + "".join(map(_tool_call, entry.tool_calls))
        + "".join(_folded(detail.title, detail.text, is_open=not entry.text) for detail in entry.details)
        + (f'<ul class="tags" aria-label="Tags">{tags}</ul>\n' if tags else "")
        + "</article>\n"
    )


def _tool_call(call: ToolCall) -> str:
    of = "" if call.id is None else f' <code class="id">{_isolated(call.id)}</code>'
    error = "" if call.error is None else f"<p>Not understood: {_isolated(call.error)}</p>\n"
    return (
        f'<details class="call"><summary>Calls <code>{_isolated(call.name)}</code>{of}</summary>\n'
        f"{error}{_preformatted(call.arguments)}</details>\n"
    )


def _folded(title: str, text: str, *, is_open: bool = False) -> str:
    opened = " open" if is_open else ""
    return f"<details{opened}><summary>{_isolated(title)}</summary>\n{_preformatted(text)}</details>\n"


def _said(text: str) -> str:
    # The language of what was said is unknown: a screen reader shall not take it for the page's.
    return f'<div class="said" lang="" dir="auto">{_marked(text)}</div>\n'


def _preformatted(text: str) -> str:
    # A parser drops the first newline.
    return f'<pre lang="" dir="auto" tabindex="0">\n{_marked(text)}</pre>\n'


def _isolated(text: str) -> str:
    """Return a short text that changes nothing of the order of what stands around it."""
    return f"<bdi>{_marked(text)}</bdi>"


def _marked(text: str) -> str:
    return DECEPTIVE.sub(_mark, escape(with_newlines(text)))


def _mark(match: re.Match[str]) -> str:
    return f'<span class="hidden">{code_point(match[0])}</span>'


def _value(value: str | datetime) -> str:
    if isinstance(value, str):
        return _isolated(value)
    shown = value.isoformat(" ", "seconds").replace("+00:00", " UTC")
    return f'<time datetime="{value.isoformat()}">{shown}</time>'


def _long_date(day: date) -> str:
    return f"{day.day} {day:%B} {day.year}"
