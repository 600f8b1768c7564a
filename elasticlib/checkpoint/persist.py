"""Writing a pack that somebody else made into a folder of checkpoints, without torch.

For an agent, whose workers are gone: what they left in memory becomes a checkpoint as if one of
them had saved it.
"""

from __future__ import annotations

import os

from . import manifest as manifests
from .commit import Committer
from .fence import Writer
from .folder import CheckpointFolder, open_place
from .place import Place
from .prune import Retention

_EVERYTHING = Retention(last=2**31)
"""Who made the pack knows what may go; the next manager of the folder deletes it."""


def persist(
    folder: str | os.PathLike[str] | Place, step: int, pack: memoryview, writer: Writer
) -> bool:
    """Save a state that is the same on all ranks, unless that step or a newer one is there.

    Args:
        folder: as `CheckpointManager` takes it.
        step: after which the state was taken.
        pack: see `elasticlib.checkpoint.pack`; it must not change meanwhile.
        writer: in whose name: the run, launch and generation of the workers; with a token of its
            own.

    Returns:
        Whether it has written. Of the one that is there already, the sizes are looked at, and
        not every byte.

    Raises:
        CheckpointRefused: somebody newer has the folder. CheckpointError: the disk failed.
    """
    manifests.check_step(step)
    checkpoints = CheckpointFolder(open_place(folder))
    if any(found.manifest and found.step >= step for found in checkpoints.found()):
        return False
    Committer(checkpoints, writer, _EVERYTHING).save(step, pack)
    return True
