"""The schema: its migrations, listed, applied and rendered; row-level security; and the words messages are found by.

A migration is a numbered file in `migrations/`, applied once and never changed afterwards. The ledger, a table beside
the others, records each. Looking never writes; changing takes a lock, so that any number of processes may start at
once.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import Any, Literal, get_args

from pgmemory.errors import ConfigurationError, SchemaError
from pgmemory.pool import Database, Execute, StoreError
from pgmemory.queries import recall, security
from pgmemory.queries.parts import in_schema, quoted

DEFAULT_NAME = "pgmemory"
DEFAULT_LANGUAGE = "english"
RowLevelSecurity = Literal["off", "setting", "roles"]
# Before, a view shows what its owner may see, whoever asks.
_SECURES_VIEWS = 150000
# How long setup() waits for locks that others hold on the tables before it gives up, in milliseconds.
_LOCK_TIMEOUT_MS = "60000"
# How long each of its statements may take, however large the tables.
_STATEMENT_SECONDS = 3600.0
_NO_LEDGER = ("42P01", "3F000")  # undefined_table, invalid_schema_name
NOT_ALLOWED = "42501"  # insufficient_privilege
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
_FIND_LEDGER = f"""
select found.mode, found.deviating, ({recall.LANGUAGE})
from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace, ({security.READ_MODE}) found
where n.nspname = %(schema)s and c.relname = 'schema_migrations'
"""
_READ_LEDGER = "select version, needs_version from {schema}.schema_migrations order by version"
_CHECK = f"""
select version, needs_version, (select found.mode from ({security.READ_MODE}) found), ({security.IS_LIMITED}),
       ({recall.LANGUAGE})
from {{schema}}.schema_migrations order by version
"""


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
        row_level_security: By what PostgreSQL tells whose rows a session may see: ``setting``, ``roles`` or not at all,
            ``off``.
        deviating: pgmemory's tables and views that are not as that has them: a table that has lost its policy shows
            every tenant's rows. Empty unless someone has changed them; ``setup(row_level_security=…)`` mends it.
        search: The text search configuration by which messages are recalled; None where they cannot be.
    """

    applied: tuple[int, ...]
    pending: tuple[Migration, ...]
    needs_version: int
    row_level_security: RowLevelSecurity
    deviating: tuple[str, ...]
    search: str | None = None

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
        _require_not_too_new(current, schema)
        migration = database.repeat(partial(_apply_next, database, schema), name="migrate")
        if migration is not None:
            applied.append(migration)
    return applied, current


def _apply_next(database: Database, schema: str) -> Migration | None:
    """Apply the next migration, if one is pending, in one transaction."""
    with changing(database, schema) as execute:
        current = _status(execute, schema)
        if not current.pending:
            return None
        migration = current.pending[0]
        if not current.applied:
            _create_ledger(execute, schema)
        execute(_in_schema(migration.sql + _record(migration), schema))
        run_returned(execute, security.COPY_RIGHTS, security.parameters(schema))
        if current.row_level_security != "off":
            _secure(execute, schema, current.row_level_security)
        return migration


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
                f"`pgmemory init{_option(schema)}` as one that may, such as the owner of the database"
            ) from error
        if error.sqlstate != _LOCK_NOT_AVAILABLE:
            raise
        # Not to be tried again: others queue up behind a migration that waits for its lock.
        raise SchemaError(
            f"waited {int(_LOCK_TIMEOUT_MS) / 1000:g} s for a lock on the schema {schema!r}: end long transactions on "
            "its tables, and other migrations (pg_stat_activity shows them), and try again"
        ) from error


