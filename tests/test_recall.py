"""Recall: the turns of a user's past that matter, found by words, by index; the words kept right; RecallMemory."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from chains import AgentExecutor, ConversationChain, create_tool_calling_agent
from conftest import CountingPool
from conversations import ai, calling, human, result, system, tokens_of_all
from fakes import FakeEmbeddings, scripted
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.tools import tool
from psycopg2.extensions import connection as Connection
from psycopg2.extensions import make_dsn
from test_cli import Ended, call  # noqa: F401  # a fixture
from test_plans import Crowd, nodes
from test_row_level_security import PASSWORD, new_role  # noqa: F401  # a fixture
from test_schema import execute

from pgmemory import (
    ConfigurationError,
    ConversationStore,
    EncryptionError,
    Keyring,
    PostgresChatMessageHistory,
    RecallMemory,
    SchemaError,
)
from pgmemory.models import ConversationKey
from pgmemory.queries import words
from pgmemory.store.recall import RecallOperations
from pgmemory.transfer import JsonLines, export_conversations, import_conversations

KEYRING = Keyring({"master": bytes(32)})


@pytest.fixture
def searched(store: ConversationStore) -> ConversationStore:
    """A store whose messages can be recalled."""
    store.setup(search=True)
    return store


def say(store: ConversationStore, session_id: str, *messages: BaseMessage | str, user_id: str | None = "u") -> None:
    """Store messages; text is what the human says and the AI answers, by turns."""
    said = [
        each if isinstance(each, BaseMessage) else (ai if number % 2 else human)(each)
        for number, each in enumerate(messages)
    ]
    PostgresChatMessageHistory(session_id, store, user_id=user_id).add_messages(said)


def hits(
    store: ConversationStore, text: str, *, session_id: str = "now", user_id: str | None = "u", **options: Any
) -> list[tuple[str, int]]:
    """The messages that matter, the one that matters most first, as session ids and numbers."""
    found = store.recall(store.key(session_id, user_id), text, **options)
    ranked = sorted((hit for turn in found.turns for hit in turn.hits), key=lambda hit: -hit.score)
    return [(hit.session_id, hit.message_index) for hit in ranked]


def best(store: ConversationStore, text: str, **options: Any) -> Any:
    found = hits(store, text, **options)
    return found[0] if found else None


# What is found


FOUND = [
    ("We adopted two dogs", "Which dog?"),
    ("I was skiing in Zermatt", "Do you ski?"),
    ("Meet me at the café", "the cafe"),
    ("Meet me at the cafe", "the Café"),
    ("my resume is ready", "her résumés"),
    ("ＦＵＬＬ width", "full"),
    ("his e-mail is bob@example.com", "bob@example.com"),
    ("either red/green", "green"),
    ("猫が好きです", "猫の名前は"),
    ("来年、東京に引っ越します", "東京はどう？"),
    ("我明年要搬到北京去", "什么时候去北京？"),
    ("コーヒーが飲みたい", "ｺｰﾋｰ"),
    ("부산에서 만나요", "부산은"),
]


def test_words_are_found_without_accents_and_inflection_and_in_languages_without_spaces(
    searched: ConversationStore,
) -> None:
    for said, asked in FOUND:
        say(searched, "old", "hello", "hi", "quite another thing", "yes", said, "good", user_id=said)
        assert best(searched, asked, user_id=said) == ("old", 4), said


def test_a_text_without_a_known_word_recalls_nothing(searched: ConversationStore) -> None:
    say(searched, "old", "the parcel", "is on its way")
    for text in ("", "   ", "the of and", "?!", "zebra", "\x00\ud800", "x" * 30_000):
        assert searched.recall(searched.key("now", "u"), text).turns == (), text


def test_a_text_of_any_length_and_kind_can_be_stored_and_recalled(searched: ConversationStore) -> None:
    many = " ".join(f"word{n}" for n in range(3_000))
    say(searched, "old", "parcel " * 200_000, "ﷺ" * 30_000, "猫" * 30_000, many)
    assert best(searched, "parcel") == ("old", 0)
    assert best(searched, many) == ("old", 3)


def test_a_rarer_word_counts_for_more(searched: ConversationStore) -> None:
    for number in range(8):
        say(searched, f"old {number}", "the invoice came", "fine")
    say(searched, "rare", "the giraffe came", "fine")
    say(searched, "later", "the invoice came", "fine")
    assert best(searched, "invoice or giraffe?") == ("rare", 0)


def test_how_rare_a_word_is_goes_by_the_users_own_messages(searched: ConversationStore) -> None:
    for number in range(8):
        say(searched, f"other {number}", "the giraffe came", "fine", user_id="another")
        say(searched, f"own {number}", "the invoice came", "fine")
    say(searched, "own", "the giraffe came", "fine")
    say(searched, "own again", "the invoice came", "fine")
    assert best(searched, "invoice or giraffe?") == ("own", 0)


def test_a_shorter_message_and_of_equal_ones_the_newer_comes_first(searched: ConversationStore) -> None:
    say(searched, "a", "parcel", "fine")
    say(searched, "long", "parcel with many further words that concern anything else entirely", "fine")
    say(searched, "b", "parcel", "fine", "parcel", "fine")
    assert [hit for hit in hits(searched, "parcel") if hit[1] % 2 == 0] == [("b", 2), ("b", 0), ("a", 0), ("long", 0)]


def test_a_neighbour_gets_a_third_so_that_a_question_brings_its_answer(searched: ConversationStore) -> None:
    say(searched, "old", "hello", "hi", "what is your sister's name?", "Ada", "bye", "bye")
    found = searched.recall(searched.key("now", "u"), "sister").turns
    scores = {hit.message_index: hit.score for turn in found for hit in turn.hits}
    assert set(scores) == {1, 2, 3}
    assert scores[1] == scores[3] == pytest.approx(scores[2] / 3)
    assert [[message.content for message in turn.messages] for turn in found] == [
        ["what is your sister's name?", "Ada"],
        ["hello", "hi"],
    ]


def test_k_messages_are_recalled_also_where_neighbours_were_deleted(searched: ConversationStore) -> None:
    history = PostgresChatMessageHistory("old", searched, user_id="u")
    for number in range(6):
        say(searched, "old", f"parcel {number}", "fine")
    history.delete_messages([1, 3, 5, 7])
    assert len(hits(searched, "parcel", k=4)) == 4
    assert {number for _, number in hits(searched, "parcel", k=99)} == {0, 2, 4, 6, 8, 9, 10, 11}


def test_turns_are_whole_and_what_stands_before_the_first_one_is_none(searched: ConversationStore) -> None:
    say(searched, "old", system("about parcels"), human("a parcel"), calling("1"), result("1"), ai("there"), human("x"))
    (turn,) = searched.recall(searched.key("now", "u"), "parcel", k=1).turns
    assert [message.message_index for message in turn.messages] == [1, 2, 3, 4]
    assert [message.role for message in turn.messages] == ["human", "ai", "tool", "ai"]


# Whose past


def test_nobody_recalls_what_another_user_tenant_or_nobody_said(
    searched: ConversationStore, server_dsn: str
) -> None:
    with ConversationStore(server_dsn, schema=searched.schema, tenant_id="t") as tenant:
        say(searched, "old", "the parcel", "fine", user_id="u")
        say(tenant, "old", "the parcel", "fine", user_id="u")
        say(searched, "alone", "the parcel", "fine", user_id=None)
        say(searched, "lonely", "the parcel", "fine", user_id=None)
        assert best(searched, "parcel", user_id="v") is None
        assert best(tenant, "parcel", user_id="v") is None
        assert {session for session, _ in hits(searched, "parcel")} == {"old"}
        assert {session for session, _ in hits(tenant, "parcel")} == {"old"}
        assert {session for session, _ in hits(searched, "parcel", session_id="alone", user_id=None)} == {"alone"}
        assert best(searched, "parcel", session_id="now", user_id=None) is None
        with pytest.raises(ConfigurationError, match="tenant 't'"):
            searched.recall(tenant.key("old", "u"), "parcel")


def test_a_session_recalls_from_itself_and_the_logs_of_other_agents_are_their_own(searched: ConversationStore) -> None:
    for session_id in ("now", "old", "old#agent:a", "now#agent:b"):
        say(searched, session_id, "the parcel", "fine")
    assert {session for session, _ in hits(searched, "parcel")} == {"now", "old"}
    assert {session for session, _ in hits(searched, "parcel", whole_user=False)} == {"now"}
    of_agent = {session for session, _ in hits(searched, "parcel", session_id="now#agent:b")}
    assert of_agent == {"now", "old", "now#agent:b"}


def test_as_of_an_earlier_message_nothing_later_is_recalled(searched: ConversationStore) -> None:
    say(searched, "now", "parcel one", "fine", "parcel two", "fine")
    say(searched, "later", "parcel three", "fine")
    assert {place for place in hits(searched, "parcel", before=2)} == {("now", 0), ("now", 1)}
    memory = RecallMemory(session_id="now", user_id="u", store=searched, k=0, return_messages=True)
    assert memory.as_of(1).load_memory_variables({"input": "parcel"}) == {"history": [human("parcel one"), ai("fine")]}
    assert memory.as_of(-1).load_memory_variables({"input": "parcel"}) == {"history": []}
    # Nor the rest of a turn that was still to be said.
    assert memory.as_of(2).load_memory_variables({"input": "two"}) == {
        "history": [human("parcel one"), ai("fine"), human("parcel two")]
    }


def test_what_a_fork_has_in_common_with_its_source_is_shown_once(searched: ConversationStore) -> None:
    history = PostgresChatMessageHistory("source", searched, user_id="u")
    for number in range(4):
        history.add_messages([human(f"zebra {number}"), ai(f"stripes {number}")])
    history.fork("fork", at=3)
    memory = RecallMemory(session_id="fork", user_id="u", store=searched, k=4, return_messages=True)
    shown = [message.content for message in memory.load_memory_variables({"input": "zebra"})["history"]]
    assert sorted(shown) == sorted(f"{word} {number}" for number in range(4) for word in ("zebra", "stripes"))
    # Also where it has moved up since.
    history.replace_turn(0, [human("another"), ai("thing"), ai("altogether")])
    moved = [message.content for message in memory.load_memory_variables({"input": "zebra"})["history"]]
    assert sorted(set(moved) & set(shown)) == sorted(text for text in moved if text in shown) == sorted(shown)


def test_what_was_said_twice_at_the_same_time_is_shown_twice(searched: ConversationStore, admin: Connection) -> None:
    say(searched, "old", "zebra", "stripes", "zebra", "stripes")
    execute(admin, f"update {searched.schema}.conversation_messages set created_at = '2026-01-01'")
    memory = RecallMemory(session_id="now", user_id="u", store=searched, return_messages=True)
    assert len(memory.load_memory_variables({"input": "zebra"})["history"]) == 4


@pytest.mark.parametrize("wrong", [{"k": -1}, {"k": True}, {"text": None}])
def test_what_cannot_be_asked_for_is_refused(searched: ConversationStore, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="must be"):
        searched.recall(searched.key("s", "u"), **({"text": "x"} | wrong))


# The words are kept right


def assert_words_are_right(admin: Connection, store: ConversationStore) -> None:
    """Compare the words that are kept with those of the messages that are there."""
    expected = f"""
        select t.term, m.conversation_id, m.message_index, m.tenant_id, t.frequency, t.length
        from {store.schema}.conversations c join {store.schema}.conversation_messages m on m.conversation_id = c.id
        cross join lateral {store.schema}.terms_of(m.content, {words.SCOPE_OF_C}) t
        where m.role in ('human', 'ai') and m.key_id is null"""
    kept = f"select * from {store.schema}.message_terms"
    for some, others in ((kept, expected), (expected, kept)):
        assert execute(admin, f"({some}) except all ({others})") == []


def test_every_way_to_write_keeps_the_words_right(
    searched: ConversationStore, admin: Connection, server_dsn: str, tmp_path: Any
) -> None:
    rng = random.Random(7)
    said = ["parcel", "giraffe", "invoice", "café", "東京タワー", "the", "running", "late"]

    def sentence() -> str:
        return " ".join(rng.choices(said, k=rng.randint(0, 6))) or "x"

    histories = [PostgresChatMessageHistory(f"s{n}", searched, user_id="u", max_messages=9) for n in range(3)]
    for _ in range(40):
        history = rng.choice(histories)
        indexes = [stored.message_index for stored in searched.read_all(history.key) if stored.role == "human"]
        index = rng.choice(indexes) if indexes else None
        action = rng.randrange(9)
        if action < 4 or index is None:
            history.add_messages([human(sentence()), calling("1"), result("1"), ai(sentence())][:: rng.choice([1, 3])])
        elif action == 4:
            history.replace_message(index, sentence())
        elif action == 5:
            history.replace_turn(index, [human(sentence()), *[ai(sentence())] * rng.randint(0, 4)])
        elif action == 6:
            history.delete_messages([index])
        elif action == 7:
            history.clear()
        else:
            searched.erase_conversation(history.session_id, user_id="u")
        assert_words_are_right(admin, searched)
    assert execute(admin, f"select count(*) from {searched.schema}.message_terms")[0][0] > 0
    file = tmp_path / "all.jsonl"
    with file.open("wb") as out:
        export_conversations(searched, out)
    searched.erase_user("u")
    assert execute(admin, f"select * from {searched.schema}.message_terms") == []
    with file.open("rb") as source:
        import_conversations(searched, JsonLines(source))
    assert_words_are_right(admin, searched)
    assert execute(admin, f"select count(*) from {searched.schema}.message_terms")[0][0] > 0


def test_setting_it_up_indexes_what_is_there_and_from_then_on_what_anybody_writes(
    store: ConversationStore, admin: Connection, server_dsn: str
) -> None:
    with ConversationStore(server_dsn, schema=store.schema) as older:
        say(older, "old", "the parcel", "came running")
        say(older, "other", "the parcel", "came", user_id="another")
        assert store.setup(search=True) == []
        assert_words_are_right(admin, store)
        # Also what processes write that know nothing of it, and people with psql.
        say(older, "old", "a giraffe", "came")
        assert best(store, "giraffe") == ("old", 2)
        PostgresChatMessageHistory("old", older, user_id="u").replace_message(2, "a rhino")
        assert best(older, "rhino") == ("old", 2)
        execute(admin, f"update {store.schema}.conversation_messages set content = 'a zebra' where message_index = 2")
        assert best(store, "zebra") == ("old", 2)
        assert_words_are_right(admin, store)
        assert store.index_messages() == 0


def test_a_setup_that_ended_early_is_gone_on_with_and_else_nothing_is_looked_through_again(
    store: ConversationStore, server_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(store, "old", "the parcel", "came")
    with monkeypatch.context() as patched:
        patched.setattr(RecallOperations, "_index", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            store.setup(search=True)
    assert not store.schema_status().search.is_complete and best(store, "parcel") is None
    store.setup(search=True)
    assert store.schema_status().search.is_complete and best(store, "parcel") == ("old", 0)
    names: list[str] = []
    with ConversationStore(server_dsn, schema=store.schema, on_operation=lambda done: names.append(done.name)) as again:
        again.setup(search=True)
    assert set(names) == {"schema_status"}


def test_long_and_many_conversations_are_indexed_in_batches(
    store: ConversationStore, admin: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgmemory.store.recall._BATCH_MESSAGES", 6)
    monkeypatch.setattr("pgmemory.store.recall._IDS", 3)
    for number, turns in enumerate([1, 2, 1, 7, 1, 1, 3, 10]):
        say(store, f"s{number}", *["parcel", "fine"] * turns)
    store.setup(search=True)
    execute(admin, f"delete from {store.schema}.message_terms")
    batches: list[int] = []
    assert store.index_messages(on_batch=batches.append) == 52
    assert batches[-1] == 52 and len(batches) > 8
    assert max(after - before for before, after in zip([0, *batches], batches, strict=False)) <= 6
    assert_words_are_right(admin, store)


def test_another_language_means_indexing_anew_and_true_keeps_the_one_that_is_there(
    store: ConversationStore, admin: Connection
) -> None:
    say(store, "old", "Die Häuser waren schön", "ja")
    store.setup(search="simple")
    assert best(store, "Haus") is None
    assert store.schema_status().search.language == "pg_catalog.simple"
    store.setup(search="german")
    assert best(store, "Haus") == ("old", 0)
    for same in (True, "german", "pg_catalog.german", None):
        store.setup(search=same)
        assert store.schema_status().search.language == "pg_catalog.german"
    assert_words_are_right(admin, store)


def test_a_language_that_is_not_there_is_refused_by_name(store: ConversationStore) -> None:
    wrong: list[Any] = ["klingon", "", 7, False, "english'; drop schema public; --"]
    for search in wrong:
        with pytest.raises(ConfigurationError, match="search"):
            store.setup(search=search)
    assert store.schema_status().search.language is None


def test_a_schema_of_any_name_can_be_searched(server_dsn: str, admin: Connection) -> None:
    name = 'we"ird %s {x} {schema} {vector} {model} $function$' + uuid.uuid4().hex[:8]
    with ConversationStore(server_dsn, schema=name, embeddings=FakeEmbeddings()) as store:
        try:
            store.setup(search="english")
            say(store, "old", "the parcel", "fine")
            store.items("u").put(["a"], "k", {"text": "the parcel"})
            store.index_messages()
            assert best(store, "parcels", by="words") == best(store, "delivery", by="meaning") == ("old", 0)
            assert store.items("u").search(query="delivery")[0].key == "k"
            assert store.schema_status().search.language == "pg_catalog.english"
        finally:
            execute(admin, "set client_min_messages = warning; drop schema {schema} cascade", schema=name)


def test_without_words_the_error_names_the_command_that_makes_them(store: ConversationStore) -> None:
    say(store, "old", "the parcel", "fine")
    memory = RecallMemory(session_id="s", store=store)
    for attempt in (
        lambda: best(store, "parcel"),
        store.index_messages,
        lambda: memory.load_memory_variables({"input": "parcel"}),
    ):
        with pytest.raises(SchemaError, match=r"pgmemory init --search.*setup\(search=True\)"):
            attempt()
    memory.save_context({"input": "parcel"}, {"output": "fine"})


# Encryption


def test_what_is_encrypted_is_not_indexed_and_not_recalled(
    searched: ConversationStore, admin: Connection, server_dsn: str
) -> None:
    with ConversationStore(server_dsn, schema=searched.schema, keyring=KEYRING) as sealing:
        say(sealing, "secret", "the parcel", "fine")
        sealing.index_messages()
        assert execute(admin, f"select * from {searched.schema}.message_terms") == []
        assert best(searched, "parcel") is None
        with pytest.raises(EncryptionError, match="cannot be recalled by its words"):
            sealing.recall(sealing.key("secret", "u"), "parcel")
        with pytest.raises(ValueError, match="RecallMemory.*without a keyring"):
            RecallMemory(session_id="secret", store=sealing)
        # What was said before it was encrypted can be recalled, and its window needs the key.
        say(searched, "half", "a giraffe", "fine")
        say(sealing, "half", "a giraffe", "fine")
        with pytest.raises(EncryptionError, match="half"):
            RecallMemory(session_id="half", user_id="u", store=searched).load_memory_variables({"input": "giraffe"})
        assert_words_are_right(admin, searched)
        # Another conversation recalls what is in clear text, not its encrypted neighbour.
        assert set(hits(searched, "giraffe fine")) == {("half", 0), ("half", 1)}


# Rights


@pytest.mark.parametrize(("mode", "first"), [("setting", "search"), ("roles", "security")])
def test_row_level_security_holds_for_the_words_whichever_comes_first(
    store: ConversationStore,
    admin: Connection,
    server_dsn: str,
    new_role: Callable[[], str],  # noqa: F811
    mode: Any,
    first: str,
) -> None:
    if first == "security":
        store.setup(row_level_security=mode)
        store.setup(search=True)
    else:
        store.setup(search=True)
        store.setup(row_level_security=mode)
    assert store.schema_status().row_level_security == mode
    stores = []
    for tenant in ("acme", "bolt"):
        role = new_role()
        store.bind_role(role, tenant)
        dsn = make_dsn(server_dsn, user=role, password=PASSWORD)
        stores.append(ConversationStore(dsn, schema=store.schema, tenant_id=tenant))
    for each in stores:
        say(each, "old", "the parcel", "fine")
    for each in stores:
        assert {session for session, _ in hits(each, "parcel")} == {"old"}
        assert each.index_messages() == 0
        tenants = each._execute("count", "select distinct tenant_id from {schema}.message_terms", {})
        assert tenants == [(each.tenant_id,)]
        each.close()
    assert_words_are_right(admin, store)


def test_who_may_use_messages_may_use_their_words(
    store: ConversationStore, server_dsn: str, admin: Connection, new_role: Callable[[], str]  # noqa: F811
) -> None:
    role = new_role()
    execute(admin, "grant usage on schema {schema} to {role}", schema=store.schema, role=role)
    execute(admin, "grant all on all tables in schema {schema} to {role}", schema=store.schema, role=role)
    store.setup(search=True)
    with ConversationStore(make_dsn(server_dsn, user=role, password=PASSWORD), schema=store.schema) as app:
        say(app, "old", "the parcel", "fine")
        assert best(app, "parcel") == ("old", 0)


# What it costs


@pytest.fixture(params=[("none", True), ("right", False), ("right", True)], ids=str)
def large(
    request: pytest.FixtureRequest,
    store: ConversationStore,
    server_dsn: str,
    admin: Connection,
    new_role: Callable[[], str],  # noqa: F811
) -> Iterator[Crowd]:
    """A user of 300 messages, in 20 of which a word stands that is in each of 15,000 messages of others.

    With the statistics that the planner has, and row-level security, of each kind.
    """
    statistics, secured = request.param
    dsn, tenant = server_dsn, "acme" if secured else ""
    store.setup(search=True)
    if secured:
        store.setup(row_level_security="roles")
        role = new_role()
        store.bind_role(role, tenant)
        dsn = make_dsn(server_dsn, user=role, password=PASSWORD)
    keys = [ConversationKey(tenant, f"u{number // 10}", f"s{number}") for number in range(510)]
    with admin.cursor() as cursor:
        cursor.execute(
            f"""
            alter table {store.schema}.message_terms set (autovacuum_enabled = off);
            alter table {store.schema}.conversation_messages set (autovacuum_enabled = off), disable trigger user;
            insert into {store.schema}.conversations (id, tenant_id, user_id, session_id, next_message_index)
            select id, %(tenant)s, user_id, session_id, 30
            from unnest(%(ids)s::uuid[], %(users)s::text[], %(sessions)s::text[]) c (id, user_id, session_id);
            insert into {store.schema}.conversation_messages
                (conversation_id, message_index, tenant_id, role, content, created_at)
            select c.id, n, c.tenant_id, case n %% 2 when 0 then 'human' else 'ai' end,
                   case when c.user_id = 'u50' and n not in (4, 8) then 'something' else 'parcel' end, clock_timestamp()
            from {store.schema}.conversations c, generate_series(0, 29) n;
            insert into {store.schema}.message_terms
            select w.term, m.conversation_id, m.message_index, m.tenant_id, 1, 1
            from {store.schema}.conversations c
            join {store.schema}.conversation_messages m on m.conversation_id = c.id
            cross join lateral (
                select hashtextextended(case m.content when 'parcel' then 'parcel' else 'someth' end,
                                        {words.SCOPE_OF_C}) as term) w;
            alter table {store.schema}.conversation_messages enable trigger user
            """,
            {
                "tenant": tenant,
                "ids": [str(key.id) for key in keys],
                "users": [key.user_id for key in keys],
                "sessions": [key.session_id for key in keys],
            },
        )
        if statistics == "right":
            cursor.execute(f"vacuum analyze {store.schema}.message_terms")
            cursor.execute(f"analyze {store.schema}.conversation_messages, {store.schema}.conversations")
    pool = CountingPool(dsn)
    with ConversationStore(pool, schema=store.schema, tenant_id=tenant or None) as app:
        yield Crowd(app, pool)
    pool.closeall()


def test_recall_touches_by_index_the_users_messages_that_share_a_word_and_the_turns_of_the_best(large: Crowd) -> None:
    key = large.store.key("s505", "u50")
    assert len(large.store.recall(key, "parcel", turns=2, k=5).turns) > 2
    query = large.sent_by(lambda: large.store.recall(key, "Where are the parcels?", k=5, turns=2))
    plan = large.explained(query, "with recursive step")
    read: dict[str, float] = {}
    for node in nodes(plan):
        if not node["Actual Loops"]:
            continue
        assert node["Node Type"] != "Seq Scan" and "Bitmap" not in node["Node Type"], node
        if table := node.get("Relation Name"):
            assert "Index" in node["Node Type"], node
            seen = node["Actual Rows"] + node.get("Rows Removed by Filter", 0)
            read[table] = read.get(table, 0) + seen * node["Actual Loops"]
    assert read["message_terms"] == 20
    assert read["conversations"] <= 10 + 60  # to count the user's messages, and a look at each place that was ranked
    assert read["conversation_messages"] <= 60


def test_loading_is_one_round_trip_and_so_is_saving(counted_store: Any) -> None:
    counted_store.setup(search=True)
    memory = RecallMemory(session_id="now", user_id="u", store=counted_store)
    say(counted_store, "old", "the parcel", "fine")
    counted_store.executes.clear()
    memory.save_context({"input": "hello"}, {"output": "hi"})
    assert len(counted_store.executes) == 1
    assert "parcel" in memory.load_memory_variables({"input": "the parcel"})["history"]
    assert len(counted_store.executes) == 2


# RecallMemory


def recalling(store: ConversationStore, **options: Any) -> RecallMemory:
    fields = {"session_id": "now", "user_id": "u", "return_messages": True} | options
    return RecallMemory(store=store, **fields)


def window(memory: RecallMemory, said: Any = "Where is the parcel?") -> list[BaseMessage]:
    return list(memory.load_memory_variables({"input": said})["history"])


def test_what_matters_stands_before_the_newest_turns_oldest_first_and_none_twice(searched: ConversationStore) -> None:
    say(searched, "later", "a parcel in another session", "fine")
    say(searched, "now", system("be kind"), human("my parcel is late"), ai("sorry"), human("hello"), ai("hi"))
    say(searched, "now", "yet another thing", "yes", "the parcel again", "what of it?")
    told = [
        system("be kind"),
        human("a parcel in another session"),
        ai("fine"),
        human("my parcel is late"),
        ai("sorry"),
        human("the parcel again"),
        ai("what of it?"),
    ]
    assert window(recalling(searched, k=1)) == told
    assert window(recalling(searched, k=1, recall_from="session")) == [told[0], *told[3:]]
    assert window(recalling(searched, k=1, max_recalled=0)) == [told[0], *told[5:]]
    assert window(recalling(searched, k=9, recall_from="session"))[1:3] == [human("my parcel is late"), ai("sorry")]
    assert len(window(recalling(searched, k=9, recall_from="session"))) == 9
    assert window(recalling(searched, k=0))[-2:] == told[-2:]
    assert recalling(searched, k=1).buffer == [told[0], *told[5:]]
    assert recalling(searched, k=1).as_history().messages == [told[0], *told[5:]]


def test_the_limit_covers_all_and_the_newest_turns_come_first_then_what_matters_most(
    searched: ConversationStore,
) -> None:
    long = "an answer of many words, " * 9
    say(searched, "old", "parcel parcel", long, "filler", "filler", "a parcel of other words", "fine")
    say(searched, "now", system("be kind"), human("hello"), ai("hi"), human("and now"), ai("yes"))
    newest = ["be kind", "hello", "hi", "and now", "yes"]
    both = window(recalling(searched, k=2, max_recalled=9))
    assert [message.content for message in both] == [
        *("be kind", "parcel parcel", long, "filler", "filler", "a parcel of other words", "fine"), *newest[1:]
    ]  # fmt: skip
    seen: dict[int, list[Any]] = {}
    for limit in range(tokens_of_all(both) + 2):
        shown = window(recalling(searched, k=2, max_recalled=9, max_token_limit=limit))
        assert not shown or tokens_of_all(shown) <= limit
        seen[limit] = [message.content for message in shown]
    different = [contents for limit, contents in seen.items() if contents != seen.get(limit - 1)]
    assert different[:4] == [[], ["be kind"], ["be kind", "and now", "yes"], newest]
    assert all(contents[-4:] == newest[1:] for contents in different[4:])
    # What matters less is shown where what matters more does not fit; and not where that takes its place.
    assert different[4] == ["be kind", "filler", "filler", *newest[1:]]
    assert seen[tokens_of_all([both[0], *both[1:3], *both[-4:]])] == ["be kind", "parcel parcel", long, *newest[1:]]
    assert different[-1] == [message.content for message in both]


def test_the_input_may_be_text_blocks_or_messages(searched: ConversationStore) -> None:
    say(searched, "old", "my parcel", "fine")
    picture = {"type": "image_url", "image_url": {"url": "http://x/y.png"}}
    for said in (
        "the parcel",
        HumanMessage("the parcel"),
        [{"type": "text", "text": "the parcel"}, picture],
        HumanMessage([{"type": "text", "text": "the parcel"}]),
        [HumanMessage("look"), HumanMessage("the parcel")],
    ):
        assert window(recalling(searched), said) == [human("my parcel"), ai("fine")]


def test_of_several_inputs_the_one_that_is_said_counts(searched: ConversationStore) -> None:
    say(searched, "old", "my parcel", "fine", "filler", "filler", "my giraffe", "fine")
    inputs = {"question": "parcel", "context": "giraffe"}
    assert recalling(searched, input_key="question", max_recalled=1).load_memory_variables(inputs) == {
        "history": [human("my parcel"), ai("fine")]
    }
    with pytest.raises(ConfigurationError, match="input_key is not set"):
        recalling(searched).load_memory_variables(inputs)


def test_the_limit_may_be_a_function_and_wrong_fields_are_refused(searched: ConversationStore) -> None:
    say(searched, "old", "my parcel", "fine")
    memory = recalling(searched, max_token_limit=lambda inputs: int(inputs["limit"]), input_key="input")
    assert memory.load_memory_variables({"input": "parcel", "limit": 5}) == {"history": []}
    assert len(memory.load_memory_variables({"input": "parcel", "limit": 500})["history"]) == 2
    for wrong in ({"k": -1}, {"max_recalled": -1}, {"recall_from": "tenant"}, {"max_token_limit": -1}, {"top_k": 3}):
        with pytest.raises(ValueError):
            recalling(searched, **wrong)


def test_explain_says_what_was_recalled_and_from_where(searched: ConversationStore) -> None:
    say(searched, "old", "a parcel elsewhere", "fine")
    say(searched, "now", system("be kind"), human("my parcel"), ai("sorry"), human("hello"), ai("hi"))
    say(searched, "now", "quite unrelated", "yes", "newest", "yes")
    memory = recalling(searched, k=1, max_recalled=3)
    explanation = memory.explain({"input": "parcels?"})
    assert explanation.shown == window(memory, "parcels?")
    told = {(each.text, each.message_index, each.code, each.kept) for each in explanation.messages}
    assert ("a parcel elsewhere", None, "added", True) in told
    assert {("be kind", 0, "kept", True), ("my parcel", 1, "kept", True), ("newest", 7, "kept", True)} <= told
    assert ("quite unrelated", 5, "irrelevant", False) in told
    reasons = {each.text: each.reason for each in explanation.messages}
    assert reasons["a parcel elsewhere"] == "Recalled from session 'old'."
    assert reasons["my parcel"].startswith("Recalled: ")
    assert explanation.tokens == tokens_of_all(explanation.shown)
    assert "recall_from='user'" in explanation.totals()
    tight = recalling(searched, k=2, max_token_limit=tokens_of_all([system(), human("newest"), ai("yes")]))
    codes = {each.text: each.code for each in tight.explain({"input": "parcels?"}).messages}
    assert (codes["newest"], codes["quite unrelated"], codes["my parcel"]) == ("kept", "beyond_limit", "irrelevant")


@pytest.fixture(params=["by words", "by both"])
def recalled(request: pytest.FixtureRequest, server_dsn: str, schema_name: str) -> Iterator[ConversationStore]:
    """A store that recalls without pgvector, and one that recalls with it."""
    embeddings = FakeEmbeddings() if request.param == "by both" else None
    with ConversationStore(server_dsn, schema=schema_name, embeddings=embeddings) as store:
        store.setup(search=True)
        yield store


@pytest.mark.parametrize("as_messages", [True, False])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_conversation_chain_recalls_what_was_said_in_another_session(
    recalled: ConversationStore, as_messages: bool, is_async: bool
) -> None:
    say(recalled, "old", "my parcel has the number 7001", "noted")
    recalled.index_messages()
    llm = scripted("It is 7001.", "Bye.")
    memory = recalling(recalled, return_messages=as_messages)
    prompt = ChatPromptTemplate.from_messages(
        [MessagesPlaceholder("history") if as_messages else ("system", "{history}"), ("human", "{input}")]
    )
    chain = ConversationChain(llm=llm, memory=memory, prompt=prompt)
    # The word is another one where the meaning is known.
    asked = "package" if recalled.embedder else "parcel"
    for said in (f"Which is the one of my {asked}?", "Goodbye"):
        inputs = {"input": said}
        asyncio.run(chain.ainvoke(inputs)) if is_async else chain.invoke(inputs)
    first, second = (str(messages) for messages in llm.calls)
    assert "number 7001" in first and "noted" in first
    assert "It is 7001." in second and (recalled.embedder or "number 7001" not in second)
    assert [message.content for message in memory.chat_memory.messages][-2:] == ["Goodbye", "Bye."]


@tool
def track(number: int) -> str:
    """Track a parcel."""
    return f"{number} is in Oslo"


@pytest.mark.parametrize("as_messages", [True, False])
@pytest.mark.parametrize("is_async", [False, True])
def test_an_agent_recalls_whole_turns_with_their_tool_calls(
    recalled: ConversationStore, as_messages: bool, is_async: bool
) -> None:
    def agent(*answers: Any, session_id: str) -> tuple[Any, AgentExecutor]:
        llm = scripted(*answers)
        prompt = ChatPromptTemplate.from_messages(
            [
                MessagesPlaceholder("history") if as_messages else ("system", "{history}"),
                ("human", "{input}"),
                MessagesPlaceholder("agent_scratchpad"),
            ]
        )
        memory = recalling(
            recalled, session_id=session_id, return_messages=as_messages, save_intermediate_steps=True
        )
        executor = AgentExecutor(
            agent=create_tool_calling_agent(llm, [track], prompt),
            tools=[track],
            memory=memory,
            return_intermediate_steps=True,
        )
        return llm, executor

    def ask(executor: AgentExecutor, said: str) -> None:
        asyncio.run(executor.ainvoke({"input": said})) if is_async else executor.invoke({"input": said})

    calls = [{"name": "track", "args": {"number": 7001}, "id": "c", "type": "tool_call"}]
    _, executor = agent(AIMessage("", tool_calls=calls), "Your parcel is in Oslo.", session_id="old")
    ask(executor, "Where is my parcel?")
    recalled.index_messages()
    llm, executor = agent("In Oslo, as I said.", session_id="now")
    ask(executor, f"The {'delivery' if recalled.embedder else 'parcel'}, any news?")
    (asked,) = llm.calls
    assert "7001 is in Oslo" in str(asked) and "Your parcel is in Oslo." in str(asked)
    if as_messages:
        assert [message.type for message in asked] == ["human", "ai", "tool", "ai", "human"]


# The command


def test_init_makes_messages_searchable_and_status_says_by_what(
    call: Callable[..., Ended], server_dsn: str, schema_name: str  # noqa: F811
) -> None:
    where = ("--dsn", server_dsn, "--schema", schema_name)
    assert "search: off" in call("init", *where).output + call("status", *where).output
    assert "search: pg_catalog.german\n" in call("init", "--search", "german", *where).output
    assert "search: pg_catalog.german\n" in call("init", *where, "--search").output
    assert "search: pg_catalog.german\n" in call("status", *where).output
    assert '"search": "pg_catalog.german"' in call("init", *where, "--json").output
    assert '"search": "pg_catalog.german"' in call("status", *where, "--json").output
    failed = call("init", *where, "--search", "klingon")
    assert failed.code == 1 and "klingon" in failed.errors and "english" in failed.errors
