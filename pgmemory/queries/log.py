"""The log of a conversation: appending to it, pruning it to a number of messages, clearing it, reading all of it."""

from __future__ import annotations

from pgmemory.queries.parts import MESSAGE, READ_COMMITTED

# Give the first number, or no row where new content must be encrypted with another key, or must not be, or where
# another tenant's row stands in the place of the conversation's.
_MAKE_OR_LOCK = """
with conversation as (
    insert into {schema}.conversations as c
        (id, tenant_id, user_id, session_id, next_message_index, keeps_summary, updated_at, time_to_live, key_id)
    values
        (%(id)s, %(tenant_id)s, %(user_id)s, %(session_id)s, %(message_count)s, %(keeps_summary)s, clock_timestamp(),
         %(time_to_live)s::interval, %(key_id)s::uuid)
    on conflict (id) do update set
        next_message_index = c.next_message_index + excluded.next_message_index,
        keeps_summary = c.keeps_summary or excluded.keeps_summary,
        updated_at = greatest(c.updated_at, excluded.updated_at),
        time_to_live = coalesce(c.time_to_live, excluded.time_to_live),
        key_id = excluded.key_id
    where c.key_id is null and c.tenant_id = excluded.tenant_id
    returning next_message_index - %(message_count)s as first_index
)"""
_STORE_KEY = """,
data_key as (
    insert into {schema}.conversation_keys (conversation_id, key_id, tenant_id, wrapped_key, master_key_name)
    select %(id)s, %(key_id)s, %(tenant_id)s, %(wrapped_key)s, %(master_key_name)s from conversation
)"""
# Makes no conversation: what was deleted must not come back with a key from before.
_LOCK_WITH_KEY = """
with conversation as (
    update {schema}.conversations c set
        next_message_index = c.next_message_index + %(message_count)s,
        keeps_summary = c.keeps_summary or %(keeps_summary)s,
        updated_at = greatest(c.updated_at, statement_timestamp()),
        time_to_live = coalesce(c.time_to_live, %(time_to_live)s::interval)
    where c.id = %(id)s and c.key_id = %(key_id)s
    returning c.next_message_index - %(message_count)s as first_index
)"""
_INSERT_MESSAGES = """
insert into {schema}.conversation_messages
    (conversation_id, message_index, tenant_id, role, content, additional_kwargs, extra,
     write_id, tags, judged_by, token_count, token_encoding, created_at, key_id)
select %(id)s, conversation.first_index + m.position::int - 1, %(tenant_id)s, m.role, m.content,
       m.additional_kwargs::json, m.extra::json,
       case when m.position = 1 then %(write_id)s::uuid end,
       case when m.position = 1 then %(tags)s::text[] end,
       %(judged_by)s, m.token_count, m.token_encoding,
       clock_timestamp(), -- not now(): that is when the transaction began, before it waited for its number
       %(key_id)s::uuid
from conversation,
     unnest(%(roles)s::text[], %(contents)s::text[], %(additional_kwargs)s::text[], %(extras)s::text[],
            %(token_counts)s::int[], %(token_encodings)s::text[])
         with ordinality as m (role, content, additional_kwargs, extra, token_count, token_encoding, position)
"""
_RETURNING = "returning message_index;\n"

APPEND = READ_COMMITTED + _MAKE_OR_LOCK + _INSERT_MESSAGES + _RETURNING
"""Append messages in clear text and hand out their numbers, which are returned; none if the conversation is encrypted.
Where this write is already there, fails on an index whose name contains WRITE_ID_COLUMN: its own, or one of those that
a partition or a shard has instead."""

APPEND_WITH_NEW_KEY = READ_COMMITTED + _MAKE_OR_LOCK + _STORE_KEY + _INSERT_MESSAGES + _RETURNING
"""As APPEND, encrypted with a key that becomes the conversation's; nothing is written if it has one."""

APPEND_WITH_KEY = READ_COMMITTED + _LOCK_WITH_KEY + _INSERT_MESSAGES + _RETURNING
"""As APPEND, encrypted with the conversation's key; nothing is written if that is another one by now."""

