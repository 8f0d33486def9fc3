"""Branches and time: copying the beginning of a conversation into a new one, and listing a conversation's states.

A fork locks the conversation that it copies, so that all of its parts are of one moment and nothing is copied that is
being erased; its writers wait meanwhile, its readers do not. It touches two conversations, and so is not for
distributed PostgreSQL.
"""

from __future__ import annotations

from pgmemory.queries.parts import MESSAGE, READ_COMMITTED, sealed_with
from pgmemory.queries.windows import PART_SUMMARY, PART_WINDOW, newest_summary_below, steps

LOCK_SOURCE = (
    READ_COMMITTED
    + """
select c.next_message_index, c.key_id::text from {schema}.conversations c where c.id = %(id)s for share;
"""
)

# What was sealed with the conversation's key opens in no other conversation; what was sealed with a key that is gone
# opens nowhere, and stays so.
_OPENS_HERE_TOO = "(%(source_key_id)s::uuid is null or {row}.key_id is distinct from %(source_key_id)s::uuid)"

COPY = f"""
with cut as (
    -- Of a turn that goes on in the source a part is copied, which was never judged.
    select coalesce((select h.message_index from {{schema}}.conversation_messages h
                     where h.conversation_id = %(id)s and h.role = 'human' and h.message_index <= %(through)s
                     order by h.message_index desc limit 1), -1) as message_index
    where (select n.role from {{schema}}.conversation_messages n
           where n.conversation_id = %(id)s and n.message_index > %(through)s
           order by n.message_index limit 1) <> 'human'
),
fork as (
    insert into {{schema}}.conversations
        (id, tenant_id, user_id, session_id, metadata, next_message_index, summarized_through, keeps_summary,
         time_to_live, key_id)
    select %(fork_id)s, c.tenant_id, c.user_id, %(session_id)s, c.metadata, %(through)s + 1,
           {newest_summary_below("%(through)s + 1")}, c.keeps_summary,
           coalesce(c.time_to_live, %(time_to_live)s::interval), %(key_id)s::uuid
    from {{schema}}.conversations c where c.id = %(id)s
    on conflict (id) do nothing
    returning id, tenant_id
),
data_key as (
    insert into {{schema}}.conversation_keys (conversation_id, key_id, tenant_id, wrapped_key, master_key_name)
    select fork.id, %(key_id)s::uuid, fork.tenant_id, %(wrapped_key)s, %(master_key_name)s
    from fork where %(key_id)s::uuid is not null
),
messages as (
    insert into {{schema}}.conversation_messages
        (conversation_id, message_index, tenant_id, role, content, additional_kwargs, extra, tags, judged_by,
         token_count, token_encoding, created_at, key_id)
    select fork.id, m.message_index, fork.tenant_id, m.role, m.content, m.additional_kwargs, m.extra,
           case when is_judged then m.tags end, case when is_judged then m.judged_by end,
           m.token_count, m.token_encoding, m.created_at, m.key_id
    from fork
    join {{schema}}.conversation_messages m on m.conversation_id = %(id)s and m.message_index <= %(through)s
    cross join lateral (select not exists (select 1 from cut where cut.message_index <= m.message_index)) j (is_judged)
    where {_OPENS_HERE_TOO.format(row="m")}
),
summaries as (
    insert into {{schema}}.conversation_summaries
        (conversation_id, covers_through, tenant_id, content, created_at, key_id)
    select fork.id, s.covers_through, fork.tenant_id, s.content, s.created_at, s.key_id
    from fork
    join {{schema}}.conversation_summaries s on s.conversation_id = %(id)s and s.covers_through <= %(through)s
    where {_OPENS_HERE_TOO.format(row="s")}
)
select id from fork;
"""
"""Make a conversation of a locked one's row, its messages up to `through` and the summaries of these; no row, and
nothing is done, if there is one of that name. What `source_key_id` sealed is left out."""

