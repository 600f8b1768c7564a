"""How a global batch is split over ranks and micro-batches, so that its gradient stays the same.

The global batch is what the user chose, whatever the world: shares differ by at most one sample,
none is over the memory's limit, and weights undo that they differ.
"""

from __future__ import annotations

import math

import attrs

from ..errors import ConfigError
from ..whole import whole
from .deal import check_rank


@attrs.frozen
class MicroBatch:
    """So many samples go through the model at once, and what their mean loss is multiplied by."""

    size: int
    weight: float


@attrs.frozen
class BatchPlan:
    """One optimizer step of `world_size` ranks over `global_batch` samples; see `plan_batches`.

    Every rank runs `accumulation` micro-batches a step, so that collectives within the model's
    backward pass line up; with fewer samples than ranks times that, the last of some are empty.

    **Weights.** DDP and FSDP *average* the ranks' gradients, as if all had used as many samples.
    To end with the gradient of the mean loss over the global batch, multiply a micro-batch's
    mean loss by its `weight`, size x world_size / global_batch, before `backward`; or its summed
    loss by `per_sample`, which also serves an empty one, whose mean is not a number. Where
    gradients are *summed* over the ranks, divide either by `world_size`::

        for k, micro in enumerate(plan.micro_batches(rank)):
            last = k == plan.accumulation - 1
            with contextlib.nullcontext() if last else model.no_sync():
                (plan.per_sample * summed_loss(model, samples[k])).backward()
        optimizer.step()
    """

    global_batch: int
    world_size: int
    max_micro_batch: int

    @property
    def accumulation(self) -> int:
        """Micro-batches a step, the same on every rank; at least 1."""
        return max(1, -(-self.share(0) // self.max_micro_batch))

    @property
    def per_sample(self) -> float:
        """What a micro-batch's summed loss is multiplied by."""
        return self.world_size / self.global_batch

    def share(self, rank: int) -> int:
        """How many samples of a global batch are this rank's: the first ranks have one more.

        Raises:
            ConfigError: `rank` is not in the world.
        """
        check_rank(rank, self.world_size)
        return self.global_batch // self.world_size + (rank < self.global_batch % self.world_size)

    def micro_batches(self, rank: int) -> tuple[MicroBatch, ...]:
        """This rank's micro-batches of one step; sizes differ by at most one.

        Raises:
            ConfigError: `rank` is not in the world.
        """
        few, more = divmod(self.share(rank), self.accumulation)
        sizes = (few + (turn < more) for turn in range(self.accumulation))
        return tuple(MicroBatch(size, self.per_sample * size) for size in sizes)


def plan_batches(
    global_batch: int, world_size: int, max_micro_batch: int | None = None
) -> BatchPlan:
    """How `world_size` ranks take one step over exactly `global_batch` samples.

    Args:
        global_batch: samples a step, of all ranks together.
        world_size: how many ranks there are now.
        max_micro_batch: the most samples that one rank's memory takes at once; by default any.

    Raises:
        ConfigError: one of them is less than 1, or no integer.
    """
    global_batch = whole("global_batch", global_batch)
    most = global_batch if max_micro_batch is None else whole("max_micro_batch", max_micro_batch)
    for name, value in (
        ("global_batch", global_batch),
        ("world_size", world_size),
        ("max_micro_batch", most),
    ):
        if value < 1:
            raise ConfigError(f"need {name} >= 1, got {value}")
    return BatchPlan(global_batch, world_size, most)


def linear_learning_rate(rate: float, *, of: int, to: int) -> float:
    """The rate for a global batch of `to`, where `rate` was right for one of `of`: in proportion.

    For SGD, with a warm-up: P. Goyal et al., "Accurate, Large Minibatch SGD", 2017. Only for who
    changes the global batch on purpose; a change of the world size alone needs no rule.

    Raises:
        ConfigError: a batch is less than 1.
    """
    return rate * _ratio(of, to)


def square_root_learning_rate(rate: float, *, of: int, to: int) -> float:
    """The rate for a global batch of `to`, by the square root of the proportion.

    For Adam and its like: S. Malladi et al., "On the SDEs and Scaling Rules for Adaptive Gradient
    Algorithms", NeurIPS 2022. Only for who changes the global batch on purpose.

    Raises:
        ConfigError: a batch is less than 1.
    """
    return rate * math.sqrt(_ratio(of, to))


def _ratio(of: int, to: int) -> float:
    if of < 1 or to < 1:
        raise ConfigError(f"need batches of at least 1 sample, got of={of} and to={to}")
    return to / of
