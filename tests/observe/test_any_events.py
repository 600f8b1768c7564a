"""What holds of a history whatever is told: cut, mixed, repeated, or by clocks that lie."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from told_runs import Agent

from elasticlib.observe.event import KINDS, Event, decode, encode
from elasticlib.observe.history import History
from elasticlib.observe.reading import history_of

NUMBERS = st.integers(0, 6) | st.floats(0, 50)
ODD = st.none() | st.booleans() | st.text(max_size=3) | st.lists(st.integers(0, 3), max_size=3)
NUMERIC = ("seconds", "step", "nodes", "world", "restarts", "node_rank", "silent", "per_second")
TRUTHS = ("ok", "stopped", "planned")
WORDS = ("the job starts", "n1: it fell", "n2 left", "n3 joined", "n2 drains (SIGUSR2)", "")
STATES = ("succeeded", "failed", "stopped", "drained", "odd")


def facts(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    def one(name: str) -> st.SearchStrategy[Any]:
        if name in NUMERIC:
            return NUMBERS | ODD
        if name in TRUTHS:
            return st.booleans()
        if name == "state":
            return st.sampled_from(STATES)
        return st.sampled_from(WORDS) | NUMBERS | ODD

    names = {*KINDS[kind], "silent", "planned", "after", "lease"}
    return st.fixed_dictionaries({}, optional={name: one(name) for name in sorted(names)})


EVENTS = st.lists(
    st.sampled_from(sorted(KINDS)).flatmap(
        lambda kind: st.builds(
            Event,
            st.just(kind),
            st.just("job"),
            st.sampled_from(("n1", "n2", "n3")),
            st.integers(0, 4),
            st.floats(0, 1e4),
            st.floats(0, 1e3),
            st.none() | st.integers(0, 3),
            facts(kind),
        )
    ),
    max_size=15,
)


def holds(history: History) -> None:
    numbers = [generation.number for generation in history.generations]
    assert numbers == sorted(set(numbers))
    before = 0.0
    for generation in history.generations:
        assert before <= generation.began + 1e-6
        ended = history.until if generation.ended is None else generation.ended
        assert generation.began <= ended + 1e-6 <= history.until + 2e-6
        if generation.trained is not None:
            assert generation.began <= generation.trained <= ended + 1e-6
        before = ended
        cost = generation.cost
        phases = (cost.detect, cost.stop, cost.rendezvous, cost.start, cost.restore)
        told = [phase for phase in phases if phase is not None]
        assert min((*told, cost.redone_seconds, cost.redone)) >= 0
    assert history.goodput is None or 0 <= history.goodput <= 1 + 1e-9
    assert all(stay.ended is None or stay.ended >= stay.began for stay in history.stays)
    assert {stay.node for stay in history.stays} <= {node.node for node in history.nodes}
    assert {stay.generation for stay in history.stays} == set(numbers)


@settings(max_examples=60, deadline=None)
@given(EVENTS, EVENTS, st.booleans())
def test_any_events_make_a_history(one: list[Event], other: list[Event], ordered: bool) -> None:
    if ordered:
        one.sort(key=lambda event: event.at)
        other.sort(key=lambda event: event.at)
    holds(history_of({"one": one, "other": other}))


def tell(agent: Agent, rank: int, ahead: float) -> list[bytes]:
    agent.launch(0.0).begin(2.0, 1, rank=rank, nodes=2).train(3.0, 1).steps(9.0, 61)
    agent.fail(10.0, "it fell").stop(10.0, 12.0 + ahead)
    agent.begin(13.0, 2, rank=rank, nodes=2, restarts=1, cause="n1: it fell").restore(14.0, 30, 0.5)
    agent.train(15.0, 31).tell(16.0, "saved", step=60).stop(17.0, 18.0, "resize")
    agent.begin(19.0, 3, rank=rank, nodes=2, restarts=1, cause="n3 joined").succeed(20.0)
    return [encode(event) for event in agent.events]


LINES = (tell(Agent("n1"), 0, 0.0), tell(Agent("n2", ahead=60.0, booted=-9.0), 1, 0.5))
CUT = st.integers(0, len(LINES[0]))


@settings(max_examples=60, deadline=None)
@given(CUT, CUT, CUT, CUT, st.randoms(use_true_random=False))
def test_any_cut_and_any_mixture_of_a_runs_events_makes_a_history(
    head: int, tail: int, other_head: int, other_tail: int, random: Any
) -> None:
    one = [decode(line) for line in LINES[0][head:tail]]
    other = [decode(line) for line in LINES[1][other_head:other_tail]]
    mixed = [(event, 0) for event in one] + [(event, 1) for event in other]
    random.shuffle(mixed)
    for told in ({"a": one, "b": other}, {"all": [event for event, _ in mixed]}):
        history = history_of(told)
        holds(history)
        assert len(history.nodes) >= bool(one) + bool(other)
