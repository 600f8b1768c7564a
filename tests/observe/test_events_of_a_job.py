"""What stands in a real job's events.jsonl: what happened, in order, in the words of the schema."""

from __future__ import annotations

import os
import signal

import pytest
from jobs import WITHOUT_TORCH, Job

from elasticlib.observe.event import KINDS, Event, decode

pytestmark = pytest.mark.faults


def read(job: Job) -> list[Event]:
    (path,) = job.folder.glob("logs/*/events.jsonl")
    return [decode(line) for line in path.read_bytes().splitlines()]


def test_a_job_that_lost_a_worker_has_told_of_it_and_of_what_followed(job: Job) -> None:
    flags = ("--nproc-per-node", "2", "--max-restarts", "1", "--log-dir", str(job.folder / "logs"))
    agent = job.start("a", *job.agent("--standalone", *flags), PYTHONPATH=WITHOUT_TORCH)
    os.kill(job.settled(2)[1]["pid"], signal.SIGKILL)
    job.settled(2, after=1)
    job.finish()
    assert agent.exit_code() == 0
    events = read(job)
    for event in events:
        assert set(event.facts) == set(KINDS[event.kind]), event.kind
    kinds = [event.kind for event in events]
    assert (kinds[0], kinds[-1]) == ("run.began", "run.ended")
    begun = [event for event in events if event.kind == "generation.began"]
    assert [(e.generation, e.facts["restarts"], e.facts["ranks"]) for e in begun] == [
        (1, 0, [0, 1]),
        (2, 1, [0, 1]),
    ]
    ends = [event for event in events if event.kind == "worker.ended"]
    assert (ends[0].rank, ends[0].generation, ends[0].facts["code"]) == (1, 1, -signal.SIGKILL)
    assert {(e.rank, e.facts["ok"]) for e in ends if e.generation == 2} == {(0, True), (1, True)}
    assert kinds.index("failure") < kinds.index("stopped") < kinds.index("run.ended")
    assert events[-1].facts["state"] == "succeeded"
    assert [e.at for e in events] == sorted(e.at for e in events)
