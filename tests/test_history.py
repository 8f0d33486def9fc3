"""The chat message history: what comes back is what was saved, sync and async, alone and inside a runnable."""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import os
import pickle
import subprocess
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.runnables import ConfigurableFieldSpec, Runnable
from langchain_core.runnables.history import RunnableWithMessageHistory
from psycopg2 import sql
from psycopg2.extensions import connection as Connection
from psycopg2.extensions import make_dsn

from pgmemory import ConfigurationError, ConversationStore, MessageNotStorableError, PostgresChatMessageHistory

PROJECT = Path(__file__).resolve().parents[1]
PATIENCE_SECONDS = 30.0
PERCENT = "100%s {x} %(y)s {schema} 'quoted' \"twice\" \\ ; --"
CONSTRUCTOR = {"lc": 1, "type": "constructor", "id": ["langchain_core", "messages", "AIMessage"], "kwargs": {"a": 1}}


def ask(admin: Connection, statement: str, schema: str = "", **parameters: Any) -> list[tuple[Any, ...]]:
    """Run one statement; `{schema}` stands for the test's schema."""
    with admin.cursor() as cursor:
        cursor.execute(sql.SQL(statement).format(schema=sql.Identifier(schema)), parameters or None)
        return cursor.fetchall() if cursor.description else []


def same(loaded: Sequence[BaseMessage], saved: Sequence[BaseMessage]) -> None:
    """Assert equality of types and values, and of what == overlooks: key order, 1 and 1.0, 0.0 and -0.0."""
    assert [type(message) for message in loaded] == [type(message) for message in saved]
    assert list(loaded) == list(saved)
    assert [repr(message) for message in loaded] == [repr(message) for message in saved]


def contents(history: PostgresChatMessageHistory) -> list[Any]:
    return [message.content for message in history.messages]


@pytest.fixture
def history(store: ConversationStore) -> PostgresChatMessageHistory:
    return PostgresChatMessageHistory("session", store, user_id="user")


# --- Fidelity --------------------------------------------------------------------------------------------------------

MESSAGES: dict[str, BaseMessage] = {
    "human": HumanMessage("hello", id="h1", name="Ada", additional_kwargs={"zeta": 1, "a": 2}),
    "ai": AIMessage(
        [{"type": "text", "text": "I look"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}],
        id="a1",
        name="bot",
        tool_calls=[
            {"name": "search", "args": {"zeta": 1, "a": 2, "f": 1e22, "z": -0.0}, "id": "c1"},
            {"name": "search", "args": {}, "id": "c2"},
        ],
        invalid_tool_calls=[{"name": "x", "args": "{bad", "id": "c3", "error": "no JSON"}],
        usage_metadata={"input_tokens": 3, "output_tokens": 4, "total_tokens": 7},
        response_metadata={"model_name": "m", "logprobs": None},
    ),
    "tool": ToolMessage(
        "failed", tool_call_id="c1", status="error", artifact={"rows": [1, 1.0]}, name="search", id="t"
    ),
    "system": SystemMessage("be kind", id="s1"),
    "function": FunctionMessage(content="4", name="add"),
    "chat": ChatMessage(content="no", role="critic", id="k"),
    "remove": RemoveMessage(id="a1"),
    "constructor-shaped data": AIMessage(
        "", tool_calls=[{"name": "f", "args": dict(CONSTRUCTOR), "id": "c"}], additional_kwargs={"x": dict(CONSTRUCTOR)}
    ),
}


@pytest.mark.parametrize("kind", MESSAGES)
def test_every_class_of_message_comes_back_as_it_was_saved(history: PostgresChatMessageHistory, kind: str) -> None:
    history.add_message(MESSAGES[kind])
    same(history.messages, [MESSAGES[kind]])


def test_all_classes_of_message_come_back_together_in_order(history: PostgresChatMessageHistory) -> None:
    history.add_messages(list(MESSAGES.values()))
    same(history.messages, list(MESSAGES.values()))


