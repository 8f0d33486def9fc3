r"""Recall: the words of messages, by which a user's past is found, and the messages that matter for a text.

A word of a message is one row: a hash of the word and of whose it is, where it stands, how often, and how long the
message is. So one b-tree finds a user's messages that share a word, with all that ranks them, and row-level security
lets the planner use it, which it does not for the operators of GIN and GiST: they are not leakproof. It is not made by
a migration, but where it is asked for, and works without any extension. Its key does not begin with the conversation's
id, and so it is not for distributed PostgreSQL.
"""

from __future__ import annotations

from pgmemory.queries.parts import MESSAGE, READ_COMMITTED
from pgmemory.queries.windows import STEP_LAST_TURNS, WINDOW_AND_PREAMBLE

PART_RECALLED = 4

# What the human and the AI said; not what tools returned.
_ROLES = "('human', 'ai')"

# Making it

LANGUAGE = """
select split_part(s.setting, '=', 2)
from pg_catalog.pg_proc p join pg_catalog.pg_namespace n on n.oid = p.pronamespace
cross join unnest(p.proconfig) as s (setting)
where n.nspname = %(schema)s and p.proname = 'terms_of' and s.setting like 'default_text_search_config=%%'
"""
"""The text search configuration that words are made with; no row where messages cannot be recalled."""

FIND_LANGUAGE = """
select format('%%I.%%I', n.nspname, c.cfgname), quote_literal(format('%%I.%%I', n.nspname, c.cfgname)),
       current_setting('server_encoding')
from pg_catalog.pg_ts_config c join pg_catalog.pg_namespace n on n.oid = c.cfgnamespace
where c.oid = (select l.oid from pg_catalog.pg_ts_config l
               where %(language)s in (l.cfgname, format('%%I.%%I', l.cfgnamespace::regnamespace, l.cfgname))
               order by pg_catalog.pg_ts_config_is_visible(l.oid) desc, l.oid limit 1)
"""
"""A text search configuration's whole name, the same as a constant, and how the database encodes text; no row if there
is none of this name."""

LIST_LANGUAGES = "select c.cfgname from pg_catalog.pg_ts_config c order by c.cfgname"

CREATE_TABLE = """
-- The words of messages in clear text, as hashes: what a user's past is recalled by.
create table if not exists {schema}.message_terms (
    term             bigint    not null, -- of the word and of whose conversation it is
    conversation_id  uuid      not null,
    message_index    int       not null,
    tenant_id        text      not null,
    frequency        smallint  not null, -- how often the word stands in the message
    length           smallint  not null, -- how many words stand in it
    primary key (term, conversation_id, message_index) include (frequency, length, tenant_id),
    foreign key (conversation_id, message_index)
        references {schema}.conversation_messages (conversation_id, message_index) on delete cascade on update cascade
);
-- For the deletion of messages.
create index if not exists message_terms_by_message on {schema}.message_terms (conversation_id, message_index);
"""

EMPTY_TABLE = "truncate {schema}.message_terms"

# A long text costs as many rows as it has words; and to_tsvector fails beyond a megabyte.
_CHARACTERS = 20_000
_ACCENTS = r"\u0300-\u036f"
_HAN = r"\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003134f"
_CJK = rf"{_HAN}\u3041-\u30ff\uac00-\ud7af"

