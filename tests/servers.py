"""Servers of a test's own, to kill, restart, promote and pause: PostgreSQL, and pgbouncer in front of it.

Binaries and the user that stands in for root are found as `pgmemory.embedded` finds them. Everything listens on
127.0.0.1 alone. A server's folder must be one that this user may enter: `new_folder` makes such a one.
"""

from __future__ import annotations

import os
import random
import select
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import psycopg2
from conftest import RUN_FOLDER
from psycopg2.extensions import make_dsn
from waiting import wait_until

from pgmemory.embedded.account import account_for
from pgmemory.embedded.binaries import find_binaries, run_program

_DEADLINE_SECONDS = 60.0
_POLL_SECONDS = 0.02
_STOP_SIGNALS = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}

# What a process may survive without: only a power cut needs fsync.
_SETTINGS = {"fsync": "off", "shared_buffers": "16MB", "wal_retrieve_retry_interval": "100ms"}


def new_folder(name: str) -> Path:
    """Make a folder for a server, which goes when the run of the tests ends."""
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=os.environ[RUN_FOLDER]))
    folder.chmod(0o711)
    return folder


def free_port() -> int:
    """Return a port that nobody listens on.

    Not one that the system gives away: while the server is down, a client's own end of a connection could be put there.
    """
    first_given_away = 32768
    for port in random.sample(range(10240, first_given_away), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")


def query(dsn: str, statement: str) -> list[tuple[Any, ...]]:
    """Run one statement in a session of its own and return its rows."""
    connection = psycopg2.connect(dsn)
    try:
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchall() if cursor.description else []
    finally:
        connection.close()


class _Daemon:
    """A process that is started as the user who may, and what it says in a log file."""

    def __init__(self, folder: Path, dsn: str) -> None:
        folder.mkdir(mode=0o711, parents=True, exist_ok=True)
        self.folder = folder
        self.dsn = dsn
        self._log = folder / "server.log"
        self._account = account_for(folder / "data")
        self._process: subprocess.Popen[bytes] | None = None
        self._life = -1  # the reading end of a pipe whose writing end every process of the daemon holds

    def _give_away(self, path: Path) -> None:
        if self._account is not None:
            os.chown(path, *self._account)

    def _launch(self, *command: str | Path) -> None:
        assert self._process is None, "it runs already"
        user: dict[str, Any] = {}
        if self._account is not None:
            user = {"user": self._account.uid, "group": self._account.gid, "extra_groups": []}
        self._life, held = os.pipe()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env={"LC_ALL": "C", "PATH": os.defpath},
                pass_fds=(held,),
                **user,
            )
        os.close(held)
        try:
            wait_until(self._answers, f"{command[0]} answers at {self.dsn}")
        except BaseException:
            self._end(signal.SIGKILL)
            raise

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise AssertionError(f"it ended while it was starting: {self._log.read_text(errors='replace')[-2000:]}")
        try:
            return bool(query(self.dsn, "select 1"))
        except psycopg2.OperationalError:
            return False

    def _end(self, signal_number: int) -> None:
        """Send a signal and wait until the process and all its children are gone. Does nothing where none runs."""
        if self._process is None:
            return
        self._process.send_signal(signal_number)
        gone = bool(select.select([self._life], [], [], _DEADLINE_SECONDS)[0])
        if not gone:
            self._process.kill()
        self._process.wait(_DEADLINE_SECONDS)
        os.close(self._life)
        self._process = None
        assert gone, f"it did not stop: {self._log.read_text(errors='replace')[-2000:]}"


