"""A state: what it is made of, one way to go through it, and how one that was read is put into it.

Saving, snapshots, restoring and files all go by this, so what one of them takes all of them take.
A restore compares everything before it changes anything: a state that does not fit changes nothing.
"""

from __future__ import annotations

import copy
import importlib
import math
import random
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import cache, partial
from itertools import chain
from typing import Any, TypeAlias, cast

import attrs
import torch
from torch.nn.parameter import is_lazy
from torch.serialization import default_restore_location

from ..errors import CheckpointError, StateMismatch, Unreadable, describe, wrapper_hint
from ..foreign import with_article

Way: TypeAlias = tuple[Any, ...]
"""Keys and indices, from the state's top."""

MapLocation: TypeAlias = (
    str | torch.device | dict[str, str] | Callable[[torch.UntypedStorage, str], Any] | None
)
"""Where tensors go, as `torch.load` takes it."""

MAX_DEPTH = 100
"""Levels of nesting; JSON's own limit is the interpreter's recursion limit."""
MAX_PARTS = 1 << 26
"""Of a state, each counted wherever it stands: a few lists of lists can stand for any number."""

_MAPPINGS = (dict, OrderedDict, Counter, defaultdict)
_SEQUENCES = (list, tuple)
_CONTAINERS = {*_MAPPINGS, *_SEQUENCES}
_LEAVES = {
    *(type(None), bool, int, float, complex, str, bytes, bytearray, set, frozenset),
    *(torch.Size, torch.dtype, torch.device),
}
_NOTHING: dict[Any, Any] = {}

MAX_KEY_BITS = 8192  # Python refuses to write integers of more than 4300 digits as text.


# -- containers ------------------------------------------------------------------------------------


def is_container(kind: type) -> bool:
    # Nearly all parts of a state are no containers, and there may be many thousands.
    return kind in _CONTAINERS


def parts_of(value: Any) -> Mapping[Any, Any]:
    """What is in a container, by its keys or indices; of anything else nothing."""
    if type(value) in _MAPPINGS:
        return cast("Mapping[Any, Any]", value)
    return dict(enumerate(value)) if is_container(type(value)) else _NOTHING


def _with_parts(value: Any, parts: Mapping[Any, Any]) -> Any:
    """A container like `value`, with these parts by the same keys or indices."""
    if type(value) in _MAPPINGS:
        found = copy.copy(value)  # with the attributes that a module's state dict carries
        # Not update, which adds to a Counter.
        for key, part in parts.items():
            found[key] = part
        return found
    return type(value)(parts.values())


# -- leaves ----------------------------------------------------------------------------------------


def _is_leaf(value: object) -> bool:
    """Whether a state holds it as one thing: no tensor, nothing that holds others by keys."""
    return type(value) in _LEAVES or is_array(value) or is_number(value)


# -- NumPy's arrays and numbers --------------------------------------------------------------------

_ELEMENTS = "biufcmMSU"
"""Of dtypes whose name says all: no objects, no records."""


def is_array(value: object) -> bool:
    """Whether it is a plain array of NumPy's; where nobody imported that there is none."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray


def is_number(value: object) -> bool:
    """Whether it is a scalar of NumPy's: a number, a date, a text."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def check_elements(way: Way, value: Any) -> None:
    plain = (sys.modules["numpy"].ndarray, value.dtype.type)
    if value.dtype.kind not in _ELEMENTS or type(value) not in plain:
        raise CheckpointError(
            f"{spoken(way)} is a numpy.{type(value).__qualname__} of {value.dtype}, which has no "
            "plain elements"
        )


def order_of(array: Any) -> str:
    """How its elements lie in memory: `F`, the first index fastest, or `C`, the last."""
    return "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"


def bytes_of(array: Any) -> torch.Tensor:
    """Its elements as bytes, in the order of `order_of`; not copied if they lie so."""
    numpy = sys.modules["numpy"]
    flat = numpy.ascontiguousarray(array.reshape(-1, order=order_of(array)))
    if not flat.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    flat = flat.view(numpy.uint8)
    # torch takes no memory that cannot be written to.
    return torch.frombuffer(flat if flat.flags.writeable else flat.copy(), dtype=torch.uint8)


