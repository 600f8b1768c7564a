"""What the workers of `programs/context_worker.py` write: completed steps, and stop requests."""

from __future__ import annotations

import json
from typing import Any

from jobs import Job, generation_of

from elasticlib.testing.waiting import wait_until


def completed_steps(job: Job) -> list[int]:
    """Return the steps in the order in which rank 0 completed them."""
    path = job.folder / "steps"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def wait_for_steps(job: Job) -> None:
    """Wait until the job has completed some more steps."""
    count = len(completed_steps(job))
    wait_until("more steps", lambda: len(completed_steps(job)) > count + 3)


def check_no_step_is_lost(job: Job) -> None:
    """Check that each step was completed once, in order."""
    steps = completed_steps(job)
    assert steps == list(range(len(steps)))


def read_stop_request(job: Job, reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Wait until all ranks of a generation have stopped, and return their stop request.

    It must be the same for all ranks, except for `seconds_left`, of which this returns the
    smallest.
    """
    generation = generation_of(reports)
    requests = []
    for rank in range(len(reports)):
        path = job.folder / f"stopped.{generation}.{rank}"
        wait_until(f"rank {rank} to stop", path.exists)
        requests.append(json.loads(path.read_text()))
    seconds_left = [request.pop("seconds_left") for request in requests]
    assert requests == [requests[0]] * len(requests)
    return {**requests[0], "seconds_left": min(seconds_left)}
