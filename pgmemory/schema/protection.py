"""Row-level security: letting PostgreSQL itself keep tenants apart."""

from __future__ import annotations

from typing import get_args

from pgmemory.errors import ConfigurationError, SchemaError
from pgmemory.pool import Database, Execute
from pgmemory.queries import parts, security
from pgmemory.schema.changes import changing, in_schema, run_returned
from pgmemory.schema.ledger import RowLevelSecurity, SchemaStatus, status

# Before, a view shows what its owner may see, whoever asks.
_SECURES_VIEWS = 150000


def secure(database: Database, schema: str, mode: RowLevelSecurity) -> None:
    """Let pgmemory's tables and views be as a mode has them, in one transaction; does nothing if all of them are.

    Raises:
        ConfigurationError: There is no such mode.
        SchemaError: The server is too old, this role may not change the schema, or others held locks on it for too
            long; nothing was changed.
    """
    if mode not in get_args(RowLevelSecurity):
        raise ConfigurationError(f"row_level_security must be one of {get_args(RowLevelSecurity)}, not {mode!r}")

    def run() -> None:
        with changing(database, schema) as execute:
            _secure(execute, schema, mode)

    current = status(database, schema)
    if current.row_level_security != mode or current.deviating:
        database.repeat(run, name="secure")


def _secure(execute: Execute, schema: str, mode: RowLevelSecurity) -> None:
    parameters = security.parameters(schema) | {"policy": security.POLICIES.get(mode)}
    if mode == "off":
        run_returned(execute, security.RELEASE_TABLES, parameters)
        run_returned(execute, security.RELEASE_VIEWS, parameters)
        execute(in_schema(security.DROP_FUNCTIONS, schema))
        return
    ((number, version),) = execute(security.READ_SERVER_VERSION)
    if number < _SECURES_VIEWS:
        raise SchemaError(
            f"row-level security needs PostgreSQL 15 or newer, this is {version}: views there show each role what "
            "their owner may see"
        )
    functions = security.quoted_functions(security.CURRENT_TENANT[mode] + security.OWNS_CONVERSATION, schema)
    execute(in_schema(functions, schema))
    run_returned(execute, security.SECURE_TABLES, parameters)
    run_returned(execute, security.SECURE_VIEWS, parameters)
    run_returned(execute, parts.in_schema(security.GRANT_RIGHTS, schema), parameters)


def treat_new_alike(execute: Execute, schema: str, current: SchemaStatus) -> None:
    """Give new tables the rights and the policies that those have that were there before.

    Args:
        execute: Runs a statement of the transaction that made them.
        schema: Where.
        current: Its status before.
    """
    run_returned(execute, security.COPY_RIGHTS, security.parameters(schema))
    if current.row_level_security != "off":
        _secure(execute, schema, current.row_level_security)
