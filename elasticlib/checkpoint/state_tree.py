"""Tree of a training state: flatten a state into tensors and plain values, and build it again.

`flatten` walks a state once. It replaces each object that has a state of its own by that state, and
returns the tensors, the plain values, and the structure that connects them. The structure is
compared with that of the previous save: if both are equal, everything that depends on it
(`encode_structure`, the layout of tensors) is reused.

`unflatten` is the inverse. It builds a state from JSON and tensors; nothing is unpickled, so a file
cannot run code.

This module also defines how objects give and take their state, and how a part of a state is named:
in messages (`format_path`), and in files and between ranks (`path_name`).
"""

from __future__ import annotations

import base64
import copy
import importlib
import math
import random
import struct
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple, TypeAlias, cast

import attrs
import torch

from ..errors import CheckpointError, CheckpointUnreadableError, format_error
from ..untrusted import class_name_with_article, full_name
from .safetensors_header import compact_json
from .state_dicts import describe_sharded_object, describe_state_dict, state_dict_owner
from .tensor_layout import dtype_from_name, dtype_name

StatePath: TypeAlias = tuple[Any, ...]  # keys and indices, from the root of the state

MAX_DEPTH = 100  # levels of nesting; JSON is limited by the interpreter's recursion limit
MAX_PARTS = 1 << 22  # containers (counted twice or more), tensors and values at each occurrence
MAX_INT_BITS = 8192  # Python refuses to convert integers of more than 4300 digits to text.

_MAPPINGS: dict[str, type] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
_MAPPING_NAMES = {kind: name for name, kind in _MAPPINGS.items()}
_CONTAINERS = frozenset({*_MAPPING_NAMES, list, tuple})
_SCALARS = frozenset({type(None), bool, int, float, str})
_EXACT_KEYS = frozenset({str, int})
_SETS: dict[type, str] = {set: "set", frozenset: "frozenset"}
_ARRAY_KINDS = "biufcmMSU"  # NumPy dtypes whose name describes them completely

# Tokens of a structure. A container is its type, followed by its keys or its length, and its parts.
_VALUE = "value"
_TENSOR, _TENSOR_WITH_GRAD, _PARAMETER, _FROZEN_PARAMETER = "t", "tg", "p", "pf"
_ARRAY, _SHARD = "array", "shard"


# -- names of parts --------------------------------------------------------------------------------


class PathLabel(str):
    """A part of a path that messages show as it is, without brackets.

    `.name` is an attribute of an object, and `.key('a')` is the key `'a'` itself.
    """


def format_path(path: StatePath) -> str:
    """Return a path as it is written in messages: `state['model'][0]`."""
    steps = (key if isinstance(key, PathLabel) else f"[{key!r}]" for key in path[:MAX_DEPTH])
    return "state" + "".join(steps)


def path_name(path: StatePath) -> str:
    """Return the name of a tensor in files and between ranks: its keys, separated by slashes.

    Escapes follow RFC 6901 (JSON Pointer): `~` is written `~0`, and `/` is written `~1`. A key that
    is neither a string nor an integer is its `repr` after a `~`. Two paths have the same name only
    if they differ by an integer and a string of the same digits.
    """
    return "/".join(map(_escape_key, path)) or "state"


def _escape_key(key: object) -> str:
    if type(key) is int:
        return str(key)
    text = str(key) if isinstance(key, str) else f"~{key!r}"
    escaped = text.replace("~", "~0").replace("/", "~1")
    # Unpaired surrogates are possible in a string, but not in a file.
    escaped = escaped if text.isascii() else escaped.encode("utf-8", "backslashreplace").decode()
    return escaped if isinstance(key, str) else escaped.replace("~0", "~", 1)


# -- objects that have a state of their own --------------------------------------------------------


class StateAccessor(NamedTuple):
    """The functions that return the state of an object and set it."""

    get_state: Callable[[], Any]
    set_state: Callable[[Any], object]


