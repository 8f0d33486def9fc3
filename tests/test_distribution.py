"""The schema and the statements keep the rules of a distributed PostgreSQL (Citus), without one to ask."""

from __future__ import annotations

import re
import uuid
from typing import Any

import pytest
from psycopg2.extensions import connection as Connection

from pgmemory import ConversationStore, schema
from pgmemory.models import StoredMessage
from pgmemory.queries import conversations, encryption, items, log, parts, windows

# Each distributed table and the column that its rows are distributed by; what is left stays on one node.
DISTRIBUTED_BY = {
    "conversations": "id",
    "conversation_messages": "conversation_id",
    "conversation_summaries": "conversation_id",
    "conversation_keys": "conversation_id",
    "items": "owner_id",
}
LOCAL = {"schema_migrations", "tenant_roles"}

# Look like functions, but are part of the language and as immutable as what they are given.
_GRAMMAR = {"greatest", "least", "coalesce", "nullif", "case", "when", "then", "else", "and", "or", "not", "in"}
_CLOCKS = {"current_timestamp", "current_date", "current_time", "localtimestamp", "localtime"}

# Go to every node; the others go to the one that holds their conversation.
ABOUT_SEVERAL = {"CLEAR_WITH_AGENTS", "READ_KEYS_TO_ROTATE", "ROTATE_KEYS", "READ_OTHER_MASTER_KEYS"}

STATEMENTS = {
    name: text
    for module in (conversations, encryption, log, windows)
    for name, text in vars(module).items()
    if name.isupper() and not name.startswith("_") and isinstance(text, str) and name not in vars(parts)
}


def rows_of(admin: Connection, query: str, schema: str) -> list[tuple[Any, ...]]:
    with admin.cursor() as cursor:
        cursor.execute(query, {"schema": schema})
        return cursor.fetchall()


def changes_on_conflict(statement: str) -> list[str]:
    """Return what each DO UPDATE of a statement sets."""
    return re.findall(r"do update\s+set\b(.*?)(?:\bwhere\b|\breturning\b|;|$)", statement, re.IGNORECASE | re.DOTALL)


def mutable_parts(admin: Connection, expression: str) -> set[str]:
    """Return the functions in an expression that are not immutable, and its clocks."""
    called = set(re.findall(r"([a-z_0-9]+)\s*\(", expression.lower())) - _GRAMMAR
    clocks = _CLOCKS & set(re.findall(r"[a-z_]+", expression.lower()))
    with admin.cursor() as cursor:
        cursor.execute(
            "select proname from pg_proc where proname = any(%s) group by proname having bool_and(provolatile = 'i')",
            (list(called),),
        )
        return called - {name for (name,) in cursor.fetchall()} | clocks


def test_every_table_is_known_to_be_distributed_or_local(store: ConversationStore, admin: Connection) -> None:
    tables = rows_of(
        admin,
        "select relname from pg_class where relnamespace = %(schema)s::regnamespace and relkind in ('r', 'p')",
        store.schema,
    )
    assert {name for (name,) in tables} == set(DISTRIBUTED_BY) | LOCAL


def test_every_unique_key_contains_the_distribution_column(store: ConversationStore, admin: Connection) -> None:
    keys = rows_of(
        admin,
        """
        select c.relname, i.indexrelid::regclass::text,
               array(select a.attname::text from unnest(i.indkey) with ordinality k (attnum, place)
                     join pg_attribute a on a.attrelid = c.oid and a.attnum = k.attnum
                     where k.place <= i.indnkeyatts)
        from pg_index i join pg_class c on c.oid = i.indrelid
        where c.relnamespace = %(schema)s::regnamespace and c.relkind in ('r', 'p')
          and (i.indisunique or i.indisexclusion)
        """,
        store.schema,
    )
    distributed = [(table, index, columns) for table, index, columns in keys if table in DISTRIBUTED_BY]
    assert {table for table, _, _ in distributed} == set(DISTRIBUTED_BY)
    assert [key for key in distributed if DISTRIBUTED_BY[key[0]] not in key[2]] == []


def test_foreign_keys_lead_from_distribution_column_to_distribution_column(
    store: ConversationStore, admin: Connection
) -> None:
    foreign_keys = rows_of(
        admin,
        """
        select own.relname, other.relname,
               array(select array[a.attname::text, b.attname::text]
                     from unnest(k.conkey, k.confkey) as pair (own, other)
                     join pg_attribute a on a.attrelid = k.conrelid and a.attnum = pair.own
                     join pg_attribute b on b.attrelid = k.confrelid and b.attnum = pair.other)
        from pg_constraint k join pg_class own on own.oid = k.conrelid join pg_class other on other.oid = k.confrelid
        where k.contype = 'f' and k.connamespace = %(schema)s::regnamespace
        """,
        store.schema,
    )
    assert {own for own, _, _ in foreign_keys} == {
        "conversation_messages",
        "conversation_summaries",
        "conversation_keys",
    }
    for own, other, pairs in foreign_keys:
        assert [DISTRIBUTED_BY[own], DISTRIBUTED_BY[other]] in pairs, (own, other)


