"""Transcripts: what a person reads of a conversation, as plain text and as a page.

`entries` says what there is to read of stored messages; `plain` and `page` write it down. Rows are data that anyone
may have written: nothing in them is executed, by a terminal or by a browser, and no row makes a transcript fail.
"""

from __future__ import annotations

from pgmemory.transcript.entries import Detail, Entry, ToolCall, entries
from pgmemory.transcript.page import as_html
from pgmemory.transcript.plain import as_text
from pgmemory.transcript.visible import visible

__all__ = ["Detail", "Entry", "ToolCall", "as_html", "as_text", "entries", "visible"]
