"""Spares, topology and missing node ranks in the rank assignment."""

from __future__ import annotations

from test_reconcile import LIMITS, A, B, C, D, E, node, settled, view

from elasticlib.rendezvous.membership import Membership, RendezvousSettings
from elasticlib.rendezvous.rank_assignment import order_members
from elasticlib.rendezvous.reconcile import reconcile


def test_surplus_spares_are_rejected() -> None:
    settings = RendezvousSettings(1, 2, spares=1)
    document = settled(A, B, settings=settings)
    refused = reconcile(view(document, A, B, C, D, E)).new_membership
    assert refused is not None
    assert refused.rejected_spares == (D.id, E.id)
    assert reconcile(view(refused, A, B, C, D, E)).reason == "generation 1 is active, 1 spare"


def test_nodes_with_equal_topology_get_adjacent_ranks_after_the_survivors() -> None:
    a, b, c, d = (node(n, topology=t) for n, t in zip("abcd", "xyxy", strict=True))
    assert order_members(Membership(LIMITS), [d, b, c, a]) == (a, c, b, d)
    assert order_members(settled(a, b), [a, b, c, d]) == (a, c, b, d)
    full = settled(a, b, settings=RendezvousSettings(2, 2))
    assert order_members(full, [c, b, a]) == (a, b)


def test_missing_node_ranks_are_named() -> None:
    settings = RendezvousSettings(3, 3, last_call_timeout=0.0, has_fixed_ranks=True)
    waits = reconcile(view(Membership(settings), node("a", rank_hint=1)))
    assert waits.reason == "1 of at least 3 nodes are here; missing: node ranks 0, 2"