# As for exports: a page is bounded by its bytes, and through the weight of a row also by its rows.
READ_SEALED = (
    steps(
        bound="m.message_index >= %(first)s and m.message_index <= %(through)s and m.key_id = %(source_key_id)s::uuid",
        adds="(8192 + octet_length(m.content))::bigint",
        done="total.total >= 8192 * 1000",
        newest_first=False,
    )
    + f"select {MESSAGE} from step m order by m.message_index;"
)
"""A page of the messages that `source_key_id` sealed, from the number `first` up to `through`."""

READ_SEALED_SUMMARIES = f"""
select 'summary', s.content, s.covers_through, s.created_at, {sealed_with("s")}
from {{schema}}.conversation_summaries s
where s.conversation_id = %(id)s and s.covers_through <= %(through)s and s.key_id = %(source_key_id)s::uuid;
"""

COPY_SEALED = """
insert into {schema}.conversation_messages
    (conversation_id, message_index, tenant_id, role, content, token_count, token_encoding, created_at, key_id)
select %(fork_id)s, m.message_index, m.tenant_id, m.role, sealed.content, m.token_count, m.token_encoding, m.created_at,
       %(key_id)s::uuid
from unnest(%(indexes)s::int[], %(contents)s::text[]) as sealed (message_index, content)
join {schema}.conversation_messages m
    on m.conversation_id = %(id)s and m.message_index = sealed.message_index;
"""
"""Copy encrypted messages with their content sealed anew."""

COPY_SEALED_SUMMARIES = """
insert into {schema}.conversation_summaries (conversation_id, covers_through, tenant_id, content, created_at, key_id)
select %(fork_id)s, s.covers_through, s.tenant_id, sealed.content, s.created_at, %(key_id)s::uuid
from unnest(%(indexes)s::int[], %(contents)s::text[]) as sealed (covers_through, content)
join {schema}.conversation_summaries s
    on s.conversation_id = %(id)s and s.covers_through = sealed.covers_through;
"""

MARK = """
update {schema}.conversation_messages set write_id = %(write_id)s
where conversation_id = %(fork_id)s and message_index = (
    select m.message_index from {schema}.conversation_messages m
    where m.conversation_id = %(fork_id)s order by m.message_index limit 1);
"""
"""Let what was copied be one write, by whose id the same fork is known when it is asked for again."""

FIND_MARK = """
select 1 from {schema}.conversations c
where c.id = %(fork_id)s
  and (exists (select 1 from {schema}.conversation_messages m
               where m.conversation_id = %(fork_id)s and m.write_id = %(write_id)s)
       or (c.next_message_index = %(through)s + 1
           and not exists (select 1 from {schema}.conversation_messages m
                           where m.conversation_id = %(fork_id)s
                              or (m.conversation_id = %(id)s and m.message_index <= %(through)s))));
"""
"""Tell whether a conversation is this fork. A fork of no message bears no mark, and has none."""

READ_STATES = f"""
with ends as materialized (
    select m.*
    from {{schema}}.conversation_messages m
    left join lateral (
        select n.role from {{schema}}.conversation_messages n
        where n.conversation_id = %(id)s and n.message_index > m.message_index and n.message_index < %(before)s
        order by n.message_index limit 1) following on true
    where m.conversation_id = %(id)s and m.message_index < %(below)s
      and (following.role is null or following.role = 'human')
    order by m.message_index desc
    limit %(limit)s
)
select {PART_WINDOW} as part, false as done, {MESSAGE} from ends m
union all
select {PART_SUMMARY} as part, false as done, 'summary', s.content, null::text, null::text, null::text[], null::text,
       null::int, null::text, s.covers_through, s.created_at, {sealed_with("s")}
from {{schema}}.conversation_summaries s
where s.conversation_id = %(id)s
  and s.covers_through <= (select max(message_index) from ends)
  and s.covers_through >= (select coalesce(max(o.covers_through), 0) from {{schema}}.conversation_summaries o
                           where o.conversation_id = %(id)s
                             and o.covers_through <= (select min(message_index) from ends))
order by part, message_index desc;
"""
"""The last messages of turns, and of the preamble, newest first, and the summaries that counted then. What is not below
`before` is not there; a page goes on `below` a number."""