def state_accessor(value: Any) -> StateAccessor | None:
    """Return the accessor of an object, or None if its state cannot be read and set."""
    if isinstance(value, type):
        return None
    get, load = getattr(value, "state_dict", None), getattr(value, "load_state_dict", None)
    if callable(get) and callable(load):
        return StateAccessor(get, load)
    # Random number generators have other names for the two functions.
    numpy = sys.modules.get("numpy.random")
    if type(value) is random.Random:
        return StateAccessor(value.getstate, value.setstate)
    if isinstance(value, torch.Generator) or (numpy and isinstance(value, numpy.RandomState)):
        return StateAccessor(value.get_state, value.set_state)
    if numpy and isinstance(value, numpy.Generator):
        bits = value.bit_generator
        return StateAccessor(lambda: bits.state, lambda state: setattr(bits, "state", state))
    return None


# -- containers ------------------------------------------------------------------------------------


def is_container(value: object) -> bool:
    """Return True for exactly a dict, OrderedDict, Counter, list or tuple."""
    return type(value) in _CONTAINERS


def is_plain_value(value: object) -> bool:
    """Return True for a value without tensors and parts, such as a number, a set or an array."""
    kind = type(value)
    is_known = kind in _SCALARS or kind in _ENCODED or kind in _SETS or kind is complex
    return is_known or is_array(value) or _is_numpy_scalar(value)


def parts_of(value: Any) -> Mapping[Any, Any]:
    """Return the parts of a container by key or index; of any other value, no parts."""
    kind = type(value)
    if kind in _MAPPING_NAMES:
        return cast("Mapping[Any, Any]", value)
    return dict(enumerate(value)) if kind in _CONTAINERS else {}


def with_parts(value: Any, parts: Mapping[Any, Any]) -> Any:
    """Return a container like `value` that has these parts under the same keys or indices."""
    if type(value) not in _MAPPING_NAMES:
        return type(value)(parts.values())
    new = copy.copy(value)  # keeps the attributes of a module's state dict
    for key, part in parts.items():  # `update` would add to the counts of a Counter
        new[key] = part
    return new


def map_leaves(state: object, change: Callable[[StatePath, Any], Any], path: StatePath = ()) -> Any:
    """Return the state with each value that is not a container replaced by `change(path, value)`.

    Containers in which nothing changes are returned as they are.

    Raises:
        CheckpointError: The state is nested too deeply.
    """
    if not is_container(state):
        return change(path, state)
    _check_depth(path)
    before = parts_of(state)
    parts = {key: map_leaves(part, change, (*path, key)) for key, part in before.items()}
    is_same = all(part is before[key] for key, part in parts.items())
    return state if is_same else with_parts(state, parts)


def to_plain_values(state: object) -> Any:
    """Return the state with each object that has a state of its own replaced by that state.

    Raises:
        CheckpointError: An object failed to return its state, or the state is nested too deeply.
    """

    def change(path: StatePath, value: Any) -> Any:
        if isinstance(value, torch.Tensor) or type(value) in _SCALARS:
            return value
        accessor = state_accessor(value)
        if accessor is None:
            return value
        return map_leaves(_get_state(accessor, path, value), change, path)

    return map_leaves(state, change)


def extract_shards(values: object) -> tuple[Any, dict[StatePath, Any]]:
    """Return the state with None in place of each DTensor, and the DTensors by path."""
    if _dtensor_class() is None:
        return values, {}
    shards: dict[StatePath, Any] = {}

    def extract(path: StatePath, value: object) -> object:
        if is_dtensor(value):
            shards[path] = value
            return None
        return value

    return map_leaves(values, extract), shards


def insert_shards(values: object, tensors: Mapping[StatePath, torch.Tensor]) -> Any:
    """Return the state with these tensors at their paths."""
    return map_leaves(values, lambda path, value: tensors.get(path, value))


