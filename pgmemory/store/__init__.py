"""The conversation store: appends to logs, reads windows of them, keeps summaries, clears. Records in, records out.

The store knows rows and transactions. It knows neither LangChain nor what a view does with a window. Every method is
one round trip and one transaction unless it says otherwise, and may be called from any thread.
"""

from __future__ import annotations

from pgmemory.store.branching import BranchingOperations
from pgmemory.store.conversations import ConversationOperations
from pgmemory.store.editing import EditingOperations
from pgmemory.store.inspection import InspectionOperations
from pgmemory.store.items import ItemOperations
from pgmemory.store.log import LogOperations
from pgmemory.store.recall import RecallOperations
from pgmemory.store.retention import RetentionOperations
from pgmemory.store.tenants import TenantOperations
from pgmemory.store.transfer import TransferOperations


class ConversationStore(
    LogOperations,
    ConversationOperations,
    InspectionOperations,
    RetentionOperations,
    ItemOperations,
    EditingOperations,
    BranchingOperations,
    RecallOperations,
    TransferOperations,
    TenantOperations,
):
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
        time_to_live: How long after their last turn `prune` removes this store's conversations: each that it writes to
            and that has no time of its own. None for ever.
        min_connections: Connections that are kept open once they were needed.
        max_connections: Connections that are never passed.
        timeout_seconds: How long to wait for a free connection before PoolTimeoutError.
        query_timeout_seconds: How long one round trip may take. The server is told to give up shortly before; if it
            does not answer at all, the connection is thrown away. Either way the operation is tried again.
        retry_seconds: For how long, from its first failure on, an operation is tried again that a lost connection, an
            unreachable or demoted server, or a conflict has stopped; 0 for never.
        on_operation: Called with an `Operation` after each, in the thread that asked for it: for metrics and traces.
        embeddings: LangChain's ``Embeddings``, by which messages and items are found by their meaning, after
            ``setup(search=True)``. They are asked after a commit, in a thread of the store's own and in batches, and
            once only for equal texts of a tenant; while they fail, messages are stored and recalled by their words.
            Not what an encrypted conversation holds. What was not embedded when a process ends waits for the next
            one that writes.
        redact: A function that rewrites the messages of each write, such as `redact_personal_data`: it is given them
            before they are judged, counted or stored, and what it returns is all that is kept of them, in errors and
            logs too; an empty list stores nothing. It must leave those it is given as they are, for the chain goes on
            with them: the model sees in this call what was said, and in later ones what was stored. If it fails, the
            turn is not stored (MessageNotStorableError) nor kept as `unsaved_turn`. It is for what histories and
            memories save, intermediate steps too; not for session ids, user ids, metadata, or records that are
            appended as they are. An `unsaved_turn` that is saved later passes it again.
        keyring: Master keys: what is appended is encrypted, and what is encrypted can be read. Without one, encrypted
            conversations are refused. See `pgmemory.encryption`.
        application_name: What PostgreSQL shows in ``pg_stat_activity``.

    Raises:
        ConfigurationError: An argument is wrong, or neither a source nor ``$DATABASE_URL`` is given.
    """
