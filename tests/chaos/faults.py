"""What is done to a campaign: every kind of fault, how often each is chosen, and how many were injected."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import cast

import psycopg2
import psycopg2.pool
from chaos.clients import APPLICATION_NAME, CONVERSATIONS, QUERY_TIMEOUT_SECONDS, SCHEMA, SmallPool, Writer
from fault_proxy import Fault, FaultProxy, How, Place
from psycopg2 import sql
from psycopg2.extensions import connection as Connection
from servers import Server

# How long to wait for a fault to have its effect; it is not counted if it has none.
_PATIENCE_SECONDS = 3.0
_POLL_SECONDS = 0.005
# Longer than what opens a connection and saves a turn, so that each message of these is met.
_MESSAGES = 60
_PLACES, _HOWS = ("before", "within", "after"), ("close", "reset", "stall")
_CANCELLED = "save cancelled in asyncio"

_SESSIONS = "select pid from pg_stat_activity where application_name = %s order by pid"
_LOCK = "select 1 from {schema}.conversations where session_id = %s for update"


class Faults:
    """Does harm, one fault at a time.

    Args:
        seed: Decides which faults come, in which order, and what they hit.
        server: The campaign's server.
        proxy: What some clients reach it by.
        pool: The small pool that some clients share.
        writers: The writers in threads, whose saves are cancelled.
        kill_process: Kills and replaces one of the writers in processes, chosen by its argument.
    """

    def __init__(
        self,
        seed: int,
        server: Server,
        proxy: FaultProxy,
        pool: SmallPool,
        writers: Sequence[Writer],
        kill_process: Callable[[random.Random], None],
    ) -> None:
        self._random = random.Random(f"{seed} faults")
        self._server, self._proxy, self._pool, self._writers = server, proxy, pool, writers
        self._kill_process = kill_process
        self._ended = threading.Event()
        self._row_holder: threading.Thread | None = None
        # How often of 100 times. A restart takes longest, for the server recovers and everybody waits.
        self._kinds: dict[str, tuple[int, Callable[[], bool]]] = {
            "session killed": (28, self._kill_session),
            "server restarted at once": (2, self._restart_server),
            "server killed with SIGKILL": (1, self._kill_server),
            "all connections closed": (14, lambda: self._cut_all("close")),
            "all connections reset": (14, lambda: self._cut_all("reset")),
            "all connections stalled": (5, lambda: self._cut_all("stall")),
            "connection broken at a message": (17, self._break_at_message),
            "writing process killed with SIGKILL": (4, self._kill_writing_process),
            "pool exhausted": (6, self._exhaust_pool),
            "row locked beyond the query timeout": (4, self._lock_row),
            _CANCELLED: (5, self._cancel_save),
        }
        self._injected = dict.fromkeys(self._kinds, 0)

    def injected(self) -> dict[str, int]:
        """Return how many faults of each kind have had an effect."""
        return self._injected | {_CANCELLED: sum(writer.cancelled for writer in self._writers)}

    def inject(self) -> None:
        """Do the next harm."""
        weights = [weight for weight, _ in self._kinds.values()]
        (kind,) = self._random.choices(list(self._kinds), weights)
        _, inject = self._kinds[kind]
        self._injected[kind] += inject()

    def end(self) -> None:
        """Leave everything in working order."""
        self._ended.set()
        if self._row_holder is not None:
            self._row_holder.join()
        self._proxy.arm(None)

    def _connect(self) -> Connection:
        connection = psycopg2.connect(self._server.dsn, application_name="chaos faults")
        connection.autocommit = True
        return connection

    def _kill_session(self) -> bool:
        with closing(self._connect()) as connection, connection.cursor() as cursor:
            cursor.execute(_SESSIONS, [APPLICATION_NAME])
            pids = [pid for (pid,) in cursor.fetchall()]
            if not pids:
                return False
            cursor.execute("select pg_terminate_backend(%s)", [self._random.choice(pids)])
            return cursor.fetchall() == [(True,)]

    def _restart_server(self) -> bool:
        self._server.restart("immediate")
        return True

    def _kill_server(self) -> bool:
        self._server.kill()
        self._server.start()
        return True

    def _cut_all(self, how: How) -> bool:
        return self._proxy.cut_all(how) > 0

    def _break_at_message(self) -> bool:
        place, how = self._random.choice(_PLACES), self._random.choice(_HOWS)
        self._proxy.arm(Fault(self._random.randrange(_MESSAGES), cast(Place, place), cast(How, how)))
        fired = _wait_until(lambda: self._proxy.fired)
        self._proxy.arm(None)
        return fired

    def _kill_writing_process(self) -> bool:
        self._kill_process(self._random)
        return True

    def _exhaust_pool(self) -> bool:
        held: list[Connection] = []

        def hold_all() -> bool:
            try:
                held.append(self._pool.getconn())
            except psycopg2.pool.PoolError:
                pass  # a client has it
            return len(held) == self._pool.maxconn

        try:
            if not _wait_until(hold_all):
                return False
            refused = self._pool.refused
            return _wait_until(lambda: self._pool.refused > refused)
        finally:
            for connection in held:
                self._pool.putconn(connection)

    def _lock_row(self) -> bool:
        if self._row_holder is not None and self._row_holder.is_alive():
            return False
        connection = self._connect()
        with connection.cursor() as cursor:
            cursor.execute("begin")
            cursor.execute(sql.SQL(_LOCK).format(schema=sql.Identifier(SCHEMA)), [self._random.choice(CONVERSATIONS)])
            locked = cursor.rowcount > 0

        def hold() -> None:
            self._ended.wait(1.5 * QUERY_TIMEOUT_SECONDS)
            connection.close()

        # Aside, so that other faults come while everybody who writes there waits.
        self._row_holder = threading.Thread(target=hold, name="row holder", daemon=True)
        self._row_holder.start()
        return locked

    def _cancel_save(self) -> bool:
        self._random.choice(self._writers).cancel_next.set()
        return False  # the writer counts it, once a save was really cancelled


def _wait_until(condition: Callable[[], bool]) -> bool:
    """Return whether a condition comes true in time."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True
