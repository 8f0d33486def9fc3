"""Fixtures for every test: one PostgreSQL server a run, one PostgreSQL schema a test.

The server is `$PGMEMORY_TEST_DSN`, else `$DATABASE_URL`, else one that is started in a temporary folder and shared by
all test processes. Without any the tests fail rather than skip.
"""

from __future__ import annotations

import gc
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import hypothesis
import psycopg2
import pytest
from psycopg2 import sql
from psycopg2.extensions import TRANSACTION_STATUS_IDLE, parse_dsn
from psycopg2.extensions import connection as Connection
from psycopg2.extensions import cursor as Cursor
from psycopg2.pool import ThreadedConnectionPool
from waiting import wait_until

if TYPE_CHECKING:
    from pgmemory import ConversationStore
    from pgmemory.pool import Database

PROJECT = Path(__file__).resolve().parents[1]

# Of what lies below LangChain: it is the same beside either line, so one run of these is enough.
BELOW_LANGCHAIN = {
    "test_benchmarks",
    "test_chaos_audit",
    "test_cli",
    "test_cli_keeping",
    "test_cli_look",
    "test_database",
    "test_deadlines",
    "test_distribution",
    "test_documents",
    "test_dsn",
    "test_embedded",
    "test_failover",
    "test_faults",
    "test_floors",
    "test_given_pools",
    "test_inspection",
    "test_items",
    "test_items_by_meaning",
    "test_keywords",
    "test_operations_guide",
    "test_packaging",
    "test_plans",
    "test_pool",
    "test_pool_copies",
    "test_recall_bench",
    "test_recall_languages",
    "test_retention",
    "test_row_level_security",
    "test_schema",
    "test_store",
    "test_transcript",
}
RUN_FOLDER = "PGMEMORY_TEST_RUN_FOLDER"

# How long an example takes says nothing here: the server shares the machine with the tests.
hypothesis.settings.register_profile("pgmemory", deadline=None)
hypothesis.settings.load_profile("pgmemory")


def pytest_configure(config: pytest.Config) -> None:
    """Make the run's folder and keep the machine's own settings out; test processes (xdist) inherit both."""
    if hasattr(config, "workerinput"):
        return
    # Not pytest's own temporary folder: the server runs as another user when the tests run as root.
    folder = tempfile.mkdtemp(prefix="pgmemory-tests-")
    os.chmod(folder, 0o755)
    os.environ[RUN_FOLDER] = folder
    os.environ["TIKTOKEN_CACHE_DIR"] = os.path.join(folder, "encodings")
    for name in ("LANGCHAIN_TRACING_V2", "LANGSMITH_TRACING"):
        os.environ[name] = "false"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of what lies below LangChain."""
    for item in items:
        if item.path.stem in BELOW_LANGCHAIN:
            item.add_marker("below_langchain")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the run's folder."""
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop(RUN_FOLDER), ignore_errors=True)


@pytest.fixture(scope="session")
def server_dsn() -> Iterator[str]:
    """The DSN of the run's PostgreSQL server, as a superuser where the tests start it."""
    dsn = os.environ.get("PGMEMORY_TEST_DSN") or os.environ.get("DATABASE_URL")
    if dsn:
        yield dsn
        return
    from pgmemory.embedded import LocalServer

    # All test processes attach to the one server in this folder; the last to leave stops it.
    server = LocalServer(Path(os.environ[RUN_FOLDER]) / "server", durable=False)
    yield server.start()
    server.stop()


@pytest.fixture
def admin(server_dsn: str) -> Iterator[Connection]:
    """A plain connection in autocommit mode, to look at what is stored and to do harm."""
    connection = psycopg2.connect(server_dsn)
    connection.autocommit = True
    yield connection
    connection.close()


@pytest.fixture
def schema_name(server_dsn: str) -> Iterator[str]:
    """A name for a PostgreSQL schema of this test's own; dropped afterwards if it was made."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    yield name
    connection = psycopg2.connect(server_dsn)
    connection.autocommit = True
    with connection.cursor() as cursor:
        # A test that leaves a transaction open shall fail here, not hang.
        cursor.execute("set lock_timeout = '10s'; set client_min_messages = warning")
        cursor.execute(sql.SQL("drop schema if exists {} cascade").format(sql.Identifier(name)))
    connection.close()


@pytest.fixture
def store(server_dsn: str, schema_name: str) -> Iterator[ConversationStore]:
    """A conversation store whose schema stands."""
    from pgmemory import ConversationStore

    with ConversationStore(server_dsn, schema=schema_name) as store:
        store.setup()
        yield store


@pytest.fixture
def application(admin: Connection) -> Iterator[str]:
    """An application name of the test's own, to tell its sessions in pg_stat_activity; none may be left behind."""
    from pools import sessions

    name = f"test-{uuid.uuid4().hex[:12]}"
    yield name
    gc.collect()
    wait_until(lambda: sessions(admin, name) == 0, "the test's sessions end")


@pytest.fixture
def database(server_dsn: str, application: str) -> Iterator[Database]:
    """A database that has one connection at most."""
    from pgmemory.pool import Database

    database = Database(server_dsn, max_connections=1, retry_seconds=0.5, application_name=application)
    yield database
    database.close()


@pytest.fixture
def parameters(server_dsn: str) -> dict[str, str]:
    """The server's DSN in its parts."""
    return parse_dsn(server_dsn)


