"""The words of messages, by which a user's past is found: making what keeps them, and indexing what was stored before.

A word of a message is one row: a hash of the word and of whose it is, where it stands, how often, and how long the
message is. So one b-tree finds a user's messages that share a word, with all that ranks them, and row-level security
lets the planner use it, which it does not for the operators of GIN and GiST: they are not leakproof. It is not made by
a migration, but where it is asked for, and works without any extension. A trigger keeps it, whoever writes. Its key
does not begin with the conversation's id, and so it is not for distributed PostgreSQL.
"""

from __future__ import annotations

import unicodedata

from pgmemory.queries.parts import READ_COMMITTED, create_triggers

ROLES = "('human', 'ai')"
"""What is recalled: what the human and the AI said; not what tools returned."""

WHAT_IS_SAID = ("role, content, key_id", "{row}.role, {row}.content, {row}.key_id")
"""The columns of messages on which it depends how they are recalled, and their values."""

WORDS = """
select array[split_part(s.setting, '=', 2), pg_catalog.obj_description(p.oid, 'pg_proc')]
from pg_catalog.pg_proc p join pg_catalog.pg_namespace n on n.oid = p.pronamespace
cross join unnest(p.proconfig) as s (setting)
where n.nspname = %(schema)s and p.proname = 'terms_of' and s.setting like 'default_text_search_config=%%'
"""
"""The text search configuration that words are made with, and whether all messages are indexed; no row where messages
cannot be recalled."""

INCOMPLETE, COMPLETE = "some messages are not indexed yet", "all messages are indexed"
MARK_COMPLETE = f"comment on function {{schema}}.terms_of(text, bigint) is '{COMPLETE}'"
MARK_INCOMPLETE = MARK_COMPLETE.replace(COMPLETE, INCOMPLETE)

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

# A long text costs as many rows as it has words; and to_tsvector fails beyond a megabyte. Taken apart into letters and
# accents, a text is longer.
_CHARACTERS, _APART = 20_000, 60_000
_HAN = r"\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003134f"
_CJK = rf"{_HAN}\u3041-\u30ff\uac00-\ud7af"
# What parts words; where the database knows ASCII alone, text search takes it for letters.
_SIGNS = (
    r"\u00a1-\u00a9\u00ab-\u00b1\u00b6\u00b7\u00bb\u00bf\u00d7\u00f7\u05be\u060c\u061b\u061f\u06d4\u0964\u0965"
    r"\u2010-\u2027\u2030-\u205e\u20a0-\u20c0\u2190-\u2bff\u3001-\u3003\u3008-\u3020\ufe0f\U0001f000-\U0001faff"
)
# Accents; the vowels of Hebrew and Arabic, and the stroke that makes a word longer.
_ACCENTS = r"\u0300-\u036f\u0591-\u05bd\u05bf\u05c1\u05c2\u05c4\u05c5\u05c7\u0640\u064b-\u065f\u0670"
# Cyrillic letters that are others than those without a breve.
_KEPT = ("й", "ў")
# What Unicode does not take apart, and people write with other letters where a keyboard lacks it.
_ONE_LETTER = ("ıøłđ", "iold")
_TWO_LETTERS = {"ß": "ss", "æ": "ae", "œ": "oe"}
# What is no ASCII letter with an accent.
_CAPITALS = "ÆÐØÞĐŁŒΑΒΓΔΕΖΗΘΙΚΛΜΝΞΟΠΡΣΤΥΦΧΨΩАБВГДЕЖЗИКЛМНОПРСТУФХЦЧШЩЪЫЬЭЮЯЂЄЅІЈЉЊЋЏҐ"


def _folded(text: str) -> str:
    """Return an SQL expression: a text in lower case without its accents, taken apart in whatever else can be."""
    apart = f"normalize({text}, nfd)"
    for letter in _KEPT:
        apart = f"replace({apart}, '{unicodedata.normalize('NFD', letter)}', '{letter}')"
    folded = f"translate(regexp_replace({apart}, E'[{_ACCENTS}]+', '', 'g'), '{_ONE_LETTER[0]}', '{_ONE_LETTER[1]}')"
    for letter, letters in _TWO_LETTERS.items():
        folded = f"replace({folded}, '{letter}', '{letters}')"
    return folded


