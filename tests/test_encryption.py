"""Encryption at rest: nothing readable is stored, everything comes back, keys are guarded, erased and rotated."""

from __future__ import annotations

import base64
import copy
import logging
import os
import pickle
import re
import shutil
import subprocess
import sys
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from chains import ConversationChain
from conversations import ai, calling, dialogue, human, logs, result, system
from fakes import FakeChat, scripted
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langchain_core.messages import BaseMessage
from psycopg2 import sql
from psycopg2.extensions import connection as Connection

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
    StoredMessage,
    SummaryMemory,
    TokenWindowMemory,
    cli,
)
from pgmemory.queries import encryption as statements

PROJECT = Path(__file__).resolve().parents[1]
SECRETS = {name: bytes([number]) * 32 for number, name in enumerate(("2026-01", "2026-02", "other"), 1)}
FIRST, SECOND, OTHER = SECRETS
WORDS = "Zebrafink", "Quittenmus", "Sägewerk", "Morgenröte"


def keyring(*names: str) -> Keyring:
    """Return a keyring of these master keys."""
    return Keyring({name: SECRETS[name] for name in names or (FIRST,)})


def words_in(messages: Sequence[BaseMessage]) -> int:
    """Count words."""
    return sum(len(str(message.content).split()) for message in messages)


Open = Callable[..., ConversationStore]


@pytest.fixture
def open_store(server_dsn: str, schema_name: str) -> Iterator[Open]:
    """Make stores of one schema, each as another process has it; encrypted under the first master key."""
    opened: list[ConversationStore] = []

    def open_store(keys: Keyring | None = None, **options: Any) -> ConversationStore:
        store = ConversationStore(server_dsn, schema=schema_name, keyring=keys or keyring(), **options)
        opened.append(store)
        return store

    open_store().setup()
    yield open_store
    for store in opened:
        store.close()


@pytest.fixture
def encrypted(open_store: Open) -> ConversationStore:
    """A store with a keyring whose schema stands."""
    return open_store()


@pytest.fixture
def plain(server_dsn: str, encrypted: ConversationStore) -> Iterator[ConversationStore]:
    """A store without a keyring over the same schema."""
    with ConversationStore(server_dsn, schema=encrypted.schema) as store:
        yield store


def history(store: ConversationStore, session_id: str = "s", **options: Any) -> PostgresChatMessageHistory:
    """Return a history in a store."""
    return PostgresChatMessageHistory(session_id, store, **options)


def rows_of(admin: Connection, store: ConversationStore, query: str, values: Any = None) -> list[tuple[Any, ...]]:
    """Run SQL on a store's schema."""
    with admin.cursor() as cursor:
        cursor.execute(sql.SQL(query).format(schema=sql.Identifier(store.schema)), values)
        return cursor.fetchall() if cursor.description else []


def is_sealed(admin: Connection, store: ConversationStore) -> list[bool]:
    """Tell of each message in the schema whether it is encrypted."""
    query = "select key_id is not null from {schema}.conversation_messages order by conversation_id, message_index"
    return [sealed for (sealed,) in rows_of(admin, store, query)]


# --- What is stored, what comes back ---------------------------------------------------------------------------------


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(log=logs)
def test_every_kind_of_message_comes_back_equal(
    encrypted: ConversationStore, plain: ConversationStore, log: list[BaseMessage]
) -> None:
    name = uuid.uuid4().hex
    history(encrypted, f"{name}-sealed").add_messages(log)
    history(plain, f"{name}-clear").add_messages(log)
    assert history(encrypted, f"{name}-sealed").messages == log
    sealed, clear = (encrypted.list_messages(f"{name}-{kind}") for kind in ("sealed", "clear"))
    assert [one._replace(created_at=None) for one in sealed] == [one._replace(created_at=None) for one in clear]


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.text(st.characters(codec="utf-8", exclude_characters="\0")),
    kwargs=st.none() | st.just('{"b": 1, "a": 1.0}'),
    extra=st.none() | st.just('{"content": "\\u0000 \\ud800"}'),
    tags=st.none() | st.lists(st.sampled_from(["", "a b", "ö'\\", "{}"])),
)
def test_every_record_comes_back_as_it_was(
    encrypted: ConversationStore, content: str, kwargs: str | None, extra: str | None, tags: list[str] | None
) -> None:
    key = encrypted.key(uuid.uuid4())
    record = StoredMessage("human", content, kwargs, extra, token_count=7, token_encoding="e")
    encrypted.append(key, [record, record], write_id=uuid.uuid4(), tags=tags, judged_by="rule")
    first, second = encrypted.read_all(key)
    assert first[:8] == record._replace(tags=None if tags is None else tuple(tags))[:8]
    assert second[:8] == record[:8]


