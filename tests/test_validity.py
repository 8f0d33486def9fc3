"""Whatever a memory loads, followed by the next human message, is what OpenAI and Anthropic accept."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from uuid import uuid4

import pytest
from conversations import (
    ai,
    calling,
    dialogue,
    function_calling,
    function_result,
    head_of,
    human,
    logs,
    result,
    shown_preamble_of,
    split,
    system,
    tokens_of_all,
    windows_of,
    write_as_others,
    writing,
)
from hypothesis import HealthCheck, given, settings
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, RemoveMessage, ToolMessage, convert_to_messages
from provider_rules import OF_THE_APPLICATION, OF_THE_MEMORY, RULES, faults, the_first_message_is_the_users

from pgmemory import (
    BufferMemory,
    ConversationStore,
    PostgresChatMemory,
    RelevantTurnMemory,
    SummaryMemory,
    TokenWindowMemory,
)

H, A, S, CALL, RESULT = human(), ai(), system(), calling("c1"), result("c1")


def naming(name: str) -> AIMessage:
    """An AI message that calls a tool of this name."""
    return AIMessage("", tool_calls=[{"name": name, "args": {}, "id": "c1"}])


# The rules themselves

BREACHES: list[tuple[str, list[BaseMessage], int]] = [
    # the rule, messages that break it and no other, the place of the breach
    ("each_call_has_its_result", [H, CALL], 1),
    ("each_call_has_its_result", [H, calling("c1", "c2"), result("c2"), A], 1),
    ("each_call_has_its_result", [H, function_calling("f"), H], 1),
    ("each_result_follows_its_call", [H, A, RESULT], 2),
    ("each_result_follows_its_call", [H, CALL, RESULT, H, RESULT], 4),
    ("each_call_has_one_result", [H, CALL, RESULT, RESULT, A], 3),
    ("call_ids_differ_in_a_message", [H, AIMessage("", tool_calls=[*CALL.tool_calls] * 2), RESULT, A], 1),
    ("call_ids_are_not_empty", [H, calling(""), result(""), A], 1),
    ("user_messages_say_something", [human(""), A], 0),
    ("user_messages_say_something", [human([]), A], 0),
    ("user_messages_say_something", [H, human(["\n", {"type": "text", "text": ""}]), A], 1),
    ("assistant_messages_say_something_or_call", [H, ai(" ")], 1),
    ("system_messages_say_something", [S, system(" "), H, A], 1),
    ("no_message_is_a_removal", [H, RemoveMessage(id="x"), A], 1),
    ("the_first_message_is_the_users", [A], 0),
    ("the_first_message_is_the_users", [S, CALL, RESULT, H, A], 1),
    ("system_messages_come_first", [S, H, A, S], 3),
    ("roles_alternate", [H, A, CALL, RESULT, A], 2),
    ("roles_are_known", [H, ChatMessage(role="critic", content="No."), A], 1),
    ("results_are_of_the_newer_form", [H, function_calling("f"), function_result("f"), A], 2),
    ("tool_names_fit", [H, naming("Current Search"), RESULT, A], 1),
    ("tool_names_fit", [H, naming("x" * 65), RESULT, A], 1),
    ("call_ids_are_not_used_again", [H, CALL, RESULT, A, H, CALL, RESULT, A], 5),
    ("text_blocks_are_not_empty", [H, ai(["", {"type": "text", "text": "Yes."}])], 1),
    ("text_blocks_are_not_empty", [H, AIMessage([""], tool_calls=CALL.tool_calls), RESULT, A], 1),
    ("results_are_not_empty_lists", [H, CALL, ToolMessage([], tool_call_id="c1"), A], 2),
]


@pytest.mark.parametrize(("rule", "messages", "position"), BREACHES)
def test_a_rule_finds_its_breach(rule: str, messages: list[BaseMessage], position: int) -> None:
    found = [(fault.rule, fault.position) for fault in faults(messages)]
    # Two calls of one id are always one too many for the results as well.
    beside = [("each_call_has_its_result", position)] if rule == "call_ids_differ_in_a_message" else []
    assert sorted(found) == sorted([(rule, position), *beside])


def test_every_rule_has_a_breach() -> None:
    assert {rule.__name__ for rule in RULES} == {rule for rule, _, _ in BREACHES}


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param([], id="nothing"),
        pytest.param([S, system("be brief"), *dialogue(2)], id="a dialogue"),
        pytest.param([H, H, A, H], id="users in a row"),
        pytest.param([H, calling("c1", "c2"), result("c2"), result("c1", ""), A], id="calls"),
        pytest.param([H, CALL, RESULT, calling("c2"), result("c2")], id="calls without a last answer"),
        pytest.param([human(["see", {"type": "image_url", "image_url": {"url": "x"}}]), A], id="an image"),
    ],
)
def test_the_rules_accept_what_is_in_order(messages: list[BaseMessage]) -> None:
    assert faults(messages) == []


# Every memory


def loaded(memory: PostgresChatMemory) -> list[BaseMessage]:
    memory.return_messages = True
    return list(memory.load_memory_variables({})[memory.memory_key])


def views(store: ConversationStore, session_id: str, log: Sequence[BaseMessage]) -> Iterator[PostgresChatMemory]:
    """Give memories of every kind, and of the windows with a size one at each at which the window changes."""
    windows = [head_of(log) + window for window in windows_of(log)]
    exact = {tokens_of_all(window) for window in windows}
    for k in range(len(windows)):
        yield BufferMemory(session_id=session_id, store=store, k=k)
    for limit in sorted(exact | {max(0, tokens - 1) for tokens in exact}):
        yield TokenWindowMemory(session_id=session_id, store=store, max_token_limit=limit)
    for k in (None, 1, 2):
        yield RelevantTurnMemory(session_id=session_id, store=store, keywords=["a"], k=k)
    yield RelevantTurnMemory(session_id=session_id, store=store, keywords=["a"], max_token_limit=max(exact) // 2)
    llm = FakeListChatModel(responses=["They talked."])
    for limit in (max(exact) // 2, max(exact) // 4):
        memory = SummaryMemory(session_id=session_id, store=store, llm=llm, max_token_limit=limit)
        yield memory
        memory.fold()
        yield memory


def test_real_dialogues_are_accepted_whatever_is_shown_of_them(store: ConversationStore, shared_data: Path) -> None:
    write = writing(TokenWindowMemory)
    for line in (shared_data / "agent_dialogues.jsonl").read_text("utf-8").splitlines():
        real = json.loads(line)
        session_id, log = real["dialogue_id"], convert_to_messages(real["messages"])
        write(store, session_id, log)
        assert loaded(BufferMemory(session_id=session_id, store=store)) == log
        for memory in [BufferMemory(session_id=session_id, store=store), *views(store, session_id, log)]:
            assert faults(loaded(memory)) == [], (session_id, memory)


@given(logs)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_log_is_accepted_but_for_what_the_application_wanted(
    store: ConversationStore, log: list[BaseMessage]
) -> None:
    session_id = uuid4().hex
    write_as_others(store, session_id, log)
    said = list(chain.from_iterable(split(log)[1]))
    for memory in views(store, session_id, log):
        shown = loaded(memory)
        assert faults(shown, OF_THE_MEMORY) == []
        assert all(shown[fault.position] in said for fault in faults(shown, OF_THE_APPLICATION))
    everything = loaded(BufferMemory(session_id=session_id, store=store))
    starts_late = bool(faults(shown_preamble_of(split(log)[0]), [the_first_message_is_the_users]))
    rules = [rule for rule in OF_THE_MEMORY if not (starts_late and rule is the_first_message_is_the_users)]
    assert faults(everything, rules) == []


# Single messages that no model accepts

REFUSED: dict[str, list[BaseMessage]] = {
    "an empty human message": [*dialogue(1), human(""), A, H, A],
    "a blank human message without an answer": [*dialogue(1), human(" "), H, A],
    "a human message of empty blocks": [human([{"type": "text", "text": ""}]), A],
    "a blank system message in front": [S, system(" "), H, A],
    "a blank system message within a turn": [H, system(""), A],
    "two calls of one id": [H, calling("c1", "c1"), RESULT, RESULT, A],
    "a call with an empty id": [H, calling(""), result(""), A],
}

@pytest.mark.parametrize("log", REFUSED.values(), ids=REFUSED)
def test_what_no_model_accepts_is_left_out(store: ConversationStore, log: list[BaseMessage]) -> None:
    write_as_others(store, "s", log)
    found = {
        repr(memory): faults(loaded(memory), OF_THE_MEMORY)
        for memory in [BufferMemory(session_id="s", store=store), *views(store, "s", log)]
    }
    assert not any(found.values()), found
