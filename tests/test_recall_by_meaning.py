"""Recall by meaning: vectors made after the commit, in batches, once a text; found by them and by words, by index."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from datetime import timedelta
from typing import Any

import numpy
import psycopg2
import pytest
from conftest import PROJECT, CountingPool, run_together
from conversations import ai, calling, human, result
from fakes import FakeEmbeddings
from psycopg2.extensions import connection as Connection
from psycopg2.extensions import make_dsn
from servers import query
from test_cli import Ended, call  # noqa: F401  # a fixture
from test_plans import Crowd, nodes
from test_recall import best, hits, recalling, say, window
from test_row_level_security import PASSWORD, new_role  # noqa: F401  # a fixture
from test_schema import execute
from waiting import wait_until

from pgmemory import (
    ConfigurationError,
    ConversationStore,
    EmbeddingError,
    Keyring,
    PostgresChatMessageHistory,
    RecallMemory,
    SchemaError,
)
from pgmemory.models import ConversationKey
from pgmemory.queries.meaning import MESSAGES

Opening = Callable[..., ConversationStore]


@pytest.fixture
def opened(server_dsn: str, schema_name: str) -> Iterator[Opening]:
    """Opens stores of one schema, each with embeddings of its own unless others are given."""
    stores: list[ConversationStore] = []

    def open_store(embeddings: Any = None, *, source: Any = None, **options: Any) -> ConversationStore:
        store = ConversationStore(
            source or server_dsn, schema=schema_name, embeddings=embeddings or FakeEmbeddings(), **options
        )
        stores.append(store)
        return store

    yield open_store
    for store in stores:
        store.close()


@pytest.fixture
def embeddings() -> FakeEmbeddings:
    return FakeEmbeddings()


@pytest.fixture
def meaning(opened: Opening, embeddings: FakeEmbeddings) -> ConversationStore:
    """A store whose messages are found by their meaning, and by their words."""
    store = opened(embeddings)
    store.setup(search=True)
    return store


def waiting(admin: Connection, store: ConversationStore) -> int:
    """How many messages have no vector yet."""
    ((count,),) = execute(admin, f"select count(*) from {store.schema}.message_vectors where embedding is null")
    return int(count)


def vectors(admin: Connection, store: ConversationStore) -> dict[tuple[str, int], str]:
    """The vectors of messages, by session id and number."""
    rows = execute(
        admin,
        f"select c.session_id, v.message_index, v.embedding::text from {store.schema}.message_vectors v "
        f"join {store.schema}.conversations c on c.id = v.conversation_id",
    )
    return {(session_id, index): vector for session_id, index, vector in rows}


# What is found


def test_what_means_alike_is_found_without_a_common_word_whole_turns_and_by_words_too(
    meaning: ConversationStore,
) -> None:
    say(meaning, "old", "my puppy is ill", "see a vet", "the engine stutters", "oil it", "nothing else", "fine")
    say(meaning, "other", "the dog", "a hound", user_id="another")
    meaning.index_messages()
    asked = "how are dogs?"
    assert hits(meaning, asked, by="words") == []
    assert best(meaning, asked, by="meaning") == best(meaning, asked, by="both") == best(meaning, asked) == ("old", 0)
    (turn, *_) = meaning.recall(meaning.key("now", "u"), asked, k=1).turns
    assert [message.content for message in turn.messages] == ["my puppy is ill", "see a vet"]
    # By both, what is found either way is there, and what is found both ways comes first.
    both = hits(meaning, "an engine, or fine?", by="both", k=6)
    assert both[0] == ("old", 2) and ("old", 5) in both


def test_of_what_is_found_by_both_either_counts_as_a_share_of_its_best(meaning: ConversationStore) -> None:
    say(meaning, "old", "zebra", "yes", "x", "y", "a puppy", "yes", "x", "y", "zebra and puppy", "yes")
    meaning.index_messages()
    found = meaning.recall(meaning.key("now", "u"), "zebra dog", k=9).turns
    scores = {hit.message_index: hit.score for turn in found for hit in turn.hits}
    assert scores[8] > 1.5 and 0.5 < scores[0] < 1.4 and 0.5 < scores[4] < 1.4
    assert max(scores, key=lambda index: scores[index]) == 8


def test_by_meaning_nobody_finds_what_another_user_or_agent_said_nor_what_is_shown_or_yet_to_be_said(
    meaning: ConversationStore, opened: Opening
) -> None:
    for session_id, user_id in (("a", "u"), ("now", "u"), ("a#agent:x", "u"), ("a", "other"), ("a", None)):
        say(meaning, session_id, "my dog", "nice", user_id=user_id)
    tenant = opened(tenant_id="acme")
    say(tenant, "a", "my dog", "nice")
    tenant.index_messages()
    meaning.index_messages()
    options: dict[str, Any] = {"by": "meaning", "k": 50}
    dogs = [hit for hit in hits(meaning, "hound", **options) if hit[1] == 0]
    assert sorted(dogs) == [("a", 0), ("now", 0)]
    assert hits(meaning, "hound", whole_user=False, session_id="now", **options)[0] == ("now", 0)
    assert hits(meaning, "hound", turns=1, **options)[0] == ("a", 0)
    assert ("now", 0) not in hits(meaning, "hound", turns=1, **options)
    assert hits(meaning, "hound", user_id=None, session_id="a", **options)[0] == ("a", 0)
    assert [hit[0] for hit in hits(tenant, "hound", **options) if hit[1] == 0] == ["a"]
    say(meaning, "late", "a second hound", "good")
    meaning.index_messages()
    assert "late" not in {session for session, _ in hits(meaning, "hound", before=1, **options)}


def test_what_tools_say_and_what_says_nothing_has_no_vector(meaning: ConversationStore, admin: Connection) -> None:
    say(meaning, "old", human("where is it?"), calling("1"), result("1"), ai("in Oslo"))
    meaning.index_messages()
    assert sorted(vectors(admin, meaning)) == [("old", 0), ("old", 3)]


# Made after the commit, in batches, once a text


def test_a_text_is_embedded_once_whoever_says_it_and_however_often(
    meaning: ConversationStore, embeddings: FakeEmbeddings, admin: Connection
) -> None:
    for number in range(4):
        say(meaning, f"s{number}", "hello", "hi", "my dog", f"noted {number}", user_id=f"u{number}")
    meaning.index_messages()
    fork = PostgresChatMessageHistory("s0", meaning, user_id="u0").fork("branch")
    fork.add_user_message("hello")
    fork.replace_message(0, "my dog")
    meaning.index_messages()
    assert sorted(embeddings.texts) == sorted({"hello", "hi", "my dog", *(f"noted {number}" for number in range(4))})
    assert waiting(admin, meaning) == 0
    made = vectors(admin, meaning)
    assert made["branch", 0] == made["branch", 2] == made["s3", 2] != made["s3", 0] == made["branch", 4]


def test_several_processes_that_write_the_same_embed_it_once(
    server_dsn: str, meaning: ConversationStore, admin: Connection
) -> None:
    program = """
