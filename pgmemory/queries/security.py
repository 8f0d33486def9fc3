"""Row-level security: policies that bind every table to one tenant, and which database role has which tenant.

All of it is about pgmemory's own tables and views, which are listed here: whatever else the schema holds is others'.
Some statements return statements, one a row, about those of them that are there. Those that are returned, and those
without parameters, are sent without parameters; what is about tables takes those of `parameters`.
"""

from __future__ import annotations

from typing import Any

from pgmemory.queries.parts import TENANT_SETTING

# A migration that adds a table or a view adds its name to one of these.
TABLES = (
    "conversations",
    "conversation_messages",
    "conversation_summaries",
    "conversation_keys",
    "items",
)
"""The tables with a tenant, in the order in which they are locked: conversations first, as writers do."""

TABLES_IF_ASKED_FOR = ("message_terms", "message_vectors", "item_vectors")
"""Those that are made where messages are recalled, and items are found by their meaning."""

VIEWS = ("conversation_log",)

TABLES_OF_THE_OWNER = ("schema_migrations", "tenant_roles")
"""The tables that only the owner writes; tenant_roles has a policy of its own."""

POLICIES = {"setting": "tenant_by_setting", "roles": "tenant_by_role"}
"""By mode: the name of the policy on each table, from which the mode is read again."""


def parameters(schema: str) -> dict[str, Any]:
    """Return the parameters that name pgmemory's own tables and views."""
    return {
        "schema": schema,
        "tables": [*TABLES, *TABLES_IF_ASKED_FOR],
        "views": list(VIEWS),
        "tables_of_the_owner": list(TABLES_OF_THE_OWNER),
    }


_IN_SCHEMA = """
from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
where n.nspname = %(schema)s
"""
_IS_TABLE = "(c.relname = any(%(tables)s::text[]) and c.relkind in ('r', 'p'))"
_IS_VIEW = "(c.relname = any(%(views)s::text[]) and c.relkind = 'v')"
_TABLES = f"{_IN_SCHEMA} and {_IS_TABLE}"
_IN_ORDER = "order by array_position(%(tables)s::text[], c.relname::text)"

READ_MODE = f"""
with own as (
    select c.relname::text as name, c.relkind = 'v' as is_view, c.relrowsecurity, c.relforcerowsecurity,
           exists (select from pg_catalog.pg_options_to_table(c.reloptions) o
                   where o.option_name = 'security_invoker' and o.option_value::boolean) as is_invokers,
           array(select p.polname::text from pg_catalog.pg_policy p
                 where p.polrelid = c.oid and p.polname in {tuple(POLICIES.values())} order by 1) as policies
    {_IN_SCHEMA} and ({_IS_TABLE} or {_IS_VIEW})
),
policy as (
    select case when bool_or('{POLICIES["roles"]}' = any(policies)) then '{POLICIES["roles"]}'
                when bool_or('{POLICIES["setting"]}' = any(policies)) then '{POLICIES["setting"]}' end as name
    from own
)
select case policy.name when '{POLICIES["roles"]}' then 'roles' when '{POLICIES["setting"]}' then 'setting' else 'off'
       end as mode,
       array(select own.name from own
             where not case when is_view then is_invokers = (policy.name is not null)
                            else relrowsecurity = (policy.name is not null)
                                 and relforcerowsecurity = (policy.name is not null)
                                 and policies = array_remove(array[policy.name], null) end
             order by 1) as deviating
from policy
"""
"""The mode, `off` only if no table has a policy of ours; and the tables and views that are not as the mode has them."""

IS_LIMITED = f"select coalesce(bool_or(pg_catalog.row_security_active(c.oid)), false) {_TABLES}"
"""Whether policies hold for this role: not for superusers and roles with BYPASSRLS."""

READ_SERVER_VERSION = "select current_setting('server_version_num')::int, current_setting('server_version')"

def quoted_functions(statements: str, schema: str) -> str:
    """Return statements that make functions with bodies quoted so that the schema's name in them does not end them."""
    quote = "$function$"
    while quote in schema:
        quote = f"{quote[:-1]}_$"
    return statements.replace("$function$", quote)


# Functions run with the rights of who asks, and under a search_path of their own: a role may put an operator or a
# table of its own in front of what they name.
_FUNCTION = """
create or replace function {{schema}}.current_tenant() returns text
language plpgsql stable set search_path = pg_catalog, pg_temp as $function$
declare
    tenant text;
begin
    {tenant}
    if tenant is null then
        raise exception using errcode = 'insufficient_privilege', message = {message};
    end if;
    return tenant;
end
$function$;
comment on function {{schema}}.current_tenant() is 'The tenant whose rows are seen; fails if there is none';
"""

CURRENT_TENANT = {
    "setting": _FUNCTION.format(
        # A transaction-local setting leaves '' behind.
        tenant=f"tenant := nullif(current_setting('{TENANT_SETTING}', true), '');",
        message=f"'no tenant is set: row-level security compares rows with the setting {TENANT_SETTING}'",
    ),
    "roles": _FUNCTION.format(
        tenant="select r.tenant_id into tenant from {schema}.tenant_roles r where r.role_name = current_user;",
        message="format('the role %I is bound to no tenant: `pgmemory bind-role` binds it', current_user)",
    ),
}
"""By mode: makes the function that every policy asks once a query."""

READ_TENANT = "select current_user, {schema}.current_tenant()"

# Volatile, to see the conversation that the same statement has just made.
OWNS_CONVERSATION = """
create or replace function {schema}.owns_conversation(id uuid) returns boolean
language plpgsql volatile set search_path = pg_catalog, pg_temp as $function$
begin
    return exists (select from {schema}.conversations c where c.id = owns_conversation.id);
end
$function$;
comment on function {schema}.owns_conversation(uuid) is 'Whether a conversation is one of the current tenant''s';
"""
"""Makes the function that keeps a role from writing into another tenant's conversation under its own tenant's name,
which foreign keys and unique indexes, that know no policies, would let it do or tell it of."""

