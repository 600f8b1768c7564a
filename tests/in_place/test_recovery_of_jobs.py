"""Launched jobs recover in place after each kind of fault in docs/failure_modes.md."""

from __future__ import annotations

import os
import signal
import time

import pytest
from in_place_runs import (
    IN_PLACE,
    Training,
    Worker,
    kill,
    needs_newest,
    pids,
    train_undisturbed,
)
from jobs import Job
from processes import is_alive

from elasticlib.testing.waiting import wait_until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(400)]

EPOCHS = 20  # 220 steps
PACE_S = 0.05


def start_single_node(job: Job, workers: int, *flags: str, epochs: int = EPOCHS) -> Training:
    training = Training(job, "run", epochs)
    training.pace(PACE_S)
    num_workers_flags = ("--nproc-per-node", str(workers))
    training.start("node", "--standalone", "--rdzv-id", "run", *num_workers_flags, *flags)
    return training


def wait_for_failure(training: Training) -> None:
    """Wait until an agent has noticed the first worker that was killed."""
    wait_until(
        "an agent that reports the killed worker",
        lambda: any("SIGKILL" in node.text for node in training.nodes.values()),
    )


class Nodes:
    """Nodes of two workers each, and a store in a separate process."""

    def __init__(self, job: Job, nodes: int = 2) -> None:
        self.training = Training(job, "run", EPOCHS)
        self.port = job.reserve_port()
        self._rendezvous_flags = (
            "--rdzv-endpoint",
            job.start_store(at=self.port),
            "--rdzv-id",
            "run",
        )
        self.training.pace(PACE_S)
        for number in range(nodes):
            self.start(f"node{number}")

    def start(self, name: str) -> None:
        num_workers_flags = ("--nnodes", "1:3", "--nproc-per-node", "2")
        short_last_call = ("--rdzv-conf", "last_call_timeout=0.3")
        self.training.start(name, *self._rendezvous_flags, *num_workers_flags, *short_last_call)


def pids_of_node(workers: list[Worker], name: str) -> set[int]:
    return pids(worker for worker in workers if worker.node == name)


@needs_newest
def test_all_workers_are_killed_while_a_group_forms_and_restored_from_memory(
    job: Job,
) -> None:
    training = start_single_node(job, 3)
    before = training.wait_for_workers(3, 5)
    # Suspended workers cannot complete the next group before they are killed.
    for worker in before[1:]:
        os.kill(worker.pid, signal.SIGSTOP)
    kill(before[0])
    wait_for_failure(training)
    kill(*before[1:])
    wait_until(
        "the exit of all workers", lambda: not any(is_alive(worker.pid) for worker in before)
    )
    step = training.last_step
    after = training.wait_for_workers(3)
    assert not pids(before) & pids(after)
    # The last step may have been committed by a worker other than the one that took its snapshot.
    assert min(worker.committed[0][0] for worker in after) >= step
    assert training.wait_for_success() == train_undisturbed(job, EPOCHS)
    training.check_nothing_is_lost()
    assert training.sources() == {"memory"}


@needs_newest
def test_a_second_worker_is_killed_while_a_group_forms(
    job: Job,
) -> None:
    training = start_single_node(job, 3)
    # The delays cover the time that workers need to form a group.
    for delay_s in (0.0, 0.01, 0.03, 0.06):
        before = training.wait_for_workers(3, training.last_step + 2)
        kill(before[0])
        time.sleep(delay_s)
        kill(before[1])
        after = training.wait_for_workers(3, training.last_step)
        assert before[2].pid in pids(after), job.logs
    assert training.wait_for_success() == train_undisturbed(job, EPOCHS)
    training.check_nothing_is_lost()


@needs_newest
def test_a_worker_that_is_stopped_in_a_collective_is_replaced(
    job: Job,
) -> None:
    training = start_single_node(job, 3, "--hang-timeout", "3")
    before = training.wait_for_workers(3, 5)
    os.kill(before[1].pid, signal.SIGSTOP)
    after = training.wait_for_workers(3, training.last_step)
    assert pids(before) - pids(after) == {before[1].pid}, job.logs
    assert not is_alive(before[1].pid)
    assert training.wait_for_success() == train_undisturbed(job, EPOCHS)
    training.check_nothing_is_lost()


