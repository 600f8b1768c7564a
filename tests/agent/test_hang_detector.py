"""Hang detection: timeouts, the slowest rank, and its stacks."""

from __future__ import annotations

import attrs
import pytest

from elasticlib.agent.hang_detector import (
    HangDetector,
    HangFinding,
    HangLimits,
    RankProgress,
    decode_progress,
    describe_hang,
    encode_progress,
    find_hung_rank,
    longest_inactivity,
    timeout_for,
    waits_in_collective,
)
from elasticlib.errors import ConfigError
from elasticlib.workers.interface import NO_STEP, Heartbeat

AUTO = HangLimits()
OTHER = encode_progress([RankProgress(2, "b", 2, 9.0, 3, node_rank=1)])


def create_heartbeat(at: float, *durations: float, steps: int = 5) -> Heartbeat:
    return Heartbeat(
        step=4,
        num_steps=steps,
        last_step_at=at,
        last_activity_at=at,
        step_durations=durations,
        is_attached=True,
    )


@pytest.mark.parametrize(
    ("limits", "heartbeat", "allowed"),
    [
        (AUTO, Heartbeat(), 900.0),
        # The second step may be compiled again, so its duration does not predict the third.
        (AUTO, create_heartbeat(0.0, steps=1), 900.0),
        (AUTO, create_heartbeat(0.0, 0.1, 0.2, 0.1), 900.0),
        (AUTO, create_heartbeat(0.0, *[0.1] * 9), 900.0),
        (AUTO, create_heartbeat(0.0, *[0.1] * 10), 300.0),
        (AUTO, create_heartbeat(0.0, *[20.0] * 10), 400.0),
        # An evaluation that took 200 s may take as long again, and half as long more.
        (AUTO, create_heartbeat(0.0, *[1.0] * 10, 200.0), 600.0),
        (HangLimits(timeout=5.0), Heartbeat(), 900.0),
        (HangLimits(timeout=5.0), create_heartbeat(0.0, 9.0, 9.0), 5.0),
        (HangLimits(timeout=2000.0), Heartbeat(), 2000.0),
    ],
)
def test_timeout_depends_on_the_reported_steps(
    limits: HangLimits, heartbeat: Heartbeat, allowed: float
) -> None:
    assert timeout_for(limits, heartbeat) == allowed


def test_longest_inactivity_is_that_of_the_worker_nearest_to_its_timeout() -> None:
    quick, slow = [0.1] * 10, [100.0] * 10
    heartbeats = {
        0: create_heartbeat(100.0, *quick),
        1: create_heartbeat(90.0, *slow),
        2: Heartbeat(is_attached=True),
    }
    inactivity = longest_inactivity(130.0, 50.0, heartbeats, AUTO)
    assert inactivity is not None
    assert (inactivity.local_rank, inactivity.seconds, inactivity.limit) == (0, 30.0, 300.0)
    assert longest_inactivity(130.0, 50.0, {}, AUTO) is None
    late = longest_inactivity(951.0, 50.0, {0: Heartbeat(is_attached=True)}, AUTO)
    assert late is not None
    assert late.fraction > 1


def test_workers_that_report_no_steps_are_ignored() -> None:
    assert longest_inactivity(1e6, 0.0, {0: Heartbeat()}, AUTO) is None
    heartbeats = {0: create_heartbeat(9e5, 0.1), 1: Heartbeat(is_attached=True)}
    inactivity = longest_inactivity(9e5 + 1, 0.0, heartbeats, AUTO)
    assert inactivity is not None
    assert (inactivity.local_rank, inactivity.seconds) == (0, 1.0)


def test_a_worker_that_saves_or_calls_should_stop_is_active() -> None:
    saving = attrs.evolve(create_heartbeat(0.0, 0.1), last_activity_at=99.0)
    inactivity = longest_inactivity(100.0, 0.0, {0: saving}, AUTO)
    assert inactivity is not None
    assert inactivity.seconds == 1.0


def test_the_rank_behind_all_others_is_named_and_none_of_several_is() -> None:
    first = RankProgress(0, "a", 7, 9.0, 1)
    behind = [RankProgress(1, "a", 6, 3.0, 1), RankProgress(2, "b", 6, 4.0, 1)]
    assert find_hung_rank([first, behind[1]]) == behind[1]
    assert describe_hang([first, behind[1]], 2.0) == (
        "hung: rank 2 on b is at step 6, inactive for 4.0 s; the others are at step 7; "
        "the limit is 2.0 s (hang, --hang-timeout)"
    )
    assert find_hung_rank([first, *behind]) is None
    assert describe_hang([first, *behind], 2.0) == (
        "hung: ranks 1-2 are at step 6, inactive for up to 4.0 s; the others are at step 7; no "
        "rank stands out, and the stacks show more; the limit is 2.0 s (hang, --hang-timeout)"
    )
    assert find_hung_rank(behind) is None, "all are at the same step"
    assert find_hung_rank([]) is None
    assert "no worker made a step" in describe_hang([], 2.0)
    only = RankProgress(0, "a", -1, 9.0, 0)
    assert find_hung_rank([only]) == only
    assert "has made no step" in describe_hang([only], 2.0)


