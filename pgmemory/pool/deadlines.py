"""Deadlines for calls in which the driver would wait for ever.

A peer that acknowledges every packet and never answers, such as a paused pooler or a stuck proxy, defeats keepalives,
`tcp_user_timeout` and the server's `statement_timeout`. So one thread of each process shuts down the sockets of
connections whose answer is overdue; the call in the driver then ends with an error. It works on any connection, also on
those of an application's own pool. This module knows sockets and time, no SQL.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from types import TracebackType

import psycopg2
import psycopg2.extensions as ext


class Deadline:
    """One call's deadline, in force within a ``with`` block.

    Attributes:
        passed: Whether it has passed, so that the connection was shut down.
    """

    def __init__(self, conn: ext.connection, at: float) -> None:
        self.conn = conn
        self.at = at
        self.passed = False
        self._watchdog = _watchdog

    def __enter__(self) -> Deadline:
        self._watchdog.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._watchdog.remove(self)


def shut_down(conn: ext.connection, how: int = socket.SHUT_RDWR) -> None:
    """End the exchange on a connection that another thread uses: its call fails, at once, as if the server had gone."""
    # Not conn.close(), which waits for the call; nor on a duplicate of the descriptor, for which there may be no room.
    with suppress(OSError, psycopg2.Error):
        borrowed = socket.socket(fileno=conn.fileno())
        try:
            borrowed.shutdown(how)
        finally:
            borrowed.detach()


class _Watchdog:
    """A thread that shuts down what is overdue. It is started when first needed and sleeps while nothing is due."""

    def __init__(self) -> None:
        # Reentrant: a collection of garbage may end a call while its thread is in here.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._pending: set[Deadline] = set()
        self._thread: threading.Thread | None = None
        self._wakes_at = float("inf")

    def add(self, deadline: Deadline) -> None:
        with self._lock:  # the condition's own: its detour through Python would count with every statement
            if self._thread is None:
                thread = threading.Thread(target=self._watch, name="pgmemory-deadlines", daemon=True)
                thread.start()  # which fails where there is no room for another thread
                self._thread = thread
            elif deadline.at < self._wakes_at:
                self._changed.notify()
            self._pending.add(deadline)

    def remove(self, deadline: Deadline) -> None:
        # Behind the lock: once this has returned, the connection may be lent to somebody else.
        with self._lock:
            self._pending.discard(deadline)

    def _watch(self) -> None:
        with self._changed:
            while True:
                now = time.monotonic()
                self._wakes_at = self._end_overdue(now)
                self._changed.wait(min(self._wakes_at - now, threading.TIMEOUT_MAX))

    def _end_overdue(self, now: float) -> float:
        """Shut down what is overdue; return when the next will be."""
        # A function of its own, for a variable that lives on in a waiting thread would keep a connection alive.
        for deadline in list(self._pending):
            if deadline.at <= now:
                deadline.passed = True
                shut_down(deadline.conn)
                self._pending.discard(deadline)
        return min((deadline.at for deadline in list(self._pending)), default=float("inf"))


_watchdog = _Watchdog()


def connect_within(dsn: str, seconds: float) -> ext.connection:
    """Return a new connection, or give up after `seconds`, whatever libpq and psycopg2 are waiting for.

    `connect_timeout` bounds neither the resolver nor what psycopg2 itself asks of a server whose DateStyle is not ISO.

    Raises:
        psycopg2.Error: As psycopg2.connect, or a psycopg2.OperationalError if time is over.
    """
    outcome: Future[ext.connection] = Future()
    threading.Thread(target=_connect, args=(dsn, outcome), name="pgmemory-connect", daemon=True).start()
    del dsn  # error trackers show the variables of frames
    with suppress(FutureTimeoutError):
        try:
            return outcome.result(seconds)
        except KeyboardInterrupt:
            outcome.cancel()  # what comes later is closed
            raise
    if outcome.cancel():
        raise psycopg2.OperationalError(f"timeout expired: no connection within {seconds:g} s")
    return outcome.result()


def _connect(dsn: str, outcome: Future[ext.connection]) -> None:
    conn, error = None, None
    try:
        conn = psycopg2.connect(dsn)
    except BaseException as exc:
        error = exc
    if not outcome.set_running_or_notify_cancel():
        if conn is not None:
            conn.close()  # too late: nobody waits any more
    elif conn is not None:
        outcome.set_result(conn)
    else:
        outcome.set_exception(error)


def answer_within(conn: ext.connection, seconds: float) -> Deadline:
    """Return what shuts the connection down unless its ``with`` block ends within `seconds` from now."""
    return Deadline(conn, time.monotonic() + seconds)


def _after_fork_in_child() -> None:
    # The thread has stayed with the parent, and so has whoever may have held the lock.
    global _watchdog
    _watchdog = _Watchdog()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork_in_child)
