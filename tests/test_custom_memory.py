"""The recipes of docs/custom-memory.md, run as they stand but for where the databases are: each in ConversationChain,
synchronously and asynchronously, as text and as messages, from the same few lines."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from chains import ConversationChain
from conftest import PROJECT
from fakes import FakeChat
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate
from psycopg2.extensions import connection as Connection
from psycopg2.extensions import make_dsn

from pgmemory import BufferMemory, as_text

DOCUMENT = (PROJECT / "docs" / "custom-memory.md").read_text("utf-8")
RECIPES = {
    "Filter by intent",
    "Show what suits the question",
    "Several prompt variables",
    "State and settings",
    "A window that depends on the question",
    "Facts from another table",
    "XML, JSON and a form of one's own",
    "Redact before storing",
}

Recipes = dict[str, SimpleNamespace]
Talk = Callable[..., list[dict[str, str]]]


@pytest.fixture
def recipes(
    server_dsn: str, schema_name: str, admin: Connection, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Recipes]:
    """The document's code, run from top to bottom: for each heading the names that there are after it."""
    module = ModuleType("custom_memory_recipes")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # where pydantic looks for a class's annotations
    shop = make_dsn(server_dsn, options=f"-c search_path={schema_name}")
    found = {}
    for heading, section in re.findall(r"^#+ (.*?)\n(.*?)(?=^## |\Z)", DOCUMENT, re.DOTALL | re.MULTILINE):
        for code in re.findall(r"```python\n(.*?)```", section, re.DOTALL):
            code = code.replace('"postgresql://app@db/support"', f"{server_dsn!r}, schema={schema_name!r}")
            exec(code.replace('"postgresql://app@db/shop"', repr(shop)), vars(module))
            found[heading] = SimpleNamespace(**vars(module))
    with admin.cursor() as cursor:
        cursor.execute(f"create table {schema_name}.customers (id text primary key, name text, plan text)")
        cursor.execute(f"insert into {schema_name}.customers values ('u7', 'Ada', 'gold')")
    yield found
    module.store.close()


@pytest.fixture(params=["text", "messages"])
def form(request: pytest.FixtureRequest) -> str:
    """How the memory fills the prompt."""
    return str(request.param)


@pytest.fixture(params=["sync", "async"])
def talk(request: pytest.FixtureRequest, form: str) -> Talk:
    """Say something to a ConversationChain with a memory; return the memory's variables of each call, as text."""

    def talk(memory: Any, *texts: str, plain: tuple[str, ...] = ()) -> list[dict[str, str]]:
        memory = memory.model_copy(update={"return_messages": form == "messages"})
        windows = [name for name in memory.memory_variables if name not in plain]
        text = PromptTemplate.from_template("".join(f"{{{name}}}\n" for name in [*windows, *plain, "input"]))
        messages = ChatPromptTemplate.from_messages(
            [*map(MessagesPlaceholder, windows), *(("human", f"{{{name}}}") for name in [*plain, "input"])]
        )
        llm = FakeChat(answer=lambda call: "re: " + str(call[-1].content).splitlines()[-1])
        chain = ConversationChain(llm=llm, memory=memory, prompt=messages if form == "messages" else text)
        calls = []
        for said in texts:
            call = (
                asyncio.run(chain.ainvoke({"input": said}))
                if request.param == "async"
                else chain.invoke({"input": said})
            )
            assert call["response"] == f"re: {said}"
            assert all(isinstance(call[name], list) == (form == "messages") for name in windows)
            calls.append({name: as_shown(call[name]) for name in memory.memory_variables})
        return calls

    return talk


def as_shown(value: str | list[BaseMessage]) -> str:
    return value if isinstance(value, str) else as_text(value)


def contents(memory: Any) -> list[str]:
    """Return what the log holds, whatever the memory shows."""
    return [str(message.content) for message in memory.chat_memory.messages]


def turn(said: str) -> str:
    return f"Human: {said}\nAI: re: {said}"


def test_every_recipe_is_tested_here(recipes: Recipes) -> None:
    assert recipes.keys() == RECIPES | {"A memory of one's own"}


