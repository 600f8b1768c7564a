"""The channel between a worker and its agent, and the agreement of all ranks on a stop call."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.agent.stop_agreement import StopProposal, agree, decode_proposal, encode_proposal
from elasticlib.clock import monotonic
from elasticlib.dir_lock import is_locked
from elasticlib.errors import ConfigError
from elasticlib.testing.waiting import wait_until
from elasticlib.workers import worker_channel
from elasticlib.workers.context import WorkerContext
from elasticlib.workers.interface import (
    DRAIN,
    PREEMPTED,
    RESIZE,
    Heartbeat,
    WorkerView,
)
from elasticlib.workers.ledger import Ledger
from elasticlib.workers.run_dirs import SnapshotDir
from elasticlib.workers.worker_channel import (
    CALLS_SETTLE_S,
    CHANNEL_ENV,
    FIRST_POLL_TIMEOUT_S,
    NUM_STEP_DURATIONS,
    PAGE_BYTES,
    WorkerChannel,
)


@pytest.fixture
def path() -> Iterator[str]:
    channel = WorkerChannel.create()
    yield channel.path
    channel.close()


def open_both_ends(path: str) -> tuple[WorkerChannel, WorkerChannel]:
    """Return the agent's and the worker's end of a channel."""
    return WorkerChannel(path), WorkerChannel(path)


def see(agent: WorkerChannel, *, is_member: bool = True, has_called: bool = False) -> WorkerView:
    """Return what the agent knows of the worker."""
    return agent.view("pid 1", is_member=is_member, has_called_should_stop=has_called)


def stop_call_of(agent: WorkerChannel) -> int | None:
    """Return the first call at which the worker can stop, once the agent may look at it."""
    time.sleep(CALLS_SETTLE_S)
    return see(agent).stop_call


def test_context_without_an_agent_accepts_reports_and_never_stops() -> None:
    context = WorkerContext(None)
    context.step(1, loss=0.5, samples=3)
    context.report_saved(1)
    context.report_snapshot(1)
    context.report_restored(1)
    assert (context.is_attached, context.should_stop()) == (False, None)


def test_agent_reads_the_steps_and_saves_of_a_worker(path: str) -> None:
    agent, worker = open_both_ends(path)
    heartbeat = agent.heartbeat()
    assert (heartbeat.step, heartbeat.last_saved_step, heartbeat.step_durations) == (-1, -1, ())
    for step in range(2 * NUM_STEP_DURATIONS):
        worker.report_step(step, now=float(step * step))
        heartbeat = agent.heartbeat()
        newest = [float(2 * n - 1) for n in range(max(1, step - NUM_STEP_DURATIONS + 1), step + 1)]
        assert sorted(heartbeat.step_durations) == newest
        expected = (step, step + 1, float(step * step))
        assert (heartbeat.step, heartbeat.num_steps, heartbeat.last_step_at) == expected
    worker.report_saved(7)
    assert (agent.heartbeat().last_saved_step, agent.heartbeat().num_saves) == (7, 1)


def test_agent_reads_losses_samples_snapshots_and_restores_of_a_worker(path: str) -> None:
    agent, context = WorkerChannel(path), WorkerContext(WorkerChannel(path))
    heartbeat = agent.heartbeat()
    assert (heartbeat.first_step, heartbeat.last_snapshot_step) == (-1, -1)
    assert (heartbeat.loss, heartbeat.last_restore) == (None, None)
    before = monotonic()
    context.report_restored(6, source="peer", seconds=0.5)
    for step in range(7, 10):
        context.step(step, loss=10.0 - step, samples=32)
    context.step(10)
    context.report_snapshot(9)
    heartbeat, after = agent.heartbeat(), monotonic()
    assert (heartbeat.first_step, heartbeat.last_snapshot_step) == (7, 9)
    assert (heartbeat.loss, heartbeat.num_samples) == (1.0, 96.0)
    assert (
        before
        <= heartbeat.first_at
        <= heartbeat.last_step_at
        <= heartbeat.last_activity_at
        <= after
    )
    restore = heartbeat.last_restore
    assert restore is not None
    assert (restore.step, restore.source, heartbeat.num_restores) == (6, "peer", 1)
    assert before <= restore.finished_at <= heartbeat.first_at
    assert restore.finished_at - restore.started_at == pytest.approx(0.5)


def test_step_that_is_reported_again_counts_once_and_adds_its_loss_and_samples(path: str) -> None:
    agent, worker = open_both_ends(path)
    for step in range(3):
        worker.report_step(step, now=10.0 * step, samples=2)
        worker.report_step(step, now=10.0 * step + 1, loss=float(step), samples=3)
    heartbeat = agent.heartbeat()
    assert (heartbeat.step, heartbeat.num_steps, heartbeat.step_durations) == (2, 3, (10.0, 10.0))
    assert (heartbeat.last_step_at, heartbeat.last_activity_at) == (20.0, 21.0)
    assert (heartbeat.loss, heartbeat.num_samples) == (2.0, 15.0)


@pytest.mark.parametrize(
    ("source", "seconds"), [("tape", 0.0), ("disk", -1.0), ("disk", float("nan"))]
)
def test_restore_report_with_an_invalid_source_or_duration_is_rejected(
    path: str, source: str, seconds: float
) -> None:
    with pytest.raises(ValueError, match="restored from memory, peer, disk in 0 seconds"):
        WorkerContext(WorkerChannel(path)).report_restored(1, source=source, seconds=seconds)
    assert WorkerChannel(path).heartbeat().num_restores == 0


def test_first_process_that_claims_a_channel_is_the_worker(path: str) -> None:
    first, other = open_both_ends(path)
    assert first.claim(100)
    assert not other.claim(101)
    assert other.claim(100)


def test_only_the_assigned_process_can_claim_a_channel(path: str) -> None:
    agent, child = open_both_ends(path)
    agent.set_worker_pid(100)
    assert not child.claim(101)
    assert child.claim(100)


@pytest.mark.parametrize("content", [b"", b"x", bytes(PAGE_BYTES), b"x" * PAGE_BYTES])
def test_file_that_is_no_channel_is_rejected(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "other").write_bytes(content)
    with pytest.raises(OSError, match="not a worker's channel"):
        WorkerChannel(str(tmp_path / "other"))


# Reports steps in the worker, in a forked child and in a subprocess of the worker.
REPORT_STEPS = """
import os, sys, elasticlib
context = elasticlib.context()
assert context is elasticlib.context()
context.step(3)
pid = os.fork()
if pid == 0:
    context.step(4)  # has no effect, because the child is not the worker
    assert not context.is_attached
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
import subprocess
code = "import elasticlib; assert not elasticlib.context().is_attached"
assert subprocess.run([sys.executable, "-c", code]).returncode == 0
assert context.is_attached == (sys.argv[1] == "present")
"""


@pytest.mark.parametrize("channel", ["present", "missing", "none"])
def test_only_the_worker_itself_reports_steps(path: str, channel: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k != CHANNEL_ENV}
    if channel != "none":
        environment[CHANNEL_ENV] = path if channel == "present" else f"{path}.missing"
    command = [sys.executable, "-c", REPORT_STEPS, channel]
    done = subprocess.run(command, env=environment, timeout=100)
    assert done.returncode == 0
    assert WorkerChannel(path).heartbeat().step == (3 if channel == "present" else -1)


# -- the agreement on a stop call ------------------------------------------------------------------


class SimulatedRank:
    """A rank in lockstep with the others that polls for a stop after each step.

    A step has three moves, and the test chooses when the rank makes the next one: it starts the
    step, it completes the step once all ranks have started it, and it polls.
    """

    def __init__(self) -> None:
        self.agent = WorkerChannel.create()
        self.worker = WorkerChannel(self.agent.path)
        self.num_started = 0  # steps
        self.call = 0  # number of the last poll
        self.is_polling = False  # the next move is a poll
        self.is_blocked = False  # the poll waits for the answer of the agent
        self.stop_call = 0  # the poll at which the rank has stopped, or 0

    def move(self, ranks: list[SimulatedRank]) -> None:
        if self.stop_call:
            return
        if self.is_blocked:
            self._read_answer()
        elif self.is_polling:
            self.is_polling = False
            self.call += 1
            if self.worker.begin_call(self.call):
                self.worker.block_call(self.call)
                self.is_blocked = True
        elif self.num_started == self.call:
            self.num_started += 1
        elif min(rank.num_started for rank in ranks) >= self.num_started:
            self.is_polling = True

    def _read_answer(self) -> None:
        stop_call = self.worker.stop_call
        if not stop_call:
            return
        self.is_blocked = False
        if self.call >= stop_call:
            self.stop_call = self.call
        else:
            self.worker.finish_call(self.call)


class SimulatedAgent:
    """The agent of one node: it requests a stop, proposes a call and announces the agreed one."""

    def __init__(self, number: int, ranks: list[SimulatedRank]) -> None:
        self.number, self.ranks = number, ranks
        self.has_requested = self.has_announced = False

    def move(self, proposals: dict[int, StopProposal], num_nodes: int) -> None:
        if not self.has_requested:
            self.has_requested = True
            for rank in self.ranks:
                rank.agent.request_stop(PREEMPTED, 1e9)
            time.sleep(CALLS_SETTLE_S)
            return
        if self.number not in proposals:
            calls = [see(rank.agent).stop_call for rank in self.ranks]
            known = [call for call in calls if call is not None]
            if len(known) == len(calls):
                proposals[self.number] = StopProposal(max(known))
            return
        agreed = agree(proposals, num_nodes)
        if agreed is not None and agreed.call is not None and not self.has_announced:
            self.has_announced = True
            for rank in self.ranks:
                rank.agent.set_stop_call(agreed.call, PREEMPTED, 1e9)


def test_agent_waits_for_a_worker_that_is_in_the_middle_of_a_call(path: str) -> None:
    agent, worker = open_both_ends(path)
    worker.begin_call(1)
    # The worker has started its second call, and may still stop at it or continue.
    worker._words[3] = 2
    agent.request_stop(PREEMPTED, 1e9)
    assert stop_call_of(agent) is None
    worker.finish_call(2)
    assert stop_call_of(agent) == 3


def test_calls_are_not_shown_at_once_after_a_request(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, worker = open_both_ends(path)
    worker.begin_call(1)
    now = 100.0
    monkeypatch.setattr(worker_channel, "monotonic", lambda: now)
    assert see(agent).stop_call is None
    agent.request_stop(PREEMPTED, 1e9)
    assert see(agent).stop_call is None
    now += CALLS_SETTLE_S
    assert see(agent).stop_call == 2
    agent.publish_assignment({})
    assert see(agent).stop_call is None


@given(
    seed=st.integers(0, 2**32),
    nodes=st.integers(1, 3),
    slots=st.integers(1, 3),
    warm_up=st.integers(1, 200),
)
def test_all_ranks_stop_at_the_same_call_for_any_interleaving(
    seed: int, nodes: int, slots: int, warm_up: int
) -> None:
    generator = random.Random(seed)
    ranks = [SimulatedRank() for _ in range(nodes * slots)]
    agents = [SimulatedAgent(n, ranks[n * slots : (n + 1) * slots]) for n in range(nodes)]
    proposals: dict[int, StopProposal] = {}
    for _ in range(warm_up):
        generator.choice(ranks).move(ranks)
    for num_moves in itertools.count():
        assert num_moves < 100_000, "the ranks wait for one another"
        mover = generator.choice([*ranks, *agents])
        if isinstance(mover, SimulatedRank):
            mover.move(ranks)
        else:
            mover.move(proposals, nodes)
        if all(rank.stop_call for rank in ranks):
            break
    assert len({rank.stop_call for rank in ranks}) == 1
    for rank in ranks:
        rank.agent.close()
        rank.worker.close()


def test_agreement_has_the_most_urgent_reason_and_the_shortest_time() -> None:
    proposals = {
        0: StopProposal(4, RESIZE, 30.0),
        1: StopProposal(5, DRAIN, 20.0),
        2: StopProposal(3, RESIZE, 30.0),
    }
    assert agree(proposals, 4) is None
    assert agree(proposals, 3) == StopProposal(5, DRAIN, 20.0)
    assert agree({**proposals, 3: StopProposal(4, PREEMPTED, 9.0)}, 4) == StopProposal(
        5, PREEMPTED, 9.0
    )
    assert agree({**proposals, 3: StopProposal(None)}, 5) == StopProposal(None)


@pytest.mark.parametrize(
    "data", [b"", b"{}x", b"[]", b'{"call": "x"}', b'{"call": 1, "reason": "x"}', b'{"more": 1}']
)
def test_invalid_proposal_is_read_as_one_without_a_call(data: bytes) -> None:
    assert decode_proposal(data) == StopProposal(None)
    proposal = StopProposal(3, DRAIN, 1.5)
    assert decode_proposal(encode_proposal(proposal)) == proposal


@pytest.mark.parametrize(
    ("length", "text"), [(2**63 - 1, b""), (4, b"\xff{]}"), (2, b"[]"), (13, b'{"a": "quick"')]
)
def test_slow_imports_that_no_program_of_elasticlib_wrote_are_ignored(
    path: str, length: int, text: bytes
) -> None:
    agent, worker = open_both_ends(path)
    worker.report_slow_imports({"slow": 1.5, "slower": 2.5})
    assert agent.heartbeat().slow_imports == {"slow": 1.5, "slower": 2.5}
    worker._words[96] = length
    worker._view[8 * 97 : 8 * 97 + len(text)] = text
    assert agent.heartbeat().slow_imports == {}


def test_worker_of_another_version_than_its_agent_fails_with_the_remedy() -> None:
    agent = WorkerChannel.create()
    agent._words[0] += 1
    with pytest.raises(ConfigError, match="the agent's has layout 6: install the same"):
        WorkerChannel(agent.path)
    agent._words[0] = 0
    with pytest.raises(OSError, match="is not a worker's channel"):
        WorkerChannel(agent.path)
    agent.close()


# -- what the agent sees ---------------------------------------------------------------------------


def test_snapshot_directory_is_locked_while_it_is_in_use() -> None:
    snapshots = SnapshotDir(ledger := Ledger())
    attempt_dir = snapshots.attempt_dir(0)
    assert attempt_dir is not None
    directory = attempt_dir.parent
    assert is_locked(directory)
    snapshots.remove()
    ledger.close()
    assert not directory.exists()


def test_only_workers_that_poll_take_notices(path: str) -> None:
    agent, worker = open_both_ends(path)
    assert not see(agent).takes_notices
    worker.begin_call(1)
    assert see(agent).takes_notices
    assert see(agent).has_called_should_stop
    assert not see(agent, is_member=False).takes_notices


def test_starting_worker_takes_notices_until_a_timeout_or_a_report_without_a_poll(
    path: str,
) -> None:
    agent, worker = open_both_ends(path)
    worker.claim(os.getpid())
    assert not see(agent).takes_notices
    worker.report_starting(monotonic())
    assert see(agent).takes_notices
    assert not see(agent).has_called_should_stop
    agent.request_stop(DRAIN, 1e9)
    assert stop_call_of(agent) == 1
    worker.report_starting(monotonic() - FIRST_POLL_TIMEOUT_S)
    assert not see(agent).takes_notices
    worker.report_starting(monotonic())
    worker.report_saved(1)
    assert not see(agent).takes_notices


def test_replacement_of_a_worker_that_polled_takes_notices_from_its_start(path: str) -> None:
    agent = WorkerChannel(path)
    assert see(agent, has_called=True).takes_notices
    assert see(agent, has_called=True).has_called_should_stop
    agent.request_stop(DRAIN, 1e9)
    assert stop_call_of(agent) == 1


def open_regroupable_worker(path: str) -> tuple[WorkerChannel, WorkerContext]:
    """Return the agent's end, and a worker that has its first assignment and can regroup."""
    agent, worker = open_both_ends(path)
    agent.publish_assignment({"RANK": "0"})
    context = WorkerContext(worker)
    context.set_can_regroup()
    assert context.accept_assignment() == {"RANK": "0"}
    return agent, context


