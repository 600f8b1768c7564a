"""What is drawn of a simulated run is what happened in it."""

from __future__ import annotations

import sys
from itertools import pairwise

import pytest

from elasticlib.errors import ConfigError
from elasticlib.rendezvous.document import Limits, Phase
from elasticlib.testing.drawing import draw, reigns
from elasticlib.testing.simulation import Faults, Simulation

CALM = Faults(crashes=0, arrivals=0, leaves=0, worker_failures=0, stalls=0, span=5.0)


def eventful(seed: int) -> Simulation:
    return Simulation(seed, Limits(2, 4, max_restarts=3), nodes=3).run()


@pytest.mark.parametrize("seed", range(20))
def test_no_node_runs_two_generations_at_once(seed: int) -> None:
    played = eventful(seed)
    for node in played.nodes:
        own = [shift for shift in played.shifts if shift.node == node.name]
        assert all(shift.start <= shift.end <= played.now for shift in own)
        assert all(a.end <= b.start for a, b in pairwise(own))
        assert all(a.generation < b.generation for a, b in pairwise(own))


@pytest.mark.parametrize("seed", range(20))
def test_whoever_trains_in_the_end_is_a_member_of_the_last_generation(seed: int) -> None:
    played = eventful(seed)
    last = played.documents[-1]
    until_now = {shift.node for shift in played.shifts if shift.end == played.now}
    assert last.phase is not Phase.SETTLED or until_now == {node.host for node in last.members}


def test_a_calm_run_is_one_reign_that_nothing_was_charged_for() -> None:
    played = Simulation(1, Limits(2, 4), nodes=4, faults=CALM).run()
    (reign,) = reigns(played)
    assert (reign.generation, reign.nodes, reign.charged) == (1, 4, False)
    assert reign.end == played.now
    assert {shift.generation for shift in played.shifts} == {1}


@pytest.mark.parametrize("seed", range(20))
def test_as_many_reigns_are_charged_as_restarts_were_counted(seed: int) -> None:
    played = eventful(seed)
    assert sum(reign.charged for reign in reigns(played)) == played.documents[-1].restarts


def test_every_node_has_a_row_of_its_own() -> None:
    played = eventful(1)
    (axes,) = draw(played).axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == ["the document", *(node.name for node in played.nodes)]


def test_drawing_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'elasticlib\[plot\]'"):
        draw(eventful(1))
