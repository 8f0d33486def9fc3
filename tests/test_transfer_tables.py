"""Imports from tables of other packages, made by those packages where there is one."""

from __future__ import annotations

import json
import uuid
import warnings
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import Any

import psycopg
import pytest
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    messages_from_dict,
)
from langchain_core.messages import message_to_dict as to_dict
from psycopg.conninfo import make_conninfo
from psycopg2.extensions import connection as Connection
from test_serialization import golden_messages
from waiting import wait_until

from pgmemory import ConfigurationError, ConversationStore, PostgresChatMessageHistory, StoreError
from pgmemory.transfer import ImportReport, TableSource, import_conversations, tables

# What a table in `jsonb` holds: no NUL and no half surrogate pair, keys in its own order.
GOLDEN = messages_from_dict([to_dict(loaded) for _, loaded in golden_messages() if "\x00" not in str(loaded.content)])
ADA, GRACE = str(uuid.UUID(int=1)), str(uuid.UUID(int=2))
GREETING: list[BaseMessage] = [HumanMessage("Hi"), AIMessage("Hello")]
CALL = {"name": "find", "args": {"q": "x"}, "id": "c1", "type": "tool_call"}

TakeIn = Callable[..., ImportReport]


@pytest.fixture
def take_in(server_dsn: str, store: ConversationStore) -> TakeIn:
    """Import a table of the test's schema, `old` unless it says otherwise, into the store."""

    def take_in(kind: Any, *, table: str = "old", user_id: Any = None, **options: Any) -> ImportReport:
        source = TableSource(server_dsn, kind, table=f"{store.schema}.{table}", user_id=user_id)
        report = import_conversations(store, source, **options)
        assert source.total is None or source.done == source.total
        return report

    return take_in


@pytest.fixture
def make(admin: Connection, store: ConversationStore) -> Callable[..., None]:
    """Make the table `old` of these columns in the test's schema, and fill it."""

    def make(columns: str, rows: Sequence[dict[str, Any]] = (), table: str = "old") -> None:
        with admin.cursor() as cursor:
            cursor.execute(f'create table if not exists {store.schema}."{table}" ({columns})')
            table = table.replace("%", "%%")
            for row in rows:
                values = [json.dumps(value) if isinstance(value, dict) else value for value in row.values()]
                places = ", ".join(["%s"] * len(row))
                cursor.execute(f'insert into {store.schema}."{table}" ({", ".join(row)}) values ({places})', values)

    return make


def said(store: ConversationStore, session_id: str, user_id: Any = None) -> list[BaseMessage]:
    return PostgresChatMessageHistory(session_id, store, user_id=user_id).messages


# --- Tables that packages have made ----------------------------------------------------------------------------------


