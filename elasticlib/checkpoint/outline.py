"""A state as JSON, with its tensors taken out and numbered.

Nothing is unpickled when it is read back, so a file cannot run code: less than even
`torch.load(weights_only=True)` lets in. Read back, equal things are equal, of the same types.
NumPy is needed only where its arrays are. Named tuples and enums are found again by their names,
among the modules that the program has imported itself.
"""

from __future__ import annotations

import base64
import enum
import importlib
import json
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..errors import CheckpointCorrupt, CheckpointError, Unreadable
from .pack_head import MAPPINGS
from .state import Step, Walk, Way, is_array, is_named_tuple, is_number, spoken
from .storages import dtype_named, name_of

MAX_INT_BITS = 8192
"""Python reads no integers of many more digits from text; longer ones are written in hex."""

_PLAIN = (type(None), bool, float, str)
_MAPPINGS = {kind: name for name, kind in MAPPINGS.items()}
_SETS: dict[type, str] = {set: "set", frozenset: "frozenset"}
_KINDS = (int, float, complex, bool, str, bytes, list, tuple, set, frozenset, dict)
_FACTORIES: dict[str, Callable[[], object] | None] = {
    "None": None,
    **{kind.__name__: kind for kind in (*_KINDS, OrderedDict, Counter, deque)},
}
"""Of default dicts: what makes the values that are not there yet."""


