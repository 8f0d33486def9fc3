"""Items as rows: putting, getting, deleting, searching, namespaces.

Every statement names the owner, a user or a session, whose items it is about; the other indexes serve
`queries.retention`. Namespaces are compared by code points, so those below a prefix are a range of the primary key.
"""

from __future__ import annotations

from pgmemory.queries.meaning import IS_OF_MODEL
from pgmemory.queries.parts import READ_COMMITTED

_OWN = "i.tenant_id = %(tenant_id)s and i.owner_id = %(owner_id)s"
_LIVE = "(i.expires_at is null or i.expires_at > statement_timestamp())"
_BELOW_PREFIX = """i.namespace >= %(first)s::text[]
      and (%(last)s::text[] is null or i.namespace < %(last)s::text[])"""

# Well within what a tsvector can hold, whatever the text.
_MOST_BYTES_OF_WORDS = 250_000

# One after the other of an owner: what is put and what is deleted are locked in orders of their own, and waiting for
# each other in turn would end in deadlocks.
_ONE_WRITER = "select pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended(%(owner_id)s::text, 0));"

PUT = (
    READ_COMMITTED
    + f"""
{_ONE_WRITER}
insert into {{schema}}.items as i (tenant_id, owner_id, user_id, session_id, namespace, key, value, words,
                                 meaning_paths, created_at, updated_at, time_to_live, expires_at)
select %(tenant_id)s, %(owner_id)s::uuid, %(user_id)s, %(session_id)s, p.namespace, p.key, p.value,
       case when octet_length(p.value::text) <= {_MOST_BYTES_OF_WORDS} then to_tsvector('simple', p.value) else '' end,
       p.meaning_paths, statement_timestamp(), statement_timestamp(), p.time_to_live,
       statement_timestamp() + p.time_to_live
from json_to_recordset(%(puts)s::json) as p
    (namespace text[], key text, value json, meaning_paths jsonpath[], time_to_live interval)
on conflict (tenant_id, owner_id, namespace, key) do update set
    value = excluded.value,
    words = excluded.words,
    meaning_paths = excluded.meaning_paths,
    created_at = case when i.expires_at <= excluded.created_at then excluded.created_at else i.created_at end,
    updated_at = excluded.updated_at,
    time_to_live = excluded.time_to_live,
    expires_at = excluded.expires_at;
"""
)
"""Put items, replacing those of the same keys."""


def _refreshing(found: str) -> str:
    """Return a part of a statement that makes what it has found live as long again; leaves out what others change."""
    return f"""
due as (
    select e.namespace, e.key
    from {found} f cross join lateral (
        select i.namespace, i.key from {{schema}}.items i
        where {_OWN} and i.namespace = f.namespace and i.key = f.key and f.refresh
          and i.time_to_live is not null and {_LIVE}
        limit 1
        for no key update skip locked
    ) e
),
refreshed as (
    update {{schema}}.items i set expires_at = statement_timestamp() + i.time_to_live
    from due where {_OWN} and i.namespace = due.namespace and i.key = due.key
)"""


def _expires_at(refresh: str) -> str:
    """Return an expression for when an item expires, once it is read."""
    return f"case when {refresh} then statement_timestamp() + i.time_to_live else i.expires_at end as expires_at"


GET = (
    READ_COMMITTED
    + f"""
with asked as materialized (
    select * from json_to_recordset(%(keys)s::json) as a (namespace text[], key text, refresh boolean)
    limit %(count)s -- tells the planner how many
),
{_refreshing("asked")}
select e.namespace, e.key, e.value::text, e.created_at, e.updated_at, e.expires_at
from asked a cross join lateral (
    select i.namespace, i.key, i.value, i.created_at, i.updated_at, {_expires_at("a.refresh")} from {{schema}}.items i
    where {_OWN} and i.namespace = a.namespace and i.key = a.key and {_LIVE}
    limit 1
) e;
"""
)
"""Get items by their keys."""

# Compares as JSON does: equal numbers are equal however they are written, and what is not there is null.
_MEETS_CONDITIONS = """not exists (
        select from jsonb_to_recordset(%(conditions)s::jsonb) as c (path text[], operator text, value jsonb)
        cross join lateral (
            select coalesce(i.value::jsonb #> c.path, 'null') as found, coalesce(c.value, 'null') as asked
        ) v
        cross join lateral (
            select case when jsonb_typeof(v.found) <> jsonb_typeof(v.asked) then null
                        when jsonb_typeof(v.asked) = 'number'
                        then sign((v.found #>> '{}')::numeric - (v.asked #>> '{}')::numeric)
                        when v.found = v.asked then 0
                        when (v.found #>> '{}') collate "C" < (v.asked #>> '{}') collate "C" then -1
                        else 1 end as difference
        ) d
        where not coalesce(case c.operator when '$eq' then v.found = v.asked
                                           when '$ne' then v.found <> v.asked
                                           when '$gt' then d.difference > 0
                                           when '$gte' then d.difference >= 0
                                           when '$lt' then d.difference < 0
                                           when '$lte' then d.difference <= 0 end, false))"""

