"""The rolling summary: what is folded and when, and that nothing is lost or said twice whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from fakes import FakeChat, scripted
from langchain_core.language_models import FakeListLLM
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.prompts import PromptTemplate
from psycopg2.extensions import connection as Connection

import pgmemory.logged as logged_room
from pgmemory import BufferMemory, ConversationStore, PostgresChatMessageHistory, SummaryError, SummaryMemory

MARKER = re.compile(r"\bm\d+[ha]\b")


def words(messages: Sequence[BaseMessage]) -> int:
    """Count words: a counter whose figures a reader can check."""
    return sum(len(str(message.content).split()) for message in messages)


def turn(number: int, length: int = 5) -> tuple[dict[str, str], dict[str, str]]:
    """Return a turn of two messages of `length` words each, with a marker in either."""
    filler = "x " * (length - 1)
    return {"input": f"m{number}h {filler}".strip()}, {"output": f"m{number}a {filler}".strip()}


def quoting(prompt: str) -> str:
    """Return a perfect summary: all markers of the prompt."""
    return " ".join(dict.fromkeys(MARKER.findall(prompt)))


def perfect_model() -> FakeChat:
    """Return a model whose summary holds every marker it was given, so that a lost one is seen."""
    return FakeChat(answer=lambda messages: quoting(str(messages[0].content)))


def new_lines(prompt: str) -> str:
    """Return the part of LangChain's summary prompt that holds the turns to be folded."""
    return prompt.split("New lines of conversation:")[-1].split("New summary:")[0]


def markers(messages: Sequence[BaseMessage]) -> list[str]:
    return MARKER.findall(" ".join(str(message.content) for message in messages))


def memory_of(store: ConversationStore, llm: Any, session_id: str = "s", **fields: Any) -> SummaryMemory:
    fields = {"max_token_limit": 40, "token_counter": words, "return_messages": True} | fields
    return SummaryMemory(session_id=session_id, store=store, llm=llm, **fields)


def test_nothing_is_folded_up_to_the_limit(store: ConversationStore) -> None:
    llm = perfect_model()
    memory = memory_of(store, llm)
    for number in range(4):
        memory.save_context(*turn(number))
    assert words(memory.buffer) == 40
    assert llm.calls == []


def test_passing_the_limit_folds_oldest_turns_down_to_half_in_one_call(store: ConversationStore) -> None:
    llm = scripted("the summary")
    memory = memory_of(store, llm)
    for number in range(5):
        memory.save_context(*turn(number))
    assert len(llm.calls) == 1
    assert markers(memory.buffer) == ["m3h", "m3a", "m4h", "m4a"]
    assert MARKER.findall(new_lines(llm.prompts[0])) == ["m0h", "m0a", "m1h", "m1a", "m2h", "m2a"]


def test_the_summary_comes_first_once_and_in_the_configured_class(store: ConversationStore) -> None:
    memory = memory_of(store, scripted("the summary"), summary_message_cls=HumanMessage)
    for number in range(12):
        memory.save_context(*turn(number))
    summaries = [position for position, message in enumerate(memory.buffer) if message.content == "the summary"]
    assert summaries == [0]
    assert type(memory.buffer[0]) is HumanMessage


def test_every_message_is_summarised_once_and_none_is_missing(store: ConversationStore) -> None:
    llm = perfect_model()
    memory = memory_of(store, llm, max_token_limit=60)
    expected: list[str] = []
    for number in range(30):
        memory.save_context(*turn(number))
        expected += [f"m{number}h", f"m{number}a"]
        assert sorted(markers(memory.buffer)) == sorted(expected)
    folded = MARKER.findall(" ".join(map(new_lines, llm.prompts)))
    assert len(folded) == len(set(folded)) > 20


def test_a_new_object_shows_the_summary_without_asking_the_model(store: ConversationStore) -> None:
    first = memory_of(store, perfect_model())
    for number in range(8):
        first.save_context(*turn(number))
    llm = scripted(AssertionError("the model was asked"))
    assert memory_of(store, llm).buffer == first.buffer
    assert len(set(markers(first.buffer))) == 16
    assert llm.calls == []


def test_saving_takes_one_round_trip_and_folding_one_more_to_let_it_take_effect(counted_store: Any) -> None:
    memory = memory_of(counted_store, scripted("short"), token_counter=None, max_token_limit=100)
    memory.save_context(*turn(0))
    assert len(counted_store.executes) == 1
    counted_store.executes.clear()
    memory.load_memory_variables({})
    assert len(counted_store.executes) == 1
    while not memory.llm.calls:
        counted_store.executes.clear()
        memory.save_context(*turn(1, 20))
    statements = [executed.statement for executed in counted_store.executes]
    assert sum("insert into" in statement for statement in statements) == 2
    assert len(statements) <= 3


