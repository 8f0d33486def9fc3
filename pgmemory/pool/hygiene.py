"""What can be told of a single connection, and how it is left clean for its next user."""

from __future__ import annotations

import logging
import select
import socket
import time
from collections.abc import Sequence

import psycopg2
import psycopg2.extensions as ext
import psycopg2.extras

from pgmemory.pool.deadlines import answer_within, shut_down

logger = logging.getLogger(__name__)

# How long the server may take to roll back; the connection is thrown away then.
_SETTLE_SECONDS = 5.0
# How long is waited for the end of sessions that are closed here.
_GOODBYE_SECONDS = 0.2
_ROW_SHAPING_CURSORS = (psycopg2.extras.DictCursorBase, psycopg2.extras.NamedTupleCursor)


def is_alive(conn: ext.connection) -> bool:
    """Tell whether an idle connection still stands: an idle server has nothing to say but goodbye."""
    return not conn.closed and not _speaks_within(conn, 0)


def log_dead(count: int, address: str) -> None:
    """Warn, once for all that were found together, that connections had died while nobody used them."""
    logger.warning("lost %d idle connection%s to %s: replaced", count, "" if count == 1 else "s", address)


def tuple_cursor(conn: ext.connection) -> ext.cursor:
    """Return a cursor whose rows are tuples; the app's own kind where that is so, which may count or log statements."""
    cursor = conn.cursor()
    return conn.cursor(cursor_factory=ext.cursor) if isinstance(cursor, _ROW_SHAPING_CURSORS) else cursor


def settle(conn: ext.connection, *, autocommit: bool) -> bool:
    """Roll back what is open and set `autocommit`; False if the connection is of no more use."""
    try:
        if conn.info.transaction_status == ext.TRANSACTION_STATUS_IDLE and conn.autocommit == autocommit:
            return True
        # Both may send something: psycopg2 undoes an isolation level that the application has set.
        with answer_within(conn, _SETTLE_SECONDS):
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


def end_sessions(conns: Sequence[ext.connection]) -> None:
    """Close connections, and give the server a moment to end their sessions before others take their place."""
    alive = [conn for conn in conns if not conn.closed]
    for conn in alive:
        shut_down(conn, socket.SHUT_WR)
    deadline = time.monotonic() + _GOODBYE_SECONDS
    for conn in alive:
        # The server's end of the socket closes with its process, behind all that the session held.
        _speaks_within(conn, max(0.0, deadline - time.monotonic()))
        conn.close()


def _speaks_within(conn: ext.connection, seconds: float) -> bool:
    """Tell whether the server says something, its goodbye included, in so many seconds."""
    if not hasattr(select, "poll"):  # Windows
        return bool(select.select([conn], [], [], seconds)[0])
    poll = select.poll()
    poll.register(conn, select.POLLIN)
    return bool(poll.poll(seconds * 1000))
