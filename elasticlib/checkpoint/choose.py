"""Which state all ranks go on from, and who gives it to whom: a function of what everyone holds.

The newest state is taken, whoever holds it. All ranks compute the plan from the same inventories,
so it is the same everywhere and nobody has to be told. Whether the parts of a sharded state make up
all of it, their heads say (see `cover`); if they do not, what comes next is chosen.
"""

from __future__ import annotations

import abc
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

import attrs

MEMORY, DISK, SHARDED_DISK = "memory", "disk", "sharded disk"
"""What holds a state. Who reaches a `sharded disk` reaches all of its parts."""
_ORDER = {MEMORY: 0, DISK: 1, SHARDED_DISK: 2}
_IN_ONE_CHAIN = 8


# -- what somebody holds ---------------------------------------------------------------------------


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


@attrs.frozen
class Trouble:
    """Why a step that is there is not offered. unread: it could not be read, and may be whole;
    else it is damaged."""

    step: int
    why: str
    unread: bool


class Source(abc.ABC):
    """What one process can reach of the states that are kept: packs (`elasticlib.checkpoint.pack`).

    What reads one raises CheckpointCorrupt if it is damaged; Unreadable if it may be whole, so that
    no older state is taken in its place; and CheckpointError for another reason, such as that it is
    not there any more.
    """

    @abc.abstractmethod
    def held(self) -> Sequence[Held]:
        """What is here, newest first; what is known to be damaged or half written is not."""

    @abc.abstractmethod
    def view(self, held: Held, part: int = 0) -> memoryview:
        """The pack of what `held` names, or of that part of it; writable, and not yet checked.

        Nothing that is saved meanwhile changes it until `release`. What is written to it changes
        no other's.
        """

    @abc.abstractmethod
    def check(self, held: Held, part: int = 0) -> None:
        """Verify every byte of it by its sum, where it has one."""

    def head(self, held: Held, part: int = 0) -> memoryview | bytes:
        """The first bytes of it, all of its outline at least; not checked."""
        return self.view(held, part)

    def release(self) -> None:  # noqa: B027 - most hold nothing
        """What was viewed is not needed any more."""

    def troubles(self) -> Sequence[Trouble]:
        """Of what the last `held` left out."""
        return ()


# -- what is chosen --------------------------------------------------------------------------------


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
    inventories: Sequence[Sequence[Held]], failed: AbstractSet[tuple[int, Held]] = frozenset()
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
class Agreed:
    """What all ranks went on from.

    step: 0 if there was nothing, and then the state is as it was. kind: what rank `rank`, this one,
    has it from, `memory`, `disk`, `sharded disk`, or nothing (""). holder: the rank that read it;
    -1 if there was nothing. moved: whether a rank was sent anything of a sharded state, or there
    was another number of ranks. received: bytes of sharded tensors that this rank was sent.
    passed_over: why newer states were not taken, or others' copies not used, a sentence each.
    """

    step: int
    kind: str
    holder: int
    rank: int
    moved: bool = False
    received: int = 0
    passed_over: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        """As a worker's context has it: `memory` of this rank's own node, which all workers there
        read by themselves, that of a `peer`, or `disk`; empty if there was nothing."""
        if self.kind != MEMORY:
            return DISK if self.kind else ""
        return MEMORY if self.holder == self.rank else "peer"


# -- who gives it to whom --------------------------------------------------------------------------


def givers(holders: Collection[int], nodes: Sequence[str], takers: Iterable[int]) -> dict[int, int]:
    """From whom each rank has a pack that it lacks; each giver stands before those that it gives
    to. One holder of each node serves an equal share of the nodes that lack it, and its own.

    Args:
        nodes: the name of each rank's node. takers: the ranks that need the pack.
    """
    first: dict[str, int] = {}
    for rank in sorted(holders):
        first.setdefault(nodes[rank], rank)
    blocks: dict[str, list[int]] = {}
    for rank in takers:
        if rank not in holders:
            blocks.setdefault(nodes[rank], []).append(rank)
    away = [block for node, block in blocks.items() if node not in first]
    found: dict[int, int] = {}
    for at, (node, sender) in enumerate(first.items()):
        found |= _relay(sender, [blocks[node]] if node in blocks else [])
        found |= _relay(sender, away[at :: len(first)])
    return found


def _relay(sender: int, blocks: Sequence[Sequence[int]]) -> dict[int, int]:
    """From whom each has it: within a block, which is a node's, each from the one before; the
    first ones of blocks in a chain, or where there are many in a binary tree.

    Chunks are passed on while the next ones arrive, so a chain of n costs hardly more than one
    copy; but each link adds a chunk's time, and a tree has fewer links one behind the other.
    """
    fan = 1 if len(blocks) <= _IN_ONE_CHAIN else 2
    found = {}
    for at, block in enumerate(blocks):
        giver = blocks[(at - 1) // fan][0] if at else sender
        for rank in block:
            found[rank] = giver
            giver = rank
    return found


def origin(route: Mapping[int, int], rank: int) -> int:
    """The holder whose pack comes to this rank, or itself, by what `givers` says."""
    while rank in route:
        rank = route[rank]
    return rank
