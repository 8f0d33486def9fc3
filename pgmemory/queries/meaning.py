"""The meanings of messages and items, as vectors by which they are found: what keeps them, and their making.

Needs the extension pgvector. Triggers, which run whoever writes, keep a row for each message that may be recalled, and
for each text of an item: with the vector of an equal text of the tenant, if there is one, else without, which is the
queue of what is to be made. Whoever has an embedder claims some of a queue, asks the embedder outside of any
transaction, and stores what it has got; what a process claimed and never made is free again after a while. Texts are
read where they stand, not kept once more. `{vector}` stands for the extension's schema.
"""

from __future__ import annotations

from typing import NamedTuple

from pgmemory.queries.parts import READ_COMMITTED, create_triggers
from pgmemory.queries.words import ROLES, WHAT_IS_SAID

# Making it

# Two schemas of one database may be set up at once.
LOCK_EXTENSION = "select pg_advisory_xact_lock(hashtextextended('pgmemory extension', 0))"

FIND_EXTENSION = """
select quote_ident(n.nspname), coalesce(string_to_array(e.extversion, '.')::int[] >= array[0, 7], false), e.extversion
from pg_catalog.pg_extension e join pg_catalog.pg_namespace n on n.oid = e.extnamespace
where e.extname = 'vector'
"""
"""The quoted schema of pgvector, whether it has all that is needed, and its version; no row without the extension."""

QUOTE = "select quote_literal(%(text)s)"

IS_AVAILABLE = "select 1 from pg_catalog.pg_available_extensions where name = 'vector'"

MAY_CREATE_IN_PUBLIC = "select coalesce(has_schema_privilege(to_regnamespace('public'), 'create'), false)"

# Not wherever the session's search_path leads.
CREATE_EXTENSION = "create extension vector schema {place}"

VECTORS = """
select array[pg_catalog.col_description(a.attrelid, a.attnum), a.atttypmod::text, quote_ident(e.nspname)]
from pg_catalog.pg_attribute a
join pg_catalog.pg_class c on c.oid = a.attrelid
join pg_catalog.pg_namespace n on n.oid = c.relnamespace
join pg_catalog.pg_type t on t.oid = a.atttypid
join pg_catalog.pg_namespace e on e.oid = t.typnamespace
where n.nspname = %(schema)s and c.relname = 'message_vectors' and a.attname = 'embedding'
"""
"""What made the vectors, how many numbers each has, and the quoted schema of pgvector; no row without vectors."""


class _Kind(NamedTuple):
    """What has texts whose vectors are kept, in a table of their own.

    Attributes:
        table: It.
        columns: Of what the primary key is made that not all such tables have, as they are declared.
        key: The primary key.
        of: The table of what has the texts, as `m`.
        of_key: Its primary key.
        texts: What joins `m` with its texts and their hashes, as `h`.
        has_meaning: Which of them have vectors.
        comment: What the table holds.
    """

    table: str
    columns: str
    key: tuple[str, ...]
    of: str
    of_key: tuple[str, ...]
    texts: str
    has_meaning: str
    comment: str

    def columns_of(self, row: str) -> str:
        """Return the columns that tell what a row is about, and its text's hash."""
        return ", ".join(f"{row}.{column}" for column in dict.fromkeys((*self.key, "text_hash")))


def _same(columns: tuple[str, ...], row: str, other: str) -> str:
    return " and ".join(f"{row}.{column} = {other}.{column}" for column in columns)


