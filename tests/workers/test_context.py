"""The channel between a worker and its agent, and how all ranks come to stop at one call."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.agent.stop_procedure import (
    StopProposal,
    agree_on_stop,
    decode_proposal,
    propose_stop,
)
from elasticlib.clock import monotonic
from elasticlib.dir_lock import is_locked
from elasticlib.errors import ConfigError
from elasticlib.event_loop import EventLoop
from elasticlib.workers.context import WorkerContext
from elasticlib.workers.interface import (
    DRAIN,
    PREEMPTED,
    RESIZE,
    Heartbeat,
    StopNotice,
)
from elasticlib.workers.run_dirs import SnapshotDir
from elasticlib.workers.supervisor_client import SupervisorClient
from elasticlib.workers.worker_channel import (
    CHANNEL_ENV,
    FIRST_POLL_TIMEOUT_S,
    NUM_STEP_DURATIONS,
    PAGE_BYTES,
    WorkerChannel,
    WorkerChannels,
)


@pytest.fixture
def path() -> Iterator[str]:
    channel = WorkerChannel.create()
    yield channel.path
    channel.close()


def ends(path: str) -> tuple[WorkerChannel, WorkerChannel]:
    """The agent's and the worker's."""
    return WorkerChannel(path), WorkerChannel(path)


def test_without_an_agent_there_is_nobody_to_ask_or_to_tell() -> None:
    context = WorkerContext(None)
    context.step(1, loss=0.5, samples=3)
    context.report_saved(1)
    context.report_snapshot(1)
    context.report_restored(1)
    assert (context.is_attached, context.should_stop()) == (False, None)


def test_what_a_worker_tells_is_there_for_its_agent(path: str) -> None:
    agent, worker = ends(path)
    beat = agent.heartbeat()
    assert (beat.step, beat.last_saved_step, beat.step_durations) == (-1, -1, ())
    for step in range(2 * NUM_STEP_DURATIONS):
        worker.report_step(step, now=float(step * step))
        beat = agent.heartbeat()
        newest = [float(2 * n - 1) for n in range(max(1, step - NUM_STEP_DURATIONS + 1), step + 1)]
        assert sorted(beat.step_durations) == newest
        expected = (step, step + 1, float(step * step))
        assert (beat.step, beat.num_steps, beat.last_step_at) == expected
    worker.report_saved(7)
    assert (agent.heartbeat().last_saved_step, agent.heartbeat().num_saves) == (7, 1)


def test_what_a_training_loop_tells_besides_is_there_for_its_agent(path: str) -> None:
    agent, context = WorkerChannel(path), WorkerContext(WorkerChannel(path))
    beat = agent.heartbeat()
    assert (beat.first_step, beat.last_snapshot_step, beat.loss, beat.last_restore) == (
        -1,
        -1,
        None,
        None,
    )
    before = monotonic()
    context.report_restored(6, source="peer", seconds=0.5)
    for step in range(7, 10):
        context.step(step, loss=10.0 - step, samples=32)
    context.step(10)
    context.report_snapshot(9)
    beat, after = agent.heartbeat(), monotonic()
    assert (beat.first_step, beat.last_snapshot_step, beat.loss, beat.num_samples) == (
        7,
        9,
        1.0,
        96.0,
    )
    assert before <= beat.first_at <= beat.last_step_at <= beat.last_activity_at <= after
    state = beat.last_restore
    assert state is not None
    assert (state.step, state.source, beat.num_restores) == (6, "peer", 1)
    assert before <= state.finished_at <= beat.first_at
    assert state.finished_at - state.started_at == pytest.approx(0.5)


def test_step_that_is_reported_again_counts_once_and_adds_its_loss_and_samples(path: str) -> None:
    agent, worker = ends(path)
    for step in range(3):
        worker.report_step(step, now=10.0 * step, samples=2)
        worker.report_step(step, now=10.0 * step + 1, loss=float(step), samples=3)
    beat = agent.heartbeat()
    assert (beat.step, beat.num_steps, beat.step_durations) == (2, 3, (10.0, 10.0))
    assert (beat.last_step_at, beat.last_activity_at, beat.loss, beat.num_samples) == (
        20.0,
        21.0,
        2.0,
        15.0,
    )


@pytest.mark.parametrize(
    ("source", "seconds"), [("tape", 0.0), ("disk", -1.0), ("disk", float("nan"))]
)
def test_a_state_from_nowhere_is_refused(path: str, source: str, seconds: float) -> None:
    with pytest.raises(ValueError, match="restored from memory, peer, disk in 0 seconds"):
        WorkerContext(WorkerChannel(path)).report_restored(1, source=source, seconds=seconds)
    assert WorkerChannel(path).heartbeat().num_restores == 0


def test_the_first_process_that_asks_is_the_worker(path: str) -> None:
    first, other = ends(path)
    assert first.claim(100)
    assert not other.claim(101)
    assert other.claim(100)


def test_nobody_passes_for_the_worker_that_it_was_assigned_to(path: str) -> None:
    agent, child = ends(path)
    agent.set_worker_pid(100)
    assert not child.claim(101)
    assert child.claim(100)


@pytest.mark.parametrize("content", [b"", b"x", bytes(PAGE_BYTES), b"x" * PAGE_BYTES])
def test_what_is_no_channel_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "other").write_bytes(content)
    with pytest.raises(OSError, match="not a worker's channel"):
        WorkerChannel(str(tmp_path / "other"))


ASK = """
import os, sys, elasticlib
context = elasticlib.context()
assert context is elasticlib.context()
context.step(3)
pid = os.fork()
if pid == 0:
    context.step(4)  # is no worker, and is not heard
    assert not context.is_attached
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
import subprocess
code = "import elasticlib; assert not elasticlib.context().is_attached"
assert subprocess.run([sys.executable, "-c", code]).returncode == 0
assert context.is_attached == (sys.argv[1] == "attached")
"""


@pytest.mark.parametrize("found", ["attached", "gone", "none"])
def test_only_the_worker_itself_is_heard(path: str, found: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k != CHANNEL_ENV}
    if found != "none":
        environment[CHANNEL_ENV] = path if found == "attached" else f"{path}.gone"
    done = subprocess.run([sys.executable, "-c", ASK, found], env=environment, timeout=100)
    assert done.returncode == 0
    assert WorkerChannel(path).heartbeat().step == (3 if found == "attached" else -1)


# -- agreeing ----------------------------------------------------------------------------------


class Rank:
    """A rank that takes steps tied to the others', and asks after each; it moves when told to.

    A step has three moves: to begin it, to end it once all ranks have begun it, and to ask.
    """

    def __init__(self) -> None:
        self.agent = WorkerChannel.create()
        self.worker = WorkerChannel(self.agent.path)
        self.begun = self.call = 0
        self.asking = self.held = False
        self.stopped = 0

    def move(self, ranks: list[Rank]) -> None:
        if self.stopped:
            return
        if self.held:
            self._look()
        elif self.asking:
            self.asking = False
            self.call += 1
            if self.worker.begin_call(self.call):
                self.worker.block_call(self.call)
                self.held = True
        elif self.begun == self.call:
            self.begun += 1
        elif min(rank.begun for rank in ranks) >= self.begun:
            self.asking = True

    def _look(self) -> None:
        stop_at = self.worker.stop_call
        if not stop_at:
            return
        self.held = False
        if self.call >= stop_at:
            self.stopped = self.call
        else:
            self.worker.finish_call(self.call)


class Agent:
    """One node's: asks its ranks, says the call at which they can stop, hears what is agreed."""

    def __init__(self, number: int, ranks: list[Rank]) -> None:
        self.number, self.ranks = number, ranks
        self.asked = self.told = False

    def move(self, needs: dict[int, StopProposal], nodes: int) -> None:
        if not self.asked:
            self.asked = True
            for rank in self.ranks:
                rank.agent.request_stop(PREEMPTED, 1e9)
            return
        if self.number not in needs:
            calls = [rank.agent.earliest_stop_call() for rank in self.ranks]
            known = [call for call in calls if call is not None]
            if len(known) == len(calls):
                needs[self.number] = StopProposal(max(known))
            return
        need = agree_on_stop(needs, nodes)
        if need is not None and need.call is not None and not self.told:
            self.told = True
            for rank in self.ranks:
                rank.agent.set_stop_call(need.call, PREEMPTED, 1e9)


