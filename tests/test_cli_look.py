"""The commands that look: ls, show, tail, search, stats, items; as people and scripts run them."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import pytest
import test_cli
from conftest import PROJECT
from psycopg2.extensions import connection as Connection
from psycopg2.extensions import make_dsn
from test_cli import Ended, failed, imported, run
from test_inspection import do, let_pass, say
from waiting import wait_until

from pgmemory import ConversationStore
from pgmemory.cli.durations import Duration
from pgmemory.encryption import Keyring
from pgmemory.models import StoredMessage

call = test_cli.call
Call = Callable[..., Ended]
COMMANDS = {"ls": (), "show": ("s",), "tail": (), "search": ("q",), "stats": (), "items": ()}
ESCAPE = "\x1b"


@pytest.fixture
def pgmemory(call: Call, store: ConversationStore, server_dsn: str) -> Call:
    """Run a command in this process on the test's store."""
    return lambda *arguments: call(*arguments, "--schema", store.schema, dsn=server_dsn)


@pytest.fixture
def role(store: ConversationStore, admin: Connection) -> Iterator[str]:
    """A role that may log in, with the test's password, and use the schema but none of its tables."""
    name = f"role_{uuid.uuid4().hex[:12]}"
    do(admin, store, f"create role {name} login password %s", test_cli.PASSWORD)
    do(admin, store, f"grant usage on schema {{schema}} to {name}")
    yield name
    do(admin, store, f"drop owned by {name}; drop role {name}")


def objects(ended: Ended) -> list[Any]:
    """Return the JSON values that a command printed, one a line."""
    assert ended.code == 0
    return [json.loads(line) for line in ended.output.splitlines()]


# --- ls --------------------------------------------------------------------------------------------------------------


def test_ls_shows_a_table_that_fits_into_80_columns(store: ConversationStore, server_dsn: str) -> None:
    names = [str(uuid.uuid4()) for _ in range(3)]
    for number, name in enumerate(names):
        say(store, name, *["text"] * (number + 1), user_id=f"user-{number}")
    say(store, "[bold]long" * 20, "q", user_id="anna@example.org")
    store.hold(names[2], user_id="user-2")
    ended = run("ls", "--schema", store.schema, dsn=server_dsn)
    assert (ended.code, ended.errors) == (0, "")
    lines = ended.output.splitlines()
    assert lines[0].split() == ["user", "session", "messages", "size", "last", "turn", "(UTC)", "marks"]
    assert max(map(len, lines)) <= 80
    assert ESCAPE not in ended.output
    assert "[bold]long" in ended.output
    narrow = run("ls", "--user", "user-1", "--schema", store.schema, dsn=server_dsn)
    assert re.fullmatch(rf"user-1 +{names[1]} +2 +10 B +\d{{4}}-\d\d-\d\d \d\d:\d\d", narrow.output.splitlines()[1])


def test_ls_prints_records_as_json_lines(store: ConversationStore, server_dsn: str) -> None:
    say(store, "a", "q", user_id="ü")
    say(store, "b", "q", "a")
    store.set_time_to_live("b", timedelta(days=30))
    first, second = objects(run("ls", "--json", "--schema", store.schema, dsn=server_dsn))
    assert (first["session_id"], first["message_count"], first["time_to_live"]) == ("b", 2, 30 * 86400.0)
    assert (second["user_id"], second["held_at"], second["size_bytes"]) == ("ü", None, 2)
    assert second["updated_at"].endswith("+00:00")


def test_ls_chooses_sorts_and_says_when_there_is_more(
    pgmemory: Call, store: ConversationStore, admin: Connection
) -> None:
    say(store, "old", "q", "a", "q")
    say(store, "new", "q")
    say(store, "middle", "long" * 99, "a")
    store.hold("old")
    let_pass(admin, store, 40, "old")
    let_pass(admin, store, 1, "middle")

    def listed(*options: str) -> list[str]:
        return [record["session_id"] for record in objects(pgmemory("ls", "--json", *options))]

    assert listed() == ["new", "middle", "old"]
    assert listed("--older-than", "30d") == ["old"]
    assert listed("--newer-than", "12h") == ["new"]
    assert listed("--min-messages", "2") == ["middle", "old"]
    assert listed("--held") == ["old"]
    assert listed("--sort", "messages", "--limit", "1") == ["old"]
    assert listed("--sort", "size", "--limit", "1") == ["middle"]
    assert listed("--user", "nobody") == []
    assert pgmemory("ls", "--limit", "2").errors == "there are more: see --limit\n"
    assert pgmemory("ls", "--limit", "3").errors == ""
    assert pgmemory("ls", "--user", "nobody") == Ended(0, "", "no conversations\n")


