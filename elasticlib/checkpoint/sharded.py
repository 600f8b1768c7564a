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
from types import MappingProxyType
from typing import Any

import attrs
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.serialization import location_tag

from ..errors import CheckpointCorrupt, CheckpointError, StateMismatch
from .cover import Box, Chunk, Share, chunks_of, lacking, shares, tensors_of
from .pack import Layout, lay_out, read_meta, unpack
from .state import Way, put_shards, spoken, take_shards
from .storages import Form, MapLocation, dtype_named, moved, name_of

Shards = Mapping[Way, DTensor]
Parameters = Mapping[Way, Sequence[torch.Tensor]]
"""Of each optimizer in a state, by its way: in the order in which its state numbers them."""


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
    chunks: list[Any] = []
    tensors: list[torch.Tensor] = []
    ways: list[Way] = []
    for way, box in boxes_of(shards).items():
        shard = shards[way]
        if not (copies or _is_first(shard)):
            continue
        local = local_of(shard)
        device = location_tag(local.untyped_storage())
        form = (tuple(shard.shape), box, tuple(shard.stride()))
        mesh = _mesh_sum(shard.device_mesh)
        chunks.append(Chunk(repr(way), name_of(shard.dtype), *form, device, mesh).row())
        tensors.append(local)
        ways.append(way)
    rest = {"state": plain, "ways": list(shards)} if whole else None
    meta = {"step": step, "chunks": chunks, "whole": whole}

    def in_the_state(way: Way) -> Way:
        return ways[way[1]] if way[0] == "shards" else way[2:]

    return lay_out({"whole": rest, "shards": tensors}, meta, told=in_the_state)


def boxes_of(shards: Shards) -> dict[Way, Box]:
    """What this rank has of each tensor, but for those in whose mesh it has no place.

    Raises:
        CheckpointError: a tensor is a partial sum, which is nobody's state.
    """
    if any(placement.is_partial() for one in shards.values() for placement in one.placements):
        raise CheckpointError(
            "state has a sharded tensor of partial sums: reduce it before it is saved"
        )
    cuts = {way: _cut(shard) for way, shard in shards.items()}
    if len(_boxes) > _MOST_BOXES:
        _boxes.clear()
    _boxes.update(_planned({cut: shards[way] for way, cut in cuts.items() if cut not in _boxes}))
    boxes = {way: _boxes[cut] for way, cut in cuts.items()}
    return {way: box for way, box in boxes.items() if box is not None}


@functools.cache
def _mesh_sum(mesh: DeviceMesh) -> int:
    return zlib.crc32(repr(sorted(mesh.mesh.flatten().tolist())).encode())


_Cut = tuple[Any, ...]
_boxes: dict[_Cut, Box | None] = {}
"""As they were planned: snapshots ask for the same ones after each step, which must not wait."""
_MOST_BOXES = 100_000


def _cut(shard: DTensor) -> _Cut:
    """What its box follows from."""
    mesh = shard.device_mesh
    return shard.shape, shard.placements, mesh, tuple(mesh.get_coordinate() or ())


def _planned(shards: Mapping[_Cut, DTensor]) -> dict[_Cut, Box | None]:
    """The boxes that DCP's planner cuts. None for a tensor in whose mesh this rank is not."""
    if not shards:
        return {}
    names = {str(at): cut for at, cut in enumerate(shards)}
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner({name: shards[cut].detach() for name, cut in names.items()})
    found: dict[_Cut, Box | None] = dict.fromkeys(shards)
    for item in planner.create_local_plan().items:
        if item.tensor_data is not None:
            chunk = item.tensor_data.chunk
            found[names[item.index.fqn]] = (tuple(chunk.offsets), tuple(chunk.sizes))
    return found


def _is_first(shard: DTensor) -> bool:
    """Whether this rank is the first of those that hold the same elements."""
    place = shard.device_mesh.get_coordinate() or ()
    copies = zip(place, shard.placements, strict=True)
    return not any(at for at, placement in copies if placement.is_replicate())


@attrs.frozen
class Parts:
    """How the parts of one checkpoint are reached.

    count: how many there are. head: the first bytes of one, its outline at least. read: one
    whole, and checked.
    """

    count: int
    head: Callable[[int], memoryview | bytes]
    read: Callable[[int], memoryview]


