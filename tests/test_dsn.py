"""DSNs in each of their forms, and their secrets."""

from __future__ import annotations

import logging
import uuid
from contextlib import closing
from urllib.parse import quote

import psycopg2
import psycopg2.extensions
import psycopg2.extras
import psycopg2.pool
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from pools import (
    SECRET,
    Connection,
    Parameters,
    everything_said_by,
    kill,
    pid_of,
)

from pgmemory.errors import ConfigurationError
from pgmemory.pool import (
    ConnectionPool,
    Database,
    StoreUnavailableError,
)


# --- DSNs -------------------------------------------------------------------------------------------------------------
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


# --- Secrets ----------------------------------------------------------------------------------------------------------
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
