"""Single checkpoint files, each with one state.

A file is a pack (see `pack`), and so a safetensors file, which any tool opens. Its head has the
checksum of its data. The functions here add nothing to what the manager uses: a state is laid out
and copied by `pack`, put in place by `LocalPlace`, and verified by `folder.sum_flaw`.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import CheckpointCorrupt, CheckpointError, Unreadable
from .folder import DataFile, sum_flaw
from .pack import plan_layout, unpack
from .place import PIECE, READERS, LocalPlace, checksum, new_memory, target_of
from .safetensors_header import (
    PREFIX_BYTES,
    PackHeader,
    read_header,
    read_size,
    with_data_checksum,
)
from .tensor_layout import MapLocation

_ZIP = b"PK\3\4"  # A file of torch.save begins with it.

log = logging.getLogger("elasticlib.checkpoint")


def save_checkpoint(path: str | os.PathLike[str], state: object) -> None:
    """Write `state` to the file `path`, in place of what was there, durably or not at all.

    When it returns, the file is complete and on the disk. The call needs memory for one copy of the
    state. Missing folders are created. Partial files that an earlier crash left at the same path
    are removed; so if two saves write to one path at once, the one that began first may fail. Save
    from one rank only.

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
    place, start = LocalPlace(target.parent), image.layout.start
    try:
        pack = memoryview(new_memory(image.size))
        image.copy_to(pack)
        pack[:start] = with_data_checksum(image.header, checksum(pack[start:]))
        target.parent.mkdir(parents=True, exist_ok=True)
        for name in place.files(""):
            if target_of(name) == target.name:
                place.remove(name)
        try:
            place.put(target.name, pack)
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
        _check_data(file, path, head, memory[head.start :])
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
                _check_data(file, path, _head(file, path))
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
        return read_header(first + file.read(start - len(first)))
    except CheckpointCorrupt as error:
        raise _corrupt(
            path, f"{error}: truncated, changed, or not written by elasticlib"
        ) from error
    except Unreadable as error:
        raise Unreadable(f"{os.fspath(path)} cannot be read: {error}") from error


def _check_data(
    file: BinaryIO, path: str | os.PathLike[str], head: PackHeader, into: memoryview | None = None
) -> None:
    """Read the data of a pack, and compare their checksum with that in its head.

    The file stays open meanwhile, because another save may replace it at any moment.
    """
    if head.checksum is None:
        raise CheckpointError(
            f"{os.fspath(path)} has no checksum, as a file of a CheckpointManager: load "
            "it with CheckpointManager(folder).load(step)"
        )

    def read(start: int, buffer: memoryview, piece: Callable[[memoryview], None]) -> int:
        count = os.preadv(file.fileno(), [buffer[:PIECE]], head.start + start)
        piece(buffer[:count])
        return count

    data = DataFile(Path(path).name, head.size - head.start, head.checksum)
    if flaw := sum_flaw(data, read, into, threads=READERS):
        raise _corrupt(path, flaw)
