"""A nested state as JSON, with its tensors taken out and numbered.

Nothing is unpickled when it is read back, so a file cannot run code: less than even
`torch.load(weights_only=True)` lets in. Read back, equal things are equal, of the same types.
"""

from __future__ import annotations

import base64
import enum
import json
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from ..errors import CheckpointCorrupt, CheckpointError
from . import arrays
from .interface import Unreadable
from .named import is_enum, is_named_tuple, kind_named, name_of
from .storages import dtype_named

MAX_DEPTH = 100
"""Levels of nesting; JSON's own limit is the interpreter's recursion limit."""

MAX_INT_BITS = 8192
"""Python reads no integers of many more digits from text; longer ones are written in hex."""

_PLAIN = (type(None), bool, float, str)
_MAPPINGS: dict[type, str] = {
    dict: "dict",
    OrderedDict: "ordered",
    Counter: "counter",
    defaultdict: "defaultdict",
}
_SEQUENCES: dict[type, str] = {
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
    torch.Size: "size",
    deque: "deque",
}
_LEAVES = (*_PLAIN, int, bytes, bytearray, complex, range, set, frozenset, torch.Size)
_FACTORIES: dict[str, Callable[[], object] | None] = {
    "None": None,
    **{
        kind.__name__: kind
        for kind in (int, float, complex, bool, str, bytes, list, tuple, set, frozenset)
    },
    **{kind.__name__: kind for kind in (dict, OrderedDict, Counter, deque)},
}
"""Of default dicts: what makes the values that are not there yet."""


def is_leaf(value: object) -> bool:
    """Whether a state holds it as one thing: no tensor, nothing that holds others by keys."""
    return (
        type(value) in _LEAVES
        or isinstance(value, (torch.dtype, torch.device, enum.Enum))
        or arrays.is_array(value)
        or arrays.is_number(value)
    )


