"""What the memories have in common: fields, what counts as said, what is refused, copies, and what is never shown."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
import warnings
from typing import Any

import pytest
from fakes import scripted
from langchain_core.documents import Document
from langchain_core.load import dumpd
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.prompts import PromptTemplate

from pgmemory import (
    BufferMemory,
    ConfigurationError,
    ConversationStore,
    MessageNotStorableError,
    PostgresChatMemory,
    PostgresChatMessageHistory,
    RelevantTurnMemory,
    SummaryMemory,
    TokenWindowMemory,
    as_json,
    as_xml,
)


def stored(store: ConversationStore, session_id: str = "s") -> list[tuple[str, Any]]:
    return [(message.type, message.content) for message in PostgresChatMessageHistory(session_id, store).messages]


def test_stock_parameters_and_defaults(store: ConversationStore) -> None:
    memory = BufferMemory(session_id="s", store=store)
    assert (memory.memory_key, memory.human_prefix, memory.ai_prefix) == ("history", "Human", "AI")
    assert (memory.input_key, memory.output_key, memory.return_messages) == (None, None, False)
    assert memory.memory_variables == ["history"]
    assert memory.load_memory_variables({}) == {"history": ""}
    memory.return_messages = True
    assert memory.load_memory_variables({}) == {"history": []}


def test_several_outputs_take_output_when_it_is_there_without_a_warning(store: ConversationStore) -> None:
    memory = BufferMemory(session_id="s", store=store)
    memory.save_context({"input": "q"}, {"output": "a", "intermediate_steps": [object()]})
    assert stored(store) == [("human", "q"), ("ai", "a")]


def test_several_outputs_need_an_output_key_and_the_error_names_them(store: ConversationStore) -> None:
    outputs = {"answer": "a", "source_documents": [Document(page_content="d")]}
    memory = BufferMemory(session_id="s", store=store)
    with pytest.raises(ConfigurationError, match=r"'answer', 'source_documents'.*output_key"):
        memory.save_context({"input": "q"}, outputs)
    assert stored(store) == []
    memory.output_key = "answer"
    memory.save_context({"input": "q"}, outputs)
    assert stored(store) == [("human", "q"), ("ai", "a")]
    memory.output_key = "missing"
    with pytest.raises(ConfigurationError, match="'missing'"):
        memory.save_context({"input": "q"}, outputs)


def test_several_inputs_need_an_input_key_and_the_error_names_them(store: ConversationStore) -> None:
    memory = BufferMemory(session_id="s", store=store)
    with pytest.raises(ConfigurationError, match=r"'ctx', 'q'.*input_key"):
        memory.save_context({"q": "one", "ctx": "two"}, {"output": "a"})
    memory.input_key = "q"
    memory.save_context({"q": "one", "ctx": "two"}, {"output": "a"})
    assert stored(store) == [("human", "one"), ("ai", "a")]


def test_memory_variables_and_stop_are_not_taken_for_what_was_said(store: ConversationStore) -> None:
    memory = BufferMemory(session_id="s", store=store)
    memory.save_context({"history": "past", "stop": ["\n"], "question": "q"}, {"text": "a"})
    assert stored(store) == [("human", "q"), ("ai", "a")]


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (AIMessageChunk(content="streamed"), ("ai", "streamed")),
        ([{"type": "text", "text": "block"}], ("ai", [{"type": "text", "text": "block"}])),
        ({"total": 3, "städte": ["Köln"]}, ("ai", '{"total": 3, "städte": ["Köln"]}')),
        (42, ("ai", "42")),
        ([1, 2], ("ai", "[1, 2]")),
        (None, ("ai", "")),
    ],
    ids=["chunk", "content blocks", "dict", "number", "list", "none"],
)
def test_outputs_that_are_not_text_are_stored(store: ConversationStore, output: Any, expected: Any) -> None:
    BufferMemory(session_id="s", store=store).save_context({"input": "q"}, {"output": output})
    assert stored(store)[1] == expected


def test_an_output_message_is_stored_as_it_is(store: ConversationStore) -> None:
    message = AIMessage(
        "looking", id="run-1", name="bot", tool_calls=[{"name": "find", "args": {"x": 1}, "id": "c1"}]
    )
    BufferMemory(session_id="s", store=store).save_context({"input": HumanMessage("q", id="h")}, {"output": message})
    assert PostgresChatMessageHistory("s", store).messages == [HumanMessage("q", id="h"), message]


def test_a_document_as_output_is_stored_as_json_text(store: ConversationStore) -> None:
    document = Document(page_content="text", metadata={"page": 1})
    BufferMemory(session_id="s", store=store).save_context({"input": "q"}, {"output": document})
    assert json.loads(stored(store)[1][1])["page_content"] == "text"


def test_what_has_no_json_form_is_refused_and_nothing_is_written(store: ConversationStore) -> None:
    memory = BufferMemory(session_id="s", store=store)
    with pytest.raises(MessageNotStorableError, match="client"):
        memory.save_context({"input": "q"}, {"output": AIMessage("a", additional_kwargs={"client": object()})})
    assert stored(store) == []
    memory.save_context({"input": "q"}, {"output": "a"})
    assert len(stored(store)) == 2


def test_a_list_of_messages_as_input_is_stored_once_each_turn(store: ConversationStore) -> None:
    memory = BufferMemory(session_id="s", store=store)
    for number in range(3):
        memory.save_context({"input": [HumanMessage(f"m{number}")]}, {"output": "r"})
    assert [content for _, content in stored(store)] == ["m0", "r", "m1", "r", "m2", "r"]


def test_an_empty_answer_is_kept_and_its_turn_is_not_shown(store: ConversationStore) -> None:
    memory = BufferMemory(session_id="s", store=store)
    memory.save_context({"input": "q1"}, {"output": ""})
    memory.save_context({"input": "q2"}, {"output": "a2"})
    assert len(stored(store)) == 4
    assert memory.buffer == "Human: q2\nAI: a2"


def test_a_system_message_is_neither_evicted_nor_repeated(store: ConversationStore) -> None:
    PostgresChatMessageHistory("s", store).add_messages([SystemMessage("be kind")])
    memory = BufferMemory(session_id="s", store=store, k=2, return_messages=True)
    for number in range(30):
        memory.save_context({"input": f"q{number}"}, {"output": "a"})
    assert [message.type for message in memory.buffer] == ["system", "human", "ai", "human", "ai"]


def test_formats_shape_the_context(store: ConversationStore) -> None:
    memory = BufferMemory(session_id="s", store=store, human_prefix="Client")
    memory.save_context({"input": "1 < 2"}, {"output": "yes"})
    assert memory.buffer == "Client: 1 < 2\nAI: yes"
    memory.formatter = as_xml
    assert "1 &lt; 2" in memory.buffer
    memory.formatter = as_json
    assert json.loads(memory.buffer)[0]["content"] == "1 < 2"


def test_unknown_fields_are_refused(store: ConversationStore) -> None:
    with pytest.raises(ValueError, match="max_tokens_limit"):
        TokenWindowMemory(session_id="s", store=store, max_tokens_limit=10)


def test_history_and_shorthand_exclude_each_other_and_one_is_needed(store: ConversationStore) -> None:
    history = PostgresChatMessageHistory("s", store)
    with pytest.raises(ValueError, match="either chat_memory or"):
        BufferMemory(chat_memory=history, session_id="s")
    with pytest.raises(ValueError, match="chat_memory=PostgresChatMessageHistory"):
        BufferMemory(session_id="s")
    with pytest.raises(ValueError, match="PostgresChatMessageHistory"):
        BufferMemory(chat_memory="s")


def test_a_turn_saved_again_under_its_key_is_stored_once(store: ConversationStore) -> None:
    configured = BufferMemory(session_id="template", store=store)
    for _ in range(3):
        memory = configured.for_session("s", idempotency_key="webhook-17")
        memory.save_context({"input": "q"}, {"output": "a"})
        configured.for_session("s").save_context({"input": "other"}, {"output": "o"})
    assert [content for _, content in stored(store)] == ["q", "a", "other", "o", "other", "o", "other", "o"]


def test_a_memory_of_ones_own_works_as_text_and_messages_sync_and_async(store: ConversationStore) -> None:
    class Shouting(BufferMemory):
        """Stores what was said in capitals, shows only what the human said."""

        loudness: int = 1

        def turn_messages(self, inputs: Any, outputs: Any) -> Any:
            messages = super().turn_messages(inputs, outputs)
            return [type(message)(str(message.content).upper() + "!" * self.loudness) for message in messages]

        def select_messages(self, inputs: Any) -> Any:
            return [message for message in super().select_messages(inputs) if message.type == "human"]

    memory = Shouting(session_id="s", store=store, loudness=2)
    memory.save_context({"input": "one"}, {"output": "a"})
    asyncio.run(memory.asave_context({"input": "two"}, {"output": "b"}))
    assert stored(store)[3] == ("ai", "B!!")
    assert asyncio.run(memory.aload_memory_variables({})) == {"history": "Human: ONE!!\nHuman: TWO!!"}
    memory.return_messages = True
    assert len(memory.load_memory_variables({})["history"]) == 2
    asyncio.run(memory.aclear())
    assert memory.buffer == []


def test_a_turn_without_messages_stores_nothing(store: ConversationStore) -> None:
    class Silent(BufferMemory):
        def turn_messages(self, inputs: Any, outputs: Any) -> Any:
            return []

    Silent(session_id="s", store=store).save_context({"input": "q"}, {"output": "a"})
    assert store.list_conversations() == []


def test_a_list_that_a_chain_returns_is_not_taken_for_content_blocks(store: ConversationStore) -> None:
    memory = BufferMemory(session_id="s", store=store)
    for output in (["apple", "orange"], [{"type": "order", "id": 7}]):
        memory.save_context({"input": "q"}, {"output": output})
        assert json.loads(stored(store)[-1][1]) == output


def test_an_unstorable_value_is_named_by_the_key_it_came_under(store: ConversationStore) -> None:
    memory = BufferMemory(session_id="s", store=store)
    with pytest.raises(MessageNotStorableError, match=r"cannot store inputs\['input'\]"):
        memory.save_context({"input": object()}, {"output": "a"})
    with pytest.raises(MessageNotStorableError, match=r"cannot store outputs\['output'\]\['x'\]"):
        memory.save_context({"input": "q"}, {"output": {"x": object()}})
    assert stored(store) == []


def test_turn_messages_may_be_any_iterable_but_not_a_single_message(store: ConversationStore) -> None:
    class Lazy(RelevantTurnMemory):
        def turn_messages(self, inputs: Any, outputs: Any) -> Any:
            yield from super().turn_messages(inputs, outputs)

    class Single(BufferMemory):
        def turn_messages(self, inputs: Any, outputs: Any) -> Any:
            return HumanMessage("q")

    Lazy(session_id="s", store=store, keywords=["q"]).save_context({"input": "q"}, {"output": "a"})
    assert stored(store) == [("human", "q"), ("ai", "a")]
    with pytest.raises(ConfigurationError, match="a list of messages, not a single HumanMessage"):
        Single(session_id="s", store=store).save_context({"input": "q"}, {"output": "a"})


def test_a_field_that_is_changed_later_is_checked_and_takes_effect(store: ConversationStore) -> None:
    relevant = RelevantTurnMemory(session_id="s", store=store, keywords=["invoice"])
    relevant.keywords = ["refund"]
    relevant.save_context({"input": "an invoice"}, {"output": "a"})
    relevant.save_context({"input": "a refund"}, {"output": "a"})
    assert stored(store) == [("human", "a refund"), ("ai", "a")]
    window = TokenWindowMemory(session_id="s", store=store, max_token_limit=2, token_counter=len)
    assert window.buffer == "Human: a refund\nAI: a"
    window.token_counter = lambda messages: 3 * len(messages)
    assert window.buffer == ""
    buffer = BufferMemory(session_id="s", store=store, k=1)
    for wrong in (-1, "one"):
        with pytest.raises(ValueError):
            buffer.k = wrong
    with pytest.raises(ValueError, match="blank"):
        relevant.keywords = [""]


def test_a_coroutine_cannot_judge_a_turn(store: ConversationStore) -> None:
    async def judge(messages: Any) -> bool:
        return False

    with pytest.raises(ValueError, match="ordinary function"):
        RelevantTurnMemory(session_id="s", store=store, is_relevant=judge)


@pytest.mark.parametrize("message_class", [ChatMessage, ToolMessage, RemoveMessage, FunctionMessage])
def test_message_classes_that_need_more_than_content_are_refused(store: ConversationStore, message_class: Any) -> None:
    with pytest.raises(ValueError, match="summary_message_cls"):
        SummaryMemory(session_id="s", store=store, llm=scripted("s"), summary_message_cls=message_class)


@pytest.mark.parametrize(
    ("position", "field", "wrong"),
    [
        (1, "token_counter", "no-such-encoding"),
        (1, "max_token_limit", -1),
        (2, "keywords", []),
        (2, "keywords", [""]),
        (2, "max_token_limit", -1),
        (3, "prompt", PromptTemplate.from_template("{summary}")),
        (3, "summary_message_cls", ChatMessage),
    ],
)
def test_a_value_that_is_refused_later_changes_nothing(
    store: ConversationStore, position: int, field: str, wrong: Any
) -> None:
    memory = every_memory(store)[position]
    before = getattr(memory, field)
    with pytest.raises(ValueError):
        setattr(memory, field, wrong)
    assert getattr(memory, field) == before
    memory.human_prefix = "Client"
    memory.save_context({"input": "q"}, {"output": "a"})
    assert memory.buffer == "Client: q\nAI: a"


def test_a_type_that_is_no_text_makes_no_content_block(store: ConversationStore) -> None:
    memory = BufferMemory(session_id="s", store=store)
    for output in ([{"type": ["x"]}], [{"type": {"a": 1}}], [{"type": "text"}, {"type": ["x"]}], [], ["a"]):
        memory.save_context({"input": "q"}, {"output": output})
        assert json.loads(stored(store)[-1][1]) == output


@pytest.mark.parametrize("kind", ["input_image", "redacted_thinking", "text-plain", "server_tool_use"])
def test_blocks_of_every_provider_are_content(store: ConversationStore, kind: str) -> None:
    said = [{"type": "text", "text": "hi"}, {"type": kind, "id": "1"}]
    BufferMemory(session_id="s", store=store).save_context({"input": said}, {"output": "a"})
    assert stored(store)[0] == ("human", said)


@pytest.mark.parametrize("position", range(4), ids=["buffer", "token window", "relevant turns", "summary"])
def test_content_blocks_come_back_as_they_were_and_show_their_text(store: ConversationStore, position: int) -> None:
    said = [{"type": "text", "text": "q?"}, {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}]
    memory = every_memory(store)[position]
    memory.save_context({"input": said}, {"output": AIMessage("a cat")})
    assert memory.load_memory_variables({}) == {"history": "Human: q?\nAI: a cat"}
    memory.return_messages = True
    assert memory.load_memory_variables({}) == {"history": [HumanMessage(said), AIMessage("a cat")]}


def test_overriding_save_context_holds_asynchronously_too(store: ConversationStore) -> None:
    class Audited(SummaryMemory):
        def save_context(self, inputs: Any, outputs: Any) -> None:
            super().save_context({"input": "masked"}, outputs)

    memory = Audited(session_id="s", store=store, llm=scripted("s"))
    asyncio.run(memory.asave_context({"input": "card 4111"}, {"output": "a"}))
    assert stored(store) == [("human", "masked"), ("ai", "a")]


def test_a_misspelt_field_is_named_even_where_the_history_is_missing(store: ConversationStore) -> None:
    with pytest.raises(ValueError, match="stroe"):
        BufferMemory(session_id="s", stroe=store)


def test_a_memory_tells_where_its_conversation_is(store: ConversationStore) -> None:
    memory = BufferMemory(session_id=7, store=store, user_id="u", max_messages=9)
    assert (memory.session_id, memory.store, memory.user_id, memory.max_messages) == ("7", store, "u", 9)


def test_another_session_keeps_the_kind_of_history(store: ConversationStore) -> None:
    class Audited(PostgresChatMessageHistory):
        pass

    memory = BufferMemory(chat_memory=Audited("s", store, max_messages=9))
    other = memory.for_session("t", user_id="u").chat_memory
    assert (type(other), other.session_id, other.user_id, other.max_messages) == (Audited, "t", "u", 9)


def test_the_buffer_is_there_asynchronously_as_the_stock_class_has_it(store: ConversationStore) -> None:
    memory = BufferMemory(session_id="s", store=store)
    memory.save_context({"input": "q"}, {"output": "a"})

    async def buffers() -> list[Any]:
        return [await memory.abuffer(), await memory.abuffer_as_str(), await memory.abuffer_as_messages()]

    assert asyncio.run(buffers()) == ["Human: q\nAI: a", "Human: q\nAI: a", [HumanMessage("q"), AIMessage("a")]]


def test_a_limit_that_is_a_function_does_not_spoil_dumps(store: ConversationStore) -> None:
    memory = TokenWindowMemory(session_id="s", store=store, max_token_limit=lambda inputs: 3)
    assert json.loads(memory.model_dump_json())["max_token_limit"] is None
    memory.max_token_limit = 7
    assert json.loads(memory.model_dump_json())["max_token_limit"] == 7


def every_memory(store: ConversationStore) -> list[PostgresChatMemory]:
    fields: dict[str, Any] = {"session_id": "s", "store": store}
    return [
        BufferMemory(k=1, **fields),
        TokenWindowMemory(**fields),
        RelevantTurnMemory(keywords=["q"], **fields),
        SummaryMemory(llm=scripted("sum"), **fields),
    ]


@pytest.mark.parametrize("position", range(4), ids=["buffer", "token window", "relevant turns", "summary"])
def test_copies_work_on_their_own(store: ConversationStore, position: int) -> None:
    memory = every_memory(store)[position]
    memory.save_context({"input": "q"}, {"output": "a"})
    copies = [copy.deepcopy(memory), copy.copy(memory)]
    if position != 3:  # the stand-in model holds a function that cannot be pickled
        copies.append(pickle.loads(pickle.dumps(memory)))
    for copied in copies:
        assert copied.buffer == "Human: q\nAI: a"
        if copied.chat_memory.store is not store:
            copied.chat_memory.store.close()
    assert memory.buffer == "Human: q\nAI: a"


def test_building_memories_is_silent_and_opens_no_connection(store: ConversationStore, admin: Any) -> None:
    with ConversationStore(_dsn_of(store), schema=store.schema, application_name="never-used") as unused:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(50):
                every_memory(unused)
        with admin.cursor() as cursor:
            cursor.execute("select count(*) from pg_stat_activity where application_name = 'never-used'")
            assert cursor.fetchone() == (0,)


def test_no_dump_or_text_of_a_memory_shows_the_password(server_dsn: str) -> None:
    store = ConversationStore("postgresql://bot:s3cr3t-w0rd@localhost:1/db", retry_seconds=0)
    for memory in every_memory(store):
        shown = [repr(memory), str(memory), str(memory.model_dump()), str(dumpd(memory)), repr(memory.__dict__)]
        shown += [memory.model_dump_json(), repr(memory.chat_memory), repr(store)]
        assert not any("s3cr3t" in text for text in shown)
        with pytest.raises(Exception, match="localhost") as caught:
            memory.load_memory_variables({})
        error: BaseException | None = caught.value
        while error is not None:
            assert "s3cr3t" not in repr(error) + str(error)
            error = error.__cause__ or error.__context__


def _dsn_of(store: ConversationStore) -> str:
    return store._database._source._pool._dsn  # type: ignore[no-any-return]


def test_a_single_message_where_a_list_belongs_is_refused_by_every_memory(store: ConversationStore) -> None:
    for memory in every_memory(store):
        with pytest.raises(ConfigurationError, match="give a list of messages, not a single HumanMessage"):
            memory.save_messages(HumanMessage("q"))  # type: ignore[arg-type]
    assert stored(store) == []
