"""The pool: waiting for a connection, dead ones, and the interface of psycopg2.pool."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import psycopg2
import psycopg2.extensions
import psycopg2.extras
import psycopg2.pool
import pytest
from pools import (
    PATIENCE_SECONDS,
    Connection,
    ask,
    in_thread,
    kill,
    our_warnings,
    pid_of,
    queued,
    sessions,
    states,
)
from psycopg2.extensions import make_dsn
from waiting import wait_until

import pgmemory.pool.connections
from pgmemory.errors import PgMemoryError
from pgmemory.pool import (
    ConnectionPool,
    Database,
    PoolClosedError,
    PoolTimeoutError,
    StoreError,
    StoreUnavailableError,
)


# --- Waiting for a connection -----------------------------------------------------------------------------------------
def test_a_caller_waits_and_then_gets_an_error_that_says_what_to_do(server_dsn: str, application: str) -> None:
    pool = ConnectionPool(server_dsn, max_connections=1, timeout_seconds=0.3, application_name=application)
    conn = pool.getconn()
    start = time.monotonic()
    message = r"host=.*timeout_seconds=0\.3.*max_connections=1 are in use.*Raise.*pool_stats.*pg_stat_activity"
    with pytest.raises(PoolTimeoutError, match=message) as caught:
        pool.getconn()
    assert 0.25 < time.monotonic() - start < 5
    assert isinstance(caught.value, (PgMemoryError, psycopg2.pool.PoolError))
    pool.putconn(conn)
    pool.putconn(pool.getconn())  # whoever gave up stands in nobody's way
    pool.closeall()


def test_with_no_time_to_wait_the_answer_comes_at_once(server_dsn: str, application: str) -> None:
    pool = ConnectionPool(server_dsn, max_connections=1, timeout_seconds=0, application_name=application)
    with closing(pool.getconn()), pytest.raises(PoolTimeoutError):
        pool.getconn()


def test_twenty_threads_never_open_more_than_max_connections(
    server_dsn: str, admin: Connection, application: str
) -> None:
    database = Database(server_dsn, max_connections=3, application_name=application)
    start = threading.Barrier(20)
    query = "select count(*) from pg_stat_activity where application_name = %(name)s"

    def work() -> int:
        start.wait()
        return max(database.execute(query, {"name": application})[0][0] for _ in range(10))

    with ThreadPoolExecutor(20) as threads:
        seen = [future.result() for future in [threads.submit(work) for _ in range(20)]]
    assert max(seen) == 3
    assert sessions(admin, application) == 3
    database.close()


def test_waiting_callers_are_served_in_order_of_arrival(server_dsn: str, application: str) -> None:
    pool = ConnectionPool(server_dsn, max_connections=1, application_name=application)
    conn = pool.getconn()
    served: list[int] = []

    def take(number: int) -> None:
        mine = pool.getconn()
        served.append(number)
        pool.putconn(mine)

    callers = []
    for number in range(5):
        callers.append(in_thread(take, number))
        queued(pool, number + 1)
    pool.putconn(conn)
    take(5)  # whoever comes when the others have waited already is last
    for caller in callers:
        caller.result(PATIENCE_SECONDS)
    assert served == [0, 1, 2, 3, 4, 5]
    pool.closeall()


def test_ctrl_c_while_waiting_leaves_the_queue(server_dsn: str, application: str) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    pool = ConnectionPool(server_dsn, max_connections=1, application_name=application)
    conn = pool.getconn()
    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            pool.getconn()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    pool.putconn(conn)
    assert pool.getconn() is conn
    conn.close()


def test_connections_are_in_autocommit_and_the_one_used_last_is_used_again_first(
    server_dsn: str, application: str
) -> None:
    pool = ConnectionPool(server_dsn, application_name=application)
    first, second = pool.getconn(), pool.getconn()
    assert first.autocommit and second.autocommit
    pool.putconn(second)
    pool.putconn(first)
    assert pool.getconn() is first
    assert pool.getconn() is second
    first.close()
    second.close()


def test_a_slow_connect_does_not_hold_up_others(
    server_dsn: str, application: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = ConnectionPool(server_dsn, max_connections=2, application_name=application)
    conn = pool.getconn()
    connect, connecting, go_on = psycopg2.connect, threading.Event(), threading.Event()

    def connect_slowly(dsn: str) -> Connection:
        connecting.set()
        assert go_on.wait(PATIENCE_SECONDS)
        return connect(dsn)

    monkeypatch.setattr(psycopg2, "connect", connect_slowly)
    slow = in_thread(pool.getconn)
    assert connecting.wait(PATIENCE_SECONDS)
    pool.putconn(conn)
    assert in_thread(pool.getconn).result(PATIENCE_SECONDS) is conn
    # The one being opened counts: there is no room for a third.
    third = in_thread(pool.getconn)
    queued(pool, 1)
    go_on.set()
    pool.putconn(slow.result(PATIENCE_SECONDS))
    assert third.result(PATIENCE_SECONDS) is slow.result()
    pool.putconn(conn)
    pool.putconn(third.result())
    pool.closeall()


def test_a_connection_that_opens_while_the_pool_is_closed_is_closed(
    server_dsn: str, application: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = ConnectionPool(server_dsn, application_name=application)
    connect, opened = psycopg2.connect, []

    def connect_as_the_pool_is_closed(dsn: str) -> Connection:
        pool.closeall()
        opened.append(connect(dsn))
        return opened[0]

    monkeypatch.setattr(psycopg2, "connect", connect_as_the_pool_is_closed)
    with pytest.raises(PoolClosedError):
        pool.getconn()
    assert opened[0].closed


@pytest.mark.parametrize("min_connections", [0, 1, 2])
def test_connections_above_the_minimum_are_closed_after_lying_idle(
    server_dsn: str, admin: Connection, application: str, min_connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = ConnectionPool(server_dsn, min_connections=min_connections, application_name=application)
    connections = [pool.getconn() for _ in range(4)]
    for conn in connections:
        pool.putconn(conn)
    assert sessions(admin, application) == 4  # none has lain there for long
    monkeypatch.setattr(pgmemory.pool.connections, "_IDLE_SECONDS", 0.0)
    pool.putconn(pool.getconn())
    expected = max(min_connections, 1)  # the one that came back just now has not lain idle at all
    wait_until(lambda: sessions(admin, application) == expected, f"{expected} connections are left")
    pool.closeall()


# --- The interface of psycopg2.pool -----------------------------------------------------------------------------------
def test_a_key_leads_to_the_connection_that_is_out_under_it(server_dsn: str, application: str) -> None:
    pool = ConnectionPool(server_dsn, application_name=application)
    conn = pool.getconn("a")
    assert pool.getconn("a") is conn
    other = pool.getconn("b")
    assert other is not conn
    assert pool.getconn() not in (conn, other)
    pool.putconn(conn, "a")
    assert pool.getconn("b") is other


def test_a_connection_of_another_origin_or_returned_twice_is_refused(server_dsn: str, application: str) -> None:
    pool = ConnectionPool(server_dsn, application_name=application)
    conn = pool.getconn()
    pool.putconn(conn)
    with pytest.raises(psycopg2.pool.PoolError, match="not out on loan"):
        pool.putconn(conn)
    with closing(psycopg2.connect(server_dsn)) as stranger, pytest.raises(psycopg2.pool.PoolError):
        pool.putconn(stranger)
    assert pool.getconn() is conn
    conn.close()


def test_a_connection_returned_to_be_closed_is_closed_and_makes_room(server_dsn: str, application: str) -> None:
    pool = ConnectionPool(server_dsn, max_connections=1, application_name=application)
    conn = pool.getconn()
    pool.putconn(conn, close=True)
    assert conn.closed
    other = pool.getconn()
    assert other is not conn
    other.close()
    pool.putconn(other)  # closed by the caller: replaced as well
    pool.putconn(pool.getconn())
    pool.closeall()


@pytest.mark.parametrize("autocommit", [True, False])
@pytest.mark.parametrize("statement", ["select 1", "select 1/0"])
def test_a_connection_returned_in_a_transaction_is_rolled_back(
    server_dsn: str, admin: Connection, application: str, autocommit: bool, statement: str
) -> None:
    pool = ConnectionPool(server_dsn, max_connections=1, application_name=application)
    conn = pool.getconn()
    conn.autocommit = autocommit
    with conn.cursor() as cursor:
        if autocommit:
            cursor.execute("begin")
        try:
            cursor.execute(statement)
        except psycopg2.DataError:
            pass
    pool.putconn(conn)
    assert states(admin, application) == "idle"
    conn = pool.getconn()
    assert conn.autocommit
    with conn.cursor() as cursor:
        cursor.execute("select 1")
    pool.putconn(conn)
    pool.closeall()


def test_closing_a_pool_closes_idle_connections_now_and_the_others_as_they_come_back(
    server_dsn: str, application: str
) -> None:
    pool = ConnectionPool(server_dsn, application_name=application)
    idle, in_use = pool.getconn(), pool.getconn()
    pool.putconn(idle)
    assert not pool.closed
    closing_it = in_thread(pool.closeall)
    wait_until(lambda: pool.closed and idle.closed, "the idle connection is closed")
    with in_use.cursor() as cursor:
        cursor.execute("select 1")
    assert not closing_it.done()
    pool.putconn(in_use)
    closing_it.result(PATIENCE_SECONDS)
    assert in_use.closed
    with pytest.raises(PoolClosedError, match="closed") as caught:
        pool.getconn()
    assert isinstance(caught.value, psycopg2.pool.PoolError)
    pool.closeall()  # once more does no harm


def test_closing_a_pool_wakes_those_who_wait(server_dsn: str, application: str) -> None:
    pool = ConnectionPool(server_dsn, max_connections=1, application_name=application)
    with closing(pool.getconn()):
        waiting = in_thread(pool.getconn)
        queued(pool, 1)
        pool.closeall(timeout_seconds=0)
        with pytest.raises(PoolClosedError):
            waiting.result(PATIENCE_SECONDS)


# --- Connections that die ---------------------------------------------------------------------------------------------
def test_a_dead_idle_connection_is_noticed_before_use(
    server_dsn: str, admin: Connection, application: str, caplog: pytest.LogCaptureFixture
) -> None:
    database = Database(server_dsn, max_connections=3, application_name=application)
    with database.transaction() as first, database.transaction() as second:
        killed = [execute("select pg_backend_pid()")[0][0] for execute in (first, second)]
    for pid in killed:
        kill(admin, pid)
    assert pid_of(database) not in killed
    (warning,) = our_warnings(caplog)  # one for both
    assert re.search("lost 2 idle connections to host=.* replaced", warning)
    assert pid_of(database) not in killed
    assert len(our_warnings(caplog)) == 1
    stats = database.stats()
    assert stats is not None and (stats.opened, stats.lost, stats.connections) == (3, 2, 1)
    database.close()


def test_a_connection_that_the_server_ended_for_lying_idle_is_replaced(
    server_dsn: str, admin: Connection, application: str, caplog: pytest.LogCaptureFixture
) -> None:
    if admin.server_version < 140000:
        pytest.skip("idle_session_timeout came with PostgreSQL 14")
    database = Database(make_dsn(server_dsn, options="-c idle_session_timeout=500ms"), application_name=application)
    database.execute("select 1")
    wait_until(lambda: sessions(admin, application) == 0, "the server ends the session")
    assert database.execute("select 1") == [(1,)]
    (warning,) = our_warnings(caplog)
    assert "lost 1 idle connection to" in warning
    database.close()


def test_statements_whose_connection_is_killed_run_again_on_another(
    database: Database, admin: Connection, application: str, caplog: pytest.LogCaptureFixture
) -> None:
    key = uuid.uuid4().int % 2**31
    ask(admin, "select pg_advisory_lock(%s)", key)
    running = in_thread(
        database.execute, "select pg_advisory_xact_lock(%(key)s); select pg_backend_pid()", {"key": key}
    )
    waiting = "select max(pid) from pg_stat_activity where application_name = %s and wait_event_type = 'Lock'"
    wait_until(lambda: ask(admin, waiting, application), "the statement waits for the lock")
    killed = ask(admin, waiting, application)
    kill(admin, killed)
    ask(admin, "select pg_advisory_unlock(%s)", key)
    ((pid,),) = running.result(PATIENCE_SECONDS)
    assert pid != killed
    (warning,) = our_warnings(caplog)
    assert re.search("^execute was done after 2 tries .* lost the connection to host=", warning)


def test_statements_that_kill_each_connection_end_in_an_error(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    lost = r"lost the connection to host=.* dbname=.* \(tried \d+ times in \d"
    with pytest.raises(StoreUnavailableError, match=lost) as caught:
        database.execute("select pg_terminate_backend(pg_backend_pid()), pg_sleep(20)")
    assert caught.value.connection_lost
    assert isinstance(caught.value, psycopg2.OperationalError)
    assert isinstance(caught.value.__cause__, psycopg2.OperationalError)
    assert our_warnings(caplog) == []  # the error says it
    assert database.execute("select 1") == [(1,)]


def test_a_transaction_whose_connection_is_killed_is_not_run_twice(database: Database) -> None:
    entered = []
    with pytest.raises(StoreUnavailableError) as caught, database.transaction() as execute:
        entered.append(1)
        execute("select pg_terminate_backend(pg_backend_pid()), pg_sleep(20)")
    assert caught.value.connection_lost
    assert entered == [1]
    assert database.execute("select 1") == [(1,)]


def test_a_connection_whose_socket_fails_is_closed_though_the_driver_thinks_it_open(database: Database) -> None:
    with pytest.raises(StoreUnavailableError), database.transaction() as execute:
        (conn,) = database._source._pool._in_use
        with open(os.devnull, "rb") as null:
            os.dup2(null.fileno(), conn.fileno())
        try:
            execute("select 1")
        finally:
            assert conn.closed
    assert database.execute("select 1") == [(1,)]


@pytest.mark.parametrize(("sqlstate", "runs"), [("40001", 3), ("40P01", 3), ("22012", 1)])
def test_conflicts_are_run_again_and_other_errors_are_not(database: Database, sqlstate: str, runs: int) -> None:
    # A sequence does not roll back: it counts the runs.
    database.execute("create temporary sequence runs")
    statements = f"""
        do $$ begin
            if nextval('runs') < 3 then raise exception using errcode = '{sqlstate}'; end if;
        end $$"""
    if runs == 1:
        with pytest.raises(StoreError) as caught:
            database.execute(statements)
        assert caught.value.sqlstate == sqlstate
    else:
        database.execute(statements)
    assert database.execute("select last_value from runs") == [(runs,)]


def test_a_conflict_that_never_ends_ends_in_its_error(database: Database, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(StoreError) as caught:
        database.execute("do $$ begin raise exception using errcode = '40001'; end $$")
    assert caught.value.sqlstate == "40001"
    assert our_warnings(caplog) == []