# E'' makes the escapes the characters themselves, whatever standard_conforming_strings is when the body is read.
CREATE_FUNCTION = rf"""
create or replace function {{schema}}.terms_of(content text, scope bigint)
returns table (term bigint, frequency smallint, length smallint)
language plpgsql immutable strict parallel safe
set search_path = pg_catalog, pg_temp
set default_text_search_config = {{language}}
as $function$
declare
    folded text := left(content, {_CHARACTERS});
    unspaced text[] := '{{}}';
begin
    if octet_length(folded) > char_length(folded) then
        folded := left(
            normalize(regexp_replace(normalize(folded, nfkd), E'[{_ACCENTS}]', '', 'g'), nfkc), {_CHARACTERS});
        -- Chinese and Japanese are written without spaces: each two neighbours are taken for a word, and so is a Han
        -- character that stands by itself, as between kana.
        unspaced := array(
            select p.pair from (
                select c.c || lead(c.c) over (partition by r.n order by c.i) as pair
                from regexp_matches(folded, E'[{_CJK}]+', 'g') with ordinality as r (run, n)
                cross join unnest(string_to_array(r.run[1], null)) with ordinality as c (c, i)) p
            where p.pair is not null
            union all
            select h.han[1] from regexp_matches(folded, E'(?<![{_HAN}])[{_HAN}](?![{_HAN}])', 'g') as h (han));
        folded := regexp_replace(folded, E'[{_CJK}]+', ' ', 'g');
    end if;
    return query
    with words as (
        select w.lexeme as word, cardinality(w.positions) as times
        -- 'either/or' would be taken for the name of a file.
        from unnest(to_tsvector(translate(folded, '/', ' '))) w
        union all
        select u.u, 1 from unnest(unspaced) u
    )
    select hashtextextended(w.word collate "C", scope), least(sum(w.times), 32767)::smallint,
           least(sum(sum(w.times)) over (), 32767)::smallint
    from words w
    group by 1;
end
$function$;
comment on function {{schema}}.terms_of(text, bigint) is
    'The words of a text, without accents and inflection, as hashes for one user';
"""


def _scope(tenant_id: str, user_id: str, id: str) -> str:
    """Return whose words a conversation's are: its user's; without a user, its own, for they are nobody else's."""
    return f"""case when {user_id} = '' then pg_catalog.hashtextextended({id}::text, 0)
                else pg_catalog.hashtextextended({user_id}, pg_catalog.hashtextextended({tenant_id}, 0)) end"""


SCOPE_OF_C = _scope("c.tenant_id", "c.user_id", "c.id")
_SCOPE = _scope("%(tenant_id)s::text", "%(user_id)s::text", "%(id)s::uuid")

# Keeping it

_INSERT = """insert into {schema}.message_terms (term, conversation_id, message_index, tenant_id, frequency, length)
    select t.term, m.conversation_id, m.message_index, m.tenant_id, t.frequency, t.length"""

INDEX_STORED = f"""
    {_INSERT}
    from stored m cross join lateral {{schema}}.terms_of(m.content, {_SCOPE}) t
    where m.role in {_ROLES}
"""
"""Index what the same statement has stored in clear text, for `queries.log`: it returns these rows as `stored`."""


def _index(which: str) -> str:
    """Return a statement that indexes the messages in clear text that the condition `which` is true of."""
    return f"""
    {_INSERT}
    from {{schema}}.conversations c
    join {{schema}}.conversation_messages m on m.conversation_id = c.id
    cross join lateral {{schema}}.terms_of(m.content, {SCOPE_OF_C}) t
    where {which} and m.role in {_ROLES} and m.key_id is null
    on conflict do nothing;
"""


_LACKS_TERMS = """not exists (
        select from {schema}.message_terms o
        where o.conversation_id = m.conversation_id and o.message_index = m.message_index)"""

INDEX_NUMBERED = _index("c.id = %(id)s and m.message_index = any(%(indexes)s::int[])")
"""Index messages of a conversation. Only behind its lock in the same transaction, as the next two."""

INDEX_AGAIN = (
    """
delete from {schema}.message_terms where conversation_id = %(id)s and message_index = any(%(indexes)s::int[]);
"""
    + INDEX_NUMBERED
)
"""As INDEX_NUMBERED, where they may have said something else before."""

INDEX_MESSAGES = _index(f"c.id = %(id)s and {_LACKS_TERMS}")
"""Index all messages of a conversation that are not indexed yet."""

