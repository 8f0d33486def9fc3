"""The log of a conversation and its summaries: append, read windows, clear. Records in, records out."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pgmemory.models import AFTER_ALL, BEFORE_AGENT, ConversationKey, StoredMessage, Window, readable
from pgmemory.pool import StoreError
from pgmemory.queries import log, windows
from pgmemory.queries.parts import only_noting_seals
from pgmemory.rows import names_of
from pgmemory.store.base import refuse_held
from pgmemory.store.encryption import EncryptionOperations, Rows, notes_seals
from pgmemory.store.meaning import MeaningOperations

_logger = logging.getLogger(__name__)


class LogOperations(EncryptionOperations, MeaningOperations):
    """What histories and memories are made of: each takes the key of a conversation."""

    def append(
        self,
        key: ConversationKey,
        messages: Sequence[StoredMessage],
        *,
        write_id: uuid.UUID,
        tags: Sequence[str] | None = None,
        judged_by: str | None = None,
        max_messages: int | None = None,
    ) -> None:
        """Append messages to a conversation: all of them, as neighbours, exactly once, or none.

        Args:
            key: The conversation; it is made if it isn't there.
            messages: At least one; their index, time, tags and rule are not read.
            write_id: Id of this write. If the conversation already holds it, nothing is written.
            tags: Keywords found in this turn, None for a turn that no rule found relevant.
            judged_by: Fingerprint of the rule behind `tags`.
            max_messages: Prune oldest whole turns above this many messages, in the same transaction; not while the
                conversation is held.

        Raises:
            StoreUnavailableError: The database could not be reached, or the answer was lost each time: it may have been
                written, which another call with the same `write_id` settles.
            StoreError: The database refused; nothing was written.
            EncryptionError: The conversation is encrypted and the keyring is missing or does not open its key; nothing
                was written.
        """
        with _written_once(key):
            self._append(
                self._own(key),
                messages,
                write_id,
                then="" if max_messages is None else log.PRUNE,
                was_written=lambda rows, key_id: bool(rows),
                tags=tags,
                judged_by=judged_by,
                max_messages=max_messages,
                time_to_live=self.time_to_live,
            )
        self._embed_soon()

    def append_and_read_unsummarized(
        self,
        key: ConversationKey,
        messages: Sequence[StoredMessage],
        *,
        write_id: uuid.UUID,
        budget: int,
        encoding: str | None,
        max_messages: int | None = None,
    ) -> Window:
        """Append as `append` does and return what `read_unsummarized` returns, in the same round trip.

        From then on pruning spares what no summary covers yet.
        """
        with _written_once(key):
            rows = self._append(
                self._own(key),
                messages,
                write_id,
                then=("" if max_messages is None else log.PRUNE)
                + (windows.READ_UNSUMMARIZED if self.keyring else only_noting_seals(windows.READ_UNSUMMARIZED)),
                was_written=lambda rows, key_id: _holds(_state_in(rows, key.tenant_id), key_id),
                and_reads={"budget": budget, "encoding": encoding},
                max_messages=max_messages,
                keeps_summary=True,
                time_to_live=self.time_to_live,
            )
            self._embed_soon()
            if self.keyring is not None or not notes_seals(rows):
                return self._to_window(key, rows)
        # Only where the write was there already, so that nothing was read, or where something encrypted has no key.
        return self.read_unsummarized(key, budget=budget, encoding=encoding)

    def list_messages(self, session_id: str | int | uuid.UUID, *, user_id: Any = None) -> list[StoredMessage]:
        """Return a whole conversation's messages as records, oldest first; empty if there is no such conversation."""
        return self.read_all(self.key(session_id, user_id))

    def read_all(self, key: ConversationKey, *, before: int = AFTER_ALL) -> list[StoredMessage]:
        """Return all messages of a conversation before message `before`, oldest first."""
        parameters = {"id": str(self._own(key).id), "before": before}
        return self._to_messages(key, self._read_rows("read_all", log.READ_ALL, parameters))

    def read_last_turns(self, key: ConversationKey, *, turns: int, before: int = AFTER_ALL) -> Window:
        """Read the last `turns` turns before message `before`. Touches no older row."""
        parameters = {"id": str(self._own(key).id), "turns": turns, "before": before}
        return self._to_window(key, self._read_rows("read_last_turns", windows.READ_LAST_TURNS, parameters))

    def read_last_tokens(
        self, key: ConversationKey, *, budget: int, encoding: str | None, before: int = AFTER_ALL
    ) -> Window:
        """Read the last whole turns before message `before`, up to the first one that passes `budget` tokens.

        Args:
            key: The conversation.
            budget: Tokens by the stored counts of `encoding`; messages without one are estimated from below.
            encoding: Name under which counts were stored, None to estimate all.
            before: Index above the newest message to read.
        """
        return self._read_tokens("read_last_tokens", windows.READ_LAST_TOKENS, key, budget, encoding, before)

    def read_relevant_turns(
        self, key: ConversationKey, *, turns: int, rule: str | None, before: int = AFTER_ALL
    ) -> Window:
        """Read the last `turns` turns before message `before` that `rule` is not known to find irrelevant.

        Args:
            key: The conversation.
            turns: How many turns.
            rule: Fingerprint of the rule; turns without its verdict are returned, to be judged by the caller.
            before: Index above the newest message to read.
        """
        parameters = {"id": str(self._own(key).id), "turns": turns, "rule": rule, "before": before}
        return self._to_window(key, self._read_rows("read_relevant_turns", windows.READ_RELEVANT_TURNS, parameters))

    def clear(self, key: ConversationKey) -> None:
        """Delete a conversation's messages and summaries; its row, its metadata and its numbering stay.

        Turns that commit while this waits are deleted too; turns that come later are not. Does nothing if there is no
        such conversation.

        Raises:
            ConversationHeldError: It is held; nothing was deleted.
        """
        refuse_held(self._execute("clear", log.CLEAR, {"id": str(self._own(key).id)}))

    def clear_with_agents(self, key: ConversationKey) -> None:
        """Delete, as `clear` does, what a conversation and the logs that agents keep beside it hold.

        Raises:
            ConversationHeldError: One of them is held; nothing was deleted.
        """
        parameters = names_of(self._own(key)) | {"before_agent": BEFORE_AGENT}
        refuse_held(self._execute("clear_with_agents", log.CLEAR_WITH_AGENTS, parameters))

    def read_summary_window(
        self, key: ConversationKey, *, budget: int, encoding: str | None, before: int = AFTER_ALL
    ) -> Window:
        """Read the newest summary and, as `read_last_tokens` does, the last turns that it does not cover.

        The newest that covers only what stands before message `before`.
        """
        return self._read_tokens("read_summary_window", windows.READ_SUMMARY_WINDOW, key, budget, encoding, before)

    def read_unsummarized(self, key: ConversationKey, *, budget: int, encoding: str | None) -> Window:
        """Read the oldest turns that no summary covers, up to the first message of a turn beyond `budget` tokens.

        Unless the window is `complete`, its last message begins a turn of which nothing else was read.
        """
        parameters = {"id": str(self._own(key).id), "budget": budget, "encoding": encoding}
        return self._to_window(key, self._read_rows("read_unsummarized", windows.READ_UNSUMMARIZED, parameters))

    def record_summary(self, key: ConversationKey, *, content: str, covers_through: int, state: str) -> bool:
        """Let a summary take effect, unless the conversation has changed since `state` was read.

        Args:
            key: The conversation.
            content: The summary: of the one before and all messages after that up to `covers_through`. What
                PostgreSQL's text cannot hold becomes U+FFFD.
            covers_through: Index of the last message that it covers.
            state: `Window.state` of the read that it was made from.

        Returns:
            Whether it took effect. Not if the conversation was cleared, something of it deleted or replaced or its key
            made or erased meanwhile, or if another summary came first.

        Raises:
            EncryptionError: It is encrypted and the keyring is missing or does not open its key.
        """
        content, key_id = readable(content), windows.key_id_in(state)
        if key_id is not None:
            data_key = self._data_key(self._own(key), key_id)
            if data_key is None:
                return False
            content = data_key.seal_summary(content)
        parameters = {
            "id": str(self._own(key).id),
            "tenant_id": self.tenant_id,
            "content": content,
            "covers_through": covers_through,
            "state": state,
            "key_id": key_id,
        }
        return bool(self._execute("record_summary", windows.RECORD_SUMMARY, parameters))

    def _read_tokens(
        self, name: str, statement: str, key: ConversationKey, budget: int, encoding: str | None, before: int
    ) -> Window:
        parameters = {"id": str(self._own(key).id), "budget": budget, "encoding": encoding, "before": before}
        return self._to_window(key, self._read_rows(name, statement, parameters))


def _holds(state: str, key_id: str | None) -> bool:
    """Say whether a conversation of this state is there and its new content is encrypted with this key."""
    return bool(state) and windows.key_id_in(state) == key_id


def _state_in(rows: Rows, tenant_id: str) -> str:
    """Return the conversation's state in the rows of READ_UNSUMMARIZED; empty if the tenant has no such one."""
    # Compared here: as a condition of the statement the planner may walk all conversations of the tenant for it.
    found = (row for row in rows if row[0] == windows.PART_STATE and row[4] == tenant_id)
    return next((state for _, _, _, state, *_ in found), "")


@contextmanager
def _written_once(key: ConversationKey) -> Iterator[None]:
    """Take "this write is already there" for success: an earlier try of it got through."""
    try:
        yield
    except StoreError as error:
        if log.WRITE_ID_COLUMN not in (error.constraint_name or ""):
            raise
        _logger.info("session %r holds this write already: nothing was stored", key.session_id)