_MESSAGE = _Kind(
    table="message_vectors",
    columns="conversation_id  uuid      not null,\n    message_index    int       not null,",
    key=("conversation_id", "message_index"),
    of="conversation_messages",
    of_key=("conversation_id", "message_index"),
    texts="cross join lateral (select m.content as text, sha256(convert_to(m.content, 'UTF8')) as text_hash) h",
    has_meaning=rf"m.role in {ROLES} and m.key_id is null and m.content ~ '\S'",
    comment="The meanings of messages in clear text: what a past is recalled by",
)
_ITEM = _Kind(
    table="item_vectors",
    columns=(
        'owner_id         uuid      not null,\n    namespace        text[]    collate "C" not null,\n'
        '    key              text      collate "C" not null,'
    ),
    key=("tenant_id", "owner_id", "namespace", "key", "text_hash"),
    of="items",
    of_key=("tenant_id", "owner_id", "namespace", "key"),
    texts="cross join lateral {schema}.texts_of_item(m.value, m.meaning_paths) h",
    has_meaning="true",
    comment="The meanings of texts in items: what these are found by",
)
_KINDS = (_MESSAGE, _ITEM)

MOST_TEXTS = 100
"""So many texts of an item have vectors, the first ones that its paths find."""

# A JSON null is no text; what is no text itself is its JSON.
_CREATE_TEXTS_OF_ITEM = rf"""
create or replace function {{schema}}.texts_of_item(value json, paths jsonpath[])
returns table (text text, text_hash bytea)
language sql stable set search_path = pg_catalog, pg_temp as $function$
    select distinct t.text, sha256(convert_to(t.text, 'UTF8'))
    from (
        select f.found #>> '{{}}' as text
        from unnest(paths) with ordinality as p (path, place)
        cross join lateral jsonb_path_query(value::jsonb, p.path, '{{}}', true) with ordinality as f (found, number)
        where f.found #>> '{{}}' ~ '\S'
        order by p.place, f.number limit {MOST_TEXTS}
    ) t
$function$;
comment on function {{schema}}.texts_of_item(json, jsonpath[]) is 'The texts that an item is found by the meaning of';
"""


# Half as many bytes as with `vector`; the order of the nearest is the same but for what is equally near. Read one after
# the other for a whole user, they stand in the row.
def _create_table(kind: _Kind) -> str:
    of_key = ", ".join(kind.of_key)
    return f"""
create table {{schema}}.{kind.table} (
    {kind.columns}
    tenant_id        text      not null,
    text_hash        bytea     not null, -- SHA-256: equal texts have one vector
    embedding        {{vector}}.halfvec({{dimensions}}), -- null until it is made
    claimed_at       timestamptz, -- when somebody last began to make it
    failures         int       not null default 0,
    primary key ({", ".join(kind.key)}),
    foreign key ({of_key}) references {{schema}}.{kind.of} ({of_key}) on delete cascade on update cascade
);
alter table {{schema}}.{kind.table} alter column embedding set storage main;
comment on table {{schema}}.{kind.table} is '{kind.comment}';
comment on column {{schema}}.{kind.table}.embedding is {{model}};
create index {kind.table}_by_text on {{schema}}.{kind.table} (tenant_id, text_hash) where embedding is not null;
create index {kind.table}_waiting on {{schema}}.{kind.table} (tenant_id, text_hash, claimed_at)
    where num_nulls(embedding) = 1;
create index {kind.table}_to_make on {{schema}}.{kind.table} (tenant_id, failures) where embedding is null;
"""


# For statements of processes that do not know yet that another model makes the vectors.
_CREATE_MODEL = """
create or replace function {schema}.embedding_model() returns text
language sql immutable parallel safe set search_path = pg_catalog, pg_temp as $function$ select {model} $function$;
comment on function {schema}.embedding_model() is 'What makes the vectors of messages and items';
"""
IS_OF_MODEL = "{schema}.embedding_model() = %(model)s"
"""Whether what a statement is given, or is to give, is of the model that makes the vectors."""

CREATE_TABLES = "".join(map(_create_table, _KINDS)) + _CREATE_TEXTS_OF_ITEM + _CREATE_MODEL

DROP_TABLES = "".join(f"drop table if exists {{schema}}.{kind.table};" for kind in _KINDS)


