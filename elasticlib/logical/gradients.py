"""Gradients of a whole model in flat tensors, added up in one order: in a rank, then by all ranks.

A parameter without a gradient counts as zeros. Behind the gradients a flat tensor has one number
for each parameter: how many of the logical workers in the sum had a gradient for it, since an
optimizer tells no gradient from a gradient of zeros.

Ranks complete the sum as in a reduce-scatter and an all-gather, but each slice of the gradient is
added up in the tree's order, by one rank, from everyone's sums, and nothing is added on the way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ..errors import ConfigError, NotReproducible
from .shares import TreeSum, pieces

ALIGNMENT = 64
"""Bytes: where a parameter's gradient begins in its flat tensor, as torch aligns on a CPU."""
BUCKET_BYTES = 32 << 20
"""How much of a gradient is under way at once; the next bucket is sent while one is added up."""

Gradients = list[Tensor | None]
"""Of one logical worker, one for each parameter of a group, in its order."""


class Exchange:
    """Adds up what the ranks of a process group have; None is the default one, or this process.

    Args:
        count: the number of logical workers.
        group: whose ranks share them.
        bucket_bytes: how much of a flat tensor is exchanged at once.
    """

    def __init__(self, count: int, group: dist.ProcessGroup | None, bucket_bytes: int) -> None:
        self.count, self._group, self._bucket_bytes = count, group, bucket_bytes
        self.world_size = dist.get_world_size(group) if dist.is_initialized() else 1
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        self._others = [rank for rank in range(self.world_size) if rank != self.rank]
        self._nodes = [pieces(count, self.world_size, rank) for rank in range(self.world_size)]

    @torch.no_grad()
    def complete(self, mine: Sequence[Tensor]) -> None:
        """Put the sum of all logical workers into `mine[0]`, on every rank.

        Args:
            mine: the sums of this rank's `pieces`, from left to right: flat, of one length, which
                is a multiple of the world size. All of them are overwritten.
        """
        if self.world_size == 1:
            return
        length, each = len(mine[0]), self._bucket_bytes // mine[0].element_size()
        step = max(1, each // self.world_size) * self.world_size
        coming: _Bucket | None = None
        going: list[dist.Work] = []
        for start in range(0, length, step):
            following = self._begin(start, min(step, length - start), mine)
            if coming:
                _wait(going)
                going = self._finish(coming, mine)
            coming = following
        if coming:
            _wait(going)
            _wait(self._finish(coming, mine))

    def _begin(self, start: int, length: int, mine: Sequence[Tensor]) -> _Bucket:
        """Ask for this rank's slice of everyone's sums, and send everyone theirs of its own."""
        bucket, ops = _Bucket(start, length // self.world_size, {}, []), []
        for rank in self._others:
            bucket.received[rank] = [mine[0].new_empty(bucket.size) for _ in self._nodes[rank]]
            ops += [self._op(dist.irecv, part, rank) for part in bucket.received[rank]]
            ops += [self._op(dist.isend, flat[bucket.slice_of(rank)], rank) for flat in mine]
        bucket.works.extend(dist.batch_isend_irecv(ops))
        return bucket

    def _finish(self, bucket: _Bucket, mine: Sequence[Tensor]) -> list[dist.Work]:
        """Add up this rank's slice, and begin to give it to everyone and to get theirs."""
        _wait(bucket.works)
        total = TreeSum[Tensor, Tensor](self.count, lambda left, right: left.add_(right))
        own = [flat[bucket.slice_of(self.rank)] for flat in mine]
        for rank, nodes in enumerate(self._nodes):
            values = own if rank == self.rank else bucket.received[rank]
            for node, value in zip(nodes, values, strict=True):
                total.push(node, value)
        ((_, whole),) = total.waiting
        own[0].copy_(whole)  # on rank 0 they are one
        ops = []
        for rank in self._others:
            ops.append(self._op(dist.irecv, mine[0][bucket.slice_of(rank)], rank))
            ops.append(self._op(dist.isend, own[0], rank))
        return list(dist.batch_isend_irecv(ops))

    def _op(self, what: object, part: Tensor, rank: int) -> dist.P2POp:
        # As bytes, so that it does not matter which dtypes a backend knows. Messages between two
        # ranks arrive in the order in which they are sent and asked for, so they need no tags.
        peer = rank if self._group is None else dist.get_global_rank(self._group, rank)
        return dist.P2POp(what, part.view(torch.uint8), peer, self._group)  # type: ignore[arg-type]


@attrs.frozen
class _Bucket:
    """One part of a flat gradient, on its way."""

    start: int
    size: int
    """Of each rank's slice, in elements."""
    received: dict[int, list[Tensor]]
    """By rank, for each of its nodes."""
    works: list[dist.Work]

    def slice_of(self, rank: int) -> slice:
        return slice(self.start + rank * self.size, self.start + (rank + 1) * self.size)


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


class ModelSum:
    """The sum of the gradients of all logical workers, for the trained parameters of a model.

    Raises:
        ConfigError: a parameter cannot be trained so; the message names it and says why.
    """

    def __init__(self, parameters: Mapping[str, Tensor], exchange: Exchange) -> None:
        self.parameters, self._exchange = dict(parameters), exchange
        groups: dict[object, list[Tensor]] = {}
        for name, parameter in parameters.items():
            if type(parameter) not in (Parameter, Tensor):
                raise ConfigError(
                    f"parameter {name} is a {type(parameter).__name__}, must be a plain Parameter"
                    " that is whole on every rank: sharded and lazy parameters cannot be used with"
                    " LogicalWorkers"
                )
            groups.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        self._kinds = [_kind(parameter) for parameter in parameters.values()]
        self._groups = [GroupSum(members, exchange) for members in groups.values()]

    def fits(self, parameters: Mapping[str, Tensor]) -> bool:
        """Whether these are the parameters that it was made for, where and as they were then."""
        before = zip(self.parameters.values(), self._kinds, strict=True)
        return len(parameters) == len(self.parameters) and all(
            one is other and _kind(one) == kind
            for one, (other, kind) in zip(parameters.values(), before, strict=True)
        )

    def take(self, worker: int) -> None:
        """Add the next logical worker's gradients, which stand in `.grad`, and empty that.

        Raises:
            NotReproducible: one cannot be added in a fixed order: it is sparse, ...
        """
        for name, parameter in self.parameters.items():
            grad = parameter.grad
            if grad is not None and (grad.layout, grad.dtype) != (torch.strided, parameter.dtype):
                raise NotReproducible(
                    f"the gradient of {name} is {grad.layout} and {grad.dtype}, must be dense and"
                    f" {parameter.dtype} as the parameter; an embedding needs sparse=False"
                )
        for group in self._groups:
            group.take(worker)

    def complete(self) -> None:
        """Put the sum over all ranks into `.grad`; None where no logical worker had a gradient."""
        for group in self._groups:
            group.complete()

    def restart(self) -> None:
        """Forget what was added."""
        for group in self._groups:
            group.restart()


class GroupSum:
    """The same for the parameters of one dtype on one device, which share flat tensors."""

    def __init__(self, parameters: list[Tensor], exchange: Exchange) -> None:
        self.parameters, self._exchange = parameters, exchange
        self.like = parameters[0]
        self.starts: list[int] = []
        step, end = max(1, ALIGNMENT // self.like.element_size()), 0
        for parameter in parameters:
            self.starts.append(end)
            end += -(-parameter.numel() // step) * step
        self.counts = slice(end, end + len(parameters))
        self.length = -(-self.counts.stop // exchange.world_size) * exchange.world_size
        self._spare: list[FlatSum] = []
        self._tree = TreeSum[Gradients, FlatSum](exchange.count, self._add, self._keep)

    def take(self, worker: int) -> None:
        grads = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        self._tree.push(range(worker, worker + 1), grads)

    def complete(self) -> None:
        sums = [total for _, total in self._tree.waiting]
        self._exchange.complete([total.flat for total in sums])
        had = sums[0].counts.tolist()
        for parameter, view, number in zip(self.parameters, sums[0].views, had, strict=True):
            parameter.grad = view if number else None
        self.restart()

    def restart(self) -> None:
        self._spare += [total for _, total in self._tree.waiting]
        self._tree.waiting.clear()

    def _add(self, left: FlatSum, right: FlatSum | Gradients) -> FlatSum:
        if isinstance(right, FlatSum):
            left.flat.add_(right.flat)
            self._spare.append(right)
        else:
            left.take(right, add=True)
        return left

    def _keep(self, grads: Gradients) -> FlatSum:
        kept = self._spare.pop() if self._spare else FlatSum(self)
        kept.take(grads, add=False)
        return kept


class FlatSum:
    """A gradient of a group, or a sum of some, in one flat tensor."""

    def __init__(self, group: GroupSum) -> None:
        # Zeros, so that the gaps between parameters stay zeros in every sum.
        self.flat = torch.zeros(group.length, dtype=group.like.dtype, device=group.like.device)
        self.views = [
            self.flat[start : start + parameter.numel()].view(parameter.shape)
            for start, parameter in zip(group.starts, group.parameters, strict=True)
        ]
        self.counts = self.flat[group.counts]

    @torch.no_grad()
    def take(self, grads: Gradients, *, add: bool) -> None:
        """Becomes the gradient of one logical worker, or its sum with that on the right."""
        there: list[Tensor] = []
        mine: list[Tensor] = []
        for view, grad in zip(self.views, grads, strict=True):
            if grad is not None:
                there.append(view)
                mine.append(grad)
            elif add:
                view.add_(0.0)  # which makes -0.0 to 0.0, as adding a flat tensor of zeros does
            else:
                view.zero_()
        had = torch.tensor([grad is not None for grad in grads]).to(self.flat)
        if there:
            (torch._foreach_add_ if add else torch._foreach_copy_)(there, mine)
        (self.counts.add_ if add else self.counts.copy_)(had)


def _kind(parameter: Tensor) -> tuple[torch.dtype, torch.device, torch.Size]:
    return parameter.dtype, parameter.device, parameter.shape
