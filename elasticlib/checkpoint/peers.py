"""What the ranks of a job say and send to each other while they restore.

Words are said by all at once, so that all know the same and go on alike: what fails on one rank
fails on all, and nobody is left waiting for one that raised. Bytes go from rank to rank in pieces.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

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

CHUNK_BYTES = 16 << 20
_IN_FLIGHT = 4
_TAG = 0x5E00
MAX_SENTENCE = 4000
_KINDS = {StateMismatch: "misfit", Unreadable: "unreadable", CheckpointCorrupt: "corrupt"}
_T = TypeVar("_T")
Words = Sequence[Mapping[str, Any]]


@attrs.frozen(eq=False)
class Transfer:
    """Bytes on their way between this rank and another.

    gives: whether this rank sends them. act: fills memory with them before they are sent, or does
    with them what they are for once they came.
    """

    peer: int
    size: int
    gives: bool
    act: Callable[[torch.Tensor], object]


class Peers:
    """All ranks of a process group that moves CPU tensors; without a group, this process alone.

    All make the same calls, in the same order. A peer that is gone shows as the error that torch
    raises, at the latest when the group's timeout is over.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        if chunk_bytes < 1:
            raise ConfigError(f"need chunk_bytes >= 1, got {chunk_bytes}")
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1
        self.chunk_bytes = chunk_bytes

    def words(self, mine: Mapping[str, Any], error: Exception | None = None) -> list[Any]:
        """What each rank says, by rank: plain JSON, and what has failed there."""
        if error is not None:
            why = describe(error)[:MAX_SENTENCE]
            mine = {**mine, "error": why, "kind": kind_of(error)}
        text = zlib.compress(json.dumps(mine).encode(), 1)
        if self.group is None:
            return [json.loads(zlib.decompress(text))]
        size = torch.tensor([len(text)])
        sizes = [torch.empty_like(size) for _ in range(self.size)]
        dist.all_gather(sizes, size, group=self.group)
        longest = max(int(each) for each in sizes)
        every = [bytearray(longest) for _ in range(self.size)]
        dist.all_gather(
            [torch.frombuffer(each, dtype=torch.uint8) for each in every],
            torch.frombuffer(bytearray(text.ljust(longest, b"\0")), dtype=torch.uint8),
            group=self.group,
        )
        ends = zip(every, sizes, strict=True)
        return [json.loads(zlib.decompress(each[: int(size)])) for each, size in ends]

    def broadcast(self, data: bytearray, giver: int) -> None:
        """Fill everybody's `data`, all of one size, with that of `giver`."""
        if self.group is not None:
            tensor = torch.frombuffer(data, dtype=torch.uint8)
            dist.broadcast(tensor, self._global(giver), group=self.group)

    def send(self, pack: memoryview, takers: Sequence[int]) -> int:
        """Send `pack` to these ranks. Its CRC-32."""
        going = _Window()
        crc = 0
        for chunk, tensor in self._chunks(pack):
            going.add([self._send(tensor, taker) for taker in takers])
            # The sum of one chunk is made while it and those before are under way.
            crc = zlib.crc32(chunk, crc)
        going.finish()
        return crc

    def receive(self, pack: memoryview, giver: int, takers: Sequence[int]) -> int:
        """Fill `pack` from rank `giver`, passing each chunk on to `takers` while the next ones
        come. The CRC-32 of what came."""
        going = _Window()
        crc = 0
        expected = self._chunks(pack)
        coming = deque(self._expect(*each, giver) for each in islice(expected, _IN_FLIGHT))
        while coming:
            chunk, tensor, work = coming.popleft()
            work.wait()
            coming.extend(self._expect(*each, giver) for each in islice(expected, 1))
            going.add([self._send(tensor, taker) for taker in takers])
            crc = zlib.crc32(chunk, crc)
        going.finish()
        return crc

    def exchange(self, transfers: Iterable[Transfer]) -> tuple[list[list[int]], Exception | None]:
        """Send and receive, a few pieces at once.

        All ranks take the transfers between any two of them in one and the same order. So what
        stands first of all that is not done is under way on both of its ends, and nobody waits for
        ever. What an `act` raises does not stop the others.

        Returns:
            For each peer and direction the CRC-32 of all bytes, as [rank that sent, rank that
            received, CRC-32]; and what was raised.
        """
        sums: dict[tuple[int, int], int] = {}
        free: list[bytearray] = []
        going: deque[tuple[Transfer, bytearray, Any]] = deque()
        failed: list[Exception] = []

        def act(one: Transfer, room: bytearray) -> None:
            tensor = torch.frombuffer(room, dtype=torch.uint8)[: one.size]
            failed.extend(filter(None, [tried(lambda: one.act(tensor))[1]]))

        def add_up(one: Transfer, room: bytearray) -> None:
            ends = (self.rank, one.peer) if one.gives else (one.peer, self.rank)
            with memoryview(room) as view, view[: one.size] as data:
                sums[ends] = zlib.crc32(data, sums.get(ends, 0))

        def finish() -> None:
            one, room, work = going.popleft()
            work.wait()
            if not one.gives:
                add_up(one, room)
                act(one, room)
            free.append(room)

        for one in transfers:
            if len(going) == _IN_FLIGHT:
                finish()
            room = free.pop() if free else bytearray()
            room = room if len(room) >= one.size else bytearray(one.size)
            tensor = torch.frombuffer(room, dtype=torch.uint8)[: one.size]
            if one.gives:
                act(one, room)
                add_up(one, room)
            move = dist.isend if one.gives else dist.irecv
            going.append((one, room, move(tensor, self._global(one.peer), self.group, _TAG)))
        while going:
            finish()
        return [[*ends, crc] for ends, crc in sums.items()], failed[0] if failed else None

    def _chunks(self, pack: memoryview) -> Iterator[tuple[memoryview, torch.Tensor]]:
        tensor = torch.frombuffer(pack, dtype=torch.uint8)
        for at in range(0, len(pack), self.chunk_bytes):
            yield pack[at : at + self.chunk_bytes], tensor[at : at + self.chunk_bytes]

    def _send(self, tensor: torch.Tensor, taker: int) -> Any:
        return dist.isend(tensor, self._global(taker), group=self.group, tag=_TAG)

    def _expect(
        self, chunk: memoryview, tensor: torch.Tensor, giver: int
    ) -> tuple[memoryview, torch.Tensor, Any]:
        work = dist.irecv(tensor, self._global(giver), group=self.group, tag=_TAG)
        return chunk, tensor, work

    def _global(self, rank: int) -> int:
        if self.group is None:
            raise CheckpointError(f"there is no rank {rank}: this process is alone")
        return dist.get_global_rank(self.group, rank)


