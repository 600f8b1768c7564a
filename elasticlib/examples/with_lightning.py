"""A Lightning Trainer that survives crashes, resizes and drains, and uses each sample once.

`elasticrun --nproc-per-node 2 --max-restarts 3 --preload lightning.pytorch with_lightning.py`. What
Lightning needs of the launcher is the number of nodes and of workers; the rest is two parts of
`elasticlib.integrations.lightning`, and `ckpt_path="last"`.
"""

from __future__ import annotations

import argparse
import os

import lightning.pytorch as lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from elasticlib import ElasticDistributedSampler
from elasticlib.examples.byte_transformer import sha256_of
from elasticlib.examples.trace import Trace
from elasticlib.integrations.lightning import ElasticCallback, EpochBatchSampler


class Regression(lightning.LightningModule):
    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
        self.trace = trace

    def on_train_start(self) -> None:
        self.trace.resumed(self.global_step)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        numbers, x, y = batch
        world = self.trainer.world_size
        self.trace.step(self.global_step + 1, self.current_epoch, numbers.tolist(), world)
        return torch.nn.functional.mse_loss(self.layer(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def main(args: argparse.Namespace) -> None:
    lightning.seed_everything(0)
    x = torch.randn(args.samples, 8)
    data = TensorDataset(torch.arange(args.samples), x, x.sum(1, keepdim=True))
    workers, nodes = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["GROUP_WORLD_SIZE"])
    sampler = ElasticDistributedSampler(
        data, int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]), drop_last=True
    )
    batches = EpochBatchSampler(sampler, args.global_batch)
    elastic = ElasticCallback(batches)
    keep = ModelCheckpoint(args.checkpoints, every_n_train_steps=args.save_every, save_last=True)
    trainer = lightning.Trainer(
        devices=workers,
        num_nodes=nodes,
        strategy="ddp",
        max_epochs=args.epochs,
        callbacks=[keep, elastic],
        use_distributed_sampler=False,  # ours deals the samples
        logger=False,
        enable_progress_bar=False,
    )
    model = Regression(Trace.of_this_worker(args.trace))
    trainer.fit(model, DataLoader(data, batch_sampler=batches), ckpt_path="last")
    if trainer.is_global_zero:
        what = f"stopped: {elastic.stopped.reason}" if elastic.stopped else "done"
        print(f"{what}, steps {trainer.global_step} weights sha256 {sha256_of(model)}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoints", default="checkpoints", help="a folder")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--global-batch", type=int, default=8, help="samples a step, of all ranks")
    parser.add_argument("--samples", type=int, default=80)
    parser.add_argument("--save-every", type=int, default=5, metavar="STEPS")
    parser.add_argument("--trace", metavar="PREFIX", help="write which samples each step used")
    main(parser.parse_args())
