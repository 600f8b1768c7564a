"""A snapshot made a checkpoint, by an agent whose job ends before its work is done. Without torch.

A snapshot and a checkpoint are the same bytes, so this is a copy and a commit.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket

from ..errors import CheckpointError, CheckpointRefused
from . import fence as fences
from .commit import ClearedAway, Committer
from .fence import Writer
from .folder import CheckpointFolder, open_place
from .interface import Unreadable
from .manifest import Manifest
from .memory import Record
from .place import Place
from .prune import Retention

log = logging.getLogger("elasticlib.checkpoint")

_ALL = Retention(last=1 << 62)  # which are too many is for the job's own manager to say

ATTEMPTS = 4
"""At a write beside a worker that clears it away, which does so once a save."""


def persist(record: Record, pack: memoryview, *, place: Place | None = None) -> bool:
    """Write a pack as the checkpoint of its record's step; see `persisting.Persist`.

    A worker of the same generation may be at work in the folder still, on another node, with its
    last save: this writes beside it.

    Args:
        place: of the checkpoints, if not the one that the record names.

    Returns:
        Whether it was written: not where that step or a later one is there whole, nor where a
        later generation of the job has the folder, which goes on by itself.

    Raises:
        CheckpointError: the disk failed; or the state is in parts, or would be on more ranks,
            which is not written so: no other number of ranks could read it.
        CheckpointRefused: another launch has the folder.
    """
    folder = CheckpointFolder(open_place(record.folder) if place is None else place)
    if _is_there(folder, record):
        return False
    if _is_sharded(record):
        raise CheckpointError(
            "of a sharded state only the workers write checkpoints: save when should_stop says so"
        )
    label = f"agent {os.getpid()} on {socket.gethostname()}"
    writer = Writer(record.run, record.launch, record.generation, secrets.token_hex(8), label)
    try:
        return _save(folder, writer, record, pack)
    except CheckpointRefused as error:
        if not _goes_on(folder, writer):
            raise
        log.info("step %d is not written, as the job goes on: %s", record.step, error)
        return False


def _is_sharded(record: Record) -> bool:
    return record.sharded or record.parts > 1


def _is_there(folder: CheckpointFolder, record: Record) -> bool:
    """Whether the folder has a whole checkpoint of the record's step, or of a later one."""
    for found in folder.found():
        if found.step < record.step:
            return False
        # Of a state in parts this only decides whether something is lost, and to read all its
        # parts on each node takes longer than a node has that is about to go.
        if found.manifest and (_is_sharded(record) or _is_whole(folder, found.manifest)):
            return True
    return False


def _is_whole(folder: CheckpointFolder, manifest: Manifest) -> bool:
    try:
        return not folder.check(manifest)
    except Unreadable:
        return False  # rather once too often


def _save(folder: CheckpointFolder, writer: Writer, record: Record, pack: memoryview) -> bool:
    committer = Committer(folder, writer, _ALL, beside=True)
    for _ in range(ATTEMPTS - 1):
        try:
            committer.save(record.step, pack)
            return True
        except ClearedAway as error:
            # Who has the folder has committed something meanwhile, perhaps this step.
            log.info("step %d is looked for again: %s", record.step, error)
            if _is_there(folder, record):
                return False
    committer.save(record.step, pack)
    return True


def _goes_on(folder: CheckpointFolder, writer: Writer) -> bool:
    """Whether a later generation of the same launch has the folder."""
    data = folder.place.read(fences.NAME)
    holder = None if data is None else fences.decode(data).holder
    return (
        holder is not None
        and holder.start == writer.start
        and holder.generation > writer.generation
    )
