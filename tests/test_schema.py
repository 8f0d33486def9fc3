"""The schema: made once whoever starts at once, equal whether setup() or psql made it, left alone once it stands."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg2
import pytest
from conftest import run_together
from fakes import scripted
from psycopg2 import sql
from psycopg2.extensions import connection as Connection
from psycopg2.extensions import make_dsn

from pgmemory import (
    BufferMemory,
    ConversationStore,
    Keyring,
    Operation,
    PostgresChatMemory,
    RelevantTurnMemory,
    SchemaError,
    StoredMessage,
    StoreError,
    SummaryMemory,
    TokenWindowMemory,
    schema,
)
from pgmemory.models import ConversationKey, Edit
from pgmemory.store.base import FIRST_ID
from pgmemory.store.transfer import Entry, Scope

PROJECT = Path(__file__).resolve().parents[1]
KNOWN = len(schema.migrations())
READ_ONLY = "-c default_transaction_read_only=on"


def execute(connection: Connection, statement: str, *parameters: Any, **names: str) -> list[tuple[Any, ...]]:
    """Run one statement; `{name}` stands for a quoted identifier."""
    with connection.cursor() as cursor:
        identifiers = {name: sql.Identifier(value) for name, value in names.items()}
        cursor.execute(sql.SQL(statement).format(**identifiers), parameters or None)
        return cursor.fetchall() if cursor.description else []


def exists(connection: Connection, schema_name: str) -> bool:
    return bool(execute(connection, "select 1 from pg_namespace where nspname = %s", schema_name))


# Each gives (what, name, detail …) of everything in a schema; `%(name)s` is the schema.
CATALOG = {
    "relation": """
        select c.relname, c.relkind::text, c.reloptions, c.relpersistence::text
        from pg_class c where c.relnamespace = %(name)s::regnamespace""",
    "column": """
        select c.relname, a.attnum, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull,
               pg_get_expr(d.adbin, d.adrelid), a.attidentity::text
        from pg_class c join pg_attribute a on a.attrelid = c.oid and a.attnum > 0
        left join pg_attrdef d on d.adrelid = c.oid and d.adnum = a.attnum
        where c.relnamespace = %(name)s::regnamespace and c.relkind in ('r', 'v')""",
    "index": """
        select i.indexrelid::regclass::text, pg_get_indexdef(i.indexrelid), i.indisunique, i.indisprimary, i.indisvalid
        from pg_index i join pg_class c on c.oid = i.indrelid where c.relnamespace = %(name)s::regnamespace""",
    "constraint": """
        select k.conrelid::regclass::text, k.conname, k.contype::text, pg_get_constraintdef(k.oid)
        from pg_constraint k where k.connamespace = %(name)s::regnamespace""",
    "view": """
        select c.relname, pg_get_viewdef(c.oid)
        from pg_class c where c.relnamespace = %(name)s::regnamespace and c.relkind = 'v'""",
    "trigger": """
        select c.relname, t.tgname from pg_trigger t join pg_class c on c.oid = t.tgrelid
        where c.relnamespace = %(name)s::regnamespace and not t.tgisinternal""",
    "function": "select p.proname, null from pg_proc p where p.pronamespace = %(name)s::regnamespace",
    "type": "select t.typname, null from pg_type t where t.typnamespace = %(name)s::regnamespace",
}


def catalog(connection: Connection, schema_name: str) -> list[str]:
    """All that PostgreSQL knows of a schema, one text an object, the schema's own name aside; and its ledger."""
    ((quoted,),) = execute(connection, "select quote_ident(%s)", schema_name)
    found = []
    with connection.cursor() as cursor:
        for kind, query in CATALOG.items():
            cursor.execute(query, {"name": quoted})
            found += [" | ".join(map(str, (kind, *row))).replace(f"{quoted}.", "") for row in cursor.fetchall()]
    ledger = "select version, name, needs_version from {schema}.schema_migrations"
    found += [f"ledger | {row}" for row in execute(connection, ledger, schema=schema_name)]
    return sorted(found)


@pytest.fixture(params=["plain", 'we"ird %s {x} {schema} Name'])
def any_schema_name(request: pytest.FixtureRequest, schema_name: str, admin: Connection) -> Iterator[str]:
    """A schema's name, plain or full of what SQL and format strings give a meaning to."""
    name = schema_name if request.param == "plain" else f"{request.param} {schema_name}"
    yield name
    if name != schema_name:
        execute(admin, "drop schema if exists {schema} cascade", schema=name)


