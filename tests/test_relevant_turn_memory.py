"""RelevantTurnMemory: which turns are stored, which are shown, whoever wrote them and by whatever rule before."""

from __future__ import annotations

import asyncio
import unicodedata
from collections.abc import Sequence
from typing import Any

import pytest
from chains import ReadOnlySharedMemory
from conversations import (
    ai,
    calling,
    dialogue,
    human,
    result,
    system,
    tokens_of_all,
    words_in,
    write_as_others,
    writing,
)
from langchain_core.messages import BaseMessage
from psycopg2.extensions import connection as Connection

from pgmemory import (
    BufferMemory,
    ConfigurationError,
    ConversationStore,
    PostgresChatMessageHistory,
    RelevantTurnMemory,
    TokenWindowMemory,
)
from pgmemory import tokens as tokens_room

REFUND = [human("I want a refund"), ai("Of course.")]
PARCEL = [human("Where is it?"), ai("The parcel is on its way.")]
WEATHER = [human("Nice weather"), ai("Indeed.")]
REFUND_AND_PARCEL = [human("A refund for the parcel!"), ai("Both.")]


def relevant(store: ConversationStore, *keywords: str, session_id: str = "s", **options: Any) -> RelevantTurnMemory:
    return RelevantTurnMemory(
        session_id=session_id, store=store, keywords=list(keywords), return_messages=True, **options
    )


def save(memory: RelevantTurnMemory, *turns: Sequence[BaseMessage]) -> None:
    for question, answer in turns:
        memory.save_context({"input": question}, {"output": answer})


def stored(store: ConversationStore, session_id: str = "s") -> list[BaseMessage]:
    return PostgresChatMessageHistory(session_id, store).messages


def tags(admin: Connection, store: ConversationStore) -> list[tuple[str, list[str]]]:
    """Return content and tags of each message as people see them with psql."""
    with admin.cursor() as cursor:
        cursor.execute(f"select content, tags from {store.schema}.conversation_log order by session_id, message_index")
        return cursor.fetchall()


# What is stored


def test_a_turn_is_relevant_by_its_input_or_its_output_and_only_relevant_turns_are_stored(
    store: ConversationStore,
) -> None:
    memory = relevant(store, "refund", "parcel")
    save(memory, REFUND, WEATHER, PARCEL)
    assert memory.buffer == stored(store) == [*REFUND, *PARCEL]
    assert memory.buffer_as_str == (
        "Human: I want a refund\nAI: Of course.\nHuman: Where is it?\nAI: The parcel is on its way."
    )


def test_irrelevant_turns_are_stored_on_request_and_still_not_shown(store: ConversationStore) -> None:
    memory = relevant(store, "refund", keep_irrelevant=True)
    save(memory, REFUND, WEATHER, PARCEL)
    assert stored(store) == [*REFUND, *WEATHER, *PARCEL]
    assert memory.buffer == REFUND
    assert BufferMemory(session_id="s", store=store, return_messages=True).buffer == stored(store)


def test_tags_in_the_database_are_the_keywords_found(store: ConversationStore, admin: Connection) -> None:
    memory = relevant(store, "REFUND", "parcel", "c++ (new)", 'it\'s "so" \\ {here}', "订单", keep_irrelevant=True)
    save(memory, REFUND_AND_PARCEL, WEATHER)
    save(memory, [human('On C++ (NEW) of IT\'S "so" \\ {here}'), ai("我的订单")])
    assert tags(admin, store) == [
        ("A refund for the parcel!", ["REFUND", "parcel"]),
        ("Both.", []),
        ("Nice weather", []),
        ("Indeed.", []),
        ('On C++ (NEW) of IT\'S "so" \\ {here}', ["c++ (new)", 'it\'s "so" \\ {here}', "订单"]),
        ("我的订单", []),
    ]


def test_what_a_tool_returned_was_said_by_neither(store: ConversationStore) -> None:
    turn = [human("?"), calling("c1"), result("c1", "a refund"), ai("there")]
    write_as_others(store, "s", turn)
    assert relevant(store, "refund").buffer == []
    assert relevant(store, "there").buffer == turn


