"""Every statement that the store sends, by name; nothing here runs one.

`{schema}` stands for the quoted name of the PostgreSQL schema, which `in_schema` fills in, once for each statement.
Rules that all of them keep, so that they also run on distributed PostgreSQL and behind pgbouncer:

- Several statements joined by `;` are sent as one query: one round trip, one transaction, and each takes its own
  snapshot. The last one's rows are the answer.
- Whoever changes a conversation locks its row first, in a statement of its own; a later statement then sees what a
  writer committed while this one waited for the lock.
- No session state, no sequence, no trigger, no advisory lock; only immutable expressions in DO UPDATE.
"""
