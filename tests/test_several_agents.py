"""Several agents in one conversation: each keeps a log of its own beside the shared one."""

from __future__ import annotations

import pytest

from pgmemory import BufferMemory, ConfigurationError, ConversationStore, PostgresChatMessageHistory, TokenWindowMemory


def save(memory: BufferMemory | TokenWindowMemory, name: str) -> None:
    memory.save_context({"input": f"q {name}"}, {"output": f"a {name}"})


def sessions(store: ConversationStore, **which: str) -> list[tuple[str, str]]:
    return sorted((found.session_id, found.user_id) for found in store.list_conversations(**which))


def test_each_agent_has_a_log_of_its_own_that_is_listed_and_cleared_with_the_shared_one(
    store: ConversationStore,
) -> None:
    shared = BufferMemory(session_id="ticket-42", user_id="u7", store=store)
    planner, critic = shared.for_agent("planner"), shared.for_agent("critic")
    for memory, name in ((shared, "shared"), (planner, "plan"), (critic, "criticism")):
        save(memory, name)
    for memory, name in ((shared, "shared"), (planner, "plan"), (critic, "criticism")):
        assert memory.load_memory_variables({}) == {"history": f"Human: q {name}\nAI: a {name}"}
    # Neighbours in name only.
    others = [("ticket-421", "u7"), ("ticket-42#x", "u7"), ("ticket-42", "u8"), ("ticket-42#agent:x", "u8")]
    for session_id, user_id in others:
        save(shared.for_session(session_id, user_id=user_id), "other")

    family = [("ticket-42", "u7"), ("ticket-42#agent:critic", "u7"), ("ticket-42#agent:planner", "u7")]
    assert sessions(store, user_id="u7", session_id="ticket-42") == family
    assert len(sessions(store)) == 7

    shared.chat_memory.clear_with_agents()
    counts = {(found.session_id, found.user_id): found.message_count for found in store.list_conversations()}
    assert {name for name, count in counts.items() if count == 0} == set(family)
    save(planner, "again")
    assert planner.chat_memory.messages[0].content == "q again"


def test_clearing_the_shared_log_alone_leaves_the_agents(store: ConversationStore) -> None:
    shared = BufferMemory(session_id="s", store=store)
    save(shared, "shared")
    save(shared.for_agent("planner"), "plan")
    shared.clear()
    assert shared.chat_memory.messages == []
    assert len(shared.for_agent("planner").chat_memory.messages) == 2


def test_an_agents_memory_is_the_same_view(store: ConversationStore) -> None:
    shared = TokenWindowMemory(session_id="s", user_id="u", store=store, max_token_limit=77, max_messages=10)
    own = shared.for_agent("planner")
    assert (own.max_token_limit, own.max_messages, own.user_id) == (77, 10, "u")
    assert own.session_id == "s#agent:planner"


@pytest.mark.parametrize("name", ["", None, "a\x00b"])
def test_an_agents_name_that_cannot_be_one_is_refused(store: ConversationStore, name: str) -> None:
    with pytest.raises(ConfigurationError, match="agent's name"):
        PostgresChatMessageHistory("s", store).for_agent(name)


def test_percent_signs_and_underscores_in_a_session_id_match_only_themselves(store: ConversationStore) -> None:
    odd = BufferMemory(session_id="a%_b", store=store)
    save(odd.for_agent("x"), "odd")
    save(BufferMemory(session_id="aXXb#agent:x", store=store), "even")
    assert sessions(store, session_id="a%_b") == [("a%_b#agent:x", "")]