READ_IDS_TO_INDEX = """
select c.id::text, c.next_message_index from {schema}.conversations c
where c.id > %(after)s::uuid and (%(tenant_id)s::text is null or c.tenant_id = %(tenant_id)s)
order by c.id limit %(limit)s;
"""
"""The ids of conversations after another one's, in order, with a bound of what each holds."""

INDEX_BATCH = (
    READ_COMMITTED
    + """
select c.id from {schema}.conversations c where c.id = any(%(ids)s::uuid[]) order by c.id for update;
with indexed as (
"""
    + _index(
        "c.id = any(%(ids)s::uuid[]) and m.message_index >= %(first)s and m.message_index < %(end)s "
        f"and {_LACKS_TERMS}"
    ).rstrip("; \n")
    + """
    returning conversation_id, message_index
)
select count(distinct (conversation_id, message_index)) from indexed;
"""
)
"""Index messages of conversations that are not indexed yet, from the number `first` on and below `end`; return how many
there were. Those without any word are among them each time, uncounted."""

# Recalling

# BM25: S. Robertson, H. Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond" (2009), with the inverse
# document frequency that is never negative. Messages are short: a word that is repeated, and a message's length, count
# for less than among documents.
_K1, _B = 0.6, 0.3
# What is meant often stands in the question before an answer, or in the answer after a question.
_NEIGHBOUR = "1 / 3::float8"
# Of a longer text, the words that it uses most.
_ASKED_TERMS = 64

_SCOPED = """
-- When message `before` was yet to be said; else there is no such moment.
moment as (
    select coalesce((select m.created_at from {schema}.conversation_messages m
                     where m.conversation_id = %(id)s and m.message_index < %(before)s and %(before)s < 2147483647
                     order by m.message_index desc limit 1), 'infinity') as at
),
-- What is shown or lies beyond is not recalled, nor are others for standing beside it.
own as (
    select coalesce((select min(step.message_index) from step where %(turns)s > 0), %(before)s) as recalled_before
),
-- A message is a single number from here on: its conversation's place, the last used having the highest, and its own.
mine as materialized (
    select c.id, c.session_id, c.next_message_index,
           row_number() over (order by c.updated_at, c.id) << 32 as place,
           c.id = %(id)s or (%(whole_user)s and position(%(before_agent)s in c.session_id) = 0
                             and c.created_at <= (select at from moment)) as is_recalled
    from {schema}.conversations c
    where c.tenant_id = %(tenant_id)s and c.user_id = %(user_id)s and (%(user_id)s <> '' or c.id = %(id)s)
)"""

_RANKED = f"""
sharing as materialized (
    select t.term, t.conversation_id, t.message_index, t.frequency::float8 as frequency, t.length::float8 as length
    from {{schema}}.message_terms t
    -- Not a join, for which the planner may read the index from end to end.
    where t.term = any(array(
        select a.term from {{schema}}.terms_of(%(text)s::text, {_SCOPE}) a
        order by a.frequency desc, a.term limit {_ASKED_TERMS}))
),
found as materialized (
    select s.term, s.frequency, s.length, mine.place + s.message_index + 1 as at,
           mine.is_recalled
           and (mine.id <> %(id)s or s.message_index < (select recalled_before from own)) as is_recalled
    from sharing s join mine on mine.id = s.conversation_id
),
weights as (
    -- Messages are counted without looking at them, by the numbers that were given to them.
    select f.term, ln(1 + (greatest((select sum(next_message_index) from mine) - count(*), 0) + 0.5)::float8
                          / (count(*) + 0.5)::float8) as weight
    from found f group by f.term
),
-- The longer a message is the more often it is found; the harmonic mean makes up for that.
typical as (select 1 / avg(1 / f.length) as length from found f),
scored as materialized (
    select f.at, sum(w.weight * f.frequency * {_K1 + 1}::float8
                     / (f.frequency + {_K1}::float8 * ({1 - _B}::float8 + {_B}::float8 * f.length
                                                      / (select length from typical)))) as score
    from found f join weights w on w.term = f.term
    where f.is_recalled
    group by f.at
),
-- Neighbours add two thirds of the greatest of the three scores at most. So of the best with theirs, each or a
-- neighbour has three fifths of what the last of as many has without; all else needs no further look.
near as (
    select distinct s.at + n.step as at
    from scored s cross join (values (-1), (0), (1)) as n (step)
    where s.score >= coalesce((select b.score * 3 / 5 from scored b order by b.score desc offset 3 * %(k)s limit 1), 0)
),
best as materialized (
    select mine.id as conversation_id, (b.at - mine.place - 1)::int as message_index, mine.session_id, b.score,
           row_number() over (order by b.score desc, b.at desc) as rank
    from (
        -- As real: equal ones that were added up in another order are equal again.
        select n.at, sum(s.score * p.share)::real as score
        from near n cross join (values (0, 1::float8), (-1, {_NEIGHBOUR}), (1, {_NEIGHBOUR})) as p (step, share)
        join scored s on s.at = n.at + p.step
        group by n.at order by 2 desc, n.at desc
        -- A neighbour may be there no more, or be shown: among these are enough that are not.
        limit 3 * %(k)s
    ) b
    join mine on mine.place = (b.at >> 32) << 32
)"""

