"""The schema's migrations: list, apply and render them.

A migration is a numbered file in `migrations/`, applied once and never changed afterwards. The ledger, a table beside
the others, records each. Looking never writes; applying takes a lock, so that any number of processes may start at
once.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import Any

from pgmemory.errors import SchemaError
from pgmemory.pool import Database, Execute, StoreError
from pgmemory.queries.parts import quoted

DEFAULT_NAME = "pgmemory"
# How long setup() waits for locks that others hold on the tables before it gives up, in milliseconds.
_LOCK_TIMEOUT_MS = "60000"
# How long each of its statements may take, however large the tables.
_STATEMENT_SECONDS = 3600.0
_NO_LEDGER = ("42P01", "3F000")  # undefined_table, invalid_schema_name
_NOT_ALLOWED = "42501"  # insufficient_privilege
_LOCK_NOT_AVAILABLE = "55P03"

_CREATE_LEDGER = """
create table if not exists {schema}.schema_migrations (
    version       int         primary key,
    name          text        not null,
    -- Code that knows fewer migrations than this no longer works on the schema.
    needs_version int         not null,
    applied_at    timestamptz not null default clock_timestamp()
);
"""
_RECORD = """
insert into {schema}.schema_migrations (version, name, needs_version) values ({version}, '{name}', {needs});
"""
# Not to_regclass, which may answer from what this session knew before it waited for the lock.
_FIND_LEDGER = """
select 1 from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
where n.nspname = %(schema)s and c.relname = 'schema_migrations'
"""
_READ_LEDGER = "select version, needs_version from {schema}.schema_migrations order by version"


@dataclass(frozen=True, slots=True)
class Migration:
    """One step of the schema.

    Attributes:
        version: Its number, from 1, without gaps.
        name: The file's name without number and ending.
        sql: Statements with `{schema}` for the quoted name of the schema.
    """

    version: int
    name: str
    sql: str


# Code that knows fewer migrations than this cannot work on the newest schema. Raise it only together with a migration
# that older code, still running during an upgrade, cannot live with.
_NEEDS_VERSION = 1


@dataclass(frozen=True, slots=True)
class SchemaStatus:
    """What the ledger says, against what this version of pgmemory knows.

    Attributes:
        applied: Versions of the migrations that were applied, ascending; empty if there is no schema.
        pending: Migrations that are still to be applied, ascending.
        needs_version: The code must know at least this many migrations.
    """

    applied: tuple[int, ...]
    pending: tuple[Migration, ...]
    needs_version: int

    @property
    def fits(self) -> bool:
        """Whether this version of pgmemory works on the schema as it is."""
        return bool(self.applied) and not self.pending and self.needs_version <= len(migrations())


def migrations() -> tuple[Migration, ...]:
    """Return all migrations in the order in which they are applied."""
    found = []
    for file in sorted(resources.files("pgmemory").joinpath("migrations").iterdir(), key=lambda file: file.name):
        if file.name.endswith(".sql"):
            number, name = file.name.removesuffix(".sql").split("_", 1)
            found.append(Migration(int(number), name, file.read_text("utf-8")))
    return tuple(found)


def status(database: Database, schema: str) -> SchemaStatus:
    """Read which migrations were applied. Writes nothing.

    Raises:
        StoreError: The database could not be asked.
    """
    return _status(partial(database.execute, name="schema_status"), schema)


def apply(database: Database, schema: str) -> list[Migration]:
    """Create the schema or bring it up to date; return the migrations that this call applied.

    Each migration and its ledger entry share one transaction under an advisory lock of that transaction: with several
    callers at once each migration is applied by one of them and the others wait. On a schema that is up to date
    nothing is written and no right beyond reading the ledger is needed.

    Raises:
        SchemaError: A newer pgmemory has changed the schema so that this version no longer works on it, this role may
            not change it, or others held locks on it for too long; nothing of the migration is left.
        StoreError: A migration failed; nothing of it is left.
    """
    applied: list[Migration] = []
    while not (current := status(database, schema)).fits:
        _require_not_too_new(current, schema)
        try:
            migration = database.repeat(partial(_apply_next, database, schema), name="migrate")
        except StoreError as error:
            if error.sqlstate == _NOT_ALLOWED:
                raise SchemaError(
                    f"this role may not create or change the schema {schema!r} ({error}): run "
                    f"`pgmemory init{_option(schema)}` as one that may, such as the owner of the database"
                ) from error
            raise
        if migration is not None:
            applied.append(migration)
    return applied


def _apply_next(database: Database, schema: str) -> Migration | None:
    """Apply the next migration, if one is pending, in one transaction."""
    try:
        with database.transaction(query_timeout_seconds=_STATEMENT_SECONDS) as execute:
            # Read committed: each statement behind the lock must see what was committed while this one waited for it.
            execute("set transaction isolation level read committed")
            execute("select set_config('lock_timeout', %(timeout)s, true)", {"timeout": _LOCK_TIMEOUT_MS})
            execute("select pg_advisory_xact_lock(hashtextextended(%(name)s, 0))", {"name": f"pgmemory {schema}"})
            current = _status(execute, schema)
            if not current.pending:
                return None
            migration = current.pending[0]
            if not current.applied:
                _create_ledger(execute, schema)
            execute(_in_schema(migration.sql + _record(migration), schema))
            return migration
    except StoreError as error:
        if error.sqlstate != _LOCK_NOT_AVAILABLE:
            raise
        # Not to be tried again: others queue up behind a migration that waits for its lock.
        raise SchemaError(
            f"waited {int(_LOCK_TIMEOUT_MS) / 1000:g} s for a lock on the schema {schema!r}: end long transactions on "
            "its tables, and other migrations (pg_stat_activity shows them), and try again"
        ) from error


def check(database: Database, schema: str) -> None:
    """Raise SchemaError unless this version of pgmemory works on the schema as it is. One round trip; writes nothing.

    Raises:
        SchemaError: The schema is missing, too old or too new: the text says what to do.
        StoreError: The database could not be asked.
    """
    ledger: list[tuple[Any, ...]] = []
    try:
        ledger = database.execute(_in_schema(_READ_LEDGER, schema), name="schema_status")
    except StoreError as error:
        if error.sqlstate == _NOT_ALLOWED:
            return  # a role with rights on the other tables alone works, as long as the schema fits
        if error.sqlstate not in _NO_LEDGER:
            raise
    require_fitting(_read(ledger), schema)


def require_fitting(current: SchemaStatus, schema: str) -> None:
    """Raise SchemaError unless this version of pgmemory works on a schema of this status."""
    _require_not_too_new(current, schema)
    if not current.fits:
        state = f"too old: version {max(current.applied)}, not {len(migrations())}" if current.applied else "missing"
        raise SchemaError(
            f"the schema {schema!r} is {state}: run `pgmemory init{_option(schema)}` or call store.setup()"
        )


def _option(schema: str) -> str:
    return "" if schema == DEFAULT_NAME else f" --schema {shlex.quote(schema)}"


def _require_not_too_new(current: SchemaStatus, schema: str) -> None:
    known = len(migrations())
    if current.needs_version > known:
        raise SchemaError(
            f"the schema {schema!r} was upgraded to version {max(current.applied)} by a newer pgmemory and needs one "
            f"that knows version {current.needs_version}; this one knows {known}: run "
            "`pip install --upgrade langchain-pgmemory`"
        )


def render(schema: str = DEFAULT_NAME) -> str:
    """Return the whole schema as SQL for psql, in one transaction."""
    parts = [
        "-- The schema of pgmemory, for people with psql: psql --set ON_ERROR_STOP=1 --file schema.sql\n"
        "-- Generated from pgmemory/migrations by `pgmemory schema`; do not edit.\n\n"
        "begin;\n\n"
        f"create schema if not exists {quoted(schema)};\n"
        f"{_in_schema(_CREATE_LEDGER, schema)}\n"
    ]
    parts += [_in_schema(f"{migration.sql}\n{_record(migration)}\n", schema) for migration in migrations()]
    return "".join([*parts, "commit;\n"])


def _status(execute: Execute, schema: str) -> SchemaStatus:
    ledger: list[tuple[Any, ...]] = []
    if execute(_FIND_LEDGER, {"schema": schema}):
        ledger = execute(_in_schema(_READ_LEDGER, schema), None)
    return _read(ledger)


def _read(ledger: list[tuple[Any, ...]]) -> SchemaStatus:
    applied = tuple(version for version, _ in ledger)
    pending = tuple(migration for migration in migrations() if migration.version not in applied)
    return SchemaStatus(applied, pending, max((needs for _, needs in ledger), default=0))


def _create_ledger(execute: Execute, schema: str) -> None:
    # CREATE SCHEMA IF NOT EXISTS wants the right to create schemas even where the schema is there already.
    if not execute("select 1 from pg_namespace where nspname = %(name)s", {"name": schema}):
        execute(f"create schema {quoted(schema)}", None)
    execute(_in_schema(_CREATE_LEDGER, schema), None)


def _record(migration: Migration) -> str:
    return _RECORD.format(
        schema="{schema}",
        version=migration.version,
        name=migration.name,
        needs=min(migration.version, _NEEDS_VERSION),
    )


def _in_schema(statement: str, schema: str) -> str:
    # Unlike queries.parts.in_schema this is for statements that are sent without parameters: a `%` stands for itself.
    return statement.replace("{schema}", quoted(schema))
