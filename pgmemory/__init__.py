"""Persistent memory for LangChain's legacy chains and agents, in PostgreSQL.

Names are imported when first used, so that what needs no LangChain, such as the command line, starts without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pgmemory._version import __version__

if TYPE_CHECKING:
    from pgmemory.embedded import LocalServerError
    from pgmemory.encryption import Keyring
    from pgmemory.entities import PostgresEntityStore
    from pgmemory.errors import (
        ConfigurationError,
        ConversationHeldError,
        EmbeddingError,
        EncryptionError,
        MessageNotStorableError,
        PgMemoryError,
        SchemaError,
        SummaryError,
        UnsavedTurn,
    )
    from pgmemory.formats import as_json, as_text, as_xml
    from pgmemory.history import PostgresChatMessageHistory
    from pgmemory.memory.base import PostgresChatMemory
    from pgmemory.memory.buffer import BufferMemory
    from pgmemory.memory.explanation import ExplainedMessage, Explanation
    from pgmemory.memory.recall import RecallMemory
    from pgmemory.memory.relevant_turn import RelevantTurnMemory
    from pgmemory.memory.summary import SummaryMemory
    from pgmemory.memory.token_window import TokenWindowMemory
    from pgmemory.models import ConversationRecord, Erased, Item, LogState, Operation, PoolStats, Pruned, StoredMessage
    from pgmemory.pool import PoolClosedError, PoolTimeoutError, StoreError, StoreUnavailableError
    from pgmemory.redaction import redact_personal_data
    from pgmemory.store import ConversationStore
    from pgmemory.store.items import ItemStore
    from pgmemory.transfer.graph_threads import copy_from_langgraph, copy_to_langgraph

_MODULES = {
    "BufferMemory": "memory.buffer",
    "ConfigurationError": "errors",
    "ConversationHeldError": "errors",
    "ConversationRecord": "models",
    "ConversationStore": "store",
    "EmbeddingError": "errors",
    "EncryptionError": "errors",
    "Erased": "models",
    "ExplainedMessage": "memory.explanation",
    "Explanation": "memory.explanation",
    "Item": "models",
    "ItemStore": "store.items",
    "Keyring": "encryption",
    "LocalServerError": "embedded",
    "LogState": "models",
    "MessageNotStorableError": "errors",
    "Operation": "models",
    "PgMemoryError": "errors",
    "PoolClosedError": "pool",
    "PoolStats": "models",
    "PoolTimeoutError": "pool",
    "PostgresChatMemory": "memory.base",
    "PostgresChatMessageHistory": "history",
    "PostgresEntityStore": "entities",
    "Pruned": "models",
    "RecallMemory": "memory.recall",
    "RelevantTurnMemory": "memory.relevant_turn",
    "SchemaError": "errors",
    "StoreError": "pool",
    "StoreUnavailableError": "pool",
    "StoredMessage": "models",
    "SummaryError": "errors",
    "SummaryMemory": "memory.summary",
    "TokenWindowMemory": "memory.token_window",
    "UnsavedTurn": "errors",
    "as_json": "formats",
    "as_text": "formats",
    "as_xml": "formats",
    "copy_from_langgraph": "transfer.graph_threads",
    "copy_to_langgraph": "transfer.graph_threads",
    "redact_personal_data": "redaction",
}

__all__ = [
    "BufferMemory",
    "ConfigurationError",
    "ConversationHeldError",
    "ConversationRecord",
    "ConversationStore",
    "EmbeddingError",
    "EncryptionError",
    "Erased",
    "ExplainedMessage",
    "Explanation",
    "Item",
    "ItemStore",
    "Keyring",
    "LocalServerError",
    "LogState",
    "MessageNotStorableError",
    "Operation",
    "PgMemoryError",
    "PoolClosedError",
    "PoolStats",
    "PoolTimeoutError",
    "PostgresChatMemory",
    "PostgresChatMessageHistory",
    "PostgresEntityStore",
    "Pruned",
    "RecallMemory",
    "RelevantTurnMemory",
    "SchemaError",
    "StoreError",
    "StoreUnavailableError",
    "StoredMessage",
    "SummaryError",
    "SummaryMemory",
    "TokenWindowMemory",
    "UnsavedTurn",
    "__version__",
    "as_json",
    "as_text",
    "as_xml",
    "copy_from_langgraph",
    "copy_to_langgraph",
    "redact_personal_data",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'pgmemory' has no attribute {name!r}")
    return getattr(import_module(f"pgmemory.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
