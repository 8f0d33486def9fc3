"""The arithmetic and the report of the benchmarks; what they measure needs an environment of its own and is not run."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
from conftest import PROJECT
from rich.console import Console

sys.path.insert(0, str(PROJECT))  # not installed: the package holds pgmemory alone

from benchmarks import report  # noqa: E402  # found by the line above
from benchmarks.rows import ROWS, Result, Spread, Target  # noqa: E402

AT_MOST, AT_LEAST = Target(1.4), Target(100, at_most=False, decimals=0)
RESULTS = [
    Result(4, "TokenWindowMemory", AT_LEAST, Spread(1234.4, 900.0, 1500.0), "308.600 ms, 0.250 ms"),
    Result(6, "BufferMemory", AT_MOST, Spread(1.5, 1.2, 1.9), peers={"langchain-postgres": Spread(2.5, 2.0, 3.0)}),
    Result(8, "BufferMemory", Target(0.8), Spread.of([0.7]), peers={"langgraph": Spread.of([8.6])}),
]


def page() -> str:
    return report.page(
        RESULTS,
        command="make bench",
        date="2026-01-31",
        origin="made-up dialogues",
        surroundings={"Machine": "two cores"},
        pictures={"benchmarks-load.svg": "Loading a window"},
    )


def cells(text: str, row: int) -> list[str]:
    """Return the cells of the page's line for a row."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {row} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_spread_is_the_median_between_the_least_and_the_greatest() -> None:
    assert Spread.of([5.0, 1.0, 2.0]) == Spread(median=2.0, low=1.0, high=5.0)


def test_ratios_are_of_what_was_measured_side_by_side() -> None:
    # The ratio of the medians would be 20 / 10.
    assert Spread.of_ratios([10.0, 20.0, 90.0], [10.0, 5.0, 30.0]) == Spread(median=3.0, low=1.0, high=4.0)


def test_ratios_of_different_numbers_of_repetitions_are_refused() -> None:
    with pytest.raises(ValueError):
        Spread.of_ratios([1.0, 2.0], [1.0])


def test_a_spread_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing was measured"):
        Spread.of([])


@pytest.mark.parametrize(
    ("target", "value", "met"),
    [(AT_MOST, 1.4, True), (AT_MOST, 1.41, False), (AT_LEAST, 100.0, True), (AT_LEAST, 99.9, False)],
)
def test_a_target_may_be_touched_and_not_passed(target: Target, value: float, met: bool) -> None:
    assert target.met_by(value) is met


def test_the_median_decides_whether_a_target_is_met() -> None:
    assert Result(6, "", AT_MOST, Spread(1.4, 1.0, 9.0)).met
    assert not Result(6, "", AT_MOST, Spread(1.5, 1.0, 1.6)).met


def test_the_tally_names_the_rows_that_miss_their_target() -> None:
    assert report.tally(RESULTS) == "2 of 3 targets are met; missed in row 6."
    assert report.tally(RESULTS[:1]) == "1 of 1 targets are met."


def test_the_page_has_target_median_spread_verdict_and_peers_of_every_line() -> None:
    text = page()
    assert cells(text, 4)[2:] == ["≥ 100×", "1,234× (900×–1,500×)", "yes", "–"]
    assert cells(text, 6)[2:] == ["≤ 1.40×", "1.50× (1.20×–1.90×)", "**no**", "langchain-postgres 2.50×"]
    assert cells(text, 8)[2:] == ["≤ 0.80×", "0.70×", "yes", "langgraph 8.60×"]


def test_the_page_says_how_where_when_and_with_what() -> None:
    text = page()
    for part in (
        "Made by `make bench` on 2026-01-31",
        report.tally(RESULTS),
        ROWS[6].how,
        "TokenWindowMemory: 308.600 ms, 0.250 ms",
        "![Loading a window](benchmarks-load.svg)",
        "| Machine | two cores |",
        "| What is said | made-up dialogues |",
    ):
        assert part in text
    assert ROWS[1].how not in text, "only what was measured is explained"


def test_the_terminal_shows_the_same_figures() -> None:
    console = Console(file=io.StringIO(), width=150)
    console.print(report.terminal_table(RESULTS))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    for part in ("1,234× (900×–1,500×)", "≤ 1.40×", "NO", "langgraph 8.60×", ROWS[8].title):
        assert part in shown


def test_help_names_every_row_and_needs_no_peer() -> None:
    # -S leaves out everything that is installed.
    command = [sys.executable, "-S", "-m", "benchmarks"]
    shown = subprocess.run([*command, "--help"], cwd=PROJECT, capture_output=True, text=True, check=True).stdout
    for number, row in ROWS.items():
        assert f"{number:>4}  {row.title}" in shown
    refused = subprocess.run([*command, "--rows", "5,99"], cwd=PROJECT, capture_output=True, text=True)
    assert refused.returncode == 2 and "'5,99'" in refused.stderr


def test_without_the_peers_it_says_what_installs_them() -> None:
    command = [sys.executable, "-S", "-m", "benchmarks", "--quick"]
    result = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    assert result.returncode == 1
    assert "make bench" in result.stderr and "Traceback" not in result.stderr
