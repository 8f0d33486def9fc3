"""Locks on files, which the kernel drops when the last process that holds them is gone."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

if sys.platform != "win32":
    import fcntl


def open_lock(path: Path) -> int:
    """Open a lock's file, made if missing, and return the descriptor; the lock is not taken."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)


def try_flock(descriptor: int) -> bool:
    """Take the lock of an open file if nobody else holds it; tell whether that was so."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def try_lock(path: Path) -> int | None:
    """Take a lock and return the descriptor that holds it until it is closed; None if somebody else holds it."""
    descriptor = open_lock(path)
    if try_flock(descriptor):
        return descriptor
    os.close(descriptor)
    return None


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock for the length of a ``with`` block; wait for it as long as others hold it."""
    descriptor = open_lock(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough where another thread forked meanwhile
        os.close(descriptor)
