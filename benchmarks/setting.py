"""What every measurement is given, and what it hands back besides lines of the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.dialogues import Dialogues


@dataclass(frozen=True)
class Setting:
    """Where and with what to measure.

    Attributes:
        dsn: Leads to an empty database.
        quick: Measure little, to see that everything works; the figures are rough.
        dialogues: What is said.
    """

    dsn: str
    quick: bool
    dialogues: Dialogues

    def repetitions(self, many: int) -> int:
        """Return how often to repeat what is repeated so many times in a full run."""
        return 3 if self.quick else many


@dataclass(frozen=True)
class Curve:
    """A picture of how something grows.

    Attributes:
        name: Of its file.
        title: What it shows.
        x_label: What grows.
        y_label: What grows with it.
        series: Points by the name of whose they are.
        logarithmic: Whether both axes are.
    """

    name: str
    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Sequence[tuple[float, float]]]
    logarithmic: bool = True
