"""What the ranks of a job hold, on which state they agree, and what they send to each other.

The newest state is taken, whoever holds it. All ranks compute the plan from the same inventories,
so it is the same everywhere and nobody has to be told. Whether the parts of a sharded state make up
all of it, their heads say (see `cover`); if they do not, what comes next is chosen.

Words are said by all at once, so that all know the same and go on alike: what fails on one rank
fails on all, and nobody is left waiting for one that raised. Bytes go from rank to rank in pieces.
"""

from __future__ import annotations

import abc
import contextlib
import json
import mmap
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from itertools import islice
from typing import Any, TypeVar, cast

import attrs
import torch
import torch.distributed as dist

from ..errors import (
    CheckpointCorrupt,
    CheckpointError,
    ConfigError,
    StateMismatch,
    Unreadable,
    describe,
)

MEMORY, DISK, SHARDED_DISK = "memory", "disk", "sharded disk"
"""What holds a state. Who reaches a `sharded disk` reaches all of its parts."""
_ORDER = {MEMORY: 0, DISK: 1, SHARDED_DISK: 2}
_IN_ONE_CHAIN = 8

CHUNK_BYTES = 16 << 20
"""Of a pack, what is sent at once."""
_IN_FLIGHT = 4
_TAG = 0x5E00
_MAX_SENTENCE = 4000
_MAX_TROUBLES, _MAX_WHY = 16, 300
_MAX_HELD = 4096
"""Of what a rank holds, the newest are said."""
_KINDS = {StateMismatch: "misfit", Unreadable: "unreadable", CheckpointCorrupt: "corrupt"}
_T = TypeVar("_T")
Words = Sequence[Mapping[str, Any]]


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


# -- what is chosen: pure --------------------------------------------------------------------------


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
    was another number of ranks. received: bytes of sharded tensors that this rank was sent. size:
    bytes of the pack of a state that is the same on all ranks; 0 if it is sharded or not known.
    passed_over: why newer states were not taken, or others' copies not used, a sentence each.
    """

    step: int
    kind: str
    holder: int
    rank: int
    moved: bool = False
    received: int = 0
    size: int = 0
    passed_over: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        """As a worker's context has it: `memory` of this rank's own node, which all workers there
        read by themselves, that of a `peer`, or `disk`; empty if there was nothing."""
        if self.kind != MEMORY:
            return DISK if self.kind else ""
        return MEMORY if self.holder == self.rank else "peer"


# -- who gives it to whom: pure --------------------------------------------------------------------


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


# -- what they say and send ------------------------------------------------------------------------


@attrs.frozen(eq=False)
class Transfer:
    """Elements that this rank sends to a peer, or has from it.

    memory: where they lie, or are to lie, in any layout and on any device. dtype: as they are sent.
    """

    peer: int
    gives: bool
    memory: torch.Tensor
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Bytes on the wire."""
        return self.memory.numel() * self.dtype.itemsize

    def copy(self, data: torch.Tensor) -> None:
        """Between the memory and the bytes on the wire."""
        elements = data.view(self.dtype).view(self.memory.shape)
        if self.gives:
            elements.copy_(self.memory)
        else:
            self.memory.copy_(elements)


