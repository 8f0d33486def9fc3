"""OpenAI's chat messages as a source: a list, an object with `messages`, or lines of such."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from itertools import chain
from typing import Any, BinaryIO

from pgmemory.errors import ConfigurationError
from pgmemory.store.transfer import Entry
from pgmemory.transfer.jsonlines import numbered_lines, size_of
from pgmemory.transfer.source import Id, Redact, Skip, SourceConversation


class OpenAIMessages:
    """Conversations in OpenAI's chat form: one JSON document, or JSON Lines.

    Each is a list of messages or ``{"messages": […]}`` with ``session_id`` and ``user_id``, or without where they are
    given here. One conversation is in memory at a time; a document that is not JSON Lines as a whole.

    Args:
        file: Opened for reading bytes.
        session_id: The name of the one conversation that bears none.
        user_id: The user of conversations that bear none.

    Attributes:
        done: Bytes that were read.
        total: Bytes in the file, or None.
        rows: Messages that were read.
    """

    def __init__(self, file: BinaryIO, *, session_id: Id | None = None, user_id: Id | None = None) -> None:
        self._file = file
        self._session_id = session_id
        self._user_id = user_id
        self.rows = 0
        self.done = 0
        self.total = size_of(file)

    def conversations(self, skip: Skip, redact: Redact | None) -> Generator[SourceConversation, None, None]:
        """Yield the conversations.

        Raises:
            ConfigurationError: A line is malformed, or more than one conversation lacks a session id.
        """
        from pgmemory.transfer.messages import OddMessageError, from_openai, to_row

        nameless = 0
        for place, value in self._values():
            messages = value.get("messages") if isinstance(value, dict) else value
            if not isinstance(messages, list):
                raise ConfigurationError(f"{place}: neither a list of messages nor an object with messages")
            names = value if isinstance(value, dict) else {}
            session_id = names.get("session_id")
            if session_id is None:
                session_id = self._session_id
                nameless += 1
                if session_id is None or nameless > 1:
                    which = "no session_id" if session_id is None else "a second conversation without session_id"
                    raise ConfigurationError(f"{place}: {which}; give the one that has none a session")
            user_id = names.get("user_id")

            def entries(place: str = place, messages: list[Any] = messages) -> Iterator[Entry]:
                index = 0
                for number, form in enumerate(messages, 1):
                    self.rows += 1
                    try:
                        row = to_row(lambda form=form: from_openai(form), redact)  # type: ignore[misc]
                    except OddMessageError as error:
                        skip(f"{place}, message {number}", str(error))
                        continue
                    if row is not None:
                        yield Entry(row._replace(message_index=index))
                        index += 1

            yield SourceConversation(place, session_id, self._user_id if user_id is None else user_id, entries())

    def _values(self) -> Iterator[tuple[str, Any]]:
        """Yield each conversation with its place."""
        lines = iter(self._file)
        head: list[bytes] = []
        for line in lines:
            head.append(line)
            if line.strip():
                break
        first = b"".join(head)
        try:
            is_lines = not first.strip() or json.loads(first) is not None
        except (ValueError, RecursionError):
            is_lines = False  # but one document of several lines
        if is_lines:
            for number, value in numbered_lines(chain(head, lines), self._count):
                yield from _each(f"line {number}", value)
            return
        document = first + b"".join(lines)
        self.done = len(document)
        try:
            value = json.loads(document)
        except (ValueError, RecursionError):
            raise ConfigurationError("neither a JSON document nor JSON Lines, in UTF-8") from None
        yield from _each("the document", value)

    def _count(self, size: int) -> None:
        self.done += size


def _each(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a conversation, or each of a list of conversations."""
    if isinstance(value, list) and any(isinstance(item, dict) and "messages" in item for item in value):
        yield from ((f"{place}, conversation {number}", item) for number, item in enumerate(value, 1))
    else:
        yield place, value
