"""psycopg2's errors as pgmemory's: each is both, so that callers may catch either."""

from __future__ import annotations

from typing import Any

import psycopg2
import psycopg2.pool

from pgmemory.errors import PgMemoryError


class StoreError(PgMemoryError, psycopg2.DatabaseError):
    """The database refused a statement; psycopg2's own error, with all details, is the cause.

    Attributes:
        sqlstate: The five-character SQLSTATE, or None if the server gave none; `pgcode` is the same.
        constraint_name: The constraint or unique index that was violated, or None.
    """

    # psycopg2 keeps pgcode in a read-only slot; this class attribute uncovers the instance's dictionary.
    pgcode: str | None = None

    def __init__(self, message: str, *, sqlstate: str | None = None, constraint_name: str | None = None) -> None:
        super().__init__(message)
        self.sqlstate = self.pgcode = sqlstate
        self.constraint_name = constraint_name

    def __setstate__(self, state: dict[str, Any] | None) -> None:
        # psycopg2's version restores its own two slots and forgets all other attributes.
        self.__dict__.update(state or {})


class StoreUnavailableError(StoreError, psycopg2.OperationalError):
    """The database could not be reached, or the connection was lost.

    Attributes:
        connection_lost: True if an open connection broke, so that its last statements may or may not have taken
            effect; False if none could be opened, so that nothing happened.
    """

    def __init__(self, message: str, *, sqlstate: str | None = None, connection_lost: bool = False) -> None:
        super().__init__(message, sqlstate=sqlstate)
        self.connection_lost = connection_lost


class PoolTimeoutError(StoreError, psycopg2.pool.PoolError):
    """No connection became free in time."""


class PoolClosedError(StoreError, psycopg2.pool.PoolError):
    """The pool was closed."""


def reason(exc: BaseException) -> str:
    """Return a driver's error text on one line."""
    return " ".join(str(exc).split()) or type(exc).__name__


def could_not_connect(address: str, exc: BaseException) -> StoreUnavailableError:
    """Return the error for a failure to connect.

    Raise it from the cause without its traceback: the frames there hold the DSN, and error trackers show frames.
    """
    return StoreUnavailableError(f"could not connect to {address}: {reason(exc)}")
