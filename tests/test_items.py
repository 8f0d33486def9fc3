"""Facts as items: by namespace and key, filters, words, namespaces, times to live; beside LangGraph's own store."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from conftest import CountingPool
from langgraph.store.base import BaseStore, GetOp, ListNamespacesOp, MatchCondition, PutOp, SearchOp
from langgraph.store.memory import InMemoryStore
from psycopg2 import sql
from psycopg2.extensions import connection as Connection
from test_plans import Crowd, nodes
from waiting import wait_until

from pgmemory import ConfigurationError, ConversationHeldError, ConversationStore, ItemStore, MessageNotStorableError
from pgmemory.langgraph_store import PostgresItemStore
from pgmemory.store.items import Put

HOUR = timedelta(hours=1)
VALUE = {
    "z": 1,
    "a": [1.0, 1e22, -0.0, 10**30, None, True],
    "text": "It's a \\ \N{SNOWMAN} \U0001f600 'test'; -- %s {schema}",
    "": {"nested": {"b": 2, "a": 1}},
}


@pytest.fixture
def items(store: ConversationStore) -> ItemStore:
    return store.items("u")


def ask(admin: Connection, statement: str, schema: str) -> list[tuple[Any, ...]]:
    with admin.cursor() as cursor:
        cursor.execute(sql.SQL(statement).format(schema=sql.Identifier(schema)))
        return cursor.fetchall() if cursor.description else []


def keys(found: list[Any]) -> list[str]:
    return [item.key for item in found]


# Putting and getting


def test_a_value_comes_back_as_it_was_put_in_its_order(items: ItemStore) -> None:
    items.put(("facts", "Wörk"), "a key", VALUE)
    item = items.get(("facts", "Wörk"), "a key")
    assert item is not None
    assert (item.namespace, item.key) == (("facts", "Wörk"), "a key")
    assert json.dumps(item.value) == json.dumps(VALUE)
    assert item.created_at == item.updated_at and item.created_at.tzinfo is not None
    assert items.get(("facts",), "a key") is None


def test_putting_again_replaces_the_value_and_keeps_when_it_was_made(items: ItemStore) -> None:
    items.put(("facts",), "k", {"n": 1})
    first = items.get(("facts",), "k")
    items.put(("facts",), "k", {"n": 2})
    second = items.get(("facts",), "k")
    assert first is not None and second is not None
    assert (second.value, second.created_at) == ({"n": 2}, first.created_at)
    assert second.updated_at > first.updated_at
    assert (items.delete(("facts",), "k"), items.delete(("facts",), "k")) == (True, False)
    assert items.get(("facts",), "k") is None


def test_users_sessions_and_the_tenant_have_items_of_their_own(store: ConversationStore) -> None:
    owners = [
        store.items(),
        store.items("u"),
        store.items("v"),
        store.items(session_id="s"),
        store.items("u", session_id="s"),
        store.items("u", session_id="s" * 5000),
    ]
    for number, owner in enumerate(owners):
        owner.put(("facts",), "k", {"n": number})
    assert [owner.search()[0].value["n"] for owner in owners] == list(range(6))
    assert owners[1].clear() == 1
    assert [len(owner.list_namespaces()) for owner in owners] == [1, 0, 1, 1, 1, 1]


def test_one_round_trip_each(counted_store: Any) -> None:
    items = counted_store.items("u")
    items.get(("facts",), "k")  # looks first whether the schema fits
    for operation in (
        lambda: items.put(("facts",), "k", {}, time_to_live=HOUR),
        lambda: items.put_all([Put(("facts",), key, {}) for key in "abc"]),
        lambda: items.get(("facts",), "k"),
        lambda: items.search(("facts",), query="word", filter={"n": 1}),
        lambda: items.list_namespaces(prefix=("facts",)),
        lambda: items.delete(("facts",), "k"),
        lambda: items.clear(),
    ):
        counted_store.executes.clear()
        operation()
        assert len(counted_store.executes) == 1


def test_a_value_that_cannot_be_kept_is_refused_and_nothing_is_put(items: ItemStore) -> None:
    for value in ({"a": "\0"}, {"\0": 1}, {"a": ["\ud800"]}, {"a": object()}):
        with pytest.raises(MessageNotStorableError, match="value"):
            items.put_all([Put(("facts",), "a", {}), Put(("facts",), "b", value)])
    assert items.search() == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda items: items.put((), "k", {}), "namespace must not be empty"),
        (lambda items: items.put("facts", "k", {}), "namespace must be a tuple"),
        (lambda items: items.put(("",), "k", {}), "empty label"),
        (lambda items: items.put(("a.b",), "k", {}), "period"),
        (lambda items: items.put((1,), "k", {}), "must be text, not int"),
        (lambda items: items.get(("a",), "\0"), "key .* NUL"),
        (lambda items: items.get(("a",), "\ud800"), "key .* surrogate"),
        (lambda items: items.put(("a" * 600,), "k" * 600, {}), "not be longer than 1000 bytes.* 1208"),
        (lambda items: items.put(("a",), "k", []), "value must be a dict, not list"),
        (lambda items: items.put(("a",), "k", {}, time_to_live=60), "time_to_live must be"),
        (lambda items: items.search(limit=-1), "limit must be"),
        (lambda items: items.search(filter={"a": {"$in": [1]}}), "operator '\\$in'.*\\$eq, \\$ne"),
        (lambda items: items.search(filter={"a": {"$gt": None}}), "'a' by \\$gt with a NoneType"),
        (lambda items: items.search(filter=["a"]), "filter must be a dict"),
        (lambda items: items.list_namespaces(max_depth=0), "max_depth must be"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_the_database_is_asked(
    call: Callable[[ItemStore], object], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        call(ConversationStore("postgresql://nowhere").items("u"))


def test_the_longest_names_fit_into_the_index(server_dsn: str, store: ConversationStore) -> None:
    with ConversationStore(server_dsn, schema=store.schema, tenant_id="\u20ac" * 333) as tenant:
        items = tenant.items("\U0001f600" * 250)
        namespace, key = tuple("abcdefgh" * 10), "".join(map(chr, range(256, 396)))
        items.put(namespace, key, {"n": 1})
        assert items.get(namespace, key) is not None


# Searching


def test_filters_compare_numbers_as_numbers_and_texts_by_code_points(items: ItemStore) -> None:
    for key, value in {
        "9": {"n": 9, "day": "2026-11-09"},
        "10": {"n": 10.0, "day": "2026-11-10"},
        "text": {"n": "10", "day": "Z", "at": {"city": "Ulm", "floor": 3}},
        "null": {"n": None, "at": {"city": "Bonn"}},
    }.items():
        items.put(("facts",), key, value)
    for filter, expected in [
        ({"n": 10}, {"10"}),
        ({"n": {"$eq": "10"}}, {"text"}),
        ({"n": None}, {"null"}),
        ({"day": None}, {"null"}),
        ({"n": {"$ne": 10}}, {"9", "text", "null"}),
        ({"n": {"$gt": 9}}, {"10"}),
        ({"n": {"$gte": 9, "$lt": 10}}, {"9"}),
        ({"n": {"$lte": 10.0}}, {"9", "10"}),
        ({"day": {"$gt": "2026-11-09"}}, {"10", "text"}),
        ({"day": {"$lt": "a"}}, {"9", "10", "text"}),
        ({"at": {"city": "Ulm", "floor": {"$gt": 2}}}, {"text"}),
        ({"n": 9, "day": "2026-11-10"}, set()),
        ({}, {"9", "10", "text", "null"}),
    ]:
        assert set(keys(items.search(("facts",), filter=filter))) == expected, filter


def test_words_are_found_in_texts_and_the_best_come_first(items: ItemStore) -> None:
    items.put(("facts",), "food", {"likes": "Pizza with cheese", "n": 1})
    items.put(("facts",), "both", {"likes": ["olives", "and pizza, and pizza again"], "n": 2})
    items.put(("facts",), "pets", {"has": "a dog called O'Neil \\ co", "pizza": "no"})
    found = items.search(("facts",), query="does she like PIZZA or olives?")
    assert keys(found) == ["both", "food"]
    assert all(item.score is not None and item.score > 0 for item in found)
    assert keys(items.search(query="o'neil \\ & | ! ( <->")) == ["pets"]
    assert keys(items.search(query="pizza", filter={"n": 1})) == ["food"]
    assert items.search(query="!?") == items.search(query="cat") == []
    assert [item.score for item in items.search()] == [None] * 3


def test_a_large_value_is_kept_though_its_words_are_not_found(items: ItemStore) -> None:
    items.put(("facts",), "large", {"text": " ".join(f"word{n}" for n in range(60_000)), "n": 1})
    assert keys(items.search(filter={"n": 1})) == ["large"]
    assert items.search(query="word1") == []


def test_the_last_put_comes_first_and_pages_follow_each_other(items: ItemStore) -> None:
    for key in ("c", "a", "b"):
        items.put(("facts",), key, {})
    items.put(("facts",), "c", {"again": True})
    assert keys(items.search()) == ["c", "b", "a"]
    assert [keys(items.search(limit=2, offset=offset)) for offset in (0, 2, 4)] == [["c", "b"], ["a"], []]


def test_a_prefix_ends_at_a_label(items: ItemStore) -> None:
    for namespace in (("a",), ("a", "b"), ("a", "b", "c"), ("a", "bc"), ("ab",), ("a", "b\x01"), ("a%",), ("a", "*")):
        items.put(namespace, "k", {})
    below = {("a", "b"), ("a", "b", "c")}
    assert {item.namespace for item in items.search(("a", "b"))} == below
    assert set(items.list_namespaces(prefix=("a", "b"))) == below
    assert items.clear(("a", "b")) == 2
    assert len(items.search()) == 6


# Times to live


def expiry(admin: Connection, store: ConversationStore) -> dict[str, Any]:
    return dict(ask(admin, "select key, expires_at from {schema}.items", store.schema))


def test_an_expired_item_is_as_if_it_were_not_there(store: ConversationStore, admin: Connection) -> None:
    items = store.items("u")
    items.put(("facts",), "short", {"n": 1}, time_to_live=timedelta(milliseconds=1))
    wait_until(lambda: items.get(("facts",), "short", refresh_time_to_live=False) is None, "it expires")
    assert items.get(("facts",), "short") is None
    assert items.search() == items.search(filter={"n": 1}) == items.list_namespaces() == []
    assert items.delete(("facts",), "short") is False
    items.put(("facts",), "short", {}, time_to_live=timedelta(milliseconds=1))
    wait_until(lambda: items.search(refresh_time_to_live=False) == [], "it expires")
    before = time.time()
    items.put(("facts",), "short", {})
    found = items.get(("facts",), "short")
    assert found is not None and found.created_at.timestamp() > before - 60
    assert found.created_at == found.updated_at  # another one than the expired one
    assert expiry(admin, store) == {"short": None}


def test_reading_lets_a_time_to_live_begin_anew_unless_it_is_told_not_to(
    store: ConversationStore, admin: Connection
) -> None:
    items = store.items("u")
    for key in ("got", "searched", "neither"):
        items.put(("facts",), key, {"key": key}, time_to_live=HOUR)
    items.put(("facts",), "for ever", {})
    made = expiry(admin, store)
    items.get(("facts",), "got", refresh_time_to_live=False)
    items.search(refresh_time_to_live=False)
    items.get(("facts",), "for ever")
    assert expiry(admin, store) == made
    items.get(("facts",), "got")
    items.search(filter={"key": "searched"})
    now = expiry(admin, store)
    assert {key for key in now if now[key] != made[key]} == {"got", "searched"}
    assert now["got"] > made["got"]


def test_an_item_says_when_it_expires_as_it_stands_after_it_was_read(
    store: ConversationStore, admin: Connection
) -> None:
    items = store.items("u")
    items.put(("facts",), "k", {"text": "word"}, time_to_live=HOUR)
    for refresh in (False, True):
        for read in (
            lambda: items.get(("facts",), "k", refresh_time_to_live=refresh),  # noqa: B023
            lambda: items.search(query="word", refresh_time_to_live=refresh)[0],  # noqa: B023
        ):
            before = expiry(admin, store)["k"]
            item = read()
            assert item is not None and item.expires_at == expiry(admin, store)["k"]
            assert (item.expires_at > before) == refresh
    items.put(("facts",), "k", {})
    (item,) = items.search()
    assert item.expires_at is None


def test_reading_does_not_wait_for_a_writer(store: ConversationStore, admin: Connection) -> None:
    items = store.items("u")
    items.put(("facts",), "k", {}, time_to_live=HOUR)
    admin.autocommit = False
    ask(admin, "select 1 from {schema}.items for update", store.schema)
    try:
        assert items.get(("facts",), "k") is not None
        assert keys(items.search()) == ["k"]
    finally:
        admin.rollback()
        admin.autocommit = True


# Holds


def test_of_a_held_session_items_are_put_and_none_deleted(store: ConversationStore) -> None:
    store.set_metadata("s", {}, user_id="u")
    items = store.items("u", session_id="s")
    items.put(("facts",), "k", {"n": 1})
    store.hold("s", user_id="u", reason="case 117")
    items.put(("facts",), "k", {"n": 2})
    for change in (
        lambda: items.delete(("facts",), "k"),
        items.clear,
        lambda: items.put_all([Put(("facts",), "new", {}), Put(("facts",), "k", None)]),
    ):
        with pytest.raises(ConversationHeldError, match="'s'.*case 117"):
            change()
    assert keys(items.search()) == ["k"]
    store.items("u").put(("facts",), "k", {})
    assert store.items("u").clear() == 1
    store.release("s", user_id="u")
    assert items.clear() == 1


# Plans


def test_a_statement_touches_the_items_of_its_owner_and_prefix_alone(
    counted_store: Any, counting_pool: CountingPool, admin: Connection
) -> None:
    store = counted_store
    ask(
        admin,
        """insert into {schema}.items (tenant_id, owner_id, user_id, session_id, namespace, key, value, words,
                                     created_at, updated_at)
           select '', md5('other' || n % 100)::uuid, 'other', '', array['facts'], n::text, '{{}}', '', now(), now()
           from generate_series(1, 4000) n""",
        store.schema,
    )
    items = store.items("u")
    items.put_all([Put(("many",), str(n), {"n": n}) for n in range(300)])
    items.put_all([Put(("few", str(n)), "k", {"text": f"word{n}"}, HOUR) for n in range(3)])
    ask(admin, "analyze {schema}.items", store.schema)
    crowd = Crowd(store, counting_pool)
    for operation, beginning, most in (
        (lambda: items.get(("few", "1"), "k"), "with asked", 3),
        (lambda: items.search(("few",), query="word1"), "with found", 5),
        (lambda: items.list_namespaces(prefix=("few", "*")), "select distinct", 3),
        (lambda: items.put(("few", "1"), "k", {}), "insert into", 0),
        (lambda: items.delete(("few", "1"), "k"), "with held", 1),
    ):
        touched = 0
        for node in nodes(crowd.explained(crowd.sent_by(operation), beginning)):
            if node.get("Relation Name") == "items" and node["Node Type"] != "ModifyTable":
                assert node["Node Type"] in ("Index Scan", "Index Only Scan"), node
                assert node["Index Name"] == "items_pkey"
                touched += (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
        assert touched <= most, beginning


# LangGraph


def operate(store: BaseStore) -> list[Any]:
    """Run the same operations on a store, and return what each gave, without its times."""

    def seen(result: Any) -> Any:
        if isinstance(result, list):
            return sorted(map(seen, result), key=repr)
        return (result.namespace, result.key, result.value) if hasattr(result, "namespace") else result

    results: list[Any] = []
    for namespace, key, value in [
        (("users", "u1"), "prefs", {"theme": "dark", "size": 11}),
        (("users", "u2"), "prefs", {"theme": "light", "size": 9}),
        (("users", "u1", "facts"), "pet", {"kind": "dog", "at": {"city": "Ulm"}}),
        (("users", "u1", "facts"), "age", {"size": 42, "tags": ["a", "b"]}),
        (("docs", "v1"), "1", {"text": "a"}),
        (("docs", "v2"), "1", {"text": "b"}),
        (("docs", "v2"), "gone", {"text": "c"}),
    ]:
        results.append(store.put(namespace, key, value))
    store.delete(("docs", "v2"), "gone")
    store.delete(("docs", "v2"), "never there")
    store.put(("users", "u2"), "prefs", {"theme": "dark", "size": 10})
    results += [
        store.get(("users", "u1"), "prefs"),
        store.get(("docs", "v2"), "gone"),
        store.search(()),
        store.search(("users",)),
        store.search(("users", "u1")),
        store.search(("user",)),
        store.search(("users",), filter={"theme": "dark"}),
        store.search(("users",), filter={"theme": {"$ne": "dark"}}),
        store.search(("users", "u2"), filter={"size": {"$gt": 9, "$lte": 10}}),
        store.search(("users",), filter={"at": {"city": "Ulm"}}),
        store.search(("users",), filter={"tags": ["a", "b"]}),
        store.search(("users",), filter={"nothing": None}),
        [len(store.search((), limit=4, offset=offset)) for offset in (0, 4, 8)],
        store.list_namespaces(),
        store.list_namespaces(prefix=("users",)),
        store.list_namespaces(prefix=("users", "*", "facts")),
        store.list_namespaces(suffix=("v1",)),
        store.list_namespaces(suffix=("docs", "*")),
        store.list_namespaces(prefix=("*",), suffix=("u1", "*"), max_depth=2),
        store.list_namespaces(max_depth=1),
        store.list_namespaces(limit=2, offset=1),
        store.batch(
            [
                GetOp(("docs", "v1"), "1"),
                PutOp(("docs", "v1"), "1", {"text": "new"}),
                PutOp(("docs", "v2"), "1", None),
                SearchOp(("docs",)),
                ListNamespacesOp((MatchCondition("prefix", ("docs",)),), 1),
                PutOp(("docs", "v1"), "1", {"text": "newest"}),
                GetOp(("docs", "v2"), "1"),
            ]
        ),
        store.search(("docs",)),
        store.get(("users",), "prefs"),  # last, for theirs lists this namespace from then on
    ]
    for bad in ((), ("langgraph",), ("a.b",), ("",)):
        with pytest.raises(ValueError):
            store.put(bad, "k", {})
    return [seen(result) for result in results]


def test_langgraphs_own_store_and_ours_give_the_same(store: ConversationStore) -> None:
    assert operate(PostgresItemStore(store.items("u"))) == operate(InMemoryStore())


def test_pages_and_namespaces_are_in_the_order_of_langgraphs_own(store: ConversationStore) -> None:
    ours, theirs = PostgresItemStore(store.items("u")), InMemoryStore()
    for label in ("b", "B", "a b", "ä", "a", "\U0001f600", "\uffff", "a-b", "_"):
        ours.put((label, "x"), "k", {})
        theirs.put((label, "x"), "k", {})
    assert ours.list_namespaces() == theirs.list_namespaces()


def test_of_several_prefixes_and_suffixes_all_hold_as_in_langgraphs_own(store: ConversationStore) -> None:
    ours, theirs = PostgresItemStore(store.items("u")), InMemoryStore()
    for namespace in (("a",), ("a", "b"), ("a", "c"), ("a", "b", "c"), ("b", "a", "c"), ("a", "b", "c", "d")):
        ours.put(namespace, "k", {})
        theirs.put(namespace, "k", {})
    paths = [("a",), ("b",), ("*", "b"), ("a", "*", "c"), ("*", "*", "*"), ()]
    several = [
        (MatchCondition(first, one), MatchCondition(second, other), MatchCondition("prefix", ("*",)))
        for first, second in (("prefix", "prefix"), ("suffix", "suffix"), ("prefix", "suffix"))
        for one in paths
        for other in paths
    ]
    for depth in (None, 2):
        asked = [ListNamespacesOp(conditions, depth) for conditions in several]  # type: ignore[arg-type]
        found = theirs.batch(asked)
        assert ours.batch(asked) == found and 0 < sum(map(bool, found)) < len(found)


def test_asynchronous_callers_get_the_same_beside_the_event_loop(store: ConversationStore) -> None:
    graph_store = PostgresItemStore(store.items("u"))

    async def talk() -> Any:
        await asyncio.gather(*(graph_store.aput(("facts",), str(n), {"n": n}) for n in range(5)))
        await graph_store.adelete(("facts",), "0")
        return await graph_store.aget(("facts",), "1"), await graph_store.asearch(("facts",), query="word")

    item, found = asyncio.run(talk())
    assert (item.value, found) == ({"n": 1}, [])
    assert len(graph_store.search(("facts",))) == 4


def test_langgraphs_minutes_are_times_to_live(store: ConversationStore, admin: Connection) -> None:
    graph_store = PostgresItemStore(store.items("u"), ttl={"default_ttl": 90.0, "refresh_on_read": False})
    graph_store.put(("facts",), "by default", {})
    graph_store.put(("facts",), "own", {}, ttl=0.5)
    graph_store.put(("facts",), "for ever", {}, ttl=None)
    spans = dict(ask(admin, "select key, time_to_live from {schema}.items", store.schema))
    assert spans == {"by default": timedelta(minutes=90), "own": timedelta(seconds=30), "for ever": None}
    made = expiry(admin, store)
    graph_store.get(("facts",), "own")
    graph_store.search(("facts",))
    assert expiry(admin, store) == made
    graph_store.get(("facts",), "own", refresh_ttl=True)
    assert expiry(admin, store) != made


def test_a_search_of_langgraphs_has_scores(store: ConversationStore) -> None:
    graph_store = PostgresItemStore(store.items("u"))
    graph_store.put(("facts",), "k", {"text": "likes pizza"})
    (found,) = graph_store.search(("facts",), query="pizza?")
    assert found.score is not None and found.score > 0
    assert graph_store.search(("facts",))[0].score is None


def test_the_adapter_takes_items_and_nothing_else(store: ConversationStore) -> None:
    with pytest.raises(ConfigurationError, match="must be an ItemStore"):
        PostgresItemStore(store)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="not by 'infix'"):
        infix = MatchCondition("infix", ("a",))  # type: ignore[arg-type]
        PostgresItemStore(store.items("u")).batch([ListNamespacesOp((infix,))])


@pytest.mark.parametrize("namespace", ["facts", None, ["a", ""]])
def test_a_namespace_that_is_none_is_refused_by_every_method(items: ItemStore, namespace: Any) -> None:
    for use in (
        lambda: items.get(namespace, "k"),
        lambda: items.get_all([(namespace, "k", True)]),
        lambda: items.put(namespace, "k", {}),
        lambda: items.put_all([Put(namespace, "k", None)]),
        lambda: items.delete(namespace, "k"),
    ):
        with pytest.raises(ConfigurationError, match="namespace"):
            use()


def test_writers_that_put_and_delete_the_same_items_never_wait_for_each_other_in_turn(
    store: ConversationStore, server_dsn: str
) -> None:
    retries: list[int] = []

    def write(number: int) -> None:
        for turn in range(15):
            puts = [Put(("c",), f"k{(turn * place + number) % 7}", {"v": place}) for place in range(5)]
            shared.items("u").put_all([*puts, Put(("c",), f"k{(number + turn) % 7}", None)])

    with (
        ConversationStore(
            server_dsn, schema=store.schema, on_operation=lambda done: retries.append(done.retries)
        ) as shared,
        ThreadPoolExecutor(5) as executor,
    ):
        list(executor.map(write, range(5)))
    assert retries and set(retries) == {0}
