"""Sharded states: the pack of each rank's part, and restoring on any other number of ranks.

A part has the same format on disk, in memory and between ranks. Its header lists the boxes of the
sharded tensors that the part contains (see `boxes`). A rank gets its own boxes from the local plan
of torch's distributed checkpoint (DCP). Because each header describes its own part, the plans of
all ranks need not be collected when a state is saved.

When a state is restored, each rank reads the boxes that it needs from the parts that it can reach,
and receives the others from their holders, each byte once, directly into the tensors of the state.
No rank has a second state in memory.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import (
    Callable,
    Container,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary

import attrs
import torch

from ..errors import CheckpointCorruptError, CheckpointError, StateMismatchError, require_not_none
from . import per_rank
from .boxes import (
    Box,
    BoxRead,
    Shards,
    TensorShard,
    describe_missing,
    different_tensors,
    format_ranks,
    has_rank,
    multi_mesh_tensors,
    plan_reads,
    read_shards,
    shards_by_tensor,
    split_box,
)
from .collectives import Transfer
from .object_checks import cast_remedy, is_castable
from .pack import LayoutCache, PackImage, PartContents, pack_state, unpack, unpack_part
from .pack import Shards as PackShards
from .restore_plan import has_all_names, plan_restore
from .safetensors_header import read_meta
from .state_search import RestoreAgreement, RestorePlan, StateSearch
from .state_tree import (
    FlatState,
    StatePath,
    extract_shards,
    format_path,
    insert_shards,
    is_dtensor,
    local_tensor,
    map_leaves,
    path_name,
    to_plain_values,
)
from .tensor_layout import (
    MapLocation,
    StridedLayout,
    device_tag,
    dtype_from_name,
    dtype_name,
    element_bytes,
    relocated,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


DTensors: TypeAlias = "Mapping[StatePath, DTensor]"
_SavedTensor: TypeAlias = Mapping[str, TensorShard]  # a shard of it on each mesh that has it
Parameters: TypeAlias = Mapping[StatePath, Sequence[torch.Tensor]]  # of optimizers, by path

TRANSFER_BYTES = 2 << 20  # maximum size of one transfer between ranks
_MAX_CACHED_BOXES = 10_000

# For each mesh: the boxes of DTensors by what else they depend on, and the ranks of the mesh.
# Snapshots need them after every step. A mesh refers to process groups, which a regroup replaces,
# so no cache keeps a mesh alive.
_local_boxes: WeakKeyDictionary[DeviceMesh, dict[tuple[Any, ...], Box | None]] = WeakKeyDictionary()
_ranks_of_meshes: WeakKeyDictionary[DeviceMesh, str] = WeakKeyDictionary()


# -- saving a part ---------------------------------------------------------------------------------


def plan_part_layout(
    layouts: LayoutCache, step: int, flat: FlatState, *, has_rest: bool, has_copies: bool
) -> PackImage:
    """Plan the pack of this rank's part of a sharded state.

    Args:
        layouts: the cache that has the layout of the last part.
        step: the step after which the state was taken.
        flat: the state.
        has_rest: include the values that are not sharded: on disk only on rank 0, in memory on
            every rank, because any rank may be lost. If none of this rank's meshes contains rank 0,
            these values are always included, because another stage of a pipeline has other ones.
        has_copies: include elements that other ranks have, too, even if this rank is not the first
            of the ranks that have them.

    Raises:
        CheckpointError: the state contains something that cannot be saved.
    """
    boxes = {path: _local_box(path, dtensor) for path, dtensor in flat.shards.items()}
    tensors: dict[StatePath, torch.Tensor] = {}
    rows: list[Any] = []
    for path, box in boxes.items():
        dtensor = flat.shards[path]
        if box is not None and (has_copies or not _copy_number(dtensor)):
            local = tensors[path] = local_tensor(dtensor)
            shard = TensorShard(
                name=path_name(path),
                dtype=dtype_name(dtensor.dtype),
                shape=tuple(dtensor.shape),
                box=box,
                stride=tuple(dtensor.stride()),
                device=device_tag(local),
                mesh=_mesh_ranks(dtensor.device_mesh),
            )
            rows.append(shard.to_row())
    meta: dict[str, Any] = {"step": step, "shards": rows}
    if flat.own is not None:
        # This is the last shard, so that `load_parts` can leave it out.
        tensors[per_rank.PATH], shard = per_rank.shard_of(flat.own)
        rows.append(shard.to_row())
        meta["own"] = flat.own.text
    has_rest = has_rest or has_own_rest(flat)
    meshes = {path: _partial_mesh(dtensor) for path, dtensor in flat.shards.items()}
    shards = PackShards(
        tensors,
        offsets=[row[3] for row in rows],
        meshes=[meshes.get(path, "") for path in tensors],
        paths=list(boxes),
        has_rest=has_rest,
        # Of a pipeline stage, what is not sharded belongs to the stage, too.
        rest_mesh=next(iter(meshes.values()), "") if all(meshes.values()) else "",
    )
    return layouts.plan(flat, meta, shards)


def has_own_rest(flat: FlatState) -> bool:
    """Return True if a rank saves all its values, because no mesh of its state contains rank 0.

    Another stage of a pipeline has other ones.
    """
    meshes = {dtensor.device_mesh for dtensor in flat.shards.values()}
    return bool(meshes) and not any(has_rank(_mesh_ranks(mesh), 0) for mesh in meshes)


def _local_box(path: StatePath, dtensor: DTensor) -> Box | None:
    """Return the box that this rank has of a tensor, or None if the rank is not in its mesh.

    Raises:
        CheckpointError: the tensor is a partial sum.
    """
    if any(placement.is_partial() for placement in dtensor.placements):
        raise CheckpointError(
            f"{format_path(path)} is a sharded tensor of partial sums: reduce it before it is saved"
        )
    mesh = dtensor.device_mesh
    boxes = _local_boxes.setdefault(mesh, {})
    key = (dtensor.shape, dtensor.placements, tuple(mesh.get_coordinate() or ()))
    if key not in boxes:
        if len(boxes) >= _MAX_CACHED_BOXES:
            boxes.clear()
        boxes[key] = _plan_local_box(dtensor)
    return boxes[key]


def _plan_local_box(dtensor: DTensor) -> Box | None:
    # Importing the planner takes most of a second, and most states are not sharded.
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner({"tensor": dtensor.detach()})
    for item in planner.create_local_plan().items:
        if item.tensor_data is not None:
            chunk = item.tensor_data.chunk
            return Box(tuple(chunk.offsets), tuple(chunk.sizes))
    return None


def copy_number(dtensors: Iterable[DTensor]) -> int:
    """Return the number of this rank among the ranks that have the same elements, from 0.

    It is 0 if this rank is the first one that has the elements of any of these tensors.
    """
    lowest = None
    for number in map(_copy_number, dtensors):
        lowest = number if lowest is None else min(lowest, number)
        if not lowest:
            break
    return lowest or 0


def _copy_number(dtensor: DTensor) -> int:
    """Return the number of this rank among the ranks that have the same elements of a tensor."""
    mesh, number = dtensor.device_mesh, 0
    rows = zip(mesh.get_coordinate() or (), mesh.shape, dtensor.placements, strict=False)
    for index, size, placement in rows:
        if placement.is_replicate():
            number = number * size + index
    return number


def _partial_mesh(dtensor: DTensor) -> str:
    """Return the ranks that share a tensor, or "" if all ranks of the job do."""
    mesh = dtensor.device_mesh
    return "" if mesh.size() == torch.distributed.get_world_size() else _mesh_ranks(mesh)


def _mesh_ranks(mesh: DeviceMesh) -> str:
    ranks = _ranks_of_meshes.get(mesh)
    if ranks is None:
        ranks = _ranks_of_meshes[mesh] = format_ranks(mesh.mesh.flatten().tolist())
    return ranks


# -- loading parts in one process ------------------------------------------------------------------


@attrs.frozen(eq=False)
class _Target:
    """The memory that shards of a tensor are copied into."""

    box: Box  # in indices of the whole tensor
    memory: torch.Tensor  # of this box


def load_parts(
    headers: Sequence[bytes],
    read: Callable[[int], memoryview],
    like: object = None,
    *,
    map_location: MapLocation,
) -> Any:
    """Load a sharded state that any number of ranks has saved.

    Args:
        headers: the first bytes of each part, which contain its header.
        read: returns the verified pack of a part, given the number of the part.
        like: a state whose sharded tensors define how those of the result are sharded. It is not
            changed. If None, the result has complete tensors.
        map_location: devices of the tensors that are not sharded in the result.

    Values that were saved by rank are lists in the result, with the values of all ranks.

    Raises:
        StateMismatchError: `like` has other sharded tensors than the checkpoint, or ranks may have
            saved different tensors.
        CheckpointCorruptError: a part is corrupt or incomplete.
    """
    metas = [read_meta(header) for header in headers]
    shards = {part: read_shards(meta) for part, meta in enumerate(metas)}
    if missing := describe_missing(shards, len(headers)):
        raise CheckpointCorruptError(f"it {missing}")
    own = [per_rank.decode_values(meta["own"]) for meta in metas if "own" in meta]
    shards = {part: [s for s in rows if s.name != per_rank.NAME] for part, rows in shards.items()}
    rest = unpack_part(read(0), map_location=map_location)
    if not rest.has_rest:
        raise CheckpointCorruptError("its first part lacks the values that are not sharded")
    saved = _saved_tensors(rest.paths, shards)
    _reject_ambiguous_tensors(saved, shards, read)
    tensors: dict[StatePath, Any]
    if like is None:
        tensors = {path: _allocate_full(_on_mesh(one)) for path, one in saved.items()}
        targets = {
            path_name(path): _Target(Box.full(tensor.shape), tensor)
            for path, tensor in tensors.items()
        }
    else:
        dtensors = extract_shards(to_plain_values(like))[1]
        matched = _match_dtensors(saved, dtensors, _optimizer_parameters(like))
        tensors = {
            path: torch.empty_like(dtensor.detach(), dtype=_saved_dtype(saved[path], dtensor))
            for path, dtensor in matched.items()
        }
        targets = _targets(tensors)
    needs = {name: target.box for name, target in targets.items()}
    reads = plan_reads(needs, shards, dict.fromkeys(shards, (0,)), rank=0, own_part=None)
    _copy_boxes(reads, shards, read, targets)
    if like is None:
        for path, tensor in tensors.items():
            tensors[path] = relocated(tensor, _on_mesh(saved[path]).device, map_location)
    state = insert_shards(rest.state, tensors)
    if own and isinstance(state, dict):
        state |= {name: [values[name] for values in own] for name in own[0]}
    return state


def _allocate_full(shard: TensorShard) -> torch.Tensor:
    """Allocate the whole tensor of a shard, with the saved strides if they are dense."""
    layout = StridedLayout(dtype_from_name(shard.dtype), shard.shape, shard.stride)
    if len(shard.stride) == len(shard.shape) and layout.is_dense:
        return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype)
    return torch.empty(layout.shape, dtype=layout.dtype)


def _saved_tensors(paths: Iterable[StatePath], shards: Shards) -> dict[StatePath, _SavedTensor]:
    """Return what describes the whole tensor at each path: a shard of each mesh that has it.

    Raises:
        CheckpointCorruptError: no part has a shard of one of the tensors.
    """
    tensors = shards_by_tensor(shards)
    saved: dict[StatePath, _SavedTensor] = {}
    for path in paths:
        if path_name(path) not in tensors:
            raise CheckpointCorruptError(f"{format_path(path)} is in none of its parts")
        by_mesh: dict[str, TensorShard] = {}
        for _, _, shard in tensors[path_name(path)]:
            by_mesh.setdefault(shard.mesh, shard)
        saved[path] = by_mesh
    return saved


def _on_mesh(saved: _SavedTensor, dtensor: DTensor | None = None) -> TensorShard:
    """Return the shard on the mesh of a live tensor. If there is none, return the first one."""
    first = next(iter(saved.values()))
    return first if dtensor is None else saved.get(_mesh_ranks(dtensor.device_mesh), first)


def _saved_dtype(saved: _SavedTensor, dtensor: DTensor) -> torch.dtype:
    return dtype_from_name(_on_mesh(saved, dtensor).dtype)


def _reject_ambiguous_tensors(
    saved: Mapping[StatePath, _SavedTensor], shards: Shards, read: Callable[[int], memoryview]
) -> None:
    """Raise StateMismatchError if the ranks have saved different tensors under one name."""
    others = shards_by_tensor(shards).keys() - {path_name(path) for path in saved}
    names = multi_mesh_tensors(shards)
    digests: dict[tuple[int, int], str] = {}
    for part in shards if names and not others else ():
        digests |= _digest_shards(part, read(part), shards[part], names)
    if ambiguous := others | different_tensors(shards, digests):
        raise StateMismatchError(
            f"{min(ambiguous)} is not the same tensor on all ranks, as in pipeline stages: only"
            f" `restore` on {len(shards)} ranks can read it"
        )


def _digest_shards(
    part: int, pack: memoryview, shards: Sequence[TensorShard], names: Container[str]
) -> dict[tuple[int, int], str]:
    """Return the digests of the elements of some tensors in a part, by part and index."""
    tensors, digests = unpack_part(pack, copy=False).shards, {}
    for index, shard in enumerate(shards):
        if shard.name in names:
            data = element_bytes(tensors[index])
            text = ctypes.string_at(data.data_ptr(), data.numel())
            digests[part, index] = hashlib.sha256(text).hexdigest()[:32]
    return digests


def _targets(dtensors: DTensors) -> dict[str, _Target]:
    """Return the memory of this rank's shards by the name of the tensor."""
    boxes = {path: _local_box(path, dtensor) for path, dtensor in dtensors.items()}
    return {
        path_name(path): _Target(box, local_tensor(dtensors[path]))
        for path, box in boxes.items()
        if box is not None
    }


