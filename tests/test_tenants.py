"""A campaign of crossed session ids, users and tenants: no operation ever shows, changes or counts another's."""

from __future__ import annotations

import io
import random
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
from fakes import scripted
from langchain_core.messages import AIMessage, HumanMessage
from psycopg2.extensions import make_dsn
from test_row_level_security import PASSWORD, new_role  # noqa: F401  # a fixture

from pgmemory import (
    BufferMemory,
    ConfigurationError,
    ConversationStore,
    PostgresChatMessageHistory,
    RecallMemory,
    RelevantTurnMemory,
    StoredMessage,
    SummaryMemory,
    TokenWindowMemory,
)
from pgmemory.models import ConversationKey, Edit
from pgmemory.store.transfer import TransferOperations
from pgmemory.transfer import export_conversations

# Names that separators, quotes, patterns, case, blanks, normal forms or an agent's suffix could make one; the same
# ones serve as tenant, user and session id.
NAMES = [
    *("a", "A", "a ", " a", "b", "c", "a:b", "b:c", ":", "a/b", "a,b", "a\tb", "a\x1fb", "1", "01", "null", "None"),
    *("ä", "a\u0308", "\u212b", "å", "ﬁ", "fi", "K", "\u212a", "ß", "ss", "İ", "i"),
    *('"', "'", '","', '["a","b"]', '{"a": "b"}', "a'; --", "\\", "\\'", "%", "_", "a%", "a_", "%s", "$1", "{schema}"),
    *("a#agent:b", "a#agent:", "#agent:b", "b#agent:c", "a#agent:b#agent:c", "agent", "*", ".", "a\u200b", "\u202ea"),
]
MARK = re.compile(r"<\d+ \d+>")  # tenant and conversation


class Spoken(NamedTuple):
    """One conversation, and the mark that everything of it bears."""

    key: ConversationKey
    mark: str


class Party(NamedTuple):
    """A tenant: its store, and its conversations."""

    store: ConversationStore
    spoken: list[Spoken]

    def marks(self, *, user_id: str | None = None, session_id: str | None = None) -> set[str]:
        """The marks of its conversations, of one user's, or of those of this session id."""
        return {
            mark
            for key, mark in self.spoken
            if user_id in (None, key.user_id) and session_id in (None, key.session_id)
        }

    def family(self, key: ConversationKey) -> set[str]:
        """The mark of a conversation and those of the logs that agents keep beside it."""
        return {
            mark
            for other, mark in self.spoken
            if other.user_id == key.user_id
            and (other.session_id == key.session_id or other.session_id.startswith(f"{key.session_id}#agent:"))
        }


def speak(store: ConversationStore, key: ConversationKey, mark: str) -> None:
    """Store messages, keywords, a summary, metadata, a reason and items that bear the mark."""
    history = PostgresChatMessageHistory(key.session_id, store, user_id=key.user_id)
    history.add_messages([HumanMessage(f"refund {mark}"), AIMessage(f"paid {mark}")])
    turn = [StoredMessage("human", f"refund {mark} again"), StoredMessage("ai", f"paid {mark} again")]
    window = store.append_and_read_unsummarized(key, turn, write_id=uuid.uuid4(), budget=99, encoding=None)
    assert window.state is not None
    assert store.record_summary(key, content=f"summary {mark}", covers_through=1, state=window.state)
    store.set_metadata(key.session_id, {"mark": mark}, user_id=key.user_id)
    store.items(key.user_id).put(("facts",), mark, {"text": f"refund {mark}"})
    store.items(key.user_id, session_id=key.session_id).put(("facts",), "fact", {"text": f"refund {mark}"})


