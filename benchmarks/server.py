"""The server that everything is measured on, and the machine and the versions that go with the figures."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import psycopg2
from psycopg2.extensions import make_dsn

from pgmemory.embedded import LocalServer

DSN_VARIABLE = "PGMEMORY_BENCH_DSN"

_PACKAGES = (
    "langchain-pgmemory", "langchain-core", "langchain-classic", "langchain-community", "langchain-postgres",
    "langgraph", "langgraph-checkpoint-postgres", "psycopg2-binary", "psycopg", "SQLAlchemy", "pydantic",
)  # fmt: skip


@contextmanager
def database() -> Iterator[str]:
    """Give a database of its own, in which a commit does not wait for the disk, and remove it afterwards.

    It is made on the server of $PGMEMORY_BENCH_DSN, else on one that is started for it, behind a Unix socket.
    """
    given = os.environ.get(DSN_VARIABLE)
    if given:
        yield from _database_on(given)
        return
    folder = Path(tempfile.mkdtemp(prefix="pgmemory-benchmarks-"))
    folder.chmod(0o711)  # the server runs as another user where this runs as root
    try:
        with LocalServer(folder / "server") as server:
            yield from _database_on(server.start())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _database_on(dsn: str) -> Iterator[str]:
    name = f"pgmemory_benchmarks_{uuid.uuid4().hex[:8]}"
    run(dsn, f"create database {name}")
    try:
        run(dsn, f"alter database {name} set synchronous_commit = off")
        yield make_dsn(dsn, dbname=name)
    finally:
        run(dsn, f"drop database {name} with (force)")


def run(dsn: str, *statements: str) -> list[tuple[Any, ...]]:
    """Run statements, each in its own transaction, in a session of its own; return the last one's rows."""
    with closing(psycopg2.connect(dsn)) as connection:
        connection.autocommit = True
        with connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
            return cursor.fetchall() if cursor.description else []


def describe(dsn: str) -> dict[str, str]:
    """Return what the figures depend on: machine, server and versions."""
    ((version,),) = run(dsn, "show server_version")
    ((shared_buffers,),) = run(dsn, "show shared_buffers")
    how = "as given" if os.environ.get(DSN_VARIABLE) else "started for this, default settings"
    gibibytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "Machine": f"{_processor()}, {len(os.sched_getaffinity(0))} cores shared by clients and server, "
        f"{gibibytes:.0f} GiB memory, {platform.system()} {platform.release().partition('-')[0]}",
        "Server": f"PostgreSQL {version}, {how}, shared_buffers {shared_buffers}, synchronous_commit off",
        "Python": platform.python_version(),
        "Packages": ", ".join(f"{name} {metadata.version(name)}" for name in _PACKAGES),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    except OSError:
        pass
    return platform.machine()
