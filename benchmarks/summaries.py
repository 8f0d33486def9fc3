"""Row 9: how often the model is asked for summaries, and with how much."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from langchain_classic.memory import ConversationSummaryBufferMemory

from benchmarks.measure import OURS
from benchmarks.ours import open_store
from benchmarks.peers import quietly
from benchmarks.rows import Result, Spread, Target
from benchmarks.setting import Curve, Setting
from benchmarks.standin import StandIn
from pgmemory import SummaryMemory

_TURNS = 200
_STOCK = "ConversationSummaryBufferMemory"
_CALLS = {500: Target(1 / 6), 2000: Target(1 / 10)}
_WORDS = Target(0.45)


def measure(setting: Setting) -> Iterator[Result | Curve]:
    """Measure the row."""
    said = setting.dialogues.ending(_TURNS)
    series: dict[str, list[tuple[float, float]]] = {}
    with open_store(setting.dsn) as store:
        for limit, target in _CALLS.items():
            models = {OURS: StandIn(), _STOCK: StandIn()}
            memories: dict[str, Any] = {
                OURS: SummaryMemory(session_id=uuid.uuid4(), store=store, llm=models[OURS], max_token_limit=limit),
                _STOCK: quietly(ConversationSummaryBufferMemory, llm=models[_STOCK], max_token_limit=limit),
            }
            for turn, (human, ai) in enumerate(said, start=1):
                for name, memory in memories.items():
                    memory.save_context({"input": human}, {"output": ai})
                    points = series.setdefault(f"{name}, limit {limit:,}", [])
                    points.append((turn, len(models[name].prompts)))
            calls = {name: len(model.prompts) for name, model in models.items()}
            words = {name: sum(model.prompts) for name, model in models.items()}
            yield _line(f"calls at a limit of {limit:,}", target, calls)
            yield _line(f"prompt tokens at a limit of {limit:,}", _WORDS, words)
    yield Curve("summaries", "Calls of the model for summaries", "turns", "calls so far", series, logarithmic=False)


def _line(case: str, target: Target, counts: dict[str, int]) -> Result:
    absolute = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    return Result(9, case, target, Spread.of([counts[OURS] / counts[_STOCK]]), absolute)