@pytest.fixture(params=["off", "setting", "roles"])
def parties(
    request: pytest.FixtureRequest,
    store: ConversationStore,
    server_dsn: str,
) -> Iterator[list[Party]]:
    """Three tenants whose users and sessions have one another's names."""
    mode = request.param
    store.setup(row_level_security=mode, search=True)
    dice = random.Random(f"tenants, {mode}")
    tenants = dice.sample(NAMES, 3)
    if mode == "off":
        tenants[0] = ""
    # Crossed: each name in each role, and pairs that only their separator parts.
    some = [*tenants, *dice.sample(NAMES, 3), "a", "a#agent:b"]
    pairs = {(dice.choice(["", *some]), dice.choice([name for name in some if name])) for _ in range(7)}
    pairs |= {("a", "b:c"), ("a:b", "c"), ("", "a:b:c"), ("b", "a"), ("b", "a#agent:b"), ("b#agent:c", "a")}
    made = []
    for number, tenant in enumerate(tenants):
        dsn = server_dsn
        if mode != "off":
            role = request.getfixturevalue("new_role")()
            store.bind_role(role, tenant)
            dsn = make_dsn(server_dsn, user=role, password=PASSWORD)
        theirs = ConversationStore(dsn, schema=store.schema, tenant_id=tenant or None, max_connections=2)
        # Each has most of the pairs, so that some are another's alone.
        pairs_here = dice.sample(sorted(pairs), len(pairs) - 2)
        spoken = [
            Spoken(theirs.key(session, user), f"<{number} {position}>")
            for position, (user, session) in enumerate(pairs_here)
        ]
        for key, mark in spoken:
            speak(theirs, key, mark)
        made.append(Party(theirs, spoken))
    yield made
    for party in made:
        party.store.close()


def crossed(parties: list[Party]) -> list[tuple[str, str]]:
    """Users and sessions of all parties."""
    return sorted({(key.user_id, key.session_id) for party in parties for key, _ in party.spoken})


def marks_in(value: Any) -> set[str]:
    return set(MARK.findall(repr(value)))


# --- Reading ---------------------------------------------------------------------------------------------------------

Read = Callable[[ConversationStore, ConversationKey], object]


def history(store: ConversationStore, key: ConversationKey) -> PostgresChatMessageHistory:
    return PostgresChatMessageHistory(key.session_id, store, user_id=key.user_id)


def memory(kind: Any, store: ConversationStore, key: ConversationKey, **options: Any) -> object:
    made = kind(session_id=key.session_id, user_id=key.user_id, store=store, **options)
    again = made.for_session(key.session_id, user_id=key.user_id)
    return [made.load_memory_variables({"input": "refund"}), again.buffer]


def exported(store: ConversationStore, **which: Any) -> bytes:
    file = io.BytesIO()
    export_conversations(store, file, **which)
    return file.getvalue()


# What each shows is of the conversation that was named, and of no other.
OF_CONVERSATION: dict[str, Read] = {
    "read_all": lambda store, key: store.read_all(key),
    "list_messages": lambda store, key: store.list_messages(key.session_id, user_id=key.user_id),
    "read_last_turns": lambda store, key: store.read_last_turns(key, turns=9),
    "read_last_tokens": lambda store, key: store.read_last_tokens(key, budget=999, encoding=None),
    "read_relevant_turns": lambda store, key: store.read_relevant_turns(key, turns=9, rule=None),
    "read_summary_window": lambda store, key: store.read_summary_window(key, budget=999, encoding=None),
    "read_unsummarized": lambda store, key: store.read_unsummarized(key, budget=999, encoding=None),
    "recall": lambda store, key: store.recall(key, "refund", k=99, whole_user=False),
    "read_page": lambda store, key: store.read_page(key),
    "read_pages": lambda store, key: list(store.read_pages(key)),
    "follow": lambda store, key: store.follow(key).newest(99),
    "read_states": lambda store, key: list(store.read_states(key)),
    "get_conversation": lambda store, key: store.get_conversation(key.session_id, user_id=key.user_id),
    "get_metadata": lambda store, key: store.get_metadata(key.session_id, user_id=key.user_id),
    "items": lambda store, key: store.items(key.user_id, session_id=key.session_id).search(query="refund"),
    "a history": lambda store, key: history(store, key).messages,
    "BufferMemory": lambda store, key: memory(BufferMemory, store, key),
    "TokenWindowMemory": lambda store, key: memory(TokenWindowMemory, store, key),
    "RelevantTurnMemory": lambda store, key: memory(RelevantTurnMemory, store, key, keywords=["refund"]),
    "SummaryMemory": lambda store, key: memory(SummaryMemory, store, key, llm=scripted("unused")),
    "RecallMemory": lambda store, key: memory(RecallMemory, store, key, recall_from="session"),
}
# Of it and of its agents' logs.
OF_FAMILY: dict[str, Read] = {
    "an export": lambda store, key: exported(store, user_id=key.user_id, session_id=key.session_id),
}
# Of that user.
OF_USER: dict[str, Read] = {
    "list_conversations": lambda store, key: store.list_conversations(user_id=key.user_id),
    "follow": lambda store, key: store.follow(user_id=key.user_id).newest(999),
    "search": lambda store, key: store.search("refund", user_id=key.user_id, limit=999),
    "items": lambda store, key: store.items(key.user_id).search(limit=999),
    "an export": lambda store, key: exported(store, user_id=key.user_id),
}
# Of that session id, whoever's in the tenant.
OF_SESSION: dict[str, Read] = {
    "find_conversations": lambda store, key: store.find_conversations(key.session_id),
}
# Of the tenant.
OF_TENANT: dict[str, Callable[[ConversationStore], object]] = {
    "list_conversations": lambda store: store.list_conversations(),
    "follow": lambda store: store.follow().newest(999),
    "search": lambda store: store.search("refund", limit=999),
    "an export": lambda store: exported(store),
}


