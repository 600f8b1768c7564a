"""Gradients of a whole model in flat tensors, which are added in place and reused each step.

A parameter without a gradient counts as zeros, and each sum says of each parameter whether any of
its terms had a gradient, since an optimizer tells no gradient from a gradient of zeros.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

from ..errors import ConfigError, NotReproducible

ALIGNMENT = 64
"""Bytes: where a parameter's gradient begins in its flat tensor, as torch aligns on a CPU."""

Gradients = list[Tensor | None]
"""Of one logical worker, one for each parameter of the layout, in its order."""


class Layout:
    """Where each parameter's gradient lies: one flat tensor for each dtype and device.

    Behind the gradients a flat tensor has one number for each of its parameters: how many of the
    logical workers in the sum had a gradient for it.

    Args:
        parameters: those that are trained, by name; each once.
        multiple: flat tensors have a multiple of so many elements.

    Raises:
        ConfigError: a parameter cannot be trained so; the message names it and says why.
    """

    def __init__(self, parameters: Mapping[str, Tensor], multiple: int) -> None:
        self.names = list(parameters)
        self.parameters = list(parameters.values())
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for at, (name, parameter) in enumerate(parameters.items()):
            _check(name, parameter)
            kinds.setdefault((parameter.dtype, parameter.device), []).append(at)
        self.groups = [
            Group([self.parameters[at] for at in members], members, multiple)
            for members in kinds.values()
        ]

    def fits(self, parameters: Mapping[str, Tensor]) -> bool:
        """Whether these are the parameters that it was made for, where and as they were then."""
        here = list(parameters.values())
        return len(here) == len(self.parameters) and all(
            one is other and _kind(one) == kind
            for group in self.groups
            for at, kind in zip(group.members, group.kinds, strict=True)
            for one, other in [(here[at], self.parameters[at])]
        )

    @property
    def nbytes(self) -> int:
        """Of one gradient of the whole model."""
        return sum(group.length * group.like.element_size() for group in self.groups)

    def taken(self) -> Gradients:
        """The gradients that stand in `.grad` now, which is left empty.

        Raises:
            NotReproducible: one cannot be added in a fixed order: it is sparse, ...
        """
        grads = [parameter.grad for parameter in self.parameters]
        for name, parameter, grad in zip(self.names, self.parameters, grads, strict=True):
            if grad is not None and (grad.layout, grad.dtype) != (torch.strided, parameter.dtype):
                raise NotReproducible(
                    f"the gradient of {name} is {grad.layout} and {grad.dtype}, must be dense and"
                    f" {parameter.dtype} as the parameter; an embedding needs sparse=False"
                )
        self.clear()
        return grads

    def clear(self) -> None:
        """Leave no parameter a gradient."""
        for parameter in self.parameters:
            parameter.grad = None


class Group:
    """The parameters of one dtype on one device: where they lie in a flat tensor of `length`."""

    def __init__(self, parameters: list[Tensor], members: list[int], multiple: int) -> None:
        self.members, self.like = members, parameters[0]
        self.kinds = [_kind(parameter) for parameter in parameters]
        self.shapes = [parameter.shape for parameter in parameters]
        self.starts: list[int] = []
        step, end = max(1, ALIGNMENT // self.like.element_size()), 0
        for parameter in parameters:
            self.starts.append(end)
            end += -(-parameter.numel() // step) * step
        self.counts = slice(end, end + len(parameters))
        self.length = -(-self.counts.stop // multiple) * multiple


class FlatGradient:
    """A gradient of the whole model, or a sum of some, in one flat tensor for each group."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        # Zeros, so that the gaps between parameters stay zeros in every sum.
        self.flat = [
            torch.zeros(group.length, dtype=group.like.dtype, device=group.like.device)
            for group in layout.groups
        ]
        self._views = [
            [
                flat[start : start + shape.numel()].view(shape)
                for start, shape in zip(group.starts, group.shapes, strict=True)
            ]
            for group, flat in zip(layout.groups, self.flat, strict=True)
        ]

    @torch.no_grad()
    def copy_(self, grads: Gradients) -> None:
        """Becomes the gradient of one logical worker."""
        for group, views, counts in self._parts():
            there, mine, missing = _sorted_out(group, views, grads)
            for view in missing:
                view.zero_()
            if there:
                torch._foreach_copy_(there, mine)
            counts.copy_(_ones(group, grads))

    @torch.no_grad()
    def add_(self, other: FlatGradient | Gradients) -> FlatGradient:
        """Becomes its sum with another one, which stands on the right."""
        if isinstance(other, FlatGradient):
            torch._foreach_add_(self.flat, other.flat)
            return self
        for group, views, counts in self._parts():
            there, mine, missing = _sorted_out(group, views, other)
            for view in missing:
                view.add_(0.0)  # which makes -0.0 to 0.0, as adding a flat tensor of zeros does
            if there:
                torch._foreach_add_(there, mine)
            counts.add_(_ones(group, other))
        return self

    def give(self) -> None:
        """Make it the parameters' `.grad`; None for those that it has no gradient for."""
        for group, views, counts in self._parts():
            had = counts.tolist()
            for at, view, number in zip(group.members, views, had, strict=True):
                self._layout.parameters[at].grad = view if number else None

    def _parts(self) -> list[tuple[Group, list[Tensor], Tensor]]:
        groups = self._layout.groups
        return [
            (group, views, flat[group.counts])
            for group, views, flat in zip(groups, self._views, self.flat, strict=True)
        ]


def _kind(parameter: Tensor) -> tuple[torch.dtype, torch.device, torch.Size]:
    return parameter.dtype, parameter.device, parameter.shape


def _check(name: str, parameter: Tensor) -> None:
    if type(parameter) not in (Parameter, Tensor):
        raise ConfigError(
            f"parameter {name} is a {type(parameter).__name__}, must be a plain Parameter that is"
            " whole on every rank: sharded and lazy parameters cannot be used with LogicalWorkers"
        )


def _sorted_out(
    group: Group, views: list[Tensor], grads: Gradients
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Views of a flat tensor with a gradient to go there, those gradients, and the other views."""
    there, mine, missing = [], [], []
    for view, at in zip(views, group.members, strict=True):
        grad = grads[at]
        if grad is None:
            missing.append(view)
        else:
            there.append(view)
            mine.append(grad)
    return there, mine, missing


def _ones(group: Group, grads: Gradients) -> Tensor:
    """One for each gradient that is there."""
    ones = [float(grads[at] is not None) for at in group.members]
    return torch.tensor(ones, dtype=group.like.dtype).to(group.like.device)