def test_a_worker_between_its_word_and_its_look_is_waited_for(path: str) -> None:
    agent, worker = ends(path)
    worker.begin_call(1)
    # As if it were held up in the middle of its second call: which way it goes is open.
    worker._words[3] = 2
    agent.request_stop(PREEMPTED, 1e9)
    assert agent.earliest_stop_call() is None
    worker.finish_call(2)
    assert agent.earliest_stop_call() == 3


@given(
    seed=st.integers(0, 2**32),
    nodes=st.integers(1, 3),
    slots=st.integers(1, 3),
    warm_up=st.integers(1, 200),
)
def test_all_ranks_stop_at_one_call_however_they_are_interleaved(
    seed: int, nodes: int, slots: int, warm_up: int
) -> None:
    draw = random.Random(seed)
    ranks = [Rank() for _ in range(nodes * slots)]
    agents = [Agent(n, ranks[n * slots : (n + 1) * slots]) for n in range(nodes)]
    needs: dict[int, StopProposal] = {}
    for _ in range(warm_up):
        draw.choice(ranks).move(ranks)
    for move in itertools.count():
        assert move < 100_000, "they wait for one another"
        mover = draw.choice([*ranks, *agents])
        if isinstance(mover, Rank):
            mover.move(ranks)
        else:
            mover.move(needs, nodes)
        if all(rank.stopped for rank in ranks):
            break
    assert len({rank.stopped for rank in ranks}) == 1
    for rank in ranks:
        rank.agent.close()
        rank.worker.close()


