"""The pytest plugin that other people's tests are run with: swaps our classes in, and notes what became of each test.

Owns: what happens inside their test process. Its program is ``python tests/peers``.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg2
import pytest
from peers.stand_ins import stand_ins, swap
from psycopg2 import sql

from pgmemory import ConversationStore

DSN = "PGMEMORY_TEST_DSN"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the plugin's own options."""
    group = parser.getgroup("pgmemory")
    group.addoption("--outcomes", type=Path, required=True, help="write what became of each test into this file")
    group.addoption("--memory-module", required=True, help="the module that exports LangChain's memories")


def pytest_configure(config: pytest.Config) -> None:
    """Swap before the first test module is imported."""
    config.pluginmanager.register(Peers(config.option.outcomes, config.option.memory_module), "pgmemory-peers")


class Peers:
    """One run over a schema of its own, which is dropped afterwards."""

    def __init__(self, outcomes: Path, memory_module: str) -> None:
        self._path = outcomes
        self._outcomes: dict[str, dict[str, Any]] = {}
        self._running: str | None = None
        self._schema = f"peers_{uuid.uuid4().hex[:12]}"
        self._store = ConversationStore(os.environ[DSN], schema=self._schema, on_operation=self._note_operation)
        self._store.setup()
        swap(stand_ins(self._store, memory_module))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Know which test runs."""
        self._running = item.nodeid
        self._outcomes[item.nodeid] = {"passed": True, "stored": False, "why": ""}
        try:
            return (yield)
        finally:
            self._running = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that failed or was skipped, in whichever phase."""
        if not report.passed:
            self._outcomes[report.nodeid].update(passed=False, why=_why(report))

    def pytest_unconfigure(self) -> None:
        """Write the outcomes and leave nothing in the database."""
        self._path.write_text(json.dumps(self._outcomes))
        self._store.close()
        connection = psycopg2.connect(os.environ[DSN])
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute("set client_min_messages = warning")
            cursor.execute(sql.SQL("drop schema if exists {} cascade").format(sql.Identifier(self._schema)))
        connection.close()

    def _note_operation(self, operation: Any) -> None:
        if self._running is not None:
            self._outcomes[self._running]["stored"] = True


def _why(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return f"{report.outcome}: {crash.message if crash else report.longreprtext.strip()}"
