"""The one place that knows both lines of LangChain: where each keeps what memories are made of.

The lines cannot be installed together, so the first that can be imported is the one that is there. A subclass is
silent in both; a deprecated class must never be instantiated.
"""

from __future__ import annotations

try:
    try:
        from langchain_classic.memory.chat_memory import BaseChatMemory
        from langchain_classic.memory.entity import BaseEntityStore
        from langchain_classic.memory.prompt import SUMMARY_PROMPT
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "langchain_classic":
            raise
        from langchain.memory.chat_memory import BaseChatMemory  # type: ignore[no-redef]
        from langchain.memory.entity import BaseEntityStore  # type: ignore[no-redef]
        from langchain.memory.prompt import SUMMARY_PROMPT  # type: ignore[no-redef]
except ImportError as error:
    raise ImportError(
        f"pgmemory's memories need one line of LangChain's legacy chains, and none works here ({error}). Install one:\n"
        '    pip install "langchain-pgmemory[langchain1]"    # langchain-classic, beside LangChain 1.x\n'
        '    pip install "langchain-pgmemory[langchain03]"   # langchain 0.3'
    ) from error

__all__ = ["SUMMARY_PROMPT", "BaseChatMemory", "BaseEntityStore"]