def load_parts(
    parts: Parts,
    like: object = None,
    *,
    parameters: Parameters = MappingProxyType({}),
    map_location: MapLocation,
) -> Any:
    """The state, whatever the number of ranks was that saved it.

    Args:
        like: a state whose sharded tensors say how those of the result are to be sharded, on
            this many ranks; with None, each is put together whole. Nothing in it is changed.
        parameters: of the optimizers in it, which may have taken no step yet.
        map_location: where tensors go that are not sharded, and with no `like` all.

    Raises:
        StateMismatch: `like` has other sharded tensors than the checkpoint.
        CheckpointCorrupt: a part is damaged.
    """
    chunks = {at: chunks_of(read_meta(parts.head(at))) for at in range(parts.count)}
    lacks = lacking(chunks, parts.count)
    if lacks:
        raise CheckpointCorrupt(f"it {lacks}")
    whole = unpack(parts.read(0), map_location=map_location)["whole"]
    tensors = {name: rows[0][2] for name, rows in tensors_of(chunks).items()}
    ways: list[Way] = whole["ways"]
    found: dict[Way, torch.Tensor]
    if like is None:
        found = {way: _memory_for(tensors[repr(way)]) for way in ways}
        needs = {repr(way): ((0,) * t.dim(), tuple(t.shape)) for way, t in found.items()}
    else:
        live = targets_of(ways, tensors, take_shards(like)[1], parameters)
        found = {way: torch.empty_like(shard.detach()) for way, shard in live.items()}
        needs = {repr(way): box for way, box in boxes_of(live).items()}
    into = {repr(way): local_of(tensor) for way, tensor in found.items()}
    wanted = shares(needs, chunks, lambda _: (0,), 0, -1)
    for part, group in groupby(sorted(wanted, key=attrgetter("part")), attrgetter("part")):
        # One part in memory at a time; its tensors are views of it.
        copy_shares(group, chunks[part], parts.read(part), needs, into)
    if like is None:
        for way, tensor in found.items():
            found[way] = moved(tensor, tensors[repr(way)].device, map_location)
    return put_shards(whole["state"], found)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of what this rank has of it, to be written to."""
    with torch.no_grad():
        found: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return found.detach()


def _memory_for(chunk: Chunk) -> torch.Tensor:
    """Memory for all of a tensor, with its strides if these leave no gaps."""
    form = Form(dtype_named(chunk.dtype), chunk.shape, chunk.stride)
    if len(chunk.stride) == len(chunk.shape) and form.is_dense:
        return torch.empty_strided(form.shape, form.stride, dtype=form.dtype)
    return torch.empty(form.shape, dtype=form.dtype)


def targets_of(
    ways: Iterable[Way], tensors: Mapping[str, Chunk], shards: Shards, parameters: Parameters
) -> dict[Way, DTensor]:
    """The sharded tensors that those which were saved are for: those there are, and new ones where
    an optimizer has taken no step yet.

    Args:
        ways, tensors: those that were saved, and what one part or another says of each.
        shards: those that there are.

    Raises:
        StateMismatch: some are on one side alone, or have another shape.
        CheckpointCorrupt: no part has one of those that were saved.
    """
    known = {}
    for way in ways:
        if repr(way) not in tensors:
            raise CheckpointCorrupt(f"{spoken(way)} is in none of its parts")
        known[way] = tensors[repr(way)]
    sizes = {way: (torch.Size(t.shape), dtype_named(t.dtype)) for way, t in known.items()}
    found = _with_states(shards, sizes, parameters)
    for missing, side in ((known, found), (found, known)):
        for way in missing:
            if way not in side:
                has = "the checkpoint" if side is found else "the given state"
                raise StateMismatch(f"{spoken(way)} is a sharded tensor in {has} alone")
    for way, shard in found.items():
        if known[way].shape != shard.shape:
            raise StateMismatch(
                f"{spoken(way)} has the shape {list(known[way].shape)} in the checkpoint, "
                f"and {list(shard.shape)} in the given state"
            )
    return found


def _with_states(
    shards: Mapping[Way, Any],
    saved: Mapping[Way, tuple[torch.Size, torch.dtype]],
    parameters: Parameters,
) -> dict[Way, Any]:
    """The sharded tensors that say how those that were `saved` are to be sharded.

    Most optimizers make their state at the first step, like the parameter that it is of. So in one
    that has taken none, a saved tensor of a parameter's size is sharded as that parameter is, and
    nobody takes a step for it: even with gradients and a rate of zero that would change some
    parameters (a negative zero, say).

    An optimizer's are those that were saved of it, whatever it has now: it takes a state whole.

    Args:
        shards: those that there are now. saved: size and dtype of those that were saved.
    """
    found = {
        way: shard
        for way, shard in shards.items()
        if way in saved or _parameter_of(way, parameters) is None
    }
    for way, (size, dtype) in saved.items():
        parameter = _parameter_of(way, parameters)
        if way not in found and isinstance(parameter, DTensor) and parameter.shape == size:
            found[way] = torch.empty_like(parameter.detach(), dtype=dtype)
    return found


def _parameter_of(way: Way, parameters: Parameters) -> Any:
    """The parameter that a tensor with this way is an optimizer's state of; None if it is none."""
    for at in range(len(way) - 2):
        # As `torch.optim.Optimizer.state_dict` has them: state, the parameter's number, a name.
        known, (kind, number) = parameters.get(way[:at]), way[at : at + 2]
        if known is not None and kind == "state" and type(number) is int and number < len(known):
            return known[number]
    return None


def copy_shares(
    wanted: Iterable[Share],
    chunks: Sequence[Chunk],
    part: memoryview,
    needs: Mapping[str, Box],
    into: Mapping[str, torch.Tensor],
) -> None:
    """Copy what is wanted of a part.

    Args:
        chunks: in that part. needs: the boxes whose memory `into` has.
    """
    shards = unpack(part, copy=False)["shards"]
    for share in wanted:
        chunk = chunks[share.place]
        target = narrowed(into[chunk.name], needs[chunk.name], share.box)
        target.copy_(narrowed(shards[share.place], chunk.box, share.box))


def narrowed(tensor: torch.Tensor, has: Box, box: Box) -> torch.Tensor:
    """A box of the whole tensor, as a view of the memory that has another one."""
    for axis, (begin, size) in enumerate(zip(*box, strict=True)):
        tensor = tensor.narrow(axis, begin - has[0][axis], size)
    return tensor