def test_calls_are_counted_separately_in_each_group(path: str) -> None:
    agent, context = open_regroupable_worker(path)
    for _ in range(7):
        assert context.should_stop() is None
    agent.request_leave()
    assert context.should_leave_group()
    assert (see(agent).has_left, see(agent).is_ready) == (False, False)
    context.report_left_group()
    assert (see(agent).has_left, see(agent).is_ready) == (True, True)
    agent.publish_assignment({"RANK": "1"})
    assert (see(agent).has_left, see(agent).is_ready) == (False, False)
    agent.request_stop(RESIZE, monotonic() + 10.0)
    assert stop_call_of(agent) == 1
    agent.set_stop_call(1, RESIZE, monotonic() + 10.0)
    assert context.accept_assignment() == {"RANK": "1"}
    assert not context.should_leave_group()
    assert stop_call_of(agent) == 1
    assert context.should_stop() is not None


def test_reports_of_an_earlier_group_are_reset(path: str) -> None:
    agent, context = open_regroupable_worker(path)
    for step in range(3):
        context.step(step, loss=0.5, samples=2)
        context.report_snapshot(step)
    context.report_restored(1)
    context.report_group_failure()
    assert see(agent).group_failed
    context.report_left_group()
    agent.publish_assignment({})
    assert not see(agent).group_failed
    assert context.accept_assignment() == {}
    heartbeat = agent.heartbeat()
    assert (
        attrs.evolve(heartbeat, last_step_at=0.0, last_activity_at=0.0, is_attached=False)
        == Heartbeat()
    )
    context.step(3, loss=0.25, samples=2)
    heartbeat = agent.heartbeat()
    assert (heartbeat.step, heartbeat.num_steps, heartbeat.first_step, heartbeat.num_samples) == (
        3,
        1,
        3,
        2.0,
    )
    assert heartbeat.loss == 0.25


