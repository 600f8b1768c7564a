"""What a state is nested in: which containers are looked into, and how one is made anew.

Saving, snapshots and restoring all walk a state by these, so what one of them takes all of them
take.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias, cast

from .named import is_named_tuple

Way: TypeAlias = tuple[Any, ...]
"""Keys and indices, from the state's top."""

_MAX_DEPTH = 100
_NOTHING: dict[Any, Any] = {}
_MAPPINGS = (dict, OrderedDict, Counter, defaultdict)


def is_mapping(value: object) -> bool:
    """Whether it is a container of keys and values."""
    return type(value) in _MAPPINGS


def is_sequence(value: object) -> bool:
    """Whether it is a container of items in order."""
    return type(value) in (list, tuple, deque) or is_named_tuple(type(value))


def parts_of(value: Any) -> Mapping[Any, Any]:
    """What is in a container, by its keys or indices; of anything else nothing."""
    if is_mapping(value):
        return cast("Mapping[Any, Any]", value)
    return dict(enumerate(value)) if is_sequence(value) else _NOTHING


def with_parts(value: Any, parts: dict[Any, Any]) -> Any:
    """A container like `value`, with these parts by the same keys or indices."""
    if is_mapping(value):
        found = copy.copy(value)  # with the attributes that a module's state dict carries
        # Not update, which adds to a Counter.
        for key, part in parts.items():
            found[key] = part
        return found
    if type(value) is deque:
        return deque(parts.values(), value.maxlen)
    if type(value) is list:
        return list(parts.values())
    # Not by a named tuple's own call, which may be anything.
    return tuple.__new__(type(value), tuple(parts.values()))


def changed(value: Any, change: Callable[[Way, Any], Any], way: Way = ()) -> Any:
    """`value` with each part replaced by `change` of its way and it; what holds no changed part
    is itself, and what was replaced is not looked into."""
    found = change(way, value)
    # A state that contains itself is for the packer to refuse, with a sentence.
    if found is not value or len(way) > _MAX_DEPTH:
        return found
    after: dict[Any, Any] = {}
    same = True
    for key, part in parts_of(value).items():
        after[key] = changed(part, change, (*way, key))
        same = same and after[key] is part
    return value if same else with_parts(value, after)


def inside(value: Any, depth: int = 0) -> Iterator[Any]:
    """`value` and all that is in it; of objects with a state, what they give as theirs."""
    if is_stateful(value):
        value = value.state_dict()
    yield value
    if depth < _MAX_DEPTH:
        for part in parts_of(value).values():
            yield from inside(part, depth + 1)


def is_stateful(value: object) -> bool:
    """Whether `value` gives its state, and takes it back."""
    return (
        not isinstance(value, type)
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    )
