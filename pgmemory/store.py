"""The conversation store: appends to logs, reads windows of them, keeps summaries, clears. Records in, records out.

The store knows rows and transactions. It knows neither LangChain nor what a view does with a window. Every method is
one round trip and one transaction unless it says otherwise, and may be called from any thread.
"""

from __future__ import annotations

import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from pgmemory import queries, schema
from pgmemory.embedded import LocalServer
from pgmemory.errors import ConfigurationError, MessageNotStorableError, SchemaError
from pgmemory.models import (
    AFTER_ALL,
    BEFORE_AGENT,
    ConversationKey,
    ConversationRecord,
    Operation,
    PoolStats,
    StoredMessage,
    Window,
    readable,
)
from pgmemory.names import indexed_id, schema_name, text_id
from pgmemory.pool import Database, StoreError
from pgmemory.rows import append_parameters, names_of, to_conversation, to_message, to_window
from pgmemory.workers import Workers

_logger = logging.getLogger(__name__)

# Its own limit ends a statement and leaves the connection in order; so it comes before the client's.
_SHARE_OF_THE_SERVER = 0.9

P = ParamSpec("P")
T = TypeVar("T")

_UNDEFINED = ("42P01", "3F000", "42703")  # undefined_table, invalid_schema_name, undefined_column
_NO_JSON_TEXT = ("22P05", "22P02")  # untranslatable_character, invalid_text_representation


