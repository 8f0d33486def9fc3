"""Keeping and forgetting conversations: holds, times to live, pruning beside writers, erasing without a trace."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import timedelta
from itertools import count
from typing import Any

import psycopg2
import pytest
from conversations import ai, dialogue, human
from psycopg2 import sql
from psycopg2.extensions import connection as Connection
from waiting import wait_until

from pgmemory import (
    BufferMemory,
    ConfigurationError,
    ConversationHeldError,
    ConversationStore,
    PostgresChatMessageHistory,
    Pruned,
)
from pgmemory.models import Erased, ErasedConversation
from pgmemory.store import retention

DAY = timedelta(days=1)


def ask(admin: Connection, statement: str, schema: str, **parameters: Any) -> list[tuple[Any, ...]]:
    """Run one statement; `{schema}` stands for the test's schema."""
    with admin.cursor() as cursor:
        cursor.execute(sql.SQL(statement).format(schema=sql.Identifier(schema)), parameters or None)
        return cursor.fetchall() if cursor.description else []


def say(store: ConversationStore, session_id: str, user_id: str | None = None, turns: int = 2) -> None:
    PostgresChatMessageHistory(session_id, store, user_id=user_id).add_messages(dialogue(turns))


def let_pass(admin: Connection, store: ConversationStore, days: float, *session_ids: str) -> None:
    """Let time pass for some conversations, or for all."""
    ask(
        admin,
        """update {schema}.conversations set updated_at = updated_at - %(days)s * interval '1 day'
           where session_id = any(%(ids)s) or %(ids)s = '{{}}'""",
        store.schema,
        days=days,
        ids=list(session_ids),
    )


def sessions(store: ConversationStore) -> list[str]:
    return sorted(found.session_id for found in store.list_conversations())


# Pruning


def test_idle_conversations_are_pruned_and_newer_ones_kept(store: ConversationStore, admin: Connection) -> None:
    for session_id in ("old", "older", "new"):
        say(store, session_id)
    let_pass(admin, store, 31, "old", "older")
    assert store.prune(older_than=30 * DAY, dry_run=True) == Pruned(2, 8, 0, 0)
    assert sessions(store) == ["new", "old", "older"]
    assert store.prune(older_than=30 * DAY) == Pruned(2, 8, 0, 0)
    assert sessions(store) == ["new"]
    assert store.prune(older_than=30 * DAY) == Pruned(0, 0, 0, 0)
    assert len(store.list_messages("new")) == 4


def test_a_time_to_live_counts_from_the_last_turn(store: ConversationStore, admin: Connection) -> None:
    for session_id in ("short", "long", "for ever"):
        say(store, session_id)
    assert store.set_time_to_live("short", DAY) == ["short"]
    assert store.set_time_to_live("long", 3 * DAY) == ["long"]
    let_pass(admin, store, 2)
    assert store.prune().conversations == 1
    assert sessions(store) == ["for ever", "long"]
    let_pass(admin, store, 2)
    say(store, "long")
    assert store.prune() == Pruned(0, 0, 0, 0)
    found = store.get_conversation("long")
    assert found is not None and found.time_to_live == 3 * DAY


def test_the_shorter_of_its_own_time_and_the_operators_counts(store: ConversationStore, admin: Connection) -> None:
    for session_id, days in (("a", 1), ("b", 90)):
        say(store, session_id)
        store.set_time_to_live(session_id, days * DAY)
    let_pass(admin, store, 2)
    assert store.prune(older_than=30 * DAY).conversations == 1
    assert sessions(store) == ["b"]
    assert store.prune(older_than=DAY).conversations == 1


def test_a_stores_time_to_live_is_that_of_conversations_without_one(
    server_dsn: str, store: ConversationStore, admin: Connection
) -> None:
    say(store, "before")
    say(store, "own")
    store.set_time_to_live("own", 90 * DAY)
    with ConversationStore(server_dsn, schema=store.schema, time_to_live=30 * DAY) as keeping:
        for session_id in ("before", "own", "new"):
            say(keeping, session_id)
    spans = {found.session_id: found.time_to_live for found in store.list_conversations()}
    assert spans == {"before": 30 * DAY, "own": 90 * DAY, "new": 30 * DAY}
    store.set_time_to_live("own", None)
    assert store.list_conversations(session_id="own")[0].time_to_live is None


