"""Hosts join, are lost and fail, in network namespaces of their own, over each kind of store."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from etcd_server import needs_etcd
from hosts import BACKENDS, Cluster
from jobs import check_consistent_world, generation_of, is_alive
from modules import write_module

pytestmark = pytest.mark.faults

QUICK = ("--rdzv-conf", "keep_alive_interval=0.2,keep_alive_max_attempt=5,last_call_timeout=0.3")
LEASE = 1.0
# If a test depends on no lease and no clock, the contract suite of each store covers the
# differences between stores. Such a test runs over the other stores only before a release.
TCP_ONLY_UNTIL_RELEASE = [
    "tcp",
    pytest.param("file", marks=pytest.mark.release),
    pytest.param("etcd", marks=(needs_etcd, pytest.mark.release)),
]


@pytest.mark.parametrize("backend", TCP_ONLY_UNTIL_RELEASE)
def test_a_second_host_joins_and_both_form_one_world(cluster: Cluster, backend: str) -> None:
    flags = (*cluster.start_rendezvous(backend), *QUICK, "--nnodes", "1:2")
    first = cluster.add_host().start_agent(*flags)
    generation = generation_of(cluster.job.wait_for_world(1))
    second = cluster.add_host().start_agent(*flags)
    reports = cluster.job.wait_for_world(2, after=generation)
    check_consistent_world(reports)
    cluster.check_reachable(reports)
    assert [report["node"] for report in reports] == [first.name, second.name]
    cluster.job.finish()
    assert (first.exit_code(), second.exit_code()) == (0, 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_survivors_of_rank_0_share_one_generation_and_master(
    cluster: Cluster, backend: str
) -> None:
    flags = (*cluster.start_rendezvous(backend), *QUICK, "--nnodes", "2:3")
    nodes = {host.name: host.start_agent(*flags) for host in cluster.add_hosts(3)}
    before = cluster.job.wait_for_world(3)
    dead = before[0]["node"]
    nodes.pop(dead).kill()
    reports = cluster.job.wait_for_world(2, after=generation_of(before))
    check_consistent_world(reports)
    cluster.check_reachable(reports)
    assert [one["node"] for one in reports] == [
        one["node"] for one in before if one["node"] != dead
    ]
    assert {report["TORCHELASTIC_RESTART_COUNT"] for report in reports} == {"0"}
    cluster.job.finish()
    assert [node.exit_code() for node in nodes.values()] == [0, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_others_continue_without_a_host_whose_agent_and_worker_were_killed(
    cluster: Cluster, backend: str
) -> None:
    flags = (*cluster.start_rendezvous(backend), *QUICK, "--nnodes", "1:3")
    nodes = {host.name: host.start_agent(*flags) for host in cluster.add_hosts(2)}
    before = cluster.job.wait_for_world(2)
    killed = nodes.pop(before[0]["node"])
    os.kill(before[0]["pid"], signal.SIGKILL)
    killed.kill()
    (report,) = cluster.job.wait_for_world(1, after=generation_of(before))
    assert report["node"] == before[1]["node"]
    assert report["TORCHELASTIC_RESTART_COUNT"] == "0"
    cluster.job.finish()
    assert [node.exit_code() for node in nodes.values()] == [0]


def test_a_killed_agent_is_detected_at_once_when_its_connection_breaks(cluster: Cluster) -> None:
    conf = ("--rdzv-conf", "keep_alive_interval=6,last_call_timeout=0.3")
    flags = (*cluster.start_rendezvous("tcp"), "--nnodes", "1:2", *conf)
    nodes = {host.name: host.start_agent(*flags) for host in cluster.add_hosts(2)}
    before = cluster.job.wait_for_world(2)
    nodes.pop(before[0]["node"]).kill()
    killed_at = time.monotonic()
    (report,) = cluster.job.wait_for_world(1, after=generation_of(before))
    assert time.monotonic() - killed_at < 15.0, "its lease would have expired only after 30 s"
    assert report["node"] == before[1]["node"]
    cluster.job.finish()
    assert [node.exit_code() for node in nodes.values()] == [0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_power_loss_of_a_host_is_detected_within_its_lease(
    cluster: Cluster, backend: str
) -> None:
    flags = (*cluster.start_rendezvous(backend), *QUICK, "--nnodes", "1:3")
    check_power_loss(cluster, flags, within=2 * LEASE + 8.0)


def test_the_power_loss_of_a_host_is_detected_within_the_default_lease(cluster: Cluster) -> None:
    conf = ("--rdzv-conf", "last_call_timeout=0.3")
    flags = (*cluster.start_rendezvous("tcp"), "--nnodes", "2:3", *conf)
    check_power_loss(cluster, flags, within=15.0, hosts=3)


def check_power_loss(
    cluster: Cluster, flags: tuple[str, ...], *, within: float, hosts: int = 2
) -> None:
    """Check that the job continues within this time after the host of rank 0 lost its power."""
    nodes = {host.name: host.start_agent(*flags) for host in cluster.add_hosts(hosts)}
    before = cluster.job.wait_for_world(hosts)
    dead = cluster.host_of(before[0])
    del nodes[dead.name]
    dead.power_off()
    lost_at = time.monotonic()
    after = cluster.job.wait_for_world(hosts - 1, after=generation_of(before))
    assert time.monotonic() - lost_at < within
    check_consistent_world(after)
    cluster.check_reachable(after)
    assert [report["node"] for report in after] == [report["node"] for report in before[1:]]
    assert not any(is_alive(report["pid"]) for report in before)
    cluster.job.finish()
    assert [node.exit_code() for node in nodes.values()] == [0] * (hosts - 1)


@pytest.mark.parametrize("backend", TCP_ONLY_UNTIL_RELEASE)
def test_a_host_that_keeps_failing_leaves_and_the_other_continues(
    cluster: Cluster, backend: str
) -> None:
    flags = (*cluster.start_rendezvous(backend), *QUICK, "--nnodes", "1:3", "--max-restarts", "1")
    good, bad = (host.start_agent(*flags) for host in cluster.add_hosts(2))
    before = cluster.job.wait_for_world(2)
    (cluster.job.folder / f"fail.{bad.name}").touch()
    assert bad.exit_code() == 1
    assert "the job continues without it (1 of 1 restarts used)" in bad.text
    (report,) = cluster.job.wait_for_world(1, after=generation_of(before) + 1)
    assert report["node"] == good.name
    cluster.job.finish()
    assert good.exit_code() == 0


# A module that Python imports at its start.
WRONG_CLOCK = """
import pathlib, time
wall_clock = time.time
time.time = lambda: wall_clock() - 60
pathlib.Path({marker!r}).touch()
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_host_whose_clock_is_a_minute_off_stays_in_the_job(
    cluster: Cluster, tmp_path: Path, backend: str
) -> None:
    marker = tmp_path / "clock was changed"
    path = tmp_path / "wrong-clock"
    write_module(path, "sitecustomize", WRONG_CLOCK.format(marker=str(marker)))
    flags = (*cluster.start_rendezvous(backend), *QUICK, "--nnodes", "2")
    right, wrong = cluster.add_hosts(2)
    nodes = [
        right.start_agent(*flags),
        wrong.start_agent(*flags, PYTHONPATH=str(path)),
    ]
    reports = cluster.job.wait_for_world(2)
    check_consistent_world(reports)
    assert marker.exists()
    # If the agents compared clocks, each would take the other for lost within this time.
    cluster.job.check_unchanged(reports, 1.5 * LEASE)
    cluster.job.finish()
    assert [node.exit_code() for node in nodes] == [0, 0]
    assert not cluster.job.reports(generation_of(reports) + 1)


@pytest.mark.parametrize("backend", TCP_ONLY_UNTIL_RELEASE)
def test_a_host_that_waits_for_others_leaves_on_sigterm(cluster: Cluster, backend: str) -> None:
    flags = (*cluster.start_rendezvous(backend), *QUICK, "--nnodes", "2")
    waiting, *others = cluster.add_hosts(3)
    agent = waiting.start_agent(*flags)
    agent.wait_for_log("1 of at least 2 nodes are here")
    signalled_at = time.monotonic()
    agent.signal(signal.SIGTERM)
    assert agent.exit_code() == 128 + signal.SIGTERM
    assert time.monotonic() - signalled_at < 4.5
    assert "STOPPED: received SIGTERM" in agent.text
    assert "Traceback" not in agent.text
    # It has left the rendezvous, too: the other nodes do not count it as a member.
    nodes = [host.start_agent(*flags) for host in others]
    reports = cluster.job.wait_for_world(2)
    assert {report["node"] for report in reports} == {host.name for host in others}
    cluster.job.finish()
    assert [node.exit_code() for node in nodes] == [0, 0]
