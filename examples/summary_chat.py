"""A long conversation in short: SummaryMemory in a ConversationChain.

When the conversation passes the limit, its oldest turns are folded into a summary by a model. The summary is kept in
PostgreSQL: a memory made later, here or in another process, begins with it and asks no model for it.

    python examples/summary_chat.py
"""

from __future__ import annotations

import re
from typing import Any

from _common import ConversationChain, StandInModel, argument_parser, open_store, real_model, say, say_messages
from langchain_core.language_models import SimpleChatModel
from langchain_core.messages import BaseMessage

from pgmemory import PostgresChatMessageHistory, SummaryMemory


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    real = real_model()
    with open_store(arguments.dsn, arguments.schema) as store:
        history = PostgresChatMessageHistory("summary-chat", store)
        history.clear()  # so that every run of this example begins with an empty conversation
        memory = SummaryMemory(chat_memory=history, llm=real or StandInSummariser(), max_token_limit=80)
        chain = ConversationChain(llm=real or StandInModel(), memory=memory)
        for text in ["I ordered a blue kettle.", "Its lid is cracked.", "The order is 7001.", "I live in Lime Street.",
                     "I would like a new lid.", "A grey one is fine, too."]:  # fmt: skip
            say(f"You: {text}")
            say(f"Bot: {chain.invoke({'input': text})['response']}")

        say(f"\nThe log keeps {len(history.messages)} messages. What the model sees of them:", "bold")
        say_messages(memory.buffer_as_messages)

        say("\nA memory made anew begins with the same summary", "bold")
        memory = SummaryMemory(chat_memory=history, llm=real or StandInSummariser(), max_token_limit=80)
        chain = ConversationChain(llm=real or StandInModel(), memory=memory)
        say("You: What did I say about the kettle?")
        say(f"Bot: {chain.invoke({'input': 'What did I say about the kettle?'})['response']}")


class StandInSummariser(SimpleChatModel):
    """Summarise without a model: the summary so far, and what the human said since."""

    @property
    def _llm_type(self) -> str:
        return "stand-in-summariser"

    def _call(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any) -> str:
        prompt = str(messages[-1].content).rpartition("Current summary:\n")[2]
        summary, _, new_lines = prompt.partition("\n\nNew lines of conversation:\n")
        return " ".join([summary or "The human said:", *re.findall(r"^Human: (.*)$", new_lines, re.MULTILINE)])


if __name__ == "__main__":
    main()