def _copy_boxes(
    reads: Iterable[BoxRead],
    shards: Shards,
    read: Callable[[int], memoryview],
    targets: Mapping[str, _Target],
) -> None:
    """Copy boxes from parts to their targets. One part is read at a time."""
    by_part = attrgetter("part")
    for part, reads_of_part in groupby(sorted(reads, key=by_part), by_part):
        tensors = unpack_part(read(part), copy=False).shards
        for box_read in reads_of_part:
            shard = shards[part][box_read.index]
            target = targets[shard.name]
            source = narrow_to_box(tensors[box_read.index], shard.box, box_read.box)
            narrow_to_box(target.memory, target.box, box_read.box).copy_(source)


def narrow_to_box(tensor: torch.Tensor, tensor_box: Box, box: Box) -> torch.Tensor:
    """Return a view of the elements of `box`. `tensor` has the elements of `tensor_box`."""
    for axis, (begin, size) in enumerate(zip(*box, strict=True)):
        tensor = tensor.narrow(axis, begin - tensor_box.offsets[axis], size)
    return tensor


# -- matching saved tensors with a live state ------------------------------------------------------


def _match_dtensors(
    saved: Mapping[StatePath, _SavedTensor], dtensors: DTensors, parameters: Parameters
) -> dict[StatePath, DTensor]:
    """Return the DTensor that each saved tensor is restored into.

    Most optimizers create their state in the first step, sharded like the parameter. If a saved
    tensor of an optimizer has the shape of its parameter and the optimizer has no state yet, a new
    DTensor is created that is sharded like the parameter. Taking a step instead would change
    parameters, even with zero gradients and a zero learning rate (a negative zero, for example). An
    optimizer replaces its state when it loads one, so tensors that only the live optimizer has are
    ignored.

    Raises:
        StateMismatchError: a tensor is sharded on one side only, or the shapes differ.
    """
    matched: dict[StatePath, DTensor] = {}
    for path, shards in saved.items():
        dtensor: Any = dtensors.get(path)
        parameter = _parameter_of(path, parameters)
        shard = _on_mesh(
            shards, parameter if dtensor is None and is_dtensor(parameter) else dtensor
        )
        if dtensor is None and is_dtensor(parameter) and parameter.shape == shard.shape:
            dtensor = torch.empty_like(parameter.detach(), dtype=dtype_from_name(shard.dtype))
        if dtensor is None:
            raise _one_sided_shard_error(path, "the checkpoint")
        if dtensor.shape != shard.shape:
            raise StateMismatchError(
                f"{format_path(path)} has the shape {list(shard.shape)} in the checkpoint, and "
                f"{list(dtensor.shape)} in the given state"
            )
        matched[path] = dtensor
    for path in dtensors:
        if path not in saved and _parameter_of(path, parameters) is None:
            raise _one_sided_shard_error(path, "the given state")
    return matched


