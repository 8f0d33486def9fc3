"""Progress bars for long work: on standard error, where that is a terminal; nothing in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(label: str, total: int | None = None) -> Iterator[Callable[..., object]]:
    """Show how far a long work is.

    Args:
        label: What is being done.
        total: How much there is to do, if that is known.

    Yields:
        A function to call with how much is done so far, and with the total where it was not known or has changed.
    """
    if not sys.stderr.isatty():
        yield lambda done, total=None: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=total)
        yield lambda done, total=total: progress.update(task, completed=done, total=total)