@pytest.fixture
def role(admin: Connection) -> Iterator[str]:
    """A role that may log in and nothing else."""
    name = f"role_{uuid.uuid4().hex[:12]}"
    execute(admin, "create role {role} login password 'only-for-tests'", role=name)
    yield name
    execute(admin, "drop owned by {role}", role=name)
    execute(admin, "drop role {role}", role=name)


def grant_rows(admin: Connection, schema_name: str, role: str) -> None:
    """Let a role read and write rows, and nothing else."""
    execute(admin, "grant usage on schema {schema} to {role}", schema=schema_name, role=role)
    rows = "grant select, insert, update, delete on all tables in schema {schema} to {role}"
    execute(admin, rows, schema=schema_name, role=role)


def store_as(role: str, server_dsn: str, schema_name: str) -> ConversationStore:
    return ConversationStore(make_dsn(server_dsn, user=role, password="only-for-tests"), schema=schema_name)


def use_everything(store: ConversationStore) -> None:
    """Call every operation of a store once."""
    key = store.key("session")
    turn = [StoredMessage("human", "q"), StoredMessage("ai", "a")]
    store.append(key, turn, write_id=uuid.uuid4(), max_messages=10)
    window = store.append_and_read_unsummarized(key, turn, write_id=uuid.uuid4(), budget=100, encoding=None)
    assert window.state is not None
    assert store.record_summary(key, content="summary", covers_through=1, state=window.state)
    assert len(store.read_all(key)) == len(store.list_messages("session")) == 4
    assert len(store.read_last_turns(key, turns=1).messages) == 2
    assert len(store.read_last_tokens(key, budget=1, encoding=None).messages) >= 2
    assert len(store.read_relevant_turns(key, turns=1, rule=None).messages) == 2
    assert store.read_summary_window(key, budget=100, encoding=None).summary is not None
    assert store.read_unsummarized(key, budget=100, encoding=None).summary is not None
    store.set_metadata("session", {"a": 1})
    assert store.get_metadata("session") == {"a": 1}
    assert [found.session_id for found in store.list_conversations()] == ["session"]
    store.clear(key)
    assert store.read_all(key) == []


def test_setup_applies_every_migration_and_then_does_nothing(
    server_dsn: str, any_schema_name: str, admin: Connection
) -> None:
    names = [f"{migration.version:04}_{migration.name}" for migration in schema.migrations()]
    with ConversationStore(server_dsn, schema=any_schema_name) as store:
        before = store.schema_status()
        assert (before.applied, len(before.pending), before.fits) == ((), KNOWN, False)
        assert store.setup() == names
        made = catalog(admin, any_schema_name)
        after = store.schema_status()
        assert (after.applied, after.pending, after.fits) == (tuple(range(1, KNOWN + 1)), (), True)
        assert store.setup() == []
        use_everything(store)
    assert catalog(admin, any_schema_name) == made


def test_migrations_are_numbered_from_one_without_gaps() -> None:
    assert [migration.version for migration in schema.migrations()] == list(range(1, KNOWN + 1))
    assert all(migration.name and migration.sql.strip() for migration in schema.migrations())


def test_sixteen_processes_at_once_make_one_schema(server_dsn: str, schema_name: str, admin: Connection) -> None:
    program = """
import os, sys
from pgmemory import ConversationStore
store = ConversationStore(os.environ["DSN"], schema=sys.argv[1])
store.schema_status()
print("ready", flush=True)
sys.stdin.readline()
print("applied", *store.setup(), flush=True)
"""
    outputs = run_together(program, [[schema_name]] * 16, server_dsn)
    applied = sorted(name for output in outputs for name in output.split()[1:])
    assert applied == [f"{migration.version:04}_{migration.name}" for migration in schema.migrations()]
    tables = execute(
        admin,
        "select count(*) from pg_class where relname = 'conversations' and relnamespace = "
        "(select oid from pg_namespace where nspname = %s)",
        schema_name,
    )
    assert tables == [(1,)]
    assert execute(admin, "select version from {schema}.schema_migrations order by 1", schema=schema_name) == [
        (version,) for version in range(1, KNOWN + 1)
    ]


