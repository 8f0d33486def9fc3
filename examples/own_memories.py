"""A memory of one's own: redact and label what is stored, show what is on topic and fits beside the question.

One class, made of RelevantTurnMemory: `turn_messages` is overridden, the filter and the limit are functions. The
log holds no e-mail address, the model sees no small talk, and a long question gets a smaller window.

    python examples/own_memories.py
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from _common import ConversationChain, StandInModel, argument_parser, open_store, real_model, say, say_messages
from langchain_core.messages import BaseMessage, messages_from_dict, messages_to_dict

from pgmemory import PostgresChatMessageHistory, RelevantTurnMemory

EMAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
SAID = [
    "My kettle leaks. Write to ada@example.org about the kettle.",
    "Lovely weather today, isn't it?",
    "The order of the kettle is 7001.",
    "Where shall you write about the kettle?",
]
LONG_QUESTION = "What do you know about the kettle? " + "It stands in the kitchen of the office. " * 20


class SupportMemory(RelevantTurnMemory):
    """Store turns without e-mail addresses and with the human's intent."""

    def turn_messages(self, inputs: dict[str, Any], outputs: dict[str, Any]) -> list[BaseMessage]:
        messages = super().turn_messages(inputs, outputs)
        human, *others = messages_from_dict(redacted(messages_to_dict(messages)))
        # Stored with the message, so that the classifier is asked once a turn.
        human.additional_kwargs["intent"] = intent_of(str(human.content))
        return [human, *others]


def redacted(value: Any) -> Any:
    """Return a JSON value without e-mail addresses, wherever in it they stand."""
    if isinstance(value, str):
        return EMAIL.sub("[e-mail]", value)
    if isinstance(value, list):
        return [redacted(item) for item in value]
    if isinstance(value, dict):
        return {key: redacted(item) for key, item in value.items()}
    return value


def intent_of(text: str) -> str:
    """Tell what the human wants. An application may ask a model here."""
    return "small talk" if re.search(r"weather|weekend|hello", text, re.IGNORECASE) else "support"


def is_support(messages: Sequence[BaseMessage]) -> bool:
    """Tell whether a stored turn is to be shown."""
    return messages[0].additional_kwargs.get("intent") == "support"


def room(inputs: dict[str, Any]) -> int:
    """Return the tokens that a question leaves for the past, at about four characters a token."""
    return max(50, 200 - len(str(inputs.get("input", ""))) // 4)


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    llm = real_model() or StandInModel()
    with open_store(arguments.dsn, arguments.schema) as store:
        history = PostgresChatMessageHistory("own-memory", store, user_id="ada")
        history.clear()  # so that every run of this example begins with an empty conversation
        memory = SupportMemory(chat_memory=history, is_relevant=is_support, keep_irrelevant=True, max_token_limit=room)
        chain = ConversationChain(llm=llm, memory=memory)
        for text in SAID:
            say(f"You: {text}")
            say(f"Bot: {chain.invoke({'input': text})['response']}")

        say("\nIn the log", "bold")
        say_messages(history.messages)
        for name, question in (("short", "What do you know about the kettle?"), ("long", LONG_QUESTION)):
            say(f"Shown to the model with a {name} question, within {room({'input': question})} tokens", "bold")
            say_messages(memory.select_messages({"input": question}))


if __name__ == "__main__":
    main()
