"""Keeping and forgetting whole conversations: holds, times to live, and deletion in batches.

Deletion takes two statements of one transaction: one locks the conversations of a batch and returns them, the other
deletes what the caller names. These look at many conversations, and so are not for distributed PostgreSQL.
"""

from __future__ import annotations

from pgmemory.queries.log import FAMILY
from pgmemory.queries.parts import READ_COMMITTED

HOLD = (
    READ_COMMITTED
    + f"""
update {{schema}}.conversations c set held_at = coalesce(c.held_at, clock_timestamp()),
    hold_reason = coalesce(%(reason)s, c.hold_reason)
where {FAMILY}
returning c.session_id;
"""
)
"""Hold a conversation and the logs that agents keep beside it."""

RELEASE = (
    READ_COMMITTED
    + f"""
update {{schema}}.conversations c set held_at = null, hold_reason = null
where {FAMILY} and c.held_at is not null
returning c.session_id;
"""
)

SET_TIME_TO_LIVE = (
    READ_COMMITTED
    + f"""
update {{schema}}.conversations c set time_to_live = %(time_to_live)s::interval
where {FAMILY}
returning c.session_id;
"""
)


def _is_held(row: str, itself: str) -> str:
    """Return a condition: held `itself`, or of a log that an agent keeps beside a conversation that is held.

    Also of a log that it began after the hold.
    """
    return f"""({itself} or (position(%(before_agent)s in {row}.session_id) > 0 and exists (
    select from {{schema}}.conversations b
    where b.held_at is not null and b.tenant_id = {row}.tenant_id and b.user_id = {row}.user_id
      and starts_with({row}.session_id, b.session_id || %(before_agent)s))))"""


_IN_TENANT = "(%(tenant_id)s::text is null or c.tenant_id = %(tenant_id)s)"
_HELD = _is_held("c", "c.held_at is not null")
# least() passes over nulls. A hundred years, for the time to be one: any span may stand in the column.
_IDLE = f"""{_IN_TENANT} and (c.time_to_live is not null or %(older_than)s::interval is not null)
  and c.updated_at < statement_timestamp() - least(c.time_to_live, %(older_than)s::interval, interval '100 years')"""
_OF_USER = "c.tenant_id = %(tenant_id)s and c.user_id = %(user_id)s"


def _lock(which: str, waiting: str) -> str:
    return (
        READ_COMMITTED
        + f"""
select c.id, c.next_message_index
from {{schema}}.conversations c
where c.id > %(after)s and not {_HELD} and {which}
order by c.id
limit %(limit)s
for update {waiting};
"""
    )


LOCK_IDLE = _lock(_IDLE, "skip locked")
"""Lock idle conversations after one of them, in the order of their ids, without waiting for those that are in use: a
conversation that a writer has just used is no longer idle. Returns a bound of what each holds."""

LOCK_FAMILY = _lock(FAMILY, "")

LOCK_USER = _lock(_OF_USER, "")

COUNT_IDLE = f"""
select count(*) filter (where not {_HELD}), count(*) filter (where {_HELD}),
       coalesce(sum((select count(*) from {{schema}}.conversation_messages m where m.conversation_id = c.id))
           filter (where not {_HELD}), 0)::bigint,
       coalesce(sum((select count(*) from {{schema}}.conversation_summaries s where s.conversation_id = c.id))
           filter (where not {_HELD}), 0)::bigint
from {{schema}}.conversations c
where {_IDLE};
"""

# Not by exists, for which the planner may read all conversations.
_HAS_NO_CONVERSATION = "(select o.id from {schema}.conversations o where o.id = i.owner_id) is null"
_OF_HELD = _is_held(
    "i", "exists (select from {schema}.conversations h where h.id = i.owner_id and h.held_at is not null)"
)
_ITEM_IN_TENANT = "(%(tenant_id)s::text is null or i.tenant_id = %(tenant_id)s)"
_EXPIRED = f"i.expires_at <= statement_timestamp() and {_ITEM_IN_TENANT} and not {_OF_HELD}"

_LONG_AGO = "statement_timestamp() - %(older_than)s::interval"
_IDLE_SESSIONS = f"""
    select i.tenant_id, i.owner_id
    from {{schema}}.items i
    where i.session_id <> '' and {_ITEM_IN_TENANT} and (i.tenant_id, i.owner_id) > (%(after_tenant)s, %(after)s::uuid)
    group by i.tenant_id, i.owner_id, i.user_id, i.session_id
    having max(i.updated_at) < {_LONG_AGO} and {_HAS_NO_CONVERSATION} and not {_OF_HELD}
"""