def array_of(elements: torch.Tensor, dtype: str, shape: list[int], order: str) -> Any:
    """The array, in memory of its own."""
    memory = bytearray(elements.nbytes)
    if memory:
        torch.frombuffer(memory, dtype=torch.uint8).copy_(elements.reshape(-1).view(torch.uint8))
    return _numpy().ndarray(shape, _numpy_dtype(dtype), memory, order=order)


def number_of(data: bytes, dtype: str) -> Any:
    return _numpy().ndarray((), _numpy_dtype(dtype), data)[()]


def _numpy_dtype(name: str) -> Any:
    found = _numpy().dtype(name)
    if found.kind not in _ELEMENTS:
        raise ValueError(f"an array of dtype {name!r}")
    return found


def _numpy() -> Any:
    try:
        return importlib.import_module("numpy")
    except ImportError as error:
        raise Unreadable(
            f"the state holds NumPy arrays or numbers, and NumPy cannot be imported ({error}): "
            "pip install numpy"
        ) from error


# -- going through a state -------------------------------------------------------------------------


class Walk:
    """One pass over a state, from the leaves up; a subclass says what becomes of each part.

    A container that stands in several places is gone into once, but for a pass whose `at_each`
    says that it matters where: its parts have several ways then.
    """

    at_each = False

    def __init__(self) -> None:
        self._above: set[int] = set()
        # With the container, as another one may get its id once it is gone.
        self._done: dict[int, tuple[object, Any, int]] = {}
        self._count = 0

    def leaf(self, way: Way, value: Any) -> Any:
        """What becomes of something that is no container."""
        del way
        return value

    def node(self, way: Way, value: Any, parts: Mapping[Any, Any]) -> Any:
        """What becomes of a container: itself if its parts are still the same.

        parts: what has become of its parts, by keys or indices.
        """
        del way
        before = parts_of(value)
        same = all(part is before[key] for key, part in parts.items())
        return value if same else _with_parts(value, parts)

    def walk(self, value: Any, way: Way = ()) -> Any:
        """What becomes of `value`.

        Raises:
            CheckpointError: it contains itself, or is nested too deeply, or too large.
        """
        if not is_container(type(value)):
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
    def node(self, way: Way, value: Any, parts: Mapping[Any, Any]) -> Any:
        for key in parts if type(value) in _MAPPINGS else ():
            _check_key(way, key)
        return super().node(way, value, parts)

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
                f"{spoken(way)}, a {type(value).__qualname__}, failed in state_dict(): "
                f"{describe(error)}"
            ) from error
        return self.walk(given, way)


def _check_key(way: Way, key: object) -> None:
    """Raise CheckpointError if messages and files cannot contain this key, because it is or
    contains too large an integer."""
    if isinstance(key, tuple):
        for part in key:
            _check_key(way, part)
    elif isinstance(key, int) and key.bit_length() > MAX_KEY_BITS:
        raise CheckpointError(
            f"{spoken(way)} has an integer of {key.bit_length()} bits as a key, and keys have at "
            f"most {MAX_KEY_BITS} bits: use a string as the key"
        )


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


def spoken(way: Way) -> str:
    """Where something stands, for messages."""
    return "state" + "".join(key if isinstance(key, Step) else f"[{key!r}]" for key in way)


class Step(str):
    """A step on a way that is no key or index: to a key itself, or to an attribute."""


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


# -- the memory that a tensor lies in --------------------------------------------------------------


@attrs.frozen
class Form:
    """How elements lie in memory; strides in elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Of the elements, without what lies between them."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def extent(self) -> int:
        """Elements from the first one in memory to the last, with those in between."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))

    @property
    def overlaps(self) -> bool:
        """Whether two elements may lie in one place."""
        reached = 1
        for step, n in sorted(zip(self.stride, self.shape, strict=True)):
            if n > 1:
                if step < reached:
                    return True
                reached += (n - 1) * step
        return False

    @property
    def has_gaps(self) -> bool:
        """Whether each element has a place of its own, and something else lies between them."""
        return math.prod(self.shape) < self.extent and not self.overlaps

    @property
    def is_dense(self) -> bool:
        """Whether each element has a place of its own, and nothing else lies between them."""
        return math.prod(self.shape) == self.extent and not self.overlaps


