"""Export and import: exact, resumable, safe to run twice, and never against what has happened here meanwhile."""

from __future__ import annotations

import io
import json
import threading
import uuid
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from conversations import ai, human
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langchain_core.messages import HumanMessage
from psycopg2.extensions import connection as Connection
from test_serialization import golden_messages
from test_serialization import messages as any_messages
from transfers import another_store, exported, imported, said, say
from waiting import wait_until

from pgmemory import ConfigurationError, ConversationStore, PostgresChatMessageHistory, StoredMessage
from pgmemory.encryption import Keyring
from pgmemory.errors import EncryptionError
from pgmemory.serialization import to_stored
from pgmemory.store import transfer as store_transfer
from pgmemory.transfer import (
    JsonLines,
    export_conversations,
    import_conversations,
    importing,
)

GOLDEN = [message for message, _ in golden_messages()]


@pytest.fixture
def other(server_dsn: str, schema_name: str) -> Iterator[ConversationStore]:
    """Another store, empty, without a tenant."""
    with another_store(server_dsn, schema_name) as other:
        yield other


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Export in pages of four messages at most, and import in batches of three."""
    monkeypatch.setattr(store_transfer, "_ROW_WEIGHT", store_transfer._PAGE_WEIGHT // 4)
    monkeypatch.setattr(store_transfer, "_IDS", 2)
    monkeypatch.setattr(importing, "_BATCH_MESSAGES", 3)


def summarise(
    store: ConversationStore, covers_through: int, content: str = "They talk.", session_id: str = "s"
) -> None:
    key = store.key(session_id)
    state = store.read_unsummarized(key, budget=1, encoding=None).state
    assert state is not None
    assert store.record_summary(key, content=content, covers_through=covers_through, state=state)


def fill(store: ConversationStore) -> None:
    """Make conversations of every kind."""
    PostgresChatMessageHistory("kinds", store, user_id="u").add_messages(GOLDEN)
    # Tags, a rule and token counts.
    row = StoredMessage("human", "q", token_count=7, token_encoding="o200k_base")
    store.append(store.key("tags"), [row], write_id=uuid.uuid4(), tags=["a,b", 'c"\\', "é"], judged_by="rule")
    store.append(store.key("tags"), [row], write_id=uuid.uuid4(), tags=[], judged_by="rule")
    store.set_metadata("tags", {"label": "é", "n": 1.10})
    say(store, 8, "summaries")
    summarise(store, 1, session_id="summaries")
    summarise(store, 3, "They talk on.", session_id="summaries")
    say(store, 4, "cleared").clear()
    say(store, 2, "cleared")
    say(store, 2, "empty").clear()
    say(store, 9, "shortened", max_messages=4)
    say(store, 6, "holes").delete_turns([2])
    store.set_metadata("only metadata", {"a": None})
    say(store, 2, "held")
    store.hold("held", reason="a case – §1")
    store.set_time_to_live("held", timedelta(days=40, seconds=1.5))
    say(store, 2, 'ticket 1/"ü"\n%s {x}')


# --- Exactly ---------------------------------------------------------------------------------------------------------


def test_a_second_export_after_an_import_is_the_same_byte_for_byte(
    store: ConversationStore, other: ConversationStore
) -> None:
    fill(store)
    first = exported(store)
    report = imported(other, first)
    assert (report.succeeded, report.skipped, report.already_there, report.deleted_here) == (True, 0, 0, 0)
    assert report.conversations == len(store.list_conversations()) == 10
    assert exported(other) == first
    assert other.list_conversations() == store.list_conversations()
    assert said(other, "kinds", "u") == [loaded for _, loaded in golden_messages()]
    summary = other.read_summary_window(other.key("summaries"), budget=1000, encoding=None)
    assert summary == store.read_summary_window(store.key("summaries"), budget=1000, encoding=None)


def test_pages_and_batches_change_nothing(
    store: ConversationStore, other: ConversationStore, small_batches: None
) -> None:
    fill(store)
    first = exported(store)
    assert first.count(b'{"message"') == sum(found.message_count for found in store.list_conversations())
    imported(other, first)
    assert exported(other) == first


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(any_messages, min_size=1, max_size=4))
def test_whatever_was_stored_comes_back_byte_for_byte(
    store: ConversationStore, other: ConversationStore, messages: list[Any]
) -> None:
    session_id = uuid.uuid4().hex
    rows = [to_stored(message) for message in messages]
    store.append(store.key(session_id), rows, write_id=uuid.uuid4())
    first = exported(store, session_id=session_id)
    assert imported(other, first).messages == len(rows)
    assert exported(other, session_id=session_id) == first
    assert other.list_messages(session_id) == store.list_messages(session_id)


def test_stored_json_of_another_writer_is_kept_to_the_letter(
    store: ConversationStore, other: ConversationStore, admin: Connection
) -> None:
    say(store, 1)
    text = '{ "b": 1.0,\t"a": 1e400, "a": "\\u0000\\ud83d" }'
    with admin.cursor() as cursor:
        cursor.execute(f"update {store.schema}.conversation_messages set extra = %s", (text,))
    imported(other, exported(store))
    assert [message.extra for message in other.list_messages("s")] == [text]


def test_idempotency_keys_go_on_working(store: ConversationStore, other: ConversationStore) -> None:
    PostgresChatMessageHistory("s", store).add_messages([human("Hi")], idempotency_key="request 1")
    imported(other, exported(store))
    PostgresChatMessageHistory("s", other).add_messages([human("Hi")], idempotency_key="request 1")
    assert said(other) == [human("Hi")]


def test_an_export_is_of_a_user_a_conversation_with_its_agents_or_all(store: ConversationStore) -> None:
    for session_id, user_id in [("a", "u"), ("b", "u"), ("a", "v"), ("a", None)]:
        say(store, 2, session_id, user_id=user_id)
    PostgresChatMessageHistory("a", store, user_id="u").for_agent("x").add_messages([human("aside")])

    def names(**options: Any) -> list[tuple[str, str]]:
        lines = [json.loads(line) for line in exported(store, **options).splitlines()]
        found = [line["conversation"] for line in lines if "conversation" in line]
        return sorted((state["user_id"], state["session_id"]) for state in found)

    assert names() == [("", "a"), ("u", "a"), ("u", "a#agent:x"), ("u", "b"), ("v", "a")]
    assert names(user_id="u") == [("u", "a"), ("u", "a#agent:x"), ("u", "b")]
    assert names(user_id="") == names(session_id="a") == [("", "a")]
    assert names(user_id="u", session_id="a") == [("u", "a"), ("u", "a#agent:x")]
    assert names(user_id="nobody") == []


def test_tenants_stay_apart_unless_all_are_asked_for(
    server_dsn: str, store: ConversationStore, other: ConversationStore
) -> None:
    with (
        ConversationStore(server_dsn, schema=store.schema, tenant_id="red") as red,
        ConversationStore(server_dsn, schema=store.schema, tenant_id="blue") as blue,
        ConversationStore(server_dsn, schema=other.schema, tenant_id="green") as green,
    ):
        say(red, 2)
        say(blue, 4)
        assert b"blue" not in exported(red) and exported(red).count(b'{"message"') == 2
        assert exported(store).count(b'{"message"') == 0
        everything = exported(store, all_tenants=True)
        assert imported(green, exported(red)).messages == 2
        assert [found.tenant_id for found in green.list_conversations()] == ["green"]
        with pytest.raises(ConfigurationError, match="green"):
            imported(green, everything, keep_tenants=True)
        green.clear(green.key("s"))
        assert imported(other, everything, keep_tenants=True).messages == 6
        with ConversationStore(server_dsn, schema=other.schema, tenant_id="blue") as there:
            assert exported(there) == exported(blue)


def test_an_export_says_how_far_it_is(store: ConversationStore, small_batches: None) -> None:
    say(store, 9, "a")
    say(store, 3, "b")
    told: list[tuple[int, int | None]] = []
    file = io.BytesIO()
    report = export_conversations(store, file, on_progress=lambda done, total: told.append((done, total)))
    assert (report.conversations, report.messages) == (2, 12)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1] == (12, 12) and len(told) == 4


# --- Again, and after it broke off -----------------------------------------------------------------------------------


def test_an_import_is_safe_to_run_twice_and_brings_only_what_is_new(
    store: ConversationStore, other: ConversationStore
) -> None:
    fill(store)
    imported(other, exported(store))
    before = exported(other)
    again = imported(other, exported(store))
    assert (again.succeeded, again.messages, again.already_there) == (True, 0, before.count(b'{"message"'))
    assert exported(other) == before
    say(store, 2, "summaries")
    third = imported(other, exported(store))
    assert (third.succeeded, third.messages) == (True, 2)
    assert exported(other) == exported(store)


class Broken(Exception):
    """Where a test breaks an import off."""


def until(file: bytes, messages: int) -> Iterator[bytes]:
    """Yield the lines of a file and break off before its message of this number."""
    count = 0
    for line in file.splitlines(keepends=True):
        if count == messages and line.startswith(b'{"message"'):
            raise Broken
        count += line.startswith(b'{"message"')
        yield line


class Lines(io.BytesIO):
    """A file of lines that a generator makes."""

    def __init__(self, lines: Iterator[bytes]) -> None:
        super().__init__()
        self._given = lines

    def __iter__(self) -> Iterator[bytes]:  # type: ignore[override]
        return self._given


def test_an_import_that_broke_off_anywhere_is_finished_by_another(
    store: ConversationStore, other: ConversationStore, small_batches: None
) -> None:
    fill(store)
    file = exported(store)
    for done_messages in range(0, file.count(b'{"message"'), 4):
        with pytest.raises(Broken):
            import_conversations(other, JsonLines(Lines(until(file, done_messages))))
    assert imported(other, file).succeeded
    assert exported(other) == file


def test_a_conversation_that_fits_into_a_batch_is_there_whole_or_not_at_all(
    store: ConversationStore, other: ConversationStore
) -> None:
    say(store, 6)
    with pytest.raises(Broken):
        import_conversations(other, JsonLines(Lines(until(exported(store), 5))))
    assert other.list_conversations() == []


def test_half_a_conversation_has_no_summary_of_what_is_still_to_come(
    store: ConversationStore, other: ConversationStore, small_batches: None
) -> None:
    say(store, 8)
    summarise(store, 5)
    file = exported(store)
    with pytest.raises(Broken):
        import_conversations(other, JsonLines(Lines(until(file, 4))))
    (half,) = other.list_conversations()
    assert (half.next_message_index, half.summarized_through) == (3, -1)
    assert half.created_at == store.list_conversations()[0].created_at
    window = other.read_summary_window(other.key("s"), budget=1000, encoding=None)
    assert window.summary is None and len(window.messages) == 3
    imported(other, file)
    assert exported(other) == file


def test_a_lost_connection_is_survived(
    server_dsn: str, store: ConversationStore, other: ConversationStore, admin: Connection, small_batches: None
) -> None:
    say(store, 12)
    file = exported(store)
    name = f"import-{uuid.uuid4().hex[:8]}"
    killed = 0

    def kill(done: int, total: int | None) -> None:
        nonlocal killed
        with admin.cursor() as cursor:
            cursor.execute(
                "select pg_terminate_backend(pid, 5000) from pg_stat_activity where application_name = %s", (name,)
            )
            killed += cursor.rowcount

    with ConversationStore(server_dsn, schema=other.schema, application_name=name, max_connections=1) as there:
        report = import_conversations(there, JsonLines(io.BytesIO(file)), on_progress=kill)
    assert killed == 4
    assert (report.succeeded, report.messages) == (True, 12)
    assert exported(other) == file


# --- What has happened here ------------------------------------------------------------------------------------------


def test_a_conversation_that_is_another_one_here_is_left_alone(
    store: ConversationStore, other: ConversationStore
) -> None:
    say(store, 4)
    say(store, 2, "fine")
    PostgresChatMessageHistory("s", other).add_messages([human("s 0"), ai("another answer")])
    before = exported(other, session_id="s")
    report = imported(other, exported(store))
    assert (report.succeeded, report.conflicts, report.messages) == (False, 1, 2)
    (finding,) = report.findings
    assert (finding.kind, finding.reason) == ("conflict", "message 1 is another one here")
    assert "answer" not in repr(report)
    assert exported(other, session_id="s") == before
    assert len(said(other, "fine")) == 2


def test_a_message_differs_also_by_what_is_not_its_text(store: ConversationStore, other: ConversationStore) -> None:
    PostgresChatMessageHistory("s", store).add_messages([HumanMessage("Hi", name="Ann")])
    PostgresChatMessageHistory("s", other).add_messages([HumanMessage("Hi", name="Bob")])
    assert imported(other, exported(store)).conflicts == 1


def test_what_was_cleared_or_deleted_here_does_not_come_back(
    store: ConversationStore, other: ConversationStore
) -> None:
    for session_id in ("cleared", "turn", "all"):
        say(store, 6, session_id)
    file = exported(store)
    imported(other, file)
    PostgresChatMessageHistory("cleared", other).clear()
    PostgresChatMessageHistory("turn", other).delete_turns([2])
    before = exported(other)
    report = imported(other, file)
    assert (report.succeeded, report.messages, report.deleted_here, report.already_there) == (True, 0, 8, 10)
    assert exported(other) == before


def test_a_conversation_that_has_gone_on_here_keeps_its_own_state(
    store: ConversationStore, other: ConversationStore
) -> None:
    say(store, 4)
    summarise(store, 1)
    store.set_metadata("s", {"from": "there"})
    file = exported(store)
    imported(other, file)
    other.set_metadata("s", {"from": "here"})
    say(other, 2)
    summarise(other, 3, "Their own summary.")
    other.hold("s")
    before = exported(other)
    report = imported(other, file)
    assert (report.succeeded, report.already_there, report.messages) == (True, 4, 0)
    assert exported(other) == before


def test_one_that_has_gone_on_here_and_there_is_a_conflict(store: ConversationStore, other: ConversationStore) -> None:
    say(store, 2)
    imported(other, exported(store))
    say(other, 2)
    PostgresChatMessageHistory("s", store).add_messages([human("elsewhere"), ai("too")])
    before = exported(other)
    assert imported(other, exported(store)).conflicts == 1
    assert exported(other) == before


def test_a_summary_that_was_cleared_here_stays_away(store: ConversationStore, other: ConversationStore) -> None:
    say(store, 4)
    summarise(store, 1)
    file = exported(store)
    imported(other, file)
    PostgresChatMessageHistory("s", other).clear()
    imported(other, file)
    assert b"They talk." not in exported(other)


def test_a_conversation_that_is_erased_while_it_is_imported_is_not_begun_in_the_middle(
    store: ConversationStore, other: ConversationStore, small_batches: None
) -> None:
    say(store, 9)

    def erase(done: int, total: int | None) -> None:
        other.erase_conversation("s")

    report = imported(other, exported(store), on_progress=erase)
    assert (report.conflicts, report.messages) == (1, 3)
    assert "deleted here" in report.findings[0].reason
    assert other.list_conversations() == []


def test_a_live_turn_in_the_middle_of_an_import_ends_it_there(
    store: ConversationStore, other: ConversationStore, small_batches: None
) -> None:
    say(store, 9)
    file = exported(store)

    def answer(done: int, total: int | None) -> None:
        PostgresChatMessageHistory("s", other).add_messages([human("live"), ai("turn")])

    report = imported(other, file, on_progress=answer)
    assert (report.conflicts, report.messages) == (1, 3)
    expected = said(store)[:3] + [human("live"), ai("turn")]
    assert said(other) == expected
    assert (imported(other, file).conflicts, said(other)) == (1, expected)


def test_live_turns_and_an_import_never_mix(
    server_dsn: str, store: ConversationStore, other: ConversationStore, small_batches: None
) -> None:
    for n in range(12):
        say(store, 10, str(n))
    file = exported(store)
    begun, done = threading.Event(), threading.Event()
    lives: dict[str, int] = dict.fromkeys(map(str, range(12)), 0)

    def write() -> None:
        with ConversationStore(server_dsn, schema=other.schema, max_connections=1) as live:
            while not done.is_set():
                for session_id in lives:
                    PostgresChatMessageHistory(session_id, live).add_messages([human("live"), ai("turn")])
                    lives[session_id] += 1
                begun.set()

    writer = threading.Thread(target=write)
    # A conversation that the writer has yet to begin, and those that it has begun.
    imported(other, exported(store, session_id="0"))
    writer.start()
    try:
        assert begun.wait(60)
        report = imported(other, file)
        more = dict(lives)
        wait_until(lambda: all(lives[name] > more[name] for name in lives), "the writer goes on")
    finally:
        done.set()
        writer.join(60)
    assert report.conflicts == 11
    for session_id, turns in lives.items():
        there = said(other, session_id)
        live = [human("live"), ai("turn")] * turns
        assert there[len(there) - len(live) :] == live
        assert there[: len(there) - len(live)] == said(store, session_id)[: len(there) - len(live)]
        assert [row.message_index for row in other.list_messages(session_id)] == list(range(len(there)))
    assert len(said(other, "0")) == 10 + 2 * lives["0"]


# --- Encrypted stores ------------------------------------------------------------------------------------------------


@pytest.fixture
def sealed(server_dsn: str, other: ConversationStore) -> Iterator[ConversationStore]:
    """The store `other` with a keyring."""
    with ConversationStore(server_dsn, schema=other.schema, keyring=Keyring({"a": bytes(range(32))})) as sealed:
        yield sealed


def test_an_encrypted_store_takes_in_and_gives_out_clear_text(
    store: ConversationStore, other: ConversationStore, sealed: ConversationStore, small_batches: None
) -> None:
    fill(store)
    # The fingerprint of a rule tells of its keywords: it is not kept.
    file = exported(store).replace(b'"judged_by": "rule"', b'"judged_by": null')
    report = imported(sealed, file)
    assert report.succeeded and report.messages == file.count(b'{"message"')
    assert exported(sealed) == file
    assert imported(sealed, file).already_there == report.messages
    with pytest.raises(EncryptionError):
        exported(other)
    say(store, 2, "holes")
    for dry_run in (True, False):
        with pytest.raises(EncryptionError):
            imported(other, exported(store, session_id="holes"), dry_run=dry_run)


def test_nothing_in_clear_text_is_stored_by_an_import_into_an_encrypted_store(
    store: ConversationStore, sealed: ConversationStore, admin: Connection
) -> None:
    say(store, 4)
    summarise(store, 1)
    imported(sealed, exported(store))
    with admin.cursor() as cursor:
        for table in ("conversation_messages", "conversation_summaries"):
            cursor.execute(f"select content, key_id from {sealed.schema}.{table}")
            rows = cursor.fetchall()
            assert rows and all(key_id for _, key_id in rows)
            assert not any("They talk" in content or "s 0" in content for content, _ in rows)


def test_what_was_given_up_with_its_key_is_not_exported_and_does_not_come_back(
    store: ConversationStore, sealed: ConversationStore
) -> None:
    say(store, 4)
    summarise(store, 1)
    file = exported(store)
    imported(sealed, file)
    assert sealed.erase_key("s")
    out = io.BytesIO()
    assert export_conversations(sealed, out).left_out == 4
    assert b"s 0" not in out.getvalue() and b"They talk" not in out.getvalue()
    report = imported(sealed, file)
    assert (report.succeeded, report.messages, report.deleted_here) == (True, 0, 4)
    assert said(sealed) == []


# --- Checks ----------------------------------------------------------------------------------------------------------


def test_a_dry_run_reads_and_compares_everything_and_writes_nothing(
    store: ConversationStore, other: ConversationStore, small_batches: None
) -> None:
    fill(store)
    say(other, 3, "summaries")
    PostgresChatMessageHistory("holes", other).add_messages([human("another one")])
    before = exported(other)
    file = exported(store)
    planned = imported(other, file, dry_run=True)
    assert exported(other) == before
    done = imported(other, file)
    assert (planned.dry_run, done.dry_run, done.conflicts) == (True, False, 1)
    planned.dry_run = False
    assert planned == done


def test_what_is_read_back_otherwise_than_it_was_given_is_reported(
    store: ConversationStore, other: ConversationStore, admin: Connection
) -> None:
    say(store, 4)
    with admin.cursor() as cursor:
        cursor.execute(f"""
            create function {other.schema}.spoil() returns trigger language plpgsql as
                $$ begin if new.message_index = 2 then new.content = 'spoilt'; end if; return new; end $$;
            create trigger spoil before insert on {other.schema}.conversation_messages
                for each row execute function {other.schema}.spoil();
        """)
    report = imported(other, exported(store))
    assert (report.succeeded, report.disagreements) == (False, 1)
    assert report.findings[0].reason == "1 messages were read back otherwise than written"


def test_retention_counts_from_the_last_turn_of_what_was_imported(
    store: ConversationStore, other: ConversationStore, admin: Connection
) -> None:
    say(store, 2)
    with admin.cursor() as cursor:
        cursor.execute(f"update {store.schema}.conversations set updated_at = '2020-01-01', created_at = '2019-01-01'")
    imported(other, exported(store))
    assert other.get_conversation("s").updated_at == datetime(2020, 1, 1, tzinfo=timezone.utc)  # type: ignore[union-attr]
    assert other.prune(older_than=timedelta(days=365)).conversations == 1


def test_the_time_to_live_of_the_store_holds_for_what_is_imported(
    server_dsn: str, store: ConversationStore, other: ConversationStore
) -> None:
    say(store, 2)
    with ConversationStore(server_dsn, schema=other.schema, time_to_live=timedelta(days=3)) as there:
        imported(there, exported(store))
    assert other.get_conversation("s").time_to_live == timedelta(days=3)  # type: ignore[union-attr]
