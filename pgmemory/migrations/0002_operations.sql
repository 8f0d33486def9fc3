-- A held conversation is never pruned, cleared, shortened, erased or edited.
alter table {schema}.conversations
    add column held_at     timestamptz,   -- null unless it is held
    add column hold_reason text,
    add column key_id      uuid;          -- of the key that new content is encrypted with; null for clear text

-- Holds are few, and no turn changes them.
create index conversations_held on {schema}.conversations (tenant_id, user_id) where held_at is not null;

-- Of the key that this content is encrypted with; null for clear text.
alter table {schema}.conversation_messages add column key_id uuid;
alter table {schema}.conversation_summaries add column key_id uuid;

-- The key of an encrypted conversation, itself encrypted under a master key that the application keeps. Without this
-- row the conversation cannot be read again.
create table {schema}.conversation_keys (
    conversation_id  uuid        primary key references {schema}.conversations (id) on delete cascade,
    key_id           uuid        not null,
    tenant_id        text        not null,
    wrapped_key      bytea       not null,
    master_key_name  text        not null,
    created_at       timestamptz not null default clock_timestamp()
);

-- Which tenant a database role may see, where row-level security goes by role.
create table {schema}.tenant_roles (
    role_name  name  primary key,
    tenant_id  text  not null check (tenant_id <> '')
);

-- A role sees its own line alone, and only the owner changes any, whatever else is granted.
alter table {schema}.tenant_roles enable row level security;
create policy own_role on {schema}.tenant_roles for select using (role_name = current_user);
grant select on {schema}.tenant_roles to public;