class Encoder:
    """Takes tensors out of states, and gives each a number; one tensor has one number.

    tensors: those found so far, in the order of their numbers; paths: where each stands first.
    arrays: those that are the bytes of NumPy's arrays: dtype, shape, and order in memory.
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.paths: list[str] = []
        self.arrays: dict[int, tuple[str, tuple[int, ...], str]] = {}
        self._path: list[object] = []
        self._numbers: dict[int, int] = {}
        # As an id says which one only while that one lives.
        self._numbered: list[object] = []
        self._above: list[int] = []

    def encode(self, value: object) -> Any:
        """What `json.dumps` takes and `decode` reads.

        Raises:
            CheckpointError: something cannot be saved; the message says what, and where it
                stands in the state.
        """
        try:
            return self._encode(value)
        except _Unsavable as found:
            raise CheckpointError(f"state{found.where} {found.what}") from None

    def _encode(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is int:
            return value if value.bit_length() <= MAX_INT_BITS else {"int": hex(value)}
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if kind is list:
            return self._inside(value, lambda: self._all(value))
        if kind in _MAPPINGS:
            return self._inside(value, lambda: self._mapping(value))
        if kind in _SEQUENCES:
            return self._inside(value, lambda: self._sequence(value))
        if is_named_tuple(kind):
            items = self._inside(value, lambda: self._all(value))
            return {"namedtuple": items, "class": _class(kind)}
        if arrays.is_array(value):
            return self._array(value)
        return _leaf(value)

    def _inside(self, value: object, encode: Callable[[], Any]) -> Any:
        if id(value) in self._above:
            raise _Unsavable("contains itself")
        if len(self._above) >= MAX_DEPTH:
            raise _Unsavable(f"is nested deeper than {MAX_DEPTH} levels")
        self._above.append(id(value))
        try:
            return encode()
        finally:
            self._above.pop()

    def _all(self, items: Iterable[object]) -> list[Any]:
        return [self._at(at, item) for at, item in enumerate(items)]

    def _sequence(self, value: Any) -> dict[str, Any]:
        items = self._all(value)
        if isinstance(value, set | frozenset):
            # Each process has an order of its own, and equal states are to be equal bytes.
            items.sort(key=dumps)
        found = {_SEQUENCES[type(value)]: items}
        return {**found, "maxlen": value.maxlen} if isinstance(value, deque) else found

    def _mapping(self, value: dict[object, object]) -> dict[str, Any]:
        items = [
            [self._at(key, key, ".key({!r})"), self._at(key, item)] for key, item in value.items()
        ]
        found: dict[str, Any] = {_MAPPINGS[type(value)]: items}
        if isinstance(value, defaultdict):
            found["factory"] = _factory(value)
        # A module's state dict carries its parts' versions in an attribute.
        attributes = getattr(value, "__dict__", None)
        if attributes:
            found["attributes"] = {
                name: self._at(name, item, ".{}") for name, item in attributes.items()
            }
        return found

    def _at(self, key: object, value: object, spoken: str = "[{!r}]") -> Any:
        self._path.append(key)
        try:
            return self._encode(value)
        except _Unsavable as found:
            found.where = spoken.format(key) + found.where
            raise
        finally:
            self._path.pop()

    def _tensor(self, tensor: torch.Tensor) -> dict[str, Any]:
        reason = _why_unsavable(tensor)
        if reason:
            raise _Unsavable(reason)
        number = self._number(tensor, tensor.detach)
        if type(tensor) is torch.nn.Parameter:
            return {"parameter": number, "grad": tensor.requires_grad}
        return {"tensor": number, "grad": True} if _is_wanted(tensor) else {"tensor": number}

    def _array(self, array: Any) -> dict[str, Any]:
        reason = arrays.why_not(array)
        if reason:
            raise _Unsavable(reason)
        number = self._number(array, lambda: arrays.bytes_of(array))
        shape, order = array.shape, arrays.order_of(array)
        self.arrays[number] = (array.dtype.str, shape, order)
        return {"array": number, "dtype": array.dtype.str, "shape": shape, "order": order}

    def _number(self, value: object, tensor: Callable[[], torch.Tensor]) -> int:
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self.tensors)
            self._numbered.append(value)
            self.tensors.append(tensor())
            self.paths.append(".".join(map(str, self._path)) or "state")
        return number


class _Unsavable(Exception):
    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.where, self.what = "", what


def _is_wanted(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and tensor.is_leaf


def _why_unsavable(tensor: torch.Tensor) -> str:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        return f"is a {kind}: a subclass of torch.Tensor is not saved as it is"
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        return f"is a tensor without plain elements ({tensor.layout}, {tensor.device})"
    return ""


def _leaf(value: Any) -> dict[str, Any]:
    if type(value) in (bytes, bytearray):
        return {type(value).__name__: base64.b64encode(value).decode()}
    if type(value) is complex:
        return {"complex": [value.real, value.imag]}
    if type(value) is range:
        return {"range": [value.start, value.stop, value.step]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, enum.Enum):
        return _member(value)
    if arrays.is_number(value):
        reason = arrays.why_not(value)
        if reason:
            raise _Unsavable(reason)
        data = base64.b64encode(value.tobytes()).decode()
        return {"number": data, "dtype": value.dtype.str}
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if callable(getattr(value, "state_dict", None)) and not isinstance(value, type):
        raise _Unsavable(f"is a {kind}, which has a state_dict and no load_state_dict: save that")
    raise _Unsavable(f"is a {kind}, which a checkpoint does not hold: save what it is made of")


def _member(value: enum.Enum) -> dict[str, Any]:
    kind = type(value)
    if kind.__members__.get(str(value.name)) is value:
        return {"enum": value.name, "class": _class(kind)}
    # Several flags at once have no name of their own.
    return {"flags": value.value, "class": _class(kind)}


def _class(kind: type) -> str:
    name = name_of(kind)
    if name is None:
        raise _Unsavable(
            f"is a {kind.__module__}.{kind.__qualname__}, a class that its module does not have "
            "under that name: it could not be found again. Define it at the top of a module"
        )
    return name


def _factory(value: defaultdict[Any, Any]) -> str:
    for name, factory in _FACTORIES.items():
        if value.default_factory is factory:
            return name
    raise _Unsavable(
        f"is a defaultdict of {value.default_factory!r}, and a checkpoint holds those of "
        f"{', '.join(_FACTORIES)}: save a dict of it"
    )


def dumps(encoded: Any) -> bytes:
    """The bytes of what `Encoder.encode` gave, and plain JSON around it."""
    return json.dumps(encoded, separators=(",", ":")).encode("ascii")


def decode(encoded: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The state again, with these tensors in the places of their numbers.

    Raises:
        CheckpointCorrupt: it is not what an `Encoder` gave.
        Unreadable: this program lacks a class or library that is needed.
    """
    try:
        return _Decoder(tensors).decode(encoded)
    except (
        *(AttributeError, IndexError, KeyError, TypeError, ValueError),
        *(OverflowError, RecursionError),
    ) as error:
        raise CheckpointCorrupt(f"the state's outline cannot be read: {error}") from error


