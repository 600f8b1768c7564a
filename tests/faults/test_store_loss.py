"""Row A6: the store dies, is cut off or comes back empty, and those who work go on working."""

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


def at(*hosts: Host) -> tuple[str, ...]:
    """The flags of a job that meets at these hosts, on which its own agents serve the store."""
    return ("--rdzv-endpoint", ",".join(f"{host.address}:{PORT}" for host in hosts), *QUICK)


def end_well(job: Job, nodes: list[Node]) -> None:
    job.finish()
    assert [node.exit_code() for node in nodes] == [0] * len(nodes), job.logs


def _others(reports: list[dict[str, object]], host: Host) -> list[dict[str, object]]:
    return [report for report in reports if report["node"] != host.name]


# -- one endpoint ------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["killed", "without power"])
def test_a6_workers_go_on_without_the_agent_that_hosts_the_store_until_it_is_back(
    cluster: Cluster, how: str
) -> None:
    first, *_ = hosts = cluster.add_hosts(3)
    # With a last call that is longer than those who remember take to come back.
    conf = ("--rdzv-conf", "keep_alive_interval=0.2,keep_alive_max_attempt=5")
    flags = ("--nnodes", "1:3", "--rdzv-endpoint", f"{first.address}:{PORT}", *conf)
    agents = [host.start_agent(*flags) for host in hosts]
    before = cluster.job.wait_for_world(3)
    if how == "killed":
        agents[0].kill()
    else:
        first.power_off()
    cluster.job.check_unchanged(_others(before, first), 3 * LEASE)
    if how == "without power":
        first.power_on()
    again = first.start_agent(*flags)
    after = cluster.job.wait_for_world(3, after=generation_of(before))
    check_consistent_world(after)
    cluster.check_reachable(after)
    # The same job: its numbers go on, and the return is a resize, which charges nobody.
    assert generation_of(after) == generation_of(before) + 1
    assert {report["TORCHELASTIC_RESTART_COUNT"] for report in after} == {"0"}
    # Who stayed keeps its place before who came.
    stayed = [report["node"] for report in _others(before, first)]
    assert [report["node"] for report in after] == [*stayed, first.name]
    end_well(cluster.job, [again, *agents[1:]])


def _store_process(job: Job, endpoint: str) -> Node:
    command = (sys.executable, "-m", "elasticlib.launch.cli", "store", "--bind", endpoint)
    return job.start("store-again", *command)


def _two_agents(job: Job, *more: str) -> tuple[str, list[Node]]:
    """Two nodes that meet in a store of its own process, which is the job's first node."""
    endpoint = job.start_store(at=job.reserve_port())
    flags = ("--nnodes", "1:2", "--rdzv-endpoint", endpoint, "--rdzv-conf", "is_host=false")
    return endpoint, [
        job.start_agent(name, *flags, *QUICK, *more, PYTHONPATH=WITHOUT_TORCH) for name in "ab"
    ]


def test_a_store_that_comes_back_empty_finds_the_job_as_it_was(job: Job) -> None:
    endpoint, agents = _two_agents(job)
    before = job.wait_for_world(2)
    job.nodes[0].kill()
    job.check_unchanged(before, 2 * LEASE)
    _store_process(job, endpoint)
    job.check_unchanged(before, 4 * LEASE)
    end_well(job, agents)


def test_a_node_that_died_while_the_store_was_away_is_missed_when_it_is_back(job: Job) -> None:
    endpoint, agents = _two_agents(job)
    before = job.wait_for_world(2)
    job.nodes[0].kill()
    dead = agents.pop([agent.name for agent in agents].index(before[0]["node"]))
    dead.kill()
    job.check_unchanged(before[1:], 2 * LEASE)
    _store_process(job, endpoint)
    (after,) = job.wait_for_world(1, after=generation_of(before))
    assert after["node"] == before[1]["node"]
    assert int(after["ELASTICLIB_GENERATION"]) == generation_of(before) + 1
    assert after["TORCHELASTIC_RESTART_COUNT"] == "0"
    end_well(job, agents)


def test_agents_give_a_store_up_after_its_grace_and_say_which(job: Job) -> None:
    endpoint, agents = _two_agents(job, "--store-grace", "3")
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
def test_workers_go_on_while_the_stores_host_is_cut_off(cluster: Cluster, backend: str) -> None:
    """The store itself lives on, and has seen all leases end for silence when it is back."""
    conf = ("--rdzv-conf", "keep_alive_interval=0.6,keep_alive_max_attempt=5")
    flags = (*cluster.start_rendezvous(backend), *conf, "--nnodes", "1:2")
    _, other = hosts = cluster.add_hosts(2)
    agents = [host.start_agent(*flags) for host in hosts]
    before = cluster.job.wait_for_world(2)
    store = cluster.hosts["store"]
    store.link_down()
    other.link_down()
    # Longer than a connection lasts that nobody answers, so that all connect anew.
    cluster.job.check_unchanged(before, 6.0)
    store.link_up()
    # Nobody is missed by who is back first, when all are back within a lease.
    cluster.job.check_unchanged(before, 0.5)
    other.link_up()
    cluster.job.check_unchanged(before, 6.0)
    end_well(cluster.job, agents)


# -- a list of endpoints -----------------------------------------------------------------------


