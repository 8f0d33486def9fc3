"""Waiting for what other threads, processes and servers do, instead of sleeping."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE_SECONDS = 60.0


def wait_until(condition: Callable[[], T], what: str, seconds: float = PATIENCE_SECONDS) -> T:
    """Return what `condition` gives as soon as that is true; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"waited {seconds:g} s in vain: {what}"
        time.sleep(0.005)
    return result