@cache
def name_of(dtype: torch.dtype) -> str:
    """What `dtype_named` finds it by."""
    return str(dtype).removeprefix("torch.")


@cache
def dtype_named(name: str) -> torch.dtype:
    """The dtype that `str` calls torch.`name`. Raises ValueError."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return found


def form_of(tensor: torch.Tensor) -> Form:
    """How it lies in memory."""
    return Form(tensor.dtype, tuple(tensor.shape), tensor.stride())


def unexpanded(tensor: torch.Tensor) -> torch.Tensor:
    """Without the repetitions that `expand` makes: each element in memory once."""
    for axis, (n, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if n > 1 and step == 0:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of its elements as bytes, in the order of their indices."""
    fresh = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return fresh.copy_(tensor).view(-1).view(torch.uint8)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is as its shape and dtype alone say, and as `view` makes it of bytes."""
    step, strides = 1, tensor.stride()
    # Not is_contiguous, which ignores the strides of axes of length 1.
    for axis, n in enumerate(reversed(tensor.shape), 1):
        if strides[-axis] != step:
            return False
        step *= n or 1
    return not (tensor.is_conj() or tensor.is_neg())


def viewed(
    storage: torch.UntypedStorage, offset: int, form: Form, *, conj: bool, neg: bool
) -> torch.Tensor:
    found = bare(storage, offset, form)
    found = found.conj() if conj else found
    return torch._neg_view(found) if neg else found


def bare(storage: torch.UntypedStorage, offset: int, form: Form) -> torch.Tensor:
    """As it lies in memory, whatever bits a tensor there has."""
    found = torch.empty(0, dtype=form.dtype, device=storage.device)
    return found.set_(storage, offset, form.shape, form.stride)


def moved(tensor: torch.Tensor, location: str, map_location: MapLocation) -> torch.Tensor:
    """A tensor that was saved from the device `location` ("" for memory that stays), with its
    storage where it is wanted. Raises what torch and the caller's function do."""
    if not location or map_location == "cpu":
        return tensor
    storage = tensor.untyped_storage()
    found: Any = None
    if callable(map_location):
        found = map_location(storage, location)
    elif isinstance(map_location, dict):
        location = map_location.get(location, location)
    elif map_location is not None:
        location = str(map_location)
    if found is None:
        found = default_restore_location(storage, location)  # type: ignore[no-untyped-call]
    # A function may give one of the typed kind.
    return bare(
        getattr(found, "_untyped_storage", found), int(tensor.storage_offset()), form_of(tensor)
    )


# -- putting a state that was read back ------------------------------------------------------------


def check_names(state: object) -> dict[str, Any]:
    """What `restore` can change in place. Raises CheckpointError."""
    if not isinstance(state, dict):
        raise CheckpointError(
            f"restore puts what was saved into a dict of names, got a {type(state).__qualname__}: "
            'give {"model": model, ...}, and save the same'
        )
    return state