def test_ls_shows_other_tenants_only_on_request(pgmemory: Call, store: ConversationStore, server_dsn: str) -> None:
    with ConversationStore(server_dsn, schema=store.schema, tenant_id="acme") as other:
        say(other, "theirs", "q")
    assert pgmemory("ls").output == ""
    assert "theirs" in pgmemory("ls", "--tenant", "acme").output
    assert pgmemory("ls", "--all-tenants").output.splitlines()[1].split()[:2] == ["acme", "theirs"]


# --- Finding a conversation by its session id alone ------------------------------------------------------------------


def test_a_session_id_is_enough_where_it_is_one_users_only(pgmemory: Call, store: ConversationStore) -> None:
    say(store, "s", "of u", user_id="u")
    assert "of u" in pgmemory("show", "s").output
    say(store, "s", "of nobody")
    say(store, "s", "of v", user_id="anna@example.org")
    ended = pgmemory("show", "s")
    assert (ended.code, ended.output) == (2, "")
    for part in ("'u'", "''", "'anna@example.org'", "--user"):
        assert part in ended.errors
    assert "of u" in pgmemory("show", "s", "--user", "u").output
    assert "of nobody" in pgmemory("show", "s", "--user", "").output


def test_a_conversation_that_is_not_there_is_told_without_its_name(pgmemory: Call, store: ConversationStore) -> None:
    say(store, "s", "q", user_id="u")
    failed(pgmemory("show", "unknown"), "no conversation of this name")
    failed(pgmemory("tail", "s", "--user", "v"), "no conversation of this name of this user")
    failed(pgmemory("show", "s", "--tenant", "acme"), "in the tenant 'acme'")
    failed(pgmemory("show", f"postgresql://app:{test_cli.PASSWORD}@h/db"), "no conversation of this name")


# --- show ------------------------------------------------------------------------------------------------------------


def with_calls_and_summary(store: ConversationStore) -> None:
    key = store.key("talk", "u")
    calls = '{"tool_calls": [{"name": "look_up", "args": {"order": 4711}, "id": "c1", "type": "tool_call"}]}'
    messages = [
        StoredMessage("human", f"Where is it? {ESCAPE}[31m"),
        StoredMessage("ai", "", extra=calls),
        StoredMessage("tool", "on its way", extra='{"tool_call_id": "c1"}'),
        StoredMessage("ai", "On its way.", additional_kwargs='{"half": "\\ud800"}', token_count=9),
    ]
    store.append(key, messages, write_id=uuid.uuid4())
    state = store.read_unsummarized(key, budget=99, encoding=None).state
    assert state is not None
    assert store.record_summary(key, content="They ask for order 4711.", covers_through=3, state=state)
    say(store, "talk", "Thanks", user_id="u")


def test_show_prints_a_transcript(store: ConversationStore, server_dsn: str) -> None:
    with_calls_and_summary(store)
    ended = run("show", "talk", "--schema", store.schema, dsn=server_dsn)
    assert (ended.code, ended.errors) == (0, "")
    assert ESCAPE not in ended.output
    parts = ["Where is it? <U+001B>[31m", "look_up", "4711", "on its way", "#3", "They ask for order 4711.", "#4 Human"]
    places = [ended.output.index(part) for part in parts]
    assert places == sorted(places)


