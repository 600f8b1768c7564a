"""NumPy's arrays and numbers as bytes and back, where there is a NumPy; nothing here needs one.

Who has not imported it has no arrays to save, and it is imported when a state is read that has.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

from .interface import Unreadable

_KINDS = "biufcmMSU"
"""Of dtypes whose name says all: no objects, no records."""


def is_array(value: object) -> bool:
    """Whether it is a plain array."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray


def is_number(value: object) -> bool:
    """Whether it is a scalar of NumPy's: a number, a date, a text."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def why_not(value: Any) -> str:
    """Why an array or number cannot be saved, as the end of a sentence; empty if it can."""
    if value.dtype.kind in _KINDS and type(value) in (
        sys.modules["numpy"].ndarray,
        value.dtype.type,
    ):
        return ""
    return f"is a numpy.{type(value).__qualname__} of {value.dtype}, which has no plain elements"


def shape_of(array: Any) -> str:
    """In words, what an array must have in common with another to be copied into it."""
    return f"a NumPy array of {array.shape} {array.dtype}"


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
        flat = elements.reshape(-1).view(torch.uint8)
        torch.frombuffer(memory, dtype=torch.uint8).copy_(flat)
    numpy = _numpy()
    kind = _dtype(dtype)
    if not memory:
        return numpy.empty(shape, kind, order)
    return numpy.ndarray(shape, kind, memory, order=order)


def number_of(data: bytes, dtype: str) -> Any:
    """The scalar with these bytes."""
    kind = _dtype(dtype)
    return _numpy().frombuffer(data, kind)[0] if kind.itemsize else kind.type()


def _dtype(name: str) -> Any:
    found = _numpy().dtype(name)
    if found.kind not in _KINDS:
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