def _insert(kind: _Kind, of: str) -> str:
    """Return a part of a statement that keeps rows for texts, except where they are there.

    Args:
        kind: Of what.
        of: What has them, with the name `m`.
    """
    columns = dict.fromkeys((*kind.of_key, "tenant_id"))
    return f"""insert into {{schema}}.{kind.table} ({", ".join(columns)}, text_hash, embedding)
    select {", ".join(f"m.{column}" for column in columns)}, h.text_hash, (
        select o.embedding from {{schema}}.{kind.table} o
        where o.tenant_id = m.tenant_id and o.text_hash = h.text_hash and o.embedding is not null limit 1)
    from {of} {kind.texts}
    where {kind.has_meaning}
    on conflict do nothing"""


def _create_triggers(kind: _Kind, name: str, changed: str, values: str) -> str:
    """Return what makes the triggers that keep the rows.

    Args:
        kind: Of what.
        name: What to call their function, and them.
        changed: The columns on whose change the texts depend.
        values: What can be compared of these, of the row `{{row}}`.
    """
    return f"""
create or replace function {{schema}}.{name}() returns trigger
language plpgsql
set search_path = pg_catalog, pg_temp
as $function$
begin
    if tg_op = 'UPDATE' then
        delete from {{schema}}.{kind.table} v
        where {_same(kind.of_key, "v", "new")}
          and v.text_hash not in (select h.text_hash from (select new.*) m {kind.texts} where {kind.has_meaning});
    end if;
    {_insert(kind, "(select new.*) m")};
    return null;
end
$function$;
comment on function {{schema}}.{name}() is 'Keeps a row for the meaning of what is stored or changed';
""" + create_triggers(name, kind.of, changed, values)


CREATE_TRIGGERS = _create_triggers(
    _MESSAGE, "keep_meanings", *WHAT_IS_SAID
) + _create_triggers(
    _ITEM, "keep_meanings_in_items", "value, meaning_paths", "{row}.value::text, {row}.meaning_paths::text[]"
)

_SPAN = """(
        select m.* from {schema}.conversation_messages m
        where m.conversation_id = any(%(ids)s::uuid[]) and m.message_index >= %(first)s and m.message_index < %(end)s
    ) m"""

ENQUEUE_BATCH = (
    READ_COMMITTED
    + f"""
select c.id from {{schema}}.conversations c where c.id = any(%(ids)s::uuid[]) order by c.id for update;
{_insert(_MESSAGE, _SPAN)};
"""
)
"""Queue messages of conversations that have no row yet, from the number `first` on and below `end`."""

ENQUEUE_ITEMS = (
    READ_COMMITTED
    + f"""
with batch as materialized (
    select i.tenant_id, i.owner_id, i.namespace, i.key
    from {{schema}}.items i
    where (i.tenant_id, i.owner_id, i.namespace, i.key)
          > (%(after_tenant)s, %(after_owner)s::uuid, %(after_namespace)s::text[], %(after_key)s)
      and (%(tenant_id)s::text is null or i.tenant_id = %(tenant_id)s)
    order by i.tenant_id, i.owner_id, i.namespace, i.key
    limit %(limit)s
),
-- Whoever puts one of them meanwhile has queued its texts before, or waits.
locked as materialized (
    select e.* from batch b cross join lateral (
        select i.* from {{schema}}.items i
        where {_same(_ITEM.of_key, "i", "b")}
          and not exists (select from {{schema}}.item_vectors v where {_same(_ITEM.of_key, "v", "i")})
        limit 1
        for no key update) e
),
queued as (
    {_insert(_ITEM, "locked m")}
)
select b.tenant_id, b.owner_id::text, b.namespace, b.key from batch b
order by b.tenant_id desc, b.owner_id desc, b.namespace desc, b.key desc limit 1;
"""
)
"""Queue the texts of items that have no row yet, of as many items after one of them in the order of the primary key;
return the last one."""

# Filling it


