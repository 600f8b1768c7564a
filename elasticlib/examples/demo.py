"""A real training job that loses a worker, gains a node and loses it: `make demo`.

Everything here goes through the command line and through signals, as it would on a cluster, and
the end counts what is left: samples and weights. Exit code 0 means that all was right.
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

from elasticlib import CheckpointManager, TcpStoreServer
from elasticlib.clock import monotonic
from elasticlib.errors import ElasticError

SCRIPT = str(Path(__file__).with_name("train_text.py"))
BATCH = 16
MORE_EPOCHS = 3
"""In which a node joins, once it has imported torch, and is killed."""
PROGRESS = re.compile(r"epoch (\d+) step (\d+)/\d+ loss (\S+) \(world (\d+), generation (\d+)\)")
STARTED = re.compile(r"generation (\d+): .*, restarts \d+/\d+; reason: (.*)$")


class DemoFailed(ElasticError):
    """Something that the demo promises did not come about."""


@attrs.define
class Generation:
    """Why it began, how large it is, and what it cost until training went on.

    seconds: from the fault to the first step that was reported again; None where none was.
    """

    cause: str
    world: int = 0
    seconds: float | None = None


class Stage:
    """Starts nodes, shows what they say, and knows where the training stands."""

    def __init__(self, folder: Path, patience: float) -> None:
        self.folder = folder
        self.generations: dict[int, Generation] = {}
        self.epoch, self.step, self.world, self.loss = 0, 0, 0, float("nan")
        self._patience = patience
        self._began = self._disturbed = monotonic()
        self._lines: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._nodes: list[subprocess.Popen[str]] = []

    def say(self, text: str) -> None:
        print(f"{monotonic() - self._began:5.1f} s  {text}", flush=True)

    def disturb(self, what: str) -> None:
        """From now on, time is lost."""
        self.say(f"---- {what}")
        self._disturbed = monotonic()

    def start(self, name: str, *arguments: str) -> subprocess.Popen[str]:
        """One node: an elasticrun of its own."""
        node = subprocess.Popen(
            [sys.executable, "-m", "elasticlib.launch", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._nodes.append(node)
        threading.Thread(target=self._read, args=(name, node), daemon=True).start()
        return node

    def _read(self, name: str, node: subprocess.Popen[str]) -> None:
        for line in node.stdout or ():
            self._lines.put((name, line.rstrip()))
        self._lines.put((name, "END"))

    def until(self, *, epoch: int = 0, step: int = 0, end_of: str = "", world: int = 0) -> None:
        """Show what is said until the training has come so far, or a node has ended."""
        deadline = monotonic() + self._patience
        while True:
            try:
                name, line = self._lines.get(timeout=max(0.01, deadline - monotonic()))
            except queue.Empty:
                raise DemoFailed(f"no progress within {self._patience:g} s") from None
            if line != "END":
                self.say(f"{name}: {line}")
                reported = self._note(line)
                there = (self.epoch, self.step) >= (epoch, step) and world in (0, self.world)
                if reported and there and not end_of:
                    return
            elif name == end_of:
                return

    def _note(self, line: str) -> bool:
        """Remember what a line tells; whether it reports a step."""
        if started := STARTED.search(line):
            self.generations.setdefault(int(started[1]), Generation(started[2]))
        progress = PROGRESS.search(line)
        if progress is None:
            return False
        self.epoch, self.step, self.world = (int(progress[at]) for at in (1, 2, 4))
        self.loss = float(progress[3])
        generation = self.generations.get(int(progress[5]))
        if generation is not None and generation.seconds is None:
            generation.world = self.world
            generation.seconds = monotonic() - self._disturbed
        return True

    def close(self) -> None:
        for node in self._nodes:
            if node.poll() is None:
                node.kill()
            node.wait()


def children(pid: int) -> list[int]:
    """In the order in which they began."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def forked_by(server: int) -> list[int]:
    """Return the workers of a fork server, and of the second one that it has forked."""
    found = []
    for child in children(server):
        found += forked_by(child) if name_of(child) == "fork-server" else [child]
    return found


def worker_of(node: subprocess.Popen[str], local_rank: int) -> int:
    """Return the pid of a node's worker. Fork servers fork workers in the order of their ranks."""
    for supervisor in children(node.pid):
        for child in children(supervisor):
            if name_of(child) == "fork-server":
                return forked_by(child)[local_rank]
    raise DemoFailed(f"process {node.pid} has no fork server")


def training(folder: Path, name: str, args: argparse.Namespace, epochs: int) -> list[str]:
    """The script with its arguments."""
    where = [f"--checkpoint-dir={folder / name}", f"--trace={folder / name}.trace"]
    sizes = [f"--samples={args.samples}", f"--global-batch={BATCH}", f"--epochs={epochs}"]
    return [SCRIPT, *where, *sizes, "--save-every=10", "--keep-last=10000"]


