"""Who writes and reads in a campaign, in threads and in processes, and how each notes what it was promised.

A client's journal is a file of its own to which it appends one line by one write: a killed process leaves whole lines
behind, and what it had acknowledged is known.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos.audit import Turn, examine, turn_texts
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from psycopg2.extensions import connection as Connection
from psycopg2.pool import PoolError, ThreadedConnectionPool

from pgmemory import (
    BufferMemory,
    ConversationStore,
    PostgresChatMemory,
    PostgresChatMessageHistory,
    StoreError,
    TokenWindowMemory,
)

SCHEMA = "chaos"
APPLICATION_NAME = "chaos client"
CONVERSATIONS = tuple(f"conversation {number}" for number in range(6))
QUERY_TIMEOUT_SECONDS = 1.0
RETRY_SECONDS = 20.0
# How long a writer goes on delivering a turn whose save has raised.
PATIENCE_SECONDS = 60.0

# How a turn is saved, and how often of 100 times.
_WAYS = {"plainly": 50, "with a key": 15, "twice": 10, "twice at once": 5, "with tools": 20}


@dataclass(frozen=True)
class Settings:
    """What every client of a campaign knows.

    Attributes:
        seed: Of the campaign.
        folder: Where the journals are, and the file `running` for as long as turns are to be written.
        ends_at: When clients end by themselves, by the machine's monotonic clock.
    """

    seed: int
    folder: Path
    ends_at: float

    def go_on(self) -> bool:
        """Tell whether the campaign still runs."""
        return time.monotonic() < self.ends_at and (self.folder / "running").exists()


class SmallPool(ThreadedConnectionPool):
    """An application's own pool of two connections, which counts how often it had none left."""

    def __init__(self, dsn: str) -> None:
        self.refused = 0
        super().__init__(2, 2, dsn)

    def getconn(self, key: Any = None) -> Connection:
        """Lend a connection."""
        try:
            return super().getconn(key)
        except PoolError:
            self.refused += 1
            raise


class Journal:
    """The notes of one client."""

    def __init__(self, folder: Path, client: str) -> None:
        self._file = os.open(folder / f"{client}.journal", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(self, *words: object) -> None:
        """Append a line."""
        os.write(self._file, ("\t".join(map(str, words)) + "\n").encode())

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._file)


