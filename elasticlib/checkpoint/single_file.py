"""Checkpoints of a single file each: `save_checkpoint`, `load_checkpoint`, `latest_checkpoint`.

Each file is a pack. The functions add no mechanism of their own: `pack` lays out and copies a
state, `LocalStorage` replaces the file, and `catalog.find_difference` verifies it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import CheckpointCorruptError, CheckpointError, CheckpointUnreadableError
from ..untrusted import open_regular_file
from .catalog import find_difference
from .pack import plan_layout, unpack
from .safetensors_header import CRC_BYTES, PackHeader, read_head, read_header
from .storage import (
    MAX_READER_THREADS,
    LocalStorage,
    checksum,
    encode_checksum,
    new_memory,
    read_handle_into,
    temp_target,
)
from .tensor_layout import MapLocation

_ZIP_MAGIC = b"PK\3\4"  # the first bytes of a file that `torch.save` wrote

log = logging.getLogger("elasticlib.checkpoint")


def save_checkpoint(path: str | os.PathLike[str], state: object) -> None:
    """Write a state to a file, durably and atomically, and replace the previous file.

    When the call returns, the file is complete and on the disk. The call needs memory for one copy
    of the state. It creates missing directories, and removes partial files that an earlier crash
    left at the same path. If two calls write to one path at the same time, the call that started
    first may fail, so save from one rank only.

    Args:
        path: the file. It is a safetensors file, whatever the ending of its name: other tools read
            its tensors by their paths in the state.
        state: a state as for `CheckpointManager.save`, without sharded tensors. Objects with
            `state_dict` are saved as their state.

    Raises:
        CheckpointError: the state cannot be saved (the message names the object and its path in the
            state), or the disk failed. The previous file is unchanged.
    """
    target = Path(path).expanduser()
    try:
        image = plan_layout(state)
    except CheckpointError as error:
        raise CheckpointError(f"{target} was not written: {error}") from None
    storage = LocalStorage(target.parent)
    try:
        pack = memoryview(new_memory(image.size))
        image.copy_to(pack)
        pack[-CRC_BYTES:] = encode_checksum(checksum(pack[:-CRC_BYTES]))
        target.parent.mkdir(parents=True, exist_ok=True)
        for name in storage.list_files(""):
            if temp_target(name) == target.name:
                storage.remove(name)
        try:
            storage.replace(target.name, pack)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{target} was not written: another save to the same path has removed its partial "
                "file; save from one rank only"
            ) from error
    except OSError as error:
        raise CheckpointError(f"{target} could not be written: {error}") from error


def load_checkpoint(path: str | os.PathLike[str], *, map_location: MapLocation = "cpu") -> Any:
    """Return the state that `save_checkpoint` wrote to a file, after verifying every byte.

    Args:
        path: the file.
        map_location: where the tensors are loaded, as for `torch.load`.

    Returns:
        The state, with new tensors.

    Raises:
        FileNotFoundError: the file does not exist.
        CheckpointCorruptError: the file is truncated or changed, or was not written by elasticlib.
        CheckpointError: `torch.save` or a version with another format wrote the file; it is a part
            of a sharded checkpoint; or this program lacks a library that the state needs.
    """
    with _open(path) as file:
        # The tensors use this memory.
        memory = memoryview(new_memory(_read_file_header(file, path).size))
        _verify(file, path, memory)
    try:
        return unpack(memory, map_location=map_location, copy=False)
    except CheckpointCorruptError as error:
        raise _incomplete(path, error) from error


def latest_checkpoint(folder: str | os.PathLike[str], pattern: str = "*.pt") -> Path | None:
    """Return the newest intact checkpoint file in a directory, by the numbers in the names.

    Every byte of the file has been verified. A newer file that is damaged is skipped, and the
    logger `elasticlib.checkpoint` warns with the reason.

    Args:
        folder: the directory. It need not exist.
        pattern: a glob that matches the names of checkpoint files.

    Returns:
        The path, or None if no file matches.

    Raises:
        CheckpointError: files match, and none of them can be used. If the training started from the
            beginning, it would replace them.
    """
    errors: list[Exception] = []
    folder = Path(folder).expanduser()
    names = [path.name for path in folder.glob(pattern) if not temp_target(path.name)]
    for name in sorted(names, key=_natural_key, reverse=True):
        path = Path(folder, name)
        try:
            with _open(path) as file:
                _read_file_header(file, path)
                _verify(file, path)
        except (CheckpointError, OSError) as error:
            log.warning("skipped a checkpoint: %s", error)
            errors.append(error)
        else:
            return path
    if errors:
        # Files that are only of another kind, or cannot be read, may be intact.
        intact = [error for error in errors if not isinstance(error, CheckpointCorruptError)]
        advice = "" if intact else ". To start from the beginning, move them away"
        shown = [*intact, *errors][0]
        raise CheckpointError(
            f"none of the {len(names)} files {pattern} in {os.fspath(folder)} is a complete "
            f"checkpoint: {shown}{advice}"
        ) from shown
    return None


@contextlib.contextmanager
def _open(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    with (
        open_regular_file(os.path.expanduser(path), follow_link=True) as handle,
        open(handle, "rb", closefd=False) as file,
    ):
        yield file


def _natural_key(name: str) -> tuple[list[str | int], str]:
    """Return a key that sorts step-9 before step-10."""
    parts = re.split(r"([0-9]+)", name)
    return [int(part) if at % 2 else part for at, part in enumerate(parts)], name


def _incomplete(path: str | os.PathLike[str], reason: object) -> CheckpointCorruptError:
    return CheckpointCorruptError(f"{os.fspath(path)} is not a complete checkpoint: {reason}")


def _read_file_header(file: BinaryIO, path: str | os.PathLike[str]) -> PackHeader:
    """Return the header of a file, whose size must be the one that the header gives."""
    handle, size = file.fileno(), os.fstat(file.fileno()).st_size
    if os.pread(handle, len(_ZIP_MAGIC), 0) == _ZIP_MAGIC:
        raise CheckpointError(
            f"{os.fspath(path)} is a zip archive, as torch.save writes it, and has no checksum: "
            f"load it with torch.load({os.fspath(path)!r}, weights_only=True)"
        )
    try:
        header = read_header(read_head(lambda count: os.pread(handle, count, 0)))
        if header.size != size:
            raise CheckpointCorruptError(f"it must have {header.size} bytes, but has {size}")
    except CheckpointCorruptError as error:
        raise _incomplete(
            path, f"{error}: truncated, changed, or not written by elasticlib"
        ) from error
    except CheckpointUnreadableError as error:
        raise CheckpointUnreadableError(f"{os.fspath(path)} cannot be read: {error}") from error
    if "shards" in header.tree:
        raise CheckpointError(
            f"{os.fspath(path)} is a part of a sharded checkpoint: load the checkpoint with "
            "CheckpointManager(folder).load(step)"
        )
    return header


def _verify(file: BinaryIO, path: str | os.PathLike[str], into: memoryview | None = None) -> None:
    """Read a file, and compare its checksum with that of its bytes.

    The caller keeps the file open, because another save may replace it at any time.
    """
    difference = find_difference(
        Path(path).name,
        os.fstat(file.fileno()).st_size,
        partial(read_handle_into, file.fileno()),
        into,
        max_threads=MAX_READER_THREADS,
    )
    if difference:
        raise _incomplete(path, difference)
