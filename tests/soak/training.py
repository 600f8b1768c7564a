"""Training script of the soak: a small transformer on English text, with logical workers.

`training.py DIR STEPS [--baseline]`. It trains like `elasticlib/examples/train_text.py`, records
what it trained on, and causes a fault when the soak requests one. With --baseline it trains the
same steps in one process, without checkpoints and faults.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from elasticlib import (
    CheckpointManager,
    ElasticBatchSampler,
    ElasticDistributedSampler,
    LogicalWorkers,
    context,
)
from elasticlib.errors import CheckpointError
from elasticlib.examples.train_text import (
    ByteTransformer,
    TextDataset,
    init_process_group,
    summed_loss,
    weights_sha256,
)

sys.path.insert(0, str(Path(__file__).parent.parent))
from soak.campaign import (
    BATCH,
    DIGEST_EVERY,
    EXCEPTION,
    EXIT,
    KEEP_LAST,
    LOGICAL,
    SAMPLES,
    SAVE_EVERY,
    SLOW,
    STEP_PARTS,
)
from soak.shared_page import SharedPage

LIMIT_POLL_INTERVAL_S = 0.005


class SoakFault(Exception):
    """An exception that the soak has requested."""


class TraceFile:
    """The file in which this rank records what it does. Each line is written by one system call."""

    def __init__(self, directory: Path, generation: int, rank: int) -> None:
        path = directory / f"{generation:08d}.{rank}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def write(self, **line: object) -> None:
        """Append a line with the current time."""
        line["at"] = time.monotonic()
        os.write(self._file, json.dumps(line).encode() + b"\n")


class RequestedFault:
    """The fault that the soak requests from this worker in the current step, if any."""

    def __init__(self, page: SharedPage, trace: TraceFile) -> None:
        self._page, self._trace = page, trace
        self._fault, self._part, self._argument, self._step = 0, 0, 0, 0

    def read(self, step: int) -> None:
        """Read the request for this step."""
        self._step = step
        self._fault, self._part, self._argument = self._page.take_request() or (0, 0, 0)

    def cause_if_due(self, part: str) -> None:
        """Cause the fault if it is due in this part of the step."""
        if not self._fault or STEP_PARTS[self._part] != part:
            return
        fault, argument, self._fault = self._fault, self._argument, 0
        self._trace.write(fault=fault, during=self._step)
        if fault == SLOW:
            time.sleep(argument / 1000)
            self._trace.write(slept=argument)
        elif fault == EXCEPTION:
            raise SoakFault(f"requested in {part}")
        elif fault == EXIT:
            sys.exit(argument)
        else:
            ctypes.string_at(0)


class Training:
    """The model, the optimizer and the sampler. `state` is what a checkpoint contains."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.dataset = TextDataset(SAMPLES)
        self.sampler = ElasticDistributedSampler(self.dataset, 1, 0, seed=0, tail="exact")
        self.batches = ElasticBatchSampler(self.sampler, BATCH)
        self.model = ByteTransformer(width=32, num_layers=2, num_heads=2)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=False)
        self.progress = {"step": 0}
        self.logical = LogicalWorkers(self.model, LOGICAL, seed=0)
        parts = {"model": self.model, "optimizer": self.optimizer, "sampler": self.sampler}
        self.state = {**parts, "logical": self.logical, "progress": self.progress}

    @property
    def step(self) -> int:
        """The last step that was trained."""
        return int(self.progress["step"])

    def remaining_batches(self, steps: int):
        """Return the batches until the end of the epoch, or until this step.

        Each item has the size of the batch, the sample indices of this rank, and their windows.
        """
        drawn = list(itertools.islice(self.batches, steps - self.step))
        parts = [self.logical.samples(len(batch)) for batch in drawn]
        indices = [batch[part.start : part.stop] for batch, part in zip(drawn, parts, strict=True)]
        loader = DataLoader(self.dataset, sampler=indices, batch_size=None)
        return zip(map(len, drawn), indices, loader, strict=True)

    def compute_gradients(self, size: int, windows: torch.Tensor) -> None:
        """Compute the gradients of the logical workers of this rank, without their sum."""
        first = self.logical.samples(size).start
        for worker in self.logical.step(self.step):
            positions = worker.samples(size)
            if positions:
                own = windows[positions.start - first : positions.stop - first]
                torch.autograd.backward(summed_loss(self.model, own) / size)


