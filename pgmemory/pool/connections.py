"""A pool of connections: waiting for a free one, noticing and replacing dead ones, forks."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakSet

import psycopg2
import psycopg2.extensions as ext
import psycopg2.pool

from pgmemory.models import PoolStats
from pgmemory.pool.deadlines import connect_within, shut_down
from pgmemory.pool.dsn import describe, longest_connect_seconds, read_dsn
from pgmemory.pool.errors import PoolClosedError, could_not_connect
from pgmemory.pool.hygiene import end_sessions, is_alive, log_dead, settle
from pgmemory.pool.limits import check_connections, check_seconds, out_of_connections

logger = logging.getLogger(__name__)

# Connections above min_connections are closed once they have lain idle for this long.
_IDLE_SECONDS = 300.0


class _Loan(NamedTuple):
    """What is remembered of a connection in use."""

    key: object
    generation: int


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
        check_connections(min_connections, max_connections)
        check_seconds("timeout_seconds", timeout_seconds)
        parameters = read_dsn(dsn, application_name)
        self._dsn = ext.make_dsn(**parameters)
        self._connect_seconds = longest_connect_seconds(parameters)
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
        self._in_use: dict[ext.connection, _Loan] = {}
        self._all: WeakSet[ext.connection] = WeakSet()  # also those on their way from one place to the other
        self._generation = 0  # of connections; an older one's are not lent again
        self._size = 0  # idle, in use, being opened, being returned
        self._queue: deque[_Place] = deque()
        self._all_returned = threading.Condition(self._lock)
        self._opened = self._lost = self._waits = self._timeouts = 0
        self._waited_seconds = 0.0

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
            if key is not None:
                for used, loan in self._in_use.items():
                    if loan.key == key:
                        return used
            generation = self._generation
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
                self._discard_dead(conn)
                conn = None
            if conn is None:
                conn = self._open()
            with self._lock:
                self._check_open()
                self._in_use[conn] = _Loan(key, generation)
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
            loan = self._in_use.pop(conn)
            if not self._in_use:
                self._all_returned.notify_all()
        usable = False
        try:
            usable = not close and not self.closed and settle(conn, autocommit=True)
        finally:
            with self._lock:
                self._lost += bool(conn.closed)
                usable = usable and loan.generation == self._generation
                if usable:
                    self._pass_on(conn)
            if not usable:
                self._discard(conn)

    def drain(self) -> None:
        """Replace all connections: close the idle ones now and the others as they come back.

        For when the server is no longer the right one, though it still holds them.
        """
        with self._lock:
            idle, self._idle = self._idle, deque()
            self._generation += 1
        self._discard(*(conn for conn, _ in idle))

    def closeall(self, timeout_seconds: float = 5.0) -> None:
        """Close all connections: the idle ones now, the others as they come back, and cut those that do not.

        Whoever waits for a connection gets a PoolClosedError at once, and so does whoever asks for one from now on.

        Args:
            timeout_seconds: How long to wait for connections in use. What is cut then fails where it is used, and a
                warning says how many there were.
        """
        with self._lock:
            self.closed = True
            idle, self._idle = self._idle, deque()
            self._size -= len(idle)
            queue, self._queue = self._queue, deque()
        for conn, _ in idle:
            conn.close()
        for place in queue:
            place.turn.set()
        with self._lock:
            if not self._all_returned.wait_for(lambda: not self._in_use, timeout_seconds):
                logger.warning(
                    "closed the pool of connections to %s and cut %d of them, still in use after %g s",
                    self.address,
                    len(self._in_use),
                    timeout_seconds,
                )
                for conn in self._in_use:
                    shut_down(conn)

    def stats(self) -> PoolStats:
        """Return how the connections are used now, and what has happened since the pool was made (or forked)."""
        with self._lock:
            return PoolStats(
                max_connections=self.max_connections,
                connections=self._size,
                idle=len(self._idle),
                in_use=len(self._in_use),
                waiting=len(self._queue),
                opened=self._opened,
                lost=self._lost,
                waits=self._waits,
                waited_seconds=self._waited_seconds,
                timeouts=self._timeouts,
            )

    def _check_open(self) -> None:
        if self.closed:
            raise PoolClosedError(f"the pool of connections to {self.address} is closed")

    def _open(self) -> ext.connection:
        try:
            conn = connect_within(self._dsn, self._connect_seconds)
        except psycopg2.Error as exc:
            raise could_not_connect(self.address, exc) from exc.with_traceback(None)
        conn.autocommit = True
        with self._lock:
            self._opened += 1
            self._all.add(conn)
        return conn

    def _discard(self, *conns: ext.connection) -> None:
        """Close connections, and only then let others take their places."""
        end_sessions(conns)
        for _ in conns:
            self._pass_on(None)

    def _discard_dead(self, conn: ext.connection) -> None:
        """Close a connection that was found dead; look at the idle ones too: a server's restart ends them all."""
        with self._lock:
            dead = [other for other, _ in self._idle if not is_alive(other)]
            self._idle = deque((other, since) for other, since in self._idle if other not in dead)
            self._lost += len(dead) + 1
        log_dead(len(dead) + 1, self.address)
        conn.close()
        self._discard(*dead)

    def _wait(self, place: _Place) -> ext.connection | None:
        """Wait for a place's turn."""
        began = time.monotonic()
        try:
            place.turn.wait(self.timeout_seconds)
        except BaseException:
            if self._leave(place):
                self._pass_on(place.connection)
            raise
        finally:
            with self._lock:
                self._waits += 1
                self._waited_seconds += time.monotonic() - began
        if self._leave(place):
            return place.connection
        self._check_open()
        with self._lock:
            self._timeouts += 1
        raise out_of_connections(self.address, self.max_connections, self.timeout_seconds)

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
            for conn in list(self._all):
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
