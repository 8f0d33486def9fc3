"""What can be told of a single connection, and how it is left clean for its next user."""

from __future__ import annotations

import logging
import select

import psycopg2
import psycopg2.extensions as ext
import psycopg2.extras

from pgmemory.pool.deadlines import answer_within

logger = logging.getLogger(__name__)

# How long the server may take to roll back; the connection is thrown away then.
_ROLLBACK_SECONDS = 5.0
_ROW_SHAPING_CURSORS = (psycopg2.extras.DictCursorBase, psycopg2.extras.NamedTupleCursor)


def is_alive(conn: ext.connection) -> bool:
    """Tell whether an idle connection still stands: an idle server has nothing to say but goodbye."""
    if conn.closed:
        return False
    if not hasattr(select, "poll"):  # Windows
        return not select.select([conn], [], [], 0)[0]
    poll = select.poll()
    poll.register(conn, select.POLLIN)
    return not poll.poll(0)


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
        if conn.info.transaction_status in (ext.TRANSACTION_STATUS_INTRANS, ext.TRANSACTION_STATUS_INERROR):
            with answer_within(conn, _ROLLBACK_SECONDS):
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