class Loop:
    """The training loop of one rank."""

    def __init__(self, directory: Path, steps: int, is_baseline: bool) -> None:
        self.steps = steps
        started_at = time.monotonic()
        init_process_group()
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        generation = int(os.environ.get("ELASTICLIB_GENERATION", "1"))
        node = os.environ.get("SOAK_NODE", "0")
        traces = directory / ("baseline" if is_baseline else "trace")
        self.trace = TraceFile(traces, generation, self.rank)
        self.trace.write(started=started_at, world=self.world, node=node)
        self.page = SharedPage(directory / "page", create=is_baseline)
        self.page.register(generation, self.rank, self.world, int(node))
        self.requested = RequestedFault(self.page, self.trace)
        self.training = Training()

    def run(self, manager: CheckpointManager | None) -> None:
        """Train until the last step, or until the agent requests a stop."""
        training = self.training
        if manager is not None:
            self.restore(manager)
        while training.step < self.steps:
            epoch = training.sampler.epoch
            if training.sampler.position.consumed == training.sampler.position.length:
                epoch += 1
            training.sampler.set_epoch(epoch)
            for size, indices, windows in training.remaining_batches(self.steps):
                self.run_step(epoch, size, indices, windows)
                if manager is not None and self.record_step(manager):
                    return
        if manager is not None:
            self.save(manager)
            manager.wait()
        self.trace.write(final_digest=weights_sha256(training.model), step=training.step)

    def restore(self, manager: CheckpointManager) -> None:
        """Restore the newest state, and record its step."""
        started_at = time.monotonic()
        result = manager.restore(self.training.state)
        seconds = time.monotonic() - started_at
        self.trace.write(
            resumed=result.step,
            source=result.source,
            seconds=seconds,
            skipped=list(result.skipped),
        )

    def run_step(self, epoch: int, size: int, indices: list[int], windows: torch.Tensor) -> None:
        """Train one step."""
        training, number = self.training, self.training.step + 1
        self.wait_for_limit(number)
        self.page.start_step(number)
        self.requested.read(number)
        self.trace.write(step=number, epoch=epoch, indices=indices, world=self.world)
        self.requested.cause_if_due("start")
        training.compute_gradients(size, windows)
        self.requested.cause_if_due("gradients")
        training.logical.reduce()
        training.optimizer.step()
        training.batches.advance()
        training.progress["step"] = number
        self.requested.cause_if_due("update")
        if number % DIGEST_EVERY == 0 and self.rank == 0:
            self.trace.write(digest=weights_sha256(training.model), step=number)

    def wait_for_limit(self, step: int) -> None:
        """Wait while the job is too many steps ahead of the campaign."""
        started_at = time.monotonic()
        while not self.page.may_start(step):
            context().step(step - 1)  # a sign of life for the hang detector
            time.sleep(LIMIT_POLL_INTERVAL_S)
        if self.rank == 0 and time.monotonic() - started_at > LIMIT_POLL_INTERVAL_S:
            self.trace.write(waited=time.monotonic() - started_at)

    def record_step(self, manager: CheckpointManager) -> bool:
        """Make a snapshot, and a checkpoint if it is due; return whether to stop."""
        step = self.training.step
        context().step(step)
        manager.snapshot(step, self.training.state)
        self.requested.cause_if_due("snapshot")
        if self.rank == 0:
            self.trace.write(done=step)
        self.page.finish_step(step)
        stop = context().should_stop()
        if stop or step % SAVE_EVERY == 0:
            self.save(manager)
        return stop is not None

    def save(self, manager: CheckpointManager) -> None:
        """Save a checkpoint. If the disk is full, record the error and continue to train."""
        try:
            manager.save(self.training.step, self.training.state)
        except CheckpointError as error:
            self.trace.write(save_failed=str(error), step=self.training.step)


def main() -> None:
    directory, steps, is_baseline = Path(sys.argv[1]), int(sys.argv[2]), "--baseline" in sys.argv
    torch.set_num_threads(1)
    loop = Loop(directory, steps, is_baseline)
    if is_baseline:
        loop.run(None)
    else:
        with CheckpointManager(directory / "checkpoints", keep_last=KEEP_LAST) as manager:
            loop.run(manager)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
