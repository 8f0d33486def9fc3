"""Stores to move conversations between, and moving them."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg2
from conversations import ai, human
from psycopg2 import sql

from pgmemory import ConversationStore, PostgresChatMessageHistory
from pgmemory.transfer import ImportReport, JsonLines, export_conversations, import_conversations


@contextmanager
def another_store(server_dsn: str, schema_name: str) -> Iterator[ConversationStore]:
    """Make an empty store without a tenant beside the one in this schema, and drop it afterwards."""
    with ConversationStore(server_dsn, schema=f"{schema_name}_other") as other:
        other.setup()
        yield other
    with psycopg2.connect(server_dsn) as connection, connection.cursor() as cursor:
        cursor.execute("set client_min_messages = warning")
        cursor.execute(sql.SQL("drop schema {} cascade").format(sql.Identifier(other.schema)))
    connection.close()


def exported(store: ConversationStore, **options: Any) -> bytes:
    """Return what an export writes."""
    file = io.BytesIO()
    export_conversations(store, file, **options)
    return file.getvalue()


def imported(store: ConversationStore, file: bytes, **options: Any) -> ImportReport:
    """Import what an export wrote."""
    return import_conversations(store, JsonLines(io.BytesIO(file)), **options)


def said(store: ConversationStore, session_id: str = "s", user_id: str | None = None) -> list[Any]:
    """Return the messages of a conversation."""
    return PostgresChatMessageHistory(session_id, store, user_id=user_id).messages


def say(store: ConversationStore, count: int, session_id: str = "s", **options: Any) -> PostgresChatMessageHistory:
    """Store so many messages, as turns of two."""
    history = PostgresChatMessageHistory(session_id, store, **options)
    history.add_messages([(human, ai)[n % 2](f"{session_id} {n}") for n in range(count)])
    return history
