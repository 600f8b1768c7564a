"""A nested state as JSON, with its tensors taken out and numbered.

Nothing is unpickled when it is read back, so a file cannot run code: less than even
`torch.load(weights_only=True)` lets in. Read back, equal things are equal, of the same types.
"""

from __future__ import annotations

import base64
import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from ..errors import CheckpointCorrupt, CheckpointError

MAX_DEPTH = 100
"""Levels of nesting; JSON's own limit is the interpreter's recursion limit."""

MAX_INT_BITS = 8192
"""Python reads no integers of many more digits from text."""

_PLAIN = (type(None), bool, float, str)
_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_SEQUENCES: dict[type, str] = {tuple: "tuple", set: "set", torch.Size: "size"}


class Encoder:
    """Takes tensors out of states, and gives each a number; one tensor has one number.

    tensors: those found so far, in the order of their numbers.
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[tuple[object, ...], int] = {}
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

    def _encode(self, value: object) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is int:
            return self._int(value)  # type: ignore[arg-type]
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if kind is list:
            return self._inside(value, lambda: self._all(value))  # type: ignore[arg-type]
        if kind in _MAPPINGS:
            return self._inside(value, lambda: self._mapping(value))  # type: ignore[arg-type]
        if kind in _SEQUENCES:
            items = self._inside(value, lambda: self._all(value))  # type: ignore[arg-type]
            return {_SEQUENCES[kind]: items}
        return _leaf(value)

    def _int(self, value: int) -> int:
        if value.bit_length() > MAX_INT_BITS:
            raise _Unsavable(f"is an integer of more than {MAX_INT_BITS} bits")
        return value

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
        return [self._at(f"[{at}]", item) for at, item in enumerate(items)]

    def _mapping(self, value: dict[object, object]) -> dict[str, Any]:
        items = [
            [self._at(f".key({key!r})", key), self._at(f"[{key!r}]", item)]
            for key, item in value.items()
        ]
        found: dict[str, Any] = {_MAPPINGS[type(value)]: items}
        # A module's state dict carries its parts' versions in an attribute.
        attributes = getattr(value, "__dict__", None)
        if attributes:
            found["attributes"] = {
                name: self._at(f".{name}", item) for name, item in attributes.items()
            }
        return found

    def _at(self, step: str, value: object) -> Any:
        try:
            return self._encode(value)
        except _Unsavable as found:
            found.where = step + found.where
            raise

    def _tensor(self, tensor: torch.Tensor) -> dict[str, Any]:
        reason = _why_unsavable(tensor)
        if reason:
            raise _Unsavable(reason)
        number = self._number(tensor)
        if type(tensor) is torch.nn.Parameter:
            return {"parameter": number, "grad": tensor.requires_grad}
        return {"tensor": number, "grad": True} if _is_wanted(tensor) else {"tensor": number}

    def _number(self, tensor: torch.Tensor) -> int:
        same = (tensor.data_ptr(), tensor.dtype, tensor.device, tensor.shape, tensor.stride())
        if tensor.numel() and same in self._numbers:
            return self._numbers[same]
        self._numbers[same] = len(self.tensors)
        self.tensors.append(tensor.detach())
        return self._numbers[same]


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


def _leaf(value: object) -> dict[str, Any]:
    if type(value) is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if type(value) is complex:
        return {"complex": [value.real, value.imag]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise _Unsavable(f"is a {kind}, which a checkpoint does not hold: save what it is made of")


def dumps(encoded: Any) -> bytes:
    """The bytes of what `Encoder.encode` gave, and plain JSON around it."""
    return json.dumps(encoded, separators=(",", ":")).encode("ascii")


def decode(encoded: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The state again, with these tensors in the places of their numbers.

    Raises:
        CheckpointCorrupt: it is not what an `Encoder` gave.
    """
    try:
        return _decode(encoded, tensors)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointCorrupt(f"the state's outline cannot be read: {error}") from error


def _decode(encoded: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(encoded, list):
        return [_decode(item, tensors) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    kind = next(iter(encoded))
    payload = encoded[kind]
    if kind in ("tensor", "parameter"):
        return _placed(kind, tensors[payload], grad=encoded.get("grad", False))
    if kind in _MAPPINGS.values():
        return _mapping(encoded, kind, tensors)
    if kind in _READ:
        return _READ[kind](_decode(payload, tensors))
    raise ValueError(f"there is no kind {kind!r}")


def _mapping(encoded: dict[str, Any], kind: str, tensors: Sequence[torch.Tensor]) -> Any:
    found = next(made for made, name in _MAPPINGS.items() if name == kind)()
    found.update(_pairs(encoded[kind], tensors))
    for name, item in encoded.get("attributes", {}).items():
        found.__dict__[name] = _decode(item, tensors)
    return found


def _pairs(items: Any, tensors: Sequence[torch.Tensor]) -> dict[Any, Any]:
    def each() -> Iterator[tuple[Any, Any]]:
        for key, item in items:
            yield _decode(key, tensors), _decode(item, tensors)

    return dict(each())


def _placed(kind: str, tensor: torch.Tensor, *, grad: bool) -> torch.Tensor:
    if kind == "parameter":
        return torch.nn.Parameter(tensor, requires_grad=grad)
    return tensor.requires_grad_() if grad else tensor


def dtype_named(name: str) -> torch.dtype:
    """The dtype that `str` calls torch.`name`. Raises ValueError."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return found


_READ: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "set": set,
    "size": torch.Size,
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "complex": lambda parts: complex(*parts),
    "dtype": dtype_named,
    "device": torch.device,
}