import os, sys
sys.path.insert(0, "tests")
from fakes import FakeEmbeddings
from pgmemory import ConversationStore, PostgresChatMessageHistory
embeddings = FakeEmbeddings()
with ConversationStore(os.environ["DSN"], schema=sys.argv[1], embeddings=embeddings) as store:
    print("ready", flush=True)
    input()
    for number in range(20):
        PostgresChatMessageHistory(sys.argv[2], store).add_user_message(f"said by all {number}")
    store.index_messages()
print("\\n".join(embeddings.texts))
"""
    outputs = run_together(program, [[meaning.schema, str(number)] for number in range(3)], server_dsn)
    meaning.index_messages()
    texts = [text for output in outputs for text in output.split("\n") if text]
    # What another process was making when this one ended has been stored by that one.
    assert sorted(texts) == sorted({f"said by all {number}" for number in range(20)})
    assert waiting(admin, meaning) == 0


def test_the_turn_is_stored_and_saving_has_ended_before_the_embedder_is_asked_which_gets_many_at_once(
    opened: Opening, admin: Connection
) -> None:
    asked, go_on = threading.Event(), threading.Event()

    def wait(texts: list[str]) -> None:
        asked.set()
        assert go_on.wait(60)

    embeddings = FakeEmbeddings()
    store = opened(embeddings)
    store.setup(search=True)
    embeddings.before = wait
    memory = RecallMemory(session_id="now", user_id="u", store=store)
    memory.save_context({"input": "one"}, {"output": "two"})
    assert asked.wait(60)
    for number in range(10):
        memory.save_context({"input": f"q{number}"}, {"output": f"a{number}"})
    assert len(store.list_messages("now", user_id="u")) == 22 and waiting(admin, store) == 22
    # The connections are free meanwhile, and no transaction is open.
    in_transaction = "select count(*) from pg_stat_activity where state like 'idle in tr%%' and query ~ %(schema)s"
    with admin.cursor() as cursor:
        cursor.execute(in_transaction, {"schema": store.schema})
        assert cursor.fetchall() == [(0,)]
    go_on.set()
    store.index_messages()
    assert [len(batch) for batch in embeddings.batches] == [2, 20]
    assert waiting(admin, store) == 0


def test_what_was_stored_before_is_embedded_after_the_setup(
    store: ConversationStore, server_dsn: str, admin: Connection
) -> None:
    for number in range(3):
        say(store, f"s{number}", *[f"my dog {number} {index}" for index in range(60)])
    embeddings = FakeEmbeddings()
    with ConversationStore(server_dsn, schema=store.schema, embeddings=embeddings) as later:
        later.setup(search=True)
        wait_until(lambda: waiting(admin, later) == 0, "all have their vectors")
        assert [len(batch) for batch in embeddings.batches] == [64, 64, 52]
        assert best(later, "hound", by="meaning") is not None
        # From then on whoever writes lets them wait, embedder or not.
        say(store, "s0", "a puppy", "nice")
        assert waiting(admin, later) == 2
        later.index_messages()
        assert best(later, "hound", by="meaning", k=1) is not None and waiting(admin, later) == 0


def test_closing_waits_for_the_batch_that_is_being_made_and_the_rest_is_anothers(
    opened: Opening, admin: Connection
) -> None:
    embeddings = FakeEmbeddings()
    store = opened(embeddings)
    store.setup(search=True)
    asked, go_on = threading.Event(), threading.Event()

    def wait(texts: list[str]) -> None:
        asked.set()
        assert go_on.wait(60)

    embeddings.before = wait
    say(store, "old", *[f"dog {number}" for number in range(200)])
    assert asked.wait(60)
    closing = threading.Thread(target=store.close, args=(60,))
    closing.start()
    wait_until(lambda: not store._embeds, "it closes")
    go_on.set()
    closing.join(60)
    assert not closing.is_alive() and waiting(admin, store) == 200 - 64
    other = FakeEmbeddings()
    opened(other).index_messages()
    assert waiting(admin, store) == 0 and len(other.texts) == 200 - 64


def test_a_program_that_just_ends_leaves_its_last_batch_made(
    meaning: ConversationStore, server_dsn: str, admin: Connection
) -> None:
    program = """
