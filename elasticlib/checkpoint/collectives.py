"""Collective operations on CPU data: JSON values, results and errors, packs, and tensor elements.

Every rank of a group makes the same calls in the same order. An error on one rank is raised on all
ranks with the same message, so that no rank waits for one that failed.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast

import attrs
import torch
import torch.distributed as dist

from ..errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointUnreadableError,
    ConfigError,
    StateMismatchError,
    format_error,
    require_not_none,
)

BROADCAST_CHUNK_BYTES = 4 << 20  # a rank that neither sends nor receives needs buffers of this size
MAX_IN_FLIGHT = 4  # chunks or transfers that are under way at the same time
_TRANSFER_TAG = 0x5E00  # separates transfers from sends and receives of the training script
_MAX_ERROR_CHARS = 4000
_T = TypeVar("_T")


@attrs.frozen
class RankError:
    """The description of an exception on one rank, which all ranks receive."""

    message: str
    is_mismatch: bool = False  # the saved state does not match the state of the script
    is_unreadable: bool = False  # the data could not be read, but may be intact
    is_corrupt: bool = False

    @classmethod
    def of(cls, error: Exception) -> RankError:
        """Return the description of an exception."""
        return cls(
            format_error(error)[:_MAX_ERROR_CHARS],
            is_mismatch=isinstance(error, StateMismatchError),
            is_unreadable=isinstance(error, CheckpointUnreadableError),
            is_corrupt=isinstance(error, CheckpointCorruptError),
        )


RankErrors = Sequence[RankError | None]  # by rank; None for a rank that succeeded


@attrs.frozen(eq=False)
class Transfer:
    """Elements that this rank sends to a peer, or receives from it."""

    peer: int
    is_send: bool
    num_elements: int
    dtype: torch.dtype  # of the elements while they are sent
    # Returns the source or destination, with any strides and on any device. It may raise.
    find_tensor: Callable[[], torch.Tensor]

    @property
    def num_bytes(self) -> int:
        """The number of bytes that are sent."""
        return self.num_elements * self.dtype.itemsize

    def copy(self, buffer: torch.Tensor) -> None:
        """Copy from the tensor to `buffer` if this rank sends, else from `buffer` to the tensor."""
        tensor = self.find_tensor()
        elements = buffer.view(self.dtype).view(tensor.shape)
        if self.is_send:
            elements.copy_(tensor)
        else:
            tensor.copy_(elements)


class PeerGroup:
    """The ranks of a process group that transfers CPU tensors, or this process alone.

    If a peer is lost, torch raises RuntimeError in the methods, at the latest after the group's
    timeout. Not thread-safe.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group  # None: this process alone
        self.rank = dist.get_rank(group) if group is not None else 0
        self.world_size = dist.get_world_size(group) if group is not None else 1

    @classmethod
    def connect(cls, store: Any, name: str, rank: int, world_size: int) -> PeerGroup:
        """Connect some of the ranks to each other; only these ranks make the call.

        `new_group` would need calls of all ranks of the job. With `use_local_synchronization` it
        takes the group's name from the number of groups that a process has, which differs.

        Args:
            store: the store in which the default process group was formed.
            name: a name that no group had before; the same on these ranks.
            rank: this rank, from 0 to `world_size - 1`.
            world_size: the number of ranks that connect.
        """
        peers = cls()
        torch_dist = cast(Any, dist)  # Its stubs lack these names.
        own_store = torch_dist.PrefixStore(f"{name}/", store)
        peers.group = torch_dist.ProcessGroupGloo(own_store, rank, world_size)
        peers.rank, peers.world_size = rank, world_size
        return peers

    def all_gather_json(self, value: Any) -> list[Any]:
        """Return the JSON values of all ranks, by rank."""
        text = zlib.compress(json.dumps(value).encode(), 1)
        if self.group is None:
            return [json.loads(zlib.decompress(text))]
        max_size = torch.tensor([len(text)])
        dist.all_reduce(max_size, dist.ReduceOp.MAX, group=self.group)
        padded = bytearray(text.ljust(int(max_size), b"\0"))
        gathered = [bytearray(len(padded)) for _ in range(self.world_size)]
        dist.all_gather(list(map(_as_tensor, gathered)), _as_tensor(padded), group=self.group)
        # A decompressor object ignores the padding.
        return [json.loads(zlib.decompressobj().decompress(each)) for each in gathered]

    # -- results and errors -----------------------------------------------------------------------

    def all_gather_errors(self, error: Exception | None) -> RankErrors:
        """Send this rank's error to all ranks, and return the errors of all ranks."""
        row = attrs.astuple(RankError.of(error)) if error else None
        return [RankError(*row) if row else None for row in self.all_gather_json(row)]

    def run_on_all(self, action: Callable[[], _T], failure: str) -> _T:
        """Run an action on each rank and return the result of this rank.

        Args:
            action: the action, which contains no collective operation.
            failure: what a rank failed to do, for the message: `rank 3 {failure}: {error}`.

        Raises:
            StateMismatchError: the action raised it on a rank; on all ranks.
            CheckpointError: the action raised any other exception on a rank; on all ranks.
        """
        result, error = capture_exception(action)
        raise_first_error(self.all_gather_errors(error), failure, cause=error)
        return cast(_T, result)

    def gather_results(self, action: Callable[[], Any], failure: str) -> list[Any]:
        """Run an action on each rank and return the results of all ranks, by rank.

        Args:
            action: returns a JSON value.
            failure: what a rank failed to do, as in `run_on_all`.

        Raises:
            StateMismatchError: the action raised it on another rank.
            CheckpointError: the action raised any other exception on another rank, or a rank was
                lost.
            Exception: the exception of this rank's own action is raised unchanged.
        """
        result, error = capture_exception(action)
        row = attrs.astuple(RankError.of(error)) if error else None
        try:
            rows = self.all_gather_json([result, row])
        except RuntimeError as lost:
            raise CheckpointError(f"this rank {failure}: another rank was lost: {lost}") from error
        if error is not None:
            raise error
        raise_first_error([RankError(*row) if row else None for _, row in rows], failure)
        return [result for result, _ in rows]

    # -- bytes ------------------------------------------------------------------------------------

    def broadcast_pack(
        self, step: int, pack: memoryview | None, sender: int, receivers: Collection[int]
    ) -> memoryview | None:
        """Send a pack from one rank to the ranks that lack it, in chunks.

        Args:
            step: the step of the state, for messages.
            pack: the pack on the sender; ignored on other ranks.
            sender: the rank that has the pack.
            receivers: the ranks that need the pack. All other ranks take part and discard it.

        Returns:
            The pack on the sender and on receivers, else None.

        Raises:
            CheckpointError: a receiver has no memory for the pack; on all ranks.
            CheckpointCorruptError: a receiver got other bytes than were sent; on all ranks.
        """
        own_size = len(pack) if self.rank == sender and pack is not None else 0
        size = self.all_gather_json(own_size)[sender]

        def allocate() -> memoryview | None:
            if self.rank in receivers:
                return memoryview(mmap.mmap(-1, size))
            return pack if self.rank == sender else None

        memory = self.run_on_all(allocate, "lacks the memory for the state that it receives")
        checksums = self.all_gather_json(self._broadcast_chunks(memory, size, sender))
        for receiver in receivers:
            _check_arrival(step, sender, receiver, checksums[sender], checksums[receiver])
        return memory

    def _broadcast_chunks(self, memory: memoryview | None, size: int, sender: int) -> int:
        """Send `memory`, or receive `size` bytes into it. Return the CRC-32 of the bytes.

        A rank without memory receives the bytes and discards them.
        """
        group = require_not_none(self.group, "a group of several ranks")
        source = dist.get_global_rank(group, sender)
        pending: deque[tuple[memoryview, Any]] = deque()
        free_buffers: list[memoryview] = []
        crc = 0

        def finish() -> None:
            nonlocal crc
            chunk, work = pending.popleft()
            work.wait()
            crc = zlib.crc32(chunk, crc)
            if memory is None:
                free_buffers.append(chunk)

        for begin in range(0, size, BROADCAST_CHUNK_BYTES):
            if len(pending) == MAX_IN_FLIGHT:
                finish()
            end = min(size, begin + BROADCAST_CHUNK_BYTES)
            if memory is not None:
                chunk = memory[begin:end]
            else:
                # The backend may forward chunks from this buffer, so each one needs its own.
                buffer = free_buffers.pop() if free_buffers else bytearray(BROADCAST_CHUNK_BYTES)
                chunk = memoryview(buffer)[: end - begin]
            work = dist.broadcast(_as_tensor(chunk), source, group=group, async_op=True)
            pending.append((chunk, work))
        while pending:
            finish()
        return crc

    def exchange(self, step: int, transfers: Iterable[Transfer]) -> None:
        """Send and receive elements, a few transfers at a time.

        All ranks take their transfers from one common order. So the first unfinished transfer in
        this order is under way on both of its ranks, and no rank waits forever. If the elements of
        a transfer cannot be copied, the other transfers continue.

        Args:
            step: the step of the state, for messages.
            transfers: the transfers of this rank, in the common order. What may fail is in
                `Transfer.find_tensor`: if the iteration failed, the peers would wait for ever.

        Raises:
            CheckpointError: a rank could not copy a transfer; on all ranks.
            CheckpointCorruptError: a rank received other bytes than were sent; on all ranks.
        """
        checksums: dict[tuple[int, int], int] = {}  # CRC-32 of all bytes from a rank to a rank
        pending: deque[tuple[Transfer, bytearray, Any]] = deque()
        free_buffers: list[bytearray] = []
        first_error: Exception | None = None

        def copy(transfer: Transfer, buffer: bytearray) -> None:
            nonlocal first_error
            data = memoryview(buffer)[: transfer.num_bytes]
            _, error = capture_exception(lambda: transfer.copy(_as_tensor(data)))
            first_error = first_error or error
            ends = (self.rank, transfer.peer)
            ends = ends if transfer.is_send else (transfer.peer, self.rank)
            checksums[ends] = zlib.crc32(data, checksums.get(ends, 0))

        def finish() -> None:
            transfer, buffer, work = pending.popleft()
            work.wait()
            if not transfer.is_send:
                copy(transfer, buffer)
            free_buffers.append(buffer)

        for transfer in transfers:
            if len(pending) == MAX_IN_FLIGHT:
                finish()
            buffer = free_buffers.pop() if free_buffers else bytearray()
            if len(buffer) < transfer.num_bytes:
                buffer = bytearray(transfer.num_bytes)
            if transfer.is_send:
                copy(transfer, buffer)
            pending.append((transfer, buffer, self._start(transfer, buffer)))
        while pending:
            finish()
        errors = self.all_gather_errors(first_error)
        raise_first_error(errors, f"failed to restore step {step}", cause=first_error)
        rows = self.all_gather_json([[*ends, crc] for ends, crc in checksums.items()])
        gathered = [{(sender, receiver): crc for sender, receiver, crc in row} for row in rows]
        for rank, sent in enumerate(gathered):
            for (sender, receiver), crc in sent.items():
                if sender == rank:
                    _check_arrival(
                        step, sender, receiver, crc, gathered[receiver][sender, receiver]
                    )

    def _start(self, transfer: Transfer, buffer: bytearray) -> Any:
        start = dist.isend if transfer.is_send else dist.irecv
        data = _as_tensor(memoryview(buffer)[: transfer.num_bytes])
        group = require_not_none(self.group, "a group of several ranks")
        peer = dist.get_global_rank(group, transfer.peer)
        return start(data, peer, group=group, tag=_TRANSFER_TAG)


