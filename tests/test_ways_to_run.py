"""Every way in which LangChain runs a memory: each turn is stored once, whole and in order, and the model sees the
window.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import pytest
from chains import (
    AgentExecutor,
    AgentType,
    ConversationalRetrievalChain,
    ConversationChain,
    LLMChain,
    SequentialChain,
    create_tool_calling_agent,
    initialize_agent,
)
from conversations import dialogue, tokens_of_all
from fakes import FakeChat, scripted
from langchain_core.callbacks import AsyncCallbackHandler, CallbackManagerForRetrieverRun
from langchain_core.chat_history import BaseChatMessageHistory
from langchain_core.documents import Document
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import ConfigurableFieldSpec, Runnable, RunnableConfig, RunnableLambda
from langchain_core.runnables.history import RunnableWithMessageHistory
from langchain_core.tools import tool
from psycopg2.extensions import cursor as Cursor
from psycopg2.pool import ThreadedConnectionPool

from pgmemory import (
    BufferMemory,
    ConversationStore,
    PostgresChatMemory,
    PostgresChatMessageHistory,
    RelevantTurnMemory,
    SummaryMemory,
    TokenWindowMemory,
)

# LangChain calls these ways old; people use them.
old_ways = pytest.mark.filterwarnings("ignore::langchain_core._api.deprecation.LangChainDeprecationWarning")


def last_said(messages: list[BaseMessage]) -> str:
    """Return what the human said last, in messages or in the one text of a prompt."""
    return str(messages[-1].content).split("Human: ")[-1].split("\n")[0]


def parrot() -> FakeChat:
    """Return a model whose answers tell which question they belong to."""
    return FakeChat(answer=lambda messages: "re: " + last_said(messages))


def contents(history: BaseChatMessageHistory) -> list[Any]:
    return [message.content for message in history.messages]


def said_in(store: ConversationStore, session_id: str = "s", **names: Any) -> list[Any]:
    """Return what the log holds, having checked that humans and AIs take turns."""
    history = PostgresChatMessageHistory(session_id, store, **names)
    messages = history.messages
    assert [type(message) for message in messages] == [HumanMessage, AIMessage] * (len(messages) // 2)
    return contents(history)


def turns_of(*questions: str) -> list[str]:
    return [text for question in questions for text in (question, f"re: {question}")]


THREE = ("alpha", "beta", "gamma")


async def consume(chunks: Any) -> None:
    async for _ in chunks:
        pass


# Chains

Run = Callable[[Any, str], Any]

CHAIN_WAYS: dict[str, Run] = {
    "predict": lambda chain, said: chain.predict(input=said),
    "apredict": lambda chain, said: asyncio.run(chain.apredict(input=said)),
    "invoke": lambda chain, said: chain.invoke({"input": said}),
    "invoke with text": lambda chain, said: chain.invoke(said),
    "ainvoke": lambda chain, said: asyncio.run(chain.ainvoke({"input": said})),
    "batch": lambda chain, said: chain.batch([{"input": said}]),
    "abatch": lambda chain, said: asyncio.run(chain.abatch([{"input": said}])),
    "stream": lambda chain, said: list(chain.stream({"input": said})),
    "astream": lambda chain, said: asyncio.run(consume(chain.astream({"input": said}))),
    "astream_events": lambda chain, said: asyncio.run(
        consume(chain.astream_events({"input": said}, version="v2"))
    ),
    "run": lambda chain, said: chain.run(said),
    "arun": lambda chain, said: asyncio.run(chain.arun(input=said)),
    "call": lambda chain, said: chain({"input": said}),
    "acall": lambda chain, said: asyncio.run(chain.acall({"input": said})),
}


@old_ways
@pytest.mark.parametrize("way", CHAIN_WAYS)
def test_every_way_to_run_a_conversation_chain(store: ConversationStore, way: str) -> None:
    llm = parrot()
    chain = ConversationChain(llm=llm, memory=BufferMemory(session_id="s", store=store, k=1))
    for said in THREE:
        CHAIN_WAYS[way](chain, said)
    assert said_in(store) == turns_of(*THREE)
    assert "Human: beta\nAI: re: beta\nHuman: gamma" in llm.prompts[-1] and "alpha" not in llm.prompts[-1]


def llm_chain(llm: FakeChat, memory: PostgresChatMemory) -> LLMChain:
    prompt = PromptTemplate.from_template("In {language}:\n{history}\nHuman: {input}")
    return LLMChain(llm=llm, prompt=prompt, memory=memory)


LLM_CHAIN_WAYS: dict[str, Run] = {
    "predict": lambda chain, said: chain.predict(input=said, language="French"),
    "apredict": lambda chain, said: asyncio.run(chain.apredict(input=said, language="French")),
    "ainvoke": lambda chain, said: asyncio.run(chain.ainvoke({"input": said, "language": "French"})),
    "batch": lambda chain, said: chain.batch([{"input": said, "language": "French"}]),
    "astream": lambda chain, said: asyncio.run(consume(chain.astream({"input": said, "language": "French"}))),
    "run": lambda chain, said: chain.run(input=said, language="French"),
}


@old_ways
@pytest.mark.parametrize("way", LLM_CHAIN_WAYS)
def test_every_way_to_run_a_chain_with_several_inputs(store: ConversationStore, way: str) -> None:
    llm = parrot()
    chain = llm_chain(llm, BufferMemory(session_id="s", store=store, k=1, input_key="input"))
    for said in THREE:
        LLM_CHAIN_WAYS[way](chain, said)
    assert said_in(store) == turns_of(*THREE)
    assert llm.prompts[-1] == "In French:\nHuman: beta\nAI: re: beta\nHuman: gamma"


@old_ways
def test_langchains_apply_and_generate_go_by_a_memory(store: ConversationStore) -> None:
    chain = llm_chain(parrot(), BufferMemory(session_id="s", store=store, input_key="input"))
    inputs = [{"input": said, "language": "French", "history": ""} for said in THREE]
    assert [output["text"] for output in chain.apply(inputs)] == ["re: alpha", "re: beta", "re: gamma"]
    chain.generate(inputs)
    assert said_in(store) == []


@pytest.mark.parametrize("way", ["ainvoke", "batch", "astream"])
def test_a_sequential_chain_with_memories_inside_and_around(store: ConversationStore, way: str) -> None:
    llm = parrot()
    draft = LLMChain(
        llm=llm,
        prompt=PromptTemplate.from_template("{history}\nHuman: {input}"),
        output_key="draft",
        memory=BufferMemory(session_id="inside", store=store, input_key="input"),
    )
    polish = LLMChain(
        llm=llm, prompt=PromptTemplate.from_template("{before}\nHuman: polish {draft}"), output_key="text"
    )
    chain = SequentialChain(
        chains=[draft, polish],
        input_variables=["input"],
        memory=BufferMemory(session_id="around", store=store, memory_key="before", input_key="input"),
    )
    for said in ("alpha", "beta"):
        CHAIN_WAYS[way](chain, said)
    assert said_in(store, "inside") == turns_of("alpha", "beta")
    assert said_in(store, "around") == ["alpha", "re: polish re: alpha", "beta", "re: polish re: beta"]
    assert llm.prompts[-1] == "Human: alpha\nAI: re: polish re: alpha\nHuman: polish re: beta"


class Shelf(BaseRetriever):
    """A retriever that finds the question."""

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        return [Document(f"about {query}")]


@old_ways
@pytest.mark.parametrize("form", ["text", "messages"])
@pytest.mark.parametrize("way", ["invoke", "ainvoke", "batch", "astream", "run"])
def test_a_conversational_retrieval_chain_rephrases_with_the_window(
    store: ConversationStore, form: str, way: str
) -> None:
    ways: dict[str, Run] = {
        "invoke": lambda chain, said: chain.invoke({"question": said}),
        "ainvoke": lambda chain, said: asyncio.run(chain.ainvoke({"question": said})),
        "batch": lambda chain, said: chain.batch([{"question": said}]),
        "astream": lambda chain, said: asyncio.run(consume(chain.astream({"question": said}))),
        "run": lambda chain, said: chain.run(said),
    }
    llm = scripted("a 1", "rephrased 2", "a 2", "rephrased 3", "a 3")
    memory = BufferMemory(
        session_id="s", store=store, k=1, memory_key="chat_history", return_messages=form == "messages"
    )
    as_it_is: dict[str, Any] = {"get_chat_history": str} if form == "text" else {}
    chain = ConversationalRetrievalChain.from_llm(llm, Shelf(), memory=memory, **as_it_is)
    for said in THREE:
        ways[way](chain, said)
    assert said_in(store) == ["alpha", "a 1", "beta", "a 2", "gamma", "a 3"]
    rephrasing, answering = llm.prompts[-2:]
    expected = "Human: beta\nAI: a 2" if form == "text" else "Human: beta\nAssistant: a 2"
    assert expected in rephrasing and "alpha" not in rephrasing
    assert "about rephrased 3" in answering


def test_a_retrieval_chain_that_returns_its_sources_stores_the_answer(store: ConversationStore) -> None:
    memory = BufferMemory(
        session_id="s", store=store, memory_key="chat_history", return_messages=True, output_key="answer"
    )
    chain = ConversationalRetrievalChain.from_llm(
        scripted("a 1"), Shelf(), memory=memory, return_source_documents=True, return_generated_question=True
    )
    assert chain.invoke({"question": "one"})["source_documents"] == [Document("about one")]
    assert said_in(store) == ["one", "a 1"]


# Agents


@tool
def echo(text: str) -> str:
    """Repeat a text."""
    return text


def executor_of(llm: FakeChat, memory: PostgresChatMemory, **options: Any) -> AgentExecutor:
    prompt = ChatPromptTemplate.from_messages(
        [MessagesPlaceholder("history"), ("human", "{input}"), MessagesPlaceholder("agent_scratchpad")]
    )
    return AgentExecutor(
        agent=create_tool_calling_agent(llm, [echo], prompt), tools=[echo], memory=memory, **options
    )


AGENT_WAYS: dict[str, Run] = {
    way: CHAIN_WAYS[way]
    for way in ["invoke", "ainvoke", "batch", "abatch", "stream", "astream", "astream_events"]
} | {
    "iter": lambda executor, said: list(executor.iter({"input": said})),
    "iter, asynchronously": lambda executor, said: asyncio.run(consume(executor.iter({"input": said}))),
    "stream, in a worker": lambda executor, said: asyncio.run(
        asyncio.to_thread(lambda: list(executor.stream({"input": said})))
    ),
}


@pytest.mark.parametrize("steps", [False, True], ids=["answers", "steps"])
@pytest.mark.parametrize("way", AGENT_WAYS)
def test_every_way_to_run_an_agent(store: ConversationStore, way: str, steps: bool) -> None:
    def answer(messages: list[BaseMessage]) -> AIMessage:
        if messages[-1].type == "tool":
            return AIMessage(f"re: {messages[-1].content}")
        made = {"name": "echo", "args": {"text": messages[-1].content}, "id": f"c{messages[-1].content}"}
        return AIMessage("", tool_calls=[made])

    llm = FakeChat(answer=answer)
    memory = BufferMemory(session_id="s", store=store, k=1, return_messages=True, save_intermediate_steps=steps)
    executor = executor_of(llm, memory, return_intermediate_steps=steps)
    for said in THREE:
        AGENT_WAYS[way](executor, said)

    def turn(said: str) -> list[Any]:
        return [said, "", said, f"re: {said}"] if steps else [said, f"re: {said}"]

    assert contents(PostgresChatMessageHistory("s", store)) == [text for said in THREE for text in turn(said)]
    assert [message.content for message in llm.calls[-2]] == [*turn("beta"), "gamma"]


@old_ways
@pytest.mark.parametrize("way", ["invoke", "ainvoke", "stream", "astream", "run"])
def test_every_way_to_run_an_older_agent(store: ConversationStore, way: str) -> None:
    llm = FakeChat(answer=lambda messages: "AI: re: " + str(messages[-1].content).split("New input: ")[1].split()[0])
    memory = BufferMemory(session_id="s", store=store, k=1, memory_key="chat_history")
    executor = initialize_agent([echo], llm, agent=AgentType.CONVERSATIONAL_REACT_DESCRIPTION, memory=memory)
    for said in THREE:
        CHAIN_WAYS[way](executor, said)
    assert said_in(store) == turns_of(*THREE)
    assert "Human: beta\nAI: re: beta\n" in llm.prompts[-1] and "alpha" not in llm.prompts[-1].split("history:")[-1]


# Runnables


class Talk:
    """A runnable with a history, what it wraps in one of several shapes.

    Attributes:
        seen: What the model was shown in each call.
    """

    def __init__(self, shape: str, history_of: Callable[..., BaseChatMessageHistory], **options: Any) -> None:
        self.seen: list[list[BaseMessage]] = []
        self._shape = shape
        model = RunnableLambda(self._note) | GenericFakeChatModel(messages=self._answers())
        prompt = ChatPromptTemplate.from_messages([MessagesPlaceholder("history"), ("human", "{input}")])
        shapes: dict[str, tuple[Runnable[Any, Any], dict[str, str]]] = {
            "messages": (model, {}),
            "text": (model | StrOutputParser(), {}),
            "dict with history": (prompt | model, {"input_messages_key": "input", "history_messages_key": "history"}),
            "dict of messages": (
                RunnableLambda(lambda inputs: inputs["input"]) | model,
                {"input_messages_key": "input"},
            ),
            "dict in, dict out": (
                prompt | model | {"answer": StrOutputParser()},
                {"input_messages_key": "input", "history_messages_key": "history", "output_messages_key": "answer"},
            ),
        }
        wrapped, keys = shapes[shape]
        self.runnable = RunnableWithMessageHistory(wrapped, history_of, **keys, **options)

    def _note(self, prompt: Any) -> list[BaseMessage]:
        messages = prompt if isinstance(prompt, list) else prompt.to_messages()
        self.seen.append(messages)
        return list(messages)

    def _answers(self) -> Iterator[AIMessage]:
        while True:
            yield AIMessage("re: " + last_said(self.seen[-1]))

    def say(self, way: str, text: str, configurable: dict[str, str]) -> None:
        """Say a text in one of the ways to run a runnable."""
        given: Any = text
        if self._shape == "messages":
            given = [HumanMessage(text)]
        elif self._shape.startswith("dict"):
            given = {"input": text}
        RUNNABLE_WAYS[way](self.runnable, given, {"configurable": configurable})


RUNNABLE_WAYS: dict[str, Callable[[Any, Any, RunnableConfig], Any]] = {
    "invoke": lambda runnable, given, config: runnable.invoke(given, config),
    "ainvoke": lambda runnable, given, config: asyncio.run(runnable.ainvoke(given, config)),
    "stream": lambda runnable, given, config: list(runnable.stream(given, config)),
    "astream": lambda runnable, given, config: asyncio.run(consume(runnable.astream(given, config))),
    "batch": lambda runnable, given, config: runnable.batch([given], [config]),
    "abatch": lambda runnable, given, config: asyncio.run(runnable.abatch([given], [config])),
    "astream_events": lambda runnable, given, config: asyncio.run(
        consume(runnable.astream_events(given, config, version="v2"))
    ),
}
SHAPES = ["messages", "text", "dict with history", "dict of messages", "dict in, dict out"]


@pytest.fixture
def nothing_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail if anything was logged: LangChain swallows and logs what fails while it saves."""
    yield
    assert [record.getMessage() for record in caplog.get_records("call")] == []


