"""The end of a soak: what must be there, and what must not be left."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from getpass import getuser
from pathlib import Path

from processes import find_processes

from elasticlib.observe.runs import MAX_FINISHED_RECORDS, is_alive, runs_dir
from elasticlib.testing.waiting import wait_until

from .campaign import BATCH, KEEP_LAST, MOST_NODES, SAMPLES
from .nodes import SCRIPT, SoakFailed
from .report import Calm
from .stage import Stage

TAG = "SOAK_TAG"
SHARED = Path("/dev/shm")
RECORDS = MAX_FINISHED_RECORDS + 3 * MOST_NODES
"""Each agent leaves so many of those that are over, and its own, and those that live: nodes of the
job, others that wait, and some that leave."""


def undisturbed(folder: Path, steps: int) -> Calm:
    """The same steps in one plain process that meets no fault and keeps no checkpoint."""
    (folder / "calm").mkdir()
    log = folder / "calm.log"
    with log.open("ab") as file:
        command = (sys.executable, SCRIPT, str(folder), str(steps), "--calm")
        done = subprocess.run(command, stdout=file, stderr=file, check=False)
    if done.returncode:
        raise SoakFailed(f"the undisturbed run failed:\n{log.read_text()[-3000:]}")
    digests, over, times = {}, "", []
    (path,) = (folder / "calm").iterdir()
    with path.open() as file:
        for line in map(json.loads, file):
            if "digest" in line:
                digests[line["step"]] = line["digest"]
            elif "indices" in line:
                times.append(line["at"])
            over = line.get("over", over)
    return Calm(over, digests, times[-1] - times[0])


def wrong_with(stage: Stage, calm: Calm) -> list[str]:
    """Sentences; none if nothing was lost."""
    wrong = stage.ledger.check(stage.steps, SAMPLES, BATCH)
    over = stage.ledger.over
    if over != {calm.digest}:
        wrong.append(
            f"the weights' sha256 is {sorted(over)} at the end, and {calm.digest} undisturbed"
        )
    for step, digest in sorted(calm.digests.items()):
        if stage.ledger.digests.get(step) != digest:
            wrong.append(f"the weights after step {step} are others than undisturbed")
            break
    # Torch comes with it, which nothing needed before.
    from elasticlib import CheckpointManager

    manager = CheckpointManager(stage.checkpoints)
    found = manager.steps()
    if not found or found[-1] != stage.steps or len(found) != KEEP_LAST:
        wrong.append(f"there should be {KEEP_LAST} checkpoints up to {stage.steps}, got {found}")
    wrong += [f"checkpoint {step}: {what}" for step, what in manager.verify().items()]
    known = {".lock", "fence.json"} | {f"step-{step:010d}" for step in found}
    strange = [path.name for path in stage.checkpoints.iterdir() if path.name not in known]
    return wrong + [f"left among the checkpoints: {name}" for name in strange]


def processes(tag: str) -> set[int]:
    """All that descend from the soak, whoever their parent is now, but for itself."""
    # The parent has made the namespaces that this is in.
    return find_processes(TAG, tag) - {os.getpid(), os.getppid()}


def left(tag: str, temporary: Path, own_memory: bool) -> list[str]:
    """Processes, temporary files and, where no one else has any, shared memory; sentences. Records
    of runs stay by design, but bounded, and none of an agent that lives."""
    with contextlib.suppress(AssertionError):  # each process that is left is reported below
        wait_until("all processes to end", lambda: not processes(tag), 10.0)
    wrong = [f"process {pid} is left" for pid in sorted(processes(tag))]
    # torch makes it when what it compiles with is imported, as an optimizer's first step does.
    stays = {f"torchinductor_{getuser()}", runs_dir().name}
    wrong += [f"{path} is left" for path in temporary.iterdir() if path.name not in stays]
    wrong += _wrong_with_records(temporary / runs_dir().name)
    if own_memory:
        wrong += [f"{path} is left" for path in SHARED.iterdir()]
    return wrong


def _wrong_with_records(folder: Path) -> list[str]:
    records = list(folder.iterdir()) if folder.exists() else []
    wrong = [f"the agent of {path} lives" for path in records if is_alive(path)]
    if len(records) > RECORDS:
        wrong.append(f"{len(records)} records of runs are left, and at most {RECORDS} should be")
    return wrong
