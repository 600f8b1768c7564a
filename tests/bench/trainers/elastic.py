"""`elastic.py FOLDER`: with elasticlib. Each step is kept in the agent's memory, from which all
resume when a worker is lost; the disk is for when the machine is."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from work import SELDOM, Progress, loss_of, make

from elasticlib import CheckpointManager

dist.init_process_group("gloo")
folder, rank = Path(sys.argv[1]), dist.get_rank()
model, optimizer = make()
parallel = torch.nn.parallel.DistributedDataParallel(model)
state = {"model": model, "optimizer": optimizer}
with CheckpointManager(folder / "checkpoints", keep_last=2) as manager:
    step = manager.restore(state).step
    progress = Progress(folder, rank)
    while True:
        optimizer.zero_grad()
        loss_of(parallel, step, rank).backward()
        optimizer.step()
        step += 1
        manager.snapshot(step, state)
        if step % SELDOM == 0:
            manager.save(step, state)
        progress.done(step)
