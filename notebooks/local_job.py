"""A training job on this machine, which a notebook starts, observes and disturbs.

Its nodes are real `elasticrun` processes, each with an agent and workers. All files are in one
temporary directory, which is deleted when the job is closed, or at the latest when Python exits.
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

RUN_ID = "local"
TRAINING = str(Path(__file__).with_name("slow_training.py"))
LAST_CALL_S = 0.5  # a generation waits this long for late nodes; a reader waits for it
STORE_TIMEOUT_S = 2.0
POLL_INTERVAL_S = 0.05
WAIT_TIMEOUT_S, EXIT_TIMEOUT_S = 90.0, 30.0
CLOSE_TIMEOUT_S = 2.0  # for all nodes; a notebook that is shut down has five seconds


class JobTimeoutError(ElasticError):
    """The job did not reach the awaited status in time, or all of its nodes have exited."""


class LocalJob:
    """A training job whose nodes are started and stopped by method calls.

    Args:
        arguments: The arguments of the training script, after the directory.
        nnodes: The number of nodes, as for `--nnodes`.
        script: The training script. Its first argument is the directory of the job. By default it
            is `slow_training.py`.

    Attributes:
        dir: The directory of the job, which is deleted when the job is closed.
    """

    def __init__(self, *arguments: str, nnodes: str = "1:2", script: str = TRAINING) -> None:
        self._temporary = tempfile.TemporaryDirectory(
            prefix="elasticlib-local-", ignore_cleanup_errors=True
        )
        self.dir = Path(self._temporary.name)
        self._store = TcpStoreServer("127.0.0.1", 0, job=RUN_ID).start()
        self._flags = (
            f"--rdzv-id={RUN_ID}",
            f"--rdzv-endpoint={self._store.address}",
            f"--nnodes={nnodes}",
            "--max-restarts=3",
            f"--rdzv-conf=last_call_timeout={LAST_CALL_S}",
        )
        self._script = (script, str(self.dir), *arguments)
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        host, _, port = self._store.address.rpartition(":")
        self._client = TcpStore(host, int(port), job=RUN_ID, timeout=STORE_TIMEOUT_S)
        resources = (self._nodes, self._client, self._store, self._temporary)
        self.close = weakref.finalize(self, _close, *resources)

    def start_node(self, name: str, workers: int, *flags: str) -> None:
        """Start a node.

        Args:
            name: A name for `drain`.
            workers: The number of its workers.
            flags: More options of elasticrun.
        """
        environment = {**os.environ, "TMPDIR": str(self.dir)}
        command = [sys.executable, "-m", "elasticlib.launch", *self._flags, *flags]
        command += [f"--nproc-per-node={workers}", *self._script]
        with open(self.dir / f"{name}.log", "ab") as log:
            self._nodes[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )

    def status(self) -> JobStatus | None:
        """Return what `elasticlib status` shows, or None before a node has started."""
        return status_of(read_job(self._client, RUN_ID))

    def show(self) -> None:
        """Print the status like `elasticlib status`, without its table of ranks."""
        status = self.status()
        if status is not None:
            blocks = (headline(status), format_table(*node_table(status)))
            print("\n\n".join("\n".join(block) for block in blocks if block))

    def wait_until(
        self, condition: Callable[[JobStatus], bool], timeout: float = WAIT_TIMEOUT_S
    ) -> None:
        """Poll the status until it satisfies the condition.

        Raises:
            JobTimeoutError: All nodes have exited, or `timeout` seconds have passed. The message
                contains the logs of the nodes.
        """
        self._wait(lambda: (status := self.status()) is not None and condition(status), timeout)

    def wait_for_step(self, step: int, timeout: float = WAIT_TIMEOUT_S) -> None:
        """Wait until all workers have finished this step. Raises JobTimeoutError."""
        self.wait_until(lambda status: status.step is not None and status.step >= step, timeout)

    def wait_for_steps(self, count: int) -> None:
        """Wait until all workers have finished `count` more steps. Raises JobTimeoutError."""
        status = self.status()
        self.wait_for_step(count + (0 if status is None or status.step is None else status.step))

    def _wait(
        self, condition: Callable[[], bool], timeout: float, clock: Clock = monotonic
    ) -> None:
        deadline, pause = clock() + timeout, threading.Event()
        while not condition():
            have_exited = all(node.poll() is not None for node in self._nodes.values())
            if have_exited or clock() > deadline:
                reason = "all nodes have exited" if have_exited else f"{timeout:g} s have passed"
                logs = "".join(path.read_text() for path in sorted(self.dir.glob("*.log")))
                raise JobTimeoutError(f"the job is not in the awaited status: {reason}\n{logs}")
            pause.wait(POLL_INTERVAL_S)

    def kill_worker(self, rank: int) -> None:
        """Kill the process of this rank with SIGKILL, as the kernel does without memory.

        Raises:
            ConfigError: No such rank is running.
        """
        status = self.status()
        nodes = () if status is None else status.nodes
        names = {worker.rank: worker.name for node in nodes for worker in node.workers or ()}
        if rank not in names:
            raise ConfigError(f"rank must be one of the running ranks {sorted(names)}, got {rank}")
        os.kill(int(names[rank].removeprefix("pid ")), signal.SIGKILL)

    def drain(self, name: str) -> int:
        """Drain a node with SIGUSR2, as a scheduler does; return its exit code."""
        self._nodes[name].send_signal(signal.SIGUSR2)
        return self._nodes[name].wait(EXIT_TIMEOUT_S)

    def finish(self) -> list[int]:
        """Let the training end, and wait for the nodes; return their exit codes."""
        (self.dir / "finish").touch()
        return self.wait(EXIT_TIMEOUT_S)

    def wait(self, timeout: float = WAIT_TIMEOUT_S) -> list[int]:
        """Wait until all nodes have exited; return their exit codes. Raises JobTimeoutError."""
        nodes = self._nodes.values()
        self._wait(lambda: all(node.poll() is not None for node in nodes), timeout)
        return [node.returncode for node in nodes]

    def history(self) -> History:
        """Return the history of the job so far, from its events."""
        return read_history(self.dir / runs_dir().name)

    def report(self) -> Report:
        """Return the page that `elasticlib report` writes."""
        return Report(self.history())


def _close(
    nodes: dict[str, subprocess.Popen[bytes]],
    client: TcpStore,
    store: TcpStoreServer,
    temporary: tempfile.TemporaryDirectory[str],
) -> None:
    running = [node for node in nodes.values() if node.poll() is None]
    for node in running:
        node.terminate()
    deadline = monotonic() + CLOSE_TIMEOUT_S
    for node in running:
        try:
            node.wait(max(0.0, deadline - monotonic()))
        except subprocess.TimeoutExpired:
            node.kill()  # its workers end together with it
            node.wait()
    client.close()
    store.close()
    temporary.cleanup()
