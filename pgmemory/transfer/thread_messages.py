"""What a LangGraph thread holds of a conversation: which messages, their ids, the summary, results that are missing.

Pure: rows in, messages out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID, uuid5

from langchain_core.messages import AIMessage, BaseMessage, FunctionMessage, SystemMessage, ToolMessage

from pgmemory.models import StoredMessage, StoredSummary
from pgmemory.serialization import to_message
from pgmemory.transfer.exporting import to_time
from pgmemory.turns import LoggedMessage, bonds_of, is_preamble_system, shown, shown_preamble, split_turns

STORED_AT = "stored_at"
"""In a message's `response_metadata`, which no provider is sent: when it was stored, as ISO 8601 text."""

MISSING_RESULT = "This call has no result: it was interrupted."
"""Content of the results that are made for calls without one."""


@dataclass(frozen=True, slots=True)
class ThreadMessages:
    """The messages of a thread.

    Attributes:
        messages: Oldest first, each with an id of its own.
        summarized: How many messages of the log the summary stands for.
        left_out: How many others of the log no model accepts.
        repaired: How many results were made, or moved up, for calls without one behind them.
    """

    messages: list[BaseMessage]
    summarized: int
    left_out: int
    repaired: int


def thread_messages(
    conversation_id: UUID, stored: Sequence[StoredMessage], summary: StoredSummary | None
) -> ThreadMessages:
    """Return what a thread holds of a conversation.

    That is all that models accept, by the rules of the memories, but for tool calls without a result behind them: these
    get the one that came later, where another message stands between, else one that says so. Where there is a summary,
    it stands as a system message before the turns that it does not cover, behind the system messages of the preamble.

    A message keeps its id; one without, or with that of an earlier message, gets one that follows from the conversation
    and its number, the same each time.

    Args:
        conversation_id: The conversation's key.
        stored: All its messages that can be read, oldest first.
        summary: Its newest summary.
    """
    log = [LoggedMessage(to_message(row), _number(row)) for row in stored]
    preamble, turns = split_turns(log)
    covered = -1
    if summary is not None:
        covered = summary.covers_through
        preamble = [logged for logged in preamble if is_preamble_system(logged)]
        turns = [turn for turn in turns if turn[0].message_index > covered]
    told = len(preamble) + sum(map(len, turns))
    late = _results_by_call(log)
    head = shown_preamble([*_with_results(conversation_id, preamble, late)])
    body = [logged for turn in turns for logged in shown([*_with_results(conversation_id, turn, late)])]
    repaired = sum(isinstance(logged, _MadeResult) for logged in (*head, *body))
    _give_ids(conversation_id, [*head, *body])
    _give_times([*head, *body], stored)
    messages = [logged.message for logged in head]
    if summary is not None:
        messages.append(SystemMessage(summary.content, id=str(uuid5(conversation_id, "summary"))))
    messages += [logged.message for logged in body]
    return ThreadMessages(messages, len(log) - told, told + repaired - len(head) - len(body), repaired)


class _MadeResult(LoggedMessage):
    """A result that stands in the place of a missing one; its index is that of the message that calls."""

    __slots__ = ()


def _results_by_call(log: Sequence[LoggedMessage]) -> dict[tuple[int, str], ToolMessage]:
    """Return the next result of each call in a log, by the index of the message that calls and the call's id."""
    results: dict[tuple[int, str], ToolMessage] = {}
    coming: dict[str, ToolMessage] = {}
    for logged in reversed(log):
        if isinstance(logged.message, ToolMessage):
            coming[logged.message.tool_call_id] = logged.message
        for _, id in bonds_of(logged.message) if isinstance(logged.message, AIMessage) else ():
            # An id may come again: what answers a later call answers none before it.
            if id and id in coming:
                results[logged.message_index, id] = coming.pop(id)
    return results


def _with_results(
    conversation_id: UUID, messages: Sequence[LoggedMessage], late: Mapping[tuple[int, str], ToolMessage]
) -> Iterator[LoggedMessage]:
    """Yield the messages of a turn with a result for each call that has none behind it.

    Calls that no result can answer, those without an id or with that of another, and the older function calls are left
    as they are.
    """
    waiting: dict[str, LoggedMessage] = {}
    for logged in messages:
        message = logged.message
        if not isinstance(message, (ToolMessage, FunctionMessage)):
            yield from waiting.values()
            waiting = _results_for(conversation_id, logged, late) if isinstance(message, AIMessage) else {}
        elif isinstance(message, ToolMessage):
            waiting.pop(message.tool_call_id, None)
        yield logged
    yield from waiting.values()


def _results_for(
    conversation_id: UUID, logged: LoggedMessage, late: Mapping[tuple[int, str], ToolMessage]
) -> dict[str, LoggedMessage]:
    assert isinstance(logged.message, AIMessage), "only these call"
    bonds = bonds_of(logged.message)
    ids = {id for kind, id in bonds if kind == "id" and id}
    if len(ids) < len(bonds):
        return {}
    calls = [*logged.message.tool_calls, *logged.message.invalid_tool_calls]
    results: dict[str, LoggedMessage] = {}
    for call in calls:
        call_id = str(call["id"])
        id = str(uuid5(conversation_id, f"result {call_id} of message {logged.message_index}"))
        if found := late.get((logged.message_index, call_id)):
            result = found.model_copy(update={"id": id})
        else:
            result = ToolMessage(MISSING_RESULT, tool_call_id=call_id, name=call["name"], status="error", id=id)
        results[call_id] = _MadeResult(result, logged.message_index)
    return results


def _give_ids(conversation_id: UUID, messages: Sequence[LoggedMessage]) -> None:
    taken: set[str] = set()
    for logged in messages:
        if not logged.message.id or logged.message.id in taken:
            logged.message.id = str(uuid5(conversation_id, f"message {logged.message_index}"))
        taken.add(logged.message.id)


def _give_times(messages: Sequence[LoggedMessage], stored: Sequence[StoredMessage]) -> None:
    times = {_number(row): row.created_at for row in stored}
    for logged in messages:
        message = logged.message
        message.response_metadata = {**message.response_metadata, STORED_AT: to_time(times[logged.message_index])}


def _number(row: StoredMessage) -> int:
    assert row.message_index is not None, "a row of the log has a number"
    return row.message_index
