"""The `pgmemory` command: thin, one function a command, over `ConversationStore`. Starts without LangChain.

Exit codes: 0 done, 1 failed (one line on standard error), 2 wrong usage. No password is ever printed.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.table import Table

from pgmemory import schema as migrations
from pgmemory._version import __version__
from pgmemory.errors import PgMemoryError
from pgmemory.names import schema_name
from pgmemory.store import ConversationStore

F = TypeVar("F", bound=Callable[..., Any])

_MAY_HOLD_A_PASSWORD = re.compile(r"://|@|passw", re.IGNORECASE)

_SCHEMA = click.option(
    "--schema", default="pgmemory", show_default=True, metavar="NAME", help="PostgreSQL schema that holds the tables."
)
_DSN = click.option(
    "--dsn", envvar="DATABASE_URL", metavar="DSN", help="Where the database is; $DATABASE_URL if not given."
)


def _one_line_errors(command: F) -> F:
    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except PgMemoryError as error:
            raise click.ClickException(" ".join(str(error).split())) from error

    return wrapped  # type: ignore[return-value]


def _store(dsn: str | None, schema: str) -> ConversationStore:
    # Somebody waits for the answer: say at once that the server cannot be reached.
    return ConversationStore(dsn, schema=schema, max_connections=1, retry_seconds=0)


class _Commands(click.Group):
    """A group of commands whose usage errors show no password: click quotes the words that it does not understand."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _without_passwords():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with _without_passwords():
            return super().invoke(ctx)


@contextmanager
def _without_passwords() -> Iterator[None]:
    try:
        yield
    except click.UsageError as error:
        if not _MAY_HOLD_A_PASSWORD.search(error.format_message()):
            raise
        raise click.UsageError(
            "an argument was not understood; it is not repeated here, for it looks like a DSN: give that with --dsn",
            error.ctx,
        ) from None


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="pgmemory")
def main() -> None:
    """Look after the PostgreSQL schema that pgmemory keeps conversations in."""


@main.command()
@_DSN
@_SCHEMA
@_one_line_errors
def init(dsn: str | None, schema: str) -> None:
    """Create the schema or bring it up to date.

    Safe to run at any time and from several places at once; does nothing on a schema that is up to date.

    \b
    Example:
      pgmemory init --dsn postgresql://admin@db/support
    """
    with _store(dsn, schema) as store:
        applied = store.setup()
    for name in applied:
        click.echo(f"applied {name}")
    click.echo(f"schema {schema!r} is up to date")


@main.command()
@_DSN
@_SCHEMA
@_one_line_errors
def status(dsn: str | None, schema: str) -> None:
    """Show which migrations were applied; exit with 1 if the schema does not fit. Writes nothing.

    \b
    Example:
      pgmemory status --dsn postgresql://app@db/support
    """
    with _store(dsn, schema) as store:
        current = store.schema_status()
    table = Table("version", "migration", "state")
    for migration in migrations.migrations():
        pending = migration in current.pending
        table.add_row(str(migration.version), migration.name, "pending" if pending else "applied")
    Console().print(table)
    migrations.require_fitting(current, schema)
    click.echo(f"schema {schema!r} is up to date")


@main.command("schema")
@_SCHEMA
@_one_line_errors
def print_schema(schema: str) -> None:
    """Print the whole schema as SQL for psql. Needs no database.

    \b
    Example:
      pgmemory schema --schema chat | psql postgresql://admin@db/support
    """
    click.echo(migrations.render(schema_name(schema)), nl=False)


if __name__ == "__main__":
    main()
