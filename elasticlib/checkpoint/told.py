"""What a worker has been told by its agent of where snapshots go; read here and nowhere else."""

from __future__ import annotations

import os

import attrs

from ..workers.spec import SNAPSHOTS


@attrs.frozen
class Told:
    """folder: where this worker's snapshots go, in its agent's memory. run, generation, launch: its
    own; see `fence.Writer`."""

    folder: str
    run: str
    generation: int
    launch: str = ""


def told() -> Told | None:
    """This worker's; None in a process that no agent with a memory has started."""
    folder = os.environ.get(SNAPSHOTS, "")
    generation = os.environ.get("ELASTICLIB_GENERATION", "")
    if not folder or not generation.isdecimal() or not os.path.isdir(folder):
        return None
    run, launch = (os.environ.get(n, "") for n in ("TORCHELASTIC_RUN_ID", "ELASTICLIB_INCARNATION"))
    return Told(folder, run, int(generation), launch)
