"""A small model that ranks train with logical workers, from where a checkpoint is, if any.

A segment of a training is a dict with `until`, the step at which it ends, and perhaps `killed` (the
step in which rank 0 is killed), `members` (of the world, those who train, as a group), or `astray`
(what the last rank has otherwise than the others, or all of them wrong). What was trained is
carried from segment to segment by a checkpoint alone.
"""

import ctypes
import hashlib
import io
import os
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elasticlib import LogicalWorkers, load_checkpoint, save_checkpoint
from elasticlib.errors import ConfigError, NotReproducible

COUNT, BATCH, SAMPLES = 5, 13, 60


class Model(nn.Module):
    """Dropout, two dtypes, and weights that some logical workers, or all, have no gradient for."""

    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(7, 33), nn.Dropout(0.3), nn.Linear(33, 3)
        self.norm = nn.BatchNorm1d(33, track_running_stats=False)
        self.wide = nn.Linear(33, 2).double()
        self.rare, self.never = nn.Parameter(torch.ones(33)), nn.Parameter(torch.ones(5))
        self.frozen = nn.Parameter(torch.ones(33), requires_grad=False)

    def forward(self, x, rare):
        hidden = self.drop(torch.relu(self.first(x))) * self.frozen
        if len(x) > 1:
            hidden = self.norm(hidden)
        if rare:
            hidden = hidden * self.rare
        return self.last(hidden).sum(1) + self.wide(hidden.double()).sum(1).float()


def digest(state):
    file = io.BytesIO()
    torch.save(state, file)
    values = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    text = hashlib.sha256()

    def walk(value):
        if isinstance(value, torch.Tensor):
            plain = value.contiguous()
            text.update(ctypes.string_at(plain.data_ptr(), plain.nbytes))
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                text.update(str(key).encode())
                walk(value[key])
        elif isinstance(value, list):
            for part in value:
                walk(part)
        else:
            text.update(repr(value).encode())

    walk(values)
    return text.hexdigest()


def train(folder, segment):
    """The digest of each step's weights and at last of the optimizer; nothing on other ranks."""
    until, killed, astray = segment["until"], segment.get("killed", -1), segment.get("astray")
    group = dist.new_group(segment["members"]) if "members" in segment else None
    # A rank that is not in the group leaves at once, while others may still be connecting to it.
    dist.barrier()
    if dist.get_rank(group) < 0:
        return []
    last = dist.get_rank(group) == dist.get_world_size(group) - 1
    torch.manual_seed(1 + (astray == "weights" and last))
    torch.set_num_threads(1 + (astray == "threads" and last))
    data, targets = torch.randn(SAMPLES, 7), torch.randn(SAMPLES)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    # Buckets of a few numbers, so that there are many, and a short last one.
    wrapped = DistributedDataParallel(model) if astray == "parallel" else model
    logical = LogicalWorkers(wrapped, COUNT, seed=3, group=group, bucket_bytes=400)
    path, step, told = folder / "state.pt", 0, []
    if path.exists():
        state = load_checkpoint(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        logical.load_state_dict(state["logical"])
        step, told = state["step"], state["told"]
    while step < until:
        compute(logical, step, killed, (data, targets))
        logical.reduce()
        assert model.never.grad is None
        assert (model.rare.grad is None) == (step == 0)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        told = [*told, digest(model.state_dict())]
        if dist.get_rank(group) == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"logical": logical.state_dict(), "step": step, "told": told}
            save_checkpoint(path, state)
    return [*told, digest(optimizer.state_dict())]


def compute(logical, step, killed, dataset):
    """This rank's part of a step's gradients."""
    data, targets = dataset
    start = step * BATCH % SAMPLES
    batch = min(BATCH, SAMPLES - start)  # 8 at the end of the epoch, then 13 again
    batch = 3 if step == 2 else batch  # fewer than logical workers
    own = []
    for worker in logical.step(step):
        own += worker.samples(batch)
        mine = [start + at for at in worker.samples(batch)]
        if not mine:
            continue
        noise = 0.1 * torch.randn(len(mine), 7, generator=worker.generator)
        out = logical.model(data[mine] + noise, rare=step > 0 and worker.index in (1, 2))
        loss = ((out - targets[mine]) ** 2).sum() / batch
        loss.backward()
        if step == killed and dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    assert own == list(logical.samples(batch))


def train_or_be_refused(folder, segment):
    """What `train` gives, or with what it is refused."""
    try:
        return train(folder, segment)
    except (NotReproducible, ConfigError) as error:
        return [str(error)]
