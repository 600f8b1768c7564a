"""The same seed draws the same campaign, its file brings it back, and it can be played."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

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

MIXES = st.dictionaries(st.sampled_from(sorted(KINDS)), st.floats(0.1, 50), min_size=1).map(
    # So that whatever the number of nodes is, something can strike.
    lambda mix: mix | {"kill": 1.0}
)
SPACINGS = st.tuples(st.integers(1, 40), st.integers(0, 40)).map(lambda p: (p[0], p[0] + p[1]))
DRAWN = st.builds(draw, st.integers(0, 2**40), st.integers(1, 60), MIXES, SPACINGS)


@given(seed=st.integers(), count=st.integers(1, 40), mix=MIXES, spacing=SPACINGS)
def test_the_same_seed_draws_the_same_campaign(
    seed: int, count: int, mix: dict[str, float], spacing: tuple[int, int]
) -> None:
    first, again = (draw(seed, count, mix, spacing) for _ in range(2))
    assert write(first) == write(again)
    assert len(first.faults) == count
    assert {fault.kind for fault in first.faults} <= set(mix)


def test_another_seed_draws_another_campaign() -> None:
    assert draw(1, 50, usual_mix()).faults != draw(2, 50, usual_mix()).faults


@given(DRAWN)
def test_a_campaign_comes_back_from_its_file(campaign) -> None:
    found = read(write(campaign))
    assert found == campaign
    assert write(found) == write(campaign)


@given(DRAWN)
def test_each_fault_can_be_played_when_it_is_due(campaign) -> None:
    nodes, last = FIRST_NODES, 0
    for fault in campaign.faults:
        kind = KINDS[fault.kind]
        assert kind.least <= nodes <= kind.most
        nodes = after(nodes, fault.kind)
        assert 1 <= nodes <= MOST_NODES
        assert fault.at >= last + campaign.spacing[0]
        last = fault.at
    assert campaign.steps > last


def test_kinds_come_as_often_as_their_weights_say() -> None:
    count = 20_000
    drawn = Counter(fault.kind for fault in draw(3, count, usual_mix()).faults)
    assert sum(KINDS[name].weight for name in KINDS) == pytest.approx(100)
    for name, kind in KINDS.items():
        # Those that need more nodes, or fewer, than there are must wait for their turn.
        share = 100 * drawn[name] / count
        assert share == pytest.approx(kind.weight, rel=0.45), name
    anywhere = [name for name, kind in KINDS.items() if (kind.least, kind.most) == (1, MOST_NODES)]
    total = sum(drawn[name] for name in anywhere)
    weights = sum(KINDS[name].weight for name in anywhere)
    for name in anywhere:
        assert drawn[name] / total == pytest.approx(KINDS[name].weight / weights, rel=0.12), name


def lines_of(count: int = 3) -> list[dict[str, object]]:
    text = write(draw(0, count, {"kill": 1.0}))
    return [json.loads(line) for line in text.splitlines()]


def text_of(lines: list[dict[str, object]]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda ls: ls[0].update(version=2), "campaigns of version 1 are read here, got 2"),
        (lambda ls: ls[0].update(format="x"), "line 1 is no header"),
        (lambda ls: ls.pop(), "tells of 3 faults, and there are 2"),
        (lambda ls: ls[1].update(kind="flood"), "line 2: no fault 'flood'; there are kill"),
        (lambda ls: ls[2].update(at=ls[1]["at"]), "line 3: faults come in the order of their"),
        (lambda ls: ls[1].update(at=0), "line 2: at is a step from 1"),
        (lambda ls: ls[1].update(which=-1), "which a number from 0"),
        (lambda ls: ls[1].update(parameters={"where": "x"}), "line 2: kill cannot be with"),
        (lambda ls: ls[1].update(kind="exit", parameters={"where": "begin", "code": 2}), "exit"),
        (
            lambda ls: [line.update(kind="drain", parameters={}) for line in ls[1:]],
            "line 3: drain needs 2 to 3 nodes, and after the faults before it there are 1",
        ),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_with_a_sentence(change, sentence: str) -> None:
    lines = lines_of()
    change(lines)
    with pytest.raises(CampaignError) as refused:
        read(text_of(lines))
    assert sentence in str(refused.value)


def test_text_that_is_no_json_is_refused_with_its_line() -> None:
    with pytest.raises(CampaignError, match="line 2 is no JSON"):
        read(text_of(lines_of()[:1]) + "{\n")
    with pytest.raises(CampaignError, match="line 1 is no header"):
        read("")


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
