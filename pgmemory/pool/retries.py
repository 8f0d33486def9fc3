"""Trying again what may pass."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_random_exponential

from pgmemory.pool.errors import StoreError, StoreUnavailableError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Tries(Generic[T]):
    """One operation, tried until it succeeds, fails with what will not pass, or has failed for too long.

    The second try comes at once: a dead connection is replaced by then. Later ones come after pauses of random length,
    up to a second, so that many callers do not all come back at the same moment.

    Args:
        function: The operation; it must be safe to run twice.
        seconds: For how long, from the first failure on, it is tried again; 0 for never.
        name: What to call it in the log.

    Attributes:
        failures: What the tries failed with so far.
    """

    def __init__(self, function: Callable[[], T], seconds: float, name: str) -> None:
        self._function = function
        self._seconds = seconds
        self._name = name
        self.failures: list[StoreError] = []

    @property
    def healed(self) -> bool:
        """Whether a connection was lost, or could not be had, on the way."""
        return any(isinstance(failure, StoreUnavailableError) for failure in self.failures)

    def run(self) -> T:
        """Return what the operation returns.

        Raises:
            StoreError: The last failure.
        """
        began = time.monotonic()
        try:
            try:
                return self._try()
            except StoreError as error:
                if not self._seconds or not error.may_pass:
                    raise
            # It counts the seconds from here: from the first failure on.
            again = Retrying(
                retry=retry_if_exception(lambda error: isinstance(error, StoreError) and error.may_pass),
                stop=stop_after_delay(self._seconds),
                wait=wait_random_exponential(multiplier=0.02, max=1.0),
                reraise=True,
            )
            return again(self._try)
        except StoreError as error:
            if len(self.failures) > 1:
                seconds = time.monotonic() - began
                error.args = (f"{error} (tried {len(self.failures)} times in {seconds:.1f} s)",)
            raise

    def _try(self) -> T:
        try:
            return self._function()
        except StoreError as error:
            self.failures.append(error)
            if error.may_pass:
                logger.info("%s: try %d failed, another may succeed: %s", self._name, len(self.failures), error)
            raise
