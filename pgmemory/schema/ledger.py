"""The migrations and the ledger that records each: what was applied, and whether this version works on it.

A migration is a numbered file in `migrations/`, applied once and never changed afterwards. The ledger is a table beside
the others. Nothing here writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import Any, Literal, NamedTuple

from pgmemory.errors import SchemaError
from pgmemory.pool import Database, Execute, StoreError
from pgmemory.queries import meaning, parts, security, words
from pgmemory.queries.parts import quoted
from pgmemory.schema.changes import DEFAULT_NAME, NOT_ALLOWED, in_schema, option

RowLevelSecurity = Literal["off", "setting", "roles"]
_NO_LEDGER = ("42P01", "3F000")  # undefined_table, invalid_schema_name

CREATE_LEDGER = """
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
select found.mode, found.deviating, ({words.WORDS}), ({meaning.VECTORS})
from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace, ({security.READ_MODE}) found
where n.nspname = %(schema)s and c.relname = 'schema_migrations'
"""
_READ_LEDGER = "select version, needs_version from {schema}.schema_migrations order by version"
_CHECK = f"""
select version, needs_version, (select found.mode from ({security.READ_MODE}) found), ({security.IS_LIMITED}),
       ({words.WORDS}), ({meaning.VECTORS})
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


class Vectors(NamedTuple):
    """The vectors by which messages are recalled by their meaning.

    Attributes:
        model: What makes them.
        dimensions: How many numbers each has.
        extension_schema: The quoted schema in which pgvector is.
    """

    model: str
    dimensions: int
    extension_schema: str


class Search(NamedTuple):
    """By what messages are recalled.

    Attributes:
        language: The text search configuration that makes their words; None where they cannot be recalled.
        is_complete: Whether all that was stored before is indexed.
        vectors: Their meanings; None where there are none.
    """

    language: str | None = None
    is_complete: bool = False
    vectors: Vectors | None = None


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
        search: By what messages are recalled.
    """

    applied: tuple[int, ...]
    pending: tuple[Migration, ...]
    needs_version: int
    row_level_security: RowLevelSecurity
    deviating: tuple[str, ...]
    search: Search = Search()

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
    return status_within(partial(database.execute, name="schema_status"), schema)


def check(database: Database, schema: str, tenant_id: str) -> Search:
    """Raise unless this version of pgmemory works on the schema as it is, and row-level security lets the tenant in.

    One round trip; a second one where roles have tenants. Writes nothing.

    Returns:
        By what messages are recalled.

    Raises:
        SchemaError: The schema is missing, too old or too new: the text says what to do.
        StoreError: Row-level security shows this tenant's rows to others than this role, or the database could not be
            asked.
    """
    rows: list[tuple[Any, ...]] = []
    try:
        rows = database.execute(parts.in_schema(_CHECK, schema), security.parameters(schema), name="schema_status")
    except StoreError as error:
        if error.sqlstate == NOT_ALLOWED:
            # A role with rights on the other tables alone works, as long as the schema fits.
            find = f"select ({words.WORDS}), ({meaning.VECTORS})"
            ((in_words, vectors),) = database.execute(find, {"schema": schema}, name="schema_status")
            return _search(in_words, vectors)
        if error.sqlstate not in _NO_LEDGER:
            raise
    require_fitting(_read([(version, needs) for version, needs, *_ in rows]), schema)
    _, _, mode, is_limited, in_words, vectors = rows[0]
    if mode == "setting" and is_limited and not tenant_id:
        raise StoreError(
            f"row-level security is on in the schema {schema!r} and the store has no tenant: give it a tenant_id, or "
            "connect as a role with BYPASSRLS to look across tenants",
            sqlstate=NOT_ALLOWED,
        )
    if mode == "roles" and is_limited:
        ((role, bound),) = database.execute(in_schema(security.READ_TENANT, schema), name="schema_status")
        if bound != tenant_id:
            raise StoreError(
                f"row-level security binds the role {role!r} to the tenant {bound!r} in the schema {schema!r}; the "
                f"store is one of {tenant_id!r}: give it that tenant_id, or connect as the role of its tenant",
                sqlstate=NOT_ALLOWED,
            )
    return _search(in_words, vectors)


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
    require_not_too_new(current, schema)
    if not current.fits:
        state = f"too old: version {max(current.applied)}, not {len(migrations())}" if current.applied else "missing"
        raise SchemaError(
            f"the schema {schema!r} is {state}: run `pgmemory init{option(schema)}` or call store.setup()"
        )


def require_protected(current: SchemaStatus, schema: str) -> None:
    """Raise SchemaError where row-level security is on, but not on everything."""
    if current.deviating and current.row_level_security != "off":
        raise SchemaError(
            f"row-level security by {current.row_level_security} is not as it should be on "
            f"{', '.join(current.deviating)} in the schema {schema!r}: other tenants' rows may show; run `pgmemory init"
            f"{option(schema)} --row-level-security {current.row_level_security}` as the owner of the tables"
        )


def require_not_too_new(current: SchemaStatus, schema: str) -> None:
    """Raise SchemaError where a newer pgmemory has changed the schema beyond what this one works on."""
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
        f"{in_schema(CREATE_LEDGER, schema)}\n"
    ]
    parts += [in_schema(f"{migration.sql}\n{record(migration)}\n", schema) for migration in migrations()]
    return "".join([*parts, "commit;\n"])


def status_within(execute: Execute, schema: str) -> SchemaStatus:
    """Read which migrations were applied, in a transaction that goes on."""
    if not (found := execute(_FIND_LEDGER, security.parameters(schema))):
        return _read([])
    return _read(execute(in_schema(_READ_LEDGER, schema), None), *found[0])


def _read(
    ledger: list[tuple[Any, ...]],
    mode: RowLevelSecurity = "off",
    deviating: Iterable[str] = (),
    in_words: Sequence[str] | None = None,
    vectors: Sequence[str] | None = None,
) -> SchemaStatus:
    applied = tuple(version for version, _ in ledger)
    pending = tuple(migration for migration in migrations() if migration.version not in applied)
    needs_version = max((needs for _, needs in ledger), default=0)
    return SchemaStatus(applied, pending, needs_version, mode, tuple(deviating), _search(in_words, vectors))


def record(migration: Migration) -> str:
    """Return the statement that enters a migration into the ledger, with `{schema}` for the schema."""
    return _RECORD.format(
        schema="{schema}",
        version=migration.version,
        name=migration.name,
        needs=min(migration.version, _NEEDS_VERSION),
    )


def _search(in_words: Sequence[str] | None, vectors: Sequence[str] | None) -> Search:
    language, remark = in_words or (None, "")
    made = None if vectors is None else Vectors(vectors[0], int(vectors[1]), vectors[2])
    return Search(language, remark == words.COMPLETE, made)
