"""Where nodes find each other: IPv6, names that mean something else on each host, shared ports."""

from __future__ import annotations

import pytest
from hosts import NETWORK, PORT, Cluster
from jobs import PROGRAMS, check_consistent_world, generation_of

pytestmark = pytest.mark.faults

QUICK = ("--rdzv-conf", "last_call_timeout=0.3")
SHORT_LEASE = ("--rdzv-conf", "keep_alive_interval=0.2,last_call_timeout=0.3")


def test_a_job_meets_over_ipv6_and_its_workers_meet_there_too(cluster: Cluster) -> None:
    hosts = cluster.add_hosts(2)
    flags = ("--nnodes", "2", "--rdzv-endpoint", f"[{hosts[0].address6}]:{PORT}", *QUICK)
    nodes = [host.start_agent(*flags) for host in hosts]
    reports = cluster.job.wait_for_world(2)
    check_consistent_world(reports)
    assert reports[0]["MASTER_ADDR"] == cluster.host_of(reports[0]).address6
    cluster.job.finish()
    assert [node.exit_code() for node in nodes] == [0, 0]


def test_torch_sums_over_ipv6_between_hosts(cluster: Cluster) -> None:
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
def test_a_host_whose_own_name_is_loopback_to_itself_serves_the_others(
    cluster: Cluster, first: str
) -> None:
    """As Debian writes /etc/hosts: h1 is 127.0.1.1 on h1, and its real address elsewhere."""
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


def test_two_jobs_on_one_port_are_told_apart_by_name(cluster: Cluster) -> None:
    one, other = cluster.add_hosts(2)
    flags = ("--nnodes", "1:2", "--rdzv-endpoint", f"{one.address}:{PORT}", *QUICK)
    first = one.start_agent(*flags, "--rdzv-id", "ada")
    reports = cluster.job.wait_for_world(1)
    second = other.start_agent(*flags, "--rdzv-id", "grace")
    assert second.exit_code(20.0) == 1
    told = [line for line in second.text.splitlines() if "ada" in line]
    assert told
    assert all("grace" in line for line in told), second.text
    assert "Traceback" not in second.text
    cluster.job.finish()
    assert first.exit_code() == 0
    assert not cluster.job.reports(generation_of(reports) + 1)


def test_a_name_that_comes_to_mean_a_host_only_after_its_agent_started_is_hosted_there(
    cluster: Cluster,
) -> None:
    """As DNS does with a container that was just started: it says something old, or nothing (see
    tests/integrations/test_kubernetes.py)."""
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
        lines = [line.partition(" ")[2] for line in node.text.splitlines() if "another pr" in line]
        assert len(set(lines)) == len(lines)


def test_the_first_of_fixed_ranks_waits_for_its_own_name_to_mean_it(cluster: Cluster) -> None:
    hosts = [cluster.add_host("train-0"), cluster.add_host("train-1")]
    for host in hosts:
        host.set_known_names({"train-0.train": f"{NETWORK}.99"})
    place = ("--master-addr", "train-0.train", "--rdzv-conf", "keep_alive_interval=0.2")
    nodes = [
        host.start_agent("--nnodes=2", f"--node-rank={n}", *place) for n, host in enumerate(hosts)
    ]
    nodes[0].wait_for_log("will host the store at train-0.train:29500 once that name resolves")
    for host in hosts:
        host.set_known_names({"train-0.train": hosts[0].address})
    check_consistent_world(cluster.job.wait_for_world(2, seconds=30.0))
    cluster.job.finish()
    assert [node.exit_code() for node in nodes] == [0, 0]


def test_a_host_that_must_serve_at_anothers_name_says_so_at_once(cluster: Cluster) -> None:
    one, _ = cluster.add_hosts(2)
    node = one.start_agent(
        "--nnodes", "2", "--node-rank=0", "--master-addr=h2", f"--master-port={PORT}"
    )
    assert node.exit_code() == 2
    assert f"must host the store at h2:{PORT}, but cannot" in node.text
    assert "set --rdzv-conf is_host=true on this node" in node.text


def test_who_hosts_alone_by_an_old_meaning_of_the_name_goes_where_it_has_come_to_lead(
    cluster: Cluster,
) -> None:
    """As where DNS still says an address of the first pod's that is another pod's by now."""
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


def test_a_name_of_several_machines_is_refused(cluster: Cluster) -> None:
    one, two = cluster.add_hosts(2)
    two.add_host_lines(f"{one.address} train", f"{two.address} train")
    node = two.start_agent("--nnodes", "2", "--rdzv-endpoint", f"train:{PORT}")
    assert node.exit_code() == 2
    assert f"several machines, this one ({two.address}) and others ({one.address})" in node.text