def test_a_log_that_others_wrote_is_folded_in_batches_and_nothing_is_missing(store: ConversationStore) -> None:
    history = PostgresChatMessageHistory("s", store)
    for number in range(50):
        inputs, outputs = turn(number)
        history.add_messages([HumanMessage(inputs["input"]), AIMessage(outputs["output"])])
    llm = perfect_model()
    memory = memory_of(store, llm)
    memory.save_context(*turn(50))
    assert len(set(markers(memory.buffer))) == 102
    assert len(llm.calls) > 3
    assert all(len(new_lines(prompt).split()) <= 80 * 1.2 for prompt in llm.prompts)  # prefixes are words here


def test_fold_on_request_does_what_saving_does(store: ConversationStore) -> None:
    history = PostgresChatMessageHistory("s", store)
    memory = memory_of(store, perfect_model(), max_token_limit=20)
    assert memory.fold() is False
    for number in range(10):
        inputs, outputs = turn(number)
        history.add_messages([HumanMessage(inputs["input"]), AIMessage(outputs["output"])])
    assert memory.fold() is True
    assert memory.fold() is False
    assert sorted(markers(memory.buffer)) == sorted(f"m{number}{who}" for number in range(10) for who in "ha")
    assert store.get_conversation("s").summarized_through == 17


def test_a_greeting_is_folded_and_the_preambles_system_messages_never(store: ConversationStore) -> None:
    history = PostgresChatMessageHistory("s", store)
    history.add_messages([SystemMessage("m90h be kind"), AIMessage("m91a welcome")])
    llm = perfect_model()
    memory = memory_of(store, llm)
    for number in range(8):
        memory.save_context(*turn(number))
    assert [type(message) for message in memory.buffer[:2]] == [SystemMessage, SystemMessage]
    assert memory.buffer[0].content == "m90h be kind"
    assert "m91a" in memory.buffer[1].content
    assert not any("m90h" in prompt for prompt in llm.prompts)


def test_the_newest_turn_is_never_folded_however_long_it_is(store: ConversationStore) -> None:
    memory = memory_of(store, scripted("short"), max_token_limit=10)
    for number in range(3):
        memory.save_context(*turn(number, 100))
        assert markers(memory.buffer)[-2:] == [f"m{number}h", f"m{number}a"]


def test_a_failing_model_loses_nothing_and_the_next_save_tries_again(
    store: ConversationStore, caplog: pytest.LogCaptureFixture
) -> None:
    llm = perfect_model()
    answer, failures = llm.answer, [RuntimeError("quota"), RuntimeError("quota")]

    def sometimes(messages: list[BaseMessage]) -> Any:
        if failures:
            raise failures.pop()
        return answer(messages)

    llm.answer = sometimes
    memory = memory_of(store, llm, session_id="ticket-42")
    with caplog.at_level(logging.ERROR, "pgmemory"):
        for number in range(7):
            memory.save_context(*turn(number))
    assert failures == []
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    assert all("'ticket-42'" in record.getMessage() for record in caplog.records)
    assert sorted(markers(memory.buffer)) == sorted(f"m{number}{who}" for number in range(7) for who in "ha")
    assert not any("quota" in str(message.content) for message in memory.buffer)


def test_while_the_model_fails_what_is_loaded_stays_within_twice_the_limit(store: ConversationStore) -> None:
    memory = memory_of(store, scripted(RuntimeError("down")))
    for number in range(40):
        memory.save_context(*turn(number))
        assert words(memory.buffer) <= 80
    assert markers(memory.buffer)[-1] == "m39a"
    assert len(PostgresChatMessageHistory("s", store).messages) == 80


def test_an_answer_without_text_is_no_summary(store: ConversationStore) -> None:
    memory = memory_of(store, scripted(" "), max_token_limit=10)
    for number in range(4):
        memory.save_context(*turn(number))
    assert store.get_conversation("s").summarized_through == -1
    with pytest.raises(SummaryError, match="without text"):
        memory.fold()


def test_an_endless_model_neither_hangs_nor_loses_anything(store: ConversationStore) -> None:
    llm = FakeChat(answer=lambda messages: quoting(str(messages[0].content)) + " word" * 500)
    memory = memory_of(store, llm, max_token_limit=20)
    for number in range(10):
        memory.save_context(*turn(number))
    assert sorted(markers(memory.buffer)) == sorted(f"m{number}{who}" for number in range(10) for who in "ha")
    assert len(llm.calls) <= 10