def _one_sided_shard_error(path: StatePath, side: str) -> StateMismatchError:
    return StateMismatchError(f"{format_path(path)} is a sharded tensor only in {side}")


def _optimizer_parameters(state: object) -> Parameters:
    """Return the parameters of each optimizer by its path, in the order of its state dict."""
    parameters: dict[StatePath, Sequence[torch.Tensor]] = {}

    def visit(path: StatePath, value: object) -> object:
        if isinstance(value, torch.optim.Optimizer):
            parameters[path] = [p for group in value.param_groups for p in group["params"]]
        return value

    map_leaves(state, visit)
    return parameters


def _parameter_of(path: StatePath, parameters: Parameters) -> Any:
    """Return the parameter whose optimizer state is at `path`, or None if `path` is elsewhere."""
    for length in range(len(path) - 2):
        # The keys in an optimizer's state dict are "state", the parameter's number, and a name.
        known, (key, number) = parameters.get(path[:length]), path[length : length + 2]
        if known is not None and key == "state" and type(number) is int and number < len(known):
            return known[number]
    return None


# -- restoring on all ranks ------------------------------------------------------------------------


class ShardedRestore:
    """An attempt of all ranks to restore a sharded state.

    Args:
        search: the states that the ranks can reach.
        plan: the chosen state, which is sharded.
        rule: what this rank restores of values that were saved by rank.
    """

    def __init__(
        self, search: StateSearch, plan: RestorePlan, rule: per_rank.RankValueRule
    ) -> None:
        self._search, self._plan, self._rule = search, plan, rule
        self._own: list[str] = []  # the values of each rank, set by _verify_parts
        self._group, self._rank = search.group, search.group.rank
        self._step, self._num_parts = plan.step, plan.ref.parts
        self._own_part = self._rank if self._num_parts == self._group.world_size else None
        self._holders = {part: sorted(ranks) for part, ranks in plan.holders.items()}
        # The following are set by _verify_parts and equal on all ranks.
        self._shards: dict[int, list[TensorShard]] = {}
        # Tensors that each rank reads from the mesh on which the rank has them now. At first these
        # are all tensors of several meshes, and after a comparison those that differ.
        self._multi_mesh: set[str] = set()
        # By rank: the part whose unsharded values it takes, and the rank that reads them.
        self._rest: list[tuple[int, int]] = []

    def run(
        self, state: MutableMapping[str, Any], *, strict: bool, allow_cast: bool
    ) -> tuple[Callable[[], None], RestoreAgreement] | None:
        """Restore the shards. Every rank must call this.

        Args:
            state: the live state. Its sharded tensors are overwritten once all parts are verified
                and all ranks know that the saved state matches.
            strict: see `restore.restore_from`.
            allow_cast: see `restore.restore_from`.

        Returns:
            The function that puts the values that are not sharded into `state`, and the agreement;
            or None, on all ranks, if the state is incomplete or corrupt or cannot be read, so that
            another one has to be chosen.

        Raises:
            StateMismatchError: the saved state does not match `state`; on all ranks.
            CheckpointError: a copy or a transfer failed; on all ranks.
        """
        if not self._verify_parts():
            return None
        rest = require_not_none(self._fetch_rest(), "the part of a rank")
        if self._own_part is None:
            # The numbers of ranks in a mesh have another meaning now.
            self._multi_mesh = self._find_different_tensors()
        put, is_complete, targets, meshes = self._group.run_on_all(
            lambda: self._match(rest, state, strict=strict, allow_cast=allow_cast),
            f"cannot restore step {self._step}",
        )
        if self._own_part is not None and self._multi_mesh:
            saved_meshes = {(s.name, s.mesh) for shards in self._shards.values() for s in shards}
            own = {pair for pair in meshes.items() if pair[0] in self._multi_mesh}
            if any(self._group.all_gather_json(not own <= saved_meshes)):
                self._multi_mesh = self._find_different_tensors()
        own_reads = self._group.run_on_all(
            lambda: self._plan_reads(targets, meshes), f"cannot restore step {self._step}"
        )
        rows = self._group.all_gather_json([attrs.astuple(read) for read in own_reads])
        # The order is the same on all ranks: the first remote read of each rank, then the second.
        remote = sorted(
            (number, receiver, read)
            for receiver, reads in enumerate(rows)
            for number, read in enumerate(map(_read_from_row, reads))
            if read.source != receiver
        )
        local = [read for read in own_reads if read.source == self._rank]
        self._group.run_on_all(
            lambda: _copy_boxes(local, self._shards, self._view, targets),
            f"failed to restore step {self._step}",
        )
        if remote:
            self._group.exchange(self._step, self._transfers(remote, targets))
        received = [read for read in own_reads if read.source != self._rank]
        has_moved_rest = any(sender != rank for rank, (_, sender) in enumerate(self._rest))
        return put, RestoreAgreement(
            self._plan.ref,
            received[0].source if received else self._rest[self._rank][1],
            self._rank,
            was_resharded=bool(remote) or has_moved_rest or self._own_part is None,
            received_bytes=sum(map(self._num_bytes, received)),
            is_complete=is_complete,
        )

    def _verify_parts(self) -> bool:
        """Verify each copy of each part, and check that the parts are the complete state.

        One rank reads each copy. A copy that cannot be used, or an incomplete state, is excluded
        from the search, and the result is False on all ranks.
        """
        readers: dict[Any, list[int]] = {}
        for part, ranks in self._holders.items():
            for rank in ranks:
                copy = self._search.copy_id(rank, self._plan.holders[part][rank])
                readers.setdefault((part, copy), []).append(rank)
        own = [part for (part, _), ranks in readers.items() if self._is_reader(part, ranks)]
        results = self._search.try_parts(self._plan, own, self._verify_part)
        if results is None:
            return False
        headers = {part: header for by_part in results for part, header in by_part.items()}
        try:
            self._shards = {part: read_shards(headers[part]) for part in sorted(headers)}
            problem = describe_missing(self._shards, self._num_parts)
        except CheckpointCorruptError as error:
            problem = f"is corrupt: {error}"
        self._own = [headers[part]["own"] for part in sorted(headers) if "own" in headers[part]]
        with_rest = [part for part in self._shards if headers[part]["has_rest"]]
        if not problem and not with_rest:
            problem = "is incomplete: no rank has the values that are not sharded"
        if problem:
            reason = f"step {self._step} ({self._plan.ref.tier}) {problem}"
            self._search.skip_state(self._plan, reason)
            return False
        self._multi_mesh = multi_mesh_tensors(self._shards)
        for rank in range(self._group.world_size):
            has_own = self._own_part is not None and rank in with_rest
            part = rank if has_own else with_rest[0]
            ranks = self._holders[part]
            self._rest.append((part, rank if rank in ranks else ranks[0]))
        return True

    def _is_reader(self, part: int, ranks: Sequence[int]) -> bool:
        """Return True if this rank is the one of `ranks` that verifies a copy of a part."""
        return ranks[part % len(ranks)] == self._rank

    def _verify_part(self, part: int) -> dict[str, Any]:
        """Verify this rank's copy of a part, and return what all ranks need of its header."""
        pack = self._view(part)
        ref = self._plan.holders[part][self._rank]
        self._search.source(ref).check(ref, part)
        meta = read_meta(pack)
        read_shards(meta)  # Raise here, where the rank that has the corrupt copy is known.
        own = {"own": meta["own"]} if "own" in meta else {}
        has_rest = unpack_part(pack, copy=False).has_rest
        return {"shards": meta["shards"], "has_rest": has_rest, **own}

    def _find_different_tensors(self) -> set[str]:
        """Compare the tensors of several meshes. Return the names of those that differ.

        Every rank must call this. One rank reads each part.
        """
        if not self._multi_mesh:
            return set()

        def digest() -> list[tuple[tuple[int, int], str]]:
            own = [part for part, ranks in self._holders.items() if self._is_reader(part, ranks)]
            digests: dict[tuple[int, int], str] = {}
            for part in own:
                shards = self._shards[part]
                digests |= _digest_shards(part, self._view(part), shards, self._multi_mesh)
            return list(digests.items())

        rows = self._group.run_on_all(digest, f"cannot restore step {self._step}")
        gathered = self._group.all_gather_json(rows)
        digests = {tuple(place): text for row in gathered for place, text in row}
        return different_tensors(self._shards, digests)

    def _view(self, part: int) -> memoryview:
        ref = self._plan.holders[part][self._rank]
        return self._search.source(ref).view(ref, part)

    def _fetch_rest(self) -> PartContents | None:
        """Read or receive the values that are not sharded."""
        receivers: dict[tuple[int, int], list[int]] = {}
        for rank, (part, sender) in enumerate(self._rest):
            if sender != rank:
                receivers.setdefault((part, sender), []).append(rank)

        def read_own_parts() -> tuple[PartContents | None, dict[int, memoryview]]:
            contents = {}
            for part, sender in {*receivers, self._rest[self._rank]}:
                if sender == self._rank:
                    contents[part] = unpack_part(self._view(part), copy=False)
            packs = {
                part: pack_state([contents[part].state, contents[part].paths])
                for part, sender in receivers
                if sender == self._rank
            }
            return contents.get(self._rest[self._rank][0]), packs

        rest, packs = self._group.run_on_all(read_own_parts, f"cannot restore step {self._step}")
        for (part, sender), ranks in receivers.items():
            pack = self._group.broadcast_pack(self._step, packs.get(part), sender, ranks)
            if self._rank in ranks and pack is not None:
                values, paths = unpack(pack, copy=False)
                rest = PartContents(values, paths, has_rest=True, shards=[])
        return rest

    def _match(
        self,
        rest: PartContents,
        state: MutableMapping[str, Any],
        *,
        strict: bool,
        allow_cast: bool,
    ) -> tuple[Callable[[], None], bool, dict[str, _Target], dict[str, str]]:
        """Compare the saved state with the live one.

        Returns:
            The function that puts the values that are not sharded into `state`; whether `state` has
            all names that were saved; and by the name of each sharded tensor the memory of this
            rank's shard, and the ranks of its mesh.

        Raises:
            StateMismatchError: the saved state does not match `state`. Nothing was changed.
        """
        saved = self._rule.add_values(rest.state, self._own, state)

        def is_in_both(path: StatePath) -> bool:
            return isinstance(saved, dict) and path[0] in saved and path[0] in state

        tensors = _saved_tensors(filter(is_in_both, rest.paths), self._shards)
        dtensors = extract_shards(to_plain_values(state))[1]
        dtensors = {path: dtensor for path, dtensor in dtensors.items() if is_in_both(path)}
        if self._own_part is None:
            self._check_same_on_all_ranks(set(map(path_name, dtensors)), rest)
        matched = _match_dtensors(tensors, dtensors, _optimizer_parameters(state))
        for path, dtensor in matched.items():
            dtype = _saved_dtype(tensors[path], dtensor)
            is_cast = allow_cast and is_castable(dtensor.dtype, dtype)
            if dtype != dtensor.dtype and not is_cast:
                raise StateMismatchError(
                    f"{format_path(path)} is a sharded tensor of {dtype_name(dtensor.dtype)}, and "
                    f"a tensor of {dtype_name(dtype)} was saved{cast_remedy(dtensor.dtype, dtype)}"
                )
        saved = insert_shards(saved, matched)
        put = plan_restore(state, saved, strict=strict, allow_cast=allow_cast)
        meshes = {path_name(path): _mesh_ranks(d.device_mesh) for path, d in matched.items()}
        return put, has_all_names(state, saved), _targets(matched), meshes

    def _check_same_on_all_ranks(self, names: set[str], rest: PartContents) -> None:
        """Raise StateMismatchError if a live tensor was not one tensor of all ranks."""
        saved = {shard.name for shards in self._shards.values() for shard in shards}
        on_some_ranks = saved - {path_name(path) for path in rest.paths}
        for name in sorted(names & (self._multi_mesh | on_some_ranks)):
            raise StateMismatchError(
                f"{name} was not saved as the same tensor on all ranks, as in pipeline stages: only"
                f" {self._num_parts} ranks can restore it"
            )

    def _plan_reads(
        self, targets: Mapping[str, _Target], meshes: Mapping[str, str]
    ) -> list[BoxRead]:
        """Plan the reads of this rank; see `_match` for the arguments."""
        return plan_reads(
            {name: target.box for name, target in targets.items()},
            self._shards,
            self._holders,
            self._rank,
            self._own_part,
            only_mesh={name: mesh for name, mesh in meshes.items() if name in self._multi_mesh},
        )

    def _transfers(
        self, remote: Iterable[tuple[int, int, BoxRead]], targets: Mapping[str, _Target]
    ) -> Iterator[Transfer]:
        """Yield the transfers of this rank in the order of `remote`."""
        tensors: dict[int, list[torch.Tensor]] = {}  # the shards in each part that is sent

        def find_tensor(read: BoxRead, box: Box) -> torch.Tensor:
            shard = self._shards[read.part][read.index]
            available = targets.get(shard.name)
            if self._rank == read.source:
                if read.part not in tensors:
                    tensors[read.part] = unpack_part(self._view(read.part), copy=False).shards
                available = _Target(shard.box, tensors[read.part][read.index])
            available = require_not_none(available, "the tensor that is received")
            return narrow_to_box(available.memory, available.box, box)

        for _, receiver, read in remote:
            if self._rank not in (read.source, receiver):
                continue
            shard = self._shards[read.part][read.index]
            dtype, is_send = dtype_from_name(shard.dtype), self._rank == read.source
            peer = receiver if is_send else read.source
            for box in split_box(read.box, shard.box.sizes, TRANSFER_BYTES // dtype.itemsize):
                find = partial(find_tensor, read, box)
                yield Transfer(peer, is_send, box.num_elements, dtype, find)

    def _num_bytes(self, read: BoxRead) -> int:
        shard = self._shards[read.part][read.index]
        return read.box.num_elements * dtype_from_name(shard.dtype).itemsize


def _read_from_row(row: Sequence[Any]) -> BoxRead:
    source, part, index, (offsets, sizes) = row
    return BoxRead(source, part, index, Box(tuple(offsets), tuple(sizes)))
