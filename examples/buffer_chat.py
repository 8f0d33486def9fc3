"""The last turns of a conversation: BufferMemory in a ConversationChain.

The memory lives in PostgreSQL: a second chain, made anew as another worker would make it, goes on with the
conversation. With k=2 the model sees the last two turns; the log keeps them all.

    python examples/buffer_chat.py
"""

from __future__ import annotations

from _common import ConversationChain, StandInModel, argument_parser, open_store, real_model, say, say_messages

from pgmemory import BufferMemory, ConversationStore


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    llm = real_model() or StandInModel()
    with open_store(arguments.dsn, arguments.schema) as store:
        memory = make_memory(store)
        memory.clear()  # so that every run of this example begins with an empty conversation
        chain = ConversationChain(llm=llm, memory=memory)
        talk(chain, "My name is Ada and my order is 7001.", "My address is 12 Lime Street.", "I pay by card.")

        say("\nAnother worker, with a memory of its own over the same conversation", "bold")
        memory = make_memory(store)
        chain = ConversationChain(llm=llm, memory=memory)
        talk(chain, "What is my address?", "Which order is it?")

        say(f"\nThe log keeps {len(memory.chat_memory.messages)} messages; the model sees the last two turns:", "bold")
        say_messages(memory.buffer_as_messages)


def make_memory(store: ConversationStore) -> BufferMemory:
    """Return the conversation's memory. This costs microseconds and no connection: make one per request."""
    return BufferMemory(session_id="buffer-chat", user_id="ada", store=store, k=2)


def talk(chain: ConversationChain, *texts: str) -> None:
    """Say something to the chain and print what it answers."""
    for text in texts:
        say(f"You: {text}")
        say(f"Bot: {chain.invoke({'input': text})['response']}")


if __name__ == "__main__":
    main()
