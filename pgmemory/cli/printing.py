"""Printing: tables and lines that any output can take, and files that are whole or not there."""

from __future__ import annotations

import errno
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import wraps
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import click

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_LINE_ENDS = re.compile(r"\s*[\r\n\t]\s*")

F = TypeVar("F", bound=Callable[..., Any])


def print_rich(*things: RenderableType, wrap: bool = True) -> None:
    """Print what rich renders: in colour and as wide as it is on a terminal, else plain and 80 columns wide.

    Args:
        *things: One below the other.
        wrap: Wrap lines that are longer.
    """
    from rich.console import Console

    console = Console(highlight=False)
    with console.capture() as captured:
        console.print(*things, sep="\n", soft_wrap=not wrap)
    print_line("\n".join(line.rstrip() for line in captured.get().splitlines()))


def new_table() -> Table:
    """Return a table of rich that leaves room for its content."""
    from rich.table import Table

    return Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))


def print_line(line: str) -> None:
    """Print a line; characters that the output does not have stand as escapes. The line is out when this returns."""
    encoding = _encoding()
    click.echo(line.encode(encoding, "backslashreplace").decode(encoding))


def can_print(text: str) -> bool:
    """Tell whether the output has these characters."""
    try:
        text.encode(_encoding())
    except UnicodeEncodeError:
        return False
    return True


def _encoding() -> str:
    return getattr(sys.stdout, "encoding", None) or "utf-8"


def one_line(text: str) -> str:
    """Return a text on one line, with what a terminal would obey made visible."""
    from pgmemory.transcript import visible

    return visible(_LINE_ENDS.sub(" ", text), one_line=True)


def in_utc(time: datetime) -> str:
    """Return a time in UTC to the minute."""
    return f"{time.astimezone(timezone.utc):%Y-%m-%d %H:%M}"


def size(count: int) -> str:
    """Return a number of bytes in a unit that suits it."""
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if unit == "B" or value >= 10 else f"{value:.1f} {unit}"


def while_read(command: F) -> F:
    """Let a command that only prints end quietly, and well, when nobody reads on, as `head` does not."""

    @wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except OSError as error:
            # What is still to be flushed goes nowhere, instead of failing once more at the end of the process.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if error.errno != errno.EPIPE:
                raise

    return wrapped  # type: ignore[return-value]


@contextmanager
def written_file(path: str) -> Iterator[BinaryIO]:
    """Give a file to write, `-` for standard output, that takes its name when it is whole, or never.

    It holds conversations: nobody but its owner may read it. A link is followed to the file that it leads to.

    Raises:
        ClickException: It cannot be written.
    """
    if path == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    try:
        if os.path.exists(path) and not os.path.isfile(path):  # a pipe or a device
            with open(path, "wb") as out:
                yield out
            return
        path = os.path.realpath(path)
        # Of a name that nobody can foresee: in a folder of others, a link in its place would lead it elsewhere.
        descriptor, part = tempfile.mkstemp(prefix=f".{os.path.basename(path)[:100]}.", dir=os.path.dirname(path))
        try:
            with open(descriptor, "wb") as out:
                yield out
            os.replace(part, path)
        except BaseException:
            os.unlink(part)
            raise
    except OSError as error:
        raise click.ClickException(f"cannot write the file: {error.strerror}") from error
