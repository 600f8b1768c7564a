"""Sharded tensors as plain ones with a note of how they were cut up, and back again.

A pack holds plain tensors alone, so of a DTensor it holds what this rank has of it. The note is
what makes sure that it only ever goes back to the same place of the same cut.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import CheckpointError, StateMismatch
from .state import Walk, Way, holder_of
from .state import is_sharded_kind as is_sharded_kind

_NOTE = "elasticlib.DTensor"


def localize(state: object) -> tuple[Any, bool]:
    """What a pack can hold of `state`, and whether it is one rank's part of a whole.

    Args:
        state: nested containers; objects with `state_dict()` and `load_state_dict()` anywhere in
            them are asked for theirs, and each DTensor (FSDP2's parameters are such) is replaced
            by this rank's local tensor and a note. Nothing is copied.

    Returns:
        The state in that form, and True if any DTensor in it is cut up over ranks: then it is
        part `rank` of `world size`. If all are whole on each rank it is False.

    Raises:
        CheckpointError: a DTensor is a partial sum, which is nobody's state.
    """
    localizing = _Localizing()
    return localizing.walk(state), localizing.cut


class _Localizing(Walk):
    cut = False

    def leaf(self, way: Way, value: Any) -> Any:
        if is_sharded_kind(value):
            self.cut = self.cut or not all(place.is_replicate() for place in value.placements)
            return _noted(value)
        holder = None if isinstance(value, torch.Tensor) else holder_of(value)
        return value if holder is None else self.walk(holder.give(), way)


class _Looking(Walk):
    """All that a state holds; of objects with a state, what they give as theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def leaf(self, way: Way, value: Any) -> Any:
        holder = None if isinstance(value, torch.Tensor) else holder_of(value)
        self.found.append(value)
        if holder is not None:
            self.walk(holder.give(), way)
        return value

    def node(self, way: Way, value: Any, parts: Mapping[Any, Any]) -> Any:
        del way, parts
        self.found.append(value)
        return value


def _inside(value: object) -> list[Any]:
    looking = _Looking()
    looking.walk(value)
    return looking.found


def check_cuts(value: object, cuts: Mapping[str, torch.Tensor]) -> None:
    """Whether `rebuild` can rebuild `value`.

    Raises:
        StateMismatch: the state has no DTensor that is cut up like one of `value`, or this rank
            has another place in it now.
    """
    for note in (found[_NOTE] for found in _inside(value) if is_noted(found)):
        like = cuts.get(note["cut"])
        if like is None:
            raise StateMismatch(f"it holds a tensor cut up as {note['cut']}; now none is")
        if note["at"] != _place(like):
            raise StateMismatch(
                f"it holds place {note['at']} of {note['cut']}, and this is {_place(like)}"
            )


def rebuild(value: Any, cuts: Mapping[str, torch.Tensor]) -> Any:
    """`value` with its notes made DTensors again, on the local tensors that stand beside them.

    Args:
        value: what `localize` gave, and a pack kept; it passes `check_cuts`.
        cuts: `cuts_of` the state that it goes back into.
    """

    return _Rebuilding(cuts).walk(value)


class _Rebuilding(Walk):
    def __init__(self, cuts: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._cuts = cuts

    def node(self, way: Way, value: Any, parts: Mapping[Any, Any]) -> Any:
        if not is_noted(value):
            return super().node(way, value, parts)
        note, like = value[_NOTE], self._cuts[value[_NOTE]["cut"]]
        tensor: Any = like
        return type(tensor).from_local(
            value["local"].to(like.device),
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=torch.Size(note["shape"]),
            stride=tuple(note["stride"]),
        )


def cuts_of(state: object) -> dict[str, torch.Tensor]:
    """For each way in which a DTensor of `state` is cut up, one that is."""
    found = (part for part in _inside(state) if is_sharded_kind(part))
    return {cut_of(part): part for part in found}


def has_notes(value: object) -> bool:
    """Whether `rebuild` would change anything in `value`."""
    return any(map(is_noted, _inside(value)))


def is_noted(value: object) -> bool:
    """Whether `value` stands for a DTensor."""
    return type(value) is dict and value.keys() == {_NOTE, "local"}


def local_of(value: Any) -> torch.Tensor:
    """What this rank has of a tensor: of a plain one all of it."""
    if is_noted(value):
        value = value["local"]
    found: torch.Tensor = value.to_local() if is_sharded_kind(value) else value
    return found


def shape_of(value: Any) -> str:
    """In words, what a tensor must have in common with another to be copied into it."""
    plain: object = local_of(value)
    if not isinstance(plain, torch.Tensor):
        return f"a {type(plain).__qualname__}"
    shape, cut = tuple(plain.shape), ""
    if is_noted(value):
        shape, cut = tuple(value[_NOTE]["shape"]), f" cut up as {value[_NOTE]['cut']}"
    elif is_sharded_kind(value):
        shape, cut = tuple(value.shape), f" cut up as {cut_of(value)}"
    return f"a tensor of {shape} {str(plain.dtype).removeprefix('torch.')}{cut}"


def _noted(tensor: Any) -> dict[str, Any]:
    if any(place.is_partial() for place in tensor.placements):
        raise CheckpointError(f"a DTensor is a partial sum ({cut_of(tensor)}): reduce it first")
    note = {
        "cut": cut_of(tensor),
        "at": _place(tensor),
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
    }
    return {_NOTE: note, "local": tensor.detach().to_local()}


def _place(tensor: Any) -> list[int]:
    return list(tensor.device_mesh.get_coordinate() or ())


def cut_of(tensor: Any) -> str:
    """How a DTensor is cut up, and over whom."""
    mesh = tensor.device_mesh
    ranks = mesh.mesh.tolist()
    listed = json.dumps(ranks)
    if len(listed) > 40:
        listed = f"{mesh.mesh.numel()} (CRC-32 {zlib.crc32(listed.encode()):08x})"
    names = "x".join(mesh.mesh_dim_names or ())
    places = ", ".join(map(repr, tensor.placements))
    return f"[{places}] over {names or 'a mesh'} of ranks {listed}"
