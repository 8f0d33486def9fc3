"""The command that says what a model would see of a conversation: explain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from pgmemory.cli.app import json_option, main, print_json, user_option, with_store
from pgmemory.cli.finding import find_conversation
from pgmemory.cli.printing import print_rich
from pgmemory.keywords import KeywordRule
from pgmemory.models import ConversationRecord
from pgmemory.store import ConversationStore

if TYPE_CHECKING:
    from pgmemory.memory.base import PostgresChatMemory
    from pgmemory.memory.explanation import Explanation

# Which options each kind of memory has.
_OPTIONS = {
    "buffer": {"k"},
    "token": {"max_token_limit", "token_counter"},
    "relevant": {"keywords", "whole_words", "k", "max_token_limit", "token_counter"},
    "summary": {"max_token_limit", "token_counter"},
}
_NAMES = {"token_counter": "--encoding", "keywords": "--keyword"}


@main.command()
@click.argument("session")
@click.option("--memory", "kind", required=True, type=click.Choice(list(_OPTIONS)), help="The application's memory.")
@click.option("--k", type=click.IntRange(min=0), help="Its k: at most so many turns (buffer, relevant).")
@click.option("--max-token-limit", type=click.IntRange(min=0), help="Its max_token_limit (token, relevant, summary).")
@click.option("--keyword", "keywords", multiple=True, help="One of its keywords; may be repeated (relevant).")
@click.option("--whole-words", is_flag=True, default=None, help="Find keywords as whole words only (relevant).")
@click.option(
    "--encoding", "token_counter", metavar="NAME", help="Its encoding or OpenAI model (token, relevant, summary)."
)
@user_option
@json_option
@with_store
def explain(store: ConversationStore, session: str, kind: str, user: str | None, as_json: bool, **options: Any) -> None:
    """Show what a model would be given of a conversation next: each message, kept or dropped, why, and its tokens.

    Give the settings of the application's memory. Nothing is written, and no model is asked. An application with a
    memory or a token counter of its own calls `memory.explain(inputs)` instead.

    \b
    Examples:
      pgmemory explain ticket-42 --memory token --max-token-limit 2000
      pgmemory explain ticket-42 --memory relevant --keyword refund --keyword invoice --k 5
    """
    given = {name: value for name, value in options.items() if value not in (None, ())}
    _check(kind, given)
    explanation = _memory(store, kind, given, find_conversation(store, session, user)).explain()
    if as_json:
        print_json(explanation.as_dict())
    else:
        _print(explanation)


def _check(kind: str, given: dict[str, Any]) -> None:
    for name in sorted(given.keys() - _OPTIONS[kind]):
        raise click.UsageError(f"{_NAMES.get(name, '--' + name.replace('_', '-'))} does not belong to --memory {kind}")
    if kind == "relevant" and "keywords" not in given:
        raise click.UsageError("--memory relevant needs a --keyword")
    try:
        KeywordRule(given.get("keywords", ()))
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if "token_counter" in given:
        from pgmemory.token_encodings import encoding_name

        if encoding_name(given["token_counter"]) is None:
            raise click.UsageError("--encoding must be an encoding or an OpenAI model that tiktoken knows")


def _memory(
    store: ConversationStore, kind: str, given: dict[str, Any], found: ConversationRecord
) -> PostgresChatMemory:
    try:
        from langchain_core.language_models import FakeListChatModel

        from pgmemory.memory.buffer import BufferMemory
        from pgmemory.memory.relevant_turn import RelevantTurnMemory
        from pgmemory.memory.summary import SummaryMemory
        from pgmemory.memory.token_window import TokenWindowMemory
    except ImportError as error:
        raise click.ClickException(" ".join(str(error).split())) from error
    of: dict[str, Any] = {"session_id": found.session_id, "user_id": found.user_id, "store": store}
    if kind == "buffer":
        return BufferMemory(**of, **given)
    if kind == "token":
        return TokenWindowMemory(**of, **given)
    if kind == "relevant":
        return RelevantTurnMemory(**of, **given)
    # Explaining asks the model nothing, and this one would have no answer.
    return SummaryMemory(**of, **given, llm=FakeListChatModel(responses=[]))


def _print(explanation: Explanation) -> None:
    from rich.table import Table
    from rich.text import Text

    from pgmemory.memory.explanation import shortened

    table = Table(expand=True)
    table.add_column("#", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("role", no_wrap=True)
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("text", ratio=1, no_wrap=True)
    table.add_column("why", ratio=1)
    for message in explanation.messages:
        cells = [
            "" if message.message_index is None else str(message.message_index),
            "+" if message.kept else "-",
            message.role,
            str(message.tokens),
            shortened(message.text),
            shortened(message.reason, 200),
        ]
        # Not as markup: people may write [bold] themselves.
        table.add_row(*map(Text, cells), style="" if message.kept else "dim")
    print_rich(table, Text(shortened(explanation.totals(), 1000)))