texts = st.text(st.characters() | st.sampled_from("\x00%{}'\"\\😀\ud83d\udca9\ud800"), max_size=20).map(
    # JSON makes one character of a pair of surrogates that together encode it.
    lambda text: text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
objects = st.dictionaries(texts, values, max_size=3)
blocks = st.lists(texts | st.builds(lambda text: {"type": "text", "text": text}, texts), max_size=3)
messages = st.builds(HumanMessage, content=texts | blocks, additional_kwargs=objects) | st.builds(
    AIMessage,
    content=texts,
    tool_calls=st.lists(st.fixed_dictionaries({"name": texts, "args": objects, "id": texts}), max_size=2),
    response_metadata=objects,
)


def test_any_text_and_any_json_come_back_from_the_database_as_they_were(store: ConversationStore) -> None:
    @settings(max_examples=100)
    @given(st.lists(messages, max_size=4))
    def campaign(messages: list[BaseMessage]) -> None:
        history = PostgresChatMessageHistory(uuid.uuid4(), store)
        history.add_messages(messages)
        same(history.messages, messages)

    campaign()


def test_very_long_text_and_a_large_block_come_back(history: PostgresChatMessageHistory) -> None:
    text = "".join(f"{number} ünïcödé 😀\n" for number in range(300_000))[: 5 * 2**20]
    image = base64.b64encode(os.urandom(2 * 2**20)).decode()
    block = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}
    saved = [HumanMessage(text), AIMessage([{"type": "text", "text": "see"}, block])]
    history.add_messages(saved)
    # Not `same`: a difference would be printed.
    assert [message == other for message, other in zip(history.messages, saved, strict=True)] == [True, True]


def test_nul_and_lone_surrogates_come_back_and_a_person_reads_the_rest(
    history: PostgresChatMessageHistory, admin: Connection
) -> None:
    said = "hi 😀 \ud83d x\0y"
    saved = [HumanMessage(said, additional_kwargs={"a\0": "\udc00"}), AIMessage([{"type": "text", "text": said}])]
    history.add_messages(saved)
    same(history.messages, saved)
    rows = ask(admin, "select content from {schema}.conversation_messages", history.store.schema)
    assert rows == [("hi 😀 \ufffd x\ufffdy",)] * 2


def test_percent_signs_and_braces_mean_nothing_in_text_ids_and_names(server_dsn: str, admin: Connection) -> None:
    schema = f"{PERCENT[:40]} {uuid.uuid4().hex[:8]}"
    try:
        with ConversationStore(server_dsn, schema=schema, tenant_id=PERCENT) as store:
            store.setup()
            history = PostgresChatMessageHistory(PERCENT, store, user_id=PERCENT)
            saved = [HumanMessage(PERCENT, name=PERCENT), AIMessage([PERCENT], additional_kwargs={PERCENT: PERCENT})]
            history.add_messages(saved, idempotency_key=PERCENT)
            same(history.messages, saved)
            (found,) = store.list_conversations(user_id=PERCENT)
            assert (found.session_id, found.user_id, found.tenant_id) == (PERCENT, PERCENT, PERCENT)
            history.clear()
            assert history.messages == []
    finally:
        ask(admin, "drop schema if exists {schema} cascade", schema)


def test_values_that_json_lacks_come_back_in_a_readable_form(history: PostgresChatMessageHistory) -> None:
    at = datetime(2024, 5, 6, tzinfo=timezone.utc)
    history.add_message(HumanMessage("exact", additional_kwargs={"at": at, "cost": Decimal("1.10"), "set": {2, 1}}))
    (loaded,) = history.messages
    assert loaded.content == "exact"
    assert loaded.additional_kwargs == {"at": "2024-05-06T00:00:00+00:00", "cost": "1.10", "set": [1, 2]}


def message_of(row: dict[str, Any]) -> BaseMessage:
    if row["role"] == "human":
        return HumanMessage(row["content"])
    if row["role"] == "tool":
        return ToolMessage(row["content"], tool_call_id=row["tool_call_id"], name=row["name"])
    assert row["role"] == "ai"
    return AIMessage(row["content"], tool_calls=row.get("tool_calls", []))


