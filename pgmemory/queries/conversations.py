"""Conversations as rows: listing them, and what applications keep about them."""

from __future__ import annotations

from pgmemory.queries.parts import READ_COMMITTED

READ_METADATA = "select c.metadata::text from {schema}.conversations c where c.id = %(id)s;"

SET_METADATA = (
    READ_COMMITTED
    + """
insert into {schema}.conversations (id, tenant_id, user_id, session_id, metadata)
values (%(id)s, %(tenant_id)s, %(user_id)s, %(session_id)s, %(metadata)s::jsonb)
on conflict (id) do update set metadata = excluded.metadata;
"""
)

# In the order of the fields of models.ConversationRecord.
READ_CONVERSATIONS = """
select c.session_id, c.user_id, c.tenant_id, c.metadata::text, c.created_at, c.updated_at,
       (select count(*) from {schema}.conversation_messages m where m.conversation_id = c.id),
       c.next_message_index, c.summarized_through, c.time_to_live,
       c.held_at, c.hold_reason, c.key_id is not null
from {schema}.conversations c
where c.tenant_id = %(tenant_id)s
  and (%(user_id)s::text is null or c.user_id = %(user_id)s)
  and (%(session_id)s::text is null or c.session_id = %(session_id)s
       or starts_with(c.session_id, %(session_id)s || %(before_agent)s))
  and (%(id)s::uuid is null or c.id = %(id)s)
order by c.updated_at desc, c.id
limit %(limit)s offset %(offset)s;
"""
"""A tenant's conversations, one user's, one with its agents', or one by id, last used first."""
