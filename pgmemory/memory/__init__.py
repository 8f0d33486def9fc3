"""LangChain memories: each a view of a conversation's log that decides which of its turns the model sees next."""
