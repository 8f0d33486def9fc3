"""A campaign of random faults: ``python tests/chaos [--seed N] [--seconds 120] [--turns N] [--faults N]``.

Writers and readers, in threads and in processes, share some conversations on one PostgreSQL server, which the campaign
starts in a temporary folder; some reach it directly, some through a proxy, some over a small pool of their own.
Meanwhile the server is restarted and killed, sessions, connections and writers are killed, connections stall, rows are
locked and saves are cancelled. A generator with the seed chooses all that can be chosen: faults and what they hit,
conversations, memories, ways of saving. The clock and the scheduler do the rest, so that no two campaigns are equal.

A turn is *acknowledged* when its save has returned. Where a save raised, its writer stores the turn that the error
carries under that error's idempotency key until this returns; where a save was cancelled, or is delivered twice on
purpose, under a key of the writer's own. A writer that was killed has not acknowledged its last turn: that one may be
there or not. A fault counts when it has had an effect: a connection was cut, a save was refused a connection, …

Afterwards every row is read by plain SQL. *Lost* are acknowledged turns that are absent, *doubled* are turns that are
there more than once, *cut* are turns that are there in part or whose messages are not neighbours, and *misordered* are
turns behind a later one of the same writer in the same conversation, and messages whose number is not one more than
that of the message before, from 0. What was wrong with a window that was loaded meanwhile counts in the same way.

The exit code is 0 if all four are 0, no client failed and the wanted numbers of turns and faults were reached.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, closing
from multiprocessing.context import ForkServerProcess
from pathlib import Path

# For this process and for those that it starts.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])

import psycopg2
from chaos.audit import Audit, Turn, audit, read_log, table
from chaos.clients import (
    APPLICATION_NAME,
    SCHEMA,
    Client,
    Reader,
    Settings,
    SmallPool,
    Writer,
    open_store,
    read_journals,
    write_in_process,
)
from chaos.faults import Faults
from documents import with_section
from fault_proxy import FaultProxy
from psycopg2.extensions import make_dsn
from servers import Server

_PATIENCE_SECONDS = 90.0  # longer than a writer tries to store a turn
_PROGRESS_SECONDS = 10.0
_LONGEST_PAUSE_SECONDS = 0.25  # between two faults
_SHOWN_FINDINGS = 20


class Processes:
    """Writers in processes of their own, each replaced by another one when it is killed."""

    def __init__(self, dsns: list[str], settings: Settings) -> None:
        # Forked from a process without threads that has imported everything already: a replacement costs little.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["chaos.clients"])
        self._settings = settings
        self._count = 0
        self._running = {dsn: self._start(dsn) for dsn in dsns}

    def kill_one(self, random: random.Random) -> None:
        """Kill one of the writers and start another one in its place."""
        dsn = random.choice(sorted(self._running))
        self._running[dsn].kill()
        self._running[dsn].join()
        self._running[dsn] = self._start(dsn)

    def failures(self) -> list[str]:
        """Name the writers that have failed."""
        processes = self._running.values()
        return [f"{process.name} ended with {process.exitcode}" for process in processes if process.exitcode]

    def join(self, deadline: float) -> list[str]:
        """Wait until all have ended, and name those that have not by then."""
        for process in self._running.values():
            process.join(max(0.0, deadline - time.monotonic()))
        return [f"{process.name} did not end" for process in self._running.values() if process.is_alive()]

    def kill(self) -> None:
        """Kill those that still run."""
        for process in self._running.values():
            process.kill()
            process.join()

    def _start(self, dsn: str) -> ForkServerProcess:
        # Never the name of one that was killed: what that one had sent may still take effect.
        self._count += 1
        name = f"process{self._count}"
        process = self._context.Process(
            target=write_in_process, args=(name, dsn, self._settings), name=name, daemon=True
        )
        process.start()
        return process


class Campaign:
    """One campaign in a folder of its own; all that it starts ends with the `stack`."""

    def __init__(self, seed: int, seconds: float, folder: Path, stack: ExitStack) -> None:
        # A save is acknowledged when its commit is in the log: with synchronous_commit=on the server hands that over to
        # the kernel before it answers. The kernel outlives every process that is killed here, so fsync may be off: it
        # guards against power cuts. full_page_writes stays on, for SIGKILL can tear a page in two even so.
        self._server = Server.initialise(
            folder / "server", fsync="off", synchronous_commit="on", full_page_writes="on"
        )
        stack.callback(self._server.stop, "immediate")
        self._server.start()
        proxy = stack.enter_context(FaultProxy(self._server.dsn))
        direct, through_proxy = (
            make_dsn(dsn, connect_timeout=2, application_name=APPLICATION_NAME)
            for dsn in (self._server.dsn, proxy.dsn)
        )
        pool = SmallPool(direct)
        stack.callback(pool.closeall)
        stores = {
            "direct": open_store(direct),
            "proxy": open_store(through_proxy),
            # This one raises at every fault that it meets, so that its writers store what the errors carry.
            "pool": open_store(pool, retry_seconds=0),
        }
        for store in stores.values():
            stack.callback(store.close)
        stores["direct"].setup()

        self.folder = folder
        self._running = folder / "running"
        self._running.touch()
        stack.callback(self._running.unlink, missing_ok=True)
        self._settings = Settings(seed, folder, time.monotonic() + seconds)
        writers = [
            Writer(f"{name}{number}", store, self._settings) for name, store in stores.items() for number in (1, 2)
        ]
        readers = [Reader(f"reader-{name}", stores[name], self._settings) for name in ("direct", "proxy")]
        self._clients: list[Client] = [*writers, *readers]
        self._processes = Processes([direct, through_proxy], self._settings)
        stack.callback(self._processes.kill)
        self._random = random.Random(f"{seed} pauses")
        self._faults = Faults(seed, self._server, proxy, pool, writers, self._processes.kill_one)

    def run(self, turns: int | None, faults: int | None) -> list[str]:
        """Let the clients work and do harm until the time is over, or the wanted numbers are reached.

        Returns:
            Who failed.
        """
        threads = [threading.Thread(target=client.run, name=client.name, daemon=True) for client in self._clients]
        for thread in threads:
            thread.start()
        show_at = time.monotonic() + _PROGRESS_SECONDS
        while self._settings.go_on() and not self._failed():
            self._faults.inject()
            done_turns, done_faults = len(self.acknowledged()), sum(self.faults().values())
            if (turns or faults) and done_turns >= (turns or 0) and done_faults >= (faults or 0):
                break
            if time.monotonic() > show_at:
                show_at += _PROGRESS_SECONDS
                print(f"{done_turns} turns, {done_faults} faults", file=sys.stderr, flush=True)
            time.sleep(self._random.uniform(0, _LONGEST_PAUSE_SECONDS))
        self._running.unlink()
        self._faults.end()
        deadline = time.monotonic() + _PATIENCE_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        hanging = [f"{thread.name} did not end" for thread in threads if thread.is_alive()]
        return hanging + self._processes.join(deadline) + self._failed()

    def acknowledged(self) -> set[tuple[str, Turn]]:
        """Return the turns that writers have noted, with their conversations."""
        notes = read_journals(self.folder)
        return {(words[1], Turn(client, int(words[2]))) for client, words in notes if words[0] == "acknowledged"}

    def faults(self) -> dict[str, int]:
        """Return the faults that were injected so far."""
        return self._faults.injected()

    def audit(self) -> Audit:
        """Read all that is stored, and what readers noted."""
        with closing(psycopg2.connect(self._server.dsn)) as connection:
            found = audit(read_log(connection, SCHEMA), self.acknowledged())
        for client, words in read_journals(self.folder):
            if words[0] == "misread":
                getattr(found.findings, words[1]).append(f"{client}: {words[2]}")
        return found

    def _failed(self) -> list[str]:
        failed = [f"{client.name}: {client.error!r}" for client in self._clients if client.error is not None]
        return failed + self._processes.failures()


def main() -> int:
    """Run a campaign as the command line says, print its table, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python tests/chaos", description="A campaign of random faults.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=120.0, help="how long at most (default: 120)")
    parser.add_argument("--turns", type=int, help="how many acknowledged turns are wanted")
    parser.add_argument("--faults", type=int, help="how many faults are wanted")
    parser.add_argument("--report", type=Path, metavar="FILE", help="put the table into this document, too")
    arguments = parser.parse_args()

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # as Ctrl-C: what was started is ended
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pgmemory-chaos-")))
        folder.chmod(0o711)  # the server runs as another user where this one is root
        os.environ["TIKTOKEN_CACHE_DIR"] = str(folder / "encodings")
        campaign = Campaign(arguments.seed, arguments.seconds, folder, stack)
        began_at = time.monotonic()
        failures = campaign.run(arguments.turns, arguments.faults)
        seconds = time.monotonic() - began_at
        findings, unsure = campaign.audit()
        turns, faults = len(campaign.acknowledged()), campaign.faults()

    for what, done, wanted in (("turns", turns, arguments.turns), ("faults", sum(faults.values()), arguments.faults)):
        if wanted is not None and done < wanted:
            failures.append(f"only {done} {what} of {wanted}")
    for kind, lines in vars(findings).items():
        failures += [f"{kind}: {line}" for line in lines[:_SHOWN_FINDINGS]]
    for failure in failures:
        print(failure, file=sys.stderr)
    outcome = table(arguments.seed, seconds, turns, unsure, faults, findings)
    print(outcome)
    if arguments.report is not None:
        document = arguments.report.read_text() if arguments.report.exists() else ""
        arguments.report.write_text(with_section(document, f"chaos: seed {arguments.seed}", outcome))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