def test_real_dialogues_are_equal_in_a_new_process(
    store: ConversationStore, server_dsn: str, shared_data: Path
) -> None:
    lines = (shared_data / "agent_dialogues.jsonl").read_text("utf-8").splitlines()
    dialogues = {row["dialogue_id"]: [message_of(said) for said in row["messages"]] for row in map(json.loads, lines)}
    assert len(dialogues) == 60
    for number, (name, dialogue) in enumerate(dialogues.items()):
        history = PostgresChatMessageHistory(name, store)
        if number % 2:
            history.add_messages(dialogue)
        else:
            for message in dialogue:
                history.add_message(message)
    program = """
import os, pickle, sys
from pgmemory import ConversationStore, PostgresChatMessageHistory
with ConversationStore(os.environ["DSN"], schema=sys.argv[1]) as store:
    found = [conversation.session_id for conversation in store.list_conversations()]
    loaded = {name: PostgresChatMessageHistory(name, store).messages for name in found}
sys.stdout.buffer.write(pickle.dumps(loaded))
"""
    environment = {**os.environ, "DSN": server_dsn, "PYTHONPATH": str(PROJECT)}
    command = [sys.executable, "-c", program, store.schema]
    loaded = pickle.loads(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout)
    assert loaded.keys() == dialogues.keys()
    for name, dialogue in dialogues.items():
        same(loaded[name], dialogue)


# --- Reading and writing ---------------------------------------------------------------------------------------------


def test_an_object_that_was_built_early_sees_what_another_saved(store: ConversationStore, server_dsn: str) -> None:
    early = PostgresChatMessageHistory("s", store)
    assert early.messages == []
    with ConversationStore(server_dsn, schema=store.schema) as another:
        PostgresChatMessageHistory("s", another).add_user_message("hello")
        assert contents(early) == ["hello"]
        early.add_ai_message("hi")
        assert contents(PostgresChatMessageHistory("s", another)) == ["hello", "hi"]
        PostgresChatMessageHistory("s", another).clear()
    assert early.messages == []


def test_each_reading_gives_a_list_of_its_own(history: PostgresChatMessageHistory) -> None:
    history.add_messages([HumanMessage("q"), AIMessage("a")])
    first = history.messages
    first.pop()
    first[0].content = "changed"
    assert type(history.messages) is list
    assert contents(history) == ["q", "a"]
    assert history.messages.copy() == history.messages


@pytest.mark.parametrize(
    "unstorable", [object(), HumanMessage("x", additional_kwargs={"client": object()}), "text", None]
)
def test_a_message_that_cannot_be_stored_is_named_and_nothing_of_its_turn_is_written(
    history: PostgresChatMessageHistory, unstorable: Any
) -> None:
    with pytest.raises(MessageNotStorableError, match=r"messages\[1\]") as caught:
        history.add_messages([HumanMessage("q"), unstorable])
    assert caught.value.path.startswith("messages[1]")
    assert history.messages == []
    assert history.store.list_conversations() == []
    history.add_messages([HumanMessage("q"), AIMessage("a")])
    assert contents(history) == ["q", "a"]


def test_no_messages_are_no_write(history: PostgresChatMessageHistory) -> None:
    history.add_messages([])
    history.add_messages(())
    assert history.store.list_conversations() == []


def test_an_idempotency_key_stores_a_turn_once(history: PostgresChatMessageHistory) -> None:
    def save(_: int) -> None:
        history.add_messages([HumanMessage("q"), AIMessage("a")], idempotency_key="request 1")

    with ThreadPoolExecutor(8) as executor:
        list(executor.map(save, range(24)))
    history.add_messages([HumanMessage("q2")], idempotency_key="request 2")
    other = PostgresChatMessageHistory("other", history.store, user_id="user")
    other.add_messages([HumanMessage("q3")], idempotency_key="request 1")
    assert contents(history) == ["q", "a", "q2"]
    assert contents(other) == ["q3"]


@pytest.mark.parametrize("key", ["", 7, b"x", True, "half \ud800"])
def test_an_idempotency_key_of_another_kind_is_refused(history: PostgresChatMessageHistory, key: Any) -> None:
    with pytest.raises(ConfigurationError, match="^idempotency_key "):
        history.add_messages([HumanMessage("q")], idempotency_key=key)
    assert history.messages == []