@pytest.mark.parametrize("span", [timedelta(0), -DAY, timedelta.max, 30, "30d"])
def test_a_span_that_is_none_is_refused(store: ConversationStore, span: Any) -> None:
    with pytest.raises(ConfigurationError, match="time_to_live must be"):
        ConversationStore("postgresql://nowhere", time_to_live=span)
    with pytest.raises(ConfigurationError, match="time_to_live must be"):
        store.set_time_to_live("s", span)
    with pytest.raises(ConfigurationError, match="older_than must be"):
        store.prune(older_than=span)


def test_only_the_stores_tenant_is_pruned_unless_all_are_meant(
    server_dsn: str, store: ConversationStore, admin: Connection
) -> None:
    tenants = [ConversationStore(server_dsn, schema=store.schema, tenant_id=name) for name in ("acme", "globex")]
    for tenant in tenants:
        say(tenant, "s")
    let_pass(admin, store, 31)
    assert store.prune(older_than=30 * DAY).conversations == 0
    assert tenants[0].prune(older_than=30 * DAY).conversations == 1
    assert [len(sessions(tenant)) for tenant in tenants] == [0, 1]
    assert store.prune(older_than=30 * DAY, all_tenants=True).conversations == 1
    for tenant in tenants:
        tenant.close()


def test_pruning_goes_in_batches_that_are_bounded(
    store: ConversationStore, admin: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "_BATCH_CONVERSATIONS", 3)
    monkeypatch.setattr(retention, "_BATCH_MESSAGES", 10)
    for number in range(7):
        say(store, f"small {number}", turns=1)
    for number in range(2):
        say(store, f"large {number}", turns=9)
    let_pass(admin, store, 31)
    batches: list[Pruned] = []
    store.prune(older_than=DAY, on_batch=batches.append)
    steps = [batches[0]] + [
        Pruned(b.conversations - a.conversations, b.messages - a.messages, 0, 0)
        for a, b in zip(batches, batches[1:], strict=False)
    ]
    assert sum(step.conversations for step in steps) == 9
    assert all(step.conversations <= 3 for step in steps)
    # A conversation that is longer than a batch goes alone.
    assert all(step.messages <= 10 or step.conversations == 1 for step in steps)
    assert sessions(store) == []


def test_pruning_that_was_broken_off_is_resumed(
    store: ConversationStore, admin: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "_BATCH_CONVERSATIONS", 2)
    for number in range(5):
        say(store, str(number))
    let_pass(admin, store, 31)

    def stop(pruned: Pruned) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.prune(older_than=DAY, on_batch=stop)
    assert len(sessions(store)) == 3
    assert store.prune(older_than=DAY).conversations == 3


def test_a_conversation_in_use_is_passed_over(store: ConversationStore, admin: Connection) -> None:
    say(store, "busy")
    say(store, "idle")
    let_pass(admin, store, 31)
    admin.autocommit = False
    ask(admin, "select 1 from {schema}.conversations where session_id = 'busy' for update", store.schema)
    assert store.prune(older_than=DAY).conversations == 1
    assert sessions(store) == ["busy"]
    admin.rollback()
    admin.autocommit = True
    assert store.prune(older_than=DAY).conversations == 1


def test_a_turn_that_meets_the_deletion_of_its_conversation_begins_it_anew(
    store: ConversationStore, admin: Connection
) -> None:
    say(store, "s")
    let_pass(admin, store, 31)
    admin.autocommit = False
    ids = [id for (id,) in ask(admin, "select id::text from {schema}.conversations for update", store.schema)]
    with ThreadPoolExecutor(1) as pool:
        saved = pool.submit(PostgresChatMessageHistory("s", store).add_messages, [human("later"), ai("yes")])
        waiting = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and query like %(own)s"
        wait_until(lambda: ask(admin, waiting, store.schema, own=f"%{store.schema}%")[0][0] == 1, "the writer waits")
        ask(admin, "delete from {schema}.conversations where id = any(%(ids)s::uuid[])", store.schema, ids=ids)
        admin.commit()
        saved.result(timeout=30)
    admin.autocommit = True
    assert [message.content for message in store.list_messages("s")] == ["later", "yes"]


