"""The training of the picture: `training.py FOLDER`. It ends when there is a file FOLDER/finish.

Each rank writes a line for each step: generation, step, time and loss.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from elasticlib import CheckpointManager, context

STEP = 0.025
"""Seconds, which stand for a GPU's work."""

dist.init_process_group("gloo")
folder, rank = Path(sys.argv[1]), dist.get_rank()
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
# Some inputs say less than others, so that the loss falls for long.
sizes = 0.6 ** torch.arange(8)
state = {"model": model, "optimizer": optimizer}
generation = os.environ["ELASTICLIB_GENERATION"]
told = (folder / f"{os.environ['NODE']}.{rank}").open("a", buffering=1)
with CheckpointManager(folder / "checkpoints") as manager:
    step = manager.restore(state).step
    stop = False
    while not stop:
        time.sleep(STEP)
        x = torch.randn(256, 8, generator=torch.Generator().manual_seed(16 * step + rank)) * sizes
        loss = (model(x) - 4 * x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        manager.snapshot(step, state)
        context().step(step, loss=loss.item())
        print(generation, step, f"{time.monotonic():.3f} {loss.item():.4f}", file=told)
        # One rank looks, so that all end at one step.
        over = torch.tensor(float((folder / "finish").exists() and rank == 0))
        dist.all_reduce(over)
        stop = bool(over) or bool(context().should_stop())
    manager.save(step, state)
del model, state
dist.destroy_process_group()
