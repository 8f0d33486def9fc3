"""Row-level security, tried with real roles: what each sees, with whatever SQL, through what, and what it costs."""

from __future__ import annotations

import io
import json
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import psycopg2
import pytest
from conftest import CountingPool
from psycopg2 import sql
from psycopg2.extensions import connection as Connection
from psycopg2.extensions import make_dsn
from servers import Pgbouncer, find_pgbouncer, new_folder
from test_cli import Ended, call, failed, run  # noqa: F401  # a fixture
from test_plans import Crowd, nodes
from test_schema import KNOWN, catalog, execute

from pgmemory import (
    BufferMemory,
    ConfigurationError,
    ConversationStore,
    Keyring,
    PostgresChatMessageHistory,
    SchemaError,
    StoredMessage,
    StoreError,
    schema,
)
from pgmemory.models import ConversationKey
from pgmemory.queries import security
from pgmemory.transfer import JsonLines, export_conversations, import_conversations

PASSWORD = "only-for-tests"
TENANTS = ("acme", "bolt")
TABLES = list(security.TABLES)
RELATIONS = [*TABLES, "conversation_log"]


@pytest.fixture
def new_role(admin: Connection) -> Iterator[Callable[[], str]]:
    """Makes roles that may log in and nothing else; they are dropped afterwards."""
    if execute(admin, "select 1 from pg_roles where rolname = current_user and not rolsuper"):
        pytest.skip("needs a superuser, to make roles")
    made: list[str] = []

    def new_role() -> str:
        made.append(f'role "{len(made)}" {uuid.uuid4().hex[:12]}')
        execute(admin, "create role {role} login password %s", PASSWORD, role=made[-1])
        return made[-1]

    yield new_role
    for name in reversed(made):
        execute(admin, "drop owned by {role} cascade", role=name)
        execute(admin, "drop role {role}", role=name)


class Tenant(NamedTuple):
    """A tenant with a role of its own, and a conversation in each table."""

    name: str
    role: str
    dsn: str
    store: ConversationStore

    def session(self, tenant: str | None = None) -> Connection:
        """A session of the role in autocommit mode; `tenant` is set for all of it."""
        connection = psycopg2.connect(self.dsn)
        connection.autocommit = True
        if tenant is not None:
            execute(connection, "select set_config('pgmemory.tenant_id', %s, false)", tenant)
        return connection


class Tenants(NamedTuple):
    """Two tenants in one schema, which the superuser's store owns."""

    mode: str
    owner: ConversationStore
    acme: Tenant
    bolt: Tenant


def converse(store: ConversationStore, session_id: str, text: str) -> None:
    """Write two turns, a summary and an item."""
    key = store.key(session_id)
    turn = [StoredMessage("human", f"question of {text}"), StoredMessage("ai", f"answer to {text}")]
    store.append(key, turn, write_id=uuid.uuid4())
    window = store.append_and_read_unsummarized(key, turn, write_id=uuid.uuid4(), budget=99, encoding=None)
    assert window.state is not None
    assert store.record_summary(key, content=f"summary of {text}", covers_through=1, state=window.state)
    store.items("u").put(("facts",), "key", {"text": f"fact of {text}"})


@pytest.fixture
def tenants(
    request: pytest.FixtureRequest, store: ConversationStore, server_dsn: str, new_role: Callable[[], str]
) -> Iterator[Tenants]:
    """Two tenants under row-level security, by roles unless the test says otherwise."""
    mode = getattr(request, "param", "roles")
    store.setup(row_level_security=mode)
    made = []
    for name in TENANTS:
        role = new_role()
        store.bind_role(role, name)
        dsn = make_dsn(server_dsn, user=role, password=PASSWORD)
        made.append(Tenant(name, role, dsn, ConversationStore(dsn, schema=store.schema, tenant_id=name)))
        converse(made[-1].store, "s", name)
        keys = "insert into {schema}.conversation_keys values (%s, %s, %s, 'wrapped', 'master')"
        with psycopg2.connect(dsn) as connection:
            execute(connection, "select set_config('pgmemory.tenant_id', %s, false)", name)
            execute(
                connection, keys, str(made[-1].store.key("s").id), str(uuid.uuid4()), name, schema=store.schema
            )
        connection.close()
    yield Tenants(mode, store, *made)
    for tenant in made:
        tenant.store.close()


both_modes = pytest.mark.parametrize("tenants", ["setting", "roles"], indirect=True)


def refused(connection: Connection, statement: str, *parameters: Any, match: str, **names: str) -> None:
    with pytest.raises(psycopg2.Error, match=match) as caught:
        execute(connection, statement, *parameters, **names)
    assert caught.value.pgcode == "42501"
    for tenant in TENANTS:
        assert tenant not in str(caught.value)


# --- What a role sees ------------------------------------------------------------------------------------------------


@both_modes
def test_hand_written_sql_sees_and_changes_one_tenants_rows_through_every_table_and_view(tenants: Tenants) -> None:
    name = tenants.owner.schema
    for tenant, other in ((tenants.acme, tenants.bolt), (tenants.bolt, tenants.acme)):
        session = tenant.session(tenant.name)
        for relation in RELATIONS:
            found = execute(session, f"select distinct tenant_id from {{schema}}.{relation}", schema=name)
            assert found == [(tenant.name,)], relation
            ((count,),) = execute(session, f"select count(*) from {{schema}}.{relation}", schema=name)
            assert count == {"conversation_messages": 4, "conversation_log": 4}.get(relation, 1)
            where = f"select 1 from {{schema}}.{relation} where tenant_id = %s or tenant_id <> current_user"
            assert len(execute(session, where, other.name, schema=name)) == count
            copied = io.StringIO()
            source = f"(select * from {relation})" if relation == "conversation_log" else relation
            with session.cursor() as cursor:
                cursor.execute(sql.SQL("set search_path = {}").format(sql.Identifier(name)))
                cursor.copy_expert(f"copy {source} to stdout", copied)
            assert tenant.name in copied.getvalue() and other.name not in copied.getvalue()
        execute(session, "update {schema}.conversation_messages set content = 'overwritten'", schema=name)
        for table in ("conversation_summaries", "conversation_keys"):
            execute(session, f"delete from {{schema}}.{table}", schema=name)
        assert [message.content for message in tenant.store.list_messages("s")] == ["overwritten"] * 4
        session.close()
        if tenant is tenants.acme:
            assert [message.content[-4:] for message in other.store.list_messages("s")] == ["bolt"] * 4
            assert execute(other.session(other.name), "select 1 from {schema}.conversation_keys", schema=name)


