"""Encryption at rest: master keys, the data key of a conversation, sealing and opening what is stored.

Each conversation has a random data key of 256 bits, which encrypts its content with AES-256-GCM under a random nonce of
96 bits. The data key is stored encrypted ("wrapped") in the same way under a master key, which the database never sees.
What is sealed is bound to its conversation and to what it is, so that nothing opens in another place. This module
stores nothing, and imports `cryptography` (the extra ``encryption``) when a keyring is made.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import threading
import uuid
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pgmemory.errors import ConfigurationError, EncryptionError
from pgmemory.models import StoredMessage

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_BYTES = 32
_NONCE_BYTES = 12
_FORMAT = b"\x01"  # the first byte of whatever is sealed, and part of what it is bound to
_NAME = re.compile(r"[\w.@/+-]{1,200}")
_CACHED_KEYS = 4096


class _Secret(bytes):
    """Bytes that are never shown, not even by an error tracker that prints a frame's variables."""

    def __repr__(self) -> str:
        return "<secret>"

    __str__ = __repr__


class WrappedKey(NamedTuple):
    """A conversation's data key as it is stored: encrypted under a master key."""

    conversation_id: str
    key_id: str
    master_key_name: str
    wrapped_key: bytes


class DataKey:
    """The key that encrypts the content of one conversation.

    Attributes:
        conversation_id: The conversation, the only one in which it opens anything.
        key_id: Stands beside whatever it sealed.
    """

    def __init__(self, conversation_id: str, key_id: str, secret: bytes) -> None:
        self.conversation_id = conversation_id
        self.key_id = key_id
        self._cipher = _cipher(secret)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.key_id} of conversation {self.conversation_id}>"

    def seal_message(self, message: StoredMessage) -> StoredMessage:
        """Return a message whose text, fields and tags are sealed into its `content`; its role and tokens stay."""
        fields = (message.content, message.additional_kwargs, message.extra, message.tags)
        sealed = self._seal(f"{message.role} message", json.dumps(fields, ensure_ascii=False))
        return message._replace(content=sealed, additional_kwargs=None, extra=None, tags=None, judged_by=None)

    def open_message(self, message: StoredMessage) -> StoredMessage:
        """Return the message that `seal_message` was given.

        Raises:
            EncryptionError: It was changed, or belongs to another conversation or under another role.
        """
        content, additional_kwargs, extra, tags = json.loads(self._open(f"{message.role} message", message.content))
        return message._replace(
            content=content,
            additional_kwargs=additional_kwargs,
            extra=extra,
            tags=None if tags is None else tuple(tags),
        )

    def seal_summary(self, content: str) -> str:
        """Return a summary's text, sealed."""
        return self._seal("summary", content)

    def open_summary(self, sealed: str) -> str:
        """Return the text that `seal_summary` was given.

        Raises:
            EncryptionError: It was changed, or belongs to another conversation.
        """
        return self._open("summary", sealed)

    def _seal(self, what: str, text: str) -> str:
        return base64.b64encode(_encrypt(self._cipher, text.encode(), self._place(what))).decode()

    def _open(self, what: str, sealed: str) -> str:
        try:
            text = _decrypt(self._cipher, base64.b64decode(sealed, validate=True), self._place(what))
        except binascii.Error:
            text = None
        if text is None:
            raise EncryptionError(
                f"an encrypted {what} of conversation {self.conversation_id} cannot be decrypted: what is stored was "
                "changed, or moved here from another place"
            )
        return text.decode()

    def _place(self, what: str) -> bytes:
        return _bound_to(what, self.conversation_id, self.key_id)


