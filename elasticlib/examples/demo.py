"""Demo: a training job that loses a worker, gains a node and loses it. Run it with `make demo`.

The demo only uses the command line and signals, as on a cluster. At the end, it checks the samples
that were used and the weights. The exit code is 0 if both are correct.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import attrs

from elasticlib import TcpStoreServer
from elasticlib.clock import monotonic
from elasticlib.errors import ElasticError
from elasticlib.numpy_warning import missing_numpy_ignored

SCRIPT = str(Path(__file__).with_name("train_text.py"))
BATCH_SIZE = 16
RESIZE_EPOCHS = 3  # enough for a node to import torch, to join and to be killed
CLOSE_TIMEOUT_S = 10.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PROGRESS = re.compile(r"epoch (\d+) step (\d+)/\d+ loss (\S+) \(world (\d+), generation (\d+)\)")
STARTED = re.compile(r"generation (\d+): .*, restarts \d+/\d+; reason: (.*)$")


class DemoError(ElasticError):
    """The job of the demo did not behave as expected."""


@attrs.define
class Generation:
    """A generation of the job with faults."""

    reason: str  # why it was started
    world_size: int = 0
    recovery_s: float | None = None  # from the fault to the first reported step; None if none was


class DemoRunner:
    """Starts the nodes, prints their output and follows the progress of the training.

    Args:
        directory: Directory for checkpoints and traces.
        timeout_s: Time limit in seconds for each wait.
    """

    def __init__(self, directory: Path, timeout_s: float) -> None:
        self.directory = directory
        self.generations: dict[int, Generation] = {}
        self.epoch, self.step, self.world_size, self.loss = 0, 0, 0, float("nan")
        self._timeout_s = timeout_s
        self._started_at = self._fault_at = monotonic()
        self._lines: queue.SimpleQueue[tuple[str, str | None]] = queue.SimpleQueue()
        self._nodes: list[tuple[subprocess.Popen[str], threading.Thread]] = []

    def log(self, text: str) -> None:
        print(f"{monotonic() - self._started_at:5.1f} s  {text}", flush=True)

    def announce_fault(self, description: str) -> None:
        """Log what happens next, and measure the recovery from now on."""
        self.log(f"---- {description}")
        self._fault_at = monotonic()

    def start_node(self, name: str, *arguments: str) -> subprocess.Popen[str]:
        """Start an elasticrun process, and read its output in a thread."""
        node = subprocess.Popen(
            [sys.executable, "-m", "elasticlib.launch", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        reader = threading.Thread(target=self._read_output, args=(name, node), daemon=True)
        self._nodes.append((node, reader))
        reader.start()
        return node

    def _read_output(self, name: str, node: subprocess.Popen[str]) -> None:
        for line in node.stdout or ():
            self._lines.put((name, line.rstrip()))
        self._lines.put((name, None))

    def wait_for_step(self, *, epoch: int, step: int = 0, world_size: int | None = None) -> None:
        """Print the output until a step of this epoch, or a later one, is reported."""
        deadline = monotonic() + self._timeout_s
        while True:
            name, line = self._next_line(deadline)
            if line is None:
                raise DemoError(f"{name} exited")
            if not self._handle_line(name, line):
                continue
            if (self.epoch, self.step) >= (epoch, step) and world_size in (None, self.world_size):
                return

    def wait_for_exit(self, node_name: str) -> None:
        """Print the output until this node exits."""
        deadline = monotonic() + self._timeout_s
        while True:
            name, line = self._next_line(deadline)
            if line is not None:
                self._handle_line(name, line)
            elif name == node_name:
                return

    def _next_line(self, deadline: float) -> tuple[str, str | None]:
        """Return the name of a node with its next line of output, or with None if it has exited."""
        try:
            return self._lines.get(timeout=max(0.01, deadline - monotonic()))
        except queue.Empty:
            raise DemoError(f"no progress within {self._timeout_s:g} s") from None

    def _handle_line(self, name: str, line: str) -> bool:
        """Print a line and read the progress from it. Return True if it reports a step."""
        self.log(f"{name}: {line}")
        if started := STARTED.search(line):
            self.generations.setdefault(int(started[1]), Generation(started[2]))
        progress = PROGRESS.search(line)
        if progress is None:
            return False
        self.epoch, self.step, self.world_size = (int(progress[group]) for group in (1, 2, 4))
        self.loss = float(progress[3])
        generation = self.generations.get(int(progress[5]))
        if generation is not None and generation.recovery_s is None:
            generation.world_size = self.world_size
            generation.recovery_s = monotonic() - self._fault_at
        return True

    def close(self) -> None:
        """Kill the agents that still run, and wait until their workers have died with them."""
        for node, _ in self._nodes:
            if node.poll() is None:
                node.kill()
            node.wait()
        for _, reader in self._nodes:
            reader.join(CLOSE_TIMEOUT_S)  # it ends when no process has the agent's output open


def _exit_on_signal(number: int, _: object) -> None:
    # Only the first signal: the next ones must not interrupt the end of the jobs.
    for each in STOP_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise SystemExit(128 + number)


def children(pid: int) -> list[int]:
    """Return the child processes in the order in which they were started."""
    files = Path(f"/proc/{pid}/task").glob("*/children")  # one for each thread
    return [int(child) for file in files for child in file.read_text().split()]


def process_name(pid: int) -> str:
    """Return the name that the kernel has of a process."""
    return Path(f"/proc/{pid}/comm").read_text().strip()


def forked_workers(fork_server: int) -> list[int]:
    """Return the workers of a fork server, and of the second one that it has forked."""
    workers = []
    for child in children(fork_server):
        is_fork_server = process_name(child) == "fork-server"
        workers += forked_workers(child) if is_fork_server else [child]
    return workers


def worker_pid(node: subprocess.Popen[str], local_rank: int) -> int:
    """Return the pid of a worker. Fork servers fork workers in the order of their ranks."""
    for child in children(node.pid):
        if process_name(child) == "fork-server":
            return forked_workers(child)[local_rank]
    raise DemoError(f"process {node.pid} has no fork server")


def training_command(directory: Path, run: str, samples: int, epochs: int) -> list[str]:
    """Return the training script with its arguments."""
    return [
        SCRIPT,
        f"--checkpoint-dir={directory / run}",
        f"--trace={directory / run}.trace",
        f"--samples={samples}",
        f"--global-batch={BATCH_SIZE}",
        f"--epochs={epochs}",
        "--save-every=10",
        "--keep-last=10000",
    ]


def run_baseline(runner: DemoRunner, samples: int) -> None:
    """Train one epoch on two workers without faults."""
    runner.announce_fault("1. baseline: one epoch on two workers without faults")
    command = training_command(runner.directory, "baseline", samples, epochs=1)
    runner.start_node("baseline", "--standalone", "--nproc-per-node=2", *command)
    runner.wait_for_exit("baseline")
    runner.generations.clear()
    runner.epoch = runner.step = 0


def run_with_faults(runner: DemoRunner, samples: int) -> None:
    """Train the same epoch while a worker is killed, and more while a node joins and is killed."""
    runner.announce_fault("2. the same epoch with a killed worker, then a node joins and is killed")
    steps_per_epoch = -(-samples // BATCH_SIZE)
    command = training_command(runner.directory, "faulty", samples, epochs=1 + RESIZE_EPOCHS)
    with TcpStoreServer("127.0.0.1", 0, job="demo").start() as store:
        flags = [
            *("--nnodes", "1:2"),
            *("--rdzv-id", "demo"),
            *("--rdzv-endpoint", store.address),
            *("--rdzv-conf", "last_call_timeout=0.5"),
            *("--max-restarts", "3"),
        ]
        first = runner.start_node("node A", *flags, "--nproc-per-node", "2", *command)
        runner.wait_for_step(epoch=0, step=steps_per_epoch // 2)
        pid = worker_pid(first, 1)
        runner.announce_fault(f"kill -9 {pid}: a worker of node A, in the middle of epoch 0")
        os.kill(pid, signal.SIGKILL)
        runner.wait_for_step(epoch=1, step=steps_per_epoch + 1)
        runner.announce_fault("node B joins with one worker")
        second = runner.start_node("node B", *flags, "--nproc-per-node", "1", *command)
        runner.wait_for_step(epoch=1, world_size=3)
        runner.wait_for_step(epoch=1, step=runner.step + steps_per_epoch // 4)
        runner.announce_fault(f"kill -9 {second.pid}: the agent of node B; its worker dies with it")
        second.kill()
        runner.wait_for_exit("node A")
        if first.wait() != 0:
            raise DemoError(f"node A exited with code {first.returncode}")


def has_equal_weights(directory: Path, step: int) -> bool:
    """Return True if both runs had bitwise equal weights after this step."""
    with missing_numpy_ignored():
        from elasticlib import CheckpointManager  # imports torch

    baseline = CheckpointManager(directory / "baseline").load(step)["model"]
    faulty = CheckpointManager(directory / "faulty").load(step)["model"]
    return baseline.keys() == faulty.keys() and all(
        weight.equal(faulty[name]) for name, weight in baseline.items()
    )


def count_samples(directory: Path) -> tuple[int, int, dict[int, Counter[int]]]:
    """Read the traces of the run with faults.

    Only the last generation that trained on a step counts for it.

    Returns:
        The number of steps, the number of repeated steps, and for each epoch how often each sample
        was used.
    """
    steps: dict[int, dict[int, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for path in directory.glob("faulty.trace.*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            if "step" in line:
                steps[line["step"]][line["generation"]].append(line)
    uses: dict[int, Counter[int]] = defaultdict(Counter)
    for generations in steps.values():
        for line in generations[max(generations)]:
            uses[line["epoch"]].update(line["indices"])
    return len(steps), sum(len(generations) - 1 for generations in steps.values()), uses


def print_results(runner: DemoRunner, samples: int) -> bool:
    """Print the results, and return True if all of them are correct."""
    num_steps, num_repeated, uses = count_samples(runner.directory)
    is_exactly_once = all(used == Counter(range(samples)) for used in uses.values())
    is_equal = has_equal_weights(runner.directory, -(-samples // BATCH_SIZE))
    print("\ngeneration  workers  recovery   reason")
    for number, generation in runner.generations.items():
        seconds = "-" if generation.recovery_s is None else f"{generation.recovery_s:.1f} s"
        print(f"{number:10}  {generation.world_size:7}  {seconds:>8}   {generation.reason}")
    print(f"\nlast loss {runner.loss:.2f} after {num_steps} steps, {num_repeated} repeated")
    for epoch, used in sorted(uses.items()):
        print(f"epoch {epoch}: {sum(used.values())} samples used, {len(used)} of {samples}")
    print(f"each sample of each epoch exactly once: {'yes' if is_exactly_once else 'NO'}")
    print(
        "weights after epoch 0 (one worker killed) bitwise equal to the baseline: "
        f"{'yes' if is_equal else 'NO'}"
    )
    is_complete = len(uses) == 1 + RESIZE_EPOCHS and len(runner.generations) == 4
    return is_exactly_once and is_equal and is_complete


def main(arguments: list[str] | None = None) -> int:
    """Run the demo, and return the exit code."""
    parser = argparse.ArgumentParser(description="a training job that loses a worker and a node")
    parser.add_argument("--samples", type=int, default=3200, help="samples per epoch")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for each wait")
    args = parser.parse_args(arguments)
    for number in STOP_SIGNALS:
        signal.signal(number, _exit_on_signal)
    with tempfile.TemporaryDirectory(prefix="elasticlib-demo-") as directory:
        runner = DemoRunner(Path(directory), args.timeout)
        try:
            run_baseline(runner, args.samples)
            run_with_faults(runner, args.samples)
            is_correct = print_results(runner, args.samples)
        except ElasticError as error:
            print(f"demo: FAILED: {error}", file=sys.stderr)
            return 1
        finally:
            runner.close()
    return 0 if is_correct else 1


if __name__ == "__main__":
    sys.exit(main())
