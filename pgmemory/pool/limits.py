"""Numbers that bound a pool and its operations, checked; and the error for having waited in vain."""

from __future__ import annotations

import math
import threading

from pgmemory.errors import ConfigurationError
from pgmemory.pool.errors import PoolTimeoutError

LONGEST_QUERY_SECONDS = 2_000_000.0
"""PostgreSQL counts `statement_timeout` in milliseconds, as an int."""


def check_connections(min_connections: int, max_connections: int) -> None:
    """Refuse numbers of connections that make no sense, with a ConfigurationError."""
    for name, value, least in (("min_connections", min_connections, 0), ("max_connections", max_connections, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigurationError(f"{name} must be a whole number, at least {least}, not {value!r}")
    if min_connections > max_connections:
        raise ConfigurationError(f"min_connections={min_connections} is more than max_connections={max_connections}")


def check_seconds(name: str, value: float, *, above_zero: bool = False, most: float = threading.TIMEOUT_MAX) -> float:
    """Return a length of time, or refuse it with a ConfigurationError."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)
    if not number or not 0 <= value <= most or (above_zero and value == 0):
        least = "above 0" if above_zero else "0 or more"
        raise ConfigurationError(
            f"{name} must be a number of seconds, {least} and at most {most:,.0f}, not {value!r}"
        )
    return value


def out_of_connections(address: str, max_connections: int, timeout_seconds: float) -> PoolTimeoutError:
    """Return the error for having waited in vain."""
    return PoolTimeoutError(
        f"no connection to {address} became free within timeout_seconds={timeout_seconds:g}: all of "
        f"max_connections={max_connections} are in use. Raise one of the two, or find what holds connections for so "
        "long: store.pool_stats() counts them, and pg_stat_activity shows what each is doing"
    )
