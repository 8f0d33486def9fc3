"""The commands export and import, as people and scripts run them."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import test_cli
from conftest import PROJECT
from conversations import ai, human
from langchain_core.messages import RemoveMessage
from psycopg2.extensions import connection as Connection
from test_cli import Ended, failed, imported, run
from transfers import another_store, exported, say
from waiting import PATIENCE_SECONDS, wait_until

from pgmemory import ConversationStore, PostgresChatMessageHistory, cli
from pgmemory.encryption import Keyring

call = test_cli.call
SOURCES = ("jsonl", "openai", "langchain-postgres", "message-store", "n8n", "conversation-messages")


@pytest.fixture
def other(server_dsn: str, schema_name: str) -> Iterator[ConversationStore]:
    """Another store, empty."""
    with another_store(server_dsn, schema_name) as other:
        yield other


def start(*arguments: str, dsn: str, **streams: Any) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), "DATABASE_URL": dsn, "TERM": "xterm", "COLUMNS": "80"}
    program = [sys.executable, "-W", "error", "-m", "pgmemory.cli", *arguments]
    return subprocess.Popen(program, env=environment, **streams)


def test_processes_move_everything_through_a_pipe_exactly_and_quietly(
    server_dsn: str, store: ConversationStore, other: ConversationStore
) -> None:
    say(store, 4, "a", user_id="u")
    say(store, 2, "b")
    out = start("export", "-", "--schema", store.schema, dsn=server_dsn, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with out, start(
        "import", "jsonl", "-", "--schema", other.schema, "--json",
        dsn=server_dsn, stdin=out.stdout, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as into:  # fmt: skip
        printed, errors = into.communicate(timeout=PATIENCE_SECONDS)
        assert out.stderr is not None
        assert (into.returncode, errors, out.wait(PATIENCE_SECONDS), out.stderr.read()) == (0, b"", 0, b"")
    report = json.loads(printed)
    assert (report["conversations"], report["messages"], report["conflicts"], report["findings"]) == (2, 6, 0, [])
    assert exported(other) == exported(store)


def test_an_export_writes_a_file_that_an_import_takes(
    call: Callable[..., Ended], server_dsn: str, store: ConversationStore, other: ConversationStore, tmp_path: Path
) -> None:
    say(store, 4, "a", user_id="u")
    say(store, 2, "b", user_id="v")
    file = str(tmp_path / "all.jsonl")
    ended = call("export", file, "--schema", store.schema, dsn=server_dsn)
    assert ended == Ended(0, "exported 2 conversations, 6 messages\n", "")
    assert Path(file).read_bytes() == exported(store)
    ended = call("import", "jsonl", file, "--schema", other.schema, "--dry-run", dsn=server_dsn)
    assert (ended.code, ended.errors) == (0, "") and ended.output.startswith("would import 6 messages of 2 ")
    assert other.list_conversations() == []
    assert call("import", "jsonl", file, "--schema", other.schema, dsn=server_dsn).code == 0
    assert exported(other) == exported(store)
    again = call("import", "jsonl", file, "--schema", other.schema, "--json", dsn=server_dsn)
    assert json.loads(again.output) == {
        "dry_run": False, "conversations": 2, "messages": 0, "already_there": 6, "deleted_here": 0,
        "left_out": 0, "skipped": 0, "in_conflicts": 0, "conflicts": 0, "disagreements": 0, "findings": [],
    }  # fmt: skip
    one = str(tmp_path / "one.jsonl")
    options = ("--user", "u", "--session", "a", "--json")
    ended = call("export", one, "--schema", store.schema, *options, dsn=server_dsn)
    assert json.loads(ended.output) == {"conversations": 1, "messages": 4, "left_out": 0}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.jsonl", "one.jsonl"]


def test_openai_messages_go_out_and_come_in(
    call: Callable[..., Ended], server_dsn: str, store: ConversationStore, other: ConversationStore, tmp_path: Path
) -> None:
    say(store, 2)
    file = tmp_path / "talk.json"
    assert call("export", str(file), "--format", "openai", "--schema", store.schema, dsn=server_dsn).code == 0
    (line,) = file.read_text().splitlines()
    file.write_text(json.dumps(json.loads(line)["messages"], indent=1))
    options = ("--session", "t", "--user", "u", "--schema", other.schema)
    assert call("import", "openai", str(file), *options, dsn=server_dsn).code == 0
    assert PostgresChatMessageHistory("t", other, user_id="u").messages == [human("s 0"), ai("s 1")]


def test_a_table_of_the_same_or_of_another_database_comes_in(
    call: Callable[..., Ended], server_dsn: str, store: ConversationStore, admin: Connection
) -> None:
    with admin.cursor() as cursor:
        cursor.execute(f"create table {store.schema}.old (id serial, session_id text, message jsonb)")
        row = f"insert into {store.schema}.old (session_id, message) values (%s, %s)"
        cursor.execute(row, ("s", '{"type": "human", "content": "Hi"}'))
        cursor.execute(row, ("s", "[]"))
    arguments = ("import", "n8n", "--table", f"{store.schema}.old", "--user", "u", "--schema", store.schema)
    ended = call(*arguments, dsn=server_dsn)
    assert ended.code == 0
    assert ended.output.startswith("imported 1 messages of 1 conversations; 0 were there")
    assert ended.errors == "skipped: id 2 of session 's': no JSON object with a type\n"
    assert PostgresChatMessageHistory("s", store, user_id="u").messages == [human("Hi")]
    failed(call(*arguments, "--strict", dsn=server_dsn), "id 2 of session 's'")
    assert json.loads(call(*arguments, "--from-dsn", server_dsn, "--json", dsn=server_dsn).output)["already_there"] == 1
    nowhere = f"postgresql://app:{test_cli.PASSWORD}@127.0.0.1:1/db"
    failed(call(*arguments, "--from-dsn", nowhere, dsn=server_dsn), "could not connect to host=127.0.0.1")


def test_a_conflict_ends_with_one_and_says_which(
    call: Callable[..., Ended], server_dsn: str, store: ConversationStore, other: ConversationStore, tmp_path: Path
) -> None:
    say(store, 2)
    PostgresChatMessageHistory("s", other).add_messages([human("another one")])
    file = tmp_path / "all.jsonl"
    file.write_bytes(exported(store))
    ended = call("import", "jsonl", str(file), "--schema", other.schema, dsn=server_dsn)
    assert (ended.code, ended.errors) == (1, "conflict: line 2: message 0 is another one here\n")
    ended = call("import", "jsonl", str(file), "--schema", other.schema, "--json", dsn=server_dsn)
    assert (ended.code, ended.errors, json.loads(ended.output)["conflicts"]) == (1, "", 1)


def test_tenants_are_the_store_s_or_kept(
    call: Callable[..., Ended], server_dsn: str, store: ConversationStore, other: ConversationStore, tmp_path: Path
) -> None:
    with ConversationStore(server_dsn, schema=store.schema, tenant_id="red") as red:
        say(red, 2)
    file = str(tmp_path / "all.jsonl")
    assert call("export", file, "--all-tenants", "--schema", store.schema, dsn=server_dsn).code == 0
    for tenant, options in (("", ()), ("red", ("--keep-tenants",)), ("blue", ("--tenant", "blue"))):
        assert call("import", "jsonl", file, *options, "--schema", other.schema, dsn=server_dsn).code == 0
        with ConversationStore(server_dsn, schema=other.schema, tenant_id=tenant or None) as there:
            assert len(there.list_messages("s")) == 2
    ended = call("import", "jsonl", file, "--keep-tenants", "--tenant", "red", "--schema", other.schema, dsn=server_dsn)
    assert (ended.code, ended.output) == (2, "")


def test_a_process_that_is_killed_in_the_middle_is_followed_by_one_that_finishes(
    server_dsn: str, store: ConversationStore, other: ConversationStore, tmp_path: Path
) -> None:
    say(store, 2, "a")
    say(store, 2500, "b")
    say(store, 2, "c")
    file = exported(store)
    cut = [line for line in file.splitlines(keepends=True)][:2000]
    arguments = ("import", "jsonl", "-", "--schema", other.schema)
    with start(*arguments, dsn=server_dsn, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stderr is not None
        process.stdin.write(b"".join(cut))
        process.stdin.flush()
        wait_until(lambda: len(other.list_messages("b")) == 1000, "the first batch is stored")
        process.send_signal(signal.SIGKILL)
        assert process.wait(PATIENCE_SECONDS) == -signal.SIGKILL
    assert len(other.list_messages("b")) == 1000
    path = tmp_path / "all.jsonl"
    path.write_bytes(file)
    ended = run("import", "jsonl", str(path), "--schema", other.schema, "--json", dsn=server_dsn)
    report = json.loads(ended.output)
    assert (ended.code, report["messages"] + report["already_there"]) == (0, 2504)
    assert report["already_there"] >= 1000
    assert exported(other) == file


# --- A terminal ------------------------------------------------------------------------------------------------------


def until_the_end(terminal: int, process: subprocess.Popen[bytes]) -> str:
    """Return all that a process writes to a terminal."""
    seen = b""
    while True:
        readable, _, _ = select.select([terminal], [], [], PATIENCE_SECONDS)
        assert readable, f"nothing more came: {seen!r}"
        try:
            read = os.read(terminal, 65536)
        except OSError:  # Linux says so at the end
            read = b""
        if not read:
            process.wait(PATIENCE_SECONDS)
            return seen.decode()
        seen += read


@pytest.mark.parametrize("command", ["export", "import"])
def test_a_bar_is_shown_on_a_terminal(
    server_dsn: str, store: ConversationStore, other: ConversationStore, tmp_path: Path, command: str
) -> None:
    say(store, 20)
    file = tmp_path / "all.jsonl"
    arguments = ["export", str(file), "--schema", store.schema]
    if command == "import":
        file.write_bytes(exported(store))
        arguments = ["import", "jsonl", str(file), "--schema", other.schema]
    ours, theirs = pty.openpty()
    try:
        with start(*arguments, dsn=server_dsn, stderr=theirs, stdout=subprocess.PIPE) as process:
            os.close(theirs)
            shown = until_the_end(ours, process)
            assert process.returncode == 0
    finally:
        os.close(ours)
    assert f"{command}ing" in shown and "━" in shown


# --- How it fails ----------------------------------------------------------------------------------------------------


def commands(file: str) -> list[list[str]]:
    imports = [["import", name, *([file] if name in ("jsonl", "openai") else [])] for name in SOURCES]
    imports[2] += ["--table", "old"]
    return [["export", "-"], *imports]


def test_every_source_has_help_with_examples_that_can_be_run(call: Callable[..., Ended]) -> None:
    group = cli.main.commands["import"]
    assert sorted(group.commands) == sorted(SOURCES)  # type: ignore[attr-defined]
    for name in SOURCES:
        ended = call("import", name, "--help")
        assert (ended.code, ended.errors) == (0, "")
        assert f"pgmemory import {name}" in ended.output.replace("gunzip <u7.jsonl.gz | ", "")


@pytest.mark.parametrize(
    "arguments",
    [
        ["export"],
        ["export", "-", "--format", "xml"],
        ["import"],
        ["import", "redis"],
        ["import", "jsonl"],
        ["import", "jsonl", "/nowhere/at/all"],
        ["import", "langchain-postgres"],
        ["import", "n8n", "--nonsense"],
        ["import", "jsonl", f"postgresql://app:{test_cli.PASSWORD}@h/db"],
    ],
    ids=" ".join,
)
def test_wrong_usage_ends_with_two(call: Callable[..., Ended], server_dsn: str, arguments: list[str]) -> None:
    ended = call(*arguments, dsn=server_dsn)
    assert ended.code == 2


def test_no_server_no_schema_and_no_rights_are_told_in_one_line(
    call: Callable[..., Ended], server_dsn: str, schema_name: str, store: ConversationStore, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_bytes(b'{"messages": [{"role": "user", "content": "Hi"}]}')
    for arguments in commands(str(file)):
        if arguments[1] == "openai":
            arguments += ["--session", "s"]
        if arguments[1] != "jsonl":
            failed(call(*arguments, dsn="postgresql://app@127.0.0.1:1/db"), "could not connect to host=127.0.0.1")
        if arguments[0] == "export" or arguments[1] == "openai":
            failed(call(*arguments, "--schema", f"{schema_name}_none", dsn=server_dsn), "pgmemory init")
    file.write_bytes(b"no header")
    failed(call("import", "jsonl", str(file), "--schema", f"{schema_name}_none", dsn=server_dsn), "pgmemory init")
    failed(call("import", "jsonl", str(file), "--schema", store.schema, dsn=server_dsn), "line 1")
    failed(call("export", "/nowhere/at/all", "--schema", store.schema, dsn=server_dsn), "cannot write the file")


def test_an_export_that_fails_leaves_no_file(
    call: Callable[..., Ended], server_dsn: str, schema_name: str, tmp_path: Path
) -> None:
    file = tmp_path / "all.jsonl"
    file.write_text("before")
    assert call("export", str(file), "--schema", f"{schema_name}_none", dsn=server_dsn).code == 1
    assert [path.name for path in tmp_path.iterdir()] == ["all.jsonl"]
    assert file.read_text() == "before"


def test_an_export_finds_the_one_user_s_conversation_or_fails_and_leaves_no_file(
    call: Callable[..., Ended], server_dsn: str, store: ConversationStore, tmp_path: Path
) -> None:
    say(store, 2, "a", user_id="u")
    say(store, 4, "both", user_id="u")
    say(store, 4, "both", user_id="v")
    file = tmp_path / "a.jsonl"

    def export(*options: str, to: str = str(file)) -> Ended:
        return call("export", to, "--schema", store.schema, *options, dsn=server_dsn)

    assert export("--session", "a") == Ended(0, "exported 1 conversations, 2 messages\n", "")
    file.unlink()
    for options in (
        ("--session", "b"),
        ("--session", "a", "--user", "v"),
        ("--session", "a", "--user", ""),
        ("--user", "w"),
        ("--session", "b", "--all-tenants"),
    ):
        failed(export(*options), "there is no")
    ended = export("--session", "both")
    assert ended.code == 2 and "several users have a conversation of this name: 'v', 'u'" in ended.errors
    assert list(tmp_path.iterdir()) == []


def test_an_export_is_for_its_owner_alone_and_goes_through_no_link_that_others_laid(
    call: Callable[..., Ended], server_dsn: str, store: ConversationStore, tmp_path: Path
) -> None:
    say(store, 2)
    target, link, victim = tmp_path / "folder" / "all.jsonl", tmp_path / "link", tmp_path / "victim"
    target.parent.mkdir()
    victim.write_text("precious")
    link.symlink_to(target)
    (target.parent / "all.jsonl.part").symlink_to(victim)
    assert call("export", str(link), "--schema", store.schema, dsn=server_dsn).code == 0
    assert link.is_symlink() and target.read_bytes() == exported(store)
    assert target.stat().st_mode & 0o777 == 0o600
    assert victim.read_text() == "precious"
    assert sorted(path.name for path in target.parent.iterdir()) == ["all.jsonl", "all.jsonl.part"]


def test_an_export_that_nobody_reads_to_the_end_ends_well_and_a_full_disk_in_one_line(
    call: Callable[..., Ended], server_dsn: str, store: ConversationStore
) -> None:
    say(store, 4000)
    arguments = ("export", "-", "--schema", store.schema)
    with start(*arguments, dsn=server_dsn, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as export:
        assert export.stdout is not None and export.stderr is not None
        export.stdout.readline()
        export.stdout.close()
        assert (export.wait(PATIENCE_SECONDS), export.stderr.read()) == (0, b"")
    with (
        open("/dev/full", "wb") as full,
        start(*arguments, dsn=server_dsn, stdout=full, stderr=subprocess.PIPE) as export,
    ):
        _, errors = export.communicate(timeout=PATIENCE_SECONDS)
    failed(Ended(export.returncode, "", errors.decode()), "No space left on device")
    failed(call("export", "/dev/full", "--schema", store.schema, dsn=server_dsn), "No space left on device")


def test_an_export_to_standard_output_says_on_standard_error_what_it_left_out(
    call: Callable[..., Ended], server_dsn: str, store: ConversationStore
) -> None:
    PostgresChatMessageHistory("s", store).add_messages([human("Hi"), RemoveMessage(id="x")])
    arguments = ("export", "-", "--format", "openai", "--schema", store.schema)
    ended = call(*arguments, dsn=server_dsn)
    assert (ended.code, ended.errors) == (0, "exported 1 conversations, 1 messages, 1 left out\n")
    ended = call(*arguments, "--json", dsn=server_dsn)
    assert json.loads(ended.errors) == {"conversations": 1, "messages": 1, "left_out": 1}
    assert len(json.loads(ended.output)["messages"]) == 1


def test_a_missing_schema_is_told_also_where_nothing_would_be_written(
    call: Callable[..., Ended], server_dsn: str, schema_name: str, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_bytes(b'[{"role": "user"}]')
    for options in ([], ["--dry-run"]):
        arguments = ("import", "openai", str(file), "--session", "s", "--schema", f"{schema_name}_none", *options)
        failed(call(*arguments, dsn=server_dsn), "pgmemory init")


def test_erasing_a_key_finds_the_one_user_s_conversation(
    call: Callable[..., Ended], server_dsn: str, store: ConversationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ConversationStore(server_dsn, schema=store.schema, keyring=Keyring({"a": bytes(32)})) as sealed:
        say(sealed, 2, user_id="u")
    arguments = ("--schema", store.schema, "--json")
    ended = call("erase-key", "s", *arguments, dsn=server_dsn)
    assert (ended.code, json.loads(ended.output)["user_id"]) == (0, "u")
    failed(call("erase-key", "s", *arguments, dsn=server_dsn), "has no key")
    failed(call("erase-key", "t", *arguments, dsn=server_dsn), "there is no conversation of this name")


def test_an_example_never_overwrites_a_file_of_keys(call: Callable[..., Ended]) -> None:
    assert "new-key 2026-01 >> " in call("new-key", "--help").output


def test_no_text_of_the_database_reaches_a_terminal_as_it_is(
    call: Callable[..., Ended], server_dsn: str, store: ConversationStore, admin: Connection
) -> None:
    say(store, 2)
    with admin.cursor() as cursor:
        cursor.execute(f"update {store.schema}.conversation_messages set role = %s", ("\x1b]0;owned\x07",))
    for arguments in (("tail",), ("search", "s 0")):
        ended = call(*arguments, "--schema", store.schema, dsn=server_dsn)
        assert ended.code == 0
        assert "\x1b" not in ended.output and "<U+001B>]0;owned<U+0007>" in ended.output


def test_the_exact_format_moves_without_langchain(
    server_dsn: str, store: ConversationStore, other: ConversationStore, tmp_path: Path
) -> None:
    say(store, 2)
    file = str(tmp_path / "all.jsonl")
    for arguments in (["export", file, "--schema", store.schema], ["import", "jsonl", file, "--schema", other.schema]):
        ended = run(*arguments, dsn=server_dsn, options=("-X", "importtime"))
        assert ended.code == 0
        assert not {name for name in imported(ended) if name.startswith(("langchain", "pydantic"))}


# --- Much ------------------------------------------------------------------------------------------------------------


# Not by wait4(), whose figure begins with what the test's own process takes.
WITH_PEAK = """
import sys
from pgmemory.cli import main
try:
    main()
