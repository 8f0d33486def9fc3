"""Messages to rows and back, exactly.

Owns the step from a LangChain message to a `StoredMessage` and back, and the JSON text of every value in it.
Must not know the database, conversations or turns, nor how a prompt looks.

``to_message(to_stored(message)) == message``, with these exceptions:

- A stream chunk comes back as the full message, a subclass as its LangChain class, its own fields as extra fields.
- ``example=False``, which LangChain 0.3 puts on human and AI messages, is not kept: rows of both lines are equal.
- Two surrogate code points that together encode one character come back as that character.
- Values that JSON lacks come back in a readable form:

  ==============================  ==============================================================================
  value                           form
  ==============================  ==============================================================================
  datetime, date, time            ISO 8601 text
  timedelta                       its seconds, a number
  Decimal, UUID                   its text
  bytes, bytearray, memoryview    base64 text (RFC 4648)
  tuple                           list
  set, frozenset                  list, sorted; by `repr` where its values do not compare
  Enum member                     the form of its value
  pydantic model, dataclass       dict of its fields, without those that a model excludes from its own dumps
  nan, inf, -inf                  ``"NaN"``, ``"Infinity"``, ``"-Infinity"``
  a dict key that is not text     the text of its form: ``1`` becomes ``"1"``, ``True`` ``"true"``, ``None`` ``"null"``
  ==============================  ==============================================================================

Everything else is a `MessageNotStorableError` that names its place: other objects, secrets, keys that become equal,
structures that contain themselves or go deeper than 200 levels, integers too long for Python to write.

Rows are data: a dict shaped like a LangChain constructor stays a dict. The JSON text is ASCII and holds no NaN
literal, so that PostgreSQL's ``json`` takes it (``jsonb`` refuses NUL characters and lone surrogates).
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import cache
from typing import Any
from uuid import UUID

from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)
from pydantic import BaseModel, SecretBytes, SecretStr

from pgmemory.errors import MessageNotStorableError
from pgmemory.models import StoredMessage, readable

_log = logging.getLogger(__name__)

_STORED_CLASSES: tuple[type[BaseMessage], ...] = (
    HumanMessage,
    AIMessage,
    SystemMessage,
    ToolMessage,
    FunctionMessage,
    ChatMessage,
    RemoveMessage,
)
# What a class demands and a row of another writer may lack.
_REQUIRED: dict[type[BaseMessage], dict[str, Any]] = {
    ToolMessage: {"tool_call_id": ""},
    FunctionMessage: {"name": ""},
    ChatMessage: {"role": "chat"},
    RemoveMessage: {"id": ""},
}
_COLUMNS = frozenset({"content", "additional_kwargs", "type"})

# Deep enough for real data; shallow enough to be read again by a caller who is deep in its own stack.
_MAX_DEPTH = 200
_NOT_SCALAR = object()
_encode = json.JSONEncoder(allow_nan=False).encode


def to_stored(message: BaseMessage, *, path: str = "message") -> StoredMessage:
    """Turn a message into the row that holds it, without its place in a conversation.

    Args:
        message: A message of a LangChain class, of a subclass of one, or a stream chunk.
        path: How errors name the message, for example ``messages[1]``.

    Raises:
        MessageNotStorableError: The object is no such message, or a value in it has no JSON form.
    """
    form = _form(type(message)) if isinstance(message, BaseMessage) else None
    if form is None:
        raise MessageNotStorableError(
            path,
            f"a {_type_name(message)} is not one of LangChain's messages; use or subclass one of "
            + ", ".join(stored_class.__name__ for stored_class in _STORED_CLASSES),
        )
    values = {**message.__dict__, **message.model_extra} if message.model_extra else message.__dict__
    content = _readable(message.content, f"{path}.content")
    extra: dict[str, Any] = {} if content == message.content else {"content": message.content}
    for name, default in form.defaults.items():
        value = values.get(name, default)
        # An artifact may be of a type whose == is not a plain truth value: never compare it with None.
        if value is not default and (default is None or value != default):
            extra[name] = value
    if not values.keys() <= form.known:
        extra.update((name, value) for name, value in values.items() if name not in form.known)
    kwargs = message.additional_kwargs
    return StoredMessage(
        role=form.role,
        content=content,
        additional_kwargs=to_json_text(kwargs, path=f"{path}.additional_kwargs") if kwargs else None,
        extra=_extra_text(extra, path) if extra else None,
    )


def to_message(stored: StoredMessage) -> BaseMessage:
    """Build the message that a row holds.

    A row never makes a conversation unreadable. Fields that a row lacks take their defaults, unknown fields become
    extra fields of the message. A row of an unknown role becomes a `ChatMessage` of that role; a row whose JSON is
    broken or does not fit its class becomes a message of the readable content alone. Both log one WARNING.
    """
    message_class = _CLASS_OF_ROLE.get(stored.role, ChatMessage)
    required = _REQUIRED.get(message_class, {})
    if stored.role not in _CLASS_OF_ROLE:
        _log.warning("a stored message has the unknown role %r: it is read as a ChatMessage", stored.role)
        required = {"role": stored.role}
    try:
        return _build(message_class, stored, required)
    except (ValueError, TypeError, AttributeError) as exc:
        # Only the error's type: its text may quote the message.
        _log.warning(
            "the fields of a stored %s do not fit (%s): only its readable content is read",
            message_class.__name__,
            type(exc).__name__,
        )
        return message_class.model_construct(content=stored.content, **required)


def to_json_text(value: Any, *, path: str) -> str:
    """Write any value as JSON text: plain JSON exactly, other values in the readable form of the module's table.

    Args:
        value: What to write.
        path: How errors name it.

    Raises:
        MessageNotStorableError: A value in it has no JSON form.
    """
    text = _exact_json(value)
    return _encode(_plain(value, path, [])) if text is None else text


@dataclass(frozen=True, slots=True)
class _Form:
    """How messages of one Python class are stored: role, and the fields of `extra` with their defaults."""

    role: str
    defaults: Mapping[str, Any]
    known: frozenset[str]


@cache
def _form(message_class: type[BaseMessage]) -> _Form | None:
    stored_class = next((known for known in _STORED_CLASSES if issubclass(message_class, known)), None)
    if stored_class is None:
        return None
    defaults = {
        name: field.get_default(call_default_factory=True)
        for name, field in stored_class.model_fields.items()
        if name not in _COLUMNS
    }
    if stored_class in (HumanMessage, AIMessage):
        # A field in one line and an extra field in the other: in both the last one, and dropped when False.
        defaults.pop("example", None)
        defaults["example"] = False
    known = _COLUMNS | defaults.keys() | (message_class.model_fields.keys() - _dumped_fields(message_class))
    if issubclass(message_class, AIMessageChunk):
        known |= AIMessageChunk.model_fields.keys() - AIMessage.model_fields.keys()
    return _Form(stored_class.model_fields["type"].default, defaults, known)


_CLASS_OF_ROLE = {known.model_fields["type"].default: known for known in _STORED_CLASSES}


def _build(message_class: type[BaseMessage], stored: StoredMessage, required: Mapping[str, Any]) -> BaseMessage:
    if stored.extra is None and stored.additional_kwargs is None:
        return message_class(content=stored.content, **required)
    unknown = dict(required) if stored.extra is None else {**required, **json.loads(stored.extra)}
    content = unknown.pop("content", stored.content)
    unknown.pop("type", None)
    if stored.additional_kwargs is not None:
        unknown["additional_kwargs"] = json.loads(stored.additional_kwargs)
    unvalidated = _pop_ai_fields(unknown) if message_class is AIMessage else {}
    known = {name: unknown.pop(name) for name in message_class.model_fields.keys() & unknown.keys()}
    message = message_class(content=content, **known)
    for name, value in unvalidated.items():
        setattr(message, name, value)
    if unknown and message.model_extra is not None:
        # Not through the constructor, which would take some names, such as content_blocks, for its own parameters.
        message.model_extra.update(unknown)
    return message


def _pop_ai_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Take out what AIMessage would change while it validates: its calls, also made from additional_kwargs, and usage.

    Raises:
        ValueError: One of them has a shape that no AIMessage holds.
    """
    taken = {name: fields.pop(name, []) for name in ("tool_calls", "invalid_tool_calls")}
    for name, calls in taken.items():
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise ValueError(f"{name} is not a list of dicts")
    taken["usage_metadata"] = usage = fields.pop("usage_metadata", None)
    if usage is not None and not isinstance(usage, dict):
        raise ValueError("usage_metadata is not a dict")
    return taken


