"""A ready function for a store's `redact`: e-mail addresses, phone and card numbers out of messages."""

from __future__ import annotations

import copy
import json
import re
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any, TypeVar
from uuid import UUID

from langchain_core.messages import BaseMessage
from pydantic import BaseModel

_Model = TypeVar("_Model", bound=BaseModel)


def redact_personal_data(messages: Sequence[BaseMessage]) -> list[BaseMessage]:
    """Return copies of messages with ``[email]``, ``[phone]`` and ``[card]`` in place of what was found.

    Give it to a store: ``ConversationStore(…, redact=redact_personal_data)``. It is a filter by form, not a guarantee.
    It looks at every text of a message: content, calls and their arguments, results, names, metadata, artifacts, and
    the keys and fields in them. Whole numbers, decimals and members of enums are looked at as the text of their value.
    Text that is JSON stays JSON. The ids of messages and calls stay, and so do a block's pictures, sounds, files (as
    data or as an address) and signatures, dates, and bytes. Objects that cannot be stored stay too: saving refuses
    them. Its own output it leaves as it is.

    Found are:

    - e-mail addresses, in any script, whose domain ends in a name (``user@localhost`` does not);
    - phone numbers with a country code after ``+`` or ``00``; numbers of 9 to 13 digits that begin with one ``0``;
      numbers with an area code in brackets; ``555-123-4567``, with points or blanks too; and any 7 to 15 digits after a
      word such as *phone*, *mobile* or *Telefon*, which may be the name of an argument;
    - card numbers: 13 to 19 digits with a right check digit, in one piece, or in groups of four or more (the last may
      be shorter) with blanks or hyphens between them; as numbers too.

    Not found are names, addresses, dates of birth, bank accounts; phone numbers that look like any other number (ten
    digits in a row without a word before them); numbers in words or digit by digit; ``jane at example dot org``; and
    whatever is cut in pieces, as by a model's token probabilities, or encoded. A number with the form of a phone or
    card number is taken for one: of other numbers of 13 to 19 digits, every tenth has a right check digit.
    """
    return [_redact_message(message) for message in messages]


# --- Text: every pattern is bounded or starts where the run before it ends, so none goes over a text more than a few
# times. Neighbours that are letters of other scripts bound nothing: such scripts may go without blanks.

_BLANKS = r" \t\u00a0\u2000-\u200d\u202a-\u202f\u2060\u2066-\u2069\u3000"
_HYPHENS = r"\-\u2010-\u2015\u2212\uff0d"
# Nor right behind what was redacted: there stood a digit or a letter, and redacting again must change nothing more.
_NOT_INSIDE = r"(?<![\dA-Za-z])(?<!\[email\])(?<!\[phone\])(?<!\[card\])"
_NOT_GOING_ON = r"(?![\dA-Za-z])"

_UNSPACED = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
_NO_MAIL = (
    r"\s\x00-\x1f!\"#$&()*,/:;<=>?@\[\\\]^`{|}\x7f-\xbf\u2000-\u206f\u3000-\u303f\uff01-\uff0f\uff1a-\uff20"
)
_LOCAL = rf"[^{_NO_MAIL}{_UNSPACED}]"
_LABEL = rf"[^{_NO_MAIL}.'%+~]"
_EMAIL = re.compile(
    rf"""
    (?: (?<!{_LOCAL}) (?P<quote>['.]*) (?!['.]){_LOCAL}+ | (?<![{_UNSPACED}]) [{_UNSPACED}]+ | "[^"\n]{{1,64}}" )
    (?: [@\uff20] | %40 )
    (?: (?:{_LABEL}+\.)+ (?: xn--[A-Za-z0-9-]+ | [A-Za-z]{{2,}} | [^{_NO_MAIL}.'%+~_\d-]{{2,}} )
      | \[(?:IPv6:)?[\d.:A-Fa-f]{{3,45}}\] )
    """,
    re.VERBOSE,
)

_UUID = r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}"

_GROUP_GAP = f"[{_BLANKS}{_HYPHENS}]{{1,3}}"
_CARD = re.compile(
    rf"{_NOT_INSIDE}(?:(?P<other>{_UUID})|(?<!\d\.)\d{{4,19}}(?:{_GROUP_GAP}\d{{4,13}}){{0,3}}(?:{_GROUP_GAP}\d{{1,3}})?)"
    rf"{_NOT_GOING_ON}(?!\.\d)"
)
_GROUP_END = re.compile(r"\d(?!\d)")
# Milli-, micro- and nanoseconds since 1970; books; a date and time in digits alone.
_NOT_A_CARD = re.compile(
    r"1\d{12}(?:\d{3}){0,2}|97[89]\d{10}|(?:19|20)\d\d(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])\d{6}(?:\d{3})?"
)