@both_modes
def test_nobody_writes_under_anothers_name_or_into_anothers_conversation(tenants: Tenants) -> None:
    session = tenants.acme.session("acme")
    insert = "insert into {schema}.conversations (id, tenant_id, user_id, session_id) values (%s, %s, '', 'new')"
    policy = "violates row-level security policy"
    for tenant in ("bolt", ""):
        refused(session, insert, str(uuid.uuid4()), tenant, match=policy, schema=tenants.owner.schema)
        for table in TABLES:
            update = f"update {{schema}}.{table} set tenant_id = %s"
            refused(session, update, tenant, match=policy, schema=tenants.owner.schema)
    insert = (
        "insert into {schema}.conversation_messages (conversation_id, message_index, tenant_id, role, content, "
        "created_at) values (%s, %s, 'acme', 'human', 'planted', now())"
    )
    # What is there and what is not are told alike: neither a unique index nor a foreign key says which it was.
    there, not_there = str(tenants.bolt.store.key("s").id), str(uuid.uuid4())
    for conversation, index in ((there, 0), (there, 999), (not_there, 0)):
        refused(session, insert, conversation, index, match=policy, schema=tenants.owner.schema)
    move = "update {schema}.conversation_summaries set conversation_id = %s"
    refused(session, move, there, match=policy, schema=tenants.owner.schema)
    session.close()
    assert len(execute_as_superuser(tenants, "select 1 from {schema}.conversation_messages")) == 8


def plant(tenant: Tenant, key: ConversationKey) -> None:
    """Write a conversation of a tenant in the place of another tenant's."""
    session = tenant.session(tenant.name)
    insert = "insert into {schema}.conversations (id, tenant_id, user_id, session_id) values (%s, %s, '', 'planted')"
    execute(session, insert, str(key.id), tenant.name, schema=tenant.store.schema)
    session.close()


@both_modes
def test_a_row_that_a_tenant_has_put_in_the_place_of_anothers_conversation_is_not_written_into(
    tenants: Tenants, server_dsn: str
) -> None:
    keyring = Keyring({"first": b"1" * 32})
    across = ConversationStore(server_dsn, schema=tenants.owner.schema, tenant_id="bolt")
    sealing = ConversationStore(server_dsn, schema=tenants.owner.schema, tenant_id="bolt", keyring=keyring)
    key, exported = across.key("name"), io.BytesIO()
    tenants.bolt.store.append(key, [StoredMessage("human", "moved")], write_id=uuid.uuid4())
    export_conversations(tenants.bolt.store, exported, session_id="name")
    assert tenants.bolt.store.erase_conversation("name").conversations
    plant(tenants.acme, key)
    turn = [StoredMessage("human", "of bolt")]
    uses: list[Callable[[ConversationStore], object]] = [
        lambda store: store.append(key, turn, write_id=uuid.uuid4()),
        lambda store: store.append_and_read_unsummarized(
            key, turn, write_id=uuid.uuid4(), budget=9, encoding=None
        ),
        lambda store: store.set_metadata("name", {"of": "bolt"}),
    ]
    with across, sealing:
        for store in (tenants.bolt.store, across, sealing):
            for use in uses:
                with pytest.raises(StoreError, match="a row in the place of session 'name'") as caught:
                    use(store)
                assert caught.value.sqlstate == "42501"
                assert ("acme" in str(caught.value)) == (store is not tenants.bolt.store)
            (moved,) = import_conversations(store, JsonLines(io.BytesIO(exported.getvalue()))).findings
            assert (moved.kind, "another tenant's row stands in its place" in moved.reason) == ("conflict", True)
        row = f"select metadata, next_message_index, key_id from {{schema}}.conversations where id = '{key.id}'"
        assert execute_as_superuser(tenants, row) == [({}, 0, None)]
        messages = f"select 1 from {{schema}}.conversation_messages where conversation_id = '{key.id}'"
        assert execute_as_superuser(tenants, messages) == []
        # Nor is a turn lost silently where that row claims to be encrypted.
        execute_as_superuser(
            tenants, f"update {{schema}}.conversations set key_id = id where id = '{key.id}' returning 1"
        )
        for use in uses:
            with pytest.raises(StoreError, match="a row in the place of session 'name'"):
                use(tenants.bolt.store)
        # What the error says helps.
        execute_as_superuser(tenants, f"delete from {{schema}}.conversations where id = '{key.id}' returning 1")
        for use in uses:
            use(tenants.bolt.store)


def execute_as_superuser(tenants: Tenants, statement: str) -> list[tuple[Any, ...]]:
    return tenants.owner._database.execute(statement.replace("{schema}", tenants.owner.schema))


def test_a_setting_does_not_change_the_tenant_that_a_role_has(tenants: Tenants) -> None:
    session = tenants.acme.session("bolt")
    query = "select distinct tenant_id from {schema}.conversation_log"
    assert execute(session, query, schema=tenants.owner.schema) == [("acme",)]
    execute(session, "set row_security = off")
    refused(session, query, match="would be affected by row-level security", schema=tenants.owner.schema)
    for role in (tenants.bolt.role, "postgres"):
        refused(session, "set role {role}", match="permission denied to set role|must be", role=role)
    session.close()


def test_who_may_take_another_role_sees_that_ones_tenant_while_it_does(
    tenants: Tenants, new_role: Callable[[], str], admin: Connection, server_dsn: str
) -> None:
    login = new_role()
    for tenant in (tenants.acme, tenants.bolt):
        execute(admin, "grant {tenant} to {login}", tenant=tenant.role, login=login)
    query = "select distinct tenant_id from {schema}.conversation_log"
    with psycopg2.connect(make_dsn(server_dsn, user=login, password=PASSWORD)) as session:
        for tenant in (tenants.acme, tenants.bolt):
            execute(session, "set local role {tenant}", tenant=tenant.role)
            assert execute(session, query, schema=tenants.owner.schema) == [(tenant.name,)]
        execute(session, "reset role")
        with pytest.raises(psycopg2.Error, match=f"role .*{login[-12:]}.* is bound to no tenant"):
            execute(session, query, schema=tenants.owner.schema)
    session.close()


