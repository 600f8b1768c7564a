"""Memberships, node records and views for tests of the pure rendezvous code."""

from __future__ import annotations

import attrs

from elasticlib.options import RendezvousSettings
from elasticlib.rendezvous.blame import Evidence, FailureKind, Verdict, blame
from elasticlib.rendezvous.membership import Membership, NodeRecord, form_generation
from elasticlib.rendezvous.reconcile import LeaderView, ReconcileResult, reconcile

SETTINGS = RendezvousSettings(2, 4, max_restarts=1, last_call_timeout=2.0)


def create_node(name: str, **fields: object) -> NodeRecord:
    plain = NodeRecord(id=f"{name}-1", host=name, address="127.0.0.1", slots=1)
    return attrs.evolve(plain, **fields)


def create_generation(
    *members: NodeRecord, settings: RendezvousSettings = SETTINGS, **fields: object
) -> Membership:
    """Return an active first generation with the given members."""
    document = form_generation(Membership(settings, "one"), members, charged=False, nonce="m")
    return attrs.evolve(document, **fields)


def create_view(document: Membership | None, *live: NodeRecord, **fields: object) -> LeaderView:
    """Return what the first of the live nodes sees as leader. `None` is a store without a job."""
    settings = SETTINGS if document is None else document.settings
    me = live[0].id if live else "no-node"
    return attrs.evolve(
        LeaderView(me, settings, document, live, nonce="next", wall_time="now"), **fields
    )


def decide(document: Membership | None, *live: NodeRecord, **fields: object) -> ReconcileResult:
    """Return the decision of the first of the live nodes as leader."""
    return reconcile(create_view(document, *live, **fields))


A, B, C, D, E = (create_node(name) for name in "abcde")


def mark_stopped(member: NodeRecord, membership_id: str = "1.m") -> NodeRecord:
    """Return the record of a node that has stopped its workers and waits for a generation."""
    return attrs.evolve(member, stopped_membership_id=membership_id)


def mark_running(document: Membership) -> list[NodeRecord]:
    """Return the records of all members of a generation whose workers run."""
    return [
        attrs.evolve(
            member, membership_id=document.membership_id, group_rank=rank, may_run_workers=True
        )
        for rank, member in enumerate(document.members)
    ]


def with_failure(
    member: NodeRecord,
    text: str,
    kind: FailureKind = FailureKind.RAISED,
    *,
    membership_id: str = "1.m",
) -> NodeRecord:
    """Return the record of a node whose workers failed."""
    return attrs.evolve(member, evidence=Evidence(kind, text), evidence_of=membership_id)


def failed_by(member: NodeRecord, text: str, kind: FailureKind = FailureKind.RAISED) -> Verdict:
    """Return the verdict on a failure that only this node has reported."""
    verdict = blame([Evidence(kind, text, node=member.id, host=member.host)])
    assert verdict is not None
    return verdict