_HITS = """
hits as materialized (
    select m.conversation_id, m.message_index, b.session_id, b.score, b.rank
    from best b cross join lateral (
        select m.conversation_id, m.message_index from {schema}.conversation_messages m
        where m.conversation_id = b.conversation_id and m.message_index = b.message_index
          and m.created_at <= (select at from moment)
        limit 1) m
    where b.conversation_id <> %(id)s or b.message_index < (select recalled_before from own)
    order by b.rank limit %(k)s
)"""

_TURNS = """
turns as materialized (
    select h.conversation_id, f.message_index as first,
           least(coalesce(n.message_index, 2147483647),
                 case when h.conversation_id = %(id)s then %(before)s else 2147483647 end) as beyond,
           min(h.session_id) as session_id, min(h.rank) as rank, array_agg(h.message_index order by h.rank) as hits,
           array_agg(h.score order by h.rank) as scores
    from hits h
    cross join lateral (
        select m.message_index from {schema}.conversation_messages m
        where m.conversation_id = h.conversation_id and m.message_index <= h.message_index and m.role = 'human'
        order by m.message_index desc limit 1) f
    left join lateral (
        select m.message_index from {schema}.conversation_messages m
        where m.conversation_id = h.conversation_id and m.message_index > h.message_index and m.role = 'human'
        order by m.message_index limit 1) n on true
    group by 1, 2, 3
)
"""

# What tells of a turn stands before the columns of a window.
RECALL = (
    # What is looked up row by row is `lateral`; what else is joined are thousands, of which the planner knows nothing.
    # Compiling so wide a plan takes longer than running it.
    "set local enable_nestloop = off;\nset local jit = off;\n"
    + STEP_LAST_TURNS
    + ","
    + ",".join([_SCOPED, _RANKED, _HITS, _TURNS])
    + f"""
select null::text as session_id, null::bigint as rank, null::int[] as hits, null::float8[] as scores, w.*
from ({WINDOW_AND_PREAMBLE}) w
union all
select t.session_id, t.rank, t.hits, t.scores, {PART_RECALLED}, false, {MESSAGE}
from turns t cross join lateral (
    select m.* from {{schema}}.conversation_messages m
    where m.conversation_id = t.conversation_id and m.message_index >= t.first and m.message_index < t.beyond
      and m.created_at <= (select at from moment)
    offset 0) m
order by part, rank, message_index;
"""
)
"""The last `turns` turns before message `before`, the preamble's system messages, and the whole turns in which the `k`
messages stand that matter most for a text: of this conversation before those turns, or of all of the user's. None for
no text."""
