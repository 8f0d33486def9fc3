"""Applying migrations: each once, whoever starts at the same time."""

from __future__ import annotations

from functools import partial

from pgmemory.pool import Database, Execute
from pgmemory.queries.parts import quoted
from pgmemory.schema.changes import changing, in_schema
from pgmemory.schema.ledger import (
    CREATE_LEDGER,
    Migration,
    SchemaStatus,
    record,
    require_not_too_new,
    status,
    status_within,
)
from pgmemory.schema.protection import treat_new_alike


def apply(database: Database, schema: str) -> tuple[list[Migration], SchemaStatus]:
    """Create the schema or bring it up to date; return the migrations that this call applied, and the status then.

    Each migration and its ledger entry share one transaction under an advisory lock of that transaction: with several
    callers at once each migration is applied by one of them and the others wait. On a schema that is up to date
    nothing is written and no right beyond reading the ledger is needed. Whoever may read or write messages may do so
    with new tables. Where any table has a policy, all of them get it with each migration, those that are new too.

    Raises:
        SchemaError: A newer pgmemory has changed the schema so that this version no longer works on it, this role may
            not change it, or others held locks on it for too long; nothing of the migration is left.
        StoreError: A migration failed; nothing of it is left.
    """
    applied: list[Migration] = []
    while not (current := status(database, schema)).fits:
        require_not_too_new(current, schema)
        migration = database.repeat(partial(_apply_next, database, schema), name="migrate")
        if migration is not None:
            applied.append(migration)
    return applied, current


def _apply_next(database: Database, schema: str) -> Migration | None:
    """Apply the next migration, if one is pending, in one transaction."""
    with changing(database, schema) as execute:
        current = status_within(execute, schema)
        if not current.pending:
            return None
        migration = current.pending[0]
        if not current.applied:
            _create_ledger(execute, schema)
        execute(in_schema(migration.sql + record(migration), schema))
        treat_new_alike(execute, schema, current)
        return migration


def _create_ledger(execute: Execute, schema: str) -> None:
    # CREATE SCHEMA IF NOT EXISTS wants the right to create schemas even where the schema is there already.
    if not execute("select 1 from pg_namespace where nspname = %(name)s", {"name": schema}):
        execute(f"create schema {quoted(schema)}", None)
    execute(in_schema(CREATE_LEDGER, schema), None)