def prune_beside_writers(
    store: ConversationStore, server_dsn: str, admin: Connection, *, conversations: int, writers: int
) -> tuple[Pruned, int]:
    """Prune so many idle conversations while writers go on in some of them and in others; return what was pruned and
    how many turns were written meanwhile."""
    ask(
        admin,
        """with made as (
               insert into {schema}.conversations (id, tenant_id, user_id, session_id, next_message_index, updated_at)
               select gen_random_uuid(), '', 'idle', 'idle-' || n, 2, now() - interval '31 days'
               from generate_series(1, %(count)s) n returning id)
           insert into {schema}.conversation_messages
               (conversation_id, message_index, tenant_id, role, content, created_at)
           select made.id, i, '', case i when 0 then 'human' else 'ai' end, 'x', now()
           from made, generate_series(0, 1) i""",
        store.schema,
        count=conversations,
    )
    for number in range(writers):
        say(store, f"revived {number}")
    let_pass(admin, store, 31, *(f"revived {number}" for number in range(writers)))
    done = threading.Event()
    retried: list[int] = []

    def write(number: int) -> dict[str, list[str]]:
        said: dict[str, list[str]] = {f"revived {number}": [], f"live {number}": []}
        with ConversationStore(
            server_dsn, schema=store.schema, on_operation=lambda operation: retried.append(operation.retries)
        ) as own:
            turn = 0
            while not done.is_set() or turn < 5:
                for session_id, texts in said.items():
                    texts.append(f"turn {turn} of {uuid.uuid4()}")
                    PostgresChatMessageHistory(session_id, own).add_messages([human(texts[-1]), ai()])
                turn += 1
        return said

    with ThreadPoolExecutor(writers) as pool:
        running = [pool.submit(write, number) for number in range(writers)]
        try:
            pruned = store.prune(older_than=30 * DAY)
        finally:
            done.set()
        written = 0
        for future in running:
            for session_id, texts in future.result(timeout=60).items():
                kept = [message.content for message in store.list_messages(session_id) if message.role == "human"]
                assert kept[-len(texts) :] == texts
                written += len(texts)
    # No writer was turned away: each waited for one statement of the pruning at most, and then went on.
    assert set(retried) == {0}
    assert sessions(store) == sorted([f"live {n}" for n in range(writers)] + [f"revived {n}" for n in range(writers)])
    return pruned, written


def test_pruning_beside_writers_loses_none_of_their_turns(
    store: ConversationStore, server_dsn: str, admin: Connection
) -> None:
    pruned, _ = prune_beside_writers(store, server_dsn, admin, conversations=2_000, writers=3)
    assert pruned.conversations >= 2_000


@pytest.mark.large
def test_fifty_thousand_conversations_are_pruned_beside_writers(
    store: ConversationStore, server_dsn: str, admin: Connection
) -> None:
    pruned, written = prune_beside_writers(store, server_dsn, admin, conversations=50_000, writers=4)
    assert pruned.conversations >= 50_000
    assert written > 100


# Items


def expire(admin: Connection, store: ConversationStore, *keys: str) -> None:
    """Let some items have expired."""
    ask(
        admin,
        "update {schema}.items set expires_at = now() - interval '1 second' where key = any(%(keys)s)",
        store.schema,
        keys=list(keys),
    )


def keys(store: ConversationStore, admin: Connection) -> list[str]:
    """Return the keys of all items that are stored, expired or not."""
    return [key for (key,) in ask(admin, "select key from {schema}.items order by key", store.schema)]


def test_expired_items_are_pruned_in_batches_and_others_kept(
    store: ConversationStore, admin: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "_BATCH_ITEMS", 2)
    for key in ("a", "b", "c", "for long", "for ever"):
        store.items("u").put(("facts",), key, {}, time_to_live=None if key == "for ever" else DAY)
    expire(admin, store, "a", "b", "c")
    assert store.prune(dry_run=True) == Pruned(0, 0, 0, 0, 3)
    batches: list[Pruned] = []
    assert store.prune(on_batch=batches.append) == Pruned(0, 0, 0, 0, 3)
    assert [batch.items for batch in batches] == [2, 3]
    assert keys(store, admin) == ["for ever", "for long"]