def fit(
    state: MutableMapping[str, Any], found: object, *, strict: bool = True
) -> Callable[[], None]:
    """What puts `found` into `state`, in place, when it is called. Until then nothing changes.

    Args:
        state: names to what `restore_from` takes; objects with `load_state_dict` are not asked.
        found: what was read. Its DTensors are this state's own, and no memory of others'.
        strict: whether a name that is on one side alone is an error; else it is left alone.

    Returns:
        A function that raises CheckpointError if an object refuses its state, or fails. What
        stands before it in `state` has been changed by then.

    Raises:
        StateMismatch: it does not fit. The message names what is missing on either side, or the
            first things that do not fit, with both shapes or types.
    """
    if not isinstance(found, dict):
        raise StateMismatch(f"what was saved is no dict of names, but {with_article(found)}")
    if strict:
        missing = [name for name in state if name not in found]
        surplus = [name for name in found if name not in state]
        if missing or surplus:
            sentences = []
            if missing:
                sentences.append(f"nothing was saved under {', '.join(map(repr, missing))}")
            if surplus:
                names = ", ".join(map(repr, surplus))
                sentences.append(f"the state has no {names}, which was saved")
            advice = "give the same names, or strict=False to restore those in both"
            raise StateMismatch(f"{'; '.join(sentences)}: {advice}")
    plan = _Fit()
    both = [name for name in state if name in found]
    steps = {name: plan.make(state[name], found[name], (name,)) for name in both}
    plan.check_shared_memory()
    if plan.unfit:
        more = f" (and {len(plan.unfit) - 3} more like this)" if len(plan.unfit) > 3 else ""
        raise StateMismatch("; ".join(plan.unfit[:3]) + more)

    def put() -> None:
        with torch.no_grad():
            for name, step in steps.items():
                state[name] = step()

    return put


class Copies:
    """Copies of tensors, which share memory where the tensors do, and not with these."""

    def __init__(self) -> None:
        self._storages: dict[tuple[torch.device, int], torch.UntypedStorage] = {}
        # With their originals, as another tensor may get the id of one that is gone.
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The copy; the same one each time."""
        if id(tensor) not in self._tensors:
            copy = self._copy(tensor).requires_grad_(tensor.requires_grad)
            if isinstance(tensor, torch.nn.Parameter):
                copy = torch.nn.Parameter(copy, requires_grad=tensor.requires_grad)
            self._tensors[id(tensor)] = (tensor, copy)
        return self._tensors[id(tensor)][1]

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        key = (tensor.device, storage.data_ptr())
        known = self._storages.get(key)
        if known is None and storage.nbytes() == tensor.nbytes and is_plain(tensor):
            copy = tensor.detach().clone()
            self._storages[key] = copy.untyped_storage()
            return copy
        if known is None:
            known = self._storages[key] = storage.clone()  # type: ignore[no-untyped-call]
        offset, form = int(tensor.storage_offset()), form_of(tensor)
        return viewed(known, offset, form, conj=tensor.is_conj(), neg=tensor.is_neg())


_ON_META = (
    "on the meta device, which has no memory to restore into: call model.to_empty(device=...) first"
)


@attrs.frozen(eq=False)
class _Write:
    """A tensor that a restore fills, and the saved one that it is filled from."""

    way: Way
    target: torch.Tensor
    source: torch.Tensor

    @property
    def begin(self) -> int:
        """The first byte of the target, counted from the start of its storage."""
        return int(self.target.storage_offset()) * self.target.element_size()

    @property
    def end(self) -> int:
        """The end of the target's last byte."""
        return self.begin + form_of(self.target).extent * self.target.element_size()


def _overlapping(writes: list[_Write]) -> Iterator[list[_Write]]:
    """Group writes into one storage by the ranges of memory that they overlap in."""
    group: list[_Write] = []
    for write in sorted(writes, key=lambda write: write.begin):
        if group and write.begin >= max(one.end for one in group):
            yield group
            group = []
        group.append(write)
    yield group


def _are_compatible(writes: list[_Write]) -> bool:
    """Return whether each target has the values of its source once all of them are written.

    Args:
        writes: into overlapping memory of one storage.
    """
    first = writes[0]
    if all(_is_same_memory(one, first) for one in writes[1:]):
        return True
    # Try it with other memory of the same layout.
    item = max(one.target.element_size() for one in writes)
    begin = first.begin // item * item
    memory = torch.empty(max(one.end for one in writes) - begin, dtype=torch.uint8)
    views = []
    for one in writes:
        offset = (one.begin - begin) // one.target.element_size()
        views.append(bare(memory.untyped_storage(), offset, form_of(one.target)))
        once = unexpanded(views[-1])
        once.copy_(one.source[tuple(slice(n) for n in once.shape)])
    return all(
        torch.equal(bits_of(view), bits_of(one.source.to("cpu", view.dtype)))
        for view, one in zip(views, writes, strict=True)
    )


