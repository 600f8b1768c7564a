"""The store is lost, is cut off or restarts empty, and the workers keep running."""

from __future__ import annotations

import signal
import sys
import time

import pytest
from etcd_server import needs_etcd
from hosts import PORT, Cluster, Host, member_flags, start_three_members
from jobs import WITHOUT_TORCH, Job, Node, check_consistent_world, generation_of, is_alive

pytestmark = pytest.mark.faults

QUICK = ("--rdzv-conf", "keep_alive_interval=0.2,keep_alive_max_attempt=5,last_call_timeout=0.3")
LEASE = 1.0
REMOTE = ["tcp", pytest.param("etcd", marks=needs_etcd)]


def hosted_at(*hosts: Host) -> tuple[str, ...]:
    """Return the flags of a job whose agents host the store on one of these hosts."""
    return ("--rdzv-endpoint", ",".join(f"{host.address}:{PORT}" for host in hosts), *QUICK)


def finish_job(job: Job, nodes: list[Node]) -> None:
    """Let the workers exit, and check that these nodes succeed."""
    job.finish()
    assert [node.exit_code() for node in nodes] == [0] * len(nodes), job.logs


def without_host(reports: list[dict[str, object]], host: Host) -> list[dict[str, object]]:
    """Return the reports of the workers on other hosts."""
    return [report for report in reports if report["node"] != host.name]


# -- one endpoint ------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["killed", "without power"])
def test_workers_keep_running_until_the_agent_that_hosts_the_store_is_back(
    cluster: Cluster, how: str
) -> None:
    first, *_ = hosts = cluster.add_hosts(3)
    # The last call is longer than the nodes of the generation take to reach the store again.
    conf = ("--rdzv-conf", "keep_alive_interval=0.2,keep_alive_max_attempt=5")
    flags = ("--nnodes", "1:3", "--rdzv-endpoint", f"{first.address}:{PORT}", *conf)
    agents = [host.start_agent(*flags) for host in hosts]
    before = cluster.job.wait_for_world(3)
    if how == "killed":
        agents[0].kill()
    else:
        first.power_off()
    cluster.job.check_unchanged(without_host(before, first), 3 * LEASE)
    if how == "without power":
        first.power_on()
    again = first.start_agent(*flags)
    after = cluster.job.wait_for_world(3, after=generation_of(before))
    check_consistent_world(after)
    cluster.check_reachable(after)
    # It is the same job: its generations continue, and the resize uses no restart.
    assert generation_of(after) == generation_of(before) + 1
    assert {report["TORCHELASTIC_RESTART_COUNT"] for report in after} == {"0"}
    # The node that joins gets the last rank.
    remaining = [report["node"] for report in without_host(before, first)]
    assert [report["node"] for report in after] == [*remaining, first.name]
    finish_job(cluster.job, [again, *agents[1:]])


def restart_store(job: Job, endpoint: str) -> Node:
    command = (sys.executable, "-m", "elasticlib.launch.cli", "store", "--bind", endpoint)
    return job.start("store-again", *command)


def start_two_agents(job: Job, *more: str) -> tuple[str, list[Node]]:
    """Start a store, the first process of the job, and two agents; return endpoint and agents."""
    endpoint = job.start_store(at=job.reserve_port())
    flags = ("--nnodes", "1:2", "--rdzv-endpoint", endpoint, "--rdzv-conf", "is_host=false")
    return endpoint, [
        job.start_agent(name, *flags, *QUICK, *more, PYTHONPATH=WITHOUT_TORCH) for name in "ab"
    ]


def test_a_store_that_restarts_empty_has_no_effect_on_the_job(job: Job) -> None:
    endpoint, agents = start_two_agents(job)
    before = job.wait_for_world(2)
    job.nodes[0].kill()
    job.check_unchanged(before, 2 * LEASE)
    restart_store(job, endpoint)
    job.check_unchanged(before, 4 * LEASE)
    finish_job(job, agents)


def test_a_node_that_was_killed_while_the_store_was_down_is_detected_when_it_is_back(
    job: Job,
) -> None:
    endpoint, agents = start_two_agents(job)
    before = job.wait_for_world(2)
    job.nodes[0].kill()
    killed = agents.pop([agent.name for agent in agents].index(before[0]["node"]))
    killed.kill()
    job.check_unchanged(before[1:], 2 * LEASE)
    restart_store(job, endpoint)
    (after,) = job.wait_for_world(1, after=generation_of(before))
    assert after["node"] == before[1]["node"]
    assert int(after["ELASTICLIB_GENERATION"]) == generation_of(before) + 1
    assert after["TORCHELASTIC_RESTART_COUNT"] == "0"
    finish_job(job, agents)


