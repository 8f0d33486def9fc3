"""Characters that deceive, made visible: those a terminal obeys, or that change what a reader sees of other text."""

from __future__ import annotations

import re

# Control characters but tab and newline; line and paragraph separators; what overrides, embeds or isolates a direction;
# half surrogate pairs; annotation characters and tags, which hide text from people that models read. Not the marks and
# joiners that right-to-left scripts and emoji need.
DECEPTIVE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufff9-\ufffb\U000e0000-\U000e007f]"
)
_BREAKS_A_LINE = re.compile("[\t\n]")


def code_point(character: str) -> str:
    """Return a character's name in Unicode's notation, such as ``U+001B``."""
    return f"U+{ord(character):04X}"


def visible(text: str, *, one_line: bool = False) -> str:
    """Return a text in which characters that deceive stand as their code points, such as ``<U+001B>``.

    Args:
        text: Any text.
        one_line: Whether tabs and newlines are made visible too, so that the text cannot pass for several lines.
    """
    text = DECEPTIVE.sub(_mark, with_newlines(text))
    return _BREAKS_A_LINE.sub(_mark, text) if one_line else text


def with_newlines(text: str) -> str:
    """Return a text whose lines end as they do here, wherever it was written."""
    return text.replace("\r\n", "\n")


def _mark(match: re.Match[str]) -> str:
    return f"<{code_point(match[0])}>"
