"""Commands that keep and forget whole conversations: prune, ttl, hold, release, erase."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, timedelta, timezone
from typing import Any

import click

from pgmemory.cli.app import json_option, main, print_json, printable, user_option, with_store
from pgmemory.cli.durations import Duration
from pgmemory.cli.finding import find_user
from pgmemory.cli.printing import one_line
from pgmemory.cli.progress import progress_bar
from pgmemory.models import Erased, ErasedConversation, Pruned
from pgmemory.pool import StoreError
from pgmemory.store import ConversationStore


@main.command()
@click.option("--older-than", type=Duration(), help="Delete conversations without a turn for so long, as in 30d.")
@click.option("--all-tenants", is_flag=True, help="Prune the conversations of every tenant.")
@click.option("--dry-run", is_flag=True, help="Delete nothing, only count.")
@click.option("--every", type=Duration(), help="Go on as a service, and prune so often; stops on SIGTERM.")
@json_option
@with_store
def prune(
    store: ConversationStore,
    older_than: timedelta | None,
    all_tenants: bool,
    dry_run: bool,
    every: timedelta | None,
    as_json: bool,
) -> None:
    """Delete idle conversations: those whose time to live has passed, and with --older-than all that are older.

    And items that have expired. Works in small batches beside writers, and passes over what is held or in use. It may
    be stopped at any time; another run goes on.

    \b
    Examples:
      pgmemory prune --older-than 30d --dry-run
      pgmemory prune --older-than 30d
      pgmemory prune --every 1h
    """
    if every is None:
        _print_pruned(_prune(store, older_than, all_tenants, dry_run), dry_run, as_json)
        return
    with _until_told_to_stop() as stopped:
        while not stopped.is_set():
            try:
                _print_pruned(_prune(store, older_than, all_tenants, dry_run, stopped), dry_run, as_json)
            except StoreError as error:
                if not error.may_pass:
                    raise
                # A service outlives its server: the next round may reach it.
                click.echo(f"{_now()} not pruned: {printable(str(error))}", err=True)
            stopped.wait(every.total_seconds())


class _Stopped(Exception):
    """The service was told to stop in the middle of a round."""


def _prune(
    store: ConversationStore,
    older_than: timedelta | None,
    all_tenants: bool,
    dry_run: bool,
    stopped: threading.Event | None = None,
) -> Pruned:
    so_far = Pruned(0, 0, 0, 0)
    with progress_bar("pruning") as show:

        def after_batch(pruned: Pruned) -> None:
            nonlocal so_far
            so_far = pruned
            show(pruned.conversations)
            if stopped is not None and stopped.is_set():
                raise _Stopped

        try:
            return store.prune(older_than=older_than, all_tenants=all_tenants, dry_run=dry_run, on_batch=after_batch)
        except _Stopped:
            return so_far


def _print_pruned(pruned: Pruned, dry_run: bool, as_json: bool) -> None:
    if as_json:
        print_json({"time": _now(), "dry_run": dry_run, **asdict(pruned)})
    else:
        held = f", held and kept: {pruned.held}" if pruned.held else ""
        items = f", items: {pruned.items}" if pruned.items else ""
        done = "would prune" if dry_run else "pruned"
        click.echo(f"{_now()} {done} conversations: {pruned.conversations}, messages: {pruned.messages}{items}{held}")


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


@contextmanager
def _until_told_to_stop() -> Iterator[threading.Event]:
    """Give an event that SIGTERM and SIGINT set."""
    stopped = threading.Event()
    signals = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda *_: stopped.set()) for number in signals]
    try:
        yield stopped
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


class _TimeToLive(Duration):
    """A duration, or ``none``."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return "none" if value == "none" else super().convert(value, param, ctx)


@main.command()
@click.argument("session")
@click.argument("duration", type=_TimeToLive())
@user_option
@json_option
@with_store
def ttl(
    store: ConversationStore, session: str, duration: timedelta | str, user: str | None, as_json: bool
) -> None:
    """Set how long after its last turn `prune` deletes a conversation; `none` for the application's own rule.

    \b
    Examples:
      pgmemory ttl ticket-42 90d --user u7
      pgmemory ttl ticket-42 none
    """
    owner = find_user(store, session, user)
    span = duration if isinstance(duration, timedelta) else None
    changed = store.set_time_to_live(session, span, user_id=owner)
    rule = "no time to live of its own" if span is None else f"{span} after its last turn"
    _print_changed({"user_id": owner, "time_to_live": span, "session_ids": changed}, as_json, f"{{}}: {rule}")


