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


def train(manager: CheckpointManager) -> str:
    """Train to the end, or until a stop is requested. Return which of the two happened."""
    torch.manual_seed(0)
    inputs = torch.randn(SAMPLES, 8)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    net = torch.nn.Linear(8, 1)
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    sampler = ElasticDistributedSampler(data, drop_last=True)
    batches = ElasticBatchSampler(sampler, GLOBAL_BATCH)
    loader = StatefulDataLoader(data, batch_sampler=batches, num_workers=2)
    state = {"model": net, "optimizer": optimizer, "loader": loader}
    step = manager.restore(state).step
    for _epoch, local_batches in batches.epochs(EPOCHS, loader):
        for x, y in local_batches:
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
                return f"stopped: {stop.reason} after {step} steps"
    return f"done after {step} steps"


dist.init_process_group("gloo")
with CheckpointManager(CHECKPOINTS) as manager:
    result = train(manager)
if dist.get_rank() == 0:
    print(result, flush=True)
# `train` has released DistributedDataParallel: otherwise torch 2.13 sometimes hangs here.
dist.destroy_process_group()
