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
from .commit import Committer
from .fence import Writer
from .folder import CheckpointFolder, open_place
from .prune import Retention
from .slot import Record

log = logging.getLogger("elasticlib.checkpoint")

_ALL = Retention(last=1 << 62)  # which are too many is for the job's own manager to say


def persist(record: Record, pack: memoryview) -> bool:
    """Write a pack as the checkpoint of its record's step; see `persisting.Persist`.

    Returns:
        Whether it was written: not where that step or a later one is there whole, nor where a
        later generation of the job has the folder, which goes on by itself.

    Raises:
        CheckpointError: the disk failed; or the state is in parts, which is not written so.
        CheckpointRefused: another launch has the folder.
    """
    if record.parts > 1:
        raise CheckpointError(
            "of a sharded state only the workers write checkpoints: save when should_stop says so"
        )
    folder = CheckpointFolder(open_place(record.folder))
    for found in folder.found():
        if found.step < record.step:
            break
        if found.manifest and not folder.check(found.manifest):
            return False
    label = f"agent {os.getpid()} on {socket.gethostname()}"
    writer = Writer(record.run, record.launch, record.generation, secrets.token_hex(8), label)
    try:
        Committer(folder, writer, _ALL).save(record.step, pack)
    except CheckpointRefused as error:
        if not _goes_on(folder, writer):
            raise
        log.info("step %d is not written, as the job goes on: %s", record.step, error)
        return False
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
