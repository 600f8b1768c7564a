"""Optimizers of sharded models that have taken no step yet: how what they will keep is sharded.

Most make their state at the first step, like the parameter that it is of. So a saved tensor of a
parameter's size is sharded as that parameter is, and nobody takes a step for it: even with
gradients and a rate of zero that would change some parameters (a negative zero, say).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .state import Way, is_sharded_kind

Parameters = Mapping[Way, Sequence[torch.Tensor]]
"""Of each optimizer in a state, by its way: in the order in which its state numbers them."""


def with_states(
    shards: Mapping[Way, Any],
    saved: Mapping[Way, tuple[torch.Size, torch.dtype]],
    parameters: Parameters,
) -> dict[Way, Any]:
    """The sharded tensors that say how those that were `saved` are to be sharded.

    An optimizer's are those that were saved of it, whatever it has now: it takes a state whole.

    Args:
        shards: those that there are now. saved: size and dtype of those that were saved.
    """
    found = {
        way: shard
        for way, shard in shards.items()
        if way in saved or _parameter_of(way, parameters) is None
    }
    for way, (size, dtype) in saved.items():
        parameter = _parameter_of(way, parameters)
        if way not in found and is_sharded_kind(parameter) and parameter.shape == size:
            found[way] = torch.empty_like(parameter.detach(), dtype=dtype)
    return found


def _parameter_of(way: Way, parameters: Parameters) -> Any:
    """The parameter that a tensor with this way is an optimizer's state of; None if it is none."""
    for at in range(len(way) - 2):
        # As `torch.optim.Optimizer.state_dict` has them: state, the parameter's number, a name.
        known, (kind, number) = parameters.get(way[:at]), way[at : at + 2]
        if known is not None and kind == "state" and type(number) is int and number < len(known):
            return known[number]
    return None