class Peers:
    """All ranks of a process group that moves CPU tensors; without a group, this process alone.

    All make the same calls, in the same order. A peer that is gone shows as the error that torch
    raises, at the latest when the group's timeout is over.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1

    def words(self, mine: Mapping[str, Any], error: Exception | None = None) -> list[Any]:
        """What each rank says, by rank: plain JSON, and what has failed there."""
        text = zlib.compress(json.dumps({**mine, **_said(error)}).encode(), 1)
        if self.group is None:
            return [json.loads(zlib.decompress(text))]
        longest = torch.tensor([len(text)])
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=self.group)
        every = [bytearray(int(longest)) for _ in range(self.size)]
        own = bytearray(text.ljust(int(longest), b"\0"))
        dist.all_gather([_bytes(each) for each in every], _bytes(own), group=self.group)
        # What follows the end is not looked at.
        return [json.loads(zlib.decompressobj().decompress(each)) for each in every]

    def all_do(self, act: Callable[[], _T], what: str) -> _T:
        """Do it on each rank; if it fails on any, say `what` that rank has failed at, on all."""
        found, error = tried(act)
        raise_any(self.words({}, error), error, what)
        return cast(_T, found)

    def results(self, act: Callable[[], Any], what: str) -> list[Any]:
        """What it gives on each rank, plain JSON. If it fails on any: there its error, on the
        others `what` that rank has failed at."""
        found, error = tried(act)
        try:
            words = self.words({"found": found}, error)
        except RuntimeError as lost:
            raise CheckpointError(f"this rank {what}: another rank is gone: {lost}") from error
        if error is not None:
            raise error
        raise_any(words, None, what)
        return [word["found"] for word in words]

    def carry(
        self, step: int, routes: Mapping[int, Mapping[int, int]], packs: dict[int, memoryview]
    ) -> None:
        """Bring packs, each by its number, to the ranks that lack them: they come into `packs`.

        Args:
            routes: of each pack, from whom each rank has it, as of `givers`.

        Raises:
            CheckpointError: on all ranks; one has no memory, or got other bytes.
        """
        sizes = self.words({"sizes": [len(packs.get(number, b"")) for number in routes]})

        def make_room() -> None:
            for at, (number, route) in enumerate(routes.items()):
                if self.rank in route:
                    size = sizes[origin(route, self.rank)]["sizes"][at]
                    packs[number] = memoryview(mmap.mmap(-1, size))

        self.all_do(make_room, "lacks the memory for what it receives")
        sums = []
        for number, route in routes.items():
            takers = [taker for taker, giver in route.items() if giver == self.rank]
            is_in = takers or self.rank in route
            sums.append(self._relay(packs[number], route.get(self.rank), takers) if is_in else 0)
        words = self.words({"sums": sums})
        for at, route in enumerate(routes.values()):
            for taker, giver in route.items():
                sender = origin(route, taker)
                ends = (words[sender]["sums"][at], words[taker]["sums"][at])
                _compare(step, (sender, taker), ends, f" by rank {giver}")

    def _relay(self, pack: memoryview, giver: int | None, takers: Sequence[int]) -> int:
        """Send a pack to these ranks; where there is a giver, what came of it while the next chunks
        come. Its CRC-32."""
        chunks = torch.split(_bytes(pack), CHUNK_BYTES)
        ahead = iter(chunks if giver is not None else ())
        coming = deque(self._move(dist.irecv, one, giver) for one in islice(ahead, _IN_FLIGHT))
        going: deque[list[Any]] = deque()
        crc = at = 0
        for chunk in chunks:
            if coming:
                coming.popleft().wait()
                coming.extend(self._move(dist.irecv, one, giver) for one in islice(ahead, 1))
            going.append([self._move(dist.isend, chunk, taker) for taker in takers])
            # The sum of one chunk is made while it and those before are under way.
            crc = zlib.crc32(pack[at : at + len(chunk)], crc)
            at += len(chunk)
            if len(going) > _IN_FLIGHT:
                _wait(going.popleft())
        for works in going:
            _wait(works)
        return crc

    def exchange(self, step: int, transfers: Iterable[Transfer]) -> None:
        """Send and receive, a few pieces at once.

        All ranks take the transfers between any two of them in one and the same order. So what
        stands first of all that is not done is under way on both of its ends, and nobody waits for
        ever. A piece that cannot be copied does not stop the others.

        Raises:
            CheckpointError: on all ranks; one could not copy a piece, or got other bytes.
        """
        sums: dict[tuple[int, int], int] = {}
        free: list[bytearray] = []
        going: deque[tuple[Transfer, bytearray, Any]] = deque()
        failed: list[Exception] = []

        def copy(one: Transfer, room: bytearray) -> None:
            error = tried(lambda: one.copy(_bytes(room)[: one.size]))[1]
            failed.extend([error] if error else [])
            ends = (self.rank, one.peer) if one.gives else (one.peer, self.rank)
            sums[ends] = zlib.crc32(memoryview(room)[: one.size], sums.get(ends, 0))

        def finish() -> None:
            one, room, work = going.popleft()
            work.wait()
            if not one.gives:
                copy(one, room)
            free.append(room)

        for one in transfers:
            if len(going) == _IN_FLIGHT:
                finish()
            room = free.pop() if free else bytearray()
            room = room if len(room) >= one.size else bytearray(one.size)
            if one.gives:
                copy(one, room)
            move = dist.isend if one.gives else dist.irecv
            going.append((one, room, self._move(move, _bytes(room)[: one.size], one.peer)))
        while going:
            finish()
        error = failed[0] if failed else None
        words = self.words({"sums": [[*ends, crc] for ends, crc in sums.items()]}, error)
        raise_any(words, error, f"failed to restore step {step}")
        every = [{(giver, taker): crc for giver, taker, crc in word["sums"]} for word in words]
        for rank, found in enumerate(every):
            for (giver, taker), crc in found.items():
                if rank == giver:
                    _compare(step, (giver, taker), (crc, every[taker][giver, taker]))

    def _move(self, move: Callable[..., Any], tensor: torch.Tensor, peer: int | None) -> Any:
        """Begin to send to, or to receive from, a peer."""
        if self.group is None or peer is None:
            raise CheckpointError(f"there is no rank {peer}: this process is alone")
        return move(tensor, dist.get_global_rank(self.group, peer), group=self.group, tag=_TAG)


def _bytes(data: bytearray | memoryview) -> torch.Tensor:
    return torch.frombuffer(data, dtype=torch.uint8)


def _wait(works: Iterable[Any]) -> None:
    for work in works:
        work.wait()


def _compare(step: int, ends: tuple[int, int], sums: tuple[int, int], by: str = "") -> None:
    """Whether what a rank sent is what came to another."""
    if sums[0] != sums[1]:
        raise CheckpointCorrupt(
            f"step {step} was corrupted in transit: rank {ends[0]} sent CRC-32 {sums[0]:08x},"
            f" {sums[1]:08x} came to rank {ends[1]}{by}"
        )


def tried(act: Callable[[], _T]) -> tuple[_T | None, Exception | None]:
    """What it gives, or what it raises: to be said to all before anybody raises it."""
    try:
        return act(), None
    except Exception as error:
        return None, error


def _said(error: Exception | None) -> dict[str, str]:
    """What others have to know of an error."""
    if error is None:
        return {}
    kind = next((name for kind, name in _KINDS.items() if isinstance(error, kind)), "")
    return {"error": describe(error)[:_MAX_SENTENCE], "kind": kind}


def raise_any(words: Words, mine: Exception | None, what: str) -> None:
    """Raise on all ranks what any of them has said, the same sentence and class."""
    bad = [rank for rank, word in enumerate(words) if "error" in word]
    if not bad:
        return
    others = "1 other rank" if len(bad) == 2 else f"{len(bad) - 1} other ranks"
    more = f" ({others} failed as well)" if len(bad) > 1 else ""
    kind = StateMismatch if words[bad[0]]["kind"] == "misfit" else CheckpointError
    raise kind(f"rank {bad[0]} {what}: {words[bad[0]]['error']}{more}") from mine


@contextlib.contextmanager
def peers_of(group: dist.ProcessGroup | None = None) -> Iterator[Peers]:
    """The ranks of `group`, by default of the default group, if there is one.

    Where the default group moves no CPU tensors (NCCL), they get a gloo group for the time being.

    Raises:
        ConfigError: `group` moves no CPU tensors and is not of all ranks, or is not this rank's.
    """
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    if group is not None and dist.get_rank(group) < 0:
        raise ConfigError("this process is not in the group given, and restores nothing with it")
    if group is None or "cpu:" in dist.get_backend_config(group):
        yield Peers(group)
        return
    if dist.get_world_size(group) != dist.get_world_size():
        raise ConfigError(
            f"the group given is of {dist.get_backend_config(group)} and moves no CPU tensors:"
            " give one that gloo serves, such as new_group(ranks, backend='gloo')"
        )
    # Not with use_local_synchronization: torch names such a group by its ranks, so the next one
    # of the same ranks would find the addresses of this one, and wait for them.
    own = dist.new_group(backend="gloo")
    try:
        yield Peers(own)
    finally:
        dist.destroy_process_group(own)


# -- what they know --------------------------------------------------------------------------------


class Search:
    """What one restore knows: the same on all ranks, but for what this one can reach.

    nodes: the name of each rank's.
    """

    def __init__(self, peers: Peers, sources: Sequence[Source]) -> None:
        self.peers, self._sources = peers, sources
        self.nodes: list[str] = []
        self._reasons: dict[str, None] = {}
        """Why something was passed over, in the order in which that was found."""
        self._inventories: list[list[Held]] = []
        self._reach: dict[Held, Source] = {}
        self._failed: set[tuple[int, Held]] = set()
        self._troubles: list[Trouble] = []

    def begin(self, node: str, step: int | None) -> None:
        """Tell everybody what is here; of one step alone, if one is given."""
        found, error = tried(lambda: self._list(step))
        words = self.peers.words({"node": node, "only": step, **(found or {})}, error)
        raise_any(words, error, "could not list the states that it holds")
        for rank, word in enumerate(words):
            if word["only"] != words[0]["only"]:
                first, other = (
                    "the newest step" if one is None else f"step {one}"
                    for one in (words[0]["only"], word["only"])
                )
                raise CheckpointError(
                    f"rank 0 asked for {first}, and rank {rank} for {other}: all ranks have to ask "
                    "for the same one, and nothing was restored"
                )
        self.nodes = [word["node"] for word in words]
        self._inventories = [[Held(*row) for row in word["held"]] for word in words]
        self._troubles = [Trouble(*row) for word in words for row in word["troubles"]]

    def _list(self, only: int | None) -> dict[str, Any]:
        troubles: list[Trouble] = []
        for source in self._sources:
            for held in source.held():
                if only in (None, held.step):
                    self._reach.setdefault(held, source)
            troubles += (one for one in source.troubles() if only in (None, one.step))
        newest = sorted(self._reach, key=lambda held: -held.step)
        # What could not be read is always told: nothing older is taken in its place.
        troubles.sort(key=lambda one: (one.unread, one.step))
        rows = [(one.step, one.why[:_MAX_WHY], one.unread) for one in troubles]
        return {
            "held": [attrs.astuple(held) for held in newest[:_MAX_HELD]],
            "troubles": rows[-_MAX_TROUBLES:],
        }

    def passed_over(self, step: int) -> tuple[str, ...]:
        """Why nothing newer than this step was taken, and what is damaged of this one."""
        damaged = (one.why for one in self._troubles if one.step >= step and not one.unread)
        return (*self._reasons, *dict.fromkeys(damaged))

    @property
    def saw_checkpoints(self) -> bool:
        """Whether any rank reached a checkpoint on a disk, whether or not it can be used."""
        held = (held for inventory in self._inventories for held in inventory)
        return bool(self._troubles) or any(one.kind in (DISK, SHARDED_DISK) for one in held)

    def choose(self) -> Plan | None:
        """What all go on from, as far as is known by now.

        Raises:
            CheckpointError: on all ranks, as something newer could not be read.
        """
        plan = choose(self._inventories, self._failed)
        unread = [one for one in self._troubles if one.unread]
        newest = max(unread, key=lambda one: (one.step, one.why), default=None)
        if newest and (plan is None or plan.state.step < newest.step):
            raise CheckpointError(
                f"{newest.why}: it may be whole, so nothing older is taken in its place; start "
                f"again when it can be read, or move its folder away to do without step "
                f"{newest.step}"
            )
        return plan

    def source(self, held: Held) -> Source:
        """Where this rank reaches it."""
        return self._reach[held]

    def place(self, rank: int, held: Held) -> tuple[str, Held]:
        """What two ranks have in common that read the same bytes."""
        return ("" if held.kind == SHARDED_DISK else self.nodes[rank]), held

    def attempt(
        self, plan: Plan, parts: Iterable[int], act: Callable[[int], Any]
    ) -> list[dict[int, Any]] | None:
        """What `act` gave on each rank of the parts that it has been given there. None, on all
        ranks, if it failed of one: nobody is to read that part there any more."""
        done, bad = [], []
        for part in parts:
            found, error = tried(partial(act, part))
            if error is None:
                done.append([part, found])
            else:
                bad.append([part, _said(error)])
        words = self.peers.words({"done": done, "bad": bad})
        for rank, word in enumerate(words):
            for part, said in word["bad"]:
                self.fail(rank, plan.holders[part][rank], said["error"], said["kind"])
        if any(word["bad"] for word in words):
            return None
        return [dict(word["done"]) for word in words]

    def fail(self, rank: int, held: Held, why: str, kind: str = "") -> None:
        """Nobody is to have this from there. kind: of the error, as words have it."""
        place = self.place(rank, held)
        if held.parts:
            ranks = range(self.peers.size)
            self._failed |= {(at, held) for at in ranks if self.place(at, held) == place}
        self._failed.add((rank, held))
        self._reasons[f"rank {rank}'s step {held.step} ({held.kind}, {held.name}): {why}"] = None
        if kind == "unreadable":
            self._troubles.append(Trouble(held.step, why, unread=True))

    def pass_over(self, state: State, why: str) -> None:
        """Nobody is to have this state."""
        for rank, inventory in enumerate(self._inventories):
            self._failed |= {(rank, held) for held in inventory if state_of(held) == state}
        self._reasons[why] = None
