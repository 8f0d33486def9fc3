"""Moving conversations out and in: read with everything that matters, written as they were; and tables of others."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pgmemory.queries.parts import MESSAGE, READ_COMMITTED, quoted, sealed_with
from pgmemory.queries.windows import steps

PART_STATE, PART_SUMMARY, PART_MESSAGE = range(3)


def _utc(column: str) -> str:
    """Return a time as ISO 8601 text with microseconds, whatever the session's time zone and style."""
    return f"""to_char({column} at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"')"""


# In the order of the fields of store.transfer.ConversationState; json, unlike jsonb, keeps that.
_STATE = f"""
select {PART_STATE} as part, false as done, 'state',
       json_build_object(
           'tenant_id', c.tenant_id, 'user_id', c.user_id, 'session_id', c.session_id, 'metadata', c.metadata::text,
           'next_message_index', c.next_message_index, 'summarized_through', c.summarized_through,
           'keeps_summary', c.keeps_summary, 'revision', c.revision,
           'created_at', {_utc("c.created_at")}, 'updated_at', {_utc("c.updated_at")},
           'time_to_live', c.time_to_live::text,
           'held_at', {_utc("c.held_at")}, 'hold_reason', c.hold_reason)::text,
       null::text, null::text, null::text[], null::text, null::int, null::text, 0, c.created_at,
       null::text[], null::text
from {{schema}}.conversations c
where c.id = %(id)s and (%(tenant_id)s::text is null or c.tenant_id = %(tenant_id)s)
"""
_SUMMARIES = f"""
select {PART_SUMMARY} as part, false as done, 'summary', s.content,
       null::text, null::text, null::text[], null::text, null::int, null::text,
       s.covers_through, s.created_at, {sealed_with("s")}, null::text
from {{schema}}.conversation_summaries s
where s.conversation_id = %(id)s
"""
# A page is bounded by its bytes, and through the weight of a row also by its rows.
_WEIGHT = """(%(row_weight)s::bigint + octet_length(m.content)
              + coalesce(octet_length(m.additional_kwargs::text), 0) + coalesce(octet_length(m.extra::text), 0))"""
_PAGE = steps(
    bound="m.message_index >= %(first)s and m.message_index < %(end)s "
    "and (%(tenant_id)s::text is null or m.tenant_id = %(tenant_id)s)",
    adds=_WEIGHT,
    done="total.total >= %(page_weight)s",
    newest_first=False,
)
_ENTRIES = f"select {PART_MESSAGE} as part, done, {MESSAGE}, m.write_id::text from step m"
_IN_ORDER = "\norder by part, message_index;\n"

READ_CONVERSATION = (
    "set local intervalstyle = 'iso_8601';\n"
    + _PAGE
    + "\nunion all\n".join([_ENTRIES, _STATE, _SUMMARIES])
    + _IN_ORDER
)
"""A conversation's row, all its summaries and its first messages, as they were at one moment."""

READ_MESSAGES = _PAGE + _ENTRIES + _IN_ORDER
"""A page of a conversation's messages, from the number `first` up to `end`."""

_SCOPE = """
from {schema}.conversations c
where (%(tenant_id)s::text is null or c.tenant_id = %(tenant_id)s)
  and (%(user_id)s::text is null or c.user_id = %(user_id)s)
  and (%(session_id)s::text is null or c.session_id = %(session_id)s
       or starts_with(c.session_id, %(session_id)s || %(before_agent)s))
"""

READ_IDS = f"select c.id::text {_SCOPE} and c.id > %(after)s::uuid order by c.id limit %(limit)s;"
"""The ids of conversations after another one's, in order."""

COUNT_SCOPE = f"select coalesce(sum(c.next_message_index), 0)::bigint {_SCOPE};"
"""How many numbers conversations have given to messages: about how many messages there are."""

_COMPARED_ROW = """
select c.next_message_index, c.summarized_through,
       coalesce(c.created_at = %(created_at)s::timestamptz and c.revision = %(revision)s, false),
       c.key_id is not null, c.tenant_id = %(tenant_id)s
from {schema}.conversations c
where c.id = %(id)s
"""

FIND_FOR_IMPORT = f"{_COMPARED_ROW};"
"""A conversation's next number, what its summaries cover, whether it is the one of this time and revision, whether new
content of it is encrypted, and whether it is this tenant's."""

MAKE_AND_LOCK = (
    READ_COMMITTED
    + """
insert into {schema}.conversations
    (id, tenant_id, user_id, session_id, metadata, revision, created_at, updated_at, time_to_live, held_at, hold_reason)
select %(id)s, %(tenant_id)s, %(user_id)s, %(session_id)s, coalesce(%(metadata)s::jsonb, '{}'),
       coalesce(%(revision)s, 0),
       coalesce(%(created_at)s::timestamptz, clock_timestamp()),
       coalesce(%(updated_at)s::timestamptz, clock_timestamp()),
       coalesce(%(time_to_live)s::interval, %(store_time_to_live)s::interval),
       %(held_at)s::timestamptz, %(hold_reason)s
where %(may_make)s
on conflict (id) do nothing;
"""
    + f"{_COMPARED_ROW} for update;"
)
"""As FIND_FOR_IMPORT, with the conversation's row made, if it may be, and locked."""

