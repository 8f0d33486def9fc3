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
update {{schema}}.conversations c set held_at = coalesce(c.held_at, clock_timestamp()), hold_reason = %(reason)s
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

_IN_TENANT = "(%(tenant_id)s::text is null or c.tenant_id = %(tenant_id)s)"
# least() passes over nulls.
_IDLE = f"{_IN_TENANT} and c.updated_at < statement_timestamp() - least(c.time_to_live, %(older_than)s::interval)"
_OF_USER = "c.tenant_id = %(tenant_id)s and c.user_id = %(user_id)s"


def _lock(which: str, waiting: str) -> str:
    return (
        READ_COMMITTED
        + f"""
select c.id, c.next_message_index
from {{schema}}.conversations c
where c.id > %(after)s and c.held_at is null and {which}
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
select count(*) filter (where c.held_at is null), count(*) filter (where c.held_at is not null),
       coalesce(sum((select count(*) from {{schema}}.conversation_messages m where m.conversation_id = c.id))
           filter (where c.held_at is null), 0)::bigint,
       coalesce(sum((select count(*) from {{schema}}.conversation_summaries s where s.conversation_id = c.id))
           filter (where c.held_at is null), 0)::bigint
from {{schema}}.conversations c
where {_IDLE};
"""

_HELD = """
select c.session_id from {schema}.conversations c where c.held_at is not null and {which} order by c.session_id;
"""

HELD_OF_FAMILY = _HELD.format(which=FAMILY, schema="{schema}")

HELD_OF_USER = _HELD.format(which=_OF_USER, schema="{schema}")

DELETE_CONVERSATIONS = """
with messages as (
    delete from {schema}.conversation_messages where conversation_id = any(%(ids)s::uuid[]) returning conversation_id
),
summaries as (
    delete from {schema}.conversation_summaries where conversation_id = any(%(ids)s::uuid[]) returning conversation_id
),
gone as (
    delete from {schema}.conversations where id = any(%(ids)s::uuid[]) returning id, session_id
)
select gone.session_id,
       (select count(*) from messages where conversation_id = gone.id),
       (select count(*) from summaries where conversation_id = gone.id)
from gone
order by gone.session_id;
"""
"""Delete conversations, which the transaction has locked, with all that belongs to them; return what each held."""
