"""The recall benchmark reads LoCoMo's form and scores what it should."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import recall
from pgmemory import ConversationStore

PROJECT = Path(__file__).resolve().parents[1]
SAMPLE = PROJECT / "benchmarks" / "recall_sample"


def test_the_sample_is_read_with_its_answerable_questions() -> None:
    (dialogue,) = recall.dialogues_in(SAMPLE)
    assert len(dialogue.entries) == 39
    assert dialogue.entries[1, 1][0] == "human" and dialogue.entries[1, 2][0] == "ai"
    assert len(dialogue.questions) == 12  # one is not answered by the dialogue
    assert dialogue.questions[2].evidence == {(1, 11), (1, 12)}


def test_evidence_among_the_best_and_within_the_budget_is_counted(server_dsn: str, schema_name: str) -> None:
    dialogues = list(recall.dialogues_in(SAMPLE))
    scores = recall.measure(server_dsn, dialogues, k=10, budget=100, schema=schema_name)
    assert set(scores) == {"recency", "full text"}
    # By hand: the last ten messages are D3:5 to D3:14.
    evidence = [question.evidence for question in dialogues[0].questions]
    newest = {(3, number) for number in range(5, 15)}
    assert scores["recency"].among_best == [len(each & newest) / len(each) for each in evidence]
    assert sum(scores["full text"].among_best) > 2 * sum(scores["recency"].among_best)
    assert all(0 <= share <= 1 for share in scores["full text"].in_budget)


@pytest.mark.parametrize("content", ["{", "[1]", '{"qa": []}'])
def test_a_file_of_another_form_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "odd.json").write_text(content)
    with pytest.raises(ValueError, match="odd.json is not of LoCoMo's form"):
        list(recall.dialogues_in(tmp_path))


def test_a_folder_without_questions_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert recall.main([str(tmp_path)]) == 1
    assert "holds no JSON file with questions" in capsys.readouterr().err
    assert json.loads((SAMPLE / "ines_and_tomas.json").read_text())


def test_a_store_of_the_sample_finds_what_shares_no_word_by_its_neighbour(store: ConversationStore) -> None:
    store.setup(search=True)
    (dialogue,) = recall.dialogues_in(SAMPLE)
    ranking = recall.rankings(store, "u", dialogue)["full text"]
    assert {(2, 7), (2, 8)} <= set(ranking("How did Tomas break his ankle?")[:10])  # "What happened?"
