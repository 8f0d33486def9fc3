"""The road to LangGraph and back, against real savers and agents."""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import test_cli
from chains import ConversationChain
from conversations import ai, calling, dialogue, human, logs, miscalling, result, system
from fakes import FakeChat, scripted
from hypothesis import HealthCheck, given, settings
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, RemoveMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from provider_rules import OF_THE_MEMORY, faults, the_first_message_is_the_users
from psycopg2.extensions import connection as Connection
from test_cli import Ended
from test_encryption import keyring
from transfers import another_store

from pgmemory import (
    BufferMemory,
    ConfigurationError,
    ConversationStore,
    PostgresChatMessageHistory,
    SummaryMemory,
    copy_from_langgraph,
    copy_to_langgraph,
)
from pgmemory.transfer import graph_savers
from pgmemory.transfer.thread_messages import MISSING_RESULT, thread_messages

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # LangGraph 0.6 announces a new default of LangChain
    pytest.importorskip("langgraph", reason="LangGraph is not installed")
    psycopg = pytest.importorskip("psycopg", reason="psycopg 3, which LangGraph's saver needs, is not installed")
    from langgraph.checkpoint.memory import InMemorySaver
    from langgraph.checkpoint.postgres import PostgresSaver

    try:
        from langchain.agents import create_agent

        is_langchain_1 = True
    except ImportError:
        from langgraph.prebuilt import create_react_agent

        is_langchain_1 = False

        def create_agent(*arguments: Any, **options: Any) -> Any:
            """Make an agent where there is no LangChain 1.x, to which LangGraph 1.x points with a warning."""
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return create_react_agent(*arguments, **options)

call = test_cli.call


@pytest.fixture
def threads_dsn(server_dsn: str, schema_name: str, admin: Connection) -> Iterator[str]:
    """Where LangGraph keeps its threads: a schema of the test's own."""
    name = f"{schema_name}_graph"
    with admin.cursor() as cursor:
        cursor.execute(f"create schema {name}")
        yield psycopg.conninfo.make_conninfo(server_dsn, options=f"-csearch_path={name}")
        cursor.execute(f"set client_min_messages = warning; drop schema {name} cascade")


@pytest.fixture
def postgres_saver(threads_dsn: str) -> Iterator[Any]:
    """LangGraph's saver in PostgreSQL, set up."""
    with PostgresSaver.from_conn_string(threads_dsn) as saver:
        saver.setup()
        yield saver


@pytest.fixture(params=["memory", "postgres"])
def saver(request: pytest.FixtureRequest) -> Any:
    """Each of LangGraph's savers."""
    return InMemorySaver() if request.param == "memory" else request.getfixturevalue("postgres_saver")


@tool
def find_order(name: str) -> str:
    """Find an order."""
    return f"{name}'s order is on its way"


def knows(messages: list[BaseMessage]) -> AIMessage:
    """Answer with the number that was said, and look for the order first where that is asked."""
    if "look" in str(messages[-1].content):
        return AIMessage("", tool_calls=[{"name": "find_order", "args": {"name": "Ada"}, "id": "look_1"}])
    found = re.search(r"\b7\d{3}\b", str([message.content for message in messages[:-1]]))
    return AIMessage(found[0] if found else "I do not know.")


def config(thread_id: str) -> dict[str, Any]:
    return {"configurable": {"thread_id": thread_id}}


def thread_of(store: ConversationStore, session_id: str = "s", user_id: Any = None) -> str:
    return str(store.key(session_id, user_id).id)


def held(saver: Any, thread_id: str) -> list[BaseMessage]:
    """Return what a thread holds."""
    return list(saver.get_tuple(config(thread_id)).checkpoint["channel_values"]["messages"])


def checkpoints(saver: Any, thread_id: str) -> int:
    return len(list(saver.list(config(thread_id))))


def plain(messages: list[BaseMessage]) -> list[tuple[str, Any]]:
    return [(message.type, message.content) for message in messages]


def ask(saver: Any, thread_id: str, question: str, llm: FakeChat | None = None) -> str:
    """Let an agent answer in a thread, and return its answer."""
    agent = create_agent(llm or FakeChat(answer=knows), [find_order], checkpointer=saver)
    state = agent.invoke({"messages": [HumanMessage(question)]}, config(thread_id))
    return str(state["messages"][-1].content)


