"""Who sees what: ids that differ lead to different conversations, tenants are apart, passwords are never shown."""

from __future__ import annotations

import asyncio
import copy
import enum
import json
import logging
import pickle
import traceback
import uuid
from collections.abc import Callable, Iterator
from typing import Any
from unittest.util import safe_repr

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from langchain_core.language_models import FakeListLLM
from langchain_core.load import dumpd, dumps
from langchain_core.messages import AIMessage, HumanMessage
from psycopg2 import sql
from psycopg2.extensions import connection as Connection
from psycopg2.extensions import make_dsn

import pgmemory
from pgmemory import (
    BufferMemory,
    ConfigurationError,
    ConversationStore,
    MessageNotStorableError,
    PostgresChatMessageHistory,
    RelevantTurnMemory,
    SchemaError,
    StoredMessage,
    StoreError,
    StoreUnavailableError,
    SummaryMemory,
    TokenWindowMemory,
)
from pgmemory.models import ConversationKey


def contents(history: PostgresChatMessageHistory) -> list[Any]:
    return [message.content for message in history.messages]


# --- Session ids -----------------------------------------------------------------------------------------------------


def test_ids_that_look_alike_are_five_conversations_and_clearing_one_leaves_four(store: ConversationStore) -> None:
    ids: list[Any] = ["user_1", "user%1", "USER_1", "u'1", 7]
    histories = [PostgresChatMessageHistory(session_id, store) for session_id in ids]
    for session_id, history in zip(ids, histories, strict=True):
        history.add_user_message(f"from {session_id}")
    assert [contents(history) for history in histories] == [[f"from {session_id}"] for session_id in ids]
    histories[1].clear()
    assert [contents(history) for history in histories] == [
        ["from user_1"],
        [],
        ["from USER_1"],
        ["from u'1"],
        ["from 7"],
    ]


class Name(str, enum.Enum):
    ACME = "acme"


class Number(enum.IntEnum):
    SEVEN = 7


class Text(str):
    def __str__(self) -> str:
        return "shown otherwise"


SOME_UUID = uuid.UUID("6f1f4c1e-6d0c-4c4e-9d5e-0b1f6a7f3d52")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (7, "7"),
        (-(10**30), "-" + "1" + "0" * 30),
        (0, "0"),
        (SOME_UUID, "6f1f4c1e-6d0c-4c4e-9d5e-0b1f6a7f3d52"),
        (Number.SEVEN, "7"),
        (Name.ACME, "acme"),
        (Text("acme"), "acme"),
    ],
)
def test_an_id_of_another_type_is_the_same_as_its_text(store: ConversationStore, given: Any, text: str) -> None:
    PostgresChatMessageHistory(given, store, user_id=given).add_user_message("hello")
    assert contents(PostgresChatMessageHistory(text, store, user_id=text)) == ["hello"]
    (found,) = store.list_conversations(user_id=given)
    assert (found.session_id, found.user_id) == (text, text)
    tenant = ConversationStore("host=/nowhere", tenant_id=given)
    assert tenant.key(given, given) == ConversationKey(text, text, text)
    assert type(tenant.key(given).session_id) is str


BAD_IDS: dict[str, tuple[Any, str]] = {
    "None": (None, "not NoneType"),
    "True": (True, "not bool"),
    "bytes": (b"s", "not bytes"),
    "a float": (1.5, "not float"),
    "a list": (["s"], "not list"),
    "empty": ("", "must not be empty"),
    "NUL": ("a\0b", "NUL"),
    "half a surrogate pair": ("a\ud800", "surrogate"),
}


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        (field, bad)
        for field, also_accepted in (("session_id", ()), ("user_id", ("None", "empty")), ("tenant_id", ("None",)))
        for bad in BAD_IDS
        if bad not in also_accepted
    ],
)
def test_an_id_that_cannot_be_kept_is_refused_by_name(field: str, bad: str) -> None:
    value, reason = BAD_IDS[bad]
    uses: dict[str, Callable[[], object]] = {
        "session_id": lambda: ConversationStore("host=/nowhere").key(value),
        "user_id": lambda: ConversationStore("host=/nowhere").key("s", value),
        "tenant_id": lambda: ConversationStore("host=/nowhere", tenant_id=value),
    }
    with pytest.raises(ConfigurationError, match=f"^{field} ") as caught:
        uses[field]()
    assert reason in str(caught.value)
    assert "\0" not in str(caught.value)
    str(caught.value).encode()


