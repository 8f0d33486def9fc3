"""Commands for keys of encryption at rest: new-key, rotate-keys, erase-key."""

from __future__ import annotations

import click

from pgmemory.cli.app import json_option, main, one_line_errors, print_json, user_option, with_store
from pgmemory.cli.finding import find_conversation
from pgmemory.encryption import Keyring
from pgmemory.errors import PgMemoryError
from pgmemory.store import ConversationStore


@main.command("new-key")
@click.argument("name")
@one_line_errors
def new_key(name: str) -> None:
    """Print a line with a new master key called NAME, for a key file. Needs no database.

    The first key of the file encrypts; those below it still decrypt. So add a new one below; when every worker has the
    file, move its line to the top. Never overwrite the file: without its keys, what they encrypt is lost. Keep it apart
    from the database's backups.

    \b
    Example:
      pgmemory new-key 2026-01 >> pgmemory.keys
    """
    click.echo(Keyring.new_line(name))


@main.command("rotate-keys")
@click.option("--all-tenants", is_flag=True, help="Rotate the keys of every tenant.")
@json_option
@with_store
def rotate_keys(store: ConversationStore, all_tenants: bool, as_json: bool) -> None:
    """Wrap every conversation's key under the first master key of the key file.

    Runs beside writers, in batches; if it is stopped, another run goes on. No content is encrypted anew.

    \b
    Example:
      pgmemory rotate-keys --keys pgmemory.keys
    """
    rotated = store.rotate_keys(all_tenants=all_tenants)
    if as_json:
        print_json({"rotated": rotated})
    else:
        click.echo(f"{rotated} keys were wrapped anew")


@main.command("erase-key")
@click.argument("session")
@user_option
@json_option
@with_store
def erase_key(store: ConversationStore, session: str, user: str | None, as_json: bool) -> None:
    """Erase the key of the conversation SESSION: what was encrypted with it cannot be read again.

    Its rows stay, empty. `pgmemory erase` removes the conversation altogether.

    \b
    Example:
      pgmemory erase-key ticket-42 --user u7
    """
    record = find_conversation(store, session, user)
    if not store.erase_key(record.session_id, user_id=record.user_id):
        raise PgMemoryError(f"session {session!r} has no key: it is not encrypted")
    if as_json:
        print_json({"session_id": record.session_id, "user_id": record.user_id, "tenant_id": record.tenant_id})
    else:
        click.echo(f"the key of session {session!r} was erased")
