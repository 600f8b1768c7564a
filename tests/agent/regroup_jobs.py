"""Jobs whose workers can regroup, with real agents and worker processes.

The workers run `programs/regroup_worker.py` and use no torch.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from typing import Any

from jobs import PROGRAMS, WITHOUT_TORCH, Job, Node

from elasticlib.testing.waiting import wait_until

PROGRAM = str(PROGRAMS / "regroup_worker.py")
MULTI_NODE = ("--rdzv-backend=tcp", "--rdzv-id=job", "--nnodes=1:3")
SHORT_LEASE = (
    "--rdzv-conf",
    "keep_alive_interval=0.3,keep_alive_max_attempt=3,last_call_timeout=0.2",
)
Report = dict[str, Any]


def start_node(job: Job, name: str, *flags: str, worker: tuple[str, ...] = ()) -> Node:
    """Start an agent with two workers."""
    common_flags = ("--nproc-per-node=2", "--max-restarts=9", "--monitor-interval=0.05")
    return job.start(
        name,
        *job.agent_command(*common_flags, *flags, program=PROGRAM, worker=worker),
        PYTHONPATH=WITHOUT_TORCH,
    )


def start_member(
    job: Job, store: str, name: str, *flags: str, worker: tuple[str, ...] = ()
) -> Node:
    """Start an agent with two workers, as one of several nodes."""
    return start_node(
        job, name, *MULTI_NODE, *SHORT_LEASE, f"--rdzv-endpoint={store}", *flags, worker=worker
    )


def pids(reports: list[Report], node: str = "") -> set[int]:
    return {int(report["pid"]) for report in reports if node in ("", report["node"])}


def kill_worker(report: Report) -> None:
    os.kill(int(report["pid"]), signal.SIGKILL)


def kill_workers(reports: Iterable[Report]) -> None:
    """Kill several workers together: none of them can leave its group after another one died."""
    reports = list(reports)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for report in reports:
            os.kill(int(report["pid"]), number)


def wait_for_first_steps(job: Job, world_size: int) -> list[Report]:
    """Wait until the workers of the first group have all taken a step, and return their reports."""
    reports = job.wait_for_world(world_size)
    paths = [job.folder / f"stepped.{report['pid']}" for report in reports]
    wait_until("a step of each worker", lambda: all(path.exists() for path in paths))
    return reports


def wait_for_replacement(job: Job) -> int:
    """Wait for the first replacement worker, and return its pid."""
    paths = wait_until("a replacement worker", lambda: sorted(job.folder.glob("standby.*")))
    return int(paths[0].suffix[1:])


def send_command(job: Job, command: str, report: Report) -> None:
    """Send a command of `regroup_worker.py` to a worker."""
    (job.folder / f"{command}.{report['pid']}").touch()
