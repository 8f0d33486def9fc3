"""Messages to the text that a prompt holds.

Owns the three formatters of a memory's `formatter` parameter and the text of a message. Gives the same result in
both LangChain lines, whose own `get_buffer_string` differ. Must not know the database, nor which messages a model
should see: every message given is shown, except RemoveMessage, which says nothing.

A formatter is a function of (messages, human_prefix, ai_prefix); the result for no messages is the empty text,
for `as_json` the empty array.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any
from xml.sax.saxutils import escape, quoteattr

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

_SURROGATE = re.compile("[\ud800-\udfff]")
# Everything outside the production Char of XML 1.0, section 2.2.
_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


def text_of(message: BaseMessage) -> str:
    """Return the text of a message's content: text blocks joined without a separator, other blocks left out."""
    # Not message.text, which is a method in LangChain 0.3, an attribute in 1.x, and missing in early versions.
    if isinstance(message.content, str):
        return message.content
    blocks = (block if isinstance(block, str) else block.get("text") for block in message.content if _is_text(block))
    return "".join(block for block in blocks if isinstance(block, str))


def _is_text(block: str | dict[Any, Any]) -> bool:
    return isinstance(block, str) or block.get("type") == "text"


def as_text(messages: Sequence[BaseMessage], human_prefix: str = "Human", ai_prefix: str = "AI") -> str:
    """Return one ``prefix: text`` line a message, as LangChain's `get_buffer_string` does for plain messages.

    An AI message's tool calls follow its text: ``AI: I look. [calls search({"query": "x"})]``.
    """
    lines = []
    for label, message in _labelled(messages, human_prefix, ai_prefix):
        lines.append(f"{label}: {text_with_calls(message)}")
    return "\n".join(lines)


def text_with_calls(message: BaseMessage) -> str:
    """Return the text of a message's content and after it, of an AI message, its tool calls."""
    text = text_of(message)
    if not (calls := _calls(message)):
        return text
    written = ", ".join(f"{call['name']}({_json(call['args'])})" for call in calls)
    return f"{text} [calls {written}]" if text else f"[calls {written}]"


def as_xml(messages: Sequence[BaseMessage], human_prefix: str = "Human", ai_prefix: str = "AI") -> str:
    """Return one ``<message role="prefix">text</message>`` element a message, a line each, without a root element.

    Messages show their name and tool call id as attributes and tool calls as ``<tool_call>`` elements with the
    arguments as JSON. Everything is escaped; what XML 1.0 cannot carry at all becomes U+FFFD.
    """
    elements = []
    for label, message in _labelled(messages, human_prefix, ai_prefix):
        calls = ""
        for call in _calls(message):
            attributes = _attributes(name=call["name"], id=call.get("id"))
            calls += f"<tool_call{attributes}>{_xml_text(_json(call['args']))}</tool_call>"
        attributes = _attributes(role=label, name=message.name, tool_call_id=_tool_call_id(message))
        elements.append(f"<message{attributes}>{_xml_text(text_of(message))}{calls}</message>")
    return "\n".join(elements)


def as_json(messages: Sequence[BaseMessage], human_prefix: str = "Human", ai_prefix: str = "AI") -> str:
    """Return a JSON array of ``{role, content, name?, tool_calls?, tool_call_id?}``, one object a message.

    ``role`` is the prefix, ``content`` the text, and a tool call ``{name, args, id?}``. Characters stand as they
    are; lone surrogates, which no encoding carries, stand as escapes.
    """
    objects = []
    for label, message in _labelled(messages, human_prefix, ai_prefix):
        shown: dict[str, Any] = {"role": label, "content": text_of(message)}
        if message.name is not None:
            shown["name"] = message.name
        if calls := _calls(message):
            shown["tool_calls"] = calls
        if (tool_call_id := _tool_call_id(message)) is not None:
            shown["tool_call_id"] = tool_call_id
        objects.append(shown)
    return _json(objects)


def _labelled(messages: Sequence[BaseMessage], human_prefix: str, ai_prefix: str) -> Iterator[tuple[str, BaseMessage]]:
    """Yield each message that says something with the label it is shown under."""
    for message in messages:
        if isinstance(message, HumanMessage):
            yield human_prefix, message
        elif isinstance(message, AIMessage):
            yield ai_prefix, message
        elif isinstance(message, SystemMessage):
            yield "System", message
        elif isinstance(message, FunctionMessage):
            yield "Function", message
        elif isinstance(message, ToolMessage):
            yield "Tool", message
        elif isinstance(message, ChatMessage):
            yield message.role, message
        elif not isinstance(message, RemoveMessage):
            yield message.type, message


def _calls(message: BaseMessage) -> list[dict[str, Any]]:
    """Return an AI message's calls as ``{name, args, id?}``: its tool calls, else the older function call."""
    if not isinstance(message, AIMessage):
        return []
    if message.tool_calls:
        calls: Sequence[Any] = message.tool_calls
        return [
            {"name": call.get("name"), "args": call.get("args")} | ({"id": call["id"]} if call.get("id") else {})
            for call in calls
        ]
    function_call = message.additional_kwargs.get("function_call")
    if not isinstance(function_call, dict):
        return []
    arguments: Any = function_call.get("arguments")
    try:
        arguments = json.loads(arguments)
    except (TypeError, ValueError):
        pass  # a model may write arguments that are not JSON: they are shown as they are
    return [{"name": function_call.get("name"), "args": arguments}]


def _tool_call_id(message: BaseMessage) -> str | None:
    return message.tool_call_id if isinstance(message, ToolMessage) else None


def _json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _attributes(**values: str | None) -> str:
    return "".join(f" {name}={quoteattr(_carried(value))}" for name, value in values.items() if value is not None)


def _xml_text(text: str) -> str:
    # A parser would turn a bare carriage return into a newline.
    return escape(_carried(text), {"\r": "&#13;"})


def _carried(text: str) -> str:
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)