# --- Tricks ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def workshop(tenants: Tenants, admin: Connection) -> Iterator[Connection]:
    """A session of a tenant's role that makes functions, operators and tables of its own, found before others."""
    name = f"workshop_{uuid.uuid4().hex[:12]}"
    execute(admin, "create schema {name} authorization {role}", name=name, role=tenants.acme.role)
    session = tenants.acme.session()
    execute(session, "set search_path = {name}, pg_catalog", name=name)
    yield session
    session.close()
    execute(admin, "drop schema {name} cascade", name=name)


def test_a_cheap_function_in_a_condition_is_shown_no_other_tenants_rows(tenants: Tenants, workshop: Connection) -> None:
    execute(
        workshop,
        "create function leak(text) returns boolean language plpgsql cost 0.0000001 as "
        "$$ begin raise notice 'saw %', $1; return true; end $$",
    )
    columns = {
        "conversations": "session_id || tenant_id",
        "conversation_messages": "content",
        "conversation_summaries": "content",
        "conversation_keys": "tenant_id",
        "conversation_log": "content || tenant_id",
        "items": "value::text || tenant_id",
    }
    for relation in RELATIONS:
        query = f"select 1 from {{schema}}.{relation} where leak({columns[relation]})"
        assert execute(workshop, query, schema=tenants.owner.schema)
    assert any("question of acme" in notice for notice in workshop.notices)
    assert not any("bolt" in notice for notice in workshop.notices)
    # Nor an error about a value.
    divide = "select 1 from {schema}.conversation_messages where 1 / (1 - sign(strpos(content, 'bolt'))::int) = 0"
    assert execute(workshop, divide, schema=tenants.owner.schema) == []
    cast = "select 1 from {schema}.conversation_messages where content like '%%bolt%%' and content::int = 1"
    assert execute(workshop, cast, schema=tenants.owner.schema) == []


def test_names_of_ones_own_do_not_stand_in_for_those_that_policies_use(tenants: Tenants, workshop: Connection) -> None:
    for statement in (
        "create function current_setting(text, boolean) returns text language sql as $$ select 'bolt' $$",
        "create function yes(name, name) returns boolean language sql as 'select true'",
        "create function yes(uuid, uuid) returns boolean language sql as 'select true'",
        "create function yes(text, text) returns boolean language sql as 'select true'",
        "create operator = (function = yes, leftarg = name, rightarg = name)",
        "create operator = (function = yes, leftarg = uuid, rightarg = uuid)",
        "create operator = (function = yes, leftarg = text, rightarg = text)",
        "create table tenant_roles as select current_user as role_name, 'bolt' as tenant_id",
        "create temp table tenant_roles as select current_user as role_name, 'bolt' as tenant_id",
        "create temp table conversations as select null::uuid as id",
        "create function current_tenant() returns text language sql as $$ select 'bolt' $$",
    ):
        execute(workshop, statement)
    query = "select distinct tenant_id collate \"C\" from {schema}.conversation_log"
    assert execute(workshop, query, schema=tenants.owner.schema) == [("acme",)]
    insert = "insert into {schema}.conversation_summaries values (%s, 5, 'acme', 'planted', now())"
    planted = str(tenants.bolt.store.key("s").id)
    refused(workshop, insert, planted, match="violates row-level security policy", schema=tenants.owner.schema)
    for statement in (
        "create or replace function {schema}.current_tenant() returns text language sql as $$ select 'bolt' $$",
        "drop policy tenant_by_role on {schema}.conversations",
        "alter table {schema}.conversations no force row level security",
        "truncate {schema}.conversations cascade",
        "create table copy (id uuid references {schema}.conversations (id))",
    ):
        refused(workshop, statement, match="permission denied|must be owner", schema=tenants.owner.schema)


def test_statistics_of_the_tables_are_not_shown(tenants: Tenants, admin: Connection) -> None:
    for table in TABLES:
        execute(admin, f"analyze {{schema}}.{table}", schema=tenants.owner.schema)
    query = "select 1 from pg_stats where schemaname = %s and tablename = any(%s)"
    assert execute(admin, query, tenants.owner.schema, TABLES)
    session = tenants.acme.session("acme")
    assert execute(session, query, tenants.owner.schema, TABLES) == []
    session.close()


def test_a_role_sees_its_own_binding_alone_and_cannot_change_it_whatever_it_was_granted(
    tenants: Tenants, admin: Connection
) -> None:
    name = tenants.owner.schema
    grant = "grant all on all tables in schema {schema} to {role}"
    execute(admin, grant, schema=name, role=tenants.acme.role)
    session = tenants.acme.session()
    bindings = "select role_name, tenant_id from {schema}.tenant_roles"
    assert execute(session, bindings, schema=name) == [(tenants.acme.role, "acme")]
    execute(session, "update {schema}.tenant_roles set tenant_id = 'bolt'", schema=name)
    execute(session, "delete from {schema}.tenant_roles", schema=name)
    insert = "insert into {schema}.tenant_roles values ('somebody', 'somewhere')"
    refused(session, insert, match="violates row-level security policy", schema=name)
    assert execute(session, bindings, schema=name) == [(tenants.acme.role, "acme")]
    session.close()


# --- Stores that are not let in --------------------------------------------------------------------------------------


USES: dict[str, Callable[[ConversationStore], object]] = {
    "read": lambda store: store.list_messages("s"),
    "read what is absent": lambda store: store.list_messages("absent"),
    "list": lambda store: store.list_conversations(),
    "write": lambda store: store.append(store.key("s"), [StoredMessage("human", "q")], write_id=uuid.uuid4()),
    "clear": lambda store: store.clear(store.key("absent")),
}


@pytest.mark.parametrize("tenants", ["setting"], indirect=True)
def test_by_setting_a_store_without_a_tenant_is_refused(tenants: Tenants) -> None:
    for use in USES.values():
        with ConversationStore(tenants.acme.dsn, schema=tenants.owner.schema) as nobody:
            for _ in range(2):
                nobody.setup()  # which says nothing about tenants
                with pytest.raises(StoreError, match="the store has no tenant: give it a tenant_id") as caught:
                    use(nobody)
                assert caught.value.sqlstate == "42501"


def test_by_role_a_store_of_another_tenant_is_refused(tenants: Tenants) -> None:
    for use in USES.values():
        for tenant in ("bolt", None):
            with ConversationStore(tenants.acme.dsn, schema=tenants.owner.schema, tenant_id=tenant) as other:
                with pytest.raises(StoreError, match="binds the role .* to the tenant 'acme'.*give it that tenant_id"):
                    use(other)
    assert len(tenants.bolt.store.list_messages("s")) == 4


