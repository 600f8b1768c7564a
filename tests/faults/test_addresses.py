"""Nodes connect over IPv6, by names that differ in meaning between hosts, and at one port."""

from __future__ import annotations

import re

import pytest
from hosts import NETWORK, PORT, Cluster
from jobs import PROGRAMS, check_consistent_world, generation_of

pytestmark = pytest.mark.faults

QUICK = ("--rdzv-conf", "last_call_timeout=0.3")
SHORT_LEASE = ("--rdzv-conf", "keep_alive_interval=0.2,last_call_timeout=0.3")


def test_agents_and_workers_connect_over_ipv6(cluster: Cluster) -> None:
    hosts = cluster.add_hosts(2)
    flags = ("--nnodes", "2", "--rdzv-endpoint", f"[{hosts[0].address6}]:{PORT}", *QUICK)
    nodes = [host.start_agent(*flags) for host in hosts]
    reports = cluster.job.wait_for_world(2)
    check_consistent_world(reports)
    assert reports[0]["MASTER_ADDR"] == cluster.host_of(reports[0]).address6
    cluster.job.finish()
    assert [node.exit_code() for node in nodes] == [0, 0]


def test_all_reduce_between_hosts_works_over_ipv6(cluster: Cluster) -> None:
    hosts = cluster.add_hosts(2)
    for host in hosts:
        host.set_known_names({other.name: other.address6 for other in hosts})
    flags = ("--nnodes", "2", "--rdzv-endpoint", f"[{hosts[0].address6}]:{PORT}", *QUICK)
    command = cluster.job.agent_command(*flags, program=str(PROGRAMS / "allreduce.py"))
    nodes = [host.start(host.name, *command) for host in hosts]
    cluster.job.wait_for_world(2)
    cluster.job.finish()
    assert [node.exit_code() for node in nodes] == [0, 0]


@pytest.mark.parametrize("first", ["the named host", "another host"])
def test_a_host_that_resolves_its_own_name_to_loopback_serves_the_others(
    cluster: Cluster, first: str
) -> None:
    """Debian writes /etc/hosts like this: on h1, the name h1 is 127.0.1.1."""
    hosts = cluster.add_hosts(3)
    for host in hosts:
        names = {other.name: other.address for other in hosts}
        host.set_known_names({**names, host.name: "127.0.1.1"})
    flags = ("--nnodes", "3", "--rdzv-endpoint", f"h1:{PORT}", *QUICK)
    order = hosts if first == "the named host" else hosts[::-1]
    nodes = [host.start_agent(*flags) for host in order]
    reports = cluster.job.wait_for_world(3, seconds=30.0)
    check_consistent_world(reports)
    cluster.check_reachable(reports)
    cluster.job.finish()
    assert [node.exit_code() for node in nodes] == [0, 0, 0]


def test_an_agent_at_the_store_of_another_job_fails_with_both_job_ids(cluster: Cluster) -> None:
    one, other = cluster.add_hosts(2)
    flags = ("--nnodes", "1:2", "--rdzv-endpoint", f"{one.address}:{PORT}", *QUICK)
    first = one.start_agent(*flags, "--rdzv-id", "ada")
    reports = cluster.job.wait_for_world(1)
    second = other.start_agent(*flags, "--rdzv-id", "grace")
    assert second.exit_code(20.0) == 1
    errors = [line for line in second.text.splitlines() if "ada" in line]
    assert errors
    assert all("grace" in line for line in errors), second.text
    assert "Traceback" not in second.text
    cluster.job.finish()
    assert first.exit_code() == 0
    assert not cluster.job.reports(generation_of(reports) + 1)


def test_a_node_hosts_the_store_once_the_endpoint_name_resolves_to_it(
    cluster: Cluster,
) -> None:
    """DNS may have an old address of a container that was just started, or none.

    tests/integrations/test_kubernetes.py tests a name without any address.
    """
    hosts = cluster.add_hosts(2)
    for host in hosts:
        host.set_known_names({"train-0.train": f"{NETWORK}.99"})
    flags = ("--nnodes", "2", "--rdzv-endpoint", f"train-0.train:{PORT}", *SHORT_LEASE)
    nodes = [host.start_agent(*flags) for host in hosts]
    for node in nodes:
        node.wait_for_log("waiting for the store at ")
        node.wait_for_log("the store is unreachable: .* retries for 600 s")
    for host in hosts:
        host.set_known_names({"train-0.train": hosts[0].address})
    check_consistent_world(cluster.job.wait_for_world(2, seconds=30.0))
    assert "this node hosts the store" in nodes[0].text
    cluster.job.finish()
    assert [node.exit_code() for node in nodes] == [0, 0]
    for node in nodes:
        # Each decision is logged once, although the agents try again and again.
        decisions = re.findall(r"waiting for the store at .*", node.text)
        assert decisions
        assert len(set(decisions)) == len(decisions), node.text


def test_static_rank_0_waits_until_the_master_name_resolves_to_it(cluster: Cluster) -> None:
    hosts = [cluster.add_host("train-0"), cluster.add_host("train-1")]
    for host in hosts:
        host.set_known_names({"train-0.train": f"{NETWORK}.99"})
    master = ("--master-addr", "train-0.train", "--rdzv-conf", "keep_alive_interval=0.2")
    nodes = [
        host.start_agent("--nnodes=2", f"--node-rank={rank}", *master)
        for rank, host in enumerate(hosts)
    ]
    nodes[0].wait_for_log("will host the store at train-0.train:29500 once that name resolves")
    for host in hosts:
        host.set_known_names({"train-0.train": hosts[0].address})
    check_consistent_world(cluster.job.wait_for_world(2, seconds=30.0))
    cluster.job.finish()
    assert [node.exit_code() for node in nodes] == [0, 0]


def test_rank_0_that_cannot_host_at_the_master_address_fails_at_once(cluster: Cluster) -> None:
    one, _ = cluster.add_hosts(2)
    node = one.start_agent(
        "--nnodes", "2", "--node-rank=0", "--master-addr=h2", f"--master-port={PORT}"
    )
    assert node.exit_code() == 2
    assert f"must host the store at h2:{PORT}, but cannot" in node.text
    assert "set --rdzv-conf is_host=true on this node" in node.text


def test_a_node_that_hosts_at_an_outdated_address_joins_the_store_at_the_new_one(
    cluster: Cluster,
) -> None:
    """DNS may still have an address that was the first pod's and is now that of another pod."""
    hosts = cluster.add_hosts(2)
    for host in hosts:
        host.set_known_names({"train-0.train": host.address})
    flags = ("--nnodes", "1:2", "--rdzv-endpoint", f"train-0.train:{PORT}", *SHORT_LEASE)
    nodes = [host.start_agent(*flags) for host in hosts]
    for node in nodes:
        node.wait_for_log("this node hosts the store")
    hosts[1].set_known_names({"train-0.train": hosts[0].address})
    nodes[1].wait_for_log("joins the store there")
    check_consistent_world(cluster.job.wait_for_world(2, seconds=30.0))
    cluster.job.finish()
    assert [node.exit_code() for node in nodes] == [0, 0]


def test_an_endpoint_name_that_resolves_to_several_machines_is_rejected(cluster: Cluster) -> None:
    one, two = cluster.add_hosts(2)
    two.add_host_lines(f"{one.address} train", f"{two.address} train")
    node = two.start_agent("--nnodes", "2", "--rdzv-endpoint", f"train:{PORT}")
    assert node.exit_code() == 2
    assert f"several machines, this one ({two.address}) and others ({one.address})" in node.text