def test_any_text_is_an_idempotency_key(history: PostgresChatMessageHistory) -> None:
    for key in ("a", "A", "a ", "ä", "a\u0308", "\0", "%s"):
        for _ in range(2):
            history.add_messages([HumanMessage(key)], idempotency_key=key)
    assert contents(history) == ["a", "A", "a ", "ä", "a\u0308", "\0", "%s"]


def test_max_messages_keeps_the_newest_turns(store: ConversationStore) -> None:
    history = PostgresChatMessageHistory("s", store, max_messages=4)
    history.add_message(SystemMessage("be kind"))
    for number in range(5):
        history.add_messages([HumanMessage(f"q{number}"), AIMessage(f"a{number}")])
    assert contents(history) == ["be kind", "q4", "a4"]


@pytest.mark.parametrize("limit", [0, -1, True, 2.0, "4"])
def test_a_max_messages_that_makes_no_sense_is_refused(store: ConversationStore, limit: Any) -> None:
    with pytest.raises(ConfigurationError, match="max_messages must be a whole number from 1"):
        PostgresChatMessageHistory("s", store, max_messages=limit)


@pytest.mark.parametrize("given", ["postgresql://u:hunter2@h/db", None, object()])
def test_a_store_of_another_kind_is_refused_without_being_shown(given: Any) -> None:
    with pytest.raises(ConfigurationError, match="store must be a ConversationStore") as caught:
        PostgresChatMessageHistory("s", given)
    assert "hunter2" not in str(caught.value)


# --- Rows of others --------------------------------------------------------------------------------------------------

INSERT = """
    insert into {schema}.conversation_messages
        (conversation_id, message_index, tenant_id, role, content, additional_kwargs, extra, created_at)
    values (%(id)s, %(index)s, '', %(role)s, %(content)s, %(kwargs)s, %(extra)s, now())"""
FOREIGN: dict[str, tuple[str, str | None, str | None]] = {
    "an unknown role": ("critic", None, None),
    "an empty role": ("", None, None),
    "an extra that is no object": ("human", None, "[1]"),
    "an extra that is null": ("ai", None, "null"),
    "an unknown field": ("ai", None, '{"from_the_future": {"a": 1}}'),
    "calls of a wrong shape": ("ai", None, '{"tool_calls": 5}'),
    "calls that lack fields": ("ai", None, '{"tool_calls": [{}]}'),
    "usage of a wrong shape": ("ai", None, '{"usage_metadata": "many"}'),
    "a tool message without call": ("tool", None, None),
    "a tool message of an unknown status": ("tool", None, '{"status": "maybe"}'),
    "a function message without name": ("function", None, None),
    "a chat message without role": ("chat", None, "{}"),
    "a remove message without id": ("remove", None, None),
    "kwargs that are text": ("human", '"text"', None),
    "kwargs that are a list": ("ai", "[]", None),
    "a content of a wrong type": ("human", None, '{"content": {"a": 1}}'),
    "a constructor": ("human", None, json.dumps(CONSTRUCTOR)),
    "keys that come twice": ("human", None, '{"id": "a", "id": "b"}'),
}


@pytest.mark.parametrize("row", FOREIGN)
def test_a_foreign_or_damaged_row_leaves_the_conversation_readable(
    history: PostgresChatMessageHistory, admin: Connection, row: str
) -> None:
    history.add_user_message("before")
    role, kwargs, extra = FOREIGN[row]
    parameters = {"id": str(history.key.id), "role": role, "kwargs": kwargs, "extra": extra}
    ask(admin, INSERT, history.store.schema, **parameters, index=5, content="readable")  # others may leave gaps
    ask(admin, "update {schema}.conversations set next_message_index = 6", history.store.schema)
    history.add_ai_message("after")
    assert [message.text if isinstance(message.text, str) else message.text() for message in history.messages] == [
        "before",
        "readable" if "content" not in (extra or "") else history.messages[1].content,
        "after",
    ]
    assert isinstance(history.messages[1].content, (str, list))
    if "from_the_future" in (extra or ""):
        assert history.messages[1].from_the_future == {"a": 1}  # type: ignore[attr-defined]