@pytest.mark.parametrize("bad", BAD_IDS)
def test_every_way_to_name_a_conversation_refuses_a_bad_session_id(bad: str) -> None:
    value, reason = BAD_IDS[bad]
    store = ConversationStore("host=/nowhere")  # refused before anything connects
    uses: list[Callable[[], object]] = [
        lambda: PostgresChatMessageHistory(value, store),
        lambda: BufferMemory(session_id=value, store=store),
        lambda: BufferMemory(session_id="s", store=store).for_session(value),
        lambda: store.get_conversation(value),
        lambda: store.get_metadata(value),
        lambda: store.set_metadata(value, {}),
        lambda: store.list_messages(value),
    ]
    for use in uses:
        with pytest.raises(ValueError, match=reason):
            use()


def test_long_names_are_kept_or_refused_with_their_length(store: ConversationStore) -> None:
    long = "€" * 100_000
    PostgresChatMessageHistory(long, store, user_id="u" * 1000).add_user_message("hello")
    assert contents(PostgresChatMessageHistory(long, store, user_id="u" * 1000)) == ["hello"]
    assert contents(PostgresChatMessageHistory(long[:-1], store, user_id="u" * 1000)) == []
    (found,) = store.list_conversations()
    assert found.session_id == long
    with pytest.raises(ConfigurationError, match="user_id must not be longer than 1000 bytes; this one has 1002"):
        store.key("s", "€" * 334)
    with pytest.raises(ConfigurationError, match="tenant_id must not be longer"):
        ConversationStore("host=/nowhere", tenant_id="x" * 1001)


# --- Users and tenants -----------------------------------------------------------------------------------------------


def test_the_same_session_id_of_another_user_or_tenant_leads_nowhere(store: ConversationStore, server_dsn: str) -> None:
    def at(tenant_id: str | None) -> ConversationStore:
        return ConversationStore(store._database._source._pool, schema=store.schema, tenant_id=tenant_id)

    owner = PostgresChatMessageHistory("1", at("acme"), user_id="ada")
    owner.add_messages([HumanMessage("q"), AIMessage("a")])
    owner.store.set_metadata("1", {"secret": True}, user_id="ada")
    others = [
        ("acme", None),
        ("acme", "bob"),
        ("acme", "1"),
        ("ada", "acme"),
        (None, "ada"),
        (None, None),
        ("1", "ada"),
    ]
    for tenant, user in others:
        elsewhere = at(tenant)
        other = PostgresChatMessageHistory("1", elsewhere, user_id=user)
        key = other.key
        assert other.messages == []
        assert elsewhere.list_messages("1", user_id=user) == []
        for window in (
            elsewhere.read_last_turns(key, turns=9),
            elsewhere.read_last_tokens(key, budget=999, encoding=None),
            elsewhere.read_relevant_turns(key, turns=9, rule=None),
            elsewhere.read_summary_window(key, budget=999, encoding=None),
            elsewhere.read_unsummarized(key, budget=999, encoding=None),
        ):
            assert (window.messages, window.system, window.summary, window.state) == ((), (), None, None)
        assert elsewhere.get_conversation("1", user_id=user) is None
        assert elsewhere.get_metadata("1", user_id=user) == {}
        assert not elsewhere.record_summary(key, content="s", covers_through=1, state="0/0/-1")
        other.clear()
        if tenant != "acme":
            assert elsewhere.list_conversations() == elsewhere.list_conversations(user_id="ada") == []
    assert contents(owner) == ["q", "a"]
    assert owner.store.get_metadata("1", user_id="ada") == {"secret": True}