_DAY, _YEAR = r"(?:0?[1-9]|[12]\d|3[01])", r"(?:19|20)\d\d"
_DATE = (
    rf"(?:{_YEAR}(?:-{_DAY}-{_DAY}(?!-?\d)|/{_DAY}/{_DAY}(?!/?\d)|\.{_DAY}\.{_DAY}(?!\.?\d))"
    rf"|{_DAY}(?:-{_DAY}-(?:{_YEAR}|\d\d)(?!-?\d)|/{_DAY}/(?:{_YEAR}|\d\d)(?!/?\d)|\.{_DAY}\.(?:{_YEAR}|\d\d)(?!\.?\d))"
    rf"|(?:0[1-9]|1[0-2])[-/.]{_YEAR}(?![-/.]?\d))"
)
_HOURS = rf"\d\d?\.\d\d[{_BLANKS}]?[{_HYPHENS}][{_BLANKS}]?\d\d?\.\d\d(?!\.?\d)"
_ADDRESS = r"(?:0|[1-9]\d{0,2})(?:\.(?:0|[1-9]\d{0,2})){3}(?!\.?\d)"
_GAP = f"[{_BLANKS}{_HYPHENS}./()]"
# One more digit of the same number. What follows a blank may be a date or a time instead.
_MORE = rf"(?:\d|{_GAP}{{1,3}}(?!(?<=[{_BLANKS}])(?:{_DATE}|\d\d?:\d\d))\d)"
_PHONE_WORD = (
    r"(?:(?:tele|smart)?phone|telefono?|t[eé]l|mobile?|m[oó]vil|cell|handy|fax|whatsapp|ruf)"
    r"(?:[_ ]?(?:number|nummer|num|no|nr))?"
)
_AFTER_WORD = rf"[{_BLANKS}.:=\#\"'*]{{0,5}}"
_PHONE = re.compile(
    rf"""
    {_NOT_INSIDE} (?: {_UUID} | {_DATE} | {_HOURS} | {_ADDRESS} ) {_NOT_GOING_ON}
    | (?P<label>
        (?<![A-Za-z]) (?i:{_PHONE_WORD}) {_AFTER_WORD} (?: (?i:is|ist|at) {_AFTER_WORD} )?
        (?!{_DATE}) (?=[\d(+\uff0b])
      )?
      (?P<phone> {_NOT_INSIDE} (?:
        \(? [+\uff0b] {_GAP}{{0,2}} (?![0\uff10])\d {_MORE}{{6,14}} (?!\d)
        | (?<!\d[-./]) \(? 00 {_GAP}? [1-9] {_MORE}{{8,14}} (?!\d)
        | (?<!\d[-./]) \(? [0\uff10] (?![0\uff10])\d {_MORE}{{7,11}} {_NOT_GOING_ON}
        | \( (?!{_YEAR}\)) \d{{2,5}} \) [{_BLANKS}{_HYPHENS}/]{{0,3}} (?!{_DATE}) \d {_MORE}{{4,10}} {_NOT_GOING_ON}
        | (?<!\d[-./]) (?:1[{_BLANKS}{_HYPHENS}.]{{1,2}})?
          [2-9]\d\d [{_BLANKS}{_HYPHENS}.] \d{{3}} [{_BLANKS}{_HYPHENS}.] \d{{4}} {_NOT_GOING_ON} (?![-.]\d)
        | (?(label) \(? \d {_MORE}{{6,14}} {_NOT_GOING_ON} | (?!) )
      ) )
    """,
    re.VERBOSE,
)
_IS_PHONE_WORD = re.compile(rf"(?:.*[^A-Za-z]|.*(?<=[a-z])(?=[A-Z]))?(?i:{_PHONE_WORD})[\W\d_]*", re.DOTALL)


def _redact_text(text: str) -> str:
    text = _EMAIL.sub(lambda match: f"{match['quote'] or ''}[email]", text)
    text = _redact_cards(text)
    return _PHONE.sub(lambda match: f"{match['label'] or ''}[phone]" if match["phone"] else match[0], text)


def _redact_cards(text: str) -> str:
    parts, done, start = [], 0, 0
    while match := _CARD.search(text, start):
        if match["other"]:
            start = match.end()
            continue
        ends = [match.start() + group.end() for group in _GROUP_END.finditer(match[0])]
        end = next((end for end in reversed(ends) if _is_card(text[match.start() : end])), None)
        if end is None:
            start = ends[0]
        else:
            parts += [text[done : match.start()], "[card]"]
            start = done = end
    return "".join([*parts, text[done:]])


