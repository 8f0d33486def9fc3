"""Moving conversations out and in: whole rows, with their numbers and times, in pages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pgmemory.encryption import DataKey, Opener
from pgmemory.models import AFTER_ALL, BEFORE_AGENT, ConversationKey, StoredMessage, StoredSummary
from pgmemory.pool import Execute, StoreError
from pgmemory.queries import log, transfer
from pgmemory.rows import names_of, to_message, to_summary
from pgmemory.store.encryption import EncryptionOperations
from pgmemory.store.meaning import MeaningOperations

_IDS = 1000
# A page holds a thousand messages, or fewer if they are larger than this.
_ROW_WEIGHT = 8 * 1024
_PAGE_WEIGHT = 1000 * _ROW_WEIGHT
# A page of large messages, or one that waits for a long deletion's lock.
_STATEMENT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class ConversationState:
    """All that a conversation's row holds, exactly: times are ISO 8601 text, metadata is JSON text."""

    tenant_id: str
    user_id: str
    session_id: str
    metadata: str
    next_message_index: int
    summarized_through: int
    keeps_summary: bool
    revision: int
    created_at: str
    updated_at: str
    time_to_live: str | None
    held_at: str | None
    hold_reason: str | None


class Entry(NamedTuple):
    """A message with its number, and the id of the write that it is the first message of."""

    message: StoredMessage
    write_id: str | None = None

    @property
    def number(self) -> int:
        """The message's number."""
        assert self.message.message_index is not None
        return self.message.message_index


class Scope(NamedTuple):
    """Which conversations are meant, and how many numbers they have given to messages so far."""

    parameters: dict[str, Any]
    numbers: int


class Page(NamedTuple):
    """Messages of a conversation, in order; `rest_from` is the number from which on there may be more, or None."""

    entries: list[Entry]
    rest_from: int | None


class Snapshot(NamedTuple):
    """A conversation, its summaries and its first messages, as they were at one moment."""

    state: ConversationState
    summaries: list[StoredSummary]
    page: Page


@dataclass(frozen=True, slots=True)
class Written:
    """What became of a batch of messages.

    Attributes:
        stored: How many were written, or would have been.
        present: How many were there already.
        conflict: Why nothing of the batch was written, or None.
    """

    stored: int = 0
    present: int = 0
    conflict: str | None = None


