"""The recall benchmark reads LoCoMo's form and scores what it should."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import recall
from pgmemory import ConversationStore
from pgmemory.offline_embeddings import OfflineEmbeddings

PROJECT = Path(__file__).resolve().parents[1]
SAMPLE = PROJECT / "benchmarks" / "recall_sample"


def test_the_sample_is_read_with_its_answerable_questions() -> None:
    (dialogue,) = recall.dialogues_in(SAMPLE)
    assert len(dialogue.entries) == 39
    assert dialogue.entries[1, 1][0] == "human" and dialogue.entries[1, 2][0] == "ai"
    assert len(dialogue.questions) == 12  # one is not answered by the dialogue
    assert dialogue.questions[2].evidence == {(1, 11), (1, 12)}


@pytest.fixture
def searched(server_dsn: str, schema_name: str) -> Iterator[ConversationStore]:
    with ConversationStore(server_dsn, schema=schema_name, embeddings=OfflineEmbeddings()) as store:
        store.setup(search=True)
        yield store


def test_evidence_among_the_best_and_within_the_budget_is_counted(searched: ConversationStore) -> None:
    dialogues = list(recall.dialogues_in(SAMPLE))
    scores = recall.measure(searched, dialogues, k=10, budget=100)
    assert list(scores) == ["recency", "full text", "vector", "fused"]
    # By hand: the last ten messages are D3:5 to D3:14.
    evidence = [question.evidence for question in dialogues[0].questions]
    newest = {(3, number) for number in range(5, 15)}
    assert scores["recency"].among_best == [len(each & newest) / len(each) for each in evidence]
    found = {name: sum(score.among_best) for name, score in scores.items()}
    assert found["fused"] >= max(found["full text"], found["vector"]) > 2 * found["recency"]
    assert all(0 <= share <= 1 for score in scores.values() for share in score.in_budget)


def test_the_time_is_that_of_a_user_who_has_said_as_much(searched: ConversationStore) -> None:
    dialogues = list(recall.dialogues_in(SAMPLE))
    seconds = recall.time_spent(searched, dialogues, k=10, messages=601)
    assert {name: len(each) for name, each in seconds.items()} == {"full text": 12, "vector": 12, "fused": 12}
    kept = "select count(*), count(embedding) from {schema}.message_vectors"
    assert searched._execute("count", kept, {}) == [(601, 601)]


@pytest.mark.parametrize("content", ["{", "[1]", '{"qa": []}'])
def test_a_file_of_another_form_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "odd.json").write_text(content)
    with pytest.raises(ValueError, match="odd.json is not of LoCoMo's form"):
        list(recall.dialogues_in(tmp_path))


def test_a_folder_without_questions_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert recall.main([str(tmp_path)]) == 1
    assert "holds no JSON file with questions" in capsys.readouterr().err
    assert json.loads((SAMPLE / "ines_and_tomas.json").read_text())


def test_a_store_of_the_sample_finds_what_shares_no_word_by_its_neighbour(searched: ConversationStore) -> None:
    (dialogue,) = recall.dialogues_in(SAMPLE)
    ranking = recall.rankings(searched, "u", dialogue)["full text"]
    assert {(2, 7), (2, 8)} <= set(ranking("How did Tomas break his ankle?")[:10])  # "What happened?"
