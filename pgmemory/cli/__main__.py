"""``python -m pgmemory.cli``: the `pgmemory` command."""

from __future__ import annotations

from pgmemory.cli import main

main()