def test_clearing_during_a_fold_leaves_no_summary_behind(store: ConversationStore) -> None:
    history = PostgresChatMessageHistory("s", store)

    def clear_meanwhile(messages: list[BaseMessage]) -> str:
        history.clear()
        return "of what was cleared"

    memory = memory_of(store, FakeChat(answer=clear_meanwhile), max_token_limit=20)
    for number in range(3):
        memory.save_context(*turn(number))
    assert len(memory.llm.calls) == 1
    assert memory.buffer == []
    memory.llm = perfect_model()
    memory.save_context(*turn(9))
    assert markers(memory.buffer) == ["m9h", "m9a"]


def test_of_two_workers_that_fold_at_once_one_wins_and_no_message_is_lost(store: ConversationStore) -> None:
    history = PostgresChatMessageHistory("s", store)
    for number in range(12):
        inputs, outputs = turn(number)
        history.add_messages([HumanMessage(inputs["input"]), AIMessage(outputs["output"])])
    together = threading.Barrier(2)
    effective: list[str] = []

    def answer_together(messages: list[BaseMessage]) -> str:
        if len(effective) < 2:
            effective.append(str(messages[0].content))
            together.wait(30)
        return quoting(str(messages[0].content))

    workers = [memory_of(store, FakeChat(answer=answer_together), max_token_limit=80) for _ in range(2)]
    threads = [threading.Thread(target=worker.fold) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert new_lines(effective[0]) == new_lines(effective[1])
    assert sum(len(worker.llm.calls) for worker in workers) == 2, "the loser asks no further"
    shown = markers(workers[0].buffer)
    assert sorted(shown) == sorted(f"m{number}{who}" for number in range(12) for who in "ha")


def test_no_connection_is_held_while_the_model_works(store: ConversationStore, admin: Connection) -> None:
    def busy_connections(messages: list[BaseMessage]) -> str:
        with admin.cursor() as cursor:
            cursor.execute(
                "select count(*) from pg_stat_activity where application_name = 'pgmemory' and state <> 'idle'"
                " and query like %s",
                (f"%{store.schema}%",),
            )
            seen.append(cursor.fetchone()[0])
        return "short"

    seen: list[int] = []
    memory = memory_of(store, FakeChat(answer=busy_connections), max_token_limit=20)
    for number in range(4):
        memory.save_context(*turn(number))
    assert seen and set(seen) == {0}


@pytest.mark.parametrize("return_messages", [False, True])
@pytest.mark.parametrize("turns", [1, 8])
def test_text_and_messages_are_honoured_with_and_without_a_summary(
    store: ConversationStore, return_messages: bool, turns: int
) -> None:
    memory = memory_of(store, scripted("the summary"), return_messages=return_messages, human_prefix="Client")
    for number in range(turns):
        memory.save_context(*turn(number))
    loaded = memory.load_memory_variables({})["history"]
    assert isinstance(loaded, list if return_messages else str)
    if not return_messages:
        assert loaded.startswith("System: the summary\nClient: m" if turns == 8 else "Client: m0h")


def test_custom_prefixes_reach_the_summary_prompt(store: ConversationStore) -> None:
    llm = scripted("the summary")
    memory = memory_of(store, llm, human_prefix="Client", ai_prefix="Bot")
    for number in range(5):
        memory.save_context(*turn(number))
    assert "Client: m0h" in llm.prompts[0]
    assert "Bot: m0a" in llm.prompts[0]


def test_a_prompt_of_ones_own_and_a_text_model_serve(store: ConversationStore) -> None:
    prompt = PromptTemplate.from_template("So far {summary}; new {new_lines}; now shorter")
    memory = memory_of(store, FakeListLLM(responses=["shorter"]), prompt=prompt)
    for number in range(5):
        memory.save_context(*turn(number))
    assert memory.buffer[0].content == "shorter"
    with pytest.raises(ValueError, match="'summary' and 'new_lines'"):
        memory_of(store, FakeListLLM(responses=["x"]), prompt=PromptTemplate.from_template("{summary}"))


def test_pruning_spares_what_no_summary_covers_yet(store: ConversationStore) -> None:
    failing = memory_of(store, scripted(RuntimeError("down")), max_messages=4)
    for number in range(6):
        failing.save_context(*turn(number))
    history = PostgresChatMessageHistory("s", store, max_messages=4)
    history.add_messages([HumanMessage("m6h x"), AIMessage("m6a x")])
    assert len(history.messages) == 14
    working = memory_of(store, perfect_model(), max_messages=4)
    working.save_context(*turn(7))
    assert len(set(markers(working.buffer))) == 16
    working.save_context(*turn(8))
    assert len(set(markers(working.buffer))) == 18
    assert len(history.messages) < 14


def test_asynchronous_saving_folds_too(store: ConversationStore) -> None:
    memory = memory_of(store, perfect_model())

    async def talk() -> Any:
        for number in range(8):
            await memory.asave_context(*turn(number))
        return await memory.aload_memory_variables({})

    loaded = asyncio.run(talk())["history"]
    assert sorted(markers(loaded)) == sorted(f"m{number}{who}" for number in range(8) for who in "ha")
    assert memory.llm.calls


def test_models_that_take_their_time_hold_up_no_other_conversation(server_dsn: str, schema_name: str) -> None:
    released = threading.Event()

    def slow(messages: list[BaseMessage]) -> str:
        assert released.wait(30)
        return "short"

    async def talk(store: ConversationStore) -> str:
        slow_ones = [memory_of(store, FakeChat(answer=slow), session_id=name, max_token_limit=5) for name in "abc"]
        for memory in slow_ones:
            await memory.asave_context(*turn(0))
        folds = [asyncio.create_task(memory.asave_context(*turn(1))) for memory in slow_ones]
        while not all(memory.llm.calls for memory in slow_ones):
            await asyncio.sleep(0)
        # All of the store's threads would be taken if they waited for the models.
        other = BufferMemory(session_id="other", store=store)
        await asyncio.wait_for(other.asave_context(*turn(2)), 20)
        shown = str(await asyncio.wait_for(other.aload_memory_variables({}), 20))
        assert not any(fold.done() for fold in folds)
        released.set()
        await asyncio.gather(*folds)
        return shown

    with ConversationStore(server_dsn, schema=schema_name, max_connections=2) as store:
        store.setup()
        assert "m2h" in asyncio.run(talk(store))


def test_folding_on_request_works_asynchronously(store: ConversationStore) -> None:
    history = PostgresChatMessageHistory("s", store)
    for number in range(10):
        inputs, outputs = turn(number)
        history.add_messages([HumanMessage(inputs["input"]), AIMessage(outputs["output"])])
    memory = memory_of(store, perfect_model(), max_token_limit=20)
    assert asyncio.run(memory.afold()) is True
    assert len(set(markers(memory.buffer))) == 20


def test_after_clearing_max_messages_prunes_again(store: ConversationStore) -> None:
    history = PostgresChatMessageHistory("s", store, max_messages=4)
    SummaryMemory(chat_memory=history, llm=scripted("short")).save_context(*turn(0))
    history.clear()
    for number in range(5):
        BufferMemory(chat_memory=history).save_context(*turn(number))
    assert len(history.messages) == 4


def test_a_fold_between_two_pages_of_a_load_shows_no_message_twice(
    store: ConversationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = PostgresChatMessageHistory("s", store)
    for number in range(6):
        inputs, outputs = turn(number)
        history.add_messages([HumanMessage(inputs["input"]), AIMessage(outputs["output"])])
    read = ConversationStore.read_summary_window
    pages = []

    def read_and_fold(self: ConversationStore, *arguments: Any, **options: Any) -> Any:
        pages.append(read(self, *arguments, **options))
        if len(pages) == 1:
            assert memory_of(store, perfect_model(), max_token_limit=20).fold()
        return pages[-1]

    monkeypatch.setattr(ConversationStore, "read_summary_window", read_and_fold)
    # Messages cost one token by this counter, so that pages, which are estimated by length, are short.
    shown = memory_of(store, perfect_model(), max_token_limit=10, token_counter=len).buffer
    assert len(pages) > 1
    assert sorted(markers(shown)) == sorted(f"m{number}{who}" for number in range(6) for who in "ha")


def test_a_save_that_folds_nothing_makes_no_messages_of_what_it_reads(
    store: ConversationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []
    to_message = logged_room.to_message
    monkeypatch.setattr(logged_room, "to_message", lambda stored: made.append(stored) or to_message(stored))
    memory = SummaryMemory(session_id="s", store=store, llm=scripted("a summary"), max_token_limit=200)
    for number in range(5):
        memory.save_context({"input": f"question {number}"}, {"output": "answer"})
    assert made == []
    assert len(memory.buffer_as_messages) == 10
    assert len(made) == 10
    memory.save_context({"input": "question " * 100}, {"output": "answer " * 100})
    assert isinstance(memory.buffer_as_messages[0], SystemMessage), "now it folds"