# Any of the words, so that a whole sentence may ask.
_ASKED_WORDS = r"""(
        select string_agg('''' || replace(replace(w.lexeme, '\', '\\'), '''', '''''') || '''', ' | ')::tsquery
        from unnest(to_tsvector('simple', %(query)s::text)) w)"""

_BY_WORDS = f"""cross join (select {_ASKED_WORDS} as words) asked
    cross join lateral (
        select case when %(query)s::text is not null then ts_rank(i.words, asked.words, 1) end as score
        where %(query)s::text is null or i.words @@ asked.words) s"""

# What means nothing is at no distance from anything.
_BY_MEANING = f"""cross join (
        select case when {IS_OF_MODEL} then %(embedding)s::{{vector}}.halfvec end as embedding) asked
    cross join lateral (
        select 1 - nullif(min(v.embedding operator({{vector}}.<=>) asked.embedding), 'NaN') as score
        from {{schema}}.item_vectors v
        where v.tenant_id = i.tenant_id and v.owner_id = i.owner_id and v.namespace = i.namespace and v.key = i.key
          and v.embedding is not null) s"""


def _search(scoring: str, refreshing: str) -> str:
    return f"""{READ_COMMITTED}
with found as materialized (
    select i.namespace, i.key, i.value, i.created_at, i.updated_at, {_expires_at("%(refresh)s")},
           %(refresh)s as refresh, s.score
    from {{schema}}.items i {scoring}
    where {_OWN} and {_LIVE} and {_BELOW_PREFIX}
      and (%(conditions)s::jsonb = '[]' or {_MEETS_CONDITIONS})
    order by score desc nulls last, i.updated_at desc, i.namespace, i.key
    limit %(limit)s offset %(offset)s
){refreshing}
select f.namespace, f.key, f.value::text, f.created_at, f.updated_at, f.expires_at, f.score
from found f
order by f.score desc nulls last, f.updated_at desc, f.namespace, f.key;
"""


_REFRESHING_FOUND = f",{_refreshing('found')}"

SEARCH = _search(_BY_WORDS, _REFRESHING_FOUND)
"""Search below a prefix: by words, best first, or all, last updated first."""

LOOK = _search(_BY_WORDS, "")
"""Search and refresh nothing, which a role or a server that only reads can."""

SEARCH_BY_MEANING = _search(_BY_MEANING, _REFRESHING_FOUND)
"""Search below a prefix by what is nearest to a vector; what has none comes last, last updated first."""

LOOK_BY_MEANING = _search(_BY_MEANING, "")
"""The same, and refresh nothing."""

LIST_NAMESPACES = f"""
select distinct i.namespace[1:%(max_depth)s]
from {{schema}}.items i
where {_OWN} and {_LIVE} and {_BELOW_PREFIX} and cardinality(i.namespace) >= %(min_depth)s
  and not exists (
      select from unnest(%(places)s::int[], %(labels)s::text[]) as c (place, label)
      where c.label is distinct from
            i.namespace[case when c.place > 0 then c.place else cardinality(i.namespace) + 1 + c.place end])
order by 1
limit %(limit)s offset %(offset)s;
"""
"""List the namespaces that bear certain labels at certain places, counted from 1, or from -1 at the end."""


def _delete(which: str, using: str = "") -> str:
    # A hold waits for the lock, or this for the hold.
    return f"""{READ_COMMITTED}
{_ONE_WRITER}
select from {{schema}}.conversations c where c.id = %(owner_id)s for share;
with held as (
    select c.session_id, c.hold_reason from {{schema}}.conversations c
    where c.id = %(owner_id)s and c.held_at is not null
),
gone as (
    delete from {{schema}}.items i {using}
    where {_OWN} and {which} and not exists (select from held)
    returning {_LIVE} as was_there
)
select (select count(*) from gone where was_there), held.session_id, held.hold_reason
from (select) one left join held on true;
"""


DELETE = _delete(
    "i.namespace = a.namespace and i.key = a.key",
    """using (
        select * from json_to_recordset(%(keys)s::json) as k (namespace text[], key text)
        limit %(count)s -- tells the planner how many
    ) a""",
)
"""Delete items by their keys; returns how many there were, and the conversation, with the reason, if it is held."""

CLEAR = _delete(_BELOW_PREFIX)
"""Delete all items below a prefix; returns as `DELETE` does."""
