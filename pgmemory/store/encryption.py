"""Encryption at rest: appending what is sealed, opening what is read, and keys: found, erased, wrapped anew.

`conversations.key_id` says which key new content of a conversation is encrypted with, and guards every write: it
takes effect only if it was sealed with that key, or is clear text where there is none. So a key that this process
remembers and another one has erased does no harm: nothing is written, and the write is sealed anew.
"""

from __future__ import annotations

import base64
import logging
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pgmemory.encryption import DataKey, Opener, WrappedKey, no_keyring
from pgmemory.errors import EncryptionError
from pgmemory.models import ConversationKey, StoredMessage, Window
from pgmemory.pool import Execute, StoreError
from pgmemory.queries import encryption, log
from pgmemory.queries.parts import only_noting_seals
from pgmemory.rows import append_parameters, names_of, to_message, to_window
from pgmemory.store.base import FIRST_ID, StoreBase, refuse_held

_logger = logging.getLogger(__name__)

_TRIES = 5  # each further one only if the key was made or erased elsewhere in the moment since the last one
_BATCH = 500

Rows = list[tuple[Any, ...]]


class EncryptionOperations(StoreBase):
    """What encrypts and decrypts; without a keyring, and in clear text, it passes everything on."""

    def erase_key(self, session_id: str | int | uuid.UUID, *, user_id: str | int | uuid.UUID | None = None) -> bool:
        """Erase a conversation's key: what was encrypted with it cannot be read again, by any process.

        The rows stay, with roles, numbers, tokens and times: as records they are empty and `is_erased`, histories and
        views leave them out and log a WARNING. What was stored in clear text stays readable. The next turn that is
        encrypted gets a new key. Backups that hold the key still open the content that they hold.

        Args:
            session_id: The conversation; not the logs that agents keep beside it, which have keys of their own.
            user_id: Its user.

        Returns:
            Whether there was a key.

        Raises:
            ConversationHeldError: The conversation is held; nothing was erased.
        """
        key = self.key(session_id, user_id)
        rows = self._execute("erase_key", encryption.ERASE_KEY, {"id": str(key.id)})
        self._data_keys.forget(str(key.id))
        refuse_held([(session, reason) for session, reason, is_held, _ in rows if is_held])
        return any(had_key for *_, had_key in rows)

    def rotate_keys(self, *, all_tenants: bool = False, on_batch: Callable[[int], object] | None = None) -> int:
        """Wrap every conversation's key under the keyring's current master key; content is not encrypted anew.

        In batches, each a transaction of its own, beside writers that go on; if it ends early, another call goes on
        where it was. Once it returns, older master keys are needed only for backups from before, and by workers that
        still have another keyring: give the new key to all of them before they stand first anywhere.

        Args:
            all_tenants: The keys of every tenant, not only the store's.
            on_batch: Called after each batch with how many keys were wrapped anew so far.

        Returns:
            How many keys were wrapped anew.

        Raises:
            ConfigurationError: The store has no keyring.
            EncryptionError: Keys are left that this keyring cannot open; the others are done.
        """
        if self.keyring is None:
            raise EncryptionError("rotating keys needs the store's keyring: with the new master key first, and the old")
        scope = {"tenant_id": self._scope(all_tenants)}
        current, *older = self.keyring.names
        parameters: dict[str, Any] = scope | {"older": older, "after": FIRST_ID, "limit": _BATCH}
        rotated = 0
        while rows := self._execute("read_keys", encryption.READ_KEYS_TO_ROTATE, parameters):
            again = [
                self.keyring.rewrap(WrappedKey(id, key_id, name, base64.b64decode(wrapped)))
                for id, key_id, name, wrapped in rows
            ]
            batch = {
                "current": current,
                "ids": [key.conversation_id for key in again],
                "key_ids": [key.key_id for key in again],
                "wrapped_keys": [key.wrapped_key for key in again],
            }
            rotated += len(self._execute("rotate_keys", encryption.ROTATE_KEYS, batch))
            if on_batch is not None:
                on_batch(rotated)
            parameters["after"] = rows[-1][0]
        names = scope | {"names": list(self.keyring.names)}
        if others := self._execute("read_keys", encryption.READ_OTHER_MASTER_KEYS, names):
            missing = ", ".join(f"{name!r} ({count} conversations)" for name, count in others)
            raise EncryptionError(f"{rotated} keys were rotated; the keyring lacks the master keys {missing}")
        return rotated

    # For the other operations

    def _append(
        self,
        key: ConversationKey,
        messages: Sequence[StoredMessage],
        write_id: uuid.UUID,
        *,
        then: str,
        was_written: Callable[[Rows, str | None], bool],
        tags: Sequence[str] | None = None,
        judged_by: str | None = None,
        and_reads: dict[str, Any] | None = None,
        **parameters: Any,
    ) -> Rows:
        """Append messages, encrypted if the store has a keyring; one round trip while the key is known.

        Args:
            key: The conversation.
            messages: The messages, in clear text.
            write_id: Id of the write.
            then: Statements for the same round trip.
            was_written: Tells by the rows of the last statement, and the key's id, whether the write has taken effect.
            tags: Keywords found in this turn.
            judged_by: Fingerprint of the rule behind `tags`; not kept if encrypted, for it tells of the keywords.
            and_reads: Parameters of what `then` reads.
            **parameters: Further ones of `append_parameters`.

        Returns:
            The rows of the last statement.

        Raises:
            EncryptionError: The conversation is encrypted and the keyring is missing or does not open its key.
        """
        if self.keyring is None:
            clear = append_parameters(key, messages, write_id, tags=tags, judged_by=judged_by, **parameters)
            rows = self._execute("append", log.APPEND + then, clear | (and_reads or {}))
            if not was_written(rows, None):
                self._refuse_taken(key)
                raise no_keyring(_name(key))
            return rows
        id = str(key.id)
        tagged = [messages[0]._replace(tags=None if tags is None else tuple(tags)), *messages[1:]]
        for _ in range(_TRIES):
            data_key, wrapped = self._data_keys.get(id), None
            if data_key is None:
                data_key, wrapped = self.keyring.new_data_key(id)
            sealed = append_parameters(
                key, [data_key.seal_message(message) for message in tagged], write_id, data_key=wrapped, **parameters
            )
            statement = log.APPEND_WITH_KEY if wrapped is None else log.APPEND_WITH_NEW_KEY
            rows = self._execute("append", statement + then, sealed | {"key_id": data_key.key_id} | (and_reads or {}))
            if was_written(rows, data_key.key_id):
                self._data_keys.put(data_key)
                return rows
            self._data_keys.forget(id)
            self._find_data_key(key)
        self._refuse_taken(key)
        raise StoreError(f"{_name(key)} got another key each time that a turn was encrypted; nothing was written")

    def _find_data_key(self, key: ConversationKey, execute: Execute | None = None) -> DataKey | None:
        """Return the key that a conversation's new content must be sealed with; None for clear text.

        Args:
            key: The conversation.
            execute: Runs the statement in a transaction, which must hold the conversation's lock for what is then
                sealed to be written; None for a round trip of its own.

        Raises:
            EncryptionError: The keyring is missing or does not open the key, or the key is not there.
        """
        id = str(key.id)
        parameters = {"id": id}
        if execute is None:
            rows = self._execute("read_key", encryption.READ_KEY, parameters)
        else:
            rows = execute(encryption.READ_KEY, parameters)
        if not rows:
            return None
        key_id, master_key_name, wrapped = rows[0]
        if self.keyring is None:
            raise no_keyring(_name(key))
        if wrapped is None:
            raise EncryptionError(
                f"the key of {_name(key)} is missing, as in a backup without keys: restore it, or give its encrypted "
                "content up with erase_key, and the conversation goes on with a new key"
            )
        data_key = self.keyring.unwrap(WrappedKey(id, key_id, master_key_name, base64.b64decode(wrapped)))
        self._data_keys.put(data_key)
        return data_key

    def _data_key(self, key: ConversationKey, key_id: str, execute: Execute | None = None) -> DataKey | None:
        """Return a conversation's key of this id, asking for it if it isn't known; None if there is another by now."""
        known = self._data_keys.get(str(key.id))
        found = known if known is not None and known.key_id == key_id else self._find_data_key(key, execute)
        return found if found is not None and found.key_id == key_id else None

    def _key_to_seal_with(self, key: ConversationKey, execute: Execute, has_key: bool) -> DataKey | None:
        """Return what a locked conversation's new content is encrypted with, which is a new key if it has none yet.

        Raises:
            EncryptionError: It is encrypted, and the keyring is missing or does not open its key.
        """
        if has_key:
            return self._find_data_key(key, execute)
        if self.keyring is None:
            return None
        data_key, wrapped = self.keyring.new_data_key(str(key.id))
        execute(encryption.GIVE_KEY, names_of(key) | wrapped._asdict())
        return data_key

    @contextmanager
    def _opener(self, name: str) -> Iterator[Opener]:
        """Give what opens the rows of a statement; say afterwards if something's key was erased.

        Args:
            name: How errors and the log name the conversation.
        """
        opener = Opener(self.keyring, self._data_keys, name)
        yield opener
        if opener.erased:
            _logger.warning("%s: %d messages are left out, for their key was erased", name, opener.erased)

    def _read_rows(self, name: str, statement: str, parameters: dict[str, Any]) -> Rows:
        """Run a statement that reads messages, with `sealed_with` last.

        Without a keyring hardly anything is encrypted: then it takes another round trip to say what is the matter, and
        all others take a tenth less time.
        """
        if self.keyring is None:
            rows = self._execute(name, only_noting_seals(statement), parameters)
            if not notes_seals(rows):
                return rows
        return self._execute(name, statement, parameters)

    def _to_messages(self, key: ConversationKey, rows: Sequence[Sequence[Any]]) -> list[StoredMessage]:
        """Return the messages in a statement's rows, in clear text. Raises EncryptionError as `_find_data_key` does."""
        with self._opener(_name(key)) as opener:
            return [to_message(row, opener) for row in rows]

    def _to_window(self, key: ConversationKey, rows: Sequence[Sequence[Any]]) -> Window:
        """Return the window in a statement's rows, in clear text. Raises EncryptionError as `_find_data_key` does."""
        with self._opener(_name(key)) as opener:
            return to_window(rows, opener)


def notes_seals(rows: Rows) -> bool:
    """Tell whether a statement that only notes seals has read something encrypted."""
    return any(row[-1] is not None for row in rows)


def _name(key: ConversationKey) -> str:
    return f"session {key.session_id!r}"
