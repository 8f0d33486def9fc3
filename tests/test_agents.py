"""What is stored of an agent's tool calls with `save_intermediate_steps`, and what a window shows of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from chains import (
    AgentExecutor,
    AgentType,
    ConversationChain,
    create_json_chat_agent,
    create_openai_functions_agent,
    create_react_agent,
    create_structured_chat_agent,
    create_tool_calling_agent,
    create_xml_agent,
    initialize_agent,
)
from conversations import split, tokens_of_all
from fakes import FakeChat, scripted
from langchain_core.agents import AgentAction
from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.outputs import ChatGenerationChunk
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate
from langchain_core.tools import BaseTool, StructuredTool, ToolException, tool

from pgmemory import (
    BufferMemory,
    ConfigurationError,
    ConversationStore,
    PostgresChatMemory,
    PostgresChatMessageHistory,
    RelevantTurnMemory,
    SummaryMemory,
    TokenWindowMemory,
)

PROMPT = ChatPromptTemplate.from_messages(
    [MessagesPlaceholder("history"), ("human", "{input}"), MessagesPlaceholder("agent_scratchpad")]
)

Ask = Callable[[AgentExecutor, str], Any]


def invoke(executor: AgentExecutor, said: str) -> Any:
    return executor.invoke({"input": said})["output"]


def ainvoke(executor: AgentExecutor, said: str) -> Any:
    return asyncio.run(executor.ainvoke({"input": said}))["output"]


def stream(executor: AgentExecutor, said: str) -> Any:
    return list(executor.stream({"input": said}))[-1]["output"]


def astream(executor: AgentExecutor, said: str) -> Any:
    async def last() -> Any:
        return [chunk async for chunk in executor.astream({"input": said})][-1]["output"]

    return asyncio.run(last())


sync_and_async = pytest.mark.parametrize("ask", [invoke, ainvoke])
every_way = pytest.mark.parametrize("ask", [invoke, ainvoke, stream, astream])


@tool
def weather(city: str) -> str:
    """Tell the weather."""
    return f"sun in {city}"


@tool
def order(number: int) -> dict[str, Any]:
    """Tell the state of an order."""
    return {"number": number, "state": "unterwegs nach Köln"}


def call(id: str, name: str = "weather", **args: Any) -> dict[str, Any]:
    return {"name": name, "args": args or {"city": "Oslo"}, "id": id, "type": "tool_call"}


def calling(*calls: dict[str, Any], text: str = "") -> AIMessage:
    return AIMessage(text, tool_calls=list(calls))


def agent(
    llm: FakeChat, memory: PostgresChatMemory, *tools: BaseTool, steps: bool = True, **options: Any
) -> AgentExecutor:
    """An executor of a tool-calling agent that returns its steps."""
    tools = tools or (weather, order)
    return AgentExecutor(
        agent=create_tool_calling_agent(llm, tools, PROMPT),
        tools=tools,
        memory=memory,
        return_intermediate_steps=steps,
        **options,
    )


def remembering(store: ConversationStore, **fields: Any) -> BufferMemory:
    """A memory of the whole conversation, with the steps."""
    options = {"return_messages": True, "save_intermediate_steps": True} | fields
    return BufferMemory(session_id="s", store=store, **options)


def log(store: ConversationStore, session_id: str = "s") -> list[BaseMessage]:
    return PostgresChatMessageHistory(session_id, store).messages


def told(messages: list[BaseMessage]) -> list[tuple[Any, ...]]:
    """What a model is told by each message."""
    return [
        (type(message), message.content, getattr(message, "tool_calls", None), getattr(message, "tool_call_id", None))
        for message in messages
    ]


def kinds(messages: list[BaseMessage]) -> list[str]:
    return [message.type for message in messages]


# Agents that call tools


TWO_STEPS = [
    calling(call("c1", city="Oslo"), call("c2", "order", number=7), text="Let me look."),
    calling(call("c3", city="Rome")),
    AIMessage("Sun everywhere."),
]
TURN: list[BaseMessage] = [
    HumanMessage("How is it?"),
    TWO_STEPS[0],
    ToolMessage("sun in Oslo", tool_call_id="c1", name="weather"),
    ToolMessage('{"number": 7, "state": "unterwegs nach Köln"}', tool_call_id="c2", name="order"),
    TWO_STEPS[1],
    ToolMessage("sun in Rome", tool_call_id="c3", name="weather"),
    AIMessage("Sun everywhere."),
]


@every_way
def test_calls_and_results_are_stored_between_question_and_answer(store: ConversationStore, ask: Ask) -> None:
    assert ask(agent(scripted(*TWO_STEPS), remembering(store)), "How is it?") == "Sun everywhere."
    assert told(log(store)) == told(TURN)
    assert [message.name for message in log(store)] == [None, None, "weather", "order", None, "weather", None]


class StreamingChat(FakeChat):
    """A model that streams its answer word by word and its calls in two pieces each."""

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        message = self._generate(messages).generations[0].message
        for word in str(message.content).split(" "):
            yield ChatGenerationChunk(message=AIMessageChunk(word))
        for index, made in enumerate(getattr(message, "tool_calls", [])):
            head, tail = {"name": made["name"], "id": made["id"]}, {"name": None, "id": None}
            arguments = json.dumps(made["args"])
            for rest, piece in [(head, arguments[:4]), (tail, arguments[4:])]:
                chunk = {**rest, "args": piece, "index": index, "type": "tool_call_chunk"}
                yield ChatGenerationChunk(message=AIMessageChunk("", tool_call_chunks=[chunk]))


@every_way
def test_streamed_calls_are_stored_as_whole_messages(store: ConversationStore, ask: Ask) -> None:
    llm = StreamingChat(answer=scripted(calling(call("c1"), call("c2", "order", number=7)), "Fine.").answer)
    ask(agent(llm, remembering(store)), "How is it?")
    expected = [HumanMessage("How is it?"), calling(call("c1"), call("c2", "order", number=7)), *TURN[2:4]]
    assert told(log(store)) == told([*expected, AIMessage("Fine.")])


MEMORIES: dict[str, Callable[..., PostgresChatMemory]] = {
    "buffer": BufferMemory,
    "last turn": lambda **fields: BufferMemory(k=1, **fields),
    "token window": lambda **fields: TokenWindowMemory(max_token_limit=500, **fields),
    "relevant turns": lambda **fields: RelevantTurnMemory(keywords=["how is"], **fields),
    "summary": lambda **fields: SummaryMemory(llm=scripted("a summary"), max_token_limit=500, **fields),
}


@pytest.mark.parametrize("kind", MEMORIES)
@sync_and_async
def test_the_next_turn_shows_the_model_calls_with_their_results(
    store: ConversationStore, kind: str, ask: Ask
) -> None:
    llm = scripted(*TWO_STEPS, AIMessage("Bye."))
    memory = MEMORIES[kind](session_id="s", store=store, return_messages=True, save_intermediate_steps=True)
    executor = agent(llm, memory)
    ask(executor, "How is it?")
    ask(executor, "How is that?")
    assert told(llm.calls[-1]) == told([*TURN, HumanMessage("How is that?")])


@sync_and_async
def test_by_default_only_question_and_answer_are_stored(store: ConversationStore, ask: Ask) -> None:
    ask(agent(scripted(*TWO_STEPS), BufferMemory(session_id="s", store=store, return_messages=True)), "How is it?")
    assert told(log(store)) == told([TURN[0], TURN[-1]])


def test_a_turn_without_calls_is_stored_without_a_warning(store: ConversationStore) -> None:
    invoke(agent(scripted("Hello."), remembering(store)), "Hi")
    assert told(log(store)) == told([HumanMessage("Hi"), AIMessage("Hello.")])


@every_way
def test_an_executor_that_returns_no_steps_is_warned_of_and_the_turn_is_stored(
    store: ConversationStore, ask: Ask
) -> None:
    executor = agent(scripted(*TWO_STEPS), remembering(store), steps=False)
    with pytest.warns(UserWarning, match="give the AgentExecutor return_intermediate_steps=True") as caught:
        ask(executor, "How is it?")
    assert len(caught) == 1
    assert told(log(store)) == told([TURN[0], TURN[-1]])


def test_a_chain_that_is_no_agent_is_warned_of(store: ConversationStore) -> None:
    chain = ConversationChain(llm=scripted("hello"), memory=remembering(store, return_messages=False))
    with pytest.warns(UserWarning, match="BufferMemory has save_intermediate_steps=True, but the chain returns no"):
        chain.predict(input="hi")
    assert kinds(log(store)) == ["human", "ai"]


@pytest.mark.parametrize("steps", [None, "text", ["step"], [("action", "result")], [(None, "result")]])
def test_steps_of_another_kind_are_refused(store: ConversationStore, steps: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"outputs\['intermediate_steps'\] must be pairs of an AgentAction"):
        remembering(store).save_context({"input": "q"}, {"output": "a", "intermediate_steps": steps})
    assert log(store) == []


# What tools return


def returning(value: Any, **options: Any) -> BaseTool:
    """A tool that returns this, whatever it is asked."""

    def look(query: str) -> Any:
        """Look something up."""
        if isinstance(value, Exception):
            raise value
        return value

    return StructuredTool.from_function(look, **options)


RESULTS: dict[str, tuple[Any, Any]] = {
    "text": ("found", "found"),
    "dict": ({"größe": [1, None]}, '{"größe": [1, null]}'),
    "list": (["a", "b"], '["a", "b"]'),
    "number": (3, "3"),
    "none": (None, ""),
    "blocks": ([{"type": "text", "text": "found"}], [{"type": "text", "text": "found"}]),
    "nul": ("a\x00b", "a\x00b"),
}


@pytest.mark.parametrize("kind", RESULTS)
@sync_and_async
def test_whatever_a_tool_returns_is_its_result_and_shown_with_the_call(
    store: ConversationStore, kind: str, ask: Ask
) -> None:
    given, stored = RESULTS[kind]
    memory = remembering(store)
    ask(agent(scripted(calling(call("c1", "look", query="x")), "Done."), memory, returning(given)), "Look")
    expected = [HumanMessage("Look"), calling(call("c1", "look", query="x"))]
    expected += [ToolMessage(stored, tool_call_id="c1"), AIMessage("Done.")]
    assert told(log(store)) == told(expected)
    assert told(memory.buffer_as_messages) == told(expected)


@pytest.mark.parametrize("kind", [kind for kind in RESULTS if kind != "none"])
def test_a_tool_that_returns_directly_gives_result_and_answer(store: ConversationStore, kind: str) -> None:
    given, stored = RESULTS[kind]
    executor = agent(
        scripted(calling(call("c1", "look", query="x"))), remembering(store), returning(given, return_direct=True)
    )
    assert invoke(executor, "Look") == given
    assert [(message.type, message.content) for message in log(store)] == [
        ("human", "Look"),
        ("ai", ""),
        ("tool", stored),
        ("ai", stored),
    ]


@sync_and_async
def test_a_tool_that_fails_and_one_that_is_unknown_leave_what_the_model_was_told(
    store: ConversationStore, ask: Ask
) -> None:
    failing = returning(ToolException("no such city"), handle_tool_error=True)
    llm = scripted(calling(call("c1", "look", query="x"), call("c2", "fly", to="Oslo")), "Sorry.")
    ask(agent(llm, remembering(store), failing), "Look")
    assert [(message.type, message.content) for message in log(store)] == [
        ("human", "Look"),
        ("ai", ""),
        ("tool", "no such city"),
        ("tool", "fly is not a valid tool, try one of [look]."),
        ("ai", "Sorry."),
    ]


@every_way
def test_a_run_that_is_stopped_keeps_its_calls(store: ConversationStore, ask: Ask) -> None:
    llm = scripted(*(calling(call(f"c{number}")) for number in range(9)))
    ask(agent(llm, remembering(store), max_iterations=2), "How is it?")
    assert kinds(log(store)) == ["human", "ai", "tool", "ai", "tool", "ai"]
    assert log(store)[-1].content == "Agent stopped due to max iterations."


def test_a_run_that_fails_stores_nothing(store: ConversationStore) -> None:
    failing = returning(RuntimeError("broken"))
    with pytest.raises(RuntimeError, match="broken"):
        invoke(agent(scripted(calling(call("c1", "look", query="x"))), remembering(store), failing), "Look")
    assert log(store) == []


# Agents that call functions, and agents that write text


def made_call(message: BaseMessage, result: BaseMessage) -> tuple[str, dict[str, Any]]:
    """Return the one call that was made from an action, having checked that the result is its own."""
    assert isinstance(message, AIMessage) and isinstance(result, ToolMessage)
    (made,) = message.tool_calls
    assert made["id"] and made["id"] == result.tool_call_id and result.name == made["name"]
    return made["name"], made["args"]


def function_calling(name: str, **arguments: Any) -> AIMessage:
    return AIMessage("", additional_kwargs={"function_call": {"name": name, "arguments": json.dumps(arguments)}})


@sync_and_async
def test_calls_of_the_older_form_are_stored_as_tool_calls(store: ConversationStore, ask: Ask) -> None:
    llm = scripted(function_calling("weather", city="Oslo"), function_calling("order", number=7), "Fine.", "Bye.")
    executor = AgentExecutor(
        agent=create_openai_functions_agent(llm, [weather, order], PROMPT),
        tools=[weather, order],
        memory=remembering(store),
        return_intermediate_steps=True,
    )
    ask(executor, "How is it?")
    found = log(store)
    assert kinds(found) == ["human", "ai", "tool", "ai", "tool", "ai"]
    assert made_call(found[1], found[2]) == ("weather", {"city": "Oslo"})
    assert made_call(found[3], found[4]) == ("order", {"number": 7})
    assert found[1].additional_kwargs == found[3].additional_kwargs == {}
    assert found[2].content == "sun in Oslo"
    ask(executor, "Thanks")
    assert told(llm.calls[-1][:-1]) == told(found)


@tool
def search(query: str) -> str:
    """Search the web."""
    return f"found {query}"


TEXT_PROMPT = PromptTemplate.from_template("{tools} {tool_names}\n{history}\nHuman: {input}\n{agent_scratchpad}")
CHAT_PROMPT = ChatPromptTemplate.from_messages(
    [
        ("system", "{tools} {tool_names}"),
        MessagesPlaceholder("history"),
        ("human", "{input}"),
        MessagesPlaceholder("agent_scratchpad"),
    ]
)
BLOB = '```json\n{"action": "search", "action_input": "rain"}\n```'
FINAL_BLOB = '```json\n{"action": "Final Answer", "action_input": "It rains."}\n```'
REACT = ["Thought: look\nAction: search\nAction Input: rain", "Thought: done\nFinal Answer: It rains."]

Script = list[str]
TEXT_AGENTS: dict[str, tuple[Callable[[FakeChat], Any], Script]] = {
    "react": (lambda llm: create_react_agent(llm, [search], TEXT_PROMPT), REACT),
    "xml": (
        lambda llm: create_xml_agent(
            llm, [search], PromptTemplate.from_template("{tools}{history}\nHuman: {input}\n{agent_scratchpad}")
        ),
        ["<tool>search</tool><tool_input>rain</tool_input>", "<final_answer>It rains.</final_answer>"],
    ),
    "json chat": (lambda llm: create_json_chat_agent(llm, [search], CHAT_PROMPT), [BLOB, FINAL_BLOB]),
    "structured chat": (
        lambda llm: create_structured_chat_agent(
            llm,
            [search],
            ChatPromptTemplate.from_messages(
                [
                    ("system", "{tools} {tool_names}"),
                    MessagesPlaceholder("history"),
                    ("human", "{input}\n{agent_scratchpad}"),
                ]
            ),
        ),
        [BLOB.replace('"rain"', '{"query": "rain"}'), FINAL_BLOB],
    ),
}


@pytest.mark.parametrize("kind", TEXT_AGENTS)
@sync_and_async
def test_an_agent_that_writes_its_actions_stores_them_as_calls_with_results(
    store: ConversationStore, kind: str, ask: Ask
) -> None:
    create, script = TEXT_AGENTS[kind]
    llm = scripted(*script, script[-1])
    as_text = kind in ("react", "xml")
    executor = AgentExecutor(
        agent=create(llm),
        tools=[search],
        memory=remembering(store, return_messages=not as_text),
        return_intermediate_steps=True,
    )
    assert ask(executor, "Does it rain?") == "It rains."
    found = log(store)
    assert kinds(found) == ["human", "ai", "tool", "ai"]
    arguments = {"query": "rain"} if kind == "structured chat" else {"__arg1": "rain"}
    assert made_call(found[1], found[2]) == ("search", arguments)
    assert [message.content for message in found] == ["Does it rain?", script[0], "found rain", "It rains."]
    ask(executor, "Sure?")
    if as_text:
        assert f"Human: Does it rain?\nAI: {found[1].content} [calls search(" in llm.prompts[-1]
        assert "Tool: found rain\nAI: It rains.\nHuman: Sure?" in llm.prompts[-1]
    else:
        assert [message.content for message in llm.calls[-1]][1:5] == [message.content for message in found]


@sync_and_async
def test_what_could_not_be_parsed_is_stored_as_the_model_was_told(store: ConversationStore, ask: Ask) -> None:
    llm = scripted("I just talk.", *REACT)
    executor = AgentExecutor(
        agent=create_react_agent(llm, [search], TEXT_PROMPT),
        tools=[search],
        memory=remembering(store, return_messages=False),
        return_intermediate_steps=True,
        handle_parsing_errors="Use the format.",
    )
    assert ask(executor, "Does it rain?") == "It rains."
    found = log(store)
    assert kinds(found) == ["human", "ai", "tool", "ai", "tool", "ai"]
    assert made_call(found[1], found[2]) == ("_Exception", {"__arg1": "Use the format."})
    assert found[2].content == "Use the format."
    assert "I just talk." in found[1].content


MULTI = AIMessage(
    "",
    additional_kwargs={
        "function_call": {
            "name": "tool_selection",
            "arguments": json.dumps({"actions": [{"action_name": "search", "action": {"query": "rain"}}]}),
        }
    },
)
CONVERSATIONAL = ["Thought: Do I need to use a tool? Yes\nAction: search\nAction Input: rain", "AI: It rains."]
OLDER_AGENTS: dict[AgentType, list[Any]] = {
    AgentType.ZERO_SHOT_REACT_DESCRIPTION: REACT,
    AgentType.CONVERSATIONAL_REACT_DESCRIPTION: CONVERSATIONAL,
    AgentType.CHAT_ZERO_SHOT_REACT_DESCRIPTION: ["Thought: look\nAction:\n" + BLOB, REACT[1]],
    AgentType.CHAT_CONVERSATIONAL_REACT_DESCRIPTION: [BLOB, FINAL_BLOB],
    AgentType.STRUCTURED_CHAT_ZERO_SHOT_REACT_DESCRIPTION: [BLOB, FINAL_BLOB],
    AgentType.OPENAI_FUNCTIONS: [function_calling("search", query="rain"), "It rains."],
    AgentType.OPENAI_MULTI_FUNCTIONS: [MULTI, "It rains."],
}


@pytest.mark.filterwarnings("ignore::langchain_core._api.deprecation.LangChainDeprecationWarning")
@pytest.mark.parametrize("kind", OLDER_AGENTS, ids=lambda kind: kind.value)
@sync_and_async
def test_older_agents_store_their_steps(store: ConversationStore, kind: AgentType, ask: Ask) -> None:
    if kind.value.startswith("openai") and "langchain_classic" in AgentExecutor.__module__:
        pytest.skip("LangChain 1.x itself no longer runs this agent; create_openai_functions_agent does run")
    messages = kind is AgentType.CHAT_CONVERSATIONAL_REACT_DESCRIPTION
    executor = initialize_agent(
        [search],
        scripted(*OLDER_AGENTS[kind]),
        agent=kind,
        # The conversational ones ask for the conversation by this name.
        memory=remembering(store, memory_key="chat_history", return_messages=messages),
        return_intermediate_steps=True,
    )
    assert ask(executor, "Does it rain?") == "It rains."
    found = log(store)
    assert kinds(found) == ["human", "ai", "tool", "ai"]
    name, arguments = made_call(found[1], found[2])
    assert (name, list(arguments.values())) == ("search", ["rain"])
    assert [found[2].content, found[3].content] == ["found rain", "It rains."]


# What windows make of turns with calls


def tool_turns(count: int) -> list[BaseMessage]:
    """So many turns with a call each, and the newest without."""
    turns: list[BaseMessage] = []
    for number in range(count):
        turns += [HumanMessage(f"How is day {number}?"), calling(call(f"c{number}", day=number))]
        turns += [ToolMessage(f"sun on day {number}", tool_call_id=f"c{number}"), AIMessage("Sunny.")]
    return turns


def save_turns(memory: PostgresChatMemory, messages: list[BaseMessage]) -> None:
    """Save turns as an agent does, from its steps."""
    for human, calls, result, answer in zip(*(messages[start::4] for start in range(4)), strict=True):
        assert isinstance(calls, AIMessage)
        action = AgentAction(calls.tool_calls[0]["name"], calls.tool_calls[0]["args"], "")
        outputs = {"output": answer.content, "intermediate_steps": [(action, result.content)]}
        memory.save_context({"input": human.content}, outputs)


def test_a_token_window_keeps_calls_and_results_together_and_counts_them(store: ConversationStore) -> None:
    turns = tool_turns(6)
    sizes = set()
    for limit in range(0, tokens_of_all(turns) + 1, 7):
        memory = TokenWindowMemory(
            session_id="s", store=store, max_token_limit=limit, return_messages=True, save_intermediate_steps=True
        )
        if not sizes:
            save_turns(memory, turns)
        window = memory.load_memory_variables({})["history"]
        assert tokens_of_all(window) <= limit
        assert kinds(window) == ["human", "ai", "tool", "ai"] * (len(window) // 4)
        sizes.add(len(window) // 4)
    assert sizes >= {0, 1, 2, 3, 4}


def test_a_summary_is_told_of_calls_and_results(store: ConversationStore) -> None:
    llm = scripted("It was sunny.")
    memory = SummaryMemory(
        session_id="s", store=store, llm=llm, max_token_limit=150, return_messages=True, save_intermediate_steps=True
    )
    save_turns(memory, tool_turns(8))
    assert "sun on day 0" in llm.prompts[0] and 'weather({"day": 0})' in llm.prompts[0]
    window = memory.load_memory_variables({})["history"]
    assert isinstance(window[0], SystemMessage) and "It was sunny." in window[0].content
    assert kinds(window[1:]) == ["human", "ai", "tool", "ai"] * (len(window) // 4)
    assert len(log(store)) == 32


def test_a_turn_is_relevant_by_what_was_said_not_by_what_a_tool_found(store: ConversationStore) -> None:
    memory = RelevantTurnMemory(
        session_id="s", store=store, keywords=["invoice"], return_messages=True, save_intermediate_steps=True
    )
    found = calling(call("c1", "look", query="x"))
    invoke(agent(scripted(found, "Done."), memory, returning("an invoice")), "Look")
    assert log(store) == []
    announcing = calling(call("c1", "look", query="x"), text="I look for the invoice.")
    invoke(agent(scripted(announcing, "Done."), memory, returning("nothing")), "Look")
    assert kinds(memory.load_memory_variables({})["history"]) == ["human", "ai", "tool", "ai"]


# Real dialogues


class Recorded(BaseTool):
    """A tool that returns what was recorded of it, one after the other."""

    description: str = "A service."
    results: list[str]

    def _run(self, **kwargs: Any) -> str:
        return self.results.pop(0)

    def _parse_input(self, tool_input: Any, tool_call_id: str | None = None) -> Any:
        return tool_input


def dialogues(folder: Path) -> Iterator[tuple[str, list[BaseMessage]]]:
    """Yield name and messages of each real dialogue."""
    build: dict[str, Callable[..., BaseMessage]] = {"human": HumanMessage, "ai": AIMessage, "tool": ToolMessage}
    for line in (folder / "agent_dialogues.jsonl").read_text("utf-8").splitlines():
        dialogue = json.loads(line)
        yield dialogue["dialogue_id"], [build[said.pop("role")](**said) for said in dialogue["messages"]]


def executor_of(messages: list[BaseMessage], memory: PostgresChatMemory) -> tuple[FakeChat, AgentExecutor]:
    """A model that says a dialogue's AI messages, and an agent whose tools give the dialogue's results."""
    llm = scripted(*(message.model_copy() for message in messages if isinstance(message, AIMessage)))
    results: dict[str, list[str]] = {"none": []}
    for message in messages:
        if isinstance(message, ToolMessage):
            results.setdefault(str(message.name), []).append(str(message.content))
    return llm, agent(llm, memory, *(Recorded(name=name, results=found) for name, found in results.items()))


def with_names(messages: list[BaseMessage]) -> list[tuple[Any, ...]]:
    return [(*said, message.name) for said, message in zip(told(messages), messages, strict=True)]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_the_log_of_a_replayed_dialogue_is_that_dialogue(
    store: ConversationStore, shared_data: Path, asynchronous: bool
) -> None:
    kinds_of_memory = cycle(
        [
            lambda **fields: BufferMemory(**fields),
            lambda **fields: TokenWindowMemory(max_token_limit=300, **fields),
            lambda **fields: RelevantTurnMemory(keywords=["the"], keep_irrelevant=True, **fields),
            lambda **fields: SummaryMemory(llm=scripted("A talk."), max_token_limit=300, **fields),
        ]
    )

    async def talk(executor: AgentExecutor, humans: list[str]) -> None:
        for said in humans:
            await executor.ainvoke({"input": said})

    async def replay() -> int:
        replayed = 0
        for name, messages in dialogues(shared_data):
            create = next(kinds_of_memory)
            memory = create(session_id=name, store=store, return_messages=True, save_intermediate_steps=True)
            llm, executor = executor_of(messages, memory)
            humans = [str(message.content) for message in messages if isinstance(message, HumanMessage)]
            if asynchronous:
                await talk(executor, humans)
            else:
                for said in humans:
                    executor.invoke({"input": said})
            stored = PostgresChatMessageHistory(name, store).messages
            assert with_names(stored) == with_names(messages), name
            if isinstance(memory, BufferMemory):
                newest = split(messages)[1][-1]
                assert told(llm.calls[-1]) == told(messages[:-1]), name
                assert told(memory.buffer_as_messages[-len(newest) :]) == told(newest), name
            replayed += len(humans)
        return replayed

    assert asyncio.run(replay()) == 349


# --- What tools give back that is no text ----------------------------------------------------------------------------


class Table:
    """What a tool may return that has no JSON form."""

    def __repr__(self) -> str:
        return "a table"


def test_a_result_without_a_json_form_is_stored_as_the_model_was_shown_it(store: ConversationStore) -> None:
    executor = agent(scripted(calling(call("c1", "look", query="x")), "Done."), remembering(store), returning(Table()))
    assert invoke(executor, "Look") == "Done."
    assert [message.content for message in log(store)] == ["Look", "", "a table", "Done."]


def test_a_result_that_is_a_tool_message_answers_its_call(store: ConversationStore) -> None:
    elsewhere = ToolMessage("found", tool_call_id="elsewhere")
    model = scripted(calling(call("c1", "look", query="x")), "Done.")
    invoke(agent(model, remembering(store), returning(elsewhere)), "Look")
    result = log(store)[2]
    assert isinstance(result, ToolMessage)
    assert (result.content, result.tool_call_id, result.name) == ("found", "c1", "look")
    assert kinds(remembering(store).buffer_as_messages) == ["human", "ai", "tool", "ai"]


def test_a_model_that_says_the_same_again_has_said_it_twice(store: ConversationStore) -> None:
    same = calling(call("c1"))
    invoke(agent(scripted(same, same, "Done."), remembering(store)), "Look")
    assert kinds(log(store)) == ["human", "ai", "tool", "ai", "tool", "ai"]