# --- Async -----------------------------------------------------------------------------------------------------------


def test_the_async_methods_do_what_the_others_do(history: PostgresChatMessageHistory) -> None:
    async def main() -> None:
        saved = [HumanMessage("q"), AIMessage("a")]
        await history.aadd_messages(saved)
        await history.aadd_messages(saved, idempotency_key="k")
        await history.aadd_messages(saved, idempotency_key="k")
        same(await history.aget_messages(), saved * 2)
        with pytest.raises(MessageNotStorableError, match=r"messages\[0\]"):
            await history.aadd_messages([object()])  # type: ignore[list-item]
        await history.aclear()
        assert await history.aget_messages() == []

    asyncio.run(main())


def test_the_other_methods_work_inside_a_running_loop(history: PostgresChatMessageHistory) -> None:
    async def main() -> None:
        history.add_messages([HumanMessage("q"), AIMessage("a")])
        assert contents(history) == ["q", "a"]
        history.clear()
        assert history.messages == []

    asyncio.run(main())


def test_many_tasks_at_once_store_their_turns_whole(store: ConversationStore) -> None:
    history = PostgresChatMessageHistory("s", store)

    async def main() -> None:
        turns = [[HumanMessage(f"q{number}"), AIMessage(f"a{number}")] for number in range(60)]
        await asyncio.gather(*(history.aadd_messages(turn) for turn in turns))

    asyncio.run(main())
    found = contents(history)
    assert sorted(found[::2]) == sorted(f"q{number}" for number in range(60))
    assert [text.replace("q", "a") for text in found[::2]] == found[1::2]


def impatient_store(server_dsn: str, schema: str, **options: Any) -> ConversationStore:
    """A store whose calls give up in the end, so that one that blocks the loop makes a test fail rather than hang."""
    dsn = make_dsn(server_dsn, options="-c lock_timeout=8s")
    return ConversationStore(dsn, schema=schema, application_name=schema, **options)


ASYNC_METHODS: dict[str, Callable[[PostgresChatMessageHistory], Awaitable[Any]]] = {
    "aadd_messages": lambda history: history.aadd_messages([HumanMessage("q")]),
    "aclear": lambda history: history.aclear(),
}


@pytest.mark.parametrize("method", ASYNC_METHODS)
def test_the_event_loop_goes_on_while_a_call_waits_for_a_lock_in_the_database(
    server_dsn: str, store: ConversationStore, admin: Connection, method: str
) -> None:
    waiting = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and application_name = %(name)s"

    async def main(history: PostgresChatMessageHistory) -> None:
        locker = psycopg2.connect(server_dsn)
        ask(locker, "select 1 from {schema}.conversations for update", store.schema)
        call = asyncio.ensure_future(ASYNC_METHODS[method](history))
        ticks = 0
        deadline = time.monotonic() + PATIENCE_SECONDS
        while ask(admin, waiting, name=store.schema) == [(0,)]:
            assert time.monotonic() < deadline and not call.done()
            await asyncio.sleep(0)
        for _ in range(1000):
            await asyncio.sleep(0)
            ticks += 1
        assert ask(admin, waiting, name=store.schema) == [(1,)]
        assert (ticks, call.done()) == (1000, False)
        locker.rollback()
        locker.close()
        await asyncio.wait_for(call, PATIENCE_SECONDS)

    with impatient_store(server_dsn, store.schema) as other:
        history = PostgresChatMessageHistory("s", other)
        history.add_user_message("before")
        asyncio.run(main(history))
        assert contents(history) == ([] if method == "aclear" else ["before", "q"])


