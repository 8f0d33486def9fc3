"""Turns: how a log divides, what of a turn a model is shown, which turns fit. Pure: lists in, lists out.

A turn starts at a human message and runs to the next one. What stands before the first human message is the preamble.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import NamedTuple

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    FunctionMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)


class LoggedMessage(NamedTuple):
    """A message with what the log knows of it.

    Attributes:
        message: The message as it was said.
        message_index: Its number in the conversation.
        token_count: Its tokens, if they are known for the counter at hand.
        tags: Keywords found in its turn; None if no rule found the turn relevant, or if it doesn't begin the turn.
        judged_by: Fingerprint of the rule that judged its turn, or None.
        is_erased: It is empty, for the key that encrypted it was erased.
    """

    message: BaseMessage
    message_index: int
    token_count: int | None = None
    tags: tuple[str, ...] | None = None
    judged_by: str | None = None
    is_erased: bool = False


Turn = list[LoggedMessage]

# Where OpenAI's models answer with empty content: a spoken answer, and why they refuse.
_SAID_BESIDE_THE_CONTENT = ("audio", "refusal")


def split_turns(messages: Sequence[LoggedMessage]) -> tuple[list[LoggedMessage], list[Turn]]:
    """Divide messages, oldest first, into what stands before the first human message and whole turns."""
    before: list[LoggedMessage] = []
    turns: list[Turn] = []
    for logged in messages:
        if isinstance(logged.message, HumanMessage):
            turns.append([logged])
        else:
            (turns[-1] if turns else before).append(logged)
    return before, turns


def shown(messages: Sequence[LoggedMessage]) -> list[LoggedMessage]:
    """Return what a model is shown of one turn or of a preamble: that which model providers accept.

    Left out are a tool call without all its results together with the results it has, a result without its call, a
    system message without text, and the whole of it if the human says nothing or an AI message has neither text nor
    calls. Results belong to a call if they follow its message directly, which is what providers require; the older
    function call and its result are paired by name.
    """
    kept: list[LoggedMessage] = []
    position = 0
    while position < len(messages):
        logged = messages[position]
        position += 1
        if is_mute(logged.message):
            if not isinstance(logged.message, SystemMessage):
                return []
        elif isinstance(logged.message, HumanMessage):  # first, for telling what a message is not takes longer
            kept.append(logged)
        elif isinstance(logged.message, AIMessage):
            results = list(takewhile(_is_result, messages[position:]))
            position += len(results)
            answers = _answers(_calls(logged.message), results)
            if answers is not None:
                kept += [logged, *answers]
        elif not _is_result(logged) and not isinstance(logged.message, RemoveMessage):
            kept.append(logged)
    return kept


def shown_preamble(messages: Sequence[LoggedMessage]) -> list[LoggedMessage]:
    """Return what a model is shown of the preamble, by the rules of `shown`, message by message.

    The preamble is no turn: an AI message that says nothing is left out alone and takes nothing else with it.
    """
    return shown([logged for logged in messages if not is_mute(logged.message)])


def exchange_around(messages: Sequence[LoggedMessage], position: int) -> list[LoggedMessage]:
    """Return what stands and falls with one message of a turn: a tool call and its results; else that message alone."""
    start = position
    while start > 0 and _is_result(messages[start]):
        start -= 1
    caller = messages[start].message
    results = list(takewhile(_is_result, messages[start + 1 :]))
    if not isinstance(caller, AIMessage) or not _calls(caller) or position > start + len(results):
        return [messages[position]]
    return [messages[start], *results]


def is_mute(message: BaseMessage) -> bool:
    """Tell whether a human, AI or system message has neither text nor calls."""
    if not isinstance(message, (HumanMessage, AIMessage, SystemMessage)) or _says_anything(message):
        return False
    return not (isinstance(message, AIMessage) and _calls(message))


def is_preamble_system(logged: LoggedMessage) -> bool:
    """Tell whether a message of the preamble is one that every window keeps."""
    return isinstance(logged.message, SystemMessage)


def longest_suffix(turns: Sequence[Turn], fits: Callable[[Sequence[Turn]], bool]) -> list[Turn]:
    """Return the most turns, newest first, that fit together, in the order of the log.

    Asks `fits` about as many candidates as the logarithm of the number of turns. What fits must still fit without its
    oldest turn, or the answer is a suffix that fits and would not with one more turn, though perhaps not the longest.

    Args:
        turns: Oldest first.
        fits: Whether a suffix of them fits; it is not asked about none.
    """
    start = bisect_left(range(len(turns)), True, key=lambda start: fits(turns[start:]))
    return list(turns[start:])


def _is_result(logged: LoggedMessage) -> bool:
    return isinstance(logged.message, (ToolMessage, FunctionMessage))


_Call = tuple[str, str | None]  # ("id", …), or ("name", …) for the older function call


def bonds_of(message: BaseMessage) -> list[_Call]:
    """Return what ties a message to others: a mark for each tool call that it makes, or for the one that it answers."""
    if isinstance(message, AIMessage):
        return _calls(message)
    if isinstance(message, ToolMessage):
        return [("id", message.tool_call_id)]
    return [("name", message.name)] if isinstance(message, FunctionMessage) else []


def _calls(message: AIMessage) -> list[_Call]:
    """Return what the result of each of a message's calls must bear."""
    calls: list[_Call] = []
    if message.tool_calls or message.invalid_tool_calls:
        calls = [("id", call.get("id")) for call in [*message.tool_calls, *message.invalid_tool_calls]]
    function_call = message.additional_kwargs.get("function_call")
    if not calls and isinstance(function_call, dict):
        calls.append(("name", function_call.get("name")))
    return calls


def _answers(calls: list[_Call], results: list[LoggedMessage]) -> list[LoggedMessage] | None:
    """Return those of the results that answer the calls, one a call; None if a call has none.

    Providers refuse calls without an id and two calls of one id: no result can answer them.
    """
    if not calls:
        return []
    waiting = {call for call in calls if call[1]}
    if len(waiting) < len(calls):
        return None
    answers = []
    for result in results:
        [call] = bonds_of(result.message)
        if call in waiting:
            waiting.remove(call)
            answers.append(result)
    return None if waiting else answers


def _says_anything(message: BaseMessage) -> bool:
    if any(message.additional_kwargs.get(name) for name in _SAID_BESIDE_THE_CONTENT):
        return True
    if isinstance(message.content, str):
        return bool(message.content.strip())
    return any(
        block.strip() if isinstance(block, str) else block.get("type") != "text" or str(block.get("text", "")).strip()
        for block in message.content
    )