def say(store: ConversationStore, *messages: BaseMessage, session_id: str = "s", user_id: Any = None) -> None:
    PostgresChatMessageHistory(session_id, store, user_id=user_id).add_messages(list(messages))


# There


def test_a_chain_talks_and_an_agent_goes_on_and_knows(store: ConversationStore, saver: Any) -> None:
    memory = BufferMemory(session_id="ticket-42", user_id="u7", store=store)
    chain = ConversationChain(llm=scripted("I see."), memory=memory)
    chain.invoke({"input": "My order is 7001."})
    chain.invoke({"input": "It has not come."})
    thread = thread_of(store, "ticket-42", "u7")
    progress: list[Any] = []
    report = copy_to_langgraph(store, saver, on_progress=lambda done, total: progress.append((done, total)))
    assert report.as_dict() == {
        "dry_run": False, "conversations": 1, "threads": 1, "messages": 4, "summarized": 0, "left_out": 0,
        "repaired": 0, "already_there": 0, "continued": 0, "conflicts": 0, "findings": [],
    }  # fmt: skip
    assert report.succeeded and progress == [(4, 4)]

    agent = create_agent(FakeChat(answer=knows), [find_order], checkpointer=saver)
    state = agent.get_state(config(thread))
    assert state.next == () and state.tasks == ()
    assert plain(state.values["messages"]) == plain(memory.chat_memory.messages)
    assert ask(saver, thread, "Which order was it?") == "7001"
    assert ask(saver, thread, "Then look for it.") == "7001"
    assert [message.type for message in held(saver, thread)[-4:]] == ["human", "ai", "tool", "ai"]
    assert len(held(saver, thread)) == 4 + 2 + 4


def test_copying_twice_writes_nothing_twice(store: ConversationStore, saver: Any) -> None:
    say(store, *dialogue(2))
    copy_to_langgraph(store, saver)
    before = held(saver, thread_of(store))
    report = copy_to_langgraph(store, saver)
    assert (report.threads, report.already_there) == (0, 1)
    assert checkpoints(saver, thread_of(store)) == 1 and held(saver, thread_of(store)) == before


def test_a_log_that_went_on_or_was_edited_is_brought_into_a_thread_that_nobody_touched(
    store: ConversationStore, saver: Any
) -> None:
    say(store, *dialogue(3))
    copy_to_langgraph(store, saver)
    ids = [message.id for message in held(saver, thread_of(store))]
    history = PostgresChatMessageHistory("s", store)
    history.delete_last_turn()
    history.replace_message(1, "a better answer")
    say(store, human("more"), ai("yes"))
    assert copy_to_langgraph(store, saver).threads == 1
    messages = held(saver, thread_of(store))
    assert plain(messages) == plain(history.messages) and plain(messages)[1] == ("ai", "a better answer")
    assert [message.id for message in messages][:4] == ids[:4]
    history.clear()
    assert copy_to_langgraph(store, saver).threads == 1
    assert held(saver, thread_of(store)) == []
    assert ask(saver, thread_of(store), "Which order?") == "I do not know."


def test_what_the_agent_said_stays_when_it_is_copied_again(store: ConversationStore, saver: Any) -> None:
    say(store, human("My order is 7001."), ai("I see."))
    copy_to_langgraph(store, saver)
    ask(saver, thread_of(store), "Which order was it?")
    before = held(saver, thread_of(store))
    report = copy_to_langgraph(store, saver)
    assert (report.threads, report.continued, report.conflicts) == (0, 1, 0)
    assert held(saver, thread_of(store)) == before


