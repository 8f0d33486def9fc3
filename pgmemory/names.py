"""Names and spans of time that applications give, checked: of a PostgreSQL schema, a tenant, a user, a session.

Every function raises ConfigurationError for a value that cannot be kept; the text says which argument it was.
"""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

from pgmemory.errors import ConfigurationError

_MAX_SCHEMA_BYTES = 63  # PostgreSQL cuts longer names without a word
_LONGEST_SPAN = timedelta(days=36_500)  # so that the time it leads back to exists, for PostgreSQL and Python
_MAX_INDEXED_BYTES = 1000  # an index row is limited to a third of a page


def schema_name(name: Any) -> str:
    """Return the name of a PostgreSQL schema, checked."""
    text = text_id("schema", name)
    if "://" in text:
        raise ConfigurationError("schema must not be a DSN: give that as the source, or to --dsn")
    if len(text.encode()) > _MAX_SCHEMA_BYTES:
        raise ConfigurationError(
            f"schema must not be longer than {_MAX_SCHEMA_BYTES} bytes; this one has {len(text.encode())}"
        )
    return text


def text_id(field: str, value: Any) -> str:
    """Return an id as text: any non-empty text, exactly as it is, or an int or a UUID turned into text."""
    if isinstance(value, uuid.UUID):
        return str(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(int(value))
    if not isinstance(value, str):
        raise ConfigurationError(f"{field} must be text, an int or a UUID, not {type(value).__name__}")
    if not value:
        raise ConfigurationError(f"{field} must not be empty")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ConfigurationError(
            f"{field} {value!r} holds half a surrogate pair, which PostgreSQL cannot keep"
        ) from None
    if "\0" in value:
        raise ConfigurationError(f"{field} {value!r} holds NUL, which PostgreSQL cannot keep")
    return value[:]  # the plain text of a subclass, such as an enumeration's, whose str() may be another


def indexed_id(field: str, value: Any) -> str:
    """Return an id as text that also fits into an index."""
    text = text_id(field, value)
    if len(text.encode()) > _MAX_INDEXED_BYTES:
        raise ConfigurationError(
            f"{field} must not be longer than {_MAX_INDEXED_BYTES} bytes; this one has {len(text.encode())}"
        )
    return text


def check_span(field: str, span: Any) -> timedelta | None:
    """Return a span of time above zero, or None for none."""
    if span is None:
        return None
    if not isinstance(span, timedelta):
        raise ConfigurationError(f"{field} must be a datetime.timedelta or None, not {type(span).__name__}")
    if not timedelta(0) < span <= _LONGEST_SPAN:
        raise ConfigurationError(f"{field} must be above zero and at most {_LONGEST_SPAN.days} days, not {span}")
    return span
