"""Commands that look after the schema: init, status, schema."""

from __future__ import annotations

import click

from pgmemory import schema as migrations
from pgmemory.cli.app import main, one_line_errors, schema_option, with_store
from pgmemory.names import schema_name
from pgmemory.store import ConversationStore


@main.command()
@with_store
def init(store: ConversationStore) -> None:
    """Create the schema or bring it up to date.

    Safe to run at any time and from several places at once; does nothing on a schema that is up to date.

    \b
    Example:
      pgmemory init --dsn postgresql://admin@db/support
    """
    applied = store.setup()
    for name in applied:
        click.echo(f"applied {name}")
    click.echo(f"schema {store.schema!r} is up to date")


@main.command()
@with_store
def status(store: ConversationStore) -> None:
    """Show which migrations were applied; exit with 1 if the schema does not fit. Writes nothing.

    \b
    Example:
      pgmemory status --dsn postgresql://app@db/support
    """
    current = store.schema_status()
    from rich.console import Console
    from rich.table import Table

    table = Table("version", "migration", "state")
    for migration in migrations.migrations():
        pending = migration in current.pending
        table.add_row(str(migration.version), migration.name, "pending" if pending else "applied")
    Console().print(table)
    migrations.require_fitting(current, store.schema)
    click.echo(f"schema {store.schema!r} is up to date")


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