def read_journals(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield every client's name with the words of each line that it noted."""
    for path in sorted(folder.glob("*.journal")):
        for line in path.read_text().splitlines():
            yield path.stem, line.split("\t")


def open_store(source: Any, *, retry_seconds: float = RETRY_SECONDS) -> ConversationStore:
    """Return a store with timeouts so small that a campaign moves on."""
    # What heals is logged as a warning and what fails as an error, here many times a second.
    logging.getLogger("pgmemory").setLevel(logging.CRITICAL)
    return ConversationStore(
        source,
        schema=SCHEMA,
        max_connections=4,
        query_timeout_seconds=QUERY_TIMEOUT_SECONDS,
        retry_seconds=retry_seconds,
        application_name=APPLICATION_NAME,
    )


class Client:
    """Somebody who uses the conversations until the campaign ends."""

    def __init__(self, name: str, store: ConversationStore, settings: Settings) -> None:
        self.name = name
        self.settings = settings
        self.error: BaseException | None = None
        self._random = random.Random(f"{settings.seed} {name}")
        history = PostgresChatMessageHistory(CONVERSATIONS[0], store)
        # Configured once; each turn takes one of them for its conversation.
        self._views: list[PostgresChatMemory] = [
            BufferMemory(chat_memory=history, return_messages=True, k=15),
            TokenWindowMemory(chat_memory=history, return_messages=True, max_token_limit=500),
        ]

    def run(self) -> None:
        """Work until the campaign ends, or note in `error` what went wrong."""
        journal = Journal(self.settings.folder, self.name)
        try:
            while self.settings.go_on():
                self._step(journal)
        except BaseException as error:
            self.error = error
            raise
        finally:
            journal.close()

    def _step(self, journal: Journal) -> None:
        raise NotImplementedError

    def _read(self, journal: Journal, view: PostgresChatMemory) -> None:
        """Load a window and note what is wrong with it: it must hold whole turns, each once, in order."""
        try:
            messages: list[BaseMessage] = view.load_memory_variables({})[view.memory_key]
        except StoreError:
            return  # a read promises nothing
        findings, _ = examine([str(message.content) for message in messages])
        for kind, lines in vars(findings).items():
            for line in lines:
                journal.note("misread", kind, f"window of {view.session_id}, {type(view).__name__}: {line}")


class Reader(Client):
    """Loads windows, now and then whole conversations."""

    def _step(self, journal: Journal) -> None:
        view = self._random.choice(self._views).for_session(self._random.choice(CONVERSATIONS))
        if self._random.random() < 0.03:
            view = BufferMemory(chat_memory=view.chat_memory, return_messages=True)
        self._read(journal, view)
        time.sleep(self._random.uniform(0, 0.05))  # or the readers would take all of a small machine


class Writer(Client):
    """Stores turn after turn; the next one only when this one is acknowledged, so that the order is known.

    Attributes:
        cancel_next: Set by whoever wants the next save to be cancelled; unset when that has happened.
        cancelled: How many saves were cancelled.
    """

    def __init__(self, name: str, store: ConversationStore, settings: Settings) -> None:
        super().__init__(name, store, settings)
        self.cancel_next = threading.Event()
        self.cancelled = 0
        self._number = 0

    def _step(self, journal: Journal) -> None:
        self._number += 1
        turn = Turn(self.name, self._number)
        view = self._random.choice(self._views)
        session_id = self._random.choice(CONVERSATIONS)
        if self._random.random() < 0.2:
            self._read(journal, view.for_session(session_id))
        if self.cancel_next.is_set():
            self._store_cancelled(view.for_session(session_id, idempotency_key=str(turn)), turn)
        else:
            self._store(view, session_id, turn)
        journal.note("acknowledged", session_id, self._number)
        # Now and then, so that writers meet in ever new ways, and as many turns come as faults need.
        if self._random.random() < 0.1:
            time.sleep(self._random.uniform(0, 0.4))

    def _store(self, view: PostgresChatMemory, session_id: str, turn: Turn) -> None:
        (way,) = self._random.choices(list(_WAYS), list(_WAYS.values()))
        memory = view.for_session(session_id, idempotency_key=None if way == "plainly" else str(turn))
        if way == "with tools":
            messages = _turn_with_tools(turn)
            self._deliver(memory, lambda: memory.chat_memory.add_messages(messages))
        elif way == "twice at once":
            self._deliver(memory, lambda: asyncio.run(_save_twice_at_once(memory, turn)))
        else:
            for _ in range(2 if way == "twice" else 1):
                self._deliver(memory, lambda: memory.save_context(*_inputs_and_outputs(turn)))

    def _store_cancelled(self, memory: PostgresChatMemory, turn: Turn) -> None:
        """Cancel a save on its way, then store the turn under the same key: only then is it known to be stored."""
        if asyncio.run(_save_and_cancel(memory, turn, after_seconds=self._random.uniform(0, 0.003))):
            self.cancelled += 1
            self.cancel_next.clear()
        self._deliver(memory, lambda: memory.save_context(*_inputs_and_outputs(turn)))

    def _deliver(self, memory: PostgresChatMemory, save: Callable[[], None]) -> None:
        """Save, and where that raises, store what the error carries until it is stored."""
        try:
            return save()
        except StoreError as error:
            unsaved = getattr(error, "unsaved_turn", None)
            if unsaved is None:
                raise
        history = memory.chat_memory.for_session(unsaved.session_id, user_id=unsaved.user_id)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                return history.add_messages(unsaved.messages, idempotency_key=unsaved.idempotency_key)
            except StoreError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(self._random.uniform(0, 0.2))


def write_in_process(name: str, dsn: str, settings: Settings) -> None:
    """Be a writer; the target of a process of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the campaign ends its processes
    with open_store(dsn) as store:
        Writer(name, store, settings).run()


def _inputs_and_outputs(turn: Turn) -> tuple[dict[str, str], dict[str, str]]:
    human, ai = turn_texts(turn, 2)
    return {"input": human}, {"output": ai}


def _turn_with_tools(turn: Turn) -> list[BaseMessage]:
    human, call, first, second, ai = turn_texts(turn, 5)
    calls = [{"name": "look_up", "args": {"turn": turn.number}, "id": f"{turn} {number}"} for number in (1, 2)]
    return [
        HumanMessage(human),
        AIMessage(call, tool_calls=calls),
        ToolMessage(first, tool_call_id=calls[0]["id"]),
        ToolMessage(second, tool_call_id=calls[1]["id"]),
        AIMessage(ai),
    ]


async def _save_twice_at_once(memory: PostgresChatMemory, turn: Turn) -> None:
    saves = [memory.asave_context(*_inputs_and_outputs(turn)) for _ in range(2)]
    await asyncio.gather(*saves)


async def _save_and_cancel(memory: PostgresChatMemory, turn: Turn, *, after_seconds: float) -> bool:
    """Return whether the save was cancelled; it may have ended before."""
    save = asyncio.ensure_future(memory.asave_context(*_inputs_and_outputs(turn)))
    await asyncio.sleep(after_seconds)
    save.cancel()
    try:
        await save
    except asyncio.CancelledError:
        return True
    except StoreError:
        pass
    return False
