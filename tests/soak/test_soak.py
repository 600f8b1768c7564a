"""The parts of the soak: campaigns, the training history, the phases of a recovery, leftovers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_events import make_event

from elasticlib.observe.event import Event
from elasticlib.observe.runs import RunRegistration, runs_dir
from soak.campaign import (
    FAULT_KINDS,
    INITIAL_NODES,
    MAX_NODES,
    CampaignError,
    default_mix,
    draw,
    nodes_after,
    read,
    write,
)
from soak.campaign_runner import FaultResult
from soak.phases import PHASES, measure_recovery
from soak.report import repeated_steps
from soak.soak_job import SoakJob
from soak.training_history import Generation, TrainingHistory, read_generation
from soak.verification import MAX_RECORDS, find_leftovers

# -- campaigns --------------------------------------------------------------------------------

MIXES = st.dictionaries(st.sampled_from(sorted(FAULT_KINDS)), st.floats(0.1, 50), min_size=1).map(
    # With `kill`, a fault is possible for every number of nodes.
    lambda mix: mix | {"kill": 1.0}
)
SPACINGS = st.tuples(st.integers(1, 40), st.integers(0, 40)).map(lambda p: (p[0], p[0] + p[1]))
ARGUMENTS = (st.integers(0, 2**40), st.integers(1, 60), MIXES, SPACINGS)


@given(*ARGUMENTS)
def test_campaign_depends_only_on_its_arguments_and_every_fault_is_possible(
    seed: int, count: int, mix: dict[str, float], spacing: tuple[int, int]
) -> None:
    campaign = draw(seed, count, mix, spacing)
    assert draw(seed, count, mix, spacing) == campaign == read(write(campaign))
    assert write(read(write(campaign))) == write(campaign)
    nodes, last = INITIAL_NODES, 0
    assert len(campaign.faults) == count
    for fault in campaign.faults:
        kind = FAULT_KINDS[fault.kind]
        assert fault.kind in mix
        assert kind.min_nodes <= nodes <= kind.max_nodes
        nodes = nodes_after(nodes, fault.kind)
        assert 1 <= nodes <= MAX_NODES
        assert fault.step >= last + spacing[0]
        last = fault.step
    assert campaign.steps > last


def test_kinds_are_as_frequent_as_their_weights() -> None:
    assert draw(1, 50, default_mix()).faults != draw(2, 50, default_mix()).faults
    count = 20_000
    drawn = Counter(fault.kind for fault in draw(3, count, default_mix()).faults)
    assert sum(kind.weight for kind in FAULT_KINDS.values()) == pytest.approx(100)
    for name, kind in FAULT_KINDS.items():
        # A kind that needs more or fewer nodes than the job has is not drawn.
        assert 100 * drawn[name] / count == pytest.approx(kind.weight, rel=0.45), name
    unrestricted = [
        name
        for name, kind in FAULT_KINDS.items()
        if (kind.min_nodes, kind.max_nodes) == (1, MAX_NODES)
    ]
    total = sum(drawn[name] for name in unrestricted)
    weights = sum(FAULT_KINDS[name].weight for name in unrestricted)
    for name in unrestricted:
        expected = FAULT_KINDS[name].weight / weights
        assert drawn[name] / total == pytest.approx(expected, rel=0.12), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ls: ls[0].update(version=1), "line 1 must be the header"),
        (lambda ls: ls.clear(), "line 1 must be the header"),
        (lambda ls: ls.pop(), "line 1 must be the header"),
        (lambda ls: ls[1].update(colour="red"), "line 2 is not part of a campaign"),
        (lambda ls: ls[1].update(kind="flood"), "line 2: unknown fault"),
        (lambda ls: ls[2].update(step=ls[1]["step"]), "line 3: faults must be in the order"),
        (
            lambda ls: [line.update(kind="drain", parameters={}) for line in ls[1:]],
            "line 3: drain needs 2 to 3 nodes, but the job has 1 after the faults before it",
        ),
    ],
)
def test_invalid_campaign_file_is_rejected_with_its_line(change, message: str) -> None:
    lines = [json.loads(line) for line in write(draw(0, 3, {"kill": 1.0})).splitlines()]
    change(lines)
    with pytest.raises(CampaignError, match=message):
        read("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("count", "mix", "spacing", "message"),
    [
        (0, {"kill": 1.0}, (1, 2), "at least one fault"),
        (1, {"kill": 1.0}, (3, 2), "MIN, MAX"),
        (1, {"kill": 0.0}, (1, 2), "weight of kill must be above 0"),
        (1, {"flood": 1.0}, (1, 2), "unknown fault 'flood'"),
        (9, {"join": 1.0}, (1, 2), "no kind of join is possible with 3 nodes"),
    ],
)
def test_invalid_arguments_of_a_campaign_are_rejected(count, mix, spacing, message: str) -> None:
    with pytest.raises(CampaignError, match=message):
        draw(0, count, mix, spacing)


# -- the training history ---------------------------------------------------------------------

SAMPLES, BATCH = 8, 4


def generation(number: int, resumed: int, steps: Iterable[int], world: int = 2) -> Generation:
    """Return a generation that resumed from a step and trained these steps."""
    files = {}
    for rank in range(world):
        lines: list[dict[str, object]] = [{"resumed": resumed, "seconds": 0.0, "at": 0.0}]
        for step in steps:
            epoch, position = divmod(step - 1, SAMPLES // BATCH)
            batch = list(range(position * BATCH, (position + 1) * BATCH))
            share = batch[rank * BATCH // world : (rank + 1) * BATCH // world]
            start = {"step": step, "epoch": epoch, "indices": share, "world": world}
            lines.append({**start, "at": 1.0 * step})
            if rank == 0:
                lines.append({"done": step, "at": step + 0.5})
        files[rank] = lines
    return read_generation(number, files)


@pytest.fixture
def history() -> TrainingHistory:
    """The history of five steps, of which the third was trained twice."""
    history = TrainingHistory()
    assert history.add(generation(1, 0, (1, 2, 3))) == 0
    assert history.add(generation(3, 2, (3, 4, 5), world=1)) == 1
    return history


def test_repeated_step_counts_once(history: TrainingHistory) -> None:
    assert history.check(5, SAMPLES, BATCH) == []
    assert (history.discarded, history.useful_seconds()) == (1, 2.5)
    # Steps that were discarded and not repeated do not count.
    assert history.add(generation(4, 2, (3,))) == 3
    assert sorted(history.steps) == [1, 2, 3]
    assert any("[4, 5] do not" in text for text in history.check(5, SAMPLES, BATCH))


def test_missing_and_repeated_samples_are_reported(history: TrainingHistory) -> None:
    history.steps[4].ranks[0] = [0, 1, 6, 7]
    (violation,) = history.check(5, SAMPLES, BATCH)
    assert "epoch 1: 6 of 8 samples were used, [0, 1] more than once" in violation
    del history.steps[4]
    assert any("[4] do not" in text for text in history.check(5, SAMPLES, BATCH))
    del history.steps[1].ranks[1]
    assert any("step 1 has ranks [0] of 2" in text for text in history.check(5, SAMPLES, BATCH))


def test_ranks_that_resume_from_different_steps_are_reported(history: TrainingHistory) -> None:
    inconsistent = generation(4, 5, (6,))
    inconsistent.restores[1] = {**inconsistent.restores[1], "resumed": 4}
    history.add(inconsistent)
    violations = history.check(6, SAMPLES, BATCH)
    assert any("resumed from different steps, [4, 5]" in text for text in violations)


# -- the phases of a recovery -------------------------------------------------------------------


def event(kind: str, at: float, number: int, node: str = "a") -> Event:
    return make_event(kind, "soak", node, number, 0.0, at)


def one_rank(number: int, restored_at: float, *done: tuple[int, float]) -> Generation:
    """Return a generation of one rank, whose restore took half a second."""
    lines: list[dict[str, object]] = [{"resumed": 0, "seconds": 0.5, "at": restored_at}]
    for step, end in done:
        lines.append({"step": step, "indices": [], "epoch": 0, "world": 1, "at": end - 0.25})
        lines.append({"done": step, "at": end})
    return read_generation(number, {0: lines})


BEFORE = one_rank(4, 1.0, (7, 9.0), (8, 10.0))
EVENTS = [
    event("progress", 10.5, 4),
    event("worker.exited", 11.0, 4),
    event("stopping", 11.25, 4),
    event("stopping", 11.5, 4, "b"),
    event("stopped", 12.0, 4),
    event("rendezvous.started", 12.0, 4),
    event("generation.started", 13.0, 5),
    event("generation.started", 13.25, 5, "b"),
    event("stopped", 20.0, 5),
]


def test_phases_of_a_recovery_add_up_to_its_total() -> None:
    result = measure_recovery(10.25, 9, EVENTS, [BEFORE, one_rank(5, 15.0, (8, 15.5), (9, 16.0))])
    assert result is not None
    assert (result.total, result.pause, result.generation) == (16.0 - 10.25, 6.0, 5)
    phases = {
        **{"detection": 0.75, "shutdown": 1.0, "rendezvous": 1.25},
        **{"startup": 1.25, "restore": 0.5, "repeated": 1.0},
    }
    assert result.seconds == phases
    assert tuple(result.seconds) == PHASES
    assert sum(result.seconds.values()) == pytest.approx(result.total)


def test_generation_without_a_step_is_part_of_the_recovery_by_the_next_one() -> None:
    events = [*EVENTS, event("worker.exited", 14.0, 5), event("generation.started", 15.0, 6)]
    generations = [BEFORE, one_rank(5, 13.5), one_rank(6, 16.0, (9, 17.0))]
    result = measure_recovery(10.25, 9, events, generations)
    assert result is not None
    assert (result.generation, result.seconds["shutdown"]) == (6, 3.0)


def test_fault_without_a_restart_has_a_total_and_no_phases() -> None:
    result = measure_recovery(9.5, 8, [], [one_rank(4, 1.0, (7, 9.0), (8, 12.0))])
    assert result is not None
    assert (result.total, result.pause, result.seconds) == (2.5, 3.0, {})


def test_recovery_ends_with_a_later_step_if_the_prevented_one_was_in_a_snapshot() -> None:
    result = measure_recovery(10.25, 9, EVENTS, [BEFORE, one_rank(5, 15.0, (10, 16.0))])
    assert result is not None
    assert result.total == 5.75
    assert measure_recovery(10.25, 9, EVENTS, [BEFORE, one_rank(5, 15.0, (8, 15.5))]) is None


def fault_result(number: int, kind: str, generation: int, discarded: dict[int, int]) -> FaultResult:
    return FaultResult(number, kind, 0, 0, 2, generation, "", discarded, (), None)


def test_repeated_steps_are_the_cost_of_the_last_fault_before_their_generation() -> None:
    first = [
        fault_result(1, "kill", 1, {1: 0}),
        fault_result(2, "slow", 2, {}),
        fault_result(3, "corrupt", 2, {2: 1}),
    ]
    results = [*first, fault_result(4, "drain", 3, {3: 20}), fault_result(5, "kill", 4, {4: 0})]
    assert repeated_steps(results) == {1: 1, 2: 0, 3: 20, 4: 0, 5: 0}
    # After the loss of an agent, the others continue without it, and again with its replacement.
    results = [fault_result(1, "drain", 4, {4: 0}), fault_result(2, "agent", 5, {5: 0, 6: 2})]
    assert repeated_steps([*results, fault_result(3, "kill", 7, {7: 1})]) == {1: 0, 2: 3, 3: 0}


# -- the effect of a fault, and leftovers -------------------------------------------------------


class RecordsOnly(SoakJob):
    """A job without processes, which only has the records of its workers and agents."""

    def __init__(self, trace: Path, events: list[Event]) -> None:
        self.trace, self.events = trace, events
        self.nodes = SimpleNamespace(present=(), new_events=list)


def test_records_of_an_earlier_fault_of_the_generation_are_ignored(tmp_path: Path) -> None:
    lines = [{"fault": 4, "at": at} for at in (1.0, 2.0)]
    (tmp_path / "00000001.0.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    failures = [event("failure", at, 1) for at in (1.0, 2.0)]
    job = RecordsOnly(tmp_path, failures)
    assert job.wait_for_line("a line", 1, 1.5, lambda line: line["fault"] == 4) == lines[1]
    assert job.wait_for_event("it", 1.5, lambda event: event.kind == "failure") is failures[1]


def test_run_records_may_be_left_unless_they_are_too_many_or_of_a_running_agent(
    tmp_path: Path,
) -> None:
    record = RunRegistration("job", directory=tmp_path / runs_dir().name)
    running = f"the agent of {record.path} is running"
    assert find_leftovers("no such tag", tmp_path, False) == [running]
    record.close()
    assert find_leftovers("no such tag", tmp_path, False) == []
    for number in range(MAX_RECORDS):
        (record.path.parent / str(number)).mkdir()
    (tmp_path / "other").touch()
    other, many = find_leftovers("no such tag", tmp_path, False)
    assert other == f"{tmp_path / 'other'} is left"
    assert many.startswith(f"{MAX_RECORDS + 1} run records are left")
