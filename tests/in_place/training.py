"""Small training programs for workers that continue in another group."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from scripted_agent import write_record
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import elasticlib
from elasticlib import ElasticBatchSampler, ElasticDistributedSampler, LogicalWorkers
from elasticlib.errors import CheckpointError
from elasticlib.testing.waiting import wait_until

SAMPLES, BATCH, EPOCHS = 240, 8, 100


def create_data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 4, generator=generator)
    return x, x.sum(1, keepdim=True)


def digest(model: nn.Module) -> str:
    sha256 = hashlib.sha256()
    for tensor in model.state_dict().values():
        sha256.update(bytes(tensor.cpu().contiguous().view(-1).view(torch.uint8).tolist()))
    return sha256.hexdigest()


class Job:
    """A model, its optimizer and its batches."""

    def __init__(self, *, logical: bool = True) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        # A fused optimizer does not raise the versions of the tensors that it writes.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.teacher = copy.deepcopy(self.model)
        self.logical = LogicalWorkers(self.model, 6) if logical else None
        self.x, self.y = create_data()
        sampler = ElasticDistributedSampler(range(SAMPLES), 1, 0, tail="exact")
        self.batches = ElasticBatchSampler(sampler, BATCH)
        self.state: dict[str, Any] = {"model": self.model, "optimizers": [self.optimizer]}
        self.state["teacher"] = self.teacher

    def update_teacher(self) -> None:
        """Move the weights of the teacher towards those of the model, as DINO does."""
        for own, other in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
            own.data.mul_(0.9).add_(other.data, alpha=0.1)

    def digest(self) -> str:
        return digest(self.model) + digest(self.teacher)


def is_last(folder: Path, step: int) -> bool:
    """Return True if the test needs no more steps than this one."""
    last_step = folder / "last"
    return last_step.exists() and step >= int(last_step.read_text())


def train(
    folder: Path,
    number: int,
    pause: float = 0.0,
    saves: bool = True,
    stops: tuple[int, int] | None = None,
) -> None:
    """Train with logical workers, so that changes of the group do not affect the weights.

    Args:
        folder: the directory of the records, and of the checkpoints.
        number: the number of this worker.
        pause: seconds that are added to each step.
        saves: save checkpoints.
        stops: a worker and a step. The worker sends itself SIGSTOP before it reduces the gradients
            of the step, and the other workers record that they reduce the gradients.
    """
    elasticlib.init_process_group("gloo")
    job = Job()
    assert job.logical is not None
    with elasticlib.CheckpointManager(folder / "checkpoints") as manager:
        loop = elasticlib.steps(
            job.batches,
            job.state,
            manager=manager if saves else None,
            epochs=EPOCHS,
            logical_workers=job.logical,
        )
        for attempt in loop:
            with attempt as indices:
                world = dist.get_world_size()
                total = job.batches.next_batch_size
                first = job.logical.samples(total).start
                job.update_teacher()
                for worker in job.logical.step(attempt.step):
                    own_samples = worker.samples(total)
                    if own_samples:
                        own_indices = indices[own_samples.start - first : own_samples.stop - first]
                        out = job.model(job.x[own_indices])
                        (mse_loss(out, job.y[own_indices], reduction="sum") / total).backward()
                time.sleep(pause)
                if stops is not None and attempt.step == stops[1]:
                    write_record(folder, number, reducing=attempt.step)
                    if number == stops[0]:
                        os.kill(os.getpid(), signal.SIGSTOP)
                job.logical.reduce()
                job.optimizer.step()
                attempt.report(samples=len(indices))
            if attempt.is_committed:
                write_record(folder, number, step=attempt.step, indices=indices, world=world)
            if is_last(folder, loop.step):
                break
        write_record(folder, number, digest=job.digest(), steps=loop.step)


def train_in_parallel(folder: Path, number: int, pause: float = 0.0) -> None:
    """Train with DistributedDataParallel, without a manager."""
    elasticlib.init_process_group("gloo")
    job = Job(logical=False)
    loop = elasticlib.steps(job.batches, job.state, epochs=EPOCHS)
    for attempt in loop:
        with attempt as indices:
            if attempt.is_new_group:
                parallel = DistributedDataParallel(job.model)
            world = dist.get_world_size()
            job.update_teacher()
            job.optimizer.zero_grad()
            weight = job.batches.sample_weight
            out = parallel(job.x[indices])
            (weight * mse_loss(out, job.y[indices], reduction="sum")).backward()
            job.optimizer.step()
            time.sleep(pause)
        if attempt.is_committed:
            write_record(folder, number, step=attempt.step, indices=indices, world=world)
        if is_last(folder, loop.step):
            break
    write_record(folder, number, digest=job.digest())


@contextlib.contextmanager
def write_error(folder: Path, number: int) -> Iterator[None]:
    """Record the error and exit if no state can be restored."""
    try:
        yield
    except CheckpointError as error:
        write_record(folder, number, error=str(error))
        sys.exit()


def train_with_a_late_error(
    folder: Path, number: int, pause: float = 0.0, saves: bool = True, blocked_step: int = 0
) -> None:
    """Train with a collective after the optimizer step, so a lost peer is noticed after the step.

    Without `saves`, no worker has a copy or a saved state. In step `blocked_step`, workers wait
    after the optimizer step until the file `released` exists.
    """
    elasticlib.init_process_group("gloo")
    job = Job(logical=False)
    with write_error(folder, number), elasticlib.CheckpointManager(folder / "disk") as manager:
        loop = elasticlib.steps(
            job.batches,
            job.state,
            manager=manager,
            snapshot_every=1 if saves else 0,
            keep_copy=saves,
        )
        for attempt in loop:
            with attempt as indices:
                job.optimizer.zero_grad()
                weight = job.batches.sample_weight / dist.get_world_size()
                out = job.model(job.x[indices])
                loss = weight * mse_loss(out, job.y[indices], reduction="sum")
                loss.backward()
                for parameter in job.model.parameters():
                    dist.all_reduce(parameter.grad)
                job.optimizer.step()
                write_record(folder, number, applied=attempt.step)
                time.sleep(pause)
                if attempt.step == blocked_step:
                    wait_until("the file that ends the wait", (folder / "released").exists)
                dist.all_reduce(loss.detach())
            if attempt.is_committed:
                world = dist.get_world_size()
                write_record(folder, number, step=attempt.step, indices=indices, world=world)
    weights = [
        value for parameter in job.model.parameters() for value in parameter.flatten().tolist()
    ]
    write_record(folder, number, digest=digest(job.model), weights=weights)


def train_sharded(folder: Path, number: int, pause: float = 0.0) -> None:
    """Train with FSDP2: each group creates the state and restores it from parts in memory."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    elasticlib.init_process_group("gloo")
    job = Job(logical=False)

    def create_state() -> dict[str, Any]:
        sharded = Job(logical=False)
        fully_shard(sharded.model, mesh=DeviceMesh.from_group(dist.group.WORLD, "cpu"))
        optimizer = torch.optim.AdamW(sharded.model.parameters(), lr=1e-2)
        return {"model": sharded.model, "optimizer": optimizer}

    with elasticlib.CheckpointManager(folder / "checkpoints") as manager:
        loop = elasticlib.steps(
            job.batches, create_state, manager=manager, epochs=EPOCHS, save_every=7
        )
        for attempt in loop:
            with attempt as indices:
                model, optimizer = attempt.state["model"], attempt.state["optimizer"]
                optimizer.zero_grad()
                weight = job.batches.sample_weight
                out = model(job.x[indices])
                (weight * mse_loss(out, job.y[indices], reduction="sum")).backward()
                optimizer.step()
                time.sleep(pause)
            if attempt.is_committed:
                world = dist.get_world_size()
                write_record(folder, number, step=attempt.step, indices=indices, world=world)
            if is_last(folder, loop.step):
                break
        weights = [
            parameter.full_tensor().flatten().tolist()
            for parameter in loop.state["model"].parameters()
        ]
    write_record(folder, number, weights=[value for values in weights for value in values])


def train_sharded_without_numpy(folder: Path, number: int, pause: float = 0.0) -> None:
    """Train as `train_sharded` does, in an environment without NumPy."""
    sys.modules.update({"numpy": None})  # type: ignore[dict-item]
    train_sharded(folder, number, pause)
