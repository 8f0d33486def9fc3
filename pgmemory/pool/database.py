"""Running statements: on a pool of our own, one that was given, or an engine; again where that is safe."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import psycopg2
import psycopg2.extensions as ext
import psycopg2.pool
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from pgmemory.errors import ConfigurationError
from pgmemory.pool.connections import (
    ConnectionPool,
    check_limits,
    is_alive,
    out_of_connections,
    settle,
    tuple_cursor,
)
from pgmemory.pool.dsn import describe
from pgmemory.pool.errors import (
    PoolClosedError,
    PoolTimeoutError,
    StoreError,
    StoreUnavailableError,
    could_not_connect,
    reason,
)

logger = logging.getLogger(__name__)

Rows = list[tuple[Any, ...]]
Execute = Callable[..., Rows]  # as `Database.execute`

# How often `Database.execute` runs its statements at most, the first time included.
_ATTEMPTS = 6
_SERIALIZATION_FAILURE, _DEADLOCK_DETECTED = "40001", "40P01"
# The server of this connection was demoted; a new connection may reach the one that took over.
_READ_ONLY_TRANSACTION = "25006"


def _is_repeatable(exc: BaseException) -> bool:
    if isinstance(exc, StoreUnavailableError):
        return exc.connection_lost
    return isinstance(exc, StoreError) and exc.sqlstate in (_SERIALIZATION_FAILURE, _DEADLOCK_DETECTED)


def _log_lost_connection(state: RetryCallState) -> None:
    exc = state.outcome.exception() if state.outcome else None
    if isinstance(exc, StoreUnavailableError):
        logger.warning("%s; running the statements again on another connection", exc)


_repeat = Retrying(
    retry=retry_if_exception(_is_repeatable),
    stop=stop_after_attempt(_ATTEMPTS),
    wait=wait_random_exponential(multiplier=0.02, max=1.0),
    before_sleep=_log_lost_connection,
    reraise=True,
)


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
        application_name: str = "pgmemory",
    ) -> None:
        check_limits(min_connections, max_connections, timeout_seconds)
        self.address = f"the given {type(source).__name__}"
        self.max_connections = max_connections
        self._timeout_seconds = timeout_seconds
        self._pool: Any = None
        self._engine: Any = None
        self._owns_pool = source is None or isinstance(source, str)
        if self._owns_pool:
            self._pool = ConnectionPool(
                source,
                min_connections=min_connections,
                max_connections=max_connections,
                timeout_seconds=timeout_seconds,
                application_name=application_name,
            )
            self.address = self._pool.address
        elif hasattr(source, "getconn") and hasattr(source, "putconn"):
            self._pool = source
            if isinstance(source, ConnectionPool):
                self.address, self.max_connections = source.address, source.max_connections
            else:
                self.max_connections = getattr(source, "maxconn", max_connections)
        elif hasattr(source, "raw_connection") and hasattr(source, "dialect"):
            if source.dialect.driver != "psycopg2":
                raise ConfigurationError(
                    f"the engine's driver is {source.dialect.driver}; create it with postgresql+psycopg2://…"
                )
            self._engine = source
            self.address = describe(source.url.host, source.url.port, source.url.database)
        else:
            raise ConfigurationError(
                "the source must be a DSN, a psycopg2 pool (getconn, putconn) or an SQLAlchemy engine, not "
                f"{type(source).__name__}"
            )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.address}, max_connections={self.max_connections}>"

    def __getstate__(self) -> dict[str, Any]:
        if not self._owns_pool:
            raise TypeError(
                f"cannot copy or pickle a {type(self).__name__} over a pool or an engine that it was given: "
                "build it from a DSN, or build another one where it is needed"
            )
        return self.__dict__

    def execute(self, statements: str, parameters: Mapping[str, Any] | None = None) -> Rows:
        """Run one or several ``;``-separated statements in one round trip and one transaction.

        They must be safe to run twice: if the connection is lost they run again on another one, though they may have
        taken effect, and so they do after a serialization failure (40001) or a deadlock (40P01); six times at most.

        Args:
            statements: SQL; with parameters, ``%(name)s`` stands for one and ``%%`` for a percent sign.
            parameters: Values by name.

        Returns:
            The rows of the last statement; none if it returns no rows.

        Raises:
            StoreUnavailableError: No connection could be opened (not tried again here), or too many were lost.
            PoolTimeoutError: No connection became free in time.
            PoolClosedError: The pool is closed.
            StoreError: The database refused a statement; none of them has taken effect.
        """
        return _repeat(self._execute_once, statements, parameters)

    @contextmanager
    def transaction(self) -> Iterator[Execute]:
        """Run statements of several calls in one transaction, committed at the end, rolled back on any exception.

        Yields:
            A function with the signature of `execute`; nothing is run twice.

        Raises:
            StoreError: As for `execute`. If the connection is lost at the very end it may yet have been committed.
        """
        with self._connection(autocommit=False) as conn:
            yield partial(self._run, conn)
            with self._translated(conn):
                conn.commit()

    def close(self) -> None:
        """Close a pool of our own; leave alone what was handed in."""
        if self._owns_pool:
            self._pool.closeall()

    def _execute_once(self, statements: str, parameters: Mapping[str, Any] | None) -> Rows:
        with self._connection(autocommit=True) as conn:
            return self._run(conn, statements, parameters)

    def _run(self, conn: ext.connection, statements: str, parameters: Mapping[str, Any] | None = None) -> Rows:
        with self._translated(conn), tuple_cursor(conn) as cursor:
            cursor.execute(statements, parameters)
            return cursor.fetchall() if cursor.description else []

    @contextmanager
    def _connection(self, *, autocommit: bool) -> Iterator[ext.connection]:
        """Borrow a connection with no transaction open; whatever happens it goes back or is thrown away."""
        loan, conn = self._borrow()
        # Each dead one that a given pool or engine holds makes room for another.
        for _ in range(self.max_connections):
            if is_alive(conn):
                break
            self._give_back(loan, usable=False)
            loan, conn = self._borrow()
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
                self._give_back(loan, usable=usable)

    def _borrow(self) -> tuple[Any, ext.connection]:
        """Return what was borrowed, to be given back, and the connection in it."""
        loan = self._borrow_from_pool() if self._engine is None else self._borrow_from_engine()
        conn = loan if self._engine is None else loan.dbapi_connection
        if not isinstance(conn, ext.connection):
            self._give_back(loan, usable=True)
            raise ConfigurationError(f"{self.address} gives connections of {type(conn).__module__}, not of psycopg2")
        return loan, conn

    def _give_back(self, loan: Any, *, usable: bool) -> None:
        if self._engine is not None:
            loan.close() if usable else loan.invalidate()
            return
        try:
            self._pool.putconn(loan, close=not usable)
        except psycopg2.pool.PoolError:
            # The app has closed its pool meanwhile; that must not hide what happened on the connection.
            loan.close()

    def _borrow_from_pool(self) -> Any:
        deadline = time.monotonic() + self._timeout_seconds
        while True:
            try:
                return self._pool.getconn()
            except StoreError:
                raise
            except psycopg2.pool.PoolError as exc:
                if self._pool.closed:
                    raise PoolClosedError(f"{self.address} is closed") from exc
                if time.monotonic() >= deadline:
                    raise out_of_connections(self.max_connections, self._timeout_seconds) from exc
            except psycopg2.Error as exc:
                raise could_not_connect(self.address, exc) from exc.with_traceback(None)
            # psycopg2's pools refuse at once and do not tell when a connection comes back.
            time.sleep(random.uniform(0.002, 0.02))

    def _borrow_from_engine(self) -> Any:
        try:
            return self._engine.raw_connection()
        except Exception as exc:
            cause = getattr(exc, "orig", exc)  # SQLAlchemy 1.4 wraps psycopg2's errors here
            if isinstance(cause, psycopg2.Error):
                raise could_not_connect(self.address, cause) from cause.with_traceback(None)
            if type(exc).__name__ == "TimeoutError":
                raise PoolTimeoutError(f"the engine had no free connection in time: {reason(exc)}") from exc
            raise

    @contextmanager
    def _translated(self, conn: ext.connection) -> Iterator[None]:
        """Turn psycopg2's errors into ours, and close a connection that was lost."""
        try:
            yield
        except psycopg2.Error as exc:
            # Lost connections carry no SQLSTATE, and psycopg2 does not notice each of them. A bare DatabaseError is
            # what it raises for a failure of libpq's own.
            no_answer = isinstance(exc, (psycopg2.OperationalError, psycopg2.InterfaceError))
            no_answer = no_answer or type(exc) is psycopg2.DatabaseError
            if conn.closed or (no_answer and exc.pgcode is None) or exc.pgcode == _READ_ONLY_TRANSACTION:
                info = conn.info
                address = describe(info.host, info.port, info.dbname) if info.host else self.address
                conn.close()
                raise StoreUnavailableError(
                    f"lost the connection to {address}: {reason(exc)}", sqlstate=exc.pgcode, connection_lost=True
                ) from exc
            text = f"{exc.diag.message_primary} (SQLSTATE {exc.pgcode})" if exc.pgcode else reason(exc)
            raise StoreError(text, sqlstate=exc.pgcode, constraint_name=exc.diag.constraint_name) from exc
