"""A state's tree as the head of its pack tells it: names, containers, shapes and dtypes, and plain
values. No tensor is read, and torch is not needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from ..errors import CheckpointCorrupt
from .pack_head import Head

_MAPPINGS = {
    "dict": "dict",
    "ordered": "OrderedDict",
    "counter": "Counter",
    "defaultdict": "defaultdict",
}
_SEQUENCES = ("tuple", "set", "frozenset", "deque", "namedtuple")
_ENTRY = re.compile(r"(BF|F|I|U|C)([0-9]+)(?:_(E[0-9]M[0-9]))?")
_WORDS = {"BF": "bfloat", "F": "float", "I": "int", "U": "uint", "C": "complex"}


@attrs.frozen
class Row:
    """One part of a state.

    path: the keys and places that lead to it, from the top. kind: `tensor`, `array`, `value`, or
    the container's type. dtype, shape: of a tensor or array. about: what else there is to say: a
    plain value, how many parts a container has, over how many files a tensor is sharded.
    """

    path: tuple[str, ...]
    kind: str
    about: str = ""
    dtype: str = ""
    shape: tuple[int, ...] | None = None


def rows_of(heads: Sequence[Head]) -> list[Row]:
    """What is in a checkpoint, in its own order, each container before its parts.

    Args:
        heads: of all its packs; of a sharded state those of all ranks, in their order.

    Raises:
        CheckpointCorrupt: it is not what a state's outline looks like.
    """
    try:
        return list(_Outline(heads).rows())
    except (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointCorrupt(f"the state's outline cannot be read: {error!r:.200}") from error


class _Outline:
    def __init__(self, heads: Sequence[Head]) -> None:
        self._head, self._sharded = heads[0], "chunks" in heads[0].outline["meta"]
        self._chunks: dict[str, list[Sequence[Any]]] = {}
        for head in heads if self._sharded else ():
            for row in head.outline["meta"]["chunks"]:
                self._chunks.setdefault(row[0], []).append(row)

    def rows(self) -> Iterator[Row]:
        tree = self._head.outline["tree"]
        if not self._sharded:
            return self._walk(tree, (), ())
        whole = dict(tree["dict"])["whole"]
        return self._walk(dict(whole["dict"])["state"], (), ())

    def _walk(self, encoded: Any, path: tuple[str, ...], keys: tuple[Any, ...]) -> Iterator[Row]:
        chunks = self._chunks.get(repr(keys))
        if chunks:
            parts = len(chunks)
            about = f"sharded in {parts} pieces" if parts > 1 else "sharded in 1 piece"
            yield Row(path, "tensor", about, str(chunks[0][1]), tuple(chunks[0][2]))
            return
        kind = next(iter(encoded)) if isinstance(encoded, dict) else type(encoded).__name__
        parts_of: list[tuple[Any, Any]]
        if kind in _MAPPINGS:
            parts_of = [(_plain(key), item) for key, item in encoded[kind]]
        elif kind in _SEQUENCES:
            parts_of = list(enumerate(encoded[kind]))
        elif kind == "list":
            parts_of = list(enumerate(encoded))
        else:
            yield self._leaf(encoded, kind, path)
            return
        yield Row(path, _MAPPINGS.get(kind, kind), f"{len(parts_of)}")
        for key, item in parts_of:
            yield from self._walk(item, (*path, str(key)), (*keys, key))

    def _leaf(self, encoded: Any, kind: str, path: tuple[str, ...]) -> Row:
        if kind in ("tensor", "parameter"):
            dtype, shape = self._tensor(encoded[kind])
            return Row(path, "tensor", "", dtype, shape)
        if kind == "array":
            return Row(path, "array", "", encoded["dtype"], tuple(encoded["shape"]))
        return Row(path, "value", _spoken(encoded, kind))

    def _tensor(self, number: int) -> tuple[str, tuple[int, ...]]:
        row = self._head.outline["tensors"][number]
        if isinstance(row, int):
            entry = self._head.entries[row]
            return _dtype(entry.dtype), entry.shape
        return str(row[0]), tuple(row[1])


def _dtype(name: str) -> str:
    """What torch calls a dtype of safetensors."""
    found = _ENTRY.fullmatch(name)
    if not found:
        return name.lower()
    ending = {"E4M3": "_e4m3fn", "E5M2": "_e5m2"}.get(found[3], "")
    return f"{_WORDS[found[1]]}{found[2]}{ending}"


def _plain(key: Any) -> Any:
    """A key, as far as it is plain."""
    if isinstance(key, dict) and next(iter(key)) == "tuple":
        return tuple(_plain(item) for item in key["tuple"])
    return key if not isinstance(key, dict) else _spoken(key, next(iter(key)))


def _spoken(encoded: Any, kind: str) -> str:
    """A plain value, in few words."""
    if not isinstance(encoded, dict):
        return f"{encoded!r:.60}"
    if kind in ("bytes", "bytearray", "number"):
        return kind if kind != "number" else f"a number of {encoded['dtype']}"
    if kind in ("enum", "flags"):
        return f"{encoded['class']} {encoded[kind]}"[:60]
    return f"{kind} {encoded[kind]}"[:60]