def _is_same_memory(one: _Write, other: _Write) -> bool:
    """Return whether two writes have the same source, or sources that shared memory, and the same
    target."""

    def place(tensor: torch.Tensor) -> tuple[Any, ...]:
        return tensor.device, tensor.data_ptr(), form_of(tensor)

    return place(one.target) == place(other.target) and place(one.source) == place(other.source)


_TORCHS_MISFITS = ("Error(s) in loading state_dict", "loaded state dict ")
"""How torch's modules and optimizers begin to say that a state is another's."""


class _Fit:
    """How one state goes into another: what does not fit, as sentences, and what is to be done.

    What several things in the state share, they share again.
    """

    def __init__(self) -> None:
        self.unfit: list[str] = []
        self._copies = Copies()
        self._writes: list[_Write] = []

    def make(self, old: Any, new: Any, way: Way) -> Callable[[], Any]:
        """What puts `new` where `old` stands, and returns what is to stand there then: `old` itself
        wherever it can be changed in place."""
        if isinstance(old, torch.Tensor):
            return self._into_tensor(old, new, way)
        holder = holder_of(old)
        if holder is not None:
            self._look_into(old, new, way)
            return partial(self._load, old, holder, new, way)
        if is_array(old):
            return self._into_array(old, new, way)
        if is_container(type(old)):
            return self._into_container(old, new, way)
        if old is not None and not _is_leaf(old):
            self.unfit.append(f"{spoken(way)} is {with_article(old)}, which has no load_state_dict")
        return partial(self._own, new)

    def _own(self, new: Any) -> Any:
        """A copy, which shares no memory with the pack that it was read from."""

        def copy(_way: Way, part: Any) -> Any:
            plain = isinstance(part, torch.Tensor) and not is_sharded_kind(part)
            return self._copies.of(part) if plain else part

        return changed(new, copy)

    def _into_tensor(self, old: Any, new: Any, way: Way) -> Callable[[], Any]:
        if _shape_of(old) != _shape_of(new):
            self.unfit.append(f"{spoken(way)} is {_shape_of(old)}, and {_shape_of(new)} was saved")
        elif old.device.type == "meta":
            self.unfit.append(f"{spoken(way)} is {_ON_META}")
        elif not _is_alike_where(local_of(old), local_of(new)):
            what = f"{_shape_of(old)} that is expanded"
            self.unfit.append(f"{spoken(way)} is {what}, and what was saved is not")
        else:
            self._note_write(way, old, new)

        def copy() -> Any:
            target = unexpanded(local_of(old))
            target.copy_(local_of(new)[tuple(slice(n) for n in target.shape)])
            return old

        return copy

    def _look_into(self, old: Any, new: Any, way: Way) -> None:
        """Check the tensors that a module or an optimizer will load its state into."""
        if isinstance(old, torch.optim.Optimizer):
            parameters = (one for group in old.param_groups for one in group["params"])
            if any(one.device.type == "meta" for one in parameters):
                self.unfit.append(f"{spoken(way)} has parameters {_ON_META}")
        if not isinstance(old, torch.nn.Module) or not isinstance(new, Mapping):
            return
        targets = [*old.named_parameters(remove_duplicate=False)]
        for name, target in [*targets, *old.named_buffers(remove_duplicate=False)]:
            source = new.get(name)
            if is_lazy(target):
                continue
            if isinstance(source, torch.Tensor) and target.device.type == "meta":
                self.unfit.append(f"{spoken((*way, name))} is {_ON_META}")
            elif isinstance(source, torch.Tensor) and source.shape == target.shape:
                self._note_write((*way, name), target, source)

    def _note_write(self, way: Way, target: torch.Tensor, source: torch.Tensor) -> None:
        if target.numel() and not is_sharded_kind(target) and not is_sharded_kind(source):
            self._writes.append(_Write(way, target, source))

    def check_shared_memory(self) -> None:
        """Find tensors that share memory here, were separate when they were saved, and had other
        values then: the one that is restored last would overwrite the others."""
        storages: dict[tuple[torch.device, int], list[_Write]] = {}
        for write in self._writes:
            key = (write.target.device, write.target.untyped_storage().data_ptr())
            storages.setdefault(key, []).append(write)
        for writes in chain.from_iterable(map(_overlapping, storages.values())):
            with torch.no_grad():
                compatible = len(writes) == 1 or _are_compatible(writes)
            if not compatible:
                names = " and ".join(spoken(write.way) for write in writes[:3])
                self.unfit.append(
                    f"{names} share memory, and tensors with other values were saved under these "
                    "names: tie them in the same way as when they were saved"
                )

    def _into_array(self, old: Any, new: Any, way: Way) -> Callable[[], Any]:
        about = f"a NumPy array of {old.shape} {old.dtype}"
        saved = f"a NumPy array of {new.shape} {new.dtype}" if is_array(new) else with_article(new)
        if about != saved:
            self.unfit.append(f"{spoken(way)} is {about}, and {saved} was saved")
        if not old.flags.writeable:
            return partial(self._own, new)

        def copy() -> Any:
            old[...] = new
            return old

        return copy

    def _into_container(self, old: Any, new: Any, way: Way) -> Callable[[], Any]:
        if type(old) is not type(new):
            self.unfit.append(
                f"{spoken(way)} is {with_article(old)}, and {with_article(new)} was saved"
            )
            return partial(self._own, new)
        mine, theirs = parts_of(old), parts_of(new)
        tensors = [key for key, part in mine.items() if isinstance(part, torch.Tensor)]
        if hint := wrapper_hint(tensors, theirs):
            self.unfit.append(f"{spoken(way)} has other names than were saved{hint}")
        for key, part in mine.items():
            if key not in theirs and holder_of(part) is not None:
                where = spoken((*way, key))
                self.unfit.append(f"nothing was saved for {where}, {with_article(part)}")
        steps = {key: self.make(mine.get(key), theirs[key], (*way, key)) for key in theirs}

        def refill() -> Any:
            parts = {key: step() for key, step in steps.items()}
            if isinstance(old, tuple):
                return _with_parts(old, parts)
            old.clear()
            old.update(parts) if type(old) in _MAPPINGS else old.extend(parts.values())
            return old

        return refill

    def _load(self, old: Any, holder: Holder, new: Any, way: Way) -> Any:
        # A module copies what it is given into its own parameters, and needs no copy before.
        mine = new if isinstance(old, torch.nn.Module) else self._own(new)
        try:
            with torch.enable_grad():
                holder.take(mine)
        except Exception as error:
            misfit = isinstance(error, StateMismatch) or str(error).startswith(_TORCHS_MISFITS)
            kind = StateMismatch if misfit else CheckpointError
            what = f"{spoken(way)}, {with_article(old)}, could not load its state"
            names = dict(old.named_parameters()) if isinstance(old, torch.nn.Module) else ()
            raise kind(f"{what}: {describe(error).rstrip()}{wrapper_hint(names, new)}") from error
        return old


def _shape_of(value: Any) -> str:
    """In words, what a tensor must have in common with another to be copied into it."""
    if not isinstance(value, torch.Tensor):
        return with_article(value)
    if value.is_nested:
        return "a nested tensor"
    cut = f" sharded as {list(getattr(value, 'placements', ()))}" if is_sharded_kind(value) else ""
    return f"a tensor of {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}{cut}"


def local_of(value: Any) -> torch.Tensor:
    """The memory of what this rank has of a tensor, to be written to: of a plain one all of it."""
    with torch.no_grad():
        found: torch.Tensor = value.to_local() if is_sharded_kind(value) else value
        return found.detach()


def _is_alike_where(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether elements of `new` that share one place in `old` are equal."""
    once = unexpanded(old)
    if once.shape == old.shape:
        return True
    like = new[tuple(slice(n) for n in once.shape)].expand(new.shape)
    # As bits: what is no number is not equal to itself.
    return form_of(like) == form_of(new) or torch.equal(bits_of(like), bits_of(new))
