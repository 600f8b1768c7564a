"""Sharded state: each rank's part of it as a pack, and how it comes to any other number of ranks.

One form on a disk, in memory and on the wire: a part says in its head which boxes of which tensors
it holds (see `cover`), as the planners of torch's distributed checkpoints (DCP) cut them. So nobody
collects the plans of all ranks, and nothing is pickled.

In a restore the parts lie wherever somebody holds them: in agents' memories, or on a disk that all
reach. Each rank reads by itself what it needs of those that it reaches, and is sent the rest, each
byte once, into the tensors that the state has: nobody ever has a second state in memory.
"""

from __future__ import annotations

import functools
import zlib
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from itertools import groupby
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import torch
from torch.serialization import location_tag

from ..errors import CheckpointCorrupt, CheckpointError, StateMismatch
from .cover import (
    Box,
    Chunk,
    Share,
    apart,
    chunks_of,
    lacking,
    pieces,
    shares,
    tensors_of,
)
from .pack import LayoutCache, PackImage, PartContents, Shards, pack_state, unpack, unpack_part
from .peers import Agreed, Held, Plan, Search, Transfer, givers, origin
from .restore_plan import plan_restore
from .safetensors_header import read_meta
from .state_tree import (
    FlatState,
    StatePath,
    extract_shards,
    format_path,
    insert_shards,
    is_dtensor,
    local_tensor,
    map_leaves,
    parts_of,
    path_name,
    state_accessor,
    to_plain_values,
)
from .tensor_layout import (
    MapLocation,
    StridedLayout,
    dtype_from_name,
    dtype_name,
    relocated,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

DTensors: TypeAlias = "Mapping[StatePath, DTensor]"

PIECE_BYTES = 2 << 20
"""Of what is sent at once."""


def plan_part_layout(
    layouts: LayoutCache, step: int, flat: FlatState, *, has_rest: bool, has_copies: bool
) -> PackImage:
    """Plan this rank's part of a sharded state.

    Args:
        layouts: The cache that has the layout of the last part.
        step: The step after which the state was taken.
        flat: The state.
        has_rest: Whether the part contains what is not sharded: on disk only the first rank's part
            does, in memory each part, because any rank may be lost.
        has_copies: Whether the part contains elements that several ranks hold alike, even if this
            rank is not the first of them.

    Raises:
        CheckpointError: The state contains something that cannot be saved.
    """
    dtensors, boxes = flat.shards, _boxes_of(flat.shards)
    paths = [path for path in boxes if has_copies or _is_first(dtensors[path])]
    chunks = [_chunk(path, dtensors[path], boxes[path]).row() for path in paths]
    tensors = {path: local_tensor(dtensors[path]) for path in paths}
    meta = {"step": step, "chunks": chunks, "whole": has_rest}
    return layouts.plan(flat, meta, Shards(tensors, [*dtensors], has_rest))


def _chunk(way: StatePath, shard: DTensor, box: Box) -> Chunk:
    device = location_tag(local_tensor(shard).untyped_storage())
    form = (tuple(shard.shape), box, tuple(shard.stride()))
    return Chunk(
        path_name(way), dtype_name(shard.dtype), *form, device, _mesh_sum(shard.device_mesh)
    )


@functools.cache
def _mesh_sum(mesh: DeviceMesh) -> int:
    return zlib.crc32(repr(sorted(mesh.mesh.flatten().tolist())).encode())


_Key = tuple[Any, ...]
_boxes: dict[_Key, Box | None] = {}
"""By what they follow from: snapshots ask for the same ones after each step, which must not wait.
None of a tensor in whose mesh this rank is not."""
_MOST_BOXES = 100_000


def _boxes_of(shards: DTensors) -> dict[StatePath, Box]:
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


def _targets_in(shards: DTensors) -> dict[str, Target]:
    """The targets that a state's sharded tensors are, by the tensors' names in parts."""
    boxes = _boxes_of(shards)
    return {path_name(way): Target(box, local_tensor(shards[way])) for way, box in boxes.items()}


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
    whole = _whole_in(read(0), map_location=map_location)
    saved = _saved_tensors(whole.paths, chunks)
    found: dict[StatePath, torch.Tensor]
    if like is None:
        found = {way: _memory_for(tensor) for way, tensor in saved.items()}
        boxes = {way: ((0,) * tensor.dim(), tuple(tensor.shape)) for way, tensor in found.items()}
        into = {path_name(way): Target(box, found[way]) for way, box in boxes.items()}
    else:
        live = _matched(saved, extract_shards(to_plain_values(like))[1], _parameters_in(like))
        fresh: dict[StatePath, Any] = {}
        for way, shard in live.items():
            fresh[way] = torch.empty_like(shard.detach())
        found, into = fresh, _targets_in(fresh)
    needs = {name: target.box for name, target in into.items()}
    _copy_shares(shares(needs, chunks, dict.fromkeys(chunks, (0,)), 0, -1), chunks, read, into)
    if like is None:
        for way, tensor in found.items():
            found[way] = relocated(tensor, saved[way].device, map_location)
    return insert_shards(whole.state, found)


def _whole_in(
    pack: memoryview, *, map_location: MapLocation = "cpu", copy: bool = True
) -> PartContents:
    """What is not sharded, in a part that says that it has it."""
    whole = unpack_part(pack, map_location=map_location, copy=copy)
    if not whole.has_rest:
        raise CheckpointCorrupt(
            "a part lacks what is not sharded, and its header claims to have it"
        )
    return whole


def _memory_for(chunk: Chunk) -> torch.Tensor:
    """Memory for all of a tensor, with its strides if these leave no gaps."""
    form = StridedLayout(dtype_from_name(chunk.dtype), chunk.shape, chunk.stride)
    if len(chunk.stride) == len(chunk.shape) and form.is_dense:
        return torch.empty_strided(form.shape, form.stride, dtype=form.dtype)
    return torch.empty(form.shape, dtype=form.dtype)


def _saved_tensors(
    ways: Sequence[StatePath], parts: Mapping[int, Sequence[Chunk]]
) -> dict[StatePath, Chunk]:
    """What one part or another says of each sharded tensor that was saved."""
    tensors = {name: rows[0][2] for name, rows in tensors_of(parts).items()}
    for way in ways:
        if path_name(way) not in tensors:
            raise CheckpointCorrupt(f"{format_path(way)} is in none of its parts")
    return {way: tensors[path_name(way)] for way in ways}


def _parameters_in(state: object) -> dict[StatePath, Sequence[torch.Tensor]]:
    """The parameters of each optimizer in a state, by its way: in the order in which its state
    numbers them."""
    found: dict[StatePath, Sequence[torch.Tensor]] = {}

    def look(way: StatePath, value: object) -> object:
        if isinstance(value, torch.optim.Optimizer):
            found[way] = [one for group in value.param_groups for one in group["params"]]
        return value

    map_leaves(state, look)
    return found


def _matched(
    saved: Mapping[StatePath, Chunk],
    shards: DTensors,
    parameters: Mapping[StatePath, Sequence[torch.Tensor]],
) -> dict[StatePath, DTensor]:
    """The sharded tensors that those which were saved are for.

    Most optimizers make their state at the first step, like the parameter that it is of. So in one
    that has taken none, a saved tensor of a parameter's size is sharded as that parameter is, and
    nobody takes a step for it: even with gradients and a rate of zero that would change some
    parameters (a negative zero, say). An optimizer's are those that were saved of it, whatever it
    has now: it takes a state whole.

    Args:
        shards: those that there are. parameters: see `_parameters_in`.

    Raises:
        StateMismatch: some are on one side alone, or have another shape.
    """
    found: dict[StatePath, DTensor] = {}
    for way, tensor in saved.items():
        shard: Any
        shard, parameter = shards.get(way), _parameter_of(way, parameters)
        if shard is None and is_dtensor(parameter) and parameter.shape == tensor.shape:
            shard = torch.empty_like(parameter.detach(), dtype=dtype_from_name(tensor.dtype))
        if shard is None:
            raise _on_one_side(way, "the checkpoint")
        if shard.shape != tensor.shape:
            raise StateMismatch(
                f"{format_path(way)} has the shape {list(tensor.shape)} in the checkpoint, "
                f"and {list(shard.shape)} in the given state"
            )
        found[way] = shard
    for way in shards:
        if way not in saved and _parameter_of(way, parameters) is None:
            raise _on_one_side(way, "the given state")
    return found


def _on_one_side(way: StatePath, side: str) -> StateMismatch:
    return StateMismatch(f"{format_path(way)} is a sharded tensor only in {side}")


def _parameter_of(way: StatePath, parameters: Mapping[StatePath, Sequence[torch.Tensor]]) -> Any:
    """The parameter that a tensor with this way is an optimizer's state of; None if it is none."""
    for at in range(len(way) - 2):
        # As `torch.optim.Optimizer.state_dict` has them: state, the parameter's number, a name.
        known, (kind, number) = parameters.get(way[:at]), way[at : at + 2]
        if known is not None and kind == "state" and type(number) is int and number < len(known):
            return known[number]
    return None


def _copy_shares(
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
        shards = unpack_part(read(part), copy=False).shards
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


# -- to all ranks, be they more or fewer than before -----------------------------------------------


_Into = Mapping[str, Target]
_Sent = Sequence[tuple[int, int, Share]]
"""What ranks want of others: the position among what a rank wants, that rank, and what it is."""


def fetch_parts(
    search: Search, plan: Plan, state: MutableMapping[str, Any], *, strict: bool
) -> tuple[Callable[[], None], Agreed] | None:
    """Bring all ranks to a sharded state, but for what is not sharded.

    Returns:
        What puts the rest into this rank's state. None, on all ranks,
        if it is not whole or damaged, and the choice is to be made anew.
    """
    way = _Resharding(search, plan)
    whole = way.whole() if way.is_all_there() else None
    if whole is None:
        return None
    put, into, mine = search.peers.all_do(
        lambda: way.fitted(whole, state, strict=strict), f"cannot restore step {plan.state.step}"
    )
    words = search.peers.words({"wants": [attrs.astuple(share) for share in mine]})
    wants = [[_share(*row) for row in word["wants"]] for word in words]
    if not way.check(wants):
        return None
    sent = sorted(
        (number, taker, share)
        for taker, every in enumerate(wants)
        for number, share in enumerate(one for one in every if one.source != taker)
    )
    way.move(mine, sent, into)
    return put, way.agreed(sent)


class _Resharding:
    """One state's way to all ranks. What is said by all is the same on all."""

    def __init__(self, search: Search, plan: Plan) -> None:
        self._search, self._plan = search, plan
        self._peers, self._rank = search.peers, search.peers.rank
        self._step, self._count = plan.state.step, plan.state.parts
        self._is_as_many = self._count == self._peers.size
        self._ranks = {part: sorted(here) for part, here in plan.holders.items()}
        self._chunks: dict[int, list[Chunk]] = {}
        self._apart: set[str] = set()
        # The part whose values each rank takes that are not sharded, and how it comes to it.
        self._whole_of: list[int] = []
        self._routes: dict[int, dict[int, int]] = {}

    def is_all_there(self) -> bool:
        """Whether all elements of all tensors are held, by the heads of the parts."""
        speaks = [part for part, ranks in self._ranks.items() if self._speaks(part, ranks)]
        said = self._search.attempt(self._plan, speaks, self._head)
        if said is None:
            return False
        heads = dict(sorted(ChainMap(*said).items()))
        wholes = [part for part, head in heads.items() if head["whole"]]
        try:
            self._chunks = {part: chunks_of(head) for part, head in heads.items()}
            lacks = lacking(self._chunks, self._count)
        except CheckpointCorrupt as error:
            lacks = f"is damaged: {error}"
        if not lacks and not wholes:
            lacks = "is not whole: nobody holds what is not sharded"
        lacks = lacks or self._mixes_up()
        if lacks:
            why = f"step {self._step} ({self._plan.kind}) {lacks}"
            self._search.pass_over(self._plan.state, why)
            return False
        own = wholes if self._is_as_many else []
        ranks = range(self._peers.size)
        self._whole_of = [rank if rank in own else wholes[0] for rank in ranks]
        return True

    def _mixes_up(self) -> str:
        """Why other ranks' tensors might be taken for one's own; empty if they cannot be.

        On a disk, parts of several meshes are copies of each other, as tensors that differ from
        rank to rank under one name are not saved as a whole there.
        """
        self._apart = set() if self._plan.state.disk else apart(self._chunks)
        if not self._apart or (self._is_as_many and len(self._chunks) == self._count):
            return ""
        return (
            f"has {min(self._apart)} on several meshes, perhaps as several tensors: only "
            f"{self._count} ranks, with all parts, can go on from it"
        )

    def _speaks(self, part: int, ranks: Sequence[int]) -> bool:
        """Whether this rank is the one of these that does for all what concerns a part."""
        return ranks[part % len(ranks)] == self._rank

    def _head(self, part: int) -> dict[str, Any]:
        held = self._held(part)
        meta = read_meta(self._search.source(held).head(held, part))
        chunks_of(meta)  # before others meet what is none
        # Formerly the first part alone had what is not sharded, and did not say so.
        return {"chunks": meta["chunks"], "whole": meta.get("whole", part == 0) is True}

    def _held(self, part: int) -> Held:
        return self._plan.holders[part][self._rank]

    def _view(self, part: int) -> memoryview:
        held = self._held(part)
        return self._search.source(held).view(held, part)

    # -- what is not sharded ------------------------------------------------------------------

    def whole(self) -> PartContents | None:
        """What is not sharded: of the part of this rank's number, if there were as many ranks and
        somebody has it; else of the first part that somebody has. None as of `Search.attempt`."""
        for part in sorted(set(self._whole_of)):
            takers = [rank for rank, wanted in enumerate(self._whole_of) if wanted == part]
            self._routes[part] = givers(self._ranks[part], self._search.nodes, takers)
        mine = self._whole_of[self._rank]
        here = [part for part in self._routes if self._rank in self._ranks[part]]
        gives = [part for part in here if self._rank in self._routes[part].values()]
        read: dict[int, PartContents] = {}
        packs: dict[int, memoryview] = {}

        def act(part: int) -> None:
            read[part] = _whole_in(self._view(part), copy=False)
            if part in gives:
                packs[part] = pack_state([read[part].state, read[part].paths])

        if self._search.attempt(self._plan, {*gives, mine} & {*here}, act) is None:
            return None
        if any(self._routes.values()):
            self._peers.carry(self._step, self._routes, packs)
        if mine in read:
            return read[mine]
        state, paths = unpack(packs[mine], copy=False)
        return PartContents(state, paths, has_rest=True, shards=[])

    # -- what is ------------------------------------------------------------------------------

    def fitted(
        self, whole: PartContents, state: MutableMapping[str, Any], *, strict: bool
    ) -> tuple[Callable[[], None], dict[str, Target], list[Share]]:
        """What puts what was saved into the state; where this rank's own sharded tensors are; and
        from where it has what it needs of them. Raises StateMismatch: it does not fit."""
        saved = whole.state

        def is_in_both(way: StatePath) -> bool:
            return isinstance(saved, dict) and way[0] in saved and way[0] in state

        tensors = _saved_tensors([way for way in whole.paths if is_in_both(way)], self._chunks)
        shards = extract_shards(to_plain_values(state))[1]
        here = {way: shard for way, shard in shards.items() if is_in_both(way)}
        live = _matched(tensors, here, _parameters_in(state))
        for way, shard in live.items():
            kind = dtype_from_name(tensors[way].dtype)
            if kind != shard.dtype and _is_bare(state, way):
                raise StateMismatch(
                    f"{format_path(way)} is a sharded tensor of {shard.dtype}, and one of {kind} "
                    "was saved"
                )
        put = plan_restore(state, insert_shards(saved, live), strict=strict)
        into = _targets_in(live)
        needs = {name: target.box for name, target in into.items()}
        own = self._rank if self._is_as_many else -1
        wanted = shares(needs, self._chunks, self._ranks, self._rank, own)
        for share in wanted:
            name = self._chunks[share.part][share.place].name
            if name in self._apart and share.part != own:
                raise StateMismatch(
                    f"{name} was on several meshes, perhaps as several tensors, and this rank needs"
                    " of it what it had not"
                )
        return put, into, wanted

    def check(self, wants: Sequence[Sequence[Share]]) -> bool:
        """Verify all that is read by anybody, each part of each memory once; whether it is good."""
        reads = {(share.source, share.part) for every in wants for share in every}
        reads |= {
            (origin(self._routes[part], rank), part) for rank, part in enumerate(self._whole_of)
        }
        users: dict[Any, list[int]] = {}
        for rank, part in sorted(reads):
            place = self._search.place(rank, self._plan.holders[part][rank])
            users.setdefault((part, place), []).append(rank)
        mine = sorted({part for (part, _), ranks in users.items() if self._speaks(part, ranks)})

        def act(part: int) -> None:
            held = self._held(part)
            self._view(part)  # which stays as it is from now on
            self._search.source(held).check(held, part)

        return self._search.attempt(self._plan, mine, act) is not None

    def move(self, mine: Sequence[Share], sent: _Sent, into: _Into) -> None:
        """Bring to this rank what it wants, and to others what they want. What fails here fails
        all, with the state changed."""
        own = [share for share in mine if share.source == self._rank]
        self._peers.all_do(
            lambda: _copy_shares(own, self._chunks, self._view, into),
            f"failed to restore step {self._step}",
        )
        if sent:
            self._peers.exchange(self._step, self._transfers(sent, into))

    def _transfers(self, sent: _Sent, into: _Into) -> Iterator[Transfer]:
        """What this rank sends and is sent, in the order that `Peers.exchange` needs: what each
        rank wants first, then what each wants second."""
        shards: dict[int, list[torch.Tensor]] = {}
        for _, taker, share in sent:
            chunk = self._chunks[share.part][share.place]
            kind = dtype_from_name(chunk.dtype)
            gives = self._rank == share.source
            if gives:
                if share.part not in shards:
                    shards[share.part] = unpack_part(self._view(share.part), copy=False).shards
                has = Target(chunk.box, shards[share.part][share.place])
            elif self._rank == taker:
                has = into[chunk.name]
            else:
                continue
            for box in pieces(share.box, chunk.box[1], PIECE_BYTES // kind.itemsize):
                memory = narrowed(has.memory, has.box, box)
                yield Transfer(taker if gives else share.source, gives, memory, kind)

    def agreed(self, sent: _Sent) -> Agreed:
        """How it went."""
        came = [share for _, taker, share in sent if taker == self._rank]
        whole_from = origin(self._routes[self._whole_of[self._rank]], self._rank)
        received = 0
        for share in came:
            chunk = self._chunks[share.part][share.place]
            received += prod(share.box[1]) * dtype_from_name(chunk.dtype).itemsize
        return Agreed(
            self._step,
            self._plan.kind,
            holder=came[0].source if came else whole_from,
            rank=self._rank,
            moved=bool(sent) or any(self._routes.values()) or not self._is_as_many,
            received=received,
        )


def _share(source: int, part: int, place: int, box: Any) -> Share:
    begins, sizes = box
    return Share(source, part, place, (tuple(begins), tuple(sizes)))


def _is_bare(state: Any, way: StatePath) -> bool:
    """Whether a tensor stands there itself, and not in an object that has a state."""
    for key in way:
        if state_accessor(state) is not None:
            return False
        state = parts_of(state).get(key)
    return True
