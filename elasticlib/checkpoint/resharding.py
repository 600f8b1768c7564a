"""A sharded state comes to all ranks, be these more or fewer than those that made it.

Its parts lie wherever somebody holds them: in agents' memories, or on a disk that all reach. Each
rank reads by itself what it needs of those that it reaches, and is sent the rest, each byte once,
into the tensors that the state has: nobody ever has a second state in memory.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from itertools import groupby
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import attrs
import torch

from ..errors import CheckpointCorrupt, StateMismatch, describe
from .choose import Held, Plan
from .cover import Box, Chunk, Share, apart, chunks_of, lacking, pieces, shares, tensors_of
from .pack import fill, lay_out, read_meta, unpack
from .peers import MAX_SENTENCE, Transfer, Words, kind_of, raise_any, tried
from .put import fit
from .sharded import boxes_of, copy_shares, local_of, narrowed, targets_of
from .state import (
    Way,
    holder_of,
    parameters_in,
    parts_of,
    put_shards,
    spoken,
    take_shards,
    values_of,
)
from .storages import dtype_named

if TYPE_CHECKING:
    from .restore import Search

PIECE_BYTES = 2 << 20
"""Of what is sent at once."""


@attrs.frozen(eq=False)
class Fetched:
    """A sharded state that is there, but for objects whose `load_state_dict` is to be called.

    state: as it was saved, with this rank's own sharded tensors in it. holder: who had what this
    rank could not read by itself; else itself. received: bytes of tensors that it was sent. moved:
    see `restore.Agreed`.
    """

    state: Any
    holder: int
    received: int
    moved: bool


def fetch(
    search: Search, plan: Plan, state: MutableMapping[str, Any], *, strict: bool
) -> Fetched | None:
    """Bring all ranks to a sharded state; None, on all of them, if it is not whole or damaged, and
    the choice is to be made anew."""
    way = _Resharding(search, plan)
    whole = way.whole() if way.is_all_there() else None
    if whole is None:
        return None
    aims, error = tried(lambda: way.aims(whole, state, strict=strict))
    raise_any(search.peers.words({}, error), error, f"cannot restore step {plan.state.step}")
    if aims is None:
        raise AssertionError("a rank whose state does not fit has said so")
    wants = way.wants(aims.wanted)
    if not way.check(wants):
        return None
    way.move(wants, aims)
    return way.fetched(wants, aims)


@attrs.frozen(eq=False)
class _Aims:
    """What a rank restores. found: the state as it was saved, with this rank's own sharded tensors
    in it; needs: the box that it has of each, and into: that box's memory. wanted: whence it has
    what it needs."""

    found: Any
    wanted: list[Share]
    needs: dict[str, Box]
    into: dict[str, torch.Tensor]


class _Resharding:
    """One state's way to all ranks. What is said by all is the same on all."""

    def __init__(self, search: Search, plan: Plan) -> None:
        self._search, self._plan = search, plan
        self._peers, self._rank = search.peers, search.peers.rank
        self._step, self._count = plan.state.step, plan.state.parts
        self._ranks = {part: sorted(here) for part, here in plan.holders.items()}
        self._chunks: dict[int, list[Chunk]] = {}
        self._apart: set[str] = set()
        # The part whose values each rank takes that are not sharded.
        self._whole_of: list[int] = []

    def is_all_there(self) -> bool:
        """Whether all elements of all tensors are held, by the heads of the parts."""
        speaks = [part for part, ranks in self._ranks.items() if self._speaks(part, ranks)]
        heads = self._all_try(speaks, self._head)
        if heads is None:
            return False
        wholes = sorted(part for part, head in heads.items() if head["whole"])
        try:
            self._chunks = {part: chunks_of(head) for part, head in sorted(heads.items())}
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
        own = wholes if self._count == self._peers.size else []
        ranks = range(self._peers.size)
        self._whole_of = [rank if rank in own else wholes[0] for rank in ranks]
        return True

    def _mixes_up(self) -> str:
        """Why other ranks' tensors might be taken for one's own; empty if they cannot be.

        On a disk, parts of several meshes are copies of each other, as tensors that differ from
        rank to rank under one name are not saved as a whole there.
        """
        self._apart = set() if self._plan.state.disk else apart(self._chunks)
        all_own = self._count == self._peers.size == len(self._chunks)
        if not self._apart or all_own:
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

    def _held(self, part: int, rank: int | None = None) -> Held:
        return self._plan.holders[part][self._rank if rank is None else rank]

    def _view(self, part: int) -> memoryview:
        held = self._held(part)
        return self._search.source(held).view(held, part)

    def _all_try(self, parts: Iterable[int], act: Callable[[int], Any]) -> dict[int, Any] | None:
        """What `act` gave of parts, on whichever rank, if that is anything. None, on all ranks, if
        it failed of one: nobody is to read that part there any more."""
        done, bad = {}, []
        for part in parts:
            found, error = tried(partial(act, part))
            if error is not None:
                bad.append([part, describe(error)[:MAX_SENTENCE], kind_of(error)])
            elif found is not None:
                done[part] = found
        words = self._peers.words({"done": done, "bad": bad})
        for rank, word in enumerate(words):
            for part, why, kind in word["bad"]:
                self._search.fail(rank, self._held(part, rank), why, kind)
        if any(word["bad"] for word in words):
            return None
        return {int(part): found for word in words for part, found in word["done"].items()}

    # -- what is not sharded ------------------------------------------------------------------

    def _sent(self) -> list[int]:
        """The parts of which some rank has to be sent what is not sharded."""
        wanted = enumerate(self._whole_of)
        return sorted({part for rank, part in wanted if rank not in self._ranks[part]})

    def whole(self) -> Any | None:
        """What is not sharded: of the part of this rank's number, if there were as many ranks and
        somebody has it; else of the first part that somebody has. None as of `_all_try`."""
        mine, sent = self._whole_of[self._rank], self._sent()
        gives = [part for part in sent if self._ranks[part][0] == self._rank]
        reads = {*gives, mine} if self._rank in self._ranks[mine] else {*gives}
        read: dict[int, Any] = {}
        packs: dict[int, bytearray] = {}

        def act(part: int) -> list[int] | None:
            read[part] = _whole_in(self._view(part))
            if part not in gives:
                return None
            packs[part] = _packed(read[part])
            return [len(packs[part]), zlib.crc32(packs[part])]

        said = self._all_try(sorted(reads), act)
        if said is None:
            return None
        for part in sent:
            packs.setdefault(part, bytearray(said[part][0]))
            self._peers.broadcast(packs[part], self._ranks[part][0])
        _, error = tried(lambda: _check_sums(packs, said))
        words = self._peers.words({}, error)
        raise_any(words, error, f"cannot restore step {self._step}")
        return read[mine] if mine in read else unpack(memoryview(packs[mine]), copy=False)

    # -- what is ------------------------------------------------------------------------------

    def aims(self, whole: Any, state: MutableMapping[str, Any], *, strict: bool) -> _Aims:
        """What this rank is to restore. Raises StateMismatch: it does not fit into the state."""
        saved = whole["state"]
        tensors = {name: rows[0][2] for name, rows in tensors_of(self._chunks).items()}

        def is_in_both(way: Way) -> bool:
            return isinstance(saved, dict) and way[0] in saved and way[0] in state

        ways = list(filter(is_in_both, whole["ways"]))
        shards = take_shards(values_of(state))[1]
        here = {way: shard for way, shard in shards.items() if is_in_both(way)}
        live = targets_of(ways, tensors, here, parameters_in(state))
        for way, shard in live.items():
            kind = dtype_named(tensors[repr(way)].dtype)
            if kind != shard.dtype and _is_bare(state, way):
                raise StateMismatch(
                    f"{spoken(way)} is a sharded tensor of {shard.dtype}, and one of {kind} "
                    "was saved"
                )
        found = put_shards(saved, live)
        fit(state, found, strict=strict)
        needs = {repr(way): box for way, box in boxes_of(live).items()}
        into = {repr(way): local_of(shard) for way, shard in live.items()}
        own = self._rank if self._count == self._peers.size else -1
        wanted = shares(needs, self._chunks, self._ranks.__getitem__, self._rank, own)
        for share in wanted:
            name = self._chunks[share.part][share.place].name
            if name in self._apart and share.part != own:
                raise StateMismatch(
                    f"{name} was on several meshes, perhaps as several tensors, and this rank needs"
                    " of it what it had not"
                )
        return _Aims(found, wanted, needs, into)

    def wants(self, mine: Sequence[Share]) -> list[list[Share]]:
        """What each rank wants."""
        words = self._peers.words({"wants": [attrs.astuple(share) for share in mine]})
        return [[_share(*row) for row in word["wants"]] for word in words]

    def check(self, wants: Sequence[Sequence[Share]]) -> bool:
        """Verify all that is read by anybody, each part of each memory once; whether it is good."""
        users: dict[Any, set[int]] = {}
        reads = {(share.source, share.part) for every in wants for share in every}
        reads |= {
            (rank if rank in self._ranks[part] else self._ranks[part][0], part)
            for rank, part in enumerate(self._whole_of)
        }
        for rank, part in reads:
            place = self._search.place(rank, self._held(part, rank))
            users.setdefault((part, place), set()).add(rank)
        mine = {part for (part, _), ranks in users.items() if self._speaks(part, sorted(ranks))}

        def act(part: int) -> None:
            held = self._held(part)
            self._view(part)  # which stays as it is from now on
            self._search.source(held).check(held, part)

        return self._all_try(sorted(mine), act) is not None

    def move(self, wants: Sequence[Sequence[Share]], aims: _Aims) -> None:
        """Bring to each rank what it wants. What fails here fails all, with the state changed."""
        what = f"failed at restoring step {self._step}"
        _, error = tried(lambda: self._copy(wants[self._rank], aims))
        raise_any(self._peers.words({}, error), error, what)
        if not _sent_ones(wants):
            return
        sums, error = self._peers.exchange(self._transfers(wants, aims))
        words = self._peers.words({"sums": sums}, error)
        raise_any(words, error, what)
        _compare(words, self._step)

    def _copy(self, wanted: Iterable[Share], aims: _Aims) -> None:
        """What this rank reaches by itself, one part after the other."""
        by_part = attrgetter("part")
        own = sorted((s for s in wanted if s.source == self._rank), key=by_part)
        for part, group in groupby(own, by_part):
            copy_shares(group, self._chunks[part], self._view(part), aims.needs, aims.into)

    def _transfers(self, wants: Sequence[Sequence[Share]], aims: _Aims) -> Iterator[Transfer]:
        """What this rank sends and is sent, in the order that `Peers.exchange` needs: what each
        rank wants first, then what each wants second."""
        every = _sent_ones(wants)
        shards: dict[int, list[torch.Tensor]] = {}
        for _, taker, share in sorted(every, key=lambda one: one[:2]):
            chunk = self._chunks[share.part][share.place]
            if self._rank == share.source:
                if share.part not in shards:
                    shards[share.part] = unpack(self._view(share.part), copy=False)["shards"]
                memory, has = shards[share.part][share.place], chunk.box
            elif self._rank == taker:
                memory, has = aims.into[chunk.name], aims.needs[chunk.name]
            else:
                continue
            kind = dtype_named(chunk.dtype)
            for box in pieces(share.box, chunk.box[1], PIECE_BYTES // kind.itemsize):
                place = partial(_move, narrowed(memory, has, box), kind)
                size = prod(box[1]) * kind.itemsize
                if self._rank == taker:
                    yield Transfer(share.source, size, False, partial(place, gives=False))
                else:
                    yield Transfer(taker, size, True, partial(place, gives=True))

    def fetched(self, wants: Sequence[Sequence[Share]], aims: _Aims) -> Fetched:
        """How it went."""
        every = _sent_ones(wants)
        sent = [share for _, taker, share in every if taker == self._rank]
        givers = [share.source for share in sent]
        part = self._whole_of[self._rank]
        if self._rank not in self._ranks[part]:
            givers.append(self._ranks[part][0])
        moved = bool(every or self._sent()) or self._count != self._peers.size
        size = sum(self._size(share) for share in sent)
        return Fetched(aims.found, givers[0] if givers else self._rank, size, moved)

    def _size(self, share: Share) -> int:
        chunk = self._chunks[share.part][share.place]
        return prod(share.box[1]) * dtype_named(chunk.dtype).itemsize


def _share(source: int, part: int, place: int, box: Any) -> Share:
    begins, sizes = box
    return Share(source, part, place, (tuple(begins), tuple(sizes)))


def _sent_ones(wants: Sequence[Sequence[Share]]) -> list[tuple[int, int, Share]]:
    """What ranks want of others: the how manieth of a rank's, that rank, and what it is."""
    return [
        (number, taker, share)
        for taker, every in enumerate(wants)
        for number, share in enumerate(one for one in every if one.source != taker)
    ]


def _move(memory: torch.Tensor, kind: torch.dtype, data: torch.Tensor, *, gives: bool) -> None:
    """Between the memory of some elements, and their bytes."""
    elements = data.view(kind).view(memory.shape)
    if gives:
        elements.copy_(memory)
    else:
        memory.copy_(elements)


def _whole_in(pack: memoryview) -> Any:
    whole = unpack(pack, copy=False)["whole"]
    if not isinstance(whole, dict) or whole.keys() != {"state", "ways"}:
        raise CheckpointCorrupt("a part says that it has what is not sharded, and has not")
    return whole


def _packed(whole: Any) -> bytearray:
    layout = lay_out(whole)
    memory = bytearray(layout.size)
    fill(layout, torch.frombuffer(memory, dtype=torch.uint8))
    return memory


def _check_sums(packs: Mapping[int, bytearray], said: Mapping[int, list[int]]) -> None:
    for part, pack in packs.items():
        if zlib.crc32(pack) != said[part][1]:
            raise CheckpointCorrupt(f"what part {part} has beside its shards came changed")


def _compare(words: Words, step: int) -> None:
    """Whether what was sent came, by both ends' sums."""
    sums: dict[tuple[int, int], int] = {}
    for rank, word in enumerate(words):
        for sender, taker, crc in word["sums"]:
            other = sums.setdefault((sender, taker), crc)
            if other != crc:
                sent, came = (crc, other) if rank == sender else (other, crc)
                raise CheckpointCorrupt(
                    f"step {step} was changed on its way: rank {sender} sent CRC-32 {sent:08x}, "
                    f"{came:08x} came to rank {taker}"
                )


def _is_bare(state: Any, way: Way) -> bool:
    """Whether a tensor stands there itself, and not in an object that has a state."""
    for key in way:
        if holder_of(state) is not None:
            return False
        state = parts_of(state).get(key)
    return True
