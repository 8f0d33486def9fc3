"""The schema: its migrations, listed, applied and rendered; row-level security; by what messages are recalled.

Looking never writes; changing takes a lock, so that any number of processes may start at once.
"""

from pgmemory.schema.changes import DEFAULT_NAME, NOT_ALLOWED, changing, run_returned
from pgmemory.schema.ledger import (
    Migration,
    RowLevelSecurity,
    SchemaStatus,
    Search,
    Vectors,
    check,
    migrations,
    render,
    require_all_tenants,
    require_fitting,
    require_protected,
    status,
)
from pgmemory.schema.migrating import apply
from pgmemory.schema.protection import secure
from pgmemory.schema.searching import DEFAULT_LANGUAGE, Model, make_searchable, mark_complete

__all__ = [
    "DEFAULT_LANGUAGE",
    "DEFAULT_NAME",
    "NOT_ALLOWED",
    "Migration",
    "Model",
    "RowLevelSecurity",
    "SchemaStatus",
    "Search",
    "Vectors",
    "apply",
    "changing",
    "check",
    "make_searchable",
    "mark_complete",
    "migrations",
    "render",
    "require_all_tenants",
    "require_fitting",
    "require_protected",
    "run_returned",
    "secure",
    "status",
]