def test_show_prints_records_as_json_lines(store: ConversationStore, server_dsn: str) -> None:
    with_calls_and_summary(store)
    conversation, summary, *messages = objects(run("show", "talk", "--json", "--schema", store.schema, dsn=server_dsn))
    assert conversation["conversation"]["message_count"] == 5
    assert summary["summary"]["covers_through"] == 3
    assert [each["message"]["message_index"] for each in messages] == [0, 1, 2, 3, 4]
    assert messages[1]["message"]["extra"]["tool_calls"][0]["args"] == {"order": 4711}
    assert messages[3]["message"]["additional_kwargs"] == {"half": "\ud800"}
    assert messages[0]["message"]["created_at"]


def test_show_prints_the_last_turns_alone(pgmemory: Call, store: ConversationStore) -> None:
    messages = [StoredMessage("system", "be kind"), *[StoredMessage("human", f"q{n}") for n in range(5)]]
    store.append(store.key("s"), messages, write_id=uuid.uuid4())

    def shown(turns: str) -> list[str]:
        return [each["message"]["content"] for each in objects(pgmemory("show", "s", "--json", "--last", turns))[1:]]

    assert shown("2") == ["q3", "q4"]
    assert shown("99") == ["be kind", "q0", "q1", "q2", "q3", "q4"]