def test_what_the_ai_said_before_its_tool_calls_counts_and_the_turn_is_shown_whole(store: ConversationStore) -> None:
    turn = [human("?"), calling("c1", text="I look for the refund."), result("c1"), ai("there")]
    writing(RelevantTurnMemory, keywords=["refund"])(store, "s", [*turn])
    assert relevant(store, "refund").buffer == turn


def test_text_in_content_blocks_counts(store: ConversationStore) -> None:
    turn = [human([{"type": "text", "text": "a ref"}, {"type": "text", "text": "und"}]), ai("ok")]
    save(relevant(store, "refund"), turn, [human([{"type": "image_url", "image_url": {"url": "refund"}}]), ai("ok")])
    assert stored(store) == turn


def test_a_relevant_turn_that_no_model_would_accept_is_stored_and_left_out(store: ConversationStore) -> None:
    memory = relevant(store, "refund")
    save(memory, [human("a refund"), ai("")], REFUND)
    assert len(stored(store)) == 4
    assert memory.buffer == REFUND


def test_the_preambles_system_messages_are_shown_and_count_for_nothing(store: ConversationStore) -> None:
    write_as_others(store, "s", [system("refund politely"), ai("A refund? Welcome!"), *WEATHER, *REFUND])
    assert relevant(store, "refund").buffer == [system("refund politely"), *REFUND]
    assert relevant(store, "refund", k=0).buffer == [system("refund politely")]


# Turns of other writers, verdicts of other rules


def test_turns_that_others_wrote_are_judged_when_loaded(store: ConversationStore, admin: Connection) -> None:
    write_as_others(store, "s", [*REFUND, *WEATHER])
    writing(TokenWindowMemory)(store, "s", [*PARCEL, *REFUND_AND_PARCEL])
    assert relevant(store, "refund").buffer == [*REFUND, *REFUND_AND_PARCEL]
    assert relevant(store, "parcel").buffer == [*PARCEL, *REFUND_AND_PARCEL]
    assert relevant(store, "snow").buffer == []
    assert [found for _, found in tags(admin, store)] == [[]] * 8, "looking changes nothing"


def test_two_memories_over_one_log_each_show_their_own(store: ConversationStore) -> None:
    refunds, parcels = relevant(store, "refund", keep_irrelevant=True), relevant(store, "parcel")
    save(refunds, WEATHER, PARCEL, REFUND)
    save(parcels, REFUND_AND_PARCEL, WEATHER, PARCEL)
    write_as_others(store, "s", [*REFUND, *WEATHER, *PARCEL])
    assert refunds.buffer == [*REFUND, *REFUND_AND_PARCEL, *REFUND]
    assert parcels.buffer == [*PARCEL, *REFUND_AND_PARCEL, *PARCEL, *PARCEL]


def test_verdicts_of_an_old_rule_do_not_decide_for_a_new_one(store: ConversationStore) -> None:
    save(relevant(store, "refund", keep_irrelevant=True), REFUND, PARCEL, [human("a parcelling"), ai("ok")])
    assert relevant(store, "parcel").buffer == [*PARCEL, human("a parcelling"), ai("ok")]
    assert relevant(store, "parcel", whole_words=True).buffer == PARCEL
    assert relevant(store, "refund", "parcel").buffer == [*REFUND, *PARCEL, human("a parcelling"), ai("ok")]
    assert relevant(store, "ref", whole_words=True).buffer == []


def test_a_verdict_of_the_same_rule_is_believed(store: ConversationStore, admin: Connection) -> None:
    save(relevant(store, "Refund", "parcel", keep_irrelevant=True), REFUND, WEATHER)
    with admin.cursor() as cursor:
        cursor.execute(f"update {store.schema}.conversation_messages set content = 'refund' where content like 'Nice%'")
        cursor.execute(f"update {store.schema}.conversation_messages set content = 'x' where content like 'I want%'")
    assert relevant(store, "PARCEL", "refund").buffer == [human("x"), REFUND[1]]
    assert relevant(store, "refund").buffer == [human("refund"), WEATHER[1]]