def _to_text(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode()


def _from_text(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


_LEAVES: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    bytes: ("bytes", _to_text, _from_text),
    bytearray: ("bytearray", _to_text, lambda text: bytearray(_from_text(text))),
    complex: ("complex", lambda v: [v.real, v.imag], lambda parts: complex(*parts)),
    range: ("range", lambda v: [v.start, v.stop, v.step], lambda ends: range(*ends)),
    torch.Size: ("size", list, torch.Size),
    torch.dtype: ("dtype", name_of, dtype_named),
    torch.device: ("device", str, torch.device),
}
"""By type: its name in JSON, and how it is written and read."""


# -- writing ---------------------------------------------------------------------------------------


class Encoder(Walk):
    """Makes of a state what `json.dumps` takes and `decode` reads, with numbers for its tensors.

    What cannot be saved is a CheckpointError that says what it is, and where it stands.

    tensors: those found so far, in the order of their numbers; ways: where each stands first.
    arrays: those that are the bytes of NumPy's arrays: dtype, shape, and order in memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[torch.Tensor] = []
        self.ways: list[Way] = []
        self.arrays: dict[int, tuple[str, tuple[int, ...], str]] = {}
        # With the value, as an id says which one only while that one lives.
        self._numbers: dict[int, tuple[int, object]] = {}

    def leaf(self, way: Way, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is int:
            return value if value.bit_length() <= MAX_INT_BITS else {"int": hex(value)}
        if isinstance(value, torch.Tensor):
            return self._tensor(way, value)
        if kind in _SETS:
            # Each process has an order of its own, and equal states are to be equal bytes.
            items = sorted((self.walk(item, way) for item in value), key=json.dumps)
            return {_SETS[kind]: items}
        if kind in _LEAVES:
            name, write, _ = _LEAVES[kind]
            return {name: write(value)}
        if isinstance(value, enum.Enum):
            return _member(way, value)
        if is_array(value):
            return self._array(way, value)
        if is_number(value):
            _check_elements(way, value)
            return {"number": _to_text(value.tobytes()), "dtype": value.dtype.str}
        raise _refusal(way, value)

    def node(self, way: Way, value: Any, parts: Mapping[Any, Any]) -> Any:
        kind = type(value)
        if kind in _MAPPINGS:
            return self._mapping(way, value, parts)
        items = list(parts.values())
        if kind is list:
            return items
        if kind is tuple:
            return {"tuple": items}
        if kind is deque:
            return {"deque": items, "maxlen": value.maxlen}
        return {"namedtuple": items, "class": _class(way, kind)}

    def _mapping(self, way: Way, value: Any, parts: Mapping[Any, Any]) -> dict[str, Any]:
        items = [
            [key if type(key) is str else self._beside(way, f".key({key!r})", key), part]
            for key, part in parts.items()
        ]
        found: dict[str, Any] = {_MAPPINGS[type(value)]: items}
        if isinstance(value, defaultdict):
            found["factory"] = _factory(way, value)
        # A module's state dict carries its parts' versions in an attribute.
        attributes = getattr(value, "__dict__", None)
        if attributes:
            found["attributes"] = {
                name: self._beside(way, f".{name}", item) for name, item in attributes.items()
            }
        return found

    def _beside(self, way: Way, text: str, value: object) -> Any:
        return self.walk(value, (*way, Step(text)))

    def _tensor(self, way: Way, tensor: torch.Tensor) -> dict[str, Any]:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise CheckpointError(
                f"{spoken(way)} is a {full_name(tensor)}: a subclass of torch.Tensor is not saved "
                "as it is"
            )
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            raise CheckpointError(
                f"{spoken(way)} is a tensor without plain elements ({tensor.layout}, "
                f"{tensor.device})"
            )
        # Nearly all want no gradient, and each new tensor takes its time.
        plain = tensor.detach() if tensor.requires_grad else tensor
        number = self._number(way, tensor, lambda: plain)
        if type(tensor) is torch.nn.Parameter:
            return {"parameter": number, "grad": tensor.requires_grad}
        wanted = tensor.requires_grad and tensor.is_leaf
        return {"tensor": number, "grad": True} if wanted else {"tensor": number}

    def _array(self, way: Way, array: Any) -> dict[str, Any]:
        _check_elements(way, array)
        number = self._number(way, array, lambda: _bytes_of(array))
        dtype, shape, order = self.arrays[number] = array.dtype.str, array.shape, _order_of(array)
        return {"array": number, "dtype": dtype, "shape": shape, "order": order}

    def _number(self, way: Way, value: object, tensor: Callable[[], torch.Tensor]) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self.tensors), value
            self.tensors.append(tensor())
            self.ways.append(way)
        return self._numbers[id(value)][0]


def _refusal(way: Way, value: object) -> CheckpointError:
    what = f"{spoken(way)} is a {full_name(value)}"
    if callable(getattr(value, "state_dict", None)) and not isinstance(value, type):
        if callable(getattr(value, "load_state_dict", None)):
            return CheckpointError(f"{what}: give what its state_dict() returns")
        return CheckpointError(f"{what}, which has a state_dict and no load_state_dict: save that")
    return CheckpointError(f"{what}, which a checkpoint does not hold: save what it is made of")


def full_name(value: object) -> str:
    """The name of its class, with its module's."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _member(way: Way, value: enum.Enum) -> dict[str, Any]:
    kind = type(value)
    if kind.__members__.get(str(value.name)) is value:
        return {"enum": value.name, "class": _class(way, kind)}
    # Several flags at once have no name of their own.
    return {"flags": value.value, "class": _class(way, kind)}


def _class(way: Way, kind: type) -> str:
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _class_named(name) is kind:
        return name
    raise CheckpointError(
        f"{spoken(way)} is a {kind.__module__}.{kind.__qualname__}, a class that its module does "
        "not have under that name: it could not be found again. Define it at the top of a module"
    )


def _factory(way: Way, value: defaultdict[Any, Any]) -> str:
    for name, factory in _FACTORIES.items():
        if value.default_factory is factory:
            return name
    raise CheckpointError(
        f"{spoken(way)} is a defaultdict of {value.default_factory!r}, and a checkpoint holds "
        f"those of {', '.join(_FACTORIES)}: save a dict of it"
    )


# -- reading ---------------------------------------------------------------------------------------


def decode(encoded: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The state again, with these tensors in the places of their numbers.

    Raises:
        CheckpointCorrupt: it is not what an `Encoder` made.
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
        if kind in MAPPINGS:
            return self._mapping(encoded, kind)
        if kind in ("enum", "flags"):
            return _found_member(encoded["class"], kind, payload)
        if kind == "number":
            return _number_of(_from_text(payload), encoded["dtype"])
        if kind in _READ:
            return _READ[kind](payload)
        if kind in _ITEMS:
            return _ITEMS[kind](self.decode(payload), encoded)
        raise ValueError(f"there is no kind {kind!r}")

    def _mapping(self, encoded: dict[str, Any], kind: str) -> Any:
        found: Any = MAPPINGS[kind]()
        if kind == "defaultdict":
            found.default_factory = _FACTORIES[encoded["factory"]]
        found.update({self.decode(key): self.decode(item) for key, item in encoded[kind]})
        for name, item in encoded.get("attributes", {}).items():
            found.__dict__[name] = self.decode(item)
        return found


_READ: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    **{name: read for name, _, read in _LEAVES.values()},
}
_ITEMS: dict[str, Callable[[list[Any], dict[str, Any]], Any]] = {
    "tuple": lambda items, _: tuple(items),
    "set": lambda items, _: set(items),
    "frozenset": lambda items, _: frozenset(items),
    "deque": lambda items, about: deque(items, about["maxlen"]),
    "namedtuple": lambda items, about: _named_tuple(about["class"], items),
}


def _placed(kind: str, tensor: torch.Tensor, encoded: dict[str, Any]) -> Any:
    grad = encoded.get("grad", False)
    if kind == "array":
        return _array_of(tensor, encoded["dtype"], encoded["shape"], encoded["order"])
    if kind == "parameter":
        return torch.nn.Parameter(tensor, requires_grad=grad)
    return tensor.detach().requires_grad_() if grad else tensor


def _named_tuple(name: str, items: list[Any]) -> Any:
    kind = _found_class(name, is_named_tuple, "named tuple")
    if len(items) != len(kind._fields):
        raise Unreadable(
            f"the state holds a named tuple {name} of {len(items)} fields, and that class has "
            f"{len(kind._fields)} here: {', '.join(kind._fields)}"
        )
    # Not by the class's own call, which may be anything.
    return tuple.__new__(kind, items)


def _found_member(name: str, what: str, payload: Any) -> Any:
    kind = _found_class(name, lambda found: issubclass(found, enum.Enum), "enum")
    if what == "flags":
        return kind(payload)
    if payload not in kind.__members__:
        raise Unreadable(f"the state holds {payload} of the enum {name}, which has no such member")
    return kind.__members__[payload]


def _found_class(name: str, is_kind: Callable[[type], bool], what: str) -> Any:
    found = _class_named(name)
    if found is None or not is_kind(found):
        raise Unreadable(
            f"the state holds a {what} {name!r}, and this program has imported no such class: "
            f"import the module {name.partition(':')[0]} before the state is read"
        )
    return found


def _class_named(name: str) -> type | None:
    """The class that a module which is imported has under this name; None if there is none.

    Nothing is imported, and nothing of the program run: a checkpoint may name any class.
    """
    module, _, path = name.partition(":")
    found: object = sys.modules.get(module)
    for part in path.split("."):
        # Not getattr: a module's own may import, and a class's may run anything.
        found = getattr(found, "__dict__", {}).get(part)
    return found if isinstance(found, type) else None


# -- NumPy -----------------------------------------------------------------------------------------

_ELEMENTS = "biufcmMSU"
"""Of dtypes whose name says all: no objects, no records."""


def _check_elements(way: Way, value: Any) -> None:
    plain = (sys.modules["numpy"].ndarray, value.dtype.type)
    if value.dtype.kind not in _ELEMENTS or type(value) not in plain:
        raise CheckpointError(
            f"{spoken(way)} is a numpy.{type(value).__qualname__} of {value.dtype}, which has no "
            "plain elements"
        )


def _order_of(array: Any) -> str:
    """How its elements lie in memory: `F`, the first index fastest, or `C`, the last."""
    return "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"


def _bytes_of(array: Any) -> torch.Tensor:
    """Its elements as bytes, in the order of `_order_of`; not copied if they lie so."""
    numpy = sys.modules["numpy"]
    flat = numpy.ascontiguousarray(array.reshape(-1, order=_order_of(array)))
    if not flat.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    flat = flat.view(numpy.uint8)
    # torch takes no memory that cannot be written to.
    return torch.frombuffer(flat if flat.flags.writeable else flat.copy(), dtype=torch.uint8)


def _array_of(elements: torch.Tensor, dtype: str, shape: list[int], order: str) -> Any:
    """The array, in memory of its own."""
    memory = bytearray(elements.nbytes)
    if memory:
        torch.frombuffer(memory, dtype=torch.uint8).copy_(elements.reshape(-1).view(torch.uint8))
    return _numpy().ndarray(shape, _numpy_dtype(dtype), memory, order=order)


def _number_of(data: bytes, dtype: str) -> Any:
    kind = _numpy_dtype(dtype)
    return _numpy().frombuffer(data, kind)[0] if kind.itemsize else kind.type()


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