@needs_newest
def test_nodes_join_and_leave_while_the_workers_of_the_others_keep_running(job: Job) -> None:
    nodes = Nodes(job)
    training = nodes.training
    two = training.wait_for_workers(4, 3)
    nodes.start("node2")  # joins
    three = training.wait_for_workers(6, training.last_step)
    assert pids(two) <= pids(three), job.logs
    drained = training.nodes.pop("node1")
    drained.signal(signal.SIGUSR2)  # is drained
    assert drained.exit_code() == 75, drained.text
    two = training.wait_for_workers(4, training.last_step)
    assert pids(three) - pids(two) == pids_of_node(three, "node1"), job.logs
    training.nodes.pop("node2").kill()
    one = training.wait_for_workers(2, training.last_step)
    assert pids(one) == pids_of_node(two, "node0"), job.logs
    nodes.start("node2")  # returns
    two = training.wait_for_workers(4, training.last_step)
    assert pids(one) <= pids(two), job.logs
    assert training.wait_for_success() == train_undisturbed(job, EPOCHS)
    training.check_nothing_is_lost()


@needs_newest
def test_a_store_is_lost_while_a_group_forms(
    job: Job,
) -> None:
    nodes = Nodes(job)
    training = nodes.training
    before = training.wait_for_workers(4, 5)
    store = next(node for node in job.nodes if node.name == "store")
    store.kill()
    kill(before[0])
    for node in training.nodes.values():
        node.wait_for_log("the store is unreachable")
    wait_for_failure(training)
    step = training.last_step
    job.start_store(at=nodes.port)
    after = training.wait_for_workers(4, step)
    assert pids(before) - pids(after) == {before[0].pid}, job.logs
    assert training.wait_for_success() == train_undisturbed(job, EPOCHS)
    training.check_nothing_is_lost()


@needs_newest
def test_a_node_and_a_worker_of_another_node_are_lost_at_once(job: Job) -> None:
    nodes = Nodes(job)
    training = nodes.training
    before = training.wait_for_workers(4, 5)
    kill(next(worker for worker in before if worker.node == "node0"))
    training.nodes.pop("node1").kill()
    nodes.start("node2")
    after = training.wait_for_workers(4, training.last_step)
    assert len(pids(before) & pids(after)) == 1, job.logs
    assert training.wait_for_success() == train_undisturbed(job, EPOCHS)
    training.check_nothing_is_lost()


@needs_newest
def test_an_error_of_the_script_uses_a_restart_and_the_others_continue(job: Job) -> None:
    training = start_single_node(job, 2)
    before = training.wait_for_workers(2, 5)
    (training.folder / "raise").touch()
    training.nodes["node"].wait_for_log("an error of the script's own")
    (training.folder / "raise").unlink()
    after = training.wait_for_workers(2, training.last_step)
    assert len(pids(before) & pids(after)) == 1, job.logs
    assert training.wait_for_success() == train_undisturbed(job, EPOCHS)
    training.check_nothing_is_lost()


@needs_newest
def test_a_job_that_is_stopped_saves_the_step_at_which_all_workers_stop(job: Job) -> None:
    training = start_single_node(job, 2)
    before = training.wait_for_workers(2, 5)
    kill(before[0])
    training.wait_for_workers(2, training.last_step)  # one of the workers was in two groups
    node = training.nodes["node"]
    node.signal(signal.SIGTERM)
    assert node.exit_code() == 75, node.text
    assert node.text.count("stopped: ") == 2, node.text
    stopped = training.last_step
    assert {worker.step for worker in training.workers()} >= {stopped}
    assert training.saved() == stopped


@pytest.mark.skipif(IN_PLACE, reason="needs a torch older than 2.14")
def test_an_older_torch_restarts_all_workers_of_the_same_script(job: Job) -> None:
    training = start_single_node(job, 2)
    before = training.wait_for_workers(2, 5)
    kill(before[0])
    after = training.wait_for_workers(2, training.last_step)
    assert not pids(before) & pids(after)
    assert training.wait_for_success() == train_undisturbed(job, EPOCHS)
    training.check_nothing_is_lost()
    assert training.sources() == {"memory"}
