"""An agent that calls tools and remembers: BufferMemory in an AgentExecutor.

The second question names no order. The agent knows which one is meant from its memory, though agent and memory are
made anew for every request, as a web application does.

    python examples/agent_with_memory.py
"""

from __future__ import annotations

import re
from typing import Any

from _common import argument_parser, legacy_agents, open_store, real_model, say, say_messages
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.tools import tool

from pgmemory import BufferMemory, PostgresChatMessageHistory

agents = legacy_agents()
PROMPT = ChatPromptTemplate.from_messages([
    ("system", "You answer questions about orders."),
    MessagesPlaceholder("chat_history"),
    ("human", "{input}"),
    MessagesPlaceholder("agent_scratchpad"),
])  # fmt: skip


@tool
def order_status(order_id: str) -> str:
    """Return the state of an order."""
    say(f"     the tool order_status({order_id}) is called", "dim")
    return f"Order {order_id} was sent on Monday and arrives on Thursday."


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    llm = real_model() or StandInToolModel()
    with open_store(arguments.dsn, arguments.schema) as store:
        history = PostgresChatMessageHistory("agent", store, user_id="ada")
        history.clear()  # so that every run of this example begins with an empty conversation
        for text in ["Where is my order 7001?", "And when does it arrive?", "Thank you!"]:
            memory = BufferMemory(chat_memory=history, memory_key="chat_history", return_messages=True, k=2)
            agent = agents.create_tool_calling_agent(llm, [order_status], PROMPT)
            executor = agents.AgentExecutor(agent=agent, tools=[order_status], memory=memory)
            say(f"You: {text}")
            say(f"Bot: {executor.invoke({'input': text})['output']}")
        say(f"\nThe log keeps {len(history.messages)} messages; the agent is shown the last two turns:", "bold")
        say_messages(memory.buffer_as_messages)


class StandInToolModel(BaseChatModel):
    """Call the tool for the last order number that the question or the memory mentions, and pass on its result."""

    @property
    def _llm_type(self) -> str:
        return "stand-in-with-tools"

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self  # it knows its one tool

    def _generate(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        last, orders = messages[-1], re.findall(r"\d{4}", " ".join(str(message.content) for message in messages))
        answer = AIMessage(str(last.content) if last.type == "tool" else "You are welcome.")
        if last.type == "human" and "?" in last.content:
            answer = AIMessage("Which order do you mean?")
            if orders:
                call = {"name": "order_status", "args": {"order_id": orders[-1]}, "id": "call_1"}
                answer = AIMessage("", tool_calls=[call])
        return ChatResult(generations=[ChatGeneration(message=answer)])


if __name__ == "__main__":
    main()
