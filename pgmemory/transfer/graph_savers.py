"""LangGraph's savers: what their threads hold, and writing one. The extra `langgraph` is imported when it is used."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from langchain_core.messages import BaseMessage, RemoveMessage

from pgmemory.errors import ConfigurationError

if TYPE_CHECKING:
    from langchain_core.runnables import RunnableConfig
    from langgraph.checkpoint.base import BaseCheckpointSaver, CheckpointTuple

    Saver = BaseCheckpointSaver[Any]

_PAGE_CHECKPOINTS = 50

# As LangGraph names what its own agents do last; any agent takes a thread from there.
_LAST_NODE = "model"
COPIED_FROM = {"copied_from": "pgmemory"}
"""What the metadata of a checkpoint have that copying made."""

_COPIED_MESSAGES = "copied_messages"  # which these were, as a digest of their ids

_UNDEFINED_TABLE = "42P01"


def check(saver: Any) -> None:
    """Raise ConfigurationError unless this is a saver whose tables are there."""
    try:
        from langgraph.checkpoint.base import BaseCheckpointSaver
    except ImportError as error:
        raise ConfigurationError(
            f'LangGraph is needed here and cannot be imported ({error}): pip install "langchain-pgmemory[langgraph]"'
        ) from error
    if not isinstance(saver, BaseCheckpointSaver):
        raise ConfigurationError(
            f"saver must be a checkpointer of LangGraph, such as a PostgresSaver, not {type(saver).__name__}; "
            "PostgresSaver.from_conn_string is to be entered: with … as saver"
        )
    if not has_tables(saver):
        raise ConfigurationError(
            "there are no tables of LangGraph in the saver's database, in any schema of its search_path: give a saver "
            "of the database where the threads are, or make the tables with saver.setup()"
        )


def has_tables(saver: Saver) -> bool:
    """Tell whether a saver's tables are there; those of a PostgresSaver are not before its `setup`."""
    try:
        saver.get_tuple(config_of(""))
    except Exception as error:
        if getattr(error, "sqlstate", None) != _UNDEFINED_TABLE:  # as psycopg's errors have it
            raise
        return False
    return True


def writer(saver: Saver) -> Callable[[str, list[BaseMessage], dict[str, Any]], object]:
    """Return a function that lets a thread hold these messages and nothing else, with this metadata."""
    check(saver)
    from langgraph.graph import END, START, MessagesState, StateGraph
    from langgraph.graph.message import REMOVE_ALL_MESSAGES

    builder = StateGraph(MessagesState)
    builder.add_node(_LAST_NODE, lambda state: state)
    builder.add_edge(START, _LAST_NODE)
    builder.add_edge(_LAST_NODE, END)
    graph = builder.compile(checkpointer=saver)

    def write(thread_id: str, messages: list[BaseMessage], metadata: dict[str, Any]) -> None:
        marked = metadata | {_COPIED_MESSAGES: _digest(messages)}
        config: RunnableConfig = {"configurable": {"thread_id": thread_id}, "metadata": marked}
        anew = {"messages": [RemoveMessage(REMOVE_ALL_MESSAGES), *messages]}
        graph.update_state(config, anew, as_node=_LAST_NODE)

    return write


def find_copied(saver: Saver, thread_id: str, newest: CheckpointTuple, by: dict[str, Any]) -> CheckpointTuple | None:
    """Return the newest checkpoint of a thread that copying made and whose metadata has these entries."""
    by = COPIED_FROM | by
    metadata: Any = newest.metadata
    if all(metadata.get(name) == value for name, value in by.items()) and _is_copy(newest):
        return newest
    return next(filter(_is_copy, saver.list(config_of(thread_id), filter=by)), None)


def _is_copy(checkpoint: CheckpointTuple) -> bool:
    # An application may hand the metadata of a thread on to the agent that continues it.
    metadata: Any = checkpoint.metadata
    return bool(metadata.get(_COPIED_MESSAGES) == _digest(messages_in(checkpoint) or []))


def _digest(messages: list[BaseMessage]) -> str:
    return hashlib.sha256(json.dumps([message.id for message in messages]).encode()).hexdigest()


def messages_in(checkpoint: CheckpointTuple) -> list[BaseMessage] | None:
    """Return the messages of a checkpoint; None if it holds something else."""
    messages = checkpoint.checkpoint["channel_values"].get("messages")
    is_list = isinstance(messages, list) and all(isinstance(message, BaseMessage) for message in messages)
    return messages if is_list else None


def thread_ids(saver: Saver) -> Iterator[str]:
    """Yield the ids of all threads, some of them several times."""
    from langgraph.checkpoint.memory import InMemorySaver

    if isinstance(saver, InMemorySaver):  # lists thread by thread, so not in pages
        yield from (checkpoint.config["configurable"]["thread_id"] for checkpoint in saver.list(None))
        return
    before: RunnableConfig | None = None
    while page := list(saver.list(None, before=before, limit=_PAGE_CHECKPOINTS)):
        for checkpoint in page:
            yield checkpoint.config["configurable"]["thread_id"]
        before = page[-1].config


def config_of(thread_id: str) -> RunnableConfig:
    """Return what names a thread to LangGraph."""
    return {"configurable": {"thread_id": thread_id, "checkpoint_ns": ""}}
