"""The memories where they are used: in LangChain's own chains, agents and runnables, with a stand-in for the model."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from chains import (
    AgentExecutor,
    CombinedMemory,
    ConversationChain,
    LLMChain,
    ReadOnlySharedMemory,
    SequentialChain,
    create_tool_calling_agent,
)
from fakes import FakeChat, scripted
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate
from langchain_core.tools import tool

from pgmemory import (
    BufferMemory,
    ConversationStore,
    PostgresChatMessageHistory,
    RelevantTurnMemory,
    SummaryMemory,
    TokenWindowMemory,
)


def parrot() -> FakeChat:
    """Return a model that repeats the last thing the human said, so that a turn's halves can be told to belong."""
    return FakeChat(answer=lambda messages: "re: " + str(messages[-1].content).split("Human: ")[-1].split("\n")[0])


def every_memory(store: ConversationStore, **fields: Any) -> list[Any]:
    fields = {"session_id": "s", "store": store} | fields
    return [
        BufferMemory(**fields),
        BufferMemory(k=2, **fields),
        TokenWindowMemory(max_token_limit=200, **fields),
        RelevantTurnMemory(keywords=["invoice"], **fields),
        SummaryMemory(llm=scripted("a summary"), max_token_limit=200, **fields),
    ]


MEMORIES = ["buffer", "last turns", "token window", "relevant turns", "summary"]


@pytest.mark.parametrize("position", range(5), ids=MEMORIES)
def test_conversation_chain_takes_every_memory_with_its_own_prompt(store: ConversationStore, position: int) -> None:
    llm = parrot()
    chain = ConversationChain(llm=llm, memory=every_memory(store)[position])
    assert chain.predict(input="my invoice is wrong") == "re: my invoice is wrong"
    again = ConversationChain(llm=llm, memory=every_memory(store)[position])
    again.invoke({"input": "which invoice?"})
    assert "Human: my invoice is wrong\nAI: re: my invoice is wrong\nHuman: which invoice?" in llm.prompts[-1]


@pytest.mark.parametrize("position", range(5), ids=MEMORIES)
def test_conversation_chain_takes_every_memory_asynchronously(store: ConversationStore, position: int) -> None:
    llm = parrot()
    chain = ConversationChain(llm=llm, memory=every_memory(store)[position])

    async def talk() -> None:
        await chain.ainvoke({"input": "my invoice is wrong"})
        await chain.apredict(input="which invoice?")

    asyncio.run(talk())
    assert "Human: my invoice is wrong\nAI: re: my invoice is wrong" in llm.prompts[-1]


def test_only_keyword_turns_reach_the_model_of_a_support_bot(store: ConversationStore) -> None:
    llm = parrot()
    memory = RelevantTurnMemory(session_id="s", store=store, keywords=["invoice"])
    chain = ConversationChain(llm=llm, memory=memory)
    for said in ["nice weather", "my INVOICE 1042", "do you like music?", "and the address?"]:
        chain.predict(input=said)
    assert "INVOICE 1042" in llm.prompts[-1]
    assert "weather" not in llm.prompts[-1] and "music" not in llm.prompts[-1]


def test_llm_chain_with_messages_and_several_inputs(store: ConversationStore) -> None:
    prompt = ChatPromptTemplate.from_messages(
        [("system", "Answer in {language}."), MessagesPlaceholder("past"), ("human", "{question}")]
    )
    llm = parrot()
    memory = BufferMemory(
        session_id="s", store=store, memory_key="past", input_key="question", return_messages=True
    )
    chain = LLMChain(llm=llm, prompt=prompt, memory=memory)
    chain.invoke({"language": "French", "question": "one"})
    chain.invoke({"language": "French", "question": "two"})
    assert [message.content for message in llm.calls[-1][1:]] == ["one", "re: one", "two"]


def test_sequential_chain_saves_the_turn_of_its_inner_chain(store: ConversationStore) -> None:
    llm = parrot()
    inner = LLMChain(
        llm=llm,
        prompt=PromptTemplate.from_template("{history}\nHuman: {question}"),
        output_key="draft",
        memory=BufferMemory(session_id="s", store=store, input_key="question"),
    )
    outer = LLMChain(llm=llm, prompt=PromptTemplate.from_template("Human: shorter {draft}"), output_key="answer")
    chain = SequentialChain(chains=[inner, outer], input_variables=["question"], output_variables=["answer"])
    assert chain.invoke({"question": "one"})["answer"] == "re: shorter re: one"
    chain.invoke({"question": "two"})
    contents = [message.content for message in PostgresChatMessageHistory("s", store).messages]
    assert contents == ["one", "re: one", "two", "re: two"]