@pytest.mark.parametrize("change", ["went on", "was edited", "was shortened"])
def test_a_thread_and_a_log_that_both_changed_are_a_conflict_and_left_alone(
    store: ConversationStore, saver: Any, change: str
) -> None:
    say(store, *dialogue(2))
    copy_to_langgraph(store, saver)
    ask(saver, thread_of(store), "And now?")
    before = held(saver, thread_of(store))
    history = PostgresChatMessageHistory("s", store)
    if change == "went on":
        say(store, *dialogue(1, first=3))
    elif change == "was edited":
        history.replace_message(1, "another answer")
    else:
        history.delete_last_turn()
    report = copy_to_langgraph(store, saver)
    assert (report.threads, report.conflicts, report.succeeded) == (0, 1, False)
    assert report.findings[0].kind == "conflict" and "gone on" in report.findings[0].reason
    assert held(saver, thread_of(store)) == before


def test_a_thread_of_somebody_else_is_left_alone(store: ConversationStore, saver: Any) -> None:
    ask(saver, "s", "Hello")
    before = held(saver, "s")
    say(store, *dialogue(1))
    say(store, *dialogue(2), session_id="t", user_id="u")
    say(store, *dialogue(3), session_id="t", user_id="v")
    report = copy_to_langgraph(store, saver, thread_id=lambda key: key.session_id)
    assert (report.threads, report.conflicts) == (1, 2), "two users' conversations are never one thread"
    assert held(saver, "s") == before
    again = copy_to_langgraph(store, saver, thread_id=lambda key: key.session_id)
    assert (again.threads, again.already_there, again.conflicts) == (0, 1, 2)


def test_users_tenants_and_sessions_stay_apart(
    server_dsn: str, schema_name: str, store: ConversationStore, saver: Any
) -> None:
    say(store, human("My order is 7001."), ai("I see."), user_id="ada")
    say(store, human("My order is 7002."), ai("I see."), user_id="eve")
    say(store, human("My order is 7003."), ai("I see."), session_id="other", user_id="ada")
    with ConversationStore(server_dsn, schema=schema_name, tenant_id="acme") as acme:
        say(acme, human("My order is 7004."), ai("I see."), user_id="ada")
        assert copy_to_langgraph(store, saver, session_id="s", user_id="ada").conversations == 1
        assert copy_to_langgraph(store, saver, user_id="ada").conversations == 2
        assert copy_to_langgraph(store, saver).conversations == 3
        assert copy_to_langgraph(acme, saver).conversations == 1
        threads = [thread_of(store, "s", "ada"), thread_of(store, "s", "eve"), thread_of(acme, "s", "ada")]
    assert [ask(saver, thread, "Which order?") for thread in threads] == ["7001", "7002", "7004"]


def test_an_agent_that_is_handed_a_threads_metadata_goes_on_with_it(store: ConversationStore, saver: Any) -> None:
    PostgresChatMessageHistory("s", store).add_messages([human("My number is 7001"), ai("noted")])
    copy_to_langgraph(store, saver)
    thread = thread_of(store)
    agent = create_agent(FakeChat(answer=knows), [find_order], checkpointer=saver)
    handed_on = {**config(thread), "metadata": dict(agent.get_state(config(thread)).metadata)}
    agent.invoke({"messages": [HumanMessage("Which is it?")]}, handed_on)
    assert copy_to_langgraph(store, saver).continued == 1
    assert len(held(saver, thread)) == 4
    copy_from_langgraph(store, saver)
    assert len(store.list_messages("s")) == 4


def test_metadata_says_whose_a_thread_is_and_when_it_was_said(store: ConversationStore, saver: Any) -> None:
    say(store, *dialogue(1), user_id="u7")
    copy_to_langgraph(store, saver)
    (found,) = saver.list(None, filter={"user_id": "u7"})
    first, last = [row.created_at for row in store.list_messages("s", user_id="u7")]
    metadata = found.metadata
    assert metadata["session_id"] == "s" and metadata["tenant_id"] == "" and metadata["copied_from"] == "pgmemory"
    assert [metadata["first_message_at"], metadata["last_message_at"]] == [
        time.isoformat(timespec="microseconds") for time in (first, last) if time
    ]
    assert held(saver, thread_of(store, "s", "u7"))[0].response_metadata == {"stored_at": metadata["first_message_at"]}


