"""Items found by their meaning: vectors of their texts, which `index` names, made after the put, once a text."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from conftest import CountingPool
from fakes import FakeEmbeddings
from langgraph.store.base.embed import get_text_at_path
from psycopg2.extensions import connection as Connection
from psycopg2.extensions import make_dsn
from test_items import keys
from test_plans import Crowd, nodes
from test_recall import say
from test_recall_by_meaning import Opening, embeddings, failing, meaning, opened  # noqa: F401  # fixtures
from test_row_level_security import PASSWORD, new_role  # noqa: F401  # a fixture
from test_schema import execute
from waiting import wait_until

from pgmemory import ConfigurationError, ConversationStore, EmbeddingError, ItemStore, SchemaError
from pgmemory.langgraph_store import PostgresItemStore
from pgmemory.queries.meaning import ITEMS, MOST_TEXTS
from pgmemory.store.items import Put

HOUR = timedelta(hours=1)


@pytest.fixture
def items(meaning: ConversationStore) -> ItemStore:  # noqa: F811
    return meaning.items("u")


def put(items: ItemStore, **texts: str) -> None:
    """Put an item for each text, and wait for its vector."""
    items.put_all([Put(("facts",), key, {"text": text}) for key, text in texts.items()])
    items.store.index_messages()  # type: ignore[attr-defined]


def rows(admin: Connection, store: ConversationStore) -> list[tuple[str, bool]]:
    """The key of each text of an item, and whether it has a vector."""
    found = execute(admin, f"select key, embedding is not null from {store.schema}.item_vectors order by 1, text_hash")
    return [(key, is_made) for key, is_made in found]


# What is found


def test_what_means_alike_is_found_without_a_common_word_best_first_with_its_similarity(items: ItemStore) -> None:
    put(items, dog="my puppy is ill", car="the engine stutters", both="a hound in a car")
    assert items.search(query="dogs", by="words") == []
    found = items.search(query="dogs")
    assert keys(found) == ["dog", "both", "car"] == keys(items.search(query="dogs", by="meaning"))
    scores = [item.score for item in found]
    assert scores[0] == pytest.approx(1, abs=1e-3) and scores == sorted(scores, reverse=True)  # type: ignore[type-var]
    assert scores[1] == pytest.approx(0.5**0.5, abs=1e-2)
    assert keys(items.search(query=" ")) == [] and items.search()[0].score is None


def test_of_several_texts_the_best_counts(items: ItemStore) -> None:
    items.put(("facts",), "many", {"a": "a car", "b": ["a parcel", "a dog"]}, index=["a", "b[*]"])
    put(items, one="a dog in a car")
    assert keys(items.search(query="hound")) == ["many", "one"]


def test_filters_prefixes_pages_and_expiry_hold_by_meaning(items: ItemStore, admin: Connection) -> None:
    for number, text in enumerate(["dog", "dog car", "car", "dog dog car"]):
        items.put(("facts", f"n{number % 2}"), f"k{number}", {"text": text, "n": number}, index=["text"])
    items.put(("other",), "k", {"text": "dog"})
    items.put(("facts",), "soon", {"text": "dog"}, time_to_live=HOUR)
    execute(admin, f"update {items.store.schema}.items set expires_at = now() where key = 'soon'")
    items.store.index_messages()  # type: ignore[attr-defined]
    assert keys(items.search(("facts",), query="hounds")) == ["k0", "k3", "k1", "k2"]
    assert keys(items.search(("facts",), query="hounds", limit=2, offset=1)) == ["k3", "k1"]
    assert keys(items.search(("facts", "n1"), query="hounds")) == ["k3", "k1"]
    assert keys(items.search(("facts",), query="hounds", filter={"n": {"$lt": 2}})) == ["k0", "k1"]


def test_what_has_no_vector_comes_last_without_a_score_and_is_paged_along(items: ItemStore) -> None:
    put(items, car="car", dog="dog")
    items.put(("facts",), "none", {"text": "dog"}, index=False)
    found = items.search(query="hound")
    assert [(item.key, item.score is None) for item in found] == [("dog", False), ("car", False), ("none", True)]
    assert keys(items.search(query="hound", limit=1, offset=2)) == ["none"]


def test_reading_by_meaning_lets_a_time_to_live_begin_anew_unless_it_is_told_not_to(
    items: ItemStore, admin: Connection
) -> None:
    items.put(("facts",), "k", {"text": "dog"}, time_to_live=HOUR)
    items.store.index_messages()  # type: ignore[attr-defined]
    soon = f"update {items.store.schema}.items set expires_at = now() + interval '1 minute' returning expires_at"
    ((before,),) = execute(admin, soon)
    assert items.search(query="hound", refresh_time_to_live=False)[0].expires_at == before
    refreshed = items.search(query="hound")[0].expires_at
    assert refreshed is not None and refreshed > before + HOUR / 2


def test_users_sessions_and_tenants_find_their_own_alone(
    meaning: ConversationStore, opened: Opening  # noqa: F811
) -> None:
    tenant = opened(tenant_id="acme")
    owners = [meaning.items(), meaning.items("u"), meaning.items("u", session_id="s"), tenant.items("u")]
    for number, owner in enumerate(owners):
        owner.put(("facts",), f"k{number}", {"text": "my dog"})
    meaning.index_messages()
    tenant.index_messages()
    assert [keys(owner.search(query="hound")) for owner in owners] == [["k0"], ["k1"], ["k2"], ["k3"]]
    assert all(owner.search(query="hound")[0].score for owner in owners)


@pytest.mark.parametrize("mode", ["setting", "roles"])
def test_row_level_security_holds_for_vectors_of_items(
    opened: Opening, server_dsn: str, mode: Any, new_role: Callable[[], str]  # noqa: F811
) -> None:
    owner = opened(tenant_id="acme")
    owner.setup(search=True, row_level_security=mode)
    for tenant in ("acme", "globex"):
        role = new_role()
        owner.bind_role(role, tenant)
        store = opened(source=make_dsn(server_dsn, user=role, password=PASSWORD), tenant_id=tenant)
        put(store.items("u"), **{tenant: "my dog"})
        assert [(item.key, item.score is None) for item in store.items("u").search(query="hound")] == [(tenant, False)]
        assert store._execute("count", "select count(*) from {schema}.item_vectors", {}) == [(1,)]


# Which texts


PATHS = [
    "text",
    "a.b.c",
    "list",
    "list[0]",
    "list[-1]",
    "list[-0]",
    "list[9]",
    "list[-9]",
    "list[*]",
    "rows[*].text",
    "rows[1].more[*]",
    "rows[-1].text",
    "number",
    "null",
    'a "b\\c',
    "no.such[*].thing",
    "text[*].x",
]


def test_paths_lead_to_the_texts_that_they_lead_to_in_langgraphs_own_stores(
    items: ItemStore, embeddings: FakeEmbeddings  # noqa: F811
) -> None:
    value = {
        "text": "Grüße \N{SNOWMAN}",
        "a": {"b": {"c": "deep"}},
        "list": ["one", "two", {"three": 3}],
        "rows": [{"text": "first"}, {"text": "second", "more": ["x", "y"]}],
        "number": 1.5,
        "null": None,
        'a "b\\c': "odd",
    }
    # The order of keys is the database's.
    for given, path in [*[(value, path) for path in PATHS], ({"text": "Grüße \N{SNOWMAN}"}, "$")]:
        items.clear()  # else a text that is known is not embedded again
        embeddings.batches.clear()
        items.put(("facts",), "k", given, index=[path])
        items.store.index_messages()  # type: ignore[attr-defined]
        assert sorted(embeddings.texts) == sorted(get_text_at_path(given, path)), path


def test_without_an_index_the_whole_value_is_one_text_and_with_false_or_none_of_its_paths_it_has_none(
    items: ItemStore, embeddings: FakeEmbeddings  # noqa: F811
) -> None:
    items.put(("facts",), "whole", {"text": "dog", "n": 1})
    items.put(("facts",), "not", {"text": "cat"}, index=False)
    items.put(("facts",), "nowhere", {"text": "cat"}, index=[])
    items.put(("facts",), "blank", {"text": " "}, index=["text"])
    items.store.index_messages()  # type: ignore[attr-defined]
    assert embeddings.texts == ['{"n": 1, "text": "dog"}']


def test_of_an_item_so_many_texts_have_vectors_the_first_ones(items: ItemStore, admin: Connection) -> None:
    many = [f"text {number}" for number in range(MOST_TEXTS + 50)]
    items.put(("facts",), "k", {"a": many, "b": ["dog"]}, index=["b[*]", "a[*]"])
    items.store.index_messages()  # type: ignore[attr-defined]
    assert rows(admin, items.store) == [("k", True)] * MOST_TEXTS  # type: ignore[arg-type]
    assert items.search(query="hound")[0].score == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("text", "index must be a list of paths, None or False, not 'text'"),
        (True, "not True"),
        ([1], "index holds 1, which is no path such as"),
        ([""], "holds '', which is no path such as"),
        (["a..b"], "'a..b'"),
        (["a[x]"], "'a\\[x\\]'"),
        (["a[0"], "'a\\[0'"),
        (["*"], "'\\*'"),
        (["{a,b}"], "'{a,b}'"),
        (["dietary_preferences_and_allergies_of_the_user" * 20 + ".*"], "which is no path"),
        (["a\0"], "which is no path"),
        (["\ud800"], "which is no path"),
    ],
)
def test_what_is_no_path_is_refused_before_the_database_is_asked(index: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ConversationStore("postgresql://nowhere").items("u").put(("facts",), "k", {}, index=index)


# Made once a text, and kept right


def test_a_text_is_embedded_once_however_many_items_hold_it_and_again_only_when_it_changes(
    meaning: ConversationStore, embeddings: FakeEmbeddings, admin: Connection  # noqa: F811
) -> None:
    for user in ("u", "v"):
        meaning.items(user).put(("facts",), "k", {"a": ["dog", "car", "dog"]}, index=["a[*]"])
    meaning.index_messages()
    assert sorted(embeddings.texts) == ["car", "dog"]
    items = meaning.items("u")
    items.put(("facts",), "k", {"a": ["new", "dog"]}, index=["a[*]"])
    meaning.index_messages()
    assert embeddings.texts[2:] == ["new"] and len(rows(admin, meaning)) == 4
    items.put(("facts",), "k", {"a": ["new", "dog"]}, index=["a[0]"])
    items.put(("facts",), "k", {"a": ["new", "dog"], "b": 1}, index=["a[0]"])
    items.search(refresh_time_to_live=True)
    assert rows(admin, meaning) == [("k", True)] * 3
    assert embeddings.texts[2:] == ["new"]


def test_what_was_put_before_and_what_another_model_made_is_embedded_where_it_was_to_be(
    store: ConversationStore, server_dsn: str, admin: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgmemory.store.meaning._ITEMS_AT_ONCE", 2)
    for number in range(3):
        store.items(f"u{number}").put_all(
            [
                Put(("facts",), "not", {"text": "dog"}, None, False),
                Put(("facts",), "k", {"text": f"dog {number}", "other": "x"}, None, ["text"]),
            ]
        )
    for model in ("concepts", "other"):
        made = FakeEmbeddings(model)
        with ConversationStore(server_dsn, schema=store.schema, embeddings=made) as later:
            later.setup(search=True)
            wait_until(lambda: rows(admin, store) == [("k", True)] * 3, "all have their vectors")
            assert sorted(made.texts) == ["dog 0", "dog 1", "dog 2"]
            # From then on whoever puts lets them wait, embedder or not.
            store.items("u1").put(("facts",), "k", {"text": f"hound {model}"}, index=["text"])
            assert rows(admin, store).count(("k", False)) == 1
            later.index_messages()
            assert later.items("u1").search(query="puppy")[0].score is not None
        store.items("u1").put(("facts",), "k", {"text": "dog 1"}, index=["text"])


def test_deleting_clearing_pruning_and_erasing_leave_no_vector(
    meaning: ConversationStore, admin: Connection  # noqa: F811
) -> None:
    items = meaning.items("u")
    put(items, a="dog", b="car", c="x", d="y")
    say(meaning, "s", "hello", "hi")
    meaning.items("u", session_id="s").put(("facts",), "session", {"text": "dog"})
    meaning.items("v").put(("facts",), "user", {"text": "dog"})
    items.put(("facts",), "d", {"text": "z"}, time_to_live=HOUR)
    meaning.index_messages()
    assert sorted(key for key, _ in rows(admin, meaning)) == ["a", "b", "c", "d", "session", "user"]
    items.delete(("facts",), "a")
    items.put_all([Put(("facts",), "b", None)])
    execute(admin, f"update {meaning.schema}.items set expires_at = now() where key = 'd'")
    meaning.prune()
    meaning.erase_conversation("s", user_id="u")
    meaning.erase_user("v")
    assert rows(admin, meaning) == [("c", True)]
    items.clear()
    assert rows(admin, meaning) == []


def test_what_is_deleted_while_it_is_being_made_leaves_nothing(
    meaning: ConversationStore, embeddings: FakeEmbeddings, admin: Connection  # noqa: F811
) -> None:
    embeddings.before = lambda texts: execute(admin, f"delete from {meaning.schema}.items")
    put(meaning.items("u"), k="dog")
    assert rows(admin, meaning) == [] and embeddings.texts == ['{"text": "dog"}']


# An embedder that fails, or is not there


def test_a_failing_embedder_costs_no_item_and_words_are_looked_for_instead(
    items: ItemStore, embeddings: FakeEmbeddings, admin: Connection, caplog: pytest.LogCaptureFixture  # noqa: F811
) -> None:
    embeddings.before = failing
    with caplog.at_level(logging.WARNING):
        items.put(("facts",), "k", {"text": "a dog"})
        wait_until(lambda: "items cannot be found by their meaning yet" in caplog.text, "the failure is logged")
        assert keys(items.search(query="dog")) == ["k"] and items.search(query="hound") == []
    assert "found by its words alone" in caplog.text and "sk-secret" not in caplog.text
    with pytest.raises(EmbeddingError):
        put(items, other="car")
    assert rows(admin, items.store) == [("k", False), ("other", False)]  # type: ignore[arg-type]
    embeddings.before = lambda texts: None
    put(items, third="x")
    assert keys(items.search(query="hound"))[0] == "k"


def test_texts_of_messages_that_cannot_be_embedded_keep_no_item_waiting(
    meaning: ConversationStore, embeddings: FakeEmbeddings, admin: Connection  # noqa: F811
) -> None:
    def refuse(texts: list[str]) -> None:
        if "too long" in texts:
            raise ValueError

    embeddings.before = refuse
    meaning._embed_soon = lambda *_: None  # type: ignore[method-assign]
    say(meaning, "s", "too long")
    with pytest.raises(EmbeddingError):
        put(meaning.items("u"), k="dog")
    assert rows(admin, meaning) == [("k", True)]


def test_without_embeddings_or_vectors_of_its_model_items_are_found_by_words_and_it_says_why_not_by_meaning(
    meaning: ConversationStore, opened: Opening, server_dsn: str, schema_name: str  # noqa: F811
) -> None:
    put(meaning.items("u"), k="a dog")
    with ConversationStore(server_dsn, schema=schema_name) as without:
        assert keys(without.items("u").search(query="dog")) == ["k"]
        with pytest.raises(ConfigurationError, match="embeddings="):
            without.items("u").search(query="dog", by="meaning")
    other = opened(FakeEmbeddings("other"))
    assert keys(other.items("u").search(query="dog")) == ["k"]
    with pytest.raises(SchemaError, match=r"vectors of 'FakeEmbeddings concepts', not of 'FakeEmbeddings other'"):
        other.items("u").search(query="dog", by="meaning")
    for wrong in ("sense", "both", "", 7):
        with pytest.raises(ConfigurationError, match="by must be one of"):
            meaning.items("u").search(query="dog", by=wrong)  # type: ignore[arg-type]


def test_vectors_that_another_process_has_made_meanwhile_are_found(
    opened: Opening, store: ConversationStore  # noqa: F811
) -> None:
    early = opened().items("u")
    early.put(("facts",), "k", {"text": "a dog"})
    assert early.search(query="hound") == []
    opened().setup(search=True)
    assert keys(early.search(query="hound", by="meaning")) == ["k"]


def test_a_text_without_direction_hides_nothing(
    items: ItemStore, embeddings: FakeEmbeddings, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    monkeypatch.setattr(embeddings, "_vector", lambda text: [0.0] * 4 if "void" in text else [1.0, "dog" in text, 0, 0])
    items.put(("facts",), "k", {"a": ["void", "dog"]}, index=["a[*]"])
    put(items, void="void")
    assert [(item.key, item.score is None) for item in items.search(query="dog")] == [("k", False), ("void", True)]
    assert sorted(keys(items.search(query="void"))) == ["k", "void"]  # by their words


# What it costs


def test_a_put_and_a_search_are_one_round_trip_each(opened: Opening, server_dsn: str) -> None:  # noqa: F811
    pool = CountingPool(server_dsn)
    try:
        store = opened(source=pool)
        store.setup(search=True)
        put(store.items("u"), k="dog")
        store._embed_soon = lambda *_: None  # type: ignore[method-assign]
        for operation in (
            lambda: store.items("u").put(("facts",), "k", {"text": "a puppy"}, index=["text"]),
            lambda: store.items("u").search(query="hound"),
        ):
            pool.executes.clear()
            operation()
            assert len(pool.executes) == 1
    finally:
        pool.closeall()


@pytest.mark.parametrize("statistics", ["none", "right"])
def test_items_and_vectors_of_the_owner_below_the_prefix_are_read_by_index_and_nobody_elses(
    meaning: ConversationStore, server_dsn: str, admin: Connection, statistics: str  # noqa: F811
) -> None:
    items = meaning.items("u")
    execute(
        admin,
        f"""
        alter table {meaning.schema}.items set (autovacuum_enabled = off), disable trigger user;
        alter table {meaning.schema}.item_vectors set (autovacuum_enabled = off);
        insert into {meaning.schema}.items (tenant_id, owner_id, user_id, session_id, namespace, key, value, words,
                                            created_at, updated_at)
        select '', case when n <= 200 then '{items._own["owner_id"]}'::uuid else md5('other' || n % 100)::uuid end, 'x',
               '', array[case n % 2 when 0 then 'facts' else 'others' end], n::text, '{{{{}}}}', '', now(), now()
        from generate_series(1, 5000) n;
        insert into {meaning.schema}.item_vectors (tenant_id, owner_id, namespace, key, text_hash, embedding)
        select i.tenant_id, i.owner_id, i.namespace, i.key, sha256((i.key || p)::bytea),
               format('[%s,1,0,1]', p)::halfvec
        from {meaning.schema}.items i, generate_series(1, 2) p;
        alter table {meaning.schema}.items enable trigger user
        """,
    )
    if statistics == "right":
        execute(admin, f"analyze {meaning.schema}.items, {meaning.schema}.item_vectors")
    pool = CountingPool(server_dsn)
    with ConversationStore(pool, schema=meaning.schema, embeddings=FakeEmbeddings()) as app:
        look = partial(app.items("u").search, ("facts",), query="dog", limit=5, refresh_time_to_live=False)
        look()
        crowd = Crowd(app, pool)
        query = crowd.sent_by(look)
        read: dict[str, float] = {}
        for node in nodes(crowd.explained(query, "with found")):
            if table := node.get("Relation Name"):
                assert node["Index Name"] == f"{table}_pkey", node
                seen = node["Actual Rows"] + node.get("Rows Removed by Filter", 0)
                read[table] = read.get(table, 0) + seen * node["Actual Loops"]
        assert read == {"item_vectors": 200, "items": 100}
    pool.closeall()


@pytest.mark.parametrize("statistics", ["none", "right"])
def test_as_many_texts_are_looked_at_as_are_claimed_however_many_wait(
    meaning: ConversationStore, server_dsn: str, admin: Connection, statistics: str  # noqa: F811
) -> None:
    execute(admin, f"alter table {meaning.schema}.item_vectors set (autovacuum_enabled = off)")
    meaning._embed_soon = lambda *_: None  # type: ignore[method-assign]
    meaning.items("u").put_all([Put(("facts",), f"k{number}", {"n": number}) for number in range(1000)])
    if statistics == "right":
        execute(admin, f"analyze {meaning.schema}.items, {meaning.schema}.item_vectors")
    pool = CountingPool(server_dsn)
    with ConversationStore(pool, schema=meaning.schema, embeddings=FakeEmbeddings()) as app:
        app.items("u").get(("facts",), "k0")
        crowd = Crowd(app, pool)
        query = crowd.sent_by(lambda: app._embed_batch(ITEMS), holding="with due as")
        seen = [
            (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
            for node in nodes(crowd.explained(query, "with due as"))
            if node.get("Alias") in ("v", "o")  # what waits, and who makes the same
        ]
        assert seen[0] == 64 >= sum(seen[1:])
    pool.closeall()


# LangGraph


def test_a_store_of_langgraphs_goes_by_meaning_and_by_its_fields(
    meaning: ConversationStore, embeddings: FakeEmbeddings  # noqa: F811
) -> None:
    graph_store = PostgresItemStore(meaning.items("u"), index={"fields": ["text"]})
    graph_store.put(("facts",), "dog", {"text": "my puppy", "other": "x"})
    graph_store.put(("facts",), "car", {"text": "y", "title": "a car"}, index=["title"])
    graph_store.put(("facts",), "not", {"text": "hound"}, index=False)
    meaning.index_messages()
    assert sorted(embeddings.texts) == ["a car", "my puppy"]
    found = graph_store.search(("facts",), query="hounds")
    assert keys(found) == ["dog", "car", "not"] and found[0].score == pytest.approx(1, abs=1e-3)
    assert found[2].score is None
    with pytest.raises(ConfigurationError, match=r"not \['dims', 'embed'\]: embeddings are given to the Conv"):
        PostgresItemStore(meaning.items("u"), index={"dims": 4, "embed": embeddings})