def test_a_message_that_looks_encrypted_comes_back_from_either_store(
    encrypted: ConversationStore, plain: ConversationStore, admin: Connection
) -> None:
    history(encrypted, "sealed").add_messages([human("q")])
    ((looks,),) = rows_of(admin, encrypted, "select content from {schema}.conversation_messages")
    for store, session in ((encrypted, "sealed"), (plain, "clear")):
        history(store, session).add_messages([human(looks)])
        assert history(store, session).messages[-1].content == looks


def test_roles_order_tokens_and_times_stay_readable_and_nothing_else(
    encrypted: ConversationStore, admin: Connection
) -> None:
    encrypted.append(
        encrypted.key("s"),
        [StoredMessage("human", "hello", '{"a": 1}', '{"name": "n"}', token_count=4, token_encoding="e")],
        write_id=uuid.uuid4(),
        tags=["hello"],
        judged_by="rule",
    )
    columns = "role, message_index, token_count, additional_kwargs, extra, tags, judged_by, created_at is not null"
    (row,) = rows_of(admin, encrypted, f"select {columns}, content from {{schema}}.conversation_messages")
    assert row[:-1] == ("human", 0, 4, None, None, None, None, True)
    assert b"hello" not in base64.b64decode(row[-1], validate=True)
    record = encrypted.get_conversation("s")
    assert record is not None and record.is_encrypted and record.message_count == 1


def test_equal_messages_are_stored_as_different_texts(encrypted: ConversationStore, admin: Connection) -> None:
    for session in ("a", "b"):
        history(encrypted, session).add_messages([human("yes"), human("yes")])
    contents = rows_of(admin, encrypted, "select distinct content from {schema}.conversation_messages")
    keys = rows_of(admin, encrypted, "select distinct key_id from {schema}.conversation_messages")
    assert (len(contents), len(keys)) == (4, 2)


def pg_dump(dsn: str, schema: str, folder: Path) -> bytes | None:
    """Dump a schema with a pg_dump that is not older than the server; None if there is none."""
    from pgmemory.embedded.binaries import package_bin_dir, system_bin_dirs

    folders = [folder for folder in (package_bin_dir(), *system_bin_dirs()) if folder is not None]
    programs = [str(folder / "pg_dump") for folder in folders] + [shutil.which("pg_dump") or ""]
    for program in filter(os.path.isfile, programs):
        target = folder / "dump.sql"
        ended = subprocess.run([program, dsn, "--schema", schema, "--file", target], capture_output=True, timeout=60)
        if ended.returncode == 0:
            return target.read_bytes()
        assert b"server version" in ended.stderr, ended.stderr
    return None


def test_a_dump_of_the_database_holds_nothing_of_the_clear_text(
    encrypted: ConversationStore, plain: ConversationStore, server_dsn: str, admin: Connection, tmp_path: Path
) -> None:
    said, argument, keyword, summary = WORDS
    log = [human(f"the {said}"), calling("c1", text=said), result("c1", f"{said} found"), ai(said, name=said)]
    log[1].tool_calls[0]["args"] = {argument: argument}
    log[3].additional_kwargs = {argument: [argument]}
    history(encrypted).add_messages(log)
    relevant = RelevantTurnMemory(session_id="s", store=encrypted, keywords=[keyword])
    relevant.save_context({"input": f"{keyword}?"}, {"output": keyword})
    memory = SummaryMemory(session_id="s", store=encrypted, llm=scripted(f"about {summary}"), max_token_limit=1)
    memory.save_context({"input": said}, {"output": said})
    assert summary in memory.buffer and keyword in relevant.buffer
    history(plain, "clear").add_messages([human("Leuchtturm")])
    dump = pg_dump(server_dsn, encrypted.schema, tmp_path)
    if dump is None:
        tables = ("conversations", "conversation_messages", "conversation_summaries", "conversation_keys")
        query = " union all ".join(f"select t::text from {{schema}}.{table} t" for table in tables)
        dump = "\n".join(text for (text,) in rows_of(admin, encrypted, query)).encode()
    assert b"Leuchtturm" in dump  # it would be found
    for word in WORDS:
        for form in (word.encode(), word.lower().encode(), word.encode("unicode_escape")):
            assert form not in dump
    for secret in SECRETS.values():
        assert secret.hex().encode() not in dump and base64.b64encode(secret) not in dump


# --- Conversations that begin in clear text, stores without a keyring ------------------------------------------------


def test_a_conversation_that_began_in_clear_text_is_encrypted_from_then_on(
    encrypted: ConversationStore, plain: ConversationStore, admin: Connection
) -> None:
    history(plain).add_messages(dialogue(1))
    assert history(encrypted).messages == dialogue(1)
    history(encrypted).add_messages(dialogue(1, first=2))
    history(encrypted).add_messages(dialogue(1, first=3))
    assert history(encrypted).messages == dialogue(3)
    assert is_sealed(admin, encrypted) == [False] * 2 + [True] * 4


