"""What a memory says of each message: that it is shown or is not, why, and what it costs; exactly, and without doing
anything."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from conversations import (
    Writer,
    ai,
    calling,
    dialogue,
    function_result,
    head_of,
    human,
    is_mute,
    is_result,
    logs,
    result,
    shown_of,
    shown_preamble_of,
    split,
    system,
    tokens_of,
    tokens_of_all,
    words_in,
    write_as_others,
    write_in_parts,
    writing,
)
from fakes import FakeChat, scripted
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langchain_core.messages import BaseMessage, HumanMessage, RemoveMessage, SystemMessage
from psycopg2.extensions import connection as Connection

from pgmemory import (
    BufferMemory,
    ConversationStore,
    Explanation,
    PgMemoryError,
    PostgresChatMemory,
    RelevantTurnMemory,
    SummaryMemory,
    TokenWindowMemory,
    cli,
)
from pgmemory.encryption import Keyring
from pgmemory.logged import to_logged
from pgmemory.memory.selection import Selection
from pgmemory.turns import split_turns

over_a_database = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])

KEYWORDS = ["refund", "66"]
RULE: dict[str, Any] = {"keywords": KEYWORDS, "keep_irrelevant": True}

writers: list[Writer] = [
    write_as_others,
    writing(TokenWindowMemory),
    writing(RelevantTurnMemory, max_token_limit=100, **RULE),
    writing(RelevantTurnMemory, keywords=["parcel"], keep_irrelevant=True),
]


def refuse(messages: list[BaseMessage]) -> str:
    raise AssertionError("an explanation asks no model")


silent = FakeChat(answer=refuse)


def loaded(memory: PostgresChatMemory, inputs: dict[str, Any] | None = None) -> list[BaseMessage]:
    memory.return_messages = True
    return list(memory.load_memory_variables(inputs or {})[memory.memory_key])


def codes(explanation: Explanation) -> list[str]:
    return [message.code for message in explanation.messages]


def codes_of(memory: PostgresChatMemory) -> list[str]:
    return codes(memory.explain())


# Any log, any memory


def assert_every_reason_is_true(memory: PostgresChatMemory, log: Sequence[BaseMessage], said: Explanation) -> None:
    """Compare an explanation with the reference: `log` is what the conversation holds, numbered from 0."""
    count = words_in if said.counter.startswith("CustomCounter") else tokens_of_all
    assert said.shown == loaded(memory)
    assert said.tokens == count(said.shown)
    of_log = [message for message in said.messages if message.message_index is not None]
    assert [message.message_index for message in of_log] == list(range(len(log)))
    assert [message.role for message in of_log] == [message.type for message in log]
    assert [log[message.message_index or 0] for message in of_log if message.kept] == [
        message for message in said.shown if "summary so far" not in message.content
    ]
    for message, logged in zip(of_log, log, strict=True):
        assert message.tokens == (words_in([logged]) if count is words_in else tokens_of(logged))
    preamble, turns = split(log)
    numbers = [None] * len(preamble) + [number for number, turn in enumerate(turns, 1) for _ in turn]
    assert [message.turn for message in of_log] == numbers
    passing = [
        any(word in str(message.content) for word in KEYWORDS for message in turn if message.type in ("human", "ai"))
        for turn in turns
    ]
    candidates = [
        turn for turn, passes in zip(turns, passing, strict=True) if passes or "keywords" not in said.settings
    ]
    k = said.settings.get("k")
    summarized = [message.message_index or 0 for message in of_log if message.code == "summarized"]
    for message, logged in zip(of_log, log, strict=True):
        turn = turns[message.turn - 1] if message.turn else []
        place = next((place for place, one in enumerate(candidates) if one is turn), None)
        assert message.reason.endswith(".")
        assert message.kept == (message.code == "kept")
        match message.code:
            case "kept":
                pass
            case "irrelevant":
                assert turn and place is None
            case "beyond_k":
                assert k is not None and place is not None and len(candidates) - place > k
            case "beyond_limit":
                assert said.limit is not None
                if turn and count(head_of(log)) <= said.limit and said.limit:
                    assert place is not None
                    behind = [each for one in candidates[place:] for each in shown_of(one)]
                    assert count([*head_of(log), *behind]) > said.limit
                    assert k is None or len(candidates) - place <= k
                elif said.limit:
                    assert count(head_of(log)) > said.limit
            case "summarized":
                assert message.message_index in summarized and message.message_index <= max(summarized)
            case "preamble":
                assert logged in preamble and not isinstance(logged, SystemMessage)
                assert any(each is logged for each in shown_preamble_of(preamble))
            case "empty":
                assert is_mute(logged) or (turn and not shown_of(turn))
            case "unpaired_call":
                assert logged.type == "ai" and not any(each is logged for each in shown_of(turn or preamble))
            case "unpaired_result":
                assert is_result(logged) and not any(each is logged for each in shown_of(turn or preamble))
            case "removal":
                assert logged.type == "remove"
            case other:
                raise AssertionError(f"{type(memory).__name__} gives {other}")
    json.dumps(said.as_dict())
    assert str(said).count("\n") == len(said.messages)


limits = st.none() | st.integers(0, 300)
memories: st.SearchStrategy[Callable[..., PostgresChatMemory]] = st.one_of(
    st.builds(lambda k: lambda **of: BufferMemory(k=k, **of), st.none() | st.integers(0, 4)),
    st.builds(
        lambda limit, counter: lambda **of: TokenWindowMemory(max_token_limit=limit, token_counter=counter, **of),
        st.integers(0, 300),
        st.sampled_from([None, None, words_in]),
    ),
    st.builds(
        lambda k, limit: lambda **of: RelevantTurnMemory(k=k, max_token_limit=limit, **RULE, **of),
        st.none() | st.integers(0, 4),
        limits,
    ),
    st.builds(lambda limit: lambda **of: SummaryMemory(llm=silent, max_token_limit=limit, **of), st.integers(0, 200)),
)


@given(
    log=logs,
    by=st.lists(st.sampled_from(writers), min_size=1, max_size=3),
    cuts=st.lists(st.integers(1, 20), max_size=4),
    folding=st.none() | st.integers(0, 60),
    kinds=st.lists(memories, min_size=4, max_size=4),
)
@over_a_database
def test_what_is_explained_is_what_is_loaded_and_every_reason_is_true(
    store: ConversationStore,
    log: list[BaseMessage],
    by: list[Writer],
    cuts: list[int],
    folding: int | None,
    kinds: list[Callable[..., PostgresChatMemory]],
) -> None:
    session_id = uuid.uuid4().hex
    write_in_parts(store, session_id, log, by, cuts)
    if folding is not None:
        folds = SummaryMemory(
            session_id=session_id, store=store, llm=scripted("summary so far"), max_token_limit=folding
        )
        folds.fold()
    for kind in kinds:
        memory = kind(session_id=session_id, store=store)
        assert_every_reason_is_true(memory, log, memory.explain())


# Reasons, one by one


def reasons(explanation: Explanation) -> dict[int | None, str]:
    return {message.message_index: message.reason for message in explanation.messages}


def test_a_turn_that_does_not_fit_says_what_it_would_have_come_to(store: ConversationStore) -> None:
    log = [system(), *dialogue(4)]
    write_as_others(store, "s", log)
    limit = tokens_of_all([system(), *dialogue(2, first=3)])
    said = TokenWindowMemory(session_id="s", store=store, max_token_limit=limit).explain()
    assert codes(said) == ["kept", *["beyond_limit"] * 4, *["kept"] * 4]
    assert [message.turn for message in said.messages] == [None, 1, 1, 2, 2, 3, 3, 4, 4]
    would_be = tokens_of_all([system(), *dialogue(3, first=2)])
    assert reasons(said) == {
        0: "A system message from before the first turn.",
        1: f"Older than a turn that does not fit the limit of {limit} tokens.",
        2: f"Older than a turn that does not fit the limit of {limit} tokens.",
        3: f"With this turn the window would take {would_be} tokens, over the limit of {limit}.",
        4: f"With this turn the window would take {would_be} tokens, over the limit of {limit}.",
        **dict.fromkeys(range(5, 9), f"Among the newest turns that fit {limit} tokens."),
    }
    assert (said.memory, said.settings, said.limit, said.tokens) == (
        "TokenWindowMemory", {"max_token_limit": limit}, limit, limit
    )  # fmt: skip
    assert (said.counter, said.estimated) == ("o200k_base", False)


def test_system_messages_that_do_not_fit_are_why_nothing_is_shown(store: ConversationStore) -> None:
    write_as_others(store, "s", [system(), *dialogue(1)])
    alone = tokens_of_all([system()])
    said = TokenWindowMemory(session_id="s", store=store, max_token_limit=alone - 1).explain()
    reason = f"The system messages before the first turn take {alone} tokens, over the limit of {alone - 1}."
    assert set(reasons(said).values()) == {reason}
    assert (said.shown, said.tokens) == ([], 0)
    said = TokenWindowMemory(session_id="s", store=store, max_token_limit=0, token_counter=lambda messages: 0).explain()
    assert set(reasons(said).values()) == {"The limit is 0, which shows nothing."}


def test_a_limit_is_what_the_function_makes_of_the_inputs(store: ConversationStore) -> None:
    write_as_others(store, "s", dialogue(3))
    memory = TokenWindowMemory(session_id="s", store=store, max_token_limit=lambda inputs: inputs.get("room", 0))
    for turns in (0, 1, 3):
        room = tokens_of_all(dialogue(turns))
        said = memory.explain({"room": room})
        assert said.shown == loaded(memory, {"room": room}) == dialogue(3)[6 - 2 * turns :]
        assert (said.limit, said.settings) == (room, {"max_token_limit": room})


def test_what_no_model_accepts_is_told_apart(store: ConversationStore) -> None:
    log = [
        ai("Welcome!"), ai(""), system(" "), calling("p"), result("p"), RemoveMessage(id="x"),
        human("one"), calling("a", "b"), result("a"), ai("so"), result("z"),
        human("two"), function_result("lookup"), RemoveMessage(id="x"), system(""), calling("c"),
        result("c"), result("c"), human("three"), ai(""),
        human(" "), ai("well?"),
    ]  # fmt: skip
    write_as_others(store, "s", log)
    whole = BufferMemory(session_id="s", store=store).explain()
    assert codes(whole) == [
        "kept", "empty", "empty", "kept", "kept", "removal",
        "kept", "unpaired_call", "unpaired_result", "kept", "unpaired_result",
        "kept", "unpaired_result", "removal", "empty", "kept", "kept", "unpaired_result",
        "empty", "empty",
        "empty", "empty",
    ]  # fmt: skip
    assert whole.messages[18].reason == "Message 19 of its turn has neither text nor calls."
    assert whole.messages[19].reason == "It has neither text nor calls, so its whole turn is left out."
    assert whole.messages[21].reason == "Message 20 of its turn has neither text nor calls."
    last = BufferMemory(session_id="s", store=store, k=3).explain()
    assert codes(last)[:11] == [
        "preamble", "empty", "empty", "preamble", "preamble", "removal", *["beyond_k"] * 5
    ]  # fmt: skip
    assert codes(last)[11:] == codes(whole)[11:]
    assert last.settings == {"k": 3} and last.limit is None
    # A turn that costs nothing is never left out for the limit.
    assert codes_of(TokenWindowMemory(session_id="s", store=store, max_token_limit=1))[-4:] == ["empty"] * 4


def test_relevant_turns_tell_their_keywords_and_the_others_why_not(store: ConversationStore) -> None:
    write_as_others(store, "s", [human("a refund"), ai("no"), human("hi"), ai("ho"), human("66?"), ai("a REFUND")])
    memory = RelevantTurnMemory(session_id="s", store=store, keywords=KEYWORDS, k=1)
    said = memory.explain()
    assert codes(said)[::2] == ["beyond_k", "irrelevant", "kept"]
    assert [message.reason for message in said.messages[::2]] == [
        "Older than the last 1 relevant turns.", "No keyword occurs in its turn.", "Found in its turn: 'refund', '66'.",
    ]  # fmt: skip
    assert said.settings == {
        "keywords": KEYWORDS, "whole_words": False, "is_relevant": False, "k": 1, "max_token_limit": None
    }  # fmt: skip
    memory = RelevantTurnMemory(session_id="s", store=store, is_relevant=lambda turn: len(str(turn[0].content)) == 2)
    assert [message.reason for message in memory.explain().messages[::2]] == [
        "is_relevant does not find its turn relevant.", "is_relevant finds its turn relevant.",
        "is_relevant does not find its turn relevant.",
    ]  # fmt: skip
    assert codes_of(RelevantTurnMemory(session_id="s", store=store, keywords=["no such"], k=0)) == ["irrelevant"] * 6


def test_a_summary_stands_where_it_is_shown_and_what_it_covers_says_so(store: ConversationStore) -> None:
    log = [ai("Welcome!"), system(), *dialogue(4)]
    write_as_others(store, "s", log)
    folds = SummaryMemory(session_id="s", store=store, llm=scripted("They talked."), max_token_limit=60)
    assert folds.fold()
    covered = folds.store.read_summary_window(folds.chat_memory.key, budget=1, encoding=None).summary.covers_through
    memory = SummaryMemory(session_id="s", store=store, llm=silent, max_token_limit=60)
    said = memory.explain()
    assert said.shown == loaded(memory)
    place = next(place for place, message in enumerate(said.messages) if message.code == "summary")
    summary = said.messages[place]
    assert (summary.message_index, summary.turn, summary.role, summary.text) == (None, None, "system", "They talked.")
    assert summary.reason == f"The summary of what was said up to message {covered}."
    assert said.messages[place - 1].message_index == covered and said.messages[place + 1].kept
    assert codes(said)[:place] == ["summarized", "kept", *["summarized"] * (covered - 1)]
    assert set(codes(said)[place + 1 :]) == {"kept"}
    assert said.messages[-1].reason == "The newest turn is always shown."
    assert said.settings == {"max_token_limit": 60} and said.limit == 120


def test_what_was_added_to_a_turn_after_it_was_folded_says_so(store: ConversationStore) -> None:
    write_as_others(store, "s", dialogue(2))
    memory = SummaryMemory(session_id="s", store=store, llm=scripted("They talked."), max_token_limit=0)
    assert memory.fold()
    assert memory.chat_memory.delete_last_turn() == [2, 3]
    memory.chat_memory.add_messages([ai("by the way")])
    said = memory.explain()
    assert said.shown == loaded(memory)
    assert codes(said) == ["summarized", "summarized", "summarized", "summary"]
    assert said.messages[2].reason == "Its turn is in the summary up to message 1; the rest waits for the next one."


def test_a_summary_of_the_very_text_of_a_message_is_not_taken_for_it(store: ConversationStore) -> None:
    write_as_others(store, "s", [human("same"), ai("same"), human("new"), ai("now")])
    folds = SummaryMemory(
        session_id="s", store=store, llm=scripted("same"), max_token_limit=0, summary_message_cls=HumanMessage
    )
    assert folds.fold()
    assert codes_of(folds) == ["summarized", "summarized", "summary", "kept", "kept"]


# Memories of one's own


class Filtering(BufferMemory):
    """Shows only turns that the human begins with a word."""

    def select_messages(self, inputs: dict[str, Any]) -> list[BaseMessage]:
        window = super().select_messages(inputs)
        starts = [place for place, message in enumerate(window) if message.type == "human"]
        chosen = inputs.get("turns", [])
        return [SystemMessage("fact"), *(window[starts[n] + m] for n in chosen for m in (0, 1)), SystemMessage("fact")]


def test_identical_turns_are_told_apart_and_additions_stand_where_they_are_shown(store: ConversationStore) -> None:
    write_as_others(store, "s", [human("hi"), ai("ho")] * 4)
    memory = Filtering(session_id="s", store=store, k=3)
    said = memory.explain({"turns": [1]})
    assert said.shown == loaded(memory, {"turns": [1]})
    assert [(message.message_index, message.code) for message in said.messages] == [
        (0, "beyond_k"), (1, "beyond_k"), (2, "left_out"), (3, "left_out"), (None, "added"), (4, "kept"), (5, "kept"),
        (6, "left_out"), (7, "left_out"), (None, "added"),
    ]  # fmt: skip
    assert said.messages[2].reason == "Left out by Filtering.select_messages."
    assert said.messages[4].reason == "Added by Filtering.select_messages."
    assert said.tokens == tokens_of_all(said.shown)
    assert (said.memory, said.settings) == ("Filtering", {"k": 3})
    # Shown in another order, and one of them twice.
    said = memory.explain({"turns": [2, 0, 0]})
    kept = [message.message_index for message in said.messages if message.code == "kept"]
    assert kept == [2, 3, 6, 7]
    assert codes(said).count("added") == 4
    assert said.tokens == tokens_of_all(said.shown)


class ByItself(PostgresChatMemory):
    """Reads the log by itself."""

    def select_messages(self, inputs: dict[str, Any]) -> list[BaseMessage]:
        return [message for message in self.chat_memory.messages if message.type == "ai"][-inputs["last"] :]


def test_a_memory_that_calls_no_other_is_matched_from_the_newest_backwards(store: ConversationStore) -> None:
    write_as_others(store, "s", [human("hi"), ai("ho")] * 3)
    memory = ByItself(session_id="s", store=store)
    said = memory.explain({"last": 2})
    assert said.shown == loaded(memory, {"last": 2})
    assert codes(said) == ["left_out", "left_out", "left_out", "kept", "left_out", "kept"]
    assert said.messages[3].reason == "Shown by ByItself.select_messages."
    assert (said.settings, said.limit, said.tokens) == ({}, None, tokens_of_all(said.shown))


class Chooser(PostgresChatMemory):
    """Chooses of the log and says nothing of why."""

    def _select(self, inputs: dict[str, Any]) -> Selection:
        log = [to_logged(stored) for stored in self.chat_memory.store.read_all(self.chat_memory.key)]
        return Selection([], split_turns(log)[1][-inputs["last"] :])


def test_a_memory_that_only_chooses_is_explained_by_its_choice(store: ConversationStore) -> None:
    write_as_others(store, "s", dialogue(3))
    said = Chooser(session_id="s", store=store).explain({"last": 1})
    assert codes(said) == ["left_out"] * 4 + ["kept"] * 2
    assert {message.reason for message in said.messages} == {"Left out by Chooser.", "Shown by Chooser."}
    assert said.settings == {}


def test_what_was_erased_with_its_key_says_so(server_dsn: str, store: ConversationStore) -> None:
    with ConversationStore(server_dsn, schema=store.schema, keyring=Keyring({"a": bytes(32)})) as sealed:
        write_as_others(sealed, "s", [system(), human("a"), ai("b"), human("c")])
        assert sealed.erase_key("s")
        write_as_others(sealed, "s", [ai("d"), human("e"), ai("f")])
        for memory in (BufferMemory, TokenWindowMemory):
            said = memory(session_id="s", store=sealed).explain()
            assert codes(said) == ["erased"] * 5 + ["kept"] * 2
            reasons = [message.reason for message in said.messages]
            assert set(reasons[:4]) == {"Its key was erased, so it cannot be read."}
            assert reasons[4] == "Message 3 of its turn cannot be read, for its key was erased."


class Greeting(BufferMemory):
    """Repeats the log's greeting in front of it."""

    def select_messages(self, inputs: dict[str, Any]) -> list[BaseMessage]:
        return [human("hi"), *super().select_messages(inputs)]


