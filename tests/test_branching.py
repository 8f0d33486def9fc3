"""Branches and time: a conversation as of a message, forks, states; each as if what follows had been deleted."""

from __future__ import annotations

import asyncio
import io
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import test_cli
from chains import ConversationChain
from conftest import PROJECT
from conversations import (
    ai,
    calling,
    dialogue,
    human,
    result,
    system,
)
from fakes import scripted
from langchain_core.messages import AIMessage, HumanMessage
from psycopg2.extensions import connection as Connection
from test_cli import Ended

from pgmemory import (
    BufferMemory,
    ConfigurationError,
    ConversationHeldError,
    ConversationStore,
    EncryptionError,
    Keyring,
    PostgresChatMemory,
    PostgresChatMessageHistory,
    RelevantTurnMemory,
    SummaryMemory,
    TokenWindowMemory,
)
from pgmemory.transfer import export_conversations

call = test_cli.call
KEYRING = Keyring.from_text(Keyring.new_line("test"))


@pytest.fixture
def history(store: ConversationStore) -> PostgresChatMessageHistory:
    """A history of a system message (0) and turns from 1 to 2, 3 to 7, 8 to 9, with a summary up to 2 and up to 7."""
    history = PostgresChatMessageHistory("s", store, user_id="u")
    history.add_messages([system("be kind")])
    for turn in (dialogue(1), [human("search"), calling("a", "b"), result("a"), result("b"), ai("found it")]):
        TokenWindowMemory(chat_memory=history).save_messages(list(turn))
    summarise(history, 2)
    summarise(history, 7)
    history.add_messages(dialogue(1, first=3))
    return history


def summarise(history: PostgresChatMessageHistory, through: int) -> None:
    state = history.store.read_unsummarized(history.key, budget=10**6, encoding=None).state
    assert state is not None
    assert history.store.record_summary(history.key, content=f"up to {through}", covers_through=through, state=state)


def numbers(history: PostgresChatMessageHistory) -> list[int | None]:
    return [stored.message_index for stored in history.store.read_all(history.key)]


def family(history: PostgresChatMessageHistory) -> list[PostgresChatMemory]:
    return [
        BufferMemory(chat_memory=history, return_messages=True),
        BufferMemory(chat_memory=history, k=1, return_messages=True),
        TokenWindowMemory(chat_memory=history, max_token_limit=60, return_messages=True),
        RelevantTurnMemory(chat_memory=history, keywords=["question"], return_messages=True),
        SummaryMemory(chat_memory=history, llm=scripted("unused"), return_messages=True),
    ]


# As of a message


@pytest.mark.parametrize("at", range(-1, 12))
def test_as_of_a_message_all_is_as_if_what_follows_were_deleted(history: PostgresChatMessageHistory, at: int) -> None:
    everything = history.messages
    past = history.as_of(at)
    assert past.messages == everything[: at + 1]
    shown = [memory.as_of(at).buffer for memory in family(history)]
    forked = history.fork("fork", at=min(at, 9))
    assert forked.messages == past.messages
    assert [memory.buffer for memory in family(forked)] == shown
    # Calls go with their results, which here leaves a part of a turn; so by what stands in the table.
    following = [number for number in numbers(history) if number is not None and number > at]
    if at not in (4, 5):
        history.delete_messages(following)
        assert [memory.buffer for memory in family(history)] == shown


def test_a_summary_counts_as_of_what_it_covers(history: PostgresChatMessageHistory) -> None:
    memory = SummaryMemory(chat_memory=history, llm=scripted("unused"), human_prefix="H", ai_prefix="A")
    assert memory.buffer == "System: be kind\nSystem: up to 7\nH: question 3\nA: answer 3"
    assert memory.as_of(7).buffer == "System: be kind\nSystem: up to 7"
    assert memory.as_of(3).buffer == "System: be kind\nSystem: up to 2\nH: search"
    assert memory.as_of(1).buffer == "System: be kind\nH: question 1"