def test_a_store_without_a_keyring_neither_reads_nor_writes_an_encrypted_conversation(
    encrypted: ConversationStore, plain: ConversationStore, admin: Connection
) -> None:
    history(encrypted).add_messages(dialogue(2))
    key, before = plain.key("s"), rows_of(admin, plain, "select * from {schema}.conversations")
    record = [StoredMessage("human", "q")]
    tries: list[Callable[[], object]] = [
        lambda: plain.append(key, record, write_id=uuid.uuid4()),
        lambda: plain.append(key, record, write_id=uuid.uuid4(), max_messages=1),
        lambda: plain.append_and_read_unsummarized(key, record, write_id=uuid.uuid4(), budget=9, encoding=None),
        lambda: plain.read_all(key),
        lambda: plain.read_last_turns(key, turns=1),
        lambda: plain.read_last_tokens(key, budget=9, encoding=None),
        lambda: plain.read_relevant_turns(key, turns=1, rule=None),
        lambda: plain.read_summary_window(key, budget=9, encoding=None),
        lambda: history(plain).replace_message(0, human("new")),
    ]
    for attempt in tries:
        with pytest.raises(EncryptionError, match="session 's' is encrypted and this store has no keyring") as caught:
            attempt()
        assert isinstance(caught.value, ConfigurationError)
    assert rows_of(admin, plain, "select * from {schema}.conversations") == before
    assert history(encrypted).messages == dialogue(2)


def test_without_a_key_that_opens_any_row_a_plain_store_writes_nothing_either(
    encrypted: ConversationStore, plain: ConversationStore
) -> None:
    history(encrypted).add_messages(dialogue(1))
    history(encrypted).clear()  # the key stays, and no row is left to tell
    for write in (
        lambda: history(plain).add_messages(dialogue(1)),
        lambda: plain.append_and_read_unsummarized(
            plain.key("s"), [StoredMessage("human", "q")], write_id=uuid.uuid4(), budget=9, encoding=None
        ),
    ):
        with pytest.raises(EncryptionError, match="no keyring"):
            write()
    assert plain.list_messages("s") == []


def test_what_a_store_without_a_keyring_could_not_save_is_handed_back(
    encrypted: ConversationStore, plain: ConversationStore, caplog: pytest.LogCaptureFixture
) -> None:
    history(encrypted).add_messages(dialogue(1))
    memory = BufferMemory(session_id="s", store=plain, on_save_error="log")
    memory.save_context({"input": "q"}, {"output": "a"})
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert [message.content for message in record.unsaved_turn.messages] == ["q", "a"]  # type: ignore[attr-defined]


# --- Guards: other workers, old keys ---------------------------------------------------------------------------------


def test_workers_that_begin_a_conversation_at_once_agree_on_one_key(open_store: Open, admin: Connection) -> None:
    stores = [open_store() for _ in range(6)]
    start = threading.Barrier(len(stores))

    def write(number: int) -> None:
        start.wait()
        history(stores[number]).add_messages([human(f"{number}"), ai(f"{number}")])

    with ThreadPoolExecutor(len(stores)) as pool:
        list(pool.map(write, range(len(stores))))
    said = [str(message.content) for message in history(open_store()).messages]
    assert sorted(said) == sorted(2 * [str(number) for number in range(len(stores))])
    assert said[::2] == said[1::2]
    keys = rows_of(admin, stores[0], "select distinct key_id from {schema}.conversation_messages")
    assert keys == rows_of(admin, stores[0], "select key_id from {schema}.conversation_keys")


def test_a_key_that_another_worker_erased_is_not_used_again(open_store: Open, admin: Connection) -> None:
    one, other = open_store(), open_store()
    for store in (one, other):
        history(store).add_messages(dialogue(1))
    assert other.erase_key("s") is True
    assert history(one).messages == []
    history(one).add_messages(dialogue(1, first=2))
    history(other).add_messages(dialogue(1, first=3))
    assert history(one).messages == history(other).messages == [*dialogue(1, first=2), *dialogue(1, first=3)]
    keys = rows_of(admin, one, "select count(distinct key_id) from {schema}.conversation_messages")
    assert keys == [(2,)]


@pytest.mark.parametrize("max_messages", [None, 2])
def test_a_conversation_that_another_worker_deleted_begins_anew_with_a_new_key(
    open_store: Open, admin: Connection, max_messages: int | None
) -> None:
    one, other = open_store(), open_store()
    history(one).add_messages(dialogue(1))
    ((before,),) = rows_of(admin, one, "select key_id from {schema}.conversation_keys")
    other.erase_conversation("s")
    history(one, max_messages=max_messages).add_messages(dialogue(1, first=2))
    ((after,),) = rows_of(admin, one, "select key_id from {schema}.conversation_keys")
    assert before != after
    assert history(other).messages == dialogue(1, first=2)


