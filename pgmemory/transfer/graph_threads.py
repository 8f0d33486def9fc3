"""LangGraph's threads: conversations copied into those that its agents continue, and back.

Owns when a thread may be written. Needs the extra `langgraph`, which is imported when it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Literal
from uuid import UUID

from langchain_core.messages import BaseMessage

from pgmemory.errors import ConfigurationError
from pgmemory.models import ConversationKey
from pgmemory.names import text_id
from pgmemory.store import ConversationStore
from pgmemory.store.transfer import Entry, Scope, Snapshot
from pgmemory.transfer.exporting import conversation_ids, to_time
from pgmemory.transfer.graph_savers import COPIED_FROM, check, config_of, find_copied, messages_in, thread_ids, writer
from pgmemory.transfer.importing import Finding, ImportReport, import_conversations
from pgmemory.transfer.messages import OddMessageError, to_row
from pgmemory.transfer.source import Redact, Skip, SourceConversation
from pgmemory.transfer.thread_messages import STORED_AT, ThreadMessages, thread_messages

if TYPE_CHECKING:
    from langgraph.checkpoint.base import BaseCheckpointSaver

    Saver = BaseCheckpointSaver[Any]

_MAX_FINDINGS = 1000


@dataclass(slots=True)
class CopyReport:
    """What copying to LangGraph has done, or, as a dry run, would do.

    Attributes:
        dry_run: Whether nothing was written.
        conversations: Conversations that were read.
        threads: Threads that were written.
        messages: Messages in them.
        summarized: Messages of the log that a summary stands for in them.
        left_out: Messages of the log that no model accepts and they do not hold.
        repaired: Results in them that were made, or moved up, for tool calls without one behind them.
        already_there: Threads that were as they should be.
        continued: Threads that have gone on since they were copied, while the conversation has not: left alone.
        conflicts: Threads that are others, or have gone on as the conversation has: left alone.
        findings: Which and why, the first thousand.
    """

    dry_run: bool = False
    conversations: int = 0
    threads: int = 0
    messages: int = 0
    summarized: int = 0
    left_out: int = 0
    repaired: int = 0
    already_there: int = 0
    continued: int = 0
    conflicts: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def succeeded(self) -> bool:
        """Whether every thread holds its conversation."""
        return not self.conflicts

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)


def copy_to_langgraph(
    store: ConversationStore,
    saver: Saver,
    *,
    user_id: Any = None,
    session_id: Any = None,
    thread_id: Callable[[ConversationKey], str] | None = None,
    dry_run: bool = False,
    on_progress: Callable[[int, int | None], object] | None = None,
) -> CopyReport:
    """Copy conversations into LangGraph threads that agents continue.

    A thread holds what models accept, in the order of the log: after a summary the turns that it does not cover, with
    the summary as a system message before them. Calls without a result get one that says so. Messages keep their ids,
    or get such as follow from the conversation and their number. Nothing is left to be done in the thread, so an agent
    that is invoked with its id answers the next message. Its checkpoint's metadata names the conversation: ``user_id``,
    ``session_id``, ``tenant_id``, ``first_message_at``, ``last_message_at``; a message's ``response_metadata`` says
    when it was stored (``stored_at``).

    Safe to run twice: a thread that nobody but this function has written is brought to what the log holds now; one that
    has gone on is left alone, and is a conflict if the conversation has gone on, or was changed, too. So is a thread
    that is another one. Copy a conversation while nobody talks in it.

    Args:
        store: Where the conversations are; those of its tenant are meant.
        saver: A PostgresSaver whose `setup` was called, an InMemorySaver or another checkpointer of LangGraph.
        user_id: Only this user's; None for everybody's, '' for those without a user.
        session_id: Only this conversation, of the user or of none, and the logs that agents keep beside it.
        thread_id: Names the thread of a conversation by its key; None for the key's id, ``str(key.id)``, which no other
            tenant's or user's conversation has, whatever its session id.
        dry_run: Write nothing, but read and check everything.
        on_progress: Called after each conversation with how many messages were passed, about, and how many there are.

    Raises:
        ConfigurationError: An argument is wrong, LangGraph is not installed, or its tables were never made.
        StoreError: The database refused or could not be reached. What the saver raises is passed on. Run it again.
    """
    write = writer(saver)
    names: dict[str, str] = {}
    if session_id is not None:
        one = store.key(session_id, user_id)
        names = {"session_id": one.session_id, "user_id": one.user_id}
    elif user_id is not None:
        names["user_id"] = store.key("any", user_id).user_id
    scope = store.read_scope(all_tenants=False, **names)
    report = CopyReport(dry_run)
    passed = 0
    for id in conversation_ids(store, scope):
        snapshot = store.read_snapshot(scope, id)
        if snapshot is None:
            continue
        report.conversations += 1
        state = snapshot.state
        key = ConversationKey(state.tenant_id, state.user_id, state.session_id)
        thread = str(key.id) if thread_id is None else text_id("thread_id", thread_id(key))
        told = _as_kept(saver, _read(store, scope, id, snapshot))
        standing, reason = _standing(saver, thread, str(key.id), told.messages)
        if standing == "to write":
            report.threads += 1
            report.messages += len(told.messages)
            report.summarized += told.summarized
            report.left_out += told.left_out
            report.repaired += told.repaired
            if not dry_run:
                write(thread, told.messages, _metadata(key, snapshot, told.messages))
        elif standing == "conflict":
            report.conflicts += 1
            if len(report.findings) < _MAX_FINDINGS:
                of_user = f" of user {key.user_id!r}" if key.user_id else ""
                report.findings.append(Finding("conflict", f"session {key.session_id!r}{of_user}", reason))
        elif standing == "continued":
            report.continued += 1
        else:
            report.already_there += 1
        passed += state.next_message_index
        if on_progress is not None:
            on_progress(passed, scope.numbers)
    return report


def copy_from_langgraph(
    store: ConversationStore,
    saver: Saver,
    *,
    thread_ids: Iterable[str] | None = None,
    user_id: Any = None,
    strict: bool = False,
    dry_run: bool = False,
    on_progress: Callable[[int, int | None], object] | None = None,
) -> ImportReport:
    """Copy the messages that LangGraph threads hold now into conversations, as `import_conversations` does.

    A thread that was copied from a conversation of this store adds to it what was said since. Every other one becomes a
    conversation with the thread's id as its session id, or with the session and the user that it was copied from.
    Threads that were copied from another tenant's conversation are skipped. Safe to run twice; a conversation that has
    gone on here itself is a conflict and left alone.

    Args:
        store: Where to; its schema stands.
        saver: A PostgresSaver, an InMemorySaver or another checkpointer of LangGraph.
        thread_ids: Which threads; None for all.
        user_id: The user of threads whose metadata has no ``user_id``.
        strict: Let what cannot be read be an error, not a finding.
        dry_run: Write nothing, but read and check everything.
        on_progress: Called after each batch of messages with how many threads were read, and how many there are.

    Raises:
        ConfigurationError: An argument is wrong, LangGraph is not installed, its tables were never made or, with
            `strict`, something cannot be read.
        StoreError: The database refused or could not be reached. What the saver raises is passed on. Run it again.
    """
    check(saver)
    if isinstance(thread_ids, str):
        raise ConfigurationError("thread_ids must be a list of ids, not one text")
    threads = _Threads(store, saver, thread_ids, user_id)
    return import_conversations(store, threads, strict=strict, dry_run=dry_run, on_progress=on_progress)


class _Threads:
    """Threads as a source of conversations."""

    def __init__(self, store: ConversationStore, saver: Saver, ids: Iterable[str] | None, user_id: Any) -> None:
        self._store = store
        self._saver = saver
        self._ids = ids
        self._user_id = user_id
        self.rows = 0
        self.done = 0
        self.total: int | None = None

    def conversations(self, skip: Skip, redact: Redact | None) -> Generator[SourceConversation, None, None]:
        """Yield a conversation for each thread."""
        ids = list(dict.fromkeys(thread_ids(self._saver) if self._ids is None else self._ids))
        self.total = len(ids)
        for id in ids:
            conversation = self._conversation(id, partial(skip, f"thread {id!r}"), redact)
            self.done += 1
            if conversation is not None:
                yield conversation
            else:
                self.rows += 1  # what was told to `skip`

    def _conversation(self, id: str, skip: Callable[[str], object], redact: Redact | None) -> SourceConversation | None:
        newest = self._saver.get_tuple(config_of(id))
        if newest is None:
            skip("there is no such thread")
            return None
        messages = messages_in(newest)
        if messages is None:
            skip("its state has no list of messages")
            return None
        first = 0
        metadata = newest.metadata
        session_id, user_id = id, metadata.get("user_id", self._user_id)
        if copied := find_copied(self._saver, id, newest, COPIED_FROM):
            origin: Any = copied.metadata
            if origin["tenant_id"] != self._store.tenant_id:
                skip("it was copied from another tenant's conversation")
                return None
            session_id, user_id = origin["session_id"], origin["user_id"]
            here = self._store.get_conversation(session_id, user_id=user_id)
            if here is not None and to_time(here.created_at) == origin["conversation_created_at"]:
                known = {message.id for message in messages_in(copied) or ()}
                messages = [message for message in messages if message.id not in known]
                first = origin["next_message_index"]
        entries = self._entries(messages, first, skip, redact)
        return SourceConversation(f"thread {id!r}", session_id, user_id, entries)

    def _entries(
        self, messages: Iterable[BaseMessage], first: int, skip: Callable[[str], object], redact: Redact | None
    ) -> Iterator[Entry]:
        number = first
        for message in messages:
            self.rows += 1
            metadata = dict(message.response_metadata)
            stored_at = metadata.pop(STORED_AT, None)
            message = message.model_copy(update={"response_metadata": metadata})
            try:
                row = to_row(lambda message=message: message, redact)  # type: ignore[misc]
            except OddMessageError as error:
                skip(f"message {message.id!r}: {error}")
                continue
            time = datetime.fromisoformat(stored_at) if isinstance(stored_at, str) else None
            if row is not None:
                yield Entry(row._replace(message_index=number, created_at=time))
                number += 1


def _read(store: ConversationStore, scope: Scope, id: str, snapshot: Snapshot) -> ThreadMessages:
    page = snapshot.page
    rows = [entry.message for entry in page.entries]
    while page.rest_from is not None:
        page = store.read_entries(scope, id, page.rest_from, snapshot.state.next_message_index)
        rows += [entry.message for entry in page.entries]
    summary = max(snapshot.summaries, key=lambda summary: summary.covers_through, default=None)
    return thread_messages(UUID(id), [row for row in rows if not row.is_erased], summary)


def _metadata(key: ConversationKey, snapshot: Snapshot, messages: Sequence[BaseMessage]) -> dict[str, Any]:
    times = [message.response_metadata[STORED_AT] for message in messages if STORED_AT in message.response_metadata]
    return COPIED_FROM | {
        "conversation_id": str(key.id),
        "conversation_created_at": snapshot.state.created_at,
        "tenant_id": key.tenant_id,
        "user_id": key.user_id,
        "session_id": key.session_id,
        "first_message_at": min(times, default=""),
        "last_message_at": max(times, default=""),
        "next_message_index": snapshot.state.next_message_index,
    }


def _standing(
    saver: Saver, thread_id: str, conversation_id: str, messages: list[BaseMessage]
) -> tuple[Literal["to write", "there", "continued", "conflict"], str]:
    """Tell what is to be done about a thread, and why nothing can be."""
    newest = saver.get_tuple(config_of(thread_id))
    if newest is None:
        return ("to write" if messages else "there"), ""
    copied = find_copied(saver, thread_id, newest, {"conversation_id": conversation_id})
    if copied is None:
        return "conflict", f"thread {thread_id!r} is there, and was not copied from this conversation"
    before = messages_in(copied) or []
    if copied is newest:
        return ("there" if before == messages else "to write"), ""
    if _holds_all(messages_in(newest) or [], before, messages):
        return "continued", ""
    return "conflict", f"thread {thread_id!r} has gone on, and the conversation has gone on or was changed too"


def _holds_all(now: list[BaseMessage], before: list[BaseMessage], messages: list[BaseMessage]) -> bool:
    """Tell whether a log is as it was when its thread was copied, but for messages that the thread has too."""
    known = {message.id: message for message in before}
    there = known.keys() | {message.id for message in now}
    told = {message.id for message in messages}
    changed = any(known.get(message.id, message) != message for message in messages)
    return not changed and known.keys() <= told <= there


def _as_kept(saver: Saver, told: ThreadMessages) -> ThreadMessages:
    """Return messages as the saver will give them back, to compare them with what it has."""
    told.messages[:] = saver.serde.loads_typed(saver.serde.dumps_typed(told.messages))
    return told
