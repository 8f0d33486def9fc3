"""The words of messages, by which a user's past is found: making what keeps them, and indexing what was stored before.

A word of a message is one row: a hash of the word and of whose it is, where it stands, how often, and how long the
message is. So one b-tree finds a user's messages that share a word, with all that ranks them, and row-level security
lets the planner use it, which it does not for the operators of GIN and GiST: they are not leakproof. It is not made by
a migration, but where it is asked for, and works without any extension. A trigger keeps it, whoever writes. Its key
does not begin with the conversation's id, and so it is not for distributed PostgreSQL.
"""

from __future__ import annotations

from pgmemory.queries.parts import READ_COMMITTED

ROLES = "('human', 'ai')"
"""What is recalled: what the human and the AI said; not what tools returned."""

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

# Dropped first: `create or replace trigger` is newer than what this runs on.
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
drop trigger if exists keep_words_of_stored on {{schema}}.conversation_messages;
create trigger keep_words_of_stored after insert on {{schema}}.conversation_messages
    for each row execute function {{schema}}.keep_words();
drop trigger if exists keep_words_of_changed on {{schema}}.conversation_messages;
create trigger keep_words_of_changed after update of role, content, key_id on {{schema}}.conversation_messages
    for each row
    when ((old.role, old.content, old.key_id) is distinct from (new.role, new.content, new.key_id))
    execute function {{schema}}.keep_words();
"""

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