import os, sys
sys.path.insert(0, "tests")
from fakes import FakeEmbeddings
from pgmemory import ConversationStore, PostgresChatMessageHistory
store = ConversationStore(os.environ["DSN"], schema=sys.argv[1], embeddings=FakeEmbeddings())
print("ready", flush=True)
input()
PostgresChatMessageHistory("s", store).add_user_message("my dog")
"""
    run_together(program, [[meaning.schema]], server_dsn)
    assert list(vectors(admin, meaning)) == [("s", 0)] and waiting(admin, meaning) == 0


def test_what_a_killed_process_was_making_is_made_by_another_one_after_a_while(
    meaning: ConversationStore, embeddings: FakeEmbeddings, server_dsn: str, admin: Connection, monkeypatch: Any
) -> None:
    program = """
import os, sys, time
sys.path.insert(0, "tests")
from fakes import FakeEmbeddings
from pgmemory import ConversationStore, PostgresChatMessageHistory
def hang(texts):
    print("asked", flush=True)
    time.sleep(60)
store = ConversationStore(os.environ["DSN"], schema=sys.argv[1], embeddings=FakeEmbeddings(before=hang))
PostgresChatMessageHistory("s", store).add_user_message("my dog")
"""
    environment = os.environ | {"DSN": server_dsn, "PYTHONPATH": str(PROJECT)}
    process = subprocess.Popen(
        [sys.executable, "-c", program, meaning.schema], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    with process.stdout as out:
        assert out.readline() == "asked\n"
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    meaning.index_messages()
    assert waiting(admin, meaning) == 1 and embeddings.texts == []
    monkeypatch.setattr("pgmemory.store.meaning._LAPSE", timedelta(0))
    meaning.index_messages()
    assert waiting(admin, meaning) == 0 and embeddings.texts == ["my dog"]


def test_a_forked_worker_embeds_what_it_writes(meaning: ConversationStore, admin: Connection) -> None:
    say(meaning, "parent", "my dog", "nice")
    meaning.index_messages()
    child = os.fork()
    if child == 0:
        try:
            say(meaning, "child", "a puppy", "nice")
            meaning.index_messages()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert {session for session, _ in vectors(admin, meaning)} == {"parent", "child"} and waiting(admin, meaning) == 0


# An embedder that fails, or is not there


def failing(texts: list[str]) -> None:
    raise ConnectionError("the key sk-secret-123 is refused")


def test_a_failing_embedder_costs_no_turn_and_is_recalled_without(
    meaning: ConversationStore, embeddings: FakeEmbeddings, admin: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    embeddings.before = failing
    memory = RecallMemory(session_id="now", user_id="u", store=meaning, return_messages=True, k=0)
    with caplog.at_level(logging.WARNING):
        memory.save_context({"input": "my puppy is called Rex"}, {"output": "nice"})
        assert window(memory, "Is Rex a dog?") == [human("my puppy is called Rex"), ai("nice")]
        assert window(memory, "the dog?") == []
        wait_until(lambda: "no vector was made" in caplog.text, "the failure is logged")
    assert "found by its words alone" in caplog.text and "ConnectionError" in caplog.text
    assert "sk-secret" not in caplog.text
    with pytest.raises(EmbeddingError, match="FakeEmbeddings concepts failed with ConnectionError"):
        meaning.index_messages()
    assert waiting(admin, meaning) == 2
    embeddings.before = lambda texts: None
    meaning.index_messages()
    assert window(memory, "the dog?")[0] == human("my puppy is called Rex")


@pytest.mark.parametrize(
    "vectors_of",
    [
        lambda texts: [[1.0, 0.0, 0.0]] * len(texts),
        lambda texts: [[float("nan")] * 4] * len(texts),
        lambda texts: [],
        lambda texts: [["x"] * 4] * len(texts),
        lambda texts: None,
    ],
    ids=["other dimensions", "not finite", "too few", "no numbers", "none"],
)
def test_what_is_no_vector_of_its_kind_is_not_stored(
    meaning: ConversationStore, embeddings: FakeEmbeddings, admin: Connection, vectors_of: Any, monkeypatch: Any
) -> None:
    say(meaning, "old", "my dog", "nice")
    meaning.index_messages()
    monkeypatch.setattr(embeddings, "embed_documents", vectors_of)
    say(meaning, "old", "a puppy", "nice")
    with pytest.raises(EmbeddingError):
        meaning.index_messages()
    assert waiting(admin, meaning) == 1  # "nice" is known


def test_an_array_of_numpys_is_taken_for_vectors(
    meaning: ConversationStore, embeddings: FakeEmbeddings, monkeypatch: Any
) -> None:
    monkeypatch.setattr(embeddings, "embed_documents", lambda texts: numpy.ones((len(texts), 4), numpy.float32))
    monkeypatch.setattr(embeddings, "embed_query", lambda text: numpy.ones(4, numpy.float32))
    say(meaning, "old", "my dog")
    meaning.index_messages()
    assert best(meaning, "x", by="meaning") == ("old", 0)


def test_a_text_that_the_embedder_does_not_take_keeps_no_other_from_being_made(
    meaning: ConversationStore, embeddings: FakeEmbeddings, admin: Connection
) -> None:
    def refuse(texts: list[str]) -> None:
        if "too long" in texts:
            raise ValueError

    embeddings.before = refuse
    say(meaning, "old", *[f"dog {number}" for number in range(70)], "too long", "puppy")
    with pytest.raises(EmbeddingError):
        meaning.index_messages()
    assert waiting(admin, meaning) == 1
    # It comes last from then on.
    say(meaning, "new", "hound", "car")
    with pytest.raises(EmbeddingError):
        meaning.index_messages()
    assert waiting(admin, meaning) == 1 and ("new", 0) in vectors(admin, meaning)


def test_many_texts_that_the_embedder_does_not_take_keep_no_other_from_being_made_in_the_end(
    meaning: ConversationStore, embeddings: FakeEmbeddings, admin: Connection
) -> None:
    def refuse(texts: list[str]) -> None:
        if any("bad" in text for text in texts):
            raise ValueError

    embeddings.before = refuse
    meaning._embed_soon = lambda *queue: None  # type: ignore[method-assign]
    say(meaning, "old", *[f"bad {number}" for number in range(30)], *[f"dog {number}" for number in range(10)])
    for _ in range(11):
        with suppress(EmbeddingError):
            meaning.index_messages()
    assert waiting(admin, meaning) == 30


def test_a_number_of_any_size_is_taken(
    meaning: ConversationStore, embeddings: FakeEmbeddings, admin: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embeddings, "_vector", lambda text: [1e308, 1e308, -1e308, 1e-320])
    say(meaning, "old", "x")
    meaning.index_messages()
    assert vectors(admin, meaning) == {("old", 0): "[0.57714844,0.57714844,-0.57714844,0]"}
    assert best(meaning, "x", by="meaning", k=2**31 - 1) == ("old", 0)


@pytest.mark.parametrize(
    ("before", "search_path", "place"),
    [
        ("select 1", "''", "public"),
        ("select 1", "pgmemory, public", "public"),
        ("drop schema public", "''", "pgmemory"),
        ('create schema "e %x"; create extension vector schema "e %x"', "''", '"e %x"'),
    ],
)
def test_pgvector_may_be_in_any_schema_and_goes_into_public_whatever_the_search_path(
    server_dsn: str, admin: Connection, before: str, search_path: str, place: str
) -> None:
    name = f"test_{uuid.uuid4().hex[:12]}"
    execute(admin, f"create database {name}")
    try:
        dsn = make_dsn(server_dsn, dbname=name)
        query(server_dsn, f"alter database {name} set search_path = {search_path}")
        query(dsn, before)
        with ConversationStore(dsn, embeddings=FakeEmbeddings()) as store:
            store.setup(search=True)
            say(store, "old", "my dog")
            store.index_messages()
            assert best(store, "hound") == ("old", 0)
            assert store.schema_status().search.vectors[2] == place  # type: ignore[index]
    finally:
        execute(admin, f"drop database {name} (force)")


def test_a_vector_without_direction_finds_nothing_and_hides_nothing(
    meaning: ConversationStore, embeddings: FakeEmbeddings, monkeypatch: Any
) -> None:
    monkeypatch.setattr(embeddings, "_vector", lambda text: [0.0] * 4 if "void" in text else [1.0, "dog" in text, 0, 0])
    say(meaning, "old", "void", "yes", "my dog", "yes")
    meaning.index_messages()
    assert best(meaning, "dogs", by="meaning") == ("old", 2)
    assert best(meaning, "void", by="meaning") == best(meaning, "void") == ("old", 0)  # by its words


def test_without_embeddings_or_vectors_of_its_model_a_store_recalls_by_words_and_says_why_not_by_meaning(
    meaning: ConversationStore, opened: Opening, server_dsn: str, admin: Connection
) -> None:
    say(meaning, "old", "my parcel", "nice")
    meaning.index_messages()
    with ConversationStore(server_dsn, schema=meaning.schema) as without:
        assert best(without, "parcels") == ("old", 0)
        with pytest.raises(ConfigurationError, match="embeddings="):
            best(without, "parcels", by="meaning")
    other = opened(FakeEmbeddings("other"))
    assert best(other, "parcels") == ("old", 0)
    with pytest.raises(SchemaError, match=r"vectors of 'FakeEmbeddings concepts', not of 'FakeEmbeddings other'"):
        best(other, "parcels", by="both")
    execute(admin, f"drop table {meaning.schema}.message_vectors")
    with (
        ConversationStore(server_dsn, schema=meaning.schema, embeddings=FakeEmbeddings()) as unprepared,
        pytest.raises(SchemaError, match=r"no vectors of 'FakeEmbeddings concepts': call store.setup\(search=True\)"),
    ):
        best(unprepared, "parcels", by="meaning")
    for wrong in ("sense", "", 7):
        with pytest.raises(ConfigurationError, match="by must be one of"):
            best(meaning, "parcels", by=wrong)
    with pytest.raises(ConfigurationError, match="embed_documents"):
        ConversationStore(server_dsn, embeddings="text-embedding-3-small")  # type: ignore[arg-type]


def test_another_model_means_vectors_anew_and_the_same_changes_nothing(
    meaning: ConversationStore, opened: Opening, admin: Connection
) -> None:
    say(meaning, "old", "my dog", "nice")
    meaning.index_messages()
    before = vectors(admin, meaning)
    opened().setup(search=True)
    assert vectors(admin, meaning) == before
    other = opened(FakeEmbeddings("other"))
    other._embed_soon = lambda *_: None  # type: ignore[method-assign]
    other.setup(search=True)
    assert waiting(admin, meaning) == 2
    assert other.schema_status().search.vectors[:2] == ("FakeEmbeddings other", 4)  # type: ignore[index]
    other.index_messages()
    assert best(other, "hound", by="meaning") == ("old", 0)


@pytest.mark.parametrize("dimensions", [4, 7])
def test_a_store_of_the_model_before_mixes_no_vectors_in_and_recalls_by_words(
    opened: Opening, admin: Connection, monkeypatch: pytest.MonkeyPatch, dimensions: int
) -> None:
    before, after = FakeEmbeddings("before"), FakeEmbeddings("after")
    monkeypatch.setattr(after, "_vector", lambda text: [1.0] * dimensions)
    old, new = opened(before), opened(after)
    old.setup(search=True)
    say(old, "old", "my parcel", "nice")
    old.index_messages()
    asked, go_on = threading.Event(), threading.Event()

    def switch(texts: list[str]) -> None:
        asked.set()
        assert go_on.wait(60)

    before.before = switch
    say(old, "old", "my dog", "nice")
    assert asked.wait(60)
    new._embed_soon = lambda *queue: None  # type: ignore[method-assign]
    new.setup(search=True)
    go_on.set()
    before.before = lambda texts: None
    say(old, "old", "a car", "nice")
    old.items("u").put(["a"], "k", {"text": "parcel"})
    old.index_messages()
    assert waiting(admin, old) == 6
    assert best(old, "parcels") == ("old", 0)
    assert hits(old, "delivery", by="meaning") == []
    new.index_messages()
    assert waiting(admin, old) == 0 and len(set(vectors(admin, old).values())) == 1


def test_a_role_that_may_not_use_pgvector_recalls_by_words(
    opened: Opening, server_dsn: str, admin: Connection, new_role: Callable[[], str],  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    name = f"test_{uuid.uuid4().hex[:12]}"
    execute(admin, f"create database {name}")
    role = new_role()
    try:
        dsn = make_dsn(server_dsn, dbname=name)
        query(dsn, "create schema hidden; create extension vector schema hidden")
        with ConversationStore(dsn, embeddings=FakeEmbeddings()) as owner:
            owner.setup(search=True)
            with closing(psycopg2.connect(dsn)) as connection, connection:
                execute(connection, "grant usage on schema pgmemory to {role}", role=role)
                execute(connection, "grant all on all tables in schema pgmemory to {role}", role=role)
            as_role = make_dsn(dsn, user=role, password=PASSWORD)
            with ConversationStore(as_role, embeddings=FakeEmbeddings()) as app:
                say(app, "old", "my parcel", "nice")
                owner.index_messages()
                assert best(app, "parcels") == ("old", 0)
        assert "recalled by their words alone: permission denied for schema hidden" in caplog.text
    finally:
        execute(admin, f"drop database {name} (force)")


def test_a_store_whose_embeddings_are_not_asked_says_so(
    meaning: ConversationStore, opened: Opening, caplog: pytest.LogCaptureFixture
) -> None:
    say(opened(FakeEmbeddings("other")), "old", "my parcel", "nice")
    assert "'FakeEmbeddings other', are not asked" in caplog.text and "'FakeEmbeddings concepts' makes" in caplog.text


def test_a_failing_embedder_is_told_when_setting_up_and_nothing_is_made(opened: Opening, admin: Connection) -> None:
    store = opened(FakeEmbeddings(before=failing))
    with pytest.raises(EmbeddingError, match="failed with ConnectionError") as caught:
        store.setup(search=True)
    assert "sk-secret" not in str(caught.value)
    assert store.schema_status().search == (None, False, None)


# Kept right


def test_edits_deletions_and_erasing_leave_no_vector_of_what_was_said(
    meaning: ConversationStore, admin: Connection
) -> None:
    history = PostgresChatMessageHistory("old", meaning, user_id="u")
    say(meaning, "old", "my dog", "nice", "my car", "fast")
    meaning.index_messages()
    before = vectors(admin, meaning)
    history.replace_message(0, "my parcel")
    assert waiting(admin, meaning) <= 1
    meaning.index_messages()
    assert best(meaning, "delivery", by="meaning") == ("old", 0)
    assert vectors(admin, meaning)["old", 0] not in before.values()
    history.delete_messages([0, 1])
    assert sorted(vectors(admin, meaning)) == [("old", 2), ("old", 3)]
    history.replace_turn(2, [human("a puppy"), ai("and"), ai("a hound")])
    meaning.index_messages()
    assert len(vectors(admin, meaning)) == 3 and waiting(admin, meaning) == 0
    meaning.erase_user("u")
    assert vectors(admin, meaning) == {}


def test_what_is_deleted_while_it_is_being_made_leaves_nothing(opened: Opening, admin: Connection) -> None:
    embeddings = FakeEmbeddings()
    store = opened(embeddings)
    store.setup(search=True)
    embeddings.before = lambda texts: execute(admin, f"delete from {store.schema}.conversation_messages")
    say(store, "old", "my dog", "nice")
    store.index_messages()
    assert vectors(admin, store) == {}


def test_an_edit_while_it_is_being_made_gets_the_vector_of_what_is_said_now(opened: Opening, admin: Connection) -> None:
    embeddings = FakeEmbeddings()
    store = opened(embeddings)
    store.setup(search=True)
    edits = iter(["my car"])

    def edit(texts: list[str]) -> None:
        for text in edits:
            execute(admin, f"update {store.schema}.conversation_messages set content = '{text}'")

    embeddings.before = edit
    say(store, "old", "my dog")
    store.index_messages()
    assert embeddings.texts == ["my dog", "my car"]
    assert best(store, "vehicle", by="meaning") == ("old", 0) and waiting(admin, store) == 0


def test_what_is_encrypted_has_no_vector(opened: Opening, admin: Connection) -> None:
    embeddings = FakeEmbeddings()
    store = opened(embeddings, keyring=Keyring({"master": bytes(32)}))
    store.setup(search=True)
    say(store, "old", "my dog", "nice")
    store.index_messages()
    assert vectors(admin, store) == {} and embeddings.texts == []


@pytest.mark.parametrize("mode", ["setting", "roles"])
def test_row_level_security_holds_for_vectors(
    opened: Opening, server_dsn: str, mode: Any, new_role: Callable[[], str]  # noqa: F811
) -> None:
    owner = opened(tenant_id="acme")
    owner.setup(search=True, row_level_security=mode)
    stores = {}
    for tenant in ("acme", "globex"):
        role = new_role()
        owner.bind_role(role, tenant)
        dsn = make_dsn(server_dsn, user=role, password=PASSWORD)
        stores[tenant] = opened(source=dsn, tenant_id=tenant)
    for tenant, store in stores.items():
        say(store, tenant, "my dog", "nice")
        store.index_messages()
    for tenant, store in stores.items():
        assert hits(store, "hound", by="meaning", k=9)[0] == (tenant, 0)
        mine = store._execute("count", "select count(*) from {schema}.message_vectors", {})
        assert mine == [(2,)]


# What it costs


def test_recall_by_both_is_one_round_trip_and_saving_too(opened: Opening, server_dsn: str) -> None:
    pool = CountingPool(server_dsn)
    try:
        store = opened(source=pool)
        store.setup(search=True)
        memory = recalling(store)
        store.index_messages()
        store._embed_soon = lambda: None  # type: ignore[method-assign]
        pool.executes.clear()
        memory.save_context({"input": "my puppy"}, {"output": "hi"})
        assert len(pool.executes) == 1
        window(memory, "dogs")
        assert len(pool.executes) == 2
        store.index_messages()
        pool.executes.clear()
        memory.save_context({"input": "my puppy"}, {"output": "hi"})
        store.index_messages()
        assert sum("halfvec" in executed.statement for executed in pool.executes) == 0  # known already: none is made
    finally:
        pool.closeall()


@pytest.fixture(params=["none", "right"])
def large(request: pytest.FixtureRequest, meaning: ConversationStore, server_dsn: str, admin: Connection) -> Any:
    """A user of 300 messages among 15,000 of others, with the statistics that the planner has of each kind."""
    keys = [ConversationKey("", f"u{number // 10}", f"s{number}") for number in range(510)]
    with admin.cursor() as cursor:
        cursor.execute(
            f"""
            alter table {meaning.schema}.message_vectors set (autovacuum_enabled = off);
            alter table {meaning.schema}.conversation_messages set (autovacuum_enabled = off), disable trigger user;
            insert into {meaning.schema}.conversations (id, tenant_id, user_id, session_id, next_message_index)
            select id, '', user_id, session_id, 30
            from unnest(%(ids)s::uuid[], %(users)s::text[], %(sessions)s::text[]) c (id, user_id, session_id);
            insert into {meaning.schema}.conversation_messages
                (conversation_id, message_index, tenant_id, role, content, created_at)
            select c.id, n, c.tenant_id, case n %% 2 when 0 then 'human' else 'ai' end, n::text, clock_timestamp()
            from {meaning.schema}.conversations c, generate_series(0, 29) n;
            insert into {meaning.schema}.message_vectors
            select m.conversation_id, m.message_index, '', sha256(m.message_index::text::bytea),
                   format('[%%s,1,0,1]', m.message_index)::halfvec
            from {meaning.schema}.conversation_messages m;
            alter table {meaning.schema}.conversation_messages enable trigger user
            """,
            {
                "ids": [str(key.id) for key in keys],
                "users": [key.user_id for key in keys],
                "sessions": [key.session_id for key in keys],
            },
        )
        if request.param == "right":
            cursor.execute(f"vacuum analyze {meaning.schema}.message_vectors")
            cursor.execute(f"analyze {meaning.schema}.conversation_messages, {meaning.schema}.conversations")
    pool = CountingPool(server_dsn)
    with ConversationStore(pool, schema=meaning.schema, embeddings=FakeEmbeddings()) as app:
        yield Crowd(app, pool)
    pool.closeall()


def test_by_meaning_the_users_vectors_are_read_by_index_and_nobody_elses(large: Crowd) -> None:
    key = large.store.key("s505", "u50")
    large.store.recall(key, "dog", k=1)
    query = large.sent_by(lambda: large.store.recall(key, "my dog", k=5, turns=2, by="both"))
    read: dict[str, float] = {}
    for node in nodes(large.explained(query, "with recursive step")):
        if not node["Actual Loops"]:
            continue
        assert node["Node Type"] != "Seq Scan" and "Bitmap" not in node["Node Type"], node
        if table := node.get("Relation Name"):
            seen = node["Actual Rows"] + node.get("Rows Removed by Filter", 0)
            read[table] = read.get(table, 0) + seen * node["Actual Loops"]
    assert read["message_vectors"] == 300 - 4
    assert read["conversation_messages"] <= 80


def test_what_waits_is_claimed_by_index_however_many_others_have_their_vectors(large: Crowd, admin: Connection) -> None:
    large.store.index_messages()
    table = f"{large.store.schema}.message_vectors"
    wait = f"update {table} set embedding = null, claimed_at = null where message_index = 7"
    execute(admin, wait)
    query = large.sent_by(lambda: large.store._embed_batch(MESSAGES), holding="with due as")
    execute(admin, wait)
    plan = large.explained(query, "with due as")
    touched = sum(
        (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
        for node in nodes(plan)
        if node.get("Relation Name") == "message_vectors" and "Scan" in node["Node Type"]
    )
    assert 0 < touched <= 64 * 510 * 3


# The command


def test_status_says_by_whose_vectors_messages_are_recalled(
    call: Callable[..., Ended], meaning: ConversationStore, server_dsn: str  # noqa: F811
) -> None:
    where = ("--dsn", server_dsn, "--schema", meaning.schema)
    assert "meaning: FakeEmbeddings concepts, 4 numbers\n" in call("status", *where).output
    assert '"meaning": {"model": "FakeEmbeddings concepts", "dimensions": 4}' in call("status", *where, "--json").output
