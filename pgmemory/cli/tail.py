"""The command that follows: tail."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import click

from pgmemory.cli.app import json_option, main, print_json, with_store
from pgmemory.cli.finding import find_conversation
from pgmemory.cli.look import message_form
from pgmemory.cli.printing import one_line, print_line, while_read
from pgmemory.findings import FoundMessage
from pgmemory.models import ConversationKey
from pgmemory.pool import StoreError
from pgmemory.store import ConversationStore
from pgmemory.store.inspection import Following

_SHOWN_CHARACTERS = 160


@main.command()
@click.argument("session", required=False)
@click.option("--user", metavar="USER", help="The conversation's user; without a session, only this user's.")
@click.option("-f", "--follow", is_flag=True, help="Go on with new messages as they come, until SIGINT or SIGTERM.")
@click.option("-n", "count", type=click.IntRange(min=0), default=10, show_default=True, help="Begin with so many.")
@click.option(
    "--interval",
    type=click.FloatRange(0.05, 3600),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="How often to look for new messages.",
)
@json_option
@with_store
@while_read
def tail(
    store: ConversationStore,
    session: str | None,
    user: str | None,
    follow: bool,
    count: int,
    interval: float,
    as_json: bool,
) -> None:
    """Print the newest messages of a conversation or of all, a line each, and with -f new ones as they come.

    A lost connection is reported, and made anew for as long as it takes. With --json one object a line, whole.

    \b
    Examples:
      pgmemory tail -f
      pgmemory tail ticket-42 -n 20
      pgmemory tail --user u7 -f --json | jq -r .content
    """
    key = None
    if session is not None:
        record = find_conversation(store, session, user)
        key, user = ConversationKey(record.tenant_id, record.user_id, record.session_id), None
    following = store.follow(key, user_id=user)
    with _until_told_to_stop() if follow else nullcontext():
        found = following.newest(count)
        while True:
            for one in found:
                _print(one, as_json, with_session=key is None)
            if not follow:
                return
            time.sleep(interval)
            found = _new(following, interval)


def _new(following: Following, interval: float) -> list[FoundMessage]:
    """Return new messages, however long it takes to get at the database."""
    failed = False
    while True:
        try:
            found = following.new()
        except StoreError as error:
            if not error.may_pass:
                raise
            if not failed:
                click.echo(f"{one_line(str(error))}; trying again every {interval:g} s", err=True)
            failed = True
            time.sleep(interval)
            continue
        if failed:
            click.echo("connected again", err=True)
        return found


def _print(found: FoundMessage, as_json: bool, *, with_session: bool) -> None:
    from pgmemory.transcript import entries

    key, message = found
    if as_json:
        names = {"tenant_id": key.tenant_id, "user_id": key.user_id, "session_id": key.session_id}
        print_json(names | message_form(message))
        return
    (entry,) = entries([message])
    said = " ".join([entry.text[: _SHOWN_CHARACTERS + 1], *(f"[calls {call.name}]" for call in entry.tool_calls)])
    text = "(its key was erased)" if message.is_erased else one_line(said.strip())
    if len(text) > _SHOWN_CHARACTERS:
        text = f"{text[:_SHOWN_CHARACTERS]}…"
    session = f" {one_line('/'.join(filter(None, (key.user_id, key.session_id))))}" if with_session else ""
    print_line(f"{entry.time:%Y-%m-%d %H:%M:%S}{session} {one_line(message.role)}: {text}")


@contextmanager
def _until_told_to_stop() -> Iterator[None]:
    """Let SIGINT and SIGTERM end a block at once, and well."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)
