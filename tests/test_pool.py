"""The pool and the database over it: waiting, dead connections, forks, transactions, secrets."""

from __future__ import annotations

import copy
import gc
import logging
import os
import pickle
import re
import select
import signal
import socket
import threading
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg2
import psycopg2.extensions
import psycopg2.extras
import psycopg2.pool
import pytest
import sqlalchemy
from fault_proxy import Fault, FaultProxy, Message
from hypothesis import assume, example, given
from hypothesis import strategies as st
from psycopg2.extensions import make_dsn
from psycopg2.pool import ThreadedConnectionPool
from waiting import wait_until

import pgmemory.pool.connections
from pgmemory.errors import ConfigurationError, PgMemoryError
from pgmemory.models import Operation
from pgmemory.pool import (
    ConnectionPool,
    Database,
    PoolClosedError,
    PoolTimeoutError,
    StoreError,
    StoreUnavailableError,
    deadlines,
    hygiene,
)
from pgmemory.pool.deadlines import connect_within
from pgmemory.pool.errors import could_not_connect

Connection = psycopg2.extensions.connection
Parameters = dict[str, str]
PATIENCE_SECONDS = 20.0


def ask(admin: Connection, statement: str, *parameters: Any) -> Any:
    """Return the first column of the first row."""
    with admin.cursor() as cursor:
        cursor.execute(statement, parameters)
        return cursor.fetchall()[0][0]


@pytest.fixture
def application(admin: Connection) -> Iterator[str]:
    """An application name of the test's own, to tell its sessions in pg_stat_activity; none may be left behind."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    yield name
    gc.collect()
    wait_until(lambda: sessions(admin, name) == 0, "the test's sessions end")


@pytest.fixture
def database(server_dsn: str, application: str) -> Iterator[Database]:
    """A database that has one connection at most."""
    database = Database(server_dsn, max_connections=1, retry_seconds=0.5, application_name=application)
    yield database
    database.close()


@pytest.fixture
def parameters(server_dsn: str) -> Parameters:
    """The server's DSN in its parts."""
    return psycopg2.extensions.parse_dsn(server_dsn)


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


# --- Waiting for a connection ----------------------------------------------------------------------------------------


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


# --- The interface of psycopg2.pool ----------------------------------------------------------------------------------


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


# --- Connections that die --------------------------------------------------------------------------------------------


def our_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("pgmemory") and record.levelno >= logging.WARNING
    ]


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


# --- Answers that do not come ----------------------------------------------------------------------------------------


def overdue(database: Database, admin: Connection) -> StoreUnavailableError:
    """Run a statement that takes too long, and end what the server goes on with."""
    with pytest.raises(StoreUnavailableError, match=r"no answer from host=.* within 0\.3 s") as caught:
        database.execute("select pg_sleep(60)")
    sleeping = "select max(pid) from pg_stat_activity where query = 'select pg_sleep(60)' and pid <> pg_backend_pid()"
    kill(admin, ask(admin, sleeping))
    return caught.value


def test_an_answer_that_does_not_come_in_time_is_an_error(
    server_dsn: str, admin: Connection, application: str
) -> None:
    database = Database(server_dsn, query_timeout_seconds=0.3, retry_seconds=0, application_name=application)
    began = time.monotonic()
    error = overdue(database, admin)
    assert 0.25 < time.monotonic() - began < 10
    assert error.connection_lost and isinstance(error, psycopg2.OperationalError)
    # Not what comes in time, however often and beside however many others.
    with ThreadPoolExecutor(5) as executor:
        assert list(executor.map(lambda _: database.execute("select pg_sleep(0.1)"), range(20))) == [[("",)]] * 20
    stats = database.stats()
    assert stats is not None and stats.lost == 1
    database.close()


def test_an_answer_that_does_not_come_in_time_is_asked_for_again_on_another_connection(
    server_dsn: str, admin: Connection, application: str, caplog: pytest.LogCaptureFixture
) -> None:
    database = Database(server_dsn, query_timeout_seconds=0.3, application_name=application)
    database.execute("select 1")
    # Only in the first session.
    first = pid_of(database)
    statement = "select case when pg_backend_pid() = %(pid)s then pg_sleep(60) end, pg_backend_pid()"
    ((_, second),) = database.execute(statement, {"pid": first})
    assert second != first
    kill(admin, first)
    (warning,) = our_warnings(caplog)
    assert "no answer from" in warning
    database.close()


def test_connections_to_a_server_that_does_not_answer_are_all_replaced(
    server_dsn: str, admin: Connection, application: str
) -> None:
    database = Database(server_dsn, query_timeout_seconds=0.3, retry_seconds=0, application_name=application)
    who = "select pg_backend_pid()"
    with database.transaction() as first, database.transaction() as second:  # two are idle then
        old = {execute(who)[0][0] for execute in (first, second)}
    with database.transaction() as lent:
        old |= {lent(who)[0][0]}
        overdue(database, admin)
        assert database.stats().idle == 0  # type: ignore[union-attr]
    with database.transaction() as first, database.transaction() as second:
        assert not old & {execute(who)[0][0] for execute in (first, second)}
    database.close()