def test_combined_memories_over_one_log_store_a_turn_once_if_one_of_them_only_reads(store: ConversationStore) -> None:
    history = PostgresChatMessageHistory("s", store)
    invoices = RelevantTurnMemory(
        chat_memory=history, keywords=["invoice"], memory_key="invoices", input_key="input", k=1
    )
    recent = BufferMemory(chat_memory=history, memory_key="recent", input_key="input", k=1)
    llm = parrot()
    chain = ConversationChain(
        llm=llm,
        prompt=PromptTemplate.from_template("About invoices: {invoices}\nRecently: {recent}\nHuman: {input}"),
        memory=CombinedMemory(memories=[recent, ReadOnlySharedMemory(memory=invoices)]),
    )
    for said in ["my invoice 1042", "hello", "bye"]:
        chain.predict(input=said)
    assert len(history.messages) == 6
    assert "About invoices: Human: my invoice 1042\nAI: re: my invoice 1042\nRecently: Human: hello" in llm.prompts[-1]


def test_a_read_only_view_shows_what_others_write(store: ConversationStore) -> None:
    history = PostgresChatMessageHistory("s", store)
    relevant = ReadOnlySharedMemory(memory=RelevantTurnMemory(chat_memory=history, keywords=["refund"]))
    summary = ReadOnlySharedMemory(
        memory=SummaryMemory(chat_memory=history, llm=scripted(AssertionError("asked")), max_token_limit=50)
    )
    for number in range(40):
        history.add_messages([HumanMessage(f"question {number}"), AIMessage(f"answer {number}")])
    history.add_messages([HumanMessage("refund please"), AIMessage("of course")])
    assert relevant.load_memory_variables({})["history"] == "Human: refund please\nAI: of course"
    assert 2 <= len(summary.load_memory_variables({})["history"].splitlines()) <= 20
    for memory in (relevant, summary):
        memory.save_context({"input": "refund"}, {"output": "not stored"})
        memory.clear()
    assert len(history.messages) == 82


@tool
def order_status(order: str) -> str:
    """Tell the state of an order."""
    return f"order {order} is on its way"


def test_a_tool_calling_agent_sees_a_window_of_its_turns(store: ConversationStore) -> None:
    call = AIMessage("", tool_calls=[{"name": "order_status", "args": {"order": "7"}, "id": "c1"}])
    llm = scripted(call, AIMessage("It is on its way."), AIMessage("Order 7."), AIMessage("Bye."))
    prompt = ChatPromptTemplate.from_messages(
        [
            ("system", "You help."),
            MessagesPlaceholder("chat_history"),
            ("human", "{input}"),
            MessagesPlaceholder("agent_scratchpad"),
        ]
    )
    memory = BufferMemory(session_id="s", store=store, memory_key="chat_history", return_messages=True, k=1)
    executor = AgentExecutor(
        agent=create_tool_calling_agent(llm, [order_status], prompt), tools=[order_status], memory=memory
    )
    assert executor.invoke({"input": "Where is order 7?"})["output"] == "It is on its way."
    assert "order 7 is on its way" in str(llm.calls[1])
    executor.invoke({"input": "Which order was it?"})
    seen = [message.content for message in llm.calls[2] if not isinstance(message, SystemMessage)]
    assert seen == ["Where is order 7?", "It is on its way.", "Which order was it?"]
    asyncio.run(executor.ainvoke({"input": "Thanks"}))
    seen = [message.content for message in llm.calls[3] if not isinstance(message, SystemMessage)]
    assert seen == ["Which order was it?", "Order 7.", "Thanks"]
    assert len(PostgresChatMessageHistory("s", store).messages) == 6


def test_an_agent_that_returns_its_steps_stores_the_answer_without_a_warning(store: ConversationStore) -> None:
    llm = scripted(AIMessage("Hello."))
    prompt = ChatPromptTemplate.from_messages([("human", "{input}"), MessagesPlaceholder("agent_scratchpad")])
    executor = AgentExecutor(
        agent=create_tool_calling_agent(llm, [order_status], prompt),
        tools=[order_status],
        memory=BufferMemory(session_id="s", store=store),
        return_intermediate_steps=True,
    )
    executor.invoke({"input": "Hi"})
    list(executor.stream({"input": "Hi again"}))
    contents = [message.content for message in PostgresChatMessageHistory("s", store).messages]
    assert contents == ["Hi", "Hello.", "Hi again", "Hello."]


def test_batches_of_a_chain_keep_turns_whole(store: ConversationStore) -> None:
    chain = ConversationChain(llm=parrot(), memory=BufferMemory(session_id="s", store=store, k=0))
    chain.batch([{"input": f"q{number}"} for number in range(8)])
    messages: list[BaseMessage] = PostgresChatMessageHistory("s", store).messages
    assert len(messages) == 16
    for human, ai in zip(messages[::2], messages[1::2], strict=True):
        assert ai.content == f"re: {human.content}"


def test_one_memory_configured_once_serves_every_request_by_its_session(store: ConversationStore) -> None:
    configured = TokenWindowMemory(session_id="template", store=store, max_token_limit=100, max_messages=4)
    for user in ("u1", "u2"):
        for said in ("one", "two", "three"):
            memory = configured.for_session("ticket", user_id=user)
            ConversationChain(llm=parrot(), memory=memory).predict(input=f"{said} of {user}")
    for user in ("u1", "u2"):
        contents = [message.content for message in PostgresChatMessageHistory("ticket", store, user_id=user).messages]
        assert contents == [f"two of {user}", f"re: two of {user}", f"three of {user}", f"re: three of {user}"]
    assert store.list_messages("template") == []
