"""Who may wait, who stands beside whom, and who is missed by its rank."""

from __future__ import annotations

from test_decide import LIMITS, A, B, C, D, E, node, settled, view

from elasticlib.rendezvous.decide import decide
from elasticlib.rendezvous.document import Document, Limits
from elasticlib.rendezvous.ranks import in_rank_order


def test_more_spares_than_are_wanted_are_turned_away() -> None:
    limits = Limits(1, 2, spares=1)
    document = settled(A, B, limits=limits)
    refused = decide(view(document, A, B, C, D, E)).write
    assert refused is not None
    assert refused.surplus == (D.id, E.id)
    assert decide(view(refused, A, B, C, D, E)).reason == "generation 1 stands, 1 spare"


def test_nodes_of_one_topology_stand_together_and_no_survivor_gives_way() -> None:
    a, b, c, d = (node(n, topology=t) for n, t in zip("abcd", "xyxy", strict=True))
    assert in_rank_order(Document(LIMITS), [d, b, c, a]) == (a, c, b, d)
    assert in_rank_order(settled(a, b), [a, b, c, d]) == (a, c, b, d)
    full = settled(a, b, limits=Limits(2, 2))
    assert in_rank_order(full, [c, b, a]) == (a, b)


def test_missing_node_ranks_are_named() -> None:
    limits = Limits(3, 3, last_call=0.0, fixed_ranks=True)
    waits = decide(view(Document(limits), node("a", hint=1)))
    assert waits.reason == "1 of at least 3 nodes are here; missing: node ranks 0, 2"
