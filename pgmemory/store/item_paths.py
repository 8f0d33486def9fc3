"""Paths to the texts by whose meaning an item is found: from LangGraph's form into PostgreSQL's."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Literal

from pgmemory.errors import ConfigurationError

Index = Sequence[str] | Literal[False] | None

_WHOLE = "$"
# A field, or what of a list: the paths that LangGraph's PutOp.index is documented with. A jsonpath has neither NUL nor
# half a surrogate pair.
_FIELD = r"[^.*\[\]{}\0\ud800-\udfff]+"
_ELEMENT = r"\[(?:\*|-?\d{1,9})\]"
# There is one way only to read a path, so that a long one that is none is refused as fast.
_PATH = re.compile(rf"(?:{_FIELD}|{_ELEMENT})(?:\.{_FIELD}|{_ELEMENT})*")
_STEP = re.compile(rf"({_FIELD})|({_ELEMENT})")


def json_paths(index: Any) -> list[str]:
    """Return what `index` stands for as paths that the type jsonpath takes.

    Args:
        index: Paths; None for the whole value, False for nothing of it.

    Raises:
        ConfigurationError: It is none of these, or a path is none.
    """
    if index is None:
        return [_WHOLE]
    if index is False:
        return []
    if isinstance(index, str) or not isinstance(index, Sequence):
        raise ConfigurationError(f"index must be a list of paths, None or False, not {index!r}")
    return [_json_path(path) for path in index]


def _json_path(path: Any) -> str:
    if path == _WHOLE:
        return _WHOLE
    if not isinstance(path, str) or not _PATH.fullmatch(path):
        raise ConfigurationError(
            f"index holds {path!r}, which is no path such as 'title', 'author.name', 'chapters[*].text', 'tags[-1]', "
            "'$'"
        )
    return _WHOLE + "".join(f".{json.dumps(field)}" if field else _element(of) for field, of in _STEP.findall(path))


def _element(step: str) -> str:
    number = step[1:-1]
    if number != "*" and int(number) < 0:
        return f"[last - {-int(number) - 1}]"
    return f"[{number.removeprefix('-')}]"