def test_the_next_endpoint_of_the_list_serves_when_the_first_is_lost(cluster: Cluster) -> None:
    first, second, third = cluster.add_hosts(3)
    flags = ("--nnodes", "2:3", *at(first, second))
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
    # At its own endpoint nobody serves, and it could; the job is at the next.
    agents[first.name] = first.start_agent(*flags)
    again = cluster.job.wait_for_world(3, after=generation_of(without))
    check_consistent_world(again)
    cluster.check_reachable(again)
    assert again[2]["node"] == first.name
    end_well(cluster.job, list(agents.values()))


def test_one_of_two_does_not_go_on_by_itself_and_says_why(cluster: Cluster) -> None:
    first, second = cluster.add_hosts(2)
    flags = ("--nnodes", "1:2", *at(first, second), "--store-grace", "8")
    agents = [host.start_agent(*flags) for host in (first, second)]
    before = cluster.job.wait_for_world(2)
    first.power_off()
    assert agents[1].exit_code() == 1, agents[1].text
    (error,) = [line for line in agents[1].text.splitlines() if line.startswith("elasticrun:")]
    assert "quorum" in error
    assert "Traceback" not in agents[1].text
    assert not cluster.job.reports(generation_of(before) + 1)


def test_one_of_two_goes_on_by_itself_where_any_number_is_quorum(cluster: Cluster) -> None:
    first, second = cluster.add_hosts(2)
    flags = ("--nnodes", "1:2", *at(first, second), "--rdzv-conf", "quorum=any")
    agents = [host.start_agent(*flags) for host in (first, second)]
    before = cluster.job.wait_for_world(2)
    first.power_off()
    (after,) = cluster.job.wait_for_world(1, after=generation_of(before))
    assert after["node"] == second.name
    assert int(after["ELASTICLIB_GENERATION"]) == generation_of(before) + 1
    end_well(cluster.job, agents[1:])


def test_of_a_job_that_is_cut_in_two_the_greater_part_goes_on(cluster: Cluster) -> None:
    first, second, third = hosts = cluster.add_hosts(3)
    flags = ("--nnodes", "1:3", *at(first, second))
    agents = [host.start_agent(*flags) for host in hosts]
    before = cluster.job.wait_for_world(3)
    first.link_down()
    without = cluster.job.wait_for_world(2, after=generation_of(before))
    check_consistent_world(without)
    cluster.check_reachable(without)
    assert {report["node"] for report in without} == {second.name, third.name}
    # The first still has the store that all met in, and sees the others' leases end.
    cluster.job.check_unchanged(without, 3 * LEASE)
    said = [
        report for g in range(2, 9) for report in cluster.job.reports(generation_of(before) + g)
    ]
    assert not said, "the cut-off part went on too"
    assert first.name not in {p["node"] for p in cluster.job.reports(generation_of(without))}
    first.link_up()
    again = cluster.job.wait_for_world(3, after=generation_of(without))
    check_consistent_world(again)
    cluster.check_reachable(again)
    assert again[2]["node"] == first.name
    end_well(cluster.job, agents)


def test_a_node_that_remembers_nothing_begins_no_second_job_in_its_part(cluster: Cluster) -> None:
    """The lesser part gives up, as it should, and whoever looks after it starts it again."""
    first, second = cluster.add_hosts(2)
    flags = ("--nnodes", "1:2", *at(first, second), "--store-grace", "3")
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
    end_well(cluster.job, [agents[0], again])


@pytest.mark.parametrize("places", [1, 2])
def test_a_host_that_is_told_to_leave_serves_until_the_others_have_gone_on(
    cluster: Cluster, places: int
) -> None:
    first, second = hosts = cluster.add_hosts(2)
    flags = ("--nnodes", "1:2", *at(*hosts[:places]), "--store-grace", "8" if places > 1 else "3")
    agents = [first.start_agent(*flags)]
    agents[0].wait_for_log("hosts the store")
    agents.append(second.start_agent(*flags))
    before = cluster.job.wait_for_world(2)
    agents[0].signal(signal.SIGTERM)
    assert agents[0].exit_code() == 128 + signal.SIGTERM
    (after,) = cluster.job.wait_for_world(1, after=generation_of(before))
    assert after["node"] == second.name
    end_well(cluster.job, agents[1:])


def test_a_host_that_is_told_to_leave_waits_for_nobody_who_cannot_go_on(cluster: Cluster) -> None:
    first, second = cluster.add_hosts(2)
    flags = ("--nnodes", "2", *at(first), "--store-grace", "1")
    agents = [host.start_agent(*flags) for host in (first, second)]
    cluster.job.wait_for_world(2)
    agents[0].signal(signal.SIGTERM)
    assert agents[0].exit_code(10.0) == 128 + signal.SIGTERM
    assert agents[1].exit_code() == 1


# -- etcd --------------------------------------------------------------------------------------


@needs_etcd
def test_a_silent_member_of_etcd_keeps_nobody_for_longer_than_a_lease(cluster: Cluster) -> None:
    dead, *others = hosts = cluster.add_hosts(3)
    start_three_members(cluster, hosts)
    # All ask the first of the list for as long as it answers.
    agents = [host.start_agent(*member_flags(hosts), *QUICK, "--nnodes", "1:3") for host in hosts]
    before = cluster.job.wait_for_world(3)
    dead.power_off()
    after = cluster.job.wait_for_world(2, after=generation_of(before), seconds=10.0)
    check_consistent_world(after)
    assert {report["node"] for report in after} == {host.name for host in others}
    end_well(cluster.job, agents[1:])
