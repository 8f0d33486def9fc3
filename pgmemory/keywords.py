"""Keywords in text: literal, whatever its case, its accents' encoding or its script."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Sequence

# First words of the Unicode names of letters of scripts that put no blanks between words.
_UNSPACED = {
    "CJK", "IDEOGRAPHIC", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "BOPOMOFO", "THAI", "LAO", "KHMER", "MYANMAR",
}  # fmt: skip


class KeywordRule:
    """A set of keywords, and how they are looked for.

    A keyword is literal text. Text and keyword are compared after compatibility composition and case folding
    (Unicode's NFKC and casefold, UAX 15 and section 3.13 of the standard), so ``STRASSE`` is found by ``straße``.

    Args:
        keywords: Texts, none of them blank.
        whole_words: Count an occurrence only where no letter, digit or mark of the same word stands beside it. Scripts
            without blanks between words, such as Chinese, Japanese and Thai, have no such neighbours.

    Raises:
        ValueError: A keyword is blank, or holds what PostgreSQL cannot keep.
    """

    def __init__(self, keywords: Sequence[str], *, whole_words: bool = False) -> None:
        self._folded = {keyword: _fold(keyword) for keyword in keywords}
        for keyword, folded in self._folded.items():
            if not folded.strip():
                raise ValueError(f"a keyword must not be blank, as {keyword!r} is")
            if any(character == "\0" or "\ud800" <= character <= "\udfff" for character in keyword):
                raise ValueError(f"a keyword must hold neither NUL nor half a surrogate pair, as {keyword!r} does")
        self._whole_words = whole_words

    @property
    def fingerprint(self) -> str:
        """Short text that two rules share if, and only if, they judge alike."""
        rule = json.dumps([sorted(set(self._folded.values())), self._whole_words])
        return hashlib.sha256(rule.encode()).hexdigest()[:16]

    def find(self, texts: Sequence[str]) -> list[str]:
        """Return the keywords that occur in any of the texts, as they were given, in their order."""
        folded_texts = [_fold(text) for text in texts]
        return [
            keyword
            for keyword, folded in self._folded.items()
            if any(self._occurs(folded, text) for text in folded_texts)
        ]

    def _occurs(self, keyword: str, text: str) -> bool:
        if not self._whole_words:
            return keyword in text
        start = text.find(keyword)
        while start >= 0:
            end = start + len(keyword)
            splits_start = start > 0 and _in_word(text[start - 1]) and _in_word(keyword[0])
            splits_end = end < len(text) and _in_word(text[end]) and _in_word(keyword[-1])
            if not splits_start and not splits_end:
                return True
            start = text.find(keyword, start + 1)
        return False


def _fold(text: str) -> str:
    # Folding can undo the composition ("ǰ" folds to two characters), so compose once more.
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())


def _in_word(character: str) -> bool:
    if character == "_":
        return True
    if unicodedata.category(character)[0] not in "LNM":
        return False
    return unicodedata.name(character, "").split(" ", 1)[0] not in _UNSPACED