COUNT_ITEMS = f"""
select count(*) from {{schema}}.items i
where {_EXPIRED}
   or i.owner_id in (select c.id from {{schema}}.conversations c where not {_HELD} and {_IDLE})
   or (i.tenant_id, i.owner_id) in ({_IDLE_SESSIONS});
"""
"""Count the items that pruning would delete: expired ones, those of idle conversations, and of sessions without one."""

DELETE_EXPIRED_ITEMS = (
    READ_COMMITTED
    + f"""
with expired as materialized (
    select i.tenant_id, i.owner_id, i.namespace, i.key
    from {{schema}}.items i
    -- A hold waits for this lock, or this passes over what a hold has locked.
    left join lateral (
        select c.id from {{schema}}.conversations c where c.id = i.owner_id and c.held_at is null
        limit 1
        for share skip locked) free on true
    where {_EXPIRED} and (free.id is not null or {_HAS_NO_CONVERSATION})
    limit %(limit)s
    for update of i skip locked
)
delete from {{schema}}.items i using expired e
where (i.tenant_id, i.owner_id, i.namespace, i.key) = (e.tenant_id, e.owner_id, e.namespace, e.key)
returning 1;
"""
)
"""Delete expired items, without waiting for those that are in use or whose conversation is. In no order: sorted, the
conversations of all that have expired might be locked for one batch."""


DELETE_ITEMS_OF_IDLE_SESSIONS = (
    READ_COMMITTED
    + f"""
with idle as materialized ({_IDLE_SESSIONS}    order by i.tenant_id, i.owner_id
    limit %(limit)s
),
gone as (
    delete from {{schema}}.items i using idle
    where (i.tenant_id, i.owner_id) = (idle.tenant_id, idle.owner_id)
      and i.updated_at < {_LONG_AGO} -- still, if it was put again meanwhile
    returning i.tenant_id, i.owner_id
)
select idle.tenant_id, idle.owner_id::text,
       (select count(*) from gone where (gone.tenant_id, gone.owner_id) = (idle.tenant_id, idle.owner_id))
from idle
order by idle.tenant_id, idle.owner_id;
"""
)
"""Delete the items of sessions that have no conversation and into which nothing was put for long, in the order of their
tenants and ids after one of them; returns these, and how many items each had."""


def _delete_items(which: str, beside: str) -> str:
    """Return a statement that deletes items unless they are held.

    Args:
        which: The items, as `i`.
        beside: All conversations, as `c`, by whose holds they may be held.
    """
    # A hold waits for the lock, or this for the hold.
    return f"""{READ_COMMITTED}
select from {{schema}}.conversations c where {beside} order by c.id for share;
delete from {{schema}}.items i
where i.tenant_id = %(tenant_id)s and i.user_id = %(user_id)s and {which} and not {_OF_HELD}
returning 1;
"""


DELETE_ITEMS_OF_USER = _delete_items("true", _OF_USER)

DELETE_ITEMS_OF_FAMILY = _delete_items(
    "(i.session_id = %(session_id)s or starts_with(i.session_id, %(session_id)s || %(before_agent)s))",
    f"({FAMILY} or {_OF_USER} and starts_with(%(session_id)s, c.session_id || %(before_agent)s))",
)
"""Delete the items of a session, and of agents beside it, also where it has no conversation."""


def _held(which: str) -> str:
    return f"select c.session_id from {{schema}}.conversations c where {_HELD} and {which} order by c.session_id;"


HELD_OF_FAMILY = _held(FAMILY)

HELD_OF_USER = _held(_OF_USER)

DELETE_CONVERSATIONS = """
with messages as (
    delete from {schema}.conversation_messages where conversation_id = any(%(ids)s::uuid[]) returning conversation_id
),
summaries as (
    delete from {schema}.conversation_summaries where conversation_id = any(%(ids)s::uuid[]) returning conversation_id
),
items as (
    delete from {schema}.items i using {schema}.conversations c
    where c.id = any(%(ids)s::uuid[]) and i.tenant_id = c.tenant_id and i.owner_id = c.id
    returning i.owner_id
),
gone as (
    delete from {schema}.conversations where id = any(%(ids)s::uuid[]) returning id, session_id
)
select gone.session_id,
       (select count(*) from messages where conversation_id = gone.id),
       (select count(*) from summaries where conversation_id = gone.id),
       (select count(*) from items where owner_id = gone.id)
from gone
order by gone.session_id;
"""
"""Delete conversations, which the transaction has locked, with all that belongs to them; return what each held."""