def test_a_turn_that_was_found_relevant_by_what_followed_is_not_as_of_what_came_before(
    store: ConversationStore,
) -> None:
    memory = RelevantTurnMemory(session_id="s", store=store, keywords=["refund"], return_messages=True)
    memory.save_context({"input": "so?"}, {"output": "a refund it is"})
    assert len(memory.buffer) == 2
    assert memory.as_of(0).buffer == []
    memory.chat_memory.fork("fork", at=0)
    fork = memory.for_session("fork")
    assert fork.buffer == []
    fork.save_context({"input": "refund?"}, {"output": "no"})
    assert [message.content for message in fork.buffer] == ["refund?", "no"]
    memory.chat_memory.fork("whole", at=1)
    assert store.list_messages("whole")[0].tags == ("refund",)


def test_what_is_as_of_a_message_says_so_and_is_never_written_to(history: PostgresChatMessageHistory) -> None:
    before = exported(history.store)
    past = history.as_of(7)
    assert repr(past).endswith(".as_of(7)")
    writes: list[Any] = [
        lambda: past.add_messages(dialogue(1)),
        lambda: past.add_messages([]),
        past.clear,
        past.clear_with_agents,
        past.delete_last_turn,
        lambda: past.delete_messages([1]),
        lambda: past.delete_turns([1]),
        lambda: past.replace_message(1, "x"),
        lambda: past.replace_turn(1, dialogue(1)),
        SummaryMemory(chat_memory=past, llm=scripted("x"), max_token_limit=1).fold,
    ]
    for memory in family(past):
        writes += [
            lambda memory=memory: memory.save_context({"input": "q"}, {"output": "a"}),
            lambda memory=memory: memory.as_history().add_messages(dialogue(1)),
            memory.clear,
        ]
    writes.append(
        lambda: TokenWindowMemory(chat_memory=past, on_save_error="log").save_context({"input": "q"}, {"output": "a"})
    )
    for write in writes:
        with pytest.raises(ConfigurationError, match="'s' as of message 7 can only be read"):
            write()
    assert exported(history.store) == before
    past.for_session("other").add_messages(dialogue(1))
    past.for_agent("a").add_messages(dialogue(1))


def test_the_past_is_explained_and_loaded_asynchronously_as_it_is_loaded(history: PostgresChatMessageHistory) -> None:
    for memory in family(history):
        past = memory.as_of(4)
        explanation = past.explain()
        assert explanation.shown == past.buffer
        assert [each.message_index for each in explanation.messages if each.message_index is not None] == [*range(5)]
        assert asyncio.run(past.aload_memory_variables({})) == past.load_memory_variables({})
    assert history.as_of(7).as_of(2).messages == history.as_of(2).as_of(7).messages == history.messages[:3]
    with pytest.raises(ConfigurationError, match="not '2'"):
        history.as_of("2")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="not -2"):
        family(history)[0].as_of(-2)


# Forks


def exported(store: ConversationStore) -> set[bytes]:
    """All that the store holds."""
    file = io.BytesIO()
    export_conversations(store, file)
    return set(file.getvalue().splitlines()[1:-1])  # without the time of the export, and counts


def test_a_fork_bears_all_that_its_messages_bear(history: PostgresChatMessageHistory) -> None:
    store = history.store
    store.set_metadata("s", {"team": "billing"}, user_id="u")
    store.set_time_to_live("s", timedelta(days=7), user_id="u")
    store.hold("s", user_id="u", reason="case 117")
    before = exported(store)
    fork = history.fork("fork", at=8)
    assert (fork.session_id, fork.user_id) == ("fork", "u")
    assert before <= exported(store)
    assert store.read_all(fork.key) == store.read_all(history.key)[:9]
    source, made = (store.get_conversation(name, user_id="u") for name in ("s", "fork"))
    assert source is not None and made is not None
    assert made == replace(
        source,
        session_id="fork",
        created_at=made.created_at,
        updated_at=made.updated_at,
        message_count=9,
        next_message_index=9,
        held_at=None,
        hold_reason=None,
    )
    assert made.updated_at > source.updated_at  # idle only from now on
    assert [state.summary for state in fork.states()] == [state.summary for state in history.as_of(8).states()]
    # Each goes on by itself.
    fork.add_messages([ai("another answer 3"), *dialogue(1, first=4)])
    assert numbers(fork) == [*range(12)]
    with pytest.raises(ConversationHeldError):
        history.delete_last_turn()
    assert fork.delete_last_turn() == [10, 11]