def _as_tensor(data: bytearray | memoryview) -> torch.Tensor:
    return torch.frombuffer(data, dtype=torch.uint8)


def _check_arrival(step: int, sender: int, receiver: int, sent: int, received: int) -> None:
    if sent != received:
        raise CheckpointCorruptError(
            f"step {step} was corrupted in transit: rank {sender} sent CRC-32 {sent:08x}, rank "
            f"{receiver} received {received:08x}"
        )


def capture_exception(action: Callable[[], _T]) -> tuple[_T | None, Exception | None]:
    """Run an action and return its result and its exception, one of which is None."""
    try:
        return action(), None
    except Exception as error:
        return None, error


def raise_first_error(errors: RankErrors, failure: str, cause: Exception | None = None) -> None:
    """Raise the error of the lowest rank that failed, or do nothing if no rank failed.

    The message is the same on all ranks.

    Args:
        errors: the errors of all ranks.
        failure: what the rank failed to do, for the message: `rank 3 {failure}: {error}`.
        cause: the exception of this rank, if it failed.

    Raises:
        StateMismatchError: the first error is one.
        CheckpointError: the first error is any other one.
    """
    failed = [(rank, error) for rank, error in enumerate(errors) if error is not None]
    if not failed:
        return
    rank, first = failed[0]
    others = "1 other rank" if len(failed) == 2 else f"{len(failed) - 1} other ranks"
    more = f" ({others} failed as well)" if len(failed) > 1 else ""
    kind = StateMismatchError if first.is_mismatch else CheckpointError
    raise kind(f"rank {rank} {failure}: {first.message}{more}") from cause


