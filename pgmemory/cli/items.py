"""The command that looks at items: items."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from pgmemory.cli.app import json_option, main, print_json, with_store
from pgmemory.cli.finding import find_user
from pgmemory.cli.printing import in_utc, one_line, print_rich, while_read
from pgmemory.models import Item
from pgmemory.store import ConversationStore


@main.command()
@click.argument("prefix", nargs=-1)
@click.option("--user", metavar="USER", help="This user's; with --session the conversation's user, '' for none.")
@click.option("--session", metavar="SESSION", help="This session's, not its user's.")
@click.option("--search", "text", metavar="TEXT", help="Only those that share a word with it, the best first.")
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="Show at most so many.")
@json_option
@with_store
@while_read
def items(
    store: ConversationStore,
    prefix: tuple[str, ...],
    user: str | None,
    session: str | None,
    text: str | None,
    limit: int,
    as_json: bool,
) -> None:
    """List items below a namespace, the last put first: of a user, of a session, or the tenant's own.

    PREFIX are the labels that their namespaces begin with, the outermost first. Looking lets no time to live begin
    anew. With --json one object a line: an item.

    \b
    Examples:
      pgmemory items --user u7
      pgmemory items --user u7 preferences food --search pizza
      pgmemory items --session ticket-42 entities --json
    """
    if text == "":
        raise click.UsageError("give --search a text to look for")
    if session is not None and user is None:
        user = find_user(store, session, None)
    found = store.items(user, session_id=session).search(
        prefix, query=text, limit=limit + 1, refresh_time_to_live=False
    )
    for item in found[:limit]:
        if as_json:
            print_json(asdict(item))
        else:
            _print_item(item)
    if not found and not as_json:
        click.echo("no items", err=True)
    if len(found) > limit:
        click.echo("there are more: see --limit", err=True)


def _print_item(item: Item) -> None:
    from rich.text import Text

    expires = "" if item.expires_at is None else f" · expires {in_utc(item.expires_at)} UTC"
    namespace = ".".join(item.namespace)  # no label holds a period
    print_rich(
        Text(f"{one_line(namespace)} {one_line(item.key)} · {in_utc(item.updated_at)} UTC{expires}", style="bold"),
        Text(f"    {one_line(json.dumps(item.value, ensure_ascii=False))}"),
        wrap=False,
    )
