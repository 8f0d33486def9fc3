"""Messages in the forms that others keep them in, to rows and back: LangChain's dicts, OpenAI's, columns of one's own.

Rows are data: none of these forms is revived through LangChain's `load`. The text of an error quotes no message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    convert_to_messages,
    convert_to_openai_messages,
    messages_from_dict,
)
from langchain_core.messages.tool import invalid_tool_call, tool_call
from pydantic import ValidationError

from pgmemory.errors import MessageNotStorableError
from pgmemory.models import StoredMessage
from pgmemory.serialization import to_message, to_stored
from pgmemory.transfer.source import Redact

# As LangChain.js names them.
_OTHER_TYPES = {"generic": "chat"}
_OPENAI_ROLES = {"user", "assistant", "system", "developer", "tool", "function", "human", "ai", "remove"}


class OddMessageError(ValueError):
    """Something cannot be read as a message; the text says why."""


def from_langchain_dict(value: Any) -> BaseMessage:
    """Return the message in what LangChain's `message_to_dict` makes, or in the flat form that LangChain.js keeps.

    Raises:
        OddMessageError: It is no such thing.
    """
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise OddMessageError("no JSON object with a type")
    data = value["data"] if isinstance(value.get("data"), dict) else value
    kind = _OTHER_TYPES.get(value["type"], value["type"])
    data = {name: item for name, item in data.items() if name != "type"}
    if "content" not in data:
        raise OddMessageError("no content")
    if data["content"] is None:
        data["content"] = ""
    invalid = _take_calls(data)
    if kind == "chat":
        data.setdefault("role", "chat")
    return _built(lambda: messages_from_dict([{"type": kind, "data": data}])[0], invalid)


def from_openai(value: Any) -> BaseMessage:
    """Return the message in an OpenAI chat message; one of another role becomes a ChatMessage.

    Raises:
        OddMessageError: It is no such thing.
    """
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise OddMessageError("no JSON object with a role")
    data = dict(value)
    if data.setdefault("content", None) is None and not data.keys() & {
        "tool_calls",
        "function_call",
        "refusal",
        "audio",
    }:
        raise OddMessageError("no content")
    invalid = _take_calls(data)
    if data["role"] not in _OPENAI_ROLES:
        return _built(lambda: ChatMessage(**{**data, "content": data["content"] or ""}), [])
    return _built(lambda: convert_to_messages([data])[0], invalid)


def from_columns(role: str, content: str | None, additional_kwargs: Mapping[str, Any] | None) -> BaseMessage:
    """Return the message in the columns of a table of one's own.

    What of a message has a field of its own in OpenAI's form is taken out of `additional_kwargs`.
    """
    others = dict(additional_kwargs or {})
    fields = {name: others.pop(name) for name in ("tool_calls", "tool_call_id", "name") if others.get(name)}
    if others:
        fields["additional_kwargs"] = others
    return from_openai({"role": role, "content": content or "", **fields})


def to_row(build: Callable[[], BaseMessage], redact: Redact | None) -> StoredMessage:
    """Return the row of a message that is built, and redacted, now.

    Raises:
        OddMessageError: It cannot be built or stored.
    """
    message = build()
    if redact is not None:
        try:
            (message,) = redact([message])
        except Exception as error:  # a function of the application's; its error may quote the message
            raise OddMessageError(f"redact failed, or made several messages of it ({type(error).__name__})") from None
    try:
        return to_stored(message)
    except MessageNotStorableError as error:
        raise OddMessageError(str(error)) from None


def to_openai(stored: StoredMessage) -> dict[str, Any] | None:
    """Return a stored message in OpenAI's chat form; None for one that only deletes another."""
    if stored.role == "remove":
        return None
    message = to_message(stored)
    try:
        return _openai_form(message)
    except Exception:  # whatever converting chokes on in blocks that some other model has made
        return _openai_form(message.model_copy(update={"content": stored.content}))


def _openai_form(message: BaseMessage) -> dict[str, Any]:
    converted: Any = convert_to_openai_messages(message)
    form: dict[str, Any] = {**converted}
    if isinstance(message, AIMessage):
        # LangChain leaves out these calls, whose results would then answer nothing.
        for call in message.invalid_tool_calls:
            function = {"name": call.get("name") or "", "arguments": call.get("args") or ""}
            form.setdefault("tool_calls", []).append({"type": "function", "id": call.get("id"), "function": function})
        if "function_call" in message.additional_kwargs:
            form["function_call"] = message.additional_kwargs["function_call"]
    return form


def _built(build: Callable[[], BaseMessage], invalid_calls: list[Any]) -> BaseMessage:
    try:
        message = build()
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise OddMessageError(f"{where}: {first['msg']}") from None
    except Exception as error:  # whatever data makes LangChain raise, it stops this message alone
        raise OddMessageError(f"LangChain cannot read it ({type(error).__name__})") from None
    if invalid_calls and isinstance(message, AIMessage):
        message.invalid_tool_calls = [*message.invalid_tool_calls, *invalid_calls]
    return message


def _take_calls(data: dict[str, Any]) -> list[Any]:
    """Give tool calls of OpenAI's form LangChain's; return those that cannot have it, as invalid calls."""
    calls = data.get("tool_calls")
    if not calls:
        data.pop("tool_calls", None)
        return []
    if not isinstance(calls, list):
        raise OddMessageError("tool_calls is no list")
    valid, invalid = [], []
    for call in calls:
        if not isinstance(call, dict):
            raise OddMessageError("a tool call is no JSON object")
        function = call.get("function")
        if not isinstance(function, dict):
            valid.append(call)
            continue
        name, arguments = function.get("name"), function.get("arguments")
        try:
            args = json.loads(arguments, strict=False) if isinstance(arguments, str) and arguments else arguments or {}
        except (ValueError, RecursionError):
            args = None
        if isinstance(args, dict) and isinstance(name, str):
            valid.append(dict(tool_call(name=name, args=args, id=call.get("id"))))
        else:
            text = arguments if isinstance(arguments, str) else json.dumps(arguments)
            invalid.append(invalid_tool_call(name=name, args=text, id=call.get("id"), error=None))
    data["tool_calls"] = valid
    return invalid
