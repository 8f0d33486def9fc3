"""psycopg2's errors as pgmemory's: each is both, so that callers may catch either."""

from __future__ import annotations

import re
from typing import Any

import psycopg2
import psycopg2.pool

from pgmemory.errors import PgMemoryError

# What the server answers to a connection that it will not accept however often it is tried, and what libpq says where
# it cannot even try. Failures to connect carry no SQLSTATE, and servers translate their texts: whatever is not
# recognised here may be cured by waiting.
_INCURABLE = re.compile(
    r"""(?:password|SASL|[Pp]eer|[Cc]ertificate)\ authentication\ failed | no\ password\ supplied
    | no\ pg_hba\.conf\ entry | pg_hba\.conf\ rejects | does\ not\ match\ host\ name
    | (?:database|role)\ ".*"\ does\ not\ exist | permission\ denied\ for\ database | not\ permitted\ to\ log\ in
    | no\ such\ (?:database|user) | server\ does\ not\ support\ SSL | certificate\ verify\ failed
    | certificate\ file\ .*\ does\ not\ exist | invalid\ (?:connection\ option|port\ number|\S+\ value)""",
    re.VERBOSE,
)
# libpq's text has one of these for each host and address that it tried.
_ONE_TRY = re.compile(r"connection to server (?:at|on) .*? failed: ")

# Besides lost connections: what may well succeed when it is tried again.
_CURABLE_SQLSTATES = {
    "40001",  # serialization_failure
    "40P01",  # deadlock_detected
    "55P03",  # lock_not_available, by a lock_timeout
    "57014",  # query_canceled, by a statement_timeout
}


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

    @property
    def may_pass(self) -> bool:
        """Whether the same may succeed when it is tried again."""
        return self.sqlstate in _CURABLE_SQLSTATES

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

    @property
    def may_pass(self) -> bool:
        """Whether the same may succeed when it is tried again: not with a wrong password, for instance."""
        if self.connection_lost:
            return True
        tries = [text for text in _ONE_TRY.split(str(self)) if text][1:] or [str(self)]
        return not all(_INCURABLE.search(text) for text in tries)


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
