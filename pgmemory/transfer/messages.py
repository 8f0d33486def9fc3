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
_OTHER_ROLES = {"bot": "ai"}
# What LangChain calls the one argument of a tool that takes text.
_TEXT_ARGUMENT = "__arg1"


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
    if data["role"] == "tool" and data.get("tool_call_id") is None:
        raise OddMessageError("no tool_call_id")
    invalid = _take_calls(data)
    if data["role"] not in _OPENAI_ROLES:
        return _built(lambda: ChatMessage(**{**data, "content": data["content"] or ""}), [])
    return _built(lambda: convert_to_messages([data])[0], invalid)


def from_columns(
    role: str, content: str | list[Any] | None, additional_kwargs: Mapping[str, Any] | None
) -> BaseMessage:
    """Return the message in the columns of a table of one's own.

    Roles may also be the names of LangChain's classes, or ``bot``, in capitals or not. What of a message has a field of
    its own in OpenAI's form is taken out of `additional_kwargs`.
    """
    others = dict(additional_kwargs or {})
    fields = {name: others.pop(name) for name in ("tool_calls", "tool_call_id", "name") if others.get(name)}
    if others:
        fields["additional_kwargs"] = others
    return from_openai({"role": _known_role(role), "content": content or "", **fields})


def _known_role(role: str) -> str:
    plain = role.strip().lower().removesuffix("chunk").removesuffix("message")
    plain = _OTHER_ROLES.get(plain, plain)
    return plain if plain in _OPENAI_ROLES else role


def to_row(build: Callable[[], BaseMessage], redact: Redact | None) -> StoredMessage | None:
    """Return the row of a message that is built, and redacted, now; None if redacting leaves nothing of it.

    Raises:
        OddMessageError: It cannot be built or stored.
    """
    message = build()
    if redact is not None:
        try:
            rewritten = redact([message])
        except Exception as error:  # a function of the application's; its error may quote the message
            raise OddMessageError(f"redact failed ({type(error).__name__})") from None
        if not rewritten:
            return None
        if len(rewritten) > 1:
            raise OddMessageError("redact made several messages of it, for which the source has no numbers")
        (message,) = rewritten
        if not isinstance(message, BaseMessage):
            raise OddMessageError(f"redact made no message of it, but a {type(message).__name__}")
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
    """Give tool calls of OpenAI's form LangChain's; return those that cannot have it, as invalid calls.

    A custom call, whose input is text, becomes one with that text as its argument, as LangChain reads it elsewhere.
    """
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
        function, custom = call.get("function"), call.get("custom")
        if isinstance(custom, dict) and isinstance(custom.get("name"), str):
            text = {_TEXT_ARGUMENT: custom.get("input")}
            valid.append(dict(tool_call(name=custom["name"], args=text, id=call.get("id"))))
            continue
        if not isinstance(function, dict):
            if not isinstance(call.get("name"), str):
                raise OddMessageError("a tool call that names neither a function nor a custom tool")
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
            written = arguments if isinstance(arguments, str) else json.dumps(arguments)
            invalid.append(invalid_tool_call(name=name, args=written, id=call.get("id"), error=None))
    data["tool_calls"] = valid
    return invalid
