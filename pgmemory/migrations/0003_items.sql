-- Facts: JSON items by namespace and key, of a user, of one of a user's sessions, or of the whole tenant.
create table {schema}.items (
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

create index items_by_user on {schema}.items (tenant_id, user_id);
create index items_by_expiry on {schema}.items (expires_at) where expires_at is not null;