def test_blocked_poll_returns_when_the_group_ends(path: str) -> None:
    agent, context = open_regroupable_worker(path)
    assert context.should_stop() is None
    agent.request_stop(RESIZE, monotonic() + 1e9)
    agent.request_leave()
    assert context.should_stop() is None
    assert context.should_leave_group()


def test_standby_worker_gets_a_place_in_a_group_later(path: str) -> None:
    agent, worker = open_both_ends(path)
    standby = WorkerContext(worker)
    assert not see(agent, is_member=False).is_ready
    standby.set_can_regroup()
    standby.report_left_group()
    view = see(agent, is_member=False)
    assert (view.is_ready, view.has_left, view.can_regroup) == (True, False, True)
    assert not standby.should_leave_group()
    agent.publish_assignment({"RANK": "1"})
    assert standby.accept_assignment() == {"RANK": "1"}
    assert standby.should_stop() is None
    with pytest.raises(ValueError, match="a worker's assignment must have at most"):
        agent.publish_assignment({"MASTER_ADDR": "x" * PAGE_BYTES})


def test_agent_is_told_at_once_what_it_must_know_at_once() -> None:
    reading, writing = os.pipe2(os.O_NONBLOCK)
    agent = WorkerChannel.create(writing)
    context = WorkerContext(WorkerChannel(agent.path))

    def num_rings() -> int:
        try:
            return len(os.read(reading, 4096))
        except BlockingIOError:
            return 0

    agent.publish_assignment({})
    context.set_can_regroup()
    context.accept_assignment()
    assert num_rings() == 1
    assert context.should_stop() is None  # the first call
    assert num_rings() == 1
    for step in range(10):
        assert context.should_stop() is None
        context.step(step)
        context.report_saved(step)
    assert num_rings() == 0
    agent.request_stop(RESIZE, monotonic() + 60)
    thread = threading.Thread(target=context.should_stop)
    thread.start()
    wait_until("the blocked call to be announced", num_rings)
    agent.set_stop_call(12, RESIZE, monotonic() + 60)
    thread.join(60)
    context.report_group_failure()
    context.report_left_group()
    assert num_rings() == 2
    WorkerChannel(agent.path).report_program_end(3, 5.0)
    assert num_rings() == 1
    assert see(agent).has_failed
    assert agent.failure == (5.0, 3)
    before = os.listdir("/proc/self/fd")
    for _ in range(100_000):  # the pipe is full
        context.report_group_failure()
    assert os.listdir("/proc/self/fd") == before
    os.close(reading)
    os.close(writing)
    context.report_group_failure()  # the agent has exited
    agent.close()