def create_stack(*frames: str) -> str:
    """Return a stack as faulthandler writes it: the innermost function first."""
    lines = [f'  File "{frame.replace(":", chr(34) + ", line 7 in ")}' for frame in frames]
    return "\n".join(["Stack (most recent call first):", *lines])


C10D = "/lib/torch/distributed/distributed_c10d.py"


@pytest.mark.parametrize(
    ("frames", "waits"),
    [
        ((f"{C10D}:barrier", "/home/train.py:main"), True),
        (("/lib/threading.py:wait", "/lib/elasticlib/in_place/process_group.py:wait"), True),
        (("/home/data.py:read", f"{C10D}:barrier"), False),
        (("/lib/threading.py:wait", "/lib/torch/utils/data/dataloader.py:_get_data"), False),
        ((f"{C10D}:destroy_process_group", "/home/train.py:main"), False),
        # Whether DDP computes or communicates in the backward pass is not in the Python stack.
        (("/lib/torch/autograd/graph.py:_engine_run_backward", "/home/train.py:main"), None),
        ((), None),
    ],
)
def test_the_innermost_function_shows_whether_a_rank_waits(
    frames: tuple[str, ...], waits: bool | None
) -> None:
    assert waits_in_collective(create_stack(*frames)) is waits


@pytest.mark.parametrize(
    ("waits", "named"),
    [
        ((True, False, True), 1),
        ((None, False, True), 1),
        ((False, False, True), None),  # which of the two is not known
        ((True, True, True), None),
        # Without a rank that certainly waits, a victim may look like the cause.
        ((None, False, None), None),
        ((False, False, False), None),
    ],
)
def test_a_rank_in_no_collective_is_named_while_others_wait_in_one(
    waits: tuple[bool | None, ...], named: int | None
) -> None:
    ranks = [
        RankProgress(rank, "a", 6, 9.0 - rank, 3, rank, waits=wait)
        for rank, wait in enumerate(waits)
    ]
    hung = find_hung_rank(ranks)
    assert (None if hung is None else hung.rank) == named
    text = describe_hang(ranks, 2.0)
    assert ("rank 1 on a is at step 6" in text) is (named == 1)
    assert ("no rank stands out" in text) is (named is None)


class DetectorHarness:
    """A detector for two workers. The first of them reported its last step at 100 s."""

    def __init__(self, limit: float = 8.0, others: int = 0) -> None:
        self.heartbeats = {
            0: create_heartbeat(100.0),
            1: Heartbeat(is_attached=True, last_activity_at=100.0),
        }
        limits = HangLimits(timeout=limit)
        self.watch = HangDetector(
            limits, "a", {0: 0, 1: 1}, node_rank=0, num_peers=others, started_at=100.0
        )

    def poll(self, at: float) -> HangFinding | bool:
        """Poll the detector at this time. True: it needs the stacks of the workers."""
        self.watch, result = self.watch.poll(at, self.heartbeats)
        return result

    def report_stacks(self, at: float, stacks: dict[int, str]) -> bytes:
        """Pass the stacks on, and return what the other nodes must know."""
        self.watch, progress = self.watch.on_stacks(at, stacks)
        return progress

    def suspects_until(self, at: float) -> bool:
        """Poll whenever a poll is due, until this time. Return whether stacks are needed."""
        results: list[HangFinding | bool] = []
        while self.watch.due_at <= at and self.watch.suspect is None:
            results.append(self.poll(self.watch.due_at))
        assert not any(results[:-1])
        return results[-1:] == [True]


def test_no_rank_is_named_if_only_one_reports_steps_and_the_stacks_show_nothing() -> None:
    harness = DetectorHarness()
    assert harness.suspects_until(200.0)
    assert not harness.poll(109.0), "no worker is stopped before its stacks have been read"
    harness.report_stacks(109.0, {0: "in a loop", 1: "in a wait"})
    hung = harness.poll(109.0)
    assert isinstance(hung, HangFinding)
    assert hung.stacks == "the stacks of rank 0, at step 4:\nin a loop"
    assert hung.reason == (
        "hung: rank 0 on a is at step 4, inactive for 8.0 s; no rank stands out, and the stacks "
        "show more; the limit is 8.0 s (hang, --hang-timeout)"
    )
    assert (hung.inactive_since, hung.node_rank) == (100.0, -1)


