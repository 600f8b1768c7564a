"""Checks at the end of a soak: nothing was lost, and nothing was left."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from getpass import getuser
from pathlib import Path

from processes import find_processes

from elasticlib.checkpoint.catalog import CheckpointCatalog
from elasticlib.checkpoint.storage import open_storage
from elasticlib.observe.runs import MAX_FINISHED_RECORDS, is_alive, runs_dir
from elasticlib.testing.waiting import wait_until

from .campaign import BATCH, KEEP_LAST, MAX_NODES, SAMPLES
from .nodes import SCRIPT, SoakError
from .report import Baseline
from .soak_job import SoakJob

TAG = "SOAK_TAG"
SHARED_MEMORY = Path("/dev/shm")
# Each agent keeps this number of finished run records. In addition, the job has the records of its
# running nodes, of waiting ones, and of some that are leaving.
MAX_RECORDS = MAX_FINISHED_RECORDS + 3 * MAX_NODES
EXIT_TIMEOUT_S = 10.0  # for all processes of the job at its end


def run_baseline(directory: Path, steps: int) -> Baseline:
    """Train the same steps in one process, without faults and checkpoints."""
    (directory / "baseline").mkdir()
    log = directory / "baseline.log"
    with log.open("ab") as file:
        command = (sys.executable, SCRIPT, str(directory), str(steps), "--baseline")
        process = subprocess.run(command, stdout=file, stderr=file, check=False)
    if process.returncode:
        raise SoakError(f"the baseline run failed:\n{log.read_text()[-3000:]}")
    digests, final_digest, times = {}, "", []
    (path,) = (directory / "baseline").iterdir()
    with path.open() as file:
        for line in map(json.loads, file):
            if "digest" in line:
                digests[line["step"]] = line["digest"]
            elif "indices" in line:
                times.append(line["at"])
            final_digest = line.get("final_digest", final_digest)
    return Baseline(final_digest, digests, times[-1] - times[0])


def find_violations(job: SoakJob, baseline: Baseline) -> list[str]:
    """Return what was lost, as sentences; nothing if all samples, steps and weights are right."""
    violations = job.history.check(job.steps, SAMPLES, BATCH)
    digests = job.history.final_digests
    if digests != {baseline.final_digest}:
        violations.append(
            f"the final weights have the SHA-256 {sorted(digests)}, those of the baseline "
            f"{baseline.final_digest}"
        )
    for step, digest in sorted(baseline.digests.items()):
        if job.history.digests.get(step) != digest:
            violations.append(f"the weights after step {step} differ from those of the baseline")
            break
    return violations + _check_checkpoints(job)


def _check_checkpoints(job: SoakJob) -> list[str]:
    catalog = CheckpointCatalog(open_storage(job.checkpoints))
    # A damaged checkpoint that the job has left can still be there.
    live = [catalog.verified(ref) for ref in catalog.live_refs()]
    steps, violations = sorted({ref.step for ref in live}), []
    if not steps or steps[-1] != job.steps or len(steps) != KEEP_LAST:
        expected = f"{KEEP_LAST} checkpoints up to step {job.steps}"
        violations.append(f"there must be {expected}, got {steps}")
    violations += [f"checkpoint {ref.place}: {ref.problem}" for ref in live if ref.problem]
    known = {".lock", "fence.json"} | {ref.place for ref in catalog.list_refs()}
    unknown = [path.name for path in job.checkpoints.iterdir() if path.name not in known]
    return violations + [f"leftover file among the checkpoints: {name}" for name in unknown]


def job_processes(tag: str) -> set[int]:
    """Return all processes that descend from the soak, except the soak itself."""
    # The parent has created the namespaces in which this process runs.
    return find_processes(TAG, tag) - {os.getpid(), os.getppid()}


def find_leftovers(tag: str, temporary: Path, owns_shared_memory: bool) -> list[str]:
    """Return leftover processes, temporary files and shared memory, as sentences.

    Run records are left by design. Their number is limited, and none is of a running agent.

    Args:
        tag: The tag of all processes of the soak.
        temporary: The directory for temporary files.
        owns_shared_memory: No other program uses this shared memory, so it can be checked.
    """
    with contextlib.suppress(AssertionError):  # the sentences name each process that is left
        wait_until("all processes to exit", lambda: not job_processes(tag), EXIT_TIMEOUT_S)
    leftovers = [f"process {pid} is left" for pid in sorted(job_processes(tag))]
    # torch creates the first directory when it imports its compiler, as the optimizer does.
    expected = {f"torchinductor_{getuser()}", runs_dir().name}
    leftovers += [f"{path} is left" for path in temporary.iterdir() if path.name not in expected]
    leftovers += _check_records(temporary / runs_dir().name)
    if owns_shared_memory:
        leftovers += [f"{path} is left" for path in SHARED_MEMORY.iterdir()]
    return leftovers


def _check_records(directory: Path) -> list[str]:
    records = list(directory.iterdir()) if directory.exists() else []
    leftovers = [f"the agent of {path} is running" for path in records if is_alive(path)]
    if len(records) > MAX_RECORDS:
        leftovers.append(f"{len(records)} run records are left, and at most {MAX_RECORDS} may be")
    return leftovers
