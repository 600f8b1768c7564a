"""A sharded state comes to all ranks, be these more or fewer than those that made it.

Its parts lie wherever somebody holds them: in agents' memories, or on a disk that all reach. Each
rank reads by itself what it needs of those that it reaches, and is sent the rest, each byte once,
into the tensors that the state has: nobody ever has a second state in memory.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from math import prod
from typing import Any

import attrs
import torch

from ..errors import CheckpointCorrupt, StateMismatch
from .cover import Chunk, Share, apart, chunks_of, lacking, pieces, shares
from .pack import fill, lay_out, unpack
from .pack_head import read_meta
from .peers import Agreed, Held, Plan, Search, Transfer, givers, origin
from .sharded import (
    Target,
    copy_shares,
    matched,
    narrowed,
    parameters_in,
    saved_tensors,
    targets_in,
    whole_in,
)
from .state import (
    Way,
    dtype_named,
    fit,
    holder_of,
    parts_of,
    put_shards,
    spoken,
    take_shards,
    values_of,
)

PIECE_BYTES = 2 << 20
"""Of what is sent at once."""

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

    def whole(self) -> Any | None:
        """What is not sharded: of the part of this rank's number, if there were as many ranks and
        somebody has it; else of the first part that somebody has. None as of `Search.attempt`."""
        for part in sorted(set(self._whole_of)):
            takers = [rank for rank, wanted in enumerate(self._whole_of) if wanted == part]
            self._routes[part] = givers(self._ranks[part], self._search.nodes, takers)
        mine = self._whole_of[self._rank]
        here = [part for part in self._routes if self._rank in self._ranks[part]]
        gives = [part for part in here if self._rank in self._routes[part].values()]
        read: dict[int, Any] = {}
        packs: dict[int, memoryview] = {}

        def act(part: int) -> None:
            read[part] = whole_in(self._view(part), copy=False)
            if part in gives:
                packs[part] = _packed(read[part])

        if self._search.attempt(self._plan, {*gives, mine} & {*here}, act) is None:
            return None
        if any(self._routes.values()):
            self._peers.carry(self._step, self._routes, packs)
        return read[mine] if mine in read else unpack(packs[mine], copy=False)

    # -- what is ------------------------------------------------------------------------------

    def fitted(
        self, whole: Any, state: MutableMapping[str, Any], *, strict: bool
    ) -> tuple[Callable[[], None], dict[str, Target], list[Share]]:
        """What puts what was saved into the state; where this rank's own sharded tensors are; and
        from where it has what it needs of them. Raises StateMismatch: it does not fit."""
        saved = whole["state"]

        def is_in_both(way: Way) -> bool:
            return isinstance(saved, dict) and way[0] in saved and way[0] in state

        tensors = saved_tensors([way for way in whole["ways"] if is_in_both(way)], self._chunks)
        shards = take_shards(values_of(state))[1]
        here = {way: shard for way, shard in shards.items() if is_in_both(way)}
        live = matched(tensors, here, parameters_in(state))
        for way, shard in live.items():
            kind = dtype_named(tensors[way].dtype)
            if kind != shard.dtype and _is_bare(state, way):
                raise StateMismatch(
                    f"{spoken(way)} is a sharded tensor of {shard.dtype}, and one of {kind} "
                    "was saved"
                )
        put = fit(state, put_shards(saved, live), strict=strict)
        into = targets_in(live)
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
            lambda: copy_shares(own, self._chunks, self._view, into),
            f"failed at restoring step {self._step}",
        )
        if sent:
            self._peers.exchange(self._step, self._transfers(sent, into))

    def _transfers(self, sent: _Sent, into: _Into) -> Iterator[Transfer]:
        """What this rank sends and is sent, in the order that `Peers.exchange` needs: what each
        rank wants first, then what each wants second."""
        shards: dict[int, list[torch.Tensor]] = {}
        for _, taker, share in sent:
            chunk = self._chunks[share.part][share.place]
            kind = dtype_named(chunk.dtype)
            gives = self._rank == share.source
            if gives:
                if share.part not in shards:
                    shards[share.part] = unpack(self._view(share.part), copy=False)["shards"]
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
            received += prod(share.box[1]) * dtype_named(chunk.dtype).itemsize
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


def _packed(whole: Any) -> memoryview:
    layout = lay_out(whole)
    memory = bytearray(layout.size)
    fill(layout, torch.frombuffer(memory, dtype=torch.uint8))
    return memoryview(memory)


def _is_bare(state: Any, way: Way) -> bool:
    """Whether a tensor stands there itself, and not in an object that has a state."""
    for key in way:
        if holder_of(state) is not None:
            return False
        state = parts_of(state).get(key)
    return True
