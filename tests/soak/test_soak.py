"""The soak's own parts: campaigns, the ledger, where a recovery's time went, what may be left."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.observe.event import Event
from elasticlib.observe.runs import RunRegistration, runs_dir
from soak.campaign import (
    FIRST_NODES,
    KINDS,
    MOST_NODES,
    CampaignError,
    after,
    draw,
    read,
    usual_mix,
    write,
)
from soak.ledger import Generation, Ledger, read_generation
from soak.phases import PHASES, recovery
from soak.proof import RECORDS, left
from soak.report import charged
from soak.stage import Stage
from soak.storm import Played

# -- campaigns --------------------------------------------------------------------------------

MIXES = st.dictionaries(st.sampled_from(sorted(KINDS)), st.floats(0.1, 50), min_size=1).map(
    # So that whatever the number of nodes is, something can strike.
    lambda mix: mix | {"kill": 1.0}
)
SPACINGS = st.tuples(st.integers(1, 40), st.integers(0, 40)).map(lambda p: (p[0], p[0] + p[1]))
DRAWN = (st.integers(0, 2**40), st.integers(1, 60), MIXES, SPACINGS)


@given(*DRAWN)
def test_a_campaign_is_its_seeds_comes_back_from_its_file_and_can_be_played(
    seed: int, count: int, mix: dict[str, float], spacing: tuple[int, int]
) -> None:
    campaign = draw(seed, count, mix, spacing)
    assert draw(seed, count, mix, spacing) == campaign == read(write(campaign))
    assert write(read(write(campaign))) == write(campaign)
    nodes, last = FIRST_NODES, 0
    assert len(campaign.faults) == count
    for fault in campaign.faults:
        kind = KINDS[fault.kind]
        assert fault.kind in mix
        assert kind.least <= nodes <= kind.most
        nodes = after(nodes, fault.kind)
        assert 1 <= nodes <= MOST_NODES
        assert fault.at >= last + spacing[0]
        last = fault.at
    assert campaign.steps > last


def test_kinds_come_as_often_as_their_weights_say() -> None:
    assert draw(1, 50, usual_mix()).faults != draw(2, 50, usual_mix()).faults
    count = 20_000
    drawn = Counter(fault.kind for fault in draw(3, count, usual_mix()).faults)
    assert sum(kind.weight for kind in KINDS.values()) == pytest.approx(100)
    for name, kind in KINDS.items():
        # Those that need more nodes, or fewer, than there are must wait for their turn.
        assert 100 * drawn[name] / count == pytest.approx(kind.weight, rel=0.45), name
    anywhere = [name for name, kind in KINDS.items() if (kind.least, kind.most) == (1, MOST_NODES)]
    total, weights = sum(drawn[n] for n in anywhere), sum(KINDS[n].weight for n in anywhere)
    for name in anywhere:
        assert drawn[name] / total == pytest.approx(KINDS[name].weight / weights, rel=0.12), name


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda ls: ls[0].update(version=2), "line 1 is no header"),
        (lambda ls: ls.clear(), "line 1 is no header"),
        (lambda ls: ls.pop(), "line 1 is no header"),
        (lambda ls: ls[1].update(colour="red"), "line 2 is no part of a campaign"),
        (lambda ls: ls[1].update(kind="flood"), "line 2: there is no such fault"),
        (lambda ls: ls[2].update(at=ls[1]["at"]), "line 3: faults come in the order of their"),
        (
            lambda ls: [line.update(kind="drain", parameters={}) for line in ls[1:]],
            "line 3: drain needs 2 to 3 nodes, and after the faults before it there are 1",
        ),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_with_a_sentence(change, sentence: str) -> None:
    lines = [json.loads(line) for line in write(draw(0, 3, {"kill": 1.0})).splitlines()]
    change(lines)
    with pytest.raises(CampaignError, match=sentence):
        read("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("count", "mix", "spacing", "sentence"),
    [
        (0, {"kill": 1.0}, (1, 2), "at least one fault"),
        (1, {"kill": 1.0}, (3, 2), "MIN to MAX"),
        (1, {"kill": 0.0}, (1, 2), "weight of kill is above 0"),
        (1, {"flood": 1.0}, (1, 2), "no fault 'flood'"),
        (9, {"join": 1.0}, (1, 2), "no kind of join can strike 3 nodes"),
    ],
)
def test_what_cannot_be_drawn_is_refused(count, mix, spacing, sentence: str) -> None:
    with pytest.raises(CampaignError, match=sentence):
        draw(0, count, mix, spacing)


# -- the ledger -------------------------------------------------------------------------------

SAMPLES, BATCH = 8, 4


def generation(number: int, resumed: int, steps: Iterable[int], world: int = 2) -> Generation:
    files = {}
    for rank in range(world):
        lines: list[dict[str, object]] = [{"resumed": resumed, "seconds": 0.0, "at": 0.0}]
        for step in steps:
            epoch, place = divmod(step - 1, SAMPLES // BATCH)
            batch = list(range(place * BATCH, (place + 1) * BATCH))
            share = batch[rank * BATCH // world : (rank + 1) * BATCH // world]
            begun = {"step": step, "epoch": epoch, "indices": share, "world": world}
            lines.append({**begun, "at": 1.0 * step})
            if rank == 0:
                lines.append({"done": step, "at": step + 0.5})
        files[rank] = lines
    return read_generation(number, files)


@pytest.fixture
def ledger() -> Ledger:
    """Of five steps, of which the third was begun twice."""
    ledger = Ledger()
    assert ledger.fold(generation(1, 0, (1, 2, 3))) == 0
    assert ledger.fold(generation(3, 2, (3, 4, 5), world=1)) == 1
    return ledger


def test_a_job_that_struck_out_what_it_did_again_is_right(ledger: Ledger) -> None:
    assert ledger.check(5, SAMPLES, BATCH) == []
    assert (ledger.struck, ledger.useful_seconds()) == (1, 2.5)
    # Steps that were begun and never done again do not count.
    assert ledger.fold(generation(4, 2, (3,))) == 3
    assert sorted(ledger.steps) == [1, 2, 3]
    assert any("[4, 5] do not" in wrong for wrong in ledger.check(5, SAMPLES, BATCH))


def test_what_is_missing_or_was_used_twice_is_named(ledger: Ledger) -> None:
    ledger.steps[4].ranks[0] = [0, 1, 6, 7]
    (twice,) = ledger.check(5, SAMPLES, BATCH)
    assert "epoch 1: 6 of 8 samples were used, [0, 1] more than once" in twice
    del ledger.steps[4]
    assert any("[4] do not" in wrong for wrong in ledger.check(5, SAMPLES, BATCH))
    del ledger.steps[1].ranks[1]
    assert any("step 1 has ranks [0] of 2" in wrong for wrong in ledger.check(5, SAMPLES, BATCH))


def test_ranks_that_went_on_from_different_steps_are_told_of(
    ledger: Ledger,
) -> None:
    odd = generation(4, 5, (6,))
    odd.resumed[1] = {**odd.resumed[1], "resumed": 4}
    ledger.fold(odd)
    assert any("went on from [4, 5]" in wrong for wrong in ledger.check(6, SAMPLES, BATCH))


# -- where the time of a recovery went ----------------------------------------------------------


def told(kind: str, at: float, number: int, node: str = "a") -> Event:
    return Event(kind, "soak", node, number, 0.0, at)


def of_one_rank(number: int, at: float, *done: tuple[int, float]) -> Generation:
    """It restored within half a second, until `at`."""
    lines: list[dict[str, object]] = [{"resumed": 0, "seconds": 0.5, "at": at}]
    for step, end in done:
        lines.append({"step": step, "indices": [], "epoch": 0, "world": 1, "at": end - 0.25})
        lines.append({"done": step, "at": end})
    return read_generation(number, {0: lines})


STRUCK = of_one_rank(4, 1.0, (7, 9.0), (8, 10.0))
EVENTS = [
    told("progress", 10.5, 4),
    told("worker.exited", 11.0, 4),
    told("stopping", 11.25, 4),
    told("stopping", 11.5, 4, "b"),
    told("stopped", 12.0, 4),
    told("rendezvous.started", 12.0, 4),
    told("generation.started", 13.0, 5),
    told("generation.started", 13.25, 5, "b"),
    told("stopped", 20.0, 5),
]


def test_a_recovery_is_cut_where_one_phase_ends_and_the_next_begins() -> None:
    found = recovery(10.25, 9, EVENTS, [STRUCK, of_one_rank(5, 15.0, (8, 15.5), (9, 16.0))])
    assert found is not None
    assert (found.total, found.pause, found.generation) == (16.0 - 10.25, 6.0, 5)
    lengths = {"detect": 0.75, "stop": 1.0, "rendezvous": 1.25, "start": 1.25, "restore": 0.5}
    assert found.seconds == {**lengths, "redone": 1.0}
    assert tuple(found.seconds) == PHASES
    assert sum(found.seconds.values()) == pytest.approx(found.total)


def test_a_generation_that_did_no_step_is_part_of_the_way_to_the_next() -> None:
    events = [*EVENTS, told("worker.exited", 14.0, 5), told("generation.started", 15.0, 6)]
    later = [STRUCK, of_one_rank(5, 13.5), of_one_rank(6, 16.0, (9, 17.0))]
    found = recovery(10.25, 9, events, later)
    assert found is not None
    assert (found.generation, found.seconds["stop"]) == (6, 3.0)


def test_what_restarts_nothing_has_a_total_and_no_phases() -> None:
    found = recovery(9.5, 8, [], [of_one_rank(4, 1.0, (7, 9.0), (8, 12.0))])
    assert found is not None
    assert (found.total, found.pause, found.seconds) == (2.5, 3.0, {})


def test_a_step_that_was_kept_needs_not_be_done_again_and_one_that_was_not_does() -> None:
    found = recovery(10.25, 9, EVENTS, [STRUCK, of_one_rank(5, 15.0, (10, 16.0))])
    assert found is not None
    assert found.total == 5.75
    assert recovery(10.25, 9, EVENTS, [STRUCK, of_one_rank(5, 15.0, (8, 15.5))]) is None


def played(number: int, kind: str, of: int, struck: dict[int, int]) -> Played:
    return Played(number, kind, 0, 0, 2, of, "", struck, (), None)


def test_steps_done_again_are_charged_to_the_last_fault_before_the_generation_that_did_them() -> (
    None
):
    first = [
        played(1, "kill", 1, {1: 0}),
        played(2, "slow", 2, {}),
        played(3, "corrupt", 2, {2: 1}),
    ]
    story = [*first, played(4, "drain", 3, {3: 20}), played(5, "kill", 4, {4: 0})]
    assert charged(story) == {1: 1, 2: 0, 3: 20, 4: 0, 5: 0}
    # An agent is lost: the others go on without it, and once more when a spare node has come.
    story = [played(1, "drain", 4, {4: 0}), played(2, "agent", 5, {5: 0, 6: 2})]
    assert charged([*story, played(3, "kill", 7, {7: 1})]) == {1: 0, 2: 3, 3: 0}


# -- a fault's own effect, and what may be left -------------------------------------------------


class Written(Stage):
    """What was written down alone: nobody trains."""

    def __init__(self, trace: Path, events: list[Event]) -> None:
        self.trace, self.events = trace, events
        self.nodes = SimpleNamespace(present=(), new_events=list)


def test_what_an_earlier_fault_of_the_generation_did_is_not_this_ones(tmp_path: Path) -> None:
    lines = [{"meets": 4, "at": at} for at in (1.0, 2.0)]
    (tmp_path / "00000001.0.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    failures = [told("failure", at, 1) for at in (1.0, 2.0)]
    stage = Written(tmp_path, failures)
    assert stage.line("it", 1, 1.5, lambda line: line["meets"] == 4) == lines[1]
    assert stage.event("it", 1.5, lambda event: event.kind == "failure") is failures[1]


def test_records_of_runs_stay_but_not_without_bounds_and_of_nobody_who_lives(
    tmp_path: Path,
) -> None:
    record = RunRegistration("job", directory=tmp_path / runs_dir().name)
    assert left("nobody", tmp_path, False) == [f"the agent of {record.path} lives"]
    record.close()
    assert left("nobody", tmp_path, False) == []
    for number in range(RECORDS):
        (record.path.parent / str(number)).mkdir()
    (tmp_path / "other").touch()
    other, many = left("nobody", tmp_path, False)
    assert other == f"{tmp_path / 'other'} is left"
    assert many.startswith(f"{RECORDS + 1} records of runs are left")
