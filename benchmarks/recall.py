"""How much of what a question needs is recalled: ``python -m benchmarks.recall DIR [--k 10] [--token-budget 1000]``.

DIR holds conversations of the form in which LoCoMo is published (Maharana et al., "Evaluating Very Long-Term
Conversational Memory of LLM Agents", 2024): JSON with the sessions of a dialogue, the entries of each with their ids,
and questions with the ids of their evidence. Each entry is one message; a dialogue's sessions are the conversations of
one user. Measured is evidence recall: the share of a question's evidence among the messages that are recalled for it,
as the mean over the questions that have any.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from langchain_core.messages import HumanMessage
from rich.console import Console
from rich.table import Table

from benchmarks import server
from pgmemory import ConversationStore, StoredMessage
from pgmemory.tokens import EncodingCounter

_SESSION = re.compile(r"session_(\d+)")
_ENTRY_ID = re.compile(r"D:?(\d+):(\d+)")
_ADVERSARIAL = 5  # the category of questions that the dialogue does not answer
# So many messages, in order of their rank, are offered to the token budget.
_OFFERED = 50

EntryId = tuple[int, int]


@dataclass(frozen=True)
class Question:
    """What is asked, and the entries in which the answer stands."""

    text: str
    evidence: frozenset[EntryId]


@dataclass(frozen=True)
class Dialogue:
    """The entries of a dialogue in order, as role and text by their ids, and its questions."""

    entries: dict[EntryId, tuple[str, str]]
    questions: list[Question]


def dialogues_in(folder: Path) -> Iterator[Dialogue]:
    """Yield the dialogues of a folder's JSON files, each of which holds one or a list.

    Raises:
        ValueError: A file holds something else: the text names it.
    """
    for file in sorted(folder.glob("*.json")):
        try:
            found = json.loads(file.read_text("utf-8"))
            for sample in found if isinstance(found, list) else [found]:
                yield _dialogue(sample)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{file} is not of LoCoMo's form: {error!r}") from error


def _dialogue(sample: dict[str, Any]) -> Dialogue:
    conversation = sample["conversation"]
    entries: dict[EntryId, tuple[str, str]] = {}
    numbers = sorted(int(found[1]) for name in conversation if (found := _SESSION.fullmatch(name)))
    for number in numbers:
        for entry in conversation[f"session_{number}"]:
            role = "human" if entry["speaker"] == conversation["speaker_a"] else "ai"
            (id,) = _ids(entry["dia_id"])
            entries[id] = (role, entry["text"])
    questions = [
        Question(question["question"], frozenset(_ids(" ".join(question.get("evidence", [])))) & entries.keys())
        for question in sample["qa"]
        if question.get("category") != _ADVERSARIAL
    ]
    return Dialogue(entries, [question for question in questions if question.evidence])


def _ids(text: str) -> list[EntryId]:
    return [(int(session), int(entry)) for session, entry in _ENTRY_ID.findall(text)]


Ranking = Callable[[str], list[EntryId]]


def rankings(store: ConversationStore, user_id: str, dialogue: Dialogue) -> dict[str, Ranking]:
    """Store a dialogue and return, by name, what ranks its entries for a question, the best first."""
    ids = list(dialogue.entries)
    numbers: dict[tuple[str, int], EntryId] = {}
    for session in dict.fromkeys(session for session, _ in ids):
        own = [id for id in ids if id[0] == session]
        messages = [StoredMessage(*dialogue.entries[id]) for id in own]
        store.append(store.key(str(session), user_id), messages, write_id=uuid.uuid4())
        numbers.update({(str(session), index): id for index, id in enumerate(own)})

    def by_words(question: str) -> list[EntryId]:
        recalled = store.recall(store.key("a question", user_id), question, k=_OFFERED)
        hits = sorted((hit for turn in recalled.turns for hit in turn.hits), key=lambda hit: -hit.score)
        return [numbers[hit.session_id, hit.message_index] for hit in hits]

    return {"recency": lambda question: ids[::-1], "full text": by_words}


@dataclass
class Score:
    """What one ranking found: per question the share among the k best and within the budget, and the seconds."""

    among_best: list[float]
    in_budget: list[float]
    seconds: list[float]


def measure(
    dsn: str, dialogues: Sequence[Dialogue], *, k: int, budget: int, schema: str = "recall"
) -> dict[str, Score]:
    """Return the scores by ranking, over all questions of all dialogues."""
    scores: dict[str, Score] = {}
    counter = EncodingCounter()
    with ConversationStore(dsn, schema=schema) as store:
        store.setup(search=True)
        for number, dialogue in enumerate(dialogues):
            tokens = {id: counter.count_message(HumanMessage(text)) for id, (_, text) in dialogue.entries.items()}
            for name, ranking in rankings(store, f"user {number}", dialogue).items():
                score = scores.setdefault(name, Score([], [], []))
                for question in dialogue.questions:
                    started = time.perf_counter()
                    ranked = ranking(question.text)
                    score.seconds.append(time.perf_counter() - started)
                    score.among_best.append(_share(question, ranked[:k]))
                    score.in_budget.append(_share(question, _within(ranked, tokens, budget)))
    return scores


def _share(question: Question, found: Sequence[EntryId]) -> float:
    return len(question.evidence.intersection(found)) / len(question.evidence)


def _within(ranked: Sequence[EntryId], tokens: dict[EntryId, int], budget: int) -> list[EntryId]:
    """Return the best ones that fit the budget together; one that does not fit is passed over."""
    kept = []
    for id in ranked[:_OFFERED]:
        if tokens[id] <= budget:
            budget -= tokens[id]
            kept.append(id)
    return kept


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, metavar="DIR", help="conversations as LoCoMo publishes them")
    parser.add_argument("--k", type=int, default=10, help="how many messages count as recalled (10)")
    parser.add_argument("--token-budget", type=int, default=1000, help="for the other figure (1000)")
    options = parser.parse_args(arguments)
    try:
        dialogues = list(dialogues_in(options.folder))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    asked = sum(len(dialogue.questions) for dialogue in dialogues)
    if not asked:
        print(f"{options.folder} holds no JSON file with questions and their evidence", file=sys.stderr)
        return 1
    with server.database() as dsn:
        scores = measure(dsn, dialogues, k=options.k, budget=options.token_budget)
    table = Table("ranking", f"among the best {options.k}", f"within {options.token_budget} tokens", "median")
    for name, score in scores.items():
        milliseconds = f"{1000 * median(score.seconds):.1f} ms"
        table.add_row(name, f"{mean(score.among_best):.1%}", f"{mean(score.in_budget):.1%}", milliseconds)
    print(f"{len(dialogues)} dialogues, {sum(len(each.entries) for each in dialogues)} messages, {asked} questions")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
