"""Callback and batch sampler for Lightning's Trainer.

Lightning keeps its own training loop, checkpoints and process group. The callback reports steps to
the agent, and stops training when the agent requests it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    # This exception makes `fit` return at once. With `trainer.should_stop`, the Trainer would first
    # finish the epoch: it would run validation, and save checkpoints of a finished epoch.
    from lightning.pytorch.utilities.exceptions import _TunerExitException as ExitFit
except ImportError as error:
    raise ImportError(
        "elasticlib.integrations.lightning needs Lightning 2.4 or later: pip install lightning, or"
        f" the extra, pip install 'elasticlib[lightning]' ({error})"
    ) from error

from ..data.batch_sampler import ElasticBatchSampler
from ..errors import ConfigError
from ..workers.context import StopRequest, context

# With ckpt_path="last", Lightning resumes from the newest file whose name starts with "last".
# ModelCheckpoint itself uses the names last.ckpt, last-v1.ckpt, ...
STOP_CHECKPOINT_NAME = "last-0.ckpt"


class EpochBatchSampler(ElasticBatchSampler):
    """An `ElasticBatchSampler` whose length is that of a whole epoch.

    The length of an `ElasticBatchSampler` is the number of remaining batches. Lightning reads the
    length once, and counts the batches of a resumed epoch from the number in the checkpoint.
    """

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch, which is the same on every rank."""
        return self.epoch_length


class ElasticCallback(Callback):
    """Callback that reports steps to the agent, and saves and stops when the agent requests it.

    After a stop request, the callback saves a checkpoint in the directory of the `ModelCheckpoint`,
    and `fit` returns with `stop_request` set. The hooks for the end of an epoch and of training are
    not called. The script must then exit. The next run resumes with `fit(..., ckpt_path="last")`.

    The Trainer needs a `ModelCheckpoint(dirpath=..., save_last=True)`. Make this callback the last
    in the list, because later callbacks are not called for the last batch. Reading a loss from a
    device waits for the device, so the callback reads it only every `log_every_n_steps` steps.

    Args:
        batches: The batch sampler of the training DataLoader. If given, its position is saved in
            every checkpoint, so that training can resume within an epoch at any world size.

    Attributes:
        stop_request: Reason and deadline of the stop request for which `fit` returned, or None.
    """

    def __init__(self, batches: EpochBatchSampler | None = None) -> None:
        self.stop_request: StopRequest | None = None
        self._batches = batches
        self._step = 0  # last optimizer step that was reported

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that the Trainer saves its last checkpoint in a fixed directory.

        Raises:
            ConfigError: The Trainer has no such ModelCheckpoint.
        """
        if stage == "fit" and not _last_checkpoint_dirs(trainer):
            raise ConfigError(
                "ElasticCallback requires ModelCheckpoint(dirpath=..., save_last=True) in the"
                " Trainer's callbacks. Without it, ckpt_path='last' would always resume from the"
                f" first checkpoint that a stop request has left ({STOP_CHECKPOINT_NAME})"
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
            return  # gradients are being accumulated; a checkpoint would not contain them
        self._step = step
        context().step(step, loss=_read_loss(trainer, outputs))
        self.stop_request = context().should_stop()
        if self.stop_request is not None:
            directory = _last_checkpoint_dirs(trainer)[0]
            trainer.save_checkpoint(os.path.join(directory, STOP_CHECKPOINT_NAME))
            context().report_saved(step)
            raise ExitFit

    def state_dict(self) -> dict[str, Any]:
        return {} if self._batches is None else {"batches": self._batches.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._batches is not None and "batches" in state_dict:
            self._batches.load_state_dict(state_dict["batches"])
            # Lightning creates the iterator of the DataLoader before it calls set_epoch.
            if not self._batches.next_batch_size:
                self._batches.set_epoch(self._batches.position.epoch + 1)


def _read_loss(trainer: Trainer, outputs: object) -> float | None:
    """Return the loss of the last batch, or None if it is missing or not to be read now."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        return None
    interval = trainer.log_every_n_steps
    if loss.device.type != "cpu" and not (interval and trainer.global_step % interval == 0):
        return None
    # Lightning divides the loss, so that the accumulated gradients are a mean.
    divisor: int = trainer.accumulate_grad_batches
    return float(loss) * divisor


def _last_checkpoint_dirs(trainer: Trainer) -> list[str]:
    """Return the directories in which a ModelCheckpoint saves its last checkpoint."""
    callbacks = [
        callback
        for callback in trainer.checkpoint_callbacks
        if isinstance(callback, ModelCheckpoint)
    ]
    return [os.fspath(c.dirpath) for c in callbacks if c.dirpath is not None and c.save_last]
