"""Sharded state: each rank's part of it as a pack, and how to read it at any other world size.

Which elements a rank has, and which parts hold those that another one needs, is what the planners
of torch's distributed checkpoints (DCP) say. A part says in its head what it holds, so nobody
collects the plans of all ranks, and nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor
from torch.serialization import location_tag

from ..errors import CheckpointError, StateMismatch
from .fresh import Parameters, with_states
from .pack import Layout, lay_out, read_meta, unpack
from .state import Way, put_shards, take_shards
from .storages import Form, MapLocation, dtype_named, moved


def lay_out_part(step: int, values: object, *, whole: bool, copies: bool) -> Layout:
    """This rank's part of a state: its shards, and what is not sharded.

    Args:
        whole: whether what is not sharded is in it: on a disk in the first rank's alone, in memory
            in each, as any of them may be lost.
        copies: whether shards are in it that several ranks hold alike, also if this rank is not
            the first of these.

    Raises:
        CheckpointError: something in it cannot be saved.
    """
    plain, shards = take_shards(values)
    named = {_name(way): shard for way, shard in shards.items()}
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner({name: shard.detach() for name, shard in named.items()})
    chunks, tensors = [], []
    for item in planner.create_local_plan().items:
        data, shard = item.tensor_data, named[item.index.fqn]
        if data is None or not (_is_first(shard) or copies):
            continue
        tensors.append(shard.detach().to_local())
        kind = str(shard.dtype).removeprefix("torch.")
        chunk = [list(data.chunk.offsets), list(data.chunk.sizes)]
        location = location_tag(tensors[-1].untyped_storage())
        about = [list(shard.stride()), location]
        chunks.append([item.index.fqn, kind, list(data.size), *chunk, *about])
    rest = {"state": plain, "ways": list(shards)} if whole else None
    return lay_out({"whole": rest, "shards": tensors}, {"step": step, "chunks": chunks})


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
    heads = [read_meta(parts.head(number))["chunks"] for number in range(parts.count)]
    whole = unpack(parts.read(0), map_location=map_location)["whole"]
    ways: list[Way] = whole["ways"]
    kept, homes = _chunks(heads)
    targets = _targets(kept, ways, heads, like, parameters)
    _fill(targets, kept, homes, parts)
    if like is None:
        locations = _each_tensors(heads, 6, "cpu")
        targets = {name: moved(t, locations[name], map_location) for name, t in targets.items()}
    return put_shards(whole["state"], {way: targets[_name(way)] for way in ways})


def _name(way: Way) -> str:
    return repr(way)


def _is_first(shard: DTensor) -> bool:
    """Whether this rank is the first of those that hold the same elements."""
    placements, place = shard.placements, shard.device_mesh.get_coordinate()
    if any(placement.is_partial() for placement in placements):
        raise CheckpointError(
            "state has a sharded tensor of partial sums: reduce it before it is saved"
        )
    if place is None:
        return False
    return not any(
        at for at, placement in zip(place, placements, strict=True) if placement.is_replicate()
    )


_Kept = dict[str, TensorStorageMetadata]
_Homes = dict[tuple[str, tuple[int, ...]], tuple[int, int]]
"""In which part the chunk of a name and offset is, and at which place among its tensors."""


def _chunks(heads: Iterable[list[Any]]) -> tuple[_Kept, _Homes]:
    found: _Kept = {}
    homes: _Homes = {}
    for part, rows in enumerate(heads):
        # What was added later (strides and devices) has no part in it.
        for at, (name, kind, size, offsets, sizes, *_) in enumerate(rows):
            known = found.setdefault(
                name,
                TensorStorageMetadata(
                    TensorProperties(dtype=dtype_named(kind)), torch.Size(size), []
                ),
            )
            known.chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            homes[name, tuple(offsets)] = (part, at)
    return found, homes


def _targets(
    kept: _Kept,
    ways: list[Way],
    heads: Sequence[list[Any]],
    like: object,
    parameters: Parameters,
) -> dict[str, torch.Tensor]:
    if like is None:
        strides = _each_tensors(heads, 5, ())
        return {
            name: _whole(one.properties.dtype, one.size, strides[name])
            for name, one in kept.items()
        }
    saved = {way: (kept[_name(way)].size, kept[_name(way)].properties.dtype) for way in ways}
    shards = with_states(take_shards(like)[1], saved, parameters)
    for missing, side in ((ways, shards), (list(shards), ways)):
        for way in missing:
            if way not in side:
                has = "the checkpoint" if side is shards else "the given state"
                raise StateMismatch(f"state{_spoken(way)} is a sharded tensor in {has} alone")
    for way, shard in shards.items():
        size = kept[_name(way)].size
        if size != shard.shape:
            raise StateMismatch(
                f"state{_spoken(way)} has the shape {list(size)} in the checkpoint, "
                f"and {list(shard.shape)} in the given state"
            )
    return {_name(way): torch.empty_like(shard.detach()) for way, shard in shards.items()}


def _each_tensors(heads: Sequence[list[Any]], column: int, default: Any) -> dict[str, Any]:
    """What the rows of chunks say of each whole tensor there; those of format 1 have fewer."""
    return {row[0]: row[column] if len(row) > column else default for rows in heads for row in rows}


def _whole(dtype: torch.dtype, size: torch.Size, stride: Sequence[int]) -> torch.Tensor:
    """Memory for all of a tensor, with its strides if these leave no gaps."""
    form = Form(dtype, tuple(size), tuple(stride))
    if len(stride) == len(size) and form.is_dense:
        return torch.empty_strided(form.shape, form.stride, dtype=dtype)
    return torch.empty(size, dtype=dtype)


def _spoken(way: Way) -> str:
    return "".join(f"[{key!r}]" for key in way)


def _fill(targets: Mapping[str, torch.Tensor], kept: _Kept, homes: _Homes, parts: Parts) -> None:
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    planner.set_up_planner(dict(targets), Metadata(dict(kept)), is_coordinator=True)
    wanted: dict[int, list[tuple[int, Any]]] = {}
    for item in planner.create_local_plan().items:
        index: MetadataIndex = item.storage_index
        part, at = homes[index.fqn, tuple(index.offset or ())]
        wanted.setdefault(part, []).append((at, item))
    for part, items in sorted(wanted.items()):
        # One part in memory at a time; its tensors are views of it.
        shards = unpack(parts.read(part), copy=False)["shards"]
        for at, item in items:
            source = shards[at]
            for axis, (start, size) in enumerate(
                zip(item.storage_offsets, item.lengths, strict=True)
            ):
                source = source.narrow(axis, start, size)
            target = planner.resolve_tensor(item).detach()
            target.copy_(source)
            planner.commit_tensor(item, target)