class Keyring:
    """Master keys by name: the first one is current and wraps new data keys, the others still open what they wrapped.

    Keep them apart from the database and from its backups, all of them as long as `rotate_keys` has not moved
    everything to the current one. Nothing shows them: not the repr, not an error. A pickle of a keyring, or of a store
    that has one, holds them, as it holds the DSN's password. Messages and summaries are encrypted; metadata and
    items are stored in clear text.

    Args:
        keys: 32 random bytes by name, the current one first. A name may consist of letters, digits and ``_.@/+-``.

    Raises:
        ConfigurationError: There is no key, one is not usable, or the extra ``encryption`` is not installed.
    """

    def __init__(self, keys: Mapping[str, bytes]) -> None:
        _cipher(bytes(KEY_BYTES))  # says at once if `cryptography` is missing
        self._keys = {
            name: _Secret(secret) if isinstance(secret, bytes) else _Secret() for name, secret in keys.items()
        }
        del keys  # error trackers show the variables of the frame that raises
        if not self._keys:
            raise ConfigurationError("a keyring needs at least one master key: make one with `pgmemory new-key NAME`")
        for name, secret in self._keys.items():
            _check_name(name)
            if len(secret) != KEY_BYTES:
                raise ConfigurationError(f"the master key {name!r} must be {KEY_BYTES} bytes")

    @classmethod
    def from_text(cls, text: str) -> Keyring:
        """Read master keys from lines of ``name:base64``, newest first; empty lines and lines with ``#`` are skipped.

        Raises:
            ConfigurationError: A line cannot be read: the text says which one, and never what it holds.
        """
        keys, problem = _read_lines(text)
        del text  # error trackers show the variables of the frame that raises
        if problem:
            raise ConfigurationError(problem)
        return cls(keys)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Keyring:
        """Read master keys from a file of lines as `from_text` takes them.

        Raises:
            ConfigurationError: The file cannot be read, or one of its lines.
        """
        try:
            keys, problem = _read_lines(Path(path).read_text(encoding="utf-8-sig"))
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            keys, problem = {}, f"it cannot be read: {why}"
        if problem:
            raise ConfigurationError(f"key file {os.fspath(path)!r}: {problem}")
        return cls(keys)

    @staticmethod
    def new_line(name: str) -> str:
        """Return a line with a new random master key for the top of a key file.

        Raises:
            ConfigurationError: The name is not usable.
        """
        _check_name(name)
        return f"{name}:{base64.b64encode(os.urandom(KEY_BYTES)).decode()}"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the master keys, the current one first."""
        return tuple(self._keys)

    @property
    def current(self) -> str:
        """The name of the master key that wraps new data keys."""
        return next(iter(self._keys))

    def __repr__(self) -> str:
        names = ", ".join(map(repr, self.__dict__.get("_keys", ())))
        return f"<{type(self).__name__} of master keys {names}>"

    def new_data_key(self, conversation_id: str) -> tuple[DataKey, WrappedKey]:
        """Return a new random data key for a conversation, and as it is to be stored."""
        secret = _Secret(os.urandom(KEY_BYTES))
        key_id = str(uuid.uuid4())
        return DataKey(conversation_id, key_id, secret), self._wrap(conversation_id, key_id, secret)

    def unwrap(self, wrapped: WrappedKey) -> DataKey:
        """Return a data key that is stored.

        Raises:
            EncryptionError: Its master key is not in this keyring, or another one of that name is.
        """
        return DataKey(wrapped.conversation_id, wrapped.key_id, self._unwrap(wrapped))

    def rewrap(self, wrapped: WrappedKey) -> WrappedKey:
        """Return a stored data key as it is to be stored under the current master key. Raises as `unwrap` does."""
        return self._wrap(wrapped.conversation_id, wrapped.key_id, self._unwrap(wrapped))

    def _wrap(self, conversation_id: str, key_id: str, secret: _Secret) -> WrappedKey:
        place = _bound_to("key", conversation_id, key_id)
        sealed = _encrypt(_cipher(self._keys[self.current]), secret, place)
        return WrappedKey(conversation_id, key_id, self.current, sealed)

    def _unwrap(self, wrapped: WrappedKey) -> _Secret:
        name = wrapped.master_key_name
        if name not in self._keys:
            raise EncryptionError(
                f"conversation {wrapped.conversation_id} is encrypted under the master key {name!r}, which this "
                f"keyring lacks: it has {', '.join(map(repr, self.names))}"
            )
        place = _bound_to("key", wrapped.conversation_id, wrapped.key_id)
        secret = _decrypt(_cipher(self._keys[name]), wrapped.wrapped_key, place)
        if secret is None:
            raise EncryptionError(
                f"the key of conversation {wrapped.conversation_id} does not open with this keyring's master key "
                f"{name!r}: it was wrapped with another one of that name, or what is stored was changed"
            )
        return secret


class DataKeys:
    """The data keys that were used last, by conversation; threads may share it.

    It spares asking for a key before a write. Whether the key is still the conversation's is the database's to say.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: OrderedDict[str, DataKey] = OrderedDict()

    def __reduce__(self) -> tuple[type[DataKeys], tuple[()]]:
        return type(self), ()  # a copy or a pickle knows no keys

    def get(self, conversation_id: str) -> DataKey | None:
        """Return the key that was last known to be a conversation's."""
        with self._lock:
            return self._keys.get(conversation_id)

    def put(self, key: DataKey) -> None:
        """Note a conversation's key."""
        with self._lock:
            self._keys[key.conversation_id] = key
            self._keys.move_to_end(key.conversation_id)
            if len(self._keys) > _CACHED_KEYS:
                self._keys.popitem(last=False)

    def forget(self, conversation_id: str) -> None:
        """Forget a conversation's key."""
        with self._lock:
            self._keys.pop(conversation_id, None)


