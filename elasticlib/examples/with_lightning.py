"""A Lightning Trainer that survives crashes, resizes and drains, and uses each sample once.

Usage: `elasticrun --nproc-per-node 2 --max-restarts 3 --preload lightning.pytorch with_lightning.py
[DIRECTORY]`, with a directory for checkpoints (default: checkpoints). Differences from a script for
a fixed number of nodes: the numbers of nodes and workers are read from the environment, and the
Trainer gets `ElasticCallback`, `EpochBatchSampler` and `ckpt_path="last"`.
"""

from __future__ import annotations

import os
import sys

import lightning.pytorch as lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from elasticlib import ElasticDistributedSampler
from elasticlib.integrations.lightning import ElasticCallback, EpochBatchSampler

CHECKPOINTS = sys.argv[1] if sys.argv[1:] else "checkpoints"
SAMPLES, GLOBAL_BATCH, EPOCHS, SAVE_EVERY = 80, 8, 3, 5


class Regression(lightning.LightningModule):
    """A linear regression."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


lightning.seed_everything(0)
inputs = torch.randn(SAMPLES, 8)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
workers, nodes = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["GROUP_WORLD_SIZE"])
sampler = ElasticDistributedSampler(data, world, rank, drop_last=True)
batches = EpochBatchSampler(sampler, GLOBAL_BATCH)
elastic = ElasticCallback(batches)
checkpoint = ModelCheckpoint(CHECKPOINTS, every_n_train_steps=SAVE_EVERY, save_last=True)
trainer = lightning.Trainer(
    devices=workers,
    num_nodes=nodes,
    strategy="ddp",
    max_epochs=EPOCHS,
    callbacks=[checkpoint, elastic],
    use_distributed_sampler=False,  # ElasticDistributedSampler is used instead
    logger=False,
    enable_progress_bar=False,
)
net = Regression()
trainer.fit(net, DataLoader(data, batch_sampler=batches), ckpt_path="last")
if trainer.is_global_zero:
    result = f"stopped: {elastic.stop_request.reason}" if elastic.stop_request else "done"
    print(result, f"after {trainer.global_step} steps", flush=True)
