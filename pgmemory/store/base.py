"""What every operation of the store rests on: the database, the tenant, keys, one way to run a statement, closing."""

from __future__ import annotations

import inspect
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from typing_extensions import Self

from pgmemory import schema
from pgmemory.embedded import LocalServer
from pgmemory.embedding import Embedder
from pgmemory.encryption import DataKeys, Keyring
from pgmemory.errors import ConfigurationError, ConversationHeldError, SchemaError
from pgmemory.models import ConversationKey, Operation, PoolStats
from pgmemory.names import check_span, indexed_id, schema_name, text_id
from pgmemory.pool import Database, Execute, StoreError
from pgmemory.queries import conversations
from pgmemory.queries.parts import governed, in_schema
from pgmemory.schema import Search
from pgmemory.workers import Workers

if TYPE_CHECKING:
    from langchain_core.embeddings import Embeddings
    from langchain_core.messages import BaseMessage

# Its own limit ends a statement and leaves the connection in order; so it comes before the client's.
_SHARE_OF_THE_SERVER = 0.9

_logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F")

FIRST_ID = "00000000-0000-0000-0000-000000000000"
"""An id before every conversation's, to begin a walk along them."""

_UNDEFINED = ("42P01", "3F000", "42703")  # undefined_table, invalid_schema_name, undefined_column


