"""Deleting and replacing messages and turns: the log, its windows, summaries, verdicts and write ids stay right."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from conversations import (
    ai,
    calling,
    calls_of,
    dialogue,
    human,
    is_result,
    logs,
    result,
    system,
    tokens_of_all,
    widest_window,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import BaseMessage, HumanMessage, RemoveMessage

from pgmemory import (
    ConfigurationError,
    ConversationStore,
    MessageNotStorableError,
    PostgresChatMessageHistory,
    RelevantTurnMemory,
    SummaryMemory,
    TokenWindowMemory,
)


def agent_turn(number: int) -> list[BaseMessage]:
    """A turn with a tool call that has two results."""
    calls = (f"a{number}", f"b{number}")
    return [human(f"question {number}"), calling(*calls), *map(result, calls), ai(f"answer {number}")]


@pytest.fixture
def history(store: ConversationStore) -> PostgresChatMessageHistory:
    """A history of a system message (0) and three turns with tool calls (1 to 5, 6 to 10, 11 to 15)."""
    history = PostgresChatMessageHistory("s", store, user_id="u")
    history.add_messages([system("be kind"), *agent_turn(1)])
    for number in (2, 3):
        history.add_messages(agent_turn(number))
    return history


def numbers(history: PostgresChatMessageHistory) -> list[int | None]:
    return [stored.message_index for stored in history.store.read_all(history.key)]


# What goes with what


@pytest.mark.parametrize(
    ("which", "deleted"),
    [
        ([6], [6, 7, 8, 9, 10]),  # a human message: its turn
        ([7], [7, 8, 9]),  # a call: its results
        ([8], [7, 8, 9]),  # a result: its call and the other result
        ([10], [10]),  # an answer
        ([0], [0]),  # a message of the preamble
        ([5, 12], [5, 12, 13, 14]),
        ([99], []),
        ([-1, 2**40], []),
        ([], []),
    ],
)
def test_a_message_goes_with_what_stands_and_falls_with_it(
    history: PostgresChatMessageHistory, which: list[int], deleted: list[int]
) -> None:
    assert history.delete_messages(which) == deleted
    assert numbers(history) == [number for number in range(16) if number not in deleted]
    assert history.delete_messages(which) == []


@pytest.mark.parametrize(
    ("which", "deleted"), [([9], [6, 7, 8, 9, 10]), ([0], []), ([1, 15], [*range(1, 6), *range(11, 16)])]
)
def test_whole_turns_are_deleted(history: PostgresChatMessageHistory, which: list[int], deleted: list[int]) -> None:
    assert history.delete_turns(which) == deleted
    assert numbers(history) == [number for number in range(16) if number not in deleted]


def test_the_last_turn_is_deleted_until_none_is_left(history: PostgresChatMessageHistory) -> None:
    assert history.delete_last_turn() == [11, 12, 13, 14, 15]
    assert history.delete_last_turn() == [6, 7, 8, 9, 10]
    assert history.delete_last_turn() == [1, 2, 3, 4, 5]
    assert history.delete_last_turn() == []
    assert history.messages == [system("be kind")]
    history.add_messages(dialogue(1))
    assert numbers(history) == [0, 16, 17]  # a number is never used again
    assert PostgresChatMessageHistory("unknown", history.store).delete_last_turn() == []


def test_messages_are_named_by_their_ids_too(store: ConversationStore) -> None:
    history = PostgresChatMessageHistory("s", store)
    history.add_messages([HumanMessage("a", id="one"), ai("b", id="two"), HumanMessage("c", id="three"), ai("d\0")])
    assert history.delete_messages(["two", "unknown"]) == [1]
    assert history.delete_turns(["three"]) == [2, 3]
    history.replace_message("one", HumanMessage("A", id="new"))
    assert history.messages == [HumanMessage("A", id="new")]
    with pytest.raises(ConfigurationError, match="0 messages 'one'"):
        history.replace_message("one", "B")


@pytest.mark.parametrize("which", ["7", [1.0], [True], [None]])
def test_what_names_no_message_is_refused(history: PostgresChatMessageHistory, which: Any) -> None:
    with pytest.raises(ConfigurationError, match="numbers or ids"):
        history.delete_messages(which)


def test_another_users_messages_are_out_of_reach(history: PostgresChatMessageHistory) -> None:
    assert PostgresChatMessageHistory("s", history.store, user_id="v").delete_messages(range(16)) == []
    assert len(history.messages) == 16


# Replacing


def test_a_message_takes_anothers_place(history: PostgresChatMessageHistory) -> None:
    before = history.store.read_all(history.key)
    history.replace_message(10, ai("another answer", id="new", response_metadata={"edited": True}))
    history.replace_message(6, "another question")
    history.replace_message(8, result("a2", "another result"))
    after = history.store.read_all(history.key)
    assert [stored.content for stored in after[6:9]] == ["another question", "", "another result"]
    assert history.messages[10] == ai("another answer", id="new", response_metadata={"edited": True})
    assert [stored.created_at for stored in after] == [stored.created_at for stored in before]
    assert [stored for stored in after if stored.message_index not in (6, 8, 10)] == [
        stored for stored in before if stored.message_index not in (6, 8, 10)
    ]


def test_a_new_text_leaves_all_else_as_it_was(history: PostgresChatMessageHistory) -> None:
    history.replace_message(7, "let me see")
    assert history.messages[7] == calling("a2", "b2", text="let me see")


@pytest.mark.parametrize(
    ("which", "message", "fault"),
    [
        (6, ai("x"), "role 'human'.*role 'ai'"),
        (7, ai("no calls"), r"tied to the tool calls \['a2', 'b2'\].*to \[\]"),
        (8, result("b2"), r"\['a2'\].*\['b2'\]"),
        (99, ai("x"), "no message 99"),
    ],
)
def test_what_would_tear_something_apart_is_refused(
    history: PostgresChatMessageHistory, which: int, message: BaseMessage, fault: str
) -> None:
    before = history.messages
    with pytest.raises(ConfigurationError, match=fault):
        history.replace_message(which, message)
    assert history.messages == before


def test_what_cannot_be_stored_replaces_nothing(history: PostgresChatMessageHistory) -> None:
    before = history.messages
    with pytest.raises(MessageNotStorableError, match="additional_kwargs"):
        history.replace_message(10, ai("x", additional_kwargs={"client": object()}))
    with pytest.raises(MessageNotStorableError, match=r"messages\[1\]"):
        history.replace_turn(10, [human("x"), ai("x", additional_kwargs={"client": object()})])
    assert history.messages == before


@pytest.mark.parametrize("which", [6, 8, 10])
def test_a_shorter_turn_takes_a_turns_place(history: PostgresChatMessageHistory, which: int) -> None:
    history.replace_turn(which, dialogue(1, first=22))
    assert [message.content for message in history.messages[6:8]] == ["question 22", "answer 22"]
    assert numbers(history) == [*range(8), *range(11, 16)]


def test_a_longer_turn_moves_up_what_follows(history: PostgresChatMessageHistory) -> None:
    longer = [human("longer"), *(ai(str(number)) for number in range(7))]
    before = history.messages
    history.replace_turn(6, longer)
    assert history.messages == [*before[:6], *longer, *before[11:]]
    assert numbers(history) == list(range(19))
    history.add_messages(dialogue(1))
    assert numbers(history) == list(range(21))


@pytest.mark.parametrize("messages", [[], [ai("x")], [human("a"), human("b")], [human("a"), ai("b"), human("c")]])
def test_a_turn_is_replaced_by_one_turn(history: PostgresChatMessageHistory, messages: list[BaseMessage]) -> None:
    with pytest.raises(ConfigurationError, match="without another human message"):
        history.replace_turn(6, messages)
    with pytest.raises(ConfigurationError, match="no turn with a message 0"):
        history.replace_turn(0, dialogue(1))
    with pytest.raises(ConfigurationError, match="not a single HumanMessage"):
        history.replace_turn(6, human())  # type: ignore[arg-type]
    assert len(history.messages) == 16


# What must stay right


def test_an_edited_turn_is_judged_anew(store: ConversationStore) -> None:
    memory = RelevantTurnMemory(session_id="s", store=store, keywords=["refund"], keep_irrelevant=True)
    for question, answer in (("refund?", "no"), ("hello", "hi"), ("so?", "a refund it is")):
        memory.save_context({"input": question}, {"output": answer})
    memory.chat_memory.replace_message(0, "return?")
    memory.chat_memory.replace_message(3, "hi, a refund?")
    assert "return" not in memory.buffer_as_str
    assert "hi, a refund?" in memory.buffer_as_str
    memory.chat_memory.delete_messages([5])
    assert memory.buffer_as_str == "Human: hello\nAI: hi, a refund?"


def test_an_edited_message_is_counted_anew(store: ConversationStore) -> None:
    memory = TokenWindowMemory(session_id="s", store=store, max_token_limit=60, return_messages=True)
    for number in range(3):
        memory.save_context({"input": f"question {number}"}, {"output": f"answer {number}"})
    assert len(memory.buffer) == 6
    memory.chat_memory.replace_message(3, "word " * 40)
    assert [message.content for message in memory.buffer] == ["question 2", "answer 2"]


def test_a_summary_that_covers_what_is_deleted_goes_with_it(store: ConversationStore) -> None:
    memory = SummaryMemory(
        session_id="s", store=store, llm=FakeListChatModel(responses=["first", "second", "third"]), max_token_limit=60
    )
    while store.get_conversation("s") is None or store.read_summary_window(
        memory.chat_memory.key, budget=1, encoding=None
    ).summary is None:
        memory.save_context({"input": "my number is 4711"}, {"output": "thank you " * 5})
    covered = store.list_conversations()[0].summarized_through
    assert "4711" in memory.buffer_as_str
    memory.chat_memory.delete_messages([covered])
    window = store.read_summary_window(memory.chat_memory.key, budget=10_000, encoding=None)
    assert window.summary is None
    assert [stored.message_index for stored in window.messages][0] == 0
    assert "first" not in memory.buffer_as_str


def test_a_fold_that_began_before_a_deletion_does_not_take_effect(store: ConversationStore) -> None:
    history = PostgresChatMessageHistory("s", store)
    history.add_messages(dialogue(3))
    window = store.read_unsummarized(history.key, budget=10_000, encoding=None)
    assert window.state is not None
    history.delete_messages([1])
    assert not store.record_summary(history.key, content="answer 1", covers_through=1, state=window.state)


def test_a_write_is_known_while_any_of_its_messages_is_there(store: ConversationStore) -> None:
    history = PostgresChatMessageHistory("s", store)
    write = [system(), ai("hello"), human("question"), ai("answer")]
    history.add_messages(write, idempotency_key="key")
    history.add_messages(dialogue(1, first=2), idempotency_key="next")
    for which, left in ((0, 5), (1, 4), (3, 3)):
        assert history.delete_messages([which]) == [which]
        history.add_messages(write, idempotency_key="key")
        history.add_messages(dialogue(1, first=2), idempotency_key="next")
        assert len(history.messages) == left
    assert history.delete_messages([2]) == [2]
    history.add_messages(write, idempotency_key="key")
    assert len(history.messages) == 2 + 4


def test_max_messages_counts_what_is_left(store: ConversationStore) -> None:
    history = PostgresChatMessageHistory("s", store, max_messages=6)
    history.add_messages(dialogue(3))
    history.delete_turns([2])
    history.add_messages(dialogue(1, first=4))
    assert [message.content for message in history.messages if message.type == "human"] == [
        "question 1",
        "question 3",
        "question 4",
    ]


def test_edits_and_writers_at_once_leave_whole_turns(store: ConversationStore) -> None:
    history = PostgresChatMessageHistory("s", store)
    history.add_messages(dialogue(5))
    with ThreadPoolExecutor(3) as pool:
        deleting = pool.submit(lambda: [history.delete_last_turn() for _ in range(15)])
        lengths = [1, 4, 2, 3] * 4
        edited = [[human("edited"), *(ai(f"edited {n}") for n in range(length))] for length in lengths]
        replacing = pool.submit(lambda: [history.replace_turn(0, turn) for turn in edited])
        writing = pool.submit(lambda: [history.add_messages(dialogue(1, first=100 + n)) for n in range(25)])
        for future in (deleting, replacing, writing):
            try:
                future.result(60)
            except ConfigurationError:  # the turn to replace was the last one for a moment
                pass
    said = [(message.type, message.content) for message in history.messages]
    questions = [place for place, (kind, _) in enumerate(said) if kind == "human"]
    for start, end in zip(questions, [*questions[1:], len(said)], strict=True):
        text = str(said[start][1])
        answers = [content for _, content in said[start + 1 : end]]
        edits = [f"edited {n}" for n in range(end - start - 1)]
        assert answers == (edits if text == "edited" else [text.replace("question", "answer")])
    kept = numbers(history)
    assert kept == sorted(set(kept), key=lambda number: number or 0)


# Any sequence of edits


class Model:
    """What the log should hold: its messages with their numbers."""

    def __init__(self) -> None:
        self.log: list[tuple[int, BaseMessage]] = []
        self.next_index = 0

    @property
    def messages(self) -> list[BaseMessage]:
        return [message for _, message in self.log]

    def append(self, messages: Sequence[BaseMessage]) -> None:
        for message in messages:
            self.log.append((self.next_index, message))
            self.next_index += 1

    def turn_around(self, place: int) -> tuple[int, int]:
        """Return where the turn around a place begins and ends; the preamble begins at 0."""
        humans = [at for at, message in enumerate(self.messages) if isinstance(message, HumanMessage)]
        start = max([at for at in humans if at <= place], default=0)
        return start, min([at for at in humans if at > place], default=len(self.log))

    def goes_with(self, place: int) -> range:
        """Return the places of what stands and falls with one message."""
        start, end = self.turn_around(place)
        if isinstance(self.messages[place], HumanMessage):
            return range(start, end)
        first = place
        while is_result(self.messages[first]) and first > start:
            first -= 1
        last = first + 1
        while last < end and is_result(self.messages[last]):
            last += 1
        return range(first, last) if calls_of(self.messages[first]) and place < last else range(place, place + 1)

    def delete(self, places: set[int]) -> list[int]:
        deleted = [index for place, (index, _) in enumerate(self.log) if place in places]
        self.log = [entry for place, entry in enumerate(self.log) if place not in places]
        return deleted

    def replace_turn(self, place: int, messages: Sequence[BaseMessage]) -> None:
        start, end = self.turn_around(place)
        old = self.log[start:end]
        more = max(0, len(messages) - len(old))
        indexes = [index for index, _ in old] + [old[-1][0] + 1 + n for n in range(more)]
        moved = [(index + more, message) for index, message in self.log[end:]]
        self.log[start:] = [*zip(indexes, messages, strict=False), *moved]
        self.next_index += more


KINDS = ["append", "append", "delete", "turns", "last", "text", "turn", "fold"]


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_sequence_of_edits_leaves_a_log_that_is_right(store: ConversationStore, data: st.DataObject) -> None:
    session_id = str(uuid.uuid4())
    history = PostgresChatMessageHistory(session_id, store)
    memory = TokenWindowMemory(chat_memory=history, max_token_limit=80, return_messages=True)
    model = Model()
    covered: dict[int, str] = {}  # the summaries that should be there: content by the last message covered

    def forget_from(index: int) -> None:
        for through in [through for through in covered if through >= index]:
            del covered[through]

    for _ in range(data.draw(st.integers(2, 8), "steps")):
        kind = data.draw(st.sampled_from(KINDS), "kind")
        place = data.draw(st.integers(0, max(0, len(model.log) - 1)), "place")
        if kind == "append" or not model.log:
            log = data.draw(logs, "log")
            history.add_messages(log)
            model.append(log)
        elif kind == "delete":
            index = model.log[place][0]
            gone = model.delete(set(model.goes_with(place)))
            assert history.delete_messages([index]) == gone
            forget_from(gone[0])
        elif kind in ("turns", "last"):
            start, end = model.turn_around(len(model.log) - 1 if kind == "last" else place)
            index = model.log[start][0]
            is_turn = isinstance(model.messages[start], HumanMessage)
            gone = model.delete(set(range(start, end))) if is_turn else []
            assert (history.delete_last_turn() if kind == "last" else history.delete_turns([index])) == gone
            if gone:
                forget_from(gone[0])
        elif kind == "text":
            index, message = model.log[place]
            if isinstance(message, RemoveMessage):
                with pytest.raises(ConfigurationError, match="no text"):
                    history.replace_message(index, "new text")
                continue
            history.replace_message(index, "new text")
            model.log[place] = (index, message.model_copy(update={"content": "new text"}))
            forget_from(index)
        elif kind == "turn":
            turn = [human("new turn"), *(ai(f"part {n}") for n in range(data.draw(st.integers(0, 5), "length")))]
            index = model.log[place][0]
            if isinstance(model.messages[model.turn_around(place)[0]], HumanMessage):
                start = model.log[model.turn_around(place)[0]][0]
                history.replace_turn(index, turn)
                model.replace_turn(place, turn)
                forget_from(start)
            else:
                with pytest.raises(ConfigurationError):
                    history.replace_turn(index, turn)
        else:
            window = store.read_unsummarized(history.key, budget=10**6, encoding=None)
            if window.messages and window.state is not None:
                through = window.messages[-1].message_index
                assert through is not None
                covered[through] = f"up to {through}"
                assert store.record_summary(
                    history.key, content=covered[through], covers_through=through, state=window.state
                )
        assert history.messages == model.messages
        assert numbers(history) == [index for index, _ in model.log]
        assert memory.buffer == widest_window(model.messages, 80, tokens_of_all)
        window = store.read_summary_window(history.key, budget=10**6, encoding=None)
        newest = max(covered, default=-1)
        assert (window.summary.content if window.summary else None) == covered.get(newest)
        turns = [stored.message_index for stored in window.messages]
        unread = [index for index, _ in model.log if index > newest]
        assert turns == unread
