"""The commands that keep, forget and edit: what they print, how they end, and the pruning service."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from conversations import ai, calling, dialogue, human, result
from psycopg2.extensions import connection as Connection
from psycopg2.extensions import make_dsn
from test_cli import PASSWORD, PROJECT, Ended, call, failed, run  # noqa: F401  # a fixture
from test_cli_look import role  # noqa: F401  # a fixture
from test_retention import ask, let_pass, say, sessions
from waiting import wait_until

from pgmemory import ConversationStore, PostgresChatMessageHistory

Call = Callable[..., Ended]


@pytest.fixture
def pgmemory(call: Call, store: ConversationStore, server_dsn: str) -> Call:  # noqa: F811
    """Run a command on the test's store."""
    return lambda *arguments: call(*arguments, "--schema", store.schema, dsn=server_dsn)


def test_prune_counts_then_deletes_what_is_idle(
    pgmemory: Call, store: ConversationStore, admin: Connection, server_dsn: str
) -> None:
    for session_id in ("old", "held", "new"):
        say(store, session_id)
    store.hold("held")
    let_pass(admin, store, 31, "old", "held")
    dry = pgmemory("prune", "--older-than", "30d", "--dry-run")
    assert dry.code == 0
    assert "would prune conversations: 1, messages: 4, held and kept: 1" in dry.output
    assert len(sessions(store)) == 3
    ended = run("prune", "--older-than", "30d", "--json", "--schema", store.schema, dsn=server_dsn)
    assert (ended.code, ended.errors) == (0, "")
    pruned = json.loads(ended.output)
    assert pruned.pop("time")
    assert pruned == {"dry_run": False, "conversations": 1, "messages": 4, "summaries": 0, "held": 1, "items": 0}
    assert sessions(store) == ["held", "new"]


def test_ttl_sets_what_prune_goes_by(pgmemory: Call, store: ConversationStore, admin: Connection) -> None:
    say(store, "s", "u")
    assert pgmemory("ttl", "s", "7d", "--user", "u") == Ended(0, "s: 7 days, 0:00:00 after its last turn\n", "")
    let_pass(admin, store, 8)
    assert "would prune conversations: 1," in pgmemory("prune", "--dry-run").output
    assert pgmemory("ttl", "s", "none").output == "s: no time to live of its own\n"
    assert "would prune conversations: 0," in pgmemory("prune", "--dry-run").output
    failed(pgmemory("ttl", "unknown", "7d"), "no conversation of this name")
    assert pgmemory("ttl", "s", "soon").code == 2


def test_hold_keeps_and_release_lets_go(pgmemory: Call, store: ConversationStore) -> None:
    say(store, "s", "u")
    assert pgmemory("hold", "s", "--reason", "case 117") == Ended(0, "held s\n", "")
    failed(pgmemory("delete", "s", "--last-turn"), "'s'", "held", "case 117")
    failed(pgmemory("replace", "s", "0", "--text", "x"), "held")
    ended = pgmemory("erase", "--user", "u")
    failed(ended, "kept, because they are held: 's'")
    assert len(store.list_messages("s", user_id="u")) == 4
    assert pgmemory("release", "s") == Ended(0, "released s\n", "")
    assert pgmemory("release", "s") == Ended(0, "it was not held\n", "")
    assert pgmemory("hold", "s", "--json").output == '{"user_id": "u", "session_ids": ["s"]}\n'


def test_erase_prints_a_receipt(pgmemory: Call, store: ConversationStore, server_dsn: str) -> None:
    for session_id, user_id in (("a", "u"), ("b", "u"), ("a", "v")):
        say(store, session_id, user_id)
    ended = run("erase", "--session", "b", "--user", "u", "--json", "--schema", store.schema, dsn=server_dsn)
    receipt = json.loads(ended.output)
    assert receipt.pop("erased_at")
    assert receipt == {
        "tenant_id": "",
        "user_id": "u",
        "session_id": "b",
        "complete": True,
        "conversations": [{"session_id": "b", "messages": 4, "summaries": 0, "items": 0}],
        "held": [],
        "items": 0,
    }
    several = pgmemory("erase", "--session", "a")
    assert several.code == 2 and "'v', 'u'" in several.errors
    store.items("u").put(("facts",), "k", {})
    store.items("u", session_id="a").put(("facts",), "k", {})
    ended = pgmemory("erase", "--user", "u")
    assert ended.code == 0
    assert ended.output.splitlines()[1:] == ["  a: 4 messages, 0 summaries", "conversations: 1, messages: 4, items: 2"]
    failed(pgmemory("erase", "--user", "u"), "nothing to erase")
    store.items("u", session_id="without a conversation").put(("facts",), "k", {})
    ended = pgmemory("erase", "--session", "without a conversation", "--user", "u")
    assert (ended.code, ended.output.splitlines()[1:]) == (0, ["conversations: 0, messages: 0, items: 1"])
    assert [found.user_id for found in store.list_conversations()] == ["v"]
    assert pgmemory("erase").code == pgmemory("erase", "--user", "").code == 2