def is_dtensor(value: object) -> bool:
    """Return True if `value` is a DTensor."""
    kind = _dtensor_class()
    return kind is not None and isinstance(value, kind)


def _dtensor_class() -> type | None:
    # Importing DTensor takes most of a second. If no module has done so, no value is a DTensor.
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def local_tensor(value: Any) -> torch.Tensor:
    """Return the memory of the elements that this rank has of a tensor, to read or write them."""
    with torch.no_grad():
        local: torch.Tensor = value.to_local() if is_dtensor(value) else value
        return local.detach()


def reject_state_dicts(state: object, path: StatePath = ()) -> None:
    """Reject a state that contains the state dict of an object that has to be given itself.

    Objects that torch has sharded without DTensors are rejected, too. What the objects in the state
    return is not checked.

    Raises:
        CheckpointError: The state contains such a dict or object; the message names its path.
    """
    if type(state) is dict and (owner := state_dict_owner(state)):
        raise CheckpointError(f"{format_path(path)} {describe_state_dict(owner)}")
    if is_container(state):
        _check_depth(path)
        for key, part in parts_of(state).items():
            if is_container(part):
                reject_state_dicts(part, (*path, key))
            else:
                _reject_sharded_object(part, (*path, key))


def _reject_sharded_object(value: object, path: StatePath) -> None:
    if reason := describe_sharded_object(value):
        raise CheckpointError(f"{format_path(path)} {reason}")


def _check_depth(path: StatePath) -> None:
    if len(path) >= MAX_DEPTH:
        raise CheckpointError(
            f"{format_path(path[:3])} contains itself, or is nested deeper than {MAX_DEPTH} levels"
        )


def _get_state(accessor: StateAccessor, path: StatePath, value: object) -> Any:
    try:
        return accessor.get_state()
    except Exception as error:
        raise CheckpointError(
            f"{format_path(path)}, a {type(value).__qualname__}, failed in state_dict(): "
            f"{format_error(error)}"
        ) from error


# -- NumPy -----------------------------------------------------------------------------------------


