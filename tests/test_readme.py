"""The README's examples, run as they stand but for where the database is, which line is installed and the model."""

from __future__ import annotations

import re
from typing import Any

from chains import ConversationChain
from conftest import PROJECT
from fakes import FakeChat
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.tools import tool
from psycopg2.extensions import connection as Connection

import pgmemory

README = (PROJECT / "README.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@tool
def find_order(name: str) -> str:
    """Find an order."""
    return "on its way"


def answer(messages: list[BaseMessage]) -> AIMessage:
    return AIMessage("Invoice 1042." if "1042" in str(messages) else "I see.")


def test_the_python_examples_run_and_remember(server_dsn: str, schema_name: str, admin: Connection) -> None:
    llm = FakeChat(answer=answer)
    names: dict[str, Any] = {"llm": llm, "tools": [find_order]}
    line = ConversationChain.__module__.partition(".")[0]
    examples = blocks("python")
    assert len(examples) == 3
    for example in examples:
        example = example.replace('"postgresql://app@db/support"', f'"{server_dsn}", schema="{schema_name}"')
        exec(example.replace("langchain_classic", line), names)
    assert "Human: Invoice 1042 has the wrong address." in llm.prompts[1]
    store = names["store"]
    roles_and_contents = [(m.role, m.content) for m in store.list_messages("ticket-42", user_id="u7")]
    assert roles_and_contents == [
        ("human", "Invoice 1042 has the wrong address."),
        ("ai", "Invoice 1042."),
        ("human", "Which invoice was it?"),
        ("ai", "Invoice 1042."),
        ("human", "Where is my order?"),
        ("ai", "Invoice 1042."),
        ("human", "Hi!"),
        ("ai", "Invoice 1042."),
    ]
    (query,) = blocks("sql")
    with admin.cursor() as cursor:
        cursor.execute(query.replace("pgmemory.", f"{schema_name}."))
        assert [row[1:3] for row in cursor.fetchall()] == roles_and_contents
    store.close()


def test_the_examples_are_as_short_as_promised() -> None:
    for example in blocks("python"):
        assert len(example.splitlines()) <= 18


def test_names_and_commands_in_the_readme_exist() -> None:
    for name in set(re.findall(r"`(\w+Memory|as_\w+|PostgresChatMessageHistory|ConversationStore)\b", README)):
        if name == "ConversationStore" or not name.startswith(("Conversation", "Combined", "ReadOnly")):
            assert name in pgmemory.__all__
    targets = (PROJECT / "Makefile").read_text("utf-8")
    for target in re.findall(r"^\$ make (\S+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", targets, re.MULTILINE)
