"""A state in one file that is there whole or not at all, and is never trusted unread.

The file is a pack (see `pack`), and so a safetensors file, which any tool opens; its head tells the
sum of its data. A save writes beside the target, syncs, and renames; a crash at any moment leaves
the old file or the new one. A load checks every byte before anything is made of them.
"""

from __future__ import annotations

import logging
import os
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ..errors import CheckpointCorrupt, CheckpointError, Unreadable
from .pack import PackImage, plan_layout, unpack
from .place import CHUNK, READERS, LocalPlace, new_memory, read_summed, target_of
from .safetensors_header import (
    PREFIX_BYTES,
    PackHeader,
    read_header,
    read_size,
    with_data_crc32,
)
from .tensor_layout import MapLocation

_CHUNK = 1 << 20
_ZIP = b"PK\3\4"  # A file of torch.save begins with it.

log = logging.getLogger("elasticlib.checkpoint")


def save_checkpoint(path: str | os.PathLike[str], state: object) -> None:
    """Write `state` to the file `path`, in place of what was there, durably or not at all.

    When it returns, the file is complete and on the disk. Missing folders are created. Leftovers of
    an earlier crash at the same path are removed; so if two saves write to one path at once, the
    one that began first may fail. Save from one rank only.

    Args:
        path: the file. It is a safetensors file, whatever its name ends in: other tools read its
            tensors, by their paths in the state.
        state: what `CheckpointManager.save` takes, but for sharded tensors; objects that have a
            state of their own are saved as that.

    Raises:
        CheckpointError: the state cannot be saved (the message says which object, and where it
            stands in the state), or the disk failed (full, read-only, ...). The old file stays.
    """
    target = Path(path)
    try:
        image = plan_layout(state)
    except CheckpointError as error:
        raise CheckpointError(f"{target} was not written: {error}") from None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for beside in target.parent.iterdir():
            if target_of(beside.name) == target.name:
                beside.unlink(missing_ok=True)
        try:
            with LocalPlace(target.parent).replacing(target.name) as handle:
                _write(handle, image)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{target} was not written: its partial file is gone, because another save of the "
                "same path began meanwhile; save from one rank only"
            ) from error
    except OSError as error:
        raise CheckpointError(f"{target} could not be written: {error}") from error


def load_checkpoint(path: str | os.PathLike[str], *, map_location: MapLocation = "cpu") -> Any:
    """The state that `save_checkpoint` wrote to `path`, after checking every byte of the file.

    Args:
        path: the file.
        map_location: where tensors go, as `torch.load` takes it.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointCorrupt: the file is truncated or changed, or was not written by elasticlib.
        CheckpointError: `torch.save` or a `CheckpointManager` wrote the file, or a version with
            another format; or it is whole, and this program lacks a library for what is in it.
    """
    with open(path, "rb") as file:
        head = _head(file, path)
        # The memory is the tensors' own.
        memory = memoryview(new_memory(head.size))
        os.preadv(file.fileno(), [memory[: head.start]], 0)
        _check_pack(file, path, head, memory[head.start :])
    try:
        return unpack(memory, map_location=map_location, copy=False)
    except CheckpointCorrupt as error:
        raise _corrupt(path, error) from error


def latest_checkpoint(folder: str | os.PathLike[str], pattern: str = "*.pt") -> Path | None:
    """The newest complete checkpoint in `folder`, by the numbers in the names, or None if there is
    no file of such a name.

    Every byte of the chosen file has been checked. A newer one that is damaged is passed over,
    and the logger `elasticlib.checkpoint` warns why.

    Args:
        folder: where to look; it need not exist.
        pattern: which names are checkpoints, as a glob.

    Raises:
        CheckpointError: there are such files, and none of them is a complete checkpoint. A training
            that started over would replace them.
    """
    newest_error: Exception | None = None
    names = [path.name for path in Path(folder).glob(pattern) if not target_of(path.name)]
    for name in sorted(names, key=_natural_key, reverse=True):
        path = Path(folder, name)
        try:
            with open(path, "rb") as file:
                _check_pack(file, path, _head(file, path))
        except (CheckpointError, OSError) as error:
            log.warning("checkpoint skipped: %s", error)
            newest_error = newest_error or error
        else:
            return path
    if newest_error is not None:
        raise CheckpointError(
            f"none of the {len(names)} files {pattern} in {os.fspath(folder)} is a complete "
            f"checkpoint: {newest_error}. To start over, move them away"
        ) from newest_error
    return None


