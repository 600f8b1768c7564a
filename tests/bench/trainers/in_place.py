"""`in_place.py FOLDER`: with `elasticlib.steps`, so that the worker that is left goes on by itself
until the next has started."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from work import PART, SAVE_EVERY, SELDOM, Progress, loss_of, make

import elasticlib
from elasticlib import CheckpointManager, ElasticBatchSampler, ElasticDistributedSampler

elasticlib.init_process_group("gloo")
folder, slot = Path(sys.argv[1]), int(os.environ["LOCAL_RANK"])
model, optimizer = make()
# The step's number decides its batch, as in the other trainers.
sampler = ElasticDistributedSampler(range(2**40), shuffle=False)
batches = ElasticBatchSampler(sampler, 2 * PART)
state = {"model": model, "optimizer": optimizer, "sampler": sampler}
with CheckpointManager(folder / "checkpoints", keep_last=2) as manager:
    progress = Progress(folder, slot)
    # The other worker has each step. The agent's memory is for when both are lost, and the disk for
    # when the machine is.
    often = {"snapshot_every": SAVE_EVERY, "save_every": SELDOM}
    for attempt in elasticlib.steps(batches, state, manager=manager, **often):
        with attempt:
            if attempt.is_new_group:
                parallel = torch.nn.parallel.DistributedDataParallel(model)
            parts = range(dist.get_rank(), 2, dist.get_world_size())
            optimizer.zero_grad()
            loss_of(parallel, attempt.step, *parts).backward()
            optimizer.step()
        if attempt.is_committed:
            progress.done(attempt.step, len(parts))
