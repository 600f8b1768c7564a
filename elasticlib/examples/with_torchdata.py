"""A plain DDP loop on torchdata's StatefulDataLoader, with loader workers that read ahead.

`elasticrun --nproc-per-node 2 --max-restarts 3 with_torchdata.py`. The loader's own state holds
the position of what it has handed out, however far its workers have read: it is saved with the
rest, and the sampler is asked for nothing.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from elasticlib import (
    CheckpointManager,
    ElasticBatchSampler,
    ElasticDistributedSampler,
    context,
)
from elasticlib.examples.byte_transformer import sha256_of
from elasticlib.examples.trace import Trace


def main(args: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    trace = Trace.of_this_worker(args.trace)
    x = torch.randn(args.samples, 8)
    data = TensorDataset(torch.arange(args.samples), x, x.sum(1, keepdim=True))
    net = torch.nn.Linear(8, 1)
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    sampler = ElasticDistributedSampler(data, drop_last=True)
    batches = ElasticBatchSampler(sampler, args.global_batch)
    loader = StatefulDataLoader(data, batch_sampler=batches, num_workers=args.loader_workers)
    state = {"model": net, "optimizer": optimizer, "loader": loader}
    with CheckpointManager(args.checkpoints) as manager:
        step, stop = manager.restore(state).step, None
        trace.resumed(step)
        while step < args.steps and not stop:
            for numbers, x, y in loader:  # one epoch after the other, by itself
                trace.step(step + 1, sampler.epoch, numbers.tolist(), dist.get_world_size())
                optimizer.zero_grad()
                torch.autograd.backward(torch.nn.functional.mse_loss(model(x), y))
                optimizer.step()
                step += 1
                context().step(step)
                manager.snapshot(step, state)
                stop = context().should_stop()
                if stop or step % args.save_every == 0:
                    manager.save(step, state)
                if stop or step == args.steps:
                    break
    if dist.get_rank() == 0:
        what = f"stopped: {stop.reason}" if stop else "done"
        print(f"{what}, steps {step} weights sha256 {sha256_of(net)}", flush=True)
    # The group must end here: if DDP, which holds it, goes last, torch 2.13 hangs now and then.
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoints", default="checkpoints", help="a folder, or a URL")
    parser.add_argument("--global-batch", type=int, default=8, help="samples a step, of all ranks")
    parser.add_argument("--loader-workers", type=int, default=2, help="processes that read ahead")
    parser.add_argument("--samples", type=int, default=80)
    parser.add_argument("--save-every", type=int, default=5, metavar="STEPS")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--trace", metavar="PREFIX", help="write which samples each step used")
    main(parser.parse_args())
