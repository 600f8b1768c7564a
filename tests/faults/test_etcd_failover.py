"""A job goes on while etcd's members die, elect another leader, and come back."""

from __future__ import annotations

import pytest
from etcd_server import needs_etcd
from hosts import ETCD_PORT, Cluster, Host, at_members, leader, three_members
from jobs import check_consistent_world, generation_of

from elasticlib.testing.waiting import wait_until

pytestmark = [pytest.mark.faults, needs_etcd]

QUICK = "keep_alive_interval=0.4,keep_alive_max_attempt=5,last_call_timeout=0.3"
LEASE = 2.0


def flags(hosts: list[Host], nodes: str) -> tuple[str, ...]:
    return (*at_members(hosts), "--rdzv-conf", QUICK, "--nnodes", nodes)


def test_workers_go_on_when_the_leading_member_is_killed(cluster: Cluster) -> None:
    hosts = cluster.grow(3)
    members = three_members(cluster, hosts)
    dead = leader(members)
    # Asked first, so that all must find another.
    ordered = sorted(hosts, key=lambda host: host.name != dead)
    nodes = [host.run(*flags(ordered, "1:3")) for host in hosts]
    before = cluster.job.wait_for_world(3)
    members.pop(dead).kill()
    wait_until("another leader", lambda: leader(members))
    cluster.job.check_unchanged(before, 1.5 * LEASE)
    assert not cluster.job.places(generation_of(before) + 1)
    # And it can still change: a member's death is noticed as before.
    nodes.pop().kill()
    cluster.job.wait_for_world(2, after=generation_of(before))
    cluster.job.finish()
    assert [node.exit_code() for node in nodes] == [0, 0]


def test_the_job_goes_on_without_a_host_that_took_the_leading_member_with_it(
    cluster: Cluster,
) -> None:
    hosts = cluster.grow(3)
    dead = leader(three_members(cluster, hosts))
    # Asked last: what becomes of those who ask a silent member is test_store_loss's.
    ordered = sorted(hosts, key=lambda host: host.name == dead)
    nodes = {host.name: host.run(*flags(ordered, "1:3")) for host in hosts}
    before = cluster.job.wait_for_world(3)
    del nodes[dead]
    cluster.hosts[dead].power_off()
    places = cluster.job.wait_for_world(2, after=generation_of(before))
    check_consistent_world(places)
    cluster.check_reachable(places)
    assert {place["node"] for place in places} == set(nodes)
    assert {place["TORCHELASTIC_RESTART_COUNT"] for place in places} == {"0"}
    cluster.job.finish()
    assert [node.exit_code() for node in nodes.values()] == [0, 0]


def test_workers_go_on_while_etcd_is_away_and_comes_back_with_its_data(cluster: Cluster) -> None:
    home = cluster.host("store")
    server = cluster.etcd(home, f"{home.address}:{ETCD_PORT}")
    server.start()
    nodes = [host.run(*flags([home], "1:2")) for host in cluster.grow(2)]
    before = cluster.job.wait_for_world(2)
    server.kill()
    cluster.job.check_unchanged(before, 1.5 * LEASE)
    server.start()
    cluster.job.check_unchanged(before, 1.5 * LEASE)
    assert not cluster.job.places(generation_of(before) + 1)
    # And it can still change: a member's death is noticed as before.
    nodes.pop(0).kill()
    (after,) = cluster.job.wait_for_world(1, after=generation_of(before))
    assert after["node"] == nodes[0].name
    cluster.job.finish()
    assert nodes[0].exit_code() == 0
