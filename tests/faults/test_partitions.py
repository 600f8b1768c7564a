"""A link is cut and mended: packets vanish meanwhile, and no error tells anybody."""

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
def test_a_host_that_was_cut_off_comes_back_as_a_newcomer(
    cluster: Cluster, backend: str, cut: str
) -> None:
    flags = (
        *cluster.start_rendezvous(backend),
        *QUICK,
        "--nnodes",
        "1:3",
        "--shutdown-timeout",
        "0.5",
    )
    # Workers that take their time to stop: none may be started beside them.
    nodes = [host.start_agent(*flags, worker=("ignore-term",)) for host in cluster.add_hosts(3)]
    before = cluster.job.wait_for_world(3)
    theirs = before[0 if cut == "the first" else 2]
    lonely = cluster.host_of(theirs)
    lonely.link_down()
    without = cluster.job.wait_for_world(2, after=generation_of(before))
    check_consistent_world(without)
    cluster.check_reachable(without)
    assert lonely.name not in {report["node"] for report in without}
    # It cannot know yet that it was replaced, and nobody has told it to stop.
    assert is_alive(theirs["pid"])
    lonely.link_up()
    again = cluster.job.wait_for_world(3, after=generation_of(without))
    check_consistent_world(again)
    cluster.check_reachable(again)
    assert not is_alive(theirs["pid"])
    assert again[2]["node"] == lonely.name, "newcomers come behind those who stayed"
    assert {report["TORCHELASTIC_RESTART_COUNT"] for report in again} == {"0"}
    cluster.job.finish()
    assert [node.exit_code() for node in nodes] == [0, 0, 0]


def test_a_cut_that_is_shorter_than_the_lease_changes_nothing(cluster: Cluster) -> None:
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
