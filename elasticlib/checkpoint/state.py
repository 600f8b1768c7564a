"""A state: what it is nested in, and one way to go through it.

Saving, snapshots, restoring and files all go by this, so what one of them takes all of them take.
"""

from __future__ import annotations

import copy
import inspect
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import attrs
import torch

from ..errors import CheckpointError, describe

Way: TypeAlias = tuple[Any, ...]
"""Keys and indices, from the state's top."""

MAX_DEPTH = 100
"""Levels of nesting; JSON's own limit is the interpreter's recursion limit."""

MAX_PARTS = 1 << 26
"""Of a state, each counted wherever it stands: a few lists of lists can stand for any number."""

_MAPPINGS = (dict, OrderedDict, Counter, defaultdict)
_SEQUENCES = (list, tuple, deque)
_CONTAINERS = {*_MAPPINGS, *_SEQUENCES}
_NOTHING: dict[Any, Any] = {}


# -- containers ------------------------------------------------------------------------------------


def is_mapping(value: object) -> bool:
    """Whether it is a container of keys and values."""
    return type(value) in _MAPPINGS


def is_named_tuple(kind: type) -> bool:
    """Whether a class is what `collections.namedtuple` or `typing.NamedTuple` makes."""
    if kind is tuple or not issubclass(kind, tuple):
        return False
    return isinstance(inspect.getattr_static(kind, "_fields", None), tuple)


def is_sequence(value: object) -> bool:
    """Whether it is a container of items in order."""
    return type(value) in _SEQUENCES or is_named_tuple(type(value))


def parts_of(value: Any) -> Mapping[Any, Any]:
    """What is in a container, by its keys or indices; of anything else nothing."""
    if is_mapping(value):
        return cast("Mapping[Any, Any]", value)
    return dict(enumerate(value)) if is_sequence(value) else _NOTHING


def with_parts(value: Any, parts: Mapping[Any, Any]) -> Any:
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


# -- going through a state -------------------------------------------------------------------------


class Walk:
    """One pass over a state, from the leaves up; a subclass says what becomes of each part.

    A container that stands in several places is gone into once, but for a pass whose `at_each`
    says that it matters where: its parts have several ways then.
    """

    at_each = False

    def __init__(self) -> None:
        self._above: set[int] = set()
        # With the container, as a number says which one only while that one lives.
        self._done: dict[int, tuple[object, Any, int]] = {}
        self._count = 0

    def leaf(self, way: Way, value: Any) -> Any:
        """What becomes of something that is no container."""
        del way
        return value

    def node(self, way: Way, value: Any, parts: Mapping[Any, Any]) -> Any:
        """What becomes of a container of whose parts this has become, by keys or indices: itself
        if they are the same."""
        del way
        before = parts_of(value)
        same = all(part is before[key] for key, part in parts.items())
        return value if same else with_parts(value, parts)

    def walk(self, value: Any, way: Way = ()) -> Any:
        """What becomes of `value`.

        Raises:
            CheckpointError: it contains itself, or is nested too deeply, or too large.
        """
        kind = type(value)
        # Nearly all parts of a state are no containers, and there may be many thousands.
        if kind not in _CONTAINERS and not (issubclass(kind, tuple) and is_named_tuple(kind)):
            return self.leaf(way, value)
        key = id(value)
        if key in self._above:
            raise CheckpointError(f"{spoken(way)} contains itself")
        if len(way) >= MAX_DEPTH:
            raise CheckpointError(f"{spoken(way)} is nested deeper than {MAX_DEPTH} levels")
        if key in self._done and not self.at_each:
            _, made, count = self._done[key]
            self._count += count
        else:
            before = self._count
            self._above.add(key)
            parts = {at: self.walk(part, (*way, at)) for at, part in parts_of(value).items()}
            self._above.remove(key)
            made = self.node(way, value, parts)
            self._count += len(parts) + 1
            self._done[key] = (value, made, self._count - before)
        if self._count > MAX_PARTS:
            raise CheckpointError(
                f"{spoken(way)} has more than {MAX_PARTS} parts, each counted wherever it stands: "
                "some of its containers stand in many places"
            )
        return made