def test_the_most_urgent_reason_and_the_shortest_time_hold_for_all() -> None:
    needs = {
        0: StopProposal(4, RESIZE, 30.0),
        1: StopProposal(5, DRAIN, 20.0),
        2: StopProposal(3, RESIZE, 30.0),
    }
    assert agree_on_stop(needs, 4) is None
    assert agree_on_stop(needs, 3) == StopProposal(5, DRAIN, 20.0)
    assert agree_on_stop({**needs, 3: StopProposal(4, PREEMPTED, 9.0)}, 4) == StopProposal(
        5, PREEMPTED, 9.0
    )
    assert agree_on_stop({**needs, 3: StopProposal(None)}, 5) == StopProposal(None)


@pytest.mark.parametrize(
    "data", [b"", b"{}x", b"[]", b'{"call": "x"}', b'{"call": 1, "reason": "x"}', b'{"more": 1}']
)
def test_what_cannot_be_read_is_no_agreement(data: bytes) -> None:
    assert decode_proposal(data) == StopProposal(None)
    assert decode_proposal(propose_stop(0, StopProposal(3, DRAIN, 1.5)).value) == StopProposal(
        3, DRAIN, 1.5
    )


def test_a_worker_of_another_version_than_its_agent_fails_with_the_remedy() -> None:
    agent = WorkerChannel.create()
    agent._words[0] += 1
    with pytest.raises(ConfigError, match="the agent's has layout 4: install the same"):
        WorkerChannel(agent.path)
    agent._words[0] = 0
    with pytest.raises(OSError, match="is not a worker's channel"):
        WorkerChannel(agent.path)
    agent.close()


# -- the agent's ends --------------------------------------------------------------------------