def test_show_writes_a_page_that_is_whole_or_not_there(
    pgmemory: Call, store: ConversationStore, server_dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_calls_and_summary(store)
    page = tmp_path / "page.html"
    page.write_text("old")
    link = tmp_path / "link.html"
    link.symlink_to(page)
    assert pgmemory("show", "talk", "--html", str(link)) == Ended(0, "", "")
    assert link.is_symlink()
    text = page.read_text()
    assert text.startswith("<!DOCTYPE html>") and text.rstrip().endswith("</html>")
    assert run("show", "talk", "--html", "-", "--schema", store.schema, dsn=server_dsn).output == text
    assert sorted(tmp_path.iterdir()) == [link, page]

    def broken(*arguments: Any, **options: Any) -> Any:
        yield "<!DOCTYPE html>"
        raise click.ClickException("it broke off")

    monkeypatch.setattr("pgmemory.transcript.as_html", broken)
    failed(pgmemory("show", "talk", "--html", str(page)), "it broke off")
    assert page.read_text() == text
    assert sorted(tmp_path.iterdir()) == [link, page]
    monkeypatch.undo()
    failed(pgmemory("show", "talk", "--html", str(tmp_path / "missing" / "page.html")), "cannot write the file")


def test_a_long_conversation_is_shown_page_by_page(
    pgmemory: Call, store: ConversationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(store, "s", *(f"message {n}" for n in range(2500)))
    pages = []
    read_page = ConversationStore.read_page

    def counted(self: ConversationStore, key: Any, **options: Any) -> list[StoredMessage]:
        pages.append(read_page(self, key, **options))
        return pages[-1]

    monkeypatch.setattr(ConversationStore, "read_page", counted)
    assert len(objects(pgmemory("show", "s", "--json"))) == 2501
    assert [len(page) for page in pages] == [1000, 1000, 500, 0]


# --- tail ------------------------------------------------------------------------------------------------------------


def test_tail_prints_the_last_messages_a_line_each(pgmemory: Call, store: ConversationStore, server_dsn: str) -> None:
    with_calls_and_summary(store)
    say(store, "b", f"a\nb{ESCAPE}\tc" + "d" * 500)
    ended = run("tail", "-n", "5", "--schema", store.schema, dsn=server_dsn)
    assert (ended.code, ended.errors) == (0, "")
    lines = [re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", "", line) for line in ended.output.splitlines()]
    assert lines[:-1] == [
        "u/talk ai: [calls look_up]",
        "u/talk tool: on its way",
        "u/talk ai: On its way.",
        "u/talk human: Thanks",
    ]
    assert lines[-1].startswith("b human: a b<U+001B> c") and lines[-1].endswith("d…") and len(lines[-1]) < 200
    assert pgmemory("tail", "talk", "-n", "1").output.endswith(" human: Thanks\n")
    assert len(pgmemory("tail", "--user", "u").output.splitlines()) == 5
    assert pgmemory("tail", "-n", "0") == Ended(0, "", "")


def test_tail_prints_whole_messages_as_json_lines(pgmemory: Call, store: ConversationStore) -> None:
    with_calls_and_summary(store)
    call_, *_ = objects(pgmemory("tail", "--json", "-n", "4"))
    assert (call_["session_id"], call_["user_id"], call_["message_index"]) == ("talk", "u", 1)
    assert call_["extra"]["tool_calls"][0]["name"] == "look_up"


@contextmanager
def following(*arguments: str, dsn: str, errors: Path) -> Iterator[subprocess.Popen[str]]:
    """Run `tail -f` as a process; end it if the test has not."""
    program = [sys.executable, "-W", "error", "-m", "pgmemory.cli", "tail", "-f", "--interval", "0.05", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), "DATABASE_URL": dsn}
    with errors.open("w") as file:
        process = subprocess.Popen(program, env=environment, stdout=subprocess.PIPE, stderr=file, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip("\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_tail_follows_until_a_signal_ends_it_well(
    store: ConversationStore, server_dsn: str, tmp_path: Path, number: int
) -> None:
    say(store, "a", "old")
    errors = tmp_path / "errors"
    with following("--schema", store.schema, dsn=server_dsn, errors=errors) as process:
        assert line_of(process).endswith(" a human: old")
        say(store, "b", "new", user_id="u")
        assert line_of(process).endswith(" u/b human: new")
        say(store, "a", "newer", "newest")
        assert line_of(process).endswith(" a human: newer")
        assert line_of(process).endswith(" a ai: newest")
        process.send_signal(number)
        assert process.wait(60) == 0
        assert line_of(process) == ""
    assert errors.read_text() == ""


def test_tail_survives_an_outage_and_misses_nothing(
    store: ConversationStore, server_dsn: str, admin: Connection, role: str, tmp_path: Path
) -> None:
    say(store, "a", "old")
    errors = tmp_path / "errors"
    dsn = make_dsn(server_dsn, user=role, password=test_cli.PASSWORD)
    do(admin, store, f"grant select on all tables in schema {{schema}} to {role}")
    with following("a", "--schema", store.schema, dsn=dsn, errors=errors) as process:
        assert line_of(process).endswith(" human: old")
        do(admin, store, f"alter role {role} connection limit 0")
        do(admin, store, "select pg_terminate_backend(pid) from pg_stat_activity where usename = %s", role)
        wait_until(lambda: "trying again every 0.05 s" in errors.read_text(), "the loss is told")
        say(store, "a", "meanwhile")
        do(admin, store, f"alter role {role} connection limit -1")
        assert line_of(process).endswith(" human: meanwhile")
        process.terminate()
        assert process.wait(60) == 0
    *_, lost, again = errors.read_text().splitlines()  # before that the pool may say that an idle connection was lost
    assert lost.startswith(("lost the connection to", "could not connect to"))
    assert again == "connected again"


def test_a_reader_that_has_enough_ends_tail_quietly_and_well(
    store: ConversationStore, server_dsn: str, tmp_path: Path
) -> None:
    say(store, "a", "old")
    errors = tmp_path / "errors"
    with following("a", "--schema", store.schema, dsn=server_dsn, errors=errors) as process:
        assert line_of(process).endswith("old")
        assert process.stdout is not None
        process.stdout.close()
        say(store, "a", "nobody reads this")
        assert process.wait(60) == 0
    assert errors.read_text() == ""


# --- search ----------------------------------------------------------------------------------------------------------


def test_search_shows_where_a_text_stands(store: ConversationStore, server_dsn: str) -> None:
    say(store, "a", f"{'x' * 100}\nthe Refund{ESCAPE}", user_id="u")
    say(store, "b", "100% refund_ed", "no")
    ended = run("search", "REFUND", "--schema", store.schema, dsn=server_dsn)
    assert (ended.code, ended.errors) == (0, "")
    first, newest, second, older = ended.output.splitlines()
    assert re.fullmatch(r"b #0 human · \d{4}-\d\d-\d\d \d\d:\d\d UTC", first)
    assert newest == "    100% [refund]_ed"
    assert second.startswith("u a #0 human · ")
    assert older == f"    …{'x' * 55} the [Refund]<U+001B>"
    hit, *others = objects(run("search", "% refund_", "--json", "--schema", store.schema, dsn=server_dsn))
    assert (hit["session_id"], hit["excerpt"], hit["found_at"], others) == ("b", "100% refund_ed", 4 - 1, [])


def test_search_is_bounded_by_limit_user_and_tenant(pgmemory: Call, store: ConversationStore, server_dsn: str) -> None:
    for number in range(4):
        say(store, f"s{number}", "needle", user_id=f"u{number % 2}")
    with ConversationStore(server_dsn, schema=store.schema, tenant_id="acme") as other:
        say(other, "theirs", "needle")
    limited = pgmemory("search", "needle", "--limit", "3", "--json")
    assert [hit["session_id"] for hit in objects(limited)] == ["s3", "s2", "s1"]
    assert limited.errors == "there are more: see --limit\n"
    assert len(objects(pgmemory("search", "needle", "--user", "u1", "--json"))) == 2
    assert len(objects(pgmemory("search", "needle", "--all-tenants", "--json"))) == 5
    assert pgmemory("search", "other") == Ended(0, "", "nothing found\n")
    assert pgmemory("search", "other", "--json") == Ended(0, "", "")


# --- What is encrypted -----------------------------------------------------------------------------------------------


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    """A file with a master key."""
    file = tmp_path / "keys"
    file.write_text(Keyring.new_line("k1"))
    file.chmod(0o600)
    return file


def test_what_is_encrypted_is_read_with_the_keys_and_never_searched(
    pgmemory: Call, store: ConversationStore, server_dsn: str, key_file: Path
) -> None:
    say(store, "clear", "needle")
    with ConversationStore(server_dsn, schema=store.schema, keyring=Keyring.from_file(key_file)) as sealed:
        say(sealed, "sealed", "needle, too", user_id="u")
        assert [one.message.content for one in sealed.follow().newest(9)] == ["needle", "needle, too"]
        partly = pgmemory("search", "needle", "--json")
        assert [hit["session_id"] for hit in objects(partly)] == ["clear"]
        assert partly.errors == "not searched: 1 encrypted conversations\n"
        failed(pgmemory("search", "too", "--user", "u", "--keys", str(key_file)), "every conversation is encrypted")
        for command in ("show", "tail"):
            failed(pgmemory(command, "sealed"), "--keys")
            assert "needle, too" in pgmemory(command, "sealed", "--keys", str(key_file)).output
        assert "encrypted" in pgmemory("ls").output
        sealed.erase_key("sealed", user_id="u")
    assert pgmemory("tail", "sealed").output.endswith(" human: (its key was erased)\n")


# --- stats -----------------------------------------------------------------------------------------------------------


def test_stats_show_counts_growth_and_sizes(store: ConversationStore, server_dsn: str, admin: Connection) -> None:
    say(store, "a", "q", "a", "q", "a", user_id="u", tokens=1000)
    say(store, "b", "q" * 100)
    let_pass(admin, store, 1, "b")
    ended = run("stats", "--days", "3", "--biggest", "1", "--schema", store.schema, dsn=server_dsn)
    assert (ended.code, ended.errors) == (0, "")
    assert ESCAPE not in ended.output
    lines = ended.output.splitlines()
    assert max(map(len, lines)) <= 80
    for line in (r"conversations +2", r"messages +5", r"turns +3", r"tokens +4,000 \(1 messages not counted\)"):
        assert any(re.fullmatch(line, each) for each in lines), line
    growth = lines.index("growth by day")
    assert [line.count("█") for line in lines[growth + 2 : growth + 5]] == [0, 10, 40]
    biggest = lines.index("biggest conversations")
    assert lines[biggest + 2].split()[0] == "b"
    assert any(line.startswith("conversation_messages ") for line in lines)


def test_stats_print_one_json_value(store: ConversationStore, server_dsn: str) -> None:
    say(store, "a", "q", "a", user_id="u")
    (counted,) = objects(run("stats", "--json", "--days", "2", "--schema", store.schema, dsn=server_dsn))
    assert (counted["conversations"], counted["messages"], counted["uncounted_messages"]) == (1, 2, 2)
    assert [day["messages"] for day in counted["days"]] == [0, 2]
    assert counted["biggest"][0]["size_bytes"] == 4
    assert {"conversations", "conversation_messages"} <= {table["name"] for table in counted["tables"]}
    assert counted["schema_version"] == test_cli.NEWEST.version


def test_stats_of_an_empty_store_are_zeros(pgmemory: Call) -> None:
    ended = pgmemory("stats")
    assert (ended.code, ended.errors) == (0, "")
    assert "biggest" not in ended.output


# --- items -----------------------------------------------------------------------------------------------------------


def test_items_shows_whose_it_is_asked_for_and_lets_no_time_to_live_begin_anew(
    store: ConversationStore, pgmemory: Call, admin: Connection
) -> None:
    store.items("u").put(("facts", "food"), "a key", {"likes": f"Käse{ESCAPE}[31m", "n": [1, None]})
    store.items("u").put(("facts",), "pet", {"kind": "dog"}, time_to_live=timedelta(hours=1))
    store.items().put(("policy",), "refunds", {"days": 30})
    store.items("u", session_id="s").put(("entities",), "Ada", {"summary": "Ada waits."})
    say(store, "s", "q", user_id="u")
    time = r"\d{4}-\d\d-\d\d \d\d:\d\d UTC"
    ended = pgmemory("items", "--user", "u")
    assert (ended.code, ended.errors) == (0, "")
    pet, kind, food, likes = ended.output.splitlines()
    assert re.fullmatch(rf"facts pet · {time} · expires {time}", pet) and kind == '    {"kind": "dog"}'
    assert re.fullmatch(rf"facts\.food a key · {time}", food)
    assert likes.startswith('    {"likes": "Käse') and likes.endswith('"n": [1, null]}') and ESCAPE not in likes
    before, again = [objects(pgmemory("items", "--user", "u", "--json"))[0] for _ in range(2)]
    assert before == again and before["expires_at"] > before["updated_at"] and before["score"] is None
    assert pgmemory("items").output.endswith('    {"days": 30}\n')
    for user in ((), ("--user", "u")):
        (found,) = objects(pgmemory("items", "--session", "s", *user, "--json"))
        assert (found["namespace"], found["key"], found["value"]) == (["entities"], "Ada", {"summary": "Ada waits."})
    failed(pgmemory("items", "--session", "other"), "pgmemory ls")
    failed(pgmemory("items", "a.b"), "holds a period")


def test_items_keeps_to_a_prefix_to_words_and_to_a_limit(store: ConversationStore, pgmemory: Call) -> None:
    for label in ("food", "pets"):
        for n in range(2):
            store.items("u").put(("facts", label), str(n), {"text": f"about {label} {n}"})

    def keys(*arguments: str) -> list[tuple[str, str]]:
        found = objects(pgmemory("items", "--user", "u", "--json", *arguments))
        return [(item["namespace"][1], item["key"]) for item in found]

    assert keys("facts", "food") == [("food", "1"), ("food", "0")]
    assert keys("--search", "PETS?", "facts") == [("pets", "1"), ("pets", "0")]
    ended = pgmemory("items", "--user", "u", "--limit", "3")
    assert ended.output.count("about") == 3 and ended.errors == "there are more: see --limit\n"
    assert pgmemory("items", "--user", "u", "--limit", "4").errors == ""
    nothing = pgmemory("items", "--user", "u", "facts", "foo")
    assert (nothing.code, nothing.output, nothing.errors) == (0, "", "no items\n")


def test_items_are_shown_by_a_role_and_a_server_that_only_read(
    store: ConversationStore, call: Call, server_dsn: str, admin: Connection, role: str
) -> None:
    store.items("u").put(("facts",), "k", {}, time_to_live=timedelta(hours=1))
    do(admin, store, f"grant select on all tables in schema {{schema}} to {role}")
    dsn = make_dsn(server_dsn, user=role, password=test_cli.PASSWORD, options="-c default_transaction_read_only=on")
    (found,) = objects(call("items", "--user", "u", "--json", "--schema", store.schema, dsn=dsn))
    assert found["key"] == "k"


# --- What all of them have in common ---------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_missing_is_told_in_one_line(
    call: Call, store: ConversationStore, server_dsn: str, role: str, command: str
) -> None:
    arguments = (command, *COMMANDS[command])
    failed(call(*arguments, dsn=f"postgresql://app:{test_cli.PASSWORD}@127.0.0.1:1/db"), "could not connect")
    failed(call(*arguments, "--schema", "not there", dsn=server_dsn), "pgmemory init --schema")
    dsn = make_dsn(server_dsn, user=role, password=test_cli.PASSWORD)
    failed(call(*arguments, "--schema", store.schema, dsn=dsn), "permission denied")


@pytest.mark.parametrize(
    "arguments",
    [
        ["ls", "--older-than", "30"],
        ["ls", "--sort", "name"],
        ["ls", "--limit", "0"],
        ["ls", "extra"],
        ["show"],
        ["show", "s", "--html", "x", "--json"],
        ["show", "s", "--last", "0"],
        ["tail", "-n", "-1"],
        ["tail", "--interval", "0"],
        ["search"],
        ["search", ""],
        ["stats", "--days", "0"],
        ["items", "--limit", "0"],
        ["items", "--search", ""],
    ],
    ids=" ".join,
)
def test_wrong_usage_ends_with_two(call: Call, arguments: list[str]) -> None:
    ended = call(*arguments, dsn="host=/nowhere")
    assert (ended.code, ended.output) == (2, "")
    assert ended.errors.startswith("Usage: ")


def test_an_output_without_unicode_gets_escapes(store: ConversationStore, server_dsn: str) -> None:
    say(store, "s", "Grüße")
    for arguments in (["stats"], ["tail"], ["show", "s", "--json"]):
        ended = run(*arguments, "--schema", store.schema, dsn=server_dsn, PYTHONIOENCODING="ascii")
        assert (ended.code, ended.errors) == (0, ""), arguments
        ended.output.encode("ascii")
    assert json.loads(ended.output.splitlines()[1])["message"]["content"] == "Grüße"


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)], ids=["colour", "NO_COLOR"])
def test_a_terminal_gets_its_own_width_and_colour_unless_it_wants_none(
    store: ConversationStore, server_dsn: str, no_color: str, coloured: bool
) -> None:
    say(store, "s", "needle")
    master, slave = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), "TERM": "xterm-256color", "NO_COLOR": no_color}
    program = [sys.executable, "-m", "pgmemory.cli", "search", "needle", "--schema", store.schema, "--dsn", server_dsn]
    ended = subprocess.run(program, env=environment, stdout=slave, stderr=slave, timeout=60)
    os.close(slave)
    shown = os.read(master, 10_000).decode()
    os.close(master)
    assert ended.returncode == 0
    assert f"{ESCAPE}[7mneedle{ESCAPE}[0m" in shown  # reverse is no colour
    assert coloured or not re.search(rf"{ESCAPE}\[[34]\d", shown)


