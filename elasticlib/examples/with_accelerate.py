"""A training loop with accelerate's Accelerator that survives crashes, resizes and drains.

Usage: `elasticrun --nproc-per-node 2 --max-restarts 3 --preload accelerate with_accelerate.py
[DIRECTORY]`, with a directory or fsspec URL for checkpoints (default: checkpoints). elasticlib
distributes the samples and saves the state, so training can resume at any world size.
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

from elasticlib import CheckpointManager, ElasticBatchSampler, ElasticDistributedSampler, context

CHECKPOINTS = sys.argv[1] if sys.argv[1:] else "checkpoints"
SAMPLES, GLOBAL_BATCH, EPOCHS, SAVE_EVERY = 80, 8, 3, 5

accelerator = Accelerator(cpu=not torch.cuda.is_available())
set_seed(0)


def train(manager: CheckpointManager) -> str:
    """Train to the end, or until a stop is requested. Return which of the two happened."""
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
    step = manager.restore(state).step
    for _epoch, local_batches in batches.epochs(EPOCHS, loader):
        for x, y in local_batches:
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
                return f"stopped: {stop.reason} after {step} steps"
    return f"done after {step} steps"


with CheckpointManager(CHECKPOINTS) as manager:
    result = train(manager)
if accelerator.is_main_process:
    print(result, flush=True)
# Release DistributedDataParallel before its process group: otherwise torch 2.13 sometimes hangs.
accelerator.free_memory()
accelerator.end_training()
