"""The log's records as LangChain's messages, with what is known of them; and messages as records for the log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from langchain_core.messages import BaseMessage

from pgmemory.models import StoredMessage, StoredSummary, Window
from pgmemory.serialization import to_message, to_stored
from pgmemory.tokens import EncodingCounter
from pgmemory.turns import LoggedMessage, shown_preamble


def to_stored_messages(messages: Sequence[BaseMessage], counter: EncodingCounter | None = None) -> list[StoredMessage]:
    """Turn messages into records, with their tokens if there is a counter of single messages.

    Raises:
        MessageNotStorableError: Names the message's place in the list and the value's in the message.
    """
    stored = []
    for position, message in enumerate(messages):
        record = to_stored(message, path=f"messages[{position}]")
        if counter is not None:
            count = counter.count_message(message)
            record = record._replace(token_count=count, token_encoding=counter.label)
        stored.append(record)
    return stored


@dataclass(frozen=True, slots=True)
class LoggedWindow:
    """A `Window` whose messages are LangChain's again; the attributes mean the same."""

    system: list[LoggedMessage]
    messages: list[LoggedMessage]
    complete: bool
    summary: StoredSummary | None
    state: str | None


def to_logged(stored: StoredMessage, encoding: str | None = None) -> LoggedMessage:
    """Turn a record from the log into a message; its token count is kept if it was made with `encoding`."""
    assert stored.message_index is not None, "a record from the log has an index"
    known = encoding is not None and stored.token_encoding == encoding
    return LoggedMessage(
        to_message(stored),
        stored.message_index,
        stored.token_count if known else None,
        stored.tags,
        stored.judged_by,
        stored.is_erased,
    )


def to_logged_window(window: Window, encoding: str | None = None) -> LoggedWindow:
    """Turn a window's records into messages."""
    return LoggedWindow(
        shown_preamble([to_logged(stored, encoding) for stored in window.system]),
        [to_logged(stored, encoding) for stored in window.messages],
        window.complete,
        window.summary,
        window.state,
    )
