"""Which of other people's test files are run, and where they come from.

Owns: the names of distributions and files, and the folder that they are unpacked in. The source distributions are
downloaded for the versions that are installed; nothing of theirs becomes part of the project.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

_DOWNLOAD_SECONDS = 300


class Suite(NamedTuple):
    """Test files of one distribution.

    Attributes:
        distribution: Its name on the package index.
        files: Their paths in its folder of tests.
        folder: That folder.
    """

    distribution: str
    files: Sequence[str]
    folder: str = "tests/unit_tests/"

    @property
    def version(self) -> str:
        """The version that is installed."""
        return metadata.version(self.distribution)

    @property
    def source(self) -> str:
        """Its name and version."""
        return f"{self.distribution} {self.version}"


_CHAINS_AND_MEMORY = (
    "chains/test_conversation.py",
    "chains/test_conversation_retrieval.py",
    "chains/test_memory.py",
    "chains/test_sequential.py",
    "chains/test_summary_buffer_memory.py",
    "memory/test_combined_memory.py",
)
_HISTORIES = (
    Suite(
        "langchain-community",
        ("chat_message_histories/test_file_chat_message_history.py", "chat_message_histories/test_sql.py"),
    ),
    Suite("langchain-postgres", ("v1/test_chat_histories.py",)),
)
_STORES = Suite("langgraph-checkpoint", ("test_store.py",), "tests/")
SUITES = {
    "LangChain 1.x": (
        Suite("langchain-classic", _CHAINS_AND_MEMORY),
        Suite("langchain-core", ("chat_history/test_chat_history.py", "runnables/test_history.py")),
        *_HISTORIES,
        _STORES,
    ),
    "LangChain 0.3": (
        Suite("langchain", _CHAINS_AND_MEMORY),
        Suite("langchain-core", ("runnables/test_history.py",)),
        *_HISTORIES,
        _STORES,
    ),
}


def installed_line() -> str:
    """Return the name of the LangChain line that is installed."""
    return "LangChain 1.x" if find_spec("langchain_classic") else "LangChain 0.3"


def unpacked(suite: Suite, cache: Path) -> Path:
    """Return the folder with a suite's tests and their configuration, downloaded if it is not in the cache.

    Raises:
        RuntimeError: They cannot be downloaded.
    """
    folder = cache / f"{suite.distribution}-{suite.version}"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            extracted = _extract_tests(_download(suite, Path(scratch)), Path(scratch))
            extracted.rename(folder)
    return folder


def _download(suite: Suite, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    # Not :all:, for then pip would also build from source what it needs to look into this one.
    command += ["--no-binary", suite.distribution, "--dest", str(folder), f"{suite.distribution}=={suite.version}"]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_DOWNLOAD_SECONDS
    )
    if done.returncode != 0:
        raise RuntimeError(f"{suite.source} could not be downloaded:\n{done.stdout}")
    (archive,) = folder.glob("*.tar.gz")
    return archive


def _extract_tests(archive: Path, folder: Path) -> Path:
    """Leave their package out: it is the installed one that the tests shall meet."""
    with tarfile.open(archive) as opened:
        members = opened.getmembers()
        top = members[0].name.partition("/")[0]
        wanted = [m for m in members if m.name == f"{top}/pyproject.toml" or m.name.startswith(f"{top}/tests/")]
        opened.extractall(folder, wanted, filter="data")
    return folder / top
