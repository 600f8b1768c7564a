"""The events of real jobs in events.jsonl: their kinds, their order and their data."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from jobs import PROGRAMS, WITHOUT_TORCH, Job, leftover_files

from elasticlib.observe.aggregate import NodeStatus, apply_event
from elasticlib.observe.event import Event, decode
from elasticlib.observe.event_kinds import KINDS
from elasticlib.observe.history import JobState
from elasticlib.observe.history_reader import read_history
from elasticlib.observe.report import Report, build_report
from elasticlib.observe.runs import find_runs, runs_dir
from elasticlib.testing.waiting import wait_until

pytestmark = pytest.mark.faults

CONTEXT_WORKER = str(PROGRAMS / "context_worker.py")


def data_of(events: list[Event], kind: str, generation: int | None = None) -> list[dict[str, Any]]:
    """Return the data of all events of this kind, in one generation or in all."""
    return [
        dict(event.data)
        for event in events
        if event.kind == kind and generation in (None, event.generation)
    ]


def read_steps(job: Job) -> list[int]:
    """Return the steps that the worker of rank 0 has completed so far."""
    path = job.folder / "steps"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def run_job_with_a_killed_worker(job: Job) -> list[Event]:
    """Run a job of two workers, kill one, and drain the job after the restart."""
    flags = ("--nproc-per-node", "2", "--max-restarts", "1", "--log-dir", str(job.folder / "logs"))
    command = job.agent_command(
        "--standalone", *flags, program=CONTEXT_WORKER, worker=("checkpoint", "10")
    )
    agent = job.start("a", *command, PYTHONPATH=WITHOUT_TORCH)
    first = job.wait_for_world(2)
    wait_until("steps beyond a checkpoint", lambda: len(read_steps(job)) > 25)
    os.kill(first[1]["pid"], signal.SIGKILL)
    job.wait_for_world(2, after=1)
    count = len(read_steps(job))
    wait_until("more steps", lambda: len(read_steps(job)) > count + 25)
    agent.signal(signal.SIGUSR2)
    assert agent.exit_code() == 75, agent.text
    (events,) = job.events()
    return events


def test_events_describe_a_killed_worker_and_the_recovery(job: Job) -> None:
    events = run_job_with_a_killed_worker(job)
    kinds = [event.kind for event in events]
    assert (kinds[0], kinds[-1]) == ("run.started", "run.finished")
    # The agent recorded each kind except two; `job.events` checks that their data are complete.
    assert set(kinds) == set(KINDS) - {"events.dropped", "control.requested"}
    generations = [event for event in events if event.kind == "generation.started"]
    assert [(e.generation, e.data["restarts"], e.data["ranks"]) for e in generations] == [
        (1, 0, [0, 1]),
        (2, 1, [0, 1]),
    ]
    killed = next(event for event in events if event.kind == "worker.exited")
    assert (killed.rank, killed.generation, killed.data["exit_code"]) == (1, 1, -signal.SIGKILL)
    assert kinds.index("failure") < kinds.index("stopped") < kinds.index("run.finished")
    assert events[-1].data["state"] == "drained"
    # The cost of the recovery can be calculated: the phases, and the repeated steps.
    (failure,), (stop, _) = data_of(events, "failure"), data_of(events, "stopping")
    assert (failure["failure_kind"], failure["seconds_since_heartbeat"]) == ("killed", None)
    assert "SIGKILL" in stop["reason"]
    assert [e["is_planned"] for e in data_of(events, "rendezvous.started")] == [False, False]
    (restored,) = data_of(events, "state.restored")
    (training,) = data_of(events, "training.started", 2)
    assert restored["source"] == "peer"
    delay, duration = restored["delay_seconds"], restored["duration_seconds"]
    assert 0 < delay < delay + duration < training["duration_seconds"]
    last_step, steps = data_of(events, "progress", 1)[-1]["step"], read_steps(job)
    assert (restored["step"] + 1) % 10 == 0
    assert training["step"] == restored["step"] + 1
    # The worker may be killed after it has saved a step and before it has reported the step.
    assert restored["step"] <= last_step + 1
    assert steps.count(last_step) == 2 or last_step <= restored["step"]
    for kind in ("progress", "snapshot.taken", "checkpoint.saved"):
        assert data_of(events, kind, 2)[-1]["step"] == steps[-1]
    assert data_of(events, "progress", 2)[-1]["loss"] == 1 / (steps[-1] + 1)
    check_status(events)
    check_run_is_found_by_each_name(job)


def test_report_counts_each_checkpoint_and_snapshot_of_fast_steps(job: Job) -> None:
    script = job.folder / "train.py"
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


def check_status(events: list[Event]) -> None:
    status = NodeStatus(events[0].run, events[0].node)
    for event in events:
        status = apply_event(status, event)
    assert (status.state, status.restarts) == (JobState.DRAINED, 1)


def check_run_is_found_by_each_name(job: Job) -> None:
    records = job.temporary / runs_dir().name
    (record,) = records.iterdir()
    (logs,) = (job.folder / "logs").iterdir()
    events = logs / "events.jsonl"
    run = decode(events.read_bytes().splitlines()[0]).run
    names: list[str | Path] = ["", run, record.name, record, logs, logs.parent, events]
    for name in names:
        (path,) = find_runs(name, directory=records)
        assert path.resolve() == events, name


def test_run_with_events_disabled_leaves_no_files(job: Job) -> None:
    flags = ("--standalone", "--log-dir", str(job.folder / "logs"))
    command = job.agent_command(*flags, fields={"observe.events": False})
    agent = job.start("a", *command, PYTHONPATH=WITHOUT_TORCH)
    job.wait_for_world(1)
    job.finish()
    assert agent.exit_code() == 0
    assert not list(job.temporary.iterdir())
    assert not list(job.folder.glob("logs/*/events.jsonl"))


def test_run_whose_events_cannot_be_written_still_succeeds(job: Job) -> None:
    (job.temporary / runs_dir().name).symlink_to(job.folder)
    agent = job.start_agent("a", "--standalone", PYTHONPATH=WITHOUT_TORCH)
    job.wait_for_world(1)
    job.finish()
    assert agent.exit_code() == 0
    assert "is not a directory of this user" in agent.text
    assert not leftover_files(job.temporary)


FAST_STEPS = """
import sys, time, elasticlib
context, pause = elasticlib.context(), float(sys.argv[2])
for step in range(800):
    context.step(step, loss=1 / (step + 1))
    time.sleep(pause)
"""


def test_report_shows_losses_that_were_sampled_during_the_run(job: Job) -> None:
    program = job.folder / "train.py"
    program.write_text(FAST_STEPS)
    command = job.agent_command("--standalone", program=str(program), worker=("0.004",))
    agent = job.start("a", *command, PYTHONPATH=WITHOUT_TORCH)
    assert agent.exit_code() == 0, agent.text
    report = build_report(find_runs("", directory=job.temporary / runs_dir().name))
    samples = report.history.progress
    losses = {sample.step: sample.loss for sample in samples if sample.loss is not None}
    assert len(losses) >= 2
    assert losses == {step: pytest.approx(1 / (step + 1), rel=1e-5) for step in losses}
    assert losses.keys() >= {799}
    figure = report.html().split('aria-label="Loss over steps')[1]
    (line, *_) = re.findall(r'd="(M[^"]*)"', figure)
    assert "L" in line
