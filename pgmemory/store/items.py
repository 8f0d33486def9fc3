"""Facts: JSON objects by namespace and key, of a user, of one session, or of the whole tenant."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, NamedTuple, get_args

from pgmemory.errors import ConfigurationError, MessageNotStorableError
from pgmemory.models import AFTER_ALL, ConversationKey, Item
from pgmemory.names import check_span, indexed_id
from pgmemory.pool import Execute, StoreError
from pgmemory.queries import items, meaning
from pgmemory.store.base import refuse_held
from pgmemory.store.item_arguments import Namespace, checked_namespace, checked_text, conditions, page, place, range_of
from pgmemory.store.item_paths import Index, json_paths
from pgmemory.store.meaning import MeaningOperations

SearchBy = Literal["words", "meaning"]

# untranslatable_character, invalid_text_representation, numeric_value_out_of_range
_NO_JSON_TEXT = ("22P05", "22P02", "22003")


class Put(NamedTuple):
    """An item to put: another one under this key is replaced.

    Attributes:
        namespace: As `Item.namespace`.
        key: As `Item.key`.
        value: A JSON object; None to delete the item.
        time_to_live: As for `ItemStore.put`.
        index: As for `ItemStore.put`.
    """

    namespace: Namespace
    key: str
    value: Mapping[str, Any] | None
    time_to_live: timedelta | None = None
    index: Index = None  # type: ignore[assignment]  # a tuple has a method of this name


class ItemOperations(MeaningOperations):
    """What leads to items."""

    def items(
        self, user_id: str | int | uuid.UUID | None = None, *, session_id: str | int | uuid.UUID | None = None
    ) -> ItemStore:
        """Return the items of a user, of one session, or of nobody in particular, which the tenant shares. No I/O.

        Args:
            user_id: The user; None and '' for none.
            session_id: The session: these items go when its conversation is pruned or erased; where it has none, when
                it is erased or nothing was put into it for as long as `prune` is told. None for what is to be known in
                every session.
        """
        user = "" if user_id is None or user_id == "" else indexed_id("user_id", user_id)
        if session_id is None:
            return ItemStore(self, ConversationKey(self.tenant_id, user, ""))
        return ItemStore(self, self.key(session_id, user))


class ItemStore:
    """JSON objects by namespace and key, of one owner: see `ConversationStore.items`.

    Methods, their arguments and what they mean are those of LangGraph's ``BaseStore`` as far as it goes; times to live
    are spans. Each method is one round trip and one transaction unless it says otherwise, and may be called from any
    thread. Values are stored in clear text, also where the store has a keyring, and do not pass its `redact`.

    Raises:
        ConfigurationError: By every method, for a namespace or a key that cannot be kept: labels are non-empty texts
            without periods, and with the key at most 1000 bytes long, each label counting 8 more.
    """

    def __init__(self, store: MeaningOperations, owner: ConversationKey) -> None:
        self._store = store
        self._owner = owner
        self._own = {"tenant_id": owner.tenant_id, "owner_id": str(owner.id)}

    def __repr__(self) -> str:
        session = f", session_id={self._owner.session_id!r}" if self._owner.session_id else ""
        return f"ItemStore(user_id={self._owner.user_id!r}{session})"

    @property
    def store(self) -> MeaningOperations:
        """The store that these items are in."""
        return self._store

    def put(
        self,
        namespace: Namespace,
        key: str,
        value: Mapping[str, Any],
        *,
        time_to_live: timedelta | None = None,
        index: Index = None,
    ) -> None:
        """Put an item, or replace the one of this key.

        Args:
            namespace: Where, from the outermost label to the innermost; at least one.
            key: Its name there.
            value: A JSON object. It comes back equal; values that JSON lacks are stored as `pgmemory.serialization`
                says.
            time_to_live: How long after it was last put or read it expires; None for never. An expired item is not
                returned any more, and deleted by `prune`.
            index: Where in the value the texts are by whose meaning it is found: paths such as ``"title"``,
                ``"author.name"``, ``"chapters[*].text"``, ``"tags[0]"``, ``"tags[-1]"``, or ``"$"`` for the whole value
                as one text. Each text has a vector of its own, of an item the first 100; what is no text is taken as
                its JSON. A path may lead nowhere. None for the whole value, False for none. Kept, and without effect,
                where the schema has no vectors.

        Raises:
            ConfigurationError: `index` is none of these.
            MessageNotStorableError: A value has no JSON form, or a text holds NUL or half a surrogate pair.
        """
        self.put_all([Put(namespace, key, value, time_to_live, index)])

    def put_all(self, puts: Iterable[Put]) -> None:
        """Put and delete several items in one transaction; of two for one key the last counts.

        One round trip if there is none to delete. The vectors of texts are made afterwards, as those of messages are:
        `ConversationStore.index_messages` waits for them.

        Raises:
            MessageNotStorableError: As for `put`; nothing was changed.
            ConversationHeldError: As for `delete`; nothing was changed.
        """
        given = list(puts)
        for put in given:
            place(put.namespace, put.key)
        last = {(tuple(put.namespace), put.key): put for put in given}
        stored = self._put_parameters([one for one in last.values() if one.value is not None])
        gone = self._keys(place for place, one in last.items() if one.value is None)

        def run(execute: Execute) -> None:
            _deleted(execute(items.DELETE, gone))
            execute(items.PUT, stored)

        with _storable("value"):
            if any(one.value is None for one in last.values()):
                self._store._transact("put_items", run)
            elif last:
                self._store._execute("put_items", items.PUT, stored)
        self._store._embed_soon(meaning.ITEMS)

    def get(self, namespace: Namespace, key: str, *, refresh_time_to_live: bool = True) -> Item | None:
        """Return an item, or None.

        Args:
            namespace: Where it is.
            key: Its name there.
            refresh_time_to_live: Let its time to live begin anew.
        """
        return self.get_all([(namespace, key, refresh_time_to_live)])[0]

    def get_all(self, keys: Sequence[tuple[Namespace, str, bool]]) -> list[Item | None]:
        """Return several items, each asked for as `get` does, in this order.

        Args:
            keys: Of each, the namespace, the key, and whether its time to live begins anew.
        """
        if not keys:
            return []
        for namespace, key, _ in keys:
            place(namespace, key)
        asked = {(tuple(namespace), key): refresh for namespace, key, refresh in keys}
        given = [place(namespace, key) | {"refresh": refresh} for (namespace, key), refresh in asked.items()]
        parameters = {"keys": json.dumps(given), "count": len(given)}
        rows = self._store._execute("get_items", items.GET, self._own | parameters)
        found = {(item.namespace, item.key): item for item in map(_to_item, rows)}
        return [found.get((tuple(namespace), key)) for namespace, key, _ in keys]

    def delete(self, namespace: Namespace, key: str) -> bool:
        """Delete an item; return whether there was one.

        Raises:
            ConversationHeldError: It is of a session whose conversation is held.
        """
        return _deleted(self._store._execute("delete_items", items.DELETE, self._keys([(namespace, key)]))) > 0

    def clear(self, namespace_prefix: Namespace = ()) -> int:
        """Delete all items below a prefix, that of all namespaces being empty; return how many there were.

        Raises:
            ConversationHeldError: They are of a session whose conversation is held.
        """
        return _deleted(self._store._execute("clear_items", items.CLEAR, self._own | range_of(namespace_prefix)))

    def search(
        self,
        namespace_prefix: Namespace = (),
        *,
        query: str | None = None,
        by: SearchBy | None = None,
        filter: Mapping[str, Any] | None = None,
        limit: int = 10,
        offset: int = 0,
        refresh_time_to_live: bool = True,
    ) -> list[Item]:
        """Return items below a prefix: with a query the best first, else the last put first.

        Args:
            namespace_prefix: What their namespaces begin with; empty for all.
            query: What to look for. By words, only items whose texts share a word with it are found; those with more
                of them, in shorter values, come first. Words are compared as they are written, upper and lower case
                alike. The words of a value of more than 250,000 bytes are not found. By meaning, all items are found,
                the one first of which a text has the greatest cosine similarity; those come last, without a score,
                that have no vectors, or none yet. The embedder is asked before the round trip.
            by: Go by ``"words"`` or by ``"meaning"``; None for meaning where the store has embeddings and the schema
                vectors of the same model, else for words. When the embedder fails items are found by words, and a
                warning is logged.
            filter: Only items whose value has all of this: a value for each key, or a dict of operators ``$eq``,
                ``$ne``, ``$gt``, ``$gte``, ``$lt``, ``$lte``, or a dict of the same form for an object in it. Numbers
                and texts can be ordered, by code points; a key that is not there is null.
            limit: At most this many.
            offset: Leave out this many first.
            refresh_time_to_live: Let the times to live of those that are returned begin anew.

        Raises:
            ConfigurationError: An argument is wrong, or `by` is meaning and the store has no embeddings.
            SchemaError: `by` is meaning, and `setup` was never called with ``search`` by a store with the same
                embeddings.
        """
        if by is not None and by not in get_args(SearchBy):
            raise ConfigurationError(f"by must be one of {get_args(SearchBy)} or None, not {by!r}")
        parameters = {
            **range_of(namespace_prefix),
            **page(limit, offset),
            "query": None if query is None else checked_text("query", query),
            "conditions": _json("filter", list(conditions((), filter))) if filter else "[]",
            "refresh": bool(refresh_time_to_live),
        }
        statement = items.SEARCH if refresh_time_to_live else items.LOOK
        asked = None
        if query is not None and by != "words":
            asked = self._store._vector_of(query, is_needed=by is not None)
        if asked is not None:
            vector, extension_schema = asked
            parameters |= {"embedding": vector, "model": self._store.embedder and self._store.embedder.name}
            statement = items.SEARCH_BY_MEANING if refresh_time_to_live else items.LOOK_BY_MEANING
            statement = meaning.in_extension(statement, extension_schema)
        with _storable("filter"):
            rows = self._store._execute("search_items", statement, self._own | parameters)
        return [_to_item(row) for row in rows]

    def list_namespaces(
        self,
        *,
        prefix: Namespace = (),
        suffix: Namespace = (),
        max_depth: int | None = None,
        limit: int = 100,
        offset: int = 0,
    ) -> list[tuple[str, ...]]:
        """Return the namespaces that hold items, sorted by code points.

        Args:
            prefix: Only those that begin so; ``*`` stands for any label.
            suffix: Only those that end so; ``*`` stands for any label.
            max_depth: Cut them after so many labels, and return what becomes equal once.
            limit: At most this many.
            offset: Leave out this many first.
        """
        if max_depth is not None and (type(max_depth) is not int or not 0 < max_depth < AFTER_ALL):
            raise ConfigurationError(f"max_depth must be a whole number from 1 or None, not {max_depth!r}")
        begin, end = checked_namespace("prefix", prefix or ()), checked_namespace("suffix", suffix or ())
        places = [*enumerate(begin, 1), *enumerate(end, -len(end))]
        known = [(place, label) for place, label in places if label != "*"]
        parameters = {
            **range_of(begin[: begin.index("*")] if "*" in begin else begin),
            **page(limit, offset),
            "min_depth": max(len(begin), len(end)),
            "max_depth": max_depth or AFTER_ALL,
            "places": [place for place, _ in known],
            "labels": [label for _, label in known],
        }
        rows = self._store._execute("list_namespaces", items.LIST_NAMESPACES, self._own | parameters)
        return [tuple(labels) for (labels,) in rows]

    def _put_parameters(self, puts: Iterable[Put]) -> dict[str, Any]:
        rows = []
        for put in puts:
            if not put.namespace:
                raise ConfigurationError("namespace must not be empty")
            if not isinstance(put.value, Mapping):
                raise ConfigurationError(f"value must be a dict, not {type(put.value).__name__}")
            span = check_span("time_to_live", put.time_to_live)
            microseconds = None if span is None else f"{span // timedelta(microseconds=1)} microseconds"
            columns = {"time_to_live": microseconds, "meaning_paths": json_paths(put.index)}
            rows.append((place(put.namespace, put.key) | columns, _json("value", dict(put.value))))
        rows.sort(key=lambda row: (row[0]["namespace"], row[0]["key"]))
        # The value's text as it is: reading and writing it once more may change it.
        texts = [f'{json.dumps(columns)[:-1]}, "value": {value}}}' for columns, value in rows]
        names = {"user_id": self._owner.user_id, "session_id": self._owner.session_id}
        return self._own | names | {"puts": f"[{', '.join(texts)}]"}

    def _keys(self, places: Iterable[tuple[Namespace, str]]) -> dict[str, Any]:
        given = [place(namespace, key) for namespace, key in places]
        return self._own | {"keys": json.dumps(given), "count": len(given)}


def _deleted(rows: list[tuple[Any, ...]]) -> int:
    """Return how many items were deleted, or raise ConversationHeldError."""
    ((count, session_id, reason),) = rows
    refuse_held([] if session_id is None else [(session_id, reason)])
    return int(count)


def _to_item(row: tuple[Any, ...]) -> Item:
    namespace, key, value, *rest = row
    return Item(tuple(namespace), key, json.loads(value), *rest)


def _json(what: str, value: Any) -> str:
    from pgmemory.serialization import to_json_text  # imports LangChain, which looking at a store does not need

    return to_json_text(value, path=what)


@contextmanager
def _storable(what: str) -> Iterator[None]:
    """Say of what PostgreSQL cannot take as JSON where it sits."""
    try:
        yield
    except StoreError as error:
        if error.sqlstate in _NO_JSON_TEXT:
            reason = "it holds NUL, half a surrogate pair, or a number out of range"
            raise MessageNotStorableError(what, reason) from error
        raise
