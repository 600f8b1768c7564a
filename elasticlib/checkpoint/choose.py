"""Which state all ranks go on from, and who gives it to whom: a function of what everyone holds.

The newest state that is whole over all ranks is taken, whoever holds it. All ranks compute the
plan from the same inventories, so it is the same everywhere and nobody has to be told.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import count

import attrs

from .held import Held

MEMORY, DISK, SHARDED_DISK = "memory", "disk", "sharded disk"
"""`sharded disk` is a state that every rank can reach, and loads its own share of by itself."""

_ORDER = {MEMORY: 0, DISK: 1, SHARDED_DISK: 2}
_IN_ONE_CHAIN = 8

Inventories = Sequence[Sequence[Held]]


@attrs.frozen
class State:
    """What holders hold alike: two `Held`s of the same `State` may stand for one another."""

    step: int
    run: str
    generation: int
    parts: int
    sharded_disk: str | None = None


def state_of(held: Held) -> State:
    """What state, or part of which, this is."""
    name = held.name if held.kind == SHARDED_DISK else None
    return State(held.step, held.run, held.generation, held.parts, name)


@attrs.frozen
class Leg:
    """One pack on its way: `sender` reads `held`; each receiver of `hops` has it from its giver,
    who is the sender or stands before it. hops: pairs of a receiver's rank and its giver's."""

    sender: int
    held: Held
    hops: tuple[tuple[int, int], ...]

    def giver(self, rank: int) -> int | None:
        """From whom `rank` has it; None if it is not among the receivers."""
        return dict(self.hops).get(rank)

    def takers(self, rank: int) -> tuple[int, ...]:
        """To whom `rank` passes it on."""
        return tuple(receiver for receiver, giver in self.hops if giver == rank)


@attrs.frozen
class Plan:
    """How all ranks come to one state.

    kind: the quickest that a holder has it in. own: for each rank what it reads by itself; None
    if it is sent it. rounds: what is sent, one round after the other; in each a rank is on one leg
    at most.
    """

    state: State
    kind: str
    own: tuple[Held | None, ...]
    rounds: tuple[tuple[Leg, ...], ...] = ()

    def origin(self, rank: int) -> tuple[str, int]:
        """What kind of holding `rank` has it from, and whose."""
        if held := self.own[rank]:
            return held.kind, rank
        legs = (leg for legs in self.rounds for leg in legs)
        leg = next(leg for leg in legs if leg.giver(rank) is not None)
        return leg.held.kind, leg.sender


@attrs.frozen
class Choice:
    """plan: None if there is nothing to go on from. passed_over: why newer states were not taken,
    a sentence each."""

    plan: Plan | None
    passed_over: tuple[str, ...] = ()


def choose(
    inventories: Inventories,
    nodes: Sequence[str] | None = None,
    failed: AbstractSet[tuple[int, Held]] = frozenset(),
) -> Choice:
    """The newest state that is whole over all ranks, and each rank's way to it.

    The newest step first; at an equal step what is in memory before what is on a disk, then the
    later generation, then what more ranks hold. A state in parts is whole if there are as many
    ranks as parts and somebody holds each part. Who holds it reads its own; the others are sent
    it, from their own node if somebody there has it, else dealt out over the nodes that do.

    Args:
        inventories: what each rank holds, by rank.
        nodes: the name of each rank's node; by default each rank is on a node of its own.
        failed: what turned out to be damaged or out of reach, with the rank that held it.
    """
    nodes = [str(rank) for rank in range(len(inventories))] if nodes is None else nodes
    passed_over: list[str] = []
    for state, holders in _candidates(inventories, failed):
        reason = _why_not(state, holders, len(inventories))
        if not reason:
            return Choice(_plan(state, holders, nodes), tuple(passed_over))
        passed_over.append(f"step {state.step} ({_kind(holders)}) {reason}")
    return Choice(None, tuple(passed_over))


Holders = dict[int, dict[int, Held]]
"""For each part of a state, who holds it, and as what."""


def _candidates(
    inventories: Inventories, failed: AbstractSet[tuple[int, Held]]
) -> Iterator[tuple[State, Holders]]:
    found: dict[State, Holders] = {}
    for rank, inventory in enumerate(inventories):
        for held in inventory:
            if (rank, held) not in failed:
                here = found.setdefault(state_of(held), {}).setdefault(held.part, {})
                here[rank] = min(here.get(rank, held), held, key=_quickest)
    yield from sorted(found.items(), key=_newest)


def _quickest(held: Held) -> tuple[int, str, str]:
    return _ORDER.get(held.kind, _ORDER[DISK]), held.kind, held.name


def _kind(holders: Holders) -> str:
    every = (held for here in holders.values() for held in here.values())
    return min(every, key=_quickest).kind


def _newest(candidate: tuple[State, Holders]) -> tuple[object, ...]:
    state, holders = candidate
    kind = _ORDER.get(_kind(holders), _ORDER[DISK])
    held_by = sum(map(len, holders.values()))
    last = (state.run, state.parts, state.sharded_disk or "")
    return -state.step, kind, -state.generation, -held_by, *last


def _why_not(state: State, holders: Holders, world: int) -> str:
    if state.sharded_disk is not None:
        away = [rank for rank in range(world) if rank not in holders.get(0, {})]
        return f"is out of reach of {_some(away, 'rank')}" if away else ""
    if state.parts == 1:
        return "" if 0 in holders else "is held by nobody"
    if state.parts != world:
        return f"is in {state.parts} parts, one for each rank, and there are {world} ranks"
    lost = [part for part in range(world) if part not in holders]
    return f"is not whole: nobody holds {_some(lost, 'part')} of {world}" if lost else ""


def _some(numbers: Sequence[int], what: str) -> str:
    first = ", ".join(map(str, numbers[:8]))
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"{what}{'s' if len(numbers) > 1 else ''} {first}{more}"


def _plan(state: State, holders: Holders, nodes: Sequence[str]) -> Plan:
    ranks = range(len(nodes))
    if state.parts == 1:
        own = tuple(holders[0].get(rank) for rank in ranks)
        rounds = [] if state.sharded_disk else _spread(holders[0], nodes)
    else:
        own = tuple(holders[rank].get(rank) for rank in ranks)
        rounds = _each_its_part(holders, nodes)
    return Plan(state, _kind(holders), own, tuple(map(tuple, rounds)))


def _spread(holders: dict[int, Held], nodes: Sequence[str]) -> list[list[Leg]]:
    """One round, in which one holder of each node serves an equal share of the nodes that lack it.

    One is enough: it sends the pack to two others at most, whatever their number is behind them.
    """
    first: dict[str, int] = {}
    for rank in sorted(holders):
        first.setdefault(nodes[rank], rank)
    blocks: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        if rank not in holders:
            blocks.setdefault(node, []).append(rank)
    away = [block for node, block in blocks.items() if node not in first]
    legs = []
    for at, (node, sender) in enumerate(first.items()):
        own = [blocks[node]] if node in blocks else []
        hops = _relay(sender, own) + _relay(sender, away[at :: len(first)])
        if hops:
            legs.append(Leg(sender, holders[sender], hops))
    return [legs] if legs else []


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


def _each_its_part(holders: Holders, nodes: Sequence[str]) -> list[list[Leg]]:
    """Each rank's own part from the least busy of those who hold it, on its own node if any. In
    a round a rank either sends or receives, so that it has one more pack in memory at most, and
    no two wait for each other."""
    busy: dict[int, set[int]] = defaultdict(set)
    rounds: list[list[Leg]] = []
    for rank, node in enumerate(nodes):
        here = holders[rank]
        if rank in here:
            continue
        near = [holder for holder in here if nodes[holder] == node]
        sender = min(near or here, key=lambda holder: (len(busy[holder]), holder))
        at = next(at for at in count() if at not in busy[sender] | busy[rank])
        busy[sender].add(at)
        busy[rank].add(at)
        while at >= len(rounds):
            rounds.append([])
        rounds[at].append(Leg(sender, here[sender], ((rank, sender),)))
    return rounds
