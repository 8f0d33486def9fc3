"""Changing the schema: one transaction under a lock, so that any number of processes may start at once."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pgmemory.errors import SchemaError
from pgmemory.pool import Database, Execute, StoreError
from pgmemory.queries.parts import quoted

DEFAULT_NAME = "pgmemory"
# How long to wait for locks that others hold on the tables before giving up, in milliseconds.
_LOCK_TIMEOUT_MS = "60000"
# How long each statement may take, however large the tables.
_STATEMENT_SECONDS = 3600.0
NOT_ALLOWED = "42501"  # insufficient_privilege
_LOCK_NOT_AVAILABLE = "55P03"


@contextmanager
def changing(database: Database, schema: str) -> Iterator[Execute]:
    """Change the schema in one transaction, while others who do so wait.

    Raises:
        SchemaError: This role may not change it, or others held locks on it for too long.
    """
    try:
        with database.transaction(query_timeout_seconds=_STATEMENT_SECONDS) as execute:
            # Read committed: each statement behind the lock must see what was committed while this one waited for it.
            execute("set transaction isolation level read committed")
            execute("select set_config('lock_timeout', %(timeout)s, true)", {"timeout": _LOCK_TIMEOUT_MS})
            execute("select pg_advisory_xact_lock(hashtextextended(%(name)s, 0))", {"name": f"pgmemory {schema}"})
            yield execute
    except StoreError as error:
        if error.sqlstate == NOT_ALLOWED:
            raise SchemaError(
                f"this role may not create or change the schema {schema!r} ({error}): run "
                f"`pgmemory init{option(schema)}` as one that may, such as the owner of the database"
            ) from error
        if error.sqlstate != _LOCK_NOT_AVAILABLE:
            raise
        # Not to be tried again: others queue up behind a migration that waits for its lock.
        raise SchemaError(
            f"waited {int(_LOCK_TIMEOUT_MS) / 1000:g} s for a lock on the schema {schema!r}: end long transactions on "
            "its tables, and other migrations (pg_stat_activity shows them), and try again"
        ) from error


def run_returned(execute: Execute, statement: str, parameters: dict[str, Any]) -> None:
    """Run the statements that a statement returns, one a row."""
    for (returned,) in execute(statement, parameters):
        execute(returned)


def in_schema(statement: str, schema: str) -> str:
    """Return a statement for a schema, to be sent without parameters.

    Unlike after `queries.parts.in_schema` a `%` stands for itself.
    """
    return statement.replace("{schema}", quoted(schema))


def option(schema: str) -> str:
    """Return the command's option that names a schema; empty for the default one."""
    return "" if schema == DEFAULT_NAME else f" --schema {shlex.quote(schema)}"
