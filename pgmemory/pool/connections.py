"""A pool of connections: waiting for a free one, noticing and replacing dead ones, forks."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import WeakSet

import psycopg2
import psycopg2.extensions as ext
import psycopg2.extras
import psycopg2.pool

from pgmemory.errors import ConfigurationError
from pgmemory.pool.dsn import describe, read_dsn
from pgmemory.pool.errors import PoolClosedError, PoolTimeoutError, could_not_connect

logger = logging.getLogger(__name__)

# Connections above min_connections are closed once they have lain idle for this long.
_IDLE_SECONDS = 300.0
_ROW_SHAPING_CURSORS = (psycopg2.extras.DictCursorBase, psycopg2.extras.NamedTupleCursor)


def check_limits(min_connections: int, max_connections: int, timeout_seconds: float) -> None:
    """Refuse sizes and times that make no sense, with a ConfigurationError."""
    for name, value, least in (("min_connections", min_connections, 0), ("max_connections", max_connections, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigurationError(f"{name} must be a whole number, at least {least}, not {value!r}")
    if min_connections > max_connections:
        raise ConfigurationError(f"min_connections={min_connections} is more than max_connections={max_connections}")
    number = isinstance(timeout_seconds, (int, float)) and not isinstance(timeout_seconds, bool)
    if not number or not 0 <= timeout_seconds <= threading.TIMEOUT_MAX:
        raise ConfigurationError(f"timeout_seconds must be a number of seconds, 0 or more, not {timeout_seconds!r}")


def out_of_connections(max_connections: int, timeout_seconds: float) -> PoolTimeoutError:
    """Return the error for having waited in vain."""
    return PoolTimeoutError(
        f"no connection became free within timeout_seconds={timeout_seconds:g}: max_connections={max_connections} are "
        "in use; raise one of the two, or find what holds connections for so long"
    )


def is_alive(conn: ext.connection) -> bool:
    """Tell whether an idle connection still stands: an idle server has nothing to say but goodbye."""
    if conn.closed:
        return False
    if not hasattr(select, "poll"):  # Windows
        return not select.select([conn], [], [], 0)[0]
    poll = select.poll()
    poll.register(conn, select.POLLIN)
    return not poll.poll(0)


def tuple_cursor(conn: ext.connection) -> ext.cursor:
    """Return a cursor whose rows are tuples; the app's own kind where that is so, which may count or log statements."""
    cursor = conn.cursor()
    return conn.cursor(cursor_factory=ext.cursor) if isinstance(cursor, _ROW_SHAPING_CURSORS) else cursor


def settle(conn: ext.connection, *, autocommit: bool) -> bool:
    """Roll back what is open and set `autocommit`; False if the connection is of no more use."""
    try:
        if conn.info.transaction_status in (ext.TRANSACTION_STATUS_INTRANS, ext.TRANSACTION_STATUS_INERROR):
            conn.rollback()
            if conn.autocommit:  # where psycopg2's rollback() does nothing
                with conn.cursor(cursor_factory=ext.cursor) as cursor:
                    cursor.execute("rollback")
        if conn.info.transaction_status != ext.TRANSACTION_STATUS_IDLE:
            return False
        if conn.autocommit != autocommit:
            conn.autocommit = autocommit
    except psycopg2.Error:
        return False
    return True


class _Place:
    """A caller's place in the queue; with its turn it gets a connection, or None: the right to open one."""

    def __init__(self) -> None:
        self.turn = threading.Event()
        self.granted = False
        self.connection: ext.connection | None = None


