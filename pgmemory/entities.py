"""LangChain's entity store over items: what ConversationEntityMemory knows of people and things, in PostgreSQL."""

from __future__ import annotations

import uuid
from datetime import timedelta

from pydantic import ConfigDict, Field, PrivateAttr, model_validator
from typing_extensions import Self

from pgmemory._compat import BaseEntityStore
from pgmemory.errors import ConfigurationError
from pgmemory.models import readable
from pgmemory.names import check_span
from pgmemory.store import ConversationStore
from pgmemory.store.item_arguments import place
from pgmemory.store.items import ItemStore

_SUMMARY = "summary"
_MOST_BYTES_OF_NAME = 500


class PostgresEntityStore(BaseEntityStore):
    """What is known of each entity, a text by name: for ``ConversationEntityMemory(entity_store=…)``.

    Give it a session id for what one conversation says, which goes with the conversation, or a user id alone for what
    all of a user's conversations say. Each entity is an item, ``{"summary": …}``, which `store.items` finds in the
    namespace ``("entities",)``. Every method is one round trip and one transaction.

    The texts are stored in clear text, also where the store has a keyring and encrypts the conversation that they were
    taken from, and do not pass its `redact`. Erasing that conversation's key leaves them readable; `clear` them too.

    As with LangChain's stores over SQLite and Redis, setting nothing or an empty text deletes, and deleting what is not
    there does nothing. A name of more than 500 bytes is cut; characters that PostgreSQL cannot keep become U+FFFD.

    Args:
        store: The store.
        session_id: The session.
        user_id: The user, also of the session.
        namespace: Another label than ``entities``, to keep several memories of one session or user apart.
        time_to_live: How long after it was last set or read an entity is forgotten; None for never.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid", frozen=True)

    store: ConversationStore = Field(repr=False, exclude=True)
    session_id: str | int | uuid.UUID | None = None
    user_id: str | int | uuid.UUID | None = None
    namespace: str = "entities"
    time_to_live: timedelta | None = None

    _items: ItemStore = PrivateAttr()

    @model_validator(mode="after")
    def _find_items(self) -> Self:
        if self.session_id is None and self.user_id in (None, ""):
            raise ConfigurationError("say whose entities these are: a session_id, a user_id, or both")
        check_span("time_to_live", self.time_to_live)
        self._items = self.store.items(self.user_id, session_id=self.session_id)
        place(self._place, "x" * _MOST_BYTES_OF_NAME)
        return self

    def get(self, key: str, default: str | None = None) -> str | None:
        """Return what is known of an entity, or the default."""
        found = self._items.get(self._place, _name(key))
        summary = None if found is None else found.value.get(_SUMMARY)
        return summary if isinstance(summary, str) else default

    def set(self, key: str, value: str | None) -> None:
        """Replace what is known of an entity.

        Raises:
            ConversationHeldError: Nothing is to be known of it any more, and the session's conversation is held.
        """
        if not value:
            self.delete(key)
            return
        self._items.put(self._place, _name(key), {_SUMMARY: readable(value)}, time_to_live=self.time_to_live)

    def delete(self, key: str) -> None:
        """Forget an entity.

        Raises:
            ConversationHeldError: The session's conversation is held.
        """
        self._items.delete(self._place, _name(key))

    def exists(self, key: str) -> bool:
        """Tell whether something is known of an entity; its time to live goes on."""
        return self._items.get(self._place, _name(key), refresh_time_to_live=False) is not None

    def clear(self) -> None:
        """Forget all entities.

        Raises:
            ConversationHeldError: The session's conversation is held.
        """
        self._items.clear(self._place)

    @property
    def _place(self) -> tuple[str]:
        return (self.namespace,)


def _name(key: str) -> str:
    """Return an entity's name as a key: a model may answer with anything, and its turn must go on."""
    return readable(str(key)).encode()[:_MOST_BYTES_OF_NAME].decode(errors="ignore")
