"""Copies and forks of a pool."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import select
import signal
import threading
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from pools import (
    PATIENCE_SECONDS,
    Connection,
    hold_all,
    in_thread,
    our_warnings,
    pid_of,
    sessions,
)
from waiting import wait_until

from pgmemory.pool import (
    ConnectionPool,
    Database,
    PoolTimeoutError,
    StoreUnavailableError,
)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda database: pickle.loads(pickle.dumps(database))])
def test_a_copy_carries_the_configuration_and_opens_its_own_connections(
    server_dsn: str, admin: Connection, application: str, duplicate: Callable[[Any], Any]
) -> None:
    database = Database(
        server_dsn, min_connections=2, max_connections=3, timeout_seconds=4.5, application_name=application
    )
    pid = pid_of(database)
    other = duplicate(database)
    assert isinstance(other, Database)
    assert repr(other) == repr(database)
    assert sessions(admin, application) == 1
    assert pid_of(other) != pid
    pool = other._source._pool
    assert (pool.min_connections, pool.max_connections, pool.timeout_seconds) == (2, 3, 4.5)
    database.close()
    assert other.execute("select 1") == [(1,)]
    with pytest.raises(PoolTimeoutError):
        hold_all(duplicate(ConnectionPool(server_dsn, timeout_seconds=0, application_name=application)))
    other.close()


def fork(function: Callable[[], object]) -> tuple[int, int]:
    """Run a function in a forked child; return the child's process id and a descriptor that its result comes out of."""
    result, write = os.pipe()
    with warnings.catch_warnings():
        # From Python 3.12 on: there are other threads. That is what these tests are about.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            os.write(write, str(function()).encode())
        except BaseException:
            os.write(write, traceback.format_exc().encode())
        finally:
            os._exit(0)
    os.close(write)
    return pid, result


def result_of(child: tuple[int, int]) -> str:
    pid, result = child
    with open(result, "rb", buffering=0) as pipe:
        answered = select.select([pipe], [], [], PATIENCE_SECONDS)[0]
        text = pipe.read(100_000).decode() if answered else "the child hangs"
    if not answered:
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return text


def test_after_a_fork_parent_and_child_go_on_with_connections_of_their_own(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    pid = pid_of(database)

    def child() -> int:
        its_pid = pid_of(database)
        database.close()
        gc.collect()
        return its_pid

    others = {int(result_of(fork(child))) for _ in range(3)}
    assert pid not in others and len(others) == 3
    assert pid_of(database) == pid
    assert our_warnings(caplog) == []


def test_a_child_is_not_stuck_by_what_its_parent_was_doing(database: Database) -> None:
    pool = database._source._pool
    conn = pool.getconn()
    release, locked = threading.Event(), threading.Event()

    def hold_the_lock() -> None:
        with pool._lock:
            locked.set()
            release.wait(PATIENCE_SECONDS)

    holder = in_thread(hold_the_lock)
    assert locked.wait(PATIENCE_SECONDS)
    child = fork(lambda: database.execute("select 'done'"))
    release.set()
    holder.result(PATIENCE_SECONDS)
    assert result_of(child) == "[('done',)]"
    with conn.cursor() as cursor:
        cursor.execute("select 1")
    pool.putconn(conn)


def test_a_child_that_is_forked_in_a_transaction_cannot_touch_it(database: Database) -> None:
    database.execute("create temporary table t (i int)")
    child: tuple[int, int] | None = None
    with database.transaction() as execute:
        execute("insert into t values (1)")

        def leave() -> str:
            try:
                execute("insert into t values (2)")
            except StoreUnavailableError:
                return "refused"
            return "let through"

        child = fork(leave)
        assert result_of(child) == "refused"
    assert database.execute("select i from t") == [(1,)]


def test_a_child_does_not_keep_the_sessions_of_a_killed_parent_alive(
    server_dsn: str, admin: Connection, application: str
) -> None:
    database = Database(server_dsn, application_name=application)
    wait, go_on = os.pipe()

    def parent() -> str:
        database.execute("select 1")

        def child() -> str:
            os.close(go_on)
            return os.read(wait, 1).decode()

        fork(child)
        os.kill(os.getpid(), signal.SIGKILL)
        return ""

    pid, result = fork(parent)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        wait_until(lambda: sessions(admin, application) == 0, "the killed process's session ends")
    finally:
        for descriptor in (result, wait, go_on):
            os.close(descriptor)