class ConnectionPool:
    """Connections in autocommit, shared by the threads of a process; the interface is that of `psycopg2.pool`.

    Building one does no I/O. Callers who find no free connection wait in order of arrival. Connections that the server
    has closed are noticed and replaced before use. After a fork the child's pool is empty and opens its own.
    A copy or a pickle carries the configuration (with the password), no connections.

    Args:
        dsn: A URL or libpq's ``key=value`` form; None means $DATABASE_URL.
        min_connections: How many idle connections are never closed for being idle.
        max_connections: How many there are at most, those being opened included.
        timeout_seconds: How long `getconn` waits for a free connection; opening one comes on top (`connect_timeout`).
        application_name: Shown in pg_stat_activity, unless the DSN names another.

    Raises:
        ConfigurationError: The DSN or a number is not usable.
    """

    # Until it is built: error trackers show the frame of __init__.
    address = "(not built)"
    min_connections = max_connections = 0

    def __init__(
        self,
        dsn: str | None = None,
        *,
        min_connections: int = 1,
        max_connections: int = 10,
        timeout_seconds: float = 30.0,
        application_name: str = "pgmemory",
    ) -> None:
        check_limits(min_connections, max_connections, timeout_seconds)
        parameters = read_dsn(dsn, application_name)
        self._dsn = ext.make_dsn(**parameters)
        self.address = describe(
            parameters.get("host") or parameters.get("hostaddr"), parameters.get("port"), parameters.get("dbname")
        )
        self.min_connections = min_connections
        self.max_connections = max_connections
        self.timeout_seconds = timeout_seconds
        self.closed = False
        self._start_empty()
        _pools.add(self)

    def _start_empty(self) -> None:
        # Reentrant: the garbage collector may return a connection while its thread is in here.
        self._lock = threading.RLock()
        self._idle: deque[tuple[ext.connection, float]] = deque()  # with the time of their return, oldest first
        self._in_use: dict[ext.connection, object] = {}  # with the key they were asked for
        self._size = 0  # idle, in use, being opened, being returned
        self._queue: deque[_Place] = deque()

    def __repr__(self) -> str:
        sizes = f"min_connections={self.min_connections}, max_connections={self.max_connections}"
        return f"<{type(self).__name__} {self.address}, {sizes}>"

    def __reduce__(self) -> tuple[Any, ...]:
        limits = {name: getattr(self, name) for name in ("min_connections", "max_connections", "timeout_seconds")}
        return partial(type(self), **limits), (self._dsn,)

    def getconn(self, key: object = None) -> ext.connection:
        """Lend a connection; with the `key` of one that is out, that same one.

        Raises:
            PoolTimeoutError: None became free within `timeout_seconds`.
            PoolClosedError: The pool is closed.
            StoreUnavailableError: A new connection was needed and could not be opened.
        """
        conn: ext.connection | None = None
        place: _Place | None = None
        with self._lock:
            self._check_open()
            if key is not None and key in self._in_use.values():
                return next(used for used, its_key in self._in_use.items() if its_key == key)
            if self._idle:
                conn, _ = self._idle.pop()
            elif self._size < self.max_connections:
                self._size += 1
            else:
                place = _Place()
                self._queue.append(place)
        if place is not None:
            conn = self._wait(place)
        try:
            if conn is not None and not is_alive(conn):
                logger.info("the server has closed an idle connection to %s: opening another", self.address)
                conn.close()
                conn = None
            if conn is None:
                conn = self._open()
            with self._lock:
                self._check_open()
                self._in_use[conn] = key
        except BaseException:
            if conn is not None:
                conn.close()
            self._pass_on(None)
            raise
        return conn

    def putconn(self, conn: ext.connection, key: object = None, close: bool = False) -> None:
        """Take a connection back, rolled back; a broken one, or any with `close`, is closed.

        Raises:
            psycopg2.pool.PoolError: The pool has not lent this connection, or has it back already.
        """
        with self._lock:
            if conn not in self._in_use:
                raise psycopg2.pool.PoolError("this connection is not out on loan from this pool (in this process)")
            del self._in_use[conn]
        usable = False
        try:
            usable = not close and not self.closed and settle(conn, autocommit=True)
        finally:
            if not usable:
                conn.close()
            self._pass_on(conn if usable else None)

    def closeall(self) -> None:
        """Close the idle connections now and the others as they come back; whoever waits gets a PoolClosedError."""
        with self._lock:
            self.closed = True
            idle, self._idle = self._idle, deque()
            self._size -= len(idle)
            queue, self._queue = self._queue, deque()
        for conn, _ in idle:
            conn.close()
        for place in queue:
            place.turn.set()

    def _check_open(self) -> None:
        if self.closed:
            raise PoolClosedError(f"the pool of connections to {self.address} is closed")

    def _open(self) -> ext.connection:
        try:
            conn = psycopg2.connect(self._dsn)
        except psycopg2.Error as exc:
            raise could_not_connect(self.address, exc) from exc.with_traceback(None)
        conn.autocommit = True
        return conn

    def _wait(self, place: _Place) -> ext.connection | None:
        """Wait for a place's turn."""
        try:
            place.turn.wait(self.timeout_seconds)
        except BaseException:
            if self._leave(place):
                self._pass_on(place.connection)
            raise
        if self._leave(place):
            return place.connection
        self._check_open()
        raise out_of_connections(self.max_connections, self.timeout_seconds)

    def _leave(self, place: _Place) -> bool:
        """Leave the queue; tell whether the turn had come, perhaps at the last moment."""
        with self._lock:
            if place in self._queue:
                self._queue.remove(place)
            return place.granted

    def _pass_on(self, conn: ext.connection | None) -> None:
        """Give a connection, or with None the right to open one, to whoever has waited longest."""
        now = time.monotonic()
        surplus = []
        with self._lock:
            if self._queue:
                place = self._queue.popleft()
                place.connection, place.granted = conn, True
                place.turn.set()
            elif conn is None:
                self._size -= 1
            else:
                self._idle.append((conn, now))
                while self._idle and (
                    self.closed or (self._size > self.min_connections and self._idle[0][1] < now - _IDLE_SECONDS)
                ):
                    surplus.append(self._idle.popleft()[0])
                    self._size -= 1
        for conn in surplus:
            conn.close()

    def _forget_inherited(self) -> None:
        """Start anew in a forked child, without a word to the server, whose sessions are the parent's."""
        with suppress(OSError):
            null = os.open(os.devnull, os.O_RDWR)
            # close() would end the parent's session; leaving the socket open would keep it alive after the parent.
            for conn in [*self._in_use, *(conn for conn, _ in self._idle)]:
                with suppress(psycopg2.Error, OSError):
                    os.dup2(null, conn.fileno(), inheritable=False)
            os.close(null)
        self._start_empty()


_pools: WeakSet[ConnectionPool] = WeakSet()


def _after_fork_in_child() -> None:
    for pool in list(_pools):
        pool._forget_inherited()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork_in_child)
