"""Where connections come from: a pool of our own, a pool that the application has, or its SQLAlchemy engine."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, Protocol

import psycopg2
import psycopg2.extensions as ext
import psycopg2.pool

from pgmemory.errors import ConfigurationError
from pgmemory.models import PoolStats
from pgmemory.pool.connections import ConnectionPool
from pgmemory.pool.dsn import describe
from pgmemory.pool.errors import PoolClosedError, PoolTimeoutError, could_not_connect, reason
from pgmemory.pool.hygiene import is_alive, log_dead
from pgmemory.pool.limits import check_connections, check_seconds, out_of_connections


class Source(Protocol):
    """What lends connections.

    Attributes:
        address: Where the database is, without secrets, as far as it can be known without connecting.
        max_connections: How many connections there are at most.
        is_own: Whether it was made here, to be closed here; else it is the application's.
    """

    address: str
    max_connections: int
    is_own: bool

    def borrow(self) -> tuple[Any, ext.connection]:
        """Return what was borrowed, to be given back, and the connection in it.

        Raises:
            PoolTimeoutError: None became free in time.
            PoolClosedError: The pool is closed.
            StoreUnavailableError: None could be opened.
            ConfigurationError: It is another driver's connection.
        """

    def give_back(self, loan: Any, *, usable: bool) -> None:
        """Give back what was borrowed; what is not usable is closed."""

    def drain(self) -> None:
        """Replace all connections, where they are ours to replace."""

    def close(self, timeout_seconds: float) -> None:
        """Close what was made here, waiting so long for what is in use."""

    def stats(self) -> PoolStats | None:
        """Return how its connections are used, or None for what the application watches itself."""


class PoolSource:
    """A pool with psycopg2's interface: ours, or the application's."""

    def __init__(self, pool: Any, *, is_own: bool, max_connections: int, timeout_seconds: float) -> None:
        self._pool = pool
        self._timeout_seconds = timeout_seconds
        self.is_own = is_own
        self.address: str = getattr(pool, "address", f"the given {type(pool).__name__}")
        self.max_connections: int = getattr(pool, "max_connections", getattr(pool, "maxconn", max_connections))

    def borrow(self) -> tuple[Any, ext.connection]:
        """Wait for a connection of the pool's."""
        if isinstance(self._pool, ConnectionPool):
            conn = self._pool.getconn()
            return conn, conn
        return _first_alive(self, lambda: (conn := self._getconn(), conn))

    def give_back(self, loan: Any, *, usable: bool) -> None:
        """Give a connection back to the pool."""
        try:
            self._pool.putconn(loan, close=not usable)
        except psycopg2.pool.PoolError:
            # The app has closed its pool meanwhile; that must not hide what happened on the connection.
            loan.close()

    def drain(self) -> None:
        """Replace the connections of a pool of our kind; psycopg2's give no way to."""
        if isinstance(self._pool, ConnectionPool):
            self._pool.drain()

    def close(self, timeout_seconds: float) -> None:
        """Close a pool of our own; leave the application's alone."""
        if self.is_own:
            self._pool.closeall(timeout_seconds)

    def stats(self) -> PoolStats | None:
        """Return what a pool of ours counts."""
        return self._pool.stats() if isinstance(self._pool, ConnectionPool) else None

    def _getconn(self) -> Any:
        deadline = time.monotonic() + self._timeout_seconds
        while True:
            try:
                return self._pool.getconn()
            except psycopg2.pool.PoolError as exc:
                if self._pool.closed:
                    raise PoolClosedError(f"{self.address} is closed") from exc
                if time.monotonic() >= deadline:
                    raise out_of_connections(self.address, self.max_connections, self._timeout_seconds) from exc
            except psycopg2.Error as exc:
                raise could_not_connect(self.address, exc) from exc.with_traceback(None)
            # psycopg2's pools refuse at once and do not tell when a connection comes back.
            time.sleep(random.uniform(0.002, 0.02))


class EngineSource:
    """The application's SQLAlchemy engine; it waits for a connection by its own `pool_timeout`."""

    is_own = False

    def __init__(self, engine: Any, *, max_connections: int) -> None:
        if engine.dialect.driver != "psycopg2":
            raise ConfigurationError(f"the engine's driver is {engine.dialect.driver}; use postgresql+psycopg2://…")
        self._engine = engine
        self.address = describe(engine.url.host, engine.url.port, engine.url.database)
        self.max_connections = max_connections

    def borrow(self) -> tuple[Any, ext.connection]:
        """Check a connection of the engine's out."""
        return _first_alive(self, lambda: (loan := self._check_out(), loan.dbapi_connection))

    def _check_out(self) -> Any:
        try:
            return self._engine.raw_connection()
        except Exception as exc:
            cause = getattr(exc, "orig", exc)  # SQLAlchemy 1.4 wraps psycopg2's errors here
            if isinstance(cause, psycopg2.Error):
                raise could_not_connect(self.address, cause) from cause.with_traceback(None)
            if type(exc).__name__ == "TimeoutError":
                raise PoolTimeoutError(f"the engine had no free connection in time: {reason(exc)}") from exc
            raise

    def give_back(self, loan: Any, *, usable: bool) -> None:
        """Check a connection in."""
        loan.close() if usable else loan.invalidate()

    def drain(self) -> None:
        """Leave the others to the engine, whose application may use them elsewhere."""

    def close(self, timeout_seconds: float) -> None:
        """Leave the application's engine alone."""

    def stats(self) -> PoolStats | None:
        """Return nothing: ``engine.pool.status()`` tells."""
        return None


def _first_alive(source: Source, borrow: Callable[[], tuple[Any, Any]]) -> tuple[Any, ext.connection]:
    """Return the first of the application's connections that still stands; each dead one makes room for another."""
    dead = 0
    while True:
        loan, conn = borrow()
        if not isinstance(conn, ext.connection):
            source.give_back(loan, usable=True)
            raise ConfigurationError(
                f"{source.address} gives connections of {type(conn).__module__}, not of psycopg2"
            )
        if is_alive(conn) or dead > source.max_connections:  # a pool that gives dead ones only is left to fail
            break
        source.give_back(loan, usable=False)
        dead += 1
    if dead:
        log_dead(dead, source.address)
    return loan, conn


def open_source(
    source: Any,
    *,
    min_connections: int,
    max_connections: int,
    timeout_seconds: float,
    application_name: str,
) -> Source:
    """Return a source of connections for a DSN (None for $DATABASE_URL), a pool or an engine. No I/O.

    Raises:
        ConfigurationError: An argument is not usable.
    """
    check_connections(min_connections, max_connections)
    check_seconds("timeout_seconds", timeout_seconds)
    if source is None or isinstance(source, str):
        pool = ConnectionPool(
            source,
            min_connections=min_connections,
            max_connections=max_connections,
            timeout_seconds=timeout_seconds,
            application_name=application_name,
        )
        return PoolSource(pool, is_own=True, max_connections=max_connections, timeout_seconds=timeout_seconds)
    if hasattr(source, "getconn") and hasattr(source, "putconn"):
        return PoolSource(source, is_own=False, max_connections=max_connections, timeout_seconds=timeout_seconds)
    if hasattr(source, "raw_connection") and hasattr(source, "dialect"):
        return EngineSource(source, max_connections=max_connections)
    raise ConfigurationError(
        "the source must be a DSN, a psycopg2 pool (getconn, putconn) or an SQLAlchemy engine, not "
        f"{type(source).__name__}"
    )
