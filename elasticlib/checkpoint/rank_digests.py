"""Digests of a rank's state, by which ranks find out that they would save different values.

A state that is not sharded is written by rank 0, and a restore gives rank 0's values to all ranks.
So a value that differs by rank would be lost. Each rank computes a digest of its state when it
saves. Rank 0 reads the digests of the others from the store in which the process group was formed,
and no rank waits for another one. This module neither writes checkpoints nor restores them.

A digest has one CRC-32 for each container, plain value and tensor of the state, so that a
difference has a path. Small tensors, such as the state of a generator, are read completely; of a
larger one, `NUM_SAMPLES` elements are. Devices and memory layouts do not matter. Buffers of modules
are left out: under DDP the statistics of BatchNorm differ by rank until those of rank 0 are
broadcast in the next forward pass.
"""

from __future__ import annotations

import ctypes
import logging
import math
import struct
import zlib
from array import array
from collections.abc import Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import attrs
import torch

from ..errors import CheckpointError
from .safetensors_header import compact_json
from .state_tree import FlatState, StatePath, StructurePart, encode_structure, format_path
from .tensor_layout import is_copyable

if TYPE_CHECKING:
    from .collectives import PeerGroup

log = logging.getLogger("elasticlib.checkpoint")

SMALL_BYTES = 8192  # A generator's state has about 5 KB.
NUM_SAMPLES = 64  # elements of a larger tensor
SAMPLE_RUN = 16  # Adjacent elements are in one cache line or two.
MAX_ROWS = 1024  # Longer lists of parts are divided into so many groups, with one CRC-32 each.
MAX_SHOWN_PATHS = 3

_COUNTS = struct.Struct("<III")  # containers and leaves, plain values, tensors
_NUMBER = struct.Struct("<Q")
_BATCH_NORM_BUFFERS = frozenset({"running_mean", "running_var", "num_batches_tracked"})


# -- digests ---------------------------------------------------------------------------------------


@attrs.frozen(eq=False)
class StateDigest:
    """The digest of a rank's state, with the paths of the state's parts."""

    table: bytes  # Two ranks have equal tables if their states are equal.
    parts: Sequence[StructurePart]

    def find_difference(self, other: bytes) -> list[StatePath]:
        """Return the paths at which this state differs from that of another rank.

        A path may stand for a group of parts that begins there, if there are very many.

        Args:
            other: the table of the other rank.
        """
        if other == self.table:
            return []
        paths = (
            [part.path for part in self.parts],
            [part.path for part in self.parts if part.is_value],
            [part.path for part in self.parts if part.is_tensor],
        )
        differing: list[StatePath] = []
        tables = zip(paths, _split_table(self.table), _split_table(other), strict=True)
        for named, own, others in tables:
            group = _group_size(len(named))
            pairs = enumerate(zip(own, others, strict=False))
            differing += [named[at * group] for at, (mine, theirs) in pairs if mine != theirs]
            if named is paths[0] and differing:
                break  # Other keys shift all that follows.
        return differing or [()]


def _group_size(count: int) -> int:
    return max(1, math.ceil(count / MAX_ROWS))


def _split_table(table: bytes) -> list[array[int]]:
    """Return the CRC-32s of the structure, the plain values and the tensors."""
    at, rows = _COUNTS.size, []
    for count in _COUNTS.unpack_from(table):
        end = at + 4 * math.ceil(count / _group_size(count))
        rows.append(array("I", table[at:end]))
        at = end
    return rows


@torch.no_grad()
def digest_state(flat: FlatState) -> StateDigest:
    """Return the digest of a state, without its sharded tensors.

    Raises:
        CheckpointError: A key cannot be saved; the message names its path.
    """
    parts = encode_structure(flat.structure, range(len(flat.tensors))).parts
    rows = (
        _checksums([part.text.encode("utf-8", "backslashreplace") for part in parts]),
        _checksums([compact_json(value).encode() for value in flat.values]),
        _checksums(_tensor_samples(flat, [part for part in parts if part.is_tensor])),
    )
    counts = _COUNTS.pack(len(parts), len(flat.values), len(flat.tensors))
    return StateDigest(b"".join((counts, *rows)), parts)