# Names that separators, quotes, patterns, case, blanks or normal forms could make one.
parts = st.sampled_from(
    ["a", "b", "A", ":", "/", ",", '"', "'", "[", "]", "%", "_", "\\", " ", "ä", "a\u0308", "\x1f", "0"]
)
names = st.lists(parts, min_size=1, max_size=3).map("".join)
optional = st.just("") | names
triples = st.tuples(optional, optional, names)


def test_names_that_differ_in_any_way_are_conversations_of_their_own(store: ConversationStore) -> None:
    pool = store._database._source._pool

    @settings(max_examples=40)
    @example([("", "a", "b:c"), ("", "a:b", "c"), ("a", "", "b:c"), ("a", "b", "c"), ("", "", "a:b:c")])
    @example([("", "a", "b"), ("", "b", "a"), ("a", "", "b"), ("a", "b", "a"), ("b", "a", "b")])
    @example([("", "", "a\u0308"), ("", "", "ä"), ("", "", "a"), ("", "", "A"), ("", "", "a "), ("", "", " a")])
    @example([("", "", '"],["'), ("", '"', '","'), ("", '","', '"')])
    @given(st.lists(triples, min_size=2, max_size=6, unique=True))
    def campaign(triples: list[tuple[str, str, str]]) -> None:
        run = uuid.uuid4().hex  # keeps the campaign's examples apart
        stores = {
            tenant: ConversationStore(pool, schema=store.schema, tenant_id=f"{run}{tenant}") for tenant, _, _ in triples
        }
        histories = {
            triple: PostgresChatMessageHistory(triple[2], stores[triple[0]], user_id=triple[1]) for triple in triples
        }
        for triple, history in histories.items():
            history.add_messages([HumanMessage(json.dumps(triple))], idempotency_key="first")
        assert len({history.key.id for history in histories.values()}) == len(triples)
        for triple, history in histories.items():
            assert contents(history) == [json.dumps(triple)]
        for tenant, tenants in stores.items():
            for user in {user for _, user, _ in triples}:
                found = {conversation.session_id for conversation in tenants.list_conversations(user_id=user)}
                assert found == {session for its, whose, session in triples if (its, whose) == (tenant, user)}
        cleared, *left = triples
        histories[cleared].clear()
        assert contents(histories[cleared]) == []
        for triple in left:
            assert contents(histories[triple]) == [json.dumps(triple)]

    campaign()


@given(triples, triples)
def test_two_names_have_one_key_only_if_they_are_equal(one: tuple[str, str, str], other: tuple[str, str, str]) -> None:
    assert (ConversationKey(*one).id == ConversationKey(*other).id) == (one == other)
    if one != other:
        assert ConversationKey(*one).write_id("k") != ConversationKey(*other).write_id("k")


def test_the_key_of_a_conversation_never_changes() -> None:
    """Rows are found by it: another formula would orphan every stored conversation."""
    assert str(ConversationKey("acme", "ada", "ticket-42").id) == "5eebff0a-e0c8-5072-a506-860f4700d163"
    assert str(ConversationKey("", "", "1").write_id("request 1")) == "65f91d0c-9a5e-52b0-84a8-8ff104f68374"


# --- Secrets ---------------------------------------------------------------------------------------------------------

PASSWORD = "hunter2-Tr0ub4dor"


@pytest.fixture
def secret_dsn(server_dsn: str, store: ConversationStore, admin: Connection) -> Iterator[str]:
    """The DSN, password included, of a role that may use the store's schema."""
    role = f"role_{uuid.uuid4().hex[:12]}"
    with admin.cursor() as cursor:
        for statement in (
            "create role {role} login password {password}",
            "grant usage on schema {schema} to {role}",
            "grant select, insert, update, delete on all tables in schema {schema} to {role}",
        ):
            names = {"role": sql.Identifier(role), "schema": sql.Identifier(store.schema)}
            cursor.execute(sql.SQL(statement).format(**names, password=sql.Literal(PASSWORD)))
    yield make_dsn(server_dsn, user=role, password=PASSWORD)
    with admin.cursor() as cursor:
        for statement in ("drop owned by {role}", "drop role {role}"):
            cursor.execute(sql.SQL(statement).format(role=sql.Identifier(role)))


