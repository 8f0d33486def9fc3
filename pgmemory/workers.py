"""Threads in which a store's work runs for asyncio callers.

asyncio's default executor has few threads and serves the whole program: saves that wait for a database there would
hold up name resolution and whatever else the loop sends to it. This module knows nothing of databases.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, ParamSpec, TypeVar

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class Workers:
    """At most `count` threads, started when first needed, made anew after a fork.

    Args:
        count: How many calls may run at once; further ones wait in line.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._start_empty()

    def _start_empty(self) -> None:
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._calls: set[Future[Any]] = set()
        self._waiting: set[tuple[Callable[..., object], Any]] = set()
        self._pid = os.getpid()

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function in one of the threads, with the caller's context variables, and return its result.

        If the awaiting task is cancelled, a function that has begun still runs to its end; an error that nobody then
        hears of is logged.
        """
        call = partial(contextvars.copy_context().run, partial(function, *args, **kwargs))
        future = self._running().submit(call)
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(_log_unheard)
            raise

    def call(self, function: Callable[[], T]) -> T:
        """Run a function in one of the threads, wait for it and return its result."""
        return self._running().submit(function).result()

    def start(self, function: Callable[[T], object], given: T) -> None:
        """Run a function in one of the threads and go on; only once if it has yet to begin when it is asked for again.

        Not if the interpreter is about to end.

        Args:
            function: It.
            given: Its argument, which can be hashed.
        """

        def call() -> None:
            self._waiting.discard(asked)
            function(given)

        asked = (function, given)
        executor = self._running()
        if asked in self._waiting:
            return
        self._waiting.add(asked)
        try:
            future = executor.submit(call)
        except RuntimeError:  # it takes no more, for the interpreter ends, or `close` was called at this moment
            self._waiting.discard(asked)
            return
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)

    def close(self, timeout_seconds: float) -> None:
        """Wait for the calls so far, but not longer than that; the next `run` starts new threads."""
        with self._lock:
            executor, self._executor = self._executor, None
        if executor is not None and self._pid == os.getpid():
            executor.shutdown(wait=False)
            wait(set(self._calls), timeout_seconds)

    def _running(self) -> ThreadPoolExecutor:
        if self._pid != os.getpid():
            # Threads, and a lock that one of them may have held, do not live on in a forked child.
            self._start_empty()
        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(self._count, thread_name_prefix="pgmemory")
            return self._executor

    def __reduce__(self) -> tuple[type[Workers], tuple[int]]:
        return Workers, (self._count,)


def _log_unheard(call: Future[Any]) -> None:
    error = None if call.cancelled() else call.exception()
    if error is not None:
        unsaved_turn = getattr(error, "unsaved_turn", None)
        what = f"session {unsaved_turn.session_id!r}: a turn was not saved" if unsaved_turn else "a call failed"
        logger.error("%s after its task was cancelled: %s", what, error, extra={"unsaved_turn": unsaved_turn})
