"""Sections that programs write into documents are replaced in their place, and nothing else is touched."""

from __future__ import annotations

import pytest
from documents import with_section


def test_a_section_is_replaced_and_the_rest_of_the_document_kept() -> None:
    document = "# Reliability\n\nWords before.\n"
    document = with_section(document, "seed 1", "first table")
    document = with_section(document, "seed 12", "other table") + "\nWords behind.\n"
    assert document == (
        "# Reliability\n\nWords before.\n"
        "\n<!-- seed 1 -->\nfirst table\n<!-- end -->\n"
        "\n<!-- seed 12 -->\nother table\n<!-- end -->\n"
        "\nWords behind.\n"
    )
    replaced = with_section(document, "seed 1", "new table")
    assert replaced == document.replace("first table", "new table")
    assert with_section(replaced, "seed 1", "new table") == replaced


def test_a_section_is_made_in_an_empty_document() -> None:
    assert with_section("", "seed 3", "a table") == "<!-- seed 3 -->\na table\n<!-- end -->\n"


def test_a_section_without_an_end_swallows_nothing() -> None:
    with pytest.raises(ValueError, match="seed 1 .* without"):
        with_section("<!-- seed 1 -->\ntable\n\nWords behind.\n", "seed 1", "new table")
