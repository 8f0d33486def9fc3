"""Deleting and replacing messages of a log: lock the conversation, read the turns, edit them, in one transaction."""

from __future__ import annotations

from pgmemory.queries.parts import MESSAGE, READ_COMMITTED

LOCK_CONVERSATION = (
    READ_COMMITTED
    + """
select c.session_id, c.hold_reason, c.held_at is not null, c.key_id is not null
from {schema}.conversations c where c.id = %(id)s for update;
"""
)
"""Lock a conversation; return whether it is held and has a key."""

READ_TURNS_AROUND = f"""
with places as (
    select distinct
        coalesce((select h.message_index from {{schema}}.conversation_messages h
                  where h.conversation_id = %(id)s and h.role = 'human' and h.message_index <= i.i
                  order by h.message_index desc limit 1), -1) as first,
        coalesce((select h.message_index from {{schema}}.conversation_messages h
                  where h.conversation_id = %(id)s and h.role = 'human' and h.message_index > i.i
                  order by h.message_index limit 1), 2147483647) as beyond
    from unnest(%(indexes)s::int[]) as i (i)
)
select {MESSAGE}
from places join {{schema}}.conversation_messages m
    on m.conversation_id = %(id)s and m.message_index >= places.first and m.message_index < places.beyond
order by m.message_index;
"""
"""The turns in which messages stand, or the preamble; for an index above all, the last turn."""

APPLY_EDIT = """
-- By way of numbers below zero: with each row the new numbers must be unique.
update {schema}.conversation_messages set message_index = -1 - message_index
where conversation_id = %(id)s and %(moved_by)s > 0 and message_index >= %(moved_from)s;
update {schema}.conversation_messages set message_index = -1 - message_index + %(moved_by)s
where conversation_id = %(id)s and message_index < 0;

-- A write's id stands on its first message, and goes to the next one as long as there is one.
with gone as (
    delete from {schema}.conversation_messages
    where conversation_id = %(id)s and message_index = any(%(deleted)s::int[])
    returning message_index, write_id
),
heirs as (
    select distinct on (heir.message_index) heir.message_index, gone.write_id
    from gone cross join lateral (
        select m.message_index, m.write_id from {schema}.conversation_messages m
        where m.conversation_id = %(id)s and m.message_index > gone.message_index
          and m.message_index <> all(%(deleted)s::int[])
        order by m.message_index limit 1) heir
    where gone.write_id is not null and heir.write_id is null
    order by heir.message_index, gone.message_index desc
)
update {schema}.conversation_messages m set write_id = heirs.write_id
from heirs where m.conversation_id = %(id)s and m.message_index = heirs.message_index;

insert into {schema}.conversation_messages
    (conversation_id, message_index, tenant_id, role, content, additional_kwargs, extra, created_at, key_id)
select %(id)s, m.message_index, %(tenant_id)s, m.role, m.content, m.additional_kwargs::json, m.extra::json,
       coalesce(m.created_at, clock_timestamp()), %(key_id)s::uuid
from unnest(%(indexes)s::int[], %(roles)s::text[], %(contents)s::text[], %(additional_kwargs)s::text[],
            %(extras)s::text[], %(times)s::timestamptz[])
    as m (message_index, role, content, additional_kwargs, extra, created_at)
on conflict (conversation_id, message_index) do update set
    role = excluded.role, content = excluded.content, additional_kwargs = excluded.additional_kwargs,
    extra = excluded.extra, key_id = excluded.key_id, token_count = null, token_encoding = null;

-- What was judged is another turn now.
update {schema}.conversation_messages set tags = null, judged_by = null
where conversation_id = %(id)s and judged_by is not null
  and message_index between %(first)s and %(last)s + %(moved_by)s;

delete from {schema}.conversation_summaries where conversation_id = %(id)s and covers_through >= %(edited_from)s;
update {schema}.conversations c
set revision = revision + 1, next_message_index = next_message_index + %(moved_by)s,
    summarized_through = case
        when c.summarized_through < %(edited_from)s then c.summarized_through
        else coalesce((select max(s.covers_through) from {schema}.conversation_summaries s
                       where s.conversation_id = %(id)s), -1) end
where c.id = %(id)s;
"""
"""Edit the turns between `first` and `last`, of which `edited_from` is the oldest message that changes. Summaries that
cover it are dropped, and what they covered is to be summarised again."""