def test_erase_asks_on_a_terminal(store: ConversationStore, server_dsn: str) -> None:
    say(store, "s", "u")
    for answer, left in (("n", 1), ("y", 0)):
        ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "pgmemory.cli", "erase", "--user", "u", "--schema", store.schema]
        process = subprocess.Popen(
            command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=PROJECT,
            env={**os.environ, "DATABASE_URL": server_dsn},
        )  # fmt: skip
        os.write(ours, f"{answer}\n".encode())
        _, errors = process.communicate(timeout=60)
        os.close(ours), os.close(theirs)
        assert b"Erase all conversations of the user 'u'?" in errors
        assert process.returncode == left
        assert len(sessions(store)) == left


def test_delete_and_replace_go_by_the_numbers_of_messages(
    pgmemory: Call, store: ConversationStore, tmp_path: Path
) -> None:
    history = PostgresChatMessageHistory("s", store, user_id="u")
    history.add_messages([*dialogue(1), human("look"), calling("c"), result("c"), ai("there"), *dialogue(2, first=3)])
    assert pgmemory("delete", "s", "4", "--json") == Ended(
        0, '{"session_id": "s", "user_id": "u", "deleted": [3, 4]}\n', ""
    )
    assert pgmemory("delete", "s", "0", "--turns").output == "deleted 0, 1\n"
    assert pgmemory("delete", "s", "--last-turn").output == "deleted 8, 9\n"
    failed(pgmemory("delete", "s", "99"), "nothing to delete")
    assert pgmemory("replace", "s", "2", "--text", "look again") == Ended(0, "replaced message 2\n", "")
    turn = tmp_path / "turn.json"
    turn.write_text(json.dumps([{"role": "user", "content": "new"}, {"role": "assistant", "content": "newer"}]))
    assert pgmemory("replace", "s", "7", "--turn", str(turn)).output == "replaced the turn of message 7\n"
    assert [message.content for message in history.messages] == ["look again", "there", "new", "newer"]
    for broken in ("{", '{"role": "user"}', "[1]", '[{"role": "assistant", "content": "x"}]'):
        turn.write_text(broken)
        failed(pgmemory("replace", "s", "7", "--turn", str(turn)))
    failed(pgmemory("replace", "s", "99", "--text", "x"), "no message 99")
    for wrong in (["delete", "s"], ["delete", "s", "1", "--last-turn"], ["delete", "s", "x"], ["delete", "s", "-1"]):
        assert pgmemory(*wrong).code == 2
    for wrong in (["replace", "s", "1"], ["replace", "s", "1", "--text", "x", "--turn", str(turn)]):
        assert pgmemory(*wrong).code == 2


