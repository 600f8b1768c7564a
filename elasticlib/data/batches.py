"""Batches of the job rather than of a rank: each is the next `global_batch` samples of the order.

A step uses the same samples at any world size. The ranks' shares of them differ by at most one
sample, micro-batches keep each within its memory, and weights undo that they differ.
"""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal
from weakref import WeakKeyDictionary

import attrs
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import Dataset, Sampler, default_collate

from ..errors import ConfigError
from .deal import Position, Tail, check_int, check_one_of, share_of
from .permutation import order_of, runs_of
from .sampler import ElasticDistributedSampler, JobIterable, _warn


@attrs.frozen
class MicroBatch:
    """Samples that go through the model at once, and what their mean loss is multiplied by."""

    size: int
    weight: float


@attrs.frozen
class BatchPlan:
    """One optimizer step of `world_size` ranks over `global_batch` samples; see `plan_batches`.

    Every rank runs `accumulation` micro-batches a step, so that collectives within the model's
    backward pass line up; with fewer samples than ranks times that, the last of some are empty.

    DDP and FSDP *average* the ranks' gradients, as if all had used as many samples. To end with
    the gradient of the mean loss over the global batch, multiply a micro-batch's mean loss by its
    `weight`, or its summed loss by `per_sample`, which also serves an empty one, whose mean is not
    a number. Where gradients are *summed* over the ranks, divide either by `world_size`::

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
        return len(share_of(self.global_batch, rank=rank, world_size=self.world_size))

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
    most = global_batch if max_micro_batch is None else max_micro_batch
    numbers = {"global_batch": global_batch, "world_size": world_size, "max_micro_batch": most}
    for name, value in numbers.items():
        numbers[name] = check_int(name, value)
        if numbers[name] < 1:
            raise ConfigError(f"need {name} >= 1, got {value}")
    return BatchPlan(**numbers)


Rule = Literal["linear", "sqrt"]


def scale_learning_rates(
    optimizer: Optimizer, global_batch: int, *, reference_batch: int, rule: Rule = "linear"
) -> float:
    """Have every step of `optimizer` taken at the rates that suit `global_batch`.

    The rates in the optimizer, and those that schedulers set, remain those for `reference_batch`:
    they are multiplied when a step begins, and restored when it ends. So a saved, restored or
    scheduled rate is never a scaled one, and nothing is scaled twice. With `ElasticBatchSampler`
    the global batch does not change, and no rule is needed. Call it in each generation, before or
    after the restore; called again, it replaces what was asked before::

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)           # right for 256 samples
        scale_learning_rates(optimizer, batch_size * world_size, reference_batch=256)

    It hooks into `optimizer.step()`, which a captured CUDA graph does not call.

    Args:
        optimizer: any of torch's, with any schedulers.
        global_batch: samples a step, of all ranks together, as it is now.
        reference_batch: the samples a step for which its learning rates are right.
        rule: "linear", in proportion, is for SGD, with a warm-up: P. Goyal et al., "Accurate, Large
            Minibatch SGD", 2017. "sqrt", by the square root of the proportion, is for Adam and its
            like: S. Malladi et al., "On the SDEs and Scaling Rules for Adaptive Gradient
            Algorithms", NeurIPS 2022.

    Returns:
        What rates are multiplied by: log `scheduler.get_last_lr()[0]` times this.

    Raises:
        ConfigError: a batch is less than 1, or there is no such rule.
    """
    check_one_of("rule", rule, Rule)
    if reference_batch < 1 or global_batch < 1:
        raise ConfigError(
            f"need batches of at least 1 sample, got global_batch={global_batch} and"
            f" reference_batch={reference_batch}"
        )
    factor = global_batch / reference_batch
    if rule == "sqrt":
        factor = math.sqrt(factor)
    scaled = _SCALED.get(optimizer)
    if scaled is None:
        scaled = _SCALED[optimizer] = _Scaled()
        optimizer.register_step_pre_hook(scaled.begin)
        optimizer.register_step_post_hook(scaled.end)
        optimizer.register_state_dict_pre_hook(scaled.end)
    scaled.factor = factor
    return factor


class _Scaled:
    """The factor of one optimizer's rates, and the rates before the present step."""

    def __init__(self) -> None:
        self.factor = 1.0
        self._before: list[tuple[dict[str, Any], Any]] = []

    def begin(self, optimizer: Optimizer, *_: object) -> None:
        self.end()  # of a step that raised, or one that this one is called by
        self._before = [(group, group["lr"]) for group in optimizer.param_groups]
        for group, rate in self._before:
            group["lr"] = rate * self.factor

    def end(self, *_: object) -> None:
        for group, rate in self._before:
            group["lr"] = rate
        self._before = []