def test_a_turn_is_classified_once_when_it_is_stored(
    recipes: Recipes, talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipes["Filter by intent"]
    asked = []
    monkeypatch.setattr(
        sys.modules["custom_memory_recipes"],
        "intent_of",
        lambda text: asked.append(text) or recipe.intent_of(text),
    )

    calls = talk(recipe.memory, "My invoice is wrong", "Nice weather", "A refund, please", "Thanks")

    assert calls[-1] == {"history": turn("My invoice is wrong") + "\n" + turn("A refund, please")}
    assert asked == ["My invoice is wrong", "Nice weather", "A refund, please", "Thanks"]
    assert contents(recipe.memory)[2] == "Nice weather"


def test_turns_of_the_mood_of_the_question_are_shown(recipes: Recipes, talk: Talk) -> None:
    memory = recipes["Show what suits the question"].memory

    calls = talk(memory, "It is broken", "Which colours are there?", "I am angry", "Thank you")

    assert [call["history"] for call in calls] == [
        "", "", turn("It is broken"), turn("Which colours are there?"),
    ]  # fmt: skip
    assert len(memory.buffer_as_messages) == 8


def test_a_turn_that_is_filtered_stays_whole(recipes: Recipes) -> None:
    memory = recipes["Show what suits the question"].memory
    call = {"name": "find_order", "args": {}, "id": "1", "type": "tool_call"}
    said = [
        HumanMessage("Where is it?"), AIMessage("", tool_calls=[call]), ToolMessage("broken", tool_call_id="1"),
        AIMessage("Here."), HumanMessage("It is broken"), AIMessage("I see."),
    ]  # fmt: skip
    memory.chat_memory.add_messages(said)
    assert memory.select_messages({"input": "and now?"}) == said[:4]


def test_one_memory_fills_several_prompt_variables_and_stores_a_turn_once(recipes: Recipes, talk: Talk) -> None:
    memory = recipes["Several prompt variables"].memory

    calls = talk(memory, "Invoice 1 is wrong", "Hello", "Hello again", "Well?", plain=("customer",))

    assert calls[-1] == {
        "history": turn("Hello") + "\n" + turn("Hello again"),
        "invoices": turn("Invoice 1 is wrong"),
        "customer": "Ada",
    }
    assert contents(memory)[::2] == ["Invoice 1 is wrong", "Hello", "Hello again", "Well?"]
    assert len(contents(memory)) == 8


def test_state_of_a_memorys_own_comes_from_its_fields(recipes: Recipes, talk: Talk) -> None:
    recipe = recipes["State and settings"]

    calls = talk(recipe.memory, "How is the WEATHER?", "My lid is cracked", "Well?")

    assert [call["history"] for call in calls] == ["", "", turn("My lid is cracked")]
    assert "_pattern" not in recipe.memory.model_dump()
    other = recipe.WithoutTopicsMemory(session_id="s", store=recipe.store, topics=["lid"])
    assert other.turn_messages({"input": "the lid"}, {"response": "."}) == []
    assert (other._skipped, recipe.memory._skipped) == (1, 0)  # the chain had a copy


def test_an_attribute_that_the_class_does_not_declare_is_refused(recipes: Recipes) -> None:
    class After(BufferMemory):
        def __init__(self, **fields: Any) -> None:
            super().__init__(**fields)
            self.pattern = "x"

    class Before(BufferMemory):
        def __init__(self, **fields: Any) -> None:
            self.pattern = "x"
            super().__init__(**fields)

    store = recipes["State and settings"].store
    with pytest.raises(ValueError, match="Object has no attribute 'pattern'"):
        After(session_id="s", store=store)
    with pytest.raises((AttributeError, ValueError)):
        Before(session_id="s", store=store)


def test_for_session_shares_what_private_attributes_refer_to(recipes: Recipes) -> None:
    memory = recipes["State and settings"].memory
    assert memory.for_session("another")._pattern is memory._pattern


def test_a_long_question_gets_a_smaller_window(recipes: Recipes, talk: Talk) -> None:
    memory = recipes["A window that depends on the question"].memory
    memory.chat_memory.add_messages(
        [message for n in range(12) for message in (HumanMessage(f"{n} " + "word " * 100), AIMessage("I see."))]
    )

    short, long = talk(memory, "Well?", "Well? " * 1500)

    assert short["history"].count("Human: ") == 12
    assert 0 < long["history"].count("Human: ") < 8
    assert "Human: Well?\nAI: re: Well?" in long["history"]


def test_another_number_of_turns_is_another_copy(recipes: Recipes) -> None:
    store = recipes["A window that depends on the question"].store
    memory = BufferMemory(session_id="s", store=store, k=1)
    memory.chat_memory.add_messages([HumanMessage("1"), AIMessage("1"), HumanMessage("2"), AIMessage("2")])
    assert len(memory.model_copy(update={"k": 3}).select_messages({})) == 4
    assert len(memory.select_messages({})) == 2


def test_a_fact_from_another_table_is_shown_and_not_stored(recipes: Recipes, talk: Talk) -> None:
    memory = recipes["Facts from another table"].memory

    calls = talk(memory, "Hello", "What may I do?")

    fact = "System: The customer is Ada, plan gold."
    assert [call["history"] for call in calls] == [fact, f"{fact}\n{turn('Hello')}"]
    assert contents(memory) == ["Hello", "re: Hello", "What may I do?", "re: What may I do?"]
    assert "connect" not in memory.model_dump() and "connect" not in repr(memory)


def test_a_query_of_ones_own_does_not_run_in_the_event_loops_thread(recipes: Recipes) -> None:
    memory = recipes["Facts from another table"].memory
    threads = []
    connect = memory.connect
    memory.connect = lambda: threads.append(threading.current_thread()) or connect()

    loaded = asyncio.run(memory.aload_memory_variables({"input": "Hello"}))

    assert loaded["history"] == "System: The customer is Ada, plan gold."
    assert threads and threading.current_thread() not in threads


def test_text_takes_the_form_that_the_formatter_gives_it(recipes: Recipes, talk: Talk, form: str) -> None:
    recipe = recipes["XML, JSON and a form of one's own"]

    calls = talk(recipe.memory, "1 < 2", "Well?")

    expected = ["", turn("1 < 2")]
    if form == "text":
        expected[1] = f"<conversation>\n{expected[1]}\n</conversation>"
    assert [call["history"] for call in calls] == expected
    assert recipe.xml.buffer.splitlines()[0] == '<message role="user">1 &lt; 2</message>'
    assert json.loads(recipe.json.buffer)[0] == {"role": "Human", "content": "1 < 2"}


def test_the_log_holds_what_is_left_after_redaction(recipes: Recipes, talk: Talk) -> None:
    memory = recipes["Redact before storing"].memory

    calls = talk(memory, "I am ada@example.org, card 4111 1111 1111 1111", "Well?")

    assert calls[-1] == {"history": turn("I am [redacted], card [redacted]")}
    assert contents(memory) == [
        "I am [redacted], card [redacted]", "re: I am [redacted], card [redacted]", "Well?", "re: Well?",
    ]  # fmt: skip


def test_redaction_reaches_blocks_and_tool_calls_and_nothing_else(recipes: Recipes) -> None:
    memory = recipes["Redact before storing"].memory
    call = {"name": "mail", "args": {"to": ["ada@example.org"]}, "id": "call_4111111111111111", "type": "tool_call"}
    said = HumanMessage([{"type": "text", "text": "to ada@example.org"}], id="1234-5678", name="ada")
    turn = [AIMessage("", tool_calls=[call]), ToolMessage("sent to ada@example.org", tool_call_id=call["id"])]

    memory.save_context({"input": said}, {"output": [*turn, AIMessage("Sent.")]})

    human, calling, result, answer = memory.chat_memory.messages
    assert human == HumanMessage([{"type": "text", "text": "to [redacted]"}], id="1234-5678", name="ada")
    assert calling.tool_calls == [{**call, "args": {"to": ["[redacted]"]}}]
    assert (result.content, result.tool_call_id) == ("sent to [redacted]", call["id"])
    assert answer == AIMessage("Sent.")
    assert said.content == [{"type": "text", "text": "to ada@example.org"}]  # the caller's message is as it was
