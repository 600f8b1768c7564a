"""Spares, topology and missing node ranks in the rank assignment."""

from __future__ import annotations

from sample_memberships import (
    SETTINGS,
    A,
    B,
    C,
    D,
    E,
    create_generation,
    create_node,
    decide,
)

from elasticlib.options import RendezvousSettings
from elasticlib.rendezvous.membership import Membership
from elasticlib.rendezvous.rank_assignment import order_members


def test_surplus_spares_are_rejected() -> None:
    settings = RendezvousSettings(1, 2, spares=1)
    document = create_generation(A, B, settings=settings)
    refused = decide(document, A, B, C, D, E).new_membership
    assert refused is not None
    assert refused.rejected_spares == (D.id, E.id)
    assert decide(refused, A, B, C, D, E).reason == "generation 1 is active, 1 spare"


def test_nodes_with_equal_topology_get_adjacent_ranks_after_the_survivors() -> None:
    a, b, c, d = (create_node(n, topology=t) for n, t in zip("abcd", "xyxy", strict=True))
    assert order_members(Membership(SETTINGS), [d, b, c, a]) == (a, c, b, d)
    assert order_members(create_generation(a, b), [a, b, c, d]) == (a, c, b, d)
    full = create_generation(a, b, settings=RendezvousSettings(2, 2))
    assert order_members(full, [c, b, a]) == (a, b)


def test_missing_node_ranks_are_named() -> None:
    settings = RendezvousSettings(3, 3, last_call_timeout=0.0, has_fixed_ranks=True)
    waits = decide(Membership(settings), create_node("a", rank_hint=1))
    assert waits.reason == "1 of at least 3 nodes are here; missing: node ranks 0, 2"
