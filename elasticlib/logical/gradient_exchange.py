"""The sum of the gradients of all logical workers, in the order of the tree of `tree_sum`.

The gradients of a model are stored in flat tensors, one for each dtype and device. A parameter
without a gradient counts as zeros. After the gradients, a flat tensor has one number for each
parameter: how many of the added logical workers had a gradient for it. If the number is 0, the
parameter keeps `.grad` None, which an optimizer treats differently from zeros.

Ranks complete the sum in the manner of a reduce-scatter and an all-gather: each rank adds one slice
of the flat tensor, in the order of the tree, from the sums of all ranks. The network adds nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ..errors import ConfigError, NotReproducibleError
from .tree_sum import TreeSum, local_subtrees

ALIGNMENT_BYTES = 64  # of each parameter in its flat tensor, as torch aligns memory on a CPU
DEFAULT_BUCKET_BYTES = 32 << 20  # one bucket is sent while the one before is added

Gradients = list[Tensor | None]  # of one logical worker, one for each parameter of a group


class GradientExchange:
    """Adds flat tensors of all ranks in the order of the tree.

    Args:
        count: number of logical workers.
        group: the process group whose ranks share the logical workers; None for the default group,
            or for this process alone if there is no group.
        bucket_bytes: part of a flat tensor that is exchanged at a time.
    """

    def __init__(self, count: int, group: dist.ProcessGroup | None, bucket_bytes: int) -> None:
        self.count = count
        self.world_size = dist.get_world_size(group) if dist.is_initialized() else 1
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        self._group = group
        self._bucket_bytes = bucket_bytes
        self._peers = [rank for rank in range(self.world_size) if rank != self.rank]
        self._nodes = [local_subtrees(count, self.world_size, r) for r in range(self.world_size)]

    @torch.no_grad()
    def reduce(self, local: Sequence[Tensor]) -> None:
        """Write the sum over all logical workers to `local[0]`. Every rank must call this.

        Args:
            local: the sums of this rank's `local_subtrees`, from left to right: flat tensors of the
                same length, which is a multiple of the world size. All of them are overwritten.
        """
        if self.world_size == 1:
            return
        length, max_elements = len(local[0]), self._bucket_bytes // local[0].element_size()
        step = max(1, max_elements // self.world_size) * self.world_size
        receiving: _Bucket | None = None
        sending: list[dist.Work] = []
        for start in range(0, length, step):
            following = self._start_bucket(start, min(step, length - start), local)
            if receiving:
                _wait_all(sending)
                sending = self._finish_bucket(receiving, local)
            receiving = following
        if receiving:
            _wait_all(sending)
            _wait_all(self._finish_bucket(receiving, local))

    def _start_bucket(self, start: int, length: int, local: Sequence[Tensor]) -> _Bucket:
        """Start to receive this rank's slices, and to send their slices to the other ranks."""
        bucket = _Bucket(start, length // self.world_size)
        operations = []
        for rank in self._peers:
            received = [local[0].new_empty(bucket.slice_length) for _ in self._nodes[rank]]
            bucket.received[rank] = received
            operations += [self._operation(dist.irecv, part, rank) for part in received]
            operations += [
                self._operation(dist.isend, flat[bucket.slice_of(rank)], rank) for flat in local
            ]
        bucket.works.extend(dist.batch_isend_irecv(operations))
        return bucket

    def _finish_bucket(self, bucket: _Bucket, local: Sequence[Tensor]) -> list[dist.Work]:
        """Add up this rank's slices, and start to exchange the total with the other ranks.

        Returns:
            The operations that are in progress.
        """
        _wait_all(bucket.works)
        tree = TreeSum[Tensor, Tensor](self.count, lambda left, right: left.add_(right))
        own = [flat[bucket.slice_of(self.rank)] for flat in local]
        for rank, nodes in enumerate(self._nodes):
            values = own if rank == self.rank else bucket.received[rank]
            for node, value in zip(nodes, values, strict=True):
                tree.push(node, value)
        ((_, total),) = tree.pending
        own[0].copy_(total)  # on rank 0, both are the same memory
        operations = []
        for rank in self._peers:
            operations.append(self._operation(dist.irecv, local[0][bucket.slice_of(rank)], rank))
            operations.append(self._operation(dist.isend, own[0], rank))
        return list(dist.batch_isend_irecv(operations))

    def _operation(self, function: object, part: Tensor, rank: int) -> dist.P2POp:
        # Tensors are sent as bytes, because backends do not support all dtypes. Messages between
        # two ranks arrive in the order in which they are sent and received, so they need no tags.
        peer = rank if self._group is None else dist.get_global_rank(self._group, rank)
        data = part.view(torch.uint8)
        return dist.P2POp(function, data, peer, self._group)  # type: ignore[arg-type]


@attrs.frozen
class _Bucket:
    """A part of a flat tensor that is being exchanged."""

    start: int  # in elements
    slice_length: int  # elements that each rank adds
    received: dict[int, list[Tensor]] = attrs.field(factory=dict)  # by rank, one for each node
    works: list[dist.Work] = attrs.field(factory=list)

    def slice_of(self, rank: int) -> slice:
        start = self.start + rank * self.slice_length
        return slice(start, start + self.slice_length)


def _wait_all(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


class ModelGradient:
    """The sum of the gradients of all logical workers, for the trained parameters of a model.

    Args:
        parameters: the parameters that are trained, by name.
        exchange: adds the sums of the ranks.

    Raises:
        ConfigError: a parameter is sharded or lazy. The message names it.
    """

    def __init__(self, parameters: Mapping[str, Tensor], exchange: GradientExchange) -> None:
        self.parameters = dict(parameters)
        groups: dict[object, list[Tensor]] = {}
        for name, parameter in parameters.items():
            if type(parameter) not in (Parameter, Tensor):
                raise ConfigError(
                    f"parameter {name} is a {type(parameter).__name__}, must be a plain Parameter"
                    " that is complete on every rank: LogicalWorkers does not support sharded and"
                    " lazy parameters"
                )
            groups.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        self._layouts = [_layout(parameter) for parameter in parameters.values()]
        self._groups = [_GroupGradient(members, exchange) for members in groups.values()]

    def is_for(self, parameters: Mapping[str, Tensor]) -> bool:
        """Return True if `parameters` are `self.parameters`, with the same types and shapes."""
        if len(parameters) != len(self.parameters):
            return False
        known = zip(self.parameters.values(), self._layouts, strict=True)
        return all(
            parameter is own and _layout(parameter) == layout
            for parameter, (own, layout) in zip(parameters.values(), known, strict=True)
        )

    def accumulate(self, worker: int) -> None:
        """Add the gradients in `.grad`, which are those of `worker`, and set `.grad` to None.

        The logical workers of this rank must be added in ascending order.

        Raises:
            NotReproducibleError: a gradient is sparse or has another dtype than its parameter.
        """
        for name, parameter in self.parameters.items():
            grad = parameter.grad
            if grad is not None and (grad.layout, grad.dtype) != (torch.strided, parameter.dtype):
                raise NotReproducibleError(
                    f"the gradient of {name} is {grad.layout} and {grad.dtype}, must be dense and"
                    f" {parameter.dtype} like the parameter; an embedding needs sparse=False"
                )
        for group in self._groups:
            group.accumulate(worker)

    def reduce_to_grads(self) -> None:
        """Write the sum over all ranks to `.grad`, or None if no logical worker had a gradient.

        Every rank must call this.
        """
        for group in self._groups:
            group.reduce_to_grads()

    def reset(self) -> None:
        """Discard what was accumulated."""
        for group in self._groups:
            group.reset()


class _GroupGradient:
    """The sum for the parameters of one dtype on one device, which share flat tensors."""

    def __init__(self, parameters: list[Tensor], exchange: GradientExchange) -> None:
        self.parameters = parameters
        self.like = parameters[0]  # has the dtype and the device of the group
        self.starts: list[int] = []  # offset of each parameter in a flat tensor, in elements
        alignment, end = max(1, ALIGNMENT_BYTES // self.like.element_size()), 0
        for parameter in parameters:
            self.starts.append(end)
            end += -(-parameter.numel() // alignment) * alignment
        self.counts = slice(end, end + len(parameters))  # numbers of gradients that were added
        self.length = -(-self.counts.stop // exchange.world_size) * exchange.world_size
        self._exchange = exchange
        self._unused: list[_FlatGradient] = []  # memory for the next sums
        self._tree = TreeSum[Gradients, _FlatGradient](exchange.count, self._add, self._copy)

    def accumulate(self, worker: int) -> None:
        gradients = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        self._tree.push(range(worker, worker + 1), gradients)

    def reduce_to_grads(self) -> None:
        sums = [total for _, total in self._tree.pending]
        self._exchange.reduce([total.flat for total in sums])
        counts = sums[0].counts.tolist()
        for parameter, view, count in zip(self.parameters, sums[0].views, counts, strict=True):
            parameter.grad = view if count else None
        self.reset()

    def reset(self) -> None:
        self._unused += [total for _, total in self._tree.pending]
        self._tree.pending.clear()

    def _add(self, left: _FlatGradient, right: _FlatGradient | Gradients) -> _FlatGradient:
        if isinstance(right, _FlatGradient):
            left.flat.add_(right.flat)
            self._unused.append(right)
        else:
            left.add(right)
        return left

    def _copy(self, gradients: Gradients) -> _FlatGradient:
        flat = self._unused.pop() if self._unused else _FlatGradient(self)
        flat.assign(gradients)
        return flat


class _FlatGradient:
    """The gradients of one logical worker, or a sum of several, in one flat tensor."""

    def __init__(self, group: _GroupGradient) -> None:
        # Zeros, so that the gaps between parameters stay zero in every sum.
        self.flat = torch.zeros(group.length, dtype=group.like.dtype, device=group.like.device)
        self.views = [
            self.flat[start : start + parameter.numel()].view(parameter.shape)
            for start, parameter in zip(group.starts, group.parameters, strict=True)
        ]
        self.counts = self.flat[group.counts]

    @torch.no_grad()
    def assign(self, gradients: Gradients) -> None:
        """Overwrite the flat tensor with one logical worker's gradients; None counts as zeros."""
        views, present = self._views_and_gradients(gradients)
        for view, gradient in zip(self.views, gradients, strict=True):
            if gradient is None:
                view.zero_()
        if present:
            torch._foreach_copy_(views, present)
        self.counts.copy_(self._gradient_counts(gradients))

    @torch.no_grad()
    def add(self, gradients: Gradients) -> None:
        """Add the gradients of one logical worker to the flat tensor, as the right operand."""
        views, present = self._views_and_gradients(gradients)
        for view, gradient in zip(self.views, gradients, strict=True):
            if gradient is None:
                # Turns -0.0 into 0.0, as adding a flat tensor of zeros does.
                view.add_(0.0)
        if present:
            torch._foreach_add_(views, present)
        self.counts.add_(self._gradient_counts(gradients))

    def _views_and_gradients(self, gradients: Gradients) -> tuple[list[Tensor], list[Tensor]]:
        """Return the views of the parameters that have a gradient, and these gradients."""
        pairs = [(v, g) for v, g in zip(self.views, gradients, strict=True) if g is not None]
        return [view for view, _ in pairs], [gradient for _, gradient in pairs]

    def _gradient_counts(self, gradients: Gradients) -> Tensor:
        """Return 1 for each parameter that has a gradient, and 0 for each other one."""
        return torch.tensor([gradient is not None for gradient in gradients]).to(self.flat)


def _layout(parameter: Tensor) -> tuple[torch.dtype, torch.device, torch.Size]:
    return parameter.dtype, parameter.device, parameter.shape
