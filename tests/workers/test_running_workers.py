"""Running workers: what an agent sees of them, and what it asks them for."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping

import pytest
from worker_groups import GroupRunner, shell

from elasticlib.testing.waiting import wait_until
from elasticlib.workers.interface import DRAIN, RESIZE, StopHow, StopNotice, WorkerView
from elasticlib.workers.spec import Script, WorkerSpec

TRAINING_SCRIPT = """
import sys, time
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
# Leaves its group when that is over, and waits for the next one.
REGROUPING_SCRIPT = """
import time
import elasticlib

context = elasticlib.context()
context.set_can_regroup()
while True:
    assignment = context.accept_assignment()
    if assignment is None:
        time.sleep(0.001)
        continue
    while not context.should_leave_group():
        context.step(int(assignment["RANK"]))
        time.sleep(0.001)
    context.report_left_group()
"""
FAILING_SCRIPT = """
import atexit, signal, sys
import elasticlib

atexit.register(signal.pause)
elasticlib.context().step(1)
if sys.argv[1] == "raises":
    raise ValueError("no luck")
"""


def start_script(runner: GroupRunner, text: str, *args: str, count: int = 1) -> threading.Event:
    """Start workers; the result is set whenever their view may have changed."""
    has_changed = threading.Event()
    (runner.directory / "script.py").write_text(text)
    script = Script(str(runner.directory / "script.py"), args)
    ready: queue.SimpleQueue[str] = queue.SimpleQueue()
    runner.workers.prepare(WorkerSpec(script, count), ready.put, has_changed.set)
    assert ready.get(timeout=60) == ""
    runner.start(script, count=count)
    return has_changed


def wait_for_steps(runner: GroupRunner, num_steps: int = 1) -> Mapping[int, WorkerView]:
    def have_stepped() -> bool:
        beats = [one.heartbeat for one in runner.workers.view().values()]
        return all(beat is not None and beat.num_steps >= num_steps for beat in beats)

    wait_until(f"{num_steps} steps of each worker", have_stepped)
    return runner.workers.view()


def test_heartbeats_are_available_while_workers_run_and_in_their_exits(runner: GroupRunner) -> None:
    start_script(runner, TRAINING_SCRIPT, count=2)
    for view in wait_for_steps(runner, 3).values():
        assert view.heartbeat is not None
        assert view.heartbeat.is_attached
        assert view.heartbeat.num_saves
        assert view.takes_notices
        assert view.has_called_should_stop
        assert view.stop_call is None
    runner.stop(StopHow.KILL)
    for exit_ in (runner.wait_for_exit(), runner.wait_for_exit()):
        assert exit_.heartbeat is not None
        assert exit_.heartbeat.step > 2
    assert runner.workers.view() == {}


def test_stacks_are_returned_and_saved_only_on_request(runner: GroupRunner) -> None:
    start_script(runner, TRAINING_SCRIPT, count=2)
    for view in wait_for_steps(runner).values():
        assert view.heartbeat is not None
        assert view.heartbeat.can_dump_stacks

    def dump(*local_ranks: int, save: bool = False) -> Mapping[int, str]:
        stacks: queue.SimpleQueue[Mapping[int, str]] = queue.SimpleQueue()
        runner.workers.dump_stacks(local_ranks, stacks.put, save=save)
        return stacks.get(timeout=60)

    wait_until("the stack of worker 1", lambda: " in train\n" in dump(1).get(1, ""))
    assert set(dump(1)) <= {1}
    assert not [*runner.directory.glob("*/attempt_0/*/stacks.txt")]
    wait_until("the stacks of both workers", lambda: [*dump(0, 1, save=True)] == [0, 1])
    pattern = "*/attempt_0/*/stacks.txt"
    files = wait_until(
        "files", lambda: len(found := [*runner.directory.glob(pattern)]) > 1 and found
    )
    wait_until("the stacks", lambda: all(" in train\n" in file.read_text() for file in files))
    assert files[0].read_text().startswith("Stack (most recent call first):")


def test_notified_workers_stop_at_the_chosen_call(runner: GroupRunner) -> None:
    has_changed = start_script(runner, TRAINING_SCRIPT, count=2)
    notice = StopNotice(DRAIN, 60.0)
    wait_for_steps(runner)
    has_changed.clear()
    runner.workers.notify(notice)
    # The calls are not shown before the notice has surely reached the workers.
    assert has_changed.wait(60)
    calls = wait_until(
        "both workers to answer",
        lambda: [call for one in runner.workers.view().values() if (call := one.stop_call)],
    )
    wait_until("both", lambda: all(one.stop_call for one in runner.workers.view().values()))
    calls = [one.stop_call or 0 for one in runner.workers.view().values()]
    runner.workers.notify(notice, max(calls))
    exits = [runner.wait_for_exit(), runner.wait_for_exit()]
    assert [(exit_.returncode, exit_.has_failed) for exit_ in exits] == [(7, False)] * 2
    # Each worker completes a step after each call except the last one.
    assert {exit_.heartbeat and exit_.heartbeat.step for exit_ in exits} == {max(calls) - 1}


