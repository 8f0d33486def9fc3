"""Items as LangGraph's long-term store: the same code works with its stores and with this one.

Needs the extra ``langgraph``; nothing else of pgmemory imports this.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from itertools import zip_longest
from typing import Any

try:
    from langgraph.store.base import (
        BaseStore,
        GetOp,
        IndexConfig,
        ListNamespacesOp,
        Op,
        PutOp,
        Result,
        SearchItem,
        SearchOp,
        TTLConfig,
    )
    from langgraph.store.base import Item as GraphItem
except ImportError as error:
    raise ImportError(
        f"PostgresItemStore needs LangGraph, which does not work here ({error}): "
        'pip install "langchain-pgmemory[langgraph]"'
    ) from error

from pgmemory.errors import ConfigurationError
from pgmemory.models import Item
from pgmemory.store.items import ItemStore, Put

_SHARED_FIELDS = ("namespace", "key", "value", "created_at", "updated_at")


class PostgresItemStore(BaseStore):
    """LangGraph's ``BaseStore`` over the items of a user, a session or a tenant: for ``store=`` of a graph or an agent.

    As LangGraph's own, with these differences. Expired items are never returned, and `ConversationStore.prune` deletes
    them. A `query` goes by meaning where the `ConversationStore` has embeddings and was set up with ``search``, else by
    words: only items that share a word with it are found. Vectors are made after a put, soon, but not within it, and
    meanwhile its item is among those without a score. Paths of `index` are those that ``PutOp`` documents; others are
    refused, and a field that is asked of a list is looked for in each of its elements. In a batch what reads comes
    before what writes; the writes are one transaction.

    Args:
        items: Whose: see `ConversationStore.items`.
        index: LangGraph's configuration of the index: its ``fields``, for what is put without an `index` of its own.
            The embeddings are those of the `ConversationStore`.
        ttl: LangGraph's configuration of times to live, in minutes: its ``default_ttl`` and ``refresh_on_read``.
    """

    supports_ttl = True

    def __init__(
        self, items: ItemStore, *, index: IndexConfig | None = None, ttl: TTLConfig | None = None
    ) -> None:
        if not isinstance(items, ItemStore):
            raise ConfigurationError(f"items must be an ItemStore, as store.items() gives, not {type(items).__name__}")
        if index is not None and index.keys() - {"fields"}:
            raise ConfigurationError(
                f"index can say fields, not {sorted(index.keys() - {'fields'})}: embeddings are given to the "
                "ConversationStore(embeddings=…), which knows their dimensions"
            )
        self.items = items
        self.ttl_config = ttl
        self._fields = None if index is None else index.get("fields")

    def batch(self, ops: Iterable[Op]) -> list[Result]:
        """Run operations; a round trip for all items to get, one for all to put, and one for each other operation."""
        given = list(ops)
        results: list[Result] = [None] * len(given)
        gets = [(place, op) for place, op in enumerate(given) if isinstance(op, GetOp)]
        found = self.items.get_all([(op.namespace, op.key, op.refresh_ttl) for _, op in gets])
        for (place, _), item in zip(gets, found, strict=True):
            results[place] = None if item is None else GraphItem(**_shared(item))
        for place, op in enumerate(given):
            if isinstance(op, SearchOp):
                results[place] = self._search(op)
            elif isinstance(op, ListNamespacesOp):
                results[place] = self._list_namespaces(op)
            elif not isinstance(op, (GetOp, PutOp)):
                raise ConfigurationError(f"there is no operation {type(op).__name__}")
        self.items.put_all(
            Put(
                op.namespace,
                op.key,
                op.value,
                None if op.ttl is None else timedelta(minutes=op.ttl),
                self._fields if op.index is None else op.index,
            )
            for op in given
            if isinstance(op, PutOp)
        )
        return results

    async def abatch(self, ops: Iterable[Op]) -> list[Result]:
        """Run operations as `batch` does, in one of the store's own threads."""
        return await self.items.store.run_in_worker(self.batch, list(ops))

    def _search(self, op: SearchOp) -> list[SearchItem]:
        found = self.items.search(
            op.namespace_prefix,
            query=op.query or None,
            filter=op.filter,
            limit=op.limit,
            offset=op.offset,
            refresh_time_to_live=op.refresh_ttl,
        )
        return [SearchItem(**_shared(item), score=item.score) for item in found]

    def _list_namespaces(self, op: ListNamespacesOp) -> list[tuple[str, ...]]:
        prefixes: list[Sequence[str]] = []
        suffixes: list[Sequence[str]] = []
        for match_type, path in op.match_conditions or ():
            if match_type not in ("prefix", "suffix"):
                raise ConfigurationError(f"namespaces can be asked for by prefix or suffix, not by {match_type!r}")
            (prefixes if match_type == "prefix" else suffixes).append(path)
        prefix = _together(prefixes)
        suffix = _together([path[::-1] for path in suffixes])
        if prefix is None or suffix is None:
            return []
        return self.items.list_namespaces(
            prefix=prefix,
            suffix=suffix[::-1],
            max_depth=op.max_depth,
            limit=op.limit,
            offset=op.offset,
        )


def _together(prefixes: Iterable[Sequence[str]]) -> list[str] | None:
    """Return the prefix of what begins with each of these, `*` being any label; None if nothing can."""
    together = []
    for labels in zip_longest(*prefixes, fillvalue="*"):
        asked = set(labels) - {"*"}
        if len(asked) > 1:
            return None
        together.append(asked.pop() if asked else "*")
    return together


def _shared(item: Item) -> dict[str, Any]:
    return {name: getattr(item, name) for name in _SHARED_FIELDS}
