"""Recall: the messages of a user's past that matter for a text, by their words, by their meaning, or by both."""

from __future__ import annotations

from pgmemory.queries.meaning import IS_OF_MODEL
from pgmemory.queries.parts import MESSAGE
from pgmemory.queries.windows import STEP_LAST_TURNS, WINDOW_AND_PREAMBLE
from pgmemory.queries.words import SCOPE_OF_KEY

PART_RECALLED = 4

# BM25: S. Robertson, H. Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond" (2009), with the inverse
# document frequency that is never negative. Messages are short: a word that is repeated, and a message's length, count
# for less than among documents.
_K1, _B = 0.6, 0.3
# What is meant often stands in the question before an answer, or in the answer after a question.
_NEIGHBOUR = "1 / 3::float8"
# Of a longer text, those that it uses most.
_MOST_WORDS_ASKED = 256

_SCOPED = """
-- When message `before` was yet to be said; else there is no such moment.
moment as (
    select coalesce(
        (select m.created_at from {schema}.conversation_messages m
         where m.conversation_id = %(id)s and m.message_index < %(before)s and %(before)s < 2147483647
         order by m.message_index desc limit 1),
        -- Before the first of them.
        (select m.created_at - interval '1 microsecond' from {schema}.conversation_messages m
         where m.conversation_id = %(id)s and m.message_index >= %(before)s and %(before)s < 2147483647
         order by m.message_index limit 1),
        'infinity') as at
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

_BY_WORDS = f"""
sharing as materialized (
    select t.term, t.conversation_id, t.message_index, t.frequency::float8 as frequency, t.length::float8 as length
    from {{schema}}.message_terms t
    -- Not a join, for which the planner may read the index from end to end.
    where t.term = any(array(
        select a.term from {{schema}}.terms_of(%(text)s::text, {SCOPE_OF_KEY}) a
        order by a.frequency desc, a.term limit {_MOST_WORDS_ASKED}))
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
by_words as materialized (
    select f.at, sum(w.weight * f.frequency * {_K1 + 1}::float8
                     / (f.frequency + {_K1}::float8 * ({1 - _B}::float8 + {_B}::float8 * f.length
                                                      / (select length from typical)))) as score
    from found f join weights w on w.term = f.term
    where f.is_recalled
    group by f.at
)"""

# By meaning every message is somewhat near. Of so many, which are most of a short past and a small part of a long one,
# those count that are nearer than their mean.
_NEAREST = 500

# All vectors have length 1, so that their inner product, which pgvector gives negated, is their cosine similarity.
_BY_MEANING = f"""
asked as materialized (select %(embedding)s::{{vector}}.halfvec as embedding where {IS_OF_MODEL}),
nearest as materialized (
    select mine.place + v.message_index + 1 as at,
           -(v.embedding operator({{vector}}.<#>) (select embedding from asked)) as similarity
    from mine cross join lateral (
        select v.message_index, v.embedding from {{schema}}.message_vectors v
        where v.conversation_id = mine.id and v.embedding is not null
          and (mine.id <> %(id)s or v.message_index < (select recalled_before from own))
        offset 0) v
    where mine.is_recalled
    order by similarity desc, at desc limit {_NEAREST}
),
by_meaning as materialized (
    -- Where all are alike, as where there is one, none is unrelated.
    select n.at, case when r.best - r.mean < 1e-6 then 1 else (n.similarity - r.mean) / (r.best - r.mean) end as score
    from nearest n cross join (select avg(similarity) as mean, max(similarity) as best from nearest) r
    where n.similarity > r.mean - 1e-6
)"""

# Scores of two kinds add up where each goes from what an unrelated message has, which is no word or the mean
# similarity, to 1, which the best has: S. Bruch, S. Gai, A. Ingber, "An Analysis of Fusion Functions for Hybrid
# Retrieval" (2023), who found such sums better than sums of reciprocal ranks.
_FUSED = """
scored as materialized (
    select b.at, sum(b.score) as score
    from (
        select w.at, w.score / (select max(score) from by_words) as score from by_words w
        union all
        select m.at, m.score from by_meaning m) b
    group by b.at
)"""

_BEST = f"""
-- Neighbours add two thirds of the greatest of the three scores at most. So of the best with theirs, each or a
-- neighbour has three fifths of what the last of as many has without; all else needs no further look.
near as (
    select distinct s.at + n.step as at
    from scored s cross join (values (-1), (0), (1)) as n (step)
    where s.score >= coalesce((select b.score * 3 / 5 from scored b
                               order by b.score desc offset 3 * %(k)s::bigint limit 1), 0)
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
        limit 3 * %(k)s::bigint
    ) b
    join mine on mine.place = (b.at >> 32) << 32
)"""

# A turn begins with what the human says; what stands before the first one is shown with every window as it is.
_HITS = """
hits as materialized (
    select b.conversation_id, b.message_index, turn.first, b.session_id, b.score, b.rank
    from best b
    cross join lateral (
        select 1 from {schema}.conversation_messages m
        where m.conversation_id = b.conversation_id and m.message_index = b.message_index
          and m.created_at <= (select at from moment)
        limit 1) m
    cross join lateral (
        select m.message_index as first from {schema}.conversation_messages m
        where m.conversation_id = b.conversation_id and m.message_index <= b.message_index and m.role = 'human'
        order by m.message_index desc limit 1) turn
    where b.conversation_id <> %(id)s or b.message_index < (select recalled_before from own)
    order by b.rank limit %(k)s
)"""

_TURNS = """
turns as materialized (
    select h.conversation_id, h.first,
           least(coalesce(n.message_index, 2147483647),
                 case when h.conversation_id = %(id)s then %(before)s else 2147483647 end) as beyond,
           min(h.session_id) as session_id, min(h.rank) as rank, array_agg(h.message_index order by h.rank) as hits,
           array_agg(h.score order by h.rank) as scores
    from hits h
    left join lateral (
        select m.message_index from {schema}.conversation_messages m
        where m.conversation_id = h.conversation_id and m.message_index > h.message_index and m.role = 'human'
        order by m.message_index limit 1) n on true
    group by 1, 2, 3
)
"""


def _recall(*scoring: str) -> str:
    """Return the statement that recalls by scores, which the last of some parts makes as `scored`."""
    return (
        # What is looked up row by row is `lateral`; what else is joined are thousands, of which the planner knows
        # nothing. Compiling so wide a plan takes longer than running it.
        "set local enable_nestloop = off;\nset local jit = off;\n"
        + STEP_LAST_TURNS
        + ","
        + ",".join([_SCOPED, *scoring, _BEST, _HITS, _TURNS])
        # What tells of a turn stands before the columns of a window.
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


RECALL_BY_WORDS = _recall(_BY_WORDS, "\nscored as (select at, score from by_words)")
"""The last `turns` turns before message `before`, the preamble's system messages, and the whole turns in which the `k`
messages stand that matter most for a text: of this conversation before those turns, or of all of the user's. None for
no text."""

RECALL_BY_MEANING = _recall(_BY_MEANING, "\nscored as (select at, score from by_meaning)")
"""The same for a vector: the messages of which no vector was made yet are no hits."""

RECALL_BY_BOTH = _recall(_BY_WORDS, _BY_MEANING, _FUSED)
"""The same for a text and a vector."""