def test_page_cannot_be_shortened_and_leaves_no_descriptor() -> None:
    before = os.listdir("/proc/self/fd")
    agent = WorkerChannel.create()
    with pytest.raises(PermissionError):
        os.truncate(agent.path, 0)
    other = WorkerChannel(agent.path)
    assert other.heartbeat().num_steps == 0
    other.close()
    agent.close()
    assert os.listdir("/proc/self/fd") == before


def test_stop_callbacks_run_once_before_a_stop_is_returned(path: str) -> None:
    agent, worker = WorkerChannel(path), WorkerChannel(path)
    context, calls = WorkerContext(worker), []

    def fail() -> None:
        calls.append("second")
        raise ValueError("in between")

    context.on_stop(lambda: calls.append("first"))
    context.on_stop(fail)
    context.on_stop(lambda: calls.append("third"))
    unregister = context.on_stop(lambda: calls.append("unregistered"))
    unregister()
    unregister()
    assert context.should_stop() is None
    assert calls == []
    agent.request_stop(DRAIN, 1e9)
    agent.set_stop_call(2, DRAIN, 1e9)
    with pytest.raises(ValueError, match="in between"):
        context.should_stop()
    assert calls == ["first", "second", "third"]
    assert context.should_stop() is not None
    assert len(calls) == 3