class ConversationStore:
    """All conversations of one tenant, in one PostgreSQL schema.

    Make one per process and share it: every history and memory may use it at once, from any thread. Building it does
    no I/O; it connects when first used. Methods that take a `key` are what histories and memories are made of; those
    that take a session id look things up for applications.

    Args:
        source: A DSN (``postgresql://…``, SQLAlchemy's ``postgresql+psycopg2://…`` or libpq's ``key=value``), None for
            ``$DATABASE_URL``, or a psycopg2 pool or an SQLAlchemy engine that the application already has, which is
            used and never closed.
        schema: Name of the PostgreSQL schema that holds the tables; any name.
        tenant_id: Tenant whose conversations these are; another tenant's are out of reach. None for no tenants.
        min_connections: Connections that are kept open once they were needed.
        max_connections: Connections that are never passed.
        timeout_seconds: How long to wait for a free connection before PoolTimeoutError.
        query_timeout_seconds: How long one round trip may take. The server is told to give up shortly before; if it
            does not answer at all, the connection is thrown away. Either way the operation is tried again.
        retry_seconds: For how long, from its first failure on, an operation is tried again that a lost connection, an
            unreachable or demoted server, or a conflict has stopped; 0 for never.
        on_operation: Called with an `Operation` after each, in the thread that asked for it: for metrics and traces.
        application_name: What PostgreSQL shows in ``pg_stat_activity``.

    Raises:
        ConfigurationError: An argument is wrong, or neither a source nor ``$DATABASE_URL`` is given.
    """

    def __init__(
        self,
        source: Any = None,
        *,
        schema: str = "pgmemory",
        tenant_id: str | int | uuid.UUID | None = None,
        min_connections: int = 1,
        max_connections: int = 10,
        timeout_seconds: float = 30.0,
        query_timeout_seconds: float = 15.0,
        retry_seconds: float = 10.0,
        on_operation: Callable[[Operation], object] | None = None,
        application_name: str = "pgmemory",
    ) -> None:
        self.schema = schema_name(schema)
        self.tenant_id = "" if tenant_id is None else indexed_id("tenant_id", tenant_id)
        self._database = Database(
            source,
            min_connections=min_connections,
            max_connections=max_connections,
            timeout_seconds=timeout_seconds,
            query_timeout_seconds=query_timeout_seconds,
            retry_seconds=retry_seconds,
            on_operation=on_operation,
            application_name=text_id("application_name", application_name),
        )
        self._server_seconds = _SHARE_OF_THE_SERVER * query_timeout_seconds
        self._schema_fits = False
        self._server: LocalServer | None = None
        self._workers = Workers(self._database.max_connections)

    @classmethod
    def embedded(cls, path: str | os.PathLike[str], *, durable: bool = True, **options: Any) -> ConversationStore:
        """Start a local PostgreSQL that keeps its data at `path`, for development; `close` lets go of it.

        Several processes may use one path: the first starts the server, the last one to end stops it. The schema is
        set up. Needs the extra ``embedded`` or a PostgreSQL that is installed on the machine.

        Args:
            path: Folder of the data; made on first use.
            durable: Survive a power cut; without it, everything is faster.
            **options: Further arguments of ConversationStore, except the source.

        Raises:
            LocalServerError: No PostgreSQL was found or it did not start: the text says why.
        """
        server = LocalServer(path, durable=durable)
        try:
            store = cls(server.start(), **options)
            store._server = server
            store.setup()
        except BaseException:
            server.stop()
            raise
        return store

    def setup(self) -> list[str]:
        """Create the schema or bring it up to date; return the names of the migrations that this call applied.

        Idempotent, and safe when any number of processes start at once. On a schema that is up to date it writes
        nothing and needs no right beyond reading. One transaction a migration.

        Raises:
            SchemaError: A newer pgmemory has changed the schema so that this version no longer works on it.
            StoreError: A migration failed (nothing of it is left) or the database could not be reached.
        """
        applied = schema.apply(self._database, self.schema)
        self._schema_fits = True
        return [f"{step.version:04}_{step.name}" for step in applied]

    def schema_status(self) -> schema.SchemaStatus:
        """Return which migrations were applied and which are pending. Writes nothing; two round trips."""
        return schema.status(self._database, self.schema)

    def key(self, session_id: str | int | uuid.UUID, user_id: str | int | uuid.UUID | None = None) -> ConversationKey:
        """Return the key of a conversation of this tenant. No I/O.

        Args:
            session_id: Its name in the application: any non-empty text, compared exactly; an int or a UUID is turned
                into text.
            user_id: Its user; None and '' mean no user. Another user's conversation of the same name is another one.

        Raises:
            ConfigurationError: A name is missing, of another type, or holds what PostgreSQL text cannot.
        """
        user = "" if user_id is None or user_id == "" else indexed_id("user_id", user_id)
        return ConversationKey(self.tenant_id, user, text_id("session_id", session_id))

    # The log

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
            max_messages: Prune oldest whole turns above this many messages, in the same transaction.

        Raises:
            StoreUnavailableError: The database could not be reached, or the answer was lost each time: it may have been
                written, which another call with the same `write_id` settles.
            StoreError: The database refused; nothing was written.
        """
        statements = queries.APPEND if max_messages is None else queries.APPEND + queries.PRUNE
        parameters = append_parameters(
            key, messages, write_id, tags=tags, judged_by=judged_by, max_messages=max_messages
        )
        with _written_once(key):
            self._execute("append", statements, parameters)

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
        statements = queries.APPEND if max_messages is None else queries.APPEND + queries.PRUNE
        parameters = append_parameters(key, messages, write_id, max_messages=max_messages, keeps_summary=True)
        parameters |= {"budget": budget, "encoding": encoding}
        with _written_once(key):
            return to_window(self._execute("append", statements + queries.READ_UNSUMMARIZED, parameters))
        # Only where the write was there already: nothing was read then.
        return self.read_unsummarized(key, budget=budget, encoding=encoding)

    def list_messages(self, session_id: str | int | uuid.UUID, *, user_id: Any = None) -> list[StoredMessage]:
        """Return a whole conversation's messages as records, oldest first; empty if there is no such conversation."""
        return self.read_all(self.key(session_id, user_id))

    def read_all(self, key: ConversationKey) -> list[StoredMessage]:
        """Return all messages of a conversation, oldest first."""
        return [to_message(row) for row in self._execute("read_all", queries.READ_ALL, {"id": str(key.id)})]

    def read_last_turns(self, key: ConversationKey, *, turns: int, before: int = AFTER_ALL) -> Window:
        """Read the last `turns` turns before message `before`. Touches no older row."""
        parameters = {"id": str(key.id), "turns": turns, "before": before}
        return to_window(self._execute("read_last_turns", queries.READ_LAST_TURNS, parameters))

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
        return self._read_tokens("read_last_tokens", queries.READ_LAST_TOKENS, key, budget, encoding, before)

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
        parameters = {"id": str(key.id), "turns": turns, "rule": rule, "before": before}
        return to_window(self._execute("read_relevant_turns", queries.READ_RELEVANT_TURNS, parameters))

    def clear(self, key: ConversationKey) -> None:
        """Delete a conversation's messages and summaries; its row, its metadata and its numbering stay.

        Turns that commit while this waits are deleted too; turns that come later are not. Does nothing if there is no
        such conversation.
        """
        self._execute("clear", queries.CLEAR, {"id": str(key.id)})

    def clear_with_agents(self, key: ConversationKey) -> None:
        """Delete, as `clear` does, what a conversation and the logs that agents keep beside it hold."""
        parameters = names_of(key) | {"before_agent": BEFORE_AGENT}
        self._execute("clear_with_agents", queries.CLEAR_WITH_AGENTS, parameters)

    # Summaries

    def read_summary_window(
        self, key: ConversationKey, *, budget: int, encoding: str | None, before: int = AFTER_ALL
    ) -> Window:
        """Read the newest summary and, as `read_last_tokens` does, the last turns that it does not cover."""
        return self._read_tokens("read_summary_window", queries.READ_SUMMARY_WINDOW, key, budget, encoding, before)

    def read_unsummarized(self, key: ConversationKey, *, budget: int, encoding: str | None) -> Window:
        """Read the oldest turns that no summary covers, up to the first message of a turn beyond `budget` tokens.

        Unless the window is `complete`, its last message begins a turn of which nothing else was read.
        """
        parameters = {"id": str(key.id), "budget": budget, "encoding": encoding}
        return to_window(self._execute("read_unsummarized", queries.READ_UNSUMMARIZED, parameters))

    def record_summary(self, key: ConversationKey, *, content: str, covers_through: int, state: str) -> bool:
        """Let a summary take effect, unless the conversation has changed since `state` was read.

        Args:
            key: The conversation.
            content: The summary: of the one before and all messages after that up to `covers_through`. What
                PostgreSQL's text cannot hold becomes U+FFFD.
            covers_through: Index of the last message that it covers.
            state: `Window.state` of the read that it was made from.

        Returns:
            Whether it took effect. Not if the conversation was cleared or something of it deleted or replaced
            meanwhile, or if another summary came first.
        """
        parameters = {
            "id": str(key.id),
            "tenant_id": key.tenant_id,
            "content": readable(content),
            "covers_through": covers_through,
            "state": state,
        }
        return bool(self._execute("record_summary", queries.RECORD_SUMMARY, parameters))

    # Conversations

    def list_conversations(
        self,
        *,
        user_id: str | int | uuid.UUID | None = None,
        session_id: str | int | uuid.UUID | None = None,
        limit: int | None = None,
        offset: int = 0,
    ) -> list[ConversationRecord]:
        """Return this tenant's conversations, last used first.

        Args:
            user_id: Only this user's ('' for those without a user); None for everybody's.
            session_id: Only this conversation and the logs that agents keep beside it; None for all.
            limit: At most this many; None for all.
            offset: Leave out this many first.
        """
        for name, value in (("limit", limit), ("offset", offset)):
            if value is not None and (type(value) is not int or not 0 <= value < 2**63):
                raise ConfigurationError(f"{name} must be a whole number from 0, not {value!r}")
        user = None if user_id is None else self.key("any", user_id).user_id
        session = None if session_id is None else self.key(session_id).session_id
        return self._conversations(user_id=user, session_id=session, limit=limit, offset=offset)

    def get_conversation(
        self, session_id: str | int | uuid.UUID, *, user_id: str | int | uuid.UUID | None = None
    ) -> ConversationRecord | None:
        """Return one conversation's record, or None if there is no such conversation."""
        found = self._conversations(id=str(self.key(session_id, user_id).id))
        return found[0] if found else None

    def get_metadata(
        self, session_id: str | int | uuid.UUID, *, user_id: str | int | uuid.UUID | None = None
    ) -> dict[str, Any]:
        """Return a conversation's metadata; empty if it has none or there is no such conversation."""
        rows = self._execute("get_metadata", queries.READ_METADATA, {"id": str(self.key(session_id, user_id).id)})
        metadata: dict[str, Any] = json.loads(rows[0][0]) if rows else {}
        return metadata

    def set_metadata(
        self,
        session_id: str | int | uuid.UUID,
        metadata: dict[str, Any],
        *,
        user_id: str | int | uuid.UUID | None = None,
    ) -> None:
        """Replace a conversation's metadata; the conversation is made if it isn't there.

        Args:
            session_id: The conversation.
            metadata: A JSON object; values that JSON lacks are stored as `pgmemory.serialization` says.
            user_id: Its user.

        Raises:
            MessageNotStorableError: A value has no JSON form, or a text holds NUL or half a surrogate pair.
        """
        from pgmemory.serialization import to_json_text  # imports LangChain, which looking at a store does not need

        if not isinstance(metadata, dict):
            raise ConfigurationError(f"metadata must be a dict, not {type(metadata).__name__}")
        key = self.key(session_id, user_id)
        try:
            parameters = names_of(key) | {"metadata": to_json_text(metadata, path="metadata")}
            self._execute("set_metadata", queries.SET_METADATA, parameters)
        except StoreError as error:
            if error.sqlstate in _NO_JSON_TEXT:
                raise MessageNotStorableError("metadata", "it holds NUL or half a surrogate pair") from error
            raise

    # Life

    async def run_in_worker(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function that uses this store in one of its own threads, as many as connections, and await it."""
        return await self._workers.run(function, *args, **kwargs)

    def pool_stats(self) -> PoolStats | None:
        """Return how the store's connections are used; None over a pool or an engine that was handed in. No I/O."""
        return self._database.stats()

    def close(self, timeout_seconds: float = 5.0) -> None:
        """Close the connections that the store opened; a pool or an engine that was handed in stays open.

        Calls that run are waited for; whoever waits for a connection gets a PoolClosedError.

        Args:
            timeout_seconds: How long to wait. What still runs then is cut, with a warning that says how many.
        """
        deadline = time.monotonic() + timeout_seconds
        self._workers.close(timeout_seconds)
        self._database.close(max(0.0, deadline - time.monotonic()))
        if self._server is not None:
            self._server.stop()

    def __enter__(self) -> ConversationStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        # A copy or a pickle carries configuration, no connections; the embedded server is the original's to stop.
        return self.__dict__ | {"_server": None, "_schema_fits": False}

    def __repr__(self) -> str:
        if "_database" not in self.__dict__:
            return f"<{type(self).__name__} that was not built>"  # as error trackers show the frame of __init__
        tenant = f", tenant_id={self.tenant_id!r}" if self.tenant_id else ""
        return f"ConversationStore({self._database.address!r}, schema={self.schema!r}{tenant})"

    # Inner workings

    def _execute(self, name: str, statement: str, parameters: dict[str, Any]) -> list[tuple[Any, ...]]:
        if not self._schema_fits:
            schema.check(self._database, self.schema)
            self._schema_fits = True
        limited = queries.governed(queries.in_schema(statement, self.schema), self._server_seconds)
        try:
            return self._database.execute(limited, parameters, name=name)
        except StoreError as error:
            if error.sqlstate in _UNDEFINED:
                # It was dropped or changed meanwhile: say what is the matter with it now.
                schema.check(self._database, self.schema)
                raise SchemaError(
                    f"the schema {self.schema!r} is not as its migrations made it: {error}. "
                    "Compare it with what `pgmemory schema` prints"
                ) from error
            raise

    def _read_tokens(
        self, name: str, statement: str, key: ConversationKey, budget: int, encoding: str | None, before: int
    ) -> Window:
        parameters = {"id": str(key.id), "budget": budget, "encoding": encoding, "before": before}
        return to_window(self._execute(name, statement, parameters))

    def _conversations(
        self,
        *,
        user_id: str | None = None,
        session_id: str | None = None,
        id: str | None = None,
        limit: int | None = None,
        offset: int = 0,
    ) -> list[ConversationRecord]:
        parameters = {
            "tenant_id": self.tenant_id,
            "user_id": user_id,
            "session_id": session_id,
            "before_agent": BEFORE_AGENT,
            "id": id,
            "limit": limit,
            "offset": offset,
        }
        rows = self._execute("list_conversations", queries.READ_CONVERSATIONS, parameters)
        return [to_conversation(row) for row in rows]


@contextmanager
def _written_once(key: ConversationKey) -> Iterator[None]:
    """Take "this write is already there" for success: an earlier try of it got through."""
    try:
        yield
    except StoreError as error:
        if queries.WRITE_ID_COLUMN not in (error.constraint_name or ""):
            raise
        _logger.info("session %r holds this write already: nothing was stored", key.session_id)
