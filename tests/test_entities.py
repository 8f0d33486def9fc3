"""ConversationEntityMemory over PostgreSQL: as over LangChain's own entity stores, and across restarts and workers."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from chains import ConversationEntityMemory, SQLiteEntityStore
from fakes import scripted
from psycopg2 import sql
from psycopg2.extensions import connection as Connection
from pydantic import ValidationError
from test_encryption import keyring
from waiting import wait_until

from pgmemory import ConversationHeldError, ConversationStore, PostgresChatMessageHistory, PostgresEntityStore

HOUR = timedelta(hours=1)


def built(kind: Callable[..., Any], **fields: Any) -> Any:
    """Build what LangChain deprecates; warnings are errors elsewhere."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kind(**fields)


@pytest.fixture(params=["LangChain's over SQLite", "ours for a session", "ours for a user"])
def entities(request: pytest.FixtureRequest, store: ConversationStore, tmp_path: Path) -> Iterator[Any]:
    """An entity store of each kind."""
    if request.param == "ours for a session":
        yield PostgresEntityStore(store=store, session_id="s")
    elif request.param == "ours for a user":
        yield PostgresEntityStore(store=store, user_id="u")
    else:
        theirs = built(SQLiteEntityStore, session_id="s", db_file=str(tmp_path / "entities.db"))
        yield theirs
        theirs.conn.close()


def test_an_entity_store_does_what_langchains_does(entities: Any) -> None:
    assert entities.get("Deven") is None
    assert entities.get("Deven", "unknown") == "unknown"
    assert not entities.exists("Deven")
    entities.set("Deven", "Deven works on a hackathon.")
    entities.set("Sam", "Sam works with 'Deven'; \N{SNOWMAN}")
    entities.set("", "an empty name")
    assert entities.exists("Deven") and entities.get("Deven") == "Deven works on a hackathon."
    entities.set("Deven", "Deven has won.")
    assert entities.get("Deven", "unknown") == "Deven has won."
    assert entities.get("deven") is None
    for nothing in ("", None):
        entities.set("Sam", "x")
        entities.set("Sam", nothing)
        assert not entities.exists("Sam")
    entities.delete("Deven")
    entities.delete("Deven")
    assert entities.get("Deven") is None
    assert entities.get("") == "an empty name"
    entities.clear()
    entities.clear()
    assert not entities.exists("")


def memory(store: ConversationStore, answers: list[str], entity_store: Any) -> Any:
    return built(
        ConversationEntityMemory,
        llm=scripted(*answers),
        chat_memory=PostgresChatMessageHistory("s", store, user_id="u"),
        entity_store=entity_store,
    )


@pytest.mark.parametrize("of_session", [True, False])
def test_an_entity_memory_knows_after_a_restart_and_forgets_when_it_is_cleared(
    store: ConversationStore, server_dsn: str, of_session: bool
) -> None:
    owner = {"session_id": "s"} if of_session else {}
    entity_store = PostgresEntityStore(store=store, user_id="u", **owner)
    first = memory(store, ["Deven, Sam", "Deven works on a hackathon.", "Sam helps Deven."], entity_store)
    question = {"input": "Deven & Sam are working on a hackathon project"}
    assert first.load_memory_variables(question)["entities"] == {"Deven": "", "Sam": ""}
    first.save_context(question, {"output": "What kind of project?"})

    with ConversationStore(server_dsn, schema=store.schema) as other_process:
        again = memory(other_process, ["Sam", "NONE"], PostgresEntityStore(store=other_process, user_id="u", **owner))
        loaded = again.load_memory_variables({"input": "Who is Sam?"})
        assert loaded["entities"] == {"Sam": "Sam helps Deven."}
        assert "hackathon project" in loaded["history"]
        facts = other_process.items("u", **owner).search(("entities",), query="hackathon")
        assert [(item.key, item.value) for item in facts] == [("Deven", {"summary": "Deven works on a hackathon."})]
        again.clear()
        assert again.load_memory_variables({"input": "Who is Sam?"}) == {"history": "", "entities": {}}
    assert not entity_store.exists("Sam")


def test_sessions_users_and_namespaces_have_entities_of_their_own(store: ConversationStore) -> None:
    owners: list[dict[str, Any]] = [
        {"session_id": "s"},
        {"session_id": "t"},
        {"user_id": "u"},
        {"user_id": "u", "session_id": "s"},
        {"user_id": "u", "namespace": "planner"},
        {"user_id": "v"},
    ]
    stores = [PostgresEntityStore(store=store, **owner) for owner in owners]
    for number, entities in enumerate(stores):
        entities.set("Sam", str(number))
    assert [entities.get("Sam") for entities in stores] == list("012345")
    stores[2].clear()
    assert [entities.exists("Sam") for entities in stores] == [True, True, False, True, True, True]


