"""Keywords are found literally, in any script, whatever their case or the encoding of their accents."""

from __future__ import annotations

import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgmemory.keywords import KeywordRule

text_with_marks = st.text(
    st.characters(exclude_categories=["Cs", "Cc"]) | st.sampled_from("aé ßẞſΣσςıİ\u0301\u0308\u0345한가ﬁ①ａ中の")
)


def finds(keyword: str, text: str, *, whole_words: bool = False) -> bool:
    found = KeywordRule([keyword], whole_words=whole_words).find([text])
    assert found in ([], [keyword])
    return bool(found)


# Anywhere in the text


@given(before=text_with_marks, keyword=text_with_marks.filter(str.strip), after=text_with_marks)
def test_a_keyword_is_found_between_any_texts(before: str, keyword: str, after: str) -> None:
    assert finds(keyword, f"{before} {keyword} {after}")


@given(keyword=st.text("ab.*+?[](){}|^$\\%_'\"<>&", min_size=1), text=st.text("ab.*+?[](){}|^$\\%_'\"<>&"))
def test_a_keyword_is_literal_text(keyword: str, text: str) -> None:
    assert finds(keyword, text) == (keyword in text)


@pytest.mark.parametrize("keyword", ["(", "+", "%", "_", "\\", ".", "*", "[", "'", '"', "$1", "{x}", "%(a)s", "c++"])
def test_signs_mean_themselves(keyword: str) -> None:
    assert finds(keyword, f"costs {keyword} or more")
    assert not finds(keyword, "nothing of the kind here")


@given(text_with_marks.filter(str.strip))
def test_the_encoding_of_accents_makes_no_difference(text: str) -> None:
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        assert finds(text, unicodedata.normalize(form, text))  # type: ignore[arg-type]
        assert finds(unicodedata.normalize(form, text), text)  # type: ignore[arg-type]


SAME = [
    ("CAFÉ", "un cafe\u0301 noir"),
    ("cafe\u0301", "un café noir"),
    ("straße", "STRASSE 1"),
    ("STRASSE", "die Straße"),
    ("STRAẞE", "die strasse"),
    ("σας", "ΣΑΣ"),
    ("ΣΑΣ", "για σας"),
    ("ﬁnance", "FINANCE"),
    ("ＡＢＣ", "abc"),
    ("ﾃｽﾄ", "テスト"),
    ("ǰ", "J\u030c"),
    ("Москва", "МОСКВА"),
    ("한국", "\u1112\u1161\u11ab\u1100\u116e\u11a8"),
]


@pytest.mark.parametrize(("keyword", "text"), SAME)
@pytest.mark.parametrize("whole_words", [False, True])
def test_case_and_compatible_forms_make_no_difference(keyword: str, text: str, whole_words: bool) -> None:
    assert finds(keyword, text, whole_words=whole_words)


@pytest.mark.parametrize(("keyword", "text"), [("cafe", "café"), ("a", "å"), ("j", "ǰ")])
def test_another_letter_is_another_letter(keyword: str, text: str) -> None:
    assert not finds(keyword, text)


UNSPACED = [
    ("断裂", "订单聊天记录断裂问题"),
    ("問題", "この問題について"),
    ("テスト", "新しいテストです"),
    ("です", "新しいテストです"),
    ("々", "人々"),
    ("ราคา", "ขอทราบราคาสินค้า"),
    ("ກິນ", "ຂ້ອຍກິນເຂົ້າ"),
    ("GPT", "我用GPT写"),
    ("2024", "2024年"),
    ("iphone", "新iPhoneの話"),
]


@pytest.mark.parametrize(("keyword", "text"), UNSPACED)
@pytest.mark.parametrize("whole_words", [False, True])
def test_scripts_without_blanks_are_searched_anywhere_in_either_mode(
    keyword: str, text: str, whole_words: bool
) -> None:
    assert finds(keyword, text, whole_words=whole_words)
    assert not finds(keyword, "别的话题 別の話 เรื่องอื่น ເລື່ອງອື່ນ", whole_words=whole_words)