def test_messages_keep_their_ids_and_get_stable_ones_where_they_have_none_or_anothers(
    store: ConversationStore, saver: Any
) -> None:
    say(store, human(), ai(id="run-1"), human(), ai(id="run-1"), human(), ai(id="run-2"))
    copy_to_langgraph(store, saver)
    ids = [message.id for message in held(saver, thread_of(store))]
    assert (ids[1], ids[5]) == ("run-1", "run-2") and len(set(ids)) == 6
    fresh = InMemorySaver()
    copy_to_langgraph(store, fresh)
    assert [message.id for message in held(fresh, thread_of(store))] == ids


def test_a_summary_leads_with_a_fixed_id_and_stands_for_what_it_covers(store: ConversationStore, saver: Any) -> None:
    say(store, system(), ai("Welcome."))
    memory = SummaryMemory(session_id="s", store=store, llm=scripted("Order 7001 is late."), max_token_limit=20)
    for n in range(4):
        memory.save_context({"input": f"a rather long question {n}"}, {"output": f"a rather long answer {n}"})
    shown = memory.buffer_as_messages
    assert shown[1] == SystemMessage("Order 7001 is late.")
    report = copy_to_langgraph(store, saver)
    messages = held(saver, thread_of(store))
    assert plain(messages) == plain(shown)
    assert report.summarized == 1 + 6 and report.left_out == 0
    memory.llm = scripted("It has come.")
    memory.save_context({"input": "a rather long question 4"}, {"output": "a rather long answer 4"})
    assert copy_to_langgraph(store, saver).threads == 1
    again = held(saver, thread_of(store))
    assert again[1].content == "It has come." and again[1].id == messages[1].id
    assert copy_to_langgraph(store, saver).already_there == 1


def test_a_result_that_came_late_is_moved_up_to_its_call_and_answers_no_earlier_one(
    store: ConversationStore, saver: Any
) -> None:
    say(store, human("one"), calling("a"), human("two"), calling("a"), human("three"), result("a"), ai("here"))
    report = copy_to_langgraph(store, saver)
    messages = held(saver, thread_of(store))
    assert [message.content or message.type for message in messages] == [
        "one", "ai", MISSING_RESULT, "two", "ai", "found", "three", "here",
    ]  # fmt: skip
    assert (report.repaired, report.left_out) == (2, 1)
    assert faults(messages, OF_THE_MEMORY) == []
    assert copy_to_langgraph(store, saver).already_there == 1


def test_dangling_calls_get_results_and_what_no_model_accepts_is_left_out(store: ConversationStore, saver: Any) -> None:
    log = [
        human("one"), calling("a", "b", text="I look."), result("b"),
        human("two"), miscalling("c"),
        human("three"), result("stray"), ai("here"), RemoveMessage(id="x"),
        human("four"), calling("d", "d"),
        human("five"), ai(""),
        human("six"), calling("a"),
    ]  # fmt: skip
    say(store, *log)
    report = copy_to_langgraph(store, saver)
    messages = held(saver, thread_of(store))
    assert [str(message.content) or message.type for message in messages] == [
        "one", "I look.", "found", MISSING_RESULT, "two", "ai", MISSING_RESULT, "three", "here", "four",
        "six", "ai", MISSING_RESULT,
    ]  # fmt: skip
    assert (report.repaired, report.left_out, report.messages) == (3, 5, 13)
    made = [message for message in messages if isinstance(message, ToolMessage) and message.status == "error"]
    assert [(message.tool_call_id, message.name) for message in made] == [(id, "search") for id in ("a", "c", "a")]
    assert len({message.id for message in messages}) == len(messages)
    assert faults(messages, OF_THE_MEMORY) == []
    assert ask(saver, thread_of(store), "And now?") == "I do not know."
    assert copy_to_langgraph(store, InMemorySaver()).repaired == 3


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(logs)
def test_whatever_was_logged_becomes_what_providers_accept_with_ids_that_differ(
    store: ConversationStore, log: list[BaseMessage]
) -> None:
    say(store, *log)
    key = store.key("s")
    stored = store.read_all(key)
    history = PostgresChatMessageHistory("s", store)
    window = BufferMemory(chat_memory=history, return_messages=True).buffer
    history.clear()
    told = thread_messages(key.id, stored, None)
    # May begin with a greeting, as `BufferMemory()` does.
    assert faults(told.messages, [rule for rule in OF_THE_MEMORY if rule is not the_first_message_is_the_users]) == []
    assert len({message.id for message in told.messages}) == len(told.messages)
    assert len(told.messages) == len(stored) - told.left_out + told.repaired
    assert thread_messages(key.id, stored, None) == told
    rest = iter(plain(told.messages))
    assert all(message in rest for message in plain(window)), "all that a memory shows, in order"