def test_a_statement_of_a_transaction_has_a_deadline_too(
    server_dsn: str, admin: Connection, application: str
) -> None:
    database = Database(server_dsn, application_name=application)
    with pytest.raises(StoreUnavailableError, match=r"within 0\.3 s"):
        with database.transaction(query_timeout_seconds=0.3) as execute:
            ((pid,),) = execute("select pg_backend_pid()")
            execute("select pg_sleep(60)")
    kill(admin, pid)
    database.close()


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), 2_500_000, True, "1", None])
def test_a_query_timeout_that_makes_no_sense_is_refused(seconds: Any) -> None:
    with pytest.raises(ConfigurationError, match="query_timeout_seconds must be a number of seconds, above 0"):
        Database("dbname=x", query_timeout_seconds=seconds)


@pytest.mark.parametrize("seconds", [-1, float("nan"), True, "1", None])
def test_a_retry_time_that_makes_no_sense_is_refused(seconds: Any) -> None:
    with pytest.raises(ConfigurationError, match="retry_seconds must be a number of seconds, 0 or more"):
        Database("dbname=x", retry_seconds=seconds)


def test_connecting_has_a_deadline_where_libpq_has_none(server_dsn: str, application: str) -> None:
    """psycopg2 sets DateStyle while it connects, where the server's is not ISO, and waits for that without a limit."""
    dsn = make_dsn(server_dsn, connect_timeout=2, options="-c datestyle=German", application_name=application)
    with FaultProxy(dsn) as proxy:
        database = Database(proxy.dsn, retry_seconds=0)
        database.execute("select 1")
        asks = proxy.messages.index(Message("client", "Q"))
        database.close()
        wait_until(lambda: proxy.messages[-1] == ("client", "X"), "the connection is closed")
        proxy.arm(Fault(asks, "before", "stall"))
        database = Database(proxy.dsn, retry_seconds=0)
        database._source._pool._connect_seconds = 2.5
        connecting = in_thread(database.execute, "select 1")
        with pytest.raises(StoreUnavailableError, match="could not connect.*no connection within 2.5 s"):
            connecting.result(PATIENCE_SECONDS)
        assert proxy.fired
        database.close()


@pytest.mark.parametrize(
    ("dsn", "seconds"),
    [
        ("host=a", 25),
        ("host=a,b connect_timeout=3", 17),
        ("host=a connect_timeout=1", 9),
        ("host=a connect_timeout=0", 25),
        ("hostaddr=10.0.0.1,10.0.0.2,10.0.0.3 connect_timeout=5", 35),
    ],
)
def test_connecting_is_given_up_after_the_time_of_all_hosts(dsn: str, seconds: int) -> None:
    assert ConnectionPool(dsn)._connect_seconds == seconds


def test_a_connection_that_comes_too_late_is_closed(server_dsn: str, admin: Connection, application: str) -> None:
    with FaultProxy(make_dsn(server_dsn, application_name=application)) as proxy:
        proxy.arm(None)
        with closing(psycopg2.connect(proxy.dsn)):
            pass
        held = threading.Event()
        connect = psycopg2.connect

        def connect_late(dsn: str) -> Connection:
            held.wait(PATIENCE_SECONDS)
            return connect(dsn)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(psycopg2, "connect", connect_late)
            with pytest.raises(psycopg2.OperationalError, match="no connection within 0.1 s"):
                connect_within(proxy.dsn, 0.1)
            held.set()
        wait_until(lambda: len(proxy.messages) > 5 and proxy.messages[-1] == ("client", "X"), "it is closed")


def test_a_connection_of_the_applications_that_stalls_as_it_is_given_back_is_let_go(server_dsn: str) -> None:
    """Given an isolation level, psycopg2 asks the server as autocommit is switched off again."""
    with FaultProxy(server_dsn) as proxy:
        pool = ThreadedConnectionPool(1, 2, proxy.dsn)
        conn = pool.getconn()
        conn.set_session(isolation_level="REPEATABLE READ")
        pool.putconn(conn)
        database = Database(pool, query_timeout_seconds=0.5)
        proxy.arm(None)
        database.execute("select 1")
        asks = [number for number, message in enumerate(proxy.messages) if message == ("client", "Q")]
        assert len(asks) > 1, "giving it back sends something"
        proxy.arm(Fault(asks[-1], "before", "stall"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hygiene, "_SETTLE_SECONDS", 0.5)
            assert in_thread(database.execute, "select 1").result(PATIENCE_SECONDS) == [(1,)]
        assert proxy.fired and conn.closed
        pool.closeall()


def test_where_no_thread_can_be_started_the_next_call_has_its_deadline_again(
    server_dsn: str, admin: Connection, application: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "_watchdog", deadlines._Watchdog())
    database = Database(server_dsn, query_timeout_seconds=0.3, retry_seconds=0, application_name=application)
    with database.transaction():  # connected
        pass
    monkeypatch.setattr(deadlines, "_watchdog", deadlines._Watchdog())

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError):
            database.execute("select 1")
    overdue(database, admin)
    database.close()


def test_replacing_all_connections_never_passes_the_limit_in_the_servers_eyes(
    server_dsn: str, admin: Connection, application: str
) -> None:
    database = Database(server_dsn, max_connections=3, application_name=application)
    over = threading.Event()

    def work() -> int:
        done = 0
        while not over.is_set():
            database.execute("select 1")
            done += 1
        return done

    most = 0
    with ThreadPoolExecutor(9) as executor:
        workers = [executor.submit(work) for _ in range(8)]
        for _ in range(40):
            database._source.drain()
            for _ in range(5):
                most = max(most, sessions(admin, application))
        over.set()
        assert all(worker.result(PATIENCE_SECONDS) for worker in workers)
    assert 1 <= most <= 3
    database.close()


