"""Commands that bind database roles to tenants: bind-role, unbind-role."""

from __future__ import annotations

import click

from pgmemory.cli.app import json_option, main, print_json, with_store
from pgmemory.store import ConversationStore


@main.command("bind-role")
@click.argument("role")
@json_option
@with_store
def bind_role(store: ConversationStore, role: str, as_json: bool) -> None:
    """Let a database role see one tenant, --tenant, and give it the rights that an application needs.

    It sees no other tenant once `pgmemory init --row-level-security roles` has run. Both are for the tables' owner.

    \b
    Example:
      pgmemory bind-role acme_app --tenant acme --dsn postgresql://admin@db/support
    """
    if not store.tenant_id:
        raise click.UsageError("name the tenant that the role is to see: --tenant")
    store.bind_role(role, store.tenant_id)
    if as_json:
        print_json({"role": role, "tenant_id": store.tenant_id})
    else:
        click.echo(f"role {role!r} sees tenant {store.tenant_id!r}")


@main.command("unbind-role")
@click.argument("role")
@json_option
@with_store
def unbind_role(store: ConversationStore, role: str, as_json: bool) -> None:
    """Take from a database role its tenant and the rights that bind-role gave it.

    Sessions that are open lose them too. Exits with 1 if the role has no tenant.

    \b
    Example:
      pgmemory unbind-role acme_app --dsn postgresql://admin@db/support
    """
    tenant_id = store.unbind_role(role)
    if as_json:
        print_json({"role": role, "tenant_id": tenant_id})
    if tenant_id is None:
        raise click.ClickException(f"role {role!r} is bound to no tenant")
    if not as_json:
        click.echo(f"role {role!r} no longer sees tenant {tenant_id!r}")
