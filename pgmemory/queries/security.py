"""Row-level security: policies that bind every table to one tenant, and which database role has which tenant.

Some statements return statements, one a row: what they are about is found in the catalog, so that a table that a later
migration adds does not escape. Those that are returned, and those without parameters, are sent without parameters.
"""

from __future__ import annotations

from pgmemory.queries.parts import TENANT_SETTING

POLICIES = {"setting": "tenant_by_setting", "roles": "tenant_by_role"}
"""By mode: the name of the policy on each table, from which the mode is read again."""

# Every table with a tenant, conversations first, as writers lock them. The roles' own table has a policy of its own.
_TABLES = """
from pg_catalog.pg_class c
join pg_catalog.pg_namespace n on n.oid = c.relnamespace
join pg_catalog.pg_attribute a on a.attrelid = c.oid and a.attname = 'tenant_id' and not a.attisdropped
where n.nspname = %(schema)s and c.relkind in ('r', 'p') and c.relname <> 'tenant_roles'
"""
_IN_ORDER = "order by c.relname <> 'conversations', c.relname"


def _has(policy: str) -> str:
    return f"""bool_and(c.relrowsecurity and c.relforcerowsecurity and exists (
        select from pg_catalog.pg_policy p where p.polrelid = c.oid and p.polname = '{policy}'))"""


MODE = f"""
select case when {_has(POLICIES["setting"])} then 'setting' when {_has(POLICIES["roles"])} then 'roles' else 'off' end
{_TABLES}
"""
"""Which policies every table has: `off` unless all of them have the same."""

IS_LIMITED = f"select coalesce(bool_or(pg_catalog.row_security_active(c.oid)), false) {_TABLES}"
"""Whether policies hold for this role: not for superusers and roles with BYPASSRLS."""

READ_SERVER_VERSION = "select current_setting('server_version_num')::int, current_setting('server_version')"

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

_ALTER_VIEWS = """
select format('alter view %%I.%%I {change}', n.nspname, c.relname)
from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
where n.nspname = %(schema)s and c.relkind = 'v';
"""

SECURE_VIEWS = _ALTER_VIEWS.format(change="set (security_invoker = true)")
"""Returns what lets policies look at who asks a view, not at its owner, who may be a superuser."""

RELEASE_VIEWS = _ALTER_VIEWS.format(change="reset (security_invoker)")

FIND_ROLE = """
select pg_catalog.pg_has_role(r.oid, c.relowner, 'member'), exists (
    select from pg_catalog.pg_roles b
    where (b.rolsuper or b.rolbypassrls) and pg_catalog.pg_has_role(r.oid, b.oid, 'member'))
from pg_catalog.pg_roles r, pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
where r.rolname = %(role)s and n.nspname = %(schema)s and c.relname = 'conversations';
"""
"""Whether a role may act as the owner of the tables, and whether as one that no policy holds for."""

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
              case when c.relkind = 'v' or c.relname = 'schema_migrations' then 'select'
                   else 'select, insert, update, delete' end,
              n.nspname, c.relname, r.rolname)
from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace, pg_catalog.pg_roles r
where n.nspname = %(schema)s and {roles} and c.relkind in ('r', 'p', 'v') and c.relname <> 'tenant_roles'
"""


GRANT_RIGHTS = _rights("grant", "to", "r.rolname in (select b.role_name from {schema}.tenant_roles b)")
"""Returns what gives every bound role the rights of an application: on rows, and to look whether the schema fits."""

REVOKE_RIGHTS = _rights("revoke", "from", "r.rolname = %(role)s")