def test_whatever_is_read_is_of_the_tenant_the_user_and_the_session_that_were_named(parties: list[Party]) -> None:
    for party in parties:
        store = party.store
        for user, session in crossed(parties):
            key = store.key(session, user)
            own = {mark for other, mark in party.spoken if other == key}
            expected: list[tuple[dict[str, Read], set[str]]] = [
                (OF_CONVERSATION, own),
                (OF_FAMILY, party.family(key)),
                (OF_USER, party.marks(user_id=user)),
                (OF_SESSION, party.marks(session_id=session)),
            ]
            for reads, marks in expected:
                for name, read in reads.items():
                    assert marks_in(read(store, key)) == marks, (name, key)
        for name, read_all in OF_TENANT.items():
            assert marks_in(read_all(store)) == party.marks(), name
        assert store.statistics().conversations == len(party.spoken)
        assert store.prune(older_than=A_MOMENT, dry_run=True).conversations == len(party.spoken)


# --- Another tenant's keys -------------------------------------------------------------------------------------------

WITH_KEY: dict[str, Read] = {
    "append": lambda store, key: store.append(key, [StoredMessage("human", "q")], write_id=uuid.uuid4()),
    "append_and_read_unsummarized": lambda store, key: store.append_and_read_unsummarized(
        key, [StoredMessage("human", "q")], write_id=uuid.uuid4(), budget=9, encoding=None
    ),
    "record_summary": lambda store, key: store.record_summary(key, content="s", covers_through=1, state="x"),
    "edit_turns": lambda store, key: store.edit_turns(key, [0], lambda turns: Edit((0,))),
    "fork": lambda store, key: store.fork(key, "a fork"),
    "clear": lambda store, key: store.clear(key),
    "clear_with_agents": lambda store, key: store.clear_with_agents(key),
    "write_entries": lambda store, key: store.write_entries(key, [], is_first=True, is_last=True),
    **{
        name: OF_CONVERSATION[name]
        for name in (
            *("read_all", "read_last_turns", "read_last_tokens", "read_relevant_turns"),
            *("read_summary_window", "read_unsummarized", "read_page", "read_pages", "read_states", "follow", "recall"),
        )
    },
}


def test_another_tenants_key_is_refused_by_everything_that_takes_one(parties: list[Party]) -> None:
    one, other, _ = parties
    for key, _mark in other.spoken:
        for name, use in WITH_KEY.items():
            with pytest.raises(ConfigurationError, match="a key of the tenant"):
                use(one.store, key)
                pytest.fail(f"{name} took the key of another tenant")


# --- Writing ---------------------------------------------------------------------------------------------------------

WRITES_TO_CONVERSATION: dict[str, Read] = {
    **{name: WITH_KEY[name] for name in ("append", "append_and_read_unsummarized", "record_summary", "edit_turns")},
    "add_messages": lambda store, key: history(store, key).add_messages([HumanMessage("q")], idempotency_key="k"),
    "delete_last_turn": lambda store, key: history(store, key).delete_last_turn(),
    "set_metadata": lambda store, key: store.set_metadata(key.session_id, {}, user_id=key.user_id),
    "erase_key": lambda store, key: store.erase_key(key.session_id, user_id=key.user_id),
    "fork": lambda store, key: fork(store, key),
    "clear": lambda store, key: store.clear(key),
    "items": lambda store, key: [
        store.items(key.user_id, session_id=key.session_id).put(("facts",), "another", {}),
        store.items(key.user_id, session_id=key.session_id).clear(),
    ],
}