def test_a_save_whose_key_is_out_of_date_prunes_and_folds_nothing_before_it_is_written(open_store: Open) -> None:
    one, other = open_store(), open_store()
    history(one).add_messages(dialogue(3))
    other.erase_key("s")
    history(other).add_messages(dialogue(2, first=4))
    history(one, max_messages=4).add_messages([human("q"), ai("a")])
    assert history(other).messages == [*dialogue(1, first=5), human("q"), ai("a")]
    other.erase_key("s")
    memory = SummaryMemory(session_id="s", store=one, llm=scripted("sum"), max_token_limit=0, return_messages=True)
    memory.save_context({"input": "q2"}, {"output": "a2"})
    assert [message.content for message in history(other).messages] == ["q2", "a2"]


def test_a_write_is_there_once_however_often_it_is_delivered_and_whoever_knows_the_key(open_store: Open) -> None:
    for _ in range(2):
        for store in (open_store(), open_store()):
            history(store).add_messages(dialogue(1), idempotency_key="once")
            history(store).add_messages(dialogue(1), idempotency_key="once")
            history(store, max_messages=2).add_messages(dialogue(1), idempotency_key="once")
    assert history(open_store()).messages == dialogue(1)


OF_B = "where conversation_id = %(b)s"
FROM_A = "where x.conversation_id = %(b)s and y.conversation_id = %(a)s"


@pytest.mark.parametrize(
    "move",
    [
        f"update {{schema}}.conversation_messages set role = 'system' {OF_B}",
        f"update {{schema}}.conversation_messages set content = repeat('QQ', 40) {OF_B}",
        f"update {{schema}}.conversation_messages set content = overlay(content placing 'AAAA' from 30) {OF_B}",
        f"update {{schema}}.conversation_messages set content = 'AQ==' {OF_B}",
        f"update {{schema}}.conversation_messages set content = 'no base64!' {OF_B}",
        f"""update {{schema}}.conversation_messages x set content = y.content
            from {{schema}}.conversation_messages y {FROM_A} and x.message_index = y.message_index""",
        f"""update {{schema}}.conversation_keys x set wrapped_key = y.wrapped_key
            from {{schema}}.conversation_keys y {FROM_A}""",
        # Even where everything about the key goes with it.
        f"""with keys as (update {{schema}}.conversation_keys x set wrapped_key = y.wrapped_key, key_id = y.key_id
                          from {{schema}}.conversation_keys y {FROM_A})
            update {{schema}}.conversation_messages x set content = y.content, key_id = y.key_id
            from {{schema}}.conversation_messages y {FROM_A} and x.message_index = y.message_index""",
    ],
)
def test_what_was_changed_or_comes_from_another_place_does_not_open(
    encrypted: ConversationStore, open_store: Open, admin: Connection, move: str
) -> None:
    for session in ("a", "b"):
        history(encrypted, session).add_messages([human(f"of {session}"), ai("yes")])
    ids = {session: str(encrypted.key(session).id) for session in ("a", "b")}
    rows_of(admin, encrypted, move, ids)
    with pytest.raises(EncryptionError, match="changed"):
        _ = history(open_store(), "b").messages
    assert history(open_store(), "a").messages == [human("of a"), ai("yes")]


# --- Erasing a key ---------------------------------------------------------------------------------------------------


def memories(store: ConversationStore, llm: Any) -> list[PostgresChatMemory]:
    """Return a memory of every kind."""
    fields: dict[str, Any] = {"session_id": "s", "store": store, "return_messages": True}
    return [
        BufferMemory(**fields),
        BufferMemory(k=5, **fields),
        TokenWindowMemory(max_token_limit=1000, **fields),
        RelevantTurnMemory(keywords=["question"], **fields),
        SummaryMemory(llm=llm, max_token_limit=30, token_counter=words_in, **fields),
    ]


