"""Training script of the picture on the first page: `training.py DIRECTORY`.

Each rank appends a line for each step to a file in the directory: generation, step, time and loss.
The script ends when the directory contains a file `finish`.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from elasticlib import CheckpointManager, context

STEP_S = 0.025  # the time that a GPU would need for a step

dist.init_process_group("gloo")
directory, rank = Path(sys.argv[1]), dist.get_rank()
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
# Some inputs are much smaller than others, so that the loss decreases during the whole run.
scales = 0.6 ** torch.arange(8)
state = {"model": model, "optimizer": optimizer}
generation = os.environ["ELASTICLIB_GENERATION"]
log = (directory / f"{os.environ['NODE']}.{rank}").open("a", buffering=1)
with CheckpointManager(directory / "checkpoints") as manager:
    step = manager.restore(state).step
    stop = False
    while not stop:
        time.sleep(STEP_S)
        x = torch.randn(256, 8, generator=torch.Generator().manual_seed(16 * step + rank)) * scales
        loss = (model(x) - 4 * x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        manager.snapshot(step, state)
        context().step(step, loss=loss.item())
        print(generation, step, f"{time.monotonic():.3f} {loss.item():.4f}", file=log)
        # Only rank 0 reads the directory, so that all ranks end at the same step.
        finish = torch.tensor(float((directory / "finish").exists() and rank == 0))
        dist.all_reduce(finish)
        stop = bool(finish) or bool(context().should_stop())
    manager.save(step, state)
del model, state
dist.destroy_process_group()
