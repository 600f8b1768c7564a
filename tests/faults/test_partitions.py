"""A host is cut off from the network for a while: packets are lost without any error."""

from __future__ import annotations

import pytest
from etcd_server import needs_etcd
from hosts import Cluster
from jobs import check_consistent_world, generation_of, is_alive

pytestmark = pytest.mark.faults

REMOTE = ["tcp", pytest.param("etcd", marks=needs_etcd)]
QUICK = ("--rdzv-conf", "keep_alive_interval=0.2,keep_alive_max_attempt=5,last_call_timeout=0.3")


@pytest.mark.parametrize("cut", ["the first", "the last"])
@pytest.mark.parametrize("backend", REMOTE)
def test_a_host_that_was_cut_off_rejoins_with_the_last_rank(
    cluster: Cluster, backend: str, cut: str
) -> None:
    timeout = ("--shutdown-timeout", "0.5")
    flags = (*cluster.start_rendezvous(backend), *QUICK, "--nnodes", "1:3", *timeout)
    # Workers that stop late: no others may be started before they have exited.
    nodes = [host.start_agent(*flags, worker=("ignore-term",)) for host in cluster.add_hosts(3)]
    before = cluster.job.wait_for_world(3)
    cut_worker = before[0 if cut == "the first" else 2]
    cut_host = cluster.host_of(cut_worker)
    cut_host.link_down()
    without = cluster.job.wait_for_world(2, after=generation_of(before))
    check_consistent_world(without)
    cluster.check_reachable(without)
    assert cut_host.name not in {report["node"] for report in without}
    # The host that is cut off cannot know yet that the others continue without it.
    assert is_alive(cut_worker["pid"])
    cut_host.link_up()
    again = cluster.job.wait_for_world(3, after=generation_of(without))
    check_consistent_world(again)
    cluster.check_reachable(again)
    assert not is_alive(cut_worker["pid"])
    assert again[2]["node"] == cut_host.name, "nodes that join get the last ranks"
    assert {report["TORCHELASTIC_RESTART_COUNT"] for report in again} == {"0"}
    cluster.job.finish()
    assert [node.exit_code() for node in nodes] == [0, 0, 0]


def test_a_network_cut_shorter_than_the_lease_has_no_effect(cluster: Cluster) -> None:
    conf = ("--rdzv-conf", "last_call_timeout=0.3")
    flags = (*cluster.start_rendezvous("tcp"), *conf, "--nnodes", "1:2")
    nodes = [host.start_agent(*flags) for host in cluster.add_hosts(2)]
    before = cluster.job.wait_for_world(2)
    cut = cluster.host_of(before[0])
    cut.link_down()
    cluster.job.check_unchanged(before, 1.0)
    cut.link_up()
    cluster.job.check_unchanged(before, 5.0)
    cluster.job.finish()
    assert [node.exit_code() for node in nodes] == [0, 0]
    assert not cluster.job.reports(generation_of(before) + 1)