_SCALED: WeakKeyDictionary[Optimizer, _Scaled] = WeakKeyDictionary()


class ElasticBatchSampler(JobIterable, Sampler[list[int]]):
    """Yields this rank's share of each global batch, as a list of indices, step by step.

    Batch k of an epoch has the same samples at any world size: the next `global_batch` samples of
    the sampler's order, dealt to the ranks like cards. Shares differ by at most one sample. A
    rank's share may be empty, in the last batch or with more ranks than samples in a batch; the
    rank then takes part in the step with the empty batch that `CollateOrEmpty` makes. ::

        sampler = ElasticDistributedSampler(dataset, tail="exact")
        batches = ElasticBatchSampler(sampler, global_batch=256)
        collate = CollateOrEmpty(dataset)                  # this rank's last share may be empty
        for epoch in range(sampler.epoch, epochs):
            sampler.set_epoch(epoch)
            for x, y in DataLoader(dataset, batch_sampler=batches, collate_fn=collate):
                weight = batches.plan().per_sample         # of this step, which may be the last
                (weight * loss(model(x), y, reduction="sum")).backward()
                ...
                batches.advance()                          # on every rank

    Its state is the sampler's. In torchdata's StatefulDataLoader give it as `batch_sampler`; the
    position is then kept without `advance`, but `plan` and `samples` follow what it counted:
    without it all batches have the weight of the first, a smaller last one too.

    Args:
        sampler: keeps the position, the order, this rank and the world size.
        global_batch: samples a step, of all ranks together.
        max_micro_batch: the most that one rank's memory takes at once; only `plan` uses it.
        tail: what becomes of the last batch where the samples do not divide by `global_batch`:
            "exact" makes it smaller, "drop" leaves it out, "pad" fills it up with samples from
            the start of the order. By default the sampler's tail.
        contiguous: whether a rank's share is one contiguous part of the batch, for data that are
            best read in a row, such as a `ShardDataset`; otherwise samples are dealt one by one.

    Raises:
        ConfigError: `global_batch`, `max_micro_batch` or `tail` cannot be.
    """

    def __init__(
        self,
        sampler: ElasticDistributedSampler,
        global_batch: int,
        *,
        max_micro_batch: int | None = None,
        tail: Tail | None = None,
        contiguous: bool = False,
    ) -> None:
        planned = plan_batches(global_batch, sampler.num_replicas, max_micro_batch)
        self.tail: Tail = sampler.tail if tail is None else tail
        check_one_of("tail", self.tail, Tail)
        self.sampler, self.global_batch = sampler, planned.global_batch
        self.progress = sampler.progress
        self.max_micro_batch, self.contiguous = max_micro_batch, contiguous

    @property
    def _stride(self) -> int:
        return self.global_batch

    def __len__(self) -> int:
        """How many batches an iterator would yield now: what is left; the same on every rank."""
        start = self.progress.next_to_draw(self._over)
        return -(-(self._end(start) - start.consumed) // self.global_batch)

    @property
    def samples(self) -> int:
        """How many samples, of all ranks, are in the batch after those that `advance` counted.

        Less than `global_batch` in the last one if `tail` is "exact"; 0 when the epoch is over
        and the next does not begin by itself.
        """
        start = self.progress.next_to_count(self._over)
        return min(self.global_batch, self._end(start) - start.consumed)

    def plan(self) -> BatchPlan:
        """How the ranks take the step of these `samples`: its sizes and weights.

        Raises:
            ConfigError: the epoch is over.
        """
        if not self.samples:
            raise ConfigError("there is no batch to plan: the epoch is over")
        return plan_batches(self.samples, self.sampler.num_replicas, self.max_micro_batch)

    def advance(self) -> int:
        """Count the next batch as trained on; to be called on every rank after each step.

        Returns:
            Its samples, of all ranks.

        Raises:
            ConfigError: epochs have begun by themselves because nobody counted.
        """
        position = self.progress.position
        samples = min(self.global_batch, self._end(position) - position.consumed)
        # The whole batch is counted, also beyond the end: a surplus shows a wrong count.
        self.progress.advance(self.global_batch)
        if self._over(self.progress.position):  # a dropped tail is not for another batch size
            self.progress.finish_epoch()
        _warn(self.progress.excess())
        return samples

    def _share(self, samples: int) -> range:
        """This rank's places in a batch of `samples`."""
        rank, world = self.sampler.rank, self.sampler.num_replicas
        if self.contiguous:
            return share_of(samples, rank=rank, world_size=world)
        return range(rank, samples, world)

    def _runs(self, start: Position) -> Iterator[list[list[int]]]:
        order, end = order_of(start, self.sampler.made_of), self._end(start)
        rest = (end - start.consumed) % self.global_batch
        whole = range(start.consumed, end - rest, self.global_batch)
        yield from runs_of(order, whole, self._share(self.global_batch))
        if rest:
            yield from runs_of(order, range(end - rest, end, rest), self._share(rest))


class CollateOrEmpty:
    """A `collate_fn` that makes a batch of no samples for a rank with an empty share.

    It is the batch of the dataset's first sample, with each tensor cut to 0 rows and each list of
    strings emptied. All other batches are left to `collate_fn`.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        collate_fn: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        self.dataset, self.collate_fn = dataset, collate_fn

    def __call__(self, samples: list[Any]) -> Any:
        return self.collate_fn(samples) if samples else _cut(self.collate_fn([self.dataset[0]]))


def _cut(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch[:0]
    if isinstance(batch, Mapping):
        cut = {name: _cut(part) for name, part in batch.items()}
        return type(batch)(cut)  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_cut(part) for part in batch))
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        parts = [part for part in batch if not isinstance(part, (str, bytes))]
        return type(batch)([_cut(part) for part in parts])  # type: ignore[call-arg]
    return batch


def ignore_signals_worker_init(worker_id: int) -> None:  # noqa: ARG001 - torch gives it
    """A `worker_init_fn` with which SIGTERM, SIGINT, SIGUSR1 and SIGUSR2 do not end the loader's
    workers.

    A scheduler or a terminal signals every process of a job, and a loader without its workers
    raises before the training step at which the job would have saved. ::

        loader = DataLoader(dataset, num_workers=4, worker_init_fn=ignore_signals_worker_init)

    The training process gets the signals, saves and ends as usual. The workers end with their
    loader, or within seconds if the training process is killed. SIGTERM from the training process
    itself ends them at once, because Python ends them so at exit, and waits for them. If you have a
    `worker_init_fn` of your own, call this one in it. It is for workers that are forked, as they
    are on Linux before Python 3.14, and with `multiprocessing_context="fork"`; one that is spawned
    is ended by SIGTERM.
    """
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    # A handler in Python does not learn a signal's sender; ignoring SIGTERM from all would leave
    # multiprocessing waiting for ever, at exit, for workers of an iterator that is still held.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    arguments = (os.getppid(),)
    threading.Thread(target=_heed_parent, args=arguments, name="sigterm", daemon=True).start()


def _heed_parent(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)
