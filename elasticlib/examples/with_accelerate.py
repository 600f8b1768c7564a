"""A plain loop under accelerate's Accelerator that survives crashes, resizes and drains.

`elasticrun --nproc-per-node 2 --max-restarts 3 --preload accelerate with_accelerate.py`. elasticlib
deals the samples and keeps the states, so that any world size goes on where another was.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

from elasticlib import (
    CheckpointManager,
    ElasticBatchSampler,
    ElasticDistributedSampler,
    Stop,
    context,
)
from elasticlib.examples.byte_transformer import sha256_of
from elasticlib.examples.trace import Trace


def finish_step(
    manager: CheckpointManager, step: int, state: dict[str, Any], save_every: int
) -> Stop | None:
    """Keep what has to be kept of this step; whether we are to stop after it."""
    context().step(step)
    manager.snapshot(step, state)
    stop = context().should_stop()
    if stop or step % save_every == 0:
        manager.save(step, state)
    return stop


def main(args: argparse.Namespace) -> None:
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    set_seed(0)
    trace = Trace.of_this_worker(args.trace)
    x = torch.randn(args.samples, 8)
    data = TensorDataset(torch.arange(args.samples), x, x.sum(1, keepdim=True))
    net = torch.nn.Linear(8, 1)
    sgd = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    model, optimizer = accelerator.prepare(net, sgd)
    world, rank = accelerator.num_processes, accelerator.process_index
    sampler = ElasticDistributedSampler(data, world, rank, drop_last=True)
    batches = ElasticBatchSampler(sampler, args.global_batch)
    # Not prepared: the Accelerator would deal out again what is this rank's share already.
    loader = DataLoader(data, batch_sampler=batches)
    state = {"model": net, "optimizer": sgd, "sampler": batches}
    with CheckpointManager(args.checkpoints) as manager:
        step, stop = manager.restore(state).step, None
        trace.resumed(step)
        for epoch in range(sampler.epoch, args.epochs):
            batches.set_epoch(epoch)
            for batch in loader:
                numbers, x, y = (part.to(accelerator.device) for part in batch)
                trace.step(step + 1, epoch, numbers.tolist(), world)
                optimizer.zero_grad()
                accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
                optimizer.step()
                batches.advance()
                step += 1
                stop = finish_step(manager, step, state, args.save_every)
                if stop:
                    break
            if stop:
                break
    if accelerator.is_main_process:
        what = f"stopped: {stop.reason}" if stop else "done"
        print(f"{what}, steps {step} weights sha256 {sha256_of(net)}", flush=True)
    # The group must end here: if DDP, which holds it, goes last, torch 2.13 hangs now and then.
    del model, optimizer
    accelerator.free_memory()
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoints", default="checkpoints", help="a folder, or a URL")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--global-batch", type=int, default=8, help="samples a step")
    parser.add_argument("--samples", type=int, default=80)
    parser.add_argument("--save-every", type=int, default=5, metavar="STEPS")
    parser.add_argument("--trace", metavar="PREFIX", help="write which samples each step used")
    main(parser.parse_args())