def test_a_sessions_items_go_with_its_conversation_unless_it_is_held(
    store: ConversationStore, admin: Connection
) -> None:
    for session_id in ("old", "held", "new"):
        say(store, session_id, "u")
        store.items("u", session_id=session_id).put(("facts",), f"of {session_id}", {}, time_to_live=DAY)
    store.items("u").put(("facts",), "of the user", {})
    store.hold("held", user_id="u")
    let_pass(admin, store, 31, "old", "held")
    expire(admin, store, "of held")
    assert store.prune(older_than=30 * DAY, dry_run=True) == Pruned(1, 4, 0, 1, 1)
    assert store.prune(older_than=30 * DAY) == Pruned(1, 4, 0, 1, 1)
    assert keys(store, admin) == ["of held", "of new", "of the user"]
    assert store.erase_user("u").items == 1
    assert keys(store, admin) == ["of held"]


def test_a_session_without_a_conversation_keeps_its_items_as_long_as_any_is_put(
    store: ConversationStore, server_dsn: str, admin: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "_BATCH_CONVERSATIONS", 2)
    say(store, "talks", "u")
    say(store, "held", "u")
    store.hold("held", user_id="u")
    for session_id in ("talks", "held#agent:a", "mixed", *(f"silent {n}" for n in range(5)), None):
        for n in range(2):
            store.items("u", session_id=session_id).put(("facts",), f"{session_id} {n}", {})
    with ConversationStore(server_dsn, schema=store.schema, tenant_id="acme") as acme:
        acme.items("u", session_id="silent").put(("facts",), "of acme", {})
    ask(
        admin,
        "update {schema}.items set updated_at = now() - interval '31 days' where key <> 'mixed 1'",
        store.schema,
    )
    assert store.prune().items == store.prune(older_than=32 * DAY).items == 0
    assert store.prune(older_than=30 * DAY, dry_run=True) == Pruned(0, 0, 0, 0, 10)
    batches: list[Pruned] = []
    assert store.prune(older_than=30 * DAY, on_batch=batches.append) == Pruned(0, 0, 0, 0, 10)
    assert [batch.items for batch in batches] == [4, 8, 10]
    kept = [f"{of} {n}" for of in ("None", "held#agent:a", "mixed", "talks") for n in range(2)]
    assert set(keys(store, admin)) == {*kept, "of acme"}
    assert store.prune(older_than=30 * DAY, all_tenants=True).items == 1


def test_items_that_are_put_after_their_conversation_was_pruned_go_too(
    store: ConversationStore, admin: Connection
) -> None:
    say(store, "s")
    let_pass(admin, store, 31)
    store.prune(older_than=30 * DAY)
    store.items(session_id="s").put(("facts",), "late", {})
    ask(admin, "update {schema}.items set updated_at = now() - interval '31 days'", store.schema)
    assert store.prune(older_than=30 * DAY).items == 1


def test_a_log_that_is_begun_after_the_hold_keeps_its_items(store: ConversationStore, admin: Connection) -> None:
    say(store, "s", "u")
    store.hold("s", user_id="u")
    say(store, "s#agent:late", "u")
    for session_id in ("s#agent:late", "s#agent:silent", "s2#agent:other"):
        store.items("u", session_id=session_id).put(("facts",), session_id, {}, time_to_live=DAY)
    kept = ["s#agent:late", "s#agent:silent"]
    expire(admin, store, *kept)
    assert store.prune().items == 0
    for session_id in ("s", *kept):
        assert store.erase_conversation(session_id, user_id="u").items == 0
    assert store.erase_user("u").items == 1
    assert keys(store, admin) == kept
    store.release("s", user_id="u")
    assert store.prune().items == 2


@contextmanager
def holding(admin: Connection, store: ConversationStore) -> Iterator[int]:
    """Hold every conversation by a transaction that is committed afterwards; gives its session's process id."""
    admin.autocommit = False
    ask(admin, "update {schema}.conversations set held_at = now()", store.schema)
    yield admin.info.backend_pid
    admin.commit()
    admin.autocommit = True


def test_pruning_passes_over_the_items_of_a_conversation_that_is_being_held(
    store: ConversationStore, admin: Connection
) -> None:
    say(store, "s")
    for session_id in ("s", "silent"):
        store.items(session_id=session_id).put(("facts",), f"of {session_id}", {}, time_to_live=DAY)
    expire(admin, store, "of s", "of silent")
    with holding(admin, store):
        assert store.prune().items == 1
    assert store.prune().items == 0
    assert keys(store, admin) == ["of s"]
    store.release("s")
    assert store.prune().items == 1