def test_views_leave_out_what_was_erased_and_go_on(
    open_store: Open, plain: ConversationStore, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = open_store(), open_store()
    history(plain).add_messages([system(), human("clear question"), ai("clear")])
    history(one).add_messages([human("question"), calling("c1"), result("c1"), ai("x"), *dialogue(40), human("last")])
    for store in (one, other):
        assert len(history(store).messages) == 88
    assert one.erase_key("s")
    left = [system(), human("clear question"), ai("clear")]
    for store in (one, other):
        caplog.clear()
        assert history(store).messages == left
        (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
        assert warning.getMessage() == "session 's': 85 messages are left out, for their key was erased"
    history(one).add_messages(dialogue(1, first=90))
    for number, memory in enumerate(memories(other, scripted("the summary")), 90):
        shown = memory.load_memory_variables({})["history"]
        assert shown[-2:] == dialogue(1, first=number)
        assert all(message.content for message in shown)
        memory.save_context({"input": f"question {number + 1}"}, {"output": f"answer {number + 1}"})
        assert memory.load_memory_variables({})["history"][-2:] == dialogue(1, first=number + 1)
    erased = [record for record in other.list_messages("s") if record.is_erased]
    assert len(erased) == 85 and {record.content for record in erased} == {""}
    assert [record.role for record in erased[:4]] == ["human", "ai", "tool", "ai"]


def test_an_erased_summary_is_not_shown_and_a_fold_from_before_does_not_bring_it_back(open_store: Open) -> None:
    store, other = open_store(), open_store()
    asked: list[str] = []

    def summarise(messages: list[BaseMessage]) -> str:
        asked.append(str(messages[0].content))
        if len(asked) == 2:
            other.erase_key("s")
        return f"summary {len(asked)}"

    memory = SummaryMemory(
        session_id="s", store=store, llm=FakeChat(answer=summarise), max_token_limit=8, token_counter=words_in
    )
    for number in range(1, 4):
        memory.save_context({"input": f"question {number}"}, {"output": f"answer {number}"})
        if number == 2:
            assert "summary" not in memory.buffer or "summary 1" in memory.buffer
    while len(asked) < 2:
        memory.save_context({"input": "question more"}, {"output": "answer more"})
    assert memory.buffer == ""  # neither the first summary, nor the second that was made of it
    memory.save_context({"input": "question 9"}, {"output": "answer 9"})
    assert memory.buffer.endswith("Human: question 9\nAI: answer 9")
    assert "answer 1" not in memory.buffer


def test_a_held_conversations_key_is_not_erased(encrypted: ConversationStore) -> None:
    history(encrypted).add_messages(dialogue(1))
    encrypted.hold("s", reason="lawsuit")
    with pytest.raises(ConversationHeldError, match="lawsuit"):
        encrypted.erase_key("s")
    assert history(encrypted).messages == dialogue(1)
    history(encrypted).add_messages(dialogue(1, first=2))
    encrypted.release("s")
    assert encrypted.erase_key("s") and history(encrypted).messages == []


def test_erasing_reaches_the_own_conversation_alone(open_store: Open) -> None:
    store, tenant = open_store(), open_store(tenant_id="t")
    history(store, user_id="u").add_messages(dialogue(1))
    history(tenant, user_id="u").add_messages(dialogue(1))
    assert not store.erase_key("s") and not store.erase_key("s", user_id="v") and not tenant.erase_key("s")
    assert store.erase_key("s", user_id="u") and not store.erase_key("s", user_id="u")
    assert history(tenant, user_id="u").messages == dialogue(1)


def test_a_conversation_whose_key_is_missing_says_so_and_goes_on_once_it_is_given_up(
    encrypted: ConversationStore, open_store: Open, admin: Connection
) -> None:
    history(encrypted).add_messages(dialogue(1))
    rows_of(admin, encrypted, "delete from {schema}.conversation_keys")  # as restored from a backup without keys
    store = open_store()
    assert history(store).messages == []
    with pytest.raises(EncryptionError, match="key of session 's' is missing.*erase_key"):
        history(store).add_messages(dialogue(1, first=2))
    assert store.erase_key("s")
    history(store).add_messages(dialogue(1, first=2))
    assert history(open_store()).messages == dialogue(1, first=2)


# --- Editing ---------------------------------------------------------------------------------------------------------


def test_what_is_edited_in_an_encrypted_conversation_is_encrypted(
    encrypted: ConversationStore, open_store: Open, plain: ConversationStore, admin: Connection
) -> None:
    history(plain).add_messages(dialogue(1))
    history(encrypted).add_messages(dialogue(2, first=2))
    for store, index in ((encrypted, 0), (open_store(), 2)):  # one knows the key, the other has to ask
        history(store).replace_message(index, human(f"new {index}"))
    said = [message.content for message in history(encrypted).messages]
    assert said == ["new 0", "answer 1", "new 2", "answer 2", "question 3", "answer 3"]
    assert is_sealed(admin, encrypted) == [True, False, True, True, True, True]


# --- Master keys -----------------------------------------------------------------------------------------------------


def test_a_missing_or_another_master_key_says_which(encrypted: ConversationStore, open_store: Open) -> None:
    history(encrypted).add_messages(dialogue(1))
    wrong = Keyring({FIRST: SECRETS[OTHER]})
    for keys, text in ((keyring(OTHER), f"'{FIRST}', which this keyring lacks: it has 'other'"), (wrong, "another")):
        store = open_store(keys)
        for attempt in (
            lambda store=store: history(store).messages,
            lambda store=store: history(store).add_messages(dialogue(1, first=2)),
        ):
            with pytest.raises(EncryptionError, match=text):
                attempt()
    assert history(encrypted).messages == dialogue(1)


def test_rotating_wraps_every_key_of_the_tenant_anew_and_older_content_stays_readable(
    open_store: Open, admin: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgmemory.store.encryption._BATCH", 2)
    old, of_tenant = open_store(), open_store(tenant_id="t")
    for number in range(5):
        history(old, f"s{number}").add_messages(dialogue(1))
    history(of_tenant).add_messages(dialogue(1))
    both = open_store(keyring(SECOND, FIRST))
    history(both, "new").add_messages(dialogue(1))
    batches: list[int] = []
    assert both.rotate_keys(on_batch=batches.append) == 5
    assert batches == [2, 4, 5]
    assert both.rotate_keys() == 0
    names = "select tenant_id, master_key_name, count(*) from {schema}.conversation_keys group by 1, 2 order by 1"
    assert rows_of(admin, both, names) == [("", SECOND, 6), ("t", FIRST, 1)]
    only_new = open_store(keyring(SECOND))
    assert history(only_new, "s3").messages == dialogue(1)
    history(old, "s3").add_messages(dialogue(1, first=2))  # which still knows the key itself
    assert history(only_new, "s3").messages == dialogue(2)
    assert both.rotate_keys(all_tenants=True) == 1
    assert history(open_store(keyring(SECOND), tenant_id="t")).messages == dialogue(1)


def test_rotating_does_what_it_can_and_names_the_master_keys_that_it_lacks(open_store: Open) -> None:
    history(open_store(), "a").add_messages(dialogue(1))
    history(open_store(keyring(OTHER)), "b").add_messages(dialogue(1))
    store = open_store(keyring(SECOND, FIRST))
    with pytest.raises(EncryptionError, match=r"1 keys were rotated; .* lacks the master keys 'other' \(1 conv"):
        store.rotate_keys()
    assert history(open_store(keyring(SECOND)), "a").messages == dialogue(1)


def test_a_key_that_is_erased_while_it_is_rotated_stays_erased(open_store: Open) -> None:
    for session in ("a", "b"):
        history(open_store(), session).add_messages(dialogue(1))
    store, other = open_store(keyring(SECOND, FIRST)), open_store()
    execute = store._execute

    def erasing(name: str, statement: str, parameters: dict[str, Any]) -> Any:
        if statement == statements.ROTATE_KEYS:
            other.erase_key("a")
            history(other, "a").add_messages(dialogue(1, first=2))
        return execute(name, statement, parameters)

    store._execute = erasing  # type: ignore[method-assign]
    assert store.rotate_keys() == 1
    assert history(store, "a").messages == dialogue(1, first=2)
    assert history(store, "b").messages == dialogue(1)


# --- Memories in chains ----------------------------------------------------------------------------------------------


def test_every_memory_works_in_a_chain_over_an_encrypted_store(open_store: Open, admin: Connection) -> None:
    store = open_store()
    model = FakeChat(answer=lambda messages: f"answer to {str(messages[-1].content).splitlines()[-2:]!r}"[:60])
    for place, memory in enumerate(memories(store, scripted("the summary"))):
        memory = memory.for_session(f"chain {place}").model_copy(update={"return_messages": False})
        chain = ConversationChain(llm=model, memory=memory)
        for number in range(4):
            chain.invoke({"input": f"question {number} {'word ' * 8}"})
        other = memory.model_copy(update={"chat_memory": history(open_store(), f"chain {place}")})
        shown = other.load_memory_variables({})["history"]
        assert "question 3" in shown and "answer to" in shown
        assert ("question 0" in shown) != isinstance(memory, SummaryMemory)
        assert ("the summary" in shown) == isinstance(memory, SummaryMemory)
    assert set(is_sealed(admin, store)) == {True}
    summaries = rows_of(admin, store, "select key_id is not null, content from {schema}.conversation_summaries")
    assert summaries and all(sealed and "summary" not in content for sealed, content in summaries)


def test_saving_and_loading_take_one_round_trip_each(counted_store: Any) -> None:
    counted_store.keyring = keyring()
    for number, memory in enumerate(memories(counted_store, scripted("sum"))):
        memory = memory.for_session(f"s{number}")
        counts = []
        for _ in range(3):
            counted_store.executes.clear()
            memory.save_context({"input": "question"}, {"output": "answer"})
            memory.load_memory_variables({})
            counts.append(len(counted_store.executes))
        assert counts == [2, 2, 2], type(memory)


def test_a_worker_that_has_loaded_a_conversation_saves_in_one_round_trip(counted_store: Any, open_store: Open) -> None:
    history(open_store()).add_messages(dialogue(1))
    counted_store.keyring = keyring()
    memory = BufferMemory(session_id="s", store=counted_store)
    memory.load_memory_variables({})
    counted_store.executes.clear()
    memory.save_context({"input": "question 2"}, {"output": "answer 2"})
    assert len(counted_store.executes) == 1
    assert history(open_store()).messages == dialogue(2)


# --- Keyrings --------------------------------------------------------------------------------------------------------


def test_a_key_file_is_read_newest_first(tmp_path: Path) -> None:
    lines = [Keyring.new_line("new"), "# from last year", "", Keyring.new_line("old")]
    path = tmp_path / "pgmemory.keys"
    path.write_text("\n".join(lines) + "\n")
    for keys in (Keyring.from_text("\n".join(lines)), Keyring.from_file(path), Keyring.from_file(str(path))):
        assert keys.names == ("new", "old") and keys.current == "new"
    assert len({Keyring.new_line("k") for _ in range(5)}) == 5


GOOD = base64.b64encode(SECRETS[FIRST]).decode()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "at least one master key"),
        ("# none\n", "at least one master key"),
        (f"a:{GOOD}\nb:{GOOD[:-8]}", "line 2 is not name:key"),
        (f"a:{GOOD}\n\n# c\nb{GOOD}", "line 4 is not name:key"),
        (f"a b:{GOOD}", "line 1 is not name:key"),
        (f":{GOOD}", "line 1 is not name:key"),
        (f"a:{GOOD[:10]}\N{SNOWMAN}{GOOD[11:]}", "line 1 is not name:key"),
        (f"a:{GOOD}\na:{GOOD}", "line 2 names a master key"),
    ],
)
def test_a_key_file_that_cannot_be_read_names_the_line_and_not_what_it_holds(
    tmp_path: Path, text: str, problem: str
) -> None:
    path = tmp_path / "keys"
    path.write_text(text, encoding="utf-8")
    for read in (lambda: Keyring.from_text(text), lambda: Keyring.from_file(path)):
        with pytest.raises(ConfigurationError, match=problem) as caught:
            read()
        assert GOOD[:8] not in shown_by(caught.value)


