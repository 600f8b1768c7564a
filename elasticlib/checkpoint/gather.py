"""What a training script hands over, as plain values: objects with a state are asked for theirs.

Sharded tensors (DTensors) are taken out, each with its way through the state, since every rank
has its own part of them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from .containers import Way, changed, is_stateful


def is_sharded_kind(value: object) -> bool:
    """Whether `value` is a DTensor. Where nobody imported that class, which costs most of a
    second, there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def values_of(state: object) -> Any:
    """The state with each object that has a state of its own, wherever it stands, replaced by
    that."""

    def value(_way: Way, part: Any) -> Any:
        return values_of(part.state_dict()) if is_stateful(part) else part

    return changed(state, value)


def take_shards(values: object) -> tuple[Any, dict[Way, Any]]:
    """The state with None in the places of its sharded tensors, and those by their ways."""
    shards: dict[Way, Any] = {}

    def each(way: Way, value: object) -> object:
        if not is_sharded_kind(value):
            return value
        shards[way] = value
        return None

    return changed(values, each), shards


def put_shards(plain: object, tensors: Mapping[Way, torch.Tensor]) -> Any:
    """The state again, with these tensors in their places."""
    return changed(plain, lambda way, value: tensors.get(way, value))
