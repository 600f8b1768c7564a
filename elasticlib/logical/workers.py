"""Training whose weights do not depend on the world size: a fixed number of logical workers.

What a logical worker computes follows from its index and the step alone, and their gradients are
added in one order. So a job may be killed and resized at will, and ends with the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..data.deal import check_int
from ..errors import ConfigError, NotReproducible, StateMismatch, present
from .conditions import (
    buffers_of,
    check_buffers,
    check_device,
    check_ranks_agree,
    conditions,
    differences,
    digest_of,
    seed_all,
)
from .exchange import BUCKET_BYTES, Exchange
from .gradients import FlatGradient, Gradients, Layout
from .seeds import seed_of
from .shares import share, workers_of
from .tree import TreeSum, pieces

FORMAT = 1
"""The version of the plain form of a state."""


class LogicalWorker:
    """One of the fixed number of workers among which the job deals each global batch.

    Attributes:
        index: which one, from 0.
        count: how many there are.
        step: the step of the job that it is computing.
        seed: what torch's random numbers are seeded with while it does; for other generators
            that its forward pass uses, such as numpy's.
    """

    def __init__(self, index: int, count: int, step: int, seed: int) -> None:
        self.index, self.count, self.step = index, count, step
        self.seed = seed_of(seed, step, index, "model")
        self._data_seed = seed_of(seed, step, index, "data")

    def samples(self, batch: int) -> range:
        """Which samples of a global batch of `batch` are its own, counted from the batch's first.

        The same at any world size; empty where there are fewer samples than logical workers.
        """
        return share(batch, self.count, self.index)

    @cached_property
    def generator(self) -> torch.Generator:
        """For its augmentations: random numbers on the CPU apart from those of the model."""
        return torch.Generator().manual_seed(self._data_seed)


class LogicalWorkers:
    """Deals the fixed number of logical workers to the ranks, and adds up their gradients::

        logical = LogicalWorkers(model, 8)
        for step in range(first, last):
            for worker in logical.step(step):            # those of this rank, one after another
                mine = worker.samples(len(batch))
                loss = loss_of(model(batch[mine])).sum() / len(batch)
                loss.backward()
            logical.reduce()                             # now .grad is the whole batch's
            optimizer.step()

    A logical worker's loss is a *share*: the sum over its samples, divided by the number of
    samples of the global batch, so that the shares add up to the batch's mean. Several calls of
    `backward` in one turn add up; a worker without samples makes none.

    The model is the bare one (no DistributedDataParallel), the same on every rank. In a process
    without a process group all logical workers are this process's. docs/same_weights.md says what
    is promised, what it costs, and what is up to the program.

    Args:
        model: whose parameters are trained; those with `requires_grad`, looked up at each step.
        count: the number of logical workers, and so the largest world size. A state of another
            count is refused, since other weights would follow.
        seed: of all random numbers; the same on every rank.
        group: the process group whose ranks share the work; by default all.
        bucket_bytes: how much of the gradient is exchanged at once.

    Raises:
        ConfigError: `count`, `seed` or `bucket_bytes` cannot be, there are more ranks than logical
            workers, or the model is already a parallel one.
    """

    def __init__(
        self,
        model: nn.Module,
        count: int,
        *,
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        count, seed = check_int("count", count), check_int("seed", seed)
        if count < 1 or bucket_bytes < 1:
            raise ConfigError(f"need count and bucket_bytes >= 1, got {count} and {bucket_bytes}")
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise ConfigError(
                "the model is a DistributedDataParallel, which reduces gradients itself, in an"
                " order of its own: pass the model that it wraps, model.module"
            )
        self.model, self.count, self.seed = model, count, seed
        self._group = group
        self._exchange = Exchange(count, group, bucket_bytes)
        self._layout: Layout | None = None
        self._spare: list[FlatGradient] = []
        self._step: int | None = None
        self._restart()

    @property
    def workers(self) -> range:
        """The logical workers of this rank: neighbours, as many as other ranks have or one more."""
        return workers_of(self.count, self._exchange.world_size, self._exchange.rank)

    def samples(self, batch: int) -> range:
        """Which samples of a global batch of `batch` this rank needs: its workers', in order."""
        mine = self.workers
        first, last = (share(batch, self.count, at) for at in (mine[0], mine[-1]))
        return range(first.start, last.stop)

    def step(self, step: int) -> Iterator[LogicalWorker]:
        """This rank's logical workers, to be computed in the loop's body, one after another.

        Each turn begins without gradients, and with torch's random numbers seeded by seed, step
        and logical worker; when the next turn is asked for, the gradients are put away. A step
        that was left in the middle may be begun again.

        At the first step, and when the model's parameters are others than before, the ranks
        compare their weights and what they compute with; that reads all weights once.

        Raises:
            ConfigError: `step` is negative or no integer, a parameter cannot be used, or the GPU is
                not set to be deterministic.
            NotReproducible: the ranks differ, a buffer of the model was changed, a gradient is
                sparse, or another step was not reduced; the message names what and what to do. The
                weights have not changed.
        """
        step = check_int("step", step)
        layout = self._begin(step)
        buffers = buffers_of(self.model)
        for index in self.workers:
            worker = LogicalWorker(index, self.count, step, self.seed)
            seed_all(worker.seed, layout.parameters)
            yield worker
            buffers = check_buffers(self.model, buffers, index)
            self._sums.push(range(index, index + 1), layout.taken())

    def reduce(self) -> None:
        """Add up the gradients of all logical workers, into `.grad`; called by all ranks.

        The sum has the same bits on every rank, and at every world size. A parameter for which no
        logical worker had a gradient has None. The tensors are reused at the next step. Random
        numbers drawn from here on, by the optimizer say, are seeded by seed and step alone.

        Raises:
            NotReproducible: the loop over `step` has not come to its end.
        """
        nodes = pieces(self.count, self._exchange.world_size, self._exchange.rank)
        if self._step is None or self._sums.nodes != nodes:
            raise NotReproducible(
                f"of logical workers {list(self.workers)} only those in"
                f" {[list(node) for node in self._sums.nodes]} are done: reduce comes once in each"
                " step, after the whole loop over LogicalWorkers.step"
            )
        sums = [value for _, value in self._sums.waiting if isinstance(value, FlatGradient)]
        for flat in zip(*(total.flat for total in sums), strict=True):
            self._exchange.complete(list(flat))
        sums[0].give()
        seed_all(seed_of(self.seed, self._step, self.count, "update"), self._parameters().values())
        self._step = None
        self._spare += sums
        self._restart()

    def state_dict(self) -> dict[str, Any]:
        """What has to be the same wherever training goes on: for the job's checkpoint."""
        mine = conditions(self._parameters())
        return {"format": FORMAT, "count": self.count, "seed": self.seed, "conditions": mine}

    def load_state_dict(
        self, state: Mapping[str, Any], *, accept_other_conditions: bool = False
    ) -> None:
        """Check that training goes on as it began; nothing is taken from the state.

        To be called once the model is where it is trained, and torch is set up.

        Args:
            state: of any rank, and any world size.
            accept_other_conditions: whether to go on with another version of torch, number of
                threads or kind of machine; the weights may then differ in their last bits.

        Raises:
            StateMismatch: names what differs.
        """
        mine = self.state_dict()
        own = {name: value for name, value in mine.items() if name != "conditions"}
        saved = {name: value for name, value in state.items() if name != "conditions"}
        found = differences(own, saved)
        if found is None and not accept_other_conditions:
            found = differences(mine["conditions"], state.get("conditions", {}))
        if found:
            raise StateMismatch(f"here and in the state, {found}: other weights would follow")

    def _parameters(self) -> dict[str, Tensor]:
        named = self.model.named_parameters()
        return {name: parameter for name, parameter in named if parameter.requires_grad}

    def _begin(self, step: int) -> Layout:
        if self._step not in (None, step):
            raise NotReproducible(
                f"step {step} begins, and step {self._step} was begun but not reduced: call"
                " reduce after each loop over LogicalWorkers.step, or begin the same step again"
            )
        self._spare += [value for _, value in self._sums.waiting if isinstance(value, FlatGradient)]
        self._restart()
        parameters = self._parameters()
        if self._layout is None or not self._layout.fits(parameters):
            layout = Layout(parameters, self._exchange.world_size)
            check_device(parameters)
            mine = conditions(parameters) | {"weights": digest_of(self.model)}
            mine |= {"count": self.count, "seed": self.seed, "step": step}
            mine |= {"trained parameters": layout.names}
            check_ranks_agree(mine, self._group)
            self._layout, self._spare = layout, []
        # Of all parameters: one that was frozen since would keep the last step's sum, which the
        # optimizer would go on applying, and which a job that was killed would not have.
        for parameter in self.model.parameters():
            parameter.grad = None
        self._step = step
        return self._layout

    def _restart(self) -> None:
        self._sums = TreeSum[FlatGradient | Gradients](self.count, self._added, self._kept)

    def _added(
        self, left: FlatGradient | Gradients, right: FlatGradient | Gradients
    ) -> FlatGradient:
        if not isinstance(left, FlatGradient):
            raise TypeError(f"a sum is of gradients that lie in one piece, got {type(left)}")
        if isinstance(right, FlatGradient):
            self._spare.append(right)
        return left.add_(right)

    def _kept(self, value: FlatGradient | Gradients) -> FlatGradient:
        if isinstance(value, FlatGradient):
            raise TypeError("what is kept has been kept already")
        layout = present(self._layout, "the gradients' layout")
        kept = self._spare.pop() if self._spare else FlatGradient(layout)
        kept.copy_(value)
        return kept
