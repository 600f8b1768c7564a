"""Sharded tensors as plain ones with a note of how they were cut up, and back again.

A pack holds plain tensors alone, so of a DTensor it holds what this rank has of it. The note is
what makes sure that it only ever goes back to the same place of the same cut.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import CheckpointError, StateMismatch
from .containers import Way, changed, inside, is_stateful

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
    cut = False

    def change(_way: Way, value: Any) -> Any:
        nonlocal cut
        if is_stateful(value):
            return changed(value.state_dict(), change)
        if is_sharded_kind(value):
            cut = cut or not all(place.is_replicate() for place in value.placements)
            return _noted(value)
        return value

    return changed(state, change), cut


def check_cuts(value: object, cuts: Mapping[str, torch.Tensor]) -> None:
    """Whether `rebuild` can rebuild `value`.

    Raises:
        StateMismatch: the state has no DTensor that is cut up like one of `value`, or this rank
            has another place in it now.
    """
    for note in (found[_NOTE] for found in inside(value) if is_noted(found)):
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

    def change(_way: Way, part: Any) -> Any:
        if not is_noted(part):
            return part
        note, like = part[_NOTE], cuts[part[_NOTE]["cut"]]
        tensor: Any = like
        return type(tensor).from_local(
            part["local"].to(like.device),
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=torch.Size(note["shape"]),
            stride=tuple(note["stride"]),
        )

    return changed(value, change)


def cuts_of(state: object) -> dict[str, torch.Tensor]:
    """For each way in which a DTensor of `state` is cut up, one that is."""
    found = (part for part in inside(state) if is_sharded_kind(part))
    return {cut_of(part): part for part in found}


def has_notes(value: object) -> bool:
    """Whether `rebuild` would change anything in `value`."""
    return any(map(is_noted, inside(value)))


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


def is_sharded_kind(value: object) -> bool:
    """Whether `value` is a DTensor. Where nobody imported that class, which costs most of a
    second, there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


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
