"""One training step and one validation of a classifier, each over all ranks, whatever the world.

A step uses the whole global batch, in pieces that fit a rank's memory, and a validation counts
each image once.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import attrs
import torch
import torch.distributed as dist
import torch.distributed.nn  # DDP would import it late: see leave_process_group
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from elasticlib import BatchPlan
from elasticlib.errors import ConfigError
from elasticlib.logical.exchange import gather_plain

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@attrs.frozen
class Scores:
    """What was seen of some images: a mean loss, and how many were right."""

    images: int
    loss: float
    top1: float
    """Per cent, as is `top5`: the right class is the likeliest, or among the five likeliest."""
    top5: float


def scores_of(sums: Tensor) -> Scores:
    """Of this rank's sums (see `look_at`), over all ranks together; to be called by all."""
    dist.all_reduce(sums)
    loss, first, five, images = sums.tolist()
    count = max(1, images)
    return Scores(int(images), loss / count, 100 * first / count, 100 * five / count)


def look_at(logits: Tensor, labels: Tensor, loss: Tensor) -> Tensor:
    """Sums over some images: of the loss, of those right at once and in five, and how many."""
    likeliest = logits.detach().topk(min(5, logits.shape[1])).indices
    right = likeliest == labels[:, None]
    sums = [loss.detach(), right[:, :1].sum(), right.sum(), torch.tensor(len(labels))]
    return torch.stack([part.to(logits.device, torch.float64) for part in sums])


@attrs.frozen
class Precision:
    """In what numbers the forward pass computes; `name` is off, bf16 or fp16."""

    name: str
    device: torch.device

    def autocast(self) -> AbstractContextManager[Any]:
        kind = TYPES.get(self.name, torch.bfloat16)
        return torch.autocast(self.device.type, kind, enabled=self.name in TYPES)

    def scaler(self) -> torch.amp.GradScaler:
        """Keeps small gradients of 16-bit floats from vanishing; does nothing for the others."""
        return torch.amp.GradScaler(self.device.type, enabled=self.name == "fp16")


def choose_precision(asked: str, device: torch.device) -> Precision:
    """What `--amp` means on this device: auto is bf16 or else fp16 on a GPU, off elsewhere.

    Raises:
        ConfigError: fp16 was asked for where there is no GPU.
    """
    if asked == "fp16" and device.type != "cuda":
        raise ConfigError(f"--amp fp16 needs a GPU, and this is {device}: use bf16 or off")
    if asked != "auto":
        return Precision(asked, device)
    if device.type != "cuda":
        return Precision("off", device)
    native = torch.cuda.is_bf16_supported(including_emulation=False)
    return Precision("bf16" if native else "fp16", device)


class Step:
    """Steps of one optimizer: the gradient of the mean loss over each global batch."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        precision: Precision,
    ) -> None:
        self._bare, self._optimizer = model, optimizer
        self._scaler, self._precision = scaler, precision
        self._model = in_parallel(model, precision.device)

    def __call__(self, images: Tensor, labels: Tensor, plan: BatchPlan) -> Tensor:
        """Take this rank's share of a batch, which may be empty; its sums, as of `look_at`."""
        self._bare.train()
        self._optimizer.zero_grad()
        sums = torch.zeros(4, dtype=torch.float64, device=self._precision.device)
        sizes = [micro.size for micro in plan.micro_batches(dist.get_rank())]
        for turn, (x, y) in enumerate(pieces(images, labels, sizes)):
            last = turn == len(sizes) - 1
            with contextlib.nullcontext() if last else self._model.no_sync():
                loss, seen = self._forward(x, y)
                torch.autograd.backward(self._scaler.scale(plan.per_sample * loss))
            sums += seen
        self._scaler.step(self._optimizer)
        self._scaler.update()
        share_buffers(self._bare, plan.share(dist.get_rank()) / plan.global_batch)
        return sums

    def _forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x, y = (part.to(self._precision.device, non_blocking=True) for part in (x, y))
        with self._precision.autocast():
            logits = self._model(x)
            loss = cross_entropy(logits.float(), y, reduction="sum")
        return loss, look_at(logits, y, loss)


def in_parallel(model: nn.Module, device: torch.device) -> DistributedDataParallel:
    """The model with gradients averaged over the ranks, and buffers left alone.

    They are shared after the step instead, so that a snapshot finds the same ones on all ranks.
    """
    known = inspect.signature(DistributedDataParallel).parameters
    newer = "forward_sync_buffers" in known  # since 2.13, which warns of the other name
    flags: dict[str, Any] = {"forward_sync_buffers" if newer else "broadcast_buffers": False}
    on_gpu = device.type == "cuda"
    return DistributedDataParallel(model, device_ids=[device.index] if on_gpu else None, **flags)


def pieces(images: Tensor, labels: Tensor, sizes: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Images and labels in pieces of these sizes."""
    return zip(torch.split(images, sizes), torch.split(labels, sizes), strict=True)


def share_buffers(model: nn.Module, weight: float) -> None:
    """Make running statistics the ranks' mean, each weighted by its part of the batch.

    Without this each rank would go on with its own, and a resume with those of one of them.
    """
    floats = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if not floats:
        return
    flat = torch.cat([buffer.flatten() for buffer in floats]).mul_(weight)
    dist.all_reduce(flat)
    sizes = [buffer.numel() for buffer in floats]
    for buffer, mean in zip(floats, torch.split(flat, sizes), strict=True):
        buffer.copy_(mean.view_as(buffer))


@torch.no_grad()
def score(
    model: nn.Module, images: Tensor, labels: Tensor, most: int, precision: Precision
) -> Tensor:
    """This rank's sums over some images, of which it has at most `most` in hand at once."""
    model.eval()
    sums = torch.zeros(4, dtype=torch.float64, device=precision.device)
    for x, y in zip(torch.split(images, most), torch.split(labels, most), strict=True):
        x, y = (part.to(precision.device, non_blocking=True) for part in (x, y))
        with precision.autocast():
            logits = model(x).float()
        sums += look_at(logits, y, cross_entropy(logits, y, reduction="sum"))
    return sums


def join_process_group(backend: str | None, rank: str | None) -> None:
    """The group of the launcher's, or of this process alone where `rank` is None.

    Raises:
        ConfigError: NCCL was asked for, and there is no GPU.
    """
    on_gpu = torch.cuda.is_available()
    if backend == "nccl" and not on_gpu:
        raise ConfigError("--dist-backend nccl needs a GPU, and torch sees none: use gloo")
    backend = backend or ("nccl" if on_gpu else "gloo")
    if rank is not None:
        dist.init_process_group(backend)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)


def must_be_same(what: str, value: object) -> None:
    """See that all ranks have the same `value`; to be called by all.

    Raises:
        ConfigError: on every rank, that they have not.
    """
    found = gather_plain(value)
    for rank, other in enumerate(found):
        if other != found[0]:
            raise ConfigError(
                f"{what} must be the same on all ranks: {found[0]} on rank 0, "
                f"{other} on rank {rank}"
            )


def leave_process_group() -> None:
    """Destroy it once nothing else has it: threads of a group that outlives Python may abort."""
    dist.destroy_process_group()
