"""The guide to operations is true: its commands exist and are used rightly, every command is in it, its SQL runs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import click
import pytest
from conversations import dialogue
from psycopg2.extensions import connection as Connection
from test_retention import let_pass, say, sessions

from pgmemory import ConversationStore, PostgresChatMessageHistory, cli

PROJECT = Path(__file__).resolve().parents[1]
GUIDE = (PROJECT / "docs" / "operations.md").read_text()
COMMANDS = sorted(cli.main.commands)

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def fences(language: str) -> list[str]:
    """Return the guide's blocks of one language."""
    return [body for found, body in _FENCE.findall(GUIDE) if found == language]


def command_lines(text: str) -> Iterator[list[str]]:
    """Yield the words of each `pgmemory` command line in a text."""
    for line in text.splitlines():
        found = re.search(r"(?:^|\$ |\| |  )(pgmemory [^|#>]+)", line.strip("`"))
        if found and not line.startswith("Usage"):
            yield shlex.split(found.group(1))[1:]


def parse(words: list[str]) -> None:
    """Parse a command's words as the command would, without running it."""
    if words and words[0] in cli.main.commands:
        cli.main.commands[words[0]].make_context(words[0], words[1:]).close()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_an_example_and_a_place_in_the_guide(command: str) -> None:
    found = cli.main.commands[command]
    assert found.help and len(found.help.splitlines()[0]) > 20
    assert f"pgmemory {command}" in found.help, "an example"
    for option in found.params:
        if isinstance(option, click.Option):
            assert option.help, option.name
    assert re.search(rf"`pgmemory {command}\b|^\$ pgmemory {command}\b", GUIDE, re.MULTILINE), "a place in the guide"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_examples_in_a_commands_help_are_right_usage(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    examples = list(command_lines(cli.main.commands[command].help or ""))
    assert examples
    for words in examples:
        make_files(words)
        parse(words)


def test_the_command_lines_of_the_guide_are_right_usage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    inline = re.findall(r"`(pgmemory [^`]+)`", GUIDE)
    lines = [shlex.split(line)[1:] for line in inline if "…" not in line]
    for language in ("console", ""):
        for block in fences(language):
            lines += command_lines(block)
    assert len(lines) > 20
    for words in lines:
        if len(words) > 1:  # a command's bare name stands in prose
            make_files(words)
            parse(words)


def make_files(words: list[str]) -> None:
    """Make the files that a command line reads."""
    for word in words:
        if re.fullmatch(r"[\w-]+\.(jsonl?|txt|keys)", word):
            Path(word).write_text("[]")


def test_the_sql_of_the_guide_runs(store: ConversationStore, admin: Connection) -> None:
    say(store, "ticket-42", "u7")
    for block in fences("sql"):
        if "create role" in block:
            continue  # roles belong to the whole server; tests of roles make their own
        block = re.sub(r"select cron\.schedule\(.*?\$\$(.*?)\$\$\)", r"\1", block, flags=re.DOTALL)
        with admin.cursor() as cursor:
            cursor.execute(block.replace("pgmemory.", f"{store.schema}."))
    store.set_metadata("ticket-42", {"team": "billing"}, user_id="u7")
    PostgresChatMessageHistory("ticket-42", store, user_id="u7").add_messages(dialogue(1))
    with admin.cursor() as cursor:
        cursor.execute(f"select session_id from {store.schema}.conversations where team = 'billing'")
        assert cursor.fetchall() == [("ticket-42",)]
        cursor.execute(f"select count(*) from {store.schema}.conversation_messages where rating = 5")
        assert cursor.fetchall() == [(1,)]


def test_the_statement_for_pg_cron_deletes_what_prune_would(store: ConversationStore, admin: Connection) -> None:
    for session_id in ("old", "held", "short", "new"):
        say(store, session_id)
    store.hold("held")
    store.set_time_to_live("short", timedelta(days=1))
    let_pass(admin, store, 31, "old", "held")
    let_pass(admin, store, 2, "short")
    (block,) = [block for block in fences("sql") if "cron.schedule" in block]
    statement = block.split("$$")[1].replace("pgmemory.", f"{store.schema}.")
    with admin.cursor() as cursor:
        cursor.execute(statement)
    assert sessions(store) == ["held", "new"]
