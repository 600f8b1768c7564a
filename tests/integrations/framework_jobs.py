"""Jobs that run the examples for frameworks."""

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
    """A job of one example. Its launches share a checkpoint directory and a trace."""

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

    def start_single(self, node: str, *flags: str, kills: str = "") -> Node:
        """Start a job with one node of two workers."""
        return self.start(node, "--standalone", "--nproc-per-node", "2", *flags, kills=kills)

    def read_lines(self) -> list[dict]:
        """Return the lines of the traces of all ranks and generations."""
        files = sorted(self.job.folder.glob("trace.*.jsonl"))
        texts = [text for file in files for text in file.read_text().splitlines(keepends=True)]
        return [json.loads(text) for text in texts if text.endswith("\n")]

    def wait_for_step(self, step: int, world: int) -> None:
        """Wait until a rank has started this step, or a later one, in a group of this size."""
        self._wait_for_line(
            f"step {step} in a world of {world}",
            lambda line: line.get("world_size") == world and line["step"] >= step,
        )

    def wait_for_resume(self, generation: int) -> None:
        """Wait until a rank of the generation has resumed."""
        self._wait_for_line(
            f"a worker of generation {generation}",
            lambda line: line["generation"] == generation and "resumed" in line,
        )

    def _wait_for_line(self, what: str, condition: Callable[[dict], bool]) -> None:
        wait_until(
            what, lambda: any(map(condition, self.read_lines())), details=lambda: self.job.logs
        )

    def read_traces(self) -> TraceSummary:
        return read_traces(self.trace)


def read_result(node: Node, outcome: str) -> tuple[int, str]:
    """Return the number of steps and the digest of the weights that rank 0 printed at the end."""
    steps_found = re.findall(rf"^{outcome} after (\d+) steps$", node.text, re.MULTILINE)
    weights = re.findall(r"^weights sha256 (\w{64})$", node.text, re.MULTILINE)
    assert (len(steps_found), len(weights)) == (1, 1), node.text
    return int(steps_found[0]), weights[0]


@cache
def train_undisturbed(name: str, folder: Path) -> str:
    """Return the digest of the weights of a run without faults. It is run once per framework."""
    folder.mkdir()
    job = Job(folder)
    try:
        node = FrameworkJob(job, name).start_single("undisturbed")
        assert node.exit_code() == 0, node.text
        steps, weights = read_result(node, "done")
    finally:
        job.close()
    assert steps == STEPS
    return weights
