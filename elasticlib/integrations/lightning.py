"""Lightning's Trainer as a worker that its agent can stop: at a step, with a checkpoint of it.

Lightning keeps its own loops, checkpoints and process group; this counts samples and listens.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import attrs
import torch

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    # What leaves `fit` at once and in order. A trainer that is told `should_stop` ends the epoch
    # first: with validation, and with checkpoints that say that the epoch is over.
    from lightning.pytorch.utilities.exceptions import _TunerExitException as LeaveFit
except ImportError as error:
    raise ImportError(
        "elasticlib.integrations.lightning needs Lightning 2.4 or later: pip install lightning, or"
        f" the extra, pip install 'elasticlib[lightning]' ({error})"
    ) from error

from ..data.batch_sampler import ElasticBatchSampler
from ..errors import ConfigError
from ..workers.context import StopRequest, context

STOPPED = "last-0.ckpt"
"""In the ModelCheckpoint's folder; named as `ckpt_path="last"` looks for it, which takes the newest
by the file's time, and as no ModelCheckpoint names its own (`last.ckpt`, `last-v1.ckpt`)."""


class EpochBatchSampler(ElasticBatchSampler):
    """An `ElasticBatchSampler` with the length of a whole epoch, wherever it stands in it.

    Lightning asks once, and counts the batches of a resumed epoch on from the checkpoint's.
    """

    def __len__(self) -> int:
        """Batches of a whole epoch; the same on every rank."""
        start = attrs.evolve(self.sampler.position, consumed=0)
        return -(-self._epoch_end(start) // self.global_batch)


class ElasticCallback(Callback):
    """Tells the agent each step and its loss; when it asks, saves a checkpoint and leaves `fit`.

    Then `fit` returns, with `stopped` set; end the script, and the next launch or generation goes
    on at the next step, by `fit(..., ckpt_path="last")`. Hooks that end an epoch, or training, are
    not called, as neither has ended. Needs a `ModelCheckpoint(dirpath=...,
    save_last=True)`, in whose folder it saves. Name it as the last of the callbacks: those behind
    it miss the end of the last batch.

    A loss that is on a device is waited for, so it is told as often as the Trainer logs
    (`log_every_n_steps`) and no oftener.

    Args:
        batches: what the training DataLoader has as its `batch_sampler`, if that is to go on in
            the midst of an epoch, at any world size: its position is in every checkpoint.

    Attributes:
        stopped: why and until when, once it has; None before.
    """

    def __init__(self, batches: EpochBatchSampler | None = None) -> None:
        self.stopped: StopRequest | None = None
        self._batches = batches
        self._step = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raises ConfigError if there is nowhere to save where the next launch will look, or if
        that launch's own checkpoints would never be looked at."""
        if stage == "fit" and not _folders(trainer):
            raise ConfigError(
                "ElasticCallback saves beside a ModelCheckpoint whose folder is the same in each"
                " launch and that saves a last checkpoint of its own, without which"
                f" ckpt_path='last' finds what a stop has left ({STOPPED}) for ever, and there is"
                " none: give the Trainer ModelCheckpoint(dirpath=..., save_last=True) as well"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step = trainer.global_step
        context().report_starting()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        if self._batches is not None:
            self._batches.advance()
        step = trainer.global_step
        if step == self._step:
            return  # gradients are being accumulated, and no checkpoint holds them
        self._step = step
        context().step(step, loss=_loss(trainer, outputs))
        self.stopped = context().should_stop()
        if self.stopped is not None:
            trainer.save_checkpoint(os.path.join(_folders(trainer)[0], STOPPED))
            context().report_saved(step)
            raise LeaveFit

    def state_dict(self) -> dict[str, Any]:
        return {} if self._batches is None else {"batches": self._batches.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._batches is not None and "batches" in state_dict:
            self._batches.load_state_dict(state_dict["batches"])
            # Lightning makes the loader's iterator before it calls set_epoch.
            if not self._batches.next_batch_size:
                self._batches.set_epoch(self._batches.position.epoch + 1)


def _loss(trainer: Trainer, outputs: object) -> float | None:
    """Of the last batch of the step; None if there is none, or it is not to be waited for."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        return None
    every = trainer.log_every_n_steps
    if loss.device.type != "cpu" and not (every and trainer.global_step % every == 0):
        return None
    # Lightning gives callbacks what it has divided, so that the gradients are a mean.
    divided_by: int = trainer.accumulate_grad_batches
    return float(loss) * divided_by


def _folders(trainer: Trainer) -> list[str]:
    """Of the ModelCheckpoints that were told where to save, and to save their last; Lightning sets
    them up after us."""
    found = [one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]
    return [os.fspath(one.dirpath) for one in found if one.dirpath is not None and one.save_last]
