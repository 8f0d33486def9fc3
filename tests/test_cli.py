"""The `pgmemory` command as people run it: what it prints, how it ends, what it never shows."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from psycopg2 import sql
from psycopg2.extensions import connection as Connection
from psycopg2.extensions import make_dsn

from pgmemory import ConversationStore, __version__, cli, schema

PROJECT = Path(__file__).resolve().parents[1]
PASSWORD = "hunter2-Tr0ub4dor"
NEWEST = schema.migrations()[-1]
COMMANDS = sorted(cli.main.commands)


class Ended(NamedTuple):
    """How a command ended and what it printed."""

    code: int
    output: str
    errors: str


def run(*arguments: str, dsn: str | None = None, options: tuple[str, ...] = (), **environment: str) -> Ended:
    """Run the command as a process of its own; `dsn` is $DATABASE_URL."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("DATABASE_URL", "COLUMNS")}
    ended = subprocess.run(
        [sys.executable, "-W", "error", *options, "-m", "pgmemory.cli", *arguments],
        env={**inherited, "PYTHONPATH": str(PROJECT), **({} if dsn is None else {"DATABASE_URL": dsn}), **environment},
        capture_output=True,
        encoding="utf-8",
        timeout=60,
    )
    assert PASSWORD not in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr
    return Ended(ended.returncode, ended.stdout, ended.stderr)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Run the command in this process, which is much faster; else as `run` does."""

    def call(*arguments: str, dsn: str | None = None) -> Ended:
        monkeypatch.delenv("DATABASE_URL", raising=False)
        if dsn is not None:
            monkeypatch.setenv("DATABASE_URL", dsn)
        with pytest.raises(SystemExit) as ended:
            cli.main(list(arguments), prog_name="pgmemory")
        output, errors = capfd.readouterr()
        assert PASSWORD not in output + errors
        assert isinstance(ended.value.code, int)
        return Ended(ended.value.code, output, errors)

    return call


def failed(ended: Ended, *parts: str) -> None:
    """Assert that a command failed with one line on standard error that holds all the parts."""
    assert ended.code == 1
    assert ended.errors.startswith("Error: ")
    assert ended.errors.count("\n") == 1 and ended.errors.endswith("\n")
    for part in parts:
        assert part in ended.errors


def exists(admin: Connection, name: str) -> bool:
    with admin.cursor() as cursor:
        cursor.execute("select 1 from pg_namespace where nspname = %s", (name,))
        return cursor.fetchone() is not None


# --- What it does ----------------------------------------------------------------------------------------------------


def test_init_makes_the_schema_and_then_does_nothing(server_dsn: str, schema_name: str) -> None:
    applied = [f"applied {migration.version:04}_{migration.name}" for migration in schema.migrations()]
    ready = f"schema {schema_name!r} is up to date"
    first = run("init", "--dsn", server_dsn, "--schema", schema_name)
    assert first == Ended(0, "\n".join([*applied, ready, ""]), "")
    assert run("init", "--schema", schema_name, dsn=server_dsn) == Ended(0, f"{ready}\n", "")
    with ConversationStore(server_dsn, schema=schema_name) as store:
        assert store.schema_status().fits


def test_status_tells_what_was_applied_and_writes_nothing(server_dsn: str, schema_name: str, admin: Connection) -> None:
    before = run("status", "--schema", schema_name, dsn=server_dsn)
    failed(before, schema_name, "pgmemory init")
    assert not exists(admin, schema_name)
    rows = [line for line in before.output.splitlines() if NEWEST.name in line]
    assert len(rows) == 1 and "pending" in rows[0] and str(NEWEST.version) in rows[0]
    run("init", "--schema", schema_name, dsn=server_dsn)
    read_only = make_dsn(server_dsn, options="-c default_transaction_read_only=on")
    after = run("status", "--dsn", read_only, "--schema", schema_name)
    assert (after.code, after.errors) == (0, "")
    assert after.output.endswith(f"schema {schema_name!r} is up to date\n")
    rows = [line for line in after.output.splitlines() if NEWEST.name in line]
    assert len(rows) == 1 and "applied" in rows[0]
    assert "pending" not in after.output


def test_the_dsn_that_is_given_comes_before_the_environment(
    call: Callable[..., Ended], server_dsn: str, schema_name: str
) -> None:
    nowhere = f"postgresql://app:{PASSWORD}@127.0.0.1:1/db"
    assert call("init", "--dsn", server_dsn, "--schema", schema_name, dsn=nowhere).code == 0
    failed(call("status", "--dsn", nowhere, "--schema", schema_name, dsn=server_dsn), "127.0.0.1")


@pytest.mark.parametrize("name", ["pgmemory", 'we"ird %s {x} {schema} Näme'])
def test_schema_prints_the_rendered_schema_without_a_database(name: str) -> None:
    assert run("schema", "--schema", name) == Ended(0, schema.render(name), "")


def test_what_schema_prints_makes_a_schema_that_init_finds_up_to_date(
    server_dsn: str, schema_name: str, admin: Connection
) -> None:
    with admin.cursor() as cursor:
        cursor.execute(run("schema", "--schema", schema_name).output)
    ready = f"schema {schema_name!r} is up to date\n"
    assert run("init", "--schema", schema_name, dsn=server_dsn) == Ended(0, ready, "")


def test_the_version_is_printed() -> None:
    assert run("--version") == Ended(0, f"pgmemory, version {__version__}\n", "")


# --- Help ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_names_every_command(option: str) -> None:
    ended = run(option)
    assert (ended.code, ended.errors) == (0, "")
    for command in COMMANDS:
        assert f"\n  {command} " in ended.output


@pytest.mark.parametrize("command", COMMANDS)
def test_a_commands_help_shows_no_password_of_the_environment(call: Callable[..., Ended], command: str) -> None:
    ended = call(command, "--help", dsn=f"postgresql://app:{PASSWORD}@h/db")
    assert (ended.code, ended.errors) == (0, "")
    summary = ended.output.splitlines()[2]
    assert summary.startswith("  ") and summary.strip()


# --- How it fails ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["init", "--nonsense"],
        ["init", "--dsn"],
        ["status", "nonsense"],
        ["schema", "--schema"],
        ["init", f"postgresql://app:{PASSWORD}@h/db"],
        ["status", f"host=h password={PASSWORD}"],
        ["status", f"host=h password = '{PASSWORD} x'"],
        [f"host=h PASSWORD ='{PASSWORD}'"],
        ["status", f"app:{PASSWORD}@h/db"],
        ["init", "host=h", f"password {PASSWORD}"],
        ["schema", f"postgresql://app:{PASSWORD}@h/db"],
        [f"postgresql://app:{PASSWORD}@h/db"],
        ["init", f"--dns=postgresql://app:{PASSWORD}@h/db"],
        ["init", "--dns", f"postgresql://app:{PASSWORD}@h/db"],
        ["init", f"-dpostgresql://app:{PASSWORD}@h/db"],
        ["--dsn", f"postgresql://app:{PASSWORD}@h/db", "init"],
    ],
    ids=lambda arguments: " ".join(arguments).replace(PASSWORD, "…") or "nothing",
)
def test_wrong_usage_ends_with_two_and_shows_no_password(call: Callable[..., Ended], arguments: list[str]) -> None:
    ended = call(*arguments)
    assert (ended.code, ended.output) == (2, "")
    assert ended.errors.startswith(("Usage: ", "Error: "))
    assert ended.errors.count("Usage: ") <= 1


def test_wrong_usage_ends_a_process_with_two() -> None:
    ended = run("init", "--nonsense")
    assert (ended.code, ended.output) == (2, "")
    assert "--nonsense" in ended.errors


@pytest.mark.parametrize("command", ["init", "status"])
def test_without_a_dsn_the_error_names_the_variable(call: Callable[..., Ended], command: str) -> None:
    failed(call(command), "DATABASE_URL")
    failed(call(command, dsn=""), "DATABASE_URL")


@pytest.mark.parametrize("command", ["init", "status"])
@pytest.mark.parametrize(
    ("dsn", "part"),
    [
        (f"postgresql://app:{PASSWORD}@127.0.0.1:1/db", "could not connect to host=127.0.0.1 port=1"),
        (f"host=/nowhere password={PASSWORD} dbname=db", "could not connect to host=/nowhere"),
        (f"postgresql://app:{PASSWORD}@h/db?no_such_option=1", "cannot be read"),
        (PASSWORD, "cannot be read"),
    ],
    ids=["no server", "no socket", "an unknown option", "no DSN at all"],
)
@pytest.mark.parametrize("by_environment", [False, True], ids=["argument", "environment"])
def test_a_server_that_cannot_be_reached_is_told_in_one_line(
    call: Callable[..., Ended], command: str, dsn: str, part: str, by_environment: bool
) -> None:
    ended = call(command, dsn=dsn) if by_environment else call(command, "--dsn", dsn)
    failed(ended, part)
    assert ended.output == ""


@pytest.mark.parametrize("command", ["init", "status"])
def test_a_process_that_reaches_no_server_ends_with_one_and_one_line(command: str) -> None:
    failed(run(command, dsn=f"postgresql://app:{PASSWORD}@127.0.0.1:1/db"), "could not connect to host=127.0.0.1")


@pytest.mark.parametrize("command", ["init", "status", "schema"])
def test_a_name_that_no_schema_can_have_is_told_in_one_line(call: Callable[..., Ended], command: str) -> None:
    for name in ("", "x" * 64, f"postgresql://app:{PASSWORD}@h/db"):
        failed(call(command, "--schema", name, dsn="host=/nowhere"), "schema must not be")


def test_a_role_without_rights_is_told_in_one_line(
    call: Callable[..., Ended], server_dsn: str, schema_name: str, admin: Connection
) -> None:
    role = f"role_{uuid.uuid4().hex[:12]}"
    names = {"role": sql.Identifier(role), "schema": sql.Identifier(schema_name)}
    with admin.cursor() as cursor:
        cursor.execute(sql.SQL("create role {role} login password %s").format(**names), (PASSWORD,))
    try:
        dsn = make_dsn(server_dsn, user=role, password=PASSWORD)
        failed(call("init", "--schema", schema_name, dsn=dsn), "permission denied")
        assert not exists(admin, schema_name)
        assert call("init", "--schema", schema_name, dsn=server_dsn).code == 0
        for command in ("init", "status"):
            failed(call(command, "--schema", schema_name, dsn=dsn), "permission denied")
        with admin.cursor() as cursor:
            cursor.execute(sql.SQL("grant usage on schema {schema} to {role}").format(**names))
            cursor.execute(sql.SQL("grant select on {schema}.schema_migrations to {role}").format(**names))
        for command in ("init", "status"):
            assert call(command, "--schema", schema_name, dsn=dsn).code == 0
    finally:
        with admin.cursor() as cursor:
            cursor.execute(sql.SQL("drop owned by {role}").format(**names))
            cursor.execute(sql.SQL("drop role {role}").format(**names))


@pytest.mark.parametrize("command", ["init", "status"])
def test_a_schema_that_needs_a_newer_version_is_told_in_one_line(
    call: Callable[..., Ended], store: ConversationStore, server_dsn: str, admin: Connection, command: str
) -> None:
    newer = "insert into {schema}.schema_migrations (version, name, needs_version) values (1000, 'later', 1000)"
    with admin.cursor() as cursor:
        cursor.execute(sql.SQL(newer).format(schema=sql.Identifier(store.schema)))
    failed(call(command, "--schema", store.schema, dsn=server_dsn), "1000", "pip install --upgrade langchain-pgmemory")


def test_a_reader_that_closes_early_leaves_no_traceback(schema_name: str) -> None:
    program = [sys.executable, "-m", "pgmemory.cli", "schema", "--schema", schema_name]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()


def test_output_that_a_terminal_cannot_show_is_no_failure(server_dsn: str, schema_name: str) -> None:
    for command in (["init"], ["status"]):
        ended = run(*command, "--schema", schema_name, dsn=server_dsn, PYTHONIOENCODING="ascii", TERM="dumb")
        assert (ended.code, ended.errors) == (0, "")
        ended.output.encode("ascii")


# --- How it starts ---------------------------------------------------------------------------------------------------


def imported(ended: Ended) -> set[str]:
    """The top-level modules that a process imported, from what `-X importtime` prints."""
    lines = [line for line in ended.errors.splitlines() if line.startswith("import time:")]
    return {line.rsplit("|", 1)[1].strip().partition(".")[0] for line in lines}


def test_no_command_imports_langchain(server_dsn: str, schema_name: str) -> None:
    for arguments in (["--version"], ["init"], ["status"]):
        named = ["--schema", schema_name] if not arguments[0].startswith("-") else []
        ended = run(*arguments, *named, dsn=server_dsn, options=("-X", "importtime"))
        assert ended.code == 0
        modules = imported(ended)
        assert {"pgmemory", "click", "psycopg2"} <= modules
        assert not {module for module in modules if module.startswith(("langchain", "langsmith", "pydantic"))}


@pytest.mark.parametrize(
    "arguments",
    [
        ["status", "--schema", f"host=h password={PASSWORD}"],
        ["import", "n8n", "--table", f"postgresql://u:{PASSWORD}@h/x"],
        ["bind-role", f"postgresql://u:{PASSWORD}@h/x", "--tenant", "t"],
        ["ls", "--keys", f"postgresql://u:{PASSWORD}@h/x"],
        ["erase", "--user", f"postgresql://u:{PASSWORD}@h/x"],
        ["hold", "s", "--user", f"postgresql://u:{PASSWORD}@h/x"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_dsn_in_the_wrong_place_is_printed_without_its_password(
    call: Callable[..., Ended], server_dsn: str, schema_name: str, arguments: list[str]
) -> None:
    if "--schema" not in arguments:
        call("init", "--schema", schema_name, dsn=server_dsn)
        arguments = [*arguments, "--schema", schema_name]
    call(*arguments, dsn=server_dsn)  # looks for the password itself