@pytest.fixture
def channels() -> Iterator[WorkerChannels]:
    channels = WorkerChannels()
    yield channels
    channels.close_all()


def test_the_folder_of_memory_is_held_as_long_as_it_is_in_use() -> None:
    loop = EventLoop()
    memory = SnapshotDir(supervisor := SupervisorClient(loop))
    made = memory.attempt_dir(0)
    assert made is not None
    folder = made.parent
    assert is_locked(folder)
    memory.remove()
    supervisor.close()
    loop.close()
    assert not folder.exists()


def test_who_never_asks_is_not_waited_for(channels: WorkerChannels) -> None:
    worker = WorkerChannel(channels.open(0))
    assert channels.notify(StopNotice(DRAIN, 10.0)) is False
    worker.begin_call(1)
    assert channels.notify(StopNotice(DRAIN, 10.0)) is True
    assert channels.earliest_stop_call() == 2


def test_who_has_just_begun_is_waited_for_until_it_steps_without_asking(
    channels: WorkerChannels,
) -> None:
    worker = WorkerChannel(channels.open(0))
    worker.claim(os.getpid())
    assert channels.notify(StopNotice(DRAIN, 10.0)) is False
    worker.report_starting(monotonic())
    assert channels.notify(StopNotice(DRAIN, 10.0)) is True
    assert channels.earliest_stop_call() == 1
    worker.report_starting(monotonic() - FIRST_POLL_TIMEOUT_S)
    assert channels.notify(StopNotice(DRAIN, 10.0)) is False
    worker.report_starting(monotonic())
    worker.report_saved(1)
    assert channels.notify(StopNotice(DRAIN, 10.0)) is False


def test_who_follows_a_worker_that_asked_is_waited_for_from_its_first_step(
    channels: WorkerChannels,
) -> None:
    WorkerChannel(channels.open(0)).begin_call(1)
    channels.close(0)
    channels.start_group()
    channels.open(0)
    assert channels.notify(StopNotice(DRAIN, 10.0)) is True
    assert channels.earliest_stop_call() == 1


def kept(channels: WorkerChannels) -> tuple[WorkerChannel, WorkerContext]:
    """A worker that has its first place, and can be kept."""
    worker = WorkerChannel(channels.open(0))
    channels.publish_assignment(0, {"RANK": "0"})
    context = WorkerContext(worker)
    context.set_can_regroup()
    assert context.accept_assignment() == {"RANK": "0"}
    return worker, context


def test_calls_of_an_earlier_group_do_not_count_in_the_next(channels: WorkerChannels) -> None:
    _, context = kept(channels)
    for _ in range(7):
        assert context.should_stop() is None
    channels.leave_group()
    assert context.should_leave_group()
    assert channels.standby_ranks() == {}
    context.report_left_group()
    assert channels.standby_ranks() == {0: True}
    channels.start_group()
    channels.publish_assignment(0, {"RANK": "1"})
    assert channels.notify(StopNotice(RESIZE, 10.0)) is True, "it has asked before"
    assert channels.earliest_stop_call() == 1, "whether or not it has taken its place"
    channels.stop_at_call(1, StopNotice(RESIZE, 10.0))
    assert context.accept_assignment() == {"RANK": "1"}
    assert not context.should_leave_group()
    assert channels.earliest_stop_call() == 1
    assert context.should_stop() is not None


def test_what_a_worker_has_told_in_an_earlier_group_is_not_told_in_the_next(
    channels: WorkerChannels,
) -> None:
    worker, context = kept(channels)
    for step in range(3):
        context.step(step, loss=0.5, samples=2)
        context.report_snapshot(step)
    context.report_restored(1)
    context.report_left_group()
    channels.publish_assignment(0, {})
    assert context.accept_assignment() == {}
    beat = worker.heartbeat()
    assert (
        attrs.evolve(beat, last_step_at=0.0, last_activity_at=0.0, is_attached=False) == Heartbeat()
    )
    context.step(3, loss=0.25, samples=2)
    beat = worker.heartbeat()
    assert (beat.step, beat.num_steps, beat.first_step, beat.num_samples) == (3, 1, 3, 2.0)
    assert beat.loss == 0.25