def test_a_key_file_that_is_not_there_or_not_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="key file '.*nowhere': it cannot be read: No such file"):
        Keyring.from_file(tmp_path / "nowhere")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match="key file '.*binary': it cannot be read: it is not UTF-8 text"):
        Keyring.from_file(tmp_path / "binary")


@pytest.mark.parametrize("keys", [{}, {"a": b"short"}, {"a": "text"}, {"": bytes(32)}, {"a:b": bytes(32)}])
def test_keys_that_are_not_usable_are_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="master key"):
        Keyring(keys)


def test_only_a_keyring_is_taken_for_one(server_dsn: str) -> None:
    with pytest.raises(ConfigurationError, match="keyring must be a Keyring or None, not bytes"):
        ConversationStore(server_dsn, keyring=bytes(32))  # type: ignore[arg-type]


def shown_by(error: BaseException) -> str:
    """Return all that an error tracker shows of an error below this file's frames: texts, and variables of frames."""
    shown = "".join(traceback.TracebackException.from_exception(error, capture_locals=True).format())
    own = re.escape(__file__)
    return re.sub(rf'  File "{own}".*?(?=\n  File "|\n\S)', "", shown, flags=re.DOTALL)


def forms_of(secret: bytes) -> list[str]:
    """Return how a key may be shown."""
    return [secret.hex(), base64.b64encode(secret).decode(), repr(secret)[2:-1], repr(list(secret))[1:-1]]


