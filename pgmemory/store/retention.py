"""Keeping and forgetting conversations: holds, times to live, pruning, erasing."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from pgmemory.models import BEFORE_AGENT, Erased, ErasedConversation, Pruned, readable
from pgmemory.names import check_span, indexed_id
from pgmemory.pool import Execute
from pgmemory.queries import retention
from pgmemory.rows import names_of
from pgmemory.store.base import FIRST_ID, StoreBase

# One transaction deletes at most so many conversations and, but for a single longer one, about so many messages: what
# it locks is locked for a fraction of a second.
_BATCH_CONVERSATIONS = 100
_BATCH_MESSAGES = 5_000
_BATCH_ITEMS = 1_000
# A conversation of millions of messages is deleted in one statement.
_STATEMENT_SECONDS = 3600.0
# Meanwhile a fork, or a new conversation, may have come whose id was passed already.
_PASSES = 5


class RetentionOperations(StoreBase):
    """What decides how long conversations are kept. They take effect for agents' logs beside a conversation too."""

    def hold(
        self,
        session_id: str | int | uuid.UUID,
        *,
        user_id: str | int | uuid.UUID | None = None,
        reason: str | None = None,
    ) -> list[str]:
        """Hold a conversation: nothing of it is deleted or changed until it is released; new turns are still stored.

        While it is held `prune` passes over it, `max_messages` does not shorten it, and clearing, erasing, deleting
        and replacing raise ConversationHeldError or report it. Metadata may still be set. Holding it again replaces the
        reason.

        Args:
            session_id: The conversation. The logs that agents keep beside it are held with it. One that an agent begins
                later is neither pruned nor erased; hold the conversation again to keep it from the rest too.
            user_id: Its user.
            reason: Why, for those who meet the hold.

        Returns:
            The session ids that are held now; empty if there is no such conversation.
        """
        parameters = self._family(session_id, user_id) | {"reason": None if reason is None else readable(reason)}
        return self._session_ids("hold", retention.HOLD, parameters)

    def release(self, session_id: str | int | uuid.UUID, *, user_id: str | int | uuid.UUID | None = None) -> list[str]:
        """End what `hold` began; return the session ids that were held."""
        return self._session_ids("release", retention.RELEASE, self._family(session_id, user_id))

    def set_time_to_live(
        self,
        session_id: str | int | uuid.UUID,
        time_to_live: timedelta | None,
        *,
        user_id: str | int | uuid.UUID | None = None,
    ) -> list[str]:
        """Set how long after its last turn `prune` removes a conversation.

        Args:
            session_id: The conversation, and the logs that agents keep beside it.
            time_to_live: The time, counted from its last turn on; None for the store's own, from the next turn on.
            user_id: Its user.

        Returns:
            The session ids that have it now; empty if there is no such conversation.
        """
        span = check_span("time_to_live", time_to_live)
        parameters = self._family(session_id, user_id) | {"time_to_live": span}
        return self._session_ids("set_time_to_live", retention.SET_TIME_TO_LIVE, parameters)

    def prune(
        self,
        *,
        older_than: timedelta | None = None,
        all_tenants: bool = False,
        dry_run: bool = False,
        on_batch: Callable[[Pruned], object] | None = None,
    ) -> Pruned:
        """Delete idle conversations, those whose time to live has passed since their last turn, or `older_than` has,
        with the items of their sessions; those of sessions without a conversation into which nothing was put for
        `older_than`; and all items that have expired.

        In batches, each a transaction of its own that takes a fraction of a second: a call that ends early has deleted
        whole conversations, and another one goes on. A conversation that is in use is not waited for, and one that
        gets a turn meanwhile is not idle any more; a turn that comes while its conversation is being deleted waits for
        that and begins it anew. Held conversations are kept.

        Args:
            older_than: Delete every conversation without a turn for so long; None to go by times to live alone.
            all_tenants: Prune the conversations of every tenant, not only the store's.
            dry_run: Delete nothing, only count.
            on_batch: Called after each batch with what was pruned so far.

        Returns:
            What was deleted, or would be.
        """
        parameters = {
            "tenant_id": self._scope(all_tenants),
            "older_than": check_span("older_than", older_than),
            "before_agent": BEFORE_AGENT,
            "after_tenant": "",
            "after": FIRST_ID,
        }
        conversations, held, messages, summaries = self._transact(
            "prune", lambda execute: execute(retention.COUNT_IDLE, parameters)[0], seconds=_STATEMENT_SECONDS
        )
        if dry_run:
            ((items,),) = self._transact(
                "prune", lambda execute: execute(retention.COUNT_ITEMS, parameters), seconds=_STATEMENT_SECONDS
            )
            return Pruned(conversations, messages, summaries, held, items)
        pruned = Pruned(0, 0, 0, held)

        def count(batch: Sequence[ErasedConversation], items: int = 0) -> None:
            nonlocal pruned
            pruned = Pruned(
                pruned.conversations + len(batch),
                pruned.messages + sum(gone.messages for gone in batch),
                pruned.summaries + sum(gone.summaries for gone in batch),
                held,
                pruned.items + sum(gone.items for gone in batch) + items,
            )
            if on_batch is not None:
                on_batch(pruned)

        def delete_items(statement: str, limit: int) -> list[tuple[Any, ...]]:
            batch = parameters | {"limit": limit}
            return self._transact("prune", lambda execute: execute(statement, batch), seconds=_STATEMENT_SECONDS)

        self._delete_batches("prune", retention.LOCK_IDLE, parameters, count)
        while expired := delete_items(retention.DELETE_EXPIRED_ITEMS, _BATCH_ITEMS):
            count([], len(expired))
        while sessions := delete_items(retention.DELETE_ITEMS_OF_IDLE_SESSIONS, _BATCH_CONVERSATIONS):
            parameters["after_tenant"], parameters["after"], _ = sessions[-1]
            count([], sum(items for _, _, items in sessions))
        return pruned

    def erase_conversation(
        self,
        session_id: str | int | uuid.UUID,
        *,
        user_id: str | int | uuid.UUID | None = None,
        on_batch: Callable[[Sequence[ErasedConversation]], object] | None = None,
    ) -> Erased:
        """Delete a conversation, the logs that agents keep beside it and its items, without a trace in the database.

        Unlike `clear` it also deletes the conversation itself: its names, metadata and numbering.

        Args:
            session_id: The conversation.
            user_id: Its user.
            on_batch: Called after each transaction with what it erased, for a receipt that is kept whatever comes.

        Returns:
            A receipt. Held conversations are kept, and named in it.
        """
        parameters = self._family(session_id, user_id)
        return self._erase(
            parameters,
            (retention.LOCK_FAMILY, retention.DELETE_ITEMS_OF_FAMILY, retention.HELD_OF_FAMILY),
            on_batch,
            user_id=parameters["user_id"],
            session_id=parameters["session_id"],
        )

    def erase_user(
        self,
        user_id: str | int | uuid.UUID,
        *,
        on_batch: Callable[[Sequence[ErasedConversation]], object] | None = None,
    ) -> Erased:
        """Delete all conversations and items of a user of this tenant, without a trace in the database.

        In batches, each a transaction of its own: if it ends early, call it again.

        Args:
            user_id: The user.
            on_batch: As of `erase_conversation`.

        Returns:
            A receipt. Held conversations are kept with the items of their sessions, and named in it.

        Raises:
            ConfigurationError: No user is named.
        """
        user = indexed_id("user_id", user_id)
        parameters = {"tenant_id": self.tenant_id, "user_id": user, "before_agent": BEFORE_AGENT}
        statements = (retention.LOCK_USER, retention.DELETE_ITEMS_OF_USER, retention.HELD_OF_USER)
        return self._erase(parameters, statements, on_batch, user_id=user)

    def _erase(
        self,
        parameters: dict[str, Any],
        statements: tuple[str, str, str],
        on_batch: Callable[[Sequence[ErasedConversation]], object] | None,
        *,
        user_id: str,
        session_id: str | None = None,
    ) -> Erased:
        lock, delete_items, held = statements
        erased: list[ErasedConversation] = []

        def note(batch: list[ErasedConversation]) -> None:
            erased.extend(batch)
            if on_batch is not None:
                on_batch(batch)

        for _ in range(_PASSES):
            before = len(erased)
            self._delete_batches("erase", lock, parameters, note)
            if len(erased) == before:
                break
        items = self._transact("erase", lambda execute: execute(delete_items, parameters), seconds=_STATEMENT_SECONDS)
        kept = self._session_ids("erase", held, parameters)
        return Erased(self.tenant_id, user_id, session_id, tuple(erased), tuple(kept), len(items))

    def _delete_batches(
        self,
        name: str,
        lock: str,
        parameters: dict[str, Any],
        on_batch: Callable[[list[ErasedConversation]], object],
    ) -> None:
        """Delete the conversations that a statement locks, batch after batch."""
        after = FIRST_ID

        def delete_batch(execute: Execute) -> tuple[str | None, list[ErasedConversation]]:
            locked = execute(lock, parameters | {"after": after, "limit": _BATCH_CONVERSATIONS})
            ids: list[str] = []
            messages = 0
            for id, most_messages in locked:
                if ids and messages + most_messages > _BATCH_MESSAGES:
                    break
                ids.append(str(id))
                messages += most_messages
            if not ids:
                return None, []
            gone = execute(retention.DELETE_CONVERSATIONS, {"ids": ids})
            return ids[-1], [ErasedConversation(*row) for row in gone]

        while True:
            last, batch = self._transact(name, delete_batch, seconds=_STATEMENT_SECONDS)
            if last is None:
                return
            after = last
            on_batch(batch)

    def _family(self, session_id: Any, user_id: Any) -> dict[str, Any]:
        return names_of(self.key(session_id, user_id)) | {"before_agent": BEFORE_AGENT}

    def _session_ids(self, name: str, statement: str, parameters: dict[str, Any]) -> list[str]:
        return sorted(session_id for (session_id,) in self._execute(name, statement, parameters))
