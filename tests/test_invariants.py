"""Any sequence of operations on branches of a conversation: windows, summaries, words, what is recalled stay right."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from itertools import count

import pytest
from conversations import (
    ai,
    calling,
    dialogue,
    head_of,
    human,
    logs,
    result,
    shown_of,
    split,
    tokens_of_all,
    widest_window,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from psycopg2.extensions import connection as Connection
from test_branching import summarise
from test_editing import Model
from test_recall import assert_words_are_right
from test_schema import execute

from pgmemory import (
    BufferMemory,
    ConfigurationError,
    ConversationStore,
    PostgresChatMessageHistory,
    RecallMemory,
    RelevantTurnMemory,
    TokenWindowMemory,
)
from pgmemory.models import AFTER_ALL, StoredMessage


class Branch(Model):
    """What a conversation should hold: its log, its summaries, and which messages bear a write's id."""

    def __init__(self, history: PostgresChatMessageHistory) -> None:
        super().__init__()
        self.history = history
        self.summaries: set[int] = set()
        self.through = -1
        self.keeps_summary = False
        self.writes: dict[str, int] = {}  # the message that bears it, by key
        self.origin: tuple[Branch, int] | None = None  # what it is a fork of, and at which message

    def write(self, key: str, messages: list[BaseMessage]) -> bool:
        if key in self.writes or not messages:
            return False
        self.writes[key] = self.next_index
        self.append(messages)
        return True

    def remove(self, gone: list[int]) -> None:
        """What goes by an edit."""
        self.log = [entry for entry in self.log if entry[0] not in gone]
        self.inherit(gone)
        self.edited(gone[0])

    def inherit(self, gone: list[int]) -> None:
        """Which messages bear the ids of writes that those which are gone bore."""
        left = [index for index, _ in self.log]
        lost = sorted(((bearer, key) for key, bearer in self.writes.items() if bearer in gone), reverse=True)
        for bearer, key in lost:
            del self.writes[key]
            heir = next((index for index in left if index > bearer), None)
            if heir is not None and heir not in self.writes.values():
                self.writes[key] = heir

    def replace_turn(self, place: int, messages: Sequence[BaseMessage]) -> None:
        start, end = self.turn_around(place)
        old = [index for index, _ in self.log[start:end]]
        more = max(0, len(messages) - len(old))
        super().replace_turn(place, messages)
        self.writes = {key: at + more if at > old[-1] else at for key, at in self.writes.items()}
        self.inherit(old[len(messages) :])
        self.edited(old[0])

    def edited(self, first: int) -> None:
        self.summaries = {through for through in self.summaries if through < first}
        if self.through >= first:
            self.through = max(self.summaries, default=-1)

    def prune(self, most: int) -> None:
        """What goes by `max_messages`, behind a turn."""
        if len(self.log) <= most:
            return
        humans = [index for index, message in self.log if isinstance(message, HumanMessage)]
        spared = {index for index, message in self.log if message.type == "system" and index < humans[0]}
        newest = {index for index, _ in self.log[max(0, len(self.log) - max(0, most - len(spared))) :]}
        cut = min([index for index in humans if index in newest], default=humans[-1])
        if self.keeps_summary:
            cut = min(cut, self.through + 1)
        self.log = [entry for entry in self.log if entry[0] >= cut or entry[0] in spared]
        left = {index for index, _ in self.log}
        self.writes = {key: bearer for key, bearer in self.writes.items() if bearer in left}

    def clear(self) -> None:
        self.log, self.summaries, self.writes = [], set(), {}
        self.through, self.keeps_summary = self.next_index - 1, False

    def as_of(self, at: int) -> Branch:
        past = Branch(self.history)
        past.log = [entry for entry in self.log if entry[0] <= at]
        past.next_index = at + 1
        past.summaries = {through for through in self.summaries if through <= at}
        past.through = self.through if self.through <= at else max(past.summaries, default=-1)
        past.keeps_summary = self.keeps_summary
        return past

    def check(self, history: PostgresChatMessageHistory) -> None:
        """Compare all that can be seen of it."""
        store = history.store
        assert history.messages == self.messages
        memory = TokenWindowMemory(chat_memory=history, max_token_limit=80, return_messages=True)
        assert memory.buffer == widest_window(self.messages, 80, tokens_of_all)
        _, turns = split(self.messages)
        relevant = RelevantTurnMemory(chat_memory=history, keywords=["refund"], return_messages=True)
        assert relevant.buffer == [
            *head_of(self.messages),
            *(message for turn in turns if is_relevant(turn) for message in shown_of(turn)),
        ]
        last = BufferMemory(chat_memory=history, k=1, return_messages=True)
        assert last.buffer == head_of(self.messages) + [message for turn in turns[-1:] for message in shown_of(turn)]
        window = store.read_summary_window(history.key, budget=10**6, encoding=None, before=history.before)
        covers = max(self.summaries, default=None)
        assert (window.summary and window.summary.covers_through) == covers
        assert [one.message_index for one in window.messages] == [at for at, _ in self.log if at > self.through]
        ends = [at for at, (_, message) in enumerate(self.log) if at and isinstance(message, HumanMessage)]
        numbers = [self.log[end - 1][0] for end in [*ends, *([len(self.log)] if self.log else [])]]
        assert [
            (state.message_index, state.summary and state.summary.covers_through) for state in history.states()
        ] == [(at, max((one for one in self.summaries if one <= at), default=None)) for at in reversed(numbers)]


