"""docs/from-langchain-memory.md: its replacements behave as it says, and its commands move old tables in."""

from __future__ import annotations

import json
import re
import shlex
import sys
from typing import Any

import pytest
from chains import CombinedMemory, ConversationChain, ReadOnlySharedMemory
from conftest import PROJECT
from fakes import scripted
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage, message_to_dict
from langchain_core.prompts import PromptTemplate
from psycopg2.extensions import connection as Connection

import pgmemory
from pgmemory import ConversationStore, PostgresChatMessageHistory, SummaryMemory, TokenWindowMemory, cli

DOCUMENT = (PROJECT / "docs" / "from-langchain-memory.md").read_text("utf-8")
OPENING, IN_PYTHON, ANY_OTHER = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
COMMANDS = re.findall(r"^\$ pgmemory (import .*)$", DOCUMENT, re.MULTILINE)
REPLACEMENTS = re.findall(r"^\| `(\w+)\((.*)\)` \| `(\w+Memory\(.*\))` \|$", DOCUMENT, re.MULTILINE)

CALL = {"name": "find_order", "args": {"name": "Ada"}, "id": "call_1", "type": "tool_call"}
SAID: list[BaseMessage] = [
    SystemMessage("You help."),
    HumanMessage("Where is my order?", additional_kwargs={"channel": "chat"}),
    AIMessage("", tool_calls=[CALL]),
    ToolMessage("on its way", tool_call_id="call_1", artifact={"id": 7001}),
    AIMessage("On its way – ✓.", id="run-1"),
    HumanMessage([{"type": "text", "text": "Thank you!"}], name="ada"),
    AIMessage("You are welcome."),
]
GREETING: list[BaseMessage] = [HumanMessage("Hi"), AIMessage("Hello")]

# The line after


def after(name: str, arguments: str, history: PostgresChatMessageHistory, *answers: str) -> Any:
    """Make the memory that the document puts in the place of one of LangChain's."""
    (line,) = [line for theirs, given, line in REPLACEMENTS if (theirs, given) == (name, arguments)]
    names: dict[str, Any] = {**{name: getattr(pgmemory, name) for name in pgmemory.__all__}}
    return eval(line, names | {"history": history, "llm": scripted(*(answers or ("a summary",)))})


@pytest.mark.parametrize(("name", "arguments", "line"), REPLACEMENTS, ids=[line[0] for line in REPLACEMENTS])
def test_each_line_after_makes_a_memory_with_the_fields_and_defaults_of_the_one_before(
    store: ConversationStore, name: str, arguments: str, line: str
) -> None:
    memory = after(name, arguments, PostgresChatMessageHistory("s", store))
    defaults = {"ConversationBufferWindowMemory": {"k": 5}, "AgentTokenBufferMemory": {"max_token_limit": 12000}}
    expected = defaults.get(name, {})
    if match := re.fullmatch(r"k=(\d+)", arguments):
        expected = {"k": int(match[1])}
    assert {field: getattr(memory, field) for field in expected} == expected
    assert memory.return_messages == (name == "AgentTokenBufferMemory")
    memory.save_context({"input": "Hi"}, {"output": "Hello", "intermediate_steps": []})
    assert memory.chat_memory.messages == GREETING
    expected_window = GREETING if memory.return_messages else "Human: Hi\nAI: Hello"
    assert memory.load_memory_variables({}) == {"history": expected_window}


def test_every_stock_class_that_holds_a_conversation_is_named(store: ConversationStore) -> None:
    module = sys.modules[CombinedMemory.__module__.rpartition(".")[0]]
    names = {name for name in module.__all__ if name.endswith("Memory")}
    assert [name for name in sorted(names) if name not in DOCUMENT] == []


def test_a_summary_is_shown_with_the_newest_turn_where_the_stock_class_shows_it_alone(store: ConversationStore) -> None:
    history = PostgresChatMessageHistory("s", store)
    memory = after("ConversationSummaryMemory", "llm=llm", history, "They greet.")
    memory.save_context({"input": "Hi"}, {"output": "Hello"})
    memory.save_context({"input": "Bye"}, {"output": "Until then"})
    assert memory.buffer == "System: They greet.\nHuman: Bye\nAI: Until then"


def test_unknown_fields_and_a_missing_history_are_errors(store: ConversationStore) -> None:
    with pytest.raises(ValueError, match="moving_summary_buffer"):
        SummaryMemory(session_id="s", store=store, llm=scripted("x"), moving_summary_buffer="")
    with pytest.raises(ValueError, match="needs chat_memory"):
        pgmemory.BufferMemory()


def test_an_empty_window_is_empty_text_or_no_messages(store: ConversationStore) -> None:
    memory = TokenWindowMemory(session_id="s", store=store, max_token_limit=5)
    memory.save_context({"input": "a question that is larger than the limit"}, {"output": "and its answer"})
    assert memory.load_memory_variables({}) == {"history": ""}
    memory.return_messages = True
    assert memory.load_memory_variables({}) == {"history": []}


