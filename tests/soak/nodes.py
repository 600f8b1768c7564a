"""The nodes of the job, started through the command line, and the store of their rendezvous.

Nodes are started in advance. They import everything and then wait at a gate, so that a lost node is
replaced without delay. `Nodes.admit` opens the gate of one node.
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
# The numbers of workers of the nodes, in turn. At most one node at a time has three workers.
NODE_SIZES = (2, 1, 1, 2, 1, 1, 1, 3)
LEASE_S, HANG_TIMEOUT_S = 1.5, 2.0
# A node that has waited at its gate for this long is replaced, because an agent that waits two
# minutes for its fork server continues without it.
MAX_GATE_WAIT_S = 80.0
KILL_TIMEOUT_S = 10.0
FLAGS = (
    *("--nnodes", "1:3", "--rdzv-id", "soak", "--max-restarts", "1000000"),
    *("--hang-timeout", f"{HANG_TIMEOUT_S:g}", "--checkpoint-grace", "5"),
    *("--shutdown-timeout", "1", "--preload", "soak.start_gate"),
    *("--rdzv-conf", "last_call_timeout=0.1,keep_alive_interval=0.5,keep_alive_max_attempt=3"),
)


class SoakError(AssertionError):
    """The job did not do what it must do."""


class NodeProcess:
    """An `elasticrun` process with its gate, its proxy to the store, and its event log.

    Args:
        number: The number of the node, from 1.
        size: The number of its workers.
        directory: The directory of the job.
        proxy: The connection of the node to the store.
        steps: The number of steps of the job.
    """

    def __init__(self, number: int, size: int, directory: Path, proxy: Proxy, steps: int) -> None:
        self.number, self.size, self.proxy = number, size, proxy
        self.directory = directory / "nodes" / str(number)
        self.directory.mkdir(parents=True)
        self.gate, self.log = self.directory / "gate", self.directory / "log"
        self.started_at = time.monotonic()
        self._read_bytes = 0  # of the event log
        variables = {"SOAK_GATE": str(self.gate), "SOAK_NODE": str(number)}
        variables |= {"TMPDIR": os.environ.get("TMPDIR", "/tmp"), "OMP_NUM_THREADS": "1"}
        paths = (TESTS, os.environ.get("PYTHONPATH", ""))
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        flags = ("--nproc-per-node", str(size), "--rdzv-endpoint", proxy.address)
        logs = ("--log-dir", str(self.directory / "logs"))
        command = (sys.executable, "-m", "elasticlib.launch", *FLAGS, *flags, *logs)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                (*command, SCRIPT, str(directory), str(steps)),
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def is_ready(self) -> bool:
        """True if the node waits at its gate."""
        return self.gate.with_suffix(".ready").exists()

    def send(self, signal_number: int) -> None:
        """Send a signal to the agent."""
        os.kill(self.process.pid, signal_number)

    def kill(self) -> None:
        """Kill the agent with SIGKILL, and wait for its exit."""
        self.process.kill()
        self.process.wait(KILL_TIMEOUT_S)

    def new_events(self) -> Iterator[Event]:
        """Yield the events that were written since the last call."""
        for path in self.directory.glob("logs/*/events.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read_bytes)
                for line in file:
                    if not line.endswith(b"\n"):
                        break  # the line is still being written
                    self._read_bytes += len(line)
                    yield decode(line)

    def delete_old_attempts(self, keep: int = 3) -> None:
        """Delete the log directories of all but the newest attempts."""
        attempts = list(self.directory.glob("logs/*/attempt_*"))
        attempts.sort(key=lambda path: int(path.name.split("_")[1]))
        for path in attempts[:-keep]:
            shutil.rmtree(path, ignore_errors=True)

    def delete_files(self) -> None:
        """Delete the directory of the node."""
        shutil.rmtree(self.directory, ignore_errors=True)


class StoreProcess:
    """An `elasticlib store` process that can be killed, and started again at the same port."""

    def __init__(self, log: Path) -> None:
        self._log, self.port = log, 0
        self.start()

    def start(self) -> None:
        """Start the process, and wait until it accepts connections."""
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

        def find_address() -> re.Match[str] | None:
            return re.search(r"127\.0\.0\.1:(\d+)", self._log.read_text()[before:])

        self.port = int(wait_until("the store to serve", find_address, 20.0)[1])

    def kill(self) -> None:
        """Kill the process with SIGKILL, and wait for its exit."""
        self.process.kill()
        self.process.wait(KILL_TIMEOUT_S)


class Nodes:
    """The store, and all nodes that the soak has started."""

    def __init__(self, directory: Path, steps: int) -> None:
        self._directory, self._steps = directory, steps
        self.store = StoreProcess(directory / "store.log")
        self.present: list[NodeProcess] = []  # the nodes of the job, oldest first
        self.waiting: list[NodeProcess] = []  # the nodes at their gates, oldest first
        self.started = 0  # the number of nodes that were started
        self._removed: list[NodeProcess] = []  # nodes whose last events may not be read yet

    @property
    def world(self) -> int:
        """The number of workers of the nodes of the job."""
        return sum(node.size for node in self.present)

    @property
    def numbers(self) -> frozenset[int]:
        """The numbers of the nodes of the job."""
        return frozenset(node.number for node in self.present)

    def prepare(self, count: int) -> None:
        """Start nodes until this number of nodes waits at a gate, or soon will."""
        for node in [n for n in self.waiting if time.monotonic() - n.started_at > MAX_GATE_WAIT_S]:
            self.waiting.remove(node)
            self.discard(node)
        while len(self.waiting) < count:
            size = NODE_SIZES[self.started % len(NODE_SIZES)]
            if size == 3 and any(n.size == 3 for n in (*self.present, *self.waiting)):
                size = 1
            self.started += 1
            proxy = Proxy(lambda: ("127.0.0.1", self.store.port))
            node = NodeProcess(self.started, size, self._directory, proxy, self._steps)
            self.waiting.append(node)

    def discard(self, node: NodeProcess) -> None:
        """End a node that was never admitted."""
        node.kill()
        node.proxy.close()
        node.delete_files()

    def admit(self) -> NodeProcess:
        """Admit the node that has waited for the longest time."""
        node = self.waiting.pop(0)
        node.gate.touch()
        self.present.append(node)
        return node

    def remove(self, node: NodeProcess) -> None:
        """Remove a node that has exited from the nodes of the job."""
        self.present.remove(node)
        node.proxy.close()
        self._removed.append(node)

    def new_events(self) -> list[Event]:
        """Return the events of all nodes since the last call, in the order of their times."""
        nodes = (*self.present, *self._removed)
        events = [event for node in nodes for event in node.new_events()]
        return sorted(events, key=lambda event: event.monotonic)

    def delete_old_files(self) -> None:
        """Delete the files of removed nodes, and the logs of old attempts."""
        while self._removed:
            self._removed.pop().delete_files()
        for node in self.present:
            node.delete_old_attempts()

    def close(self) -> None:
        """Kill all processes."""
        for node in (*self.waiting, *self.present):
            if node.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    node.send(signal.SIGCONT)
                node.kill()
        self.store.kill()
        for node in (*self.waiting, *self.present):
            node.proxy.close()