def test_closing_a_pool_cuts_what_does_not_end_and_says_so(
    server_dsn: str, admin: Connection, application: str, caplog: pytest.LogCaptureFixture
) -> None:
    database = Database(server_dsn, application_name=application)
    sleeping = in_thread(database.execute, "select pg_sleep(60)")
    statement = "select max(pid) from pg_stat_activity where application_name = %s and wait_event = 'PgSleep'"
    wait_until(lambda: ask(admin, statement, application), "the statement runs")
    pid = ask(admin, statement, application)
    database.close(timeout_seconds=0.1)
    with pytest.raises(PoolClosedError):
        sleeping.result(PATIENCE_SECONDS)
    kill(admin, pid)
    (warning,) = our_warnings(caplog)
    assert re.search("cut 1 .* still in use after 0.1 s", warning)


# --- Where no connection can be opened -------------------------------------------------------------------------------


@pytest.fixture
def closed_port() -> int:
    """A port on which nothing listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_an_unreachable_server_is_named_in_the_error_and_nothing_is_printed(
    closed_port: int, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    database = Database(f"postgresql://me@127.0.0.1:{closed_port}/support", retry_seconds=0)
    with pytest.raises(StoreUnavailableError, match="Connection refused") as caught:
        database.execute("select 1")
    assert f"host=127.0.0.1 port={closed_port} dbname=support" in str(caught.value)
    assert isinstance(caught.value, (PgMemoryError, psycopg2.OperationalError))
    assert isinstance(caught.value.__cause__, psycopg2.OperationalError)
    assert not caught.value.connection_lost
    del database, caught
    gc.collect()
    assert capfd.readouterr() == ("", "")
    assert our_warnings(caplog) == []  # not tried again


def test_what_waiting_cannot_cure_fails_at_once(server_dsn: str, parameters: Parameters, application: str) -> None:
    told: list[Operation] = []
    wrong = [{"dbname": f"no_{application}"}, {"user": f"no_{application}"}]
    for changed in wrong:
        database = Database(make_dsn(**{**parameters, **changed}), on_operation=told.append)
        with pytest.raises(StoreUnavailableError, match=f"could not connect to host=.*no_{application}"):
            database.execute("select 1")
    assert [operation.retries for operation in told] == [0, 0]


def test_a_server_that_is_away_is_tried_again_with_pauses_and_the_error_says_how_often(closed_port: int) -> None:
    told: list[Operation] = []
    dsn = f"postgresql://me:{SECRET}@127.0.0.1:{closed_port}/support"
    database = Database(dsn, retry_seconds=0.5, on_operation=told.append)
    pattern = r"could not connect.* \(tried \d+ times in \d\.\d s\)$"
    with pytest.raises(StoreUnavailableError, match=pattern) as caught:
        database.execute("select 1")
    (operation,) = told
    assert operation.retries >= 2 and operation.seconds >= 0.5
    assert f"(tried {operation.retries + 1} times" in str(caught.value)
    assert SECRET not in everything_said_by(caught.value)


SERVER_AT = 'connection to server at "127.0.0.1", port 5432 failed: '


@pytest.mark.parametrize(
    ("text", "may_pass"),
    [
        ("Connection refused\n\tIs the server running on that host and accepting TCP/IP connections?", True),
        ("FATAL:  the database system is starting up", True),
        ("FATAL:  the database system is shutting down", True),
        ("FATAL:  sorry, too many clients already", True),
        ("timeout expired", True),
        ("session is read-only", True),
        ("FATAL:  der Text eines Servers in einer anderen Sprache", True),
        ('FATAL:  password authentication failed for user "me"', False),
        ('FATAL:  database "support" does not exist', False),
        ('FATAL:  role "me" does not exist', False),
        ('FATAL:  no pg_hba.conf entry for host "10.0.0.1", user "me", database "support", no encryption', False),
        ("fe_sendauth: no password supplied", False),
        ("FATAL:  SASL authentication failed", False),
        ('FATAL:  Peer authentication failed for user "me"', False),
        ('server certificate for "a" does not match host name "b"', False),
        ("server does not support SSL, but SSL was required", False),
    ],
)
def test_failures_to_connect_that_may_pass_are_told_from_others(text: str, may_pass: bool) -> None:
    def error(*texts: str) -> StoreUnavailableError:
        return could_not_connect("host=a", psycopg2.OperationalError("\n".join(SERVER_AT + text for text in texts)))

    assert error(text).may_pass == may_pass
    # Of several hosts one is enough that may be right in a moment.
    assert error(text, "Connection refused").may_pass
    assert error(text, 'FATAL:  role "me" does not exist').may_pass == may_pass


def test_a_failed_connect_makes_room_for_the_next(closed_port: int) -> None:
    pool = ConnectionPool(f"host=127.0.0.1 port={closed_port}", max_connections=1, timeout_seconds=5)
    for _ in range(3):
        with pytest.raises(StoreUnavailableError):
            pool.getconn()


def test_a_failed_connect_wakes_the_next_who_waits() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENCE_SECONDS)
        port = listener.getsockname()[1]
        dsn = f"host=127.0.0.1 port={port} sslmode=disable gssencmode=disable"
        pool = ConnectionPool(dsn, max_connections=1, timeout_seconds=PATIENCE_SECONDS)
        first = in_thread(pool.getconn)
        connecting, _ = listener.accept()
        others = [in_thread(pool.getconn) for _ in range(2)]
        queued(pool, 2)
        connecting.close()
        for _ in others:
            listener.accept()[0].close()
        for caller in [first, *others]:
            with pytest.raises(StoreUnavailableError):
                caller.result(PATIENCE_SECONDS)


def test_building_a_pool_costs_no_connection_until_it_is_used(
    server_dsn: str, admin: Connection, application: str
) -> None:
    databases = [Database(server_dsn, min_connections=2, application_name=application) for _ in range(200)]
    assert sessions(admin, application) == 0
    databases[7].execute("select 1")
    assert sessions(admin, application) == 1


@pytest.mark.parametrize("made_by", [ConnectionPool, Database])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_connections": 0}, "max_connections must be .* not 0"),
        ({"max_connections": True}, "max_connections must be .* not True"),
        ({"max_connections": 2.0}, "max_connections must be .* not 2.0"),
        ({"max_connections": "3"}, "max_connections must be .* not '3'"),
        ({"min_connections": -1}, "min_connections must be .* not -1"),
        ({"min_connections": False}, "min_connections must be .* not False"),
        ({"min_connections": 3, "max_connections": 2}, "min_connections=3 is more than max_connections=2"),
        ({"timeout_seconds": -0.1}, "timeout_seconds must be .* not -0.1"),
        ({"timeout_seconds": float("nan")}, "timeout_seconds must be .* not nan"),
        ({"timeout_seconds": float("inf")}, "timeout_seconds must be .* not inf"),
        ({"timeout_seconds": True}, "timeout_seconds must be .* not True"),
        ({"timeout_seconds": None}, "timeout_seconds must be .* not None"),
    ],
)
def test_limits_that_make_no_sense_are_refused(made_by: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        made_by("postgresql://host/db", **arguments)


# --- Statements and transactions -------------------------------------------------------------------------------------


def test_rows_are_those_of_the_last_statement(database: Database) -> None:
    assert database.execute("select 1; select %(a)s, '100%%' union all select 'y', 'z'", {"a": "x"}) == [
        ("x", "100%"),
        ("y", "z"),
    ]
    assert database.execute("select '100%'") == [("100%",)]
    assert database.execute("create temporary table t (i int); insert into t values (1)") == []
    assert database.execute("select i from t where i = 2") == []


def test_several_statements_are_one_transaction(database: Database) -> None:
    database.execute("create temporary table t (i int)")
    with pytest.raises(StoreError) as caught:
        database.execute("insert into t values (1); select 1/0; insert into t values (2)")
    assert caught.value.sqlstate == "22012"
    assert database.execute("select count(*) from t") == [(0,)]
    ((first,), (second,)) = database.execute(
        "create temporary table ids as select txid_current() as id; "
        "insert into ids select txid_current(); select id from ids"
    )
    assert first == second


def test_a_failed_statement_does_not_spoil_the_next(database: Database, admin: Connection, application: str) -> None:
    for statements in ("select 1/0", "begin; select 1/0", "begin; select 1", "no sql", "select %(missing)s"):
        try:
            database.execute(statements, {})
        except (StoreError, KeyError):
            pass
        assert states(admin, application) in ("idle", "")
        assert database.execute("select 1") == [(1,)]


def test_an_error_tells_the_sqlstate_and_the_constraint(database: Database) -> None:
    database.execute("create temporary table t (i int constraint t_key primary key)")
    with pytest.raises(StoreError, match=r"duplicate key .*\(SQLSTATE 23505\)") as caught:
        database.execute("insert into t values (1); insert into t values (1)")
    assert (caught.value.sqlstate, caught.value.constraint_name) == ("23505", "t_key")
    assert caught.value.pgcode == "23505"
    assert isinstance(caught.value, psycopg2.DatabaseError)
    assert isinstance(caught.value.__cause__, psycopg2.errors.UniqueViolation)
    assert database.execute("select count(*) from t") == [(0,)]


def test_an_error_without_sqlstate_is_translated_too(database: Database) -> None:
    with pytest.raises(StoreError, match="can't adapt type 'object'") as caught:
        database.execute("select %(a)s", {"a": object()})
    assert caught.value.sqlstate is None
    assert isinstance(caught.value.__cause__, psycopg2.ProgrammingError)


@pytest.mark.parametrize("kind", [StoreError, StoreUnavailableError, PoolTimeoutError, PoolClosedError])
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_errors_can_be_copied_and_pickled(
    kind: type[StoreError], duplicate: Callable[[StoreError], StoreError]
) -> None:
    error = kind("text", sqlstate="23505")
    error.constraint_name = "t_key"
    other = duplicate(error)
    assert type(other) is kind
    assert str(other) == "text"
    assert vars(other) == vars(error)
    assert (other.sqlstate, other.pgcode, other.constraint_name) == ("23505", "23505", "t_key")


def test_a_transaction_is_committed_at_the_end(database: Database, admin: Connection, application: str) -> None:
    database.execute("create temporary table t (i int)")
    with database.transaction() as execute:
        execute("insert into t values (%(i)s)", {"i": 1})
        assert execute("insert into t values (2); select count(*) from t") == [(2,)]
        assert states(admin, application) == "idle in transaction"
    assert states(admin, application) == "idle"
    assert database.execute("select count(*) from t") == [(2,)]


@pytest.mark.parametrize("exception", [ValueError, KeyboardInterrupt, psycopg2.DataError])
def test_a_transaction_is_rolled_back_on_any_exception(
    database: Database, admin: Connection, application: str, exception: type[BaseException]
) -> None:
    database.execute("create temporary table t (i int)")
    with pytest.raises(exception), database.transaction() as execute:
        execute("insert into t values (1)")
        raise exception
    assert states(admin, application) == "idle"
    assert database.execute("select count(*) from t") == [(0,)]


def test_an_error_at_commit_is_translated(database: Database) -> None:
    database.execute("create temporary table t (i int constraint t_key unique deferrable initially deferred)")
    with pytest.raises(StoreError) as caught, database.transaction() as execute:
        execute("insert into t values (1), (1)")
    assert caught.value.constraint_name == "t_key"
    assert database.execute("select count(*) from t") == [(0,)]


def test_no_transaction_stays_open_after_reading(database: Database, admin: Connection, application: str) -> None:
    database.execute("select 1")
    assert states(admin, application) == "idle"


def test_a_closed_database_says_so(database: Database) -> None:
    database.execute("select 1")
    database.close()
    with pytest.raises(PoolClosedError):
        database.execute("select 1")


# --- DSNs ------------------------------------------------------------------------------------------------------------


def url(parameters: Parameters, scheme: str = "postgresql", user: str = "", password: str = "") -> str:
    """Return the server's URL, its host and port among the options, where the path of a socket needs no escapes."""
    user, password = user or quote(parameters.get("user", "")), password or quote(parameters.get("password", ""), "")
    rest = parameters.keys() - {"user", "password", "dbname"}
    options = "&".join(f"{name}={quote(parameters[name])}" for name in rest)
    return f"{scheme}://{user}:{password}@/{quote(parameters['dbname'])}?{options}"


