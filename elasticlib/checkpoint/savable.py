"""Which states can be saved: those that `torch.load(weights_only=True)` is known to read back.

A state is checked before a byte is written, since one that cannot be read is found out too late.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import attrs
import torch

MAX_DEPTH = 100
"""Levels of nesting; the pickler's own limit is the interpreter's recursion limit."""

MAX_INT_BITS = 2032
"""The unpickler knows no longer integers."""

_PLAIN = {type(None), bool, float, complex, str, torch.Size, torch.dtype, torch.device}
_TENSORS = {torch.Tensor, torch.nn.Parameter}
_CONTAINERS = {dict, OrderedDict, list, tuple, set}


@attrs.frozen
class _Finding:
    where: str
    what: str


def why_unsavable(state: object) -> str | None:
    """A sentence that names the first object in `state` that cannot be saved; None if all can.

    A class that merely derives from one that can be saved (a numpy number, a named tuple, a
    default dict, a tensor subclass) cannot.
    """
    finding = _find(state, (), set())
    return f"state{finding.where} {finding.what}" if finding else None


def _find(value: object, above: tuple[int, ...], done: set[int]) -> _Finding | None:
    kind = type(value)
    if kind in _PLAIN or id(value) in done:
        return None
    if kind not in _CONTAINERS | _TENSORS:
        return _leaf(value)
    if id(value) in above:
        return _Finding("", "contains itself")
    if len(above) >= MAX_DEPTH:
        return _Finding("", f"is nested deeper than {MAX_DEPTH} levels")
    for step, part in _parts(value):
        finding = _find(part, (*above, id(value)), done)
        if finding:
            return _Finding(step + finding.where, finding.what)
    done.add(id(value))
    return None


def _leaf(value: object) -> _Finding | None:
    if type(value) is int:
        long = value.bit_length() > MAX_INT_BITS
        return _Finding("", f"is an integer of more than {MAX_INT_BITS} bits") if long else None
    if type(value) is bytes:
        return None if value else _Finding("", "is an empty bytes object")
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return _Finding("", f"is a {kind}, which torch.load(weights_only=True) does not read")


def _parts(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield f".key({key!r})", key
            yield f"[{key!r}]", item
    elif isinstance(value, list | tuple):
        for at, item in enumerate(value):
            yield f"[{at}]", item
    elif isinstance(value, set):
        for item in value:
            yield ".member", item
    # Attributes set on a tensor or on a module's state dict are pickled with it.
    for name, attribute in getattr(value, "__dict__", {}).items():
        yield f".{name}", attribute
