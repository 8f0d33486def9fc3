"""A relay between psycopg2 and a PostgreSQL server that can break their exchange at any message of the wire protocol.

It knows where messages begin and end, nothing of what they say. Each message is counted before anything of it goes on.
"""

from __future__ import annotations

import selectors
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Literal, NamedTuple

from psycopg2.extensions import make_dsn, parse_dsn

PATIENCE_SECONDS = 10

Sender = Literal["client", "server"]
Place = Literal["before", "within", "after"]
How = Literal["close", "reset", "stall"]

_ENCRYPTION_REQUESTS = (80877103, 80877104)  # SSLRequest, GSSENCRequest
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_HOW_BY_ORDER: dict[bytes, How] = {b"c": "close", b"r": "reset", b"s": "stall"}


class Message(NamedTuple):
    """A message of the protocol: `kind` is its type, "startup" for the untyped packets that open a connection."""

    sender: Sender
    kind: str


class Fault(NamedTuple):
    """Where and how to break an exchange.

    Args:
        message: Which message, counted from 0, in the order in which the proxy sees them.
        place: Deliver nothing of it, its first half, or all of it; then break.
        how: Close both sides in order, reset them, or read on from both and deliver nothing more. A reset may overtake
            a message that is larger than the sockets' buffers.
    """

    message: int
    place: Place
    how: How


class FaultProxy:
    """A proxy on the loopback for one server; it takes any number of connections, and one fault at a time.

    Attributes:
        dsn: The server's DSN, by way of the proxy and without encryption.
        messages: What the proxy has seen since the last `arm`, of all connections.
        fired: Whether the armed fault has happened.
    """

    def __init__(self, dsn: str) -> None:
        self._server_parameters = parse_dsn(dsn)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        parameters = {**self._server_parameters, "host": "127.0.0.1", "port": self._listener.getsockname()[1]}
        parameters.pop("hostaddr", None)
        self.dsn = make_dsn(**{**parameters, "sslmode": "disable", "gssencmode": "disable"})
        self.messages: list[Message] = []
        self.fired = False
        self._fault: Fault | None = None
        self._links: set[_Link] = set()
        self._lock = threading.Lock()  # of all that changes here
        self._accepting = threading.Thread(target=self._accept, name="fault proxy", daemon=True)
        self._accepting.start()

    def arm(self, fault: Fault | None) -> None:
        """Forget what was seen, and let the fault happen once from now on; None for no fault."""
        with self._lock:
            self.messages, self.fired, self._fault = [], False, fault

    def cut_all(self, how: How) -> int:
        """Break every open connection now, and return how many there were."""
        with self._lock:
            links = list(self._links)
        for link in links:
            link.cut(how)
        return len(links)

    def close(self) -> None:
        """Close every connection and listen no more."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._accepting.join(PATIENCE_SECONDS)
        self._listener.close()
        self.cut_all("close")

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = self._connect()
            except OSError:
                client.close()
                continue
            link = _Link(client, server, seen=self._seen, ended=self._ended)
            with self._lock:
                self._links.add(link)
                link.thread.start()

    def _connect(self) -> socket.socket:
        parameters = self._server_parameters
        host = parameters.get("hostaddr") or parameters.get("host", "localhost")
        port = int(parameters.get("port", 5432))
        if not host.startswith("/"):
            return socket.create_connection((host, port), PATIENCE_SECONDS)
        server = socket.socket(socket.AF_UNIX)
        try:
            server.settimeout(PATIENCE_SECONDS)
            server.connect(f"{host}/.s.PGSQL.{port}")
        except OSError:
            server.close()
            raise
        return server

    def _seen(self, message: Message) -> Fault | None:
        """Count a message; return the fault that is to happen at it."""
        with self._lock:
            self.messages.append(message)
            fault = self._fault
            if fault is None or fault.message != len(self.messages) - 1:
                return None
            self._fault, self.fired = None, True
            return fault

    def _ended(self, link: _Link) -> None:
        with self._lock:
            self._links.discard(link)


class _Link:
    """One connection: a thread that delivers, in either direction, message by message."""

    def __init__(
        self,
        client: socket.socket,
        server: socket.socket,
        *,
        seen: Callable[[Message], Fault | None],
        ended: Callable[[_Link], None],
    ) -> None:
        self._sockets: dict[Sender, socket.socket] = {"client": client, "server": server}
        self._received: dict[Sender, bytearray] = {"client": bytearray(), "server": bytearray()}
        self._seen, self._ended = seen, ended
        self._started = False  # the client's untyped packets are past
        self._broken = False
        self._stalled = threading.Event()
        self._orders, self._commander = socket.socketpair()
        for each in self._sockets.values():
            each.settimeout(PATIENCE_SECONDS)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.thread = threading.Thread(target=self._run, name="fault proxy's link", daemon=True)

    def cut(self, how: How) -> None:
        """Break this connection, and wait until that is done."""
        with suppress(OSError):  # it has ended meanwhile
            self._commander.send(how[:1].encode())
        if how == "stall":
            self._stalled.wait(PATIENCE_SECONDS)
        else:
            self.thread.join(PATIENCE_SECONDS)

    def _run(self) -> None:
        try:
            self._relay()
        finally:
            self._ended(self)
            for each in (*self._sockets.values(), self._orders, self._commander):
                each.close()
            self._stalled.set()

    def _relay(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._orders, selectors.EVENT_READ)
            for sender, each in self._sockets.items():
                selector.register(each, selectors.EVENT_READ, sender)
            while not self._broken:
                for key, _ in selector.select():
                    if key.data is None:
                        self._break_off(_HOW_BY_ORDER[self._orders.recv(1)])
                    elif not self._broken and not self._pass_on(key.data):
                        if key.data == "client" or not self._stalled.is_set():
                            return
                        selector.unregister(key.fileobj)  # the client must not notice

    def _pass_on(self, sender: Sender) -> bool:
        """Read from one side and deliver what is complete; return whether the exchange goes on."""
        try:
            data = self._sockets[sender].recv(65536)
            if self._stalled.is_set():
                return bool(data)
            self._received[sender] += data
            target = self._sockets["server" if sender == "client" else "client"]
            for message, content in self._complete(sender):
                fault = self._seen(message)
                if fault is None:
                    target.sendall(content)
                    continue
                delivered = {"before": 0, "within": len(content) // 2, "after": len(content)}[fault.place]
                target.sendall(content[:delivered])
                self._break_off(fault.how)
                return True
        except OSError:
            return False
        return bool(data)

    def _complete(self, sender: Sender) -> Iterator[tuple[Message, bytes]]:
        """Take the messages out of what was received that are there whole."""
        received = self._received[sender]
        while True:
            typed = sender == "server" or self._started
            head = 5 if typed else 4  # the length counts itself, not the type
            end = int.from_bytes(received[head - 4 : head], "big") + head - 4
            if len(received) < max(head, end):
                return
            content = bytes(received[:end])
            del received[:end]
            if not typed and int.from_bytes(content[4:8], "big") in _ENCRYPTION_REQUESTS:
                self._sockets["client"].sendall(b"N")
                continue
            self._started = self._started or not typed
            yield Message(sender, chr(content[0]) if typed else "startup"), content

    def _break_off(self, how: How) -> None:
        if how == "stall":
            self._stalled.set()
            return
        self._broken = True
        if how == "reset":
            for each in self._sockets.values():  # a Unix socket takes no notice and is just closed
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
