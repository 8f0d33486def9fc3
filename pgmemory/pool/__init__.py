"""Connections to PostgreSQL: the only room that imports psycopg2.

It owns connecting, waiting for a free connection, noticing and replacing dead ones, deadlines, forks, transactions,
repeating what a lost connection or a conflict undid, and the translation of psycopg2's errors. It knows no table, no
SQL but ``rollback``, and nothing of conversations.

It never sets session state (no ``SET``, no ``options=``), so pgbouncer in transaction mode works.
"""

from pgmemory.pool.connections import ConnectionPool
from pgmemory.pool.database import Database, Execute, Rows
from pgmemory.pool.errors import PoolClosedError, PoolTimeoutError, StoreError, StoreUnavailableError

__all__ = [
    "ConnectionPool",
    "Database",
    "Execute",
    "PoolClosedError",
    "PoolTimeoutError",
    "Rows",
    "StoreError",
    "StoreUnavailableError",
]
