"""Commands that look at conversations: ls, show, search."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from itertools import takewhile
from typing import Any

import click

from pgmemory.cli.app import json_option, main, print_json, with_store
from pgmemory.cli.durations import Duration
from pgmemory.cli.finding import find_conversation
from pgmemory.cli.printing import in_utc, new_table, one_line, print_line, print_rich, size, while_read, written_file
from pgmemory.findings import Hit, SearchResult
from pgmemory.models import AFTER_ALL, ConversationKey, ConversationRecord, StoredMessage
from pgmemory.store import ConversationStore

_all_tenants = click.option("--all-tenants", is_flag=True, help="Those of every tenant.")
_of_user = click.option("--user", metavar="USER", help="Only this user's; '' for those without a user.")


@main.command("ls")
@_of_user
@_all_tenants
@click.option("--older-than", type=Duration(), help="Only those without a turn for so long, as in 30d.")
@click.option("--newer-than", type=Duration(), help="Only those with a turn since then, as in 12h.")
@click.option("--min-messages", type=click.IntRange(min=1), metavar="N", help="Only those with at least N messages.")
@click.option("--held", is_flag=True, help="Only those that are held.")
@click.option(
    "--sort",
    type=click.Choice(["updated", "created", "messages", "size"]),
    default="updated",
    show_default=True,
    help="What comes first: the last used, the last created, the longest, the largest.",
)
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="Show at most so many.")
@json_option
@with_store
@while_read
def list_conversations(
    store: ConversationStore,
    user: str | None,
    all_tenants: bool,
    older_than: timedelta | None,
    newer_than: timedelta | None,
    min_messages: int | None,
    held: bool,
    sort: Any,
    limit: int,
    as_json: bool,
) -> None:
    """List conversations, the last used first.

    With --json one object a line: a conversation's record.

    \b
    Examples:
      pgmemory ls --user u7
      pgmemory ls --older-than 30d --sort size
      pgmemory ls --json --limit 100000 | jq -r .session_id
    """
    found = store.list_conversations(
        user_id=user,
        all_tenants=all_tenants,
        older_than=older_than,
        newer_than=newer_than,
        min_messages=min_messages,
        held=True if held else None,
        sort=sort,
        with_sizes=True,
        limit=limit + 1,
    )
    shown, more = found[:limit], len(found) > limit
    if as_json:
        for record in shown:
            print_json(asdict(record))
    elif shown:
        print_conversations(shown, with_tenants=all_tenants)
    else:
        click.echo("no conversations", err=True)
    if more:
        click.echo("there are more: see --limit", err=True)


def print_conversations(records: Sequence[ConversationRecord], *, with_tenants: bool) -> None:
    """Print conversations, with their sizes, as a table."""
    from rich.text import Text

    table = new_table()
    if with_tenants:
        table.add_column("tenant", overflow="fold")
    table.add_column("user", overflow="fold")
    table.add_column("session", overflow="fold")
    for name in ("messages", "size"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("last turn (UTC)", no_wrap=True)
    marks = [_marks(record) for record in records]
    if any(marks):
        table.add_column("marks")
    for record, mark in zip(records, marks, strict=True):
        names = (record.tenant_id, record.user_id, record.session_id)[0 if with_tenants else 1 :]
        table.add_row(
            *(Text(one_line(name)) for name in names),
            f"{record.message_count:,}",
            size(record.size_bytes or 0),
            in_utc(record.updated_at),
            *([mark] if any(marks) else []),
        )
    print_rich(table)


def _marks(record: ConversationRecord) -> str:
    ttl = [] if record.time_to_live is None else [f"ttl {_short(record.time_to_live)}"]
    return ", ".join(["held"] * (record.held_at is not None) + ["encrypted"] * record.is_encrypted + ttl)


def _short(duration: timedelta) -> str:
    """Return a duration in its largest whole unit, as `Duration` reads it."""
    seconds = round(duration.total_seconds())
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds and seconds % length == 0:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"


@main.command()
@click.argument("session")
@click.option("--user", metavar="USER", help="The conversation's user, where several have one of this name.")
@click.option("--last", type=click.IntRange(min=1), metavar="N", help="Only the last N turns.")
@click.option("--as-of", type=click.IntRange(min=0), metavar="N", help="As if message N were the last one.")
@click.option(
    "--html",
    type=click.Path(dir_okay=False, allow_dash=True),
    metavar="FILE",
    help="Write a page that stands alone and prints well; - for standard output.",
)
@json_option
@with_store
@while_read
def show(
    store: ConversationStore,
    session: str,
    user: str | None,
    last: int | None,
    as_of: int | None,
    html: str | None,
    as_json: bool,
) -> None:
    """Show a conversation: who said what and when, tool calls, and the summary behind the messages that it covers.

    With --json one object a line: {"conversation": …}, {"summary": …} if there is one, and a {"message": …} for each.

    \b
    Examples:
      pgmemory show ticket-42
      pgmemory show ticket-42 --user u7 --last 5
      pgmemory show ticket-42 --as-of 11
      pgmemory show ticket-42 --html ticket-42.html
    """
    if html and as_json:
        raise click.UsageError("give --html or --json, not both")
    record = find_conversation(store, session, user)
    key = ConversationKey(record.tenant_id, record.user_id, record.session_id)
    before = AFTER_ALL if as_of is None else min(as_of + 1, AFTER_ALL)
    summary = store.read_summary_window(key, budget=0, encoding=None, before=before).summary
    messages: Iterable[StoredMessage]
    if last is None:
        messages = takewhile(lambda message: (message.message_index or 0) < before, store.read_pages(key))
    else:
        messages = store.read_last_turns(key, turns=last, before=before).messages
    if as_json:
        print_json({"conversation": asdict(record)})
        if summary is not None:
            print_json({"summary": asdict(summary)})
        for message in messages:
            print_json({"message": message_form(message)})
        return
    from pgmemory import transcript

    if html is None:
        for line in transcript.as_text(record, messages, summary):
            print_line(line)
        return
    with written_file(html) as file:
        for part in transcript.as_html(record, messages, summary):
            file.write(part.encode())


def message_form(message: StoredMessage) -> dict[str, Any]:
    """Return a message as JSON has it: what is stored as JSON text is a value."""
    form = message._asdict()
    for name in ("additional_kwargs", "extra"):
        if form[name] is not None:
            with suppress(RecursionError):  # nested deeper than can be read: it stays text
                form[name] = json.loads(form[name])
    return form


@main.command()
@click.argument("text")
@_of_user
@_all_tenants
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, help="Show at most so many.")
@json_option
@with_store
@while_read
def search(
    store: ConversationStore, text: str, user: str | None, all_tenants: bool, limit: int, as_json: bool
) -> None:
    """Find messages that hold a text, newest first. Nothing in the text is a pattern; case makes no difference.

    Encrypted messages cannot be searched: how many conversations that concerns is printed. Ends with 1 if that is all
    of them. With --json one object a line for each message found.

    \b
    Examples:
      pgmemory search "refund" --user u7
      pgmemory search "order 4711" --all-tenants --json
    """
    if not text:
        raise click.UsageError("give a text to look for")
    result = store.search(text, user_id=user, all_tenants=all_tenants, limit=limit + 1)
    for hit in result.hits[:limit]:
        if as_json:
            print_json(asdict(hit))
        else:
            _print_hit(hit, with_tenant=all_tenants)
    if not result.hits and not as_json and result.searched:
        click.echo("nothing found", err=True)
    if len(result.hits) > limit:
        click.echo("there are more: see --limit", err=True)
    _tell_of_encrypted(result)


def _tell_of_encrypted(result: SearchResult) -> None:
    if not result.encrypted:
        return
    if not result.searched and not result.hits:
        raise click.ClickException("nothing can be searched: every conversation is encrypted")
    click.echo(f"not searched: {result.encrypted} encrypted conversations", err=True)


def _print_hit(hit: Hit, *, with_tenant: bool) -> None:
    from rich.text import Text

    end = hit.found_at + hit.found_length
    parts = (hit.excerpt[: hit.found_at], hit.excerpt[hit.found_at : end], hit.excerpt[end:])
    before, found, after = map(one_line, parts)
    if not sys.stdout.isatty():
        found = f"[{found}]"
    names = [hit.tenant_id] * with_tenant + [hit.user_id] * bool(hit.user_id) + [hit.session_id]
    heading = f"{' '.join(map(one_line, names))} #{hit.message_index} {one_line(hit.role)}"
    print_rich(
        Text(f"{heading} · {in_utc(hit.created_at)} UTC", style="bold"),
        Text.assemble(
            "    " + ("" if hit.is_start else "…") + before, (found, "reverse"), after + ("" if hit.is_end else "…")
        ),
        wrap=False,
    )