def test_there_is_no_trigger_sequence_identity_or_generated_column(
    store: ConversationStore, admin: Connection
) -> None:
    found = rows_of(
        admin,
        """
        select 'trigger', t.tgname::text from pg_trigger t join pg_class c on c.oid = t.tgrelid
        where c.relnamespace = %(schema)s::regnamespace and not t.tgisinternal
        union all
        select 'sequence', relname::text from pg_class
        where relnamespace = %(schema)s::regnamespace and relkind = 'S'
        union all
        select 'identity or generated', a.attname::text from pg_attribute a join pg_class c on c.oid = a.attrelid
        where c.relnamespace = %(schema)s::regnamespace and (a.attidentity <> '' or a.attgenerated <> '')
        union all
        select 'default from a sequence', d.adrelid::regclass::text
        from pg_attrdef d join pg_class c on c.oid = d.adrelid
        where c.relnamespace = %(schema)s::regnamespace and pg_get_expr(d.adbin, d.adrelid) like '%%nextval%%'
        """,
        store.schema,
    )
    assert found == []


def test_what_is_set_on_conflict_is_immutable(admin: Connection) -> None:
    statements = STATEMENTS | {"PUT": items.PUT}
    set_on_conflict = {name: parts for name, text in statements.items() if (parts := changes_on_conflict(text))}
    assert set(set_on_conflict) == {"PUT", "APPEND", "APPEND_WITH_NEW_KEY", "SET_METADATA", "RECORD_SUMMARY"}
    for name, parts in set_on_conflict.items():
        for part in parts:
            assert mutable_parts(admin, part) == set(), name


@pytest.mark.parametrize(
    ("statement", "mutable"),
    [
        ("on conflict (id) do update set at = now() where true", {"now"}),
        ("on conflict (id) do update\n    set n = c.n, at = greatest(c.at, clock_timestamp());", {"clock_timestamp"}),
        ("on conflict (id) do update set at = current_timestamp returning id", {"current_timestamp"}),
        ("on conflict (id) do update set id = gen_random_uuid()", {"gen_random_uuid"}),
        ("on conflict (id) do update set t = upper(excluded.t) returning now()", set()),
    ],
)
def test_a_mutable_expression_on_conflict_is_found(admin: Connection, statement: str, mutable: set[str]) -> None:
    (part,) = changes_on_conflict(statement)
    assert mutable_parts(admin, part) == mutable


def test_every_statement_names_its_conversation_unless_it_is_about_several() -> None:
    of_one = {name for name, text in STATEMENTS.items() if "{schema}" in text} - ABOUT_SEVERAL
    assert len(of_one) > 8
    for name in of_one:
        for statement in STATEMENTS[name].split(";\n"):
            assert "{schema}" not in statement or "%(id)s" in statement, name


def test_statements_use_no_lock_or_number_that_one_node_alone_could_give() -> None:
    for name, text in STATEMENTS.items():
        assert not re.search(r"advisory|skip\s+locked|nextval|lock\s+table", text, re.IGNORECASE), name


def test_a_log_that_is_partitioned_by_conversation_keeps_every_promise_of_a_write(
    server_dsn: str, schema_name: str, admin: Connection
) -> None:
    script = schema.render(schema_name)
    end_of_table = "primary key (conversation_id, message_index)\n);"
    assert script.count(end_of_table) == 1
    partitions = "".join(
        f'create table "{schema_name}".messages_{number} partition of "{schema_name}".conversation_messages '
        f"for values with (modulus 4, remainder {number});"
        for number in range(4)
    )
    partitioned = end_of_table.replace(");", f") partition by hash (conversation_id); {partitions}")
    with admin.cursor() as cursor:
        cursor.execute(script.replace(end_of_table, partitioned))
    with ConversationStore(server_dsn, schema=schema_name) as store:
        assert store.setup() == []
        for number in range(20):
            key, write_id = store.key(number), uuid.uuid4()
            for _ in range(2):  # delivered twice
                store.append(key, [StoredMessage("human", "q"), StoredMessage("ai", "a")], write_id=write_id)
            for _ in range(3):
                store.append(key, [StoredMessage("human", "q")], write_id=uuid.uuid4(), max_messages=4)
            assert [message.message_index for message in store.read_all(key)] == [2, 3, 4]
            assert len(store.read_last_turns(key, turns=2).messages) == 2
            store.clear(key)
            assert store.read_all(key) == []
