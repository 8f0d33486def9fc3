"""Where to connect: a DSN in any of its forms, read, checked and never quoted."""

from __future__ import annotations

import os
import re
from urllib.parse import quote, unquote_to_bytes

import psycopg2
import psycopg2.extensions as ext

from pgmemory.errors import ConfigurationError

_DEFAULTS = {
    "connect_timeout": "10",
    "keepalives": "1",
    "keepalives_idle": "10",
    "keepalives_interval": "3",
    "keepalives_count": "3",
    "tcp_user_timeout": "15000",
    "client_encoding": "UTF8",
}
_HOST = r"(?:\[[^\]@/?#]+\]|[^\[\]:,@/?#]*)(?::\d*)?"


def _url(credentials: str, value: str) -> re.Pattern[str]:
    query = rf"(?:\w+={value}(?:&\w+={value})*)?"
    rest = rf"(?P<rest>{_HOST}(?:,{_HOST})*(?:/[^?@]*)?(?:\?{query})?)"
    return re.compile(rf"postgres(?:ql)?(?:\+\w+)?://{credentials}{rest}")


_URLS = (
    _url(r"(?P<user>[^:@/?#]*)(?::(?P<password>[^:@/?#]*))?@", value=r"[^&]*"),
    _url(r"(?P<user>)(?P<password>)", value=r"[^&@]*"),
    # Unescaped, as SQLAlchemy takes it: all up to the last @ that a host can follow is user and password.
    _url(r"(?P<user>[^:/?#]*)(?::(?P<password>.*))?@", value=r"[^&]*"),
)
# A blank that was forgotten, or a DSN inside a DSN: libpq's errors and ours would print these values.
_MISPLACED_SECRET = re.compile(r"password\s*=|://.*@")


def _parse_dsn(dsn: str) -> dict[str, str] | None:
    """Return the libpq parameters in a DSN, or None if it is not one."""
    dsn = dsn.strip()
    if match := next(filter(None, (url.fullmatch(dsn) for url in _URLS)), None):
        user, password = (quote(unquote_to_bytes(match[name] or ""), safe="") for name in ("user", "password"))
        dsn = f"postgresql://{user}:{password}@{match['rest']}"
    elif not dsn or re.match(r"[\w+.-]+://", dsn) or "\0" in dsn:
        return None
    try:
        parameters = {name: value for name, value in ext.parse_dsn(dsn).items() if value}
    except (psycopg2.Error, ValueError):
        return None
    if not re.fullmatch(r"[\d,]*", parameters.get("port", "")):
        return None
    if any(_MISPLACED_SECRET.search(parameters[name]) for name in parameters.keys() - {"password", "options"}):
        return None
    return parameters


def read_dsn(dsn: str | None, application_name: str) -> dict[str, str]:
    """Return the libpq parameters that a DSN, or $DATABASE_URL in its place, asks for, with defaults for the rest.

    Raises:
        ConfigurationError: It is missing or cannot be read. The text never quotes it.
    """
    origin = "the DSN"
    if dsn is None:
        origin = "the DSN in $DATABASE_URL"
        dsn = os.environ.get("DATABASE_URL")
        if not dsn:
            raise ConfigurationError("no DSN was given and the environment variable DATABASE_URL is not set or empty")
    parameters = _parse_dsn(dsn)
    # Not raised while psycopg2's error is handled: that quotes parts of the DSN and would be our error's context.
    if parameters is None:
        raise ConfigurationError(
            f"{origin} cannot be read: give postgresql://user:password@host:port/dbname?option=value (postgres:// and "
            "postgresql+driver:// do as well) or libpq's host=… port=… dbname=… user=… password=… with options that "
            "libpq knows; percent-encode special characters in a URL, put values with blanks between single quotes"
        )
    if parameters.get("connect_timeout") == "0":
        del parameters["connect_timeout"]  # libpq would wait for ever
    return {"application_name": application_name, **_DEFAULTS, **parameters}


def longest_connect_seconds(parameters: dict[str, str]) -> float:
    """Return after how long connecting may be given up: libpq takes `connect_timeout` for each host, 2 at least."""
    timeout = parameters["connect_timeout"]
    each = max(2, int(timeout)) if timeout.isdecimal() else int(_DEFAULTS["connect_timeout"])
    hosts = parameters.get("hostaddr") or parameters.get("host", "")
    # Twice, for a host may have two addresses; the rest is for the resolver.
    return 2.0 * each * (hosts.count(",") + 1) + 5.0


def describe(host: str | None, port: object, dbname: str | None) -> str:
    """Return an address as people read it, without secrets."""
    return f"host={host or '(default)'} port={port or '(default)'} dbname={dbname or '(default)'}"
