"""What the ranks of a job say and send to each other while they restore.

Words are said by all at once, so that all know the same and go on alike. Packs go from one to the
next in chunks, straight from and into the memory that they lie in.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from ..errors import CheckpointError, ConfigError

Pack: TypeAlias = mmap.mmap | bytearray

CHUNK_BYTES = 16 << 20
MAX_WORD_BYTES = 64 << 10
_IN_FLIGHT = 4
_TAG = 0x5E00


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

    def words(self, mine: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What each rank says, by rank: plain JSON, of at most `MAX_WORD_BYTES` bytes."""
        said = json.dumps(mine).encode()
        if len(said) > MAX_WORD_BYTES:
            raise CheckpointError(
                f"a rank says at most {MAX_WORD_BYTES} bytes at once, this is {len(said)}"
            )
        if self.group is None:
            return [json.loads(said)]
        size = torch.tensor([len(said)])
        sizes = [torch.empty_like(size) for _ in range(self.size)]
        dist.all_gather(sizes, size, group=self.group)
        longest = max(int(each) for each in sizes)
        every = [bytearray(longest) for _ in range(self.size)]
        dist.all_gather(
            [torch.frombuffer(each, dtype=torch.uint8) for each in every],
            torch.frombuffer(bytearray(said.ljust(longest)), dtype=torch.uint8),
            group=self.group,
        )
        return [json.loads(each) for each in every]

    def send(self, pack: Pack, takers: Sequence[int]) -> int:
        """Send `pack` to these ranks. Its CRC-32."""
        going = _Window()
        crc = 0
        for chunk, tensor in self._chunks(pack):
            going.add([self._send(tensor, taker) for taker in takers])
            # The sum of one chunk is made while it and those before are under way.
            crc = zlib.crc32(chunk, crc)
        going.finish()
        return crc

    def receive(self, pack: Pack, giver: int, takers: Sequence[int]) -> int:
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

    def _chunks(self, pack: Pack) -> Iterator[tuple[memoryview, torch.Tensor]]:
        bytes_, tensor = memoryview(pack), torch.frombuffer(pack, dtype=torch.uint8)
        for at in range(0, len(bytes_), self.chunk_bytes):
            yield bytes_[at : at + self.chunk_bytes], tensor[at : at + self.chunk_bytes]

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
