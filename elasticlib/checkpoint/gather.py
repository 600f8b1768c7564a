"""What a training script hands over, as plain values: objects with a state are asked for theirs.

Sharded tensors (DTensors) are taken out, each with its way through the state, since every rank
has its own part of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .shards import is_sharded_kind

Way = tuple[Any, ...]
"""Keys and indices, from the state's top."""

_CONTAINERS = (dict, OrderedDict, list, tuple)


def values_of(state: object) -> Any:
    """The state with each object that has a `state_dict()`, wherever it stands, replaced by it."""
    return _mapped(state, lambda _way, value: _value(value))


def take_shards(values: object) -> tuple[Any, dict[Way, Any]]:
    """The state with None in the places of its sharded tensors, and those by their ways."""
    shards: dict[Way, Any] = {}

    def each(way: Way, value: object) -> object:
        if not is_sharded_kind(value):
            return value
        shards[way] = value
        return None

    return _mapped(values, each), shards


def put_shards(plain: object, tensors: Mapping[Way, torch.Tensor]) -> Any:
    """The state again, with these tensors in their places."""
    return _mapped(plain, lambda way, value: tensors.get(way, value))


def _value(value: Any) -> Any:
    if isinstance(value, (torch.Tensor, *_CONTAINERS, type)):
        return value
    ask = getattr(value, "state_dict", None)
    return values_of(ask()) if callable(ask) else value


def _mapped(value: Any, change: Callable[[Way, Any], Any], way: Way = ()) -> Any:
    kind = type(value)
    if kind in (dict, OrderedDict):
        found: dict[Any, Any] = kind()
        # A module's state dict carries its parts' versions in an attribute.
        if getattr(value, "__dict__", None):
            found.__dict__.update(value.__dict__)
        for key, item in value.items():
            found[key] = _mapped(item, change, (*way, key))
        return found
    if kind in (list, tuple):
        return kind(_mapped(item, change, (*way, at)) for at, item in enumerate(value))
    return change(way, value)
