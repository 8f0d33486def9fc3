"""Conversations as rows: listing them, and what applications keep about them."""

from __future__ import annotations

from pgmemory.queries.parts import READ_COMMITTED

READ_TENANT = "select c.tenant_id from {schema}.conversations c where c.id = %(id)s;"

READ_METADATA = "select c.metadata::text from {schema}.conversations c where c.id = %(id)s;"

SET_METADATA = (
    READ_COMMITTED
    + """
insert into {schema}.conversations as c (id, tenant_id, user_id, session_id, metadata, time_to_live)
values (%(id)s, %(tenant_id)s, %(user_id)s, %(session_id)s, %(metadata)s::jsonb, %(time_to_live)s::interval)
on conflict (id) do update set metadata = excluded.metadata
where c.tenant_id = excluded.tenant_id
returning c.id;
"""
)

_MESSAGES_OF_C = "{schema}.conversation_messages m where m.conversation_id = c.id"
_COUNT = f"(select count(*) from {_MESSAGES_OF_C})"
# As stored, so compressed; without what PostgreSQL adds to each row, and without indexes.
_SIZE = f"""(select coalesce(sum(pg_column_size(m.content) + coalesce(pg_column_size(m.additional_kwargs), 0)
               + coalesce(pg_column_size(m.extra), 0)), 0)::bigint from {_MESSAGES_OF_C})"""

SORTS = {
    "updated": "c.updated_at desc",
    "created": "c.created_at desc",
    "messages": "message_count desc",
    "size": "size_bytes desc",
}
"""What conversations are sorted by, largest and latest first."""


def read_conversations(sort: str = "updated", *, with_sizes: bool = False) -> str:
    """Return the statement that reads conversations, in the order of the fields of models.ConversationRecord.

    Each parameter that is null restricts nothing, apart from `before_agent`, which leaves out agents' logs.

    Args:
        sort: One of SORTS.
        with_sizes: Read how large they are; else that is null.
    """
    return f"""
select c.session_id, c.user_id, c.tenant_id, c.metadata::text, c.created_at, c.updated_at,
       {_COUNT} as message_count,
       c.next_message_index, c.summarized_through, c.time_to_live,
       c.held_at, c.hold_reason, c.key_id is not null,
       {_SIZE if with_sizes else "null::bigint"} as size_bytes
from {{schema}}.conversations c
where (%(tenant_id)s::text is null or c.tenant_id = %(tenant_id)s)
  and (%(user_id)s::text is null or c.user_id = %(user_id)s)
  and (%(session_id)s::text is null or c.session_id = %(session_id)s
       or starts_with(c.session_id, %(session_id)s || %(before_agent)s))
  and (%(id)s::uuid is null or c.id = %(id)s)
  and (%(older_than)s::interval is null or c.updated_at < statement_timestamp() - %(older_than)s::interval)
  and (%(newer_than)s::interval is null or c.updated_at >= statement_timestamp() - %(newer_than)s::interval)
  and (%(held)s::boolean is null or (c.held_at is not null) = %(held)s)
  and (%(min_messages)s::bigint is null or (c.next_message_index >= %(min_messages)s and {_COUNT} >= %(min_messages)s))
order by {SORTS[sort]}, c.id
limit %(limit)s offset %(offset)s;
"""