def test_workers_that_leave_their_group_get_a_place_in_the_next_one(runner: GroupRunner) -> None:
    has_changed = start_script(runner, REGROUPING_SCRIPT, count=2)
    before = wait_for_steps(runner)
    assert all(one.can_regroup and not one.has_left for one in before.values())
    has_changed.clear()
    runner.stop(StopHow.LEAVE)
    assert has_changed.wait(60)
    wait_until("both to leave", lambda: all(one.has_left for one in runner.workers.view().values()))
    assert all(one.is_ready for one in runner.workers.view().values())
    runner.start(Script(str(runner.directory / "script.py")), count=2, attempt=1)
    after = wait_for_steps(runner)
    assert [one.name for one in after.values()] == [one.name for one in before.values()]
    assert not any(one.has_left for one in after.values())


@pytest.mark.parametrize("how", ["raises", "returns"])
def test_end_of_a_program_whose_process_stays_is_seen_at_once(
    runner: GroupRunner, how: str
) -> None:
    has_changed = start_script(runner, FAILING_SCRIPT, how)
    wait_for_steps(runner)
    assert has_changed.wait(60)

    def has_ended() -> bool:
        (view,) = runner.workers.view().values()
        return view.has_failed or view.has_returned

    wait_until("the end of the program", has_ended)
    (view,) = runner.workers.view().values()
    assert (view.has_failed, view.has_returned) == (how == "raises", how == "returns")
    runner.stop(StopHow.KILL)
    exit_ = runner.wait_for_exit()
    assert exit_.message == ("ValueError: no luck" if how == "raises" else "")
    assert exit_.has_failed == (how == "raises")


def test_worker_that_was_not_in_the_group_before_knows_of_earlier_calls(
    runner: GroupRunner,
) -> None:
    start_script(runner, TRAINING_SCRIPT)
    wait_for_steps(runner)
    runner.stop(StopHow.KILL)
    runner.wait_for_exit()
    # A worker of another program: it has not called should_stop, and is expected to.
    runner.start(shell("sleep 600"), attempt=1)
    (view,) = runner.workers.view().values()
    assert view.takes_notices
    assert view.has_called_should_stop
    runner.workers.notify(StopNotice(RESIZE, 60.0))
    wait_until("its first call", lambda: runner.workers.view()[0].stop_call == 1)


def test_processes_that_a_succeeded_worker_has_started_are_waited_for(runner: GroupRunner) -> None:
    file = runner.directory / "uploaded"
    runner.start(shell(f"(sleep 1; touch {file}) & exit 0"))
    assert runner.wait_for_exit().succeeded
    is_done = threading.Event()
    runner.workers.finish(float("inf"), is_done.set)
    assert not is_done.wait(0.1)
    assert is_done.wait(60)
    assert file.exists()


def test_wait_for_such_processes_can_be_given_up(runner: GroupRunner) -> None:
    runner.start(shell("sleep 600 & exit 0"))
    assert runner.wait_for_exit().succeeded
    first, second = threading.Event(), threading.Event()
    runner.workers.finish(float("inf"), first.set)
    assert not first.wait(0.3)
    runner.workers.finish(0.0, second.set)
    assert first.wait(60)
    assert second.wait(60)


def test_notice_without_a_worker_has_no_effect(runner: GroupRunner) -> None:
    runner.start(shell("exit 0"))
    assert runner.wait_for_exit().succeeded
    runner.workers.notify(StopNotice(RESIZE, 60.0))
    runner.workers.stop([0], StopHow.KILL)
    runner.start(shell("exit 3"), attempt=1)
    assert runner.wait_for_exit().returncode == 3


def test_close_gives_workers_time_after_sigterm(runner: GroupRunner) -> None:
    runner.set_output("1", "0").start(
        shell("trap 'sleep 0.3; echo saved; exit 5' TERM; echo up; while :; do sleep 0.01; done")
    )
    runner.pid()
    wait_until("the trap", lambda: "up" in runner.read_file("stdout.log"))
    runner.workers.close(60.0)
    exit_ = runner.wait_for_exit()
    assert (exit_.returncode, exit_.has_failed) == (5, False)
    assert runner.read_file("stdout.log") == "up\nsaved\n"
