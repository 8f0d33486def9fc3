"""What applications give for items, checked, as statements take it: namespaces, keys, pages, filters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pgmemory.errors import ConfigurationError

Namespace = Sequence[str]

_MOST_BYTES_OF_PLACE = 1000  # namespace and key together: an index row is limited to a third of a page
_BYTES_OF_LABEL = 8  # what an array adds to each
_OPERATORS = ("$eq", "$ne", "$gt", "$gte", "$lt", "$lte")


def checked_text(what: str, text: Any) -> str:
    """Return a text that PostgreSQL can keep."""
    if not isinstance(text, str):
        raise ConfigurationError(f"{what} must be text, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigurationError(f"{what} {text!r} holds half a surrogate pair, which PostgreSQL cannot keep") from None
    if "\0" in text:
        raise ConfigurationError(f"{what} {text!r} holds NUL, which PostgreSQL cannot keep")
    return text


def checked_namespace(what: str, labels: Any) -> list[str]:
    """Return the labels of a namespace."""
    if isinstance(labels, str) or not isinstance(labels, Sequence):
        raise ConfigurationError(f"{what} must be a tuple of labels, such as ('facts', 'work'), not {labels!r}")
    for label in labels:
        if not checked_text(f"a label of the {what}", label):
            raise ConfigurationError(f"{what} {tuple(labels)!r} holds an empty label")
        if "." in label:
            raise ConfigurationError(f"{what} {tuple(labels)!r} holds a period, which LangGraph's stores refuse")
    return list(labels)


def place(namespace: Namespace, key: str) -> dict[str, Any]:
    """Return a namespace and a key, checked, as a statement takes them."""
    labels = checked_namespace("namespace", namespace)
    size = sum(len(label.encode()) + _BYTES_OF_LABEL for label in labels) + len(checked_text("key", key).encode())
    if size > _MOST_BYTES_OF_PLACE:
        raise ConfigurationError(
            f"namespace and key together must not be longer than {_MOST_BYTES_OF_PLACE} bytes, with {_BYTES_OF_LABEL} "
            f"more for each label; these have {size}"
        )
    return {"namespace": labels, "key": key}


def range_of(prefix: Namespace) -> dict[str, Any]:
    """Return from which namespace on, and before which, those that begin with a prefix stand."""
    labels = checked_namespace("namespace_prefix", prefix)
    # By code points nothing stands between a text and the same one with the first of all characters.
    return {"first": labels, "last": [*labels[:-1], labels[-1] + "\x01"] if labels else None}


def page(limit: Any, offset: Any) -> dict[str, Any]:
    """Return how many to leave out and to return at most, as a statement takes them."""
    for name, value in (("limit", limit), ("offset", offset)):
        if type(value) is not int or not 0 <= value < 2**63:
            raise ConfigurationError(f"{name} must be a whole number from 0, not {value!r}")
    return {"limit": limit, "offset": offset}


def conditions(path: tuple[str, ...], filter: Any) -> Iterable[dict[str, Any]]:
    """Yield the conditions that a filter consists of: an operator, and what it compares a place of the value with."""
    if not isinstance(filter, Mapping):
        raise ConfigurationError(f"filter must be a dict, not {type(filter).__name__}")
    for key, wanted in filter.items():
        here = (*path, checked_text("a key of the filter", key))
        if not isinstance(wanted, Mapping) or not wanted:
            yield {"path": here, "operator": "$eq", "value": wanted}
        elif not any(str(name).startswith("$") for name in wanted):
            yield from conditions(here, wanted)
        else:
            for operator, value in wanted.items():
                if operator not in _OPERATORS:
                    raise ConfigurationError(
                        f"filter has the operator {operator!r} for {key!r}; there are {', '.join(_OPERATORS)}"
                    )
                is_ordered = isinstance(value, (int, float, str)) and not isinstance(value, bool)
                if operator not in ("$eq", "$ne") and not is_ordered:
                    raise ConfigurationError(
                        f"filter compares {key!r} by {operator} with a {type(value).__name__}; only numbers and texts "
                        "have an order"
                    )
                yield {"path": here, "operator": operator, "value": value}
