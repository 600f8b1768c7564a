"""What `LocalWorkers` is told by workers that are at work, and what it has them do."""

from __future__ import annotations

from test_local import Run

from elasticlib.testing.waiting import wait_until
from elasticlib.workers.interface import DRAIN, StopNotice, Workers
from elasticlib.workers.spec import Script

TRAINS = """
import os, sys, time
import elasticlib

def train(context):
    step = 0
    while context.should_stop() is None:
        context.step(step := step + 1)
        context.report_saved(step)
        time.sleep(0.001)
    return context.should_stop().reason

sys.exit({"drain": 7}[train(elasticlib.context())])
"""


def training(run: Run) -> Run:
    script = run.folder / "script.py"
    script.write_text(TRAINS)
    return run.start(Script(str(script)), count=2)


def have_stepped(workers: Workers) -> bool:
    return all(beat.num_steps for beat in workers.heartbeats().values())


def test_what_workers_report_is_known_while_they_run_and_after_they_have_ended(run: Run) -> None:
    workers = training(run).workers
    wait_until(
        "three steps of each worker",
        lambda: all(workers.heartbeats()[local].num_steps > 2 for local in (0, 1)),
    )
    assert all(beat.is_attached and beat.num_saves for beat in workers.heartbeats().values())
    workers.stop(workers.running(), force=True)
    ended = {run.end().local_rank, run.end().local_rank}
    assert workers.heartbeats() == {}
    workers.close()
    assert set(workers.final_heartbeats()) == ended == {0, 1}
    assert all(beat.step > 2 for beat in workers.final_heartbeats().values())


def test_the_stacks_of_workers_are_told_and_those_for_people_are_kept(run: Run) -> None:
    workers = training(run).workers
    wait_until(
        "a step of each worker",
        lambda: all(beat.num_steps for beat in workers.heartbeats().values()),
    )
    assert all(beat.can_dump_stacks for beat in workers.heartbeats().values())
    wait_until(
        "the stack of worker 1", lambda: " in train\n" in workers.dump_stacks((1,)).get(1, "")
    )
    assert set(workers.dump_stacks((1,))) <= {1}
    assert not [*run.folder.glob("*/attempt_0/*/stacks.txt")]
    wait_until(
        "the stacks of both workers", lambda: [*workers.dump_stacks((0, 1), save=True)] == [0, 1]
    )
    assert all(" in train\n" in run.file("stacks.txt", local) for local in (0, 1))
    assert run.file("stacks.txt").startswith("Stack (most recent call first):")


def test_workers_that_are_notified_stop_at_the_call_that_is_named(run: Run) -> None:
    workers = training(run).workers
    notice = StopNotice(DRAIN, 60.0)
    wait_until(
        "a step of each worker",
        lambda: all(beat.num_steps for beat in workers.heartbeats().values()),
    )
    assert workers.notify(notice)
    wait_until("both workers to answer", lambda: workers.earliest_stop_call() is not None)
    call = workers.earliest_stop_call()
    assert call is not None
    workers.stop_at_call(call, notice)
    ends = [run.end(), run.end()]
    assert [(end.returncode, end.has_failed) for end in ends] == [(7, False)] * 2
    # They step after each call but the one that stops them.
    assert {beat.step for beat in workers.final_heartbeats().values()} == {call - 1}