class TransferOperations(EncryptionOperations, MeaningOperations):
    """What export and import are made of."""

    def require_schema(self) -> None:
        """See that the schema is there and fits.

        Raises:
            SchemaError: It does not; the text says what to do.
        """
        self._check_schema()

    def read_scope(
        self, *, user_id: str | None = None, session_id: str | None = None, all_tenants: bool = False
    ) -> Scope:
        """Return which conversations are meant: all, a user's, or one and the logs that agents keep beside it.

        Raises:
            StoreError: Row-level security keeps other tenants' rows from this role.
        """
        parameters = {
            "tenant_id": self._scope(all_tenants),
            "user_id": user_id,
            "session_id": session_id,
            "before_agent": BEFORE_AGENT,
        }
        ((numbers,),) = self._transact(
            "read_scope", lambda execute: execute(transfer.COUNT_SCOPE, parameters), seconds=_STATEMENT_SECONDS
        )
        return Scope(parameters, numbers)

    def read_ids(self, scope: Scope, after: str) -> list[str]:
        """Return the ids of the next conversations of a scope after another one's, in order; none at the end."""
        parameters = scope.parameters | {"after": after, "limit": _IDS}
        rows = self._transact(
            "read_ids", lambda execute: execute(transfer.READ_IDS, parameters), seconds=_STATEMENT_SECONDS
        )
        return [row[0] for row in rows]

    def read_snapshot(self, scope: Scope, id: str) -> Snapshot | None:
        """Return a conversation of a scope with its summaries and its first messages; None if it is gone."""
        rows = self._read(transfer.READ_CONVERSATION, scope, id, 0, AFTER_ALL)
        states = [ConversationState(**json.loads(row[3])) for row in rows if row[0] == transfer.PART_STATE]
        if not states:
            return None
        with self._opener(f"session {states[0].session_id!r}") as opener:
            summaries = [to_summary(row[2:-1], opener) for row in rows if row[0] == transfer.PART_SUMMARY]
            return Snapshot(states[0], [summary for summary in summaries if summary], _to_page(rows, opener))

    def read_entries(self, scope: Scope, id: str, first: int, end: int) -> Page:
        """Return a page of a conversation's messages, from the number `first` on and below `end`."""
        with self._opener(f"conversation {id}") as opener:
            return _to_page(self._read(transfer.READ_MESSAGES, scope, id, first, end), opener)

    def write_entries(
        self,
        key: ConversationKey,
        entries: Sequence[Entry],
        *,
        state: ConversationState | None = None,
        summaries: Sequence[StoredSummary] = (),
        is_first: bool,
        is_last: bool,
        all_tenants: bool = False,
        dry_run: bool = False,
    ) -> Written:
        """Write messages under their own numbers: those from the conversation's next number on.

        Those below it that are there are compared; a difference is a conflict, and nothing is written then. Those that
        are not there were deleted here, and stay so. One transaction, which first locks the conversation's row.

        Args:
            key: The conversation; its row is made with the first batch if it isn't there.
            entries: A batch of messages in the order of their numbers.
            state: What the row shall hold where it is made here. Its numbering and what its summaries cover come with
                the last batch, if nothing else was written, cleared or edited here.
            summaries: Its summaries, for the last batch.
            is_first: The conversation's first batch of this import.
            is_last: Its last one.
            all_tenants: The key may be another tenant's.
            dry_run: Write nothing.
        """
        if not all_tenants:
            self._own(key)
        parameters = names_of(key) | self._row_parameters(entries, state) | {"may_make": is_first}

        def write(execute: Execute) -> Written:
            rows = execute(transfer.FIND_FOR_IMPORT if dry_run else transfer.MAKE_AND_LOCK, parameters)
            found = rows[0] if rows else (0, -1, True, False, dry_run)
            next_index, summarized_through, is_same, has_key, is_own = found
            if not is_own:
                return Written(
                    conflict="it was deleted here while it was imported, or another tenant's row stands in its place"
                )
            below = [entry for entry in entries if entry.number < next_index]
            indexes = {"id": parameters["id"], "indexes": [entry.number for entry in below]}
            present = self._to_messages(key, execute(transfer.READ_NUMBERED, indexes)) if below else []
            # What was given up with its key was deleted here.
            present = [message for message in present if not message.is_erased]
            if conflict := _difference(below, present):
                return Written(conflict=conflict)
            new = entries[len(below) :]
            written = Written(len(new), len(present))
            if dry_run:
                if new and has_key:
                    self._find_data_key(key, execute)  # raises as writing would
                return written
            next_index = new[-1].number + 1 if new else next_index
            restored = state if is_last and is_same and _is_ahead(state, next_index, summarized_through) else None
            if not new and restored is None:
                return written
            data_key = self._key_to_seal_with(key, execute, has_key)
            sealed = parameters | {"key_id": data_key and data_key.key_id}
            if new:
                execute(transfer.INSERT_NUMBERED, sealed | _entry_parameters(new, data_key))
            if restored is not None:
                execute(transfer.RESTORE_SUMMARIES, sealed | _summary_parameters(restored, summaries, data_key))
            return written

        try:
            written = self._transact("write_entries", write, seconds=_STATEMENT_SECONDS)
        except StoreError as error:
            if log.WRITE_ID_COLUMN in (error.constraint_name or ""):
                return Written(conflict="a write of the same id is here under other numbers")
            raise
        self._embed_soon()
        return written

    def count_differing(self, key: ConversationKey, entries: Sequence[Entry], *, all_tenants: bool = False) -> int:
        """Return how many of these messages are not, or not so, in a conversation; no I/O for none."""
        if not all_tenants:
            self._own(key)
        if not entries:
            return 0
        indexes = {"id": str(key.id), "indexes": [entry.number for entry in entries]}
        rows = self._execute("count_differing", transfer.READ_NUMBERED, indexes)
        found = {(message.message_index, *message[:4]) for message in self._to_messages(key, rows)}
        return sum((entry.number, *entry.message[:4]) not in found for entry in entries)

    def _read(self, statement: str, scope: Scope, id: str, first: int, end: int) -> list[tuple[Any, ...]]:
        parameters = {
            "id": id,
            "tenant_id": scope.parameters["tenant_id"],
            "first": first,
            "end": end,
            "row_weight": _ROW_WEIGHT,
            "page_weight": _PAGE_WEIGHT,
        }
        return self._execute("read_for_transfer", statement, parameters)

    def _row_parameters(self, entries: Sequence[Entry], state: ConversationState | None) -> dict[str, Any]:
        """Return what a conversation's row holds where it is made."""
        times = [entry.message.created_at for entry in entries if entry.message.created_at is not None]
        return {
            "metadata": state and state.metadata,
            "revision": state and state.revision,
            "created_at": state.created_at if state else min(times, default=None),
            "updated_at": state.updated_at if state else max(times, default=None),
            "time_to_live": state and state.time_to_live,
            "store_time_to_live": self.time_to_live,
            "held_at": state and state.held_at,
            "hold_reason": state and state.hold_reason,
        }