def test_agents_fail_after_store_grace_and_name_the_store(job: Job) -> None:
    endpoint, agents = start_two_agents(job, "--store-grace", "3")
    before = job.wait_for_world(2)
    job.nodes[0].kill()
    lost_at = time.monotonic()
    job.check_unchanged(before, 2.0)
    assert [agent.exit_code() for agent in agents] == [1, 1], job.logs
    assert 2.5 < time.monotonic() - lost_at < 15.0
    for agent in agents:
        errors = [line for line in agent.text.splitlines() if line.startswith("elasticrun:")]
        (error,) = errors
        assert endpoint in error
        assert "--store-grace" in error
        assert "Traceback" not in agent.text
    assert not any(is_alive(report["pid"]) for report in before)


@pytest.mark.parametrize("backend", REMOTE)
def test_workers_keep_running_while_the_host_of_the_store_is_cut_off(
    cluster: Cluster, backend: str
) -> None:
    """The store keeps running. When it can be reached again, all leases in it have expired."""
    conf = ("--rdzv-conf", "keep_alive_interval=0.6,keep_alive_max_attempt=5")
    flags = (*cluster.start_rendezvous(backend), *conf, "--nnodes", "1:2")
    _, other = hosts = cluster.add_hosts(2)
    agents = [host.start_agent(*flags) for host in hosts]
    before = cluster.job.wait_for_world(2)
    store = cluster.hosts["store"]
    store.link_down()
    other.link_down()
    # This is longer than a connection lasts without answers, so that all nodes connect again.
    cluster.job.check_unchanged(before, 6.0)
    store.link_up()
    # All nodes are back within a lease, so that the first one does not lose the others.
    cluster.job.check_unchanged(before, 0.5)
    other.link_up()
    cluster.job.check_unchanged(before, 6.0)
    finish_job(cluster.job, agents)


# -- a list of endpoints -----------------------------------------------------------------------


def test_the_next_endpoint_of_the_list_hosts_the_store_when_the_first_is_lost(
    cluster: Cluster,
) -> None:
    first, second, third = cluster.add_hosts(3)
    flags = ("--nnodes", "2:3", *hosted_at(first, second))
    agents = {host.name: host.start_agent(*flags) for host in (first, second, third)}
    before = cluster.job.wait_for_world(3)
    first.power_off()
    without = cluster.job.wait_for_world(2, after=generation_of(before))
    check_consistent_world(without)
    cluster.check_reachable(without)
    assert generation_of(without) == generation_of(before) + 1
    assert {report["node"] for report in without} == {second.name, third.name}
    assert {report["TORCHELASTIC_RESTART_COUNT"] for report in without} == {"0"}
    first.power_on()
    # The node could host the store at its own endpoint, but the job uses the next one.
    agents[first.name] = first.start_agent(*flags)
    again = cluster.job.wait_for_world(3, after=generation_of(without))
    check_consistent_world(again)
    cluster.check_reachable(again)
    assert again[2]["node"] == first.name
    finish_job(cluster.job, list(agents.values()))


def test_one_of_two_nodes_without_a_quorum_fails_with_the_reason(cluster: Cluster) -> None:
    first, second = cluster.add_hosts(2)
    flags = ("--nnodes", "1:2", *hosted_at(first, second), "--store-grace", "8")
    agents = [host.start_agent(*flags) for host in (first, second)]
    before = cluster.job.wait_for_world(2)
    first.power_off()
    assert agents[1].exit_code() == 1, agents[1].text
    (error,) = [line for line in agents[1].text.splitlines() if line.startswith("elasticrun:")]
    assert "quorum" in error
    assert "Traceback" not in agents[1].text
    assert not cluster.job.reports(generation_of(before) + 1)


def test_one_of_two_nodes_continues_with_quorum_any(cluster: Cluster) -> None:
    first, second = cluster.add_hosts(2)
    flags = ("--nnodes", "1:2", *hosted_at(first, second), "--rdzv-conf", "quorum=any")
    agents = [host.start_agent(*flags) for host in (first, second)]
    before = cluster.job.wait_for_world(2)
    first.power_off()
    (after,) = cluster.job.wait_for_world(1, after=generation_of(before))
    assert after["node"] == second.name
    assert int(after["ELASTICLIB_GENERATION"]) == generation_of(before) + 1
    finish_job(cluster.job, agents[1:])