def test_everything_a_message_holds_goes_over(store: ConversationStore, saver: Any) -> None:
    log = [
        HumanMessage([{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "x"}}], name="ada"),
        AIMessage("ok", additional_kwargs={"a": {"b": [1, None, 2.5]}}, response_metadata={"model": "m"},
                  usage_metadata={"input_tokens": 1, "output_tokens": 2, "total_tokens": 3}),
        calling("a"),
        ToolMessage("found", tool_call_id="a", artifact={"rows": [1]}),
        AIMessage("nul \0, half \ud800"),
    ]  # fmt: skip
    say(store, *log)
    copy_to_langgraph(store, saver)
    messages = held(saver, thread_of(store))
    for message in messages:
        del message.response_metadata["stored_at"]
        message.id = None
    assert messages == [*log[:-1], AIMessage("nul \0, half ?")]
    assert copy_to_langgraph(store, saver).already_there == 1


def test_a_long_and_encrypted_conversation_is_copied_whole(server_dsn: str, schema_name: str) -> None:
    saver = InMemorySaver()
    with ConversationStore(server_dsn, schema=schema_name, keyring=keyring()) as store:
        store.setup()
        say(store, *dialogue(600))
        assert copy_to_langgraph(store, saver).messages == 1200
        assert plain(held(saver, thread_of(store))) == plain(dialogue(600))
        store.erase_key("s")
        say(store, *dialogue(1))
        assert copy_to_langgraph(store, saver).messages == 2
        assert plain(held(saver, thread_of(store))) == plain(dialogue(1))


def test_a_dry_run_writes_nothing_and_says_what_would_be(store: ConversationStore, saver: Any) -> None:
    say(store, *dialogue(2))
    report = copy_to_langgraph(store, saver, dry_run=True)
    assert (report.dry_run, report.threads, report.messages) == (True, 1, 4)
    assert saver.get_tuple(config(thread_of(store))) is None


def test_what_is_no_saver_or_no_thread_id_is_an_error(store: ConversationStore) -> None:
    say(store, *dialogue(1))
    for copy in (copy_to_langgraph, copy_from_langgraph):
        with pytest.raises(ConfigurationError, match="must be a checkpointer"):
            copy(store, PostgresSaver.from_conn_string(""))
    with pytest.raises(ConfigurationError, match="thread_id must not be empty"):
        copy_to_langgraph(store, InMemorySaver(), thread_id=lambda key: "")
    with pytest.raises(ConfigurationError, match="thread_ids must be a list"):
        copy_from_langgraph(store, InMemorySaver(), thread_ids="s")


def test_without_langgraph_the_error_says_what_to_install(
    call: Callable[..., Ended], server_dsn: str, store: ConversationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "langgraph.checkpoint.base", None)
    monkeypatch.setitem(sys.modules, "langgraph.checkpoint.postgres", None)
    for copy in (copy_to_langgraph, copy_from_langgraph):
        with pytest.raises(ConfigurationError, match=r"pip install .*\[langgraph\]"):
            copy(store, InMemorySaver())
    for command in ("copy-to-langgraph", "copy-from-langgraph"):
        test_cli.failed(call(command, "--schema", store.schema, dsn=server_dsn), "langchain-pgmemory[langgraph]")


# And back


