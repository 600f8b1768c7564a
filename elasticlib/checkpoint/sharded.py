"""Sharded state: each rank's part of it as a pack, and how to read it at any other world size.

One form on a disk, in memory and on the wire: a part says in its head which boxes of which tensors
it holds (see `cover`), as the planners of torch's distributed checkpoints (DCP) cut them. So nobody
collects the plans of all ranks, and nothing is pickled.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import torch
from torch.serialization import location_tag

from ..errors import CheckpointCorrupt, CheckpointError, StateMismatch
from .cover import Box, Chunk, Share, chunks_of, lacking, shares, tensors_of
from .pack import Layout, lay_out, unpack
from .pack_head import read_meta
from .state import (
    Form,
    MapLocation,
    Way,
    changed,
    dtype_named,
    is_sharded_kind,
    local_of,
    moved,
    name_of,
    put_shards,
    spoken,
    take_shards,
    values_of,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

Shards: TypeAlias = "Mapping[Way, DTensor]"


def lay_out_part(step: int, plain: object, shards: Shards, *, whole: bool, copies: bool) -> Layout:
    """This rank's part of a state: its shards, and what is not sharded.

    Args:
        plain, shards: as `state.take_shards` has them.
        whole: whether what is not sharded is in it: on a disk in the first rank's alone, in memory
            in each, as any of them may be lost.
        copies: whether shards are in it that several ranks hold alike, also if this rank is not
            the first of these.

    Raises:
        CheckpointError: something in it cannot be saved.
    """
    boxes = {way: box for way, box in boxes_of(shards).items() if copies or _is_first(shards[way])}
    ways = [*boxes]
    chunks = [_chunk(way, shards[way], box).row() for way, box in boxes.items()]
    tensors = [local_of(shards[way]) for way in ways]
    rest = {"state": plain, "ways": list(shards)} if whole else None
    meta = {"step": step, "chunks": chunks, "whole": whole}

    def in_the_state(way: Way) -> Way:
        return ways[way[1]] if way[0] == "shards" else way[2:]

    return lay_out({"whole": rest, "shards": tensors}, meta, shown_as=in_the_state)


def _chunk(way: Way, shard: DTensor, box: Box) -> Chunk:
    device = location_tag(local_of(shard).untyped_storage())
    form = (tuple(shard.shape), box, tuple(shard.stride()))
    return Chunk(repr(way), name_of(shard.dtype), *form, device, _mesh_sum(shard.device_mesh))


@functools.cache
def _mesh_sum(mesh: DeviceMesh) -> int:
    return zlib.crc32(repr(sorted(mesh.mesh.flatten().tolist())).encode())


_Key = tuple[Any, ...]
_boxes: dict[_Key, Box | None] = {}
"""By what they follow from: snapshots ask for the same ones after each step, which must not wait.
None of a tensor in whose mesh this rank is not."""
_MOST_BOXES = 100_000


def boxes_of(shards: Shards) -> dict[Way, Box]:
    """What this rank has of each tensor, as DCP's planner cuts it; but for tensors in whose mesh it
    has no place.

    Raises:
        CheckpointError: a tensor is a partial sum, which is nobody's state.
    """
    if any(placement.is_partial() for one in shards.values() for placement in one.placements):
        raise CheckpointError(
            "state has a sharded tensor of partial sums: reduce it before it is saved"
        )
    keys = {}
    for way, shard in shards.items():
        mesh = shard.device_mesh
        keys[way] = (shard.shape, shard.placements, mesh, tuple(mesh.get_coordinate() or ()))
    if len(_boxes) > _MOST_BOXES:
        _boxes.clear()
    _boxes.update(_planned({key: shards[way] for way, key in keys.items() if key not in _boxes}))
    return {way: box for way, key in keys.items() if (box := _boxes[key]) is not None}


def _planned(shards: Mapping[_Key, DTensor]) -> dict[_Key, Box | None]:
    if not shards:
        return {}
    # Most of a second to import, and most states are not sharded.
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    keys = {str(at): key for at, key in enumerate(shards)}
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner({name: shards[key].detach() for name, key in keys.items()})
    found: dict[_Key, Box | None] = dict.fromkeys(shards)
    for item in planner.create_local_plan().items:
        if item.tensor_data is not None:
            chunk = item.tensor_data.chunk
            found[keys[item.index.fqn]] = (tuple(chunk.offsets), tuple(chunk.sizes))
    return found


def _is_first(shard: DTensor) -> bool:
    """Whether this rank is the first of those that hold the same elements."""
    place = shard.device_mesh.get_coordinate() or ()
    copies = zip(place, shard.placements, strict=True)
    return not any(at for at, placement in copies if placement.is_replicate())


@attrs.frozen(eq=False)
class Target:
    """Where elements of a tensor go: the box of it that this rank has, and the memory of that."""

    box: Box
    memory: torch.Tensor


def targets_in(shards: Shards) -> dict[str, Target]:
    """The targets that a state's sharded tensors are, by the tensors' names in parts."""
    boxes = boxes_of(shards)
    return {repr(way): Target(box, local_of(shards[way])) for way, box in boxes.items()}


def load_parts(
    heads: Sequence[bytes],
    read: Callable[[int], memoryview],
    like: object = None,
    *,
    map_location: MapLocation,
) -> Any:
    """The state in the parts of one checkpoint, whatever the number of ranks was that saved it.

    Args:
        heads: the first bytes of each part, its outline at least. read: gives one whole, checked.
        like: a state whose sharded tensors say how those of the result are to be sharded, on
            this many ranks; with None, each is put together whole. Nothing in it is changed.
        map_location: where tensors go that are not sharded, and with no `like` all.

    Raises:
        StateMismatch: `like` has other sharded tensors than the checkpoint.
        CheckpointCorrupt: a part is damaged.
    """
    chunks = {part: chunks_of(read_meta(head)) for part, head in enumerate(heads)}
    lacks = lacking(chunks, len(heads))
    if lacks:
        raise CheckpointCorrupt(f"it {lacks}")
    whole = whole_in(read(0), map_location=map_location)
    saved = saved_tensors(whole["ways"], chunks)
    found: dict[Way, torch.Tensor]
    if like is None:
        found = {way: _memory_for(tensor) for way, tensor in saved.items()}
        boxes = {way: ((0,) * tensor.dim(), tuple(tensor.shape)) for way, tensor in found.items()}
        into = {repr(way): Target(box, found[way]) for way, box in boxes.items()}
    else:
        live = matched(saved, take_shards(values_of(like))[1], parameters_in(like))
        fresh: dict[Way, Any] = {}
        for way, shard in live.items():
            fresh[way] = torch.empty_like(shard.detach())
        found, into = fresh, targets_in(fresh)
    needs = {name: target.box for name, target in into.items()}
    copy_shares(shares(needs, chunks, dict.fromkeys(chunks, (0,)), 0, -1), chunks, read, into)
    if like is None:
        for way, tensor in found.items():
            found[way] = moved(tensor, saved[way].device, map_location)
    return put_shards(whole["state"], found)


def whole_in(pack: memoryview, *, map_location: MapLocation = "cpu", copy: bool = True) -> Any:
    """What is not sharded, in a part that says that it has it."""
    whole = unpack(pack, map_location=map_location, copy=copy)["whole"]
    if not isinstance(whole, dict) or whole.keys() != {"state", "ways"}:
        raise CheckpointCorrupt("a part says that it has what is not sharded, and has not")
    return whole


def _memory_for(chunk: Chunk) -> torch.Tensor:
    """Memory for all of a tensor, with its strides if these leave no gaps."""
    form = Form(dtype_named(chunk.dtype), chunk.shape, chunk.stride)
    if len(chunk.stride) == len(chunk.shape) and form.is_dense:
        return torch.empty_strided(form.shape, form.stride, dtype=form.dtype)
    return torch.empty(form.shape, dtype=form.dtype)


def saved_tensors(ways: Sequence[Way], parts: Mapping[int, Sequence[Chunk]]) -> dict[Way, Chunk]:
    """What one part or another says of each sharded tensor that was saved."""
    tensors = {name: rows[0][2] for name, rows in tensors_of(parts).items()}
    for way in ways:
        if repr(way) not in tensors:
            raise CheckpointCorrupt(f"{spoken(way)} is in none of its parts")
    return {way: tensors[repr(way)] for way in ways}


def parameters_in(state: object) -> dict[Way, Sequence[torch.Tensor]]:
    """The parameters of each optimizer in a state, by its way: in the order in which its state
    numbers them."""
    found: dict[Way, Sequence[torch.Tensor]] = {}

    def look(way: Way, value: object) -> object:
        if isinstance(value, torch.optim.Optimizer):
            found[way] = [one for group in value.param_groups for one in group["params"]]
        return value

    changed(state, look)
    return found


def matched(
    saved: Mapping[Way, Chunk], shards: Shards, parameters: Mapping[Way, Sequence[torch.Tensor]]
) -> dict[Way, DTensor]:
    """The sharded tensors that those which were saved are for.

    Most optimizers make their state at the first step, like the parameter that it is of. So in one
    that has taken none, a saved tensor of a parameter's size is sharded as that parameter is, and
    nobody takes a step for it: even with gradients and a rate of zero that would change some
    parameters (a negative zero, say). An optimizer's are those that were saved of it, whatever it
    has now: it takes a state whole.

    Args:
        shards: those that there are. parameters: see `parameters_in`.

    Raises:
        StateMismatch: some are on one side alone, or have another shape.
    """
    found: dict[Way, DTensor] = {}
    for way, tensor in saved.items():
        shard: Any
        shard, parameter = shards.get(way), _parameter_of(way, parameters)
        if shard is None and is_sharded_kind(parameter) and parameter.shape == tensor.shape:
            shard = torch.empty_like(parameter.detach(), dtype=dtype_named(tensor.dtype))
        if shard is None:
            raise _on_one_side(way, "the checkpoint")
        if shard.shape != tensor.shape:
            raise StateMismatch(
                f"{spoken(way)} has the shape {list(tensor.shape)} in the checkpoint, "
                f"and {list(shard.shape)} in the given state"
            )
        found[way] = shard
    for way in shards:
        if way not in saved and _parameter_of(way, parameters) is None:
            raise _on_one_side(way, "the given state")
    return found


def _on_one_side(way: Way, side: str) -> StateMismatch:
    return StateMismatch(f"{spoken(way)} is a sharded tensor in {side} alone")


def _parameter_of(way: Way, parameters: Mapping[Way, Sequence[torch.Tensor]]) -> Any:
    """The parameter that a tensor with this way is an optimizer's state of; None if it is none."""
    for at in range(len(way) - 2):
        # As `torch.optim.Optimizer.state_dict` has them: state, the parameter's number, a name.
        known, (kind, number) = parameters.get(way[:at]), way[at : at + 2]
        if known is not None and kind == "state" and type(number) is int and number < len(known):
            return known[number]
    return None


def copy_shares(
    wanted: Iterable[Share],
    chunks: Mapping[int, Sequence[Chunk]],
    read: Callable[[int], memoryview],
    into: Mapping[str, Target],
) -> None:
    """Copy what is wanted of parts, one part after the other: there is one in memory at a time.

    Args:
        chunks: of each part. read: gives a part's pack. into: by the tensors' names.
    """
    by_part = attrgetter("part")
    for part, group in groupby(sorted(wanted, key=by_part), by_part):
        shards = unpack(read(part), copy=False)["shards"]
        for share in group:
            chunk = chunks[part][share.place]
            target = into[chunk.name]
            given = narrowed(shards[share.place], chunk.box, share.box)
            narrowed(target.memory, target.box, share.box).copy_(given)


def narrowed(tensor: torch.Tensor, has: Box, box: Box) -> torch.Tensor:
    """A box of the whole tensor, as a view of the memory that has another one."""
    for axis, (begin, size) in enumerate(zip(*box, strict=True)):
        tensor = tensor.narrow(axis, begin - has[0][axis], size)
    return tensor
