"""A turn that could not be saved: who hears of it, that it is not lost, and that it is not stored twice."""

from __future__ import annotations

import asyncio
import logging
import pickle
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import psycopg2
import pytest
from chains import ConversationChain
from fakes import scripted
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables.history import RunnableWithMessageHistory
from psycopg2 import sql
from psycopg2.extensions import connection as Connection
from waiting import wait_until

from pgmemory import (
    BufferMemory,
    ConfigurationError,
    ConversationStore,
    MessageNotStorableError,
    PgMemoryError,
    PostgresChatMemory,
    PostgresChatMessageHistory,
    RelevantTurnMemory,
    SchemaError,
    StoreError,
    StoreUnavailableError,
    SummaryMemory,
    TokenWindowMemory,
    UnsavedTurn,
)

QUESTION, ANSWER = "what-was-asked", "what-was-answered"

MEMORIES: dict[str, Callable[..., PostgresChatMemory]] = {
    "buffer": BufferMemory,
    "token window": TokenWindowMemory,
    "relevant turns": lambda **fields: RelevantTurnMemory(keywords=[QUESTION], **fields),
    "summary": lambda **fields: SummaryMemory(llm=scripted("a summary"), **fields),
}
each_memory = pytest.mark.parametrize("make", MEMORIES.values(), ids=MEMORIES)


@pytest.fixture
def nowhere() -> Iterator[ConversationStore]:
    """A store that no server stands behind."""
    with ConversationStore("postgresql://app:s3cr3t@127.0.0.1:1/db", retry_seconds=0) as store:
        yield store


def save(memory: PostgresChatMemory) -> None:
    memory.save_context({"input": QUESTION}, {"output": ANSWER})


def save_asynchronously(memory: PostgresChatMemory) -> None:
    asyncio.run(memory.asave_context({"input": QUESTION}, {"output": ANSWER}))


each_way = pytest.mark.parametrize("save", [save, save_asynchronously], ids=["synchronous", "asynchronous"])


def errors(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.levelno >= logging.ERROR]


def is_said(turn: UnsavedTurn | None, *contents: str) -> bool:
    return turn is not None and tuple(message.content for message in turn.messages) == contents


def is_the_turn(turn: UnsavedTurn | None) -> bool:
    return turn is not None and turn.messages == (HumanMessage(QUESTION), AIMessage(ANSWER))


@each_way
@each_memory
def test_the_error_of_a_failed_save_carries_the_turn_and_shows_nothing_of_it(
    nowhere: ConversationStore,
    caplog: pytest.LogCaptureFixture,
    make: Callable[..., PostgresChatMemory],
    save: Callable[[PostgresChatMemory], None],
) -> None:
    memory = make(session_id="s", user_id="u", store=nowhere, idempotency_key="event 7")
    with pytest.raises(StoreUnavailableError) as caught:
        save(memory)
    turn = caught.value.unsaved_turn
    assert turn is not None and is_the_turn(turn)
    assert (turn.session_id, turn.user_id, turn.idempotency_key) == ("s", "u", "event 7")
    for text in (str(caught.value), repr(caught.value), repr(turn), caplog.text):
        assert QUESTION not in text and ANSWER not in text and "s3cr3t" not in text
    assert errors(caplog) == []  # who gets the error need not read the log
    copied = pickle.loads(pickle.dumps(caught.value))
    assert copied.unsaved_turn == turn


@each_way
@each_memory
def test_a_memory_that_is_told_to_log_lets_the_answer_through(
    nowhere: ConversationStore,
    caplog: pytest.LogCaptureFixture,
    make: Callable[..., PostgresChatMemory],
    save: Callable[[PostgresChatMemory], None],
) -> None:
    save(make(session_id="ticket-42", store=nowhere, on_save_error="log"))
    (record,) = errors(caplog)
    assert record.name.startswith("pgmemory") and record.levelno == logging.ERROR
    assert "'ticket-42'" in record.getMessage() and "port=1" in record.getMessage()
    assert is_the_turn(record.unsaved_turn)  # type: ignore[attr-defined]
    assert QUESTION not in caplog.text and ANSWER not in caplog.text and "s3cr3t" not in caplog.text