@pytest.mark.filterwarnings("ignore:The class `:DeprecationWarning", "ignore:Please see the migration guide")
def test_what_has_no_counterpart_runs_beside_ours_or_over_our_history(store: ConversationStore) -> None:
    stock = sys.modules[CombinedMemory.__module__.rpartition(".")[0]]
    history = PostgresChatMessageHistory("s", store)
    entities = stock.ConversationEntityMemory(llm=scripted("Ada"), chat_memory=history)
    entities.load_memory_variables({"input": "I am Ada"})
    entities.save_context({"input": "I am Ada"}, {"output": "Hello"})
    assert history.messages == [HumanMessage("I am Ada"), AIMessage("Hello")]

    log = pgmemory.BufferMemory(chat_memory=history, input_key="input")
    last = pgmemory.BufferMemory(chat_memory=history, memory_key="last", k=1)
    combined = CombinedMemory(
        memories=[log, ReadOnlySharedMemory(memory=last), stock.SimpleMemory(memories={"shop": "Kettles"})]
    )
    prompt = PromptTemplate.from_template("{shop}\n{last}\n{history}\n{input}")
    chain = ConversationChain(llm=scripted("Yes"), memory=combined, prompt=prompt)
    assert chain.invoke({"input": "Well?"})["shop"] == "Kettles"
    assert history.messages[2:] == [HumanMessage("Well?"), AIMessage("Yes")]


# Moving in

ADA = "7b0f3f0e-6e7c-4ad0-9a52-1d52b8a1c001"
OWN = """conversation_id uuid, message_index int, role text, content text,
         additional_kwargs jsonb generated always as (message->'data'->'additional_kwargs') stored, message jsonb"""


def make_table(admin: Connection, name: str, messages: list[BaseMessage]) -> None:
    """Make a table that fits every source."""
    with admin.cursor() as cursor:
        cursor.execute(f"create table {name} (id serial, session_id uuid, {OWN})")
        for index, message in enumerate(messages):
            row = (ADA, json.dumps(message_to_dict(message)), ADA, index, message.type, str(message.content))
            columns = "session_id, message, conversation_id, message_index, role, content"
            cursor.execute(f"insert into {name} ({columns}) values (%s, %s, %s, %s, %s, %s)", row)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_moves_its_table_in(
    store: ConversationStore, server_dsn: str, admin: Connection, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("DATABASE_URL", server_dsn)
    command = command.replace("postgresql://app@old/bot", server_dsn)
    name, table = re.search(r"import (\S+) --table (\S+)", command).groups()  # type: ignore[union-attr]
    plain = name == "conversation-messages"
    said = GREETING if plain else SAID
    make_table(admin, f"{store.schema}.old_{table}", said)
    arguments = shlex.split(command.replace(f"--table {table}", f"--table {store.schema}.old_{table}"))
    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            cli.main([*arguments, "--schema", store.schema])
        assert ended.value.code == 0
    assert PostgresChatMessageHistory(ADA, store).messages == said


def test_every_source_is_named() -> None:
    sources = set(re.findall(r"^\| `([\w-]+)(?: FILE)?` \|", DOCUMENT.partition("## Moving")[2], re.MULTILINE))
    assert sources == set(cli.main.commands["import"].commands)  # type: ignore[attr-defined]


def test_limits_and_summaries_hold_for_what_was_moved_in(
    store: ConversationStore, server_dsn: str, admin: Connection
) -> None:
    turns = [message for n in range(20) for message in (HumanMessage(f"question {n}"), AIMessage(f"answer {n}"))]
    make_table(admin, f"{store.schema}.message_store", turns)
    names: dict[str, Any] = {"store": store}
    here = IN_PYTHON.replace("postgresql://app@old/bot", server_dsn)
    exec(here.replace('"message_store"', f'"{store.schema}.message_store"'), names)
    assert (names["report"].messages, names["report"].findings) == (40, [])

    window = TokenWindowMemory(session_id=ADA, store=store, max_token_limit=50).buffer_as_messages
    assert window and window == turns[-len(window) :] and len(window) < 10
    memory = SummaryMemory(session_id=ADA, store=store, llm=scripted("They talk."), max_token_limit=100)
    assert memory.fold()
    assert memory.buffer.startswith("System: They talk.\nHuman: question ")


@pytest.mark.filterwarnings("ignore:The class `InMemoryChatMessageHistory` was deprecated")
def test_any_other_history_moves_in_by_its_messages(server_dsn: str, schema_name: str) -> None:
    names: dict[str, Any] = {}
    exec(OPENING.replace('"postgresql://app@db/support"', f"{server_dsn!r}, schema={schema_name!r}"), names)
    with names["store"]:
        exec(ANY_OTHER, names)
        exec(ANY_OTHER, names)
        assert names["history"].messages == [HumanMessage("My order is 7001.")]
