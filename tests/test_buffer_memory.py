"""BufferMemory: the whole conversation or its last turns, as text or messages, of any session."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from conversations import (
    ai,
    calling,
    dialogue,
    function_calling,
    function_result,
    human,
    result,
    system,
    write_as_others,
)
from langchain_core.messages import BaseMessage

from pgmemory import (
    BufferMemory,
    ConversationStore,
    PostgresChatMessageHistory,
    as_json,
    as_xml,
)

PREAMBLE = [system("be kind"), ai("Welcome!")]


@pytest.fixture
def three_turns(store: ConversationStore) -> ConversationStore:
    """A store whose conversation "s" holds a preamble and three turns."""
    write_as_others(store, "s", [*PREAMBLE, *dialogue(3)])
    return store


def shown(store: ConversationStore, session_id: str = "s", **options: Any) -> list[BaseMessage]:
    memory = BufferMemory(session_id=session_id, store=store, return_messages=True, **options)
    loaded = memory.load_memory_variables({"input": "?"})
    assert list(loaded) == ["history"]
    return list(loaded["history"])


# Which turns


def test_without_k_everything_is_shown_with_the_preamble(three_turns: ConversationStore) -> None:
    assert shown(three_turns) == [*PREAMBLE, *dialogue(3)]


@pytest.mark.parametrize(
    ("k", "turns"),
    [
        (0, []),
        (1, dialogue(1, first=3)),
        (2, dialogue(2, first=2)),
        (3, dialogue(3)),
        (4, dialogue(3)),
        (5, dialogue(3)),
        (2**31, dialogue(3)),
        (10**20, dialogue(3)),
    ],
)
def test_k_turns_are_the_last_ones_in_order_behind_the_preambles_system_message(
    three_turns: ConversationStore, k: int, turns: list[BaseMessage]
) -> None:
    assert shown(three_turns, k=k) == [PREAMBLE[0], *turns]


@pytest.mark.parametrize("k", [None, 0, 1])
def test_a_conversation_that_nobody_began_shows_nothing(store: ConversationStore, k: int | None) -> None:
    memory = BufferMemory(session_id="new", store=store, k=k)
    assert memory.load_memory_variables({}) == {"history": ""}
    assert memory.buffer_as_messages == []


@pytest.mark.parametrize("k", [None, 1, 7])
def test_a_preamble_alone(store: ConversationStore, k: int | None) -> None:
    write_as_others(store, "s", PREAMBLE)
    assert shown(store, k=k) == (PREAMBLE if k is None else PREAMBLE[:1])


def test_every_system_message_of_the_preamble_is_shown_once_however_many_turns_follow(
    store: ConversationStore,
) -> None:
    write_as_others(store, "s", [system("one"), ai("Welcome!"), system("two")])
    memory = BufferMemory(session_id="s", store=store, k=2, return_messages=True)
    for number in range(1, 31):
        memory.save_context({"input": f"question {number}"}, {"output": f"answer {number}"})
    assert memory.buffer == [system("one"), system("two"), *dialogue(2, first=29)]


def test_a_system_message_within_a_turn_goes_with_its_turn(store: ConversationStore) -> None:
    first = [human("a"), system("from now on in French"), ai("b")]
    write_as_others(store, "s", [*first, human("c"), ai("d")])
    assert shown(store, k=1) == [human("c"), ai("d")]
    assert shown(store, k=2) == [*first, human("c"), ai("d")]


def test_a_turn_is_whole_with_all_its_tool_calls(store: ConversationStore) -> None:
    turn = [human("?"), calling("c1", "c2"), result("c2"), result("c1"), calling("c3"), result("c3"), ai("there")]
    write_as_others(store, "s", [*dialogue(1), *turn])
    assert shown(store, k=1) == turn


def test_a_last_question_without_answer_is_a_turn(store: ConversationStore) -> None:
    write_as_others(store, "s", [*dialogue(2), human("hello?"), human("anyone?")])
    assert shown(store, k=1) == [human("anyone?")]
    assert shown(store, k=3) == [*dialogue(1, first=2), human("hello?"), human("anyone?")]


UNANSWERED = [
    pytest.param([human("where?"), calling("c1")], id="a call"),
    pytest.param([human("where?"), calling("c1", "c2"), result("c2")], id="parallel calls, one result"),
    pytest.param([human("where?"), function_calling("f")], id="a function call"),
    pytest.param([human("where?"), function_calling("f"), function_result("g")], id="another function's result"),
]


@pytest.mark.parametrize("died", UNANSWERED)
@pytest.mark.parametrize("k", [None, 2])
def test_a_call_without_all_its_results_is_stored_and_not_shown(
    store: ConversationStore, died: list[BaseMessage], k: int | None
) -> None:
    write_as_others(store, "s", [*died, human("again?"), ai("there")])
    assert shown(store, k=k) == [human("where?"), human("again?"), ai("there")]
    assert PostgresChatMessageHistory("s", store).messages == [*died, human("again?"), ai("there")]


@pytest.mark.parametrize("k", [None, 3])
def test_an_answer_that_says_nothing_is_stored_and_its_turn_not_shown(store: ConversationStore, k: int | None) -> None:
    memory = BufferMemory(session_id="s", store=store, k=k, return_messages=True)
    memory.save_context({"input": "a"}, {"output": "b"})
    memory.save_context({"input": "c"}, {"output": ""})
    memory.save_context({"input": "e"}, {"output": "f"})
    assert memory.buffer == [human("a"), ai("b"), human("e"), ai("f")]
    assert memory.chat_memory.messages == [human("a"), ai("b"), human("c"), ai(""), human("e"), ai("f")]


def test_k_is_read_anew_at_every_load(three_turns: ConversationStore) -> None:
    memory = BufferMemory(session_id="s", store=three_turns, k=3, return_messages=True)
    assert len(memory.buffer) == 7
    memory.k = 1
    assert memory.buffer == [PREAMBLE[0], *dialogue(1, first=3)]


@pytest.mark.parametrize("k", [-1, 1.5, "three"])
def test_a_k_that_is_no_number_of_turns_is_refused_by_name(store: ConversationStore, k: Any) -> None:
    with pytest.raises(ValueError, match=r"\bk\b"):
        BufferMemory(session_id="s", store=store, k=k)


# Text and messages


def test_text_is_the_default_and_calls_the_two_by_their_prefixes(three_turns: ConversationStore) -> None:
    memory = BufferMemory(session_id="s", store=three_turns, k=1)
    assert memory.load_memory_variables({}) == {"history": "System: be kind\nHuman: question 3\nAI: answer 3"}
    named = BufferMemory(session_id="s", store=three_turns, k=1, human_prefix="Client", ai_prefix="Desk")
    assert named.load_memory_variables({}) == {"history": "System: be kind\nClient: question 3\nDesk: answer 3"}
    assert named.buffer_as_str == "System: be kind\nClient: question 3\nDesk: answer 3"


def test_the_variable_is_the_one_of_memory_key(three_turns: ConversationStore) -> None:
    memory = BufferMemory(session_id="s", store=three_turns, k=0, memory_key="chat_history")
    assert memory.memory_variables == ["chat_history"]
    assert memory.load_memory_variables({}) == {"chat_history": "System: be kind"}


def test_a_formatter_shapes_the_text(three_turns: ConversationStore) -> None:
    memory = BufferMemory(session_id="s", store=three_turns, k=1, formatter=as_xml, human_prefix="Client")
    assert memory.load_memory_variables({})["history"].splitlines() == [
        '<message role="System">be kind</message>',
        '<message role="Client">question 3</message>',
        '<message role="AI">answer 3</message>',
    ]
    memory = BufferMemory(session_id="s", store=three_turns, k=1, formatter=as_json, ai_prefix="Desk")
    assert json.loads(memory.load_memory_variables({})["history"]) == [
        {"role": "System", "content": "be kind"},
        {"role": "Human", "content": "question 3"},
        {"role": "Desk", "content": "answer 3"},
    ]


def test_a_formatter_of_ones_own_gets_messages_and_prefixes(three_turns: ConversationStore) -> None:
    def last_words(messages: Sequence[BaseMessage], human_prefix: str, ai_prefix: str) -> str:
        return f"{human_prefix}/{ai_prefix}: {messages[-1].content}"

    memory = BufferMemory(session_id="s", store=three_turns, formatter=last_words)
    assert memory.load_memory_variables({}) == {"history": "Human/AI: answer 3"}
    memory.return_messages = True
    assert memory.load_memory_variables({}) == {"history": [*PREAMBLE, *dialogue(3)]}


@pytest.mark.parametrize("return_messages", [False, True])
def test_the_buffer_is_what_is_loaded_in_either_form(three_turns: ConversationStore, return_messages: bool) -> None:
    memory = BufferMemory(session_id="s", store=three_turns, k=1, return_messages=return_messages)
    messages = [PREAMBLE[0], *dialogue(1, first=3)]
    text = "System: be kind\nHuman: question 3\nAI: answer 3"
    assert memory.buffer == memory.load_memory_variables({})["history"] == (messages if return_messages else text)
    assert memory.buffer_as_messages == messages
    assert memory.buffer_as_str == text


def test_what_is_loaded_may_be_changed_without_harm(three_turns: ConversationStore) -> None:
    memory = BufferMemory(session_id="s", store=three_turns, return_messages=True)
    memory.buffer.clear()
    memory.buffer[0].content = "changed"
    assert memory.buffer == [*PREAMBLE, *dialogue(3)]


def test_another_worker_sees_a_turn_at_once(server_dsn: str, three_turns: ConversationStore) -> None:
    memory = BufferMemory(session_id="s", store=three_turns, k=1, return_messages=True)
    assert memory.buffer[-1] == ai("answer 3")
    with ConversationStore(server_dsn, schema=three_turns.schema) as other:
        BufferMemory(session_id="s", store=other).save_context({"input": "question 4"}, {"output": "answer 4"})
    assert memory.buffer == [PREAMBLE[0], *dialogue(1, first=4)]


def test_loading_without_blocking_gives_the_same(three_turns: ConversationStore) -> None:
    memory = BufferMemory(session_id="s", store=three_turns, k=2, return_messages=True)
    assert asyncio.run(memory.aload_memory_variables({})) == memory.load_memory_variables({})


# Other sessions


def test_the_same_view_of_another_session_differs_in_nothing_else(three_turns: ConversationStore) -> None:
    memory = BufferMemory(
        session_id="s",
        store=three_turns,
        max_messages=4,
        k=2,
        memory_key="past",
        human_prefix="Client",
        formatter=as_xml,
        idempotency_key="request 1",
    )
    other = memory.for_session(7, user_id="u", idempotency_key="request 2")
    assert (other.chat_memory.session_id, other.chat_memory.user_id) == ("7", "u")
    assert (other.chat_memory.store, other.chat_memory.max_messages) == (three_turns, 4)
    assert (other.k, other.memory_key, other.human_prefix, other.formatter) == (2, "past", "Client", as_xml)
    assert (memory.chat_memory.session_id, memory.idempotency_key) == ("s", "request 1")
    assert (other.idempotency_key, memory.for_session("t").idempotency_key) == ("request 2", None)


def test_sessions_and_users_never_see_each_other(three_turns: ConversationStore) -> None:
    configured = BufferMemory(session_id="unused", store=three_turns)
    for session_id, user_id in [("s", "u1"), ("s", "u2"), ("S", "u1"), ("s ", None), ("s%", None), (1, None)]:
        memory = configured.for_session(session_id, user_id=user_id)
        assert memory.buffer == "", (session_id, user_id)
        memory.save_context({"input": f"{session_id} of {user_id}"}, {"output": "ok"})
    assert configured.for_session("s", user_id="u1").buffer == "Human: s of u1\nAI: ok"
    configured.for_session("s", user_id="u1").clear()
    assert configured.for_session("s", user_id="u2").buffer == "Human: s of u2\nAI: ok"
    assert configured.for_session("1").buffer == "Human: 1 of None\nAI: ok"
    assert configured.for_session("s").buffer_as_messages == [*PREAMBLE, *dialogue(3)]


def test_building_and_changing_the_session_asks_the_database_nothing(counted_store: Any) -> None:
    BufferMemory(session_id="s", store=counted_store, k=3).for_session("t")
    assert counted_store.executes == []


def test_a_view_deletes_nothing(three_turns: ConversationStore) -> None:
    for k in (0, 1, None):
        memory = BufferMemory(session_id="s", store=three_turns, k=k)
        memory.load_memory_variables({})
        memory.save_context({"input": "more"}, {"output": "ok"})
    assert len(PostgresChatMessageHistory("s", three_turns).messages) == 8 + 6


def test_after_clearing_only_what_comes_later_is_shown(three_turns: ConversationStore) -> None:
    memory = BufferMemory(session_id="s", store=three_turns, k=5, return_messages=True)
    memory.clear()
    assert memory.buffer == []
    memory.save_context({"input": "new"}, {"output": "ok"})
    assert memory.buffer == [human("new"), ai("ok")]