def is_relevant(turn: list[BaseMessage]) -> bool:
    said = [message.content for message in turn if isinstance(message, (HumanMessage, AIMessage))]
    return any(isinstance(text, str) and "refund" in text.casefold() for text in said)


WORDS = ("refund", "parcel")
ASKED = " ".join(WORDS)


def turn_around(log: Sequence[StoredMessage], index: int | None) -> tuple[StoredMessage, ...]:
    """Return the turn in which the message with this number stands."""
    place = [stored.message_index for stored in log].index(index)
    starts = [at for at, stored in enumerate(log) if stored.role == "human"]
    start = max(at for at in starts if at <= place)
    return tuple(log[start : min([at for at in starts if at > place], default=len(log))])


def check_recalled(
    branches: Sequence[Branch], branch: Branch, *, before: int, k: int, turns: int, whole_user: bool
) -> None:
    """Compare what is recalled with the logs as they are, cut at what stood there before a message."""
    store, key = branch.history.store, branch.history.key
    among = branches if whole_user else [branch]
    past = {other.history.session_id: store.read_all(other.history.key) for other in among}
    own = [stored for stored in past[key.session_id] if (stored.message_index or 0) < before]
    if before < AFTER_ALL and own:
        moment = own[-1].created_at
        assert moment is not None
        past = {name: [one for one in log if one.created_at and one.created_at <= moment] for name, log in past.items()}
    past[key.session_id] = own
    found = store.recall(key, ASKED, k=k, turns=turns, before=before, whole_user=whole_user)
    hits = [(hit.session_id, hit.message_index) for turn in found.turns for hit in turn.hits]
    assert len(set(hits)) == len(hits) <= k
    assert len({(turn.session_id, turn.messages[0].message_index) for turn in found.turns}) == len(found.turns)
    _, own_turns = split(branch.as_of(before - 1).messages)
    shown = sum(map(len, own_turns[-turns:])) if turns else 0
    past[key.session_id] = own[: len(own) - shown]
    for turn in found.turns:
        assert turn.messages == turn_around(past[turn.session_id], turn.messages[0].message_index)
        assert {hit.message_index for hit in turn.hits} <= {stored.message_index for stored in turn.messages}
    if before == AFTER_ALL and k > sum(map(len, past.values())):
        assert set(hits) >= {
            (name, stored.message_index)
            for name, log in past.items()
            for place, stored in enumerate(log)
            if stored.role in ("human", "ai")
            and set(WORDS) & set(re.findall(r"\w+", stored.content.casefold()))
            and any(earlier.role == "human" for earlier in log[: place + 1])
        }


def check_shown_once(branch: Branch, history: PostgresChatMessageHistory, k: int) -> None:
    """Nothing that was said is shown twice beside the newest turns, whatever branches it is in."""
    memory = RecallMemory(chat_memory=history, k=k, max_recalled=99, max_token_limit=10**6, return_messages=True)
    shown = memory.load_memory_variables({"input": ASKED})["history"]
    said = [(message.id, repr(message.content)) for message in shown if isinstance(message, HumanMessage)]
    assert len(set(said)) == len(said)
    head, (_, turns) = head_of(branch.messages), split(branch.messages)
    newest = [message for turn in turns[len(turns) - k :] for message in shown_of(turn)]
    assert shown[: len(head)] == head
    assert shown[len(shown) - len(newest) :] == newest