def test_the_rendered_schema_is_the_one_that_setup_makes(
    server_dsn: str, any_schema_name: str, admin: Connection
) -> None:
    with ConversationStore(server_dsn, schema=any_schema_name) as store:
        store.setup()
        by_setup = catalog(admin, any_schema_name)
        execute(admin, "drop schema {schema} cascade", schema=any_schema_name)
        with admin.cursor() as cursor:
            # Sent as psql sends a file: without parameters.
            cursor.execute(schema.render(any_schema_name))
        assert catalog(admin, any_schema_name) == by_setup
        assert store.setup() == []
        use_everything(store)
    tables = {line.split(" | ")[1] for line in by_setup if line.startswith("relation") and " | r | " in line}
    assert tables == {
        "conversations",
        "conversation_messages",
        "conversation_summaries",
        "conversation_keys",
        "items",
        "tenant_roles",
        "schema_migrations",
    }


def test_the_catalog_comparison_sees_every_kind_of_difference(store: ConversationStore, admin: Connection) -> None:
    original = catalog(admin, store.schema)
    for change in (
        "alter table {schema}.conversations alter metadata drop default",
        "alter table {schema}.conversation_messages alter content drop not null",
        "alter table {schema}.conversations set (fillfactor = 80)",
        "drop index {schema}.conversations_by_user",
        "alter table {schema}.conversation_summaries drop constraint conversation_summaries_conversation_id_fkey",
        "alter table {schema}.conversation_messages alter token_count type bigint",
        "create or replace view {schema}.conversation_log as select * from {schema}.conversation_messages",
        "update {schema}.schema_migrations set needs_version = 0",
    ):
        admin.autocommit = False
        if "view" in change or "bigint" in change:
            execute(admin, "drop view {schema}.conversation_log", schema=store.schema)
        execute(admin, change, schema=store.schema)
        changed = catalog(admin, store.schema)
        admin.rollback()
        admin.autocommit = True
        assert changed != original, change
    assert catalog(admin, store.schema) == original


def test_schema_sql_is_the_rendered_schema() -> None:
    assert (PROJECT / "schema.sql").read_text("utf-8") == schema.render()


def test_a_role_that_may_only_read_and_write_rows_uses_everything_and_its_setup_does_nothing(
    store: ConversationStore, server_dsn: str, role: str, admin: Connection
) -> None:
    grant_rows(admin, store.schema, role)
    made = catalog(admin, store.schema)
    with store_as(role, server_dsn, store.schema) as app:
        assert app.setup() == []
        assert app.schema_status().fits
        use_everything(app)
        assert app.setup() == []
    assert catalog(admin, store.schema) == made


def test_a_role_that_owns_nothing_but_the_empty_schema_sets_it_up(
    server_dsn: str, schema_name: str, role: str, admin: Connection
) -> None:
    execute(admin, "create schema {schema}", schema=schema_name)
    execute(admin, "grant usage, create on schema {schema} to {role}", schema=schema_name, role=role)
    with store_as(role, server_dsn, schema_name) as owner:
        assert len(owner.setup()) == KNOWN
        use_everything(owner)


def test_a_role_without_the_right_to_create_gets_an_error_that_says_so(
    server_dsn: str, schema_name: str, role: str, admin: Connection
) -> None:
    for needed, grant in (
        ("permission denied for database", None),
        ("permission denied for schema", "create schema {schema}"),
    ):
        if grant is not None:
            execute(admin, grant, schema=schema_name)
            execute(admin, "grant usage on schema {schema} to {role}", schema=schema_name, role=role)
        with store_as(role, server_dsn, schema_name) as app:
            with pytest.raises(SchemaError, match=f"{needed}.*run `pgmemory init --schema {schema_name}` as"):
                app.setup()


def with_keyring(store: ConversationStore) -> ConversationStore:
    """Give a store a keyring."""
    store.keyring = Keyring({"master": bytes(32)})
    return store


