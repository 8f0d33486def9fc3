"""For root, as whom PostgreSQL refuses to run: the user that runs it, and root's folder that this one can reach."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from pgmemory.embedded.errors import LocalServerError

if sys.platform != "win32":
    import pwd

# Root's data and copied binaries, where the server's user could not reach them otherwise. Not under /tmp, which is
# emptied at a reboot and where anyone can put a folder first.
_ROOT_FOLDER = Path("/var/lib/pgmemory")


class Account(NamedTuple):
    """The user that the server runs as, where that is not the current one."""

    uid: int
    gid: int


def account_for(data: Path) -> Account | None:
    """Return the user that a server with its data in a folder must run as; None for the current one.

    Raises:
        LocalServerError: The current user is root, and there is no other to run it.
    """
    if os.geteuid() != 0:
        return None
    if data.exists():  # a user postgres may have come since they were made
        status = data.stat()
        return Account(status.st_uid, status.st_gid)
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            return Account(entry.pw_uid, entry.pw_gid)
    raise LocalServerError("PostgreSQL refuses to run as root: create a user named postgres for it")


def run_as(
    command: list[str], account: Account | None, cwd: Path, env: dict[str, str], pass_fds: tuple[int, ...] = ()
) -> subprocess.CompletedProcess[bytes]:
    """Run a command as that user and return how it ended and what it printed."""
    user: dict[str, Any] = {}
    if account is not None:
        user = {"user": account.uid, "group": account.gid, "extra_groups": []}
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=cwd,
        env=env,
        pass_fds=pass_fds,
        **user,
    )


def may_enter(folder: Path, account: Account) -> bool:
    """Tell whether that user may enter a folder."""
    # Asking the kernel as that user covers what mode bits do not show, such as access lists.
    return run_as(["/bin/sh", "-c", 'cd -- "$1"', "sh", str(folder)], account, Path("/"), {}).returncode == 0


def root_folder() -> Path:
    """Return root's folder for data and copied binaries, made if missing.

    Raises:
        LocalServerError: Somebody else may have put it there.
    """
    try:
        _ROOT_FOLDER.mkdir(parents=True)
    except FileExistsError:
        require_roots(_ROOT_FOLDER)
    else:
        _ROOT_FOLDER.chmod(0o755)  # whatever the umask
    return _ROOT_FOLDER


def require_roots(folder: Path) -> None:
    """Raise LocalServerError unless a folder is root's and nobody else can write to it."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != 0 or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise LocalServerError(
            f"{folder} must be a folder of root's that nobody else can write to: somebody else may have put it there. "
            "Look at it and remove it, then start again"
        )
