"""Other people's own memory and history tests, run against our classes: ``python tests/peers [--report FILE]``.

Takes the source distributions of the LangChain packages that are installed from the package index, keeps them in a
cache folder outside the project, and runs their test files, unchanged and with their own configuration, in a process
of pytest each, where a plugin swaps our classes in for theirs. The server is `$PGMEMORY_TEST_DSN`, else
`$DATABASE_URL`, else one that is started in a temporary folder.

Every test passes or is excused (`excused.py`). The run fails where another test does not pass or is skipped, where an
excused test passes, fails in another way or is no longer there, and where no test of a file reaches PostgreSQL.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import quote

# For this process and for those that it starts.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from documents import with_section
from peers.excused import EXCUSED
from peers.outcomes import FileOutcome, Outcome, section, table, wrong
from peers.plugin import DSN
from peers.suites import SUITES, Suite, installed_line, unpacked
from psycopg2.extensions import parse_dsn

from pgmemory.embedded import LocalServer

_RUN_SECONDS = 300
_TESTS_RAN = (0, 1)  # pytest's exit codes


def main() -> int:
    """Run the suites of the line that is installed, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python tests/peers", description=__doc__.partition("\n")[0])
    parser.add_argument("--report", type=Path, metavar="FILE", help="put the section of this line into this document")
    arguments = parser.parse_args()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pgmemory-peer-tests"

    line = installed_line()
    memory_module = f"{SUITES[line][0].distribution.replace('-', '_')}.memory"
    files: list[FileOutcome] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pgmemory-peers-")))
        folder.chmod(0o711)  # the server runs as another user where this one is root
        dsn = os.environ.get(DSN) or os.environ.get("DATABASE_URL")
        if not dsn:
            dsn = stack.enter_context(LocalServer(folder / "server", durable=False)).dsn
        environment = _environment(folder, dsn)
        for suite in SUITES[line]:
            report = folder / f"{suite.distribution}.json"
            files += _run(suite, unpacked(suite, cache), memory_module, environment, report)

    failures = wrong(files, EXCUSED)
    for failure in failures:
        print(failure, file=sys.stderr)
    print(f"{line}\n\n{table(files)}")
    if arguments.report is not None and not failures:
        document = arguments.report.read_text() if arguments.report.exists() else ""
        content = section(line, files, EXCUSED)
        arguments.report.write_text(with_section(document, f"peers: {line}", content))
    return 1 if failures else 0


def _environment(folder: Path, dsn: str) -> dict[str, str]:
    """Return what the test processes find in their environment."""
    parts = parse_dsn(dsn)
    return {
        **os.environ,
        DSN: dsn,
        # Where the tests of langchain-postgres look for a server; they put this into a URL.
        "POSTGRES_HOST": quote(parts.get("host", "localhost"), safe=""),
        "POSTGRES_PORT": parts.get("port", "5432"),
        "POSTGRES_USER": quote(parts.get("user", ""), safe=""),
        "POSTGRES_PASSWORD": quote(parts.get("password", ""), safe=""),
        "POSTGRES_DB": quote(parts.get("dbname", ""), safe=""),
        "PYTHONPATH": os.pathsep.join(sys.path[:2]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TIKTOKEN_CACHE_DIR": str(folder / "encodings"),
        "LANGCHAIN_TRACING_V2": "false",
        "LANGSMITH_TRACING": "false",
    }


def _run(
    suite: Suite, folder: Path, memory_module: str, environment: dict[str, str], report: Path
) -> list[FileOutcome]:
    """Run a suite in the folder that it is unpacked in.

    Raises:
        RuntimeError: pytest could not run it.
    """
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "peers.plugin"]
    command += ["--outcomes", str(report), "--memory-module", memory_module]
    command += [f"{suite.folder}{path}" for path in suite.files]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_RUN_SECONDS,
    )
    if done.returncode not in _TESTS_RAN:
        raise RuntimeError(f"the tests of {suite.source} could not be run:\n{done.stdout}")
    tests = {
        name.removeprefix(suite.folder): Outcome(**outcome) for name, outcome in json.loads(report.read_text()).items()
    }
    return [
        FileOutcome(suite.source, path, {name: test for name, test in tests.items() if name.startswith(f"{path}::")})
        for path in suite.files
    ]


if __name__ == "__main__":
    sys.exit(main())
