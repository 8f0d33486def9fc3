"""Commands that look after the schema: init, status, schema."""

from __future__ import annotations

from typing import get_args

import click

from pgmemory import schema as migrations
from pgmemory.cli.app import json_option, main, one_line_errors, print_json, schema_option, with_store
from pgmemory.names import schema_name
from pgmemory.store import ConversationStore


@main.command()
@click.option(
    "--row-level-security",
    is_flag=False,
    flag_value="setting",
    type=click.Choice(get_args(migrations.RowLevelSecurity)),
    help="Let PostgreSQL keep tenants apart: by the setting that each store sends (the default of this option), "
    "which protects against mistakes, or by the roles that bind-role binds, whatever SQL they send.",
)
@click.option(
    "--search",
    is_flag=False,
    flag_value="",
    metavar="[LANGUAGE]",
    help="Let messages be recalled by their words, and index those that are not yet: by a text search configuration of "
    "PostgreSQL, such as german, or simple for any language. Without LANGUAGE by the one that is there, or english.",
)
@json_option
@with_store
def init(
    store: ConversationStore,
    row_level_security: migrations.RowLevelSecurity | None,
    search: str | None,
    as_json: bool,
) -> None:
    """Create the schema or bring it up to date.

    Safe to run at any time and from several places at once; does nothing on a schema that is up to date. Row-level
    security, and by what messages are recalled, stay as they are unless the options are given.

    \b
    Example:
      pgmemory init --dsn postgresql://admin@db/support
      pgmemory init --row-level-security roles --dsn postgresql://admin@db/support
      pgmemory init --search german --dsn postgresql://admin@db/support
    """
    applied = store.setup(row_level_security=row_level_security, search=True if search == "" else search)
    if as_json or search is not None:
        current = store.schema_status()
    if as_json:
        mode = current.row_level_security
        print_json(
            {
                "schema": store.schema,
                "applied": applied,
                "row_level_security": mode,
                "search": current.search.language,
            }
        )
        return
    for name in applied:
        click.echo(f"applied {name}")
    if row_level_security is not None:
        click.echo(f"row-level security: {row_level_security}")
    if search is not None:
        click.echo(f"search: {current.search.language}")
    click.echo(f"schema {store.schema!r} is up to date")


@main.command()
@json_option
@with_store
def status(store: ConversationStore, as_json: bool) -> None:
    """Show which migrations were applied, whether row-level security is on, and by what messages are recalled.

    Writes nothing.

    Exits with 1 if the schema does not fit, or if row-level security is on, but not on all tables and views.

    \b
    Example:
      pgmemory status --dsn postgresql://app@db/support
    """
    current = store.schema_status()
    vectors = current.search.vectors
    if as_json:
        pending = [f"{migration.version:04}_{migration.name}" for migration in current.pending]
        print_json(
            {
                "schema": store.schema,
                "fits": current.fits,
                "applied": current.applied,
                "pending": pending,
                "row_level_security": current.row_level_security,
                "deviating": current.deviating,
                "search": current.search.language,
                "meaning": vectors and {"model": vectors.model, "dimensions": vectors.dimensions},
            }
        )
    else:
        _print_status(current)
    migrations.require_fitting(current, store.schema)
    migrations.require_protected(current, store.schema)
    if not as_json:
        click.echo(f"schema {store.schema!r} is up to date")


def _print_status(current: migrations.SchemaStatus) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("version", "migration", "state")
    for migration in migrations.migrations():
        pending = migration in current.pending
        table.add_row(str(migration.version), migration.name, "pending" if pending else "applied")
    Console().print(table)
    vectors = current.search.vectors
    click.echo(f"search: {current.search.language or 'off'}")
    click.echo(f"meaning: {f'{vectors.model}, {vectors.dimensions} numbers' if vectors else 'off'}")
    but = f", but not so: {', '.join(current.deviating)}" if current.deviating else ""
    click.echo(f"row-level security: {current.row_level_security}{but}")


@main.command("schema")
@schema_option
@one_line_errors
def print_schema(schema: str) -> None:
    """Print the whole schema as SQL for psql. Needs no database.

    \b
    Example:
      pgmemory schema --schema chat | psql postgresql://admin@db/support
    """
    click.echo(migrations.render(schema_name(schema)), nl=False)
