"""The words of messages in many languages: inflected, with accents and without them, however they are encoded."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator
from typing import NamedTuple

import psycopg2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgmemory.queries import words
from pgmemory.schema.changes import in_schema


class Term(NamedTuple):
    """What is kept of a word."""

    term: int
    frequency: int
    length: int


Terms = Callable[..., set[Term]]


@pytest.fixture(scope="module")
def terms(server_dsn: str) -> Iterator[Terms]:
    """The words of a text in a language, by the function that a database keeps them with."""
    connection = psycopg2.connect(server_dsn)
    connection.autocommit = True
    made: set[str] = set()

    def terms_of(language: str, text: str, scope: int = 0) -> set[Term]:
        name = f"test_words_{connection.info.backend_pid}_{language}"
        with connection.cursor() as cursor:
            if name not in made:
                made.add(name)
                cursor.execute(f"create schema {name}")
                create = words.CREATE_FUNCTION.replace("{language}", f"'pg_catalog.{language}'")
                cursor.execute(in_schema(create, name))
            cursor.execute(f"select * from {name}.terms_of(%s, %s)", (text, scope))
            return {Term(*row) for row in cursor}

    yield terms_of
    with connection.cursor() as cursor:
        cursor.execute("set client_min_messages = warning")
        for name in made:
            cursor.execute(f"drop schema {name} cascade")
    connection.close()


# What is found: pairs of what was said and what is asked that have a word in common, and pairs that have none.

ALIKE = [
    # However it is inflected.
    ("english", "her résumés are ready", "the résumé"),
    ("english", "two naïve fiancées", "a naive fiancée"),
    ("german", "die Häuser am Fluss", "Haus"),
    ("german", "mehrere Verträge", "der Vertrag"),
    ("german", "Straßen und Brücken", "Straße"),
    ("french", "mes chansons préférées", "préférer"),
    ("french", "les élèves étaient fatigués", "fatiguée"),
    ("french", "l'année dernière", "années"),
    ("french", "il l´aimait", "aimer"),
    ("french", "deux portes-fenêtres", "fenêtre"),
    ("spanish", "me gusta esta canción", "canciones"),
    ("spanish", "dos señores ingleses", "el inglés"),
    ("spanish", "los pequeños autobuses", "un autobús"),
    ("spanish", "ayer cantábamos juntos", "cantar"),
    ("portuguese", "uma informação", "informações"),
    ("portuguese", "dois pães", "o pão"),
    ("portuguese", "as relações políticas", "o político"),
    ("italian", "le città antiche", "antica"),
    ("italian", "i libri che abbiamo letto", "libro"),
    ("italian", "parlò di lavoro", "parlare"),
    ("swedish", "två böcker och många gåvor", "gåva"),
    ("swedish", "flickorna på gården", "gård"),
    ("danish", "de røde æbler", "rød"),
    ("norwegian", "båtene på sjøen", "båt"),
    ("finnish", "kirjoissa ja lehdissä", "kirja"),
    ("turkish", "evlerimizde ışıklar yandı", "evler"),
    ("turkish", "kitapları okudum", "kitap"),
    ("russian", "мои любимые собаки", "собака"),
    ("russian", "Новый трамвай", "трамваи"),
    ("russian", "зелёные ёлки", "елка"),
    ("romanian", "casele și grădinile", "grădină"),
    ("hungarian", "a házakban", "ház"),
    ("greek", "οι καφέδες", "καφές"),
    # Written without accents, or with them only then.
    ("english", "meet me at the café", "cafe"),
    ("english", "her resumes are ready", "résumé"),
    ("simple", "meet me at the CAFÉ", "cafe"),
    ("simple", "Łódź, Đà Nẵng, Ærø, Kırşehir", "lodz"),
    ("simple", "Łódź, Đà Nẵng, Ærø, Kırşehir", "da"),
    ("simple", "Łódź, Đà Nẵng, Ærø, Kırşehir", "Aero"),
    ("simple", "Łódź, Đà Nẵng, Ærø, Kırşehir", "kirsehir"),
    ("german", "auf der Strasse", "Straße"),
    ("german", "schöne Grüße", "gruss"),
    ("french", "ma sœur préférée", "soeur"),
    ("french", "ma sœur préférée", "preferee"),
    ("french", "le CAFÉ d’à côté", "cafe"),
    ("spanish", "me gusta esta canción", "cancion"),
    ("spanish", "MAÑANA POR LA MAÑANA", "manana"),
    ("portuguese", "duas ações judiciais", "acoes"),
    ("portuguese", "nao sei se o aviao chegou", "avião"),
    ("italian", "la città più bella", "citta"),
    ("swedish", "ett rött äpple", "apple"),
    ("turkish", "ışıklar yandı", "isiklar"),
    ("turkish", "IŞIKLAR İSTANBUL", "istanbul"),
    ("turkish", "IŞIKLAR", "ışıklar"),
    ("russian", "всё ещё далеко", "далёко"),
    ("russian", "РАБОТА НАЙДЕНА", "работой"),
    ("russian", "старый за́мок", "замок"),
    ("arabic", "قَرَأْتُ كِتَابًا", "كتاب"),
    ("simple", "كِتَاب", "كتاب"),
    ("simple", "שָׁלוֹם עֲלֵיכֶם", "שלום"),
    ("simple", "ข้าวผัด กะเพรา", "กะเพรา"),
    # Written in other forms of the same letters.
    ("english", "ＤＯＧＳ", "dog"),
    ("english", "“dogs”—and…", "dog"),
    ("french", "«préférées»", "préféré"),
    ("english", "the dogs🐕🙂", "dog"),
    ("arabic", "كتاب؟", "كتاب"),
    ("spanish", "ｃａｎｃｉｏｎｅｓ", "canción"),
    ("english", "I don’t like parsnips", "parsnip"),
    ("french", "josé@example.com m’a écrit", "jose"),
    ("french", "une idée/des projets", "projet"),
    ("simple", "コーヒーが飲みたい", "ｺｰﾋｰ"),
    ("spanish", "東京の café", "東京"),
    ("simple", "부산에서 만나요", "부산은"),
]

UNLIKE = [
    ("english", "the café is closed", "a cave"),
    ("german", "schöne Häuser", "hausieren"),
    ("french", "il a été à la mer", "en été"),  # 'été' is a stop word: it means 'been', too
    ("french", "il a été à la mer", "ete"),
    ("french", "nous avons été à la mer", "même à la plage"),
    ("french", "mes chansons préférées", "un préfet"),
    ("spanish", "me gusta esta canción", "él también está"),
    ("spanish", "ellos están aquí", "también estará"),
    ("portuguese", "uma ação judicial", "você não é"),
    ("italian", "la città", "perché è così"),
    ("swedish", "på gården", "på är då"),
    ("russian", "мой трамвай", "твой трам"),
    ("russian", "за́мок", "замет"),
    ("simple", "мой", "мои"),
    ("simple", "東京", "京東"),
    ("simple", "شكرا", "كتاب"),
]


def shared(terms: Terms, language: str, said: str, asked: str) -> set[int]:
    return {term.term for term in terms(language, said)} & {term.term for term in terms(language, asked)}


@pytest.mark.parametrize(("language", "said", "asked"), ALIKE)
def test_a_word_is_found_inflected_and_without_its_accents(terms: Terms, language: str, said: str, asked: str) -> None:
    assert shared(terms, language, said, asked)


@pytest.mark.parametrize(("language", "said", "asked"), UNLIKE)
def test_other_words_and_stop_words_with_accents_are_not_found(
    terms: Terms, language: str, said: str, asked: str
) -> None:
    assert not shared(terms, language, said, asked)


# What holds for every text.

LETTERS = "abceinorstAEIOUéèêàâçœñãõáóúäöüßåæøłđıİışğйёўЙаеиоСтΣσάю'’´-@./ \n猫がｶﾞ각부ﬁ½שָׁكِـأก็"
TEXTS = st.one_of(st.text(LETTERS, max_size=60), st.text(max_size=60)).map(lambda text: text.replace("\x00", ""))
LANGUAGES = st.sampled_from(["simple", "english", "french", "portuguese", "russian", "turkish", "arabic"])
FEW = settings(max_examples=120)


@FEW
@given(LANGUAGES, TEXTS)
def test_equal_texts_have_equal_words_however_they_are_encoded(terms: Terms, language: str, text: str) -> None:
    composed, apart = (unicodedata.normalize(form, text) for form in ("NFC", "NFD"))
    assert terms(language, composed) == terms(language, apart)


@FEW
@given(LANGUAGES, st.text(st.characters(min_codepoint=1, max_codepoint=126), max_size=60))
def test_letters_beyond_ascii_change_nothing_for_the_words_beside_them(terms: Terms, language: str, text: str) -> None:
    assert terms(language, text) == terms(language, f"{text} … “”")


@FEW
@given(LANGUAGES, TEXTS)
def test_words_stand_at_least_once_and_have_two_stems_at_most(terms: Terms, language: str, text: str) -> None:
    found = terms(language, text)
    assert len({term.length for term in found}) <= 1
    assert all(1 <= term.frequency <= term.length for term in found)
    assert sum(term.frequency for term in found) <= 2 * max((term.length for term in found), default=0)


def test_a_word_counts_once_whether_it_has_one_stem_or_two(terms: Terms) -> None:
    said = terms("french", "mes préférées, tes préférées: un chat")
    assert sorted((term.frequency, term.length) for term in said) == [(1, 3), (2, 3), (2, 3)]
    (said_once,) = terms("simple", "Café cafe CAFÉ")
    assert (said_once.frequency, said_once.length) == (3, 3)


def test_a_message_of_a_tag_alone_has_a_length_to_divide_by(terms: Terms) -> None:
    assert {term.length for term in terms("french", '<a title="préférées">')} == {1}


def test_whose_word_it_is_matters(terms: Terms) -> None:
    assert not {term.term for term in terms("french", "idées", 1)} & {term.term for term in terms("french", "idées", 2)}


@pytest.mark.parametrize("text", ["préférées " * 100_000, "é" * 70_000, "ﷺ" * 70_000, "\u0301 ´" * 30_000])
def test_a_long_text_is_cut_at_the_same_letter_however_it_is_encoded(terms: Terms, text: str) -> None:
    assert terms("french", text) == terms("french", unicodedata.normalize("NFD", text))