def test_by_role_a_role_without_a_tenant_is_told_the_command(
    tenants: Tenants, new_role: Callable[[], str], server_dsn: str, admin: Connection
) -> None:
    role = new_role()
    execute(admin, "grant usage on schema {schema} to {role}", schema=tenants.owner.schema, role=role)
    rows = "grant select, insert, update, delete on all tables in schema {schema} to {role}"
    execute(admin, rows, schema=tenants.owner.schema, role=role)
    dsn = make_dsn(server_dsn, user=role, password=PASSWORD)
    with ConversationStore(dsn, schema=tenants.owner.schema, tenant_id="acme") as store:
        for use in USES.values():
            with pytest.raises(StoreError, match="bound to no tenant: `pgmemory bind-role` binds it"):
                use(store)


@pytest.mark.parametrize("mode", ["setting", "roles"])
def test_a_store_that_is_in_use_when_policies_come_finds_nothing_and_says_why_it_writes_nothing(
    store: ConversationStore, server_dsn: str, new_role: Callable[[], str], mode: Any
) -> None:
    role = new_role()
    store.bind_role(role, "acme")
    tenant = None if mode == "setting" else "bolt"
    dsn = make_dsn(server_dsn, user=role, password=PASSWORD)
    with ConversationStore(dsn, schema=store.schema, tenant_id=tenant) as app:
        history = PostgresChatMessageHistory("s", app)
        history.add_user_message("before")
        store.setup(row_level_security=mode)
        reason = "the store has no tenant" if mode == "setting" else "binds the role .* to the tenant 'acme'"
        with pytest.raises(StoreError, match=reason) as caught:
            history.add_user_message("after")
        turn = caught.value.unsaved_turn
        assert turn is not None and [message.content for message in turn.messages] == ["after"]
        if mode == "roles":
            assert history.messages == app.list_conversations() == []
        store.setup(row_level_security="off")
        assert [message.content for message in history.messages] == ["before"]


@pytest.mark.parametrize("tenants", ["setting"], indirect=True)
def test_by_setting_an_empty_tenant_is_refused_also_where_a_transaction_has_left_one(tenants: Tenants) -> None:
    session = tenants.acme.session()
    query = "select 1 from {schema}.conversations"
    insert = "insert into {schema}.conversations (id, tenant_id, user_id, session_id) values (%s, '', '', 's')"
    for _ in range(2):
        refused(session, query, match="no tenant is set", schema=tenants.owner.schema)
        refused(session, insert, str(uuid.uuid4()), match="no tenant is set", schema=tenants.owner.schema)
        session.autocommit = False
        execute(session, "set local pgmemory.tenant_id = 'acme'")
        assert execute(session, query, schema=tenants.owner.schema) == [(1,)]
        session.commit()
        session.autocommit = True
        # The setting is there now, and empty.
        assert execute(session, "select current_setting('pgmemory.tenant_id', true)") == [("",)]
    session.close()


# --- Turning it on and off -------------------------------------------------------------------------------------------


def policies(connection: Connection, name: str) -> list[tuple[Any, ...]]:
    """Everything that row-level security consists of."""
    query = """
        select c.relname, c.relrowsecurity, c.relforcerowsecurity, c.reloptions, p.polname,
               pg_get_expr(p.polqual, c.oid), pg_get_expr(p.polwithcheck, c.oid), p.polcmd::text, p.polroles::text
        from pg_class c left join pg_policy p on p.polrelid = c.oid
        where c.relnamespace = %s::regnamespace and c.relkind in ('r', 'v') and c.relname <> 'tenant_roles'
        order by 1, 5"""
    return execute(connection, query, name)


def secured(connection: Connection, name: str) -> set[tuple[str, str]]:
    """The tables whose policy binds their owner too, and its name."""
    return {(row[0], row[4]) for row in policies(connection, name) if row[1] and row[2]}


def with_tenants(connection: Connection, name: str) -> set[str]:
    """The tables that have a column for the tenant."""
    query = """
        select c.relname from pg_class c join pg_attribute a on a.attrelid = c.oid and a.attname = 'tenant_id'
        where c.relnamespace = %s::regnamespace and c.relkind in ('r', 'p') and c.relname <> 'tenant_roles'"""
    return {table for (table,) in execute(connection, query, name)}


def test_every_table_and_view_of_the_migrations_is_listed(store: ConversationStore, admin: Connection) -> None:
    query = """
        select relkind in ('r', 'p'), relname::text from pg_class
        where relnamespace = %s::regnamespace and relkind not in ('i', 'I', 't', 'c')"""
    listed = {(True, name) for name in security.TABLES + security.TABLES_OF_THE_OWNER}
    assert set(execute(admin, query, store.schema)) == listed | {(False, name) for name in security.VIEWS}
    # Every table with a tenant is protected; what is protected has one.
    assert with_tenants(admin, store.schema) == set(security.TABLES)


@pytest.fixture
def others(schema_name: str, admin: Connection) -> str:
    """A schema in which an application has tables and views of its own, with row-level security of its own."""
    for statement in (
        "create schema {schema}",
        "create table {schema}.orders (tenant_id uuid, conversation_id uuid)",
        "create table {schema}.invoices (tenant_id text)",
        "alter table {schema}.invoices enable row level security",
        "create policy tenant_by_role on {schema}.invoices using (tenant_id = current_user)",
        "create table {schema}.secrets (secret text)",
        "create view {schema}.open_orders with (security_invoker = true) as select * from {schema}.orders",
        "create view {schema}.all_orders as select * from {schema}.orders",
    ):
        execute(admin, statement, schema=schema_name)
    return schema_name