def test_the_larger_part_of_a_job_that_is_cut_in_two_continues(cluster: Cluster) -> None:
    first, second, third = hosts = cluster.add_hosts(3)
    flags = ("--nnodes", "1:3", *hosted_at(first, second))
    agents = [host.start_agent(*flags) for host in hosts]
    before = cluster.job.wait_for_world(3)
    first.link_down()
    without = cluster.job.wait_for_world(2, after=generation_of(before))
    check_consistent_world(without)
    cluster.check_reachable(without)
    assert {report["node"] for report in without} == {second.name, third.name}
    # The first node still hosts the old store, and sees the leases of the others expire.
    cluster.job.check_unchanged(without, 3 * LEASE)
    later = range(generation_of(before) + 2, generation_of(before) + 9)
    reports = [report for number in later for report in cluster.job.reports(number)]
    assert not reports, "the node that was cut off continued, too"
    reports = cluster.job.reports(generation_of(without))
    assert first.name not in {report["node"] for report in reports}
    first.link_up()
    again = cluster.job.wait_for_world(3, after=generation_of(without))
    check_consistent_world(again)
    cluster.check_reachable(again)
    assert again[2]["node"] == first.name
    finish_job(cluster.job, agents)


def test_a_new_agent_in_the_smaller_part_does_not_start_a_second_job(cluster: Cluster) -> None:
    """The smaller part fails, and a supervisor such as systemd starts its agent again."""
    first, second = cluster.add_hosts(2)
    flags = ("--nnodes", "1:2", *hosted_at(first, second), "--store-grace", "3")
    agents = [first.start_agent(*flags), second.start_agent(*flags)]
    before = cluster.job.wait_for_world(2)
    first.link_down()
    assert agents[1].exit_code() == 1
    again = second.start_agent(*flags, name="again")
    again.wait_for_log("begins with more than half")
    first.link_up()
    after = cluster.job.wait_for_world(2, after=generation_of(before))
    check_consistent_world(after)
    assert [report["node"] for report in after] == [first.name, "again"]
    finish_job(cluster.job, [agents[0], again])


@pytest.mark.parametrize("num_endpoints", [1, 2])
def test_a_store_host_that_gets_sigterm_serves_until_the_others_have_continued(
    cluster: Cluster, num_endpoints: int
) -> None:
    first, second = hosts = cluster.add_hosts(2)
    grace = ("--store-grace", "8" if num_endpoints > 1 else "3")
    flags = ("--nnodes", "1:2", *hosted_at(*hosts[:num_endpoints]), *grace)
    agents = [first.start_agent(*flags)]
    agents[0].wait_for_log("hosts the store")
    agents.append(second.start_agent(*flags))
    before = cluster.job.wait_for_world(2)
    agents[0].signal(signal.SIGTERM)
    assert agents[0].exit_code() == 128 + signal.SIGTERM
    (after,) = cluster.job.wait_for_world(1, after=generation_of(before))
    assert after["node"] == second.name
    finish_job(cluster.job, agents[1:])


def test_a_store_host_that_gets_sigterm_does_not_wait_for_nodes_that_cannot_continue(
    cluster: Cluster,
) -> None:
    first, second = cluster.add_hosts(2)
    flags = ("--nnodes", "2", *hosted_at(first), "--store-grace", "1")
    agents = [host.start_agent(*flags) for host in (first, second)]
    cluster.job.wait_for_world(2)
    agents[0].signal(signal.SIGTERM)
    assert agents[0].exit_code(10.0) == 128 + signal.SIGTERM
    assert agents[1].exit_code() == 1


# -- etcd --------------------------------------------------------------------------------------


@needs_etcd
def test_a_silent_etcd_member_delays_agents_by_at_most_a_lease(cluster: Cluster) -> None:
    dead, *others = hosts = cluster.add_hosts(3)
    start_three_members(cluster, hosts)
    # All agents use the first member of the list as long as it answers.
    agents = [host.start_agent(*member_flags(hosts), *QUICK, "--nnodes", "1:3") for host in hosts]
    before = cluster.job.wait_for_world(3)
    dead.power_off()
    after = cluster.job.wait_for_world(2, after=generation_of(before), seconds=10.0)
    check_consistent_world(after)
    assert {report["node"] for report in after} == {host.name for host in others}
    finish_job(cluster.job, agents[1:])
