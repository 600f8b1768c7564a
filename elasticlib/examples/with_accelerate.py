"""A training loop with accelerate's Accelerator that survives crashes, resizes and drains.

Usage: `elasticrun --nproc-per-node 2 --max-restarts 3 --preload accelerate with_accelerate.py
[DIRECTORY]`, with a directory or fsspec URL for checkpoints (default: checkpoints). elasticlib
distributes the samples and saves the state, so training can resume at any world size.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

from elasticlib import CheckpointManager, ElasticBatchSampler, ElasticDistributedSampler, context

CHECKPOINTS = sys.argv[1] if sys.argv[1:] else "checkpoints"
SAMPLES, GLOBAL_BATCH, EPOCHS, SAVE_EVERY = 80, 8, 3, 5

accelerator = Accelerator(cpu=not torch.cuda.is_available())
set_seed(0)
inputs = torch.randn(SAMPLES, 8)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
net = torch.nn.Linear(8, 1)
sgd = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
model, optimizer = accelerator.prepare(net, sgd)
world, rank = accelerator.num_processes, accelerator.process_index
sampler = ElasticDistributedSampler(data, world, rank, drop_last=True)
batches = ElasticBatchSampler(sampler, GLOBAL_BATCH)
# Do not prepare the loader: the Accelerator would divide this rank's part of each batch again.
loader = DataLoader(data, batch_sampler=batches)
state = {"model": net, "optimizer": sgd, "sampler": batches}


def remaining_batches() -> Iterator[list[torch.Tensor]]:
    """Yield the remaining batches of the current epoch, and those of all later epochs."""
    for epoch in range(sampler.epoch, EPOCHS):
        batches.set_epoch(epoch)
        yield from loader


with CheckpointManager(CHECKPOINTS) as manager:
    step, stop = manager.restore(state).step, None
    for x, y in remaining_batches():
        optimizer.zero_grad()
        prediction = model(x.to(accelerator.device))
        accelerator.backward(torch.nn.functional.mse_loss(prediction, y.to(accelerator.device)))
        optimizer.step()
        batches.advance()
        step += 1
        context().step(step)
        manager.snapshot(step, state)
        stop = context().should_stop()
        if stop or step % SAVE_EVERY == 0:
            manager.save(step, state)
        if stop:
            break
if accelerator.is_main_process:
    print(f"stopped: {stop.reason}" if stop else "done", f"after {step} steps", flush=True)
# Release DistributedDataParallel before its process group: otherwise torch 2.13 sometimes hangs.
del model, optimizer
accelerator.free_memory()
accelerator.end_training()