def _checksums(items: Sequence[bytes]) -> bytes:
    """Return the CRC-32 of each item, or of each group of items if there are very many."""
    group = _group_size(len(items))
    groups = (b"\n".join(items[at : at + group]) for at in range(0, len(items), group))
    return array("I", map(zlib.crc32, groups)).tobytes()


# -- the comparison ------------------------------------------------------------------------------


class StatesDifferError(CheckpointError):
    """A rank has other values than rank 0, which a restore would replace by those of rank 0."""


def difference_error(
    step: int, rank: int, paths: Sequence[StatePath], *, is_durable: bool = False
) -> StatesDifferError:
    """Return the error for a state that differs between rank 0 and another rank.

    Args:
        step: the step that was to be saved.
        rank: the other rank.
        paths: what `StateDigest.find_difference` returned.
        is_durable: whether the checkpoint has been committed already.
    """
    shown = ", ".join(map(format_path, paths[:MAX_SHOWN_PATHS]))
    num_more = len(paths) - MAX_SHOWN_PATHS
    more = f" (and {num_more} more)" if num_more > 0 else ""
    outcome = "was saved with rank 0's values only" if is_durable else "is not saved"
    name = next((path[0] for path in paths if path), "name")
    return StatesDifferError(
        f"step {step} {outcome}: {shown}{more} is not the same on rank {rank} as on rank 0, and a "
        "restore would give rank 0's values to all ranks. Make the keys and values equal on all "
        f"ranks, or save them by rank: CheckpointManager(..., per_rank=({name!r},))"
    )


