"""Every statement that the store sends, by name; nothing here runs one.

`{schema}` stands for the quoted name of the PostgreSQL schema, which `in_schema` fills in, once for each statement.
Rules that all of them keep, so that they also run on distributed PostgreSQL and behind pgbouncer:

- Several statements joined by `;` are sent as one query: one round trip, one transaction, and each takes its own
  snapshot. The last one's rows are the answer.
- Whoever changes a conversation locks its row first, in a statement of its own; a later statement then sees what a
  writer committed while this one waited for the lock.
- No session state, no sequence, no trigger, no advisory lock; only immutable expressions in DO UPDATE.
"""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=1024)
def in_schema(statement: str, schema: str) -> str:
    """Return `statement` with the schema's name, quoted, in place of each `{schema}`.

    The result is for psycopg2 with parameters: a `%` in the name is doubled.
    """
    return statement.replace("{schema}", quoted(schema).replace("%", "%%"))


def governed(statement: str, seconds: float) -> str:
    """Return `statement` behind settings for its transaction: a limit for each statement, and to go by index alone.

    With the limit a statement whose client has given up does not go on, nor queue up behind a lock with its
    repetitions. Where it may do otherwise, the planner reads whole tables, or sorts a whole conversation, while its
    statistics are older than the growth of a table, or where a window is larger than what it believes to be there.
    """
    return (
        f"set local statement_timeout = {max(1, round(seconds * 1000))};\n"
        f"set local enable_seqscan = off;\nset local enable_bitmapscan = off;\n{statement}"
    )


def quoted(name: str) -> str:
    """Return an SQL identifier for any name."""
    return '"' + name.replace('"', '""') + '"'


# The server's default may be repeatable read, under which concurrent appends fail instead of waiting.
_READ_COMMITTED = "set transaction isolation level read committed;\n"

# In the order of the fields of models.StoredMessage.
_MESSAGE = """m.role, m.content, m.additional_kwargs::text, m.extra::text, m.tags, m.judged_by,
           m.token_count, m.token_encoding, m.message_index, m.created_at"""

APPEND = (
    _READ_COMMITTED
    + """
with conversation as (
    insert into {schema}.conversations as c
        (id, tenant_id, user_id, session_id, next_message_index, keeps_summary, updated_at)
    values
        (%(id)s, %(tenant_id)s, %(user_id)s, %(session_id)s, %(message_count)s, %(keeps_summary)s, clock_timestamp())
    on conflict (id) do update set
        next_message_index = c.next_message_index + excluded.next_message_index,
        keeps_summary = c.keeps_summary or excluded.keeps_summary,
        updated_at = greatest(c.updated_at, excluded.updated_at)
    returning next_message_index - %(message_count)s as first_index
)
insert into {schema}.conversation_messages
    (conversation_id, message_index, tenant_id, role, content, additional_kwargs, extra,
     write_id, tags, judged_by, token_count, token_encoding, created_at)
select %(id)s, conversation.first_index + m.position::int - 1, %(tenant_id)s, m.role, m.content,
       m.additional_kwargs::json, m.extra::json,
       case when m.position = 1 then %(write_id)s::uuid end,
       case when m.position = 1 then %(tags)s::text[] end,
       %(judged_by)s, m.token_count, m.token_encoding,
       clock_timestamp() -- not now(): that is when the transaction began, before it waited for its number
from conversation,
     unnest(%(roles)s::text[], %(contents)s::text[], %(additional_kwargs)s::text[], %(extras)s::text[],
            %(token_counts)s::int[], %(token_encodings)s::text[])
         with ordinality as m (role, content, additional_kwargs, extra, token_count, token_encoding, position);
"""
)
"""Append messages and hand out their numbers; where this write is already there, fails on an index whose name contains
WRITE_ID_COLUMN: its own, or one of those that a partition or a shard has instead."""

WRITE_ID_COLUMN = "write_id"

PRUNE = """
with preamble as (
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
)
delete from {schema}.conversation_messages m
where m.conversation_id = %(id)s
  and m.message_index < (
      select case when c.keeps_summary then least(cut.message_index, c.summarized_through + 1)
                  else cut.message_index end
      from cut, {schema}.conversations c
      where c.id = %(id)s)
  and not (m.role = 'system' and m.message_index < (select ends_before from preamble));
"""
"""Delete oldest whole turns above `max_messages`: never the newest turn, a system message of the preamble, nor what a
summary has yet to cover. A log without turns keeps its newest messages. Only behind APPEND in the same query, whose
lock it needs."""