class Opener:
    """Opens what one statement has read; without a keyring it refuses.

    Whether a key is still there is always taken from the statement's own rows: what was erased does not come back
    from memory.

    Args:
        keyring: The store's.
        known: The keys that were used last.
        name: How errors name the conversation.

    Attributes:
        erased: How many messages and summaries could not be opened, because their key was erased.
    """

    def __init__(self, keyring: Keyring | None, known: DataKeys, name: str) -> None:
        self._keyring = keyring
        self._name = name
        self._known = known
        self.erased = 0

    def message(self, message: StoredMessage, sealed_with: Sequence[str]) -> StoredMessage:
        """Return a message as it was stored; one whose key was erased is empty and `is_erased`.

        Args:
            message: As it was read.
            sealed_with: As `queries.parts.sealed_with` reads it.

        Raises:
            EncryptionError: The keyring is missing or does not open it.
        """
        key = self._key(sealed_with)
        return message._replace(content="", is_erased=True) if key is None else key.open_message(message)

    def summary(self, content: str, sealed_with: Sequence[str]) -> str | None:
        """Return a summary's text; None if its key was erased. Raises as `message` does."""
        key = self._key(sealed_with)
        return None if key is None else key.open_summary(content)

    def _key(self, sealed_with: Sequence[str]) -> DataKey | None:
        conversation_id, key_id, *stored = sealed_with
        if not stored:
            self.erased += 1
            return None
        if self._keyring is None:
            raise no_keyring(self._name)
        key = self._known.get(conversation_id)
        if key is None or key.key_id != key_id:
            master_key_name, wrapped = stored
            key = self._keyring.unwrap(WrappedKey(conversation_id, key_id, master_key_name, base64.b64decode(wrapped)))
            self._known.put(key)
        return key


def no_keyring(name: str) -> EncryptionError:
    """Return the error that tells a store without a keyring that a conversation is encrypted."""
    return EncryptionError(
        f"{name} is encrypted and this store has no keyring: give it one, as in ConversationStore(…, "
        "keyring=Keyring.from_file(path)), or on the command line --keys FILE"
    )


def _cipher(secret: bytes) -> AESGCM:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        missing = str(error)
    else:
        return AESGCM(secret)
    raise ConfigurationError(
        f"encryption needs the package cryptography: pip install 'langchain-pgmemory[encryption]' ({missing})"
    )


def _encrypt(cipher: AESGCM, data: bytes, place: bytes) -> bytes:
    nonce = os.urandom(_NONCE_BYTES)
    return _FORMAT + nonce + cipher.encrypt(nonce, data, place)


def _decrypt(cipher: AESGCM, sealed: bytes, place: bytes) -> _Secret | None:
    """Return what was encrypted; None if it was not encrypted with this key for this place, or was changed."""
    from cryptography.exceptions import InvalidTag

    nonce, encrypted = sealed[len(_FORMAT) : len(_FORMAT) + _NONCE_BYTES], sealed[len(_FORMAT) + _NONCE_BYTES :]
    if not sealed.startswith(_FORMAT) or len(nonce) < _NONCE_BYTES:
        return None
    try:
        return _Secret(cipher.decrypt(nonce, encrypted, place))
    except InvalidTag:
        return None


def _bound_to(what: str, conversation_id: str, key_id: str) -> bytes:
    """Return the associated data of what is sealed: it opens as this, in this conversation, under this key, alone."""
    return _FORMAT + json.dumps([what, conversation_id, key_id]).encode()


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigurationError("a master key's name must consist of letters, digits and _.@/+-, without blanks")


def _read_lines(text: str) -> tuple[dict[str, bytes], str | None]:
    """Return the keys in the lines of a key file, and what is wrong with it, if anything is."""
    keys: dict[str, bytes] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, _, encoded = line.strip().partition(":")
        try:
            secret = _Secret(base64.b64decode(encoded, validate=True))
        except (binascii.Error, ValueError):
            secret = _Secret()
        if not _NAME.fullmatch(name) or len(secret) != KEY_BYTES:
            return {}, f"line {number} is not name:key with a key of {KEY_BYTES} bytes in base64"
        if name in keys:
            return {}, f"line {number} names a master key that an earlier line names, too"
        keys[name] = secret
    return keys, None
