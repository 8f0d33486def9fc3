"""pgmemory as it is measured: stores, its five memories, long logs, and the statements that it sends."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

from psycopg2.extensions import cursor as Cursor
from psycopg2.pool import ThreadedConnectionPool

from benchmarks.dialogues import Said
from benchmarks.standin import StandIn
from pgmemory import (
    BufferMemory,
    ConversationStore,
    PostgresChatMemory,
    RelevantTurnMemory,
    SummaryMemory,
    TokenWindowMemory,
)
from pgmemory.logged import to_stored_messages
from pgmemory.tokens import EncodingCounter

SCHEMA = "ours"

_BATCH = 1000


def open_store(dsn: str) -> ConversationStore:
    """Return a store whose schema stands."""
    store = ConversationStore(dsn, schema=SCHEMA)
    store.setup()
    return store


def five_memories(store: ConversationStore, name: str) -> dict[str, PostgresChatMemory]:
    """Return one memory of each kind, each with a conversation of its own whose name begins with `name`."""
    return {
        "BufferMemory": BufferMemory(session_id=f"{name} buffer", store=store),
        "BufferMemory(k=5)": BufferMemory(session_id=f"{name} last turns", store=store, k=5),
        "TokenWindowMemory": TokenWindowMemory(session_id=f"{name} tokens", store=store),
        "RelevantTurnMemory": RelevantTurnMemory(
            session_id=f"{name} relevant", store=store, keywords=["e"], keep_irrelevant=True
        ),
        # The limit is never passed: summarising is the model's time, not the memory's.
        "SummaryMemory": SummaryMemory(
            session_id=f"{name} summary", store=store, llm=StandIn(), max_token_limit=1_000_000
        ),
    }


def fill(store: ConversationStore, session_id: str, said: Sequence[Said]) -> None:
    """Store turns as a token window saves them, with their counts, but in large batches."""
    counter = EncodingCounter()
    key = store.key(session_id)
    stored = {turn: to_stored_messages(turn.messages(), counter) for turn in set(said)}
    for start in range(0, len(said), _BATCH):
        batch = [message for turn in said[start : start + _BATCH] for message in stored[turn]]
        store.append(key, batch, write_id=uuid.uuid4())


def statement_of(dsn: str, work: Callable[[ConversationStore], object]) -> tuple[str, dict[str, Any]]:
    """Return the last statement that pgmemory sends while it works, with its parameters."""
    sent: list[tuple[str, dict[str, Any]]] = []

    class Recording(Cursor):
        def execute(self, query: Any, vars: Any = None) -> None:
            sent.append((query, vars))
            super().execute(query, vars)

    pool = ThreadedConnectionPool(1, 1, dsn, cursor_factory=Recording)
    try:
        work(ConversationStore(pool, schema=SCHEMA))
    finally:
        pool.closeall()
    return sent[-1]
