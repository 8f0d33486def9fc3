"""Servers that die, restart and change roles under load: writers go on, and every turn is there once."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from psycopg2.extensions import make_dsn
from servers import Server, new_folder, query, wait_until

from pgmemory import BufferMemory, ConversationStore, PostgresChatMessageHistory, StoreUnavailableError

WRITERS = 4
PATIENCE_SECONDS = 60


@pytest.fixture
def server() -> Iterator[Server]:
    """A server without a standby."""
    with Server.initialise(new_folder("server")) as server:
        server.start()
        yield server


@pytest.fixture
def pair() -> Iterator[tuple[Server, Server]]:
    """A primary and its synchronous standby: what the primary acknowledges, the standby has."""
    with (
        Server.initialise(new_folder("primary"), synchronous_standby_names="*") as primary,
        primary.standby(new_folder("standby")) as standby,
    ):
        primary.start()
        standby.start()
        in_step = "select 1 from pg_stat_replication where sync_state = 'sync'"
        wait_until(lambda: query(primary.dsn, in_step), "the standby is in step")
        yield primary, standby


def either(*servers: Server) -> str:
    """Return a DSN that leads to whichever of the servers takes writes."""
    return make_dsn(
        host=",".join("127.0.0.1" for _ in servers),
        port=",".join(str(server.port) for server in servers),
        user="postgres",
        dbname="postgres",
        target_session_attrs="read-write",
    )


def save(memory: BufferMemory, name: object) -> None:
    memory.save_context({"input": f"q {name}"}, {"output": f"a {name}"})


class Load:
    """Threads that write turns without a pause, two to a conversation, each by a memory of its own over one store.

    Leaving the block ends them and raises the first error that reached one.
    """

    def __init__(self, store: ConversationStore) -> None:
        self.acknowledged = [0] * WRITERS
        self._memories = [BufferMemory(session_id=self._session(writer), store=store) for writer in range(WRITERS)]
        self._ended = threading.Event()
        self._executor = ThreadPoolExecutor(WRITERS)
        self._threads: list[Future[None]] = []

    def __enter__(self) -> Load:
        self._threads = [self._executor.submit(self._write, writer) for writer in range(WRITERS)]
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._executor.shutdown(wait=False)
        for thread in self._threads:
            thread.result(PATIENCE_SECONDS)

    @staticmethod
    def _session(writer: int) -> str:
        return f"s{writer % 2}"

    def _write(self, writer: int) -> None:
        while not self._ended.is_set():
            save(self._memories[writer], f"{writer}.{self.acknowledged[writer]}")
            self.acknowledged[writer] += 1

    def go_on(self) -> None:
        """Wait until every writer has written some more."""
        goal = [count + 10 for count in self.acknowledged]

        def reached() -> bool:
            for thread in self._threads:
                if thread.done():
                    thread.result()
            return all(count >= least for count, least in zip(self.acknowledged, goal, strict=True))

        wait_until(reached, "every writer goes on")

    def audit(self, dsn: str) -> None:
        """Assert that each acknowledged turn is there once, whole and in its writer's order, numbered gaplessly."""
        found: dict[int, list[int]] = {writer: [] for writer in range(WRITERS)}
        with ConversationStore(dsn) as store:
            for session in sorted({self._session(writer) for writer in range(WRITERS)}):
                log = store.list_messages(session)
                assert [message.message_index for message in log] == list(range(len(log)))
                assert [message.role for message in log] == ["human", "ai"] * (len(log) // 2)
                questions = [message.content.removeprefix("q ") for message in log[::2]]
                assert questions == [message.content.removeprefix("a ") for message in log[1::2]]
                for writer, number in (name.split(".") for name in questions):
                    found[int(writer)].append(int(number))
        assert found == {writer: list(range(count)) for writer, count in enumerate(self.acknowledged)}


def test_when_the_primary_dies_the_same_objects_go_on_with_the_promoted_standby(pair: tuple[Server, Server]) -> None:
    primary, standby = pair
    with ConversationStore(either(primary, standby), retry_seconds=20) as store:
        store.setup()
        with Load(store) as load:
            load.go_on()
            primary.kill()
            standby.promote()
            load.go_on()
        assert BufferMemory(session_id="s0", store=store, k=1).buffer
    load.audit(standby.dsn)


def test_when_live_sessions_turn_read_only_the_store_moves_to_the_server_that_takes_writes(
    pair: tuple[Server, Server],
) -> None:
    old, new = pair
    # A write that the old server had yet to hand on when the new one left it waits there for ever.
    with ConversationStore(either(old, new), retry_seconds=20, query_timeout_seconds=2) as store:
        store.setup()
        with ExitStack() as more_than_the_writers_need:
            for _ in range(WRITERS + 3):
                more_than_the_writers_need.enter_context(store._database.transaction())
        with Load(store) as load:
            load.go_on()
            query(old.dsn, "alter system set default_transaction_read_only = on")
            query(old.dsn, "select pg_reload_conf()")
            new.promote()
            load.go_on()
        # But for the session of such a write, which its client has long given up.
        left = (
            "select pid from pg_stat_activity "
            "where application_name = 'pgmemory' and wait_event is distinct from 'SyncRep'"
        )
        wait_until(lambda: not query(old.dsn, left), "nobody reads from the old server any more")
    load.audit(new.dsn)


def test_writers_go_on_when_their_server_restarts_at_once(server: Server) -> None:
    with ConversationStore(server.dsn, retry_seconds=20) as store:
        store.setup()
        with Load(store) as load:
            for _ in range(3):
                load.go_on()
                server.restart("immediate")
            load.go_on()
    load.audit(server.dsn)


def fail_to_save(memory: BufferMemory, name: object) -> StoreUnavailableError:
    with pytest.raises(StoreUnavailableError) as caught:
        save(memory, name)
    return caught.value


def store_later(history: PostgresChatMessageHistory, error: Any) -> None:
    """Store what an error says was not saved, as an application does that cannot tell whether it did so already."""
    turn = error.unsaved_turn
    assert (turn.session_id, turn.user_id) == (history.session_id, history.user_id)
    for _ in range(2):
        history.add_messages(turn.messages, idempotency_key=turn.idempotency_key)


def test_a_turn_that_could_not_be_saved_can_be_stored_when_the_server_is_back(server: Server) -> None:
    query(server.dsn, "create database support")
    dsn = make_dsn(server.dsn, dbname="support", password="open-sesame")
    with ConversationStore(dsn, retry_seconds=1) as store:
        store.setup()
        memory = BufferMemory(session_id="s", user_id="u", store=store)
        save(memory, 0)
        server.stop()
        error = fail_to_save(memory, 1)
        for part in ("host=127.0.0.1", f"port={server.port}", "dbname=support"):
            assert part in str(error)
        assert "open-sesame" not in "".join(traceback.format_exception(error))
        assert "open-sesame" not in repr(error) + repr(error.unsaved_turn)

        server.start()
        save(memory, 2)
        store_later(memory.chat_memory, error)
        log = store.list_messages("s", user_id="u")
    assert [message.content for message in log] == ["q 0", "a 0", "q 2", "a 2", "q 1", "a 1"]
    assert [message.message_index for message in log] == list(range(6))


def test_a_turn_that_the_server_did_take_before_it_died_is_not_stored_again(server: Server) -> None:
    """Its transaction was on the disk, and waited for a standby when the server died: nobody was told."""
    with ConversationStore(server.dsn, retry_seconds=1) as store, ThreadPoolExecutor(1) as executor:
        store.setup()
        memory = BufferMemory(session_id="s", store=store)
        save(memory, 0)
        query(server.dsn, "alter system set synchronous_standby_names = absent")
        server.restart()
        saving = executor.submit(fail_to_save, memory, 1)
        waiting = "select 1 from pg_stat_activity where wait_event = 'SyncRep'"
        wait_until(lambda: query(server.dsn, waiting), "the turn is written")
        server.kill()
        error = saving.result(PATIENCE_SECONDS)

        server.start()
        query(server.dsn, "alter system reset synchronous_standby_names")
        server.restart()
        assert [message.content for message in store.list_messages("s")] == ["q 0", "a 0", "q 1", "a 1"]
        store_later(memory.chat_memory, error)
        save(memory, 2)
        log = store.list_messages("s")
    assert [message.content for message in log] == ["q 0", "a 0", "q 1", "a 1", "q 2", "a 2"]