@pytest.mark.usefixtures("nothing_logged")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("way", RUNNABLE_WAYS)
def test_every_way_to_run_a_runnable_over_a_log(store: ConversationStore, way: str, shape: str) -> None:
    talk = Talk(shape, lambda session_id: PostgresChatMessageHistory(session_id, store))
    for said in THREE:
        talk.say(way, said, {"session_id": "s"})
    assert said_in(store) == turns_of(*THREE)
    assert [message.content for message in talk.seen[-1]] == [*turns_of("alpha", "beta"), "gamma"]


Make = Callable[..., PostgresChatMemory]
VIEWS: dict[str, Make] = {
    "buffer": partial(BufferMemory, k=2),
    "token window": partial(TokenWindowMemory, max_token_limit=60),
    "relevant turns": partial(RelevantTurnMemory, keywords=["invoice"], keep_irrelevant=True),
    "summary": lambda **fields: SummaryMemory(llm=scripted("They talked."), max_token_limit=60, **fields),
}
QUESTIONS = [f"{'invoice' if number in (1, 4) else 'weather'} {number}" for number in range(8)]


def check_window(kind: str, window: list[BaseMessage]) -> None:
    """Check what a view shows after all questions but the last."""
    shown = [message.content for message in window]
    if kind == "buffer":
        assert shown == turns_of(*QUESTIONS[5:7])
    elif kind == "token window":
        assert shown == turns_of(*QUESTIONS[7 - len(shown) // 2 : 7]) and 2 <= len(shown) < 14
        assert tokens_of_all(window) <= 60 < tokens_of_all([*window, *dialogue(1)])
    elif kind == "relevant turns":
        assert shown == turns_of(QUESTIONS[1], QUESTIONS[4])
    else:
        assert isinstance(window[0], SystemMessage) and "They talked." in shown[0]
        assert shown[1:] == turns_of(*QUESTIONS[7 - len(shown[1:]) // 2 : 7]) and 3 <= len(shown) < 14


@pytest.mark.usefixtures("nothing_logged")
@pytest.mark.parametrize("kind", VIEWS)
@pytest.mark.parametrize("way", RUNNABLE_WAYS)
def test_every_way_to_run_a_runnable_over_a_view(store: ConversationStore, way: str, kind: str) -> None:
    memory = VIEWS[kind](session_id="template", store=store)
    # Where LangChain must tell what was said from what was shown.
    talk = Talk("messages", lambda session_id: memory.for_session(session_id).as_history())
    for said in QUESTIONS:
        talk.say(way, said, {"session_id": "s"})
    assert said_in(store) == turns_of(*QUESTIONS)
    assert talk.seen[-1][-1].content == QUESTIONS[-1]
    check_window(kind, talk.seen[-1][:-1])


@pytest.mark.usefixtures("nothing_logged")
@pytest.mark.parametrize("kind", ["log", *VIEWS])
@pytest.mark.parametrize("way", ["invoke", "ainvoke", "astream"])
def test_users_and_conversations_are_kept_apart(store: ConversationStore, way: str, kind: str) -> None:
    def history_of(user_id: str, conversation_id: str) -> BaseChatMessageHistory:
        if kind == "log":
            return PostgresChatMessageHistory(conversation_id, store, user_id=user_id)
        return VIEWS[kind](session_id=conversation_id, user_id=user_id, store=store).as_history()

    names = ["user_id", "conversation_id"]
    specs = [ConfigurableFieldSpec(id=name, annotation=str) for name in names]
    talk = Talk("dict with history", history_of, history_factory_config=specs)
    for said, user, conversation in [("invoice 1", "ada", "1"), ("invoice 2", "bob", "1"), ("invoice 3", "ada", "2")]:
        talk.say(way, said, {"user_id": user, "conversation_id": conversation})
    talk.say(way, "invoice 4", {"user_id": "ada", "conversation_id": "1"})
    assert [message.content for message in talk.seen[-1]] == [*turns_of("invoice 1"), "invoice 4"]
    assert said_in(store, "1", user_id="ada") == turns_of("invoice 1", "invoice 4")
    assert said_in(store, "1", user_id="bob") == turns_of("invoice 2")
    assert said_in(store, "2", user_id="ada") == turns_of("invoice 3")
    assert said_in(store, "1") == []


@pytest.mark.usefixtures("nothing_logged")
@pytest.mark.parametrize("kind", ["log", *VIEWS])
def test_turns_of_one_conversation_at_once_are_stored_whole_where_the_history_has_a_key(
    store: ConversationStore, kind: str
) -> None:
    def history_of(session_id: str) -> BaseChatMessageHistory:
        if kind == "log":
            return PostgresChatMessageHistory(session_id, store)
        return VIEWS[kind](session_id=session_id, store=store).as_history()

    prompt = ChatPromptTemplate.from_messages([MessagesPlaceholder("history"), ("human", "{input}")])
    wrapped = RunnableWithMessageHistory(
        prompt | parrot(), history_of, input_messages_key="input", history_messages_key="history"
    )
    config: RunnableConfig = {"configurable": {"session_id": "s"}}
    inputs = [{"input": f"question {number}"} for number in range(6)]
    wrapped.batch(inputs, [config] * 6)
    asyncio.run(wrapped.abatch(inputs, [config] * 6))
    said = said_in(store)
    assert sorted(said[::2]) == sorted([f"question {number}" for number in range(6)] * 2)
    assert said[1::2] == [f"re: {question}" for question in said[::2]]


@pytest.mark.usefixtures("nothing_logged")
@pytest.mark.parametrize("kind", ["log", *VIEWS])
@pytest.mark.parametrize("way", ["invoke", "ainvoke", "stream", "astream"])
def test_a_runnable_that_returns_calls_results_and_answer_has_them_stored(
    store: ConversationStore, way: str, kind: str
) -> None:
    call = AIMessage("", tool_calls=[{"name": "echo", "args": {"text": "invoice"}, "id": "c1", "type": "tool_call"}])
    said = [call, ToolMessage("invoice", tool_call_id="c1"), AIMessage("Done.")]
    history: BaseChatMessageHistory = PostgresChatMessageHistory("s", store)
    if kind != "log":
        history = VIEWS[kind](session_id="s", store=store).as_history()
    wrapped = RunnableWithMessageHistory(RunnableLambda(lambda messages: list(said)), lambda session_id: history)
    given = [SystemMessage("Be kind."), HumanMessage("invoice?")]
    RUNNABLE_WAYS[way](wrapped, given, {"configurable": {"session_id": "s"}})
    assert PostgresChatMessageHistory("s", store).messages == [*given, *said]
    assert history.messages == [*given, *said]


# The event loop


class SlowCursor(Cursor):
    """A cursor whose every answer takes a second."""

    def execute(self, query: Any, vars: Any = None) -> None:
        super().execute("select pg_sleep(1)")
        super().execute(query, vars)


async def longest_pause(work: Callable[[], Awaitable[Any]]) -> float:
    """Do some work, and return for how long the event loop ran nothing else at worst."""
    longest = 0.0

    async def watch() -> None:
        nonlocal longest
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.002)
            longest = max(longest, time.monotonic() - before)

    watching = asyncio.ensure_future(watch())
    await asyncio.sleep(0.01)  # it watches before the work begins, and after it has ended
    await work()
    await asyncio.sleep(0.01)
    watching.cancel()
    return longest


def test_twenty_chains_over_a_slow_database_leave_the_event_loop_free(
    server_dsn: str, store: ConversationStore
) -> None:
    tokens_of_all(dialogue(1))  # loads what a process loads once, which no database can make slower
    pool = ThreadedConnectionPool(20, 20, server_dsn, cursor_factory=SlowCursor)

    async def main(slow: ConversationStore) -> float:
        chains = [
            ConversationChain(llm=parrot(), memory=VIEWS[kind](session_id=f"s{number}", store=slow))
            for number, kind in enumerate([*VIEWS] * 5)
        ]

        async def talk() -> None:
            await asyncio.gather(*(chain.ainvoke({"input": "one"}) for chain in chains))

        return await longest_pause(talk)

    with ConversationStore(pool, schema=store.schema) as slow:
        pause = asyncio.run(main(slow))
    pool.closeall()
    assert pause < 0.25
    for number in range(20):
        assert said_in(store, f"s{number}") == turns_of("one")


class Noting(BufferMemory):
    """A memory that notes in which threads it loads and saves."""

    threads: list[int] = []

    def select_messages(self, inputs: dict[str, Any]) -> list[BaseMessage]:
        self.threads.append(threading.get_ident())
        return super().select_messages(inputs)

    def save_messages(self, messages: list[BaseMessage]) -> None:
        self.threads.append(threading.get_ident())
        super().save_messages(messages)


class Talker(GenericFakeChatModel):
    """A model that streams word by word and takes tools."""

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self


class Tokens(AsyncCallbackHandler):
    """Collects the pieces of a model's answer."""

    def __init__(self) -> None:
        self.pieces: list[str] = []

    async def on_llm_new_token(self, token: str, **kwargs: Any) -> None:
        self.pieces.append(token)


INPUT = {"input": "hi"}


async def tokens_of(events: Any) -> list[str]:
    """Return the pieces of the model's answer among events."""
    return [event["data"]["chunk"].content async for event in events if event["event"] == "on_chat_model_stream"]


async def by_callbacks(executor: AgentExecutor, memory: Noting) -> list[str]:
    tokens = Tokens()
    await executor.ainvoke(INPUT, {"callbacks": [tokens]})
    return tokens.pieces


async def by_events_of_ainvoke(executor: AgentExecutor, memory: Noting) -> list[str]:
    return await tokens_of(RunnableLambda(executor.ainvoke).astream_events(INPUT, version="v2"))


async def by_a_worker(executor: AgentExecutor, memory: Noting) -> list[str]:
    chunks = await asyncio.to_thread(lambda: list(executor.stream(INPUT)))
    return [chunks[-1]["output"]]


async def by_a_history_around(executor: AgentExecutor, memory: Noting) -> list[str]:
    wrapped = RunnableWithMessageHistory(
        executor.model_copy(update={"memory": None}),
        lambda session_id: memory.for_session(session_id).as_history(),
        input_messages_key="input",
        history_messages_key="history",
        output_messages_key="output",
    )
    return await tokens_of(wrapped.astream_events(INPUT, {"configurable": {"session_id": "s"}}, version="v2"))


async def by_astream(executor: AgentExecutor, memory: Noting) -> list[str]:
    return [chunk["output"] async for chunk in executor.astream(INPUT)]


async def by_iter(executor: AgentExecutor, memory: Noting) -> list[str]:
    return [chunk["output"] async for chunk in executor.iter(INPUT)]


async def by_events(executor: AgentExecutor, memory: Noting) -> list[str]:
    return await tokens_of(executor.astream_events(INPUT, version="v2"))


OFF_THE_LOOP = [by_callbacks, by_events_of_ainvoke, by_a_worker, by_a_history_around]


@pytest.mark.parametrize("way", [*OFF_THE_LOOP, by_astream, by_iter, by_events])
def test_only_langchains_own_streaming_of_an_agent_loads_and_saves_on_the_event_loop(
    store: ConversationStore, way: Callable[[AgentExecutor, Noting], Awaitable[list[str]]]
) -> None:
    memory = Noting(session_id="s", store=store, return_messages=True)
    llm: Any = Talker(messages=iter([AIMessage("hello out there")]))
    pieces = asyncio.run(way(executor_of(llm, memory), memory))  # the loop is in this thread
    assert "".join(pieces) == "hello out there"
    on_the_loop = [thread == threading.get_ident() for thread in memory.threads]
    assert on_the_loop == [way not in OFF_THE_LOOP] * 2
    assert said_in(store) == ["hi", "hello out there"]