class _Window:
    """Chunks on their way, so many that the wire is busy, and no more."""

    def __init__(self) -> None:
        self._works: deque[list[Any]] = deque()

    def add(self, works: list[Any]) -> None:
        self._works.append(works)
        if len(self._works) > _IN_FLIGHT:
            self._wait_for_one()

    def finish(self) -> None:
        while self._works:
            self._wait_for_one()

    def _wait_for_one(self) -> None:
        for work in self._works.popleft():
            work.wait()


def tried(act: Callable[[], _T]) -> tuple[_T | None, Exception | None]:
    """What it gives, or what it raises: to be said to all before anybody raises it."""
    try:
        return act(), None
    except Exception as error:
        return None, error


def kind_of(error: Exception) -> str:
    """What others have to know of an error beside its sentence."""
    return next((name for kind, name in _KINDS.items() if isinstance(error, kind)), "")


def raise_any(words: Words, mine: Exception | None, what: str) -> None:
    """Raise on all ranks what any of them has said, the same sentence and class."""
    bad = [rank for rank, word in enumerate(words) if "error" in word]
    if not bad:
        return
    more = f" (and so did {len(bad) - 1} other ranks)" if len(bad) > 1 else ""
    kind = StateMismatch if words[bad[0]]["kind"] == "misfit" else CheckpointError
    raise kind(f"rank {bad[0]} {what}: {words[bad[0]]['error']}{more}") from mine


@contextlib.contextmanager
def peers_of(
    group: dist.ProcessGroup | None = None, *, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[Peers]:
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
        yield Peers(group, chunk_bytes=chunk_bytes)
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
        yield Peers(own, chunk_bytes=chunk_bytes)
    finally:
        dist.destroy_process_group(own)