@pytest.mark.filterwarnings("ignore:The class `ConversationChain` was deprecated")
def test_a_chain_fails_or_answers_as_its_memory_is_told(
    store: ConversationStore, admin: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    def hide(name: str, other: str) -> None:
        with admin.cursor() as cursor:
            parts = [sql.Identifier(each) for each in (store.schema, name, other)]
            cursor.execute(sql.SQL("alter table {}.{} rename to {}").format(*parts))

    def chain(**fields: Any) -> Any:
        memory = BufferMemory(session_id="s", store=store, **fields)
        return ConversationChain(llm=scripted("one", "two", "three"), memory=memory)

    strict, lenient = chain(), chain(on_save_error="log")
    for each in (strict, lenient):
        each.predict(input="first")
    answers = [each.llm.answer for each in (strict, lenient)]

    def over_a_broken_database(answer: Any) -> Any:
        def answer_and_break(messages: list[BaseMessage]) -> AIMessage | str:
            hide("conversation_messages", "hidden")
            return answer(messages)  # type: ignore[no-any-return]

        return answer_and_break

    for each, answer in zip((strict, lenient), answers, strict=True):
        each.llm.answer = over_a_broken_database(answer)
    with pytest.raises(SchemaError) as caught:
        strict.predict(input="second")
    hide("hidden", "conversation_messages")
    assert is_said(caught.value.unsaved_turn, "second", "two")
    assert lenient.predict(input="second") == "two"
    hide("hidden", "conversation_messages")
    (record,) = errors(caplog)
    assert is_said(record.unsaved_turn, "second", "two")  # type: ignore[attr-defined]
    lenient.llm.answer = answers[1]
    assert lenient.predict(input="third") == "three"
    assert [message.content for message in store.list_messages("s")] == ["first", "one"] * 2 + ["third", "three"]


@pytest.mark.filterwarnings("ignore:RunnableWithMessageHistory is deprecated")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_turn_that_a_runnable_loses_without_a_word_is_logged_with_its_session(
    store: ConversationStore, caplog: pytest.LogCaptureFixture, asynchronous: bool
) -> None:
    wrapped = RunnableWithMessageHistory(
        ChatPromptTemplate.from_messages([("placeholder", "{history}"), ("human", "{input}")])
        | scripted(AIMessage("an answer", additional_kwargs={"client": object()}), "another"),
        lambda session_id: PostgresChatMessageHistory(session_id, store),
        input_messages_key="input",
        history_messages_key="history",
    )

    def ask(text: str) -> str:
        config: Any = {"configurable": {"session_id": "ticket-42"}}
        call = wrapped.ainvoke({"input": text}, config) if asynchronous else None
        answer = asyncio.run(call) if call is not None else wrapped.invoke({"input": text}, config)
        return str(answer.content)

    assert ask("lost") == "an answer"
    (record,) = [record for record in errors(caplog) if record.name.startswith("pgmemory")]
    assert "'ticket-42'" in record.getMessage() and "additional_kwargs['client']" in record.getMessage()
    assert is_said(record.unsaved_turn, "lost", "an answer")  # type: ignore[attr-defined]
    assert ask("kept") == "another"
    assert [message.content for message in store.list_messages("ticket-42")] == ["kept", "another"]


@each_memory
def test_an_unsaved_turn_is_stored_once_though_it_was_there_already(
    store: ConversationStore, make: Callable[..., PostgresChatMemory]
) -> None:
    """The answer to the first try was lost, and with it the only word of its success."""
    memory = make(session_id="s", store=store)
    history = memory.chat_memory
    with pytest.raises(StoreUnavailableError) as caught:
        with history.saving([HumanMessage(QUESTION), AIMessage(ANSWER)], None) as write_id:
            store.append(
                history.key,
                [message for message in _records(HumanMessage(QUESTION), AIMessage(ANSWER))],
                write_id=write_id,
            )
            raise StoreUnavailableError("lost", connection_lost=True)
    turn = caught.value.unsaved_turn
    assert turn is not None
    for _ in range(2):
        history.add_messages(turn.messages, idempotency_key=turn.idempotency_key)
    assert [message.content for message in store.list_messages("s")] == [QUESTION, ANSWER]
    assert len(memory.buffer_as_messages) == 2


def _records(*messages: BaseMessage) -> list[Any]:
    from pgmemory.logged import to_stored_messages

    return to_stored_messages(messages)


def test_each_failed_save_has_a_key_of_its_own(nowhere: ConversationStore) -> None:
    memory = BufferMemory(session_id="s", store=nowhere)
    keys = set()
    for _ in range(3):
        with pytest.raises(StoreUnavailableError) as caught:
            save(memory)
        assert caught.value.unsaved_turn is not None
        keys.add(caught.value.unsaved_turn.idempotency_key)
    assert len(keys) == 3


@pytest.mark.parametrize("on_save_error", ["raise", "log"])
def test_a_turn_that_cannot_be_stored_is_kept_too(
    store: ConversationStore, caplog: pytest.LogCaptureFixture, on_save_error: Any
) -> None:
    memory = BufferMemory(session_id="s", store=store, on_save_error=on_save_error)
    answer = AIMessage(ANSWER, additional_kwargs={"client": object()})
    turn = None
    try:
        memory.save_context({"input": QUESTION}, {"output": answer})
    except MessageNotStorableError as error:
        assert on_save_error == "raise"
        turn = error.unsaved_turn
    else:
        (record,) = errors(caplog)
        turn = record.unsaved_turn  # type: ignore[attr-defined]
    assert turn is not None and turn.messages == (HumanMessage(QUESTION), answer)
    assert store.list_messages("s") == []


def test_a_mistake_of_the_programmer_is_raised_whatever_the_memory_is_told(store: ConversationStore) -> None:
    memory = BufferMemory(session_id="s", store=store, on_save_error="log")
    with pytest.raises(ConfigurationError, match="output_key") as caught:
        memory.save_context({"input": QUESTION}, {"one": 1, "two": 2})
    assert caught.value.unsaved_turn is None


def test_another_way_to_handle_save_errors_is_refused(store: ConversationStore) -> None:
    with pytest.raises(ValueError, match="on_save_error"):
        BufferMemory(session_id="s", store=store, on_save_error="ignore")  # type: ignore[arg-type]


def test_loading_that_fails_is_raised_whatever_the_memory_is_told(nowhere: ConversationStore) -> None:
    memory = BufferMemory(session_id="s", store=nowhere, on_save_error="log")
    with pytest.raises(StoreError) as caught:
        memory.load_memory_variables({})
    assert caught.value.unsaved_turn is None


def test_a_copy_for_another_session_handles_save_errors_as_its_original_does(nowhere: ConversationStore) -> None:
    memory = BufferMemory(session_id="s", store=nowhere, on_save_error="log")
    assert memory.for_session("t").on_save_error == "log"


# --- Delivered again -------------------------------------------------------------------------------------------------


def test_a_turn_that_is_delivered_again_after_thousands_of_writes_is_stored_once(store: ConversationStore) -> None:
    memory = BufferMemory(session_id="s", store=store)
    save(memory.for_session("s", idempotency_key="event 7"))
    for _ in range(2000):
        save(memory)
    for _ in range(2):
        save(memory.for_session("s", idempotency_key="event 7"))
    assert [message.message_index for message in store.list_messages("s")] == list(range(2 * 2001))


@each_memory
def test_a_key_is_of_its_conversation_and_lives_as_long_as_its_turn(
    store: ConversationStore, make: Callable[..., PostgresChatMemory]
) -> None:
    original = make(session_id="any", store=store)
    history = PostgresChatMessageHistory("s", store)
    for _ in range(3):
        save(original.for_session("s", idempotency_key="event 7"))
    assert len(store.list_messages("s")) == 2
    save(original.for_session("t", idempotency_key="event 7"))
    assert len(store.list_messages("t")) == 2
    history.clear()
    save(original.for_session("s", idempotency_key="event 7"))
    assert len(store.list_messages("s")) == 2


def test_every_error_of_pgmemory_has_a_place_for_the_turn() -> None:
    assert PgMemoryError("any").unsaved_turn is None
    assert StoreError("any").unsaved_turn is None
    turn = UnsavedTurn("s", "", (HumanMessage(QUESTION),), str(uuid.uuid4()))
    assert QUESTION not in repr(turn)


def test_a_save_that_fails_after_its_task_was_cancelled_is_logged_with_its_session_and_turn(
    server_dsn: str, store: ConversationStore, admin: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(memory: PostgresChatMemory) -> None:
        saving = asyncio.ensure_future(memory.asave_context({"input": QUESTION}, {"output": ANSWER}))
        waiting = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and application_name = %s"
        with admin.cursor() as cursor:
            count = 0
            while not count:
                await asyncio.sleep(0.005)
                cursor.execute(waiting, (store.schema,))
                ((count,),) = cursor.fetchall()
            saving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await saving
            cursor.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where application_name = %s", (store.schema,)
            )

    with ConversationStore(server_dsn, schema=store.schema, application_name=store.schema, retry_seconds=0) as other:
        memory = BufferMemory(session_id="ticket-42", store=other)
        save(memory)
        with closing(psycopg2.connect(server_dsn)) as locker, locker.cursor() as cursor:
            cursor.execute(
                sql.SQL("select 1 from {}.conversations for update").format(sql.Identifier(store.schema))
            )
            asyncio.run(main(memory))
            wait_until(lambda: errors(caplog), "the failure is logged")
    (record,) = errors(caplog)
    assert "'ticket-42'" in record.getMessage() and "cancelled" in record.getMessage()
    assert is_the_turn(record.unsaved_turn)  # type: ignore[attr-defined]
    assert len(store.list_messages("ticket-42")) == 2


@pytest.mark.parametrize("asynchronous", [False, True])
@each_memory
def test_an_answer_without_a_json_form_is_handled_as_the_memory_is_told(
    store: ConversationStore,
    caplog: pytest.LogCaptureFixture,
    make: Callable[..., PostgresChatMemory],
    asynchronous: bool,
) -> None:
    def save_object(on_save_error: str) -> None:
        memory = make(session_id="s", store=store, on_save_error=on_save_error)
        said: tuple[Any, Any] = ({"input": QUESTION}, {"output": object()})
        if asynchronous:
            asyncio.run(memory.asave_context(*said))
        else:
            memory.save_context(*said)

    with pytest.raises(MessageNotStorableError, match="outputs"):
        save_object("raise")
    save_object("log")
    (record,) = errors(caplog)
    assert "'s'" in record.getMessage() and "outputs" in record.getMessage()
    assert store.list_messages("s") == []


@each_memory
def test_ways_to_store_of_ones_own_hold_in_every_call(
    store: ConversationStore, make: Callable[..., PostgresChatMemory]
) -> None:
    memory_class = type(make(session_id="any", store=store))

    class Own(memory_class):  # type: ignore[misc, valid-type]
        def turn_messages(self, inputs: Any, outputs: Any) -> list[BaseMessage]:
            turn = super().turn_messages(inputs, outputs)
            return [message.model_copy(update={"content": f"{message.content}, redacted"}) for message in turn]

        def save_messages(self, messages: list[BaseMessage]) -> None:
            super().save_messages([message for message in messages if message.type != "system"])

    fields: dict[str, Any] = {"llm": scripted("a summary")} if memory_class is SummaryMemory else {}
    if memory_class is RelevantTurnMemory:
        fields = {"keywords": [QUESTION]}
    memory = Own(session_id="s", store=store, **fields)
    history = memory.as_history()
    turn = [HumanMessage(QUESTION), AIMessage(ANSWER)]
    save(memory)
    save_asynchronously(memory)
    history.add_messages(turn)
    asyncio.run(history.aadd_messages(turn))
    redacted = [f"{QUESTION}, redacted", f"{ANSWER}, redacted"]
    assert [message.content for message in store.list_messages("s")] == redacted * 4
    memory.clear()
    history.add_messages([SystemMessage(QUESTION)])
    asyncio.run(history.aadd_messages([SystemMessage(QUESTION)]))
    assert store.list_messages("s") == []


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_runnables_turn_is_stored_by_turn_messages_also_behind_a_system_message(
    store: ConversationStore, caplog: pytest.LogCaptureFixture, asynchronous: bool
) -> None:
    class Redacting(BufferMemory):
        def turn_messages(self, inputs: Any, outputs: Any) -> list[BaseMessage]:
            turn = super().turn_messages(inputs, outputs)
            return [message.model_copy(update={"content": "redacted"}) for message in turn]

    class Failing(BufferMemory):
        def turn_messages(self, inputs: Any, outputs: Any) -> list[BaseMessage]:
            raise KeyError("a mistake of the application's")

    def add(memory: PostgresChatMemory) -> None:
        said = [SystemMessage("be kind"), HumanMessage(QUESTION), HumanMessage(QUESTION), AIMessage(ANSWER)]
        history = memory.as_history()
        if asynchronous:
            asyncio.run(history.aadd_messages(said))
        else:
            history.add_messages(said)

    add(Redacting(session_id="s", store=store, save_intermediate_steps=True))
    assert [message.content for message in store.list_messages("s")] == ["redacted"] * 4
    assert [message.role for message in store.list_messages("s")] == ["system", "human", "human", "ai"]
    # A runnable would swallow it.
    with pytest.raises(KeyError):
        add(Failing(session_id="s", store=store))
    (record,) = errors(caplog)
    assert "'s'" in record.getMessage() and "KeyError" in record.getMessage()
