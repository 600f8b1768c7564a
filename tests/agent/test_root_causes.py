"""The root cause of a failed job: each node names the failure that the job's leader has found."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import attrs
from single_worker_agent import OneWorker, Run, SingleNodeHandler, running

from elasticlib import DynamicRendezvousHandler, MemoryStore, Node, WorkerState
from elasticlib.agent.run_observer import remote_cause
from elasticlib.errors import RendezvousTimeoutError
from elasticlib.options import RendezvousSettings, RendezvousTimeouts
from elasticlib.rendezvous.blame import (
    MAX_TRACE_BYTES,
    Evidence,
    FailureDetails,
    FailureKind,
    Verdict,
)
from elasticlib.rendezvous.interface import RendezvousInfo, Report, ReportKind
from elasticlib.testing.rendezvous_cluster import FakeBootstrapStore
from elasticlib.testing.waiting import wait_until
from elasticlib.workers.exits import WorkerExit

CLOSED_BY_PEER = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer"


class FailingWorker(OneWorker):
    """A worker that fails with these fields of its exit."""

    def __init__(self, **fields: Any) -> None:
        super().__init__()
        self.fields = fields

    def fail(self) -> None:
        self.end(3)

    def make_exit(self, code: int, *, was_stopped: bool) -> WorkerExit:
        exit_ = super().make_exit(code, was_stopped=was_stopped)
        return exit_ if was_stopped or not code else attrs.evolve(exit_, pid=77, **self.fields)


@contextlib.contextmanager
def job(*workers: OneWorker) -> Iterator[list[Run]]:
    """Run one agent for each worker, until all of them are in one generation and fail."""
    store = MemoryStore()
    nodes = [f"h{n}" for n in range(len(workers))]
    settings = RendezvousSettings(len(nodes), len(nodes), 0, last_call_timeout=0.0)
    timeouts = RendezvousTimeouts(join_timeout=60.0, keep_alive_interval=0.1, close_timeout=5.0)
    with contextlib.ExitStack() as stack:
        handlers = [
            DynamicRendezvousHandler(
                store.client(),
                "job",
                Node(name, name, "127.0.0.1", 1, rank_hint=rank),
                settings,
                timeouts=timeouts,
                open_bootstrap_store=FakeBootstrapStore,
            )
            for rank, name in enumerate(nodes)
        ]
        # `running` waits for the start of the worker, and so for the other nodes.
        for worker in workers:
            worker.up.set()
        yield [
            stack.enter_context(running(worker, handler))
            for worker, handler in zip(workers, handlers, strict=True)
        ]


def wait_for_starts(*workers: OneWorker) -> None:
    wait_until("the start of all workers", lambda: all(worker.starts for worker in workers))


def test_all_nodes_name_the_failure_of_one_with_all_that_is_known_of_it() -> None:
    traceback = "Traceback (most recent call last):\n  ...\nValueError: bad data"
    other = OneWorker()
    failing = FailingWorker(message="ValueError: bad data", traceback=traceback, log_dir="/logs/1")
    with job(other, failing) as runs:
        wait_for_starts(other, failing)
        failing.fail()
        results = [run.result() for run in runs]
    assert [result.state for result in results] == [WorkerState.FAILED] * 2
    for result in results:
        cause = result.root_cause
        assert cause is not None
        assert (cause.rank, cause.local_rank, cause.pid, cause.returncode) == (1, 0, 77, 3)
        assert (cause.message, cause.traceback) == ("ValueError: bad data", traceback)
        assert (cause.log_dir, cause.subsequent_ranks, cause.generation) == ("/logs/1", (), 1)
        assert "worker of rank 1" in cause.summary
        assert cause.summary in result.reason
    remote = results[0].root_cause
    assert remote is not None
    assert remote.host == "h1"
    assert [list(result.failures) for result in results] == [[], [1]]


def test_a_failed_collective_is_not_the_cause_but_follows_from_it() -> None:
    workers = [FailingWorker(message=CLOSED_BY_PEER), FailingWorker(message="ValueError: x")]
    with job(*workers) as runs:
        wait_for_starts(*workers)
        for worker in workers:  # the failed collective is reported first
            worker.fail()
        causes = [run.result().root_cause for run in runs]
    assert [cause and (cause.rank, cause.message) for cause in causes] == [(1, "ValueError: x")] * 2
    assert [cause and cause.subsequent_ranks for cause in causes] == [(0,)] * 2


def test_each_node_names_its_own_failure_if_the_handler_has_no_leader() -> None:
    worker = FailingWorker(message="ValueError: x", stderr_tail="the end of stderr")
    with running(worker) as run:
        worker.fail()
        cause = run.result().root_cause
    assert cause is not None
    assert (cause.rank, cause.message, cause.stderr_tail) == (
        0,
        "ValueError: x",
        "the end of stderr",
    )


class HandlerThatLosesPeer(SingleNodeHandler):
    """A handler whose peer is lost. The worker fails because of it, and no other node joins."""

    def next_rendezvous(self) -> RendezvousInfo:
        if self.generation:
            error = RendezvousTimeoutError("1 of at least 2 nodes are here; n1 was lost")
            error.is_node_loss = True
            raise error
        return super().next_rendezvous()

    def report(self, report: Report) -> bool:
        return report.kind is ReportKind.FAILURE


def test_a_worker_that_failed_because_a_node_was_lost_is_not_the_root_cause() -> None:
    workers = OneWorker()
    with running(workers, HandlerThatLosesPeer(restarts=0, max_restarts=3)) as run:
        workers.end(7)
        result = run.result()
    assert (result.state, result.root_cause) == (WorkerState.FAILED, None)
    assert result.reason == "1 of at least 2 nodes are here; n1 was lost"
    assert result.failures[0].returncode == 7


def test_no_worker_has_failed_in_a_hang() -> None:
    evidence = Evidence(
        FailureKind.ELSEWHERE, "hung: rank 3 on b is at step 4", 3, node="b-1", host="b"
    )
    cause = remote_cause(Verdict(evidence, "b-1", "b"), 2)
    assert (cause.host, cause.rank, cause.local_rank, cause.generation) == ("b", -1, -1, 2)
    assert cause.summary == "hung: rank 3 on b is at step 4"


def test_a_signal_is_named_on_all_nodes() -> None:
    evidence = Evidence(FailureKind.KILLED, "worker of rank 3 was killed", 3, host="b")
    verdict = Verdict(evidence, "b-1", "b", details=FailureDetails(3, 1, 5, -9))
    assert (remote_cause(verdict, 1).signal, remote_cause(verdict, 1).returncode) == ("SIGKILL", -9)
    unknown = remote_cause(Verdict(evidence, "b-1", "b"), 1)
    assert (unknown.rank, unknown.pid, unknown.summary) == (3, 0, "worker of rank 3 was killed")


def test_details_are_bounded_and_keep_the_end_of_a_traceback() -> None:
    huge = FailureDetails(
        message="é" * 10**6, traceback="Traceback\n" + "x\n" * 10**6 + "the end", log_dir="/" * 999
    )
    bounded = attrs.evolve(huge, stderr_tail="y\n" * 10**6).bounded()
    assert len(str(attrs.asdict(bounded))) < MAX_TRACE_BYTES + 1024
    assert bounded.traceback.startswith("Traceback")
    assert bounded.traceback.endswith("the end")
    assert bounded.stderr_tail == ""
    only_stderr = FailureDetails(stderr_tail="y\n" * 10**6 + "the end").bounded()
    assert only_stderr.stderr_tail.endswith("the end")
    assert bounded.bounded() == bounded