def secure(database: Database, schema: str, mode: RowLevelSecurity) -> None:
    """Let pgmemory's tables and views be as a mode has them, in one transaction; does nothing if all of them are.

    Raises:
        ConfigurationError: There is no such mode.
        SchemaError: The server is too old, this role may not change the schema, or others held locks on it for too
            long; nothing was changed.
    """
    if mode not in get_args(RowLevelSecurity):
        raise ConfigurationError(f"row_level_security must be one of {get_args(RowLevelSecurity)}, not {mode!r}")

    def run() -> None:
        with changing(database, schema) as execute:
            _secure(execute, schema, mode)

    current = status(database, schema)
    if current.row_level_security != mode or current.deviating:
        database.repeat(run, name="secure")


def _secure(execute: Execute, schema: str, mode: RowLevelSecurity) -> None:
    parameters = security.parameters(schema) | {"policy": security.POLICIES.get(mode)}
    if mode == "off":
        run_returned(execute, security.RELEASE_TABLES, parameters)
        run_returned(execute, security.RELEASE_VIEWS, parameters)
        execute(_in_schema(security.DROP_FUNCTIONS, schema))
        return
    ((number, version),) = execute(security.READ_SERVER_VERSION)
    if number < _SECURES_VIEWS:
        raise SchemaError(
            f"row-level security needs PostgreSQL 15 or newer, this is {version}: views there show each role what "
            "their owner may see"
        )
    functions = security.quoted_functions(security.CURRENT_TENANT[mode] + security.OWNS_CONVERSATION, schema)
    execute(_in_schema(functions, schema))
    run_returned(execute, security.SECURE_TABLES, parameters)
    run_returned(execute, security.SECURE_VIEWS, parameters)
    run_returned(execute, in_schema(security.GRANT_RIGHTS, schema), parameters)


def make_searchable(database: Database, schema: str, language: str | bool) -> str:
    """Let messages be recalled by their words, in one transaction; return the text search configuration of the words.

    Where they are made by another configuration than before, none is left; `store.index_messages` makes them.

    Args:
        database: Where.
        schema: Its tables must be up to date.
        language: The configuration's name; True for the one that is there, or ``english``.

    Raises:
        ConfigurationError: There is no such configuration.
        SchemaError: The database's encoding is not UTF-8, this role may not change the schema, or others held locks on
            it for too long; nothing was changed.
    """
    if language is False or not isinstance(language, (str, bool)):
        raise ConfigurationError(f"search must be the name of a text search configuration or True, not {language!r}")

    def run() -> str:
        with changing(database, schema) as execute:
            current = _status(execute, schema)
            named = current.search or DEFAULT_LANGUAGE if language is True else language
            wanted, constant = _configuration(execute, named)
            if current.search == wanted:
                return wanted
            execute(_in_schema(recall.CREATE_TABLE, schema))
            execute(_in_schema(recall.EMPTY_TABLE, schema))
            execute(_in_schema(recall.CREATE_FUNCTION.replace("{language}", constant), schema))
            run_returned(execute, security.COPY_RIGHTS, security.parameters(schema))
            if current.row_level_security != "off":
                _secure(execute, schema, current.row_level_security)
            return wanted

    current = status(database, schema).search
    if current is not None and language in (True, current, current.removeprefix("pg_catalog.")):
        return current
    return database.repeat(run, name="make_searchable")


def _configuration(execute: Execute, language: str) -> tuple[str, str]:
    """Return the whole name of a text search configuration, and the same as an SQL constant."""
    found = execute(recall.FIND_LANGUAGE, {"language": language})
    if not found:
        names = ", ".join(name for (name,) in execute(recall.LIST_LANGUAGES))
        raise ConfigurationError(f"search: there is no text search configuration {language!r}; there are {names}")
    ((name, constant, encoding),) = found
    if encoding != "UTF8":
        raise SchemaError(f"recall by words needs a database whose encoding is UTF8, to fold accents; it is {encoding}")
    return name, constant


def run_returned(execute: Execute, statement: str, parameters: dict[str, Any]) -> None:
    """Run the statements that a statement returns, one a row."""
    for (returned,) in execute(statement, parameters):
        execute(returned)


