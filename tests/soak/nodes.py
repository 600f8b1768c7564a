"""The job's nodes, started through the command line, and the store that they meet in.

Nodes are started in advance and stand at a gate with all that they import, so that whoever is
lost is replaced at once; `come` lets one in.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from elasticlib.observe.event import Event, decode
from elasticlib.testing.waiting import wait_until

from .proxy import Proxy

SCRIPT = str(Path(__file__).with_name("training.py"))
TESTS = str(Path(__file__).parent.parent)
SIZES = (2, 1, 1, 2, 1, 1, 1, 3)
"""Workers of the nodes, in turn; of nodes with 3 there is one at a time."""
LEASE, HANG = 1.5, 2.0
LONGEST_WAIT = 80.0
"""Seconds at a gate, after which a node is replaced: an agent that has waited for its template for
two minutes goes on without it."""
FLAGS = (
    *("--nnodes", "1:3", "--rdzv-id", "soak", "--max-restarts", "1000000"),
    *("--hang-timeout", f"{HANG:g}", "--checkpoint-grace", "5"),
    *("--shutdown-timeout", "1", "--preload", "soak.gate"),
    *("--rdzv-conf", "last_call_timeout=0.1,keep_alive_interval=0.5,keep_alive_max_attempt=3"),
)


class SoakFailed(AssertionError):
    """The job did not do what it should have."""


class NodeProcess:
    """One `elasticrun` process, its gate, its way to the store, and its journal."""

    def __init__(self, number: int, size: int, folder: Path, proxy: Proxy, steps: int) -> None:
        self.number, self.size, self.proxy = number, size, proxy
        self.folder = folder / "nodes" / str(number)
        self.folder.mkdir(parents=True)
        self.gate, self.log = self.folder / "gate", self.folder / "log"
        self.began, self._read = time.monotonic(), 0
        here = {"SOAK_GATE": str(self.gate), "SOAK_NODE": str(number)}
        here |= {"TMPDIR": os.environ.get("TMPDIR", "/tmp"), "OMP_NUM_THREADS": "1"}
        paths = (TESTS, os.environ.get("PYTHONPATH", ""))
        here["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        flags = ("--nproc-per-node", str(size), "--rdzv-endpoint", proxy.address)
        logs = ("--log-dir", str(self.folder / "logs"))
        command = (sys.executable, "-m", "elasticlib.launch", *FLAGS, *flags, *logs)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                (*command, SCRIPT, str(folder), str(steps)),
                env={**os.environ, **here},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def ready(self) -> bool:
        """Whether it stands at its gate."""
        return self.gate.with_suffix(".ready").exists()

    def send(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10.0)

    def new_events(self) -> Iterator[Event]:
        """Those that were written since this was last asked."""
        for path in self.folder.glob("logs/*/events.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read)
                for line in file:
                    if not line.endswith(b"\n"):
                        break  # a part of one that is being written, whose rest may come next
                    self._read += len(line)
                    yield decode(line)

    def forget_attempts(self, but: int = 3) -> None:
        """A log folder keeps a folder for each attempt; of a job like this one that is too many."""
        attempts = list(self.folder.glob("logs/*/attempt_*"))
        attempts.sort(key=lambda path: int(path.name.split("_")[1]))
        for path in attempts[:-but]:
            shutil.rmtree(path, ignore_errors=True)

    def forget(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class StoreProcess:
    """`elasticlib store`, which can be killed and started again where it was."""

    def __init__(self, log: Path) -> None:
        self._log, self.port = log, 0
        self.start()

    def start(self) -> None:
        command = (sys.executable, "-m", "elasticlib.launch.cli", "store")
        before = self._log.stat().st_size if self._log.exists() else 0
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                (*command, "--bind", f"127.0.0.1:{self.port}"),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

        def serving() -> re.Match[str] | None:
            return re.search(r"127\.0\.0\.1:(\d+)", self._log.read_text()[before:])

        self.port = int(wait_until("the store to serve", serving, 20.0)[1])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10.0)


class Nodes:
    """present: those of the job, from old to new; waiting: those at their gates."""

    def __init__(self, folder: Path, steps: int) -> None:
        self._folder, self._steps = folder, steps
        self.store = StoreProcess(folder / "store.log")
        self.present: list[NodeProcess] = []
        self.waiting: list[NodeProcess] = []
        self.started = 0
        self._gone: list[NodeProcess] = []

    @property
    def world(self) -> int:
        return sum(node.size for node in self.present)

    @property
    def numbers(self) -> frozenset[int]:
        return frozenset(node.number for node in self.present)

    def prepare(self, count: int) -> None:
        """Start nodes until so many stand at their gates, or will soon."""
        for node in [n for n in self.waiting if time.monotonic() - n.began > LONGEST_WAIT]:
            self.waiting.remove(node)
            self.dismiss(node)
        while len(self.waiting) < count:
            size = SIZES[self.started % len(SIZES)]
            if size == 3 and any(n.size == 3 for n in (*self.present, *self.waiting)):
                size = 1
            self.started += 1
            proxy = Proxy(lambda: ("127.0.0.1", self.store.port))
            node = NodeProcess(self.started, size, self._folder, proxy, self._steps)
            self.waiting.append(node)

    def dismiss(self, node: NodeProcess) -> None:
        """End a node that has never come."""
        node.kill()
        node.proxy.close()
        node.forget()

    def come(self) -> NodeProcess:
        """Let in the node that has waited for longest."""
        node = self.waiting.pop(0)
        node.gate.touch()
        self.present.append(node)
        return node

    def leave(self, node: NodeProcess) -> None:
        """It is no node of the job any more; its end was seen."""
        self.present.remove(node)
        node.proxy.close()
        self._gone.append(node)

    def new_events(self) -> list[Event]:
        """Of all nodes, since this was last asked; what is of no more use is deleted."""
        found = [event for node in (*self.present, *self._gone) for event in node.new_events()]
        return sorted(found, key=lambda event: event.monotonic)

    def tidy(self) -> None:
        while self._gone:
            self._gone.pop().forget()
        for node in self.present:
            node.forget_attempts()

    def close(self) -> None:
        for node in (*self.waiting, *self.present):
            if node.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    node.send(signal.SIGCONT)
                node.kill()
        self.store.kill()
        for node in (*self.waiting, *self.present):
            node.proxy.close()
