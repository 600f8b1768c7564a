"""A state in one file that is there whole or not at all, and is never trusted unread.

A save writes beside the target, syncs, and renames; a crash at any moment leaves the old file or
the new one. A load checks every byte first, and unpickles with `weights_only=True` alone.
"""

from __future__ import annotations

import logging
import os
import pickle
import secrets
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ..errors import CheckpointCorrupt, CheckpointError
from .format import (
    LEGACY_MAGIC,
    NO_COMMENT,
    SEAL_BYTES,
    Digest,
    can_be_sealed,
    flaw,
    is_legacy,
    seal,
)
from .names import aside_name, natural_key, target_of
from .savable import why_unsavable
from .storages import MapLocation

_CHUNK = 1 << 20

log = logging.getLogger("elasticlib.checkpoint")


def save_checkpoint(path: str | os.PathLike[str], state: object) -> None:
    """Write `state` to the file `path`, in place of what was there, durably or not at all.

    When it returns, the file is whole and on the disk. Missing folders are made. What an earlier
    crash left of a save to the same path is removed; so of two saves of one path at once, the
    one that began first may fail. Save from one rank only.

    Args:
        path: the file; plain `torch.load(path, weights_only=True)` reads it too.
        state: nested dicts, lists, tuples and sets of tensors, numbers, strings and None. Exact
            types only: what `weights_only` cannot read is refused before anything is written.

    Raises:
        CheckpointError: the state cannot be saved (the message says which object, and where it
            stands in the state), or the disk failed (full, read-only, ...). The old file stays.
    """
    target = Path(path)
    reason = why_unsavable(state)
    if reason:
        raise CheckpointError(f"{target} was not written: {reason}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target)
        aside = target.with_name(aside_name(target.name, secrets.randbits(32)))
        try:
            _write(aside, state)
            _put_in_place(aside, target)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise CheckpointError(f"{target} could not be written: {error}") from error


def load_checkpoint(path: str | os.PathLike[str], *, map_location: MapLocation = "cpu") -> Any:
    """The state that `save_checkpoint` wrote to `path`, after checking every byte of the file.

    Args:
        path: the file.
        map_location: where tensors go, as `torch.load` takes it.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointCorrupt: the file was cut short or changed, or is not one of ours.
        CheckpointError: plain `torch.save` wrote the file; or it is whole, but `weights_only` does
            not read what is in it.
    """
    with open(path, "rb") as file:
        _verify(file, path)
        file.seek(0)
        try:
            where: Any = map_location
            return torch.load(file, map_location=where, weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{os.fspath(path)} is whole, but not readable: {error}"
            ) from error


def latest_checkpoint(folder: str | os.PathLike[str], pattern: str = "*.pt") -> Path | None:
    """The newest whole checkpoint in `folder`, by the numbers in the names; None if there is none.

    Every byte of the chosen file has been checked. A newer one that is damaged is passed over,
    and the logger `elasticlib.checkpoint` warns why.

    Args:
        folder: where to look; it need not exist.
        pattern: which names are checkpoints, as a glob.
    """
    names = [path.name for path in Path(folder).glob(pattern) if not target_of(path.name)]
    for name in sorted(names, key=natural_key, reverse=True):
        path = Path(folder, name)
        try:
            with open(path, "rb") as file:
                _verify(file, path)
        except (CheckpointError, OSError) as error:
            log.warning("checkpoint passed over: %s", error)
        else:
            return path
    return None


class _Sums:
    """A file that torch writes an archive to, which sums it up on the way."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.digest = Digest()
        self.error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        try:
            written = self.file.write(data)
        except OSError as error:
            # torch answers with a RuntimeError about positions, which hides the cause.
            self.error = error
            raise
        self.digest = self.digest.over(data)
        return written

    def flush(self) -> None:
        self.file.flush()


def _write(aside: Path, state: object) -> None:
    with open(aside, "x+b") as file:
        sums = _Sums(file)
        try:
            torch.save(state, sums)  # type: ignore[arg-type]
        except RuntimeError:
            if sums.error:
                raise sums.error from None
            raise
        _seal(file, sums.digest)
        file.flush()
        os.fsync(file.fileno())


def _seal(file: BinaryIO, digest: Digest) -> None:
    file.seek(-min(_CHUNK, digest.size), os.SEEK_END)
    if not can_be_sealed(file.read()):
        raise CheckpointError("torch.save made something else than a plain zip archive")
    file.seek(-len(NO_COMMENT), os.SEEK_END)
    file.write(seal(digest))


def _put_in_place(aside: Path, target: Path) -> None:
    try:
        os.replace(aside, target)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{target} was not written: its partial file is gone, because another save of the same"
            " path began meanwhile; save from one rank only"
        ) from error
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _remove_leftovers(target: Path) -> None:
    with os.scandir(target.parent) as entries:
        for entry in entries:
            if target_of(entry.name) == target.name:
                Path(entry).unlink(missing_ok=True)


def _verify(file: BinaryIO, path: str | os.PathLike[str]) -> None:
    left = max(0, os.fstat(file.fileno()).st_size - SEAL_BYTES)
    digest = Digest()
    while left and (data := file.read(min(left, _CHUNK))):
        digest = digest.over(data)
        left -= len(data)
    reason = flaw(digest.over(NO_COMMENT), file.read())
    if reason and _is_of_plain_torch(file):
        name = os.fspath(path)
        raise CheckpointError(
            f"{name} is a file of plain torch.save, which has no sum to check it by: load it with "
            f"torch.load({name!r}, weights_only=True), and write the state with save_checkpoint "
            "to have it checked from then on"
        )
    if reason:
        raise CheckpointCorrupt(f"{os.fspath(path)} is no whole checkpoint: {reason}")


def _is_of_plain_torch(file: BinaryIO) -> bool:
    file.seek(0)
    if is_legacy(file.read(len(LEGACY_MAGIC))):
        return True
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - SEAL_BYTES))
    # One of ours that was cut short does not end like this.
    if not can_be_sealed(file.read()):
        return False
    try:
        with zipfile.ZipFile(file) as archive:
            names = {name.partition("/")[2] for name in archive.namelist()}
    except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError):
        return False
    return "data.pkl" in names and "constants.pkl" not in names  # which a script's archive has
