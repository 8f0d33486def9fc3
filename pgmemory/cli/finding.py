"""Finding the conversation that a command is about: operators often know no more than its session id."""

from __future__ import annotations

import click

from pgmemory.cli.app import KnownUsageError
from pgmemory.models import ConversationRecord
from pgmemory.store import ConversationStore

_SHOWN = 10


def find_conversation(store: ConversationStore, session: str, user: str | None) -> ConversationRecord:
    """Return the conversation of this session id.

    Args:
        store: Of the tenant in which it is looked for.
        session: Its session id, exactly.
        user: Its user, '' for none; None if that is not known: then the session id must be one user's only.

    Raises:
        KnownUsageError: Several users have a conversation of this name.
        ClickException: There is none.
    """
    if user is not None:
        record = store.get_conversation(session, user_id=user)
        found = [record] if record else []
    else:
        found = store.find_conversations(session, limit=_SHOWN + 1)
    _require_one_user(store, [record.user_id for record in found], user)
    return found[0]


def find_user(store: ConversationStore, session: str, user: str | None) -> str:
    """Return whose a conversation is, of which perhaps only the logs are left that agents keep beside it.

    Args and errors are as of `find_conversation`.
    """
    found = store.list_conversations(session_id=session, user_id=user)
    users = list(dict.fromkeys(record.user_id for record in found))
    _require_one_user(store, users, user)
    return users[0]


def _require_one_user(store: ConversationStore, users: list[str], user: str | None) -> None:
    if not users:
        # Not repeated: it may be a DSN that stands in the wrong place.
        of_user = "" if user is None else " of this user" if user else " without a user"
        of_tenant = f" in the tenant {store.tenant_id!r}" if store.tenant_id else ""
        raise click.ClickException(f"there is no conversation of this name{of_user}{of_tenant}: see `pgmemory ls`")
    if len(users) > 1:
        some = ", ".join(map(repr, users[:_SHOWN]))
        more = " and others" if len(users) > _SHOWN else ""
        raise KnownUsageError(
            f"several users have a conversation of this name: {some}{more}; say whose with --user "
            "(--user '' for the one without a user)"
        )
