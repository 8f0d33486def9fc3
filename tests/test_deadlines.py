"""Answers, connections and goodbyes that do not come."""

from __future__ import annotations

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import psycopg2
import psycopg2.extensions
import psycopg2.extras
import psycopg2.pool
import pytest
from fault_proxy import Fault, FaultProxy, Message
from pools import (
    PATIENCE_SECONDS,
    Connection,
    ask,
    in_thread,
    kill,
    our_warnings,
    pid_of,
    sessions,
)
from psycopg2.extensions import make_dsn
from psycopg2.pool import ThreadedConnectionPool
from waiting import wait_until

from pgmemory.errors import ConfigurationError
from pgmemory.pool import (
    ConnectionPool,
    Database,
    PoolClosedError,
    StoreUnavailableError,
    deadlines,
    hygiene,
)
from pgmemory.pool.deadlines import connect_within


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