def check(database: Database, schema: str, tenant_id: str) -> str | None:
    """Raise unless this version of pgmemory works on the schema as it is, and row-level security lets the tenant in.

    One round trip; a second one where roles have tenants. Writes nothing.

    Returns:
        The text search configuration by which messages are recalled; None where they cannot be.

    Raises:
        SchemaError: The schema is missing, too old or too new: the text says what to do.
        StoreError: Row-level security shows this tenant's rows to others than this role, or the database could not be
            asked.
    """
    rows: list[tuple[Any, ...]] = []
    try:
        rows = database.execute(in_schema(_CHECK, schema), security.parameters(schema), name="schema_status")
    except StoreError as error:
        if error.sqlstate == NOT_ALLOWED:
            # A role with rights on the other tables alone works, as long as the schema fits.
            found = database.execute(recall.LANGUAGE, {"schema": schema}, name="schema_status")
            return found[0][0] if found else None
        if error.sqlstate not in _NO_LEDGER:
            raise
    require_fitting(_read([(version, needs) for version, needs, *_ in rows]), schema)
    _, _, mode, is_limited, language = rows[0]
    if mode == "setting" and is_limited and not tenant_id:
        raise StoreError(
            f"row-level security is on in the schema {schema!r} and the store has no tenant: give it a tenant_id, or "
            "connect as a role with BYPASSRLS to look across tenants",
            sqlstate=NOT_ALLOWED,
        )
    if mode == "roles" and is_limited:
        ((role, bound),) = database.execute(_in_schema(security.READ_TENANT, schema), name="schema_status")
        if bound != tenant_id:
            raise StoreError(
                f"row-level security binds the role {role!r} to the tenant {bound!r} in the schema {schema!r}; the "
                f"store is one of {tenant_id!r}: give it that tenant_id, or connect as the role of its tenant",
                sqlstate=NOT_ALLOWED,
            )
    return None if language is None else str(language)


def require_all_tenants(database: Database, schema: str) -> None:
    """Raise StoreError where row-level security keeps other tenants' rows from this role. One round trip.

    Raises:
        StoreError: It does, or the database could not be asked.
    """
    ((is_limited,),) = database.execute(security.IS_LIMITED, security.parameters(schema), name="schema_status")
    if is_limited:
        raise StoreError(
            f"row-level security in the schema {schema!r} shows this role one tenant only: to look across tenants "
            "connect as a role with BYPASSRLS",
            sqlstate=NOT_ALLOWED,
        )


def require_fitting(current: SchemaStatus, schema: str) -> None:
    """Raise SchemaError unless this version of pgmemory works on a schema of this status."""
    _require_not_too_new(current, schema)
    if not current.fits:
        state = f"too old: version {max(current.applied)}, not {len(migrations())}" if current.applied else "missing"
        raise SchemaError(
            f"the schema {schema!r} is {state}: run `pgmemory init{_option(schema)}` or call store.setup()"
        )


def require_protected(current: SchemaStatus, schema: str) -> None:
    """Raise SchemaError where row-level security is on, but not on everything."""
    if current.deviating and current.row_level_security != "off":
        raise SchemaError(
            f"row-level security by {current.row_level_security} is not as it should be on "
            f"{', '.join(current.deviating)} in the schema {schema!r}: other tenants' rows may show; run `pgmemory init"
            f"{_option(schema)} --row-level-security {current.row_level_security}` as the owner of the tables"
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
    if not (found := execute(_FIND_LEDGER, security.parameters(schema))):
        return _read([])
    return _read(execute(_in_schema(_READ_LEDGER, schema), None), *found[0])


def _read(
    ledger: list[tuple[Any, ...]],
    mode: RowLevelSecurity = "off",
    deviating: Iterable[str] = (),
    search: str | None = None,
) -> SchemaStatus:
    applied = tuple(version for version, _ in ledger)
    pending = tuple(migration for migration in migrations() if migration.version not in applied)
    needs_version = max((needs for _, needs in ledger), default=0)
    return SchemaStatus(applied, pending, needs_version, mode, tuple(deviating), search)


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
