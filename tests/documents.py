"""Sections of a document that programs write: each stands between marker comments and has a name.

Owns: where such a section begins and ends.
"""

from __future__ import annotations

END = "<!-- end -->"


def with_section(document: str, name: str, content: str) -> str:
    """Return a document in which the section of this name has this content; a new one comes at the end.

    Raises:
        ValueError: The section begins and does not end.
    """
    begin = f"<!-- {name} -->"
    section = f"{begin}\n{content}\n{END}"
    before, found, rest = document.partition(begin)
    if not found:
        return f"{document.rstrip()}\n\n{section}\n".lstrip()
    _, ended, after = rest.partition(END)
    if not ended:
        raise ValueError(f"the document has {begin} without {END}")
    return before + section + after