DROP_FUNCTIONS = """
drop function if exists {schema}.owns_conversation(uuid);
drop function if exists {schema}.current_tenant();
"""

_DROP_POLICIES = "".join(f" drop policy if exists {name} on %%1$I.%%2$I;" for name in POLICIES.values())

SECURE_TABLES = f"""
select format(
    'alter table %%1$I.%%2$I enable row level security, force row level security;{_DROP_POLICIES}'
    ' create policy %%3$I on %%1$I.%%2$I using (tenant_id = (select %%1$I.current_tenant()))'
    ' with check (tenant_id = (select %%1$I.current_tenant())%%4$s)',
    n.nspname, c.relname, %(policy)s::text,
    case when exists (select from pg_catalog.pg_attribute o
                      where o.attrelid = c.oid and o.attname = 'conversation_id' and not o.attisdropped)
         then format(' and %%I.owns_conversation(conversation_id)', n.nspname) end)
{_TABLES} {_IN_ORDER};
"""
"""Returns what binds each table to the current tenant, its owner included."""

RELEASE_TABLES = f"""
select format('{_DROP_POLICIES} alter table %%1$I.%%2$I disable row level security, no force row level security',
              n.nspname, c.relname)
{_TABLES} {_IN_ORDER};
"""


def _alter_views(change: str) -> str:
    return f"select format('alter view %%I.%%I {change}', n.nspname, c.relname) {_IN_SCHEMA} and {_IS_VIEW}"


SECURE_VIEWS = _alter_views("set (security_invoker = true)")
"""Returns what lets policies look at who asks a view, not at its owner, who may be a superuser."""

RELEASE_VIEWS = _alter_views("reset (security_invoker)")

# Files and replication hold every row, and what others ask holds what they write. Before PostgreSQL 16 a role that may
# make roles may also make itself a member of any that is no superuser.
_BYPASSES = """
(b.rolsuper or b.rolbypassrls or b.rolreplication
 or b.rolcreaterole and current_setting('server_version_num')::int < 160000
 or b.rolname in ('pg_read_server_files', 'pg_write_server_files', 'pg_execute_server_program', 'pg_read_all_stats'))
"""

FIND_ROLE = f"""
select (select bool_or(pg_catalog.pg_has_role(r.oid, o.owner, 'member')) from (
            select n.nspowner as owner from pg_catalog.pg_namespace n where n.nspname = %(schema)s
            union
            select c.relowner {_IN_SCHEMA}
            and ({_IS_TABLE} or {_IS_VIEW} or c.relname = any(%(tables_of_the_owner)s::text[]))
            union
            select f.proowner from pg_catalog.pg_proc f join pg_catalog.pg_namespace n on n.oid = f.pronamespace
            where n.nspname = %(schema)s and f.proname in ('current_tenant', 'owns_conversation')) o),
       (select b.rolname::text from pg_catalog.pg_roles b
        where {_BYPASSES} and pg_catalog.pg_has_role(r.oid, b.oid, 'member')
        order by b.oid <> r.oid, b.rolname limit 1)
from pg_catalog.pg_roles r where r.rolname = %(role)s;
"""
"""Whether a role may act as an owner of the schema or of something in it, and the role, itself or one that it may take,
whose rights get round policies; null if there is none."""

COPY_RIGHTS = f"""
select format('grant %%s on %%I.%%I to %%s', string_agg(distinct held.privilege_type, ', '), n.nspname, c.relname,
              case held.grantee when 0 then 'public' else quote_ident(pg_catalog.pg_get_userbyid(held.grantee)) end)
from pg_catalog.pg_class m, pg_catalog.aclexplode(m.relacl) held,
     pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
where n.nspname = %(schema)s and {_IS_TABLE} and m.relnamespace = n.oid and m.relname = 'conversation_messages'
  and held.grantee <> m.relowner and held.privilege_type in ('SELECT', 'INSERT', 'UPDATE', 'DELETE')
group by n.nspname, c.relname, held.grantee;
"""
"""Returns what lets whoever may read or write messages do the same with all tables: with new ones too."""

BIND_ROLE = """
insert into {schema}.tenant_roles (role_name, tenant_id) values (%(role)s, %(tenant_id)s)
on conflict (role_name) do update set tenant_id = excluded.tenant_id;
"""

UNBIND_ROLE = "delete from {schema}.tenant_roles where role_name = %(role)s returning tenant_id;"


def _rights(verb: str, preposition: str, roles: str) -> str:
    """Return a statement that returns what gives the rights of an application to roles, or takes them."""
    return f"""
select format('{verb} usage on schema %%I {preposition} %%I', n.nspname, r.rolname)
from pg_catalog.pg_namespace n, pg_catalog.pg_roles r where n.nspname = %(schema)s and {roles}
union all
select format('{verb} %%s on %%I.%%I {preposition} %%I',
              case when {_IS_TABLE} then 'select, insert, update, delete' else 'select' end,
              n.nspname, c.relname, r.rolname)
from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace, pg_catalog.pg_roles r
where n.nspname = %(schema)s and {roles} and ({_IS_TABLE} or {_IS_VIEW} or c.relname = 'schema_migrations')
"""


GRANT_RIGHTS = _rights("grant", "to", "r.rolname in (select b.role_name from {schema}.tenant_roles b)")
"""Returns what gives every bound role the rights of an application: on rows, and to look whether the schema fits."""

REVOKE_RIGHTS = _rights("revoke", "from", "r.rolname = %(role)s")