finally:
    with open("/proc/self/status") as status:
        print(next(line for line in status if line.startswith("VmHWM:")), file=sys.stderr)
"""


def peak_kilobytes(*arguments: str, dsn: str) -> int:
    """Run the command as a process and return how much memory it took at most."""
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), "DATABASE_URL": dsn}
    program = [sys.executable, "-c", WITH_PEAK, *arguments]
    ended = subprocess.run(program, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 0, ended.stderr
    return int(ended.stderr.split()[-2])


@pytest.mark.skipif(
    not os.path.exists("/proc/self/status"), reason="the system does not tell how much memory was taken"
)
@pytest.mark.large
@pytest.mark.parametrize("sessions", [1, 2000], ids=["one conversation", "many conversations"])
def test_a_hundred_thousand_messages_take_no_more_memory_than_ten_thousand(
    server_dsn: str,
    store: ConversationStore,
    other: ConversationStore,
    admin: Connection,
    tmp_path: Path,
    sessions: int,
) -> None:
    peaks: dict[str, list[int]] = {}
    for session in range(sessions):
        say(store, 1, str(session))
    for count in (10_000, 100_000):
        with admin.cursor() as cursor:
            cursor.execute(f"""
                insert into {store.schema}.conversation_messages
                    (conversation_id, message_index, tenant_id, role, content, extra, created_at)
                select c.id, n, '', case when n % 2 = 0 then 'human' else 'ai' end, repeat('words ' || n, 30),
                       '{{"id": "x"}}', now()
                from {store.schema}.conversations c,
                     generate_series((select max(message_index) + 1 from {store.schema}.conversation_messages m),
                                     {count // sessions} - 1) n;
                update {store.schema}.conversations set next_message_index = {count // sessions};
                truncate {other.schema}.conversations cascade;
            """)
        file = str(tmp_path / "all.jsonl")
        with admin.cursor() as cursor:
            cursor.execute(f"""
                drop table if exists {store.schema}.old;
                create table {store.schema}.old (id serial, session_id text, message jsonb);
                insert into {store.schema}.old (session_id, message)
                select session_id, jsonb_build_object('type', role, 'content', content)
                from {store.schema}.conversation_log order by message_index, session_id;
            """)
        steps = {
            "export": ["export", file, "--schema", store.schema],
            "import": ["import", "jsonl", file, "--schema", other.schema],
            "import of a table": [
                *("import", "n8n", "--table", f"{store.schema}.old", "--user", "u", "--schema", other.schema)
            ],
            "export as OpenAI's": ["export", os.devnull, "--format", "openai", "--schema", store.schema],
        }
        for name, arguments in steps.items():
            peaks.setdefault(name, []).append(peak_kilobytes(*arguments, dsn=server_dsn))
        with admin.cursor() as cursor:
            cursor.execute(f"select count(*) from {other.schema}.conversation_messages")
            assert cursor.fetchone() == (2 * count,)
    with open(file, "rb") as first:
        assert first.read() == exported(other, user_id="")
    assert all(large < small + 8 * 1024 for small, large in peaks.values()), peaks