def _difference(given: Sequence[Entry], present: Sequence[StoredMessage]) -> str | None:
    """Say which message is another one here."""
    said = {message.message_index: message[:4] for message in present}
    for entry in given:
        if said.get(entry.number, entry.message[:4]) != entry.message[:4]:
            return f"message {entry.number} is another one here"
    return None


def _is_ahead(state: ConversationState | None, next_index: int, summarized_through: int) -> bool:
    """Tell whether a conversation is here as `state` has it, but for numbers or summaries that are still to come."""
    if state is None or next_index > state.next_message_index or summarized_through > state.summarized_through:
        return False
    return next_index < state.next_message_index or summarized_through < state.summarized_through


def _to_page(rows: Sequence[Sequence[Any]], opener: Opener) -> Page:
    read = [row for row in rows if row[0] == transfer.PART_MESSAGE]
    found = [(row[1], Entry(to_message(row[2:-1], opener), row[-1])) for row in read]
    rest_from = found[-1][1].number + 1 if found and found[-1][0] else None
    return Page([entry for _, entry in found], rest_from)


def _entry_parameters(entries: Sequence[Entry], data_key: DataKey | None) -> dict[str, Any]:
    messages = [entry.message if data_key is None else data_key.seal_message(entry.message) for entry in entries]
    return {
        "next_message_index": entries[-1].number + 1,
        "indexes": [entry.number for entry in entries],
        "roles": [message.role for message in messages],
        "contents": [message.content for message in messages],
        "additional_kwargs": [message.additional_kwargs for message in messages],
        "extras": [message.extra for message in messages],
        "write_ids": [entry.write_id for entry in entries],
        "tags": [None if message.tags is None else json.dumps(message.tags) for message in messages],
        "judged_by": [message.judged_by for message in messages],
        "token_counts": [message.token_count for message in messages],
        "token_encodings": [message.token_encoding for message in messages],
        "times": [message.created_at for message in messages],
    }


def _summary_parameters(
    state: ConversationState, summaries: Sequence[StoredSummary], data_key: DataKey | None
) -> dict[str, Any]:
    contents = [summary.content for summary in summaries]
    return {
        "next_message_index": state.next_message_index,
        "summarized_through": state.summarized_through,
        "keeps_summary": state.keeps_summary,
        "covers_through": [summary.covers_through for summary in summaries],
        "contents": contents if data_key is None else list(map(data_key.seal_summary, contents)),
        "times": [summary.created_at for summary in summaries],
    }