class Queue(NamedTuple):
    """The statements about what waits for its vectors.

    Attributes:
        name: What it is.
        claim: Claim texts whose vectors are to be made, those first that failed least often, and return them; of those
            whose text has got a vector meanwhile it is taken over.
        store: Store the vectors of texts, for all that the tenant has of the same.
        release: Give texts back whose vectors were not made, for some of which the embedder failed.
    """

    name: str
    claim: str
    store: str
    release: str


# What waits is found by its text where `num_nulls(embedding) = 1` is said, in order of failures where
# `embedding is null` is: so the planner, whatever its statistics, cannot take the one index for the other.
def _queue(name: str, kind: _Kind) -> Queue:
    table = f"{{schema}}.{kind.table}"
    claim = f"""
-- One after the other, each seeing what the one before has claimed: no text is made twice.
select pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended(%(lock)s, 0));
with due as materialized (
    select {kind.columns_of("v")}
    from {table} v
    where v.tenant_id = %(tenant_id)s and v.embedding is null and {IS_OF_MODEL}
      and (v.claimed_at is null or v.claimed_at < statement_timestamp() - %(lapse)s::interval)
      and not exists (
          select from {table} o
          -- Looked up by its text for each that is claimed, not all at once.
          where o.tenant_id = v.tenant_id and o.text_hash = v.text_hash and num_nulls(o.embedding) = 1
            and o.claimed_at >= statement_timestamp() - %(lapse)s::interval
          offset 0)
    order by v.tenant_id, v.failures
    limit %(limit)s
    for no key update skip locked
),
claimed as (
    update {table} v
    set claimed_at = statement_timestamp(),
        embedding = (
            select o.embedding from {table} o
            where o.tenant_id = v.tenant_id and o.text_hash = v.text_hash and o.embedding is not null limit 1)
    from due
    where {_same(kind.key, "v", "due")}
    returning {kind.columns_of("v")}, v.embedding is not null as is_known, v.failures
)
select c.text_hash, c.is_known, t.text
from claimed c cross join lateral (
    select h.text from {{schema}}.{kind.of} m {kind.texts}
    where {_same(kind.of_key, "m", "c")} and h.text_hash = c.text_hash
    limit 1) t
order by c.failures;
"""
    store = f"""
with made as (
    select e.text_hash, e.embedding from unnest(%(hashes)s::bytea[], %(embeddings)s::text[]) as e (text_hash, embedding)
),
-- What another transaction has locked is being changed or deleted: waiting for it may end in a deadlock.
waiting as materialized (
    select {kind.columns_of("v")}, made.embedding
    from made join {table} v
        on v.tenant_id = %(tenant_id)s and v.text_hash = made.text_hash and num_nulls(v.embedding) = 1
    where {IS_OF_MODEL}
    for no key update of v skip locked
)
update {table} v set embedding = waiting.embedding::{{vector}}.halfvec
from waiting where {_same(kind.key, "v", "waiting")};
"""
    release = f"""
with failed as materialized (
    select {kind.columns_of("v")} from {table} v
    where v.tenant_id = %(tenant_id)s and v.text_hash = any(%(hashes)s::bytea[]) and num_nulls(v.embedding) = 1
    for no key update skip locked
)
update {table} v set claimed_at = null, failures = v.failures + (v.text_hash = any(%(failed)s::bytea[]))::int
from failed where {_same(kind.key, "v", "failed")};
"""
    return Queue(name, READ_COMMITTED + claim, READ_COMMITTED + store, READ_COMMITTED + release)


MESSAGES = _queue("messages", _MESSAGE)
ITEMS = _queue("items", _ITEM)


def in_extension(statement: str, extension_schema: str) -> str:
    """Return a statement, for psycopg2 with parameters, with the quoted schema of pgvector in place of `{vector}`."""
    return statement.replace("{vector}", extension_schema.replace("%", "%%"))