@pytest.mark.parametrize("held", ["s", "s#agent:a"])
@pytest.mark.parametrize(
    "erase", [lambda store: store.erase_user("u"), lambda store: store.erase_conversation("s#agent:a", user_id="u")]
)
def test_erasing_waits_for_a_hold_of_a_conversation_that_was_begun_meanwhile(
    store: ConversationStore,
    admin: Connection,
    server_dsn: str,
    monkeypatch: pytest.MonkeyPatch,
    held: str,
    erase: Callable[[ConversationStore], Erased],
) -> None:
    # As if it had been begun just after the conversations were erased.
    monkeypatch.setattr(retention, "_PASSES", 0)
    say(store, held, "u")
    store.items("u", session_id="s#agent:a").put(("facts",), "of s", {})
    with closing(psycopg2.connect(server_dsn)) as looking, ThreadPoolExecutor(1) as pool:
        looking.autocommit = True
        with holding(admin, store) as pid:
            erasing = pool.submit(erase, store)
            blocked = "select count(*) from pg_stat_activity where %(pid)s = any(pg_blocking_pids(pid))"
            wait_until(lambda: erasing.done() or ask(looking, blocked, "", pid=pid) == [(1,)], "erasing waits")
        receipt = erasing.result(60)
    assert (receipt.items, keys(store, admin)) == (0, ["of s"])


def test_only_the_tenants_expired_items_are_pruned_unless_all_are_meant(
    server_dsn: str, store: ConversationStore, admin: Connection
) -> None:
    for tenant_id in ("acme", "globex"):
        with ConversationStore(server_dsn, schema=store.schema, tenant_id=tenant_id) as tenant:
            tenant.items("u").put(("facts",), tenant_id, {}, time_to_live=DAY)
    expire(admin, store, "acme", "globex")
    with ConversationStore(server_dsn, schema=store.schema, tenant_id="acme") as acme:
        assert acme.prune().items == 1
    assert keys(store, admin) == ["globex"]
    assert store.prune(all_tenants=True).items == 1


# Holds


def test_a_held_conversation_is_kept_whole_and_says_so(store: ConversationStore, admin: Connection) -> None:
    history = PostgresChatMessageHistory("s", store, user_id="u", max_messages=4)
    history.add_messages(dialogue(2))
    agent = history.for_agent("planner")
    agent.add_messages(dialogue(1))
    assert store.hold("s", user_id="u", reason="case 117") == ["s", "s#agent:planner"]
    found = store.get_conversation("s", user_id="u")
    assert found is not None and found.held_at is not None and found.hold_reason == "case 117"

    refused: list[Callable[[], object]] = [
        history.clear,
        agent.clear,
        history.clear_with_agents,
        BufferMemory(chat_memory=history).clear,
        history.delete_last_turn,
        lambda: history.delete_messages([0]),
        lambda: history.delete_turns([0]),
        lambda: history.replace_message(0, human("other")),
        lambda: history.replace_turn(0, [human("other")]),
    ]
    for change in refused:
        with pytest.raises(ConversationHeldError, match="'s.*held.*case 117.*release"):
            change()
    let_pass(admin, store, 31)
    assert store.prune(older_than=DAY) == Pruned(0, 0, 0, 2)
    assert store.erase_user("u").held == ("s", "s#agent:planner")
    assert store.erase_conversation("s", user_id="u").conversations == ()

    history.add_messages(dialogue(1, first=3))
    assert [message.content for message in history.messages if message.type == "human"] == [
        "question 1",
        "question 2",
        "question 3",
    ]
    assert store.release("s", user_id="u") == ["s", "s#agent:planner"]
    history.add_messages(dialogue(1, first=4))
    assert len(history.messages) == 4
    history.clear()
    assert history.messages == []
    assert store.release("s", user_id="u") == []


def test_if_an_agents_log_is_held_nothing_of_the_family_is_cleared(store: ConversationStore) -> None:
    history = PostgresChatMessageHistory("s", store)
    history.add_messages(dialogue(1))
    history.for_agent("planner").add_messages(dialogue(1))
    store.hold("s#agent:planner")
    with pytest.raises(ConversationHeldError):
        history.clear_with_agents()
    assert len(history.messages) == len(history.for_agent("planner").messages) == 2
    history.clear()
    assert history.messages == []


