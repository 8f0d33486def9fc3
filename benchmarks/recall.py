"""How much of what a question needs is recalled, and how fast: ``python -m benchmarks.recall DIR``.

DIR holds conversations of the form in which LoCoMo is published (Maharana et al., "Evaluating Very Long-Term
Conversational Memory of LLM Agents", 2024): JSON with the sessions of a dialogue, the entries of each with their ids,
and questions with the ids of their evidence. Each entry is one message; a dialogue's sessions are the conversations of
one user. Measured is evidence recall: the share of a question's evidence among the messages that are recalled for it,
as the mean over the questions that have any. Then the same questions are asked of a user who has said much more of the
same kind, for the time that it takes; the embedder's is part of that.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import re
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

from langchain_core.embeddings import Embeddings
from langchain_core.messages import HumanMessage
from rich.console import Console
from rich.table import Table

from benchmarks import server
from pgmemory import ConversationStore, StoredMessage
from pgmemory.store.recall import RecallBy
from pgmemory.tokens import EncodingCounter

_SESSION = re.compile(r"session_(\d+)")
_ENTRY_ID = re.compile(r"D:?(\d+):(\d+)")
_ADVERSARIAL = 5  # the category of questions that the dialogue does not answer
# So many messages, in order of their rank, are offered to the token budget.
_OFFERED = 50
_OFFLINE = "pgmemory.offline_embeddings:OfflineEmbeddings"
# Of so many messages a past is stored at once.
_BATCH = 500

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
_RECALLED_BY: dict[str, RecallBy] = {"full text": "words", "vector": "meaning", "fused": "both"}


def rankings(store: ConversationStore, user_id: str, dialogue: Dialogue) -> dict[str, Ranking]:
    """Store a dialogue and return, by name, what ranks its entries for a question, the best first."""
    ids = list(dialogue.entries)
    numbers: dict[tuple[str, int], EntryId] = {}
    for session in dict.fromkeys(session for session, _ in ids):
        own = [id for id in ids if id[0] == session]
        messages = [StoredMessage(*dialogue.entries[id]) for id in own]
        store.append(store.key(str(session), user_id), messages, write_id=uuid.uuid4())
        numbers.update({(str(session), index): id for index, id in enumerate(own)})

    store.index_messages()

    def recalled(question: str, by: RecallBy) -> list[EntryId]:
        found = store.recall(store.key("a question", user_id), question, k=_OFFERED, by=by)
        hits = sorted((hit for turn in found.turns for hit in turn.hits), key=lambda hit: -hit.score)
        return [numbers[hit.session_id, hit.message_index] for hit in hits]

    return {"recency": lambda question: ids[::-1]} | {
        name: partial(recalled, by=by) for name, by in _RECALLED_BY.items()
    }


@dataclass
class Score:
    """What one ranking found: per question the share among the k best and within the budget."""

    among_best: list[float]
    in_budget: list[float]


def measure(store: ConversationStore, dialogues: Sequence[Dialogue], *, k: int, budget: int) -> dict[str, Score]:
    """Return the scores by ranking, over all questions of all dialogues."""
    scores: dict[str, Score] = {}
    counter = EncodingCounter()
    for number, dialogue in enumerate(dialogues):
        tokens = {id: counter.count_message(HumanMessage(text)) for id, (_, text) in dialogue.entries.items()}
        for name, ranking in rankings(store, f"user {number}", dialogue).items():
            score = scores.setdefault(name, Score([], []))
            for question in dialogue.questions:
                ranked = ranking(question.text)
                score.among_best.append(_share(question, ranked[:k]))
                score.in_budget.append(_share(question, _within(ranked, tokens, budget)))
    return scores


def time_spent(
    store: ConversationStore, dialogues: Sequence[Dialogue], *, k: int, messages: int
) -> dict[str, list[float]]:
    """Return the seconds of each question by ranking, asked of a user with so many messages."""
    rng = random.Random(messages)
    texts = [text for dialogue in dialogues for _, text in dialogue.entries.values()]
    for number in range(0, messages, _BATCH):
        said = [
            StoredMessage("ai" if index % 2 else "human", _mixed(rng, texts))
            for index in range(number, min(number + _BATCH, messages))
        ]
        store.append(store.key(str(number), "talkative"), said, write_id=uuid.uuid4())
    store.index_messages()
    asking = store.key("a question", "talkative")
    seconds: dict[str, list[float]] = {}
    for name, by in _RECALLED_BY.items():
        for question in (question for dialogue in dialogues for question in dialogue.questions):
            started = time.perf_counter()
            store.recall(asking, question.text, k=k, by=by)
            seconds.setdefault(name, []).append(time.perf_counter() - started)
    return seconds


def _mixed(rng: random.Random, texts: Sequence[str]) -> str:
    """Return the beginning of one text and the end of another."""
    words, others = rng.choice(texts).split(), rng.choice(texts).split()
    return " ".join([*words[: rng.randint(1, len(words))], *others[rng.randrange(len(others)) :]])


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
    parser.add_argument("--messages", type=int, default=20_000, help="of the user whose time is measured (20,000)")
    parser.add_argument(
        "--embeddings", type=_embeddings, default=_OFFLINE, metavar="MODULE:CLASS", help=f"make vectors ({_OFFLINE})"
    )
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
    with server.database() as dsn, ConversationStore(dsn, schema="recall", embeddings=options.embeddings) as store:
        store.setup(search=True)
        scores = measure(store, dialogues, k=options.k, budget=options.token_budget)
        seconds = time_spent(store, dialogues, k=options.k, messages=options.messages)
    table = Table("ranking", f"among the best {options.k}", f"within {options.token_budget} tokens")
    for name, score in scores.items():
        table.add_row(name, f"{mean(score.among_best):.1%}", f"{mean(score.in_budget):.1%}")
    times = Table("ranking", "median", "95 of 100 within")
    for name, each in seconds.items():
        times.add_row(name, f"{1000 * median(each):.1f} ms", f"{1000 * quantiles([*each, *each], n=20)[-1]:.1f} ms")
    print(f"{len(dialogues)} dialogues, {sum(len(each.entries) for each in dialogues)} messages, {asked} questions")
    Console().print(table)
    print(f"The same questions of one user with {options.messages:,} messages:")
    Console().print(times)
    return 0


def _embeddings(path: str) -> Embeddings:
    module, _, name = path.partition(":")
    try:
        made: Embeddings = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{path!r} is no MODULE:CLASS of embeddings: {error}") from error
    return made


if __name__ == "__main__":
    sys.exit(main())