def texts_of(value: Any) -> Iterator[str]:
    """Every text that a person, a log or a tracer could make of an object."""
    yield from (repr(value), str(value), f"{value}", "%s %r" % (value, value), repr([value]), repr({"a": value}))  # noqa: UP031
    yield from (dumps(value), repr(dumpd(value)), json.dumps(value, default=repr), json.dumps(value, default=str))
    if hasattr(value, "model_dump"):
        yield from (repr(value.model_dump()), value.model_dump_json(), repr(value.__repr_args__()), repr(dict(value)))
        yield from map(repr, value.model_copy().model_dump(mode="json").items())
    if isinstance(value, BaseException):
        yield from (repr(value.args), everything_shown_of(value))


def everything_shown_of(error: BaseException) -> str:
    """What an error tracker shows: the chain of errors with the local variables of all frames in the package."""
    shown = []
    chain = [error]
    for link in chain:
        shown += [repr(link), str(link), repr(link.args), *traceback.format_exception(link, chain=False)]
        for frame, _ in traceback.walk_tb(link.__traceback__):
            if "/pgmemory/" in frame.f_code.co_filename:
                shown += map(safe_repr, frame.f_locals.values())
        chain += [cause for cause in (link.__cause__, link.__context__) if cause is not None and cause not in chain]
    return "\n".join(shown)


def memories(history: PostgresChatMessageHistory) -> list[Any]:
    return [
        BufferMemory(chat_memory=history, k=3),
        TokenWindowMemory(chat_memory=history, max_token_limit=100),
        RelevantTurnMemory(chat_memory=history, keywords=["invoice"], is_relevant=lambda _: False),
        SummaryMemory(chat_memory=history, max_token_limit=20, llm=FakeListLLM(responses=["a summary"])),
    ]


def use_everything(dsn: str | None, schema: str) -> Iterator[Any]:
    """Use the whole package and yield each of its objects and errors on the way."""
    with ConversationStore(dsn, schema=schema, tenant_id="acme", application_name=schema) as store:
        store.setup()
        history = PostgresChatMessageHistory("s", store, user_id="u", max_messages=50)
        yield from (store, history, store.schema_status(), history.key, store._database, store._database._source._pool)
        for memory in memories(history):
            for number in range(3):
                memory.save_context({"input": f"my invoice {number}"}, {"output": "which " * 10})
            memory.load_memory_variables({})
            asyncio.run(memory.asave_context({"input": "invoice"}, {"output": "done"}))
            asyncio.run(memory.aload_memory_variables({}))
            yield from (memory, memory.for_session("t"))
        store.set_metadata("s", {"plan": "pro"}, user_id="u")
        yield from store.list_conversations()
        yield from store.list_messages("s", user_id="u")[:2]
        yield store.read_unsummarized(history.key, budget=99, encoding=None)
        yield from (copy.deepcopy(store), pickle.loads(pickle.dumps(history)))
        wrong: list[tuple[type[BaseException], Callable[[], object]]] = [
            (ConfigurationError, lambda: PostgresChatMessageHistory("", store)),
            (
                MessageNotStorableError,
                lambda: history.add_messages([HumanMessage("x", additional_kwargs={"a": store})]),
            ),
            (ValueError, lambda: BufferMemory(chat_memory=history, kk=3)),
            (ConfigurationError, lambda: memories(history)[0].save_context({"a": 1, "b": 2}, {"c": 3})),
            (
                StoreError,
                lambda: store.append(history.key, [StoredMessage("ai", "", extra="{")], write_id=uuid.uuid4()),
            ),
            (SchemaError, ConversationStore(store._database._source._pool, schema=f"no {schema}").list_conversations),
        ]
        for kind, use in wrong:
            with pytest.raises(kind) as caught:
                use()
            yield caught.value
        history.clear()
    with pytest.raises(pgmemory.PoolClosedError) as closed:
        store.list_conversations()
    yield closed.value


