"""Commands that move conversations out and in: export, import."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from pgmemory.cli.app import F, json_option, main, print_json, with_store
from pgmemory.cli.finding import find_user
from pgmemory.cli.printing import one_line, while_read, written_file
from pgmemory.cli.progress import progress_bar
from pgmemory.store import ConversationStore

if TYPE_CHECKING:
    from pgmemory.transfer import Source
    from pgmemory.transfer.tables import Kind


def _options(*options: Callable[[F], F]) -> Callable[[F], F]:
    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


_import_options = _options(
    click.option("--dry-run", is_flag=True, help="Write nothing: read and check all, and say what would happen."),
    click.option("--strict", is_flag=True, help="Fail at the first row or message that cannot be read."),
    json_option,
)
_table_options = _options(
    click.option("--from-dsn", metavar="DSN", help="Where the table is; the store's own database if not given."),
    click.option("--user", metavar="USER", help="The user of conversations for which the table names none."),
    _import_options,
)


@main.command("export")
@click.argument("file", type=click.Path(dir_okay=False, allow_dash=True))
@click.option(
    "--format",
    type=click.Choice(["jsonl", "openai"]),
    default="jsonl",
    show_default=True,
    help="Exact JSON Lines, to be imported again, or a line of OpenAI chat messages for each conversation.",
)
@click.option("--user", metavar="USER", help="Only this user's conversations; '' for those without a user.")
@click.option(
    "--session",
    metavar="SESSION",
    help="Only this conversation, and its agents' logs; with --all-tenants that of --user or of none.",
)
@click.option("--all-tenants", is_flag=True, help="The conversations of every tenant.")
@json_option
@with_store
@while_read
def export(
    store: ConversationStore,
    file: str,
    format: Any,
    user: str | None,
    session: str | None,
    all_tenants: bool,
    as_json: bool,
) -> None:
    """Write conversations to FILE, or to standard output for -. In clear text, also of an encrypted store.

    Items are not among what is written: see `pgmemory items`.

    A file appears when it is whole, for its owner alone; then what was done is printed. Standard output gets the
    conversations alone: with --json what was done goes to standard error. Ends with 1 if --user or --session fits none.

    \b
    Examples:
      pgmemory export backup.jsonl
      pgmemory export - --user u7 | gzip >u7.jsonl.gz
      pgmemory export talk.json --format openai --session ticket-42
    """
    from pgmemory.transfer import export_conversations

    if session is not None and user is None and not all_tenants:
        user = find_user(store, session, user)
    with written_file(file) as out, progress_bar("exporting") as progress:
        report = export_conversations(
            store,
            out,
            format=format,
            user_id=user,
            session_id=session,
            all_tenants=all_tenants,
            on_progress=progress,
        )
        if not report.conversations and (user, session) != (None, None):
            raise click.ClickException("there is no such conversation: see `pgmemory ls`")
    is_output = file == "-"
    if as_json:
        click.echo(json.dumps(asdict(report)), err=is_output)
    elif report.left_out or not is_output:
        left_out = f", {report.left_out} left out" if report.left_out else ""
        done = f"exported {report.conversations} conversations, {report.messages} messages{left_out}"
        click.echo(done, err=is_output)


@main.group("import")
def import_() -> None:
    """Bring conversations in: from a file, or from a table of another package.

    Safe to run twice, and to run again after it broke off: what is here is not stored again, what was deleted here does
    not come back, and a conversation that is another one here is left alone and reported. Exit code 1 then.

    \b
    Example:
      pgmemory import message-store --dry-run
    """


@import_.command("jsonl")
@click.argument("file", type=click.File("rb"))
@click.option("--keep-tenants", is_flag=True, help="Keep each conversation's own tenant; needs a store without one.")
@_import_options
@with_store
def import_jsonl(store: ConversationStore, file: BinaryIO, keep_tenants: bool, **options: Any) -> None:
    """Import what `pgmemory export` wrote, exactly, from FILE, or from standard input for -.

    \b
    Examples:
      pgmemory import jsonl backup.jsonl
      gunzip <u7.jsonl.gz | pgmemory import jsonl -
    """
    from pgmemory.transfer import JsonLines

    if keep_tenants and store.tenant_id:
        raise click.UsageError("--keep-tenants and a tenant exclude each other")
    _import(store, JsonLines(file), keep_tenants=keep_tenants, **options)


@import_.command("openai")
@click.argument("file", type=click.File("rb"))
@click.option("--session", metavar="SESSION", help="The name of the one conversation that bears none.")
@click.option("--user", metavar="USER", help="The user of conversations that bear none.")
@_import_options
@with_store
def import_openai(
    store: ConversationStore, file: BinaryIO, session: str | None, user: str | None, **options: Any
) -> None:
    """Import OpenAI's chat messages from FILE: a JSON list, {"messages": […]}, or lines of such.

    Lines may name their session_id and user_id.

    \b
    Example:
      pgmemory import openai talk.json --session ticket-42 --user u7
    """
    from pgmemory.transfer import OpenAIMessages

    _import(store, OpenAIMessages(file, session_id=session, user_id=user), **options)


@import_.command("langchain-postgres")
@click.option("--table", required=True, metavar="NAME", help="The table, perhaps schema.table.")
@_table_options
@with_store
def import_langchain_postgres(store: ConversationStore, **options: Any) -> None:
    """Import a table of langchain-postgres' PostgresChatMessageHistory.

    \b
    Example:
      pgmemory import langchain-postgres --table chat_history
    """
    _import_table(store, "langchain-postgres", **options)


@import_.command("message-store")
@click.option("--table", default="message_store", show_default=True, metavar="NAME", help="Perhaps schema.table.")
@_table_options
@with_store
def import_message_store(store: ConversationStore, **options: Any) -> None:
    """Import a table of langchain-community's SQLChatMessageHistory or PostgresChatMessageHistory.

    \b
    Example:
      pgmemory import message-store --from-dsn postgresql://app@old/bot
    """
    _import_table(store, "message-store", **options)


@import_.command("n8n")
@click.option("--table", default="n8n_chat_histories", show_default=True, metavar="NAME", help="Perhaps schema.table.")
@_table_options
@with_store
def import_n8n(store: ConversationStore, **options: Any) -> None:
    """Import a table of n8n's Postgres Chat Memory.

    \b
    Example:
      pgmemory import n8n --from-dsn postgresql://n8n@db/n8n --user shop
    """
    _import_table(store, "n8n", **options)


@import_.command("conversation-messages")
@click.option(
    "--table", default="conversation_messages", show_default=True, metavar="NAME", help="Perhaps schema.table."
)
@_table_options
@with_store
def import_conversation_messages(store: ConversationStore, **options: Any) -> None:
    """Import a table of your own: conversation_id, message_index, role, content, perhaps additional_kwargs.

    Tool calls, tool_call_id and name may stand in additional_kwargs; user_id and created_at are taken where they are.

    \b
    Example:
      pgmemory import conversation-messages --table chat.conversation_messages
    """
    _import_table(store, "conversation-messages", **options)


def _import_table(
    store: ConversationStore, kind: Kind, *, table: str, from_dsn: str | None, user: str | None, **options: Any
) -> None:
    from pgmemory.transfer import TableSource

    # The store's own database, by a connection of its own: the store has but one.
    dsn = from_dsn or click.get_current_context().params["dsn"]
    _import(store, TableSource(dsn, kind, table=table, user_id=user), **options)


def _import(store: ConversationStore, source: Source, *, as_json: bool, dry_run: bool, **options: Any) -> None:
    from pgmemory.transfer import import_conversations

    with progress_bar("checking" if dry_run else "importing") as progress:
        report = import_conversations(store, source, dry_run=dry_run, on_progress=progress, **options)
    if as_json:
        print_json(report.as_dict())
    else:
        for finding in report.findings:
            click.echo(one_line(f"{finding.kind}: {finding.place}: {finding.reason}"), err=True)
        would = "would import" if dry_run else "imported"
        click.echo(
            f"{would} {report.messages} messages of {report.conversations} conversations; "
            f"{report.already_there} were there, {report.deleted_here} were deleted here, "
            f"{report.left_out} left out by redaction, {report.skipped} skipped, {report.in_conflicts} in "
            f"{report.conflicts} conflicts; {report.disagreements} disagreements"
        )
    if not report.succeeded:
        raise click.exceptions.Exit(1)
