"""What saves and loads cost, as PostgreSQL counts it: plans, rows and pages, whatever it knows of its tables.

Nothing is timed. Round trips, and rows that cross the wire, are counted in test_windows.py.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import psycopg2
import pytest
import tiktoken
from conftest import CountingCursor, CountingPool, run_together
from langchain_core.language_models import FakeListChatModel
from psycopg2.extensions import connection as Connection
from psycopg2.extensions import make_dsn
from waiting import wait_until

from pgmemory import (
    BufferMemory,
    ConversationStore,
    PostgresChatMemory,
    RelevantTurnMemory,
    SummaryMemory,
    TokenWindowMemory,
)
from pgmemory.keywords import KeywordRule

TABLES = ("conversations", "conversation_messages", "conversation_summaries")
FIRST, LONG, SHORT, EACH_OTHER, PRUNED = 60, 20_000, 100, 30, 500
TOKENS = 20  # that each stored message counts
UNCOVERED = 50  # messages that no summary covers
SPACING = 10  # every tenth turn is relevant
USER = "u0"
TURN = ({"input": "where is my parcel?"}, {"output": "on its way"})


# Large tables


class Crowd(NamedTuple):
    """A store over tables that hold a long conversation, a short one and many others, and its only session."""

    store: ConversationStore
    pool: CountingPool

    def sent_by(self, call: Callable[[], object], holding: str = "") -> str:
        """Return the one query that a call sends, or the one that holds a text, its values filled in."""
        sent: list[str] = []
        execute = CountingCursor.execute

        def noting(cursor: CountingCursor, query: Any, vars: Any = None) -> None:
            execute(cursor, query, vars)
            sent.append(cursor.query.decode())

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CountingCursor, "execute", noting)
            call()
        (query,) = (query for query in sent if holding in query)
        return query

    def explained(self, query: str, beginning: str) -> dict[str, Any]:
        """Run a query again, only explaining its statement that begins so, and return that one's plan."""
        before, found, rest = query.partition(beginning)
        assert found
        statement = rest.partition(";\n")[0]
        connection = self.pool.getconn()
        try:
            with connection.cursor() as cursor:
                cursor.execute(f"{before}explain (analyze, buffers, format json) {beginning}{statement}")
                ((plans,),) = cursor.fetchall()
        finally:
            connection.rollback()
            self.pool.putconn(connection)
        plan: dict[str, Any] = plans[0]["Plan"]
        return plan

    def touched_by(self, query: str) -> dict[str, Touched]:
        """Run a query again, under a new write id if it writes, and undo it; return what it touched of each table.

        That includes what triggers do, such as the checks of foreign keys.
        """
        counts = "select relname, seq_scan, seq_tup_read + coalesce(idx_tup_fetch, 0) from pg_stat_xact_user_tables"
        again = re.sub(r"'[0-9a-f-]{36}'::uuid end", f"'{uuid.uuid4()}'::uuid end", query)
        connection = self.pool.getconn()
        found: list[dict[str, tuple[int, int]]] = []
        try:
            with connection.cursor() as cursor:
                # These counts may contain the session's earlier transactions.
                for statement in (counts, again, counts):
                    if statement is counts:
                        cursor.execute(f"{counts} where schemaname = %s", (self.store.schema,))
                        found.append({table: (scans, rows) for table, scans, rows in cursor.fetchall()})
                    else:
                        cursor.execute(statement)
        finally:
            connection.rollback()
            self.pool.putconn(connection)
        before, after = found
        return {table: Touched(*(b - a for a, b in zip(before[table], after[table], strict=True))) for table in TABLES}


class Touched(NamedTuple):
    """What a query touched of a table: how often all of it, and how many rows in all."""

    full_scans: int
    rows: int


