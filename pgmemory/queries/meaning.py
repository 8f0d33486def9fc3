"""The meanings of messages, as vectors by which they are found beside their words: what keeps them, and their making.

Needs the extension pgvector. A trigger, which runs whoever writes, keeps a row for each message that may be recalled:
with the vector of an equal text of the tenant, if there is one, else without, which is the queue of what is to be made.
Whoever has an embedder claims some of the queue, asks the embedder outside of any transaction, and stores what it has
got; what a process claimed and never made is free again after a while. `{vector}` stands for the extension's schema.
"""

from __future__ import annotations

from pgmemory.queries.parts import READ_COMMITTED
from pgmemory.queries.words import ROLES

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

CREATE_EXTENSION = "create extension vector"

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

# Half as many bytes as with `vector`; the order of the nearest is the same but for what is equally near. Read one after
# the other for a whole user, they stand in the row.
CREATE_TABLE = """
create table {schema}.message_vectors (
    conversation_id  uuid      not null,
    message_index    int       not null,
    tenant_id        text      not null,
    text_hash        bytea     not null, -- SHA-256: equal texts have one vector
    embedding        {vector}.halfvec({dimensions}), -- null until it is made
    claimed_at       timestamptz, -- when somebody last began to make it
    failures         int       not null default 0,
    primary key (conversation_id, message_index),
    foreign key (conversation_id, message_index)
        references {schema}.conversation_messages (conversation_id, message_index) on delete cascade on update cascade
);
alter table {schema}.message_vectors alter column embedding set storage main;
comment on table {schema}.message_vectors is 'The meanings of messages in clear text: what a past is recalled by';
comment on column {schema}.message_vectors.embedding is {model};
create index message_vectors_by_text on {schema}.message_vectors (tenant_id, text_hash);
create index message_vectors_to_make on {schema}.message_vectors (tenant_id, failures) where embedding is null;
"""

DROP_TABLE = "drop table if exists {schema}.message_vectors"

_INSERT = """insert into {schema}.message_vectors (conversation_id, message_index, tenant_id, text_hash, embedding)
    select m.conversation_id, m.message_index, m.tenant_id, h.text_hash, (
        select o.embedding from {schema}.message_vectors o
        where o.tenant_id = m.tenant_id and o.text_hash = h.text_hash and o.embedding is not null limit 1)"""
_HASH = "sha256(convert_to(m.content, 'UTF8')) as text_hash"
_HAS_MEANING = rf"m.role in {ROLES} and m.key_id is null and m.content ~ '\S'"

CREATE_TRIGGERS = f"""
create or replace function {{schema}}.keep_meanings() returns trigger
language plpgsql
set search_path = pg_catalog, pg_temp
as $function$
declare
    m {{schema}}.conversation_messages := new;
begin
    if tg_op = 'UPDATE' then
        delete from {{schema}}.message_vectors v
        where v.conversation_id = m.conversation_id and v.message_index = m.message_index;
    end if;
    {_INSERT} from (select {_HASH}) h where {_HAS_MEANING};
    return null;
end
$function$;
comment on function {{schema}}.keep_meanings() is 'Keeps a row for the meaning of what is stored or changed';
drop trigger if exists keep_meanings_of_stored on {{schema}}.conversation_messages;
create trigger keep_meanings_of_stored after insert on {{schema}}.conversation_messages
    for each row execute function {{schema}}.keep_meanings();
drop trigger if exists keep_meanings_of_changed on {{schema}}.conversation_messages;
create trigger keep_meanings_of_changed after update of role, content, key_id on {{schema}}.conversation_messages
    for each row
    when ((old.role, old.content, old.key_id) is distinct from (new.role, new.content, new.key_id))
    execute function {{schema}}.keep_meanings();
"""

ENQUEUE_BATCH = (
    READ_COMMITTED
    + f"""
select c.id from {{schema}}.conversations c where c.id = any(%(ids)s::uuid[]) order by c.id for update;
{_INSERT}
from {{schema}}.conversation_messages m cross join lateral (select {_HASH}) h
where m.conversation_id = any(%(ids)s::uuid[]) and m.message_index >= %(first)s and m.message_index < %(end)s
  and {_HAS_MEANING}
on conflict do nothing;
"""
)
"""Queue messages of conversations that have no row yet, from the number `first` on and below `end`."""

# Filling it

CLAIM = (
    READ_COMMITTED
    + """
-- One after the other, each seeing what the one before has claimed: no text is made twice.
select pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended(%(lock)s, 0));
with due as materialized (
    select v.conversation_id, v.message_index, v.text_hash
    from {schema}.message_vectors v
    where v.tenant_id = %(tenant_id)s and v.embedding is null
      and (v.claimed_at is null or v.claimed_at < statement_timestamp() - %(lapse)s::interval)
      and not exists (
          select from {schema}.message_vectors o
          where o.tenant_id = v.tenant_id and o.text_hash = v.text_hash and o.embedding is null
            and o.claimed_at >= statement_timestamp() - %(lapse)s::interval)
    order by v.tenant_id, v.failures
    limit %(limit)s
    for no key update skip locked
),
claimed as (
    update {schema}.message_vectors v
    set claimed_at = statement_timestamp(),
        embedding = (
            select o.embedding from {schema}.message_vectors o
            where o.tenant_id = v.tenant_id and o.text_hash = v.text_hash and o.embedding is not null limit 1)
    from due
    where v.conversation_id = due.conversation_id and v.message_index = due.message_index
    returning v.conversation_id, v.message_index, v.text_hash, v.embedding is not null as is_known
)
select c.text_hash, c.is_known, m.content
from claimed c cross join lateral (
    select m.content from {schema}.conversation_messages m
    where m.conversation_id = c.conversation_id and m.message_index = c.message_index
    limit 1) m;
"""
)
"""Claim messages whose vectors are to be made, those first that failed least often, and return their texts; of those
whose text has got a vector meanwhile it is taken over."""

STORE = (
    READ_COMMITTED
    + """
with made as (
    select e.text_hash, e.embedding from unnest(%(hashes)s::bytea[], %(embeddings)s::text[]) as e (text_hash, embedding)
),
-- What another transaction has locked is being changed or deleted: waiting for it may end in a deadlock.
waiting as materialized (
    select v.conversation_id, v.message_index, made.embedding
    from made join {schema}.message_vectors v
        on v.tenant_id = %(tenant_id)s and v.text_hash = made.text_hash and v.embedding is null
    for no key update of v skip locked
)
update {schema}.message_vectors v set embedding = waiting.embedding::{vector}.halfvec
from waiting where v.conversation_id = waiting.conversation_id and v.message_index = waiting.message_index;
"""
)
"""Store the vectors of texts, for all messages of the tenant that say the same."""

RELEASE = (
    READ_COMMITTED
    + """
with failed as materialized (
    select v.conversation_id, v.message_index from {schema}.message_vectors v
    where v.tenant_id = %(tenant_id)s and v.text_hash = any(%(hashes)s::bytea[]) and v.embedding is null
    for no key update skip locked
)
update {schema}.message_vectors v set claimed_at = null, failures = v.failures + 1
from failed where v.conversation_id = failed.conversation_id and v.message_index = failed.message_index;
"""
)
"""Give texts back whose vectors were not made."""


def in_extension(statement: str, extension_schema: str) -> str:
    """Return a statement with the quoted schema of pgvector in place of each `{vector}`."""
    return statement.replace("{vector}", extension_schema)
