"""Training of a small model with logical workers, resumed from a checkpoint if there is one.

A segment of the training is a dict with these keys: `until`, the last step; optionally `killed`,
the step in which rank 0 is killed; `members`, the ranks that form a group and train; and `fault`,
an inconsistency of the last rank or of all ranks. Segments share state only through a checkpoint.
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
from elasticlib.errors import ConfigError, NotReproducibleError

COUNT, BATCH, SAMPLES = 5, 13, 60


class Model(nn.Module):
    """A model with dropout, two dtypes, and parameters without gradients on some or all workers."""

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


def compute_digest(state):
    file = io.BytesIO()
    torch.save(state, file)
    values = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    text = hashlib.sha256()

    def add(value):
        if isinstance(value, torch.Tensor):
            plain = value.contiguous()
            text.update(ctypes.string_at(plain.data_ptr(), plain.nbytes))
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                text.update(str(key).encode())
                add(value[key])
        elif isinstance(value, list):
            for part in value:
                add(part)
        else:
            text.update(repr(value).encode())

    add(values)
    return text.hexdigest()


def train(folder, segment):
    """Return the digests of the weights after each step, and at the end of the optimizer.

    A rank that is not a member returns an empty list.
    """
    until, killed, fault = segment["until"], segment.get("killed", -1), segment.get("fault")
    group = dist.new_group(segment["members"]) if "members" in segment else None
    # A rank outside the group returns at once, while other ranks may still connect to it.
    dist.barrier()
    if dist.get_rank(group) < 0:
        return []
    last = dist.get_rank(group) == dist.get_world_size(group) - 1
    torch.manual_seed(1 + (fault == "weights" and last))
    torch.set_num_threads(1 + (fault == "threads" and last))
    data, targets = torch.randn(SAMPLES, 7), torch.randn(SAMPLES)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    # The buckets are small, so that there are many, and the last one is shorter.
    wrapped = DistributedDataParallel(model) if fault == "parallel" else model
    logical = LogicalWorkers(wrapped, COUNT, seed=3, group=group, bucket_bytes=400)
    path, step, digests = folder / "state.pt", 0, []
    if path.exists():
        state = load_checkpoint(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        logical.load_state_dict(state["logical"])
        step, digests = state["step"], state["digests"]
    while step < until:
        compute(logical, step, killed, (data, targets))
        logical.reduce()
        assert model.never.grad is None
        assert (model.rare.grad is None) == (step == 0)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        digests = [*digests, compute_digest(model.state_dict())]
        if dist.get_rank(group) == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"logical": logical.state_dict(), "step": step, "digests": digests}
            save_checkpoint(path, state)
    return [*digests, compute_digest(optimizer.state_dict())]


def compute(logical, step, killed, dataset):
    """Compute the gradients of this rank's logical workers."""
    data, targets = dataset
    start = step * BATCH % SAMPLES
    batch = min(BATCH, SAMPLES - start)  # 8 at the end of the epoch, then 13 again
    batch = 3 if step == 2 else batch  # fewer than logical workers
    own = []
    for worker in logical.step(step):
        own += worker.samples(batch)
        local = [start + at for at in worker.samples(batch)]
        if not local:
            continue
        noise = 0.1 * torch.randn(len(local), 7, generator=worker.generator)
        out = logical.model(data[local] + noise, rare=step > 0 and worker.index in (1, 2))
        loss = ((out - targets[local]) ** 2).sum() / batch
        loss.backward()
        if step == killed and dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    assert own == list(logical.samples(batch))


def train_or_return_error(folder, segment):
    """Return the result of `train`, or the message of its error."""
    try:
        return train(folder, segment)
    except (NotReproducibleError, ConfigError) as error:
        return [str(error)]