class DigestExchange:
    """The digests that the ranks put into the store of their process group.

    Args:
        store: the store, or None.
        prefix: of the keys; the same on all ranks of a manager, and no other manager has it.
        rank: this rank.
        world_size: the number of ranks.
    """

    def __init__(self, store: Any, prefix: str, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._store, self._prefix = store, prefix

    @property
    def is_needed(self) -> bool:
        """True if there are other ranks whose digests can be read."""
        return self._store is not None and self.world_size > 1

    def put(self, number: int, digest: StateDigest) -> None:
        """Publish this rank's digest for a save. The digests of the last two saves are kept.

        A TCP store does not answer, so this does not wait for its host.
        """
        try:
            self._store.set(self._key(number, self.rank), _NUMBER.pack(number) + digest.table)
        except (RuntimeError, NotImplementedError) as lost:
            self._give_up(lost)

    def read(self, number: int, rank: int) -> bytes | None:
        """Return the table of a rank's digest for a save, or None if it is not there."""
        key = self._key(number, rank)
        try:
            if not self.is_needed or not self._store.check([key]):
                return None
            value: bytes = self._store.get(key)
        except (RuntimeError, NotImplementedError) as lost:
            self._give_up(lost)
            return None
        is_same = _NUMBER.unpack_from(value)[0] == number
        return value[_NUMBER.size :] if is_same else None

    def _give_up(self, lost: Exception) -> None:
        log.info("cannot compare the states of the ranks through their store: %s", lost)
        self._store = None

    def _key(self, number: int, rank: int) -> str:
        # Each rank overwrites its key of the save before the last one. A rank that is one save
        # ahead of rank 0 does not overwrite what rank 0 has not read.
        return f"{self._prefix}/digests/{rank}/{number % 2}"


class RankComparison:
    """The comparison of one save on rank 0 with the digests of the other ranks.

    Some of the digests may arrive after the checkpoint was committed, or never, if only rank 0
    saves.
    """

    def __init__(
        self, exchange: DigestExchange, number: int, step: int, digest: StateDigest
    ) -> None:
        self._exchange, self._number, self._step, self._digest = exchange, number, step, digest
        self._waiting = set(range(1, exchange.world_size))  # their digests are not compared yet

    @property
    def is_complete(self) -> bool:
        """True if all ranks have the same state."""
        return not self._waiting

    def check(self) -> None:
        """Raise StatesDifferError for a difference that is known before the commit."""
        if (error := self.find_difference(is_durable=False)) is not None:
            raise error

    def find_difference(self, *, is_durable: bool) -> StatesDifferError | None:
        """Compare the digests that have arrived since the last call. This never waits for a rank.

        Args:
            is_durable: whether the checkpoint has been committed already.
        """
        for rank in sorted(self._waiting):
            table = self._exchange.read(self._number, rank)
            if table is not None:
                self._waiting.discard(rank)
                if paths := self._digest.find_difference(table):
                    return difference_error(self._step, rank, paths, is_durable=is_durable)
            elif is_durable:
                break  # The training waits for this call, and perhaps only rank 0 saves.
        return None


class PartComparison:
    """The comparison of what is not sharded in the parts of a sharded save, on all its ranks.

    Args:
        step: the step.
        digest: the digest of what rank 0 saves for this rank, or None if this rank saves all of its
            values itself.
    """

    def __init__(self, step: int, digest: StateDigest | None) -> None:
        self._step, self._digest = step, digest
        self.summary = "" if digest is None else sha256(digest.table).hexdigest()[:32]

    def check(self, peers: PeerGroup, summaries: Sequence[str]) -> None:
        """Raise CheckpointError on all ranks if one has other values than rank 0."""
        digest, failure = self._digest, f"could not save step {self._step}"
        if all(summary in ("", summaries[0]) for summary in summaries):
            return
        own = digest.table.hex() if digest is not None and peers.rank == 0 else ""
        first = bytes.fromhex(peers.gather_results(lambda: own, failure)[0])

        def compare() -> None:
            if digest is not None and (paths := digest.find_difference(first)):
                raise difference_error(self._step, peers.rank, paths)

        peers.gather_results(compare, failure)


# -- tensors ---------------------------------------------------------------------------------------


def _tensor_samples(flat: FlatState, parts: Sequence[StructurePart]) -> list[bytes]:
    """Return the dtype and the shape of each tensor, and the elements of it that are read."""
    exempt = _buffer_paths(flat)
    texts: list[bytes] = []
    samples: dict[tuple[torch.device, torch.dtype], dict[int, torch.Tensor]] = {}
    for at, (part, tensor) in enumerate(zip(parts, flat.tensors, strict=True)):
        is_plain = tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)
        if not is_plain or tensor.is_meta or not is_copyable(tensor.dtype):
            texts.append(b"")  # The save rejects it.
            continue
        texts.append(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        if part.path not in exempt and not _is_batch_norm_buffer(part):
            samples.setdefault((tensor.device, tensor.dtype), {})[at] = _sample(tensor)
    for (device, dtype), by_position in samples.items():
        # A device is waited for once for each dtype, and not once for each tensor.
        counts = [sample.numel() for sample in by_position.values()]
        copies = torch.empty(sum(counts), dtype=dtype, device=device)
        views = zip(torch.split(copies, counts), by_position.values(), strict=True)
        torch._foreach_copy_([v.view(one.shape) for v, one in views], [*by_position.values()])
        host = copies.cpu()
        data, begin = ctypes.string_at(host.data_ptr(), host.nbytes), 0
        for at, count in zip(by_position, counts, strict=True):
            end = begin + count * dtype.itemsize
            texts[at] += data[begin:end]
            begin = end
    return texts


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the elements that are read of a tensor.

    They are chosen by their indices, so that the memory layout does not matter.
    """
    if tensor.nbytes <= SMALL_BYTES:
        return tensor
    size: list[int] = []
    stride: list[int] = []
    budget = NUM_SAMPLES
    for length, step in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        is_run = not size and tensor.dim() > 1  # adjacent elements of the last dimension
        count = min(length, SAMPLE_RUN if is_run else budget)
        size.insert(0, count)
        stride.insert(0, step if is_run else step * (length // count))
        budget //= count
    return tensor.as_strided(size, stride)


def _buffer_paths(flat: FlatState) -> set[StatePath]:
    """Return the paths of the buffers of all modules in a state."""
    return {
        (*path, name)
        for path, module in flat.modules
        for name, _ in module.named_buffers(remove_duplicate=False)
    }


def _is_batch_norm_buffer(part: StructurePart) -> bool:
    """Return whether a tensor is a statistic of BatchNorm in a given `module.state_dict()`.

    Such a dict does not show which of its tensors are buffers.
    """
    return part.is_in_state_dict and str(part.path[-1]).rpartition(".")[2] in _BATCH_NORM_BUFFERS