def test_cancelled_calls_leave_turns_whole_or_absent_and_the_connection_free(
    server_dsn: str, store: ConversationStore, admin: Connection
) -> None:
    async def main(history: PostgresChatMessageHistory) -> None:
        locker = psycopg2.connect(server_dsn)
        ask(locker, "select 1 from {schema}.conversations for update", store.schema)
        turns = [[HumanMessage(f"q{number}"), AIMessage(f"a{number}")] for number in range(20)]
        calls = [asyncio.ensure_future(history.aadd_messages(turn)) for turn in turns]
        waiting = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and application_name = %(name)s"
        deadline = time.monotonic() + PATIENCE_SECONDS
        while ask(admin, waiting, name=store.schema) == [(0,)]:
            assert time.monotonic() < deadline
            await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(result) for result in results} == {asyncio.CancelledError}
        locker.rollback()
        locker.close()
        await asyncio.wait_for(history.aadd_messages([HumanMessage("last")]), PATIENCE_SECONDS)

    with impatient_store(server_dsn, store.schema, max_connections=1) as other:
        history = PostgresChatMessageHistory("s", other)
        history.add_user_message("first")
        asyncio.run(main(history))
        first, *turns, last = contents(history)
    assert (first, last) == ("first", "last")
    assert turns[1::2] == [text.replace("q", "a") for text in turns[::2]]
    assert len(turns) == len(set(turns)) < 40


# --- RunnableWithMessageHistory --------------------------------------------------------------------------------------


def chat(*answers: str) -> Runnable[Any, Any]:
    prompt = ChatPromptTemplate.from_messages([MessagesPlaceholder("history"), ("human", "{input}")])
    return prompt | GenericFakeChatModel(messages=iter([AIMessage(answer) for answer in answers]))


def config(**configurable: str) -> Any:
    return {"configurable": configurable}