CLEAR = (
    _READ_COMMITTED
    + """
update {schema}.conversations
set summarized_through = next_message_index - 1, keeps_summary = false, revision = revision + 1
where id = %(id)s;
delete from {schema}.conversation_summaries where conversation_id = %(id)s;
delete from {schema}.conversation_messages where conversation_id = %(id)s;
"""
)
"""Delete what a conversation holds; its numbering goes on, so that nothing late can match a new message."""

# A conversation and the logs that agents keep beside it.
_FAMILY = """c.tenant_id = %(tenant_id)s and c.user_id = %(user_id)s
  and (c.session_id = %(session_id)s or starts_with(c.session_id, %(session_id)s || %(before_agent)s))"""

CLEAR_WITH_AGENTS = (
    _READ_COMMITTED
    + f"""
select c.id from {{schema}}.conversations c where {_FAMILY} order by c.id for update;
update {{schema}}.conversations c
set summarized_through = next_message_index - 1, keeps_summary = false, revision = revision + 1
where {_FAMILY};
delete from {{schema}}.conversation_summaries
where conversation_id in (select c.id from {{schema}}.conversations c where {_FAMILY});
delete from {{schema}}.conversation_messages
where conversation_id in (select c.id from {{schema}}.conversations c where {_FAMILY});
"""
)
"""As CLEAR, for a conversation and the logs that agents keep beside it, locked in the order of their ids. The one
statement that locks several conversations, and so not one for distributed PostgreSQL."""

READ_ALL = f"""
select {_MESSAGE}
from {{schema}}.conversation_messages m
where m.conversation_id = %(id)s
order by m.message_index;
"""

# A window is read by stepping from message to message along the primary key, in either direction, so that no more rows
# are touched than the window holds, whatever the planner believes. Its answer joins up to four parts.
PART_PREAMBLE, PART_SUMMARY, PART_WINDOW, PART_STATE = range(4)

_PREAMBLE_SYSTEM = f"""
select {PART_PREAMBLE} as part, false as done, {_MESSAGE}
from {{schema}}.conversation_messages m
where m.conversation_id = %(id)s and m.role = 'system'
  and m.message_index < coalesce(
      (select h.message_index from {{schema}}.conversation_messages h
       where h.conversation_id = %(id)s and h.role = 'human' order by h.message_index limit 1),
      2147483647)
"""

_SUMMARY = f"""
select {PART_SUMMARY} as part, false as done, * from (
    select 'summary', content, null::text, null::text, null::text[], null::text, null::int, null::text,
           covers_through, created_at
    from {{schema}}.conversation_summaries
    where conversation_id = %(id)s
    order by covers_through desc limit 1) s
"""

# What must still be so when a summary takes effect: the conversation was not made anew, nothing of it was cleared,
# deleted or replaced, and no other summary came first.
_STATE_OF_C = "concat_ws('/', extract(epoch from c.created_at), c.revision, c.summarized_through)"

_STATE = f"""
select {PART_STATE} as part, false as done, 'state', {_STATE_OF_C}, null::text, null::text, null::text[], null::text,
       null::int, null::text, null::int, c.created_at
from {{schema}}.conversations c
where c.id = %(id)s
"""

_AFTER_SUMMARY = "(select c.summarized_through from {schema}.conversations c where c.id = %(id)s)"

# A message without a count of this encoding is taken for fewer tokens than it has (4 around it and one for eight
# bytes), so that a page is rather too long than too short; the reader counts it and asks for another page if need be.
# What is stored beside the text costs something too, or a page of images could be as large as memory.
_COST = """coalesce(case when m.token_encoding = %(encoding)s then m.token_count end,
                     4 + octet_length(m.content) / 8 + coalesce(pg_column_size(m.extra), 0) / 64)"""


def _steps(*, bound: str, adds: str, done: str, newest_first: bool = True) -> str:
    """Return a recursive query `step` that goes on until a row is `done`, which it still includes.

    Args:
        bound: Condition on `m` that every row meets.
        adds: What row `m` adds to the running `total`.
        done: Condition on `m` and `total.total` that ends the walk.
        newest_first: Walk towards older messages, else towards newer ones.
    """
    order, beyond = ("desc", "<") if newest_first else ("asc", ">")
    return f"""
with recursive step as (
    (select m.*, total.total, {done} as done
     from {{schema}}.conversation_messages m cross join lateral (select {adds} as total) total
     where m.conversation_id = %(id)s and {bound}
     order by m.message_index {order} limit 1)
    union all
    select m.*, total.total, {done}
    from step cross join lateral (
        select * from {{schema}}.conversation_messages m
        where m.conversation_id = %(id)s and {bound} and m.message_index {beyond} step.message_index
        order by m.message_index {order} limit 1) m
    cross join lateral (select step.total + {adds} as total) total
    where not step.done
)
"""


