"""Our classes behind other people's constructors.

Owns: which class of ours stands for which of theirs. A stand-in takes the arguments of the class it stands for, makes
up a conversation where theirs needs no name for it, and leaves the rest to ours.
"""

from __future__ import annotations

import copy
import sys
import uuid
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from langchain_core.messages import BaseMessage
from langgraph.store.base import IndexConfig, Op, PutOp, Result
from langgraph.store.memory import InMemoryStore

from pgmemory import BufferMemory, ConversationStore, PostgresChatMessageHistory, SummaryMemory, TokenWindowMemory
from pgmemory.embedding import Embedder
from pgmemory.langgraph_store import PostgresItemStore

MEMORIES: dict[str, tuple[type, dict[str, Any]]] = {
    "ConversationBufferMemory": (BufferMemory, {}),
    "ConversationStringBufferMemory": (BufferMemory, {}),
    "ConversationBufferWindowMemory": (BufferMemory, {"k": 5}),
    "ConversationTokenBufferMemory": (TokenWindowMemory, {}),
    "ConversationSummaryBufferMemory": (SummaryMemory, {}),
    # All but the newest turn is summarised.
    "ConversationSummaryMemory": (SummaryMemory, {"max_token_limit": 0}),
}
"""Their memory, ours, and the fields that make ours behave like theirs."""


class Conversation(PostgresChatMessageHistory):
    """A history that stands for one of theirs."""

    kept_in: ConversationStore  # set by `stand_ins`

    def __init__(self, session_id: str | uuid.UUID) -> None:
        super().__init__(session_id, self.kept_in)


class InMemory(Conversation):
    """Stands for a history in memory: a conversation of its own for each object."""

    def __init__(self, messages: Iterable[BaseMessage] = ()) -> None:
        super().__init__(uuid.uuid4())
        self.add_messages(list(messages))

    def __eq__(self, other: object) -> bool:
        # Theirs are data, and equal when their messages are: that is how their tests ask what was stored.
        return self.messages == other.messages if isinstance(other, InMemory) else NotImplemented

    __hash__ = None  # type: ignore[assignment]


class InFile(Conversation):
    """Stands for a history in a file: the path names the conversation."""

    def __init__(self, file_path: str) -> None:
        super().__init__(file_path)
        self.file_path = file_path


class InSqlTable(Conversation):
    """Stands for a history over SQLAlchemy: database, table and session id together name the conversation."""

    def __init__(
        self, session_id: str, connection: str, table_name: str = "message_store", **_sqlalchemy: Any
    ) -> None:
        super().__init__(f"{connection} {table_name} {session_id}")


class InPostgresTable(Conversation):
    """Stands for a history over psycopg: table and session id together name the conversation."""

    def __init__(self, table_name: str, session_id: str, **_connections: Any) -> None:
        super().__init__(f"{table_name} {session_id}")

    @staticmethod
    def create_tables(connection: Any, table_name: str) -> None:
        """Do nothing: our schema stands."""

    @staticmethod
    async def acreate_tables(connection: Any, table_name: str) -> None:
        """Do nothing: our schema stands."""

    @staticmethod
    def drop_table(connection: Any, table_name: str) -> None:
        """Do nothing: every run has a schema of its own, so there is no table left over."""

    @staticmethod
    async def adrop_table(connection: Any, table_name: str) -> None:
        """Do nothing: every run has a schema of its own, so there is no table left over."""


class InMemoryItems(PostgresItemStore):
    """Stands for LangGraph's store in memory: a user's items of its own for each object.

    With an index, over a store with the embeddings that it names; what was put is found by its meaning at once.
    """

    kept_in: ConversationStore  # set by `stand_ins`

    def __init__(self, *, index: IndexConfig | None = None) -> None:
        self._embedding: ConversationStore | None = None
        if index is None:
            super().__init__(self.kept_in.items(uuid.uuid4()))
            return
        self._embedding = copy.copy(self.kept_in)
        self._embedding.embedder = Embedder(index["embed"])
        # Equal texts of a tenant have one vector; theirs of one name make others in each test.
        self._embedding.tenant_id = uuid.uuid4().hex
        self._embedding.setup(search="simple")
        fields: IndexConfig = {"fields": index.get("fields")}
        super().__init__(self._embedding.items(uuid.uuid4()), index=fields)

    def batch(self, ops: Iterable[Op]) -> list[Result]:
        given = list(ops)
        results = super().batch(given)
        if self._embedding is not None and any(isinstance(op, PutOp) for op in given):
            self._embedding.index_messages()
        return results


HISTORIES: dict[str, type[Conversation]] = {
    "langchain_core.chat_history.InMemoryChatMessageHistory": InMemory,
    "langchain_community.chat_message_histories.file.FileChatMessageHistory": InFile,
    "langchain_community.chat_message_histories.sql.SQLChatMessageHistory": InSqlTable,
    "langchain_postgres.chat_message_histories.PostgresChatMessageHistory": InPostgresTable,
}
"""Their history, by module and name, and ours."""


def stand_ins(store: ConversationStore, memory_module: str) -> dict[type, type]:
    """Return our class for each of theirs; what they store goes into this store.

    Args:
        store: Its schema stands.
        memory_module: The module that exports their memories, which the two lines have in different places.
    """
    Conversation.kept_in = store
    InMemoryItems.kept_in = store
    memories = import_module(memory_module)
    found: dict[type, type] = {InMemoryStore: InMemoryItems}
    for name, (ours, fields) in MEMORIES.items():
        theirs = getattr(memories, name)
        found[theirs] = _memory(theirs, ours, fields)
    for path, history in HISTORIES.items():
        module, _, name = path.rpartition(".")
        found[getattr(import_module(module), name)] = history
    return found


def swap(replacements: dict[type, type]) -> None:
    """Put classes in the place of others in every module that is loaded."""
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if isinstance(value, type) and value in replacements:
                setattr(module, name, replacements[value])


def _memory(theirs: Any, ours: Any, fields: dict[str, Any]) -> type:
    def __init__(self: Any, **given: Any) -> None:
        # Theirs leave out of account what they do not know; ours refuse it.
        known = {name: value for name, value in given.items() if name in theirs.model_fields}
        ours.__init__(self, **{"chat_memory": InMemory(), **fields, **known})

    return type(theirs.__name__, (ours,), {"__init__": __init__, "__module__": __name__})
