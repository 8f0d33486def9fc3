"""Looking at what is stored: a log page by page, its newest messages, new ones as they come, searching, counting.

Nothing here is on the way of a turn. What looks at all messages of a tenant goes by the planner's own choice.
"""

from __future__ import annotations

from pgmemory.queries.parts import MESSAGE, quoted

_WHOLE_TABLES = "set local enable_seqscan = on;\nset local enable_bitmapscan = on;\n"

# Each parameter that is null restricts nothing.
_SCOPE = """(%(tenant_id)s::text is null or c.tenant_id = %(tenant_id)s)
  and (%(user_id)s::text is null or c.user_id = %(user_id)s)"""
_SCOPE_OR_ONE = f"{_SCOPE}\n  and (%(id)s::uuid is null or c.id = %(id)s)"

READ_PAGE = f"""
select {MESSAGE}
from {{schema}}.conversation_messages m
where m.conversation_id = %(id)s and m.message_index > %(after)s
order by m.message_index
limit %(limit)s;
"""

READ_NEWEST = f"""
with latest as (
    select c.id, c.tenant_id, c.user_id, c.session_id
    from {{schema}}.conversations c
    where {_SCOPE_OR_ONE}
      and exists (select 1 from {{schema}}.conversation_messages m where m.conversation_id = c.id)
    order by c.updated_at desc
    limit %(limit)s
)
select latest.tenant_id, latest.user_id, latest.session_id, {MESSAGE}
from latest cross join lateral (
    select * from {{schema}}.conversation_messages m
    where m.conversation_id = latest.id
    order by m.message_index desc
    limit %(limit)s) m
order by case when %(id)s::uuid is null then m.created_at end desc, latest.id, m.message_index desc
limit %(limit)s;
"""
"""The newest messages of conversations, newest first: by their times among several, by their numbers in one."""

READ_ACTIVE = f"""
select c.tenant_id, c.user_id, c.session_id, c.next_message_index, statement_timestamp()
from (select 1) one left join {{schema}}.conversations c
on {_SCOPE_OR_ONE}
  and (%(id)s::uuid is not null
       or c.updated_at > coalesce(%(as_of)s::timestamptz, statement_timestamp()) - %(known_for)s::interval);
"""
"""Conversations with a turn of late, or the one; and the time, which also stands in a row of nulls if there is none."""

INDEX_BEFORE = """
select m.message_index
from {schema}.conversation_messages m
where m.conversation_id = %(id)s and m.created_at <= %(time)s
order by m.message_index desc
limit 1;
"""
"""The number of the last message that was there at a time. Steps back from the newest, and so reads what came since."""

UNICODE_COLLATION = """
select c.collname from pg_collation c
where c.collname in ('pg_unicode_fast', 'und-x-icu') and c.collnamespace = 'pg_catalog'::regnamespace
  and c.collencoding in (-1, pg_char_to_encoding(getdatabaseencoding()))
order by c.collname
limit 1;
"""
"""A collation that knows the case of every script's letters: PostgreSQL's own from 18 on, or ICU's."""

COUNT_SEARCHED = f"""
select count(*) filter (where c.key_id is null), count(*) filter (where c.key_id is not null)
from {{schema}}.conversations c
where {_SCOPE};
"""
"""How many conversations can be searched, and how many cannot because they are encrypted."""


def search(collation: str | None, *, whole_tables: bool) -> str:
    """Return the statement that finds messages whose content holds a text, newest first.

    A row has the conversation's names, the message's number, role and time, an excerpt, where in it the text begins,
    counted from 0, how long it is, and whether the excerpt begins and ends as the content does.

    Args:
        collation: Whose idea of upper and lower case is taken; None for the database's own.
        whole_tables: Let the planner read whole tables.
    """
    by = "" if collation is None else f" collate {quoted(collation)}"
    statement = f"""
with hits as (
    select c.tenant_id, c.user_id, c.session_id, m.conversation_id, m.message_index, m.role, m.created_at, m.content,
           strpos(lower(m.content{by}), lower(%(text)s{by})) as place, char_length(lower(%(text)s{by})) as length
    from {{schema}}.conversations c join {{schema}}.conversation_messages m on m.conversation_id = c.id
    where {_SCOPE} and m.key_id is null
      and strpos(lower(m.content{by}), lower(%(text)s{by})) > 0
    order by m.created_at desc, m.conversation_id, m.message_index desc
    limit %(limit)s
),
places as (select *, greatest(place - %(context)s, 1) as start from hits)
select tenant_id, user_id, session_id, message_index, role, created_at,
       substr(content, start, place - start + length + %(context)s), place - start, length,
       start = 1, place + length + %(context)s > char_length(content)
from places
order by created_at desc, conversation_id, message_index desc;
"""
    return (_WHOLE_TABLES if whole_tables else "") + statement


COUNT_CONVERSATIONS = (
    _WHOLE_TABLES
    + f"""
select count(*), count(distinct (c.tenant_id, c.user_id)) filter (where c.user_id <> ''),
       count(*) filter (where c.held_at is not null),
       count(*) filter (where c.held_at is null and c.time_to_live is not null
           and c.updated_at < statement_timestamp() - least(c.time_to_live, interval '100 years')),
       count(*) filter (where c.key_id is not null),
       (statement_timestamp() at time zone 'UTC')::date
from {{schema}}.conversations c
where {_SCOPE};
"""
)

COUNT_NEW_CONVERSATIONS = (
    _WHOLE_TABLES
    + f"""
select (c.created_at at time zone 'UTC')::date as day, count(*)
from {{schema}}.conversations c
where {_SCOPE} and c.created_at >= %(since)s::timestamp at time zone 'UTC'
group by day;
"""
)

COUNT_MESSAGES = (
    _WHOLE_TABLES
    + f"""
select (m.created_at at time zone 'UTC')::date as day, count(*), count(*) filter (where m.role = 'human'),
       coalesce(sum(m.token_count), 0)::bigint, count(*) filter (where m.token_count is null)
from {{schema}}.conversations c join {{schema}}.conversation_messages m on m.conversation_id = c.id
where {_SCOPE}
group by day;
"""
)
"""For each day, in UTC: messages, human ones among them, their tokens, and how many were not counted."""

TABLE_SIZES = """
select c.relname, pg_table_size(c.oid), pg_indexes_size(c.oid)
from pg_class c join pg_namespace n on n.oid = c.relnamespace
where n.nspname = %(schema)s and c.relkind = 'r'
order by pg_total_relation_size(c.oid) desc, c.relname;
"""
