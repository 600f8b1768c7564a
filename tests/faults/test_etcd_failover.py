"""The job continues while etcd members are killed, elect another leader, and are restarted."""

from __future__ import annotations

import pytest
from etcd_server import needs_etcd
from hosts import ETCD_PORT, Cluster, Host, find_leader, member_flags, start_three_members
from jobs import check_consistent_world, generation_of

from elasticlib.testing.waiting import wait_until

pytestmark = [pytest.mark.faults, needs_etcd]

QUICK = "keep_alive_interval=0.4,keep_alive_max_attempt=5,last_call_timeout=0.3"
LEASE = 2.0


def agent_flags(hosts: list[Host], nodes: str) -> tuple[str, ...]:
    return (*member_flags(hosts), "--rdzv-conf", QUICK, "--nnodes", nodes)


def test_workers_keep_running_when_the_etcd_leader_is_killed(cluster: Cluster) -> None:
    hosts = cluster.add_hosts(3)
    members = start_three_members(cluster, hosts)
    dead = find_leader(members)
    # All agents use this member first, so that all have to switch to another.
    ordered = sorted(hosts, key=lambda host: host.name != dead)
    nodes = [host.start_agent(*agent_flags(ordered, "1:3")) for host in hosts]
    before = cluster.job.wait_for_world(3)
    members.pop(dead).kill()
    wait_until("another leader", lambda: find_leader(members))
    cluster.job.check_unchanged(before, 1.5 * LEASE)
    assert not cluster.job.reports(generation_of(before) + 1)
    # The job can still change: the agents detect that one of them was killed.
    nodes.pop().kill()
    cluster.job.wait_for_world(2, after=generation_of(before))
    cluster.job.finish()
    assert [node.exit_code() for node in nodes] == [0, 0]


def test_the_job_continues_without_the_host_of_the_etcd_leader(
    cluster: Cluster,
) -> None:
    hosts = cluster.add_hosts(3)
    dead = find_leader(start_three_members(cluster, hosts))
    # No agent uses this member first. test_store_loss.py tests agents with a silent member.
    ordered = sorted(hosts, key=lambda host: host.name == dead)
    nodes = {host.name: host.start_agent(*agent_flags(ordered, "1:3")) for host in hosts}
    before = cluster.job.wait_for_world(3)
    del nodes[dead]
    cluster.hosts[dead].power_off()
    reports = cluster.job.wait_for_world(2, after=generation_of(before))
    check_consistent_world(reports)
    cluster.check_reachable(reports)
    assert {report["node"] for report in reports} == set(nodes)
    assert {report["TORCHELASTIC_RESTART_COUNT"] for report in reports} == {"0"}
    cluster.job.finish()
    assert [node.exit_code() for node in nodes.values()] == [0, 0]


def test_workers_keep_running_while_etcd_is_down_and_restarts_with_its_data(
    cluster: Cluster,
) -> None:
    home = cluster.add_host("store")
    server = cluster.create_etcd(home, f"{home.address}:{ETCD_PORT}")
    server.start()
    nodes = [host.start_agent(*agent_flags([home], "1:2")) for host in cluster.add_hosts(2)]
    before = cluster.job.wait_for_world(2)
    server.kill()
    cluster.job.check_unchanged(before, 1.5 * LEASE)
    server.start()
    cluster.job.check_unchanged(before, 1.5 * LEASE)
    assert not cluster.job.reports(generation_of(before) + 1)
    # The job can still change: the agents detect that one of them was killed.
    nodes.pop(0).kill()
    (after,) = cluster.job.wait_for_world(1, after=generation_of(before))
    assert after["node"] == nodes[0].name
    cluster.job.finish()
    assert nodes[0].exit_code() == 0