def test_what_an_agent_said_comes_back_behind_what_was_there_and_once(store: ConversationStore, saver: Any) -> None:
    log = [system(), human("My order is 7001."), calling("a"), human("Well?"), ai("I see.")]
    say(store, *log, user_id="u7")
    copy_to_langgraph(store, saver)
    thread = thread_of(store, "s", "u7")
    assert ask(saver, thread, "Which order was it?") == "7001"
    report = copy_from_langgraph(store, saver)
    assert (report.conversations, report.messages, report.already_there, report.findings) == (1, 2, 0, [])
    history = PostgresChatMessageHistory("s", store, user_id="u7")
    assert history.messages[:5] == log and history.messages[5:] == held(saver, thread)[-2:]
    again = copy_from_langgraph(store, saver)
    assert (again.messages, again.already_there, again.conflicts) == (0, 2, 0)
    assert copy_to_langgraph(store, saver).continued == 1, "the thread has all of it"

    ask(saver, thread, "Once more?")
    assert copy_from_langgraph(store, saver, thread_ids=[thread]).messages == 2
    assert plain(history.messages[5:]) == plain(held(saver, thread)[-4:])
    assert len(store.list_conversations()) == 1


def test_a_conversation_that_went_on_here_is_left_alone(store: ConversationStore, saver: Any) -> None:
    say(store, *dialogue(1))
    copy_to_langgraph(store, saver)
    ask(saver, thread_of(store), "And now?")
    say(store, *dialogue(1, first=2))
    report = copy_from_langgraph(store, saver)
    assert (report.messages, report.conflicts, report.succeeded) == (0, 1, False)
    assert PostgresChatMessageHistory("s", store).messages == dialogue(2)


def test_every_other_thread_becomes_a_conversation(
    store: ConversationStore, saver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_savers, "_PAGE_CHECKPOINTS", 5)
    agent = create_agent(FakeChat(answer=knows), [], checkpointer=saver)
    for n in range(12):
        of_user = {**config(f"thread {n % 4}"), "metadata": {"user_id": "u7"}}
        agent.invoke({"messages": [HumanMessage(f"question {n}")]}, of_user)
    ask(saver, "nobody's", "My order is 7001.")
    progress: list[Any] = []
    report = copy_from_langgraph(store, saver, on_progress=lambda done, total: progress.append((done, total)))
    assert (report.conversations, report.messages, report.findings) == (5, 4 * 6 + 2, [])
    assert progress[-1] == (5, 5)
    assert PostgresChatMessageHistory("thread 3", store, user_id="u7").messages == held(saver, "thread 3")
    assert PostgresChatMessageHistory("nobody's", store).messages == held(saver, "nobody's")
    assert copy_from_langgraph(store, saver, user_id="u8", thread_ids=["nobody's"]).messages == 2
    assert PostgresChatMessageHistory("nobody's", store, user_id="u8").messages == held(saver, "nobody's")
    again = copy_from_langgraph(store, saver)
    assert (again.messages, again.already_there) == (0, 26)


def test_into_another_store_a_thread_comes_whole_and_equal(
    server_dsn: str, schema_name: str, store: ConversationStore, saver: Any
) -> None:
    say(store, *dialogue(2), result("stray"), user_id="u7")
    copy_to_langgraph(store, saver)
    ask(saver, thread_of(store, "s", "u7"), "And now?")
    with another_store(server_dsn, schema_name) as other:
        for _ in range(2):
            assert copy_from_langgraph(other, saver).succeeded
        rows = other.list_messages("s", user_id="u7")
        messages = PostgresChatMessageHistory("s", other, user_id="u7").messages
        assert [row.created_at for row in rows[:4]] == [
            row.created_at for row in store.list_messages("s", user_id="u7")[:4]
        ]
    assert plain(messages) == plain(held(saver, thread_of(store, "s", "u7")))
    assert [message.id for message in messages] == [message.id for message in held(saver, thread_of(store, "s", "u7"))]
    assert all("stored_at" not in message.response_metadata for message in messages)


def test_another_tenants_threads_and_what_is_no_thread_are_skipped(
    server_dsn: str, schema_name: str, store: ConversationStore, saver: Any
) -> None:
    with ConversationStore(server_dsn, schema=schema_name, tenant_id="acme") as acme:
        say(acme, *dialogue(1))
        copy_to_langgraph(acme, saver)
        thread = thread_of(acme)
        ask(saver, thread, "And now?")
    report = copy_from_langgraph(store, saver, thread_ids=[thread, "none"])
    assert (report.conversations, report.skipped, store.list_conversations()) == (0, 2, [])
    assert [finding.reason for finding in report.findings] == [
        "it was copied from another tenant's conversation", "there is no such thread",
    ]  # fmt: skip
    with pytest.raises(ConfigurationError, match="another tenant"):
        copy_from_langgraph(store, saver, strict=True)


