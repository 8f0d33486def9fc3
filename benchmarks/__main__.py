"""Measure pgmemory beside LangChain's own memories: ``python -m benchmarks [--quick] [--rows 5,6] [--output docs]``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib import import_module
from pathlib import Path

from benchmarks.rows import ROWS, Result

_MODULES: dict[str, tuple[int, ...]] = {
    "trips": (1, 2),
    "loads": (3, 4),
    "floor": (5, 6),
    "processes": (7,),
    "storage": (8,),
    "summaries": (9,),
    "starting": (10, 11),
}
_PAGE = "benchmarks.md"
_PIPE_WIDTH = 150  # of the table where there is no terminal


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, and write the page and its pictures."""
    given = " ".join(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(arguments)
    names = [name for name, rows in _MODULES.items() if options.rows.intersection(rows)]
    try:
        modules = {name: import_module(f"benchmarks.{name}") for name in names}
        from benchmarks import curves, report, server
        from benchmarks.dialogues import Dialogues
        from benchmarks.setting import Setting
    except ModuleNotFoundError as error:
        print(f"{error}: `make bench` installs what the benchmarks need", file=sys.stderr)
        return 1
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console()
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    results: list[Result] = []
    pictures = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with server.database() as dsn, progress:
        surroundings = server.describe(dsn)
        setting = Setting(dsn, options.quick, Dialogues())
        task = progress.add_task("", total=sum(len(_MODULES[name]) for name in names))
        for name, module in modules.items():
            progress.update(task, description="; ".join(ROWS[row].title for row in _MODULES[name]))
            for outcome in module.measure(setting):
                if isinstance(outcome, Result):
                    results.append(outcome)
                else:
                    pictures.append(outcome)
            progress.advance(task, len(_MODULES[name]))
    results = sorted((result for result in results if result.row in options.rows), key=lambda result: result.row)
    console.print(report.terminal_table(results), report.tally(results))
    if options.output is None:
        return 0
    options.output.mkdir(parents=True, exist_ok=True)
    files = {f"benchmarks-{curve.name}.svg": curve for curve in pictures}
    for file, curve in files.items():
        curves.draw(curve, options.output / file)
    page = report.page(
        results,
        command="make bench" if not options.quick and options.rows == set(ROWS) else f"python -m benchmarks {given}",
        date=datetime.now(timezone.utc).date().isoformat(),
        origin=setting.dialogues.origin,
        surroundings=surroundings,
        pictures={file: curve.title for file, curve in files.items()},
    )
    (options.output / _PAGE).write_text(page, encoding="utf-8")
    console.print(f"Wrote {options.output / _PAGE}")
    return 0


def _rows(text: str) -> set[int]:
    try:
        rows = {int(part) for part in text.split(",")}
    except ValueError:
        rows = set()
    if not rows or not rows <= ROWS.keys():
        raise argparse.ArgumentTypeError(f"give numbers from 1 to {max(ROWS)}, with commas between them, not {text!r}")
    return rows


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=(
            "Measure pgmemory beside LangChain's own memories and langgraph, on one server and with the same work: "
            "$PGMEMORY_BENCH_DSN, else one that is started for this."
        ),
        epilog="rows:\n" + "\n".join(f"{number:>4}  {row.title}" for number, row in ROWS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="measure little, within a minute: the figures are rough")
    parser.add_argument("--rows", type=_rows, default=set(ROWS), metavar="N,…", help="only these rows")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="write the page and its pictures into it")
    return parser


if __name__ == "__main__":
    sys.exit(main())
