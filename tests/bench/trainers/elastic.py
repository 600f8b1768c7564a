"""Training script for elasticrun: `elastic.py DIR`.

Each step is kept as a snapshot in the memory of the agent, from which all workers resume when one
is lost. Checkpoints on the disk serve the loss of the machine.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from work import RARE_SAVE_EVERY, ProgressFile, compute_loss, create_model

from elasticlib import CheckpointManager

dist.init_process_group("gloo")
directory, rank = Path(sys.argv[1]), dist.get_rank()
model, optimizer = create_model()
parallel = torch.nn.parallel.DistributedDataParallel(model)
state = {"model": model, "optimizer": optimizer}
with CheckpointManager(directory / "checkpoints", keep_last=2) as manager:
    step = manager.restore(state).step
    progress = ProgressFile(directory, rank)
    while True:
        optimizer.zero_grad()
        compute_loss(parallel, step, rank).backward()
        optimizer.step()
        step += 1
        manager.snapshot(step, state)
        if step % RARE_SAVE_EVERY == 0:
            manager.save(step, state)
        progress.record_step(step)
