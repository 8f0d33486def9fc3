"""The database over the pool: servers that are away, statements, transactions."""

from __future__ import annotations

import copy
import gc
import pickle
import socket
from collections.abc import Callable
from typing import Any

import psycopg2
import psycopg2.extensions
import psycopg2.extras
import psycopg2.pool
import pytest
from pools import (
    PATIENCE_SECONDS,
    SECRET,
    Connection,
    Parameters,
    everything_said_by,
    in_thread,
    our_warnings,
    queued,
    sessions,
    states,
)
from psycopg2.extensions import make_dsn

from pgmemory.errors import ConfigurationError, PgMemoryError
from pgmemory.models import Operation
from pgmemory.pool import (
    ConnectionPool,
    Database,
    PoolClosedError,
    PoolTimeoutError,
    StoreError,
    StoreUnavailableError,
)
from pgmemory.pool.errors import could_not_connect


# --- Where no connection can be opened --------------------------------------------------------------------------------
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


# --- Statements and transactions --------------------------------------------------------------------------------------
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