def test_no_key_is_ever_shown(encrypted: ConversationStore, open_store: Open, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    history(encrypted).add_messages(dialogue(1))
    data_key = encrypted._data_keys.get(str(encrypted.key("s").id))
    keys = keyring(FIRST, SECOND)
    shown = [repr(value) for value in (keys, encrypted, history(encrypted), data_key, encrypted._data_keys)]
    shown += [str(keys), f"{keys}", repr(vars(keys)), repr(vars(data_key)), repr(keys.new_data_key("id"))]
    memory = BufferMemory(session_id="s", store=encrypted)
    shown += [repr(memory), repr(memory.model_dump()), str(memory)]
    for wrong in (keyring(OTHER), Keyring({FIRST: SECRETS[OTHER]})):
        with pytest.raises(EncryptionError) as caught:
            _ = history(open_store(wrong)).messages
        shown.append(shown_by(caught.value))
    shown.append(caplog.text)
    for secret in SECRETS.values():
        for form in forms_of(secret):
            assert not any(form in text for text in shown)


def test_a_copy_and_a_pickle_of_a_store_read_on_and_carry_no_conversations_key(encrypted: ConversationStore) -> None:
    history(encrypted).add_messages(dialogue(1))
    assert encrypted._data_keys.get(str(encrypted.key("s").id)) is not None
    for copied in (copy.deepcopy(encrypted), pickle.loads(pickle.dumps(encrypted))):
        with copied:
            assert copied._data_keys.get(str(encrypted.key("s").id)) is None
            assert history(copied).messages == dialogue(1)


def test_without_the_package_cryptography_a_keyring_names_the_extra_and_nothing_else_needs_it() -> None:
    program = (
        "import sys; sys.modules['cryptography'] = None\n"
        "import pgmemory, pgmemory.cli\n"
        "pgmemory.ConversationStore('postgresql://127.0.0.1/none')\n"
        "line = pgmemory.Keyring.new_line('a')\n"
        "try: pgmemory.Keyring.from_text(line)\n"
        "except pgmemory.ConfigurationError as error: print(error)\n"
    )
    ended = subprocess.run([sys.executable, "-W", "error", "-c", program], cwd=PROJECT, capture_output=True, text=True)
    assert "pip install 'langchain-pgmemory[encryption]'" in ended.stdout, ended.stderr


def test_what_does_not_encrypt_does_not_load_cryptography() -> None:
    program = "import sys, pgmemory.cli, pgmemory.store; print('cryptography' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", program], cwd=PROJECT, capture_output=True, text=True)
    assert ended.stdout == "False\n", ended.stderr