ENTRY = Entry(StoredMessage("human", "q", message_index=0))
EVERYTHING = Scope({"tenant_id": None, "user_id": None, "session_id": None, "before_agent": "#"}, 0)
OPERATIONS: dict[str, Callable[[ConversationStore, ConversationKey], object]] = {
    "append": lambda store, key: store.append(key, [StoredMessage("human", "q")], write_id=uuid.uuid4()),
    "append with pruning": lambda store, key: store.append(
        key, [StoredMessage("human", "q")], write_id=uuid.uuid4(), max_messages=4
    ),
    "append and read": lambda store, key: store.append_and_read_unsummarized(
        key, [StoredMessage("human", "q")], write_id=uuid.uuid4(), budget=9, encoding=None
    ),
    "read_all": lambda store, key: store.read_all(key),
    "list_messages": lambda store, key: store.list_messages("session"),
    "read_last_turns": lambda store, key: store.read_last_turns(key, turns=1),
    "read_last_tokens": lambda store, key: store.read_last_tokens(key, budget=9, encoding=None),
    "read_relevant_turns": lambda store, key: store.read_relevant_turns(key, turns=1, rule=None),
    "read_summary_window": lambda store, key: store.read_summary_window(key, budget=9, encoding=None),
    "read_unsummarized": lambda store, key: store.read_unsummarized(key, budget=9, encoding=None),
    "record_summary": lambda store, key: store.record_summary(key, content="s", covers_through=0, state="0/0/0"),
    "clear": lambda store, key: store.clear(key),
    "clear_with_agents": lambda store, key: store.clear_with_agents(key),
    "erase_key": lambda store, key: store.erase_key("session"),
    "rotate_keys": lambda store, key: with_keyring(store).rotate_keys(),
    "list_conversations": lambda store, key: store.list_conversations(),
    "find_conversations": lambda store, key: store.find_conversations("session"),
    "follow": lambda store, key: store.follow().newest(1),
    "read_page": lambda store, key: store.read_page(key),
    "read_pages": lambda store, key: list(store.read_pages(key)),
    "search": lambda store, key: store.search("text"),
    "statistics": lambda store, key: store.statistics(),
    "get_conversation": lambda store, key: store.get_conversation("session"),
    "get_metadata": lambda store, key: store.get_metadata("session"),
    "set_metadata": lambda store, key: store.set_metadata("session", {}),
    "items": lambda store, key: store.items("user").get(("facts",), "key"),
    "hold": lambda store, key: store.hold("session"),
    "release": lambda store, key: store.release("session"),
    "set_time_to_live": lambda store, key: store.set_time_to_live("session", None),
    "prune": lambda store, key: store.prune(),
    "erase_conversation": lambda store, key: store.erase_conversation("session"),
    "erase_user": lambda store, key: store.erase_user("user"),
    "read_scope": lambda store, key: store.read_scope(),
    "read_ids": lambda store, key: store.read_ids(EVERYTHING, FIRST_ID),
    "read_snapshot": lambda store, key: store.read_snapshot(EVERYTHING, str(key.id)),
    "read_entries": lambda store, key: store.read_entries(EVERYTHING, str(key.id), 0, 9),
    "write_entries": lambda store, key: store.write_entries(key, [ENTRY], is_first=True, is_last=True),
    "count_differing": lambda store, key: store.count_differing(key, [ENTRY]),
    "require_schema": lambda store, key: store.require_schema(),
    "edit_turns": lambda store, key: store.edit_turns(key, [0], lambda turns: Edit()),
    "fork": lambda store, key: (
        store.append(key, [StoredMessage("human", "q")], write_id=uuid.uuid4()),
        store.fork(key, "fork"),
    ),
    "read_states": lambda store, key: list(store.read_states(key)),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_without_a_schema_every_operation_names_the_command_that_makes_it(
    server_dsn: str, schema_name: str, admin: Connection, operation: str
) -> None:
    with ConversationStore(server_dsn, schema=schema_name) as store:
        with pytest.raises(SchemaError, match="pgmemory init") as caught:
            OPERATIONS[operation](store, store.key("session"))
        assert schema_name in str(caught.value)
        # The connection that failed is of use again.
        assert store.setup()
        OPERATIONS[operation](store, store.key("session"))


def test_every_public_operation_of_the_store_is_tried_without_a_schema() -> None:
    no_io_or_no_table = {"embedded", "setup", "schema_status", "key", "run_in_worker", "pool_stats", "close"}
    changes_the_schema = {"bind_role", "unbind_role"}  # in test_row_level_security.py
    needs_words = {"recall", "index_messages"}  # in test_recall.py
    excused = no_io_or_no_table | changes_the_schema | needs_words
    public = {name for name in dir(ConversationStore) if not name.startswith("_")} - excused
    tried = {name.split(" ")[0] for name in OPERATIONS} | {"append_and_read_unsummarized"}
    assert public <= tried


def test_a_table_that_someone_has_changed_is_told(store: ConversationStore, admin: Connection) -> None:
    execute(admin, "alter table {schema}.conversations drop keeps_summary", schema=store.schema)
    with pytest.raises(SchemaError, match="not as its migrations made it.*keeps_summary.*`pgmemory schema`"):
        OPERATIONS["append"](store, store.key("session"))


def add_to_ledger(connection: Connection, schema_name: str, *, version: int, needs: int) -> None:
    statement = "insert into {schema}.schema_migrations (version, name, needs_version) values (%s, 'later', %s)"
    execute(connection, statement, version, needs, schema=schema_name)


def test_a_schema_that_is_too_old_names_the_command_that_upgrades_it(
    server_dsn: str, store: ConversationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = schema.Migration(KNOWN + 1, "later", "select 1;")
    known = (*schema.migrations(), newest)
    monkeypatch.setattr(schema.ledger, "migrations", lambda: known)
    with ConversationStore(server_dsn, schema=store.schema) as worker:
        message = f"{store.schema}.*too old: version {KNOWN}, not {KNOWN + 1}.*pgmemory init --schema {store.schema}"
        with pytest.raises(SchemaError, match=message):
            worker.list_messages("s")
        assert worker.setup() == [f"{KNOWN + 1:04}_later"]
        assert worker.list_messages("s") == []


def test_a_role_that_may_not_read_the_ledger_works_on_a_schema_that_fits(
    server_dsn: str, store: ConversationStore, role: str, admin: Connection
) -> None:
    grant_rows(admin, store.schema, role)
    execute(admin, "revoke all on {schema}.schema_migrations from {role}", schema=store.schema, role=role)
    with store_as(role, server_dsn, store.schema) as app:
        OPERATIONS["append"](app, app.key("session"))
        assert len(app.list_messages("session")) == 1


def test_a_schema_that_needs_a_newer_version_says_upgrade(
    server_dsn: str, store: ConversationStore, admin: Connection
) -> None:
    add_to_ledger(admin, store.schema, version=KNOWN + 7, needs=KNOWN + 1)
    before = catalog(admin, store.schema)
    with pytest.raises(SchemaError, match="pip install --upgrade langchain-pgmemory") as caught:
        store.setup()
    for part in (store.schema, str(KNOWN + 7), str(KNOWN + 1)):
        assert part in str(caught.value)
    with ConversationStore(server_dsn, schema=store.schema) as worker:  # whose setup() nobody has called
        with pytest.raises(SchemaError, match="pip install --upgrade langchain-pgmemory"):
            worker.append(worker.key("s"), [StoredMessage("human", "q")], write_id=uuid.uuid4())
    assert store.list_messages("s") == []
    assert not store.schema_status().fits
    assert catalog(admin, store.schema) == before


def test_a_newer_schema_that_this_version_still_fits_is_used_as_it_is(
    store: ConversationStore, admin: Connection
) -> None:
    add_to_ledger(admin, store.schema, version=KNOWN + 7, needs=KNOWN)
    assert store.setup() == []
    assert store.schema_status().fits
    use_everything(store)


def test_a_failing_migration_leaves_nothing_of_itself(
    server_dsn: str, schema_name: str, admin: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = schema.migrations()
    works = "create table {schema}.half (a int); alter table {schema}.conversations add note text;"
    broken = schema.Migration(KNOWN + 1, "broken", works + "\nselect 1 / 0;")
    mended = schema.Migration(KNOWN + 1, "mended", works)
    with ConversationStore(server_dsn, schema=schema_name) as store:
        store.setup()
        before = catalog(admin, schema_name)
        monkeypatch.setattr(schema.ledger, "migrations", lambda: (*first, broken))
        for _ in range(2):
            with pytest.raises(StoreError, match="division by zero"):
                store.setup()
            assert catalog(admin, schema_name) == before
            assert [migration.name for migration in store.schema_status().pending] == ["broken"]
        use_everything(store)
        monkeypatch.setattr(schema.ledger, "migrations", lambda: (*first, mended))
        assert store.setup() == [f"{KNOWN + 1:04}_mended"]
        assert store.setup() == []
    assert execute(admin, "select count(*) from {schema}.half", schema=schema_name) == [(0,)]


def test_a_failing_first_migration_leaves_not_even_the_schema(
    server_dsn: str, schema_name: str, admin: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = schema.Migration(1, "broken", "create table {schema}.half (a int); select 1 / 0;")
    monkeypatch.setattr(schema.ledger, "migrations", lambda: (broken,))
    with ConversationStore(server_dsn, schema=schema_name) as store, pytest.raises(StoreError, match="division"):
        store.setup()
    assert not exists(admin, schema_name)


@pytest.mark.parametrize("stands", [False, True])
def test_looking_writes_nothing(server_dsn: str, schema_name: str, admin: Connection, stands: bool) -> None:
    with ConversationStore(server_dsn, schema=schema_name) as store:
        if stands:
            store.setup()
    # The server itself refuses every write of this one.
    with ConversationStore(make_dsn(server_dsn, options=READ_ONLY), schema=schema_name, retry_seconds=0) as looking:
        assert looking.schema_status().fits == stands
        if stands:
            assert looking.setup() == []
        else:
            with pytest.raises(StoreError, match="may only read"):
                looking.setup()
    assert exists(admin, schema_name) == stands


def test_a_setup_that_gets_no_lock_says_what_holds_it_up_and_asks_once(
    server_dsn: str, schema_name: str, admin: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema.changes, "_LOCK_TIMEOUT_MS", "300")
    told: list[Operation] = []
    admin.autocommit = False
    execute(admin, "select pg_advisory_xact_lock(hashtextextended(%s, 0))", f"pgmemory {schema_name}")
    with ConversationStore(server_dsn, schema=schema_name, on_operation=told.append) as store:
        with pytest.raises(SchemaError, match="waited 0.3 s for a lock.*pg_stat_activity.*try again"):
            store.setup()
        admin.rollback()
        admin.autocommit = True
        assert [operation.retries for operation in told if operation.name == "migrate"] == [0]
        assert store.setup()


def test_setup_waits_for_another_one_and_then_finds_its_work_done(
    server_dsn: str, schema_name: str, admin: Connection
) -> None:
    """Also where transactions are repeatable read, in which one would not see what it waited for."""
    dsn = make_dsn(server_dsn, options="-c default_transaction_isolation=repeatable\\ read")
    program = (
        "import sys; from pgmemory import ConversationStore as S; print(S(sys.argv[1], schema=sys.argv[2]).setup())"
    )
    admin.autocommit = False
    lock = "select pg_advisory_xact_lock(hashtextextended(%s, 0))"
    execute(admin, lock, f"pgmemory {schema_name}")
    process = subprocess.Popen(
        [sys.executable, "-c", program, dsn, schema_name],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
    )
    watcher = psycopg2.connect(server_dsn)
    watcher.autocommit = True
    waiting = (
        "select count(*) from pg_locks where locktype = 'advisory' and not granted and objid = "
        "(select objid from pg_locks where locktype = 'advisory' and pid = %s)"
    )
    while execute(watcher, waiting, admin.info.backend_pid) == [(0,)]:
        assert process.poll() is None, process.communicate()
    watcher.close()
    with admin.cursor() as cursor:
        cursor.execute(schema.render(schema_name).replace("begin;", "").replace("commit;", ""))
    admin.commit()
    admin.autocommit = True
    output, _ = process.communicate(timeout=60)
    assert output == "[]\n"


def test_the_view_for_people_shows_a_line_a_message(store: ConversationStore, admin: Connection) -> None:
    key = ConversationKey("", "user", "session")
    messages = [StoredMessage("human", "hello"), StoredMessage("ai", "hi", additional_kwargs='{"a": 1}')]
    store.append(key, messages, write_id=uuid.uuid4(), tags=["hello"], judged_by="rule")
    rows = execute(
        admin,
        "select tenant_id, user_id, session_id, message_index, role, content, additional_kwargs, extra, tags, "
        "summarized from {schema}.conversation_log order by message_index",
        schema=store.schema,
    )
    assert rows == [
        ("", "user", "session", 0, "human", "hello", {}, {}, ["hello"], False),
        ("", "user", "session", 1, "ai", "hi", {"a": 1}, {}, [], False),
    ]


@pytest.mark.parametrize("name", ["x" * 64, "é" * 32, "", None, b"bytes", "nul\0", "half \ud800"])
def test_a_schema_name_that_postgresql_would_cut_or_refuse_is_refused_at_once(name: Any) -> None:
    with pytest.raises(ValueError, match="^schema "):
        ConversationStore("host=/nowhere", schema=name)


def test_two_schemas_whose_names_differ_only_at_their_end_are_two(
    server_dsn: str, schema_name: str, admin: Connection
) -> None:
    names = [schema_name.ljust(62, "x") + end for end in "ab"]
    try:
        for name in names:
            with ConversationStore(server_dsn, schema=name) as store:
                assert len(store.setup()) == KNOWN
                store.append(store.key("s"), [StoredMessage("human", name)], write_id=uuid.uuid4())
                assert [message.content for message in store.list_messages("s")] == [name]
    finally:
        for name in names:
            execute(admin, "drop schema if exists {schema} cascade", schema=name)


def test_every_memory_works_as_a_role_that_may_only_read_and_write_rows(
    store: ConversationStore, server_dsn: str, role: str, admin: Connection
) -> None:
    grant_rows(admin, store.schema, role)
    with store_as(role, server_dsn, store.schema) as app:
        memories: list[PostgresChatMemory] = [
            BufferMemory(session_id="0", store=app),
            BufferMemory(session_id="1", store=app, k=2),
            TokenWindowMemory(session_id="2", store=app),
            RelevantTurnMemory(session_id="3", store=app, keywords=["q"]),
            SummaryMemory(session_id="4", store=app, llm=scripted("the summary"), max_token_limit=20),
        ]
        for memory in memories:
            for number in range(3):
                memory.save_context({"input": f"q{number}"}, {"output": f"a{number}"})
            assert memory.buffer.endswith("Human: q2\nAI: a2")
        assert memories[-1].buffer.startswith("System: the summary\n")


def test_an_older_schema_is_upgraded_with_its_rows_while_older_code_runs_on(
    server_dsn: str, schema_name: str, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = schema.migrations()
    older = ConversationStore(server_dsn, schema=schema_name)
    monkeypatch.setattr(schema.ledger, "migrations", lambda: known[:1])
    assert older.setup() == ["0001_initial"]
    # As a version that knew the first migration only has stored them.
    first = [StoredMessage("human", "before"), StoredMessage("ai", "yes")]
    with psycopg2.connect(server_dsn) as connection:
        write_as_the_first_version(connection, schema_name, older.key("s"), first)
    monkeypatch.setattr(schema.ledger, "migrations", lambda: known)
    with psycopg2.connect(server_dsn) as granting:
        execute(granting, "grant usage on schema {schema} to {role}", schema=schema_name, role=role)
        for table in ("conversations", "conversation_messages", "conversation_summaries", "schema_migrations"):
            rights = "select" if table == "schema_migrations" else "select, insert, update, delete"
            execute(granting, f"grant {rights} on {{schema}}.{table} to {{role}}", schema=schema_name, role=role)
    granting.close()
    with ConversationStore(server_dsn, schema=schema_name) as newer:
        with pytest.raises(SchemaError, match="too old: version 1.*pgmemory init"):
            newer.list_messages("s")
        assert newer.setup() == [f"{step.version:04}_{step.name}" for step in known[1:]]
        newer.append(newer.key("s"), [StoredMessage("human", "after")], write_id=uuid.uuid4())
        write_as_the_first_version(connection, schema_name, older.key("s"), [StoredMessage("ai", "still here")])
        said = [message.content for message in newer.list_messages("s")]
    assert said == ["before", "yes", "after", "still here"]
    # A role that was given rights on the tables that there were can go on.
    with store_as(role, server_dsn, schema_name) as app:
        app.append(app.key("s"), [StoredMessage("human", "as before")], write_id=uuid.uuid4())
        assert len(app.list_messages("s")) == 5
    older.close()
    connection.close()


def write_as_the_first_version(
    connection: Connection, schema_name: str, key: ConversationKey, messages: list[StoredMessage]
) -> None:
    """Append as the code of the first migration did."""
    for message in messages:
        execute(
            connection,
            """
            with conversation as (
                insert into {schema}.conversations as c (id, tenant_id, user_id, session_id, next_message_index)
                values (%s, %s, %s, %s, 1)
                on conflict (id) do update set next_message_index = c.next_message_index + 1
                returning next_message_index - 1 as message_index)
            insert into {schema}.conversation_messages
                (conversation_id, message_index, tenant_id, role, content, created_at)
            select %s, message_index, '', %s, %s, clock_timestamp() from conversation""",
            str(key.id),
            key.tenant_id,
            key.user_id,
            key.session_id,
            str(key.id),
            message.role,
            message.content,
            schema=schema_name,
        )
    connection.commit()
