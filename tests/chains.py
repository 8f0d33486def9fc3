"""LangChain's legacy chains and agents, from whichever line is installed."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    # langchain_classic.agents imports langchain_community, which announces its end.
    warnings.simplefilter("ignore")
    try:
        from langchain_classic.agents import AgentExecutor, create_tool_calling_agent
        from langchain_classic.chains import ConversationChain, LLMChain, SequentialChain
        from langchain_classic.memory import CombinedMemory, ReadOnlySharedMemory
    except ModuleNotFoundError:
        from langchain.agents import AgentExecutor, create_tool_calling_agent
        from langchain.chains import ConversationChain, LLMChain, SequentialChain
        from langchain.memory import CombinedMemory, ReadOnlySharedMemory

__all__ = [
    "AgentExecutor",
    "CombinedMemory",
    "ConversationChain",
    "LLMChain",
    "ReadOnlySharedMemory",
    "SequentialChain",
    "create_tool_calling_agent",
]
