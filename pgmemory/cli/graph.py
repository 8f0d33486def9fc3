"""Commands that copy conversations into LangGraph's threads and back: copy-to-langgraph, copy-from-langgraph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from pgmemory.cli.app import json_option, main, print_json, with_store
from pgmemory.cli.finding import find_conversation
from pgmemory.cli.progress import progress_bar
from pgmemory.errors import ConfigurationError
from pgmemory.store import ConversationStore

if TYPE_CHECKING:
    from langgraph.checkpoint.base import BaseCheckpointSaver

    from pgmemory.transfer.importing import Finding

_dry_run_option = click.option("--dry-run", is_flag=True, help="Write nothing: check all, and say what would happen.")


@main.command("copy-to-langgraph")
@click.option("--to-dsn", metavar="DSN", help="Where LangGraph keeps its threads; the store's own database by default.")
@click.option("--user", metavar="USER", help="Only this user's conversations.")
@click.option(
    "--session", metavar="SESSION", help="Only this conversation, of --user or of none, and its agents' logs."
)
@click.option(
    "--thread-id",
    type=click.Choice(["key", "session"]),
    default="key",
    show_default=True,
    help="Name threads by the conversation's key, a UUID, or by its session id, which several users may have.",
)
@_dry_run_option
@json_option
@with_store
def copy_to(
    store: ConversationStore,
    to_dsn: str | None,
    user: str | None,
    session: str | None,
    thread_id: str,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Copy conversations into LangGraph's PostgresSaver, as threads that its agents continue.

    LangGraph's tables are made where they are missing. Safe to run twice: what is there is not written again, and a
    thread that has gone on is left alone. Exit code 1 if one is another thread, or has gone on as its conversation has.

    \b
    Examples:
      pgmemory copy-to-langgraph --dry-run
      pgmemory copy-to-langgraph --to-dsn postgresql://app@new/agents --user u7
    """
    from pgmemory.transfer.graph_savers import has_tables
    from pgmemory.transfer.graph_threads import copy_to_langgraph

    if session is not None:
        user = find_conversation(store, session, user).user_id
    with _saver(to_dsn) as saver, progress_bar("copying") as progress:
        if not dry_run:
            saver.setup()
        report = copy_to_langgraph(
            store,
            saver if has_tables(saver) else _empty_saver(),
            user_id=user,
            session_id=session,
            thread_id=(lambda key: key.session_id) if thread_id == "session" else None,
            dry_run=dry_run,
            on_progress=progress,
        )
    if user and not report.conversations:
        raise click.ClickException(f"user {user!r} has no conversation: nothing was copied")
    would = "would write" if dry_run else "wrote"
    _end(
        report,
        as_json,
        f"{would} {report.threads} threads with {report.messages} messages, of {report.conversations} conversations; "
        f"{report.summarized} messages are summarized, {report.left_out} left out, {report.repaired} results made; "
        f"{report.already_there} threads were there, {report.continued} have gone on, {report.conflicts} conflicts",
    )


@main.command("copy-from-langgraph")
@click.option("--from-dsn", metavar="DSN", help="Where LangGraph keeps its threads; the store's own by default.")
@click.option("--thread", "threads", multiple=True, metavar="ID", help="Only this thread; may be given several times.")
@click.option("--user", metavar="USER", help="The user of threads whose metadata names none.")
@click.option("--strict", is_flag=True, help="Fail at the first thread or message that cannot be read.")
@_dry_run_option
@json_option
@with_store
def copy_from(
    store: ConversationStore,
    from_dsn: str | None,
    threads: tuple[str, ...],
    user: str | None,
    strict: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Copy what threads of LangGraph's PostgresSaver hold into conversations.

    A thread that was copied from here adds what was said since; every other one becomes a conversation of its name.
    Safe to run twice. Exit code 1 if a conversation is another one here, or has gone on here, and if LangGraph has no
    tables there.

    \b
    Examples:
      pgmemory copy-from-langgraph --dry-run
      pgmemory copy-from-langgraph --thread 7001 --thread 7002 --user u7
    """
    from pgmemory.transfer.graph_savers import has_tables
    from pgmemory.transfer.graph_threads import copy_from_langgraph

    with _saver(from_dsn) as saver, progress_bar("copying") as progress:
        if not has_tables(saver):
            found = saver.conn.info
            raise click.ClickException(
                f"there are no tables of LangGraph in the database {found.dbname!r} at {found.host}:{found.port}, in "
                "any schema of the search_path: say with --from-dsn where its threads are"
            )
        report = copy_from_langgraph(
            store,
            saver,
            thread_ids=threads or None,
            user_id=user,
            strict=strict,
            dry_run=dry_run,
            on_progress=progress,
        )
    would = "would copy" if dry_run else "copied"
    _end(
        report,
        as_json,
        f"{would} {report.messages} messages of {report.conversations} threads; {report.already_there} were there, "
        f"{report.deleted_here} were deleted here; {report.skipped} skipped, {report.conflicts} conflicts, "
        f"{report.disagreements} disagreements",
    )


def _end(report: Any, as_json: bool, told: str) -> None:
    """Print a report, and end with 1 where not everything could be done."""
    if as_json:
        print_json(report.as_dict())
    else:
        findings: list[Finding] = report.findings
        for finding in findings:
            click.echo(f"{finding.kind}: {finding.place}: {finding.reason}", err=True)
        click.echo(told)
    if not report.succeeded:
        raise click.exceptions.Exit(1)


@contextmanager
def _saver(dsn: str | None) -> Iterator[Any]:
    """Open LangGraph's PostgresSaver; its tables may be missing."""
    try:
        import psycopg
        from langgraph.checkpoint.postgres import PostgresSaver
        from psycopg.conninfo import make_conninfo
    except ImportError as error:
        raise ConfigurationError(
            f'LangGraph is needed here and cannot be imported ({error}): pip install "langchain-pgmemory[langgraph]"'
        ) from error
    from pgmemory.pool.dsn import read_dsn

    # Read by us first: psycopg's errors quote what they do not understand, which may be a password.
    given = dsn if dsn is not None else click.get_current_context().params["dsn"]
    where = make_conninfo(**read_dsn(given, "pgmemory"))
    try:
        with PostgresSaver.from_conn_string(where) as saver:
            yield saver
    except psycopg.Error as error:
        raise click.ClickException(f"LangGraph's database: {' '.join(str(error).split())}") from error


def _empty_saver() -> BaseCheckpointSaver[Any]:
    """Return what a dry run finds where LangGraph's tables are still to be made."""
    from langgraph.checkpoint.memory import InMemorySaver

    return InMemorySaver()
