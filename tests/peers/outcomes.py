"""What became of other people's tests: what of it is wrong, and the section of the document.

Owns: the verdict of a run and its text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from peers.excused import Excuse


@dataclass(frozen=True)
class Outcome:
    """What became of one test.

    Attributes:
        passed: It neither failed nor was skipped.
        stored: It reached PostgreSQL while it ran.
        why: Why it did not pass.
    """

    passed: bool
    stored: bool
    why: str = ""


@dataclass(frozen=True)
class FileOutcome:
    """What became of the tests of one file.

    Attributes:
        source: The distribution that it is from, with the version.
        path: Its path in there.
        tests: By path and name.
    """

    source: str
    path: str
    tests: Mapping[str, Outcome]


def wrong(files: Iterable[FileOutcome], excused: Mapping[str, Excuse]) -> list[str]:
    """Say what fails a run, one line for each thing."""
    lines = []
    for file in files:
        for name, test in file.tests.items():
            excuse = excused.get(name)
            if test.passed and excuse:
                lines.append(f"{name} is excused and passed")
            elif not test.passed and (excuse is None or excuse.failure not in test.why):
                lines.append(f"{name} {test.why}")
        gone = [name for name in excused if name.startswith(f"{file.path}::") and name not in file.tests]
        lines += [f"{name} is excused and was not run" for name in gone]
        if not any(test.stored for test in file.tests.values()):
            lines.append(f"{file.path} shows nothing: no test of it reached PostgreSQL")
    return lines


def table(files: Iterable[FileOutcome]) -> str:
    """Return a run as a Markdown table."""
    lines = ["| from | file | tests | that reach PostgreSQL | passed | excused |", "|---|---|---:|---:|---:|---:|"]
    sums = [0, 0, 0, 0]
    for file in files:
        tests = file.tests.values()
        passed = sum(test.passed for test in tests)
        counts = [len(tests), sum(test.stored for test in tests), passed, len(tests) - passed]
        sums = [total + count for total, count in zip(sums, counts, strict=True)]
        lines.append(f"| {file.source} | `{file.path}` | {' | '.join(map(str, counts))} |")
    lines.append(f"| **all** | | {' | '.join(f'**{total}**' for total in sums)} |")
    return "\n".join(lines)


def section(line: str, files: Sequence[FileOutcome], excused: Mapping[str, Excuse]) -> str:
    """Return what the document says of a LangChain line: the table, and the reasons for what is excused in it."""
    names: dict[str, list[str]] = {}
    for name, excuse in excused.items():
        if any(name in file.tests for file in files):
            names.setdefault(excuse.reason, []).append(f"`{name.rpartition('::')[2]}`")
    reasons = [f"- {', '.join(tests)}: {reason}." for reason, tests in names.items()]
    return "\n".join([f"## {line}", "", table(files), "", "Excused:", "", *reasons])
