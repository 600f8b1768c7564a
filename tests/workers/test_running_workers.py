"""Running workers: heartbeats, stacks and stop notices of `LocalWorkers`."""

from __future__ import annotations

from worker_groups import GroupRunner

from elasticlib.testing.waiting import wait_until
from elasticlib.workers.interface import DRAIN, StopNotice, Workers
from elasticlib.workers.spec import Script

TRAINING_SCRIPT = """
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


def start_training(runner: GroupRunner) -> Workers:
    """Start two workers that train until they get a stop notice."""
    script = runner.directory / "script.py"
    script.write_text(TRAINING_SCRIPT)
    return runner.start(Script(str(script)), count=2).workers


def wait_for_steps(workers: Workers, num_steps: int = 1) -> None:
    def have_stepped() -> bool:
        return all(workers.heartbeats()[local].num_steps >= num_steps for local in (0, 1))

    wait_until(f"{num_steps} steps of each worker", have_stepped)


def test_heartbeats_are_available_while_workers_run_and_after_they_exit(
    runner: GroupRunner,
) -> None:
    workers = start_training(runner)
    wait_for_steps(workers, 3)
    assert all(
        heartbeat.is_attached and heartbeat.num_saves for heartbeat in workers.heartbeats().values()
    )
    workers.stop(workers.running(), force=True)
    exited = {runner.wait_for_exit().local_rank, runner.wait_for_exit().local_rank}
    assert workers.heartbeats() == {}
    workers.close()
    assert set(workers.final_heartbeats()) == exited == {0, 1}
    assert all(heartbeat.step > 2 for heartbeat in workers.final_heartbeats().values())


def test_stacks_are_returned_and_saved_only_on_request(runner: GroupRunner) -> None:
    workers = start_training(runner)
    wait_for_steps(workers)
    assert all(heartbeat.can_dump_stacks for heartbeat in workers.heartbeats().values())
    wait_until(
        "the stack of worker 1", lambda: " in train\n" in workers.dump_stacks((1,)).get(1, "")
    )
    assert set(workers.dump_stacks((1,))) <= {1}
    assert not [*runner.directory.glob("*/attempt_0/*/stacks.txt")]
    wait_until(
        "the stacks of both workers", lambda: [*workers.dump_stacks((0, 1), save=True)] == [0, 1]
    )
    assert all(" in train\n" in runner.read_file("stacks.txt", local) for local in (0, 1))
    assert runner.read_file("stacks.txt").startswith("Stack (most recent call first):")


def test_notified_workers_stop_at_the_chosen_call(runner: GroupRunner) -> None:
    workers = start_training(runner)
    notice = StopNotice(DRAIN, 60.0)
    wait_for_steps(workers)
    assert workers.notify(notice)
    wait_until("both workers to answer", lambda: workers.earliest_stop_call() is not None)
    call = workers.earliest_stop_call()
    assert call is not None
    workers.stop_at_call(call, notice)
    exits = [runner.wait_for_exit(), runner.wait_for_exit()]
    assert [(exit_.returncode, exit_.has_failed) for exit_ in exits] == [(7, False)] * 2
    # Each worker completes a step after each call except the last one.
    assert {heartbeat.step for heartbeat in workers.final_heartbeats().values()} == {call - 1}
