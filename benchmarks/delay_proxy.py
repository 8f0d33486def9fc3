"""A relay to a PostgreSQL server over a network that takes its time: what is sent arrives a fixed time later.

Everything sent is delayed for itself, as on a wire, so that a client that sends several messages without waiting for
an answer waits once.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from contextlib import suppress
from types import TracebackType

from psycopg2.extensions import make_dsn, parse_dsn


class DelayProxy:
    """A proxy on the loopback for one server; it takes any number of connections.

    Args:
        dsn: Leads to the server.
        round_trip_seconds: How much longer a round trip takes through it.

    Attributes:
        dsn: Leads to the server through the proxy, without encryption.
    """

    def __init__(self, dsn: str, round_trip_seconds: float) -> None:
        self._parameters = parse_dsn(dsn)
        self._delay = round_trip_seconds / 2
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        parameters = {**self._parameters, "host": "127.0.0.1", "port": self._listener.getsockname()[1]}
        parameters.pop("hostaddr", None)
        self.dsn = make_dsn(**{**parameters, "sslmode": "disable", "gssencmode": "disable"})
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> DelayProxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for each in (self._listener, *self._sockets):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                server = self._connect()
                self._sockets += [client, server]
                for source, target in ((client, server), (server, client)):
                    waiting: queue.Queue[tuple[float, bytes]] = queue.Queue()
                    threading.Thread(target=self._receive, args=(source, waiting), daemon=True).start()
                    threading.Thread(target=_deliver, args=(waiting, target), daemon=True).start()

    def _connect(self) -> socket.socket:
        host = self._parameters.get("hostaddr") or self._parameters.get("host") or "localhost"
        port = int(self._parameters.get("port") or 5432)
        if not host.startswith("/"):
            return socket.create_connection((host, port))
        server = socket.socket(socket.AF_UNIX)
        server.connect(f"{host}/.s.PGSQL.{port}")
        return server

    def _receive(self, source: socket.socket, waiting: queue.Queue[tuple[float, bytes]]) -> None:
        data = b"?"
        while data:
            try:
                data = source.recv(65536)
            except OSError:
                data = b""
            waiting.put((time.monotonic() + self._delay, data))


def _deliver(waiting: queue.Queue[tuple[float, bytes]], target: socket.socket) -> None:
    with suppress(OSError):
        while True:
            due, data = waiting.get()
            time.sleep(max(0.0, due - time.monotonic()))
            if not data:
                target.shutdown(socket.SHUT_WR)
                return
            target.sendall(data)