def test_what_prints_no_table_imports_neither_langchain_nor_rich(store: ConversationStore, server_dsn: str) -> None:
    say(store, "s", "q")
    for arguments in (["ls", "--json"], ["show", "s"], ["items", "--json"]):
        modules = imported(run(*arguments, "--schema", store.schema, dsn=server_dsn, options=("-X", "importtime")))
        assert {"pgmemory", "click"} <= modules
        heavy = ("langchain", "langsmith", "pydantic", "rich", "tiktoken", "cryptography", "sqlalchemy")
        assert not {module for module in modules if module.startswith(heavy)}, arguments


# --- Durations -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "duration"),
    [
        ("45s", timedelta(seconds=45)),
        ("90m", timedelta(minutes=90)),
        ("12h", timedelta(hours=12)),
        ("30d", timedelta(days=30)),
        ("2w", timedelta(weeks=2)),
        ("36500d", timedelta(days=36500)),
    ],
)
def test_a_duration_is_a_number_and_a_unit(text: str, duration: timedelta) -> None:
    assert Duration().convert(text, None, None) == duration
    assert Duration().convert(duration, None, None) == duration


@pytest.mark.parametrize(
    "text", ["", "30", "d", "0d", "-1d", "1.5h", "30 d", "30D", "1y", "٣d", "36501d", "9" * 12 + "w", "9" * 99 + "d"]
)
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        Duration().convert(text, None, None)
