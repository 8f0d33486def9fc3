"""Every memory's window over any log: whole turns, the newest that fit, in one round trip and a window's rows."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import pytest
from conversations import (
    Writer,
    ai,
    calls_of,
    characters_in,
    dialogue,
    head_of,
    human,
    is_result,
    logs,
    shown_of,
    shown_preamble_of,
    split,
    system,
    tokens_of_all,
    widest_window,
    windows_of,
    words_in,
    write_as_others,
    write_in_parts,
    writing,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage
from psycopg2.extensions import connection as Connection

from pgmemory import (
    BufferMemory,
    ConversationStore,
    PostgresChatMemory,
    PostgresChatMessageHistory,
    RelevantTurnMemory,
    SummaryMemory,
    TokenWindowMemory,
)
from pgmemory.keywords import KeywordRule
from pgmemory.queries.parts import governed

# One schema serves all examples of a test; each example has a session of its own.
over_a_database = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])

KEYWORDS = ["refund", "66"]

writers: list[Writer] = [
    writing(TokenWindowMemory),
    write_as_others,
    writing(TokenWindowMemory, token_counter="cl100k_base"),
    writing(RelevantTurnMemory, keywords=KEYWORDS, keep_irrelevant=True, max_token_limit=100),
    writing(RelevantTurnMemory, keywords=["parcel"], keep_irrelevant=True),
]
written_by = st.lists(st.sampled_from(writers), min_size=1, max_size=3)
cuts = st.lists(st.integers(1, 20), max_size=4)


class FakeModel(FakeListChatModel):
    """A chat model that has nothing to say: whoever asks it fails."""

    responses: list[str] = []

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        return words_in(messages)


def stored(
    store: ConversationStore, admin: Connection, log: Sequence[BaseMessage], by: Sequence[Writer], cuts: Sequence[int]
) -> str:
    """Write a log into a new session; what is not counted by the default encoding gets a count that is wrong."""
    session_id = uuid.uuid4().hex
    write_in_parts(store, session_id, log, by, cuts)
    with admin.cursor() as cursor:
        cursor.execute(
            f"update {store.schema}.conversation_messages set token_count = 1 where token_encoding <> 'o200k_base'"
        )
    return session_id


def loaded(memory: PostgresChatMemory) -> list[BaseMessage]:
    memory.return_messages = True
    return list(memory.load_memory_variables({})[memory.memory_key])


def assert_it_can_be_sent(window: list[BaseMessage], log: Sequence[BaseMessage]) -> None:
    """Assert what every narrower view promises of its window, whatever it shows."""
    head = head_of(log)
    after = window[len(head) :]
    if window:
        assert window[: len(head)] == head
    if after:
        assert isinstance(after[0], HumanMessage)
    for place, message in enumerate(window):
        results = []
        for follower in window[place + 1 :]:
            if not is_result(follower):
                break
            results.append(follower)
        if not is_result(message):
            assert len(results) == len(calls_of(message))


# Any log, any limit


@given(log=logs, by=written_by, cuts=cuts)
@over_a_database
def test_the_last_k_turns(
    store: ConversationStore, admin: Connection, log: list[BaseMessage], by: list[Writer], cuts: list[int]
) -> None:
    session_id = stored(store, admin, log, by, cuts)
    for k, window in enumerate([*windows_of(log), windows_of(log)[-1]]):
        shown = loaded(BufferMemory(session_id=session_id, store=store, k=k))
        assert shown == head_of(log) + window
        assert_it_can_be_sent(shown, log)
    preamble, turns = split(log)
    everything = shown_preamble_of(preamble) + list(chain.from_iterable(map(shown_of, turns)))
    assert loaded(BufferMemory(session_id=session_id, store=store)) == everything
    assert PostgresChatMessageHistory(session_id, store).messages == log


@given(log=logs, by=written_by, cuts=cuts, limits=st.lists(st.integers(0, 500), max_size=2))
@over_a_database
def test_the_most_whole_turns_within_a_token_limit(
    store: ConversationStore,
    admin: Connection,
    log: list[BaseMessage],
    by: list[Writer],
    cuts: list[int],
    limits: list[int],
) -> None:
    session_id = stored(store, admin, log, by, cuts)
    for window in windows_of(log):
        exact = tokens_of_all(head_of(log) + window)
        limits += [exact, max(0, exact - 1)]
    for limit in limits:
        shown = loaded(TokenWindowMemory(session_id=session_id, store=store, max_token_limit=limit))
        assert shown == widest_window(log, limit, tokens_of_all)
        assert tokens_of_all(shown) <= limit
        assert_it_can_be_sent(shown, log)


COUNTERS: list[tuple[str, Any, Callable[[Sequence[BaseMessage]], int]]] = [
    ("token_counter", words_in, words_in),
    ("token_counter", characters_in, characters_in),
    ("llm", FakeModel(), words_in),
]


@pytest.mark.parametrize(("option", "counter", "count"), COUNTERS, ids=["words", "characters", "llm"])
@given(log=logs, by=written_by, cuts=cuts, limit=st.integers(1, 300))
@over_a_database
def test_the_most_whole_turns_by_a_counter_of_ones_own(
    store: ConversationStore,
    admin: Connection,
    option: str,
    counter: Any,
    count: Callable[[Sequence[BaseMessage]], int],
    log: list[BaseMessage],
    by: list[Writer],
    cuts: list[int],
    limit: int,
) -> None:
    session_id = stored(store, admin, log, by, cuts)
    for some in {limit, 1, max(1, count(head_of(log) + windows_of(log)[-1]) - 1)}:
        memory = TokenWindowMemory(session_id=session_id, store=store, max_token_limit=some, **{option: counter})
        shown = loaded(memory)
        assert shown == widest_window(log, some, count)
        assert count(shown) <= some
        assert_it_can_be_sent(shown, log)


def relevant_turns(log: Sequence[BaseMessage], is_relevant: Callable[[list[BaseMessage]], bool]) -> list[BaseMessage]:
    """Return a log without its irrelevant turns."""
    preamble, turns = split(log)
    return preamble + list(chain.from_iterable(filter(is_relevant, turns)))


def mentions_a_keyword(turn: Sequence[BaseMessage]) -> bool:
    said = " ".join(str(message.content) for message in turn if message.type in ("human", "ai"))
    return any(keyword in said for keyword in KEYWORDS)


def is_long(turn: Sequence[BaseMessage]) -> bool:
    return len(turn) > 2


RULES: list[tuple[dict[str, Any], Callable[[list[BaseMessage]], bool]]] = [
    ({"keywords": KEYWORDS}, mentions_a_keyword),
    ({"keywords": ["REFUND", "66"], "whole_words": True}, mentions_a_keyword),
    ({"is_relevant": is_long}, is_long),
    ({"keywords": KEYWORDS, "is_relevant": is_long}, lambda turn: mentions_a_keyword(turn) or is_long(turn)),
]


@given(log=logs, by=written_by | st.just(writers[3:]), cuts=cuts, k=st.integers(0, 4), limit=st.integers(0, 300))
@settings(over_a_database, max_examples=80)
def test_the_newest_relevant_turns_within_k_and_a_token_limit(
    store: ConversationStore,
    admin: Connection,
    log: list[BaseMessage],
    by: list[Writer],
    cuts: list[int],
    k: int,
    limit: int,
) -> None:
    session_id = stored(store, admin, log, by, cuts)
    for rule, is_relevant in RULES:
        memory = RelevantTurnMemory(session_id=session_id, store=store, **rule)
        relevant = relevant_turns(log, is_relevant)
        preamble, turns = split(relevant)
        newest = preamble + list(chain.from_iterable(turns[max(0, len(turns) - k) :]))
        assert loaded(memory) == head_of(log) + windows_of(relevant)[-1]
        memory.k = k
        assert loaded(memory) == head_of(log) + windows_of(newest)[-1]
        memory.max_token_limit = limit
        assert loaded(memory) == widest_window(newest, limit, tokens_of_all)
        memory.k = None
        shown = loaded(memory)
        assert shown == widest_window(relevant, limit, tokens_of_all)
        assert tokens_of_all(shown) <= limit
        assert_it_can_be_sent(shown, log)


@given(log=logs, by=written_by, cuts=cuts, limit=st.integers(0, 200))
@over_a_database
def test_what_nobody_has_summarised_is_bounded_to_twice_the_limit_and_holds_the_newest_turn(
    store: ConversationStore, admin: Connection, log: list[BaseMessage], by: list[Writer], cuts: list[int], limit: int
) -> None:
    session_id = stored(store, admin, log, by, cuts)
    memory = SummaryMemory(session_id=session_id, store=store, llm=FakeModel(), max_token_limit=limit)
    head_tokens = tokens_of_all(head_of(log))
    bound = max(2 * limit, head_tokens + limit // 2)
    shown = loaded(memory)
    assert shown == widest_window(log, bound, tokens_of_all, min_turns=1)
    assert_it_can_be_sent(shown, log)


# Round trips and rows

TURNS = 25_000
COUNTED: dict[str, Any] = {"count": 20, "encoding": "o200k_base"}
UNCOUNTED: dict[str, Any] = {"count": None, "encoding": None}
FILLER = "the parcel left the warehouse this morning and is on its way"


def fill(
    admin: Connection,
    store: ConversationStore,
    session_id: str,
    turns: int,
    *,
    count: int | None,
    encoding: str | None,
    rule: str | None = None,
) -> None:
    """Write a system message and so many turns of two messages; every tenth turn is about a refund."""
    key = store.key(session_id)
    write_as_others(store, session_id, [system()])
    with admin.cursor() as cursor:
        cursor.execute(
            f"""
            insert into {store.schema}.conversation_messages
                (conversation_id, message_index, tenant_id, role, content, tags, judged_by,
                 token_count, token_encoding, created_at)
            select %(id)s, n, '', case when n %% 2 = 1 then 'human' else 'ai' end,
                   case when n %% 20 = 1 then 'refund ' else '' end || %(filler)s || ' ' || n,
                   case when n %% 20 = 1 then '{{refund}}'::text[] end, %(rule)s,
                   %(count)s, %(encoding)s, clock_timestamp()
            from generate_series(1, 2 * %(turns)s) n;
            update {store.schema}.conversations set next_message_index = 2 * %(turns)s + 1 where id = %(id)s;
            """,
            {"id": str(key.id), "filler": FILLER, "turns": turns, "count": count, "encoding": encoding, "rule": rule},
        )


def parameters(store: ConversationStore, session_id: str, **others: Any) -> dict[str, Any]:
    return {"id": str(store.key(session_id).id), "before": 2**31 - 1, **others}


def plan_nodes(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for child in node.get("Plans", []):
        yield from plan_nodes(child)


def rows_touched(admin: Connection, statement: str, values: dict[str, Any]) -> int:
    """Run a statement that was recorded and return how many rows of messages it touched; it must not scan or sort."""
    explained = statement.replace("with recursive", "explain (analyze, format json) with recursive", 1)
    assert explained != statement
    with admin.cursor() as cursor:
        cursor.execute(explained, values)
        ((plans,),) = cursor.fetchall()
    touched = 0
    for node in plan_nodes(plans[0]["Plan"]):
        if node.get("Relation Name") == "conversation_messages":
            assert node["Node Type"] in ("Index Scan", "Index Only Scan"), node
            touched += (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
        if "Sort" in node["Node Type"]:
            assert node["Actual Rows"] <= 200, node
    return int(touched)


@pytest.mark.parametrize("analyzed", [False, True])
def test_a_window_of_a_long_conversation_is_one_round_trip_and_a_windows_rows(
    counted_store: Any, admin: Connection, analyzed: bool
) -> None:
    fill(admin, counted_store, "s", TURNS, **COUNTED, rule=KeywordRule(["refund"]).fingerprint)
    if analyzed:
        with admin.cursor() as cursor:
            cursor.execute(f"analyze {counted_store.schema}.conversation_messages")
    views: list[tuple[PostgresChatMemory, int, int, dict[str, Any]]] = [
        # a view, the messages it shows, rows it may fetch besides, rows it may touch, its statement's parameters
        (BufferMemory(session_id="s", store=counted_store, k=3), 1 + 6, 0, {"turns": 3}),
        (
            TokenWindowMemory(session_id="s", store=counted_store, max_token_limit=200),
            1 + 2 * ((200 - tokens_of_all([system()])) // 40),
            4,
            {"budget": 200, "encoding": "o200k_base"},
        ),
        (
            RelevantTurnMemory(session_id="s", store=counted_store, k=3, keywords=["refund"]),
            1 + 6,
            2,
            {"turns": 3, "rule": KeywordRule(["refund"]).fingerprint},
        ),
        (
            SummaryMemory(session_id="s", store=counted_store, llm=FakeModel(), max_token_limit=100),
            1 + 2 * ((200 - tokens_of_all([system()])) // 40),
            4,
            {"budget": 200, "encoding": "o200k_base"},
        ),
    ]
    for memory, messages, besides, values in views:
        counted_store.executes.clear()
        assert len(loaded(memory)) == messages
        (executed,) = counted_store.executes
        assert executed.rows <= messages + besides, type(memory)
        touched = rows_touched(admin, executed.statement, parameters(counted_store, "s", **values))
        # Relevant turns are every tenth, and the step over the others touches them.
        assert touched <= 5 + executed.rows * (10 if isinstance(memory, RelevantTurnMemory) else 1), type(memory)


def test_saving_is_one_round_trip_in_every_memory(counted_store: Any, admin: Connection) -> None:
    fill(admin, counted_store, "s", 100, **COUNTED)
    memories: list[PostgresChatMemory] = [
        BufferMemory(session_id="s", store=counted_store),
        TokenWindowMemory(session_id="s", store=counted_store),
        RelevantTurnMemory(session_id="s", store=counted_store, keywords=["refund"]),
        RelevantTurnMemory(session_id="s", store=counted_store, keywords=["refund"], max_token_limit=100),
        SummaryMemory(session_id="s", store=counted_store, llm=FakeModel(), max_token_limit=10**6),
        BufferMemory(session_id="s", store=counted_store, max_messages=1000),
    ]
    for memory in memories:
        counted_store.executes.clear()
        memory.save_context({"input": "a refund"}, {"output": "yes"})
        assert len(counted_store.executes) == 1, type(memory)
    counted_store.executes.clear()
    memories[2].save_context({"input": "the weather"}, {"output": "is fine"})
    assert counted_store.executes == [], "a turn that is not stored asks the database nothing"


def test_the_whole_conversation_is_one_round_trip(counted_store: Any, admin: Connection) -> None:
    fill(admin, counted_store, "s", 100, **COUNTED)
    counted_store.executes.clear()
    assert len(loaded(BufferMemory(session_id="s", store=counted_store))) == 201
    assert [executed.rows for executed in counted_store.executes] == [201]
    counted_store.executes.clear()
    assert len(loaded(RelevantTurnMemory(session_id="s", store=counted_store, keywords=["refund"]))) == 1 + 20
    assert len(counted_store.executes) == 1


@pytest.mark.parametrize("limit", [100, 1_000, 10_000])
@pytest.mark.parametrize("counts", [UNCOUNTED, {"count": 1, "encoding": "estimated"}], ids=["none", "another's"])
def test_rows_without_counts_of_the_encoding_are_read_in_pages_that_grow_and_hardly_more_than_is_shown(
    counted_store: Any, admin: Connection, counts: dict[str, Any], limit: int
) -> None:
    fill(admin, counted_store, "s", 2_000, **counts)
    counted_store.executes.clear()
    shown = loaded(TokenWindowMemory(session_id="s", store=counted_store, max_token_limit=limit))
    assert len(shown) > 3
    pages = [executed.rows for executed in counted_store.executes]
    assert len(pages) <= 3
    assert pages == sorted(pages)
    assert sum(pages) <= 2 * len(shown) + 6


@pytest.mark.parametrize("text", ["订单聊天记录断裂问题", "перезвоните мне завтра", "     \n\n\n     ", "x" * 400])
@pytest.mark.parametrize("limit", [300, 3_000])
def test_texts_that_cost_more_or_less_than_is_estimated_are_read_in_few_pages(
    counted_store: Any, text: str, limit: int
) -> None:
    turn = [human(f"question {text}"), ai(f"{text} answer")]
    write_as_others(counted_store, "s", turn * 200)
    counted_store.executes.clear()
    shown = loaded(TokenWindowMemory(session_id="s", store=counted_store, max_token_limit=limit))
    assert shown == turn * min(200, (limit - 3) // (tokens_of_all(turn) - 3))
    pages = [executed.rows for executed in counted_store.executes]
    assert len(pages) <= 4
    assert sum(pages) <= 3 * len(shown) + 6


def test_turns_without_a_verdict_are_read_in_pages_that_grow_until_k_are_found(
    counted_store: Any, admin: Connection
) -> None:
    fill(admin, counted_store, "s", 2_000, **UNCOUNTED)
    for k in (1, 3, 30):
        counted_store.executes.clear()
        shown = loaded(RelevantTurnMemory(session_id="s", store=counted_store, keywords=["refund"], k=k))
        assert len(shown) == 1 + 2 * k
        pages = [executed.rows for executed in counted_store.executes]
        assert len(pages) <= 5
        assert pages == sorted(pages)
        assert sum(pages) <= 2 * (10 * len(shown)) + 10


def test_a_long_run_of_irrelevant_turns_is_passed_over_without_fetching_it(
    counted_store: Any, admin: Connection
) -> None:
    memory = RelevantTurnMemory(session_id="s", store=counted_store, keywords=["refund"], keep_irrelevant=True, k=2)
    memory.save_context({"input": "a refund"}, {"output": "yes"})
    for message in dialogue(100)[::2]:
        memory.save_context({"input": message.content}, {"output": "ok"})
    counted_store.executes.clear()
    assert loaded(memory) == [human("a refund"), ai("yes")]
    (executed,) = counted_store.executes
    assert executed.rows <= 2


def test_the_planner_settings_of_a_read_end_with_it(counted_store: Any, counting_pool: Any) -> None:
    loaded(BufferMemory(session_id="s", store=counted_store, k=3))
    connection = counting_pool.getconn()
    with connection.cursor() as cursor:
        cursor.execute("select current_setting('enable_seqscan'), current_setting('enable_bitmapscan')")
        assert cursor.fetchone() == ("on", "on")
    connection.rollback()
    counting_pool.putconn(connection)
    assert "enable_seqscan" in governed("", 1)


def test_a_preamble_without_turns_counts_against_the_limit(store: ConversationStore) -> None:
    write_as_others(store, "s", [system(), ai("Welcome!")])
    for limit, shown in [(tokens_of_all([system()]), [system()]), (tokens_of_all([system()]) - 1, [])]:
        assert loaded(TokenWindowMemory(session_id="s", store=store, max_token_limit=limit)) == shown
    assert isinstance(loaded(SummaryMemory(session_id="s", store=store, llm=FakeModel()))[0], SystemMessage)
