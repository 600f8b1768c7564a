"""What an agent answers to a request: it follows from what the machine has made of it."""

from __future__ import annotations

import attrs
import pytest

from elasticlib.agent.answers import Reaction, describe_reaction
from elasticlib.agent.machine import Limits, MachineState, begin, handle
from elasticlib.agent.messages import Action, Event, NodeReady, Requested
from elasticlib.rendezvous.interface import (
    Joined,
    MembershipChanged,
    RankAssignment,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from elasticlib.rendezvous.membership import Change, ChangeKind

LIMITS = Limits(local_world_size=2)
PLACE = RankAssignment(
    group_rank=0, num_nodes=1, first_rank=0, world_size=2, local_world_size=2,
    first_role_rank=0, role_world_size=2,
)  # fmt: skip
GENERATION = RendezvousInfo("job", 3, PLACE, RendezvousStoreInfo("127.0.0.1", 1))


def after(*events: Event) -> MachineState:
    """Return the state of the machine after these events."""
    state, _ = begin(LIMITS)
    for event in events:
        state, _ = handle(state, event, 1.0, LIMITS)
    return state


JOINING = after(NodeReady())
ACTIVE = after(NodeReady(), Joined(1, GENERATION))
RESIZED = after(
    NodeReady(),
    Joined(1, GENERATION),
    MembershipChanged(1, Change(ChangeKind.RESIZE, "one more")),
)


def request(action: str, generation: int = 3) -> Requested:
    return Requested(Action(action), "a request", generation=generation, id="1", by="ann")


DRAINING = after(NodeReady(), Joined(1, GENERATION), request("drain"))
STOPPED = after(NodeReady(), Joined(1, GENERATION), request("stop"))


@pytest.mark.parametrize(
    ("action", "state", "reaction"),
    [
        ("drain", ACTIVE, Reaction(True, "leaves the job once its 2 workers have stopped")),
        ("drain", RESIZED, Reaction(True, "leaves the job once its 2 workers have stopped")),
        ("drain", JOINING, Reaction(True, "leaves the job")),
        ("drain", DRAINING, Reaction(False, "was leaving the job already")),
        ("drain", STOPPED, Reaction(False, "is ending already")),
        ("stop", ACTIVE, Reaction(True, "ends once its 2 workers have stopped")),
        ("stop", JOINING, Reaction(True, "ends")),
        (
            "stop",
            DRAINING,
            Reaction(True, "ends instead of draining once its 2 workers have stopped"),
        ),
        ("stop", STOPPED, Reaction(True, "is ending already")),
        ("restart", ACTIVE, Reaction(True, "restarts its 2 workers")),
        ("restart", RESIZED, Reaction(False, "is stopping its workers already")),
        ("restart", JOINING, Reaction(False, "has no workers to restart")),
        ("restart", DRAINING, Reaction(False, "is leaving the job")),
    ],
)
def test_the_answer_describes_what_the_node_does(
    action: str, state: MachineState, reaction: Reaction
) -> None:
    requested = request(action)
    changed, effects = handle(state, requested, 2.0, LIMITS)
    assert describe_reaction(requested, state, changed, effects) == reaction


def test_workers_that_were_started_after_the_request_are_not_restarted() -> None:
    requested = request("restart", generation=2)
    changed, effects = handle(ACTIVE, requested, 2.0, LIMITS)
    assert (changed, effects) == (ACTIVE, ())
    assert describe_reaction(requested, ACTIVE, changed, effects) == Reaction(
        False, "has started generation 3 since the request"
    )


def test_one_worker_is_named_in_the_singular() -> None:
    state = attrs.evolve(ACTIVE, alive={0: ACTIVE.alive[0]})
    requested = request("drain")
    changed, effects = handle(state, requested, 2.0, LIMITS)
    reaction = describe_reaction(requested, state, changed, effects)
    assert reaction.text == "leaves the job once its 1 worker has stopped"
