"""Which state all ranks go on from, and who gives it to whom: a function of what everyone holds.

The newest state is taken, whoever holds it. All ranks compute the plan from the same inventories,
so it is the same everywhere and nobody has to be told. Whether the parts of a sharded state make up
all of it, their heads say (see `cover`); if they do not, what comes next is chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

import attrs

MEMORY, DISK, SHARDED_DISK = "memory", "disk", "sharded disk"
"""What holds a state. Who reaches a `sharded disk` reaches all of its parts."""


@attrs.frozen
class Held:
    """A state, or one rank's part of it, as somebody here holds it.

    step: after which the state was taken. kind: what holds it, such as `memory` or `disk`. name:
    for the one who holds it to find it again, and for people. parts: over how many ranks it is
    sharded, and part, which rank's part this is; 0 of 0 is a state that is the same on all ranks.
    run, generation: by which launch of the job, and in which of its generations, it was made. A
    step that was trained twice, before a loss and after it, is two states, and their parts do not
    fit together.
    """

    step: int
    kind: str
    name: str
    part: int = 0
    parts: int = 0
    run: str = ""
    generation: int = 0

    @property
    def has(self) -> range:
        """The numbers of the parts that this is; of a state that is the same on all ranks, 0."""
        return range(self.parts) if self.kind == SHARDED_DISK else range(self.part, self.part + 1)


_ORDER = {MEMORY: 0, DISK: 1, SHARDED_DISK: 2}
_IN_ONE_CHAIN = 8

Inventories = Sequence[Sequence[Held]]


@attrs.frozen
class State:
    """What holders hold alike: two `Held`s of the same `State` and part may stand for one another.

    disk: the name of a sharded one on a disk, whose parts are not cut as those in memory are.
    """

    step: int
    run: str
    generation: int
    parts: int
    disk: str = ""


def state_of(held: Held) -> State:
    """What state, or part of which, this is."""
    disk = held.name if held.kind == SHARDED_DISK else ""
    return State(held.step, held.run, held.generation, held.parts, disk)


@attrs.frozen
class Plan:
    """What all ranks go on from, if it turns out to be whole.

    kind: the quickest that a holder has it in. holders: of each part that is held, who holds it by
    rank, and as what; a state that is the same on all ranks is part 0.
    """

    state: State
    kind: str
    holders: Mapping[int, Mapping[int, Held]]


def choose(
    inventories: Inventories, failed: AbstractSet[tuple[int, Held]] = frozenset()
) -> Plan | None:
    """The newest state that is held; None if there is none.

    The newest step first; at an equal step what is in memory before what is on a disk, then the
    later generation, then what more ranks hold.

    Args:
        inventories: what each rank holds, by rank.
        failed: what turned out to be damaged, out of reach or not whole, with the rank that held
            it.
    """
    found: dict[State, list[tuple[int, Held]]] = {}
    for rank, inventory in enumerate(inventories):
        for held in inventory:
            if (rank, held) not in failed:
                found.setdefault(state_of(held), []).append((rank, held))
    if not found:
        return None
    state, holdings = min(found.items(), key=_newest)
    holders: dict[int, dict[int, Held]] = {}
    for rank, held in holdings:
        for part in held.has:
            here = holders.setdefault(part, {})
            here[rank] = min(here.get(rank, held), held, key=_quickest)
    return Plan(state, _kind(holdings), holders)


def _newest(candidate: tuple[State, list[tuple[int, Held]]]) -> tuple[object, ...]:
    state, holdings = candidate
    kind = _ORDER.get(_kind(holdings), _ORDER[DISK])
    held_by = len({(rank, held.part) for rank, held in holdings})
    last = (state.run, state.parts, state.disk)
    return -state.step, kind, -state.generation, -held_by, *last


def _kind(holdings: Sequence[tuple[int, Held]]) -> str:
    return min((held for _, held in holdings), key=_quickest).kind


def _quickest(held: Held) -> tuple[int, str, str]:
    return _ORDER.get(held.kind, _ORDER[DISK]), held.kind, held.name


@attrs.frozen
class Leg:
    """One pack on its way: each receiver of `hops` has it from its giver, who is the sender or
    stands before it. hops: pairs of a receiver's rank and its giver's."""

    sender: int
    hops: tuple[tuple[int, int], ...]

    def giver(self, rank: int) -> int | None:
        """From whom `rank` has it; None if it is not among the receivers."""
        return dict(self.hops).get(rank)

    def has(self, rank: int) -> bool:
        """Whether `rank` is among the receivers."""
        return self.giver(rank) is not None

    def takers(self, rank: int) -> tuple[int, ...]:
        """To whom `rank` passes it on."""
        return tuple(receiver for receiver, giver in self.hops if giver == rank)


def legs(holders: Mapping[int, Held], nodes: Sequence[str]) -> tuple[Leg, ...]:
    """How those have a pack who do not hold it; a rank is on one leg at most.

    One holder of each node serves an equal share of the nodes that lack it, and its own. One is
    enough: it sends the pack to two others at most, whatever their number is behind them.

    Args:
        nodes: the name of each rank's node.
    """
    first: dict[str, int] = {}
    for rank in sorted(holders):
        first.setdefault(nodes[rank], rank)
    blocks: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        if rank not in holders:
            blocks.setdefault(node, []).append(rank)
    away = [block for node, block in blocks.items() if node not in first]
    found = []
    for at, (node, sender) in enumerate(first.items()):
        own = [blocks[node]] if node in blocks else []
        hops = _relay(sender, own) + _relay(sender, away[at :: len(first)])
        if hops:
            found.append(Leg(sender, hops))
    return tuple(found)


def _relay(sender: int, blocks: Sequence[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    """Who has it from whom: within a block, which is a node's, each from the one before; the
    first ones of blocks in a chain, or where there are many in a binary tree.

    Chunks are passed on while the next ones arrive, so a chain of n costs hardly more than one
    copy; but each link adds a chunk's time, and a tree has fewer links one behind the other.
    """
    fan = 1 if len(blocks) <= _IN_ONE_CHAIN else 2
    hops = []
    for at, block in enumerate(blocks):
        giver = blocks[(at - 1) // fan][0] if at else sender
        for rank in block:
            hops.append((rank, giver))
            giver = rank
    return tuple(hops)