def test_korean_is_found_before_a_particle_unless_whole_words_are_asked_for() -> None:
    assert finds("서울", "서울에서 만나요")
    assert not finds("서울", "서울에서 만나요", whole_words=True)
    assert finds("서울", "서울 날씨", whole_words=True)


# Whole words


@given(
    keyword=st.text("ab", min_size=1, max_size=3),
    text=st.text("ab_1 .-", max_size=12),
)
def test_whole_words_are_those_of_regular_expressions_where_text_is_ascii(keyword: str, text: str) -> None:
    assert finds(keyword, text, whole_words=True) == bool(re.search(rf"\b{keyword}\b", text, re.ASCII))


@pytest.mark.parametrize(
    ("keyword", "text"),
    [
        ("art", "Is it art?"),
        ("art", "(art)"),
        ("art", "party art"),
        ("art", "art’s sake"),
        ("c++", "I like C++11"),
        ("c++", "c++"),
        (".net", "ASP.NET"),
        ("#1", "is #1"),
        ("order 66", "execute order 66!"),
        ("don't", "I don't"),
        ("x", "x🙂"),
        ("été", "l'e\u0301te\u0301 !"),
    ],
)
def test_whole_words_that_stand_alone(keyword: str, text: str) -> None:
    assert finds(keyword, text, whole_words=True)


@pytest.mark.parametrize(
    ("keyword", "text"),
    [
        ("art", "party"),
        ("art", "arts"),
        ("art", "smart"),
        ("art", "art_1"),
        ("art", "artà"),
        ("66", "order 661"),
        ("c++", "objc++"),
        ("x", "x\u0302"),
        ("и", "и\u0306"),
        ("मन", "मनु"),
        ("نام", "نامه"),
    ],
)
def test_parts_of_words_are_no_whole_words(keyword: str, text: str) -> None:
    assert not finds(keyword, text, whole_words=True)


def test_a_letter_below_an_accent_of_its_own_is_found_anywhere() -> None:
    assert finds("x", "x\u0302")


def test_a_later_whole_occurrence_counts_though_an_earlier_one_is_part_of_a_word() -> None:
    assert finds("aa", "aaa aa", whole_words=True)
    assert finds("ana ana", "banana ana ana", whole_words=True)


# What is reported


def test_keywords_are_reported_as_given_in_their_order_and_once() -> None:
    rule = KeywordRule(["Refund", "parcel", "STRASSE", "Refund"])
    assert rule.find(["Parcel in the Straße", "a refund for the parcel"]) == ["Refund", "parcel", "STRASSE"]


def test_a_keyword_does_not_span_two_texts() -> None:
    rule = KeywordRule(["order 66"])
    assert rule.find(["order ", "66"]) == []
    assert rule.find([]) == []


@pytest.mark.parametrize("blank", ["", " ", "\t\n", "\u3000", "\u00a0"])
def test_a_blank_keyword_is_refused(blank: str) -> None:
    with pytest.raises(ValueError, match="must not be blank"):
        KeywordRule(["refund", blank])


@pytest.mark.parametrize("keyword", ["nul \0", "half \ud83d"])
def test_a_keyword_that_no_database_keeps_is_refused(keyword: str) -> None:
    with pytest.raises(ValueError, match="keyword"):
        KeywordRule([keyword])


@pytest.mark.parametrize("text", ["refund \0", "refund \ud83d", "\0refund\ud83d"])
def test_any_text_can_be_searched(text: str) -> None:
    assert finds("refund", text)
    assert finds("refund", text, whole_words=True)


# Fingerprints


def test_rules_that_judge_alike_share_a_fingerprint() -> None:
    assert KeywordRule(["a", "Straße"]).fingerprint == KeywordRule(["STRASSE", "A", "a"]).fingerprint


@pytest.mark.parametrize(
    "other",
    [
        KeywordRule(["a"]),
        KeywordRule(["a", "b", "c"]),
        KeywordRule(["ab"]),
        KeywordRule(["a b"]),
        KeywordRule(['a", "b']),
        KeywordRule(["a", "b"], whole_words=True),
    ],
)
def test_rules_that_judge_otherwise_have_other_fingerprints(other: KeywordRule) -> None:
    assert KeywordRule(["a", "b"]).fingerprint != other.fingerprint