def test_a_pause_of_the_whole_process_does_not_count_as_inactivity() -> None:
    harness = DetectorHarness()
    assert not harness.poll(1000.0)
    assert not harness.suspects_until(1007.5)
    assert harness.suspects_until(1008.0)


def test_a_worker_that_makes_a_step_again_is_not_hung() -> None:
    harness = DetectorHarness()
    harness.suspects_until(107.5)
    harness.heartbeats[0] = create_heartbeat(107.5)
    assert not harness.suspects_until(115.0)
    assert harness.suspects_until(116.0)


def test_progress_of_other_nodes_is_awaited_for_a_limited_time() -> None:
    for answers in (True, False):
        harness = DetectorHarness(others=1)
        assert harness.suspects_until(200.0)
        assert not harness.poll(200.0)
        published = harness.report_stacks(200.0, {})
        assert [pulse.rank for pulse in decode_progress(published)] == [0, 1]
        assert not harness.poll(202.0)
        if answers:
            harness.watch = harness.watch.on_peer_reports({0: published, 1: OTHER})
        hung = harness.poll(202.0 if answers else 203.0)
        assert isinstance(hung, HangFinding)
        assert hung.reason.startswith(f"hung: rank {2 if answers else 0} on ")
        assert ("no rank stands out" in hung.reason, hung.node_rank, hung.rank) == (
            (False, 1, 2) if answers else (True, -1, -1)
        )


def test_stacks_are_reported_if_the_node_is_stopped_before_a_hang_is_confirmed() -> None:
    harness = DetectorHarness(others=1)
    assert harness.watch.stack_report() == ""
    harness.suspects_until(200.0)
    assert harness.watch.stack_report() == ""
    harness.report_stacks(200.0, {0: "in a loop", 1: "in a wait"})
    assert not harness.poll(201.0), "the other node has not published its progress"
    assert harness.watch.stack_report() == "the stacks of rank 0, at step 4:\nin a loop"


def test_the_rarest_stacks_are_shown_first_for_ranks_at_the_same_step() -> None:
    """Collectives keep all ranks at the same step, and most ranks wait in one."""
    harness = DetectorHarness()
    harness.heartbeats = {
        local: attrs.evolve(create_heartbeat(100.0), step=4) for local in range(3)
    }
    harness.watch = attrs.evolve(harness.watch, ranks={0: 0, 1: 1, 2: 2})
    harness.suspects_until(200.0)
    harness.report_stacks(200.0, {0: "in a wait", 1: "in a wait", 2: "in a loader"})
    assert harness.watch.stack_report() == (
        "the stacks of rank 2, at step 4:\nin a loader\n\n"
        "the stacks of ranks 0-1, at step 4:\nin a wait"
    )


def test_a_hang_of_another_node_halves_the_timeout() -> None:
    harness = DetectorHarness(others=1)
    harness.watch = harness.watch.on_peer_reports({1: OTHER})
    assert not harness.suspects_until(103.5)
    assert harness.suspects_until(104.0)


def test_a_rank_of_another_node_in_its_first_step_can_be_the_hung_one() -> None:
    other = RankProgress(1, "b", NO_STEP, 90.0, 0)
    for steps, rank in ((1, 1), (2, 0)):
        pulses = [RankProgress(0, "a", 700, 9.0, steps), *decode_progress(encode_progress([other]))]
        assert find_hung_rank(pulses) == (other if steps == 1 else None)
        assert f"hung: rank {rank} " in describe_hang(pulses, 2.0)


@pytest.mark.parametrize(
    "data", [b"", b"x", b"{}", b"[1]", b'[{"rank": "x"}]', b'[{"rank": 1}]', b"[" * 9999]
)
def test_malformed_progress_of_other_nodes_is_ignored(data: bytes) -> None:
    assert decode_progress(data) == []
    pulses = [RankProgress(0, "a", 7, 9.0, 1)]
    assert decode_progress(encode_progress(pulses)) == pulses


@pytest.mark.parametrize(
    "bad",
    [{"timeout": 0.0}, {"min_timeout": 0.0}, {"median_factor": -1.0}, {"first_step_timeout": 0.0}],
)
def test_hang_limits_must_be_positive(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        HangLimits(**bad)
