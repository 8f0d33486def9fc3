"""What statements are made of: the schema's name, settings of their transaction, columns."""

from __future__ import annotations

from functools import lru_cache

TENANT_SETTING = "pgmemory.tenant_id"
"""The setting that names a transaction's tenant."""


@lru_cache(maxsize=1024)
def in_schema(statement: str, schema: str) -> str:
    """Return `statement` with the schema's name, quoted, in place of each `{schema}`.

    The result is for psycopg2 with parameters: a `%` in the name is doubled.
    """
    return statement.replace("{schema}", quoted(schema).replace("%", "%%"))


def governed(statement: str, seconds: float, tenant_id: str = "") -> str:
    """Return `statement` behind settings for its transaction: each statement's limit, to go by index alone, a tenant.

    With the limit a statement whose client has given up does not go on, nor queue up behind a lock with its
    repetitions. Where it may do otherwise, the planner reads whole tables, or sorts a whole conversation, while its
    statistics are older than the growth of a table, or where a window is larger than what it believes to be there.
    The tenant is what row-level security by setting compares with (`queries.security`).

    The result is for psycopg2 with parameters.
    """
    # Not set_config(): after a query the transaction's isolation level could no longer be set.
    tenant = f"set local {TENANT_SETTING} = {_literal(tenant_id)};\n" if tenant_id else ""
    return (
        f"set local statement_timeout = {max(1, round(seconds * 1000))};\n"
        f"set local enable_seqscan = off;\nset local enable_bitmapscan = off;\n{tenant}{statement}"
    )


def _literal(text: str) -> str:
    # With E'' a backslash means the same whatever the server's standard_conforming_strings.
    return "E'" + text.replace("\\", "\\\\").replace("'", "''").replace("%", "%%") + "'"


def quoted(name: str) -> str:
    """Return an SQL identifier for any name."""
    return '"' + name.replace('"', '""') + '"'


# The server's default may be repeatable read, under which concurrent appends fail instead of waiting.
READ_COMMITTED = "set transaction isolation level read committed;\n"


def sealed_with(row: str) -> str:
    """Return a column with what opens the content of a row of messages or summaries, null for clear text.

    It is an array of the conversation's id and the key's id, and, unless the key was erased, the name of its master key
    and the wrapped key in base64. The key is always read with the content, never kept from before.

    Args:
        row: The row's name in the statement.
    """
    return f"""case when {row}.key_id is not null then array[{row}.conversation_id::text, {row}.key_id::text] || (
               select array[k.master_key_name, encode(k.wrapped_key, 'base64')] from {{schema}}.conversation_keys k
               where k.conversation_id = {row}.conversation_id and k.key_id = {row}.key_id) end"""


@lru_cache(maxsize=64)
def only_noting_seals(statement: str) -> str:
    """Return a statement that says only that a row is encrypted, not what opens it: the planner has less to do.

    Where `sealed_with` stands the result has an empty array for an encrypted row, null for clear text.
    """
    for row in ("m", "s"):
        noted = f"case when {row}.key_id is not null then array[]::text[] end"
        statement = statement.replace(sealed_with(row), noted)
    return statement


# In the order of the fields of models.StoredMessage that a row has, and then what opens it.
MESSAGE = f"""m.role, m.content, m.additional_kwargs::text, m.extra::text, m.tags, m.judged_by,
           m.token_count, m.token_encoding, m.message_index, m.created_at,
           {sealed_with("m")} as sealed_with"""


def create_triggers(function: str, table: str, columns: str, values: str) -> str:
    """Return what makes the triggers that call a function for each row that is stored, or changed in some columns.

    Args:
        function: Its name, from which theirs are made.
        table: Of the rows.
        columns: Those on whose change something depends.
        values: What can be compared of these, of the row `{row}`.
    """
    # Dropped first: `create or replace trigger` is newer than what this runs on.
    return f"""
drop trigger if exists {function}_of_stored on {{schema}}.{table};
create trigger {function}_of_stored after insert on {{schema}}.{table}
    for each row execute function {{schema}}.{function}();
drop trigger if exists {function}_of_changed on {{schema}}.{table};
create trigger {function}_of_changed after update of {columns} on {{schema}}.{table}
    for each row
    when (({values.replace("{row}", "old")}) is distinct from ({values.replace("{row}", "new")}))
    execute function {{schema}}.{function}();
"""
