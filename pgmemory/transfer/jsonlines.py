"""The exact format, read: every line is checked, and an error names the line."""

from __future__ import annotations

import json
import os
import re
import stat
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import fields
from datetime import datetime
from typing import Any, BinaryIO, NoReturn

from pgmemory.errors import ConfigurationError
from pgmemory.models import StoredMessage, StoredSummary, readable
from pgmemory.store.transfer import ConversationState, Entry
from pgmemory.transfer.exporting import FORMAT, VERSION
from pgmemory.transfer.source import Redact, Skip, SourceConversation

_INTERVAL = re.compile(r"P(?=.)[-+\d.YMWDTHS]*")
_MAX_INT = 2**31 - 1
_ENTRY_FIELDS = [name for name in (*StoredMessage._fields, "write_id") if name != "is_erased"]


class _Unfit(ValueError):
    """A line is not what it should be; the text quotes nothing of it."""


def numbered_lines(file: Iterable[bytes], progress: Callable[[int], object]) -> Iterator[tuple[int, Any]]:
    """Yield the number and the JSON value of each line that is not blank.

    Args:
        file: Opened for reading bytes.
        progress: Told how many bytes each line has.

    Raises:
        ConfigurationError: A line is no JSON in UTF-8.
    """
    for number, line in enumerate(file, 1):
        progress(len(line))
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            # The error would quote the line, or hold all of it.
            what = "is not UTF-8" if isinstance(error, UnicodeDecodeError) else "is not JSON"
            raise ConfigurationError(f"line {number} {what}") from None
        yield number, value


def size_of(file: BinaryIO) -> int | None:
    """Return how many bytes a regular file has; None for a pipe."""
    try:
        status = os.fstat(file.fileno())
    except (OSError, ValueError):
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


class JsonLines:
    """What `export_conversations` wrote as ``jsonl``.

    Args:
        file: Opened for reading bytes.

    Attributes:
        done: Bytes that were read.
        total: Bytes in the file, or None.
        rows: Messages that were read.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.rows = 0
        self.done = 0
        self.total = size_of(file)

    def conversations(self, skip: Skip, redact: Redact | None) -> Generator[SourceConversation, None, None]:
        """Yield the conversations, exactly.

        Raises:
            ConfigurationError: The file is of another format or version, a line is malformed, or the end is missing.
        """
        lines = self._lines()
        number, kind, value = next(lines, (1, "", None))
        if kind != "format" or value != FORMAT:
            raise ConfigurationError(f"line 1: no header: not a file that `pgmemory export` wrote as {FORMAT!r}")
        count = 0
        number, kind, value = next(lines, (number, "", None))
        while kind == "conversation":
            count += 1
            first_line, state = number, _parsed(number, _to_state, value)
            summaries = []
            number, kind, value = next(lines, (number, "", None))
            while kind == "summary":
                summaries.append(_parsed(number, _to_summary, value))
                number, kind, value = next(lines, (number, "", None))

            def entries(state: ConversationState = state) -> Iterator[Entry]:
                nonlocal number, kind, value
                lowest = 0
                while kind == "message":
                    entry = _parsed(number, _to_entry, value)
                    if not lowest <= entry.number < state.next_message_index:
                        raise ConfigurationError(f"line {number}: message_index {entry.number} is not in order")
                    lowest = entry.number + 1
                    self.rows += 1
                    yield entry
                    number, kind, value = next(lines, (number, "", None))
                if kind not in ("conversation", "end"):
                    _fail_at(number, kind)

            remaining = entries()
            yield SourceConversation(
                f"line {first_line}", state.session_id, state.user_id, remaining, state, tuple(summaries)
            )
            for _ in remaining:
                pass
        if kind != "end":
            _fail_at(number, kind)
        if value != {"conversations": count, "messages": self.rows}:
            raise ConfigurationError(f"line {number}: other numbers of conversations and messages than were read")
        if next(lines, None) is not None:
            raise ConfigurationError(f"line {number + 1}: more after the end")

    def _lines(self) -> Iterator[tuple[int, str, Any]]:
        """Yield each line's number, its kind and what it holds."""
        for number, value in numbered_lines(self._file, self._count):
            if isinstance(value, dict) and value.keys() == {"format", "version"}:
                if value["format"] == FORMAT and value["version"] != VERSION:
                    raise ConfigurationError(
                        f"line {number}: version {str(value['version'])[:20]} of the format; this pgmemory reads "
                        f"{VERSION}: pip install --upgrade langchain-pgmemory"
                    )
                yield number, "format", value["format"]
            elif isinstance(value, dict) and len(value) == 1:
                yield number, *next(iter(value.items()))
            else:
                raise ConfigurationError(f"line {number} is none that `pgmemory export` writes")

    def _count(self, size: int) -> None:
        self.done += size