def test_an_addition_that_equals_what_is_shown_of_the_log_stays_an_addition(store: ConversationStore) -> None:
    write_as_others(store, "s", [human("hi"), ai("ho")])
    said = Greeting(session_id="s", store=store).explain()
    assert [(message.message_index, message.code) for message in said.messages] == [
        (None, "added"), (0, "kept"), (1, "kept")
    ]  # fmt: skip


class Wider(BufferMemory):
    """Shows more turns to a long question, by a copy of itself."""

    def select_messages(self, inputs: dict[str, Any]) -> list[BaseMessage]:
        if self.k != inputs["k"]:
            return self.model_copy(update={"k": inputs["k"]}).select_messages(inputs)
        return super().select_messages(inputs)


def test_settings_are_those_of_the_copy_that_chose(store: ConversationStore) -> None:
    write_as_others(store, "s", dialogue(4))
    said = Wider(session_id="s", store=store, k=1).explain({"k": 3})
    assert codes(said) == ["beyond_k"] * 2 + ["kept"] * 6
    assert said.settings == {"k": 3}
    assert said.messages[-1].reason == "Among the last 3 turns."


class Restless(BufferMemory):
    """Gets a turn each time it is asked, so many times."""

    times: int

    def select_messages(self, inputs: dict[str, Any]) -> list[BaseMessage]:
        window = super().select_messages(inputs)
        if self.times:
            self.times -= 1
            self.chat_memory.add_messages(dialogue(1))
        return window


