"""Jobs in a store for tests of observers: members and a spare, which are all alive."""

from __future__ import annotations

from collections.abc import Sequence

from elasticlib.rendezvous.membership import (
    Leader,
    Membership,
    NodeRecord,
    RendezvousSettings,
    form_generation,
)
from elasticlib.rendezvous.rank_assignment import shard_members
from elasticlib.rendezvous.store_layout import StoreKeys, encode, encode_shard, encode_state
from elasticlib.stores.interface import Store

RUN_ID = "job"
JOB = StoreKeys(RUN_ID)
MEMBERS = tuple(NodeRecord(f"id{n}", f"host{n}", "", 1) for n in range(3))
SPARE = NodeRecord("id9", "host9", "", 1)


def write_job(
    store: Store,
    members: Sequence[NodeRecord] = MEMBERS,
    others: Sequence[NodeRecord] = (SPARE,),
    *,
    incarnation: str = "run",
) -> Membership:
    """Write a job with these members and other nodes, which are all alive."""
    waiting = Membership(RendezvousSettings(1, len(members)), incarnation)
    membership = form_generation(waiting, members, charged=False, nonce="m")
    for number, rows in shard_members(membership).items():
        store.set(JOB.shard(membership.membership_id, number), encode_shard(rows))
    for node in (*members, *others):
        store.set(JOB.node(node.id), encode(node), ttl=60.0)
    store.set(JOB.leader, encode(Leader(members[0].id, members[0].host)), ttl=60.0)
    store.set(JOB.job_name, b"")
    store.set(JOB.state, encode_state(membership))
    return membership