@contextmanager
def pruning(store: ConversationStore, dsn: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Run the pruning service."""
    command = [sys.executable, "-W", "error", "-m", "pgmemory.cli", "prune", "--schema", store.schema, *options]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=PROJECT,
        env={**os.environ, "DATABASE_URL": dsn},
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=60)


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_the_pruning_service_goes_on_until_it_is_told_to_stop(
    store: ConversationStore, admin: Connection, server_dsn: str, stop: signal.Signals
) -> None:
    with pruning(store, server_dsn, "--every", "1s", "--older-than", "30d", "--json") as process:
        assert process.stdout is not None
        for number in range(2):
            say(store, str(number))
            let_pass(admin, store, 31)
            wait_until(lambda: sessions(store) == [], "the next round prunes it")
        process.send_signal(stop)
        output, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")
    rounds = [json.loads(line) for line in output.splitlines()]
    assert sum(each["conversations"] for each in rounds) == 2


def test_the_pruning_service_outlives_a_server_that_is_away(store: ConversationStore, closed_port: int) -> None:
    away = f"postgresql://app:hunter2@127.0.0.1:{closed_port}/db"
    with pruning(store, away, "--every", "1s") as process:
        assert process.stderr is not None
        lines = [process.stderr.readline() for _ in range(2)]
        assert process.poll() is None
        process.terminate()
        assert process.wait(timeout=30) == 0
    assert all("not pruned: " in line and str(closed_port) in line and "hunter2" not in line for line in lines)


def test_a_service_that_is_told_to_stop_ends_between_two_batches(
    store: ConversationStore, admin: Connection, server_dsn: str
) -> None:
    ask(
        admin,
        """insert into {schema}.conversations (id, tenant_id, user_id, session_id, updated_at)
           select gen_random_uuid(), '', '', 'idle-' || n, now() - interval '1 year'
           from generate_series(1, 9000) n""",
        store.schema,
    )
    with pruning(store, server_dsn, "--every", "1h", "--older-than", "30d", "--json") as process:
        count = "select count(*) from {schema}.conversations"
        wait_until(lambda: ask(admin, count, store.schema)[0][0] < 9_000, "it has begun")
        process.terminate()
        output, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")
    left = ask(admin, count, store.schema)[0][0]
    assert left > 0
    assert json.loads(output)["conversations"] == 9_000 - left


COMMANDS = [
    ["prune"],
    ["ttl", "s", "1d"],
    ["hold", "s"],
    ["release", "s"],
    ["erase", "--user", "u"],
    ["delete", "s", "--last-turn"],
    ["replace", "s", "0", "--text", "x"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_what_stands_in_the_way_is_said_in_one_line(
    call: Call, server_dsn: str, schema_name: str, closed_port: int, command: list[str]  # noqa: F811
) -> None:
    failed(call(*command, "--schema", schema_name, dsn=server_dsn), schema_name, "pgmemory init")
    failed(call(*command, dsn=f"postgresql://app:hunter2-Tr0ub4dor@127.0.0.1:{closed_port}/db"), str(closed_port))


# The same for those that handle keys, roles and explanations.
OTHERS = [
    ["erase-key", "s"],
    ["bind-role", "nobody", "--tenant", "t"],
    ["unbind-role", "nobody"],
    ["explain", "s", "--memory", "buffer"],
]


@pytest.mark.parametrize("command", [*COMMANDS, *OTHERS], ids=lambda command: command[0])
def test_a_role_without_rights_is_told_in_one_line(
    call: Call, store: ConversationStore, server_dsn: str, role: str, command: list[str]  # noqa: F811
) -> None:
    say(store, "s")
    dsn = make_dsn(server_dsn, user=role, password=PASSWORD)
    failed(call(*command, "--schema", store.schema, dsn=dsn))
    assert len(store.list_messages("s")) == 4


@pytest.mark.parametrize(
    ("command", "printed"),
    [
        (["ttl", "s", "7d"], {"user_id": "u", "time_to_live": 604800.0, "session_ids": ["s"]}),
        (["hold", "s"], {"user_id": "u", "session_ids": ["s"]}),
        (["release", "s"], {"user_id": "u", "session_ids": []}),
        (["delete", "s", "2"], {"session_id": "s", "user_id": "u", "deleted": [2, 3]}),
        (["replace", "s", "0", "--text", "x"], {"session_id": "s", "user_id": "u", "replaced": 0}),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_as_a_process_a_command_prints_json(
    store: ConversationStore, server_dsn: str, command: list[str], printed: dict[str, Any]
) -> None:
    say(store, "s", "u")
    ended = run(*command, "--json", "--schema", store.schema, dsn=server_dsn)
    assert (ended.code, ended.errors) == (0, "")
    assert json.loads(ended.output) == printed


def test_spans_are_timedeltas(pgmemory: Call, store: ConversationStore) -> None:
    say(store, "s")
    pgmemory("ttl", "s", "90m")
    found: Any = store.get_conversation("s")
    assert found.time_to_live == timedelta(minutes=90)


def test_a_conversation_of_which_only_agents_logs_are_left_is_found_by_its_name(
    pgmemory: Call, store: ConversationStore
) -> None:
    say(store, "gone#agent:planner", "u")
    assert pgmemory("hold", "gone").output == "held gone#agent:planner\n"
    assert pgmemory("release", "gone").code == 0
    assert pgmemory("erase", "--session", "gone").code == 0
    assert sessions(store) == []


def test_an_output_that_cannot_be_written_is_one_line(store: ConversationStore, server_dsn: str) -> None:
    say(store, "s")
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "pgmemory.cli", "hold", "s", "--schema", store.schema],
            env={**os.environ, "DATABASE_URL": server_dsn}, cwd=PROJECT, stdout=full, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert ended.returncode == 1
    assert "cannot write the output" in ended.stderr and "Traceback" not in ended.stderr
