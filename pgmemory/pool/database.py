"""Running statements, again where that is safe, and telling of it."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import psycopg2
import psycopg2.extensions as ext

from pgmemory.models import Operation, PoolStats
from pgmemory.pool.deadlines import Deadline, answer_within
from pgmemory.pool.dsn import describe
from pgmemory.pool.errors import StoreError, StoreUnavailableError, reason
from pgmemory.pool.hygiene import settle, tuple_cursor
from pgmemory.pool.limits import LONGEST_QUERY_SECONDS, check_seconds
from pgmemory.pool.retries import Tries
from pgmemory.pool.sources import open_source

logger = logging.getLogger(__name__)

Rows = list[tuple[Any, ...]]
Execute = Callable[..., Rows]  # as `Database.execute`
T = TypeVar("T")

# The server of this connection was demoted; a new connection may reach the one that took over.
_READ_ONLY_TRANSACTION = "25006"


class Database:
    """Run SQL over a pool of our own, a pool that the app has, or an SQLAlchemy engine; threads may share it.

    Building one does no I/O. What was handed in is used and never closed, its connections go back with the autocommit
    setting they came with, and keeping it right over a fork is the app's affair.
    A copy or a pickle of one with its own pool carries the configuration (with the password), no connections.

    Args:
        source: A DSN; None for $DATABASE_URL; an object with `getconn` and `putconn` that gives psycopg2 connections
            and may be shared by threads; or an SQLAlchemy engine over psycopg2.
        min_connections: See `ConnectionPool`; like `application_name` only for a pool of our own.
        max_connections: See `ConnectionPool`; with an engine only the number of callers to expect at once.
        timeout_seconds: How long to wait for a free connection; an engine waits by its own `pool_timeout`.
        query_timeout_seconds: How long an answer may take; then its connection is thrown away.
        retry_seconds: For how long, from the first failure on, what may pass is tried again; 0 for never.
        on_operation: Called with an `Operation` after each.
        application_name: See `ConnectionPool`.

    Attributes:
        address: Where the database is, without secrets, as far as it can be known without connecting.
        max_connections: How many connections there are at most.

    Raises:
        ConfigurationError: An argument is not usable.
    """

    # Until it is built: error trackers show the frame of __init__.
    address = "(not built)"
    max_connections = 0

    def __init__(
        self,
        source: Any = None,
        *,
        min_connections: int = 1,
        max_connections: int = 10,
        timeout_seconds: float = 30.0,
        query_timeout_seconds: float = 15.0,
        retry_seconds: float = 10.0,
        on_operation: Callable[[Operation], object] | None = None,
        application_name: str = "pgmemory",
    ) -> None:
        self._query_timeout_seconds = check_seconds(
            "query_timeout_seconds", query_timeout_seconds, above_zero=True, most=LONGEST_QUERY_SECONDS
        )
        self._retry_seconds = check_seconds("retry_seconds", retry_seconds)
        self._on_operation = on_operation
        self._source = open_source(
            source,
            min_connections=min_connections,
            max_connections=max_connections,
            timeout_seconds=timeout_seconds,
            application_name=application_name,
        )
        self.address = self._source.address
        self.max_connections = self._source.max_connections

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.address}, max_connections={self.max_connections}>"

    def __getstate__(self) -> dict[str, Any]:
        if not self._source.is_own:
            raise TypeError(
                f"cannot copy or pickle a {type(self).__name__} over a pool or an engine that it was given: "
                "build it from a DSN, or build another one where it is needed"
            )
        return self.__dict__

    def __deepcopy__(self, memo: dict[int, Any]) -> Database:
        copied = copy.copy(self)  # with the application's own on_operation, not a copy of it
        copied._source = copy.deepcopy(self._source, memo)
        return copied

    def execute(
        self, statements: str, parameters: Mapping[str, Any] | None = None, *, name: str = "execute"
    ) -> Rows:
        """Run one or several ``;``-separated statements in one round trip and one transaction.

        They must be safe to run twice: see `repeat`.

        Args:
            statements: SQL; with parameters, ``%(name)s`` stands for one and ``%%`` for a percent sign.
            parameters: Values by name.
            name: What to call this operation in logs and for `on_operation`.

        Returns:
            The rows of the last statement; none if it returns no rows.

        Raises:
            StoreUnavailableError: The database could not be reached, or connections were lost, for `retry_seconds`.
            PoolTimeoutError: No connection became free in time.
            PoolClosedError: The pool is closed.
            StoreError: The database refused a statement; none of them has taken effect.
        """
        row_count = 0

        def run() -> Rows:
            nonlocal row_count
            with self._connection(autocommit=True) as conn:
                rows, row_count = self._run(conn, statements, parameters, self._query_timeout_seconds)
            return rows

        return self.repeat(run, name=name, row_count=lambda: row_count)

    def repeat(self, function: Callable[[], T], *, name: str, row_count: Callable[[], int] = lambda: 0) -> T:
        """Call a function again while what it raises may pass, though it may have taken effect.

        That is: a lost connection, one that could not be opened, an answer that did not come in time, a server that
        was demoted (25006), a serialization failure (40001), a deadlock (40P01), a lock or a statement that took too
        long (55P03, 57014).

        Args:
            function: Uses this database.
            name: What to call this operation in logs and for `on_operation`.
            row_count: Returns how many rows the function has read or written.

        Raises:
            StoreError: The last failure, `retry_seconds` after the first or when it is none that may pass.
        """
        started = time.monotonic()
        tries = Tries(function, self._retry_seconds, name)
        error: BaseException | None = None
        try:
            return tries.run()
        except BaseException as exc:
            error = exc
            raise
        finally:
            failed, seconds = len(tries.failures), time.monotonic() - started
            if failed and error is None and tries.healed:
                logger.warning("%s was done after %d tries in %.1f s: %s", name, failed + 1, seconds, tries.failures[0])
            if self._on_operation is not None:
                rows, retries = (row_count(), failed) if error is None else (0, max(0, failed - 1))
                self._tell(Operation(name, seconds, rows, retries, error))

    @contextmanager
    def transaction(self, *, query_timeout_seconds: float | None = None) -> Iterator[Execute]:
        """Run statements of several calls in one transaction, committed at the end, rolled back on any exception.

        Args:
            query_timeout_seconds: How long each answer may take, if not as long as elsewhere.

        Yields:
            A function of statements and parameters, as `execute` takes them; nothing is run twice.

        Raises:
            StoreError: As for `execute`. If the connection is lost at the very end it may yet have been committed.
        """
        seconds = query_timeout_seconds or self._query_timeout_seconds
        with self._connection(autocommit=False) as conn:
            yield lambda statements, parameters=None: self._run(conn, statements, parameters, seconds)[0]
            deadline = answer_within(conn, seconds)
            try:
                with deadline:
                    conn.commit()
            except psycopg2.Error as exc:
                raise self._failure(exc, deadline, seconds) from exc

    def stats(self) -> PoolStats | None:
        """Return how the connections of our own pool are used; None over what was handed in."""
        return self._source.stats()

    def close(self, timeout_seconds: float = 5.0) -> None:
        """Close a pool of our own, as `ConnectionPool.closeall` does; leave alone what was handed in."""
        self._source.close(timeout_seconds)

    def _run(
        self, conn: ext.connection, statements: str, parameters: Mapping[str, Any] | None, seconds: float
    ) -> tuple[Rows, int]:
        deadline = answer_within(conn, seconds)
        try:
            with deadline, tuple_cursor(conn) as cursor:
                cursor.execute(statements, parameters)
                return cursor.fetchall() if cursor.description else [], cursor.rowcount
        except psycopg2.Error as exc:
            raise self._failure(exc, deadline, seconds) from exc

    @contextmanager
    def _connection(self, *, autocommit: bool) -> Iterator[ext.connection]:
        """Borrow a connection with no transaction open; whatever happens it goes back or is thrown away."""
        loan, conn = self._source.borrow()
        originally = conn.autocommit
        usable = False
        try:
            if not settle(conn, autocommit=autocommit):
                raise StoreUnavailableError(f"lost the connection to {self.address}", connection_lost=True)
            yield conn
        finally:
            try:
                usable = settle(conn, autocommit=originally)
            finally:
                self._source.give_back(loan, usable=usable)

    def _failure(self, exc: psycopg2.Error, deadline: Deadline, seconds: float) -> StoreError:
        """Return our error for one of psycopg2's, and close a connection that was lost."""
        conn = deadline.conn
        # Lost connections carry no SQLSTATE, and psycopg2 does not notice each of them. A bare DatabaseError is
        # what it raises for a failure of libpq's own.
        no_answer = isinstance(exc, (psycopg2.OperationalError, psycopg2.InterfaceError))
        no_answer = no_answer or type(exc) is psycopg2.DatabaseError
        if conn.closed or (no_answer and exc.pgcode is None) or exc.pgcode == _READ_ONLY_TRANSACTION:
            info = conn.info
            address = describe(info.host, info.port, info.dbname) if info.host else self.address
            conn.close()
            text = f"lost the connection to {address}: {reason(exc)}"
            if exc.pgcode == _READ_ONLY_TRANSACTION:
                text = f"the session at {address} may only read (a standby, or default_transaction_read_only)"
            elif deadline.passed:
                text = f"no answer from {address} within {seconds:g} s (query_timeout_seconds)"
            if deadline.passed or exc.pgcode == _READ_ONLY_TRANSACTION:
                # The others lead to the same server, which has not ended them.
                self._source.drain()
            return StoreUnavailableError(text, sqlstate=exc.pgcode, connection_lost=True)
        text = f"{exc.diag.message_primary} (SQLSTATE {exc.pgcode})" if exc.pgcode else reason(exc)
        return StoreError(text, sqlstate=exc.pgcode, constraint_name=exc.diag.constraint_name)

    def _tell(self, operation: Operation) -> None:
        assert self._on_operation is not None
        try:
            self._on_operation(operation)
        except Exception:
            # What watches the work must not break it.
            logger.exception("on_operation failed; the operation %r is not affected", operation.name)