class StoreBase:
    """A database, a schema in it and a tenant; see `ConversationStore`."""

    def __init__(
        self,
        source: Any = None,
        *,
        schema: str = "pgmemory",
        tenant_id: str | int | uuid.UUID | None = None,
        time_to_live: timedelta | None = None,
        min_connections: int = 1,
        max_connections: int = 10,
        timeout_seconds: float = 30.0,
        query_timeout_seconds: float = 15.0,
        retry_seconds: float = 10.0,
        on_operation: Callable[[Operation], object] | None = None,
        embeddings: Embeddings | None = None,
        redact: Callable[[Sequence[BaseMessage]], Sequence[BaseMessage]] | None = None,
        keyring: Keyring | None = None,
        application_name: str = "pgmemory",
    ) -> None:
        if keyring is not None and not isinstance(keyring, Keyring):
            raise ConfigurationError(f"keyring must be a Keyring or None, not {type(keyring).__name__}")
        self.keyring = keyring
        self._data_keys = DataKeys()
        self.schema = schema_name(schema)
        self.tenant_id = "" if tenant_id is None else indexed_id("tenant_id", tenant_id)
        self.time_to_live = check_span("time_to_live", time_to_live)
        self.embedder = None if embeddings is None else Embedder(embeddings)
        self.redact = _ordinary_function("redact", redact)
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
        self._search = Search()
        self._server: LocalServer | None = None
        self._workers = Workers(self._database.max_connections)
        self._embedding_workers = Workers(1)
        self._embeds = False

    @classmethod
    def embedded(cls, path: str | os.PathLike[str], *, durable: bool = True, **options: Any) -> Self:
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

    def setup(
        self, *, row_level_security: schema.RowLevelSecurity | None = None, search: str | bool | None = None
    ) -> list[str]:
        """Create the schema or bring it up to date; return the names of the migrations that this call applied.

        Idempotent, and safe when any number of processes start at once. On a schema that is up to date it writes
        nothing and needs no right beyond reading. One transaction a migration.

        Args:
            row_level_security: Let PostgreSQL itself keep tenants apart, superusers and roles with BYPASSRLS aside.
                ``"setting"``: a session sees the tenant that it names, as a store does with its `tenant_id`, which
                protects against mistakes; ``"roles"``: a database role sees the tenant that `bind_role` gave it,
                whatever SQL it sends; ``"off"``: neither. None leaves it as it is. Waits until no transaction uses
                the tables, and keeps others waiting meanwhile. Needs PostgreSQL 15 and the tables' owner.
            search: Let messages in clear text be recalled by their words: the name of the text search configuration
                that makes them, such as ``"german"``, or ``"simple"`` for any language; True for the one that is there,
                or ``"english"``. With `embeddings` by their meaning, too, and items by theirs, which needs the
                extension pgvector, and makes it where this role may. What is stored already is indexed, in batches;
                its vectors are made afterwards, in a thread of their own. Another configuration or another model than
                before means indexing anew. Waits until no transaction uses the tables. None leaves it as it is.

        Raises:
            ConfigurationError: There is no such row-level security or text search configuration.
            SchemaError: A newer pgmemory has changed the schema so that this version no longer works on it, this role
                may not change it, the server is too old for row-level security, or it has no pgvector.
            EmbeddingError: The embedder failed to make a vector to know its size by.
            StoreError: A migration failed (nothing of it is left) or the database could not be reached.
        """
        applied, current = schema.apply(self._database, self.schema)
        if row_level_security is not None:
            schema.secure(self._database, self.schema, row_level_security)
        self._search = current.search
        if search is not None:
            model = None
            if self.embedder is not None:
                model = schema.Model(self.embedder.name, self.embedder.dimensions())
            self._search = schema.make_searchable(self._database, self.schema, search, model)
        # Else the first operation looks whether this store's tenant is let in.
        self._schema_fits = (row_level_security or current.row_level_security) == "off"
        if search is not None:
            self._index_after_setup()
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
        self._embeds = False
        self._workers.close(timeout_seconds)
        self._embedding_workers.close(max(0.0, deadline - time.monotonic()))
        self._database.close(max(0.0, deadline - time.monotonic()))
        if self._server is not None:
            self._server.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        # A copy or a pickle carries configuration, no connections; the embedded server is the original's to stop.
        return self.__dict__ | {"_server": None, "_schema_fits": False, "_search": Search()}

    def __repr__(self) -> str:
        if "_database" not in self.__dict__:
            return f"<{type(self).__name__} that was not built>"  # as error trackers show the frame of __init__
        tenant = f", tenant_id={self.tenant_id!r}" if self.tenant_id else ""
        return f"ConversationStore({self._database.address!r}, schema={self.schema!r}{tenant})"

    def _execute(self, name: str, statement: str, parameters: dict[str, Any]) -> list[tuple[Any, ...]]:
        """Run a statement of `queries` in one round trip and one transaction, again where that is needed."""
        with self._fitting_schema():
            return self._database.execute(self._prepared(statement, self._server_seconds), parameters, name=name)

    def _transact(self, name: str, function: Callable[[Execute], T], *, seconds: float | None = None) -> T:
        """Run a function's statements in one transaction, all of them again where that is needed.

        Args:
            name: What to call this operation in logs and for `on_operation`.
            function: Given what runs a statement of `queries`.
            seconds: How long each statement may take, if not as long as elsewhere.
        """

        def run() -> T:
            with self._database.transaction(query_timeout_seconds=seconds) as execute:
                return function(lambda statement, parameters: execute(self._prepared(statement, limit), parameters))

        limit = self._server_seconds if seconds is None else _SHARE_OF_THE_SERVER * seconds
        with self._fitting_schema():
            return self._database.repeat(run, name=name)

    def _prepared(self, statement: str, seconds: float) -> str:
        return governed(in_schema(statement, self.schema), seconds, self.tenant_id)

    @contextmanager
    def _fitting_schema(self) -> Iterator[None]:
        """See before the first statement that the schema fits; say of a failure that it is what does not."""
        if not self._schema_fits:
            self._check_schema()
            self._schema_fits = True
        try:
            yield
        except StoreError as error:
            if error.sqlstate in _UNDEFINED:
                # It was dropped or changed meanwhile: say what is the matter with it now.
                self._check_schema()
                raise SchemaError(
                    f"the schema {self.schema!r} is not as its migrations made it: {error}. "
                    "Compare it with what `pgmemory schema` prints"
                ) from error
            if error.sqlstate == schema.NOT_ALLOWED:
                # Row-level security may have been turned on meanwhile.
                self._check_schema()
            raise

    def _check_schema(self) -> None:
        self._search = schema.check(self._database, self.schema, self.tenant_id)
        vectors = self._search.vectors
        if vectors is not None and self.embedder is not None and vectors.model != self.embedder.name:
            _logger.warning(
                "this store's embeddings, %r, are not asked: in the schema %r %r makes the vectors; "
                "store.setup(search=True) makes them anew",
                *(self.embedder.name, self.schema, vectors.model),
            )

    def _index_after_setup(self) -> None:
        """Index what was stored before `setup` made it possible; see `RecallOperations`."""
        raise NotImplementedError

    def _scope(self, all_tenants: bool) -> str | None:
        """Return the tenant that an operation is about, None for all of them, which takes a round trip to allow.

        Raises:
            StoreError: Row-level security keeps other tenants' rows from this role.
        """
        if not all_tenants:
            return self.tenant_id
        schema.require_all_tenants(self._database, self.schema)
        return None

    def _refuse_taken(self, key: ConversationKey) -> None:
        """Raise StoreError if a write met another tenant's row in the place of a conversation. One round trip.

        Only SQL of one's own makes such a row: a role may write its tenant's conversations under any id.
        """
        rows = self._execute("read_tenant", conversations.READ_TENANT, {"id": str(key.id)})
        if rows != [(key.tenant_id,)]:
            whose = f"the tenant {rows[0][0]!r} has" if rows else "another tenant has"
            raise StoreError(
                f"{whose} a row in the place of session {key.session_id!r}, or it was deleted at this moment: nothing "
                f"was written; try again, and delete the row {key.id} of the table conversations as a role with "
                "BYPASSRLS if it is another tenant's",
                sqlstate=schema.NOT_ALLOWED,
            )

    def _own(self, key: ConversationKey) -> ConversationKey:
        """Return a key of this store's tenant.

        Raises:
            ConfigurationError: It is another tenant's.
        """
        if key.tenant_id != self.tenant_id:
            raise ConfigurationError(f"a key of the tenant {key.tenant_id!r} in a store of {self.tenant_id!r}")
        return key


def _ordinary_function(name: str, function: F) -> F:
    """Return an argument that is a function or None.

    Raises:
        ConfigurationError: It cannot be called, or its result would have to be awaited.
    """
    if function is None:
        return function
    if not callable(function):
        raise ConfigurationError(f"{name} must be a function or None, not a {type(function).__name__}")
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        raise ConfigurationError(f"{name} must be an ordinary function: a coroutine is not awaited")
    return function


def refuse_held(held: Sequence[tuple[Any, ...]]) -> None:
    """Raise ConversationHeldError if rows of session id and reason tell of conversations that are held."""
    if held:
        session_id, reason = held[0]
        others = f" (and {len(held) - 1} more)" if len(held) > 1 else ""
        raise ConversationHeldError(
            f"session {session_id!r}{others} is held ({reason or 'no reason was given'}): nothing was changed; "
            "release it first"
        )