def _readable(content: Any, path: str) -> str:
    """Return what a person reads of a message's content: text, with a mark for each block that is not text."""
    if isinstance(content, str):
        text = content
    elif isinstance(content, list):
        text = "\n".join(_readable_block(block, f"{path}[{index}]") for index, block in enumerate(content))
    else:
        raise MessageNotStorableError(path, f"a {_type_name(content)} is no content; use text or a list of blocks")
    return readable(text)


def _readable_block(block: Any, path: str) -> str:
    if isinstance(block, str):
        return block
    if not isinstance(block, dict):
        raise MessageNotStorableError(path, f"a {_type_name(block)} is no content block; use text or a dict")
    if block.get("type") == "text" and isinstance(block.get("text"), str):
        return str(block["text"])
    return f"[{block.get('type', 'block')}]"


def _extra_text(extra: Mapping[str, Any], path: str) -> str:
    text = _exact_json(extra)
    if text is None:
        text = _encode({name: _plain(value, f"{path}.{name}", []) for name, value in extra.items()})
    return text


def _exact_json(value: Any) -> str | None:
    """Return the JSON text of a value that is plain JSON, or None if it is not.

    Writing, reading back and comparing all happen in C. The comparison finds what `json.dumps` changes silently,
    such as keys that are not text, in less time than a walk in Python.
    """
    try:
        text = _encode(value)
        back = json.loads(text)
        if back != value:
            return None
    except (TypeError, ValueError, RecursionError):
        return None
    if text.count("[") + text.count("{") > _MAX_DEPTH and _is_too_deep(back):
        return None
    return text


