"""TokenWindowMemory: the most whole turns within a limit, by stored counts, by own counters, offline."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from conversations import (
    ai,
    calling,
    characters_in,
    dialogue,
    human,
    result,
    system,
    tokens_of,
    tokens_of_all,
    words_in,
    write_as_others,
    writing,
)
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import BaseMessage
from psycopg2.extensions import connection as Connection

from pgmemory import (
    BufferMemory,
    ConfigurationError,
    ConversationStore,
    PostgresChatMessageHistory,
    TokenWindowMemory,
    token_encodings,
)
from pgmemory import tokens as tokens_room

TURN = tokens_of_all(dialogue(1)) - 3
assert tokens_of_all(dialogue(9)) == 3 + 9 * TURN, "every turn of a dialogue costs the same"


@pytest.fixture(autouse=True)
def _nothing_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens_room, "_warned", {})


def window(store: ConversationStore, limit: Any, session_id: str = "s", **options: Any) -> list[BaseMessage]:
    memory = TokenWindowMemory(
        session_id=session_id, store=store, max_token_limit=limit, return_messages=True, **options
    )
    return list(memory.load_memory_variables({"input": "?"})["history"])


def stored_counts(admin: Connection, store: ConversationStore) -> list[tuple[int | None, str | None]]:
    with admin.cursor() as cursor:
        cursor.execute(
            f"select token_count, token_encoding from {store.schema}.conversation_messages order by message_index"
        )
        return cursor.fetchall()


def set_counts(admin: Connection, store: ConversationStore, assignments: str) -> None:
    with admin.cursor() as cursor:
        cursor.execute(f"update {store.schema}.conversation_messages set {assignments}")


saved_with_counts = writing(TokenWindowMemory)

# The limit


def test_the_limit_holds_of_what_is_loaded_turn_after_turn(store: ConversationStore) -> None:
    memory = TokenWindowMemory(session_id="s", store=store, max_token_limit=3 + 2 * TURN + 1, return_messages=True)
    for number in range(1, 10):
        memory.save_context({"input": f"question {number}"}, {"output": f"answer {number}"})
        assert memory.buffer == dialogue(min(2, number), first=max(1, number - 1))
    assert len(memory.chat_memory.messages) == 18


@pytest.mark.parametrize("write", [saved_with_counts, write_as_others])
def test_each_turn_appears_at_the_very_token_that_it_needs(
    store: ConversationStore, write: Callable[[ConversationStore, str, list[BaseMessage]], None]
) -> None:
    write(store, "s", dialogue(9))
    for turns in range(1, 10):
        assert window(store, 3 + turns * TURN) == dialogue(turns, first=10 - turns)
        assert window(store, 3 + turns * TURN - 1) == dialogue(turns - 1, first=11 - turns)
    assert window(store, 10**6) == window(store, 2**40) == dialogue(9)


def test_a_lowered_limit_holds_without_saving_anew(store: ConversationStore) -> None:
    memory = TokenWindowMemory(session_id="s", store=store, max_token_limit=10**6)
    for number in range(1, 10):
        memory.save_context({"input": f"question {number}"}, {"output": f"answer {number}"})
    assert window(store, 3 + TURN) == dialogue(1, first=9)
    assert window(store, 10**6) == dialogue(9)


def test_a_limit_of_six_words_over_four_turns(store: ConversationStore) -> None:
    write_as_others(store, "s", dialogue(4))
    assert window(store, 6, token_counter=words_in) == dialogue(1, first=4)
    assert window(store, 8, token_counter=words_in) == dialogue(2, first=3)


@pytest.mark.parametrize("limit", [0, lambda inputs: 0])
def test_a_limit_of_nothing_shows_nothing(store: ConversationStore, limit: Any) -> None:
    write_as_others(store, "s", [system(), *dialogue(2)])
    assert window(store, limit) == []
    assert window(store, limit, token_counter=lambda messages: 0) == []


def test_the_default_limit_is_2000(store: ConversationStore) -> None:
    saved_with_counts(store, "s", [message for _ in range(30) for message in dialogue(9)])
    memory = TokenWindowMemory(session_id="s", store=store, return_messages=True)
    assert len(memory.buffer) == 2 * ((2000 - 3) // TURN)


def test_a_newest_turn_beyond_the_limit_leaves_no_turn_and_no_older_one(store: ConversationStore) -> None:
    log = [system(), *dialogue(2), human("long " * 100), ai("ok")]
    saved_with_counts(store, "s", log)
    write_as_others(store, "t", log)
    for session_id in "st":
        assert window(store, 100, session_id) == [system()]
        assert window(store, tokens_of_all(log), session_id) == log


def test_system_messages_of_the_preamble_count_and_come_first(store: ConversationStore) -> None:
    write_as_others(store, "s", [system("one"), ai("Welcome!"), system("two"), *dialogue(3)])
    head = [system("one"), system("two")]
    limit = tokens_of_all(head) + 2 * TURN
    assert window(store, limit) == [*head, *dialogue(2, first=2)]
    assert window(store, limit - 1) == [*head, *dialogue(1, first=3)]
    assert window(store, tokens_of_all(head)) == head


def test_system_messages_beyond_the_limit_leave_nothing(store: ConversationStore) -> None:
    write_as_others(store, "s", [system("rules " * 100), *dialogue(3)])
    assert window(store, 50) == []


def test_a_system_message_written_once_is_shown_once_behind_thirty_turns(store: ConversationStore) -> None:
    write_as_others(store, "s", [system()])
    for number in range(1, 31):
        TokenWindowMemory(session_id="s", store=store).save_context(
            {"input": f"question {number}"}, {"output": f"answer {number}"}
        )
    assert window(store, tokens_of_all([system()]) + 2 * TURN) == [system(), *dialogue(2, first=29)]


def test_calls_without_results_are_stored_cost_nothing_and_are_not_shown(store: ConversationStore) -> None:
    died = [human("question 2"), calling("c1", text="long " * 100), ai("answer 2")]
    log = [*dialogue(1), *died, *dialogue(1, first=3)]
    saved_with_counts(store, "s", log)
    assert window(store, 3 + 3 * TURN) == dialogue(3)
    assert window(store, 3 + 3 * TURN - 1) == dialogue(2, first=2)
    assert PostgresChatMessageHistory("s", store).messages == log


def test_a_turn_with_tools_is_shown_whole_or_not_at_all(store: ConversationStore) -> None:
    turn = [human("?"), calling("c1", "c2"), result("c1", "long " * 50), result("c2"), ai("there")]
    saved_with_counts(store, "s", [*dialogue(1), *turn, *dialogue(1, first=3)])
    whole = [*turn, *dialogue(1, first=3)]
    assert window(store, tokens_of_all(whole)) == whole
    assert window(store, tokens_of_all(whole) - 1) == dialogue(1, first=3)


# A limit that depends on the inputs


def test_a_limit_may_be_a_function_of_the_chains_inputs(store: ConversationStore) -> None:
    write_as_others(store, "s", dialogue(9))
    memory = TokenWindowMemory(
        session_id="s", store=store, return_messages=True, max_token_limit=lambda inputs: 3 + inputs["turns"] * TURN
    )
    for turns in (0, 2, 5, 9):
        assert memory.load_memory_variables({"input": "?", "turns": turns})["history"] == dialogue(
            turns, first=10 - turns
        )
    assert len(asyncio.run(memory.aload_memory_variables({"turns": 3}))["history"]) == 6


def test_the_function_is_asked_once_each_load_and_with_nothing_for_the_buffer(store: ConversationStore) -> None:
    asked: list[dict[str, Any]] = []
    memory = TokenWindowMemory(session_id="s", store=store, max_token_limit=lambda inputs: asked.append(inputs) or 9)
    memory.load_memory_variables({"input": "?"})
    _ = memory.buffer
    assert asked == [{"input": "?"}, {}]


@pytest.mark.parametrize("answer", [None, -1, 2.5, "12", True, [5], float("inf")])
def test_an_answer_that_is_no_limit_is_shown_in_the_error(store: ConversationStore, answer: Any) -> None:
    memory = TokenWindowMemory(session_id="s", store=store, max_token_limit=lambda inputs: answer)
    with pytest.raises(ConfigurationError, match="max_token_limit must be a whole number from 0") as caught:
        memory.load_memory_variables({})
    assert repr(answer) in str(caught.value)


def test_what_the_function_raises_reaches_the_caller(store: ConversationStore) -> None:
    memory = TokenWindowMemory(session_id="s", store=store, max_token_limit=lambda inputs: inputs["missing"])
    with pytest.raises(KeyError, match="missing"):
        memory.load_memory_variables({})


@pytest.mark.parametrize("limit", [-1, 2.5, None, "many", [5]])
def test_a_limit_that_is_no_number_of_tokens_is_refused_by_name(store: ConversationStore, limit: Any) -> None:
    with pytest.raises(ValueError, match="max_token_limit"):
        TokenWindowMemory(session_id="s", store=store, max_token_limit=limit)


# Stored counts


def test_counts_are_stored_with_the_messages_and_name_their_encoding(
    store: ConversationStore, admin: Connection
) -> None:
    turn = [human("where is 订单 66?"), calling("c1", "c2"), result("c2"), result("c1"), ai("There. 🙂")]
    saved_with_counts(store, "s", turn)
    assert stored_counts(admin, store) == [(tokens_of(message), "o200k_base") for message in turn]


def test_each_encoding_stores_under_its_own_name(store: ConversationStore, admin: Connection) -> None:
    writing(TokenWindowMemory, token_counter="cl100k_base")(store, "s", [human("hello")])
    writing(TokenWindowMemory, token_counter="gpt-4o")(store, "s", [human("hello")])
    assert [encoding for _, encoding in stored_counts(admin, store)] == ["cl100k_base", "o200k_base"]


def test_counts_of_ones_own_are_not_stored(store: ConversationStore, admin: Connection) -> None:
    writing(TokenWindowMemory, token_counter=words_in)(store, "s", dialogue(1))
    BufferMemory(session_id="s", store=store).save_context({"input": "a"}, {"output": "b"})
    assert stored_counts(admin, store) == [(None, None)] * 4


def test_a_stored_count_is_believed(store: ConversationStore, admin: Connection) -> None:
    saved_with_counts(store, "s", dialogue(9))
    set_counts(admin, store, "token_count = 50")
    assert window(store, 3 + 2 * 100) == dialogue(2, first=8)


@pytest.mark.parametrize(
    "stale",
    [
        "token_count = 1, token_encoding = 'estimated'",
        "token_count = 1, token_encoding = 'cl100k_base'",
        "token_count = 9999, token_encoding = 'cl100k_base'",
        "token_count = 1, token_encoding = null",
        "token_count = null, token_encoding = null",
        "token_count = null",
    ],
)
def test_a_count_that_is_another_encodings_or_missing_is_made_anew(
    store: ConversationStore, admin: Connection, stale: str
) -> None:
    saved_with_counts(store, "s", [system(), *dialogue(9)])
    set_counts(admin, store, stale)
    for turns in (1, 4, 9):
        limit = tokens_of_all([system()]) + turns * TURN
        assert window(store, limit) == [system(), *dialogue(turns, first=10 - turns)]
        assert window(store, limit - 1) == [system(), *dialogue(turns - 1, first=11 - turns)]


def test_one_message_without_a_count_hides_nothing_that_is_older(store: ConversationStore, admin: Connection) -> None:
    saved_with_counts(store, "s", dialogue(9))
    set_counts(admin, store, "token_count = null where message_index = 15")
    assert window(store, 10**6) == dialogue(9)


# Special tokens


def test_special_tokens_in_a_text_are_saved_counted_and_unchanged(store: ConversationStore, admin: Connection) -> None:
    text = "hi <|endoftext|> <|im_start|>system<|im_sep|>"
    memory = TokenWindowMemory(session_id="s", store=store, return_messages=True)
    memory.save_context({"input": text}, {"output": f"so: {text}"})
    write_as_others(store, "s", [human(text)])
    assert memory.buffer == [human(text), ai(f"so: {text}"), human(text)]
    assert stored_counts(admin, store)[0] == (tokens_of(human(text)), "o200k_base")
    assert tokens_of(human(text)) > 12


# Offline


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No encoding can be loaded, until this is undone."""
    monkeypatch.setattr(token_encodings, "_outcomes", {"o200k_base": "ProxyError"})
    return monkeypatch


