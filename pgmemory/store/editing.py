"""Editing a log: deleting and replacing what was stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from pgmemory.models import ConversationKey, Edit, StoredMessage
from pgmemory.pool import Execute
from pgmemory.queries import editing
from pgmemory.rows import edit_parameters
from pgmemory.store.base import refuse_held
from pgmemory.store.encryption import EncryptionOperations
from pgmemory.store.meaning import MeaningOperations


class EditingOperations(EncryptionOperations, MeaningOperations):
    """What changes messages that were stored."""

    def edit_turns(
        self, key: ConversationKey, indexes: Sequence[int], decide: Callable[[list[StoredMessage]], Edit]
    ) -> Edit:
        """Edit the turns in which messages stand, in one transaction that keeps writers of this conversation waiting.

        Windows, summaries, verdicts of keywords and write ids stay right: a summary that covers what is edited is
        dropped, so that what it covered and is still there is summarised again; verdicts on the turns are made anew
        when they are loaded; a write is still known while any of its messages is there. Four round trips.

        Args:
            key: The conversation.
            indexes: The messages' numbers; one above all stands for the last turn.
            decide: Given those turns, or the preamble, oldest first, returns the edit. It may be called again if the
                transaction has to be.

        Returns:
            The edit that was made; an empty one, too, if there is no such conversation.

        Raises:
            ConversationHeldError: The conversation is held; nothing was changed.
        """
        id = str(self._own(key).id)

        def edit(execute: Execute) -> Edit:
            locked = execute(editing.LOCK_CONVERSATION, {"id": id})
            if not locked:
                return decide([])
            ((session_id, reason, is_held, has_key),) = locked
            refuse_held([(session_id, reason)] if is_held else [])
            rows = execute(editing.READ_TURNS_AROUND, {"id": id, "indexes": list(indexes)})
            turns = self._to_messages(key, rows)
            decided = decide(turns)
            data_key = self._key_to_seal_with(key, execute, has_key) if decided.put else None
            sealed = decided
            if data_key is not None:
                sealed = replace(decided, put=tuple(data_key.seal_message(message) for message in decided.put))
            if decided.deleted or decided.put:
                parameters = edit_parameters(key, sealed, turns) | {"key_id": data_key and data_key.key_id}
                execute(editing.APPLY_EDIT, parameters)
            return decided

        edited = self._transact("edit_turns", edit)
        self._embed_soon()
        return edited