@pytest.mark.parametrize("keep_irrelevant", [True, False])
def test_a_turn_that_grew_after_its_verdict_is_judged_anew(store: ConversationStore, keep_irrelevant: bool) -> None:
    memory = relevant(store, "refund", "weather", keep_irrelevant=keep_irrelevant)
    judged = relevant(store, "refund", keep_irrelevant=True)
    save(judged, WEATHER)
    assert judged.buffer == []
    write_as_others(store, "s", [ai("By the way, your refund is there.")])
    assert judged.buffer == [*WEATHER, ai("By the way, your refund is there.")]
    save(judged, PARCEL)
    assert judged.buffer == [*WEATHER, ai("By the way, your refund is there.")]
    assert memory.buffer == judged.buffer


def test_a_relevant_turn_that_grew_stays_relevant(store: ConversationStore) -> None:
    memory = relevant(store, "refund")
    save(memory, REFUND)
    write_as_others(store, "s", [ai("Nice weather, too.")])
    assert memory.buffer == [*REFUND, ai("Nice weather, too.")]


def test_a_turn_that_this_memory_itself_lets_grow_is_judged_as_a_whole(store: ConversationStore) -> None:
    says = writing(RelevantTurnMemory, keywords=["refund"], keep_irrelevant=True)
    says(store, "s", WEATHER)
    says(store, "s", [ai("Your refund is there.")])
    assert relevant(store, "refund").buffer == [*WEATHER, ai("Your refund is there.")]
    says(store, "t", REFUND)
    says(store, "t", [ai("Nice weather.")])
    assert relevant(store, "refund", session_id="t").buffer == [*REFUND, ai("Nice weather.")]


# Inputs of more or less than one human message


@pytest.mark.parametrize("keep_irrelevant", [True, False])
def test_each_turn_of_an_input_of_several_messages_is_judged_for_itself(
    store: ConversationStore, keep_irrelevant: bool
) -> None:
    memory = relevant(store, "refund", keep_irrelevant=keep_irrelevant)
    memory.save_context({"input": [human("hello"), human("a refund")]}, {"output": "ok"})
    assert memory.buffer == [human("a refund"), ai("ok")]
    memory.save_context({"input": [human("a refund"), ai("why?"), human("broken")]}, {"output": "ok"})
    assert memory.buffer == [human("a refund"), ai("ok"), human("a refund"), ai("why?")]


def test_a_system_message_before_the_humans_does_not_hide_the_turn(store: ConversationStore) -> None:
    memory = relevant(store, "refund")
    memory.save_context({"input": [system("it is Monday"), human("a refund")]}, {"output": "ok"})
    assert memory.buffer == [system("it is Monday"), human("a refund"), ai("ok")]
    memory.save_context({"input": [system("it is Tuesday"), human("the refund?")]}, {"output": "there"})
    assert memory.buffer[-2:] == [human("the refund?"), ai("there")]


# A test of one's own


def asks(messages: Sequence[BaseMessage]) -> bool:
    return str(messages[0].content).endswith("?")


def test_a_test_of_ones_own_decides_alone(store: ConversationStore, admin: Connection) -> None:
    memory = RelevantTurnMemory(session_id="s", store=store, is_relevant=asks, return_messages=True)
    save(memory, REFUND, PARCEL, WEATHER)
    assert memory.buffer == stored(store) == PARCEL
    write_as_others(store, "s", [*WEATHER, *PARCEL])
    assert memory.buffer == [*PARCEL, *PARCEL]
    assert tags(admin, store)[0] == ("Where is it?", [])


def test_a_keyword_or_a_test_of_ones_own_suffices(store: ConversationStore, admin: Connection) -> None:
    memory = relevant(store, "refund", is_relevant=asks)
    save(memory, REFUND, WEATHER, PARCEL)
    write_as_others(store, "s", [*PARCEL, *WEATHER, *REFUND])
    assert memory.buffer == [*REFUND, *PARCEL, *PARCEL, *REFUND]
    assert tags(admin, store)[0] == ("I want a refund", ["refund"])


def test_a_test_of_ones_own_gets_whole_turns_in_which_no_keyword_occurs(store: ConversationStore) -> None:
    asked: list[list[BaseMessage]] = []

    def notes(messages: Sequence[BaseMessage]) -> bool:
        asked.append(list(messages))
        return False

    died = [human("?"), calling("c1", "c2"), result("c1"), ai("sorry")]
    memory = relevant(store, "refund", is_relevant=notes)
    save(memory, WEATHER, REFUND)
    assert asked == [WEATHER]
    write_as_others(store, "s", died)
    asked.clear()
    assert memory.buffer == REFUND
    assert asked == [died]