def test_whatever_a_model_names_or_says_is_kept(store: ConversationStore) -> None:
    entities = PostgresEntityStore(store=store, session_id="s")
    for name in ("a\0b", "\ud800", "ü" * 5_000, "'; drop table items; --", "{schema} %s %(key)s"):
        entities.set(name, f"{name[:10]} is known")
        assert entities.exists(name)
        assert str(entities.get(name)).endswith(" is known")
    assert entities.get("a\0b") == "a\ufffdb is known"


def test_a_time_to_live_begins_anew_with_each_reading(store: ConversationStore) -> None:
    entities = PostgresEntityStore(store=store, session_id="s", time_to_live=timedelta(milliseconds=1))
    entities.set("Sam", "helps")
    wait_until(lambda: not entities.exists("Sam"), "it is forgotten")
    assert entities.get("Sam", "unknown") == "unknown"
    lasting = PostgresEntityStore(store=store, session_id="s", time_to_live=HOUR)
    lasting.set("Sam", "helps")
    assert lasting.get("Sam") == "helps"


def test_of_a_held_conversation_nothing_is_forgotten(store: ConversationStore) -> None:
    history = PostgresChatMessageHistory("s", store)
    history.add_user_message("hello")
    entities = PostgresEntityStore(store=store, session_id="s")
    entities.set("Sam", "helps")
    store.hold("s", reason="case 117")
    for forget in (entities.clear, lambda: entities.delete("Sam"), lambda: entities.set("Sam", "")):
        with pytest.raises(ConversationHeldError, match="case 117"):
            forget()
    entities.set("Sam", "still helps")
    assert entities.get("Sam") == "still helps"
    store.release("s")
    assert store.erase_conversation("s").conversations[0].items == 1
    assert not entities.exists("Sam")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "say whose entities these are"),
        ({"user_id": ""}, "say whose entities these are"),
        ({"session_id": ""}, "session_id must not be empty"),
        ({"session_id": "s", "namespace": ""}, "empty label"),
        ({"session_id": "s", "namespace": "a.b"}, "period"),
        ({"session_id": "s", "time_to_live": timedelta(0)}, "time_to_live must be above zero"),
        ({"session_id": "s", "ttl": 60}, "Extra inputs"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_the_database_is_asked(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        PostgresEntityStore(store=ConversationStore("postgresql://nowhere"), **fields)


def test_one_round_trip_each(counted_store: Any) -> None:
    entities = PostgresEntityStore(store=counted_store, session_id="s")
    entities.exists("Sam")  # looks first whether the schema fits
    for operation in (
        lambda: entities.set("Sam", "helps"),
        lambda: entities.get("Sam"),
        lambda: entities.exists("Sam"),
        lambda: entities.delete("Sam"),
        lambda: entities.clear(),
    ):
        counted_store.executes.clear()
        operation()
        assert len(counted_store.executes) == 1


def test_a_copy_works_and_no_password_is_shown(store: ConversationStore) -> None:
    secret = ConversationStore("postgresql://app:hunter2@nowhere/db")
    shown = PostgresEntityStore(store=secret, session_id="s")
    assert "hunter2" not in f"{shown!r} {shown.model_dump()}" and "store" not in shown.model_dump()
    entities = PostgresEntityStore(store=store, user_id="u", session_id="s")
    entities.set("Sam", "helps")
    for copied in (copy.deepcopy(entities), pickle.loads(pickle.dumps(entities))):
        assert copied.get("Sam") == "helps"
        copied.store.close()


def test_entities_of_an_encrypted_conversation_are_clear_text_and_outlive_its_key(
    server_dsn: str, schema_name: str, admin: Connection
) -> None:
    with ConversationStore(server_dsn, schema=schema_name, keyring=keyring()) as store:
        store.setup()
        entities = PostgresEntityStore(store=store, session_id="s")
        with_memory = built(
            ConversationEntityMemory,
            llm=scripted("Sam", "Sam helps."),
            chat_memory=PostgresChatMessageHistory("s", store),
            entity_store=entities,
        )
        with_memory.load_memory_variables({"input": "Sam helps."})
        with_memory.save_context({"input": "Sam helps."}, {"output": "Good."})
        store.erase_key("s")
        assert PostgresChatMessageHistory("s", store).messages == []
        assert entities.get("Sam") == "Sam helps."
    with admin.cursor() as cursor:
        cursor.execute(sql.SQL("select value::text from {}.items").format(sql.Identifier(schema_name)))
        assert cursor.fetchall() == [('{"summary": "Sam helps."}',)]


def test_an_item_of_another_shape_is_no_entity(store: ConversationStore) -> None:
    entities = PostgresEntityStore(store=store, user_id="u")
    store.items("u").put(("entities",), "Sam", {"age": 7})
    assert entities.get("Sam") is None
    assert entities.get("Sam", "a stranger") == "a stranger"
    assert entities.get(5) is None  # type: ignore[arg-type]
