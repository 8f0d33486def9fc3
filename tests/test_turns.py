"""How a log divides into turns, and what of it a model is shown, for any log and for each rule by name."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from conversations import (
    MUTE,
    ai,
    answered_by,
    calling,
    calls_of,
    dialogue,
    function_calling,
    function_result,
    human,
    is_mute,
    is_result,
    logs,
    messages,
    miscalling,
    result,
    shown_of,
    shown_preamble_of,
    split,
    system,
)
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    HumanMessageChunk,
    RemoveMessage,
    ToolMessage,
)

from pgmemory.turns import (
    LoggedMessage,
    Turn,
    is_preamble_system,
    longest_suffix,
    shown,
    shown_preamble,
    split_turns,
)

any_log = logs | st.lists(messages, max_size=12)


def logged(log: Sequence[BaseMessage]) -> list[LoggedMessage]:
    return [LoggedMessage(message, index) for index, message in enumerate(log)]


def messages_of(part: Sequence[LoggedMessage]) -> list[BaseMessage]:
    return [entry.message for entry in part]


def shown_messages(turn: Sequence[BaseMessage]) -> list[BaseMessage]:
    return messages_of(shown(logged(turn)))


# Turns


@given(any_log)
def test_a_log_is_its_preamble_and_its_turns_and_nothing_is_lost(log: list[BaseMessage]) -> None:
    before, turns = split_turns(logged(log))
    assert [*before, *(entry for turn in turns for entry in turn)] == logged(log)
    assert (messages_of(before), [messages_of(turn) for turn in turns]) == split(log)


@given(any_log)
def test_a_turn_holds_one_human_message_and_begins_with_it(log: list[BaseMessage]) -> None:
    before, turns = split_turns(logged(log))
    assert not any(isinstance(entry.message, HumanMessage) for entry in before)
    for turn in turns:
        assert [isinstance(entry.message, HumanMessage) for entry in turn] == [True] + [False] * (len(turn) - 1)


def test_human_messages_in_a_row_are_a_turn_each() -> None:
    _, turns = split_turns(logged([human("a"), human("b"), ai(), human("c")]))
    assert [len(turn) for turn in turns] == [1, 2, 1]


def test_a_log_without_human_messages_is_all_preamble() -> None:
    log = logged([system(), ai("Welcome!"), calling("c1"), result("c1")])
    assert split_turns(log) == (log, [])


def test_a_subclass_of_a_human_message_begins_a_turn_and_a_chat_role_of_that_name_does_not() -> None:
    log = logged([ChatMessage(role="human", content="x"), HumanMessageChunk("y")])
    assert split_turns(log) == (log[:1], [log[1:]])


# What is shown: any log


@given(any_log)
def test_what_is_shown_is_what_the_rules_say(log: list[BaseMessage]) -> None:
    preamble, turns = split(log)
    assert messages_of(shown_preamble(logged(preamble))) == shown_preamble_of(preamble)
    for turn in turns:
        assert shown_messages(turn) == shown_of(turn)


@given(any_log)
def test_what_is_shown_is_what_a_provider_accepts(log: list[BaseMessage]) -> None:
    preamble, turns = split(log)
    for part in [messages_of(shown_preamble(logged(preamble))), *map(shown_messages, turns)]:
        waiting: list[tuple[str, object]] = []
        for message in part:
            if is_result(message):
                assert answered_by(message) in waiting, "a result answers an open call of the message before"
                waiting.remove(answered_by(message))
                continue
            assert not waiting, "nothing stands between a call and its results"
            assert not isinstance(message, RemoveMessage)
            assert not is_mute(message)
            waiting = calls_of(message)
        assert not waiting, "no call lacks its result"


@given(any_log)
def test_what_is_shown_is_in_order_and_leaves_out_only_calls_results_and_mute_turns(log: list[BaseMessage]) -> None:
    for turn in split(log)[1]:
        kept = shown(logged(turn))
        places = [entry.message_index for entry in kept]
        assert places == sorted(set(places))
        assert kept == [entry for entry in logged(turn) if entry.message_index in places]
        if any(is_mute(message) for message in turn if message.type != "system"):
            assert kept == []
        else:
            left_out = [message for place, message in enumerate(turn) if place not in places]
            assert all(is_result(m) or calls_of(m) or is_mute(m) or isinstance(m, RemoveMessage) for m in left_out)


@given(any_log)
def test_what_is_shown_of_it_is_shown_again(log: list[BaseMessage]) -> None:
    for turn in split(log)[1]:
        once = shown(logged(turn))
        assert shown(once) == once


def test_what_the_log_knows_of_a_message_stays_with_it() -> None:
    turn = [LoggedMessage(human(), 7, 12, ("refund",), "rule"), LoggedMessage(ai(), 8, 9)]
    assert shown(turn) == turn


# What is shown: each rule

H, A, S = human(), ai(), system()


@pytest.mark.parametrize(
    ("turn", "left"),
    [
        pytest.param([H, calling("c1"), A], [H, A], id="a call without result"),
        pytest.param([H, calling("c1")], [H], id="a call that ends the log"),
        pytest.param([H, calling("c1", text="I look."), A], [H, A], id="a call with text, without result"),
        pytest.param([H, calling("c1", "c2"), result("c1"), A], [H, A], id="partial results"),
        pytest.param([H, calling("c1"), A, result("c1")], [H, A], id="a result that comes too late"),
        pytest.param([H, calling("c1"), S, result("c1"), A], [H, S, A], id="a result behind another message"),
        pytest.param([H, calling("c1", "c1"), result("c1"), A], [H, A], id="two calls of one id, one result"),
        pytest.param([H, calling("c1", "c1"), result("c1"), result("c1"), A], [H, A], id="two calls of one id"),
        pytest.param([H, calling(""), result(""), A], [H, A], id="a call with an empty id"),
        pytest.param([H, system(" "), A], [H, A], id="a system message that says nothing"),
        pytest.param([H, miscalling("c1"), A], [H, A], id="an unreadable call without result"),
        pytest.param([H, result("c1"), A], [H, A], id="a result without call"),
        pytest.param([H, function_calling("f"), A], [H, A], id="a function call without result"),
        pytest.param([H, function_calling("f"), function_result("g"), A], [H, A], id="another function's result"),
        pytest.param([H, function_calling("f"), result("f"), A], [H, A], id="a tool's result for a function call"),
        pytest.param([H, calling("f"), function_result("f"), A], [H, A], id="a function's result for a tool call"),
        pytest.param([H, function_result("f"), A], [H, A], id="a function's result without call"),
        pytest.param([H, RemoveMessage(id="x"), A], [H, A], id="a removal, which says nothing"),
        pytest.param([H, calling("c1"), RemoveMessage(id="x"), A], [H, A], id="a call and a removal"),
    ],
)
def test_left_out(turn: list[BaseMessage], left: list[BaseMessage]) -> None:
    assert shown_messages(turn) == left


@pytest.mark.parametrize(
    "turn",
    [
        pytest.param([H], id="a human message without answer"),
        pytest.param([H, A, A], id="two answers"),
        pytest.param([H, S, A], id="a system message within the turn"),
        pytest.param([H, calling("c1"), result("c1"), A], id="a call with its result"),
        pytest.param([H, calling("c1", "c2"), result("c1"), result("c2"), A], id="parallel calls"),
        pytest.param([H, calling("c1", "c2"), result("c2"), result("c1"), A], id="results in another order"),
        pytest.param([H, calling("c1"), result("c1"), calling("c1"), result("c1"), A], id="an id used again"),
        pytest.param([H, calling("c1"), result("c1")], id="calls without a last answer"),
        pytest.param([H, miscalling("c1"), result("c1"), A], id="an unreadable call with its result"),
        pytest.param([H, function_calling("f"), function_result("f"), A], id="a function call with its result"),
        pytest.param([H, ai([{"type": "image_url", "image_url": {"url": "https://x.org/a.png"}}])], id="an image"),
        pytest.param([H, AIMessage("", additional_kwargs={"audio": {"id": "a1"}})], id="a spoken answer"),
        pytest.param([H, AIMessage("", additional_kwargs={"refusal": "No."})], id="a refusal"),
        pytest.param([H, ai([{"type": "reasoning", "summary": []}])], id="reasoning alone"),
        pytest.param([H, ai(["", {"type": "text", "text": "x"}])], id="one text block of several"),
        pytest.param([H, ChatMessage(role="critic", content="")], id="another role's empty message"),
    ],
)
def test_shown_whole(turn: list[BaseMessage]) -> None:
    assert shown_messages(turn) == turn


@pytest.mark.parametrize("content", MUTE)
def test_an_answer_that_says_nothing_takes_its_turn_with_it(content: str | list[str | dict[str, str]]) -> None:
    assert shown_messages([H, calling("c1"), result("c1"), AIMessage(content)]) == []
    assert shown_messages([H, AIMessage(content), A]) == []


@pytest.mark.parametrize("content", MUTE)
def test_a_human_message_that_says_nothing_takes_its_turn_with_it(content: str | list[str | dict[str, str]]) -> None:
    assert shown_messages([HumanMessage(content), calling("c1"), result("c1"), A]) == []


@pytest.mark.parametrize("content", MUTE)
def test_a_call_needs_no_text(content: str | list[str | dict[str, str]]) -> None:
    turn = [H, calling("c1").model_copy(update={"content": content}), result("c1"), A]
    assert shown_messages(turn) == turn


def test_results_beyond_the_calls_are_left_out_and_the_first_of_each_stays() -> None:
    turn = [H, calling("c1", "c2"), result("c9"), result("c1", "one"), result("c1", "more"), result("c2"), A]
    assert shown_messages(turn) == [H, turn[1], turn[3], turn[5], A]


def test_a_turn_goes_on_after_a_round_that_died() -> None:
    turn = [H, calling("c1", "c2"), result("c2"), calling("c3"), result("c3"), A]
    assert shown_messages(turn) == [H, turn[3], turn[4], A]


def test_a_function_call_beside_tool_calls_is_not_one_more_call() -> None:
    call = calling("c1").model_copy(update={"additional_kwargs": {"function_call": {"name": "f", "arguments": "{}"}}})
    turn = [H, call, result("c1"), A]
    assert shown_messages(turn) == turn


def test_a_call_without_id_is_answered_by_no_result() -> None:
    call = AIMessage("", tool_calls=[{"name": "search", "args": {}, "id": None}])
    assert shown_messages([H, call, ToolMessage("found", tool_call_id="None"), A]) == [H, A]


def test_a_mute_greeting_leaves_the_rest_of_the_preamble() -> None:
    preamble = [S, ai(""), ai("Welcome!"), system(""), calling("c1"), result("c2"), function_result("f")]
    assert messages_of(shown_preamble(logged(preamble))) == [S, preamble[2]]


def test_only_system_messages_of_the_preamble_stay_in_every_window() -> None:
    preamble = [S, ai("Welcome!"), ChatMessage(role="system", content="x"), result("c1")]
    assert [is_preamble_system(entry) for entry in logged(preamble)] == [True, False, False, False]


# The longest suffix

TURNS: list[Turn] = split_turns(logged(dialogue(40)))[1]


@given(count=st.integers(0, 40), fitting=st.integers(0, 41))
def test_the_longest_suffix_that_fits_is_found_with_few_questions(count: int, fitting: int) -> None:
    asked: list[int] = []

    def fits(some: Sequence[Turn]) -> bool:
        assert list(some) == TURNS[count - len(some) : count]
        asked.append(len(some))
        return len(some) <= fitting

    assert longest_suffix(TURNS[:count], fits) == TURNS[count - min(count, fitting) : count]
    assert len(asked) <= math.ceil(math.log2(count + 1))
    assert 0 not in asked


@given(count=st.integers(0, 40), answers=st.sets(st.integers(1, 40)))
def test_where_less_may_fit_worse_the_answer_still_fits_and_one_more_turn_does_not(
    count: int, answers: set[int]
) -> None:
    chosen = len(longest_suffix(TURNS[:count], lambda some: len(some) in answers))
    assert chosen == 0 or chosen in answers
    assert chosen == count or chosen + 1 not in answers
