"""The examples for frameworks as jobs of tests."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

from jobs import PROGRAMS, Job, Node
from traces import TraceSummary, read_traces

from elasticlib.testing.waiting import wait_until

SAMPLES, BATCH, EPOCHS, SAVE_EVERY = 80, 8, 3, 5
STEPS = EPOCHS * SAMPLES // BATCH
PRELOAD = {
    "lightning": "lightning.pytorch",
    "accelerate": "accelerate",
    "transformers": "transformers.trainer",
}
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


class FrameworkJob:
    """A job of one example: its launches share a folder of checkpoints and a trace."""

    def __init__(self, job: Job, name: str) -> None:
        self.job, self.name = job, name
        self.trace = job.folder / "trace"
        self.hold = job.folder / "hold"
        self.checkpoints = job.folder / "checkpoints"
        self.start_flags = ("--preload", PRELOAD[name]) if name in PRELOAD else ()

    @property
    def keeps_each_step(self) -> bool:
        """True if the example makes a snapshot of each step."""
        return self.name in ("accelerate", "torchdata")

    def start(self, node: str, *flags: str, kills: str = "") -> Node:
        program = (str(PROGRAMS / "framework_job.py"), self.name, kills, str(self.hold))
        arguments = (str(self.trace), str(self.checkpoints))
        run = (sys.executable, "-m", "elasticlib.launch")
        return self.job.start(
            node, *run, *self.start_flags, *flags, *program, *arguments, **OFFLINE
        )

    def alone(self, node: str, *flags: str, kills: str = "") -> Node:
        """A node with two workers, which is the whole job."""
        return self.start(node, "--standalone", "--nproc-per-node", "2", *flags, kills=kills)

    def lines(self) -> list[dict]:
        """All that was traced, by any rank, of any generation."""
        files = sorted(self.job.folder.glob("trace.*.jsonl"))
        texts = [text for file in files for text in file.read_text().splitlines(keepends=True)]
        return [json.loads(text) for text in texts if text.endswith("\n")]

    def trains(self, step: int, world: int) -> None:
        """Waits until a rank has begun this step, or a later one, in such a world."""
        self._until(
            f"step {step} in a world of {world}",
            lambda line: line.get("world_size") == world and line["step"] >= step,
        )

    def resumes(self, generation: int) -> None:
        """Waits until a rank of the generation is about to train."""
        self._until(
            f"generation {generation} to train",
            lambda line: line["generation"] == generation and "resumed" in line,
        )

    def _until(self, what: str, is_it: Callable[[dict], bool]) -> None:
        wait_until(what, lambda: any(map(is_it, self.lines())), details=lambda: self.job.logs)

    def read_traces(self) -> TraceSummary:
        return read_traces(self.trace)


def said(node: Node, word: str) -> tuple[int, str]:
    """Return the number of steps and the digest of the weights that rank 0 printed at the end."""
    found = re.findall(rf"^{word} after (\d+) steps$", node.text, re.MULTILINE)
    weights = re.findall(r"^weights sha256 (\w{64})$", node.text, re.MULTILINE)
    assert (len(found), len(weights)) == (1, 1), node.text
    return int(found[0]), weights[0]


@cache
def undisturbed(name: str, folder: Path) -> str:
    """The hash of the weights of a run to which nothing happens; once a framework."""
    folder.mkdir()
    job = Job(folder)
    try:
        node = FrameworkJob(job, name).alone("undisturbed")
        assert node.exit_code() == 0, node.text
        steps, weights = said(node, "done")
    finally:
        job.close()
    assert steps == STEPS
    return weights