@contextlib.contextmanager
def peer_group(group: dist.ProcessGroup | None = None) -> Iterator[PeerGroup]:
    """Provide a group that transfers CPU tensors between the ranks of `group`.

    Args:
        group: the ranks; by default the default group, or this process alone if there is none. If
            the group has all ranks and transfers no CPU tensors (NCCL), a temporary gloo group of
            the same ranks is used.

    Raises:
        ConfigError: this process is not in `group`, or `group` transfers no CPU tensors and does
            not have all ranks.
    """
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    if group is not None and dist.get_rank(group) < 0:
        raise ConfigError("this process is not in the given group, so it cannot restore with it")
    if group is None or "cpu:" in dist.get_backend_config(group):
        yield PeerGroup(group)
        return
    if dist.get_world_size(group) != dist.get_world_size():
        raise ConfigError(
            f"the given group uses {dist.get_backend_config(group)} and transfers no CPU tensors:"
            " give a group that gloo serves, such as new_group(ranks, backend='gloo')"
        )
    # Without use_local_synchronization: torch names such a group by its ranks, so the next group of
    # the same ranks would find the addresses of this one, and wait for them.
    temporary = dist.new_group(backend="gloo")
    try:
        yield PeerGroup(temporary)
    finally:
        dist.destroy_process_group(temporary)