class _Decoder:
    """One thing has one number, and where it stands in several places it is one again."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._made: dict[tuple[object, ...], Any] = {}

    def decode(self, encoded: Any) -> Any:
        if isinstance(encoded, list):
            return [self.decode(item) for item in encoded]
        if not isinstance(encoded, dict):
            return encoded
        kind = next(iter(encoded))
        payload = encoded[kind]
        if kind in ("tensor", "parameter", "array"):
            key = (kind, payload, encoded.get("grad", False))
            if key not in self._made:
                self._made[key] = _placed(kind, self._tensors[payload], encoded)
            return self._made[key]
        if kind in _MAPPINGS.values():
            return self._mapping(encoded, kind)
        if kind == "deque":
            return deque(self.decode(payload), encoded["maxlen"])
        if kind == "namedtuple":
            return _named_tuple(encoded["class"], self.decode(payload))
        if kind in ("enum", "flags"):
            return _found_member(encoded["class"], kind, payload)
        if kind == "number":
            return arrays.number_of(_base64(payload), encoded["dtype"])
        if kind in _READ:
            return _READ[kind](self.decode(payload))
        raise ValueError(f"there is no kind {kind!r}")

    def _mapping(self, encoded: dict[str, Any], kind: str) -> Any:
        found = next(made for made, name in _MAPPINGS.items() if name == kind)()
        if kind == "defaultdict":
            found.default_factory = _FACTORIES[encoded["factory"]]
        found.update(self._pairs(encoded[kind]))
        for name, item in encoded.get("attributes", {}).items():
            found.__dict__[name] = self.decode(item)
        return found

    def _pairs(self, items: Any) -> dict[Any, Any]:
        def each() -> Iterator[tuple[Any, Any]]:
            for key, item in items:
                yield self.decode(key), self.decode(item)

        return dict(each())


def _placed(kind: str, tensor: torch.Tensor, encoded: dict[str, Any]) -> Any:
    grad = encoded.get("grad", False)
    if kind == "array":
        return arrays.array_of(tensor, encoded["dtype"], encoded["shape"], encoded["order"])
    if kind == "parameter":
        return torch.nn.Parameter(tensor, requires_grad=grad)
    return tensor.detach().requires_grad_() if grad else tensor


def _named_tuple(name: str, items: list[Any]) -> Any:
    kind = _kind(name, is_named_tuple, "named tuple")
    if len(items) != len(kind._fields):
        raise Unreadable(
            f"the state holds a named tuple {name} of {len(items)} fields, and that class has "
            f"{len(kind._fields)} here: {', '.join(kind._fields)}"
        )
    # Not by the class's own call, which may be anything.
    return tuple.__new__(kind, items)


def _found_member(name: str, what: str, payload: Any) -> Any:
    kind = _kind(name, is_enum, "enum")
    if what == "flags":
        return kind(payload)
    if payload not in kind.__members__:
        raise Unreadable(f"the state holds {payload} of the enum {name}, which has no such member")
    return kind.__members__[payload]


def _kind(name: str, is_kind: Callable[[type], bool], what: str) -> Any:
    found = kind_named(name)
    if found is None or not is_kind(found):
        raise Unreadable(
            f"the state holds a {what} {name!r}, and this program has imported no such class: "
            f"import the module {name.partition(':')[0]} before the state is read"
        )
    return found


def _base64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


_READ: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "size": torch.Size,
    "int": lambda text: int(text, 16),
    "bytes": _base64,
    "bytearray": lambda text: bytearray(_base64(text)),
    "complex": lambda parts: complex(*parts),
    "range": lambda ends: range(*ends),
    "dtype": dtype_named,
    "device": torch.device,
}
