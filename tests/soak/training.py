"""The soak's training script: a small transformer on English text, with logical workers.

`training.py FOLDER STEPS [--calm]`. It does what `elasticlib/examples/train_text.py` does, writes
down what it trained on, and meets faults when the soak's board asks for them. With --calm it is
the undisturbed run: one process, no checkpoint, the same steps.
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
from soak.board import Board
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
    WHERE,
)


class SoakFault(Exception):
    """An exception that the soak has asked for."""


class Lines:
    """Appends what this rank does to a file of its own; a line is out when the call returns."""

    def __init__(self, folder: Path, generation: int, rank: int) -> None:
        path = folder / f"{generation:08d}.{rank}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def write(self, **line: object) -> None:
        line["at"] = time.monotonic()
        os.write(self._file, json.dumps(line).encode() + b"\n")


class Asked:
    """What the board asks of this worker in the step under way."""

    def __init__(self, board: Board, lines: Lines) -> None:
        self._board, self._lines = board, lines
        self._what, self._where, self._number, self._step = 0, 0, 0, 0

    def listen(self, step: int) -> None:
        self._step = step
        self._what, self._where, self._number = self._board.asked() or (0, 0, 0)

    def rendezvous_flags(self, where: str) -> None:
        """The fault, if it is due in this part of the step."""
        if not self._what or WHERE[self._where] != where:
            return
        what, number, self._what = self._what, self._number, 0
        self._lines.write(meets=what, during=self._step)
        if what == SLOW:
            time.sleep(number / 1000)
            self._lines.write(slept=number)
        elif what == EXCEPTION:
            raise SoakFault(f"asked for in {where}")
        elif what == EXIT:
            sys.exit(number)
        else:
            ctypes.string_at(0)


class Training:
    """What is trained, in `state`; torch's and elasticlib's parts alone."""

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
        return int(self.progress["step"])

    def rest_of_epoch(self, steps: int):
        """Of each batch that is left: its size, this rank's part of it, and the windows of that."""
        drawn = list(itertools.islice(self.batches, steps - self.step))
        parts = [self.logical.samples(len(batch)) for batch in drawn]
        mine = [batch[part.start : part.stop] for batch, part in zip(drawn, parts, strict=True)]
        loader = DataLoader(self.dataset, sampler=mine, batch_size=None)
        return zip(map(len, drawn), mine, loader, strict=True)

    def gradients(self, size: int, windows: torch.Tensor) -> None:
        """Of this rank's logical workers, yet to be added up."""
        first = self.logical.samples(size).start
        for worker in self.logical.step(self.step):
            places = worker.samples(size)
            if places:
                own = windows[places.start - first : places.stop - first]
                torch.autograd.backward(summed_loss(self.model, own) / size)


class Loop:
    def __init__(self, folder: Path, steps: int, calm: bool) -> None:
        self.steps, self.calm = steps, calm
        self.began = time.monotonic()
        init_process_group()
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        generation = int(os.environ.get("ELASTICLIB_GENERATION", "1"))
        self.lines = Lines(folder / ("calm" if calm else "trace"), generation, self.rank)
        self.lines.write(began=self.began, world=self.world, node=os.environ.get("SOAK_NODE", "0"))
        self.board = Board(folder / "board", create=calm)
        self.board.enter(generation, self.rank, self.world, int(os.environ.get("SOAK_NODE", "0")))
        self.asked = Asked(self.board, self.lines)
        self.training = Training()

    def run(self, manager: CheckpointManager | None) -> bool:
        """Whether it came to the end."""
        training = self.training
        if manager is not None:
            before = time.monotonic()
            found = manager.restore(training.state)
            seconds = time.monotonic() - before
            passed = list(found.skipped)
            self.lines.write(
                resumed=found.step, source=found.source, seconds=seconds, skipped=passed
            )
        while training.step < self.steps:
            epoch = training.sampler.epoch
            if training.sampler.position.consumed == training.sampler.position.length:
                epoch += 1
            training.sampler.set_epoch(epoch)
            for size, mine, windows in training.rest_of_epoch(self.steps):
                self.one_step(epoch, size, mine, windows)
                if manager is not None and self.kept(manager):
                    return False
        if manager is not None:
            self.save(manager)
            manager.wait()
        self.lines.write(over=weights_sha256(training.model), step=training.step)
        return True

    def one_step(self, epoch: int, size: int, mine: list[int], windows: torch.Tensor) -> None:
        training, number = self.training, self.training.step + 1
        self.wait_for(number)
        self.board.begin(number)
        self.asked.listen(number)
        self.lines.write(step=number, epoch=epoch, indices=mine, world=self.world)
        self.asked.meet("begin")
        training.gradients(size, windows)
        self.asked.meet("gradients")
        training.logical.reduce()
        training.optimizer.step()
        training.batches.advance()
        training.progress["step"] = number
        self.asked.meet("update")
        if number % DIGEST_EVERY == 0 and self.rank == 0:
            self.lines.write(digest=weights_sha256(training.model), step=number)

    def wait_for(self, step: int) -> None:
        """Stand still where the job is far ahead of the campaign, as a fault takes its time."""
        began = time.monotonic()
        while not self.board.may(step):
            context().step(step - 1)  # a sign of life
            time.sleep(0.005)
        if self.rank == 0 and time.monotonic() - began > 0.005:
            self.lines.write(held=time.monotonic() - began)

    def kept(self, manager: CheckpointManager) -> bool:
        """Keep what has to be kept of this step; whether to stop after it."""
        step = self.training.step
        context().step(step)
        manager.snapshot(step, self.training.state)
        self.asked.meet("kept")
        if self.rank == 0:
            self.lines.write(done=step)
        self.board.finish(step)
        stop = context().should_stop()
        if stop or step % SAVE_EVERY == 0:
            self.save(manager)
        return stop is not None

    def save(self, manager: CheckpointManager) -> None:
        """A disk that is full is told of, and the training goes on: the next save may succeed."""
        try:
            manager.save(self.training.step, self.training.state)
        except CheckpointError as error:
            self.lines.write(save_failed=str(error), step=self.training.step)


def main() -> None:
    folder, steps, calm = Path(sys.argv[1]), int(sys.argv[2]), "--calm" in sys.argv
    torch.set_num_threads(1)
    loop = Loop(folder, steps, calm)
    if calm:
        loop.run(None)
    else:
        with CheckpointManager(folder / "checkpoints", keep_last=KEEP_LAST) as manager:
            loop.run(manager)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
