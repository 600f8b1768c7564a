"""Training script for elasticrun with in-place recovery: `in_place.py DIR`.

The loop uses `elasticlib.steps`: the worker that was not killed keeps running, and trains alone
until the replacement has started.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from work import (
    PART_SAMPLES,
    RARE_SAVE_EVERY,
    SAVE_EVERY,
    ProgressFile,
    compute_loss,
    create_model,
)

import elasticlib
from elasticlib import CheckpointManager, ElasticBatchSampler, ElasticDistributedSampler

elasticlib.init_process_group("gloo")
directory, slot = Path(sys.argv[1]), int(os.environ["LOCAL_RANK"])
model, optimizer = create_model()
# The number of a step determines its batch, as in the other scripts. The sampler only counts steps.
sampler = ElasticDistributedSampler(range(2**40), shuffle=False)
batches = ElasticBatchSampler(sampler, 2 * PART_SAMPLES)
state = {"model": model, "optimizer": optimizer, "sampler": sampler}
with CheckpointManager(directory / "checkpoints", keep_last=2) as manager:
    progress = ProgressFile(directory, slot)
    # The other worker has the state of each step. Snapshots in the memory of the agent serve the
    # loss of both workers, and checkpoints on the disk serve the loss of the machine.
    intervals = {"snapshot_every": SAVE_EVERY, "save_every": RARE_SAVE_EVERY}
    for attempt in elasticlib.steps(batches, state, manager=manager, **intervals):
        with attempt:
            if attempt.is_new_group:
                parallel = torch.nn.parallel.DistributedDataParallel(model)
            parts = range(dist.get_rank(), 2, dist.get_world_size())
            optimizer.zero_grad()
            compute_loss(parallel, attempt.step, *parts).backward()
            optimizer.step()
        if attempt.is_committed:
            progress.record_step(attempt.step, len(parts))
