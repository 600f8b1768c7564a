"""A DDP training loop with torchdata's StatefulDataLoader, whose workers read ahead.

Usage: `elasticrun --nproc-per-node 2 --max-restarts 3 with_torchdata.py [DIRECTORY]`, with a
directory or fsspec URL for checkpoints (default: checkpoints). The state of the loader contains the
position of the batches that it has returned, even if its workers have read more. It is saved with
the rest of the state, so the script does not call `sampler.advance`.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from elasticlib import CheckpointManager, ElasticBatchSampler, ElasticDistributedSampler, context

CHECKPOINTS = sys.argv[1] if sys.argv[1:] else "checkpoints"
SAMPLES, GLOBAL_BATCH, EPOCHS, SAVE_EVERY = 80, 8, 3, 5

dist.init_process_group("gloo")
torch.manual_seed(0)
inputs = torch.randn(SAMPLES, 8)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
net = torch.nn.Linear(8, 1)
model = torch.nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
sampler = ElasticDistributedSampler(data, drop_last=True)
batches = ElasticBatchSampler(sampler, GLOBAL_BATCH)
loader = StatefulDataLoader(data, batch_sampler=batches, num_workers=2)
progress = {"epoch": 0}  # the loader restores its state only when it is iterated
state = {"model": net, "optimizer": optimizer, "loader": loader, "progress": progress}

with CheckpointManager(CHECKPOINTS) as manager:
    step, stop = manager.restore(state).step, None
    for epoch in range(progress["epoch"], EPOCHS):
        progress["epoch"] = epoch
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            step += 1
            context().step(step)
            manager.snapshot(step, state)
            stop = context().should_stop()
            if stop or step % SAVE_EVERY == 0:
                manager.save(step, state)
            if stop:
                break
        if stop:
            break
if dist.get_rank() == 0:
    print(f"stopped: {stop.reason}" if stop else "done", f"after {step} steps", flush=True)
# Release DistributedDataParallel before its process group: otherwise torch 2.13 sometimes hangs.
del model
dist.destroy_process_group()
