"""Workers are started before their node joins, while the workers of the other nodes train on.

The agents and workers are real processes; the workers use no torch.
"""

from __future__ import annotations

import os
import signal

import pytest
from jobs import Job, Node, check_consistent_world, generation_of, is_alive
from test_kept_workers import join, kill, pids, wait_for_first_steps

from elasticlib.testing.waiting import wait_until

SLOW = ("start", "2")


def newcomers(job: Job, count: int = 2) -> set[int]:
    """Wait until `count` standby workers have started, and return their pids."""

    def look() -> set[int]:
        found = {int(path.suffix[1:]) for path in job.folder.glob("standby.*")}
        return found if len(found) >= count else set()

    return wait_until(f"{count} newcomers", look)


def pair(job: Job, *flags: str) -> tuple[Node, Node]:
    """Start two nodes."""
    store = job.start_store()
    one, two = (join(job, store, name, *flags, worker=SLOW) for name in ("one", "two"))
    return one, two


def test_members_continue_while_the_workers_of_a_joining_node_start(job: Job) -> None:
    store = job.start_store()
    one = join(job, store, "one", worker=SLOW)
    alone = job.wait_for_world(2)
    two = join(job, store, "two", worker=SLOW)
    started = newcomers(job)
    assert job.wait_for_world(2) == alone, "there is no other generation before they are ready"
    both = job.wait_for_world(4, after=1)
    check_consistent_world(both)
    assert pids(both, "one") == pids(alone)
    assert pids(both, "two") == started
    assert both[0]["TORCHELASTIC_RESTART_COUNT"] == "0"
    two.wait_for_log(
        r"the job is running: starting 2 standby worker\(s\) before this node joins it"
    )
    job.finish()
    assert [node.exit_code() for node in (one, two)] == [0, 0], job.logs


def test_members_continue_while_a_node_restarts_all_its_workers(job: Job) -> None:
    one, two = pair(job)
    first = wait_for_first_steps(job, 4)
    for report in first[2:]:
        kill(report)
    left = job.wait_for_world(2, after=1)
    assert pids(left) == pids(first[:2])
    assert left[0]["TORCHELASTIC_RESTART_COUNT"] == "1", "it is charged all the same"
    whole = job.wait_for_world(4, after=generation_of(left))
    assert pids(first[:2]) < pids(whole)
    assert pids(whole) - pids(first) <= newcomers(job)
    assert whole[0]["TORCHELASTIC_RESTART_COUNT"] == "1"
    job.finish()
    assert [node.exit_code() for node in (one, two)] == [0, 0], job.logs


def test_members_without_a_common_step_wait_for_a_node_that_lost_its_workers(
    job: Job,
) -> None:
    one, two = pair(job)
    first = wait_for_first_steps(job, 4)
    kill(first[2])
    kill(first[3])
    left = job.wait_for_world(2, after=1)
    (idle := job.folder / "idle").touch()
    # The new workers of node two may not have the state of the job yet.
    whole = job.wait_for_world(4, after=generation_of(left))
    for report in whole[:2]:
        kill(report)
    wait_until("another group", lambda: job.reports(generation_of(whole) + 1))
    after = job.wait_for_world(4, after=generation_of(whole))
    assert generation_of(after) == generation_of(whole) + 1, job.logs
    assert pids(after, "two") == pids(whole, "two"), job.logs
    idle.unlink()
    job.finish()
    assert [node.exit_code() for node in (one, two)] == [0, 0], job.logs


def test_no_node_continues_without_the_others_if_all_workers_are_lost(job: Job) -> None:
    one, two = pair(job)
    first = job.wait_for_world(4)
    for report in first:
        kill(report)
    second = job.wait_for_world(4, after=1)
    check_consistent_world(second)
    worlds = {path.name.split(".")[1] for path in job.folder.glob("report.*.json")}
    assert worlds == {"1", str(generation_of(second))}, "no generation of one node lies between"
    job.finish()
    assert [node.exit_code() for node in (one, two)] == [0, 0], job.logs


def test_workers_that_fail_before_their_node_joins_are_started_again(job: Job) -> None:
    store = job.start_store()
    one = join(job, store, "one", worker=SLOW)
    alone = job.wait_for_world(2)
    two = join(job, store, "two", worker=SLOW)
    started = newcomers(job)
    for pid in started:
        os.kill(pid, signal.SIGKILL)
    both = job.wait_for_world(4, after=1)
    assert pids(both, "one") == pids(alone)
    assert not pids(both) & started
    assert both[0]["TORCHELASTIC_RESTART_COUNT"] == "0", "the job has lost nothing"
    job.finish()
    assert [node.exit_code() for node in (one, two)] == [0, 0], job.logs


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR2, 75)])
def test_a_signal_stops_workers_whose_node_has_not_joined_yet(
    job: Job, number: int, code: int
) -> None:
    store = job.start_store()
    one = join(job, store, "one")
    alone = job.wait_for_world(2)
    two = join(job, store, "two", worker=("start", "30"))
    started = newcomers(job)
    two.signal(number)
    assert two.exit_code() == code, job.logs
    wait_until("its workers to be gone", lambda: not any(map(is_alive, started)))
    assert job.wait_for_world(2) == alone
    job.finish()
    assert one.exit_code() == 0, job.logs


def test_a_spare_node_has_started_workers(job: Job) -> None:
    store = job.start_store()
    one = join(job, store, "one", "--nnodes=1:1")
    first = job.wait_for_world(2)
    two = join(job, store, "two", "--nnodes=1:1")
    ready = newcomers(job)
    one.kill()
    second = job.wait_for_world(2, after=1)
    assert pids(second) == ready
    assert not pids(first) & ready
    job.finish()
    assert two.exit_code() == 0, job.logs