def fill(admin: Connection, store: ConversationStore, sessions: Sequence[str], messages: int) -> None:
    """Write conversations of so many messages, a system message and then turns of two, ten for each user.

    Every fifty messages a summary was made; the newest one leaves some uncovered.
    """
    keys = [store.key(session, f"u{number // 10}") for number, session in enumerate(sessions)]
    with admin.cursor() as cursor:
        cursor.execute(
            f"""
            insert into {store.schema}.conversations
                (id, tenant_id, user_id, session_id, next_message_index, summarized_through)
            select id, '', user_id, session_id, %(messages)s, %(covered)s
            from unnest(%(ids)s::uuid[], %(users)s::text[], %(sessions)s::text[]) c (id, user_id, session_id);
            insert into {store.schema}.conversation_messages
                (conversation_id, message_index, tenant_id, role, content, tags, judged_by,
                 token_count, token_encoding, created_at)
            select id, n, '', case when n = 0 then 'system' when n %% 2 = 1 then 'human' else 'ai' end,
                   'the parcel left the warehouse and is on its way ' || n,
                   case when n %% (2 * %(spacing)s) = 1 then '{{refund}}'::text[] end, %(rule)s,
                   %(tokens)s, 'o200k_base', clock_timestamp()
            from unnest(%(ids)s::uuid[]) id, generate_series(0, %(messages)s - 1) n;
            insert into {store.schema}.conversation_summaries (conversation_id, covers_through, tenant_id, content)
            select id, n, '', 'what was said until then'
            from unnest(%(ids)s::uuid[]) id, generate_series(%(covered)s, 0, -50) n;
            """,
            {
                "ids": [str(key.id) for key in keys],
                "users": [key.user_id for key in keys],
                "sessions": list(sessions),
                "messages": messages,
                "covered": max(-1, messages - UNCOVERED - 1),
                "spacing": SPACING,
                "tokens": TOKENS,
                "rule": KeywordRule(["refund"]).fingerprint,
            },
        )


