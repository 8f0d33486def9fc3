"""The command's frame: its group, the options that commands share, how it ends and what it never prints."""

from __future__ import annotations

import errno
import functools
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import click

from pgmemory._version import __version__
from pgmemory.encryption import Keyring
from pgmemory.errors import PgMemoryError
from pgmemory.store import ConversationStore

F = TypeVar("F", bound=Callable[..., Any])

# What of a DSN, in either form, is or may hold a password.
_PASSWORD = re.compile(r"(?<=://)[^\s/'\"]*(?=@)|(?<=password=)('[^']*'|[^\s'\"]+)", re.IGNORECASE)
_MAY_HOLD_A_PASSWORD = re.compile(r"://|@|passw", re.IGNORECASE)

schema_option = click.option(
    "--schema", default="pgmemory", show_default=True, metavar="NAME", help="PostgreSQL schema that holds the tables."
)
_DSN = click.option(
    "--dsn", envvar="DATABASE_URL", metavar="DSN", help="Where the database is; $DATABASE_URL if not given."
)
_TENANT = click.option(
    "--tenant", envvar="PGMEMORY_TENANT", metavar="TENANT", help="Whose conversations; $PGMEMORY_TENANT if not given."
)
_KEYS = click.option(
    "--keys",
    "key_file",
    envvar="PGMEMORY_KEYS_FILE",
    metavar="FILE",
    help="Master keys of encrypted conversations; $PGMEMORY_KEYS_FILE if not given.",
)
user_option = click.option("--user", metavar="USER", help="The conversation's user.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")


def printable(text: str) -> str:
    """Return what may hold words of the command line or of the database on one line, harmless, without passwords."""
    from pgmemory.transcript import visible

    return visible(_PASSWORD.sub("***", " ".join(text.split())), one_line=True)


def one_line_errors(command: F) -> F:
    """Let a command end with one line on standard error, and 1, where it fails with an error of ours."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except PgMemoryError as error:
            raise click.ClickException(printable(str(error))) from error
        except OSError as error:
            if error.errno == errno.EPIPE:  # nobody reads on
                raise
            raise click.ClickException(f"cannot write the output: {error.strerror}") from error

    return wrapped  # type: ignore[return-value]


def with_store(command: F) -> F:
    """Give a command a store as its first argument, and the options that say which."""

    @schema_option
    @_TENANT
    @_KEYS
    @_DSN
    @one_line_errors
    @functools.wraps(command)
    def wrapped(
        *args: Any, dsn: str | None, tenant: str | None, schema: str, key_file: str | None, **kwargs: Any
    ) -> Any:
        # Somebody waits for the answer: say at once that the server cannot be reached.
        options: dict[str, Any] = {"max_connections": 1, "retry_seconds": 0}
        if key_file:
            options["keyring"] = Keyring.from_file(key_file)
        with ConversationStore(dsn, schema=schema, tenant_id=tenant or None, **options) as store:
            return command(store, *args, **kwargs)

    return wrapped  # type: ignore[return-value]


def print_json(value: Any) -> None:
    """Print a value as one line of JSON; times as ISO 8601 text, intervals as seconds."""
    line = json.dumps(value, default=_json_form, ensure_ascii=False)
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    try:
        line.encode(encoding)
    except UnicodeEncodeError:
        # Half a surrogate pair, which messages may hold, or an output that is not UTF-8: as JSON's own escapes.
        line = json.dumps(value, default=_json_form)
    click.echo(line)


def _json_form(value: Any) -> Any:
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if hasattr(value, "total_seconds"):
        return value.total_seconds()
    raise TypeError(f"no JSON form for {type(value).__name__}")


class KnownUsageError(click.UsageError):
    """Wrong usage whose text repeats no word of the command line, and so is shown as it is."""


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
        if isinstance(error, KnownUsageError) or not _MAY_HOLD_A_PASSWORD.search(error.format_message()):
            raise
        raise click.UsageError(
            "an argument was not understood; it is not repeated here, for it looks like a DSN: give that with --dsn",
            error.ctx,
        ) from None


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="pgmemory")
def main() -> None:
    """Look after the conversations that pgmemory keeps in PostgreSQL."""
