"""Pools and engines of the application's own."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg2
import psycopg2.extensions
import psycopg2.extras
import psycopg2.pool
import pytest
import sqlalchemy
from pools import (
    PATIENCE_SECONDS,
    SECRET,
    Connection,
    ask,
    everything_said_by,
    in_thread,
    kill,
    our_warnings,
    pid_of,
    sessions,
    states,
)

from pgmemory.errors import ConfigurationError
from pgmemory.models import Operation
from pgmemory.pool import (
    ConnectionPool,
    Database,
    PoolClosedError,
    PoolTimeoutError,
    StoreUnavailableError,
)


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