def test_what_else_is_in_the_schema_is_left_alone(
    others: str, server_dsn: str, admin: Connection, new_role: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = {"orders", "invoices", "secrets", "open_orders", "all_orders"}

    def state() -> list[tuple[Any, ...]]:
        return [row for row in policies(admin, others) if row[0] in theirs]

    rights = "select 1 from pg_class where relnamespace = %s::regnamespace and relname = any(%s) and relacl is not null"
    before, role = state(), new_role()
    with ConversationStore(server_dsn, schema=others) as store:
        for mode in ("setting", "roles", "off", "roles"):
            store.setup(row_level_security=mode)
            status = store.schema_status()
            assert (status.row_level_security, status.deviating) == (mode, ())
            assert state() == before
        store.bind_role(role, "acme")
        assert execute(admin, rights, others, list(theirs)) == []
        # Nor does it decide what a later migration's tables get.
        table = "create table {schema}.notes (tenant_id text);"
        known = (*schema.migrations(), schema.Migration(KNOWN + 1, "later", table))
        monkeypatch.setattr(schema.ledger, "migrations", lambda: known)
        monkeypatch.setattr(security, "TABLES", (*security.TABLES, "notes"))
        assert store.setup() == [f"{KNOWN + 1:04}_later"]
        assert {("notes", "tenant_by_role"), ("conversations", "tenant_by_role")} <= secured(admin, others)
        execute(admin, "grant select on {schema}.secrets to {role}", schema=others, role=role)
        store.unbind_role(role)
        assert execute(admin, "select has_table_privilege(%s, %s, 'select')", role, f"{others}.secrets") == [(True,)]
        store.setup(row_level_security="off")
        assert state() == before


@pytest.mark.parametrize("mode", ["setting", "roles"])
def test_a_schemas_name_may_be_anything(server_dsn: str, schema_name: str, admin: Connection, mode: Any) -> None:
    name = f"""$function$ $function_$ '"\\%s {{schema}} {schema_name[-6:]}"""
    try:
        with ConversationStore(server_dsn, schema=name, tenant_id="acme") as store:
            store.setup(row_level_security=mode)
            assert store.schema_status().row_level_security == mode
            converse(store, "s", "acme")
            store.setup(row_level_security="off")
    finally:
        execute(admin, "drop schema if exists {schema} cascade", schema=name)


def test_every_table_with_a_tenant_has_the_policy_and_off_leaves_nothing_of_it(
    store: ConversationStore, admin: Connection
) -> None:
    name = store.schema
    before = catalog(admin, name), policies(admin, name)
    assert store.schema_status().row_level_security == "off"
    assert with_tenants(admin, name) == set(TABLES)
    for mode in ("setting", "roles", "setting"):
        for _ in range(2):
            assert store.setup(row_level_security=mode) == []
            assert store.schema_status().row_level_security == mode
            assert secured(admin, name) == {(table, security.POLICIES[mode]) for table in TABLES}
    assert store.setup() == []
    assert store.schema_status().row_level_security == "setting"
    store.setup(row_level_security="off")
    assert (catalog(admin, name), policies(admin, name)) == before
    assert store.schema_status().row_level_security == "off"


def test_what_a_later_migration_adds_does_not_escape(
    tenants: Tenants, admin: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = schema.Migration(
        KNOWN + 1,
        "later",
        "create table {schema}.notes (conversation_id uuid primary key references {schema}.conversations (id),"
        " tenant_id text not null, note text);"
        "create table {schema}.tenant_limits (tenant_id text primary key);"
        "create view {schema}.noted as select * from {schema}.notes;",
    )
    known = (*schema.migrations(), later)
    monkeypatch.setattr(schema.ledger, "migrations", lambda: known)
    monkeypatch.setattr(security, "TABLES", (*security.TABLES, "notes", "tenant_limits"))
    monkeypatch.setattr(security, "VIEWS", (*security.VIEWS, "noted"))
    name = tenants.owner.schema
    assert tenants.owner.setup() == [f"{KNOWN + 1:04}_later"]
    assert secured(admin, name) == {(table, "tenant_by_role") for table in with_tenants(admin, name)}
    assert len(with_tenants(admin, name)) == len(TABLES) + 2
    for tenant in (tenants.acme, tenants.bolt):
        session = tenant.session()
        insert = "insert into {schema}.notes values (%s, %s, 'a note')"
        execute(session, insert, str(tenant.store.key("s").id), tenant.name, schema=name)
        assert execute(session, "select tenant_id from {schema}.noted", schema=name) == [(tenant.name,)]
        session.close()


HARMS = {
    "drop policy tenant_by_setting on {schema}.conversation_summaries": "conversation_summaries",
    "alter table {schema}.conversation_keys no force row level security": "conversation_keys",
    "alter table {schema}.conversations disable row level security": "conversations",
    "alter view {schema}.conversation_log reset (security_invoker)": "conversation_log",
    "create policy tenant_by_role on {schema}.conversations using (true)": "conversations",
}


def test_what_has_lost_its_protection_is_told_and_gets_it_again(
    store: ConversationStore,
    admin: Connection,
    call: Callable[..., Ended],  # noqa: F811
    server_dsn: str,
) -> None:
    store.setup(row_level_security="setting")
    whole = policies(admin, store.schema)
    for harm, harmed in HARMS.items():
        execute(admin, harm, schema=store.schema)
        status = store.schema_status()
        assert status.row_level_security == ("roles" if "by_role" in harm else "setting")
        assert harmed in status.deviating
        mode = status.row_level_security
        told = call("status", "--schema", store.schema, dsn=server_dsn)
        failed(told, f"`pgmemory init --schema {store.schema} --row-level-security {mode}`")
        assert harmed in told.errors and f"row-level security: {mode}, but not so: " in told.output
        told = call("status", "--schema", store.schema, "--json", dsn=server_dsn)
        failed(told, "--row-level-security")
        assert harmed in json.loads(told.output)["deviating"]
        store.setup(row_level_security="setting")
        assert policies(admin, store.schema) == whole
        assert store.schema_status().deviating == ()
    # Turning it off takes what is left, also where nothing tells of a mode any more.
    for table in TABLES:
        execute(admin, f"drop policy tenant_by_setting on {{schema}}.{table}", schema=store.schema)
    status = store.schema_status()
    assert (status.row_level_security, set(status.deviating)) == ("off", set(RELATIONS))
    assert call("status", "--schema", store.schema, dsn=server_dsn).code == 0
    store.setup(row_level_security="off")
    assert store.schema_status().deviating == ()
    assert not any(row[1] or row[2] or row[3] for row in policies(admin, store.schema) if row[0] != "conversations")


def test_a_migration_protects_everything_where_only_some_of_it_was(
    store: ConversationStore, admin: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.setup(row_level_security="setting")
    execute(admin, "drop policy tenant_by_setting on {schema}.conversations", schema=store.schema)
    later = schema.Migration(KNOWN + 1, "later", "create table {schema}.notes (tenant_id text);")
    known = (*schema.migrations(), later)
    monkeypatch.setattr(schema.ledger, "migrations", lambda: known)
    monkeypatch.setattr(security, "TABLES", (*security.TABLES, "notes"))
    store.setup()
    assert secured(admin, store.schema) == {(table, "tenant_by_setting") for table in security.TABLES}


def test_an_owner_who_is_no_superuser_is_bound_too_and_only_the_owner_changes_it(
    schema_name: str, server_dsn: str, new_role: Callable[[], str], admin: Connection
) -> None:
    owner_role, app_role = new_role(), new_role()
    execute(admin, "create schema {schema} authorization {role}", schema=schema_name, role=owner_role)

    def store_as(role: str, tenant: str | None = None) -> ConversationStore:
        dsn = make_dsn(server_dsn, user=role, password=PASSWORD)
        return ConversationStore(dsn, schema=schema_name, tenant_id=tenant)

    with store_as(owner_role) as owner, store_as(owner_role, "acme") as acme, store_as(app_role, "acme") as app:
        assert len(owner.setup(row_level_security="setting")) == KNOWN
        owner.bind_role(app_role, "acme")
        converse(acme, "s", "acme")
        with pytest.raises(StoreError, match="the store has no tenant"):
            owner.list_conversations()
        with psycopg2.connect(make_dsn(server_dsn, user=owner_role, password=PASSWORD)) as session:
            execute(session, "set local pgmemory.tenant_id = 'bolt'")
            assert execute(session, "select 1 from {schema}.conversation_log", schema=schema_name) == []
            # What foreign keys delete along is not for policies to hide.
            execute(session, "set local pgmemory.tenant_id = 'acme'")
            execute(session, "delete from {schema}.conversations", schema=schema_name)
            session.commit()
        session.close()
        assert execute(admin, "select 1 from {schema}.conversation_messages", schema=schema_name) == []
        # The application may ask for what is there already, and for nothing else.
        assert app.setup(row_level_security="setting") == []
        for mode in ("off", "roles"):
            with pytest.raises(SchemaError, match="this role may not create or change the schema"):
                app.setup(row_level_security=mode)
        with pytest.raises(SchemaError, match="this role may not"):
            app.bind_role(app_role, "bolt")
        with pytest.raises(SchemaError, match="this role may not"):
            app.unbind_role(app_role)
        assert app.schema_status().row_level_security == "setting"


def test_a_server_whose_views_do_not_obey_is_refused_and_left_as_it_was(
    store: ConversationStore, admin: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = catalog(admin, store.schema), policies(admin, store.schema)
    monkeypatch.setattr(schema.protection, "_SECURES_VIEWS", 10**9)
    with pytest.raises(SchemaError, match="row-level security needs PostgreSQL 15 or newer"):
        store.setup(row_level_security="roles")
    assert (catalog(admin, store.schema), policies(admin, store.schema)) == before


def test_several_who_turn_it_on_at_once_all_succeed_while_writers_go_on(
    store: ConversationStore, server_dsn: str
) -> None:
    def set_up(_: int) -> list[str]:
        with ConversationStore(server_dsn, schema=store.schema) as other:
            return other.setup(row_level_security="setting")

    def write(number: int) -> None:
        with ConversationStore(server_dsn, schema=store.schema, tenant_id="acme") as writer:
            memory = BufferMemory(session_id=number, store=writer, max_messages=4)
            for _ in range(20):
                memory.save_context({"input": "q"}, {"output": "a"})
            memory.clear()

    with ThreadPoolExecutor(8) as executor:
        writers = [executor.submit(write, number) for number in range(2)]
        assert list(executor.map(set_up, range(6))) == [[]] * 6
        for writer in writers:
            writer.result()
    assert store.schema_status().row_level_security == "setting"


@pytest.mark.parametrize("mode", ["on", "", True, "Roles"])
def test_a_mode_that_is_none_is_refused(store: ConversationStore, mode: Any) -> None:
    with pytest.raises(ConfigurationError, match="row_level_security must be one of"):
        store.setup(row_level_security=mode)


# --- Binding roles ---------------------------------------------------------------------------------------------------


def test_a_bound_role_has_the_rights_of_an_application_and_an_unbound_one_has_none(
    tenants: Tenants, admin: Connection, new_role: Callable[[], str]
) -> None:
    name, role = tenants.owner.schema, tenants.acme.role
    query = """
        select c.relname::text, string_agg(g.privilege_type, ' ' order by g.privilege_type) from pg_class c,
            lateral aclexplode(c.relacl) g
        where c.relnamespace = %s::regnamespace and g.grantee = (select oid from pg_roles where rolname = %s)
        group by 1"""
    rows = "DELETE INSERT SELECT UPDATE"
    expected = dict.fromkeys(TABLES, rows) | dict.fromkeys(("conversation_log", "schema_migrations"), "SELECT")
    assert dict(execute(admin, query, name, role)) == expected
    tenants.owner.bind_role(role, "bolt")
    with ConversationStore(tenants.acme.dsn, schema=name, tenant_id="bolt") as moved:
        assert [message.content[-4:] for message in moved.list_messages("s")] == ["bolt"] * 4
    assert tenants.owner.unbind_role(role) == "bolt"
    assert tenants.owner.unbind_role(role) is None
    assert execute(admin, query, name, role) == []
    with pytest.raises(StoreError, match="permission denied for schema"):
        tenants.acme.store.list_messages("s")
    # A role that was dropped meanwhile.
    gone = new_role()
    tenants.owner.bind_role(gone, "acme")
    execute(admin, "drop owned by {role}", role=gone)
    execute(admin, "alter role {role} rename to {other}", role=gone, other=f"{gone} renamed")
    try:
        assert tenants.owner.unbind_role(gone) == "acme"
    finally:
        execute(admin, "alter role {other} rename to {role}", role=gone, other=f"{gone} renamed")


def test_a_role_that_no_policy_binds_cannot_be_bound(
    tenants: Tenants, admin: Connection, new_role: Callable[[], str]
) -> None:
    owner, bypassing, member = new_role(), new_role(), new_role()
    execute(admin, "alter role {role} bypassrls", role=bypassing)
    execute(admin, "grant {of} to {role}", of=bypassing, role=member)
    for role in (bypassing, member):
        with pytest.raises(ConfigurationError, match="may bypass row-level security"):
            tenants.owner.bind_role(role, "acme")
    for attribute in ("replication", "createrole"):
        role = new_role()
        execute(admin, f"alter role {{role}} {attribute}", role=role)
        if attribute == "createrole" and execute(admin, "show server_version_num")[0][0] >= "160000":
            continue  # may no longer take any role
        with pytest.raises(ConfigurationError, match="may bypass row-level security, by the rights of 'role"):
            tenants.owner.bind_role(role, "acme")
    for power in ("pg_read_server_files", "pg_write_server_files", "pg_execute_server_program", "pg_monitor"):
        role = new_role()
        execute(admin, f"grant {power} to {{role}}", role=role)
        with pytest.raises(ConfigurationError, match="may bypass row-level security, by the rights of 'pg_"):
            tenants.owner.bind_role(role, "acme")
    execute(admin, "grant {of} to {role}", of=owner, role=(of_owner := new_role()))
    for thing in (
        "schema {schema}",
        "table {schema}.conversations",
        "table {schema}.tenant_roles",
        "view {schema}.conversation_log",
        "function {schema}.current_tenant()",
    ):
        ((before,),) = execute(admin, "select current_user")
        execute(admin, f"alter {thing} owner to {{role}}", schema=tenants.owner.schema, role=owner)
        for role in (owner, of_owner):
            with pytest.raises(ConfigurationError, match="may act as the owner of the schema or of what is in it"):
                tenants.owner.bind_role(role, "acme")
        execute(admin, f"alter {thing} owner to {{role}}", schema=tenants.owner.schema, role=before)
    tenants.owner.bind_role(owner, "acme")  # whom nothing belongs to any more
    with pytest.raises(ConfigurationError, match="there is no role 'nobody of that name'"):
        tenants.owner.bind_role("nobody of that name", "acme")
    for tenant in ("", None):
        with pytest.raises(ConfigurationError, match="tenant_id must"):
            tenants.owner.bind_role(tenants.acme.role, tenant)  # type: ignore[arg-type]


def test_without_a_schema_binding_names_the_command_that_makes_it(server_dsn: str, schema_name: str) -> None:
    with ConversationStore(server_dsn, schema=schema_name) as store:
        for use in (lambda: store.bind_role("r", "t"), lambda: store.unbind_role("r")):
            with pytest.raises(SchemaError, match="pgmemory init"):
                use()


@both_modes
def test_looking_across_tenants_takes_a_role_that_bypasses(tenants: Tenants) -> None:
    found = tenants.owner.list_conversations(all_tenants=True)
    assert {conversation.tenant_id for conversation in found} == set(TENANTS)
    for use in (
        lambda store: store.list_conversations(all_tenants=True),
        lambda store: store.prune(all_tenants=True, dry_run=True),
    ):
        use(tenants.owner)
        with pytest.raises(StoreError, match="shows this role one tenant only.*BYPASSRLS"):
            use(tenants.acme.store)


@both_modes
def test_a_tenant_encrypts_moves_out_and_moves_in_as_without_it(tenants: Tenants) -> None:
    store, name = tenants.acme.store, tenants.owner.schema
    keyring = Keyring({"first": b"1" * 32})
    with ConversationStore(tenants.acme.dsn, schema=name, tenant_id="acme", keyring=keyring) as sealing:
        converse(sealing, "sealed", "acme")
        expected = sealing.list_messages("sealed")
        assert [message.content[-4:] for message in expected] == ["acme"] * 4
        exported = io.BytesIO()
        export_conversations(sealing, exported)
        assert sealing.erase_conversation("sealed").conversations
        import_conversations(sealing, JsonLines(io.BytesIO(exported.getvalue())))
        assert sealing.list_messages("sealed") == expected
        assert sealing.read_summary_window(sealing.key("sealed"), budget=9, encoding=None).summary is not None
        assert sealing.erase_key("sealed")
    assert all(message.is_erased for message in store.list_messages("sealed"))
    assert b"bolt" not in exported.getvalue()


# --- The command -----------------------------------------------------------------------------------------------------


def test_the_command_turns_it_on_and_off_and_status_tells(
    call: Callable[..., Ended],  # noqa: F811
    server_dsn: str,
    schema_name: str,
) -> None:
    ready = f"schema {schema_name!r} is up to date\n"

    def on(*arguments: str) -> Ended:
        return call(*arguments, "--schema", schema_name, dsn=server_dsn)

    assert json.loads(on("status", "--json").output)["fits"] is False
    applied = [f"{migration.version:04}_{migration.name}" for migration in schema.migrations()]
    first = json.loads(on("init", "--json").output)
    assert first == {"schema": schema_name, "applied": applied, "row_level_security": "off", "search": None}
    for arguments, mode in (([], "setting"), (["roles"], "roles"), (["setting"], "setting"), (["off"], "off")):
        ended = on("init", "--row-level-security", *arguments)
        assert ended == Ended(0, f"row-level security: {mode}\n{ready}", "")
        assert f"row-level security: {mode}\n{ready}" in on("status").output
        assert json.loads(on("status", "--json").output) == {
            "schema": schema_name,
            "fits": True,
            "applied": list(range(1, KNOWN + 1)),
            "pending": [],
            "row_level_security": mode,
            "deviating": [],
            "search": None,
            "meaning": None,
        }
    ended = on("init", "--row-level-security", "sometimes")
    assert (ended.code, ended.output) == (2, "") and "'off', 'setting', 'roles'" in ended.errors


def test_a_status_in_json_that_does_not_fit_ends_with_one(
    call: Callable[..., Ended],  # noqa: F811
    server_dsn: str,
    schema_name: str,
) -> None:
    ended = call("status", "--json", "--schema", schema_name, dsn=server_dsn)
    failed(ended, "pgmemory init")
    told = json.loads(ended.output)
    assert (told["applied"], len(told["pending"]), told["row_level_security"]) == ([], KNOWN, "off")


def test_the_commands_bind_and_unbind_a_role(
    store: ConversationStore, server_dsn: str, new_role: Callable[[], str], call: Callable[..., Ended]  # noqa: F811
) -> None:
    role = new_role()
    where = ("--schema", store.schema)
    ended = run("bind-role", role, "--tenant", "acme", *where, dsn=server_dsn)
    assert ended == Ended(0, f"role {role!r} sees tenant 'acme'\n", "")
    bound = call("bind-role", role, "--tenant", "bolt", "--json", *where, dsn=server_dsn)
    assert json.loads(bound.output) == {"role": role, "tenant_id": "bolt"}
    ended = call("bind-role", role, *where, dsn=server_dsn)
    assert (ended.code, ended.output) == (2, "") and "--tenant" in ended.errors
    assert call("bind-role", "--tenant", "acme", *where, dsn=server_dsn).code == 2
    failed(call("bind-role", "nobody", "--tenant", "acme", *where, dsn=server_dsn), "there is no role 'nobody'")
    app = make_dsn(server_dsn, user=role, password=PASSWORD)
    for command in (["bind-role", role, "--tenant", "x"], ["unbind-role", role], ["init", "--row-level-security"]):
        failed(call(*command, *where, dsn=app), "this role may not create or change the schema")
    ended = call("unbind-role", role, *where, dsn=server_dsn)
    assert ended == Ended(0, f"role {role!r} no longer sees tenant 'bolt'\n", "")
    failed(call("unbind-role", role, *where, dsn=server_dsn), "is bound to no tenant")
    ended = call("unbind-role", role, "--json", *where, dsn=server_dsn)
    assert (ended.code, json.loads(ended.output)) == (1, {"role": role, "tenant_id": None})
    failed(call("bind-role", role, "--tenant", "x", dsn="postgresql://app@127.0.0.1:1/db"), "could not connect")
    failed(call("bind-role", role, "--tenant", "x", "--schema", "absent", dsn=server_dsn), "pgmemory init")


# --- Behind pgbouncer ------------------------------------------------------------------------------------------------


@both_modes
def test_behind_pgbouncer_each_tenant_sees_its_own(tenants: Tenants) -> None:
    if find_pgbouncer() is None:
        pytest.skip("pgbouncer is not installed: apt-get install pgbouncer")
    by_role = tenants.mode == "roles"
    # By setting, both tenants take turns in the one session of one role.
    bouncers = [
        Pgbouncer(new_folder("pgbouncer"), dsn, pool_size=1)
        for dsn in ([tenants.acme.dsn, tenants.bolt.dsn] if by_role else [tenants.acme.dsn])
    ]
    try:
        stores = [
            ConversationStore(bouncers[by_role * number].dsn, schema=tenants.owner.schema, tenant_id=name)
            for number, name in enumerate(TENANTS)
        ]

        def use(number: int) -> None:
            name, store = TENANTS[number % 2], stores[number % 2]
            converse(store, f"s{number}", f"{number} of {name}")
            assert {message.content.split()[-1] for message in store.list_messages(f"s{number}")} == {name}
            assert {found.tenant_id for found in store.list_conversations()} == {name}
            assert store.list_messages(f"s{number + 1}") == []

        with ThreadPoolExecutor(4) as executor:
            list(executor.map(use, range(0, 24, 3)))
        for store in stores:
            store.close()
        # Whoever comes next in these sessions, and names no tenant.
        for bouncer, tenant in zip(bouncers, (tenants.acme, tenants.bolt), strict=False):
            session = psycopg2.connect(bouncer.dsn)
            query = "select distinct tenant_id from {schema}.conversation_log"
            if by_role:
                assert execute(session, query, schema=tenants.owner.schema) == [(tenant.name,)]
            else:
                refused(session, query, match="no tenant is set", schema=tenants.owner.schema)
            session.close()
    finally:
        for bouncer in bouncers:
            bouncer.stop()


# --- Plans -----------------------------------------------------------------------------------------------------------

LONG, COVERED, SPACING, TOKENS = 50_000, 49_960, 10, 20


@both_modes
def test_windows_of_a_long_conversation_are_still_walked_by_index(tenants: Tenants, admin: Connection) -> None:
    tenant, name = tenants.acme, tenants.owner.schema
    key = tenant.store.key("long")
    with admin.cursor() as cursor:
        cursor.execute(
            f"""
            insert into {name}.conversations
                (id, tenant_id, user_id, session_id, next_message_index, summarized_through)
            values (%(id)s, 'acme', '', 'long', {LONG}, {COVERED});
            insert into {name}.conversation_messages
                (conversation_id, message_index, tenant_id, role, content, tags, judged_by,
                 token_count, token_encoding, created_at)
            select %(id)s, n, 'acme', case when n = 0 then 'system' when n %% 2 = 1 then 'human' else 'ai' end, 'text',
                   case when n %% (2 * {SPACING}) = 1 then '{{refund}}'::text[] end, 'rule', {TOKENS}, 'e', now()
            from generate_series(0, {LONG - 1}) n;
            insert into {name}.conversation_summaries values (%(id)s, {COVERED}, 'acme', 'summary', now());
            analyze {name}.conversation_messages; analyze {name}.conversations
            """,
            {"id": str(key.id)},
        )
    pool = CountingPool(tenant.dsn)
    with ConversationStore(pool, schema=name, tenant_id=tenant.name) as store:
        store.list_messages("absent")
        crowd = Crowd(store, pool)
        reads: dict[int, Callable[[], object]] = {
            6: lambda: store.read_last_turns(key, turns=3),
            20: lambda: store.read_last_tokens(key, budget=20 * TOKENS, encoding="e"),
            21: lambda: store.read_summary_window(key, budget=20 * TOKENS, encoding="e"),
            3 * 2 * SPACING: lambda: store.read_relevant_turns(key, turns=3, rule="rule"),
            LONG - COVERED: lambda: store.read_unsummarized(key, budget=10**6, encoding="e"),
        }
        for spans, read in reads.items():
            plan = crowd.explained(crowd.sent_by(read), "with recursive")
            touched = 0
            for node in nodes(plan):
                if "Relation Name" in node:
                    assert node["Node Type"] in ("Index Scan", "Index Only Scan"), node
                    assert node["Index Name"] == f"{node['Relation Name']}_pkey"
                    touched += (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
            assert touched <= spans + 12, (spans, touched)
        turn = [StoredMessage("human", "q"), StoredMessage("ai", "a")]
        appended = crowd.sent_by(lambda: store.append(key, turn, write_id=uuid.uuid4()))
        touched_by_append = crowd.touched_by(appended)
        assert touched_by_append["conversation_messages"] == (0, 0)
        assert touched_by_append["conversations"].full_scans == 0
        pruned = tenants.acme.store.key("s")
        pruning = crowd.sent_by(lambda: store.append(pruned, turn, write_id=uuid.uuid4(), max_messages=4))
        touched_by_pruning = crowd.touched_by(pruning)
        assert touched_by_pruning["conversation_messages"].full_scans == 0
        assert touched_by_pruning["conversation_messages"].rows <= 20
    pool.closeall()
