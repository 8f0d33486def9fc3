"""Looking at what is stored, for people: a log page by page, the newest messages and new ones, searching, counting."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import date, datetime, timedelta
from typing import Any

from pgmemory.errors import ConfigurationError
from pgmemory.findings import DayOfGrowth, FoundMessage, Hit, SearchResult, Statistics, TableSize
from pgmemory.models import ConversationKey, StoredMessage
from pgmemory.names import text_id
from pgmemory.pool import Execute
from pgmemory.queries import inspection
from pgmemory.store.conversations import WHOLE_STORE_SECONDS
from pgmemory.store.encryption import EncryptionOperations

_CONTEXT_CHARACTERS = 60  # beside what was found, on each side

# A turn becomes visible later than the times it bears, by as long as its writer waited for a lock and for the commit.
# The conversations that were active within `_KNOWN_FOR` are remembered. Any other one was last written to so long ago
# that `_LATE_BY` parts, by their times, the messages that were there from those that are new.
_KNOWN_FOR = timedelta(minutes=4)
_LATE_BY = timedelta(minutes=2)


class InspectionOperations(EncryptionOperations):
    """What operators look at."""

    def read_page(self, key: ConversationKey, *, after: int = -1, limit: int = 1000) -> list[StoredMessage]:
        """Return at most `limit` messages of a conversation behind message `after`, oldest first."""
        parameters = {"id": str(self._own(key).id), "after": after, "limit": limit}
        return self._to_messages(key, self._execute("read_page", inspection.READ_PAGE, parameters))

    def read_pages(self, key: ConversationKey, *, after: int = -1) -> Iterator[StoredMessage]:
        """Yield the messages of a conversation behind message `after`, oldest first; one round trip for each page."""
        while page := self.read_page(key, after=after):
            yield from page
            after = _index(page[-1])

    def follow(self, key: ConversationKey | None = None, *, user_id: Any = None) -> Following:
        """Return what reads the newest messages, and new ones as they come. No I/O.

        Args:
            key: Of this conversation; None for all of the tenant's.
            user_id: Of this user's conversations ('' for those without a user); None for everybody's.
        """
        return Following(self, key, user_id)

    def search(
        self,
        text: str,
        *,
        user_id: str | int | uuid.UUID | None = None,
        all_tenants: bool = False,
        limit: int = 20,
    ) -> SearchResult:
        """Return the newest messages whose content holds a text.

        Upper and lower case count as the same, as far as the database knows them: in every script with PostgreSQL 18
        or one that has ICU, else as the database's own locale has it. Otherwise characters are compared as they are:
        ``ß`` is not ``ss``, nor is an accent that is a character of its own the same as the accented letter. Encrypted
        conversations are left out, and counted. Reads the content of every message, which may take minutes.

        Args:
            text: Any text but the empty one; nothing in it is a pattern.
            user_id: Search this user's conversations ('' for those without a user); None for everybody's.
            all_tenants: Search those of every tenant, not only the store's.
            limit: Return at most this many.
        """
        if type(limit) is not int or not 0 <= limit < 2**63:
            raise ConfigurationError(f"limit must be a whole number from 0, not {limit!r}")
        parameters = {
            "text": text_id("text", text),
            "tenant_id": self._scope(all_tenants),
            "user_id": None if user_id is None else self.key("any", user_id).user_id,
            "limit": limit,
            "context": _CONTEXT_CHARACTERS,
        }

        def search(execute: Execute) -> SearchResult:
            ((searched, encrypted),) = execute(inspection.COUNT_SEARCHED, parameters)
            collations = execute(inspection.UNICODE_COLLATION, {})
            collation = collations[0][0] if collations else None
            rows = execute(inspection.search(collation, whole_tables=user_id is None), parameters)
            return SearchResult(tuple(Hit(*row) for row in rows), searched, encrypted)

        return self._transact("search", search, seconds=WHOLE_STORE_SECONDS)

    def statistics(self, *, all_tenants: bool = False, days: int = 14) -> Statistics:
        """Count what is stored. Reads every message's row, which may take minutes.

        Args:
            all_tenants: Count what belongs to any tenant, not only to the store's.
            days: How many days of growth to return, the current one, in UTC, included.
        """
        if type(days) is not int or not 1 <= days <= 3660:
            raise ConfigurationError(f"days must be a whole number from 1 to 3660, not {days!r}")
        parameters = {"tenant_id": self._scope(all_tenants), "user_id": None}

        def count(execute: Execute) -> Statistics:
            ((conversations, users, held, expired, encrypted, today),) = execute(
                inspection.COUNT_CONVERSATIONS, parameters
            )
            shown = [today - timedelta(days=back) for back in reversed(range(days))]
            begun: dict[date, int] = dict(
                execute(inspection.COUNT_NEW_CONVERSATIONS, parameters | {"since": shown[0]})
            )
            by_day = execute(inspection.COUNT_MESSAGES, parameters)
            messages = {day: count for day, count, *_ in by_day}
            sizes = execute(inspection.TABLE_SIZES, {"schema": self.schema})
            return Statistics(
                conversations=conversations,
                users=users,
                messages=sum(messages.values()),
                turns=sum(row[2] for row in by_day),
                tokens=sum(row[3] for row in by_day),
                uncounted_messages=sum(row[4] for row in by_day),
                held=held,
                expired=expired,
                encrypted=encrypted,
                days=tuple(DayOfGrowth(day, begun.get(day, 0), messages.get(day, 0)) for day in shown),
                tables=tuple(TableSize(*row) for row in sizes),
            )

        return self._transact("statistics", count, seconds=WHOLE_STORE_SECONDS)


class Following:
    """The newest messages of one or several conversations, and after them new ones, each once.

    See `InspectionOperations.follow`. Not for several threads at once.
    """

    def __init__(self, store: InspectionOperations, key: ConversationKey | None, user_id: Any) -> None:
        self._store = store
        self._which = {
            "id": None if key is None else str(store._own(key).id),
            "tenant_id": store.tenant_id,
            "user_id": None if user_id is None else store.key("any", user_id).user_id,
            "known_for": _KNOWN_FOR,
        }
        # The number that the next message gets of each conversation that was active of late, as of this time.
        self._next: dict[ConversationKey, int] = {}
        self._as_of: datetime | None = None

    def newest(self, limit: int) -> list[FoundMessage]:
        """Return the newest messages, oldest first; `new` goes on from there. Two round trips."""
        self._next, self._as_of = {}, None
        self.new()
        rows = self._store._execute("newest", inspection.READ_NEWEST, self._which | {"limit": limit})
        found = []
        for row in reversed(rows):
            key = ConversationKey(*row[:3])
            (message,) = self._store._to_messages(key, [row[3:]])
            found.append(FoundMessage(key, message))
            self._next[key] = max(self._next.get(key, 0), _index(message) + 1)
        return found

    def new(self) -> list[FoundMessage]:
        """Return the messages that came since the last call, in the order of their times.

        One round trip, and two or three more for each conversation with new ones. The first call returns nothing: from
        then on everything is new. After an error another call goes on where the last one that succeeded ended.
        """
        rows = self._store._execute("follow", inspection.READ_ACTIVE, self._which | {"as_of": self._as_of})
        active = {ConversationKey(*names): next_index for *names, next_index, _ in rows if next_index is not None}
        found: list[FoundMessage] = []
        if self._as_of is not None:
            for key, next_index in active.items():
                messages = self._read(key, self._next.get(key), next_index, self._as_of)
                if messages:
                    active[key] = _index(messages[-1]) + 1
                    found += [FoundMessage(key, message) for message in messages]
        self._next, self._as_of = active, rows[0][-1]
        return sorted(found, key=lambda one: (one.message.created_at, one.message.message_index))

    def _read(
        self, key: ConversationKey, start: int | None, next_index: int, as_of: datetime
    ) -> list[StoredMessage]:
        """Return the messages from number `start` on, or those that cannot have been there as of a time."""
        if start is None:
            parameters = {"id": str(key.id), "time": as_of - _LATE_BY}
            rows = self._store._execute("follow", inspection.INDEX_BEFORE, parameters)
            start = rows[0][0] + 1 if rows else 0
        elif next_index < start:
            start = 0  # it was erased, and begun anew
        return list(self._store.read_pages(key, after=start - 1)) if start < next_index else []


def _index(message: StoredMessage) -> int:
    assert message.message_index is not None  # it is stored
    return message.message_index