# E'' makes the escapes the characters themselves, whatever standard_conforming_strings is when the body is read.
CREATE_FUNCTION = rf"""
create or replace function {{schema}}.terms_of(content text, scope bigint)
returns table (term bigint, frequency smallint, length smallint)
language plpgsql immutable strict parallel safe
set search_path = pg_catalog, pg_temp
set default_text_search_config = {{language}}
as $function$
declare
    -- As in C: to a Turkish database "I" is no capital of "i".
    written text := lower(left(content, {_CHARACTERS}) collate "C");
    unspaced text[] := '{{}}';
    found tsvector;
    stems text[];
    apart text;
    bare_stems text[] := '{{}}';
begin
    if octet_length(written) > char_length(written) then
        -- '´' is often meant for an apostrophe, and would become a blank with an accent.
        written := left(normalize(translate(left(content, {_APART}), '´', ' '), nfkd), {_APART});
        -- Taken apart, most letters become lower case as in C, and the others where the database knows more than ASCII.
        written := lower(lower(written collate "C") collate "default");
        if written ~ '[{_CAPITALS}]' then
            written := translate(written, '{_CAPITALS}', '{_CAPITALS.lower()}');
        end if;
        -- The capital I of Turkish has a dot.
        written := left(normalize(replace(written, E'i\u0307', 'i'), nfkc), {_CHARACTERS});
        -- Chinese and Japanese are written without spaces: each two neighbours are taken for a word, and so is a Han
        -- character that stands by itself, as between kana.
        unspaced := array(
            select p.pair from (
                select c.c || lead(c.c) over (partition by r.n order by c.i) as pair
                from regexp_matches(written, E'[{_CJK}]+', 'g') with ordinality as r (run, n)
                cross join unnest(string_to_array(r.run[1], null)) with ordinality as c (c, i)) p
            where p.pair is not null
            union all
            select h.han[1] from regexp_matches(written, E'(?<![{_HAN}])[{_HAN}](?![{_HAN}])', 'g') as h (han));
        written := regexp_replace(written, E'[{_CJK}{_SIGNS}]+', ' ', 'g');
    end if;
    -- 'either/or' would be taken for the name of a file.
    found := to_tsvector(translate(written, '/', ' '));
    stems := tsvector_to_array(found);
    if octet_length(written) > char_length(written) then
        -- By accents a stemmer knows endings and stop words: they are folded after it.
        stems := string_to_array({_folded("array_to_string(stems, chr(10))")}, chr(10));
        -- Who writes without accents gets other stems: a word with accents has the stem of what is then written, too.
        apart := regexp_replace(written, E'[^a-z0-9\u0080-\U0010ffff]+', chr(10), 'g');
        bare_stems := array(
            select b.lexeme
            from unnest(string_to_array(apart, chr(10)), string_to_array({_folded("apart")}, chr(10))) w (word, bare)
            cross join unnest(to_tsvector(w.bare)) b
            where w.word <> w.bare and to_tsvector(w.word) <> '');
    end if;
    return query
    with words as (
        select f.stem as word, cardinality(f.positions) as times, 0 as times_bare
        from rows from (unnest(stems), unnest(found)) f (stem, lexeme, positions, weights)
        union all
        select u.u, 1, 0 from unnest(unspaced) u
        union all
        select b.b, 0, 1 from unnest(bare_stems) b
    )
    -- A word counts once, whether it has one stem or two.
    select hashtextextended(w.word collate "C", scope),
           least(greatest(sum(w.times), sum(w.times_bare)), 32767)::smallint,
           least(greatest(sum(sum(w.times)) over (), 1), 32767)::smallint
    from words w
    where w.word <> ''
    group by 1;
end
$function$;
"""


def _scope(tenant_id: str, user_id: str, id: str) -> str:
    """Return whose words a conversation's are: its user's; without a user, its own, for they are nobody else's."""
    return f"""case when {user_id} = '' then pg_catalog.hashtextextended({id}::text, 0)
                else pg_catalog.hashtextextended({user_id}, pg_catalog.hashtextextended({tenant_id}, 0)) end"""


SCOPE_OF_C = _scope("c.tenant_id", "c.user_id", "c.id")
SCOPE_OF_KEY = _scope("%(tenant_id)s::text", "%(user_id)s::text", "%(id)s::uuid")
"""Whose words those of a conversation are, by its names as parameters."""

_INSERT = """insert into {schema}.message_terms (term, conversation_id, message_index, tenant_id, frequency, length)
    select t.term, m.conversation_id, m.message_index, m.tenant_id, t.frequency, t.length"""

CREATE_TRIGGERS = f"""
create or replace function {{schema}}.keep_words() returns trigger
language plpgsql
set search_path = pg_catalog, pg_temp
as $function$
declare
    m {{schema}}.conversation_messages := new;
begin
    if tg_op = 'UPDATE' then
        delete from {{schema}}.message_terms t
        where t.conversation_id = m.conversation_id and t.message_index = m.message_index;
    end if;
    if m.role in {ROLES} and m.key_id is null then
        {_INSERT}
        from {{schema}}.conversations c cross join lateral {{schema}}.terms_of(m.content, {SCOPE_OF_C}) t
        where c.id = m.conversation_id;
    end if;
    return null;
end
$function$;
comment on function {{schema}}.keep_words() is 'Keeps the words of messages that are stored or changed';
""" + create_triggers("keep_words", "conversation_messages", *WHAT_IS_SAID)

READ_IDS_TO_INDEX = """
select c.id::text, c.next_message_index from {schema}.conversations c
where c.id > %(after)s::uuid and (%(tenant_id)s::text is null or c.tenant_id = %(tenant_id)s)
order by c.id limit %(limit)s;
"""
"""The ids of conversations after another one's, in order, with a bound of what each holds."""

INDEX_BATCH = (
    READ_COMMITTED
    + f"""
select c.id from {{schema}}.conversations c where c.id = any(%(ids)s::uuid[]) order by c.id for update;
with indexed as (
    {_INSERT}
    from {{schema}}.conversations c
    join {{schema}}.conversation_messages m on m.conversation_id = c.id
    cross join lateral {{schema}}.terms_of(m.content, {SCOPE_OF_C}) t
    where c.id = any(%(ids)s::uuid[]) and m.message_index >= %(first)s and m.message_index < %(end)s
      and m.role in {ROLES} and m.key_id is null
      and not exists (
          select from {{schema}}.message_terms o
          where o.conversation_id = m.conversation_id and o.message_index = m.message_index)
    on conflict do nothing
    returning conversation_id, message_index
)
select count(distinct (conversation_id, message_index)) from indexed;
"""
)
"""Index messages of conversations that are not indexed yet, from the number `first` on and below `end`; return how many
there were. Those without any word are among them each time, uncounted."""