def _is_card(text: str) -> bool:
    digits = [int(character) for character in text if character.isdecimal()]
    if not 13 <= len(digits) <= 19 or digits[0] == 0:
        return False
    if len(digits) == len(text) and _NOT_A_CARD.fullmatch("".join(map(str, digits))):
        return False
    # Luhn's formula, ISO/IEC 7812-1: every second digit from the right counts twice, without its tens.
    doubled = (digit * 2 - 9 * (digit > 4) for digit in digits[-2::-2])
    return (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0


# --- Messages

# What ties a message, a block or a call to others, and parts of a block that are no text.
_IDS = {"id", "tool_call_id", "tool_use_id", "call_id", "type"}
_OPAQUE = {"data", "base64", "file_data", "url", "image_url", "signature", "thought_signature", "encrypted_content"}
# What a tool is given: its keys are the application's own and say nothing about their values.
_GIVEN = {"args", "arguments", "input"}


# Of these the stored text is a key's own; whatever else is a key could be quoted when storing fails.
_KEYS = (str, int, float, date, time, timedelta, UUID, type(None))
# A longer name of a value is no name.
_LONGEST_NAME = 100


def _redact_message(message: BaseMessage) -> BaseMessage:
    return _redact_model(message, _redact_field)


def _redact_field(value: Any, name: str) -> Any:
    if name in _IDS:
        return value
    if name in ("content", "tool_calls", "invalid_tool_calls", "tool_call_chunks"):
        return _redact_part(value, name)
    if name == "additional_kwargs":
        calls = {"tool_calls": _redact_part(value["tool_calls"], "")} if "tool_calls" in value else {}
        return _redact({key: item for key, item in value.items() if key not in calls}) | calls
    return _redact(value, name)


def _redact_part(value: Any, name: str) -> Any:
    """Redact blocks, calls and what they consist of, but for ids and what is no text."""
    value = _plain(value)
    if name in _GIVEN:
        return _redact(value)
    if isinstance(value, (list, tuple)):
        return [_redact_part(item, name) for item in value]
    if isinstance(value, dict):
        return _redact_dict(value, _redact_part)
    return value if name in _IDS | _OPAQUE else _redact(value, name)


def _redact(value: Any, name: str = "") -> Any:
    """Return a value with its texts, keys and numbers redacted, as it will be stored; `name` is what it is called."""
    value = _plain(value)
    if isinstance(value, str):
        redacted = _redact_json(value)
        return _redact_named(value, name) if redacted is None else redacted
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        # A longer one is neither, and cannot always be written.
        text = str(int(value)) if abs(value) < 10**20 and value == int(value) else ""
        redacted = _redact_named(text, name)
        return value if redacted == text else redacted
    if isinstance(value, dict):
        return _redact_dict(value, _redact)
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_redact(item, name) for item in value]
    if isinstance(value, BaseModel):
        return _redact_model(value, _redact)
    if is_dataclass(value) and not isinstance(value, type):
        copied = copy.copy(value)
        for field in fields(value):
            object.__setattr__(copied, field.name, _redact(getattr(value, field.name), field.name))
        return copied
    return value


def _plain(value: Any) -> Any:
    """Return what is stored of a member of an enum or a decimal; other values as they are."""
    while isinstance(value, Enum):
        value = value.value
    return str(value) if isinstance(value, Decimal) else value


def _redact_dict(value: dict[Any, Any], redact: Callable[[Any, str], Any]) -> dict[Any, Any]:
    form: dict[Any, Any] = {}
    for key, item in value.items():
        form[_unused(_redact_key(key), form)] = redact(item, str(_plain(key)))
    return form


def _redact_key(key: Any) -> Any:
    key = _redact(key)
    if isinstance(key, bytes):
        return b64encode(key).decode("ascii")
    if not isinstance(key, _KEYS):
        raise TypeError(f"a {type(key).__name__} cannot be a key")
    return key


def _redact_model(model: _Model, redact: Callable[[Any, str], Any]) -> _Model:
    copied = model.model_copy()
    copied.__dict__.update({name: redact(item, name) for name, item in model.__dict__.items()})
    if copied.model_extra:
        told = _redact_dict(copied.model_extra, redact)
        copied.model_extra.clear()
        copied.model_extra.update(told)
    return copied


def _redact_named(text: str, name: str) -> str:
    word = "phone: " if len(name) <= _LONGEST_NAME and _IS_PHONE_WORD.fullmatch(name) else ""
    return _redact_text(word + text)[len(word) :]


def _redact_json(text: str) -> str | None:
    """Return the JSON text of an object or a list redacted; None for other text."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        value = json.loads(text, object_pairs_hook=_without_doubles)
        before, after = (json.dumps(each, ensure_ascii=False) for each in (value, _redact(value)))
    except (ValueError, RecursionError):
        return None
    return text if before == after else after


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Of two values of one key, the first would be out of sight, and stay in the text.
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a key stands twice")
    return value


def _unused(key: Any, form: dict[Any, Any]) -> Any:
    """Return a key that does not take the place of another, where two became the same."""
    number, free = len(form) + 1, key
    while free in form:
        free = f"{key} {number}"
        number *= 2  # few steps even where someone took the next numbers on purpose
    return free