@main.command()
@click.argument("session")
@click.option("--reason", metavar="TEXT", help="Why, for those who meet the hold.")
@user_option
@json_option
@with_store
def hold(store: ConversationStore, session: str, reason: str | None, user: str | None, as_json: bool) -> None:
    """Hold a conversation: nothing of it is deleted or changed until it is released. New turns are still stored.

    \b
    Example:
      pgmemory hold ticket-42 --user u7 --reason "case 2026/117"
    """
    owner = find_user(store, session, user)
    held = store.hold(session, user_id=owner, reason=reason)
    _print_changed({"user_id": owner, "session_ids": held}, as_json, "held {}")


@main.command()
@click.argument("session")
@user_option
@json_option
@with_store
def release(store: ConversationStore, session: str, user: str | None, as_json: bool) -> None:
    """End the hold on a conversation.

    \b
    Example:
      pgmemory release ticket-42 --user u7
    """
    owner = find_user(store, session, user)
    released = store.release(session, user_id=owner)
    _print_changed({"user_id": owner, "session_ids": released}, as_json, "released {}")
    if not released and not as_json:
        click.echo("it was not held")


def _print_changed(changed: dict[str, Any], as_json: bool, line: str) -> None:
    if as_json:
        print_json(changed)
    else:
        for session_id in changed["session_ids"]:
            click.echo(line.format(one_line(session_id)))


@main.command()
@click.option("--session", metavar="SESSION", help="Erase this conversation.")
@click.option("--user", metavar="USER", help="Erase all of this user's conversations, or say whose the one is.")
@click.option("--yes", is_flag=True, help="Do not ask on a terminal.")
@json_option
@with_store
def erase(store: ConversationStore, session: str | None, user: str | None, yes: bool, as_json: bool) -> None:
    """Delete a conversation, or all of a user's, with the items, without a trace, and print a receipt.

    A receipt names each conversation and what it held. Ends with 1 if one is held, and so was kept, and if there was
    nothing to erase. Backups, and the server's own files until it has cleaned them up, are another matter: see the
    guide to operations.

    \b
    Examples:
      pgmemory erase --user u7
      pgmemory erase --session ticket-42 --user u7 --json
    """
    if session is None and not user:
        raise click.UsageError("say what to erase: --user, --session, or both for one of a user's conversations")
    what = f"all conversations of the user {user!r}"
    if session is not None:
        if user is None:
            user = find_user(store, session, None)
        what = f"the conversation {session!r} of the user {user!r}"
    if not yes and sys.stdin is not None and sys.stdin.isatty():
        click.confirm(f"Erase {what}? This cannot be undone.", abort=True, err=True)
    assert user is not None
    gone: list[ErasedConversation] = []
    complete = False
    held: tuple[str, ...] = ()
    items = 0
    try:
        if session is None:
            erased = store.erase_user(user, on_batch=gone.extend)
        else:
            erased = store.erase_conversation(session, user_id=user, on_batch=gone.extend)
        held, items, complete = erased.held, erased.items, True
    finally:
        # Also of what was erased before something went wrong: nobody else can tell.
        if complete or gone:
            _print_receipt(Erased(store.tenant_id, user, session, tuple(gone), held, items), complete, as_json)
    if held:
        raise click.ClickException(f"kept, because they are held: {', '.join(map(repr, held))}")
    if not gone and not items:
        raise click.ClickException("there was nothing to erase")


def _print_receipt(erased: Erased, complete: bool, as_json: bool) -> None:
    if as_json:
        print_json({"erased_at": _now(), "complete": complete, **asdict(erased)})
        return
    tenant = f" of the tenant {erased.tenant_id!r}" if erased.tenant_id else ""
    broken_off = "" if complete else ", and then broken off"
    click.echo(printable(f"{_now()} erased for the user {erased.user_id!r}{tenant}{broken_off}"))
    for gone in erased.conversations:
        click.echo(f"  {one_line(gone.session_id)}: {gone.messages} messages, {gone.summaries} summaries")
    messages = sum(gone.messages for gone in erased.conversations)
    items = erased.items + sum(gone.items for gone in erased.conversations)
    kept = f", items: {items}" if items else ""
    click.echo(f"conversations: {len(erased.conversations)}, messages: {messages}{kept}")
