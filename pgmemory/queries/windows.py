"""Windows of a log, read by index; and the summary that takes effect."""

from __future__ import annotations

from pgmemory.queries.parts import MESSAGE, READ_COMMITTED, sealed_with

# A window is read by stepping from message to message along the primary key, in either direction, so that no more rows
# are touched than the window holds, whatever the planner believes. Its answer joins up to four parts.
PART_PREAMBLE, PART_SUMMARY, PART_WINDOW, PART_STATE = range(4)

# Of windows that end before a message. A page never begins within the preamble, which so stands in each of them.
_BEFORE = "{row} < %(before)s"
_ALL = "true"


def _preamble_system(bound: str) -> str:
    return f"""
select {PART_PREAMBLE} as part, false as done, {MESSAGE}
from {{schema}}.conversation_messages m
where m.conversation_id = %(id)s and m.role = 'system' and {bound.format(row="m.message_index")}
  -- As a subselect: the planner takes coalesce() for a function that may leak rows, so behind a policy not by index.
  and m.message_index < (select coalesce(
      (select h.message_index from {{schema}}.conversation_messages h
       where h.conversation_id = %(id)s and h.role = 'human' order by h.message_index limit 1),
      2147483647))
"""


def _summary(bound: str) -> str:
    return f"""
select {PART_SUMMARY} as part, false as done, * from (
    select 'summary', s.content, null::text, null::text, null::text[], null::text, null::int, null::text,
           s.covers_through, s.created_at, {sealed_with("s")}
    from {{schema}}.conversation_summaries s
    where s.conversation_id = %(id)s and {bound.format(row="s.covers_through")}
    order by s.covers_through desc limit 1) s
"""


# What must still be so when a summary takes effect: the conversation was not made anew, nothing of it was cleared,
# deleted or replaced, no other summary came first, and its key, if it has one, is the same.
STATE_OF_C = "concat_ws('/', extract(epoch from c.created_at), c.revision, c.summarized_through, c.key_id)"


def key_id_in(state: str) -> str | None:
    """Return the id of the key that a conversation's state names; None for clear text."""
    key_id = state.split("/")[3:]
    return key_id[0] if key_id else None


_STATE = f"""
select {PART_STATE} as part, false as done, 'state', {STATE_OF_C}, c.tenant_id, null::text, null::text[], null::text,
       null::int, null::text, null::int, c.created_at, null::text[]
from {{schema}}.conversations c
where c.id = %(id)s
"""

_AFTER_SUMMARY = "(select c.summarized_through from {schema}.conversations c where c.id = %(id)s)"


def newest_summary_below(index: str) -> str:
    """Return the expression of what summaries cover in conversation `c`, taking into account those below a message.

    That is what its row says, unless that lies beyond; what was cleared then lies beyond, too.

    Args:
        index: The expression of the message's number.
    """
    return f"""case when c.summarized_through < {index} then c.summarized_through
                else coalesce((select max(s.covers_through) from {{schema}}.conversation_summaries s
                               where s.conversation_id = %(id)s and s.covers_through < {index}), -1) end"""


_AFTER_SUMMARY_BEFORE = (
    f"(select {newest_summary_below('%(before)s')} from {{schema}}.conversations c where c.id = %(id)s)"
)

# A message without a count of this encoding is taken for fewer tokens than it has (4 around it and one for eight
# bytes), so that a page is rather too long than too short; the reader counts it and asks for another page if need be.
# What is stored beside the text costs something too, or a page of images could be as large as memory. What is encrypted
# is longer than the text, and holds both.
_COST = """coalesce(case when m.token_encoding = %(encoding)s then m.token_count end,
                     4 + octet_length(m.content) / case when m.key_id is null then 8 else 16 end
                     + coalesce(pg_column_size(m.extra), 0) / 64)"""


def steps(*, bound: str, adds: str, done: str, newest_first: bool = True) -> str:
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


_WINDOW = f"select {PART_WINDOW} as part, done, {MESSAGE} from step m"
_UNION = "\nunion all\n"
_IN_ORDER = "\norder by part, message_index;\n"
_TOKENS_PASSED = "(total.total > %(budget)s and m.role = 'human')"

STEP_LAST_TURNS = steps(
    bound="m.message_index < %(before)s", adds="(m.role = 'human')::int", done="total.total >= %(turns)s"
)
WINDOW_AND_PREAMBLE = _UNION.join([_WINDOW, _preamble_system(_BEFORE)])

READ_LAST_TURNS = STEP_LAST_TURNS + WINDOW_AND_PREAMBLE + _IN_ORDER
"""The last `turns` turns before message `before`, and the preamble's system messages."""

READ_LAST_TOKENS = (
    steps(bound="m.message_index < %(before)s", adds=_COST, done=_TOKENS_PASSED)
    + _UNION.join([_WINDOW, _preamble_system(_BEFORE)])
    + _IN_ORDER
)
"""The last turns before message `before` until they pass `budget` tokens, and the preamble's system messages."""

READ_SUMMARY_WINDOW = (
    steps(
        bound=f"m.message_index < %(before)s and m.message_index > {_AFTER_SUMMARY_BEFORE}",
        adds=_COST,
        done=_TOKENS_PASSED,
    )
    + _UNION.join([_WINDOW, _preamble_system(_BEFORE), _summary(_BEFORE)])
    + _IN_ORDER
)
"""As READ_LAST_TOKENS, but only turns that no summary covers, and the newest summary: of those that cover only what
stands before message `before`."""

READ_UNSUMMARIZED = (
    steps(bound=f"m.message_index > {_AFTER_SUMMARY}", adds=_COST, done=_TOKENS_PASSED, newest_first=False)
    + _UNION.join([_WINDOW, _preamble_system(_ALL), _summary(_ALL), _STATE])
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
    + _UNION.join([f"{_WINDOW} where m.turn not in (select turn from step where skipped)", _preamble_system(_BEFORE)])
    + _IN_ORDER
)
"""As READ_LAST_TURNS, without the turns that `rule` is known to find irrelevant."""

RECORD_SUMMARY = (
    READ_COMMITTED
    + f"""
select c.id from {{schema}}.conversations c where c.id = %(id)s for update;
with taken as (
    update {{schema}}.conversations c
    set summarized_through = %(covers_through)s, keeps_summary = true
    where c.id = %(id)s and {STATE_OF_C} = %(state)s
    returning c.id
)
insert into {{schema}}.conversation_summaries (conversation_id, covers_through, tenant_id, content, key_id)
select taken.id, %(covers_through)s, %(tenant_id)s, %(content)s, %(key_id)s::uuid from taken
on conflict (conversation_id, covers_through) do update
    set content = excluded.content, key_id = excluded.key_id, created_at = excluded.created_at
returning covers_through;
"""
)
"""Let a summary take effect if the conversation's state is still the one it was made from; else return no row."""