@pytest.mark.parametrize(
    "scheme", ["postgresql", "postgres", "postgresql+psycopg2", "postgresql+psycopg", "postgresql+asyncpg"]
)
def test_urls_of_each_scheme_reach_the_server(parameters: Parameters, scheme: str) -> None:
    parameters.setdefault("user", "postgres")
    parameters.setdefault("dbname", "postgres")
    with closing(Database(url(parameters, scheme))) as database:
        assert database.execute("select current_database()::text") == [(parameters["dbname"],)]


def test_libpq_key_value_form_reaches_the_server(parameters: Parameters) -> None:
    with closing(Database(psycopg2.extensions.make_dsn(**parameters))) as database:
        assert database.execute("select 1") == [(1,)]


def test_database_url_is_used_where_no_dsn_is_given(server_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", server_dsn + "\n")
    with closing(Database()) as database:
        assert database.execute("select 1") == [(1,)]


@pytest.mark.parametrize("value", [None, ""])
def test_without_dsn_and_database_url_the_error_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("DATABASE_URL", raising=False)
    if value is not None:
        monkeypatch.setenv("DATABASE_URL", value)
    with pytest.raises(ConfigurationError, match="DATABASE_URL is not set or empty"):
        Database()


PASSWORDS = [
    "p@ss",
    "a@b@c",
    "#1",
    "a/b",
    "a?b",
    "x?y=1",
    "a:b",
    "100%",
    "%zz",
    "[x]",
    "a b",
    "pässwörd",
    "'\"\\",
    "+&=",
]


@pytest.mark.parametrize("password", PASSWORDS)
def test_passwords_with_special_characters_reach_the_server(
    admin: Connection, parameters: Parameters, password: str
) -> None:
    role = f"role_{uuid.uuid4().hex[:12]}"
    parameters.setdefault("dbname", "postgres")
    with admin.cursor() as cursor:
        cursor.execute(f"create role {role} login password %s", (password,))
    try:
        for written in (password, quote(password, safe="")):
            pool = ConnectionPool(url(parameters, "postgresql+psycopg2", role, written))
            conn = pool.getconn()
            assert (conn.info.user, conn.info.password) == (role, password)
            pool.putconn(conn)
            pool.closeall()
    finally:
        with admin.cursor() as cursor:
            cursor.execute(f"drop role {role}")


def read(dsn: str) -> Parameters:
    """Return what a DSN is understood to say."""
    return psycopg2.extensions.parse_dsn(ConnectionPool(dsn)._dsn)


# No control characters, which no password file or form carries, and no surrogates, which UTF-8 lacks.
TEXTS = st.text(st.characters(exclude_categories=("Cc", "Cs")))


@given(user=TEXTS.filter(bool), password=TEXTS.filter(bool), dbname=TEXTS.filter(bool))
def test_an_escaped_url_is_read_exactly(user: str, password: str, dbname: str) -> None:
    assume("password" not in user + dbname and "://" not in user + dbname)
    parts = [quote(text, safe="") for text in (user, password, dbname)]
    found = read("postgresql://{}:{}@host:5433/{}?sslmode=disable".format(*parts))
    assert [found.get(name) for name in ("user", "password", "dbname")] == [user, password, dbname]
    assert (found["host"], found["port"], found["sslmode"]) == ("host", "5433", "disable")


@given(st.text("ab1@#/:?[]=&+, é", min_size=1))
@example("1?a=b")
@example("a@b")
def test_an_unescaped_password_is_read_as_all_up_to_the_last_at_sign(password: str) -> None:
    assume(not ("@" in password and "?" in password))  # could be the end of a well-formed URL
    found = read(f"postgresql://user:{password}@host:5433/db")
    assert (found["user"], found["password"], found["host"]) == ("user", password, "host")


@pytest.mark.parametrize(
    ("dsn", "expected"),
    [
        ("postgresql://", {}),
        ("postgresql://me@h", {"user": "me", "host": "h"}),
        ("postgresql://h/db?application_name=x", {"host": "h", "dbname": "db", "application_name": "x"}),
        ("postgresql://me@server:pw@h/db", {"user": "me@server", "password": "pw", "host": "h"}),
        ("postgresql://me:pw@[::1]:5433/db", {"host": "::1", "port": "5433"}),
        ("postgresql://me@h1:1,h2/db?target_session_attrs=any", {"host": "h1,h2", "port": "1,"}),
        ("postgresql://%2Fvar%2Frun/db", {"host": "/var/run"}),
        ("postgresql://me:pw@/db?host=/var/run", {"host": "/var/run", "password": "pw"}),
        ("postgresql://me:pw@h/db?application_name=a@b", {"host": "h", "application_name": "a@b"}),
        ("postgresql://h/db?ssl=true", {"sslmode": "require"}),
        ("  host=h password='a b' ", {"host": "h", "password": "a b"}),
    ],
)
def test_a_dsn_is_understood(dsn: str, expected: Parameters) -> None:
    found = read(dsn)
    assert {name: found.get(name) for name in expected} == expected


def test_time_limits_are_set_only_where_the_dsn_does_not_set_them() -> None:
    found = read("postgresql://host/db?connect_timeout=3&application_name=theirs&client_encoding=LATIN1")
    assert found == {
        "host": "host",
        "dbname": "db",
        "application_name": "theirs",
        "client_encoding": "LATIN1",
        "connect_timeout": "3",
        "keepalives": "1",
        "keepalives_idle": "10",
        "keepalives_interval": "3",
        "keepalives_count": "3",
        "tcp_user_timeout": "15000",
    }
    found = read("host=host tcp_user_timeout=0 keepalives=0")
    assert (found["tcp_user_timeout"], found["keepalives"]) == ("0", "0")
    assert (found["connect_timeout"], found["application_name"]) == ("10", "pgmemory")
    assert found["client_encoding"] == "UTF8"


# --- Secrets ---------------------------------------------------------------------------------------------------------

SECRET = "t0p-s3cr3t"


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


@pytest.mark.parametrize(
    "dsn",
    [
        f"postgresql://me:{SECRET}@127.0.0.1:PORT/db",
        f"postgresql+psycopg2://me:@{SECRET}@127.0.0.1:PORT/db",
        f"postgresql://me:/{SECRET}@127.0.0.1:PORT/db",
        f"host=127.0.0.1 port=PORT dbname=db user=me password={SECRET}",
    ],
)
def test_a_password_is_never_shown_when_connecting_fails(
    dsn: str, closed_port: int, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    database = Database(dsn.replace("PORT", str(closed_port)), retry_seconds=0)
    with pytest.raises(StoreUnavailableError) as caught:
        database.execute("select 1")
    said = everything_said_by(caught.value)
    assert "127.0.0.1" in said and "def execute" not in said
    shown = [repr(database), str(database), repr(database._source._pool), database.address, caplog.text]
    shown += capfd.readouterr()
    assert SECRET not in said + "".join(shown)
    assert database.address == f"host=127.0.0.1 port={closed_port} dbname=db"


@pytest.mark.parametrize(
    "dsn",
    [
        SECRET,
        f"postgresql://me:{SECRET}",
        f"postgresql://me:1{SECRET}@host:port/db",
        f"postgresql://me:{SECRET}@host/db?pgbouncer=true",
        f"postgresql://me:{SECRET}%FF@host/db",
        f"postgresql://me:1?x={SECRET}@host/db?y=1",
        f"mysql://me:{SECRET}@host/db",
        f"jdbc:postgresql://host/db?password={SECRET}",
        f"host=host password=top {SECRET}",
        f"host=host password='{SECRET}",
        f"host=host port=5432password={SECRET}",
        f"host=host port={SECRET}",
        f"host=host sslmode=requirepassword={SECRET}",
        f"dbname=postgresql://me:{SECRET}@host/db",
        f"host=host password={SECRET}\0x",
        f"host=host password={SECRET}\udc80",
        "",
        " ",
    ],
)
def test_a_dsn_that_cannot_be_read_is_never_quoted(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="the DSN cannot be read: give postgresql://") as caught:
        Database(dsn)
    assert SECRET not in str(caught.value) + repr(caught.value)
    assert caught.value.__cause__ is caught.value.__context__ is None


def test_a_bad_database_url_is_named_and_not_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", f"postgresql://me:{SECRET}")
    with pytest.raises(ConfigurationError, match=r"\$DATABASE_URL cannot be read") as caught:
        Database()
    assert SECRET not in str(caught.value)


def test_a_password_is_not_logged_when_a_connection_is_healed(
    parameters: Parameters, admin: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    database = Database(psycopg2.extensions.make_dsn(**{"password": SECRET, **parameters}), retry_seconds=0.5)
    kill(admin, pid_of(database))
    database.execute("select 1")
    with pytest.raises(StoreUnavailableError) as caught:
        database.execute("select pg_terminate_backend(pg_backend_pid()), pg_sleep(20)")
    assert "lost the connection" in str(caught.value) and "lost 1 idle connection" in caplog.text
    assert SECRET not in caplog.text + everything_said_by(caught.value)
    database.close()


# --- Copies and forks ------------------------------------------------------------------------------------------------


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


def hold_all(pool: ConnectionPool) -> None:
    connections = []
    while True:
        connections.append(pool.getconn())


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


# --- Pools and engines of the app's own ------------------------------------------------------------------------------


@contextmanager
def threaded_pool(
    dsn: str, application: str, *, least: int = 1, most: int = 1, **options: Any
) -> Iterator[psycopg2.pool.ThreadedConnectionPool]:
    pool = psycopg2.pool.ThreadedConnectionPool(least, most, dsn, application_name=application, **options)
    yield pool
    if not pool.closed:
        pool.closeall()


def test_a_given_pool_is_used_and_left_open_and_as_it_was(server_dsn: str, admin: Connection, application: str) -> None:
    options = {"cursor_factory": psycopg2.extras.RealDictCursor}
    with threaded_pool(server_dsn, application, **options) as pool:
        conn = pool.getconn()
        with conn.cursor() as cursor:
            cursor.execute("create temporary table t (i int); insert into t values (1)")
            conn.commit()
            cursor.execute("insert into t values (2)")  # left open
        pool._pool.append(conn)  # as a careless pool would take it back
        pool._used.clear()
        database = Database(pool, max_connections=7)
        assert database.max_connections == 1
        assert database.execute("insert into t values (3); select i from t order by i") == [(1,), (3,)]
        assert states(admin, application) == "idle"
        with database.transaction() as execute:
            execute("insert into t values (4)")
        database.close()
        assert not pool.closed
        conn = pool.getconn()
        assert not conn.autocommit
        with conn.cursor() as cursor:
            cursor.execute("select count(*) as n from t")
            assert cursor.fetchall() == [{"n": 3}]
        pool.putconn(conn)
        assert sessions(admin, application) == 1


@pytest.mark.parametrize("kind", ["Dict", "RealDict", "NamedTuple"])
def test_rows_are_tuples_whatever_rows_the_app_has_its_connections_make(
    server_dsn: str, application: str, kind: str
) -> None:
    for option, name in (("cursor_factory", f"{kind}Cursor"), ("connection_factory", f"{kind}Connection")):
        with threaded_pool(server_dsn, application, **{option: getattr(psycopg2.extras, name)}) as pool:
            (row,) = Database(pool).execute("select 1 as a, 2 as b")
            assert (type(row), row) == (tuple, (1, 2))


def test_an_app_that_watches_its_cursors_sees_our_statements(server_dsn: str, application: str) -> None:
    seen = []

    class WatchedCursor(psycopg2.extensions.cursor):
        def execute(self, query: Any, vars: Any = None) -> None:
            seen.append(query)
            super().execute(query, vars)

    with threaded_pool(server_dsn, application, cursor_factory=WatchedCursor) as pool:
        Database(pool).execute("select 1")
    assert seen == ["select 1"]


def test_a_given_connection_keeps_its_autocommit(server_dsn: str, application: str) -> None:
    with threaded_pool(server_dsn, application) as pool:
        conn = pool.getconn()
        conn.autocommit = True
        pool.putconn(conn)
        with Database(pool).transaction() as execute:
            execute("select 1")
        assert pool.getconn().autocommit


def test_an_exhausted_given_pool_is_waited_for(server_dsn: str, application: str) -> None:
    with threaded_pool(server_dsn, application) as pool:
        conn = pool.getconn()
        with pytest.raises(PoolTimeoutError, match=r"timeout_seconds=0\.2.*max_connections=1"):
            Database(pool, timeout_seconds=0.2).execute("select 1")
        waiting = in_thread(Database(pool).execute, "select 1")
        assert not waiting.done()
        pool.putconn(conn)
        assert waiting.result(PATIENCE_SECONDS) == [(1,)]


def test_dead_connections_of_a_given_pool_are_replaced(
    server_dsn: str, admin: Connection, application: str, caplog: pytest.LogCaptureFixture
) -> None:
    with threaded_pool(server_dsn, application, least=8, most=8) as pool:
        query = "select pid from pg_stat_activity where application_name = %s"
        while sessions(admin, application):
            kill(admin, ask(admin, query, application))
        assert Database(pool).execute("select 1") == [(1,)]
        (warning,) = our_warnings(caplog)
        assert "lost 8 idle connections to the given ThreadedConnectionPool" in warning
        with pytest.raises(StoreUnavailableError):
            Database(pool, retry_seconds=0.5).execute("select pg_terminate_backend(pg_backend_pid()), pg_sleep(20)")
        assert Database(pool).execute("select 1") == [(1,)]


def test_a_given_pool_that_is_closed_says_so(server_dsn: str, application: str) -> None:
    with threaded_pool(server_dsn, application) as pool:
        database = Database(pool)
        with pytest.raises(ZeroDivisionError), database.transaction():
            pool.closeall()
            raise ZeroDivisionError  # not hidden by the failure to give the connection back
        with pytest.raises(PoolClosedError):
            database.execute("select 1")


def test_a_given_pool_that_cannot_connect_is_translated(server_dsn: str, application: str) -> None:
    with threaded_pool(server_dsn, application, least=0) as pool:
        pool._kwargs["dbname"] = f"no_{application}"
        with pytest.raises(StoreUnavailableError, match=f"no_{application}.* does not exist"):
            Database(pool).execute("select 1")


def test_a_pool_of_ours_can_be_given_and_stays_open(server_dsn: str, application: str) -> None:
    pool = ConnectionPool(server_dsn, max_connections=2, application_name=application)
    database = Database(pool)
    assert (database.address, database.max_connections) == (pool.address, 2)
    assert database.execute("select 1") == [(1,)]
    database.close()
    assert not pool.closed
    pool.closeall()


@contextmanager
def engine_over(dsn: str, application: str) -> Iterator[sqlalchemy.Engine]:
    engine = sqlalchemy.create_engine(
        "postgresql+psycopg2://",
        creator=lambda: psycopg2.connect(dsn, application_name=application),
        pool_size=1,
        max_overflow=0,
        pool_timeout=0.2,
    )
    yield engine
    engine.dispose()


def test_an_engine_is_used_and_left_open_and_as_it_was(server_dsn: str, admin: Connection, application: str) -> None:
    with engine_over(server_dsn, application) as engine:
        database = Database(engine)
        assert database.execute("create temporary table t (i int); insert into t values (1)") == []
        with database.transaction() as execute:
            execute("insert into t values (2)")
        assert states(admin, application) == "idle"
        database.close()
        with engine.connect() as connection:
            assert connection.execute(sqlalchemy.text("select count(*) from t")).scalar() == 2
            assert connection.connection.dbapi_connection is not None
            assert not connection.connection.dbapi_connection.autocommit
            with pytest.raises(PoolTimeoutError, match="QueuePool limit"):
                database.execute("select 1")
        assert sessions(admin, application) == 1


def test_a_dead_connection_of_an_engine_is_replaced(
    server_dsn: str, admin: Connection, application: str, caplog: pytest.LogCaptureFixture
) -> None:
    with engine_over(server_dsn, application) as engine:
        database = Database(engine, retry_seconds=0.5)
        kill(admin, pid_of(database))
        assert database.execute("select 1") == [(1,)]
        (warning,) = our_warnings(caplog)
        assert "lost 1 idle connection" in warning
        with pytest.raises(StoreUnavailableError):
            database.execute("select pg_terminate_backend(pg_backend_pid()), pg_sleep(20)")
        assert database.execute("select 1") == [(1,)]


def test_an_engine_that_cannot_connect_is_translated(closed_port: int) -> None:
    engine = sqlalchemy.create_engine(f"postgresql+psycopg2://me:{SECRET}@127.0.0.1:{closed_port}/db")
    with pytest.raises(StoreUnavailableError, match=f"host=127.0.0.1 port={closed_port} dbname=db") as caught:
        Database(engine, retry_seconds=0).execute("select 1")
    assert isinstance(caught.value.__cause__, psycopg2.OperationalError)
    assert SECRET not in everything_said_by(caught.value)


def test_an_engine_of_another_driver_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"driver is pysqlite.*postgresql\+psycopg2"):
        Database(sqlalchemy.create_engine("sqlite://"))


def test_a_pool_of_another_driver_is_refused() -> None:
    class OtherPool:
        returned = 0

        def getconn(self) -> Path:
            return Path()

        def putconn(self, conn: Path, close: bool = False) -> None:
            self.returned += 1

    pool = OtherPool()
    with pytest.raises(ConfigurationError, match="the given OtherPool gives connections of pathlib"):
        Database(pool).execute("select 1")
    assert pool.returned == 1


@pytest.mark.parametrize("source", [b"postgresql://host/db", Path("db"), 1, object()])
def test_a_source_of_another_kind_is_refused(source: object) -> None:
    with pytest.raises(ConfigurationError, match=f"not {type(source).__name__}"):
        Database(source)


def test_a_copy_calls_the_same_hook(server_dsn: str, application: str) -> None:
    class Metrics:
        """As a metrics client has one: what cannot be copied."""

        def __init__(self) -> None:
            self.lock = threading.Lock()
            self.told: list[str] = []

        def tell(self, operation: Operation) -> None:
            with self.lock:
                self.told.append(operation.name)

    metrics = Metrics()
    database = Database(server_dsn, on_operation=metrics.tell, application_name=application)
    copied = copy.deepcopy(database)
    for each in (database, copied):
        each.execute("select 1")
        each.close()
    assert metrics.told == ["execute", "execute"]
    assert copied._source is not database._source


def test_what_was_given_is_not_copied(server_dsn: str, application: str) -> None:
    with threaded_pool(server_dsn, application) as pool:
        for duplicate in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="cannot copy or pickle a Database over a pool"):
                duplicate(Database(pool))