class Server(_Daemon):
    """A PostgreSQL primary or standby of a test's own, on 127.0.0.1 with a free port.

    Attributes:
        dsn: Leads its superuser to its database ``postgres``, without a password.
        port: Stays the same over restarts.
    """

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        super().__init__(folder, make_dsn(host="127.0.0.1", port=self.port, user="postgres", dbname="postgres"))
        self._data = folder / "data"
        self._data.mkdir(mode=0o700)
        self._give_away(self._data)
        self._bin_dir = find_binaries(folder, None, self._account, None)

    @classmethod
    def initialise(cls, folder: Path, **settings: str) -> Server:
        """Make the data of a new server with these settings; it is not started."""
        server = cls(folder)
        arguments = ("--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync")
        run_program(server._bin_dir / "initdb", *arguments, cwd=server._data, account=server._account)
        server._configure(_SETTINGS | settings)
        return server

    def _configure(self, settings: dict[str, str]) -> None:
        with (self._data / "postgresql.conf").open("a") as file:
            for name, value in settings.items():
                file.write(f"{name} = {_quoted(value)}\n")

    def start(self) -> None:
        """Start it and wait until it answers; a standby then answers read-only."""
        options = {"port": str(self.port), "listen_addresses": "127.0.0.1", "unix_socket_directories": ""}
        arguments = [f"--{name}={value}" for name, value in options.items()]
        self._launch(self._bin_dir / "postgres", "-D", self._data, *arguments)

    def stop(self, mode: str = "fast") -> None:
        """Stop it as ``pg_ctl stop --mode`` does and wait until it is gone; does nothing where it does not run."""
        self._end(_STOP_SIGNALS[mode])

    def kill(self) -> None:
        """Kill it with SIGKILL and wait until all its processes are gone."""
        self._end(signal.SIGKILL)

    def restart(self, mode: str = "immediate") -> None:
        """Stop it and start it again."""
        self.stop(mode)
        self.start()

    def standby(self, folder: Path) -> Server:
        """Make a streaming standby of this server, which must be stopped; the standby is not started.

        A copy of the data rather than pg_basebackup, which not every set of binaries has.
        """
        assert self._process is None, "stop it first: its files are copied"
        standby = type(self)(folder)
        subprocess.run(["cp", "-a", f"{self._data}/.", standby._data], check=True)
        (standby._data / "standby.signal").touch()
        standby._give_away(standby._data / "standby.signal")
        # Once promoted it has no standby of its own to wait for.
        standby._configure({"primary_conninfo": self.dsn, "synchronous_standby_names": ""})
        return standby

    def promote(self) -> None:
        """Make a primary of this standby and wait until it takes writes."""
        assert query(self.dsn, f"select pg_promote(true, {_DEADLINE_SECONDS:.0f})") == [(True,)]
        wait_until(lambda: query(self.dsn, "show transaction_read_only") == [("off",)], "the standby takes writes")

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop("immediate")


class Pgbouncer(_Daemon):
    """A running pgbouncer in transaction mode in front of a server.

    Args:
        folder: For its configuration and log.
        server_dsn: The server; clients come in as the user that it names, whatever name they give.
        pool_size: How many sessions it opens at the server at most.

    Attributes:
        dsn: Leads to the server's database through it.
    """

    def __init__(self, folder: Path, server_dsn: str, *, pool_size: int = 2) -> None:
        binary = find_pgbouncer()
        assert binary is not None, "pgbouncer is not installed"
        self.port = free_port()
        target = _resolve(server_dsn)
        name = target["dbname"]
        super().__init__(folder, make_dsn(host="127.0.0.1", port=self.port, user="postgres", dbname=name))
        connection = " ".join(f"{part}={_quoted(value)}" for part, value in target.items())
        configuration = folder / "pgbouncer.ini"
        configuration.write_text(
            f"[databases]\n{name} = {connection}\n"
            "[pgbouncer]\nauth_type = any\nadmin_users = postgres\npool_mode = transaction\nunix_socket_dir =\n"
            f"listen_addr = 127.0.0.1\nlisten_port = {self.port}\ndefault_pool_size = {pool_size}\n"
        )
        self._give_away(configuration)
        configuration.chmod(0o600)
        self._launch(binary, configuration)

    def stop(self) -> None:
        """Stop it at once; does nothing where it does not run."""
        self._end(signal.SIGTERM)

    def pause(self) -> None:
        """Let every statement wait from now on; returns when those under way have ended."""
        self._command("pause")

    def resume(self) -> None:
        """Let the waiting statements through."""
        self._command("resume")

    def _command(self, command: str) -> None:
        query(make_dsn(self.dsn, dbname="pgbouncer"), command)

    def __enter__(self) -> Pgbouncer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _quoted(value: str) -> str:
    """Quote a value for a configuration file of either program."""
    return "'{}'".format(value.replace("'", "''"))


def _resolve(dsn: str) -> dict[str, str]:
    """Return where a DSN leads to, with what the environment and libpq's defaults add to it."""
    connection = psycopg2.connect(dsn)
    info = connection.info
    found = {name: getattr(info, name) for name in ("host", "port", "dbname", "user", "password")}
    connection.close()
    return {name: str(value) for name, value in found.items() if value}


def find_pgbouncer() -> str | None:
    """Return the path of the pgbouncer that is installed, or None."""
    return shutil.which("pgbouncer", path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin"]))
