"""LangChain's legacy chains and agents, from whichever line is installed."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    # langchain_classic.agents imports langchain_community, which announces its end.
    warnings.simplefilter("ignore")
    try:
        from langchain_classic.agents import (
            AgentExecutor,
            AgentType,
            create_json_chat_agent,
            create_openai_functions_agent,
            create_react_agent,
            create_structured_chat_agent,
            create_tool_calling_agent,
            create_xml_agent,
            initialize_agent,
        )
        from langchain_classic.chains import (
            ConversationalRetrievalChain,
            ConversationChain,
            LLMChain,
            SequentialChain,
        )
        from langchain_classic.memory import (
            CombinedMemory,
            ConversationEntityMemory,
            ReadOnlySharedMemory,
            SQLiteEntityStore,
        )
    except ModuleNotFoundError:
        from langchain.agents import (
            AgentExecutor,
            AgentType,
            create_json_chat_agent,
            create_openai_functions_agent,
            create_react_agent,
            create_structured_chat_agent,
            create_tool_calling_agent,
            create_xml_agent,
            initialize_agent,
        )
        from langchain.chains import (
            ConversationalRetrievalChain,
            ConversationChain,
            LLMChain,
            SequentialChain,
        )
        from langchain.memory import CombinedMemory, ConversationEntityMemory, ReadOnlySharedMemory, SQLiteEntityStore

__all__ = [
    "AgentExecutor",
    "AgentType",
    "CombinedMemory",
    "ConversationChain",
    "ConversationEntityMemory",
    "ConversationalRetrievalChain",
    "LLMChain",
    "ReadOnlySharedMemory",
    "SQLiteEntityStore",
    "SequentialChain",
    "create_json_chat_agent",
    "create_openai_functions_agent",
    "create_react_agent",
    "create_structured_chat_agent",
    "create_tool_calling_agent",
    "create_xml_agent",
    "initialize_agent",
]
