"""A plain DDP loop of workers that outlive their group: when one is lost, the others go on.

`elasticrun --nproc-per-node 2 --max-restarts 3 in_place.py [FOLDER]`, with a folder or URL for
checkpoints. With a torch before 2.14 the same script works, and all workers are started anew.
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
from elasticlib.data.batch_sampler import CollateOrEmpty
from elasticlib.in_place.steps import Steps

SAMPLES, GLOBAL_BATCH, EPOCHS, SAVE_EVERY = 80, 8, 3, 5


def train(manager: CheckpointManager) -> Steps:
    torch.manual_seed(0)
    inputs = torch.randn(SAMPLES, 8)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    net = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    sampler = Sampler(data, dist.get_world_size(), dist.get_rank(), tail="exact")
    batches = ElasticBatchSampler(sampler, GLOBAL_BATCH)
    state = {"model": net, "optimizer": optimizer, "sampler": sampler}
    attempts = elasticlib.steps(
        batches,
        state,
        manager=manager,
        epochs=EPOCHS,
        loader=lambda drawn: DataLoader(data, batch_sampler=drawn, collate_fn=CollateOrEmpty(data)),
        save_every=SAVE_EVERY,
    )
    for attempt in attempts:  # of a step, which may be cut and attempted again
        with attempt as (x, y):
            if attempt.new_group:
                model = DistributedDataParallel(net)
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y, reduction="sum")
            (batches.sample_weight * loss).backward()
            optimizer.step()
            attempt.report(samples=len(x))
    return attempts


def main(checkpoints: str) -> None:
    elasticlib.init_process_group("gloo")
    with CheckpointManager(checkpoints) as manager:
        done = train(manager)
    if dist.get_rank() == 0:
        stop = done.stopped
        said = f"stopped: {stop.reason}" if stop else "done"
        print(f"{said} after {done.step} steps", flush=True)
    # The group must end here: DDP, which holds it, went with `train`.
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else "checkpoints")
