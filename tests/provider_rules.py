"""What OpenAI's Chat Completions and Anthropic's Messages refuse, as rules over the messages that a memory loads.

The rules look at LangChain messages as langchain-openai and langchain-anthropic send them: results follow their call as
messages of their own (langchain-anthropic joins them with the user messages next to them), an assistant's empty text is
not sent, nor are empty text blocks of users and assistants. Error texts are quoted as the APIs' users report them.

A window holds a log's messages as they were said. So there are two kinds of rules. `OF_THE_MEMORY` are those that a
memory answers for: by leaving out what no model accepts, and by not cutting where a model needs both sides.
`OF_THE_APPLICATION` are those that are broken by a single message that the application wanted as it is, and that other
providers accept: leaving it out, moving it or changing it would not be the memory's to decide.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from conversations import answered_by, calls_of, is_result
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)


class Fault(NamedTuple):
    """A rule that a message breaks.

    Attributes:
        rule: The rule's name.
        position: The message's place in the list.
        text: What is wrong with it.
    """

    rule: str
    position: int
    text: str


Rule = Callable[[Sequence[BaseMessage]], Iterator[tuple[int, str]]]

NEXT = HumanMessage("And now?")


def faults(window: Sequence[BaseMessage], rules: Sequence[Rule] | None = None) -> list[Fault]:
    """Return what providers refuse of a window that the next human message follows, by all rules or by some."""
    messages = [*window, NEXT]
    chosen = RULES if rules is None else rules
    return [Fault(rule.__name__, position, text) for rule in chosen for position, text in rule(messages)]


# What a memory answers for: calls and results


def each_call_has_its_result(messages: Sequence[BaseMessage]) -> Iterator[tuple[int, str]]:
    """OpenAI: "An assistant message with 'tool_calls' must be followed by tool messages responding to each
    'tool_call_id'." Anthropic: "`tool_use` ids were found without `tool_result` blocks immediately after".
    """
    for position, message in enumerate(messages):
        results = _results_behind(messages, position)
        for call in (Counter(calls_of(message)) - Counter(map(answered_by, results))).elements():
            yield position, f"no result follows for {call}"


def each_result_follows_its_call(messages: Sequence[BaseMessage]) -> Iterator[tuple[int, str]]:
    """OpenAI: "messages with role 'tool' must be a response to a preceding message with 'tool_calls'". Anthropic:
    "unexpected `tool_use_id` found in `tool_result` blocks: … must have a corresponding `tool_use` block in the
    previous message."
    """
    calls: list[tuple[str, Any]] = []
    for position, message in enumerate(messages):
        if not is_result(message):
            calls = calls_of(message)
        elif answered_by(message) not in calls:
            yield position, f"no call of the message before has {answered_by(message)}"


def each_call_has_one_result(messages: Sequence[BaseMessage]) -> Iterator[tuple[int, str]]:
    """OpenAI: "Duplicate value for 'tool_call_id' of '…' in messages[7] and messages[8]." Anthropic: "each tool_use
    must have a single result. Found multiple `tool_result` blocks with id".
    """
    answered: list[tuple[str, Any]] = []
    for position, message in enumerate(messages):
        if not is_result(message):
            answered = []
        elif answered_by(message) in answered:
            yield position, f"a second result for {answered_by(message)}"
        else:
            answered.append(answered_by(message))


def call_ids_differ_in_a_message(messages: Sequence[BaseMessage]) -> Iterator[tuple[int, str]]:
    """Anthropic: "messages.1.content.2: `tool_use` ids must be unique". OpenAI takes one result for an id, and so
    leaves the other call without.
    """
    for position, message in enumerate(messages):
        for call in (Counter(calls_of(message)) - Counter(set(calls_of(message)))).elements():
            yield position, f"two calls have {call}"


def call_ids_are_not_empty(messages: Sequence[BaseMessage]) -> Iterator[tuple[int, str]]:
    """Anthropic: "tool_use.id: String should match pattern '^[a-zA-Z0-9_-]+$'" (langchain-anthropic since 1.x sends
    another id for one that does not fit, but not for none). OpenAI, reference of Create chat completion: `id` of a
    tool call is required.
    """
    for position, message in enumerate(messages):
        for form, mark in calls_of(message):
            if not mark:
                yield position, f"a {form} call without one"


# What a memory answers for: content


def user_messages_say_something(messages: Sequence[BaseMessage]) -> Iterator[tuple[int, str]]:
    """Anthropic: "user messages must have non-empty content" and "text content blocks must contain non-whitespace
    text". OpenAI accepts them.
    """
    for position, message in enumerate(messages):
        if isinstance(message, HumanMessage) and not _says_anything(message):
            yield position, f"content is {message.content!r}"


def assistant_messages_say_something_or_call(messages: Sequence[BaseMessage]) -> Iterator[tuple[int, str]]:
    """OpenAI, reference of Create chat completion: an assistant's content is "required unless `tool_calls` or
    `function_call` is specified". Anthropic: "all messages must have non-empty content except for the optional final
    assistant message"; here none is final, since the next human message follows.
    """
    for position, message in enumerate(messages):
        if isinstance(message, AIMessage) and not calls_of(message) and not _says_anything(message):
            yield position, f"content is {message.content!r}, without a call"


def system_messages_say_something(messages: Sequence[BaseMessage]) -> Iterator[tuple[int, str]]:
    """Anthropic: "system: text content blocks must be non-empty" and "… must contain non-whitespace text". A lone empty
    text passes, but langchain-anthropic makes blocks of it beside a prompt's own system message. OpenAI accepts them.
    """
    for position, message in enumerate(messages):
        if isinstance(message, SystemMessage) and not _says_anything(message):
            yield position, f"content is {message.content!r}"


# What a memory answers for: order and kinds


def no_message_is_a_removal(messages: Sequence[BaseMessage]) -> Iterator[tuple[int, str]]:
    """Langchain-openai: "Got unknown type"; langchain-anthropic: KeyError 'remove'. It is an order to a graph's state,
    not something that was said.
    """
    for position, message in enumerate(messages):
        if isinstance(message, RemoveMessage):
            yield position, "a RemoveMessage"


def the_first_message_is_the_users(messages: Sequence[BaseMessage]) -> Iterator[tuple[int, str]]:
    """Anthropic: "messages: first message must use the \"user\" role", after the system messages; Bedrock too. OpenAI
    and newer Claude models accept others, so `BufferMemory()`, which shows all there is, may begin with a greeting.
    """
    for position, message in enumerate(messages):
        if not isinstance(message, SystemMessage):
            if not isinstance(message, HumanMessage):
                yield position, f"it is of type {message.type}"
            return


# What an application may want as it is


def system_messages_come_first(messages: Sequence[BaseMessage]) -> Iterator[tuple[int, str]]:
    """Langchain-anthropic: "Received multiple non-consecutive system messages." or, earlier and for Bedrock, "System
    message must be at beginning of message list." OpenAI accepts them anywhere, newer Claude models behind a user's.

    The application's: it said this at this point. A memory answers for the preamble's system messages and for the
    summary, which come first.
    """
    for position, message in enumerate(messages):
        if isinstance(message, SystemMessage) and not all(isinstance(m, SystemMessage) for m in messages[:position]):
            yield position, "a system message behind others"


def roles_alternate(messages: Sequence[BaseMessage]) -> Iterator[tuple[int, str]]:
    """Anthropic, until 2024: "roles must alternate between \"user\" and \"assistant\", but found multiple … in a row";
    some chat templates still. Today's reference of Create a Message: "Consecutive user or assistant turns in your
    request will be combined into a single turn", and langchain-anthropic joins users' messages, results among them,
    before that: so this is about assistants alone.

    The application's: the assistant spoke twice.
    """
    for position, (before, message) in enumerate(zip(messages, messages[1:], strict=False), start=1):
        if isinstance(before, AIMessage) and isinstance(message, AIMessage):
            yield position, "an assistant's message behind another"


def roles_are_known(messages: Sequence[BaseMessage]) -> Iterator[tuple[int, str]]:
    """OpenAI: "Invalid value: '…'. Supported values are: 'system', 'assistant', 'user', 'function', 'tool', and
    'developer'." Langchain-anthropic: KeyError 'chat'.

    The application's: a ChatMessage is there for models with roles of their own.
    """
    for position, message in enumerate(messages):
        if isinstance(message, ChatMessage):
            yield position, f"role {message.role!r}"


def results_are_of_the_newer_form(messages: Sequence[BaseMessage]) -> Iterator[tuple[int, str]]:
    """Langchain-anthropic: KeyError 'function'. OpenAI, reference of Create chat completion: function messages are
    deprecated, and accepted.

    The application's: its model made a call of the older form, and takes it back.
    """
    for position, message in enumerate(messages):
        if isinstance(message, FunctionMessage):
            yield position, "a FunctionMessage"


def tool_names_fit(messages: Sequence[BaseMessage]) -> Iterator[tuple[int, str]]:
    """OpenAI: "Invalid 'messages[9].tool_calls[0].function.name': string does not match pattern. Expected a string that
    matches the pattern '^[a-zA-Z0-9_-]+$'." Anthropic: "String should match pattern '^[a-zA-Z0-9_-]{1,64}$'".

    The application's: it named its tools, and its model called them.
    """
    for position, message in enumerate(messages):
        for call in [*getattr(message, "tool_calls", []), *getattr(message, "invalid_tool_calls", [])]:
            if not re.fullmatch("[a-zA-Z0-9_-]{1,64}", call["name"] or ""):
                yield position, f"tool name {call['name']!r}"


def call_ids_are_not_used_again(messages: Sequence[BaseMessage]) -> Iterator[tuple[int, str]]:
    """Anthropic, over the whole request: "`tool_use` ids must be unique". OpenAI and others want it of each message
    alone.

    The application's: a model that counts its ids from 0 in each answer takes them back; Claude's own ids differ.
    """
    used: set[tuple[str, Any]] = set()
    for position, message in enumerate(messages):
        calls = {call for call in calls_of(message) if call[0] == "tool"}
        for call in sorted(calls & used):
            yield position, f"{call} has been used before"
        used |= calls


def text_blocks_are_not_empty(messages: Sequence[BaseMessage]) -> Iterator[tuple[int, str]]:
    """Anthropic: "text content blocks must be non-empty". Langchain-anthropic leaves such blocks out, but no bare texts
    among blocks, and nothing of a system message.

    The application's, where the message says something besides: a memory shows messages as they are.
    """
    for position, message in enumerate(messages):
        sent = _says_anything(message) or calls_of(message)  # else the rules about saying something speak
        if sent and isinstance(message.content, list) and not isinstance(message, ToolMessage):
            keeps = isinstance(message, SystemMessage)
            if "" in message.content or (keeps and "" in map(_text_of, message.content)):
                yield position, f"content is {message.content!r}"


def results_are_not_empty_lists(messages: Sequence[BaseMessage]) -> Iterator[tuple[int, str]]:
    """OpenAI, specification of Create chat completion: a tool message's content is a text or an array of at least one
    part. Anthropic accepts it.

    The application's, as above.
    """
    for position, message in enumerate(messages):
        if isinstance(message, ToolMessage) and message.content == []:
            yield position, "content is []"


OF_THE_MEMORY: tuple[Rule, ...] = (
    each_call_has_its_result,
    each_result_follows_its_call,
    each_call_has_one_result,
    call_ids_differ_in_a_message,
    call_ids_are_not_empty,
    user_messages_say_something,
    assistant_messages_say_something_or_call,
    system_messages_say_something,
    no_message_is_a_removal,
    the_first_message_is_the_users,
)
OF_THE_APPLICATION: tuple[Rule, ...] = (
    system_messages_come_first,
    roles_alternate,
    roles_are_known,
    results_are_of_the_newer_form,
    tool_names_fit,
    call_ids_are_not_used_again,
    text_blocks_are_not_empty,
    results_are_not_empty_lists,
)
RULES = OF_THE_MEMORY + OF_THE_APPLICATION


def _results_behind(messages: Sequence[BaseMessage], position: int) -> list[BaseMessage]:
    """Return the results that follow a message directly; none behind a result."""
    return [] if is_result(messages[position]) else list(takewhile(is_result, messages[position + 1 :]))


def _text_of(block: str | dict[str, Any]) -> str | None:
    """Return a block's text, None if it is another kind of block."""
    if isinstance(block, str):
        return block
    return str(block.get("text", "")) if block.get("type") == "text" else None


def _says_anything(message: BaseMessage) -> bool:
    blocks = [message.content] if isinstance(message.content, str) else message.content
    texts = [_text_of(block) for block in blocks]
    return any(text is None or text.strip() for text in texts)