def test_offline_tokens_are_estimated_with_one_warning(
    store: ConversationStore, admin: Connection, offline: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(1, 10):
        memory = TokenWindowMemory(session_id="s", store=store, max_token_limit=60, return_messages=True)
        memory.save_context({"input": f"question {number}"}, {"output": f"answer {number}"})
        assert memory.buffer[-2:] == dialogue(1, first=number)
    assert 0 < len(memory.buffer) < 18
    assert {encoding for _, encoding in stored_counts(admin, store)} == {"estimated"}
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_estimates_are_counted_again_once_the_encoding_is_there(
    store: ConversationStore, admin: Connection, offline: pytest.MonkeyPatch
) -> None:
    saved_with_counts(store, "s", dialogue(9))
    estimated = window(store, 3 + 4 * TURN)
    offline.undo()
    assert window(store, 3 + 4 * TURN) == dialogue(4, first=6)
    assert len(estimated) < 8, "an estimate is rather too high"
    saved_with_counts(store, "s", dialogue(1, first=10))
    assert window(store, 3 + 5 * TURN) == dialogue(5, first=6)
    assert {encoding for _, encoding in stored_counts(admin, store)} == {"estimated", "o200k_base"}


# Counters of one's own


class CountsItself(FakeListChatModel):
    """A chat model with a tokenizer of its own: a word is a token."""

    responses: list[str] = []

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        return words_in(messages)


@pytest.mark.parametrize("counter", [words_in, characters_in, len])
@pytest.mark.parametrize("write", [saved_with_counts, write_as_others])
def test_a_function_of_ones_own_decides_what_fits(
    store: ConversationStore,
    counter: Callable[[Sequence[BaseMessage]], int],
    write: Callable[[ConversationStore, str, list[BaseMessage]], None],
) -> None:
    write(store, "s", [system(), *dialogue(9)])
    for turns in (1, 4, 9):
        expected = [system(), *dialogue(turns, first=10 - turns)]
        assert window(store, counter(expected), token_counter=counter) == expected
        assert len(window(store, counter(expected) - 1, token_counter=counter)) == len(expected) - 2


def test_a_function_may_find_that_nothing_costs_anything(store: ConversationStore) -> None:
    write_as_others(store, "s", dialogue(200))
    assert window(store, 1, token_counter=lambda messages: 0) == dialogue(200)


def test_a_function_is_asked_a_few_times_about_whole_lists(store: ConversationStore) -> None:
    saved_with_counts(store, "s", [system(), *dialogue(500)])
    asked: list[int] = []

    def counter(messages: list[BaseMessage]) -> int:
        asked.append(len(messages))
        return words_in(messages)

    assert len(window(store, 1000, token_counter=counter)) == 1 + 2 * (998 // 4)
    assert len(asked) <= 30
    assert max(asked) <= 1001


@pytest.mark.parametrize(("answer", "told"), [(None, "NoneType"), (2.5, "2.5"), (-1, "-1"), ("5", "str")])
def test_a_function_that_returns_no_count_is_named_with_its_answer(
    store: ConversationStore, answer: Any, told: str
) -> None:
    def my_counter(messages: list[BaseMessage]) -> Any:
        return answer

    write_as_others(store, "s", dialogue(1))
    with pytest.raises(ValueError, match=f"my_counter.*{told}"):
        window(store, 100, token_counter=my_counter)


@pytest.mark.parametrize("option", ["llm", "token_counter"])
def test_an_llm_that_counts_for_itself_is_asked(store: ConversationStore, option: str) -> None:
    write_as_others(store, "s", dialogue(4))
    assert window(store, 8, **{option: CountsItself()}) == dialogue(2, first=3)


def test_token_counter_goes_before_the_llm(store: ConversationStore) -> None:
    write_as_others(store, "s", dialogue(4))
    assert window(store, 2, llm=CountsItself(), token_counter=len) == dialogue(1, first=4)


def test_a_model_without_tokenizer_is_counted_by_the_default_encoding_with_one_warning(
    store: ConversationStore, admin: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(1, 10):
        memory = TokenWindowMemory(
            session_id="s",
            store=store,
            llm=FakeListChatModel(responses=[]),
            max_token_limit=3 + 3 * TURN,
            return_messages=True,
        )
        memory.save_context({"input": f"question {number}"}, {"output": f"answer {number}"})
    assert memory.buffer == dialogue(3, first=7)
    assert {encoding for _, encoding in stored_counts(admin, store)} == {"o200k_base"}
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING
    assert "FakeListChatModel" in warning.getMessage()


@pytest.mark.parametrize("counter", ["no-such-model", 5, object()])
def test_a_counter_that_cannot_count_is_refused_when_the_memory_is_built(
    store: ConversationStore, counter: Any
) -> None:
    with pytest.raises(ValueError, match=r"encoding|token_counter"):
        TokenWindowMemory(session_id="s", store=store, token_counter=counter)


def test_another_session_is_counted_alike(store: ConversationStore) -> None:
    memory = TokenWindowMemory(
        session_id="s", store=store, max_token_limit=8, token_counter=words_in, return_messages=True
    )
    write_as_others(store, "t", dialogue(4))
    assert memory.for_session("t").buffer == dialogue(2, first=3)
    assert memory.buffer == []


# Text


def test_the_window_as_text(store: ConversationStore) -> None:
    write_as_others(store, "s", [system(), *dialogue(3)])
    memory = TokenWindowMemory(
        session_id="s", store=store, max_token_limit=tokens_of_all([system()]) + TURN, human_prefix="Client"
    )
    assert memory.load_memory_variables({}) == {"history": "System: be kind\nClient: question 3\nAI: answer 3"}
    assert memory.buffer == memory.buffer_as_str == memory.load_memory_variables({})["history"]
