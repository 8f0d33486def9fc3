"""The `pgmemory` command: thin, one function a command, over `ConversationStore`. Starts without LangChain.

Exit codes: 0 done, 1 failed (one line on standard error), 2 wrong usage. No password is ever printed.
"""

from __future__ import annotations

from pgmemory.cli import (  # noqa: F401  # registers their commands
    branching,
    editing,
    explaining,
    graph,
    items,
    keeping,
    keys,
    look,
    move,
    setup,
    stats,
    tail,
    tenants,
)
from pgmemory.cli.app import main

__all__ = ["main"]
