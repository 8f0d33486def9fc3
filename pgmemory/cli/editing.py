"""Commands that edit a log: delete, replace."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, TextIO

import click

from pgmemory.cli.app import json_option, main, print_json, user_option, with_store
from pgmemory.cli.finding import find_conversation
from pgmemory.errors import ConfigurationError
from pgmemory.store import ConversationStore

if TYPE_CHECKING:
    from langchain_core.messages import BaseMessage

    from pgmemory.history import PostgresChatMessageHistory


@main.command()
@click.argument("session")
@click.argument("numbers", metavar="[NUMBER]...", type=click.IntRange(min=0), nargs=-1)
@click.option("--turns", is_flag=True, help="Delete the whole turns in which these messages stand.")
@click.option("--last-turn", is_flag=True, help="Delete the newest turn.")
@user_option
@json_option
@with_store
def delete(
    store: ConversationStore,
    session: str,
    numbers: tuple[int, ...],
    turns: bool,
    last_turn: bool,
    user: str | None,
    as_json: bool,
) -> None:
    """Delete messages by their numbers, as `show` prints them, each with what stands and falls with it.

    A human message goes with its turn, a tool call with its results, a result with its call. A summary that covers
    what is deleted goes too, and what is left of it is summarised again.

    \b
    Examples:
      pgmemory delete ticket-42 7 --user u7
      pgmemory delete ticket-42 7 --turns
      pgmemory delete ticket-42 --last-turn
    """
    if bool(numbers) == last_turn or (last_turn and turns):
        raise click.UsageError("give the numbers of messages, or --last-turn")
    history = _history(store, session, user)
    if last_turn:
        deleted = history.delete_last_turn()
    else:
        deleted = history.delete_turns(numbers) if turns else history.delete_messages(numbers)
    if as_json:
        print_json({"session_id": history.session_id, "user_id": history.user_id, "deleted": deleted})
    elif deleted:
        click.echo(f"deleted {', '.join(map(str, deleted))}")
    if not deleted:
        raise click.ClickException("there was nothing to delete")


@main.command()
@click.argument("session")
@click.argument("number", type=click.IntRange(min=0))
@click.option("--text", metavar="TEXT", help="The message's new text; all else of it stays.")
@click.option(
    "--turn",
    "file",
    type=click.File(encoding="utf-8"),
    metavar="FILE",
    help="Replace the whole turn by the messages in a JSON file, in OpenAI's form; - for standard input.",
)
@user_option
@json_option
@with_store
def replace(
    store: ConversationStore,
    session: str,
    number: int,
    text: str | None,
    file: TextIO | None,
    user: str | None,
    as_json: bool,
) -> None:
    """Replace a message's text, or a whole turn, by the number that `show` prints.

    A summary that covers what is replaced is dropped, and what it covered is summarised again.

    \b
    Examples:
      pgmemory replace ticket-42 6 --text "My card number is [card]" --user u7
      pgmemory replace ticket-42 6 --turn turn.json
    """
    if (text is None) == (file is None):
        raise click.UsageError("give --text or --turn")
    history = _history(store, session, user)
    if text is not None:
        history.replace_message(number, text)
    elif file is not None:
        history.replace_turn(number, _read_turn(file))
    if as_json:
        print_json({"session_id": history.session_id, "user_id": history.user_id, "replaced": number})
    else:
        click.echo(f"replaced {'message' if text is not None else 'the turn of message'} {number}")


def _read_turn(file: TextIO) -> list[BaseMessage]:
    from pgmemory.transfer.messages import OddMessageError, from_openai

    try:
        forms = json.load(file)
        if not isinstance(forms, list):
            raise OddMessageError("it is no JSON list")
        return [from_openai(form) for form in forms]
    except (ValueError, RecursionError) as error:  # of JSON, of UTF-8, of a message
        raise ConfigurationError(f"{file.name} holds no list of messages in OpenAI's form: {error}") from error


def _history(store: ConversationStore, session: str, user: str | None) -> PostgresChatMessageHistory:
    from pgmemory.history import PostgresChatMessageHistory

    found = find_conversation(store, session, user)
    return PostgresChatMessageHistory(found.session_id, store, user_id=found.user_id)