@pytest.fixture
def nothing_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail if anything was logged: LangChain swallows and logs what fails while it saves."""
    yield
    assert [record.getMessage() for record in caplog.get_records("call")] == []


def wrapping(test: Callable[..., None]) -> Callable[..., None]:
    pytest.mark.filterwarnings("ignore:RunnableWithMessageHistory is deprecated")(test)
    pytest.mark.usefixtures("nothing_logged")(test)
    return test


@wrapping
def test_a_runnable_keeps_its_turns_by_session_id(store: ConversationStore) -> None:
    wrapped = RunnableWithMessageHistory(
        chat("hi Ada", "your name is Ada", "hello", "streamed answer of words"),
        lambda session_id: PostgresChatMessageHistory(session_id, store),
        input_messages_key="input",
        history_messages_key="history",
    )
    assert wrapped.invoke({"input": "I am Ada"}, config(session_id="1")).content == "hi Ada"
    answer = asyncio.run(wrapped.ainvoke({"input": "my name?"}, config(session_id="1")))
    assert answer.content == "your name is Ada"
    assert wrapped.invoke({"input": "hi"}, config(session_id="2")).content == "hello"
    chunks = list(wrapped.stream({"input": "stream"}, config(session_id="1")))
    assert len(chunks) > 1 and all(isinstance(chunk, AIMessageChunk) for chunk in chunks)
    found = PostgresChatMessageHistory("1", store).messages
    assert [type(message) for message in found] == [HumanMessage, AIMessage] * 3
    assert [message.type for message in found] == ["human", "ai"] * 3
    assert [message.content for message in found] == [
        "I am Ada",
        "hi Ada",
        "my name?",
        "your name is Ada",
        "stream",
        "streamed answer of words",
    ]
    assert contents(PostgresChatMessageHistory("2", store)) == ["hi", "hello"]


@wrapping
def test_an_asynchronous_stream_is_stored_as_a_whole_message(store: ConversationStore) -> None:
    wrapped = RunnableWithMessageHistory(
        chat("one two three"),
        lambda session_id: PostgresChatMessageHistory(session_id, store),
        input_messages_key="input",
        history_messages_key="history",
    )

    async def main() -> int:
        return len([chunk async for chunk in wrapped.astream({"input": "q"}, config(session_id="1"))])

    assert asyncio.run(main()) > 1
    found = PostgresChatMessageHistory("1", store).messages
    assert [(type(message), message.content) for message in found] == [
        (HumanMessage, "q"),
        (AIMessage, "one two three"),
    ]


@wrapping
def test_a_runnable_keeps_its_turns_by_user_and_conversation(store: ConversationStore) -> None:
    def history_of(user_id: str, conversation_id: str) -> PostgresChatMessageHistory:
        return PostgresChatMessageHistory(conversation_id, store, user_id=user_id)

    wrapped = RunnableWithMessageHistory(
        chat("a1", "a2", "a3"),
        history_of,
        input_messages_key="input",
        history_messages_key="history",
        history_factory_config=[
            ConfigurableFieldSpec(id="user_id", annotation=str),
            ConfigurableFieldSpec(id="conversation_id", annotation=str),
        ],
    )
    wrapped.invoke({"input": "q1"}, config(user_id="ada", conversation_id="1"))
    wrapped.invoke({"input": "q2"}, config(user_id="bob", conversation_id="1"))
    asyncio.run(wrapped.ainvoke({"input": "q3"}, config(user_id="ada", conversation_id="1")))
    assert contents(history_of("ada", "1")) == ["q1", "a1", "q3", "a3"]
    assert contents(history_of("bob", "1")) == ["q2", "a2"]
    assert contents(PostgresChatMessageHistory("1", store)) == []


@wrapping
def test_a_runnable_over_messages_stores_nothing_twice(store: ConversationStore) -> None:
    model = GenericFakeChatModel(messages=iter([AIMessage(f"r{number}") for number in range(3)]))
    wrapped = RunnableWithMessageHistory(model, lambda session_id: PostgresChatMessageHistory(session_id, store))
    for number in range(3):
        wrapped.invoke([HumanMessage(f"m{number}")], config(session_id="s"))
    assert contents(PostgresChatMessageHistory("s", store)) == ["m0", "r0", "m1", "r1", "m2", "r2"]


# --- Life ------------------------------------------------------------------------------------------------------------


def sessions(admin: Connection, application: str) -> set[int]:
    rows = ask(admin, "select pid from pg_stat_activity where application_name = %(name)s", name=application)
    return {pid for (pid,) in rows}


def test_two_hundred_histories_open_no_connection_and_use_no_more_than_the_store_may_have(
    server_dsn: str, store: ConversationStore, admin: Connection
) -> None:
    with ConversationStore(server_dsn, schema=store.schema, max_connections=3, application_name=store.schema) as shared:
        histories = [PostgresChatMessageHistory(number, shared, user_id=number % 7) for number in range(200)]
        assert sessions(admin, store.schema) == set()
        seen: set[int] = set()
        with ThreadPoolExecutor(20) as executor:
            loads = [executor.submit(getattr, history, "messages") for history in histories]
            while not all(load.done() for load in loads):
                open_now = sessions(admin, store.schema)
                assert len(open_now) <= 3
                seen |= open_now
            assert [load.result() for load in loads] == [[]] * 200
        assert 1 <= len(seen | sessions(admin, store.schema)) <= 3


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda history: pickle.loads(pickle.dumps(history))], ids=["deepcopy", "pickle"]
)
def test_a_copy_works_and_shares_no_connection(
    server_dsn: str,
    store: ConversationStore,
    admin: Connection,
    copied: Callable[[Any], PostgresChatMessageHistory],
) -> None:
    with ConversationStore(server_dsn, schema=store.schema, application_name=store.schema) as other:
        history = PostgresChatMessageHistory("s", other, user_id=7, max_messages=4)
        history.add_user_message("q1")
        first = sessions(admin, store.schema)
        twin = copied(history)
        assert (repr(twin), twin.key, twin.max_messages) == (repr(history), history.key, 4)
        twin.add_ai_message("a1")
        assert contents(history) == contents(twin) == ["q1", "a1"]
        asyncio.run(twin.aadd_messages([HumanMessage("q2")]))
        assert len(sessions(admin, store.schema) - first) == 1
        twin.store.close()
        assert contents(history) == ["q1", "a1", "q2"]


def test_after_closing_the_store_a_history_says_so(server_dsn: str, store: ConversationStore) -> None:
    with ConversationStore(server_dsn, schema=store.schema) as other:
        history = PostgresChatMessageHistory("s", other)
        asyncio.run(history.aadd_messages([HumanMessage("q")]))
    for use in (lambda: history.messages, history.clear, lambda: asyncio.run(history.aget_messages())):
        with pytest.raises(psycopg2.pool.PoolError, match="closed"):
            use()