def by_langchain_postgres(dsn: str, schema: str, sessions: dict[str, list[BaseMessage]]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the package itself imports
        from langchain_postgres import PostgresChatMessageHistory as Theirs

    with psycopg.connect(dsn, options=f"-c search_path={schema}", autocommit=True) as connection:
        Theirs.create_tables(connection, "old")
        for session_id, messages in sessions.items():
            Theirs("old", session_id, sync_connection=connection).add_messages(messages)


def by_community_postgres(dsn: str, schema: str, sessions: dict[str, list[BaseMessage]]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from langchain_community.chat_message_histories import PostgresChatMessageHistory as Theirs

        for session_id, messages in sessions.items():
            history = Theirs(session_id, make_conninfo(dsn, options=f"-c search_path={schema}"), "old")
            history.add_messages(messages)
            history.cursor.close()
            history.connection.close()


def by_sql_chat_message_history(dsn: str, schema: str, sessions: dict[str, list[BaseMessage]]) -> None:
    import sqlalchemy
    from psycopg2.extensions import parse_dsn

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from langchain_community.chat_message_histories import SQLChatMessageHistory

    arguments = {**parse_dsn(dsn), "options": f"-c search_path={schema}"}
    engine = sqlalchemy.create_engine("postgresql+psycopg2://", connect_args=arguments)
    for session_id, messages in sessions.items():
        SQLChatMessageHistory(session_id, connection=engine, table_name="old").add_messages(messages)
    engine.dispose()


MAKERS = {
    "langchain-postgres": ("langchain-postgres", by_langchain_postgres),
    "community's Postgres": ("message-store", by_community_postgres),
    "SQLChatMessageHistory": ("message-store", by_sql_chat_message_history),
}


@pytest.mark.parametrize(("kind", "made_by"), MAKERS.values(), ids=MAKERS)
def test_every_message_of_a_table_that_a_package_made_comes_in_once(
    server_dsn: str, store: ConversationStore, take_in: TakeIn, kind: str, made_by: Any
) -> None:
    made_by(server_dsn, store.schema, {ADA: GOLDEN, GRACE: GREETING})
    report = take_in(kind)
    assert (report.conversations, report.messages, report.skipped) == (2, len(GOLDEN) + 2, 0)
    assert said(store, ADA) == GOLDEN
    assert said(store, GRACE) == GREETING

    PostgresChatMessageHistory(GRACE, store).add_messages(GREETING)  # the conversation goes on here
    again = take_in(kind)
    assert (again.messages, again.already_there, again.succeeded) == (0, len(GOLDEN) + 2, True)
    assert said(store, GRACE) == GREETING * 2

    made_by(server_dsn, store.schema, {ADA: GREETING})  # and one goes on there
    assert take_in(kind).messages == 2
    assert said(store, ADA) == GOLDEN + GREETING


def test_what_only_a_text_column_holds_comes_in_exactly(
    server_dsn: str, store: ConversationStore, take_in: TakeIn
) -> None:
    messages = [
        HumanMessage("NUL \x00 and half a pair \ud83d"),
        AIMessage("☃", response_metadata={"p": -0.0, "q": 1e300}),
    ]
    by_sql_chat_message_history(server_dsn, store.schema, {"ticket 1/ü": messages})
    take_in("message-store", user_id="u")
    assert said(store, "ticket 1/ü", "u") == messages


def test_times_of_messages_come_in_and_retention_counts_from_the_last(
    server_dsn: str, store: ConversationStore, take_in: TakeIn, admin: Connection
) -> None:
    by_langchain_postgres(server_dsn, store.schema, {ADA: GREETING})
    with admin.cursor() as cursor:
        cursor.execute(f"update {store.schema}.old set created_at = make_timestamptz(2020, 1, id, 0, 0, 0, 'UTC')")
    take_in("langchain-postgres")
    first, second = (datetime(2020, 1, day, tzinfo=timezone.utc) for day in (1, 2))
    assert [row.created_at for row in store.list_messages(ADA)] == [first, second]
    record = store.get_conversation(ADA)
    assert record is not None and (record.created_at, record.updated_at) == (first, second)


# --- n8n -------------------------------------------------------------------------------------------------------------

N8N = "id serial primary key, session_id varchar(255) not null, message jsonb not null"
N8N_SAID: list[tuple[dict[str, Any], BaseMessage]] = [
    (
        {"type": "human", "content": "Hi", "additional_kwargs": {}, "response_metadata": {}},
        HumanMessage("Hi"),
    ),
    (
        {
            "type": "ai",
            "content": "",
            "tool_calls": [CALL],
            "invalid_tool_calls": [],
            "additional_kwargs": {},
            "response_metadata": {"model": "m"},
        },
        AIMessage("", tool_calls=[CALL], response_metadata={"model": "m"}),
    ),
    (
        {"type": "tool", "content": "found", "tool_call_id": "c1", "name": "find"},
        ToolMessage("found", tool_call_id="c1", name="find"),
    ),
    ({"type": "ai", "content": "Here.", "tool_calls": [], "invalid_tool_calls": []}, AIMessage("Here.")),
    (
        {"type": "human", "data": {"content": "Nested", "additional_kwargs": {"a": 1}}},
        HumanMessage("Nested", additional_kwargs={"a": 1}),
    ),
    ({"type": "system", "content": "Be kind."}, SystemMessage("Be kind.")),
    (
        {
            "type": "ai",
            "content": None,
            "tool_calls": [{"id": "c2", "type": "function", "function": {"name": "find", "arguments": "{}"}}],
        },
        AIMessage("", tool_calls=[{**CALL, "args": {}, "id": "c2"}]),
    ),
    ({"type": "ai", "content": "By hand", "sender": "Flow"}, AIMessage("By hand", sender="Flow")),
]


def test_n8n_s_table_comes_in_flat_and_nested(
    store: ConversationStore, take_in: TakeIn, make: Callable[..., None]
) -> None:
    make(N8N, [{"session_id": "a", "message": form} for form, _ in N8N_SAID], table="n8n_chat_histories")
    report = take_in("n8n", table="n8n_chat_histories")
    assert (report.messages, report.findings) == (len(N8N_SAID), [])
    assert said(store, "a") == [message for _, message in N8N_SAID]


def test_a_user_column_names_the_user_and_the_option_those_without(
    store: ConversationStore, take_in: TakeIn, make: Callable[..., None]
) -> None:
    rows = [
        {"session_id": "a", "user_id": user, "message": {"type": "human", "content": f"{user}"}}
        for user in (7, None, 8)
    ]
    make(f"{N8N}, user_id int", rows)
    assert take_in("n8n", user_id="nobody").conversations == 3
    for user in ("7", "8", "nobody"):
        assert len(said(store, "a", user)) == 1


ODD: list[tuple[Any, str]] = [
    ({"type": "alien", "content": "x"}, "LangChain cannot read it (ValueError)"),
    ({"content": "x"}, "no JSON object with a type"),
    ([1], "no JSON object with a type"),
    ({"type": "human"}, "no content"),
    ({"type": "human", "content": {"a": "secret"}}, "content.str: Input should be a valid string"),
    ({"type": "tool", "content": "x"}, "LangChain cannot read it (KeyError)"),
]


def test_odd_rows_are_reported_by_their_id_and_stop_nothing_unless_strict(
    store: ConversationStore, take_in: TakeIn, make: Callable[..., None]
) -> None:
    good = {"type": "human", "content": "Hi"}
    make(N8N, [{"session_id": "a", "message": json.dumps(form)} for form in (good, *(odd for odd, _ in ODD), good)])
    report = take_in("n8n")
    assert (report.messages, report.skipped, report.succeeded) == (2, len(ODD), True)
    assert [finding.reason for finding in report.findings] == [reason for _, reason in ODD]
    assert [finding.place for finding in report.findings] == [f"id {n} of session 'a'" for n in range(2, len(ODD) + 2)]
    assert "secret" not in repr(report)
    assert len(said(store, "a")) == 2
    with pytest.raises(ConfigurationError, match="id 2 of session 'a': LangChain cannot read it"):
        take_in("n8n", strict=True)


def test_a_text_column_that_holds_no_json_and_a_missing_session_are_odd_rows(
    store: ConversationStore, take_in: TakeIn, make: Callable[..., None]
) -> None:
    hi = json.dumps({"type": "human", "data": {"content": "Hi"}})
    rows = [("a", hi), ("a", "{"), ("a", None), (None, hi), ("", hi)]
    make("id serial, session_id text, message text", [dict(session_id=name, message=text) for name, text in rows])
    report = take_in("message-store")
    assert (report.messages, report.skipped) == (1, 4)
    assert sorted(finding.reason for finding in report.findings) == [
        "no JSON",
        "no JSON object with a type",
        "session_id must be text, an int or a UUID, not NoneType (1 messages)",
        "session_id must not be empty (1 messages)",
    ]


# --- A table of one's own --------------------------------------------------------------------------------------------

OWN = """
    id uuid primary key default gen_random_uuid(), conversation_id uuid not null, message_index int not null,
    role text not null, content text, additional_kwargs jsonb default '{}',
    created_at timestamptz default '2021-01-01 00:00:00+00', unique (conversation_id, message_index)
"""
OWN_SAID: list[tuple[str, str | None, dict[str, Any] | None, BaseMessage]] = [
    ("system", "Be kind.", None, SystemMessage("Be kind.")),
    ("user", "Hi", {"channel": "chat"}, HumanMessage("Hi", additional_kwargs={"channel": "chat"})),
    ("assistant", None, {"tool_calls": [CALL]}, AIMessage("", tool_calls=[CALL])),
    ("tool", "found", {"tool_call_id": "c1", "name": "find"}, ToolMessage("found", tool_call_id="c1", name="find")),
    (
        "ai",
        "",
        {"tool_calls": [{"id": "c2", "type": "function", "function": {"name": "find", "arguments": '{"q": "y"}'}}]},
        AIMessage("", tool_calls=[{**CALL, "args": {"q": "y"}, "id": "c2"}]),
    ),
    ("human", "Bye", {}, HumanMessage("Bye")),
]


def own_rows(conversation_id: str = ADA, first: int = 0) -> list[dict[str, Any]]:
    return [
        {
            "conversation_id": conversation_id,
            "message_index": n,
            "role": role,
            "content": text,
            "additional_kwargs": others,
        }
        for n, (role, text, others, _) in enumerate(OWN_SAID, first)
    ]


def test_a_table_of_one_s_own_comes_in_with_calls_and_results(
    store: ConversationStore, take_in: TakeIn, make: Callable[..., None]
) -> None:
    make(OWN, [*reversed(own_rows()), *own_rows(GRACE, first=3)])
    report = take_in("conversation-messages")
    assert (report.messages, report.findings) == (2 * len(OWN_SAID), [])
    assert said(store, ADA) == said(store, GRACE) == [message for *_, message in OWN_SAID]
    rows = store.list_messages(GRACE)
    assert [row.message_index for row in rows] == list(range(3, 3 + len(OWN_SAID)))
    assert {row.created_at for row in rows} == {datetime(2021, 1, 1, tzinfo=timezone.utc)}


def test_a_table_of_one_s_own_needs_only_four_columns(
    store: ConversationStore, take_in: TakeIn, make: Callable[..., None]
) -> None:
    columns = "conversation_id text, message_index bigint, role text, content text"
    rows = [
        ("s", 0, "user", "Hi"),
        ("s", 0, "user", "twice"),
        ("s", -1, "user", "?"),
        ("s", 1, None, "?"),
        ("s", 2, "assistant", "Hello"),
        ("s", 2**31 - 1, "assistant", "too far"),
    ]
    names = ("conversation_id", "message_index", "role", "content")
    make(columns, [dict(zip(names, row, strict=True)) for row in rows])
    report = take_in("conversation-messages")
    assert (report.messages, report.skipped) == (2, 4)
    assert sorted(finding.reason for finding in report.findings) == [
        "message_index comes twice",
        *["message_index is no whole number from 0 to 2147483646"] * 2,
        "no role",
    ]
    assert [row.message_index for row in store.list_messages("s")] == [0, 2]
    make(columns.replace("bigint", "text"), table="by_text")
    with pytest.raises(ConfigurationError, match="the column message_index of .*by_text is of type text"):
        take_in("conversation-messages", table="by_text")


def test_roles_of_hand_made_tables_are_known_by_any_of_their_usual_names(
    store: ConversationStore, take_in: TakeIn, make: Callable[..., None]
) -> None:
    roles = [
        ("HumanMessage", "human"), ("AIMessage", "ai"), ("Human", "human"), ("assistant", "ai"), ("bot", "ai"),
        ("USER", "human"), ("AIMessageChunk", "ai"), ("SystemMessage", "system"), ("Bot", "ai"), ("Critic", "chat"),
    ]  # fmt: skip
    rows = [
        {"conversation_id": "s", "message_index": n, "role": role, "content": "x"} for n, (role, _) in enumerate(roles)
    ]
    make("conversation_id text, message_index numeric, role text, content text", rows)
    assert take_in("conversation-messages").messages == len(roles)
    assert [message.type for message in said(store, "s")] == [kind for _, kind in roles]


def test_content_in_a_column_of_json_is_text_or_blocks(
    store: ConversationStore, take_in: TakeIn, make: Callable[..., None]
) -> None:
    blocks = [{"type": "text", "text": "Hi"}, {"type": "image_url", "image_url": {"url": "https://x/y"}}]
    contents = [json.dumps(blocks), '"Hi"', "[1]", '{"a": 1}', None]
    rows = [
        {"conversation_id": "s", "message_index": n, "role": "user", "content": content}
        for n, content in enumerate(contents)
    ]
    make("conversation_id text, message_index int, role text, content jsonb", rows)
    assert take_in("conversation-messages").findings == []
    assert [message.content for message in said(store, "s")] == [blocks, "Hi", "[1]", '{"a": 1}', ""]


@pytest.mark.parametrize("type", ["timestamptz", "timestamp"])
def test_times_that_no_calendar_of_python_has_are_odd_rows(
    store: ConversationStore, take_in: TakeIn, make: Callable[..., None], type: str
) -> None:
    hi = {"type": "human", "content": "Hi"}
    times = ["2024-02-29 00:00:00", "10000-01-01 00:00:00", "0044-03-15 00:00:00 BC", "infinity", "-infinity"]
    make(f"{N8N}, created_at {type}", [{"session_id": "s", "message": hi, "created_at": time} for time in times])
    report = take_in("n8n")
    assert report.messages + report.skipped == len(times)
    assert {finding.reason for finding in report.findings} == {"created_at is not between the years 1 and 9999"}
    assert {finding.place for finding in report.findings} >= {"id 2 of session 's'", "id 3 of session 's'"}
    found = {row.created_at for row in store.list_messages("s")}
    assert datetime(2024, 2, 29, tzinfo=timezone.utc) in found
    assert not any(time is not None and time.year < 2024 for time in found)


# --- The source itself -----------------------------------------------------------------------------------------------


def test_rows_are_fetched_in_pages_that_shrink_with_their_size(
    store: ConversationStore, take_in: TakeIn, make: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "_PAGE_CHARACTERS", 1000)
    messages = [{"type": "human", "content": "x" * 400} for _ in range(7)]
    make(N8N, [{"session_id": "s", "message": form} for form in messages])
    sizes: list[int] = []
    next_size = tables._next_page_size

    def noted(page: list[Any]) -> int:
        sizes.append(next_size(page))
        return sizes[-1]

    monkeypatch.setattr(tables, "_next_page_size", noted)
    assert take_in("n8n").messages == 7
    assert sizes[0] == 2


def test_names_of_tables_are_taken_exactly(
    server_dsn: str, store: ConversationStore, take_in: TakeIn, make: Callable[..., None]
) -> None:
    hi = [{"session_id": "s", "message": {"type": "human", "content": "Hi"}}]
    for name in ("Old %s {x}", "with.dot"):
        make(N8N, hi, table=name)
    assert take_in("n8n", table="Old %s {x}").messages == 1
    assert take_in("n8n", table='"with.dot"').already_there == 1
    for name in ("", ".", "a.", ".a", "a.b.c", '"a', 'a"b".c'):
        with pytest.raises(ConfigurationError, match="table"):
            TableSource(server_dsn, "n8n", table=name)


def test_wrong_tables_are_named(
    server_dsn: str, store: ConversationStore, take_in: TakeIn, make: Callable[..., None]
) -> None:
    with pytest.raises(ConfigurationError, match="there is no table"):
        take_in("n8n")
    make("id int, session_id text")
    with pytest.raises(ConfigurationError, match="no column message: it is not one of message-store"):
        take_in("message-store")
    with pytest.raises(ConfigurationError, match="table must be given"):
        TableSource(server_dsn, "langchain-postgres")
    with pytest.raises(ConfigurationError, match="kind must be one of"):
        TableSource(server_dsn, "redis")  # type: ignore[arg-type]
    with pytest.raises(StoreError):
        import_conversations(store, TableSource("host=/nowhere", "n8n"))


def test_the_table_is_left_as_it_is_and_its_connection_is_closed(
    server_dsn: str, store: ConversationStore, take_in: TakeIn, make: Callable[..., None], admin: Connection
) -> None:
    make(N8N, [{"session_id": "s", "message": {"type": "human", "content": "Hi"}}])
    with admin.cursor() as cursor:
        cursor.execute(f"alter table {store.schema}.old add check (false) not valid")
        take_in("n8n")

        def is_closed() -> bool:
            # A session ends shortly after its connection is closed; and other test processes import meanwhile.
            cursor.execute("select count(*) from pg_stat_activity where application_name = 'pgmemory import'")
            return cursor.fetchone() == (0,)

        wait_until(is_closed, "no session is left")


def test_what_the_store_redacts_is_redacted(
    server_dsn: str, store: ConversationStore, make: Callable[..., None]
) -> None:
    texts = ("my secret", "bad", "drop", "split")
    make(N8N, [{"session_id": "s", "message": {"type": "human", "content": text}} for text in texts])

    def redact(messages: Sequence[BaseMessage]) -> list[BaseMessage]:
        if messages[0].content == "bad":
            raise ValueError("bad")
        if messages[0].content == "drop":
            return []
        if messages[0].content == "split":
            return [HumanMessage("a"), HumanMessage("b")]
        return [message.model_copy(update={"content": "[redacted]"}) for message in messages]

    with ConversationStore(server_dsn, schema=store.schema, redact=redact) as redacting:
        for stored in (1, 0):
            report = import_conversations(redacting, TableSource(server_dsn, "n8n", table=f"{store.schema}.old"))
            assert (report.messages, report.left_out, report.skipped, report.conflicts) == (stored, 1, 2, 0)
        assert [finding.reason for finding in report.findings] == [
            "redact failed (ValueError)",
            "redact made several messages of it, for which the source has no numbers",
        ]
    assert said(store, "s") == [HumanMessage("[redacted]")]


def test_forms_that_langchain_writes_are_read_as_langchain_reads_them(
    store: ConversationStore, take_in: TakeIn, make: Callable[..., None]
) -> None:
    envelope = {
        "lc": 1,
        "type": "constructor",
        "id": ["langchain", "schema", "messages", "AIMessage"],
        "kwargs": {"content": "x"},
    }
    rows = [to_dict(HumanMessage([{"type": "text", "text": "Hi"}, envelope])), envelope]
    make(N8N, [{"session_id": "s", "message": form} for form in rows])
    assert take_in("n8n").skipped == 1  # nothing is revived through LangChain's load
    assert said(store, "s") == [HumanMessage([{"type": "text", "text": "Hi"}, envelope])]
