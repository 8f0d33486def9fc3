"""The keys of encrypted conversations: reading one, erasing one, wrapping them anew."""

from __future__ import annotations

from pgmemory.queries.parts import READ_COMMITTED

READ_KEY = """
select c.key_id::text, k.master_key_name, encode(k.wrapped_key, 'base64')
from {schema}.conversations c
left join {schema}.conversation_keys k on k.conversation_id = c.id and k.key_id = c.key_id
where c.id = %(id)s and c.key_id is not null;
"""
"""The key that a conversation's new content is encrypted with; null beside its id if it is gone."""

GIVE_KEY = """
insert into {schema}.conversation_keys (conversation_id, key_id, tenant_id, wrapped_key, master_key_name)
values (%(id)s, %(key_id)s, %(tenant_id)s, %(wrapped_key)s, %(master_key_name)s);
update {schema}.conversations set key_id = %(key_id)s where id = %(id)s;
"""
"""Let new content of a conversation be encrypted with a new key. Only in a transaction that has locked its row, for one
that has no key."""

ERASE_KEY = (
    READ_COMMITTED
    + """
select c.id from {schema}.conversations c where c.id = %(id)s for update;
with erased as (
    delete from {schema}.conversation_keys k
    where k.conversation_id = %(id)s
      and exists (select from {schema}.conversations c where c.id = %(id)s and c.held_at is null)
    returning k.key_id
),
changed as (
    update {schema}.conversations c set key_id = null, revision = revision + 1
    where c.id = %(id)s and c.held_at is null and c.key_id is not null
    returning c.id
)
select c.session_id, c.hold_reason, c.held_at is not null, exists (select from erased) or exists (select from changed)
from {schema}.conversations c where c.id = %(id)s;
"""
)
"""Erase a conversation's key, unless it is held; its next turn gets a new one. Says whether it is held, and whether
there was a key."""

READ_KEYS_TO_ROTATE = """
select k.conversation_id::text, k.key_id::text, k.master_key_name, encode(k.wrapped_key, 'base64')
from {schema}.conversation_keys k
where (%(tenant_id)s::text is null or k.tenant_id = %(tenant_id)s)
  and k.master_key_name = any(%(older)s::text[]) and k.conversation_id > %(after)s::uuid
order by k.conversation_id limit %(limit)s;
"""

ROTATE_KEYS = """
update {schema}.conversation_keys k
set wrapped_key = r.wrapped_key, master_key_name = %(current)s
from unnest(%(ids)s::uuid[], %(key_ids)s::uuid[], %(wrapped_keys)s::bytea[]) as r (id, key_id, wrapped_key)
where k.conversation_id = r.id and k.key_id = r.key_id
returning k.conversation_id;
"""
"""Replace wrapped keys by the same keys under another master key, those that are still there."""

READ_OTHER_MASTER_KEYS = """
select k.master_key_name, count(*)
from {schema}.conversation_keys k
where (%(tenant_id)s::text is null or k.tenant_id = %(tenant_id)s) and k.master_key_name <> all(%(names)s::text[])
group by k.master_key_name order by k.master_key_name;
"""
"""The master keys that a keyring lacks, and how many conversations need them."""