def test_holding_again_keeps_the_time_and_replaces_the_reason(store: ConversationStore) -> None:
    say(store, "s")
    assert store.hold("unknown") == []
    store.hold("s", reason="first\0")
    first = store.get_conversation("s")
    store.hold("s")
    store.hold("s", reason="second")
    second = store.get_conversation("s")
    assert first is not None and second is not None
    assert first.hold_reason == "first\ufffd"
    assert (second.held_at, second.hold_reason) == (first.held_at, "second")


# Erasing


def trace_of(admin: Connection, schema: str, *texts: str) -> list[str]:
    """Return the tables of a schema that hold one of the texts anywhere."""
    tables = ask(
        admin,
        "select relname from pg_class where relnamespace = %(own)s::regnamespace and relkind = 'r'",
        schema,
        own=schema,
    )
    found = []
    for (table,) in tables:
        rows = sql.SQL("select t::text from {}.{} t").format(sql.Identifier(schema), sql.Identifier(table))
        with admin.cursor() as cursor:
            cursor.execute(rows)
            if any(text in row for (row,) in cursor.fetchall() for text in texts):
                found.append(table)
    return found


def test_erasing_a_user_leaves_no_trace_and_gives_a_receipt(store: ConversationStore, admin: Connection) -> None:
    store.setup(search=True)
    for session_id in ("secret-a", "secret-b"):
        history = PostgresChatMessageHistory(session_id, store, user_id="secret-user")
        history.add_messages([human("secret-text"), ai("secret-answer")], idempotency_key="secret-key")
        store.set_metadata(session_id, {"note": "secret-note"}, user_id="secret-user")
        window = store.read_unsummarized(history.key, budget=100, encoding=None)
        assert window.state is not None
        assert store.record_summary(history.key, content="secret-summary", covers_through=1, state=window.state)
        store.items("secret-user", session_id=session_id).put(("facts",), "secret-fact", {"text": "secret-item"})
    for session_id in (None, "without messages"):
        store.items("secret-user", session_id=session_id).put(("facts",), "secret-fact", {"text": "secret-item"})
    PostgresChatMessageHistory("secret-a", store, user_id="secret-user").for_agent("x").add_messages(dialogue(1))
    say(store, "secret-a", "another")
    store.items("another").put(("facts",), "fact", {"text": "kept"})
    assert sorted(trace_of(admin, store.schema, "secret-user")) == ["conversations", "items"]
    ids = [str(store.key(session_id, "secret-user").id) for session_id in ("secret-a", "secret-b", "secret-a#agent:x")]

    receipt = store.erase_user("secret-user")

    assert (receipt.user_id, receipt.session_id, receipt.held) == ("secret-user", None, ())
    assert {(gone.session_id, gone.messages, gone.summaries, gone.items) for gone in receipt.conversations} == {
        ("secret-a", 2, 1, 1),
        ("secret-a#agent:x", 2, 0, 0),
        ("secret-b", 2, 1, 1),
    }
    assert receipt.items == 2
    secrets = ("secret-user", "secret-text", "secret-note", "secret-summary", "secret-fact", "secret-item")
    assert trace_of(admin, store.schema, *secrets, *ids) == []
    assert store.items("another").get(("facts",), "fact")
    assert len(store.list_messages("secret-a", user_id="another")) == 4
    assert store.erase_user("secret-user").conversations == ()


def test_erasing_a_session_takes_its_agents_logs_and_nothing_else(store: ConversationStore) -> None:
    for session_id in ("s", "s#agent:a", "s2", "t"):
        say(store, session_id, "u")
    owners = ["s", "s#agent:a", "s#agent:silent", "s2", None]
    for owner in owners:
        store.items("u", session_id=owner).put(("facts",), "fact", {})
    receipt = store.erase_conversation("s", user_id="u")
    assert (receipt.session_id, receipt.user_id) == ("s", "u")
    assert {gone.session_id for gone in receipt.conversations} == {"s", "s#agent:a"}
    assert sessions(store) == ["s2", "t"]
    assert [owner for owner in owners if store.items("u", session_id=owner).search()] == ["s2", None]
    assert receipt.items == 1
    # It begins anew, as if it had never been.
    say(store, "s", "u", turns=1)
    assert [message.message_index for message in store.list_messages("s", user_id="u")] == [0, 1]