def test_one_that_waits_for_an_answer_does_not_when_its_group_is_over(
    channels: WorkerChannels,
) -> None:
    _, context = kept(channels)
    assert context.should_stop() is None
    assert channels.notify(StopNotice(RESIZE, 1e9)) is True
    channels.leave_group()
    assert context.should_stop() is None, "at once"
    assert context.should_leave_group()


def test_a_newcomer_is_in_no_group_and_is_asked_nothing_before_it_has_a_place(
    channels: WorkerChannels,
) -> None:
    member, _ = kept(channels)
    newcomer = WorkerContext(WorkerChannel(channels.open(1, is_standby=True)))
    assert (channels.standby_ranks(), channels.regroupable_ranks()) == ({1: False}, {0, 1})
    newcomer.set_can_regroup()
    newcomer.report_left_group()
    assert channels.standby_ranks() == {1: True}
    assert not newcomer.should_leave_group()
    member.begin_call(1)
    assert channels.notify(StopNotice(RESIZE, 10.0)) is True
    assert member.begin_call(2)
    assert channels.earliest_stop_call() is None
    member.block_call(2)
    assert channels.earliest_stop_call() == 2
    channels.start_group()
    channels.publish_assignment(1, {"RANK": "1"})
    assert newcomer.accept_assignment() == {"RANK": "1"}
    assert newcomer.should_stop() is None, "it was asked when it was in no group"
    with pytest.raises(OSError, match="a worker's assignment must have at most"):
        channels.publish_assignment(1, {"MASTER_ADDR": "x" * PAGE_BYTES})


def test_channel_cannot_be_shortened_and_leaves_no_descriptor(channels: WorkerChannels) -> None:
    before = os.listdir("/proc/self/fd")
    path = channels.open(0)
    with pytest.raises(PermissionError):
        os.truncate(path, 0)
    assert WorkerChannel(path).heartbeat().num_steps == 0
    channels.close(0)
    assert os.listdir("/proc/self/fd") == before


def test_what_goes_on_behind_the_step_ends_before_a_stop_is_answered(path: str) -> None:
    agent, worker = WorkerChannel(path), WorkerChannel(path)
    context, calls = WorkerContext(worker), []

    def fail() -> None:
        calls.append("second")
        raise ValueError("in between")

    context.on_stop(lambda: calls.append("first"))
    context.on_stop(fail)
    context.on_stop(lambda: calls.append("third"))
    take_back = context.on_stop(lambda: calls.append("never"))
    take_back()
    take_back()
    assert context.should_stop() is None
    assert calls == []
    agent.request_stop(DRAIN, 1e9)
    agent.set_stop_call(2, DRAIN, 1e9)
    with pytest.raises(ValueError, match="in between"):
        context.should_stop()
    assert calls == ["first", "second", "third"]
    assert context.should_stop() is not None
    assert len(calls) == 3


def test_a_worker_that_goes_on_elsewhere_ends_nothing_for_it(path: str) -> None:
    agent, worker = ends(path)
    context, called = WorkerContext(worker), list[str]()
    context.on_stop(lambda: called.append("stop"))
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
    assert called == ["stop"]
    context.set_can_regroup(False)
    assert not agent.can_regroup


def test_a_question_whose_group_is_over_is_answered_with_no(path: str) -> None:
    agent, worker = ends(path)
    context = WorkerContext(worker)
    context.set_can_regroup()
    agent.publish_assignment({})
    context.accept_assignment()
    agent.request_stop(DRAIN, monotonic() + 60)
    agent.request_leave()
    assert context.should_stop() is None
    assert context.should_leave_group()
