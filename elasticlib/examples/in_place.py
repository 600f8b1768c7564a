"""A DDP training loop whose workers keep running when another worker is lost.

Usage: `elasticrun --nproc-per-node 2 --max-restarts 3 in_place.py [DIRECTORY]`, with a directory or
fsspec URL for checkpoints (default: checkpoints). With torch older than 2.14, the same script runs,
and all workers are restarted instead.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import elasticlib
from elasticlib import CheckpointManager, ElasticBatchSampler
from elasticlib import ElasticDistributedSampler as Sampler
from elasticlib.data.batch_sampler import EmptyBatchCollator
from elasticlib.in_place.step_loop import StepLoop

SAMPLES, GLOBAL_BATCH, EPOCHS, SAVE_EVERY = 80, 8, 3, 5


def train(manager: CheckpointManager) -> StepLoop:
    """Train a linear model, and return the loop after its last step."""
    torch.manual_seed(0)
    inputs = torch.randn(SAMPLES, 8)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    net = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    sampler = Sampler(data, dist.get_world_size(), dist.get_rank(), tail="exact")
    batches = ElasticBatchSampler(sampler, GLOBAL_BATCH)
    state = {"model": net, "optimizer": optimizer, "sampler": sampler}
    loop = elasticlib.steps(
        batches,
        state,
        manager=manager,
        epochs=EPOCHS,
        loader=lambda local: DataLoader(
            data, batch_sampler=local, collate_fn=EmptyBatchCollator(data)
        ),
        save_every=SAVE_EVERY,
    )
    for attempt in loop:  # a step that is interrupted is attempted again
        with attempt as (x, y):
            if attempt.is_new_group:
                model = DistributedDataParallel(net)
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y, reduction="sum")
            (batches.sample_weight * loss).backward()
            optimizer.step()
            attempt.report(samples=len(x))
    return loop


def main(checkpoints: str) -> None:
    """Train with checkpoints in a directory, and print the result on rank 0."""
    elasticlib.init_process_group("gloo")
    with CheckpointManager(checkpoints) as manager:
        loop = train(manager)
    if dist.get_rank() == 0:
        stop = loop.stop_request
        result = f"stopped: {stop.reason}" if stop else "done"
        print(f"{result} after {loop.step} steps", flush=True)
    # DistributedDataParallel uses the group, and was released when `train` returned.
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else "checkpoints")
