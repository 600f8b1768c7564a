"""A node starts its workers before it joins, while the workers of the other nodes continue."""

from __future__ import annotations

import os
import signal

import pytest
from jobs import Job, Node, check_consistent_world, generation_of, is_alive
from regroup_jobs import kill_workers, pids, start_member, wait_for_first_steps

from elasticlib.constants import DRAINED_EXIT_CODE
from elasticlib.testing.waiting import wait_until

SLOW_START = ("start", "2")


def wait_for_standby_workers(job: Job, count: int = 2) -> set[int]:
    """Wait until `count` standby workers have started, and return their pids."""

    def condition() -> set[int]:
        pids_of_standby_workers = {int(path.suffix[1:]) for path in job.folder.glob("standby.*")}
        return pids_of_standby_workers if len(pids_of_standby_workers) >= count else set()

    return wait_until(f"{count} standby workers", condition)


def start_pair(job: Job, *flags: str) -> tuple[Node, Node]:
    """Start two nodes."""
    store = job.start_store()
    one, two = (
        start_member(job, store, name, *flags, worker=SLOW_START) for name in ("one", "two")
    )
    return one, two


def test_members_continue_while_the_workers_of_a_joining_node_start(job: Job) -> None:
    store = job.start_store()
    one = start_member(job, store, "one", worker=SLOW_START)
    before = job.wait_for_world(2)
    two = start_member(job, store, "two", worker=SLOW_START)
    started = wait_for_standby_workers(job)
    assert job.wait_for_world(2) == before, "no generation is formed before the workers are ready"
    both = job.wait_for_world(4, after=1)
    check_consistent_world(both)
    assert pids(both, "one") == pids(before)
    assert pids(both, "two") == started
    assert both[0]["TORCHELASTIC_RESTART_COUNT"] == "0"
    two.wait_for_log(
        r"the job is running: starting 2 standby worker\(s\) before this node joins it"
    )
    job.finish()
    assert [node.exit_code() for node in (one, two)] == [0, 0], job.logs


def test_members_continue_while_a_node_restarts_all_its_workers(job: Job) -> None:
    one, two = start_pair(job)
    first = wait_for_first_steps(job, 4)
    kill_workers(first[2:])
    smaller = job.wait_for_world(2, after=1)
    assert pids(smaller) == pids(first[:2])
    assert smaller[0]["TORCHELASTIC_RESTART_COUNT"] == "1", "the failure uses a restart"
    complete = job.wait_for_world(4, after=generation_of(smaller))
    assert pids(first[:2]) < pids(complete)
    assert pids(complete) - pids(first) <= wait_for_standby_workers(job)
    assert complete[0]["TORCHELASTIC_RESTART_COUNT"] == "1"
    job.finish()
    assert [node.exit_code() for node in (one, two)] == [0, 0], job.logs


def test_members_without_a_common_step_wait_for_a_node_that_lost_its_workers(
    job: Job,
) -> None:
    one, two = start_pair(job)
    first = wait_for_first_steps(job, 4)
    kill_workers(first[2:])
    smaller = job.wait_for_world(2, after=1)
    (idle := job.folder / "idle").touch()
    # The new workers may not have the state of the job yet.
    complete = job.wait_for_world(4, after=generation_of(smaller))
    kill_workers(complete[:2])
    wait_until("the next group", lambda: job.reports(generation_of(complete) + 1))
    after = job.wait_for_world(4, after=generation_of(complete))
    assert generation_of(after) == generation_of(complete) + 1, job.logs
    replaced = complete[2]["node"]
    assert pids(after, replaced) == pids(complete, replaced), job.logs
    idle.unlink()
    job.finish()
    assert [node.exit_code() for node in (one, two)] == [0, 0], job.logs


def test_no_node_continues_without_its_peers_if_all_workers_are_lost(job: Job) -> None:
    one, two = start_pair(job)
    first = job.wait_for_world(4)
    kill_workers(first)
    second = job.wait_for_world(4, after=1)
    check_consistent_world(second)
    worlds = {path.name.split(".")[1] for path in job.folder.glob("report.*.json")}
    assert worlds == {"1", str(generation_of(second))}, "no generation had one node only"
    job.finish()
    assert [node.exit_code() for node in (one, two)] == [0, 0], job.logs


def test_workers_that_fail_before_their_node_joins_are_started_again(job: Job) -> None:
    store = job.start_store()
    one = start_member(job, store, "one", worker=SLOW_START)
    before = job.wait_for_world(2)
    two = start_member(job, store, "two", worker=SLOW_START)
    started = wait_for_standby_workers(job)
    for pid in started:
        os.kill(pid, signal.SIGKILL)
    both = job.wait_for_world(4, after=1)
    assert pids(both, "one") == pids(before)
    assert not pids(both) & started
    assert both[0]["TORCHELASTIC_RESTART_COUNT"] == "0", "the failure uses no restart"
    job.finish()
    assert [node.exit_code() for node in (one, two)] == [0, 0], job.logs


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_stops_workers_whose_node_has_not_joined_yet(job: Job, number: int) -> None:
    store = job.start_store()
    one = start_member(job, store, "one")
    before = job.wait_for_world(2)
    two = start_member(job, store, "two", worker=("start", "30"))
    started = wait_for_standby_workers(job)
    two.signal(number)
    # The workers of the other node have shown that the script takes notices.
    assert two.exit_code() == DRAINED_EXIT_CODE, job.logs
    wait_until("the exit of the workers of the node", lambda: not any(map(is_alive, started)))
    assert job.wait_for_world(2) == before
    job.finish()
    assert one.exit_code() == 0, job.logs


def test_a_spare_node_has_started_workers(job: Job) -> None:
    store = job.start_store()
    one = start_member(job, store, "one", "--nnodes=1:1")
    first = job.wait_for_world(2)
    two = start_member(job, store, "two", "--nnodes=1:1")
    ready = wait_for_standby_workers(job)
    one.kill()
    second = job.wait_for_world(2, after=1)
    assert pids(second) == ready
    assert not pids(first) & ready
    job.finish()
    assert two.exit_code() == 0, job.logs