# --- Commands --------------------------------------------------------------------------------------------------------


def call(capfd: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    """Run a command in this process."""
    with pytest.raises(SystemExit) as ended:
        cli.main([str(argument) for argument in arguments], prog_name="pgmemory")
    assert isinstance(ended.value.code, int)
    return ended.value.code, *capfd.readouterr()


def test_keys_are_made_rotated_and_erased_by_commands(
    encrypted: ConversationStore,
    server_dsn: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DATABASE_URL", server_dsn)
    schema = ("--schema", encrypted.schema)
    old_file, new_file = tmp_path / "old.keys", tmp_path / "new.keys"
    code, line, errors = call(capfd, "new-key", "old")
    assert (code, errors) == (0, "") and re.fullmatch(r"old:[A-Za-z0-9+/]{43}=\n", line)
    old_file.write_text(line)
    new_file.write_text(call(capfd, "new-key", "new")[1] + line)
    with ConversationStore(server_dsn, schema=encrypted.schema, keyring=Keyring.from_file(old_file)) as store:
        history(store, user_id="u").add_messages(dialogue(1))
    assert call(capfd, "rotate-keys", "--keys", new_file, "--json", *schema) == (0, '{"rotated": 1}\n', "")
    monkeypatch.setenv("PGMEMORY_KEYS_FILE", str(new_file))
    assert call(capfd, "rotate-keys", *schema) == (0, "0 keys were wrapped anew\n", "")
    shown = call(capfd, "show", "s", "--user", "u", *schema)
    assert shown[0] == 0 and "question 1" in shown[1]
    code, output, errors = call(capfd, "show", "s", "--user", "u", "--keys", old_file, *schema)
    assert code == 1 and "which this keyring lacks" in errors and errors.count("\n") == 1
    erased = call(capfd, "erase-key", "s", "--user", "u", "--json", *schema)
    assert erased == (0, '{"session_id": "s", "user_id": "u", "tenant_id": ""}\n', "")
    code, _, errors = call(capfd, "erase-key", "s", "--user", "u", *schema)
    assert code == 1 and "has no key" in errors
    monkeypatch.delenv("PGMEMORY_KEYS_FILE")
    code, _, errors = call(capfd, "rotate-keys", *schema)
    assert code == 1 and "keyring" in errors
    code, _, errors = call(capfd, "rotate-keys", "--keys", tmp_path / "none", *schema)
    assert code == 1 and "No such file" in errors and errors.count("\n") == 1


@pytest.mark.parametrize("arguments", [("new-key",), ("erase-key",), ("rotate-keys", "--every", "1h")])
def test_wrong_usage_of_the_key_commands_ends_with_2(
    capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    assert call(capfd, *arguments)[0] == 2


def test_what_an_edit_puts_into_an_encrypted_store_is_encrypted(
    encrypted: ConversationStore, admin: Connection
) -> None:
    history = PostgresChatMessageHistory("s", encrypted)
    history.add_messages([human("first"), ai("yes")])
    assert encrypted.erase_key("s")
    history.replace_turn(0, [human("PLAINLY")])
    with admin.cursor() as cursor:
        cursor.execute(f'select content from "{encrypted.schema}".conversation_messages')
        assert not any("PLAINLY" in content for (content,) in cursor.fetchall())
    assert [message.content for message in history.messages] == ["PLAINLY"]
    history.add_messages([human("more")])
    assert [message.content for message in history.messages] == ["PLAINLY", "more"]
