"""Looking at a store: which conversations there are, a log in pages, what is new, searching, counting."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import psycopg2
import pytest
from psycopg2 import sql
from psycopg2.extensions import connection as Connection

from pgmemory import ConfigurationError, ConversationStore
from pgmemory.findings import FoundMessage
from pgmemory.models import StoredMessage

Say = Callable[..., None]


@pytest.fixture
def tenants(server_dsn: str, store: ConversationStore) -> Iterator[Callable[[str], ConversationStore]]:
    """Return a tenant's store in the schema of the test."""
    opened: list[ConversationStore] = []

    def of(tenant_id: str) -> ConversationStore:
        opened.append(ConversationStore(server_dsn, schema=store.schema, tenant_id=tenant_id))
        return opened[-1]

    yield of
    for each in opened:
        each.close()


def say(store: ConversationStore, session_id: str, *texts: str, user_id: str | None = None, tokens: Any = None) -> None:
    """Store human and AI messages in turn, each call in one write."""
    messages = [StoredMessage(("human", "ai")[n % 2], text, token_count=tokens) for n, text in enumerate(texts)]
    store.append(store.key(session_id, user_id), messages, write_id=uuid.uuid4())


def do(connection: Connection, store: ConversationStore, statement: str, *parameters: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute(sql.SQL(statement).format(schema=sql.Identifier(store.schema)), parameters)


def let_pass(admin: Connection, store: ConversationStore, days: float, *session_ids: str) -> None:
    """Move conversations and their messages into the past."""
    ago = timedelta(days=days)
    sessions = "(select id from {schema}.conversations where session_id = any(%s))"
    do(
        admin,
        store,
        f"update {{schema}}.conversation_messages set created_at = created_at - %s where conversation_id in {sessions}",
        ago,
        list(session_ids),
    )
    do(
        admin,
        store,
        "update {schema}.conversations set updated_at = updated_at - %s, created_at = created_at - %s"
        " where session_id = any(%s)",
        ago,
        ago,
        list(session_ids),
    )


def sessions(records: Any) -> list[str]:
    return [record.session_id for record in records]


def texts(found: list[FoundMessage]) -> list[str]:
    return [one.message.content for one in found]


# --- Which conversations there are -----------------------------------------------------------------------------------


def test_conversations_are_listed_by_age_length_and_hold(store: ConversationStore, admin: Connection) -> None:
    say(store, "old", "q", "a", "q", "a")
    say(store, "middle", "q" * 999)
    say(store, "new", "q", "a")
    let_pass(admin, store, 30, "old")
    let_pass(admin, store, 2, "middle")
    store.hold("middle")
    assert sessions(store.list_conversations()) == ["new", "middle", "old"]
    assert sessions(store.list_conversations(older_than=timedelta(days=1))) == ["middle", "old"]
    assert sessions(store.list_conversations(newer_than=timedelta(days=3))) == ["new", "middle"]
    assert sessions(store.list_conversations(older_than=timedelta(days=1), newer_than=timedelta(days=3))) == ["middle"]
    assert sessions(store.list_conversations(min_messages=2)) == ["new", "old"]
    assert sessions(store.list_conversations(held=True)) == ["middle"]
    assert sessions(store.list_conversations(held=False)) == ["new", "old"]
    assert sessions(store.list_conversations(sort="messages")) == ["old", "new", "middle"]
    assert sessions(store.list_conversations(sort="size", limit=2)) == ["middle", "old"]
    assert sessions(store.list_conversations(sort="created", limit=1, offset=1)) == ["middle"]


def test_a_conversations_length_is_that_of_what_it_holds_now(store: ConversationStore) -> None:
    say(store, "cleared", "q", "a", "q", "a")
    store.clear(store.key("cleared"))
    say(store, "cleared", "q")
    assert store.list_conversations(min_messages=2) == []
    assert sessions(store.list_conversations(min_messages=1)) == ["cleared"]


def test_sizes_are_read_only_where_they_are_asked_for(store: ConversationStore) -> None:
    say(store, "s", "four", "more")
    assert store.list_conversations()[0].size_bytes is None
    assert store.get_conversation("s").size_bytes is None  # type: ignore[union-attr]
    (record,) = store.list_conversations(with_sizes=True)
    assert record.size_bytes == 2 * len("four") + 2  # a byte of length before each


def test_only_on_request_conversations_of_other_tenants_are_listed(
    store: ConversationStore, tenants: Callable[[str], ConversationStore]
) -> None:
    say(tenants("a"), "of a", "q")
    say(tenants("b"), "of b", "q")
    assert sessions(tenants("a").list_conversations()) == ["of a"]
    assert sessions(tenants("a").list_conversations(all_tenants=True)) == ["of b", "of a"]
    assert store.list_conversations() == []


@pytest.mark.parametrize(
    "wrong",
    [{"sort": "name"}, {"min_messages": -1}, {"older_than": timedelta(0)}, {"newer_than": 3}, {"limit": 1.5}],
    ids=str,
)
def test_what_cannot_be_listed_by_is_refused(store: ConversationStore, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        store.list_conversations(**wrong)


def test_a_session_id_is_found_among_all_users_of_the_tenant_but_not_in_agents_logs(
    store: ConversationStore, tenants: Callable[[str], ConversationStore]
) -> None:
    for user_id in ("u", "v", None):
        say(store, "s", "q", user_id=user_id)
    say(store, "s2", "q")
    store.append(store.key("s").of_agent("helper"), [StoredMessage("human", "q")], write_id=uuid.uuid4())
    say(tenants("other"), "s", "q", user_id="w")
    assert [record.user_id for record in store.find_conversations("s")] == ["", "v", "u"]
    assert len(store.find_conversations("s", limit=2)) == 2
    assert store.find_conversations("unknown") == []


# --- A log in pages --------------------------------------------------------------------------------------------------


def test_a_log_is_read_in_pages_one_round_trip_each(counted_store: Any) -> None:
    key = counted_store.key("s")
    say(counted_store, "s", *map(str, range(7)))
    counted_store.executes.clear()
    page = counted_store.read_page(key, after=1, limit=3)
    assert [message.content for message in page] == ["2", "3", "4"]
    assert [execute.rows for execute in counted_store.executes] == [3]
    assert counted_store.read_page(key, after=6) == []


def test_all_pages_together_are_the_log(store: ConversationStore, monkeypatch: pytest.MonkeyPatch) -> None:
    say(store, "s", *map(str, range(7)))
    key = store.key("s")
    page = store.read_page
    monkeypatch.setattr(store, "read_page", lambda key, after: page(key, after=after, limit=3))
    assert list(store.read_pages(key)) == store.read_all(key)
    assert [message.content for message in store.read_pages(key, after=4)] == ["5", "6"]
    assert list(store.read_pages(store.key("unknown"))) == []


# --- What is new -----------------------------------------------------------------------------------------------------


def test_the_newest_messages_of_all_conversations_come_in_the_order_of_their_times(store: ConversationStore) -> None:
    say(store, "a", "1", "2")
    say(store, "b", "3", user_id="u")
    say(store, "a", "4")
    say(store, "cleared", "5")
    store.clear(store.key("cleared"))
    found = store.follow().newest(3)
    assert texts(found) == ["2", "3", "4"]
    assert [one.key for one in found] == [store.key("a"), store.key("b", "u"), store.key("a")]
    assert texts(store.follow().newest(99)) == ["1", "2", "3", "4"]
    assert texts(store.follow(user_id="u").newest(9)) == ["3"]
    assert texts(store.follow(user_id="").newest(9)) == ["1", "2", "4"]
    assert store.follow().newest(0) == []


def test_the_newest_messages_of_one_conversation_go_by_their_numbers(
    store: ConversationStore, admin: Connection
) -> None:
    say(store, "s", "1", "2", "3")
    do(admin, store, "update {schema}.conversation_messages set created_at = '2020-01-01' where message_index = 2")
    assert texts(store.follow(store.key("s")).newest(2)) == ["2", "3"]


def test_each_new_message_comes_once(store: ConversationStore) -> None:
    say(store, "a", "old")
    following = store.follow()
    one = store.follow(store.key("b"))
    assert texts(following.newest(5)) == ["old"]
    assert one.newest(5) == []
    assert following.new() == []
    say(store, "a", "1")
    say(store, "b", "2", "3")
    say(store, "a", "4")
    assert texts(following.new()) == ["1", "2", "3", "4"]
    assert texts(one.new()) == ["2", "3"]
    assert (following.new(), one.new()) == ([], [])


def test_of_a_conversation_that_was_long_idle_only_what_is_new_comes(
    store: ConversationStore, admin: Connection
) -> None:
    say(store, "idle", "old", "older")
    let_pass(admin, store, 1, "idle")
    following = store.follow()
    assert following.newest(0) == []
    say(store, "idle", "new")
    assert texts(following.new()) == ["new"]
    assert following.new() == []


def test_a_turn_that_commits_late_is_not_missed(store: ConversationStore, server_dsn: str) -> None:
    say(store, "slow", "old")
    following = store.follow()
    following.newest(0)
    writer = psycopg2.connect(server_dsn)
    try:
        do(
            writer,
            store,
            "update {schema}.conversations set next_message_index = 2, updated_at = clock_timestamp()"
            " where session_id = 'slow'",
        )
        do(
            writer,
            store,
            "insert into {schema}.conversation_messages"
            " (conversation_id, message_index, tenant_id, role, content, created_at)"
            " select id, 1, '', 'human', 'late', clock_timestamp() from {schema}.conversations"
            " where session_id = 'slow'",
        )
        say(store, "fast", "in time")
        assert texts(following.new()) == ["in time"]
        assert following.new() == []
        writer.commit()
    finally:
        writer.close()
    assert texts(following.new()) == ["late"]


def test_a_conversation_that_was_erased_and_begun_anew_is_followed_on(store: ConversationStore) -> None:
    say(store, "s", "1", "2", "3")
    following = store.follow(store.key("s"))
    following.newest(1)
    store.erase_conversation("s")
    say(store, "s", "anew")
    assert texts(following.new()) == ["anew"]
    store.erase_conversation("s")
    assert following.new() == []
    say(store, "s", "again")
    assert texts(following.new()) == ["again"]


def test_following_asks_once_where_nothing_happens(counted_store: Any) -> None:
    say(counted_store, "s", "q")
    following = counted_store.follow()
    following.newest(1)
    counted_store.executes.clear()
    assert following.new() == []
    assert len(counted_store.executes) == 1


def test_a_conversation_of_another_tenant_is_not_followed(
    store: ConversationStore, tenants: Callable[[str], ConversationStore]
) -> None:
    following = store.follow()
    following.newest(1)
    say(tenants("other"), "s", "secret")
    assert following.new() == []
    with pytest.raises(ConfigurationError, match="tenant"):
        store.follow(tenants("other").key("s"))


# --- Searching -------------------------------------------------------------------------------------------------------


def found_in(store: ConversationStore, text: str, **options: Any) -> list[str]:
    return [hit.excerpt for hit in store.search(text, **options).hits]


def test_a_search_finds_literal_text_newest_first(store: ConversationStore) -> None:
    say(store, "a", "100% of_it", "100 of it", user_id="u")
    say(store, "b", "it's 100% OF_IT\\ too")
    hits = store.search("100% of_").hits
    assert [(hit.user_id, hit.session_id, hit.message_index, hit.role) for hit in hits] == [
        ("", "b", 0, "human"),
        ("u", "a", 0, "human"),
    ]
    assert found_in(store, "IT\\ TOO") == ["it's 100% OF_IT\\ too"]
    assert found_in(store, "' or true --") == []
    assert found_in(store, "of", user_id="u", limit=1) == ["100 of it"]
    assert found_in(store, "of", user_id="") == ["it's 100% OF_IT\\ too"]


def test_a_search_knows_the_case_of_other_scripts(store: ConversationStore) -> None:
    say(store, "s", "Viele GRÜẞE", "Привет, МИР", "ΟΔΟΣ")
    assert found_in(store, "grüße") == ["Viele GRÜẞE"]
    assert found_in(store, "мир") == ["Привет, МИР"]
    assert found_in(store, "gruße") == []


def test_an_excerpt_shows_where_the_text_stands(store: ConversationStore) -> None:
    say(store, "s", f"{'x' * 500}NeedlE{'y' * 500}", "Needle", f"needle{'y' * 60}")
    end, whole, middle = store.search("needle").hits
    assert (whole.excerpt, whole.found_at, whole.found_length, whole.is_start, whole.is_end) == (
        "Needle", 0, 6, True, True,
    )  # fmt: skip
    assert middle.excerpt == f"{'x' * 60}NeedlE{'y' * 60}"
    assert (middle.found_at, middle.is_start, middle.is_end) == (60, False, False)
    assert (end.is_start, end.is_end) == (True, True)


def test_a_search_stays_within_its_tenant_unless_told_otherwise(
    store: ConversationStore, tenants: Callable[[str], ConversationStore]
) -> None:
    say(store, "s", "needle of none")
    say(tenants("a"), "s", "needle of a")
    assert found_in(store, "needle") == ["needle of none"]
    assert found_in(tenants("a"), "needle") == ["needle of a"]
    assert found_in(tenants("a"), "needle", all_tenants=True) == ["needle of a", "needle of none"]


def test_encrypted_conversations_are_left_out_and_counted(store: ConversationStore, admin: Connection) -> None:
    say(store, "clear", "needle")
    say(store, "sealed", "needle", user_id="u")
    do(admin, store, "update {schema}.conversations set key_id = id where session_id = 'sealed'")
    do(
        admin,
        store,
        "update {schema}.conversation_messages m set key_id = c.id from {schema}.conversations c"
        " where c.id = m.conversation_id and c.session_id = 'sealed'",
    )
    result = store.search("needle")
    assert ([hit.session_id for hit in result.hits], result.searched, result.encrypted) == (["clear"], 1, 1)
    result = store.search("needle", user_id="u")
    assert (result.hits, result.searched, result.encrypted) == ((), 0, 1)


@pytest.mark.parametrize("wrong", ["", "\0", 7.5], ids=repr)
def test_what_cannot_be_searched_for_is_refused(store: ConversationStore, wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="text"):
        store.search(wrong)


def test_a_users_messages_are_searched_without_reading_the_whole_table(counted_store: Any) -> None:
    counted_store.search("x", user_id="u")
    assert not any("enable_seqscan = on" in execute.statement for execute in counted_store.executes)
    counted_store.search("x")
    assert any("enable_seqscan = on" in execute.statement for execute in counted_store.executes)


# --- Counting --------------------------------------------------------------------------------------------------------


def test_statistics_count_what_is_stored(
    store: ConversationStore, admin: Connection, tenants: Callable[[str], ConversationStore]
) -> None:
    say(store, "a", "q", "a", "q", user_id="u", tokens=5)
    say(store, "b", "q", user_id="u")
    say(store, "c", "q", "a", tokens=7)
    say(store, "d", "q", user_id="v")
    say(tenants("other"), "a", "q", user_id="u", tokens=100)
    let_pass(admin, store, 2, "b", "c", "d")
    for session_id, user_id in (("b", "u"), ("c", None), ("d", "v")):
        store.set_time_to_live(session_id, timedelta(days=1 if session_id != "c" else 9), user_id=user_id)
    store.hold("d", user_id="v")
    do(admin, store, "update {schema}.conversations set key_id = id where session_id = 'c'")
    counted = store.statistics(days=3)
    assert (counted.conversations, counted.users, counted.messages, counted.turns) == (4, 2, 7, 5)
    assert (counted.tokens, counted.uncounted_messages) == (3 * 5 + 2 * 7, 2)
    assert (counted.held, counted.expired, counted.encrypted) == (1, 1, 1)
    assert [(day.conversations, day.messages) for day in counted.days] == [(3, 4), (0, 0), (1, 3)]
    assert counted.days[-1].day - counted.days[0].day == timedelta(days=2)
    sizes = {table.name: table for table in counted.tables}
    assert sizes["conversation_messages"].table_bytes > 0 and sizes["conversation_messages"].index_bytes > 0
    assert store.statistics(all_tenants=True).tokens == counted.tokens + 100
    assert store.statistics(all_tenants=True).users == 3


def test_an_empty_store_has_statistics_too(store: ConversationStore) -> None:
    counted = store.statistics(days=2)
    assert (counted.conversations, counted.messages, counted.tokens) == (0, 0, 0)
    assert [(day.conversations, day.messages) for day in counted.days] == [(0, 0), (0, 0)]
    with pytest.raises(ConfigurationError, match="days"):
        store.statistics(days=0)
