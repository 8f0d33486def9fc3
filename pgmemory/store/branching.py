"""Branches and time: forking a conversation, and listing its states."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from pgmemory.encryption import DataKey
from pgmemory.errors import ConfigurationError
from pgmemory.models import AFTER_ALL, BEFORE_AGENT, ConversationKey, LogState
from pgmemory.pool import Execute
from pgmemory.queries import branching, windows
from pgmemory.rows import names_of, to_message, to_summary
from pgmemory.store.encryption import EncryptionOperations
from pgmemory.store.meaning import MeaningOperations

_STATES = 100
# A conversation of millions of messages is copied in one statement.
_STATEMENT_SECONDS = 3600.0


class BranchingOperations(EncryptionOperations, MeaningOperations):
    """What makes branches of a conversation, and finds where they may begin."""

    def fork(self, key: ConversationKey, session_id: str | int | uuid.UUID, *, at: int | None = None) -> None:
        """Make a new conversation of the same user that begins with another one's messages.

        They are copied in the database, with their numbers, times, tokens and keywords, the summaries that cover
        nothing but them, metadata and time to live. A hold is not copied, nor are the logs that agents keep beside the
        conversation. What was encrypted is sealed anew in this process, for it is bound to its conversation: the fork
        has a key of its own. Writers of the conversation wait meanwhile. One transaction, of three round trips where
        nothing is encrypted.

        Forking again with the same arguments does nothing while the fork holds any of what was copied, so that it may
        be repeated when the answer was lost.

        Args:
            key: The conversation to copy; it is left as it is.
            session_id: The new one's name. Only a log that an agent keeps beside a conversation is forked into one that
                bears such a log's name.
            at: Number of the last message that is copied, -1 for none; None for all there are.

        Raises:
            ConfigurationError: There is no such conversation, no such message yet, already a conversation of the new
                name, or that is an agent's; nothing was written.
            EncryptionError: It is encrypted and the keyring is missing or does not open its key; nothing was written.
        """
        if at is not None and (type(at) is not int or at < -1):
            raise ConfigurationError(f"a fork must end at a message's number, or at -1 for none, not at {at!r}")
        fork = self.key(session_id, self._own(key).user_id)
        if BEFORE_AGENT in fork.session_id and BEFORE_AGENT not in key.session_id:
            # It would be cleared, held and erased with a conversation that it has nothing to do with, and not recalled.
            raise ConfigurationError(
                f"session {key.session_id!r} cannot be forked into {fork.session_id!r}, the name of a log that an "
                f"agent keeps beside a conversation: choose a name without {BEFORE_AGENT!r}"
            )
        write_id = str(fork.write_id(f"fork of {key.id} at {at}"))

        def copy(execute: Execute) -> None:
            locked = execute(branching.LOCK_SOURCE, {"id": str(key.id)})
            if not locked:
                raise ConfigurationError(f"there is no session {key.session_id!r} of user {key.user_id!r} to fork")
            ((next_index, source_key_id),) = locked
            if at is not None and at >= next_index:
                raise ConfigurationError(
                    f"session {key.session_id!r} cannot be forked at message {at}: its last one is {next_index - 1}"
                )
            parameters = {
                **names_of(fork),
                "id": str(key.id),
                "fork_id": str(fork.id),
                "through": next_index - 1 if at is None else at,
                "write_id": write_id,
                "time_to_live": self.time_to_live,
                **dict.fromkeys(("source_key_id", "key_id", "wrapped_key", "master_key_name")),
            }
            data_key = None
            if source_key_id is not None:
                self._find_data_key(key, execute)
                assert self.keyring is not None, "without it the key is not found"
                data_key, wrapped = self.keyring.new_data_key(str(fork.id))
                parameters |= wrapped._asdict() | {"source_key_id": source_key_id}
            if not execute(branching.COPY, parameters):
                if not execute(branching.FIND_MARK, parameters):
                    raise ConfigurationError(f"there is a session {fork.session_id!r} already: fork into a new one")
                return
            if data_key is not None:
                self._copy_sealed(key, data_key, parameters, execute)
            execute(branching.MARK, parameters)

        self._transact("fork", copy, seconds=_STATEMENT_SECONDS)
        self._embed_soon()

    def read_states(self, key: ConversationKey, *, before: int = AFTER_ALL) -> Iterator[LogState]:
        """Yield the states of a conversation, newest first: one after each turn, and after what stands before them.

        One round trip for every hundred, made when they are asked for.

        Args:
            key: The conversation.
            before: Only as far as its messages below this number go.
        """
        parameters = {"id": str(self._own(key).id), "before": before, "below": before, "limit": _STATES}
        while rows := self._read_rows("read_states", branching.READ_STATES, parameters):
            states = self._to_states(key, rows)
            yield from states
            parameters["below"] = states[-1].message_index

    def _to_states(self, key: ConversationKey, rows: list[tuple[Any, ...]]) -> list[LogState]:
        with self._opener(f"session {key.session_id!r}") as opener:
            messages = [to_message(columns, opener) for part, _, *columns in rows if part == windows.PART_WINDOW]
            found = [to_summary(columns, opener) for part, _, *columns in rows if part == windows.PART_SUMMARY]
        summaries = [summary for summary in found if summary is not None]
        states = []
        for message in messages:
            assert message.message_index is not None, "it is stored"
            # Both go from the newest to the oldest: what lies beyond this state lies beyond all that follow.
            while summaries and summaries[0].covers_through > message.message_index:
                summaries.pop(0)
            states.append(LogState(message, summaries[0] if summaries else None))
        return states

    def _copy_sealed(
        self, key: ConversationKey, data_key: DataKey, parameters: dict[str, Any], execute: Execute
    ) -> None:
        """Copy what is encrypted of a locked conversation, sealed with the fork's key: in pages, and in order."""
        first = 0
        while rows := execute(branching.READ_SEALED, parameters | {"first": first}):
            sealed = [data_key.seal_message(message) for message in self._to_messages(key, rows)]
            contents: dict[str, Any] = {
                "indexes": [message.message_index for message in sealed],
                "contents": [message.content for message in sealed],
            }
            execute(branching.COPY_SEALED, parameters | contents)
            first = contents["indexes"][-1] + 1
        with self._opener(f"session {key.session_id!r}") as opener:
            rows = execute(branching.READ_SEALED_SUMMARIES, parameters)
            summaries = [summary for row in rows if (summary := to_summary(row, opener))]
        contents = {
            "indexes": [summary.covers_through for summary in summaries],
            "contents": [data_key.seal_summary(summary.content) for summary in summaries],
        }
        execute(branching.COPY_SEALED_SUMMARIES, parameters | contents)
