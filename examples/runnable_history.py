"""The log itself, without a view: PostgresChatMessageHistory in a RunnableWithMessageHistory.

First with LangChain's usual session_id, then with names of one's own, a user and a conversation: one user's
conversation is out of another's reach, even under the same name.

    python examples/runnable_history.py
"""

from __future__ import annotations

from typing import Any

from _common import StandInModel, argument_parser, open_store, real_model, say
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.runnables import ConfigurableFieldSpec
from langchain_core.runnables.history import RunnableWithMessageHistory

from pgmemory import PostgresChatMessageHistory

PROMPT = ChatPromptTemplate.from_messages([MessagesPlaceholder("history"), ("human", "{question}")])
KEYS: Any = {"input_messages_key": "question", "history_messages_key": "history"}
FIELDS = [
    ConfigurableFieldSpec(id="user_id", annotation=str, name="User", description="Who asks"),
    ConfigurableFieldSpec(id="conversation_id", annotation=str, name="Conversation", description="The user's own name"),
]


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    chain = PROMPT | (real_model() or StandInModel())
    with open_store(arguments.dsn, arguments.schema) as store:

        def of_session(session_id: str) -> PostgresChatMessageHistory:
            return PostgresChatMessageHistory(session_id, store, max_messages=200)

        def of_user(user_id: str, conversation_id: str) -> PostgresChatMessageHistory:
            return PostgresChatMessageHistory(conversation_id, store, user_id=user_id)

        # So that every run of this example begins with empty conversations.
        for history in of_session("kettle"), of_user("ada", "kettle"), of_user("grace", "kettle"):
            history.clear()

        say("\nBy session_id", "bold")
        chat = RunnableWithMessageHistory(chain, of_session, **KEYS)
        ask(chat, "My kettle is blue.", session_id="kettle")
        ask(chat, "Which colour is my kettle?", session_id="kettle")

        say("\nBy user_id and conversation_id", "bold")
        chat = RunnableWithMessageHistory(chain, of_user, history_factory_config=FIELDS, **KEYS)
        ask(chat, "My kettle is red.", user_id="ada", conversation_id="kettle")
        ask(chat, "Which colour is my kettle?", user_id="ada", conversation_id="kettle")
        ask(chat, "Which colour is my kettle?", user_id="grace", conversation_id="kettle")


def ask(chat: RunnableWithMessageHistory, question: str, **names: str) -> None:
    """Ask in the conversation of these names and print question and answer."""
    say(f"{names.get('user_id', 'You')}: {question}")
    say(f"Bot: {chat.invoke({'question': question}, {'configurable': names}).content}")


if __name__ == "__main__":
    main()