def test_another_question_is_asked_in_a_fork(store: ConversationStore) -> None:
    memory = TokenWindowMemory(session_id="s", store=store, user_id="u", return_messages=True)
    for n in (1, 2):
        memory.save_context({"input": f"question {n}"}, {"output": f"answer {n}"})
    memory.chat_memory.fork("s, 2", at=1)
    branch = memory.for_session("s, 2", user_id="u")
    branch.save_context({"input": "question 2, but better"}, {"output": "better"})
    assert [message.content for message in branch.buffer][2:] == ["question 2, but better", "better"]
    assert [message.content for message in memory.buffer][2:] == ["question 2", "answer 2"]
    assert memory.chat_memory.delete_last_turn() == [2, 3]
    assert len(branch.buffer) == 4


def test_a_fork_begins_anywhere_and_by_id(store: ConversationStore) -> None:
    history = PostgresChatMessageHistory("s", store, max_messages=50)
    history.add_messages([HumanMessage("a", id="one"), AIMessage("b", id="two"), *dialogue(1)])
    assert history.fork("by id", at="two").messages == history.messages[:2]
    assert history.fork("all").messages == history.messages
    assert history.fork("none", at=-1).messages == []
    assert history.as_of(2).fork("as of").messages == history.messages[:3]
    assert history.as_of(2).fork("as of, at", at=3).messages == history.messages[:3]
    assert history.as_of(2).fork("as of, before", at=0).max_messages == 50
    for name in ("none", "by id"):
        PostgresChatMessageHistory(name, store).add_messages(dialogue(1, first=9))
    assert [numbers(PostgresChatMessageHistory(name, store)) for name in ("none", "by id")] == [[0, 1], [0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("source", "name", "at", "fault"),
    [
        ("s", "other", 1, "a session 'other' already"),
        ("s", "s", None, "a session 's' already"),
        ("s", "new", 10, "at message 10: its last one is 9"),
        ("s", "new", -2, "not at -2"),
        ("s", "new", True, "not at True"),
        ("s", "new", "unknown", "0 messages 'unknown'"),
        ("s", "", 1, "session_id must not be empty"),
        ("s", "other#agent:a", 1, "'other#agent:a', the name of a log that an .* choose a name without '#agent:'"),
        ("unknown", "new", None, "no session 'unknown' of user 'u'"),
    ],
)
def test_a_fork_that_cannot_be_made_writes_nothing(
    history: PostgresChatMessageHistory, source: str, name: str, at: Any, fault: str
) -> None:
    PostgresChatMessageHistory("other", history.store, user_id="u").add_messages(dialogue(1))
    before = exported(history.store)
    with pytest.raises(ConfigurationError, match=fault):
        history.for_session(source, user_id="u").fork(name, at=at)
    assert exported(history.store) == before


def test_an_agents_log_is_forked_into_another_agents_log_or_a_conversation(history: PostgresChatMessageHistory) -> None:
    agent = history.for_agent("a")
    agent.add_messages(dialogue(1))
    history.fork("branch")
    for name in ("branch#agent:a", "s#agent:b", "plain"):
        assert agent.fork(name).messages == agent.messages
    assert {found.session_id for found in history.store.list_conversations(session_id="branch", user_id="u")} == {
        "branch",
        "branch#agent:a",
    }


def test_a_fork_that_is_asked_for_again_is_there(history: PostgresChatMessageHistory) -> None:
    for at in (-1, 7, None):
        fork = history.fork(f"fork {at}", at=at)
        assert history.fork(f"fork {at}", at=at).messages == fork.messages
    fork.add_messages(dialogue(1, first=4))
    history.add_messages(dialogue(1, first=5))
    assert history.fork("fork None").messages == fork.messages
    fork.delete_messages([0])
    history.fork("fork None")
    with pytest.raises(ConfigurationError, match="already"):
        history.fork("fork None", at=7)
    fork.delete_messages(range(10))
    with pytest.raises(ConfigurationError, match="already"):
        history.fork("fork None")


def test_a_fork_that_was_emptied_is_no_fork_any_more(history: PostgresChatMessageHistory) -> None:
    history.add_messages([human("q"), ai("a")])
    history.fork("emptied").clear()
    with pytest.raises(ConfigurationError, match="there is a session 'emptied' already"):
        history.fork("emptied")


def test_forks_among_writers_are_each_of_one_moment(store: ConversationStore) -> None:
    history = PostgresChatMessageHistory("s", store, max_messages=12)
    history.add_messages(dialogue(3))

    def write(writer: int) -> None:
        for n in range(15):
            history.add_messages(dialogue(2, first=100 * writer + 2 * n))

    with ThreadPoolExecutor(4) as pool:
        writing = [pool.submit(write, writer) for writer in (1, 2)]
        same = [pool.submit(history.fork, "same") for _ in range(2)]
        forks = [history.fork(str(n)) for n in range(12)]
        for future in (*writing, *same):
            future.result(60)
    for fork in [*forks, same[0].result()]:
        kept = numbers(fork)
        assert kept == [*range(kept[0] or 0, (kept[0] or 0) + len(kept))] and len(kept) in (6, 10, 12)
        said = [str(message.content) for message in fork.messages]
        assert said[1::2] == [text.replace("question", "answer") for text in said[::2]]
        record = store.get_conversation(fork.session_id)
        assert record is not None and record.next_message_index == (kept[-1] or 0) + 1


def test_a_conversation_that_is_being_erased_is_not_forked(store: ConversationStore, admin: Connection) -> None:
    history = PostgresChatMessageHistory("s", store)
    history.add_messages(dialogue(1))
    admin.autocommit = False
    with admin.cursor() as cursor, ThreadPoolExecutor(1) as pool:
        cursor.execute(f"select pg_backend_pid() from {store.schema}.conversations for update")
        ((pid,),) = cursor.fetchall()
        forking = pool.submit(history.fork, "fork")
        blocked = "select count(*) from pg_stat_activity where %s = any(pg_blocking_pids(pid))"
        while True:
            cursor.execute("select pg_stat_clear_snapshot()")
            cursor.execute(blocked, (pid,))
            if cursor.fetchall() == [(1,)] or forking.done():
                break
        cursor.execute(f"delete from {store.schema}.conversations")
        admin.commit()
        with pytest.raises(ConfigurationError, match="no session 's'"):
            forking.result(60)
    admin.autocommit = True
    assert store.list_conversations() == []


def test_a_fork_is_found_by_its_words(store: ConversationStore, admin: Connection) -> None:
    store.setup(search="simple")
    history = PostgresChatMessageHistory("s", store, user_id="u")
    history.add_messages([human("invoice 66"), ai("paid"), human("anything else")])
    history.fork("fork", at=1)
    with admin.cursor() as cursor:
        cursor.execute(
            f"select array_agg(term order by term) from {store.schema}.message_terms where message_index <= 1 "
            "group by conversation_id"
        )
        (one,), (other,) = cursor.fetchall()
        assert one == other and len(one) == 3
        cursor.execute(f"select count(*) from {store.schema}.message_terms where message_index = 2")
        assert cursor.fetchall() == [(2,)]


# Encrypted ones


def test_a_fork_of_an_encrypted_conversation_has_a_key_of_its_own(
    store: ConversationStore, server_dsn: str, admin: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    clear = PostgresChatMessageHistory("s", store)
    clear.add_messages(dialogue(1))
    with ConversationStore(server_dsn, schema=store.schema, keyring=KEYRING) as sealing:
        history = PostgresChatMessageHistory("s", sealing)
        memory = RelevantTurnMemory(chat_memory=history, keywords=["secret"], return_messages=True)
        memory.save_context({"input": "erased secret"}, {"output": "erased"})
        sealing.erase_key("s")
        for n in range(4):
            memory.save_context({"input": f"a secret {n}"}, {"output": "\0"})
        summarise(history, 5)
        with pytest.raises(EncryptionError, match="keyring"):
            clear.fork("fork")
        assert len(store.list_conversations()) == 1
        monkeypatch.setattr("pgmemory.queries.branching.READ_SEALED", pages_of(2))
        fork = history.fork("fork", at=9)
        assert history.fork("fork", at=9).messages == fork.messages == history.messages[:8]
        assert sealing.read_all(fork.key) == sealing.read_all(history.key)[:10]
        assert [stored.is_erased for stored in sealing.read_all(fork.key)] == [False] * 2 + [True] * 2 + [False] * 6
        assert (
            sealing.read_summary_window(fork.key, budget=9, encoding=None).summary
            == sealing.read_summary_window(history.key, budget=9, encoding=None).summary
        )
        assert memory.for_session("fork").buffer == memory.as_of(9).buffer
        with admin.cursor() as cursor:
            cursor.execute(
                f"select count(distinct content), count(*) from {store.schema}.conversation_messages "
                "where key_id is not null and message_index between 4 and 9"
            )
            assert cursor.fetchall() == [(12, 12)]
        sealing.erase_key("s")
        assert len(history.messages) == 2
        fork.add_messages(dialogue(1))
        forked = fork.messages
        assert len(forked) == 10
    with ConversationStore(server_dsn, schema=store.schema, keyring=KEYRING) as another:
        assert PostgresChatMessageHistory("fork", another).messages == forked


def pages_of(count: int) -> str:
    from pgmemory.queries.branching import READ_SEALED

    changed = READ_SEALED.replace("8192 * 1000", f"8192 * {count}")
    assert changed != READ_SEALED
    return changed


# States


def test_states_are_the_ends_of_turns_newest_first(history: PostgresChatMessageHistory) -> None:
    states = list(history.states())
    assert [(state.message_index, state.summary and state.summary.covers_through) for state in states] == [
        (9, 7),
        (7, 7),
        (2, 2),
        (0, None),
    ]
    assert [state.message for state in states] == [
        stored for stored in reversed(history.store.read_all(history.key)) if stored.message_index in (9, 7, 2, 0)
    ]
    assert [state.message_index for state in history.as_of(5).states()] == [5, 2, 0]
    assert list(history.for_session("unknown").states()) == []


def test_the_states_of_a_long_conversation_come_in_pages(
    store: ConversationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgmemory.store.branching._STATES", 3)
    history = PostgresChatMessageHistory("s", store)
    history.add_messages(dialogue(10))
    for through in (3, 9, 11):
        summarise(history, through)
    found = [(state.message_index, state.summary and state.summary.content) for state in history.states()]
    covered = {**dict.fromkeys((3, 5, 7), "up to 3"), 9: "up to 9"}
    assert found == [(at, covered.get(at, "up to 11" if at > 9 else None)) for at in range(19, 0, -2)]


# The commands


def test_the_commands_fork_list_states_and_show_the_past(
    call: Any, history: PostgresChatMessageHistory, server_dsn: str
) -> None:
    def run(*words: str) -> Ended:
        ended: Ended = call(*words, "--schema", history.store.schema, dsn=server_dsn)
        return ended

    states = run("states", "s", "--limit", "3").output.splitlines()
    assert [line.split()[0] for line in states] == ["message", "9", "7", "2"]
    assert "up to 7" in states[1] and "ai: answer 3" in states[1]
    assert '"covers_through": 2' in run("states", "s", "--json").output.splitlines()[2]
    shown = run("show", "s", "--as-of", "3").output
    assert "up to 2" in shown and "search" in shown and "found it" not in shown and "up to 7" not in shown
    last = run("show", "s", "--as-of", "3", "--last", "1").output
    assert "search" in last and "question 1" not in last
    assert run("fork", "s", "new", "--at", "2", "--user", "u").output == "copied 3 messages\n"
    assert history.for_session("new", user_id="u").messages == history.messages[:3]
    assert '"message_count": 10' in run("fork", "s", "whole", "--json").output
    refused = run("fork", "s", "new")
    assert refused.code == 1 and "already" in refused.errors
    history.store.set_metadata("empty", {})
    assert run("states", "empty").code == 0


# The guide


def test_the_code_of_the_guide_runs(server_dsn: str, store: ConversationStore) -> None:
    guide = (PROJECT / "docs" / "branches.md").read_text("utf-8")
    names: dict[str, Any] = {}
    setup, *rest = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    exec(setup.replace('"postgresql://app@db/support"', f"{server_dsn!r}, schema={store.schema!r}"), names)
    chain = ConversationChain(llm=scripted("an answer"), memory=names["memory"])
    for n in range(7):
        chain.invoke({"input": f"question {n}"})
    for code in rest:
        exec(code, names)
    names["ask_again"](chain, 2, "another question", "branch")
    said = [message.content for message in names["history"].for_session("branch", user_id="u7").messages]
    assert said == ["question 0", "an answer", "another question", "an answer"]
    assert len(names["history"].messages) == 14
    names["store"].close()
