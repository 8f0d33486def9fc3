-- The schema of pgmemory, for people with psql: psql --set ON_ERROR_STOP=1 --file schema.sql
-- Generated from pgmemory/migrations by `pgmemory schema`; do not edit.

begin;

create schema if not exists "pgmemory";

create table if not exists "pgmemory".schema_migrations (
    version       int         primary key,
    name          text        not null,
    -- Code that knows fewer migrations than this no longer works on the schema.
    needs_version int         not null,
    applied_at    timestamptz not null default clock_timestamp()
);

-- A conversation: the row that hands out message numbers and that every operation locks first.
-- Every turn updates it, so no index stands on a column that a turn changes, and a tenth of each page stays
-- free: updates remain heap-only.
create table "pgmemory".conversations (
    id                  uuid        primary key,  -- made from the next three columns
    tenant_id           text        not null,     -- '' without tenants
    user_id             text        not null,     -- '' without users
    session_id          text        not null,     -- the conversation's name in the application
    metadata            jsonb       not null default '{}',
    next_message_index  int         not null default 0,
    summarized_through  int         not null default -1,    -- last message that summaries cover, or last one cleared
    keeps_summary       boolean     not null default false, -- until cleared: prune nothing that a summary has yet to cover
    revision            int         not null default 0,     -- counts clearings, deletions and replacements
    created_at          timestamptz not null default clock_timestamp(),
    updated_at          timestamptz not null default clock_timestamp(), -- when its last turn was stored
    time_to_live        interval
) with (fillfactor = 90);

create index conversations_by_user on "pgmemory".conversations (tenant_id, user_id);

-- The log. A message's number is unique in its conversation and never used again.
create table "pgmemory".conversation_messages (
    conversation_id    uuid        not null references "pgmemory".conversations (id) on delete cascade,
    message_index      int         not null,
    tenant_id          text        not null,
    role               text        not null,
    content            text        not null, -- what a person reads
    additional_kwargs  json,
    extra              json,        -- what content cannot carry exactly; json keeps key order, number shapes and \u0000
    write_id           uuid,        -- on the first message of a write: the same write never happens twice
    tags               text[],      -- on the first message of a relevant turn: the keywords found
    judged_by          text,        -- fingerprint of the rule that found them
    token_count        int,
    token_encoding     text,        -- what token_count was counted with
    created_at         timestamptz not null,
    primary key (conversation_id, message_index)
);

create unique index conversation_messages_write_id
    on "pgmemory".conversation_messages (conversation_id, write_id) where write_id is not null;

-- A summary of every message up to covers_through; the newest one counts.
create table "pgmemory".conversation_summaries (
    conversation_id  uuid        not null references "pgmemory".conversations (id) on delete cascade,
    covers_through   int         not null,
    tenant_id        text        not null,
    content          text        not null,
    created_at       timestamptz not null default clock_timestamp(),
    primary key (conversation_id, covers_through)
);

-- For people with psql: one line a message.
create view "pgmemory".conversation_log as
select c.tenant_id, c.user_id, c.session_id, m.message_index, m.role, m.content,
       coalesce(m.additional_kwargs, '{}'::json) as additional_kwargs,
       coalesce(m.extra, '{}'::json) as extra,
       coalesce(m.tags, '{}') as tags,
       m.token_count, m.token_encoding, m.created_at,
       m.message_index <= c.summarized_through as summarized,
       m.conversation_id
from "pgmemory".conversations c
join "pgmemory".conversation_messages m on m.conversation_id = c.id;


insert into "pgmemory".schema_migrations (version, name, needs_version) values (1, 'initial', 1);

-- A held conversation is never pruned, cleared, shortened, erased or edited.
alter table "pgmemory".conversations
    add column held_at     timestamptz,   -- null unless it is held
    add column hold_reason text,
    add column key_id      uuid;          -- of the key that new content is encrypted with; null for clear text

-- Holds are few, and no turn changes them.
create index conversations_held on "pgmemory".conversations (tenant_id, user_id) where held_at is not null;

-- Of the key that this content is encrypted with; null for clear text.
alter table "pgmemory".conversation_messages add column key_id uuid;
alter table "pgmemory".conversation_summaries add column key_id uuid;

-- The key of an encrypted conversation, itself encrypted under a master key that the application keeps. Without this
-- row the conversation cannot be read again.
create table "pgmemory".conversation_keys (
    conversation_id  uuid        primary key references "pgmemory".conversations (id) on delete cascade,
    key_id           uuid        not null,
    tenant_id        text        not null,
    wrapped_key      bytea       not null,
    master_key_name  text        not null,
    created_at       timestamptz not null default clock_timestamp()
);

-- Which tenant a database role may see, where row-level security goes by role.
create table "pgmemory".tenant_roles (
    role_name  name  primary key,
    tenant_id  text  not null check (tenant_id <> '')
);

-- A role sees its own line alone, and only the owner changes any, whatever else is granted.
alter table "pgmemory".tenant_roles enable row level security;
create policy own_role on "pgmemory".tenant_roles for select using (role_name = current_user);
grant select on "pgmemory".tenant_roles to public;


insert into "pgmemory".schema_migrations (version, name, needs_version) values (2, 'operations', 1);

-- Facts: JSON items by namespace and key, of a user, of one of a user's sessions, or of the whole tenant.
create table "pgmemory".items (
    tenant_id     text        not null,
    owner_id      uuid        not null, -- made from the tenant and the next two columns; that of a session's conversation
    user_id       text        not null, -- '' for the whole tenant's
    session_id    text        not null, -- '' unless they are one session's
    namespace     text[]      collate "C" not null, -- compared by code points: what begins alike stands together
    key           text        collate "C" not null,
    value         json        not null, -- as it was put: key order, number shapes
    words         tsvector    not null, -- of the texts in the value
    meaning_paths jsonpath[]  not null default '{$}', -- where in it the texts are that it is found by the meaning of
    created_at    timestamptz not null,
    updated_at    timestamptz not null,
    time_to_live  interval,
    expires_at    timestamptz, -- never returned from then on, and deleted by pruning
    primary key (tenant_id, owner_id, namespace, key),
    check (jsonb_typeof(value::jsonb) = 'object') -- also refuses what no filter could look into, such as \u0000
);

create index items_by_user on "pgmemory".items (tenant_id, user_id);
create index items_by_expiry on "pgmemory".items (expires_at) where expires_at is not null;


insert into "pgmemory".schema_migrations (version, name, needs_version) values (3, 'items', 1);

commit;