def is_array(value: object) -> bool:
    """Return True if `value` is a NumPy array and not of a subclass."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray


def _is_numpy_scalar(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def _check_numpy_dtype(path: StatePath, value: Any) -> None:
    plain = (sys.modules["numpy"].ndarray, value.dtype.type)
    if value.dtype.kind not in _ARRAY_KINDS or type(value) not in plain:
        raise CheckpointError(
            f"{format_path(path)} is a numpy.{type(value).__qualname__} of {value.dtype}, which has"
            " no plain elements"
        )


def _array_order(array: Any) -> str:
    """Return the memory order of an array: `F` if its first index varies fastest, else `C`."""
    return "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"


def _array_bytes(array: Any) -> torch.Tensor:
    """Return the bytes of an array in its memory order, without a copy if there are no gaps."""
    numpy = sys.modules["numpy"]
    flat = numpy.ascontiguousarray(array.reshape(-1, order=_array_order(array)))
    if not flat.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    flat = flat.view(numpy.uint8)
    # torch accepts writable memory only.
    return torch.frombuffer(flat if flat.flags.writeable else flat.copy(), dtype=torch.uint8)


def _array_from_bytes(data: torch.Tensor, dtype: str, shape: list[int], order: str) -> Any:
    memory = bytearray(data.nbytes)
    if memory:
        torch.frombuffer(memory, dtype=torch.uint8).copy_(data.reshape(-1).view(torch.uint8))
    return _numpy().ndarray(shape, _numpy_dtype(dtype), memory, order=order)


def _numpy_scalar(data: bytes, dtype: str) -> Any:
    return _numpy().ndarray((), _numpy_dtype(dtype), data)[()]


def _numpy_dtype(name: str) -> Any:
    dtype = _numpy().dtype(name)
    if dtype.kind not in _ARRAY_KINDS:
        raise ValueError(f"an array of dtype {name!r}")
    return dtype


def _numpy() -> Any:
    try:
        return importlib.import_module("numpy")
    except ImportError as error:
        raise CheckpointUnreadableError(
            f"the state holds NumPy arrays or numbers, and NumPy cannot be imported ({error}): "
            "pip install numpy"
        ) from error


# -- plain values as JSON --------------------------------------------------------------------------

_NAN, _NEGATIVE_NAN = (struct.pack(">d", nan) for nan in (math.nan, -math.nan))


def _encode_scalar(path: StatePath, value: Any) -> Any:
    """Encode None, a bool, a number or a string, so that it has the same bits when it is read.

    Raises:
        CheckpointError: JSON cannot have the value.
    """
    if type(value) is int and value.bit_length() > MAX_INT_BITS:
        raise CheckpointError(
            f"{format_path(path)} is an integer of {value.bit_length()} bits, and a checkpoint has "
            f"integers of at most {MAX_INT_BITS} bits: save its bytes, as of value.to_bytes()"
        )
    if value == value or struct.pack(">d", value) == _NAN:
        return value
    if struct.pack(">d", value) != _NEGATIVE_NAN:
        raise CheckpointError(
            f"{format_path(path)} is a NaN with the bits {struct.pack('>d', value).hex()}, and a "
            "checkpoint has only the usual NaN of Python: save it as a tensor or a NumPy number"
        )
    return {"nan": "-"}  # Processors of Intel and AMD give this NaN for inf - inf, for example.


def _to_text(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode()


def _from_text(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


# By type: the name in JSON, the encoder and the decoder.
_ENCODED: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    bytes: ("bytes", _to_text, _from_text),
    bytearray: ("bytearray", _to_text, lambda text: bytearray(_from_text(text))),
    torch.Size: ("size", list, torch.Size),
    torch.dtype: ("dtype", dtype_name, dtype_from_name),
    torch.device: ("device", str, torch.device),
}
_DECODERS: dict[str, Callable[[Any], Any]] = {
    "nan": lambda _: -math.nan,
    "complex": lambda parts: complex(*map(_decode_plain, parts)),
    **{name: decode for name, _, decode in _ENCODED.values()},
}


def _encode_plain(path: StatePath, value: Any) -> Any:
    """Encode a scalar, a key, or a value that has no parts of its own in a state.

    Raises:
        CheckpointError: A state cannot contain this value.
    """
    kind = type(value)
    if kind in _SCALARS:
        return _encode_scalar(path, value)
    if kind in _ENCODED:
        name, encode, _ = _ENCODED[kind]
        return {name: encode(value)}
    if kind is complex:
        return {"complex": [_encode_scalar(path, part) for part in (value.real, value.imag)]}
    if kind in _SETS:
        # The order of a set differs between processes, and equal states must be equal bytes.
        items = (_encode_plain(path, item) for item in value)
        return {_SETS[kind]: sorted(items, key=compact_json)}
    if kind is tuple:
        raise CheckpointError(
            f"{format_path(path)} has the tuple {value!r:.80}, and the keys of a dict and the items"
            " of a set are single values in a checkpoint: use a string in place of the tuple"
        )
    if _is_numpy_scalar(value):
        _check_numpy_dtype(path, value)
        return {"number": _to_text(value.tobytes()), "dtype": value.dtype.str}
    raise _unsupported_value_error(path, value)


def _decode_plain(encoded: Any) -> Any:
    if not isinstance(encoded, dict):
        return encoded
    kind = next(iter(encoded), "")
    payload = encoded[kind]
    if kind in _DECODERS:
        return _DECODERS[kind](payload)
    if kind == "number":
        return _numpy_scalar(_from_text(payload), encoded["dtype"])
    return {"set": set, "frozenset": frozenset}[kind](map(_decode_plain, payload))


def _unsupported_value_error(path: StatePath, value: object) -> CheckpointError:
    name = (
        class_name_with_article(value)
        if type(value).__module__ == "builtins"
        else f"a {full_name(value)}"
    )
    what = f"{format_path(path)} is {name}"
    if isinstance(value, torch.Tensor):
        return CheckpointError(f"{what}: a subclass of torch.Tensor is not saved as it is")
    if callable(getattr(value, "state_dict", None)) and not isinstance(value, type):
        return CheckpointError(f"{what}, which has a state_dict and no load_state_dict: save that")
    advice = "save a dict of it" if isinstance(value, dict) else "save what it is made of"
    return CheckpointError(f"{what}, which a checkpoint does not hold: {advice}")


# -- from a state to its tensors and values --------------------------------------------------------


@attrs.frozen
class RankValues:
    """The values that one rank saves for itself, see `per_rank`."""

    text: str  # encoded
    rank: int
    world_size: int


@attrs.define(eq=False)
class FlatState:
    """A state as tensors, plain values, and the structure that connects them.

    It refers to the memory of the state's tensors and does not copy it.
    """

    structure: list[Any] = attrs.field(factory=list)  # tokens in depth-first order
    tensors: list[torch.Tensor] = attrs.field(factory=list)  # tensors, and the bytes of arrays
    values: list[Any] = attrs.field(factory=list)  # plain values, scalars as they are
    shards: dict[StatePath, Any] = attrs.field(factory=dict)  # DTensors
    modules: list[tuple[StatePath, torch.nn.Module]] = attrs.field(factory=list)
    generators: list[int] = attrs.field(factory=list)  # positions of their states in `tensors`
    own: RankValues | None = None  # not part of the fields above

    @property
    def has_parts(self) -> bool:
        """True if each rank saves a part of the state, and not rank 0 all of it."""
        return bool(self.shards) or self.own is not None


def flatten(
    state: object, *, reject_state_dicts: bool = False, own: RankValues | None = None
) -> FlatState:
    """Flatten a state, and ask each object in it for its state once.

    Args:
        state: Nested containers of tensors, NumPy arrays, plain values, and objects with
            `state_dict` and `load_state_dict`.
        reject_state_dicts: Raise for what the function of that name rejects.
        own: The values of this rank, which are not in `state`.

    Raises:
        CheckpointError: The state contains a value that cannot be saved; the message names its
            path. (Tensors and keys are checked when their layout is planned.)
    """
    flattener = _Flattener(reject_state_dicts, own)
    flattener.add(state)
    return flattener.flat


class _Flattener:
    """A walk over a state, which collects its parts in a FlatState."""

    def __init__(self, reject_state_dicts: bool, own: RankValues | None) -> None:
        self.flat = FlatState(own=own)
        self._path: list[Any] = []
        self._checks_dicts = reject_state_dicts

    def add(self, value: Any) -> None:
        """Add a value at the current path."""
        self._add_parts((((), value),), self._path[:-1])

    def _add_parts(self, items: Iterable[tuple[Any, Any]], at: list[Any] | None = None) -> None:
        # Snapshots spend most of their own time here: few calls, and the frequent types first.
        flat, path = self.flat, self._path
        structure, values, tensors = flat.structure, flat.values, flat.tensors
        for key, value in items:
            kind = type(value)
            if kind is torch.Tensor and not value.requires_grad:
                structure.append(_TENSOR)
                tensors.append(value)
            elif kind in _SCALARS:
                structure.append(_VALUE)
                if value != value or (kind is int and value.bit_length() > MAX_INT_BITS):
                    value = _encode_scalar(tuple(path) if at is not None else (*path, key), value)
                values.append(value)
            elif (
                kind is dict and at is None and not self._checks_dicts and len(path) < MAX_DEPTH - 1
            ):
                structure += (dict, _keys_token(value))
                path.append(key)
                self._add_parts(value.items())
                path.pop()
            else:
                if at is None:
                    path.append(key)
                adder = _ADDERS.get(kind)
                if adder is None:
                    self._add_other(value, kind)
                else:
                    if len(path) >= MAX_DEPTH:
                        _check_depth(tuple(path))
                    adder(self, value)
                    if len(structure) > MAX_PARTS:
                        self._reject_size()
                if at is None:
                    path.pop()

    def _add_dict(self, value: dict[Any, Any]) -> None:
        if self._checks_dicts and (owner := state_dict_owner(value)):
            raise CheckpointError(f"{format_path(tuple(self._path))} {describe_state_dict(owner)}")
        self.flat.structure += (dict, _keys_token(value))
        self._add_parts(value.items())

    def _add_sequence(self, value: list[Any] | tuple[Any, ...]) -> None:
        self.flat.structure += (type(value), len(value))
        self._add_parts(enumerate(value))

    def _add_mapping(self, value: Any) -> None:
        attributes = value.__dict__
        names = tuple(attributes)
        self.flat.structure += (type(value), _keys_token(value), names)
        self._add_parts(value.items())
        if names:
            # A module's state dict contains the versions of its parts in an attribute.
            self._add_parts((PathLabel(f".{name}"), part) for name, part in attributes.items())

    def _add_other(self, value: Any, kind: type) -> None:
        if isinstance(value, torch.Tensor):
            self._add_tensor(value, kind)
        elif (accessor := state_accessor(value)) is not None:
            if self._checks_dicts:
                _reject_sharded_object(value, tuple(self._path))
            given = _get_state(accessor, tuple(self._path), value)
            if isinstance(value, torch.nn.Module):
                self.flat.modules.append((tuple(self._path), value))
            elif isinstance(value, torch.Generator):
                self.flat.generators.append(len(self.flat.tensors))
            checks, self._checks_dicts = self._checks_dicts, False
            self.add(given)
            self._checks_dicts = checks
        elif is_array(value):
            _check_numpy_dtype(tuple(self._path), value)
            about = (value.dtype.str, value.shape, _array_order(value))
            self.flat.structure += (_ARRAY, about)
            self.flat.tensors.append(_array_bytes(value))
        else:
            self.flat.structure.append(_VALUE)
            self.flat.values.append(_encode_plain(tuple(self._path), value))

    def _add_tensor(self, value: torch.Tensor, kind: type) -> None:
        if kind is torch.Tensor:
            has_grad = value.requires_grad and value.is_leaf
            self.flat.structure.append(_TENSOR_WITH_GRAD if has_grad else _TENSOR)
        elif kind is torch.nn.Parameter:
            self.flat.structure.append(_PARAMETER if value.requires_grad else _FROZEN_PARAMETER)
        elif is_dtensor(value):
            self.flat.structure.append(_SHARD)
            self.flat.shards[tuple(self._path)] = value
            return
        else:
            raise _unsupported_value_error(tuple(self._path), value)
        self.flat.tensors.append(value)

    def _reject_size(self) -> None:
        raise CheckpointError(
            f"{format_path(tuple(self._path[:3]))} has more than {MAX_PARTS} parts, each counted at"
            " each occurrence: some of its containers occur in many places"
        )


_ADDERS: dict[type, Callable[[_Flattener, Any], None]] = {
    dict: _Flattener._add_dict,
    **dict.fromkeys((list, tuple), _Flattener._add_sequence),
    **dict.fromkeys((OrderedDict, Counter), _Flattener._add_mapping),
}


def _keys_token(value: Mapping[Any, Any]) -> tuple[Any, ...]:
    """Return a token that is equal for two mappings only if their keys have the same types, too.

    It is the keys if all are strings or all are integers, and else a pair with the keys first.
    Python regards 1, 1.0 and True as equal keys.
    """
    keys = tuple(value)
    kinds = {*map(type, keys)}
    is_exact = len(kinds) <= 1 and kinds <= _EXACT_KEYS
    return keys if is_exact else (keys, tuple(map(_exact_key, keys)))


def _exact_key(key: object) -> Any:
    """Return a value that is equal for two keys only if they have the same types and values."""
    return (type(key), key if type(key) in (str, int) else repr(key))


# -- structure as JSON -----------------------------------------------------------------------------


class StructurePart(NamedTuple):
    """A container, or a leaf, of a structure."""

    path: StatePath
    text: str  # Two parts have equal texts if their types and their keys are equal.
    is_value: bool = False
    is_tensor: bool = False  # a tensor or an array; not a DTensor
    is_in_state_dict: bool = False  # it is directly in the dict that a module returned


@attrs.define
class TreeEncoding:
    """The structure of a state as JSON, and the parts of the structure."""

    tree: Any = None
    parts: list[StructurePart] = attrs.field(factory=list)  # in the order of the tokens
    arrays: dict[int, tuple[str, tuple[int, ...], str]] = attrs.field(factory=dict)

    @property
    def paths(self) -> list[StatePath]:
        """The path of each tensor."""
        return [part.path for part in self.parts if part.is_tensor]


def encode_structure(structure: Sequence[Any], numbers: Sequence[int]) -> TreeEncoding:
    """Encode the structure of a flat state.

    Args:
        structure: The structure of a `FlatState`.
        numbers: The number of each of its tensors. Tensors of one number share their memory.

    Returns:
        The JSON, the containers and leaves, and the NumPy arrays (dtype, shape and memory order) by
        the position of their bytes among the tensors.

    Raises:
        CheckpointError: A key cannot be saved; the message names its path.
    """
    encoder = _StructureEncoder(structure, numbers)
    encoder.encoding.tree = encoder.encode_next(())
    return encoder.encoding


class _StructureEncoder:
    def __init__(self, structure: Sequence[Any], numbers: Sequence[int]) -> None:
        self._tokens, self._numbers = iter(structure), enumerate(numbers)
        self._shards = count()
        self.encoding = TreeEncoding()

    def encode_next(self, path: StatePath, is_in_state_dict: bool = False) -> Any:
        """Return the JSON of the value that begins at the next token and has this path."""
        token, parts = next(self._tokens), self.encoding.parts
        if token is _VALUE:
            parts.append(StructurePart(path, token, is_value=True))
            return None
        if token in _MAPPING_NAMES:
            return self._mapping(path, _MAPPING_NAMES[token])
        if token is list or token is tuple:
            length = next(self._tokens)
            parts.append(StructurePart(path, f"{token.__name__} {length}"))
            items = [self.encode_next((*path, at)) for at in range(length)]
            return items if token is list else {"tuple": items}
        if token is _SHARD:
            parts.append(StructurePart(path, token))
            return {"shard": next(self._shards)}
        position, number = next(self._numbers)
        about = next(self._tokens) if token is _ARRAY else None
        text = token if about is None else f"{token} {about}"
        parts.append(StructurePart(path, text, is_tensor=True, is_in_state_dict=is_in_state_dict))
        if about is not None:
            dtype, shape, order = self.encoding.arrays[position] = about
            return {"array": number, "dtype": dtype, "shape": shape, "order": order}
        if token in (_PARAMETER, _FROZEN_PARAMETER):
            return {"parameter": number, "grad": token is _PARAMETER}
        return (
            {"tensor": number, "grad": True} if token is _TENSOR_WITH_GRAD else {"tensor": number}
        )

    def _mapping(self, path: StatePath, kind: str) -> dict[str, Any]:
        keys = next(self._tokens)
        keys = keys[0] if keys and type(keys[0]) is tuple else keys
        names = () if kind == "dict" else next(self._tokens)
        encoded_keys = [_encode_key(path, key) for key in keys]
        text = compact_json([kind, encoded_keys, names])
        self.encoding.parts.append(StructurePart(path, text))
        is_of_module = "_metadata" in names
        values = [self.encode_next((*path, key), is_of_module) for key in keys]
        encoded: dict[str, Any] = {kind: list(zip(encoded_keys, values, strict=True))}
        if names:
            labels = {name: PathLabel(f".{name}") for name in names}
            encoded["attributes"] = {n: self.encode_next((*path, at)) for n, at in labels.items()}
        return encoded


def _encode_key(path: StatePath, key: Any) -> Any:
    if type(key) is str:
        return key
    # Python refuses to write an integer of thousands of digits.
    is_huge = type(key) is int and key.bit_length() > MAX_INT_BITS
    label = PathLabel(".key(...)" if is_huge else f".key({key!r:.80})")
    return _encode_plain((*path, label), key)


def encode_path(path: StatePath) -> list[Any]:
    """Encode a path as JSON."""
    return [_encode_plain(path, key) for key in path]


def decode_path(encoded: Sequence[Any]) -> StatePath:
    """Decode what `encode_path` returned."""
    return tuple(map(_decode_plain, encoded))


# -- from JSON and tensors to a state --------------------------------------------------------------


def unflatten(tree: Any, values: Sequence[Any], tensors: Sequence[torch.Tensor]) -> Any:
    """Build a state from the JSON of its structure, its plain values and its tensors.

    DTensors are None. Tensors that were one tensor are one again, and tensors that were different
    objects of the same memory share it again.

    Raises:
        AttributeError, LookupError, OverflowError, RuntimeError, TypeError, ValueError: The JSON
            was not written by `encode_structure`, or the values not by `flatten`.
        CheckpointUnreadableError: The state contains NumPy arrays, and NumPy is not installed.
    """
    decoder = _Decoder(values, tensors)
    state = decoder.decode(tree)
    if next(decoder.values, decoder) is not decoder:
        raise ValueError("there are more values than the tree has places for")
    return state


class _Decoder:
    def __init__(self, values: Sequence[Any], tensors: Sequence[torch.Tensor]) -> None:
        self.values: Iterator[Any] = iter(values)
        self._tensors = tensors
        self._built: dict[tuple[object, ...], Any] = {}

    def decode(self, encoded: Any) -> Any:
        if encoded is None:
            return _decode_plain(self._next_value())
        if isinstance(encoded, list):
            return [self.decode(item) for item in encoded]
        kind = next(iter(encoded), "")
        payload = encoded[kind]
        if kind in ("tensor", "parameter", "array"):
            # Arrays with the same bytes can be views of another dtype, shape or memory order.
            about = [encoded.get(name) for name in ("dtype", "shape", "order")]
            key = (kind, payload, encoded.get("grad", False), repr(about))
            if key not in self._built:
                self._built[key] = _as_kind(kind, self._tensors[_index(payload)], encoded)
            return self._built[key]
        if kind == "tuple":
            return tuple([self.decode(item) for item in payload])
        if kind == "shard":
            return None
        return self._mapping(encoded, kind)

    def _next_value(self) -> Any:
        for value in self.values:
            return value
        raise ValueError("there are fewer values than the tree has places for")

    def _mapping(self, encoded: dict[str, Any], kind: str) -> Any:
        state: Any = _MAPPINGS[kind]()
        for key, item in encoded[kind]:
            state[key if type(key) is str else _decode_plain(key)] = self.decode(item)
        for name, item in encoded.get("attributes", {}).items():
            state.__dict__[name] = self.decode(item)
        return state


def _index(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is not the number of a tensor")
    return number


def _as_kind(kind: str, tensor: torch.Tensor, encoded: dict[str, Any]) -> Any:
    if kind == "array":
        return _array_from_bytes(tensor, encoded["dtype"], encoded["shape"], encoded["order"])
    has_grad = encoded.get("grad", False)
    if kind == "parameter":
        return torch.nn.Parameter(tensor, requires_grad=has_grad)
    return tensor.detach().requires_grad_() if has_grad else tensor