READ_NUMBERED = f"""
select {MESSAGE}
from {{schema}}.conversation_messages m
where m.conversation_id = %(id)s and m.message_index = any(%(indexes)s::int[])
order by m.message_index;
"""

INSERT_NUMBERED = """
insert into {schema}.conversation_messages
    (conversation_id, message_index, tenant_id, role, content, additional_kwargs, extra,
     write_id, tags, judged_by, token_count, token_encoding, created_at, key_id)
select %(id)s, m.message_index, %(tenant_id)s, m.role, m.content, m.additional_kwargs::json, m.extra::json,
       m.write_id, case when m.tags is not null then array(select json_array_elements_text(m.tags::json)) end,
       m.judged_by, m.token_count, m.token_encoding, coalesce(m.created_at, clock_timestamp()),
       %(key_id)s::uuid
from unnest(%(indexes)s::int[], %(roles)s::text[], %(contents)s::text[], %(additional_kwargs)s::text[],
            %(extras)s::text[], %(write_ids)s::uuid[], %(tags)s::text[], %(judged_by)s::text[],
            %(token_counts)s::int[], %(token_encodings)s::text[], %(times)s::timestamptz[])
     as m (message_index, role, content, additional_kwargs, extra, write_id, tags, judged_by, token_count,
           token_encoding, created_at);
update {schema}.conversations
set next_message_index = %(next_message_index)s,
    updated_at = greatest(updated_at, coalesce(%(updated_at)s::timestamptz, clock_timestamp()))
where id = %(id)s;
"""
"""Write messages under the numbers that they have. Only behind MAKE_AND_LOCK in the same transaction."""

RESTORE_SUMMARIES = """
insert into {schema}.conversation_summaries (conversation_id, covers_through, tenant_id, content, created_at, key_id)
select %(id)s, s.covers_through, %(tenant_id)s, s.content, s.created_at, %(key_id)s::uuid
from unnest(%(covers_through)s::int[], %(contents)s::text[], %(times)s::timestamptz[])
     as s (covers_through, content, created_at)
on conflict (conversation_id, covers_through) do nothing;
update {schema}.conversations
set next_message_index = greatest(next_message_index, %(next_message_index)s),
    summarized_through = %(summarized_through)s, keeps_summary = %(keeps_summary)s
where id = %(id)s;
"""
"""Give a conversation its summaries and what they cover. Only behind MAKE_AND_LOCK in the same transaction."""

# Tables of others, read through a cursor that one transaction keeps open: one sort, and no more rows here than a page.

COLUMNS_OF_TABLE = """
set transaction isolation level repeatable read, read only;
select a.attname, format_type(a.atttypid, null) from pg_attribute a
where a.attrelid = to_regclass(%(table)s) and a.attnum > 0 and not a.attisdropped;
"""
"""The columns of a table and their types; no rows if there is no such table. Begins the transaction of `open_table`."""

_NAME_PART = re.compile(r'(?:"((?:[^"]|"")+)"|([^."]+))(?:\.|$)')


def table_name(name: str) -> str | None:
    """Return the quoted form of a table's name, ``table`` or ``schema.table``, or None if it cannot be one.

    Names are taken exactly; a part that holds a dot stands between double quotes.
    """
    parts = [match[1].replace('""', '"') if match[1] else match[2] for match in _NAME_PART.finditer(name)]
    exact = ".".join(map(quoted, parts))
    plain = "".join(match[0] for match in _NAME_PART.finditer(name))
    return exact if plain == name and not name.endswith(".") and len(parts) in (1, 2) else None


def open_table(table: str, columns: Sequence[str], order: Sequence[str]) -> str:
    """Return the statements that open the cursor `source` over a table's rows, and count them.

    Args:
        table: Its quoted name.
        columns: What to select: expressions that `text_of` made.
        order: Columns by which the rows come.
    """
    by = ", ".join(f"t.{quoted(column)}" for column in order)
    return (
        f"declare source no scroll cursor for select {', '.join(columns)} from {table} t order by {by};\n"
        f"select count(*) from {table};"
    )


def text_of(column: str | None, *, is_time: bool = False) -> str:
    """Return the expression that selects a column as text; null for None.

    A time is ISO 8601 in UTC; one before our era, which that cannot say, begins with ``BC``.
    """
    if column is None:
        return "null"
    name = f"t.{quoted(column)}"
    if not is_time:
        return f"{name}::text"
    era = f"case when {name}::timestamptz < '0001-01-01 00:00:00+00' then 'BC ' else '' end"
    return f"{era} || {_utc(f'{name}::timestamptz')}"


def fetch(rows: int) -> str:
    """Return the statement that fetches the next rows of the cursor `source`."""
    return f"fetch {rows:d} from source;"
