"""What pip does when pgmemory is installed beside LangChain: real installations, from the package registry."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import Distributions, VirtualEnvironment

pytestmark = pytest.mark.install

LANGCHAIN = ("langchain", "langchain-classic", "langchain-community", "langchain-core")
WORKING = {
    "langchain 0.3": ["langchain>=0.3,<1"],
    "langchain 0.3 with community": ["langchain>=0.3,<1", "langchain-community>=0.3,<0.4"],
    "langchain-classic": ["langchain-classic>=1,<2"],
}
UNUSABLE = {
    "neither": [],
    "langchain 1 without classic": ["langchain>=1,<2"],
    "langchain 0.3 forced beside core 1": ["--no-deps", "langchain>=0.3,<1", "langchain-text-splitters>=0.3,<1"],
}


def langchain_versions(environment: VirtualEnvironment) -> dict[str, str]:
    """Return the version of each LangChain package that pip lists."""
    listed = json.loads(environment.run("python", "-m", "pip", "list", "--format", "json"))
    return {package["name"]: package["version"] for package in listed if package["name"] in LANGCHAIN}


def assert_memory_works(environment: VirtualEnvironment, server_dsn: str, schema_name: str) -> None:
    """Save a turn in one process and load it in another."""
    code = """if True:
        import sys
        from pgmemory import BufferMemory, ConversationStore
        with ConversationStore(sys.argv[1], schema=sys.argv[2]) as store:
            store.setup()
            memory = BufferMemory(session_id="ticket-42", store=store)
            print(memory.load_memory_variables({})["history"])
            memory.save_context({"input": "What is 6 x 7?"}, {"output": "It is 42."})
    """
    environment.run("python", "-m", "pip", "check")
    environment.run("python", "-c", code, server_dsn, schema_name)
    loaded = environment.run("python", "-c", code, server_dsn, schema_name)
    assert loaded.splitlines()[-2:] == ["Human: What is 6 x 7?", "AI: It is 42."]


@pytest.mark.parametrize("requirements", WORKING.values(), ids=WORKING.keys())
def test_installing_beside_a_working_langchain_leaves_its_versions_alone(
    requirements: list[str],
    virtual_environment: VirtualEnvironment,
    distributions: Distributions,
    server_dsn: str,
    schema_name: str,
) -> None:
    virtual_environment.install(*requirements)
    before = langchain_versions(virtual_environment)
    assert len(before) > len(requirements)  # langchain-core came with them

    virtual_environment.install(distributions.wheel)

    assert langchain_versions(virtual_environment) == before
    assert_memory_works(virtual_environment, server_dsn, schema_name)


@pytest.mark.parametrize("requirements", WORKING.values(), ids=WORKING.keys())
def test_langchain_can_be_installed_afterwards(
    requirements: list[str],
    virtual_environment: VirtualEnvironment,
    distributions: Distributions,
    server_dsn: str,
    schema_name: str,
) -> None:
    virtual_environment.install(distributions.wheel)
    virtual_environment.install(*requirements)
    assert_memory_works(virtual_environment, server_dsn, schema_name)


@pytest.mark.parametrize("requirements", UNUSABLE.values(), ids=UNUSABLE.keys())
def test_without_a_usable_langchain_importing_a_memory_says_what_to_install(
    requirements: list[str], virtual_environment: VirtualEnvironment, distributions: Distributions
) -> None:
    virtual_environment.install(distributions.wheel)
    if requirements:
        virtual_environment.install(*requirements)

    virtual_environment.run("python", "-c", "from pgmemory import ConversationStore, PostgresChatMessageHistory")
    code = """if True:
        try:
            from pgmemory import BufferMemory
        except ImportError as error:
            sys.exit(str(error))
    """
    said = virtual_environment.run("python", "-c", "import sys\n" + code, fails=True)
    assert "Traceback" not in said
    assert "langchain-pgmemory[langchain1]" in said
    assert "langchain-pgmemory[langchain03]" in said


ACROSS_LINES = """if True:
    import json, sys
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
    from pgmemory import ConversationStore, PostgresChatMessageHistory

    def said(message):
        if message["role"] == "human":
            return HumanMessage(message["content"])
        if message["role"] == "tool":
            return ToolMessage(
                message["content"], tool_call_id=message["tool_call_id"], name=message["name"], artifact=[1e22, -0.0]
            )
        usage = {"input_tokens": 1, "output_tokens": 2, "total_tokens": 3}
        return AIMessage(
            message["content"], tool_calls=message.get("tool_calls", []), id="run-1", usage_metadata=usage,
            response_metadata={"model": "m"}, additional_kwargs={"refusal": None},
        )

    verb, line, dsn, schema, file = sys.argv[1:]
    with ConversationStore(dsn, schema=schema, tenant_id=line) as store:
        store.setup()
        for text in open(file, encoding="utf-8"):
            dialogue = json.loads(text)
            history = PostgresChatMessageHistory(dialogue["dialogue_id"], store)
            messages = [said(message) for message in dialogue["messages"]]
            if verb == "write":
                history.add_messages(messages)
            else:
                assert history.messages == messages, dialogue["dialogue_id"]
"""


def test_rows_written_under_one_line_load_equal_under_the_other(
    tmp_path: Path, shared_data: Path, distributions: Distributions, server_dsn: str, schema_name: str
) -> None:
    environments = {line: VirtualEnvironment(tmp_path / line) for line in ("langchain03", "langchain1")}
    for line, environment in environments.items():
        environment.install(f"{distributions.wheel}[{line}]")
    arguments = [server_dsn, schema_name, shared_data / "agent_dialogues.jsonl"]
    for line, environment in environments.items():
        environment.run("python", "-c", ACROSS_LINES, "write", line, *arguments)
    for line, other in (("langchain03", "langchain1"), ("langchain1", "langchain03")):
        environments[other].run("python", "-c", ACROSS_LINES, "read", line, *arguments)
