"""A job on this machine to watch and to disturb, from a notebook or a prompt.

Its nodes are real `elasticrun`s, each with an agent and workers of its own. All that they write is
in one temporary folder, which goes when the job is closed, at the latest when Python ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

from elasticlib.clock import Clock, monotonic
from elasticlib.errors import ConfigError, ElasticError
from elasticlib.observe.formatting import format_table
from elasticlib.observe.history import History
from elasticlib.observe.history_reader import read_history
from elasticlib.observe.job_status import (
    JobStatus,
    headline,
    node_table,
    read_job,
    status_of,
)
from elasticlib.observe.report import Report
from elasticlib.observe.runs import runs_dir
from elasticlib.stores.tcp_client import TcpStore
from elasticlib.stores.tcp_server import TcpStoreServer

PACED = str(Path(__file__).with_name("paced.py"))
LAST_CALL = 0.5
"""Seconds that a generation waits for latecomers: there are few, and somebody watches."""
ANSWER_SECONDS = 2.0
LOOK_SECONDS = 0.05
BOUND_SECONDS, END_SECONDS = 90.0, 30.0
PATIENCE = 2.0
"""Seconds that nodes have to end when the job is closed: a notebook that is shut down has five."""


class JobStuck(ElasticError):
    """The job did not come to what was awaited of it, or has ended without."""


class WatchedJob:
    """A training in which nodes come and go as you say.

    Args:
        arguments: of the training script, after its folder.
        nnodes: how many nodes there may be, as `--nnodes` has it.
        script: is given the job's folder as its first argument; `paced.py` by default.

    Attributes:
        folder: holds what the job writes; it is gone when the job is closed.
    """

    def __init__(self, *arguments: str, nnodes: str = "1:2", script: str = PACED) -> None:
        self._room = tempfile.TemporaryDirectory(
            prefix="elasticlib-watched-", ignore_cleanup_errors=True
        )
        self.folder = Path(self._room.name)
        self._store = TcpStoreServer("127.0.0.1", 0, job="watched").start()
        place = ("--rdzv-id=watched", f"--rdzv-endpoint={self._store.address}")
        more = (
            f"--nnodes={nnodes}",
            "--max-restarts=3",
            f"--rdzv-conf=last_call_timeout={LAST_CALL}",
        )
        self._flags, self._script = (*place, *more), (script, str(self.folder), *arguments)
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        host, _, port = self._store.address.rpartition(":")
        self._client = TcpStore(host, int(port), job="watched", timeout=ANSWER_SECONDS)
        closing = (self._nodes, self._client, self._store, self._room)
        self.close = weakref.finalize(self, _close, *closing)

    def start_node(self, name: str, workers: int, *flags: str) -> None:
        """Start an `elasticrun` with so many workers. flags: more of its flags."""
        environment = {**os.environ, "TMPDIR": str(self.folder)}
        command = [sys.executable, "-m", "elasticlib.launch", *self._flags, *flags]
        command += [f"--nproc-per-node={workers}", *self._script]
        with open(self.folder / f"{name}.log", "ab") as log:
            self._nodes[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )

    def status(self) -> JobStatus | None:
        """What `elasticlib status` shows. None before there is a node."""
        return status_of(read_job(self._client, "watched"))

    def show(self) -> None:
        """Print the status as `elasticlib status` does, without its table of ranks."""
        status = self.status()
        if status is not None:
            parts = (headline(status), format_table(*node_table(status)))
            print("\n\n".join("\n".join(part) for part in parts if part))

    def until(self, there: Callable[[JobStatus], bool], seconds: float = BOUND_SECONDS) -> None:
        """Look at the status again and again, until it is as wanted.

        Raises:
            JobStuck: all nodes have ended, or `seconds` are over; with what they have said.
        """
        self._await(lambda: (status := self.status()) is not None and there(status), seconds)

    def until_step(self, step: int, seconds: float = BOUND_SECONDS) -> None:
        """Until all workers have made it. Raises JobStuck."""
        self.until(lambda status: status.step is not None and status.step >= step, seconds)

    def more_steps(self, count: int) -> None:
        """Until all workers have made so many more. Raises JobStuck."""
        status = self.status()
        self.until_step(count + (0 if status is None or status.step is None else status.step))

    def _await(self, there: Callable[[], bool], seconds: float, clock: Clock = monotonic) -> None:
        deadline, pause = clock() + seconds, threading.Event()
        while not there():
            over = all(node.poll() is not None for node in self._nodes.values())
            if over or clock() > deadline:
                why = "all nodes have ended" if over else f"{seconds:g} s are over"
                said = "".join(path.read_text() for path in sorted(self.folder.glob("*.log")))
                raise JobStuck(f"the job is not where it was awaited, and {why}:\n{said}")
            pause.wait(LOOK_SECONDS)

    def kill_worker(self, rank: int) -> None:
        """Kill the process of this rank, as the kernel does when memory runs out.

        Raises:
            ConfigError: no such rank runs.
        """
        status = self.status()
        standings = [node.status for node in status.nodes if node.status] if status else []
        names = {worker.rank: worker.name for told in standings for worker in told.workers}
        if rank not in names:
            raise ConfigError(f"the ranks that run are {sorted(names)}, got {rank}")
        os.kill(int(names[rank].removeprefix("pid ")), signal.SIGKILL)

    def drain(self, name: str) -> int:
        """Ask a node to leave, as a scheduler would, and wait for it: its exit code."""
        self._nodes[name].send_signal(signal.SIGUSR2)
        return self._nodes[name].wait(END_SECONDS)

    def finish(self) -> list[int]:
        """Tell the training that it is over, and wait for the nodes: their exit codes."""
        (self.folder / "finish").touch()
        return self.wait(END_SECONDS)

    def wait(self, seconds: float = BOUND_SECONDS) -> list[int]:
        """Wait for all nodes to end; their exit codes. Raises JobStuck."""
        nodes = self._nodes.values()
        self._await(lambda: all(node.poll() is not None for node in nodes), seconds)
        return [node.returncode for node in nodes]

    def history(self) -> History:
        """What the job's events tell of it, by now."""
        return read_history(self.folder / runs_dir().name)

    def report(self) -> Report:
        """What `elasticlib report` writes, by now."""
        return Report(self.history())


def _close(
    nodes: dict[str, subprocess.Popen[bytes]],
    client: TcpStore,
    store: TcpStoreServer,
    room: tempfile.TemporaryDirectory[str],
) -> None:
    left = [node for node in nodes.values() if node.poll() is None]
    for node in left:
        node.terminate()
    deadline = monotonic() + PATIENCE
    for node in left:
        try:
            node.wait(max(0.0, deadline - monotonic()))
        except subprocess.TimeoutExpired:
            node.kill()  # its workers end with it
            node.wait()
    client.close()
    store.close()
    room.cleanup()