def test_the_answer_of_a_test_of_ones_own_is_never_remembered(store: ConversationStore) -> None:
    wanted = ["weather"]
    memory = RelevantTurnMemory(
        session_id="s",
        store=store,
        is_relevant=lambda messages: any(word in str(messages[0].content) for word in wanted),
        keep_irrelevant=True,
        return_messages=True,
    )
    save(memory, WEATHER, REFUND)
    assert memory.buffer == WEATHER
    wanted[:] = ["refund"]
    assert memory.buffer == REFUND
    assert relevant(store, "weather").buffer == WEATHER


def test_what_a_test_of_ones_own_raises_reaches_the_caller_and_nothing_is_stored(store: ConversationStore) -> None:
    def fails(messages: Sequence[BaseMessage]) -> bool:
        raise LookupError("no answer")

    memory = RelevantTurnMemory(session_id="s", store=store, is_relevant=fails)
    with pytest.raises(LookupError, match="no answer"):
        save(memory, WEATHER)
    assert stored(store) == []


# k and a token limit


@pytest.fixture
def ten_of_each(store: ConversationStore) -> ConversationStore:
    """A store whose session "s" holds ten relevant turns, an irrelevant one behind each."""
    for number in range(1, 11):
        write_as_others(store, "s", [human(f"refund {number}"), ai(f"answer {number}"), *WEATHER])
    return store


def refunds(count: int, *, last: int = 10) -> list[BaseMessage]:
    numbers = range(last - count + 1, last + 1)
    return [message for n in numbers for message in (human(f"refund {n}"), ai(f"answer {n}"))]


@pytest.mark.parametrize(("k", "count"), [(None, 10), (0, 0), (1, 1), (9, 9), (10, 10), (11, 10), (2**40, 10)])
def test_at_most_the_newest_k_relevant_turns(ten_of_each: ConversationStore, k: int | None, count: int) -> None:
    assert relevant(ten_of_each, "refund", k=k).buffer == refunds(count)


def test_at_most_so_many_tokens(ten_of_each: ConversationStore) -> None:
    for count in (1, 3, 9):
        limit = tokens_of_all(refunds(count))
        assert relevant(ten_of_each, "refund", max_token_limit=limit).buffer == refunds(count)
        assert relevant(ten_of_each, "refund", max_token_limit=limit - 1).buffer == refunds(count - 1)
        assert relevant(ten_of_each, "refund", max_token_limit=limit, k=2).buffer == refunds(min(2, count))
    assert relevant(ten_of_each, "refund", max_token_limit=0).buffer == []


def test_the_limit_may_depend_on_the_inputs_and_the_counter_be_ones_own(ten_of_each: ConversationStore) -> None:
    memory = relevant(ten_of_each, "refund", max_token_limit=lambda inputs: inputs["words"], token_counter=words_in)
    for words, count in [(0, 0), (3, 0), (4, 1), (15, 3), (40, 10), (400, 10)]:
        assert memory.load_memory_variables({"words": words})["history"] == refunds(count)
    with pytest.raises(ConfigurationError, match="max_token_limit must be a whole number from 0, not None"):
        memory.load_memory_variables({"words": None})


def test_without_a_limit_nothing_is_counted(ten_of_each: ConversationStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens_room, "load_once", lambda name: pytest.fail("the encoding was loaded"))

    def counter(messages: Sequence[BaseMessage]) -> int:
        pytest.fail("the counter was asked")

    for options in ({}, {"token_counter": counter}):
        memory = relevant(ten_of_each, "refund", k=3, **options)
        assert memory.buffer == refunds(3)
        save(memory, [human("refund 11"), ai("answer 11")])
        memory.chat_memory.clear()
        write_as_others(ten_of_each, "s", refunds(10))


def test_counts_are_stored_where_there_is_a_limit(store: ConversationStore, admin: Connection) -> None:
    save(relevant(store, "refund"), REFUND)
    save(relevant(store, "refund", max_token_limit=100), REFUND)
    with admin.cursor() as cursor:
        cursor.execute(f"select token_encoding from {store.schema}.conversation_messages order by message_index")
        assert cursor.fetchall() == [(None,), (None,), ("o200k_base",), ("o200k_base",)]