def test_a_conversation_that_changes_meanwhile_is_explained_anew(store: ConversationStore) -> None:
    memory = Restless(session_id="s", store=store, k=1, times=4)
    said = memory.explain()
    assert codes(said) == ["beyond_k"] * 6 + ["kept"] * 2
    memory = Restless(session_id="t", store=store, k=1, times=5)
    with pytest.raises(PgMemoryError, match="was written to while it was explained"):
        memory.explain()


# What it does and does not do


def test_explaining_writes_nothing_asks_no_model_and_is_a_few_round_trips(
    counted_store: Any, admin: Connection
) -> None:
    write_as_others(counted_store, "s", [system(), human("a refund"), *dialogue(20)])
    tables = ["conversations", "conversation_messages", "conversation_summaries"]

    def rows() -> list[Any]:
        found = []
        with admin.cursor() as cursor:
            for table in tables:
                cursor.execute(f"select t.*, t.xmin::text from {counted_store.schema}.{table} t order by t::text")
                found.append(cursor.fetchall())
        return found

    before = rows()
    of: dict[str, Any] = {"session_id": "s", "store": counted_store}
    for memory in (
        BufferMemory(**of, k=2, max_messages=2),
        TokenWindowMemory(**of, max_token_limit=10**6),
        RelevantTurnMemory(**of, keywords=["refund"]),
        SummaryMemory(**of, llm=silent, max_token_limit=20),
    ):
        counted_store.executes.clear()
        loaded(memory)
        loading = len(counted_store.executes)
        counted_store.executes.clear()
        memory.explain()
        assert len(counted_store.executes) == loading + 3
    assert rows() == before


