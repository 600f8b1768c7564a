"""What the ranks of a job say and send to each other while they save and restore.

Words are said by all at once, so that all know the same and go on alike: what fails on one rank
fails on all, and nobody is left waiting for one that raised. Bytes go from rank to rank in pieces.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from .choose import SHARDED_DISK, Held, Plan, Source, State, Trouble, choose, origin, state_of

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

    def carry(
        self, step: int, routes: Mapping[int, Mapping[int, int]], packs: dict[int, memoryview]
    ) -> None:
        """Bring packs, each by its number, to the ranks that lack them: they come into `packs`.

        Args:
            routes: of each pack, from whom each rank has it, as of `choose.givers`.

        Raises:
            CheckpointError: on all ranks; one has no memory, or got other bytes.
        """
        sizes = self.words({"sizes": [len(packs.get(number, b"")) for number in routes]})

        def make_room() -> None:
            for at, (number, route) in enumerate(routes.items()):
                if self.rank in route:
                    size = sizes[origin(route, self.rank)]["sizes"][at]
                    packs[number] = memoryview(mmap.mmap(-1, size))

        self.all_do(make_room, "has no memory for what it is sent")
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
        raise_any(words, error, f"failed at restoring step {step}")
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
            f"step {step} was changed on its way: rank {ends[0]} sent CRC-32 {sums[0]:08x},"
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
    more = f" (and so did {len(bad) - 1} other ranks)" if len(bad) > 1 else ""
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
        raise_any(words, error, "could not say which states it holds")
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