OPERATIONS = ["append", "append", "judged", "again", "prune", "fold", "fork", "fork", "refork"]
OPERATIONS += ["delete", "last", "text", "turn", "clear"]
TURNS: list[list[BaseMessage]] = [
    [human("a refund?"), ai("no")],
    [human("so?"), calling("c1"), result("c1"), ai("a refund it is")],
    [human("hello"), ai("hi")],
]


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_sequence_of_operations_leaves_every_branch_right(
    store: ConversationStore, admin: Connection, data: st.DataObject
) -> None:
    store.setup(search="simple")
    execute(admin, f"delete from {store.schema}.conversations")
    branches = [Branch(PostgresChatMessageHistory(str(uuid.uuid4()), store, user_id="u"))]
    said: list[list[BaseMessage]] = []  # each write's key is its place here
    new_ids = count()

    def identified(messages: Sequence[BaseMessage]) -> list[BaseMessage]:
        """The same, each of its own, so that what is shown twice is told from what was said twice."""
        return [
            one if one.type == "remove" else one.model_copy(update={"id": str(next(new_ids))}) for one in messages
        ]

    def write(branch: Branch, number: int, *, judged: bool = False, most: int | None = None) -> None:
        history, messages = branch.history, identified(said[number])
        if judged:
            memory = RelevantTurnMemory(
                chat_memory=history, keywords=["refund"], keep_irrelevant=True, idempotency_key=str(number)
            )
            memory.save_messages(messages)
        else:
            limited = PostgresChatMessageHistory(history.session_id, store, user_id="u", max_messages=most)
            limited.add_messages(messages, idempotency_key=str(number))
        if branch.write(str(number), messages) and most is not None:
            branch.prune(most)

    said.append([message for turn in TURNS for message in turn])
    write(branches[0], 0)
    for _ in range(data.draw(st.integers(3, 10), "steps")):
        kind = data.draw(st.sampled_from(OPERATIONS), "operation")
        branch = data.draw(st.sampled_from(branches), "branch")
        history = branch.history
        place = data.draw(st.integers(0, max(0, len(branch.log) - 1)), "place")
        if kind in ("append", "judged") or not branch.log:
            turn = data.draw(logs if kind == "append" else st.sampled_from(TURNS), "log")
            said.append(turn)
            write(branch, len(said) - 1, judged=kind == "judged")
        elif kind == "again":
            write(branch, data.draw(st.integers(0, len(said) - 1), "write"))
        elif kind == "prune":
            said.append(dialogue(1))
            write(branch, len(said) - 1, most=data.draw(st.integers(1, 6), "most"))
        elif kind == "fold":
            unread = [index for index, _ in branch.log if index > branch.through]
            if unread:
                through = data.draw(st.sampled_from(unread), "through")
                summarise(history, through)
                branch.summaries.add(through)
                branch.through, branch.keeps_summary = through, True
        elif kind == "fork":
            at = data.draw(st.integers(-1, branch.next_index - 1), "at")
            fork = branch.as_of(at)
            fork.history = history.fork(str(uuid.uuid4()), at=at)
            fork.origin = (branch, at)
            if fork.log:
                fork.writes["fork"] = fork.log[0][0]
            branches.append(fork)
        elif kind == "refork":
            if branch.origin is not None:
                source, at = branch.origin
                if "fork" in branch.writes:
                    source.history.fork(history.session_id, at=at)
                else:
                    with pytest.raises(ConfigurationError, match="already"):
                        source.history.fork(history.session_id, at=at)
        elif kind == "delete":
            places = branch.goes_with(place)
            gone = [branch.log[at][0] for at in places]
            assert history.delete_messages([branch.log[place][0]]) == gone
            branch.remove(gone)
        elif kind == "last":
            start, end = branch.turn_around(len(branch.log) - 1)
            is_turn = isinstance(branch.messages[start], HumanMessage)
            gone = [index for index, _ in branch.log[start:end]] if is_turn else []
            assert history.delete_last_turn() == gone
            if gone:
                branch.remove(gone)
        elif kind == "text":
            index, message = branch.log[place]
            if message.type == "remove":
                continue
            history.replace_message(index, "new text")
            branch.log[place] = (index, message.model_copy(update={"content": "new text"}))
            branch.edited(index)
        elif kind == "turn":
            start, _ = branch.turn_around(place)
            if isinstance(branch.messages[start], HumanMessage):
                answers = data.draw(st.lists(st.sampled_from(["a refund", "part"]), max_size=5), "answers")
                turn = identified([human("new turn"), *map(ai, answers)])
                history.replace_turn(branch.log[place][0], turn)
                branch.replace_turn(place, turn)
        else:
            history.clear()
            branch.clear()
        branch.check(history)
        at = data.draw(st.integers(-1, branch.next_index), "as of")
        branch.as_of(at).check(history.as_of(at))
        assert_words_are_right(admin, store)
        k, turns = data.draw(st.sampled_from([1, 3, 1000]), "k"), data.draw(st.integers(0, 2), "turns")
        for before in (AFTER_ALL, at + 1):
            check_recalled(branches, branch, before=before, k=k, turns=turns, whole_user=data.draw(st.booleans()))
        check_shown_once(branch, history, turns)
        check_shown_once(branch.as_of(at), history.as_of(at), turns)
    for branch in branches:
        branch.check(branch.history)
