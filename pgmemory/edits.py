"""What deleting or replacing a message means for its turn: what goes with it, what must stay as it was. Pure.

A message is edited in the turns that the log has around it, so that no edit leaves half of something behind: a human
message goes with its turn, a tool call with its results, and a result with its call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from langchain_core.messages import BaseMessage, HumanMessage, RemoveMessage

from pgmemory.errors import ConfigurationError
from pgmemory.models import Edit, StoredMessage
from pgmemory.serialization import to_message, to_stored
from pgmemory.turns import LoggedMessage, Turn, bonds_of, exchange_around, split_turns


def deletion(stored: Sequence[StoredMessage], indexes: Collection[int], *, whole_turns: bool) -> Edit:
    """Return the edit that deletes messages.

    Args:
        stored: The turns in which they stand, or the preamble, oldest first.
        indexes: Which; those that are not there are passed over.
        whole_turns: Delete the turns in which they stand; nothing of the preamble.
    """
    preamble, turns = split_turns(_logged(stored))
    deleted: set[int] = set()
    for messages in [preamble, *turns]:
        for position, logged in enumerate(messages):
            if logged.message_index not in indexes:
                continue
            if messages is not preamble and (whole_turns or position == 0):
                deleted.update(one.message_index for one in messages)
            elif not whole_turns:
                deleted.update(one.message_index for one in exchange_around(messages, position))
    return Edit(deleted=tuple(sorted(deleted)))


def last_turn(stored: Sequence[StoredMessage]) -> Edit:
    """Return the edit that deletes the last turn of some messages; of a preamble alone, nothing."""
    _, turns = split_turns(_logged(stored))
    return Edit(deleted=tuple(logged.message_index for logged in turns[-1]) if turns else ())


def replacement(
    stored: Sequence[StoredMessage],
    index: int,
    message: BaseMessage | str,
    rewrite: Callable[[list[BaseMessage]], list[BaseMessage]] = list,
) -> Edit:
    """Return the edit that puts a message in another's place.

    Args:
        stored: The turn in which the other stands.
        index: The other's number.
        message: Of the same role, and with the same tool calls, or the answer to the same call; or a new text for the
            other.
        rewrite: Applied to the new message before anything else is done with it.

    Raises:
        ConfigurationError: There is no such message, or the new one would tear apart what belongs together.
        MessageNotStorableError: The new one holds a value that has no JSON form.
    """
    old = next((to_message(one) for one in stored if one.message_index == index), None)
    if old is None:
        raise ConfigurationError(f"the conversation has no message {index}")
    if isinstance(message, str):
        if isinstance(old, RemoveMessage):
            raise ConfigurationError(f"message {index} is a RemoveMessage, which has no text")
        message = old.model_copy(update={"content": message})
    rewritten = rewrite([message])
    if len(rewritten) != 1:
        raise ConfigurationError(f"redacting makes {len(rewritten)} messages of one: delete message {index} instead")
    message = rewritten[0]
    new = to_stored(message)
    if message.type != old.type:
        raise ConfigurationError(
            f"message {index} is of the role {old.type!r}: one of the role {message.type!r} cannot take its place; "
            "replace the turn"
        )
    if bonds_of(message) != bonds_of(old):
        raise ConfigurationError(
            f"message {index} is tied to the tool calls {[mark for _, mark in bonds_of(old)]}, the new message to "
            f"{[mark for _, mark in bonds_of(message)]}: give it the same calls, or replace the turn"
        )
    return Edit(put=(new._replace(message_index=index),))


def turn_replacement(stored: Sequence[StoredMessage], index: int, messages: Sequence[BaseMessage]) -> Edit:
    """Return the edit that puts other messages in the place of a turn's.

    They take its numbers; if they are more, what follows moves up.

    Args:
        stored: The turn in which a message stands.
        index: The number of that message.
        messages: The new turn, oldest first: a human message, and no other one.

    Raises:
        ConfigurationError: There is no such turn, or `messages` are none.
        MessageNotStorableError: A message holds a value that has no JSON form.
    """
    if [isinstance(message, HumanMessage) for message in messages] != [True] + [False] * (len(messages) - 1):
        raise ConfigurationError("a turn is a human message and what follows it, without another human message")
    _, turns = split_turns(_logged(stored))
    turn: Turn = next((turn for turn in turns if any(one.message_index == index for one in turn)), [])
    if not turn:
        raise ConfigurationError(f"the conversation has no turn with a message {index}")
    numbers = [logged.message_index for logged in turn]
    beyond = numbers[-1] + 1
    more = max(0, len(messages) - len(numbers))
    places = [*numbers, *range(beyond, beyond + more)]
    when = next(one.created_at for one in stored if one.message_index == numbers[-1])
    put = [
        to_stored(message, path=f"messages[{position}]")._replace(message_index=places[position], created_at=when)
        for position, message in enumerate(messages)
    ]
    return Edit(deleted=tuple(numbers[len(messages) :]), put=tuple(put), moved_from=beyond, moved_by=more)


def _logged(stored: Sequence[StoredMessage]) -> list[LoggedMessage]:
    logged = []
    for one in stored:
        assert one.message_index is not None, "a record from the log has an index"
        logged.append(LoggedMessage(to_message(one), one.message_index))
    return logged