WRITE_ID_COLUMN = "write_id"

PRUNE = """
with written as materialized (
    select message_index from {schema}.conversation_messages
    where conversation_id = %(id)s and write_id = %(write_id)s
),
preamble as (
    select coalesce(
        (select message_index from {schema}.conversation_messages
         where conversation_id = %(id)s and role = 'human' order by message_index limit 1),
        2147483647) as ends_before
),
system as materialized (
    select count(*) as messages
    from {schema}.conversation_messages m
    where m.conversation_id = %(id)s and m.role = 'system'
      and m.message_index < (select ends_before from preamble)
),
newest as (
    select message_index, role, row_number() over (order by message_index desc) as rank
    from (select message_index, role from {schema}.conversation_messages
          where conversation_id = %(id)s order by message_index desc limit %(max_messages)s + 1) n
),
cut as materialized (
    select coalesce(
        (select min(message_index) from newest where role = 'human' and rank <= %(max_messages)s - system.messages),
        (select message_index from {schema}.conversation_messages
         where conversation_id = %(id)s and role = 'human' order by message_index desc limit 1),
        -- Without turns; not among the newest alone, which may all be system messages.
        (select min(message_index) from (
            select message_index from {schema}.conversation_messages
            where conversation_id = %(id)s and role <> 'system'
            order by message_index desc limit greatest(%(max_messages)s - system.messages, 1)) n)
    ) as message_index
    from system
    where (select count(*) from newest) > %(max_messages)s
),
pruned as (
    delete from {schema}.conversation_messages m
    where m.conversation_id = %(id)s
      and m.message_index < (
          select case when c.keeps_summary then least(cut.message_index, c.summarized_through + 1)
                      else cut.message_index end
          from written, cut, {schema}.conversations c
          where c.id = %(id)s and c.held_at is null)
      and not (m.role = 'system' and m.message_index < (select ends_before from preamble))
)
select message_index from written;
"""
"""Delete oldest whole turns above `max_messages`: never the newest turn, a system message of the preamble, nor what a
summary has yet to cover. A log without turns keeps its newest messages. Only behind APPEND in the same query, whose
lock it needs; returns a row if that has written, else it does nothing."""

# A conversation and the logs that agents keep beside it.
FAMILY = """c.tenant_id = %(tenant_id)s and c.user_id = %(user_id)s
  and (c.session_id = %(session_id)s or starts_with(c.session_id, %(session_id)s || %(before_agent)s))"""


def _clear(named: str) -> str:
    """Return the statements that clear the conversations that the condition `named` is true of, unless one is held."""
    held = f"{named} and c.held_at is not null"
    cleared = f"{named} and not exists (select 1 from {{schema}}.conversations c where {held})"
    return f"""
select c.id from {{schema}}.conversations c where {named} order by c.id for update;
update {{schema}}.conversations c
set summarized_through = next_message_index - 1, keeps_summary = false, revision = revision + 1
where {cleared};
delete from {{schema}}.conversation_summaries
where conversation_id in (select c.id from {{schema}}.conversations c where {cleared});
delete from {{schema}}.conversation_messages
where conversation_id in (select c.id from {{schema}}.conversations c where {cleared});
select c.session_id, c.hold_reason from {{schema}}.conversations c where {held} order by c.session_id;
"""


CLEAR = READ_COMMITTED + _clear("c.id = %(id)s")
"""Delete what a conversation holds; its numbering goes on, so that nothing late can match a new message. If it is held
nothing is deleted and it is returned."""

CLEAR_WITH_AGENTS = READ_COMMITTED + _clear(FAMILY)
"""As CLEAR, for a conversation and the logs that agents keep beside it, locked in the order of their ids. The one
statement that locks several conversations, and so not one for distributed PostgreSQL."""

READ_ALL = f"""
select {MESSAGE}
from {{schema}}.conversation_messages m
where m.conversation_id = %(id)s and m.message_index < %(before)s
order by m.message_index;
"""
