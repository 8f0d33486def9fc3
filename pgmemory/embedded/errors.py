"""What a local server fails with."""

from __future__ import annotations

from pgmemory.errors import PgMemoryError


class LocalServerError(PgMemoryError, RuntimeError):
    """The local server cannot be used: the text says what failed, what its log says last, and what to do."""
