"""What stands in a real job's events.jsonl: what happened, in order, in the words of the schema."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from jobs import PROGRAMS, WITHOUT_TORCH, Job, leftover_files

from elasticlib.observe.aggregate import NodeStatus, apply_event
from elasticlib.observe.event import KINDS, Event, decode
from elasticlib.observe.history import JobState
from elasticlib.observe.history_reader import read_history
from elasticlib.observe.report import Report, build_report
from elasticlib.observe.runs import find_runs, runs_dir
from elasticlib.testing.waiting import wait_until

pytestmark = pytest.mark.faults

CONTEXT = str(PROGRAMS / "context_worker.py")


def of(events: list[Event], kind: str, generation: int | None = None) -> list[dict[str, Any]]:
    return [
        dict(event.data)
        for event in events
        if event.kind == kind and generation in (None, event.generation)
    ]


def steps_of(job: Job) -> list[int]:
    path = job.folder / "steps"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def run_with_a_loss(job: Job) -> list[Event]:
    """Two workers; the second is killed, and after a restart they work until they are drained."""
    flags = ("--nproc-per-node", "2", "--max-restarts", "1", "--log-dir", str(job.folder / "logs"))
    command = job.agent_command(
        "--standalone", *flags, program=CONTEXT, worker=("checkpoint", "10")
    )
    agent = job.start("a", *command, PYTHONPATH=WITHOUT_TORCH)
    first = job.wait_for_world(2)
    wait_until("steps beyond a checkpoint", lambda: len(steps_of(job)) > 25)
    os.kill(first[1]["pid"], signal.SIGKILL)
    job.wait_for_world(2, after=1)
    count = len(steps_of(job))
    wait_until("more steps", lambda: len(steps_of(job)) > count + 25)
    agent.signal(signal.SIGUSR2)
    assert agent.exit_code() == 75, agent.text
    (events,) = job.events()
    return events


def test_a_job_that_lost_a_worker_has_told_of_it_and_of_what_followed(job: Job) -> None:
    events = run_with_a_loss(job)
    kinds = [event.kind for event in events]
    assert (kinds[0], kinds[-1]) == ("run.started", "run.finished")
    # Each kind that one node's job can tell was told, and with all of its data.
    assert set(kinds) == set(KINDS) - {"events.dropped"}
    begun = [event for event in events if event.kind == "generation.started"]
    assert [(e.generation, e.data["restarts"], e.data["ranks"]) for e in begun] == [
        (1, 0, [0, 1]),
        (2, 1, [0, 1]),
    ]
    ends = [event for event in events if event.kind == "worker.exited"]
    assert (ends[0].rank, ends[0].generation, ends[0].data["exit_code"]) == (1, 1, -signal.SIGKILL)
    assert kinds.index("failure") < kinds.index("stopped") < kinds.index("run.finished")
    assert events[-1].data["state"] == "drained"
    # What a recovery cost can be read off: what each phase took, and which steps are done again.
    (failure,), (lost, _) = of(events, "failure"), of(events, "stopping")
    assert (failure["failure_kind"], failure["seconds_since_heartbeat"]) == ("killed", None)
    assert "SIGKILL" in lost["reason"]
    assert [said["is_planned"] for said in of(events, "rendezvous.started")] == [False, False]
    (restored,), (trains,) = of(events, "state.restored"), of(events, "training.started", 2)
    assert restored["source"] == "peer"
    delay, duration = restored["delay_seconds"], restored["duration_seconds"]
    assert 0 < delay < delay + duration < trains["duration_seconds"]
    last, done = of(events, "progress", 1)[-1], steps_of(job)
    assert (restored["step"] + 1) % 10 == 0
    assert trains["step"] == restored["step"] + 1
    # A step is kept before it is told of, and the kill may come between.
    assert restored["step"] <= last["step"] + 1
    assert done.count(last["step"]) == 2 or last["step"] <= restored["step"]
    assert (
        of(events, "progress", 2)[-1]["step"]
        == done[-1]
        == of(events, "snapshot.taken", 2)[-1]["step"]
    )
    assert of(events, "checkpoint.saved", 2)[-1]["step"] == done[-1]
    assert of(events, "progress", 2)[-1]["loss"] == 1 / (done[-1] + 1)
    fold(events)
    found_by_every_name(job)


def test_report_counts_each_checkpoint_and_snapshot_however_fast_they_come(job: Job) -> None:
    script = job.folder / "quick.py"
    script.write_text(
        "import elasticlib\n"
        "context = elasticlib.context()\n"
        "for step in range(384):\n"
        "    context.step(step)\n"
        "    context.report_snapshot(step)\n"
        "    if step % 32 == 31: context.report_saved(step)\n"
    )
    command = job.agent_command("--standalone", "--nproc-per-node", "2", program=str(script))
    agent = job.start("a", *command, PYTHONPATH=WITHOUT_TORCH)
    assert agent.exit_code() == 0, agent.text
    (run,) = (job.temporary / runs_dir().name).iterdir()
    history = read_history(str(run / "events.jsonl"))
    assert history.save_counts == {"checkpoint.saved": 12, "snapshot.taken": 384}
    text = Report(history).html()
    assert "Checkpoints: 12<" in text
    assert "Snapshots in memory: 384<" in text


def fold(events: list[Event]) -> None:
    status = NodeStatus(events[0].run, events[0].node)
    for event in events:
        status = apply_event(status, event)
    assert (status.state, status.restarts) == (JobState.DRAINED, 1)


def found_by_every_name(job: Job) -> None:
    records = job.temporary / runs_dir().name
    (record,) = records.iterdir()
    (logs,) = (job.folder / "logs").iterdir()
    ours = logs / "events.jsonl"
    run = decode(ours.read_bytes().splitlines()[0]).run
    names: list[str | Path] = ["", run, record.name, record, logs, logs.parent, ours]
    for name in names:
        (found,) = find_runs(name, directory=records)
        assert found.resolve() == ours, name


def test_a_run_that_is_to_keep_no_events_leaves_none(job: Job) -> None:
    flags = ("--standalone", "--log-dir", str(job.folder / "logs"))
    command = job.agent_command(*flags, fields={"events": False})
    agent = job.start("a", *command, PYTHONPATH=WITHOUT_TORCH)
    job.wait_for_world(1)
    job.finish()
    assert agent.exit_code() == 0
    assert not list(job.temporary.iterdir())
    assert not list(job.folder.glob("logs/*/events.jsonl"))


def test_a_run_whose_events_cannot_be_kept_is_run_all_the_same(job: Job) -> None:
    (job.temporary / runs_dir().name).symlink_to(job.folder)
    agent = job.start_agent("a", "--standalone", PYTHONPATH=WITHOUT_TORCH)
    job.wait_for_world(1)
    job.finish()
    assert agent.exit_code() == 0
    assert "is not a directory of this user" in agent.text
    assert not leftover_files(job.temporary)


QUICK = """
import sys, time, elasticlib
context, pause = elasticlib.context(), float(sys.argv[2])
for step in range(800):
    context.step(step, loss=1 / (step + 1))
    time.sleep(pause)
"""


def test_report_shows_losses_that_were_sampled_during_the_run(job: Job) -> None:
    program = job.folder / "quick.py"
    program.write_text(QUICK)
    command = job.agent_command("--standalone", program=str(program), worker=("0.004",))
    agent = job.start("a", *command, PYTHONPATH=WITHOUT_TORCH)
    assert agent.exit_code() == 0, agent.text
    made = build_report(find_runs("", directory=job.temporary / runs_dir().name))
    told = {pace.step: pace.loss for pace in made.history.progress if pace.loss is not None}
    assert len(told) >= 2
    assert all(loss == pytest.approx(1 / (step + 1), rel=1e-5) for step, loss in told.items())
    assert told.keys() >= {799}
    figure = made.html().split('aria-label="Loss over steps')[1]
    (line, *_) = re.findall(r'd="(M[^"]*)"', figure)
    assert "L" in line
