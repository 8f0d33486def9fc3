"""What the tests of the pool share: looking at sessions, killing them, threads, what was said."""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import psycopg2
import psycopg2.extensions
import psycopg2.extras
import psycopg2.pool
import pytest
from waiting import wait_until

from pgmemory.pool import (
    ConnectionPool,
    Database,
)

Connection = psycopg2.extensions.connection
Parameters = dict[str, str]
SECRET = "t0p-s3cr3t"
PATIENCE_SECONDS = 20.0


def ask(admin: Connection, statement: str, *parameters: Any) -> Any:
    """Return the first column of the first row."""
    with admin.cursor() as cursor:
        cursor.execute(statement, parameters)
        return cursor.fetchall()[0][0]


def sessions(admin: Connection, application: str) -> int:
    return int(ask(admin, "select count(*) from pg_stat_activity where application_name = %s", application))


def states(admin: Connection, application: str) -> str:
    """Return the states of an application's sessions, once none is active any more."""
    query = "select coalesce(string_agg(state, ','), '') from pg_stat_activity where application_name = %s"
    wait_until(lambda: "active" not in ask(admin, query, application), "the sessions finish their work")
    return str(ask(admin, query, application))


def kill(admin: Connection, pid: int) -> None:
    """End a session from the server's side."""
    assert ask(admin, "select pg_terminate_backend(%s)", pid)
    wait_until(
        lambda: not ask(admin, "select count(*) from pg_stat_activity where pid = %s", pid), "the session is gone"
    )


def pid_of(database: Database) -> int:
    return int(database.execute("select pg_backend_pid()")[0][0])


def in_thread(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Run a function in a thread of its own, which does not outlive the test run."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as exc:
            future.set_exception(exc)

    threading.Thread(target=run, daemon=True).start()
    return future


def queued(pool: ConnectionPool, callers: int) -> None:
    wait_until(lambda: len(pool._queue) == callers, f"{callers} callers wait")


def our_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("pgmemory") and record.levelno >= logging.WARNING
    ]


def everything_said_by(error: BaseException) -> str:
    """Return the texts of an error and all it comes from, and the local variables of the frames below the test."""
    said = []
    chain: BaseException | None = error
    while chain is not None:
        said += [str(chain), repr(chain), repr(vars(chain))]
        below = chain.__traceback__.tb_next if chain.__traceback__ else None
        said += traceback.StackSummary.extract(traceback.walk_tb(below), capture_locals=True).format()
        chain = chain.__cause__ or chain.__context__
    return "\n".join(said)


def hold_all(pool: ConnectionPool) -> None:
    connections = []
    while True:
        connections.append(pool.getconn())