@pytest.fixture
def closed_port() -> int:
    """A port on which nothing listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Executed(NamedTuple):
    """One round trip that the driver made: its statements and how many rows came back."""

    statement: str
    rows: int


class CountingCursor(Cursor):
    """A cursor that notes each round trip in its connection's `executes`."""

    connection: CountingConnection

    def execute(self, query: Any, vars: Any = None) -> None:
        connection = self.connection
        if not connection.autocommit and connection.info.transaction_status == TRANSACTION_STATUS_IDLE:
            connection.executes.append(Executed("begin", 0))
        rows = 0
        try:
            super().execute(query, vars)
            # The whole result has crossed the wire by now, whatever is fetched of it later.
            rows = self.rowcount if self.description else 0
        finally:
            text = query if isinstance(query, str) else query.as_string(connection)
            connection.executes.append(Executed(text, rows))

    def executemany(self, query: Any, vars_list: Any) -> None:
        for vars in vars_list:
            self.execute(query, vars)


class CountingConnection(Connection):
    """A connection that notes each round trip in `executes`."""

    def __init__(self, dsn: str, *, executes: list[Executed]) -> None:
        super().__init__(dsn)
        self.executes = executes

    def cursor(self, *args: Any, **options: Any) -> Cursor:
        # Also where the caller asks for a class of its own: nothing shall go by unseen.
        return super().cursor(*args, **{**options, "cursor_factory": CountingCursor})

    def commit(self) -> None:
        self._end("commit")
        super().commit()

    def rollback(self) -> None:
        self._end("rollback")
        super().rollback()

    def _end(self, statement: str) -> None:
        if not self.closed and self.info.transaction_status != TRANSACTION_STATUS_IDLE:
            self.executes.append(Executed(statement, 0))


class CountingPool(ThreadedConnectionPool):
    """An application's own pool, with `executes`: every round trip of its connections, in order."""

    def __init__(self, dsn: str) -> None:
        self.executes: list[Executed] = []
        super().__init__(1, 4, dsn, connection_factory=partial(CountingConnection, executes=self.executes))


@pytest.fixture
def counting_pool(server_dsn: str) -> Iterator[CountingPool]:
    """A psycopg2 pool that notes every round trip to the server in its list `executes`."""
    pool = CountingPool(server_dsn)
    yield pool
    pool.closeall()


@pytest.fixture
def counted_store(counting_pool: CountingPool, schema_name: str) -> Iterator[Any]:
    """A store whose schema stands and whose list `executes` notes every round trip from now on."""
    from pgmemory import ConversationStore

    with ConversationStore(counting_pool, schema=schema_name) as store:
        store.setup()
        counting_pool.executes.clear()
        store.executes = counting_pool.executes  # type: ignore[attr-defined]
        yield store


def run_together(program: str, arguments: Sequence[Sequence[str]], server_dsn: str) -> list[str]:
    """Run a program in several processes that begin at the same moment, and return what each printed after that.

    The program finds the server in $DSN, prints ``ready``, and begins when it can read a line.
    """
    # Warnings are errors there too, and only the path tells where pgmemory is.
    environment = {**os.environ, "DSN": server_dsn, "PYTHONPATH": str(PROJECT)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", program, *each],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for each in arguments
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    ends = [process.communicate(timeout=60) for process in processes]
    for process, (_, errors) in zip(processes, ends, strict=True):
        assert (process.returncode, errors) == (0, "")
    return [output for output, _ in ends]


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real dialogues beside the project; the test is skipped where it is absent."""
    folder = PROJECT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no real dialogues: {folder} is absent")
    return folder


class VirtualEnvironment:
    """A fresh virtual environment with nothing but pip in it."""

    def __init__(self, folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        self.folder = folder

    def run(self, command: str, *arguments: str | Path, env: dict[str, str] | None = None, fails: bool = False) -> str:
        """Run a command of the environment, away from the project, and return all that it printed.

        Fails the test if the command fails, or with ``fails=True`` if it does not.
        """
        # The environment under test must see itself alone, not what the tests run in.
        inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        result = subprocess.run(
            [self.folder / "bin" / command, *arguments],
            cwd=self.folder,
            env={**inherited, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        assert (result.returncode != 0) == fails, (
            f"{command} {arguments} ended with {result.returncode}:\n{result.stdout}"
        )
        return result.stdout

    def install(self, *requirements: str | Path) -> None:
        """Install with pip from the package registry."""
        self.run("python", "-m", "pip", "install", "--quiet", *requirements)


@pytest.fixture
def virtual_environment(tmp_path: Path) -> VirtualEnvironment:
    """A fresh virtual environment of this test's own."""
    return VirtualEnvironment(tmp_path / "environment")


class Distributions(NamedTuple):
    """The two files that a release consists of."""

    sdist: Path
    wheel: Path


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    """The sdist, built from a copy of the project without its left-overs, and the wheel, built from that sdist."""
    folder = tmp_path_factory.mktemp("release")
    left_overs = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "build", "dist")
    shutil.copytree(PROJECT, folder / "project", ignore=left_overs)
    built = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", folder / "project"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert built.returncode == 0, built.stdout
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    (wheel,) = (folder / "dist").glob("*.whl")
    return Distributions(sdist, wheel)