def undisturbed(stage: Stage, args: argparse.Namespace) -> None:
    stage.disturb("1. one epoch on two workers, undisturbed: what the weights should be")
    work = training(stage.folder, "calm", args, epochs=1)
    stage.start("calm", "--standalone", "--nproc-per-node=2", *work)
    stage.until(end_of="calm")
    stage.generations.clear()
    stage.epoch = stage.step = 0


def disturbed(stage: Stage, args: argparse.Namespace) -> None:
    stage.disturb(
        "2. the same epoch with a worker killed, then more with a node that comes and goes"
    )
    steps = -(-args.samples // BATCH)
    with TcpStoreServer("127.0.0.1", 0, job="demo").start() as store:
        place = ("--nnodes", "1:2", "--rdzv-id", "demo", "--rdzv-endpoint", store.address)
        flags = (*place, "--max-restarts", "3", "--rdzv-conf", "last_call_timeout=0.5")
        work = training(stage.folder, "storm", args, epochs=1 + MORE_EPOCHS)
        first = stage.start("node A", *flags, "--nproc-per-node", "2", *work)
        stage.until(epoch=0, step=steps // 2)
        victim = worker_of(first, 1)
        stage.disturb(f"kill -9 {victim}: a worker of node A, in the middle of epoch 0")
        os.kill(victim, signal.SIGKILL)
        stage.until(epoch=1, step=steps + 1)
        stage.disturb("node B joins with one worker")
        second = stage.start("node B", *flags, "--nproc-per-node", "1", *work)
        stage.until(epoch=1, world=3)
        stage.until(epoch=1, step=stage.step + steps // 4)
        stage.disturb(f"kill -9 {second.pid}: node B is gone, agent and all")
        second.kill()
        stage.until(end_of="node A")
        if first.wait() != 0:
            raise DemoFailed(f"node A ended with exit code {first.returncode}")


def same_weights(folder: Path, step: int) -> bool:
    """Whether both runs had bitwise equal weights after this step."""
    one, two = (CheckpointManager(folder / run).load(step)["model"] for run in ("calm", "storm"))
    return one.keys() == two.keys() and all(one[name].equal(two[name]) for name in one)


def samples_used(folder: Path) -> tuple[int, int, dict[int, Counter[int]]]:
    """Steps, steps that were begun again, and how often each epoch used each sample: what the last
    generation that took a step has written down of it counts."""
    begun: dict[int, dict[int, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for path in folder.glob("storm.trace.*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            if "step" in line:
                begun[line["step"]][line["generation"]].append(line)
    uses: dict[int, Counter[int]] = defaultdict(Counter)
    for generations in begun.values():
        for line in generations[max(generations)]:
            uses[line["epoch"]].update(line["indices"])
    return len(begun), sum(len(times) - 1 for times in begun.values()), uses


def tell(stage: Stage, args: argparse.Namespace) -> bool:
    """What a person wants to know at the end; whether all of it is right."""
    steps, redone, uses = samples_used(stage.folder)
    once = all(used == Counter(range(args.samples)) for used in uses.values())
    equal = same_weights(stage.folder, -(-args.samples // BATCH))
    print("\ngeneration  workers  back in    because")
    for number, one in stage.generations.items():
        cost = "-" if one.seconds is None else f"{one.seconds:.1f} s"
        print(f"{number:10}  {one.world:7}  {cost:>7}    {one.cause}")
    print(f"\nlast loss reported {stage.loss:.2f} after {steps} steps, {redone} redone")
    for epoch, used in sorted(uses.items()):
        print(f"epoch {epoch}: {sum(used.values())} samples used, {len(used)} of {args.samples}")
    print(f"each sample of each epoch exactly once: {'yes' if once else 'NO'}")
    print(
        f"weights after epoch 0 (world size 2, one worker killed) bitwise equal to the "
        f"undisturbed run's: {'yes' if equal else 'NO'}"
    )
    return once and equal and len(uses) == 1 + MORE_EPOCHS and len(stage.generations) == 4


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="a training job that loses a worker and a node")
    parser.add_argument("--samples", type=int, default=3200, help="samples an epoch")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds for each stage")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="elasticlib-demo-") as folder:
        stage = Stage(Path(folder), args.patience)
        try:
            undisturbed(stage, args)
            disturbed(stage, args)
            right = tell(stage, args)
        except ElasticError as error:
            print(f"demo: FAILED: {error}", file=sys.stderr)
            return 1
        finally:
            stage.close()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
