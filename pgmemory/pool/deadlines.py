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
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psycopg2
import psycopg2.extensions as ext


class Deadline:
    """One call's deadline.

    Attributes:
        passed: Whether it has passed, so that the connection was shut down.
    """

    def __init__(self, conn: ext.connection, at: float) -> None:
        self.conn = conn
        self.at = at
        self.passed = False


def shut_down(conn: ext.connection) -> None:
    """End the exchange on a connection that another thread uses: its call fails, at once, as if the server had gone."""
    # Not conn.close(), which waits for the call to end. A duplicate of the descriptor shares the socket.
    with suppress(OSError, psycopg2.Error):
        with socket.fromfd(conn.fileno(), socket.AF_INET, socket.SOCK_STREAM) as duplicate:
            duplicate.shutdown(socket.SHUT_RDWR)


class _Watchdog:
    """A thread that shuts down what is overdue. It is started when first needed and sleeps while nothing is due."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._pending: set[Deadline] = set()
        self._thread: threading.Thread | None = None
        self._wakes_at = float("inf")

    def add(self, deadline: Deadline) -> None:
        with self._changed:
            self._pending.add(deadline)
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="pgmemory-deadlines", daemon=True)
                self._thread.start()
            elif deadline.at < self._wakes_at:
                self._changed.notify()

    def remove(self, deadline: Deadline) -> None:
        # Behind the lock: once this has returned, the connection may be lent to somebody else.
        with self._changed:
            self._pending.discard(deadline)

    def _watch(self) -> None:
        with self._changed:
            while True:
                now = time.monotonic()
                for deadline in [deadline for deadline in self._pending if deadline.at <= now]:
                    deadline.passed = True
                    shut_down(deadline.conn)
                    self._pending.discard(deadline)
                self._wakes_at = min((deadline.at for deadline in self._pending), default=float("inf"))
                self._changed.wait(min(self._wakes_at - now, threading.TIMEOUT_MAX))


_watchdog = _Watchdog()


@contextmanager
def answer_within(conn: ext.connection, seconds: float) -> Iterator[Deadline]:
    """Shut the connection down unless the block ends within `seconds`."""
    deadline = Deadline(conn, time.monotonic() + seconds)
    watchdog = _watchdog
    watchdog.add(deadline)
    try:
        yield deadline
    finally:
        watchdog.remove(deadline)


def _after_fork_in_child() -> None:
    # The thread has stayed with the parent, and so has whoever may have held the lock.
    global _watchdog
    _watchdog = _Watchdog()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork_in_child)