_WINDOW = f"select {PART_WINDOW} as part, done, {_MESSAGE} from step m"
_UNION = "\nunion all\n"
_IN_ORDER = "\norder by part, message_index;\n"
_TOKENS_PASSED = "(total.total > %(budget)s and m.role = 'human')"

READ_LAST_TURNS = (
    _steps(bound="m.message_index < %(before)s", adds="(m.role = 'human')::int", done="total.total >= %(turns)s")
    + _UNION.join([_WINDOW, _PREAMBLE_SYSTEM])
    + _IN_ORDER
)
"""The last `turns` turns before message `before`, and the preamble's system messages."""

READ_LAST_TOKENS = (
    _steps(bound="m.message_index < %(before)s", adds=_COST, done=_TOKENS_PASSED)
    + _UNION.join([_WINDOW, _PREAMBLE_SYSTEM])
    + _IN_ORDER
)
"""The last turns before message `before` until they pass `budget` tokens, and the preamble's system messages."""

READ_SUMMARY_WINDOW = (
    _steps(
        bound=f"m.message_index < %(before)s and m.message_index > {_AFTER_SUMMARY}", adds=_COST, done=_TOKENS_PASSED
    )
    + _UNION.join([_WINDOW, _PREAMBLE_SYSTEM, _SUMMARY])
    + _IN_ORDER
)
"""As READ_LAST_TOKENS, but only turns that no summary covers, and the newest summary."""

READ_UNSUMMARIZED = (
    _steps(bound=f"m.message_index > {_AFTER_SUMMARY}", adds=_COST, done=_TOKENS_PASSED, newest_first=False)
    + _UNION.join([_WINDOW, _PREAMBLE_SYSTEM, _SUMMARY, _STATE])
    + _IN_ORDER
)
"""The oldest turns that no summary covers until they pass `budget` tokens, with all that RECORD_SUMMARY compares."""

READ_RELEVANT_TURNS = (
    """
with recursive step as (
    (select m.*, verdict.skipped, m.judged_by as end_judged_by, 0 as turn, found.total, found.total >= %(turns)s as done
     from {schema}.conversation_messages m
     cross join lateral (select m.role = 'human' and coalesce(m.judged_by = %(rule)s, false) and m.tags is null
                         as skipped) verdict
     cross join lateral (select (m.role = 'human' and not verdict.skipped)::int as total) found
     where m.conversation_id = %(id)s and m.message_index < %(before)s
     order by m.message_index desc limit 1)
    union all
    select m.*, verdict.skipped, turn.end_judged_by, turn.number, found.total, found.total >= %(turns)s
    from step cross join lateral (
        select * from {schema}.conversation_messages m
        where m.conversation_id = %(id)s and m.message_index < step.message_index
        order by m.message_index desc limit 1) m
    cross join lateral (
        select case when step.role = 'human' then m.judged_by else step.end_judged_by end as end_judged_by,
               step.turn + (step.role = 'human')::int as number) turn
    cross join lateral (
        -- A verdict counts while the turn's last message bears it too: what was added later was not judged.
        select m.role = 'human' and m.tags is null
               and coalesce(m.judged_by = %(rule)s and turn.end_judged_by = %(rule)s, false) as skipped) verdict
    cross join lateral (
        select step.total + (m.role = 'human' and not verdict.skipped)::int as total) found
    where not step.done
)
"""
    + _UNION.join([f"{_WINDOW} where m.turn not in (select turn from step where skipped)", _PREAMBLE_SYSTEM])
    + _IN_ORDER
)
"""As READ_LAST_TURNS, without the turns that `rule` is known to find irrelevant."""

RECORD_SUMMARY = (
    _READ_COMMITTED
    + f"""
select c.id from {{schema}}.conversations c where c.id = %(id)s for update;
with taken as (
    update {{schema}}.conversations c
    set summarized_through = %(covers_through)s, keeps_summary = true
    where c.id = %(id)s and {_STATE_OF_C} = %(state)s
    returning c.id
)
insert into {{schema}}.conversation_summaries (conversation_id, covers_through, tenant_id, content)
select taken.id, %(covers_through)s, %(tenant_id)s, %(content)s from taken
on conflict (conversation_id, covers_through) do update
    set content = excluded.content, created_at = excluded.created_at
returning covers_through;
"""
)
"""Let a summary take effect if the conversation's state is still the one it was made from; else return no row."""

READ_METADATA = "select c.metadata::text from {schema}.conversations c where c.id = %(id)s;"

SET_METADATA = (
    _READ_COMMITTED
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
       c.next_message_index, c.summarized_through, c.time_to_live
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
