-- A conversation: the row that hands out message numbers and that every operation locks first.
-- Every turn updates it, so no index stands on a column that a turn changes, and a tenth of each page stays
-- free: updates remain heap-only.
create table {schema}.conversations (
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

create index conversations_by_user on {schema}.conversations (tenant_id, user_id);

-- The log. A message's number is unique in its conversation and never used again.
create table {schema}.conversation_messages (
    conversation_id    uuid        not null references {schema}.conversations (id) on delete cascade,
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
    on {schema}.conversation_messages (conversation_id, write_id) where write_id is not null;

-- A summary of every message up to covers_through; the newest one counts.
create table {schema}.conversation_summaries (
    conversation_id  uuid        not null references {schema}.conversations (id) on delete cascade,
    covers_through   int         not null,
    tenant_id        text        not null,
    content          text        not null,
    created_at       timestamptz not null default clock_timestamp(),
    primary key (conversation_id, covers_through)
);

-- For people with psql: one line a message.
create view {schema}.conversation_log as
select c.tenant_id, c.user_id, c.session_id, m.message_index, m.role, m.content,
       coalesce(m.additional_kwargs, '{}'::json) as additional_kwargs,
       coalesce(m.extra, '{}'::json) as extra,
       coalesce(m.tags, '{}') as tags,
       m.token_count, m.token_encoding, m.created_at,
       m.message_index <= c.summarized_through as summarized,
       m.conversation_id
from {schema}.conversations c
join {schema}.conversation_messages m on m.conversation_id = c.id;