@pytest.mark.parametrize("comes", ["before", "after"])
def test_nothing_of_a_user_survives_in_a_fork_that_is_made_meanwhile(
    store: ConversationStore, server_dsn: str, admin: Connection, comes: str
) -> None:
    store.setup(search=True)
    source = store.key("s", "secret-user")
    history = PostgresChatMessageHistory("s", store, user_id="secret-user")
    history.add_messages([human("secret-text"), ai("secret-answer")])
    # Conversations are erased in the order of their ids.
    forks = (store.key(f"fork {n}", "secret-user") for n in count())
    fork = next(key for key in forks if (key.id < source.id) == (comes == "before"))
    admin.autocommit = False
    # The fork waits in the middle, with its source locked, for one of the same id that is never committed.
    ask(
        admin,
        "insert into {schema}.conversations (id, tenant_id, user_id, session_id) values (%(id)s, '', '', '')",
        store.schema,
        id=str(fork.id),
    )
    with closing(psycopg2.connect(server_dsn)) as looking, ThreadPoolExecutor(2) as pool:
        looking.autocommit = True

        def wait_for(sessions: int) -> None:
            waiting = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and query like %(own)s"
            wait_until(lambda: ask(looking, waiting, "", own=f"%{store.schema}%") == [(sessions,)], "they wait")

        forking = pool.submit(history.fork, fork.session_id)
        wait_for(1)
        erasing = pool.submit(store.erase_user, "secret-user")
        wait_for(2)
        admin.rollback()
        admin.autocommit = True
        forking.result(60)
        receipt = erasing.result(60)
    assert {gone.session_id for gone in receipt.conversations} == {"s", fork.session_id}
    assert trace_of(admin, store.schema, "secret-", str(source.id), str(fork.id)) == []


@pytest.mark.parametrize("user_id", ["", None])
def test_erasing_a_user_without_a_name_is_refused(store: ConversationStore, user_id: Any) -> None:
    say(store, "s")
    with pytest.raises(ConfigurationError, match="user_id"):
        store.erase_user(user_id)
    assert sessions(store) == ["s"]


def test_an_agents_log_that_is_begun_after_the_hold_is_neither_pruned_nor_erased(
    store: ConversationStore, admin: Connection
) -> None:
    say(store, "s", "u")
    store.hold("s", user_id="u")
    say(store, "s#agent:late", "u")
    say(store, "s2#agent:other", "u")
    let_pass(admin, store, 31)
    assert store.prune(older_than=DAY) == Pruned(1, 4, 0, 2)
    assert store.erase_conversation("s", user_id="u").held == ("s", "s#agent:late")
    assert store.erase_user("u").held == ("s", "s#agent:late")
    assert sessions(store) == ["s", "s#agent:late"]
    store.release("s", user_id="u")
    assert len(store.erase_user("u").conversations) == 2


def test_a_span_beyond_all_times_stops_nobodys_pruning(store: ConversationStore, admin: Connection) -> None:
    say(store, "far")
    say(store, "old")
    ask(admin, "update {schema}.conversations set time_to_live = '9000 years' where session_id = 'far'", store.schema)
    let_pass(admin, store, 31)
    assert store.statistics().expired == 0
    assert store.prune(older_than=DAY).conversations == 2


def test_a_receipt_tells_of_what_was_erased_before_something_went_wrong(
    store: ConversationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "_BATCH_CONVERSATIONS", 1)
    for number in range(3):
        say(store, str(number), "u")
    gone: list[str] = []

    def note(batch: Sequence[ErasedConversation]) -> None:
        gone.extend(each.session_id for each in batch)
        if len(gone) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.erase_user("u", on_batch=note)
    assert sorted([*gone, *sessions(store)]) == ["0", "1", "2"]


def test_metadata_of_a_new_conversation_has_the_stores_time_to_live(server_dsn: str, store: ConversationStore) -> None:
    with ConversationStore(server_dsn, schema=store.schema, time_to_live=30 * DAY) as keeping:
        keeping.set_metadata("s", {"team": "billing"})
    found = store.get_conversation("s")
    assert found is not None and found.time_to_live == 30 * DAY
