"""Commands about branches: fork a conversation, list the states at which it can be forked."""

from __future__ import annotations

from dataclasses import asdict
from itertools import islice

import click

from pgmemory.cli.app import json_option, main, print_json, user_option, with_store
from pgmemory.cli.finding import find_conversation
from pgmemory.cli.look import message_form
from pgmemory.cli.printing import in_utc, new_table, one_line, print_rich, while_read
from pgmemory.models import ConversationKey
from pgmemory.store import ConversationStore

_TEXT = 60


@main.command()
@click.argument("session")
@click.argument("new")
@click.option(
    "--at", type=click.IntRange(min=-1), metavar="N", help="Number of the last message that is copied; -1 for none."
)
@user_option
@json_option
@with_store
def fork(store: ConversationStore, session: str, new: str, at: int | None, user: str | None, as_json: bool) -> None:
    """Copy a conversation, or its messages up to one of them, into a new one of the same user.

    \b
    Examples:
      pgmemory fork ticket-42 ticket-42-again --at 11 --user u7
      pgmemory fork ticket-42 ticket-42-copy
    """
    record = find_conversation(store, session, user)
    store.fork(ConversationKey(record.tenant_id, record.user_id, record.session_id), new, at=at)
    made = store.get_conversation(new, user_id=record.user_id)
    if as_json:
        print_json(made and asdict(made))
    else:
        click.echo(f"copied {made.message_count if made else 0} messages")


@main.command()
@click.argument("session")
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="Show at most so many.")
@user_option
@json_option
@with_store
@while_read
def states(store: ConversationStore, session: str, limit: int, user: str | None, as_json: bool) -> None:
    """List a conversation's states, newest first: the last message of each turn, and what a summary covered then.

    Their numbers are those that `fork --at` and `show --as-of` take. With --json one object a line for each state.

    \b
    Examples:
      pgmemory states ticket-42 --user u7
      pgmemory states ticket-42 --limit 1 --json
    """
    from rich.text import Text

    record = find_conversation(store, session, user)
    found = list(islice(store.read_states(ConversationKey(record.tenant_id, record.user_id, record.session_id)), limit))
    if as_json:
        for state in found:
            print_json({"message": message_form(state.message), "summary": state.summary and asdict(state.summary)})
        return
    table = new_table()
    table.add_column("message", justify="right", no_wrap=True)
    table.add_column("stored (UTC)", no_wrap=True)
    table.add_column("summary of", no_wrap=True)
    table.add_column("last message")
    for state in found:
        content = one_line(state.message.content[: 2 * _TEXT])
        table.add_row(
            str(state.message_index),
            in_utc(state.message.created_at) if state.message.created_at else "",
            f"up to {state.summary.covers_through}" if state.summary else "",
            Text(f"{state.message.role}: {content if len(content) <= _TEXT else content[: _TEXT - 1] + '…'}"),
        )
    if found:
        print_rich(table)
    else:
        click.echo("no messages", err=True)