def test_a_conversation_that_is_not_there_is_explained_as_empty(store: ConversationStore) -> None:
    for memory in (BufferMemory(session_id="s", store=store), TokenWindowMemory(session_id="s", store=store)):
        said = memory.explain()
        assert (said.messages, said.shown, said.tokens) == ((), [], 0)
    assert store.get_conversation("s") is None


def test_loading_notes_nothing(store: ConversationStore) -> None:
    memory = BufferMemory(session_id="s", store=store)
    memory.explain()
    loaded(memory)
    assert memory._noted is None


def test_aexplain_does_the_same_in_a_thread_of_the_store(store: ConversationStore) -> None:
    write_as_others(store, "s", dialogue(2))
    threads = []

    class Noting(BufferMemory):
        def select_messages(self, inputs: dict[str, Any]) -> list[BaseMessage]:
            threads.append(threading.current_thread())
            return super().select_messages(inputs)

    memory = Noting(session_id="s", store=store, k=1)
    assert asyncio.run(memory.aexplain({"input": "x"})) == memory.explain({"input": "x"})
    assert threads[0] is not threading.current_thread()


def test_a_counter_of_ones_own_and_an_estimate_are_named(
    store: ConversationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_as_others(store, "s", dialogue(1))
    said = TokenWindowMemory(session_id="s", store=store, token_counter=words_in).explain()
    assert (said.counter, said.estimated, said.tokens) == ("CustomCounter(words_in)", False, 4)
    assert [message.tokens for message in said.messages] == [2, 2]
    monkeypatch.setattr("pgmemory.tokens.load_once", lambda name: "no network")
    said = BufferMemory(session_id="s", store=store).explain()
    assert (said.counter, said.estimated) == ("o200k_base", True)
    assert "estimated" in said.totals()


def test_it_reads_well_and_a_hostile_text_does_nothing_to_a_terminal(store: ConversationStore) -> None:
    write_as_others(
        store, "s", [human("\x1b[2J\x07 two\nlines " + "x" * 200), calling("a"), result("a"), ai("\u202eok")]
    )
    said = BufferMemory(session_id="s", store=store).explain()
    lines = str(said).splitlines()
    assert len(lines) == 5
    assert lines[0].startswith("+     0 human ") and "<U+001B>[2J<U+0007> two lines xxx" in lines[0]
    assert "…" in lines[0] and "<U+202E>ok" in lines[3]
    assert '[calls search({"query": "about a"})]' in lines[1]
    assert all(character.isprintable() for line in lines for character in line)
    assert lines[-1] == f"BufferMemory(k=None) shows 4 of 4 messages, {said.tokens} tokens (o200k_base)"
    shown = json.loads(json.dumps(said.as_dict()))
    assert shown["messages"][1] == {
        "message_index": 1, "turn": 1, "role": "ai", "text": '[calls search({"query": "about a"})]',
        "tokens": tokens_of(calling("a")), "kept": True, "code": "kept", "reason": "The whole conversation is shown.",
    }  # fmt: skip
    assert "shown" not in shown and "xxx" not in repr(said).replace(repr(said.messages), "")


# The command


@pytest.fixture
def call(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], store: ConversationStore, server_dsn: str
) -> Callable[..., tuple[int, str, str]]:
    """Run `pgmemory explain` on the test's schema in this process; return exit code, output and errors."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setenv("DATABASE_URL", server_dsn)
        with pytest.raises(SystemExit) as ended:
            cli.main(["explain", "--schema", store.schema, *arguments], prog_name="pgmemory")
        output, errors = capfd.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, output, errors

    return call


MEMORIES: list[tuple[list[str], Callable[..., PostgresChatMemory]]] = [
    (["buffer"], BufferMemory),
    (["buffer", "--k", "1"], lambda **of: BufferMemory(**of, k=1)),
    (["token", "--max-token-limit", "40"], lambda **of: TokenWindowMemory(**of, max_token_limit=40)),
    (["token", "--encoding", "cl100k_base"], lambda **of: TokenWindowMemory(**of, token_counter="cl100k_base")),
    (
        ["relevant", "--keyword", "refund", "--keyword", "66", "--whole-words", "--k", "3", "--max-token-limit", "99"],
        lambda **of: RelevantTurnMemory(**of, keywords=KEYWORDS, whole_words=True, k=3, max_token_limit=99),
    ),
    (["summary", "--max-token-limit", "12"], lambda **of: SummaryMemory(**of, llm=silent, max_token_limit=12)),
]


@pytest.mark.parametrize(("arguments", "memory"), MEMORIES, ids=[" ".join(arguments) for arguments, _ in MEMORIES])
def test_the_command_says_what_the_memory_says(
    call: Callable[..., tuple[int, str, str]],
    store: ConversationStore,
    arguments: list[str],
    memory: Callable[..., PostgresChatMemory],
) -> None:
    write_as_others(store, "s", [system(), *dialogue(2), human("a refund [bold]\x1b[2J"), ai("no " * 99)])
    said = memory(session_id="s", store=store).explain()
    code, output, errors = call("s", "--memory", *arguments, "--json")
    assert (code, errors) == (0, "")
    assert json.loads(output) == said.as_dict()
    assert output.count("\n") == 1
    code, output, errors = call("s", "--memory", *arguments)
    assert (code, errors) == (0, "")
    assert "\x1b" not in output and "[bold]" in output
    assert " ".join(said.totals().split()) in " ".join(output.split())
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if "│" in line]
    assert [row[:4] for row in rows if row[3]] == [
        [
            "" if message.message_index is None else str(message.message_index),
            "+" if message.kept else "-",
            message.role,
            str(message.tokens),
        ]
        for message in said.messages
    ]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "--memory"),
        (["--memory", "nonsense"], "nonsense"),
        (["--memory", "buffer", "--max-token-limit", "5"], "--max-token-limit does not belong to --memory buffer"),
        (["--memory", "buffer", "--encoding", "gpt-4o"], "--encoding does not belong to --memory buffer"),
        (["--memory", "token", "--k", "5"], "--k does not belong to --memory token"),
        (["--memory", "token", "--keyword", "x"], "--keyword does not belong to --memory token"),
        (["--memory", "summary", "--whole-words"], "--whole-words does not belong to --memory summary"),
        (["--memory", "relevant"], "--memory relevant needs a --keyword"),
        (["--memory", "relevant", "--keyword", " "], "must not be blank"),
        (["--memory", "token", "--encoding", "nonsense"], "tiktoken knows"),
        (["--memory", "token", "--max-token-limit", "-1"], "max-token-limit"),
        (["--memory", "buffer", "--k", "x"], "--k"),
    ],
)
def test_wrong_usage_of_the_command(call: Callable[..., tuple[int, str, str]], arguments: list[str], part: str) -> None:
    code, output, errors = call("s", *arguments)
    assert (code, output) == (2, "")
    assert part in errors


def test_the_command_finds_the_conversation_or_says_that_there_is_none(
    call: Callable[..., tuple[int, str, str]], store: ConversationStore
) -> None:
    code, output, errors = call("s", "--memory", "buffer")
    assert (
        (code, output) == (1, "") and errors.startswith("Error: there is no conversation") and errors.count("\n") == 1
    )
    BufferMemory(session_id="s", user_id="u", store=store).save_context({"input": "a"}, {"output": "b"})
    for user in ([], ["--user", "u"]):
        assert len(json.loads(call("s", "--memory", "buffer", "--json", *user)[1])["messages"]) == 2


def test_without_langchain_the_command_says_so_in_one_line(
    call: Callable[..., tuple[int, str, str]], store: ConversationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_as_others(store, "s", dialogue(1))
    for name in [name for name in sys.modules if name.startswith(("pgmemory.memory", "pgmemory._compat"))]:
        monkeypatch.delitem(sys.modules, name)
    for line in ("langchain_classic", "langchain"):
        for name in [line, *(name for name in sys.modules if name.startswith(f"{line}."))]:
            monkeypatch.setitem(sys.modules, name, None)
    code, output, errors = call("s", "--memory", "buffer")
    assert (code, output) == (1, "")
    assert errors.count("\n") == 1 and "langchain-pgmemory[langchain1]" in errors