# Language


@pytest.mark.parametrize(
    ("keyword", "said"),
    [
        ("CAFÉ", unicodedata.normalize("NFD", "un café noir")),
        (unicodedata.normalize("NFD", "café"), "CAFÉ"),
        ("straße", "HAUPTSTRASSE 1"),
        ("σας", "ΣΑΣ"),
        ("断裂", "订单聊天记录断裂问题"),
        ("問題", "この問題について"),
        ("서울", "서울에서 만나요"),
        ("ราคา", "ขอทราบราคาสินค้า"),
        ("100%", "it was 100% wool"),
        ("a_b", "see a_b.c"),
        ("(.*", "grep '(.*'"),
        ("\\d+", "the pattern \\d+"),
    ],
)
def test_a_keyword_is_found_whatever_its_language_and_signs(store: ConversationStore, keyword: str, said: str) -> None:
    memory = relevant(store, keyword, keep_irrelevant=True)
    save(memory, [human(said), ai("ok")], [human("ok"), ai(said)], WEATHER)
    write_as_others(store, "s", [human(said), ai("ok"), human("aXb 1000 gre"), ai("5+")])
    assert memory.buffer == [human(said), ai("ok"), human("ok"), ai(said), human(said), ai("ok")]


def test_whole_words(store: ConversationStore) -> None:
    turns = [[human("my party"), ai("ok")], [human("my art"), ai("ok")], [human("我的art作品"), ai("ok")]]
    memory = relevant(store, "art", whole_words=True)
    save(memory, *turns)
    assert memory.buffer == stored(store) == [*turns[1], *turns[2]]


# Reading only, sessions, async


def test_a_read_only_memory_judges_what_others_wrote_and_stores_nothing(store: ConversationStore) -> None:
    write_as_others(store, "s", [*REFUND, *WEATHER])
    shared = ReadOnlySharedMemory(memory=relevant(store, "refund"))
    assert shared.load_memory_variables({}) == {"history": REFUND}
    shared.save_context({"input": "a refund"}, {"output": "yes"})
    assert stored(store) == [*REFUND, *WEATHER]


def test_another_session_is_judged_by_the_same_rule(store: ConversationStore) -> None:
    memory = relevant(store, "refund", whole_words=True, k=1).for_session("t")
    save(memory, REFUND, [human("refunds"), ai("ok")], [human("my refund"), ai("ok")])
    assert memory.buffer == [human("my refund"), ai("ok")]
    assert stored(store) == []
    assert stored(store, "t") == [*REFUND, human("my refund"), ai("ok")]


def test_without_blocking(store: ConversationStore) -> None:
    memory = relevant(store, "refund")

    async def converse() -> Any:
        for question, answer in [REFUND, WEATHER]:
            await memory.asave_context({"input": question}, {"output": answer})
        return await memory.aload_memory_variables({})

    assert asyncio.run(converse()) == {"history": REFUND}
    assert stored(store) == REFUND


# What is refused


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "keywords, is_relevant, or both"),
        ({"keywords": []}, "keywords, is_relevant, or both"),
        ({"keywords": "refund"}, "keywords"),
        ({"keywords": None}, "keywords"),
        ({"keywords": [5]}, "keywords"),
        ({"keywords": ["refund", ""]}, "keyword must not be blank"),
        ({"keywords": [" \n"]}, "keyword must not be blank"),
        ({"keywords": ["nul \0"]}, "keyword"),
        ({"keywords": ["half \ud83d"]}, "keyword"),
        ({"is_relevant": "refund"}, "is_relevant"),
        ({"keywords": ["refund"], "k": -1}, r"\bk\b"),
        ({"keywords": ["refund"], "max_token_limit": -1}, "max_token_limit"),
        ({"keywords": ["refund"], "max_token_limit": 2.5}, "max_token_limit"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused_by_name(
    store: ConversationStore, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        RelevantTurnMemory(session_id="s", store=store, **options)


def test_a_tuple_of_keywords_will_do(store: ConversationStore) -> None:
    memory = RelevantTurnMemory(session_id="s", store=store, keywords=("refund",), return_messages=True)
    save(memory, REFUND, *[dialogue(1)])
    assert memory.buffer == REFUND