def test_stop_callbacks_do_not_run_for_a_resize_of_a_worker_that_can_regroup(path: str) -> None:
    agent, worker = open_both_ends(path)
    context, calls = WorkerContext(worker), list[str]()
    context.on_stop(lambda: calls.append("stop"))
    context.set_can_regroup()
    agent.publish_assignment({"RANK": "0"})
    assert context.accept_assignment() == {"RANK": "0"}
    for reason in (RESIZE, DRAIN):
        agent.request_stop(reason, monotonic() + 60)
        agent.set_stop_call(1, reason, monotonic() + 60)
        stop = context.should_stop()
        assert stop is not None
        assert stop.reason == reason
        context.report_left_group()
        agent.publish_assignment({"RANK": "0"})
        context.accept_assignment()
    assert calls == ["stop"]
    context.set_can_regroup(False)
    assert not see(agent).can_regroup


def test_stop_is_not_returned_once_a_worker_must_leave_its_group(path: str) -> None:
    agent, worker = open_both_ends(path)
    context = WorkerContext(worker)
    context.set_can_regroup()
    agent.publish_assignment({})
    context.accept_assignment()
    agent.request_stop(DRAIN, monotonic() + 60)
    agent.request_leave()
    assert context.should_stop() is None
    assert context.should_leave_group()
