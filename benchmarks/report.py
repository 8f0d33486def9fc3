"""The figures as a table for the terminal and as a page of the documentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from benchmarks.rows import ROWS, Result, Spread, Target


def figures(target: Target, spread: Spread) -> str:
    """Return a median with, if there is more than one figure, the least and the greatest."""
    text = target.show(spread.median)
    if spread.low == spread.high:
        return text
    return f"{text} ({target.show(spread.low)}–{target.show(spread.high)})"


def tally(results: Sequence[Result]) -> str:
    """Return how many targets are met, and which rows miss one."""
    missed = sorted({result.row for result in results if not result.met})
    text = f"{sum(result.met for result in results)} of {len(results)} targets are met"
    return text + (f"; missed in row {', '.join(map(str, missed))}." if missed else ".")


def terminal_table(results: Sequence[Result]) -> Table:
    """Return the table for a terminal."""
    table = Table("row", "what", "target", "measured (least–greatest)", "met", "others")
    for result in results:
        others = "\n".join(f"{name} {result.target.show(spread.median)}" for name, spread in result.peers.items())
        table.add_row(
            str(result.row),
            f"{ROWS[result.row].title}\n[dim]{result.case}[/dim]",
            str(result.target),
            figures(result.target, result.measured),
            "[green]yes[/green]" if result.met else "[red]NO[/red]",
            others,
        )
    return table


def page(
    results: Sequence[Result],
    *,
    command: str,
    date: str,
    origin: str,
    surroundings: Mapping[str, str],
    pictures: Mapping[str, str],
) -> str:
    """Return the page.

    Args:
        results: The lines of its table.
        command: What it was made with.
        date: When.
        origin: Where what is said comes from.
        surroundings: What the figures depend on.
        pictures: Titles by the path of the picture.
    """
    lines = [
        "# Benchmarks",
        "",
        "pgmemory beside LangChain's own memories and langgraph, on one server, with the same work.",
        f"Made by `{command}` on {date}; do not edit. {tally(results)}",
        "",
        "Every figure is a ratio of two things that were measured one after the other in the same run, unless its",
        "unit says otherwise. It is the median of repetitions that took turns; the least and the greatest follow in",
        "parentheses. The columns of others hold the same ratio of theirs. The machine's own speed cancels out;",
        "how many cores client and server share does not.",
        "",
        "| row | what | target | measured | met | others |",
        "|---|---|---|---|---|---|",
    ]
    for result in results:
        others = ", ".join(f"{name} {result.target.show(spread.median)}" for name, spread in result.peers.items())
        cells = (
            str(result.row),
            f"{ROWS[result.row].title}: {result.case}",
            str(result.target),
            figures(result.target, result.measured),
            "yes" if result.met else "**no**",
            others or "–",
        )
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "## How each was measured", ""]
    for number in sorted({result.row for result in results}):
        lines.append(f"{number}. **{ROWS[number].title}.** {ROWS[number].how}")
        lines += [f"   - {each.case}: {each.absolute}" for each in results if each.row == number and each.absolute]
    if pictures:
        lines += ["", "## How it grows", ""]
        lines += [f"![{title}]({path})" for path, title in pictures.items()]
    lines += ["", "## Where", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in {**surroundings, "What is said": origin}.items()]
    return "\n".join(lines) + "\n"