def fork(store: ConversationStore, key: ConversationKey) -> None:
    """Fork a conversation, if there is one of these names."""
    with suppress(ConfigurationError):
        store.fork(key, "a fork of it")


WRITES_TO_FAMILY: dict[str, Read] = {
    "set_time_to_live": lambda store, key: store.set_time_to_live(
        key.session_id, timedelta(days=1), user_id=key.user_id
    ),
    "hold": lambda store, key: store.hold(key.session_id, user_id=key.user_id, reason="a reason"),
    "release": lambda store, key: store.release(key.session_id, user_id=key.user_id),
    "clear_with_agents": lambda store, key: store.clear_with_agents(key),
    "erase_conversation": lambda store, key: store.erase_conversation(key.session_id, user_id=key.user_id),
}
WRITES_TO_USER: dict[str, Read] = {
    "erase_user": lambda store, key: store.erase_user(key.user_id) if key.user_id else None,
}
WRITES = WRITES_TO_CONVERSATION | WRITES_TO_FAMILY | WRITES_TO_USER
A_MOMENT = timedelta(microseconds=1)


def everything(party: Party) -> dict[ConversationKey, object]:
    """All that is stored of a party's conversations, by name."""
    return {
        key: (
            party.store.get_conversation(key.session_id, user_id=key.user_id),
            party.store.read_all(key),
            party.store.items(key.user_id, session_id=key.session_id).search(),
            party.store.items(key.user_id).get(("facts",), mark),
        )
        for key, mark in party.spoken
    }


def test_whatever_is_written_or_deleted_is_of_the_one_that_was_named(parties: list[Party]) -> None:
    busy, *others = parties
    before = [everything(party) for party in others]
    # Of its own: the one that is named, with its agents' logs or all of its user's where that is said.
    named = next(key for key, _ in busy.spoken if key.user_id)
    for writes, marks in (
        (WRITES_TO_CONVERSATION, {mark for key, mark in busy.spoken if key == named}),
        (WRITES_TO_FAMILY, busy.family(named)),
        (WRITES_TO_USER, busy.marks(user_id=named.user_id)),
    ):
        spared = Party(busy.store, [spoken for spoken in busy.spoken if spoken.mark not in marks])
        state = everything(spared)
        for name, write in writes.items():
            write(busy.store, named)
            assert everything(spared) == state, name
    # Of the others: nothing, whoever's names are used.
    for user, session in crossed(parties):
        for write in WRITES.values():
            write(busy.store, busy.store.key(session, user))
    assert [everything(party) for party in others] == before
    busy.store.prune(older_than=A_MOMENT)
    assert busy.store.list_conversations() == []
    assert [everything(party) for party in others] == before


def test_a_key_of_ones_own_stands_for_one_write_in_each_conversation(parties: list[Party]) -> None:
    for party in parties:
        for key, mark in party.spoken:
            for _ in range(2):
                history(party.store, key).add_messages([HumanMessage(f"once {mark}")], idempotency_key="the same")
    for party in parties:
        for key, mark in party.spoken:
            assert [str(message.content) for message in history(party.store, key).messages][4:] == [f"once {mark}"]


# --- Nothing is left out ---------------------------------------------------------------------------------------------

EXCUSED = {
    "embedded, close, pool_stats, run_in_worker": "no rows",
    "setup, schema_status, bind_role, unbind_role": "about the schema and roles, for its owner",
    "key": "no I/O: makes the names that the others are tried with",
    "statistics, prune": "tried above by what they count",
    ", ".join(name for name in vars(TransferOperations) if not name.startswith("_")): "parts of exports and imports",
    "index_messages": "changes no message",
    "rotate_keys": "changes how keys are wrapped, of every tenant's alike",
}


def test_every_operation_of_the_store_is_in_the_campaign_or_excused() -> None:
    public = {name for name in dir(ConversationStore) if not name.startswith("_")}
    tried = {*OF_CONVERSATION, *OF_FAMILY, *OF_USER, *OF_SESSION, *OF_TENANT, *WITH_KEY, *WRITES}
    excused = {name for names in EXCUSED for name in names.split(", ")}
    assert public - tried - excused == set()
    assert excused <= public