# The commands


def test_the_commands_go_there_and_back(
    call: Callable[..., Ended], server_dsn: str, store: ConversationStore, threads_dsn: str
) -> None:
    say(store, human("My order is 7001."), ai("I see."), user_id="u7")
    say(store, *dialogue(1), user_id="u8")
    there = ("copy-to-langgraph", "--to-dsn", threads_dsn, "--schema", store.schema)
    back = ("copy-from-langgraph", "--from-dsn", threads_dsn, "--schema", store.schema)
    ended = call(*there, "--dry-run", dsn=server_dsn)
    assert ended.code == 0 and ended.output.startswith("would write 2 threads with 4 messages, of 2 conversations;")
    test_cli.failed(call(*there, "--session", "nope", dsn=server_dsn), "there is no conversation of this name")
    test_cli.failed(call(*there, "--user", "nobody", dsn=server_dsn), "user 'nobody' has no conversation")
    several = call(*there, "--session", "s", dsn=server_dsn)
    assert several.code == 2 and "'u7'" in several.errors and "'u8'" in several.errors
    for expected in ({"threads": 1, "already_there": 0}, {"threads": 0, "already_there": 1}):
        ended = call(*there, "--user", "u7", "--session", "s", "--json", dsn=server_dsn)
        assert ended.code == 0 and json.loads(ended.output).items() >= expected.items()
    thread = thread_of(store, "s", "u7")
    with PostgresSaver.from_conn_string(threads_dsn) as saver:
        assert ask(saver, thread, "Which order was it?") == "7001"
    ended = call(*back, "--thread", thread, dsn=server_dsn)
    assert ended.code == 0 and ended.output.startswith("copied 2 messages of 1 threads; 0 were there,")
    assert json.loads(call(*back, "--json", dsn=server_dsn).output)["already_there"] == 2
    assert call(*there, "--thread-id", "session", "--user", "u8", dsn=server_dsn).code == 0
    ended = call(*there, "--thread-id", "session", dsn=server_dsn)
    assert ended.code == 1 and ended.errors.startswith("conflict: session 's' of user 'u7': thread 's' is there, ")


def test_where_langgraphs_tables_were_never_made_nothing_is_copied_back_and_both_ways_say_so(
    call: Callable[..., Ended], server_dsn: str, store: ConversationStore, threads_dsn: str
) -> None:
    back = ("copy-from-langgraph", "--from-dsn", threads_dsn, "--schema", store.schema)
    where = psycopg.conninfo.conninfo_to_dict(server_dsn)
    for options in ((), ("--dry-run",), ("--json",), ("--thread", "s")):
        ended = call(*back, *options, dsn=server_dsn)
        test_cli.failed(ended, "no tables of LangGraph", repr(where["dbname"]), str(where["host"]), "--from-dsn")
        assert ended.output == ""
    say(store, *dialogue(1))
    with PostgresSaver.from_conn_string(threads_dsn) as saver:
        for copy in (copy_to_langgraph, copy_from_langgraph):
            for dry_run in (False, True):
                with pytest.raises(ConfigurationError, match=r"no tables of LangGraph.*saver\.setup\(\)"):
                    copy(store, saver, dry_run=dry_run)
        saver.setup()
        assert copy_from_langgraph(store, saver).conversations == 0


@pytest.mark.parametrize("dsn", [f"host=127.0.0.1 port=1 password={test_cli.PASSWORD}", f"x {test_cli.PASSWORD}"])
def test_a_database_that_is_not_there_is_told_in_one_line_without_its_password(
    call: Callable[..., Ended], server_dsn: str, store: ConversationStore, dsn: str
) -> None:
    for command in ("copy-to-langgraph", "copy-from-langgraph"):
        option = "--to-dsn" if "to" in command else "--from-dsn"
        ended = call(command, option, dsn, "--schema", store.schema, dsn=server_dsn)
        test_cli.failed(ended)
