"""docs/to-langgraph.md, run as it stands: its road, and what it puts in the place of each class."""

from __future__ import annotations

import asyncio
import re
import shlex
from contextlib import suppress
from typing import Any

import pytest
import test_langgraph
from conftest import PROJECT
from conversations import ai, dialogue, human
from fakes import FakeChat, scripted
from langchain_core.messages import AIMessage, BaseMessage, SystemMessage, trim_messages
from test_langgraph import config, create_agent, find_order, held, is_langchain_1, knows, plain, say, thread_of

import pgmemory
from pgmemory import (
    ConversationStore,
    PostgresChatMessageHistory,
    PostgresEntityStore,
    cli,
    copy_from_langgraph,
    copy_to_langgraph,
)

if is_langchain_1:
    from langchain.agents.middleware import SummarizationMiddleware
from langgraph.checkpoint.memory import InMemorySaver

GUIDE = (PROJECT / "docs" / "to-langgraph.md").read_text("utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
CLASSES = "\n".join(line for line in GUIDE.splitlines() if line.startswith("| `"))
IN_THE_GUIDE = '"postgresql://app@db/support"'
LEADING: list[BaseMessage] = [SystemMessage("You help.", id="p"), SystemMessage("Ada waits for order 7001.", id="s")]
NEW = ("human", "Here is a summary of the conversation to date:\n\nNew.")

threads_dsn = test_langgraph.threads_dsn
only_langchain_1 = pytest.mark.skipif(not is_langchain_1, reason="the guide's agents are LangChain 1.x's")


@only_langchain_1
def test_the_guide_is_walked_as_it_stands(server_dsn: str, schema_name: str, threads_dsn: str) -> None:
    llm = FakeChat(answer=knows)
    names: dict[str, Any] = {"llm": llm, "tools": [find_order]}
    here = f"ConversationStore({server_dsn!r}, schema={schema_name!r}"
    for block in PYTHON:
        exec(block.replace(f"ConversationStore({IN_THE_GUIDE}", here).replace(IN_THE_GUIDE, repr(threads_dsn)), names)
    assert names["state"]["messages"][-1].content == "7001"
    assert names["report"].messages == 2
    said = PostgresChatMessageHistory("ticket-42", names["store"], user_id="u7").messages
    assert plain(said)[-2:] == [("human", "Which order was it?"), ("ai", "7001")] and len(said) == 4
    names["store"].close()


@pytest.fixture
def guide(store: ConversationStore) -> Any:
    """What the guide defines class by class."""
    if not is_langchain_1:
        pytest.skip("the guide's middleware is LangChain 1.x's")
    names = {"llm": scripted(""), "tools": [], "store": store, "saver": InMemorySaver(), "create_agent": create_agent}
    first = next(place for place, block in enumerate(PYTHON) if "def leading" in block)
    for block in PYTHON[first:]:
        exec(block, names)
    return names


@pytest.mark.parametrize("greeting", [[], [ai("Welcome.")]], ids=["", "greeting"])
@pytest.mark.parametrize(
    ("middleware", "seen"),
    [
        ("last_turns", [f"question {n}" for n in range(45, 50)]),
        ("window", [f"question {n}" for n in range(50)][-5:]),
        ("relevant", ["an invoice"]),
    ],
)
def test_the_guides_middleware_shows_what_the_memory_showed_behind_what_leads_the_thread(
    guide: Any, middleware: str, seen: list[str], greeting: list[BaseMessage]
) -> None:
    llm = FakeChat(answer=knows)
    agent = create_agent(llm, [], middleware=[guide[middleware]], checkpointer=InMemorySaver())
    long = " at some length" * 100 if middleware == "window" else ""
    log = [*LEADING, *greeting, *([human("an invoice"), ai()] if middleware == "relevant" else [])]
    for n in range(50):
        log += [human(f"question {n}{long}"), ai()]
    agent.update_state(config("s"), {"messages": log}, as_node="model")
    agent.invoke({"messages": [human("now")]}, config("s"))
    assert plain(llm.calls[-1])[:2] == plain(LEADING)
    assert [message.type for message in llm.calls[-1][2:4]] == ["human", "ai"]
    asked = [str(message.content).removesuffix(long) for message in llm.calls[-1] if message.type == "human"]
    assert asked[-1] == "now" and len(held(agent.checkpointer, "s")) == len(log) + 2
    if middleware == "window":
        assert 1 < len(asked) < 10
        seen = seen[-len(asked) + 1 :]
    assert asked[:-1] == seen


def summarizing(kind: Any, saver: Any) -> tuple[Any, FakeChat]:
    """Return an agent whose middleware of this kind summarizes, and its model."""
    llm = FakeChat(answer=lambda messages: "New." if "<messages>" in str(messages[0].content) else "Well.")
    middleware = kind(llm, trigger=("messages", 10), keep=("messages", 2))
    return create_agent(llm, [], middleware=[middleware], checkpointer=saver), llm


def summarized(kind: Any, *, is_async: bool = False) -> tuple[list[tuple[str, Any]], str]:
    """Return what a thread with all that leads one holds after it was summarized, and what the model was asked."""
    agent, llm = summarizing(kind, InMemorySaver())
    agent.update_state(config("s"), {"messages": [*LEADING, *dialogue(6)]}, as_node="model")
    given = {"messages": [human("now")]}
    if is_async:
        asyncio.run(agent.ainvoke(given, config("s")))
    else:
        agent.invoke(given, config("s"))
    return plain(held(agent.checkpointer, "s")), llm.prompts[0]


@only_langchain_1
def test_a_summarizing_middleware_loses_what_leads_a_thread_as_the_guide_says() -> None:
    messages, asked = summarized(SummarizationMiddleware)
    assert messages == [NEW, ("ai", dialogue(6)[-1].content), ("human", "now"), ("ai", "Well.")]
    assert "You help." in asked and "order 7001" not in asked
    trimmed = trim_messages([*LEADING, human("now")], max_tokens=1000, token_counter=len, start_on="human",
                            include_system=True)  # fmt: skip
    assert plain(trimmed) == [*plain(LEADING)[:1], ("human", "now")]


@pytest.mark.parametrize("is_async", [False, True])
def test_the_guides_summarizing_middleware_keeps_what_leads_a_thread(guide: Any, is_async: bool) -> None:
    messages, asked = summarized(guide["KeepLeading"], is_async=is_async)
    assert messages == [*plain(LEADING), NEW, ("ai", dialogue(6)[-1].content), ("human", "now"), ("ai", "Well.")]
    assert "You help." not in asked and str(dialogue(1)[0].content) in asked


@only_langchain_1
def test_a_summary_that_a_middleware_made_is_copied_back_as_the_human_message_that_it_is(
    store: ConversationStore,
) -> None:
    saver = InMemorySaver()
    say(store, *dialogue(6))
    copy_to_langgraph(store, saver)
    agent, _ = summarizing(SummarizationMiddleware, saver)
    agent.invoke({"messages": [human("now")]}, config(thread_of(store)))
    assert copy_from_langgraph(store, saver).messages == 3
    messages = PostgresChatMessageHistory("s", store).messages
    assert plain(messages) == [*plain(dialogue(6)), NEW, ("human", "now"), ("ai", "Well.")]


def test_the_guides_agent_knows_what_an_entity_memory_has_learned_and_learns_more(
    guide: Any, store: ConversationStore
) -> None:
    known = PostgresEntityStore(store=store, user_id="u7")
    known.set("Ada", "Ada likes olives.")
    known.set("Bob", "Bob has a dog.")
    new = {"name": "Ada", "summary": "Ada likes olives and cheese."}
    call = AIMessage("", tool_calls=[{"name": "remember", "args": new, "id": "1"}])
    llm = scripted(call, "Noted.", "Olives and cheese.")
    agent = create_agent(
        llm, [guide["remember"]], middleware=[guide["last_turns"], guide["entities"]], store=guide["facts"],
        checkpointer=InMemorySaver(),
    )  # fmt: skip
    log = [*LEADING, *dialogue(10)]
    agent.update_state(config("s"), {"messages": log}, as_node="model")
    agent.invoke({"messages": [human("Ada likes cheese too.")]}, config("s"))
    shown = plain(llm.calls[0])
    assert shown[:3] == [*plain(LEADING), ("system", "Ada: Ada likes olives.")]
    assert shown[3:] == plain([*dialogue(10)[-10:], human("Ada likes cheese too.")])
    assert known.get("Ada") == "Ada likes olives and cheese." and known.get("Bob") == "Bob has a dog."
    agent.invoke({"messages": [human("What does Ada like?")]}, config("s"))
    assert plain(llm.calls[2])[2] == ("system", "Ada: Ada likes olives and cheese.")
    assert PostgresEntityStore(store=store, user_id="u8").get("Ada") is None
    assert store.erase_user("u7").items == 2


def test_the_guides_commands_are_right_usage() -> None:
    lines = [shlex.split(line) for line in re.findall(r"^\$ pgmemory (.*)$", GUIDE, re.MULTILINE)]
    assert len(lines) == 3
    for name, *arguments in lines:
        with suppress(SystemExit):
            cli.main.commands[name].make_context(name, arguments).close()


def test_the_guide_has_a_row_for_every_class() -> None:
    stock = ["ConversationEntityMemory", "CombinedMemory", "ReadOnlySharedMemory", "SimpleMemory"]
    ours = [name for name in pgmemory.__all__ if name.endswith(("Memory", "EntityStore", "ChatMessageHistory"))]
    names = {*stock, *ours} - {"PostgresChatMemory"}
    assert [name for name in sorted(names) if f"`{name}" not in CLASSES] == []