class _Gathering(Walk):
    def leaf(self, way: Way, value: Any) -> Any:
        if isinstance(value, torch.Tensor | int | float | str | None):
            return value
        holder = holder_of(value)
        if holder is None:
            return value
        try:
            given = holder.give()
        except Exception as error:
            raise CheckpointError(
                f"{spoken(way)}, a {type(value).__qualname__}, could not give its state: "
                f"{describe(error)}"
            ) from error
        return self.walk(given, way)


def values_of(state: object) -> Any:
    """What a training script hands over, as plain values: the state with each object that has a
    state of its own, wherever it stands, replaced by that.

    Raises:
        CheckpointError: an object could not give its state.
    """
    return _Gathering().walk(state)


class _Changing(Walk):
    at_each = True

    def __init__(self, change: Callable[[Way, Any], Any]) -> None:
        super().__init__()
        self._change = change

    def leaf(self, way: Way, value: Any) -> Any:
        return self._change(way, value)


def changed(state: object, change: Callable[[Way, Any], Any]) -> Any:
    """The state with `change` of its way and it in the place of each thing that is no container;
    containers in which nothing changes are themselves."""
    return _Changing(change).walk(state)


def take_shards(values: object) -> tuple[Any, dict[Way, Any]]:
    """The state with None in the places of its sharded tensors, and those by their ways, since
    every rank has its own part of them."""
    if _sharded_class() is None:
        return values, {}
    shards: dict[Way, Any] = {}

    def take(way: Way, value: object) -> object:
        if is_sharded_kind(value):
            shards[way] = value
            return None
        return value

    return changed(values, take), shards


def put_shards(plain: object, tensors: Mapping[Way, torch.Tensor]) -> Any:
    """The state again, with these tensors in their places."""
    return changed(plain, lambda way, value: tensors.get(way, value))


def is_sharded_kind(value: object) -> bool:
    """Whether `value` is a DTensor."""
    sharded = _sharded_class()
    return sharded is not None and isinstance(value, sharded)


def _sharded_class() -> type | None:
    """DTensor. Where nobody imported it, which costs most of a second, no value is of it."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def parameters_in(state: object) -> dict[Way, Sequence[torch.Tensor]]:
    """The parameters of each optimizer in a state, by its way: in the order in which its state
    numbers them."""
    found: dict[Way, Sequence[torch.Tensor]] = {}

    def look(way: Way, value: object) -> object:
        if isinstance(value, torch.optim.Optimizer):
            found[way] = [one for group in value.param_groups for one in group["params"]]
        return value

    changed(state, look)
    return found


def spoken(way: Way) -> str:
    """Where something stands, for messages."""
    return "state" + "".join(key.text if isinstance(key, Step) else f"[{key!r}]" for key in way)


@attrs.frozen
class Step:
    """A step on a way that is no key or index: to a key itself, or to an attribute."""

    text: str

    def __str__(self) -> str:
        return self.text


# -- objects that have a state of their own --------------------------------------------------------


@attrs.frozen
class Holder:
    """How an object gives its state, and takes it back."""

    give: Callable[[], Any]
    take: Callable[[Any], object]


def holder_of(value: Any) -> Holder | None:
    """None for what has no state of its own, and for what gives it but does not take it back."""
    if isinstance(value, type):
        return None
    give, take = getattr(value, "state_dict", None), getattr(value, "load_state_dict", None)
    if callable(give) and callable(take):
        return Holder(give, take)
    # Generators of random numbers have other names for it.
    numpy = sys.modules.get("numpy.random")
    if type(value) is random.Random:
        return Holder(value.getstate, value.setstate)
    if isinstance(value, torch.Generator) or (numpy and isinstance(value, numpy.RandomState)):
        return Holder(value.get_state, value.set_state)
    if numpy and isinstance(value, numpy.Generator):
        bits = value.bit_generator
        return Holder(lambda: bits.state, lambda state: setattr(bits, "state", state))
    return None
