"""What others offer for the same work: LangChain's own memories over its three histories, and langgraph's threads."""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, TypeVar

import psycopg
import psycopg2
import sqlalchemy
from langchain_classic.memory import ConversationBufferWindowMemory
from langchain_community.chat_message_histories import PostgresChatMessageHistory as CommunityHistory
from langchain_community.chat_message_histories import SQLChatMessageHistory
from langchain_core.chat_history import BaseChatMessageHistory
from langchain_core.messages import AIMessage, BaseMessage
from langchain_postgres import PostgresChatMessageHistory
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.graph import START, MessagesState, StateGraph
from psycopg.rows import dict_row

T = TypeVar("T")

LANGCHAIN_POSTGRES = "langchain-postgres"
SQL_HISTORY = "SQLChatMessageHistory"
COMMUNITY = "community Postgres"
LANGGRAPH = "langgraph"

# The tables of each, as they make them.
TABLES = {
    LANGCHAIN_POSTGRES: ["chat_history"],
    SQL_HISTORY: ["sql_message_store"],
    COMMUNITY: ["community_message_store"],
    LANGGRAPH: ["checkpoints", "checkpoint_blobs", "checkpoint_writes", "checkpoint_migrations"],
}


class Peer(Protocol):
    """One conversation at somebody else's."""

    def save(self, human: str, ai: str) -> None:
        """Store a turn of two texts."""

    def add(self, turn: list[BaseMessage]) -> None:
        """Store a turn of any messages."""

    def load(self) -> object:
        """Load the conversation, or the last `k` turns of it."""


def quietly(build: Callable[..., T], **fields: Any) -> T:
    """Build one of LangChain's memories or histories without the notice that it is deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return build(**fields)


class StockMemory:
    """LangChain's window memory over a stock history."""

    def __init__(self, history: BaseChatMessageHistory, k: int) -> None:
        self.history = history
        self.memory = quietly(ConversationBufferWindowMemory, chat_memory=history, k=k)

    def save(self, human: str, ai: str) -> None:
        """Store a turn of two texts."""
        self.memory.save_context({"input": human}, {"output": ai})

    def add(self, turn: list[BaseMessage]) -> None:
        """Store a turn of any messages."""
        self.history.add_messages(turn)

    def load(self) -> object:
        """Load the window as text, as LangChain's chains do."""
        return self.memory.load_memory_variables({})


class Thread:
    """A thread of a graph without a model: its only node answers what was said then."""

    def __init__(self, saver: PostgresSaver) -> None:
        self._answer: list[BaseMessage] = []
        graph = StateGraph(MessagesState)
        graph.add_node("answer", lambda state: {"messages": self._answer})
        graph.add_edge(START, "answer")
        self._graph = graph.compile(checkpointer=saver)
        self._config: Any = {"configurable": {"thread_id": str(uuid.uuid4())}}

    def save(self, human: str, ai: str) -> None:
        """Run a turn of two texts, which loads the thread and stores it."""
        self._answer = [AIMessage(ai)]
        self._graph.invoke({"messages": [("human", human)]}, self._config)

    def add(self, turn: list[BaseMessage]) -> None:
        """Run a turn of any messages."""
        question, *self._answer = _copies(turn)
        self._graph.invoke({"messages": [question]}, self._config)

    def fill(self, messages: list[BaseMessage]) -> None:
        """Store messages in one step."""
        self._graph.update_state(self._config, {"messages": _copies(messages)})

    def load(self) -> object:
        """Load the thread."""
        return self._graph.get_state(self._config)


def _copies(messages: list[BaseMessage]) -> list[BaseMessage]:
    """Return copies, for langgraph gives each message an id, which others would have to store too."""
    return [message.model_copy() for message in messages]


class Peers:
    """Connections for all of them to one server; each conversation is a new one.

    Args:
        dsn: Leads to the server.
    """

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._stack = ExitStack()
        self._connection = self._stack.enter_context(psycopg.connect(dsn))
        PostgresChatMessageHistory.create_tables(self._connection, *TABLES[LANGCHAIN_POSTGRES])
        self._engine = sqlalchemy.create_engine("postgresql+psycopg2://", creator=lambda: psycopg2.connect(dsn))
        self._stack.callback(self._engine.dispose)
        # As PostgresSaver.from_conn_string opens it.
        self._saver = PostgresSaver(
            self._stack.enter_context(
                psycopg.connect(dsn, autocommit=True, prepare_threshold=0, row_factory=dict_row)
            )
        )
        self._saver.setup()

    def langchain_postgres(self, k: int = 5) -> StockMemory:
        """Return LangChain's window over langchain-postgres."""
        return StockMemory(self.langchain_postgres_history(), k)

    def langchain_postgres_history(self) -> PostgresChatMessageHistory:
        """Return langchain-postgres's history."""
        (table,) = TABLES[LANGCHAIN_POSTGRES]
        return PostgresChatMessageHistory(table, str(uuid.uuid4()), sync_connection=self._connection)

    def thread(self) -> Thread:
        """Return a thread of langgraph's."""
        return Thread(self._saver)

    def all(self, k: int = 5) -> dict[str, Peer]:
        """Return a conversation at each, by name; windows show `k` turns."""
        session_id = str(uuid.uuid4())
        sql_history = SQLChatMessageHistory(session_id, TABLES[SQL_HISTORY][0], connection=self._engine)
        community = quietly(
            CommunityHistory, session_id=session_id, connection_string=self._dsn, table_name=TABLES[COMMUNITY][0]
        )
        self._stack.callback(community.connection.close)
        return {
            LANGCHAIN_POSTGRES: self.langchain_postgres(k),
            SQL_HISTORY: StockMemory(sql_history, k),
            COMMUNITY: StockMemory(community, k),
            LANGGRAPH: self.thread(),
        }

    def end_transactions(self) -> None:
        """End what langchain-postgres leaves open when it reads."""
        self._connection.rollback()

    def close(self) -> None:
        """Close all connections."""
        self._stack.close()


@contextmanager
def open_peers(dsn: str) -> Iterator[Peers]:
    """Open connections for all of them, and close them afterwards."""
    peers = Peers(dsn)
    try:
        yield peers
    finally:
        peers.close()
