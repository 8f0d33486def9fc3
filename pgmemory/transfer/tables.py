"""Tables of other packages, in this or another PostgreSQL database, as a source."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

from pgmemory.errors import ConfigurationError
from pgmemory.pool import Database
from pgmemory.queries import transfer
from pgmemory.store.transfer import Entry
from pgmemory.transcript import visible
from pgmemory.transfer.source import Id, Redact, Skip, SourceConversation

if TYPE_CHECKING:
    from langchain_core.messages import BaseMessage

Kind = Literal["langchain-postgres", "message-store", "n8n", "conversation-messages"]

DEFAULT_TABLES: dict[str, str] = {
    "message-store": "message_store",
    "n8n": "n8n_chat_histories",
    "conversation-messages": "conversation_messages",
}
"""The table of each kind that has one of a usual name."""

# The first page sorts the whole table.
_QUERY_SECONDS = 3600.0
_PAGE_ROWS = 1000
_PAGE_CHARACTERS = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Shape:
    """The columns of a kind of table: of the session, of the order in it, of the message; and those it may have."""

    session: str
    order: str
    message: tuple[str, ...]
    optional: tuple[str, ...] = ()


_LANGCHAIN = _Shape("session_id", "id", ("message",))
_SHAPES: dict[str, _Shape] = {
    "langchain-postgres": _LANGCHAIN,
    "message-store": _LANGCHAIN,
    "n8n": _LANGCHAIN,
    "conversation-messages": _Shape("conversation_id", "message_index", ("role", "content"), ("additional_kwargs",)),
}
_NUMBERS = ("smallint", "integer", "bigint", "numeric")


class TableSource:
    """Conversations in a table of another package; one transaction that reads from beginning to end.

    A column ``user_id`` names the user, ``created_at`` the time of a message; both may be missing. A conversation's
    messages are numbered from 0 in the order of ``id``, or keep their ``message_index``.

    Args:
        database: Where the table is: a DSN, None for ``$DATABASE_URL``, a psycopg2 pool or an SQLAlchemy engine.
        kind: ``langchain-postgres``, ``message-store`` (langchain-community's SQLChatMessageHistory and
            PostgresChatMessageHistory), ``n8n`` or ``conversation-messages`` (a table of one's own with
            ``conversation_id``, ``message_index``, ``role``, ``content`` and perhaps ``additional_kwargs``).
        table: Its name, exactly, perhaps ``schema.table``; None for the usual one.
        user_id: The user of conversations for which the table names none.

    Attributes:
        done: Rows that were read.
        rows: The same.
        total: Rows in the table; None before it is read.

    Raises:
        ConfigurationError: An argument is wrong.
    """

    def __init__(self, database: Any, kind: Kind, *, table: str | None = None, user_id: Id | None = None) -> None:
        if kind not in _SHAPES:
            raise ConfigurationError(f"kind must be one of {', '.join(_SHAPES)}, not {kind!r}")
        named = table if table is not None else DEFAULT_TABLES.get(kind)
        if named is None:
            raise ConfigurationError(f"table must be given: {kind} has no usual name for it")
        quoted = transfer.table_name(named)
        if quoted is None:
            raise ConfigurationError("table must be a name or schema.name; put one that holds a dot in double quotes")
        self._database = database
        self._kind = kind
        self._name = named
        self._table = quoted
        self._user_id = user_id
        self._content_is_json = False
        self.rows = 0
        self.done = 0
        self.total: int | None = None

    def conversations(self, skip: Skip, redact: Redact | None) -> Generator[SourceConversation, None, None]:
        """Yield the conversations, ordered by user and session.

        Raises:
            ConfigurationError: There is no such table, or it lacks a column.
            StoreError: The database refused or could not be reached.
        """
        from pgmemory.transfer.messages import OddMessageError, to_row

        keeps_numbers = self._kind == "conversation-messages"

        def entries(rows: Iterator[tuple[Any, ...]]) -> Iterator[Entry]:
            index = 0
            for session_id, _, order, created_at, *columns in rows:
                try:
                    number = _own_number(order, index) if keeps_numbers else index
                    time = _time(created_at)
                    row = to_row(lambda columns=columns: self._message(columns), redact)  # type: ignore[misc]
                except OddMessageError as error:
                    column = _SHAPES[self._kind].order
                    skip(f"{column} {visible(str(order), one_line=True)} of session {session_id!r}", str(error))
                    continue
                if row is not None:
                    yield Entry(row._replace(message_index=number, created_at=time))
                    index = number + 1

        with closing(self._rows()) as all_rows:
            for (session_id, user_id), rows in groupby(all_rows, key=lambda row: row[:2]):
                user = self._user_id if user_id is None else user_id
                yield SourceConversation(f"session {session_id!r}", session_id, user, entries(rows))

    def _message(self, columns: list[Any]) -> BaseMessage:
        from pgmemory.transfer.messages import OddMessageError, from_columns, from_langchain_dict

        def parsed(text: str | None) -> Any:
            try:
                return None if text is None else json.loads(text)
            except (ValueError, RecursionError):
                raise OddMessageError("no JSON") from None

        if self._kind != "conversation-messages":
            return from_langchain_dict(parsed(columns[0]))
        role, content, additional_kwargs = columns
        others = parsed(additional_kwargs)
        if role is None or not isinstance(others, (dict, type(None))):
            raise OddMessageError("no role" if role is None else "additional_kwargs is no JSON object")
        if self._content_is_json:
            content = _blocks_or_text(parsed(content), content)
        return from_columns(role, content, others)

    def _rows(self) -> Generator[tuple[Any, ...], None, None]:
        """Yield rows of session, user, order, time and the message's columns, all of them text."""
        database = Database(self._database, min_connections=0, max_connections=1, application_name="pgmemory import")
        try:
            with database.transaction(query_timeout_seconds=_QUERY_SECONDS) as execute:
                ((self.total,),) = execute(self._open_statement(execute))
                rows, page = 100, [()]
                while page:
                    page = execute(transfer.fetch(rows))
                    for row in page:
                        self.done += 1
                        self.rows += 1
                        yield row
                    rows = _next_page_size(page)
        finally:
            database.close()

    def _open_statement(self, execute: Callable[..., list[tuple[Any, ...]]]) -> str:
        shape = _SHAPES[self._kind]
        types = dict(execute(transfer.COLUMNS_OF_TABLE, {"table": self._table}))
        if not types:
            raise ConfigurationError(f"there is no table {self._name} that may be seen here")
        if missing := [name for name in (shape.session, shape.order, *shape.message) if name not in types]:
            raise ConfigurationError(
                f"the table {self._name} has no column {missing[0]}: it is not one of {self._kind}"
            )
        if shape.order == "message_index" and types[shape.order] not in _NUMBERS:
            raise ConfigurationError(
                f"the column {shape.order} of {self._name} is of type {types[shape.order]}, which does not sort as "
                f"numbers do: give it one of {', '.join(_NUMBERS)}, perhaps in a view"
            )
        self._content_is_json = types.get("content") in ("json", "jsonb")
        has_time = types.get("created_at", "").startswith("timestamp")
        user = "user_id" if "user_id" in types else None
        columns = [
            transfer.text_of(shape.session),
            transfer.text_of(user),
            transfer.text_of(shape.order),
            transfer.text_of("created_at" if has_time else None, is_time=True),
            *(transfer.text_of(name) for name in shape.message),
            *(transfer.text_of(name if name in types else None) for name in shape.optional),
        ]
        order = [name for name in (user, shape.session, shape.order) if name]
        return transfer.open_table(self._table, columns, order)


def _own_number(order: str | None, lowest: int) -> int:
    from pgmemory.transfer.messages import OddMessageError

    if order is None or not order.isdecimal() or int(order) >= 2**31 - 1:
        raise OddMessageError("message_index is no whole number from 0 to 2147483646")
    if int(order) < lowest:
        raise OddMessageError("message_index comes twice")
    return int(order)


def _time(text: str | None) -> datetime | None:
    from pgmemory.transfer.messages import OddMessageError

    try:
        return None if text is None else datetime.fromisoformat(text)
    except ValueError:
        raise OddMessageError("created_at is not between the years 1 and 9999") from None


def _blocks_or_text(value: Any, text: str | None) -> str | list[Any] | None:
    """Return the content in a column of JSON: a list of blocks, a text, or anything else as the text that it is."""
    if isinstance(value, list) and all(isinstance(block, (str, dict)) for block in value):
        return value
    return value if isinstance(value, str) or value is None else text


def _next_page_size(page: list[tuple[Any, ...]]) -> int:
    """Return how many rows to fetch next, so that a page of large messages stays small."""
    characters = sum(len(text or "") for row in page for text in row[4:])
    return max(1, min(_PAGE_ROWS, len(page) * _PAGE_CHARACTERS // max(1, characters)))