def _is_too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return False
    return True


def _plain(value: Any, path: str, parents: list[int]) -> Any:
    """Return a value's plain JSON form; `parents` are the ids of the containers around it."""
    while isinstance(value, Enum):
        value = value.value
    scalar = _scalar(value, path)
    if scalar is not _NOT_SCALAR:
        return scalar
    if id(value) in parents:
        raise MessageNotStorableError(path, "the structure contains itself; store a copy without the loop")
    if len(parents) == _MAX_DEPTH:
        raise MessageNotStorableError(path, f"nested more than {_MAX_DEPTH} levels deep; store a flatter structure")
    parents.append(id(value))
    form: Any
    if isinstance(value, dict):
        form = {}
        for key, item in value.items():
            item_path = f"{path}[{key!r}]"
            text = _key_text(key, item_path)
            if text in form:
                raise MessageNotStorableError(item_path, "another key of the same dict also becomes this text")
            form[text] = _plain(item, item_path, parents)
    elif isinstance(value, (list, tuple, set, frozenset)):
        form = []
        for index, item in enumerate(_sorted(value) if isinstance(value, (set, frozenset)) else value):
            form.append(_plain(item, f"{path}[{index}]", parents))
    else:
        form = {}
        for name, item in _fields_of(value, path).items():
            form[name] = _plain(item, f"{path}.{name}", parents)
    parents.pop()
    return form


def _scalar(value: Any, path: str) -> Any:
    """Return the plain JSON form of a value that holds no others, or `_NOT_SCALAR`."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int):
        try:
            str(value)
        except ValueError as exc:
            raise MessageNotStorableError(path, "an integer too long to be written; store it as text") from exc
        return value
    if isinstance(value, float):
        if value != value:
            return "NaN"
        return {float("inf"): "Infinity", float("-inf"): "-Infinity"}.get(value, value)
    if isinstance(value, (date, time)):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, (Decimal, UUID)):
        return str(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return base64.b64encode(value).decode("ascii")
    return _NOT_SCALAR


def _key_text(key: Any, path: str) -> str:
    while isinstance(key, Enum):
        key = key.value
    form = _scalar(key, path)
    if form is _NOT_SCALAR:
        raise MessageNotStorableError(path, f"a {_type_name(key)} cannot be a key; use text")
    return form if isinstance(form, str) else _encode(form)


def _sorted(values: set[Any] | frozenset[Any]) -> list[Any]:
    try:
        return sorted(values)
    except TypeError:
        return sorted(values, key=repr)


def _fields_of(value: Any, path: str) -> dict[str, Any]:
    """Return the fields of a pydantic model or a dataclass; anything else has no JSON form."""
    if isinstance(value, BaseModel):
        own = {name: getattr(value, name) for name in _dumped_fields(type(value))}
        return {**own, **(value.model_extra or {})}
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, (SecretStr, SecretBytes)):
        raise MessageNotStorableError(path, "a secret is never stored; leave it out of the message")
    raise MessageNotStorableError(
        path, f"an object of type {_type_name(value)} has no JSON form; store text, numbers, lists or dicts instead"
    )


def _dumped_fields(model_class: type[BaseModel]) -> list[str]:
    return [name for name, field in model_class.model_fields.items() if not field.exclude]


def _type_name(value: Any) -> str:
    return type(value).__qualname__