@pytest.fixture(
    scope="module",
    params=[(others, statistics) for others in (2_000, 650) for statistics in ("none", "right", "outdated")],
    ids=lambda param: f"{'one of many' if param[0] == 2_000 else 'half of all'}, statistics: {param[1]}",
)
def crowd(request: pytest.FixtureRequest, server_dsn: str) -> Iterator[Crowd]:
    """Large tables in each state that the planner may find them in; autovacuum does not change it."""
    others, statistics = request.param
    schema = f"test_{uuid.uuid4().hex[:12]}"
    admin = psycopg2.connect(server_dsn)
    admin.autocommit = True
    pool = CountingPool(server_dsn)
    with admin.cursor() as cursor, ConversationStore(pool, schema=schema) as store:
        store.setup()
        for table in TABLES:
            cursor.execute(f"alter table {schema}.{table} set (autovacuum_enabled = off)")
        fill(admin, store, ["first"], FIRST)
        if statistics == "outdated":
            for table in TABLES:
                cursor.execute(f"analyze {schema}.{table}")
            # Often enough for the session to keep the plans of its foreign keys, which suit a tiny table.
            for number in range(10):
                BufferMemory(session_id=f"early {number}", store=store).save_context(*TURN)
        fill(admin, store, [f"other {number}" for number in range(others)], EACH_OTHER)
        for session_id, messages in (("short", SHORT), ("long", LONG), ("pruned", PRUNED), ("unfolded", LONG // 4)):
            fill(admin, store, [session_id], messages)
        cursor.execute(f"update {schema}.conversations set summarized_through = -1 where session_id = 'unfolded'")
        if statistics == "right":
            for table in TABLES:
                cursor.execute(f"analyze {schema}.{table}")
        yield Crowd(store, pool)
        pool.closeall()
        cursor.execute(f"set client_min_messages = warning; drop schema {schema} cascade")
    admin.close()


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", []):
        yield from nodes(child)


def pages(plan: dict[str, Any]) -> int:
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


# Windows


class View(NamedTuple):
    """A way to read a window, and how many messages the window spans."""

    memory: Callable[..., PostgresChatMemory]
    options: dict[str, Any]
    spans: int

    def read(self, store: ConversationStore, session_id: str) -> object:
        memory = self.memory(session_id=session_id, user_id=USER, store=store, **self.options)
        return memory.load_memory_variables({})


class Unsummarized(SummaryMemory):
    """Reads what folding reads."""

    def load_memory_variables(self, inputs: dict[str, Any]) -> dict[str, Any]:
        assert not self.fold()
        return {}


LLM = FakeListChatModel(responses=["what was said"])

VIEWS = {
    "last turns": View(BufferMemory, {"k": 3}, 6),
    "many last turns": View(BufferMemory, {"k": 40}, 80),
    "last tokens": View(TokenWindowMemory, {"max_token_limit": 20 * TOKENS}, 20),
    "relevant turns": View(RelevantTurnMemory, {"k": 3, "keywords": ["refund"]}, 3 * 2 * SPACING),
    "summary and turns": View(SummaryMemory, {"llm": LLM, "max_token_limit": 10 * TOKENS}, 2 * 10),
    "turns to fold": View(Unsummarized, {"llm": LLM, "max_token_limit": 100 * TOKENS}, UNCOVERED),
}

views = pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)


@views
def test_a_window_is_walked_along_the_primary_keys_and_no_row_beyond_it_is_touched(crowd: Crowd, view: View) -> None:
    plan = crowd.explained(crowd.sent_by(lambda: view.read(crowd.store, "long")), "with recursive")
    touched = 0
    for node in nodes(plan):
        if "Relation Name" in node:
            assert node["Node Type"] in ("Index Scan", "Index Only Scan"), node
            assert node["Index Name"] == f"{node['Relation Name']}_pkey"
            touched += (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
        assert "Bitmap" not in node["Node Type"]
        assert "Sort" not in node["Node Type"] or node["Actual Rows"] <= plan["Actual Rows"], "more than the answer"
    # Besides: the first message beyond the window's turns, the preamble and the summary.
    assert touched <= view.spans + 12
    (walk,) = (node for node in nodes(plan) if node["Node Type"] == "Recursive Union")
    directions = {
        node["Scan Direction"] for node in nodes(walk) if node.get("Relation Name") == "conversation_messages"
    }
    assert directions == {"Forward" if view.memory is Unsummarized else "Backward"}


@views
def test_a_window_of_a_long_conversation_reads_as_many_pages_as_that_of_a_short_one(crowd: Crowd, view: View) -> None:
    long = crowd.explained(crowd.sent_by(lambda: view.read(crowd.store, "long")), "with recursive")
    short = crowd.explained(crowd.sent_by(lambda: view.read(crowd.store, "short")), "with recursive")
    assert pages(long) <= pages(short) + 4, "where a page ends is chance"


# Saves


def saving(crowd: Crowd, session_id: str, **options: Any) -> str:
    memory = BufferMemory(session_id=session_id, user_id=USER, store=crowd.store, **options)
    return crowd.sent_by(lambda: memory.save_context(*TURN))


def test_a_turn_is_appended_without_reading_the_log(crowd: Crowd) -> None:
    touched = crowd.touched_by(saving(crowd, "long"))
    assert touched["conversation_messages"] == (0, 0)
    # Each message's foreign key is checked.
    assert touched["conversations"].full_scans == 0
    assert touched["conversations"].rows <= 3


def test_pruning_reads_as_many_messages_as_may_stay(crowd: Crowd) -> None:
    saving(crowd, "pruned", max_messages=PRUNED)
    touched = crowd.touched_by(saving(crowd, "pruned", max_messages=PRUNED))
    assert touched["conversation_messages"].full_scans == touched["conversations"].full_scans == 0
    assert touched["conversation_messages"].rows <= PRUNED + 12


def test_pruning_does_not_read_what_it_must_leave_to_a_summary(crowd: Crowd) -> None:
    memory = SummaryMemory(
        session_id="unfolded", user_id=USER, store=crowd.store, max_messages=SHORT, llm=LLM, max_token_limit=10**6
    )
    query = crowd.sent_by(lambda: memory.save_context(*TURN))
    pruning, found, _ = query.partition("with recursive")
    assert found
    touched = crowd.touched_by(pruning)
    assert touched["conversation_messages"].full_scans == touched["conversations"].full_scans == 0
    assert touched["conversation_messages"].rows <= SHORT + 12


# Whole conversations


# What the planner once took for all of the table is the hardest to tell from the rest.
whole = pytest.mark.parametrize(("session_id", "messages"), [("first", FIRST), ("other 7", EACH_OTHER)])


@whole
def test_a_whole_conversation_is_read_without_reading_another(crowd: Crowd, session_id: str, messages: int) -> None:
    query = crowd.sent_by(lambda: BufferMemory(session_id=session_id, user_id=USER, store=crowd.store).buffer)
    assert crowd.touched_by(query)["conversation_messages"] == (0, messages)


@whole
def test_clearing_reads_the_conversation_and_no_other(crowd: Crowd, session_id: str, messages: int) -> None:
    store = crowd.store
    query = crowd.sent_by(lambda: store.clear(store.key("absent")))
    touched = crowd.touched_by(query.replace(str(store.key("absent").id), str(store.key(session_id, USER).id)))
    assert touched["conversation_messages"] == (0, messages)
    assert touched["conversations"].full_scans == 0


def test_a_users_conversations_are_found_by_index_and_only_those_of_the_page_are_counted(crowd: Crowd) -> None:
    query = crowd.sent_by(lambda: crowd.store.list_conversations(user_id="u5", limit=3))
    touched = crowd.touched_by(query)
    assert touched["conversations"] == (0, 10)
    assert touched["conversation_messages"] == (0, 3 * EACH_OTHER)


def test_a_turn_changes_its_conversations_row_without_touching_an_index(server_dsn: str, admin: Connection) -> None:
    # A database of its own: a transaction that another test holds open would keep old versions of the row.
    name = f"test_{uuid.uuid4().hex[:12]}"
    with admin.cursor() as cursor:
        cursor.execute(f"create database {name}")
    try:
        dsn = make_dsn(server_dsn, dbname=name)
        with ConversationStore(dsn) as store:
            store.setup()
            memories = [BufferMemory(session_id=number, store=store) for number in range(10)]
            for _ in range(100):
                for memory in memories:
                    memory.save_context(*TURN)
        # The session has ended, so it tells what it counted.
        observer = psycopg2.connect(dsn)
        observer.autocommit = True
        with observer.cursor() as cursor:

            def updates() -> tuple[int, int] | None:
                cursor.execute(
                    "select n_tup_upd, n_tup_hot_upd from pg_stat_user_tables where relname = 'conversations'"
                )
                ((all_updates, heap_only),) = cursor.fetchall()
                return (all_updates, heap_only) if all_updates >= 990 else None

            all_updates, heap_only = wait_until(updates, "the updates are counted") or (0, 0)
        observer.close()
        assert heap_only > 0.9 * all_updates
    finally:
        with admin.cursor() as cursor:
            cursor.execute(f"drop database {name} with (force)")


# Tokens


def test_a_message_is_counted_when_it_is_saved_and_never_again(
    store: ConversationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[str] = []
    encode = tiktoken.Encoding.encode

    def noting(encoding: tiktoken.Encoding, text: str, **options: Any) -> list[int]:
        counted.append(text)
        return encode(encoding, text, **options)

    monkeypatch.setattr(tiktoken.Encoding, "encode", noting)
    memories: list[PostgresChatMemory] = [
        TokenWindowMemory(session_id="tokens", store=store),
        RelevantTurnMemory(session_id="relevant", store=store, keywords=["parcel"], max_token_limit=2000),
        SummaryMemory(session_id="summary", store=store, llm=LLM),
    ]
    for memory in memories:
        said = []
        counted.clear()
        for number in range(5):
            said += [f"where is parcel {number}?", f"parcel {number} is on its way"]
            memory.save_context({"input": said[-2]}, {"output": said[-1]})
        assert sorted(text for text in counted if "parcel" in text) == sorted(said), type(memory)
        counted.clear()
        assert "parcel 0" in memory.load_memory_variables({})["history"]
        assert counted == [], type(memory)
    BufferMemory(session_id="buffer", store=store, k=3).save_context(*TURN)
    assert counted == [], "who has no limit counts nothing"


WITHOUT_A_LIMIT = """
import os, sys
from pgmemory import BufferMemory, ConversationStore, RelevantTurnMemory, TokenWindowMemory

print("ready")
sys.stdin.readline()
with ConversationStore(os.environ["DSN"], schema=sys.argv[1]) as store:
    for memory in (
        BufferMemory(session_id="1", store=store),
        BufferMemory(session_id="2", store=store, k=3, max_messages=100),
        RelevantTurnMemory(session_id="3", store=store, keywords=["parcel"]),
    ):
        memory.save_context({"input": "where is my parcel?"}, {"output": "on its way"})
        assert "parcel" in memory.load_memory_variables({})["history"]
    TokenWindowMemory(session_id="4", store=store)
    registry = sys.modules.get("tiktoken.registry")
    print(registry.ENCODINGS if registry else {})
"""


def test_a_process_that_needs_no_tokens_loads_no_encoding(server_dsn: str, store: ConversationStore) -> None:
    assert run_together(WITHOUT_A_LIMIT, [[store.schema]], server_dsn) == ["{}\n"]