def _natural_key(name: str) -> tuple[list[str | int], str]:
    """Sorts names with numbers in them as people do: step-9 before step-10."""
    parts = re.split(r"([0-9]+)", name)
    return [int(part) if at % 2 else part for at, part in enumerate(parts)], name


def _write(handle: int, image: PackImage) -> None:
    with open(handle, "wb", buffering=_CHUNK, closefd=False) as file:
        file.write(image.header)
        summed = 0
        for piece in _pieces(image):
            file.write(piece)
            summed = zlib.crc32(piece, summed)
        file.seek(0)
        file.write(with_data_crc32(image.header, summed))


def _pieces(image: PackImage) -> Iterator[memoryview]:
    """The data of a pack without a second state in memory: piece by piece, of 16 MiB at most.

    Each is valid until the next one is asked for.
    """
    most = max((tensor.nbytes for tensor in image.sources), default=0)
    memory = bytearray(max(1, min(most, CHUNK)))
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    for flat in image.iter_bytes():
        for at in range(0, len(flat), len(memory)):
            piece = flat[at : at + len(memory)]
            buffer[: len(piece)].copy_(piece)
            yield memoryview(memory)[: len(piece)]


def _corrupt(path: str | os.PathLike[str], reason: object) -> CheckpointCorrupt:
    return CheckpointCorrupt(f"{os.fspath(path)} is not a complete checkpoint: {reason}")


def _head(file: BinaryIO, path: str | os.PathLike[str]) -> PackHeader:
    """That of a pack of ours, which has as many bytes as it says."""
    first, there = file.read(PREFIX_BYTES), os.fstat(file.fileno()).st_size
    if first.startswith(_ZIP):
        raise CheckpointError(
            f"{os.fspath(path)} is a zip archive, as torch.save writes it, and has no checksum: "
            f"load it with torch.load({os.fspath(path)!r}, weights_only=True)"
        )
    try:
        size, start = read_size(first)
        if size != there:
            raise CheckpointCorrupt(f"it should have {size} bytes, and has {there}")
        head = read_header(first + file.read(start - len(first)))
    except CheckpointCorrupt as error:
        raise _corrupt(
            path, f"{error}: truncated, changed, or not written by elasticlib"
        ) from error
    except Unreadable as error:
        raise Unreadable(f"{os.fspath(path)} cannot be read: {error}") from error
    if head.crc32 is None:
        raise CheckpointError(
            f"{os.fspath(path)} has no checksum, as a file of a CheckpointManager: load "
            "it with CheckpointManager(folder).load(step)"
        )
    return head


def _check_pack(
    file: BinaryIO, path: str | os.PathLike[str], head: PackHeader, into: memoryview | None = None
) -> None:
    """Read a pack's data, all of them, and compare their sum."""

    def read(at: int, buffer: memoryview, piece: Callable[[memoryview], None]) -> int:
        count = os.preadv(file.fileno(), [buffer[:_CHUNK]], head.start + at)
        piece(buffer[:count])
        return count

    size = head.size - head.start
    count, summed = read_summed(read, size, into, threads=READERS)
    if count < size:
        raise _corrupt(path, f"it ends after {head.start + count} of {head.size} bytes")
    if summed != head.crc32:
        raise _corrupt(
            path, f"it says CRC-32 {head.crc32:08x} of its data, these give {summed:08x}"
        )