@pytest.mark.parametrize("by_environment", [False, True], ids=["argument", "environment"])
def test_a_password_is_in_no_text_of_any_object_and_in_no_log(
    store: ConversationStore,
    secret_dsn: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    by_environment: bool,
) -> None:
    caplog.set_level(logging.DEBUG)
    if by_environment:
        monkeypatch.setenv("DATABASE_URL", secret_dsn)
    kinds = set()
    for value in use_everything(None if by_environment else secret_dsn, store.schema):
        kinds.add(type(value).__name__)
        for text in texts_of(value):
            assert PASSWORD not in text, type(value)
    assert {"ConversationStore", "SummaryMemory", "ConversationRecord", "StoredMessage", "StoreError"} <= kinds
    assert caplog.records
    for record in caplog.records:
        assert PASSWORD not in f"{record.getMessage()} {record.args} {record.exc_info} {vars(record)}"
    assert PASSWORD not in caplog.text
    assert PASSWORD not in "".join(capfd.readouterr())


UNREACHABLE = [
    f"postgresql://app:{PASSWORD}@127.0.0.1:1/db",
    f"postgresql://app:{PASSWORD}@/db?host=/nowhere",
    f"postgresql+psycopg2://app:{PASSWORD}@no-such-host.invalid/db",
    f"host=127.0.0.1 port=1 user=app password={PASSWORD}",
    f"postgresql://app@127.0.0.1:1/db?password={PASSWORD}",
    f"postgresql://app:{PASSWORD}@127.0.0.1:1,127.0.0.1:2/db",
]
UNREADABLE = [
    f"postgresql://app:{PASSWORD}@h:port/db",
    f"postgresql://app:{PASSWORD}@h/db?no_such_option=1",
    f"mysql://app:{PASSWORD}@h/db",
    f"app:{PASSWORD}@h/db",
    f"host=h password = '{PASSWORD}",
    f"host=h no_such_option={PASSWORD}",
    PASSWORD,
]


@pytest.mark.parametrize("dsn", UNREACHABLE)
def test_an_error_to_connect_names_the_place_and_hides_the_password(
    dsn: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("DATABASE_URL", dsn)
    store = ConversationStore(retry_seconds=0)
    history = PostgresChatMessageHistory("s", store)
    uses: list[Callable[[], object]] = [
        store.setup,
        lambda: history.messages,
        lambda: history.add_user_message("q"),
        lambda: asyncio.run(history.aget_messages()),
        lambda: BufferMemory(chat_memory=history).load_memory_variables({}),
    ]
    for use in uses:
        with pytest.raises(StoreUnavailableError, match="could not connect to host=") as caught:
            use()
        for text in texts_of(caught.value):
            assert PASSWORD not in text
    assert PASSWORD not in caplog.text
    for value in (store, history, *memories(history)):
        for text in (repr(value), *([] if value is history else [str(value)])):
            assert PASSWORD not in text


@pytest.mark.parametrize("dsn", UNREADABLE)
@pytest.mark.parametrize("by_environment", [False, True], ids=["argument", "environment"])
def test_a_dsn_that_cannot_be_read_is_not_shown(
    dsn: str, by_environment: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", dsn)
    with pytest.raises(ConfigurationError, match="cannot be read") as caught:
        ConversationStore(None if by_environment else dsn)
    assert ("$DATABASE_URL" in str(caught.value)) == by_environment
    assert PASSWORD not in "".join(traceback.format_exception(caught.value))
    link: BaseException | None = caught.value
    while link is not None:
        assert PASSWORD not in f"{link!r} {link}"
        link = link.__cause__ or link.__context__


def test_what_could_not_be_built_can_still_be_shown_by_an_error_tracker(store: ConversationStore) -> None:
    for build in (lambda: ConversationStore("no DSN"), lambda: PostgresChatMessageHistory("", store)):
        with pytest.raises(ConfigurationError) as caught:
            build()
        shown = traceback.TracebackException.from_exception(caught.value, capture_locals=True)
        assert "that was not built" in "".join(shown.format())