def _fail_at(number: int, kind: str) -> NoReturn:
    if kind:
        raise ConfigurationError(f"line {number} is none that belongs here")
    raise ConfigurationError(f"the file ends with line {number}, before the end that an export writes: it is not whole")


def _parsed(number: int, parse: Callable[[Any], Any], value: Any) -> Any:
    try:
        return parse(value)
    except _Unfit as error:
        raise ConfigurationError(f"line {number}: {error}") from None


def _to_state(value: Any) -> ConversationState:
    names = [field.name for field in fields(ConversationState)]
    state = ConversationState(**_checked(value, names))
    for name in ("tenant_id", "user_id", "session_id"):
        _text(name, getattr(state, name))
    _json_text("metadata", state.metadata)
    _number("next_message_index", state.next_message_index)
    _number("summarized_through", state.summarized_through, least=-1, most=state.next_message_index - 1)
    _number("revision", state.revision)
    if not isinstance(state.keeps_summary, bool):
        raise _Unfit("keeps_summary is not true or false")
    for name in ("created_at", "updated_at"):
        _time(name, getattr(state, name))
    if state.held_at is not None:
        _time("held_at", state.held_at)
    if state.hold_reason is not None:
        _text("hold_reason", state.hold_reason)
    if state.time_to_live is not None and not _INTERVAL.fullmatch(_text("time_to_live", state.time_to_live)):
        raise _Unfit("time_to_live is no ISO 8601 interval")
    return state


def _to_summary(value: Any) -> StoredSummary:
    found = _checked(value, ["covers_through", "content", "created_at"])
    return StoredSummary(
        _text("content", found["content"]),
        _number("covers_through", found["covers_through"]),
        _time("created_at", found["created_at"]),
    )


def _to_entry(value: Any) -> Entry:
    found = _checked(value, _ENTRY_FIELDS)
    write_id = found.pop("write_id")
    if write_id is not None:
        try:
            uuid.UUID(write_id)
        except (ValueError, AttributeError, TypeError):
            raise _Unfit("write_id is no UUID") from None
    _number("message_index", found["message_index"], most=_MAX_INT - 1)
    for name in ("role", "content"):
        _text(name, found[name])
    for name in ("judged_by", "token_encoding"):
        if found[name] is not None:
            _text(name, found[name])
    for name in ("additional_kwargs", "extra"):
        if found[name] is not None:
            _json_text(name, found[name])
    if found["token_count"] is not None:
        _number("token_count", found["token_count"])
    if found["tags"] is not None:
        if not isinstance(found["tags"], list):
            raise _Unfit("tags is no list")
        found["tags"] = tuple(_text("tags", tag) for tag in found["tags"])
    found["created_at"] = _time("created_at", found["created_at"])
    return Entry(StoredMessage(**found), write_id)


def _checked(value: Any, names: list[str]) -> dict[str, Any]:
    if not isinstance(value, dict) or value.keys() != set(names):
        raise _Unfit(f"must hold {', '.join(names)} and nothing else")
    return dict(value)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or readable(value) != value:
        raise _Unfit(f"{name} is no text that PostgreSQL can keep")
    return value


def _number(name: str, value: Any, *, least: int = 0, most: int = _MAX_INT) -> int:
    if type(value) is not int or not least <= value <= most:
        raise _Unfit(f"{name} is no whole number from {least} to {most}")
    return value


def _time(name: str, value: Any) -> datetime:
    try:
        time = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise _Unfit(f"{name} is no ISO 8601 time") from None
    if time.tzinfo is None:
        raise _Unfit(f"{name} has no time zone")
    return time


def _json_text(name: str, value: Any) -> None:
    try:
        json.loads(_text(name, value), parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise _Unfit(f"{name} is no text that holds JSON") from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)
