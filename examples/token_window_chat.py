"""As much of a conversation as fits a token limit: TokenWindowMemory in a ConversationChain.

The limit holds for whatever is loaded, turns are never cut in two, and nothing is deleted: what falls out of the
window is still in the log, here for a memory with a larger limit.

    python examples/token_window_chat.py
"""

from __future__ import annotations

from _common import ConversationChain, StandInModel, argument_parser, open_store, real_model, say, say_messages

from pgmemory import PostgresChatMessageHistory, TokenWindowMemory

SAID = [
    "I ordered a blue kettle for the office kitchen.",
    "It came with a cracked lid, and the box was open.",
    "The number of the order is 7001.",
    "What do you know about the order?",
    "What do you know about the kettle?",
]


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    llm = real_model() or StandInModel()
    with open_store(arguments.dsn, arguments.schema) as store:
        history = PostgresChatMessageHistory("token-window-chat", store)
        history.clear()  # so that every run of this example begins with an empty conversation
        memory = TokenWindowMemory(chat_memory=history, max_token_limit=70)
        chain = ConversationChain(llm=llm, memory=memory)
        for text in SAID:
            say(f"You: {text}")
            say(f"Bot: {chain.invoke({'input': text})['response']}")
            say(f"     the window: {len(memory.buffer_as_messages) // 2} of {len(history.messages) // 2} turns", "dim")

        window = memory.buffer_as_messages
        logged = history.messages
        say("\nFell out of the window of 70 tokens", "bold")
        say_messages(logged[: len(logged) - len(window)])
        say("In the window", "bold")
        say_messages(window)
        larger = TokenWindowMemory(chat_memory=history, max_token_limit=2000)
        shown = len(larger.buffer_as_messages)
        say(f"\nThe log keeps {len(logged)} messages; a memory with a limit of 2000 tokens shows {shown}.")


if __name__ == "__main__":
    main()
