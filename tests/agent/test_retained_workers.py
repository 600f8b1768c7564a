"""Workers that survive a failure continue in the next group, and replacements join them later."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from jobs import Job, check_consistent_world, generation_of, is_alive
from regroup_jobs import (
    kill_worker,
    kill_workers,
    pids,
    send_command,
    start_member,
    start_node,
    wait_for_first_steps,
    wait_for_replacement,
)

from elasticlib.constants import DRAINED_EXIT_CODE
from elasticlib.testing.waiting import wait_until


def read_output(job: Job) -> dict[int, list[str]]:
    """Return the lines that the workers of the newest generation have printed, by rank.

    The log directory of a worker is in its event, because a retained worker keeps its directory.
    """
    (events,) = job.events()
    (run,) = (job.folder / "logs").iterdir()
    newest = max(event.generation for event in events)
    lines_of_rank: dict[int, list[str]] = {}
    for event in events:
        if event.kind == "worker.started" and event.generation == newest:
            path = run / f"attempt_{event.data['attempt']}/{event.data['local_rank']}/stdout.log"
            if path.exists():
                lines_of_rank[event.rank or 0] = path.read_text().splitlines()
    return lines_of_rank


def test_a_survivor_continues_in_a_smaller_group_until_the_replacement_joins(job: Job) -> None:
    node = start_node(job, "one", "--standalone")
    first = job.wait_for_world(2)
    kill_worker(first[0])
    smaller = job.wait_for_world(1, after=1)
    assert pids(smaller) == {first[1]["pid"]}
    assert (smaller[0]["LOCAL_RANK"], smaller[0]["LOCAL_WORLD_SIZE"]) == ("1", "2")
    assert smaller[0]["TORCHELASTIC_RESTART_COUNT"] == "1"
    complete = job.wait_for_world(2, after=generation_of(smaller))
    check_consistent_world(complete)
    assert complete[1]["pid"] == first[1]["pid"]
    assert complete[0]["pid"] not in pids(first)
    assert complete[0]["TORCHELASTIC_RESTART_COUNT"] == "1", (
        "the admission of a replacement uses no restart"
    )
    memory = {Path(report["ELASTICLIB_SNAPSHOTS"]) for report in (*smaller, *complete)}
    assert len(memory) == 2, "each generation has its own snapshots"
    job.finish()
    assert node.exit_code() == 0, job.logs


def test_output_and_status_of_a_retained_worker_continue(job: Job) -> None:
    logs = f"--log-dir={job.folder / 'logs'}"
    node = start_node(job, "one", "--standalone", logs, "--redirects=3", worker=("start", "3"))
    first = job.wait_for_world(2)
    kill_worker(first[0])
    job.wait_for_world(1, after=1)
    node.wait_for_log("generation 2: rendezvous took")
    left = {0: ["generation 1", "generation 2"]}
    wait_until("the output of the remaining worker", lambda: read_output(job) == left)
    job.wait_for_world(2, after=2)
    job.finish()
    assert node.exit_code() == 0, job.logs
    retained = [f"generation {number}" for number in (1, 2, 3)]
    assert read_output(job) == {0: ["generation 3"], 1: retained}
    (events,) = job.events()
    started = [e.data for e in events if e.kind == "worker.started"]
    assert [(fact["local_rank"], fact["attempt"]) for fact in started] == [
        *((0, 0), (1, 0)),
        (1, 0),
        *((0, 1), (1, 0)),
    ]
    trained = [e.data["duration_seconds"] for e in events if e.kind == "training.started"]
    assert len(trained) == 3, "there is one event for each generation"
    assert all(seconds >= 0 for seconds in trained)
    failed = [e for e in events if e.kind == "worker.exited" and not e.data["succeeded"]]
    assert [event.rank for event in failed] == [0]


def test_survivors_on_all_nodes_continue_after_a_worker_is_lost(job: Job) -> None:
    store = job.start_store()
    nodes = [start_member(job, store, name, "--nnodes=2:2") for name in ("one", "two")]
    first = job.wait_for_world(4)
    kill_worker(first[3])
    smaller = job.wait_for_world(3, after=1)
    check_consistent_world(smaller)
    assert pids(smaller) == pids(first[:3])
    complete = job.wait_for_world(4, after=generation_of(smaller))
    check_consistent_world(complete)
    assert pids(first[:3]) < pids(complete)
    job.finish()
    assert [node.exit_code() for node in nodes] == [0, 0], job.logs


def test_workers_continue_when_another_node_joins_and_is_lost(job: Job) -> None:
    store = job.start_store()
    start_member(job, store, "one")
    first = job.wait_for_world(2)
    other = start_member(job, store, "two")
    both = job.wait_for_world(4, after=1)
    assert pids(both, "one") == pids(first)
    other.kill()
    left = job.wait_for_world(2, after=generation_of(both))
    assert pids(left) == pids(first)
    assert left[0]["TORCHELASTIC_RESTART_COUNT"] == "0", "a loss is not charged"
    job.finish()
    assert job.nodes[1].exit_code() == 0, job.logs


def test_workers_continue_when_another_node_drains(job: Job) -> None:
    store = job.start_store()
    node, other = (start_member(job, store, name, "--nnodes=1:2") for name in ("one", "two"))
    both = job.wait_for_world(4)
    other.signal(signal.SIGUSR2)
    left = job.wait_for_world(2, after=generation_of(both))
    assert pids(left) == pids(both, "one")
    assert other.exit_code() == 75, job.logs
    job.finish()
    assert node.exit_code() == 0, job.logs


def test_a_worker_that_does_not_leave_its_group_is_stopped_and_the_others_continue(
    job: Job,
) -> None:
    node = start_node(job, "one", "--standalone", "--nproc-per-node=3")
    first = job.wait_for_world(3)
    send_command(job, "stick", first[1])
    kill_worker(first[0])
    smaller = job.wait_for_world(1, after=1)
    assert pids(smaller) == {first[2]["pid"]}
    node.wait_for_log("still in their group 10 s after it was over, sending SIGTERM")
    assert job.wait_for_world(3, after=generation_of(smaller))[2]["pid"] == first[2]["pid"]
    job.finish()
    assert node.exit_code() == 0, job.logs


def test_a_hung_worker_is_killed_and_the_others_continue(job: Job) -> None:
    node = start_node(job, "one", "--standalone", "--hang-timeout=1")
    # A worker without a step has the longer limit of a first step.
    first = wait_for_first_steps(job, 2)
    os.kill(first[0]["pid"], signal.SIGSTOP)
    smaller = job.wait_for_world(1, after=1)
    assert pids(smaller) == {first[1]["pid"]}
    assert not is_alive(first[0]["pid"])
    job.wait_for_world(2, after=generation_of(smaller))
    job.finish()
    assert node.exit_code() == 0, job.logs


def test_a_replacement_that_fails_uses_a_restart_and_the_others_continue(job: Job) -> None:
    node = start_node(job, "one", "--standalone", worker=("start", "0.5"))
    first = job.wait_for_world(2)
    kill_worker(first[0])
    smaller = job.wait_for_world(1, after=1)
    os.kill(wait_for_replacement(job), signal.SIGKILL)
    again = job.wait_for_world(1, after=generation_of(smaller))
    assert pids(again) == pids(smaller)
    assert again[0]["TORCHELASTIC_RESTART_COUNT"] == "2"
    complete = job.wait_for_world(2, after=generation_of(again))
    assert complete[1]["pid"] == first[1]["pid"]
    job.finish()
    assert node.exit_code() == 0, job.logs


def test_replacements_that_are_starting_survive_a_regroup_and_join(job: Job) -> None:
    node = start_node(job, "one", "--standalone", "--nproc-per-node=3", worker=("start", "4"))
    first = job.wait_for_world(3)
    kill_worker(first[0])
    smaller = job.wait_for_world(2, after=1)
    starting = wait_for_replacement(job)
    kill_worker(first[1])
    smallest = job.wait_for_world(1, after=generation_of(smaller))
    assert pids(smallest) == {first[2]["pid"]}
    complete = job.wait_for_world(3, after=generation_of(smallest))
    assert {starting, first[2]["pid"]} < pids(complete)
    job.finish()
    assert node.exit_code() == 0, job.logs


def test_all_workers_leave_a_group_that_breaks_during_a_resize(job: Job) -> None:
    store = job.start_store()
    nodes = [
        start_member(job, store, n, "--nnodes=2:2", worker=("start", "2")) for n in ("one", "two")
    ]
    first = job.wait_for_world(4)
    kill_worker(first[0])
    smaller = job.wait_for_world(3, after=1)
    *waiting, broken = smaller
    for report in waiting:
        send_command(job, "wait", report)
    send_command(job, "stick", broken)
    for node in nodes:
        node.wait_for_log("resize: ")
    kill_worker(broken)
    after = job.wait_for_world(3, after=generation_of(smaller), seconds=9)
    assert pids(waiting) < pids(after)
    for report in waiting:
        (job.folder / f"wait.{report['pid']}").unlink()
    job.wait_for_world(4, after=generation_of(after))
    job.finish()
    assert [node.exit_code() for node in nodes] == [0, 0], job.logs


def test_workers_that_are_starting_when_a_node_joins_are_retained(job: Job) -> None:
    store = job.start_store()
    (starting := job.folder / "starting.one.1").touch()
    node = start_member(job, store, "one")
    wait_until("the first worker", lambda: job.reports(1))
    other = start_member(job, store, "two")
    node.wait_for_log("resize: ")
    starting.unlink()
    complete = job.wait_for_world(4, after=1, seconds=15)
    assert pids(complete, "one") == pids(job.reports(1)), job.logs
    job.finish()
    assert [node.exit_code(), other.exit_code()] == [0, 0], job.logs


def test_a_worker_is_retained_if_one_fails_while_another_is_starting(job: Job) -> None:
    (starting := job.folder / "starting.one.1").touch()
    node = start_node(job, "one", "--standalone", "--nproc-per-node=3")
    first = wait_until("two workers", lambda: job.reports(1)[1:] and job.reports(1))
    kill_worker(first[1])
    smaller = job.wait_for_world(1, after=1)
    assert pids(smaller) == {first[0]["pid"]}
    starting.unlink()
    assert first[0]["pid"] in pids(job.wait_for_world(3, after=generation_of(smaller)))
    job.finish()
    assert node.exit_code() == 0, job.logs


def test_a_worker_whose_group_is_broken_does_not_wait_for_the_others(job: Job) -> None:
    store = job.start_store()
    nodes = [
        start_member(job, store, n, "--nnodes=2:2", worker=("start", "2")) for n in ("one", "two")
    ]
    first = job.wait_for_world(4)
    kill_worker(first[0])
    smaller = job.wait_for_world(3, after=1)
    for report in smaller:
        send_command(job, "wait", report)
    for node in nodes:
        node.wait_for_log("resize: ")
    send_command(job, "broken", smaller[0])
    complete = job.wait_for_world(4, after=generation_of(smaller), seconds=9)
    assert pids(smaller) < pids(complete)
    job.finish()
    for report in smaller:
        (job.folder / f"wait.{report['pid']}").unlink()
    assert [node.exit_code() for node in nodes] == [0, 0], job.logs


def test_all_workers_are_started_if_none_has_survived(job: Job) -> None:
    node = start_node(job, "one", "--standalone")
    first = job.wait_for_world(2)
    kill_workers(first)
    second = job.wait_for_world(2, after=1)
    assert not pids(first) & pids(second)
    job.finish()
    assert node.exit_code() == 0, job.logs


def test_no_process_is_left_after_the_last_restart_is_used(job: Job) -> None:
    node = start_node(job, "one", "--standalone", "--max-restarts=1")
    first = job.wait_for_world(2)
    kill_worker(first[0])
    complete = job.wait_for_world(2, after=2)
    send_command(job, "fail", complete[0])
    assert node.exit_code() == 1, job.logs
    node.wait_for_log("exited with code 1 .*1 of 1 restarts used")
    job.wait_until_gone()


def test_workers_that_fail_during_each_resize_use_up_the_restarts(job: Job) -> None:
    flags = ("--nproc-per-node=3", "--max-restarts=2")
    node = start_node(job, "one", "--standalone", *flags, worker=("start", "1"))
    first = job.wait_for_world(3)
    kill_worker(first[0])
    group = job.wait_for_world(2, after=1)
    for restarts in (1, 2):
        assert group[0]["TORCHELASTIC_RESTART_COUNT"] == str(restarts)
        staying, failing = group
        # The resize lasts until the worker fails.
        for report in group:
            send_command(job, "wait", report)
        node.wait_for_log(rf"generation {generation_of(group)}: [^$]*resize: ")
        send_command(job, "fail", failing)
        (job.folder / f"wait.{staying['pid']}").unlink()
        if restarts == 1:
            group = job.wait_for_world(2, after=generation_of(group))
    assert node.exit_code() == 1, job.logs
    node.wait_for_log("exited with code 1 .*2 of 2 restarts used")
    job.wait_until_gone()


def test_a_signal_stops_workers_that_wait_for_a_generation(job: Job) -> None:
    store = job.start_store()
    node, other = (start_member(job, store, name, "--nnodes=2:2") for name in ("one", "two"))
    first = job.wait_for_world(4)
    other.kill()
    node.wait_for_log("generation 1: [^$]*1 of at least 2 nodes are here")
    assert all(is_alive(pid) for pid in pids(first, "one"))
    node.signal(signal.SIGTERM)
    assert node.exit_code() == DRAINED_EXIT_CODE, job.logs
    wait_until(
        "the exit of the workers of the node", lambda: not any(map(is_alive, pids(first, "one")))
    )


def test_a_worker_that_dies_while_it_waits_for_a_generation_is_replaced(job: Job) -> None:
    store = job.start_store()
    slow = ("start", "3")  # A replacement must not join before all other workers have started.
    node, other = (start_member(job, store, n, "--nnodes=2:2", worker=slow) for n in ("one", "two"))
    first = job.wait_for_world(4)
    other.kill()
    node.wait_for_log("generation 1: [^$]*1 of at least 2 nodes are here")
    lost, waiting = (report for report in first if report["node"] == "one")
    kill_worker(lost)
    start_member(job, store, "three", "--nnodes=2:2")
    smaller = job.wait_for_world(3, after=1)
    assert pids(smaller, "one") == {waiting["pid"]}
    complete = job.wait_for_world(4, after=generation_of(smaller))
    assert waiting["pid"] in pids(complete)
    job.finish()
    assert node.exit_code() == 0, job.logs


def test_the_job_ends_while_a_replacement_is_still_starting(job: Job) -> None:
    node = start_node(job, "one", "--standalone", worker=("start", "3"))
    first = job.wait_for_world(2)
    kill_worker(first[0])
    job.wait_for_world(1, after=1)
    job.finish()
    assert node.exit_code() == 0, job.logs
    job.wait_until_gone()


def test_a_drain_does_not_wait_for_a_replacement_that_is_starting(job: Job) -> None:
    node = start_node(job, "one", "--standalone", worker=("start", "30"))
    first = job.wait_for_world(2)
    kill_worker(first[0])
    job.wait_for_world(1, after=1)
    node.signal(signal.SIGUSR2)
    assert node.exit_code() == 75, job.logs
    job.wait_until_gone()
