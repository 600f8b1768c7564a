"""Nodes that fail their node check, and nodes whose workers keep failing, on hosts of their own."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest
from hosts import PORT, Cluster, Host
from jobs import Node, check_consistent_world, generation_of

from elasticlib.observe.event import Event, decode
from elasticlib.observe.history_reader import read_history
from elasticlib.testing.waiting import wait_until

pytestmark = pytest.mark.faults

CONF = "keep_alive_interval=0.2,keep_alive_max_attempt=5,last_call_timeout=1"
UNFIT = 69


def node_check(folder: Path) -> tuple[str, str]:
    """Return the flag of a check that fails on a host with a file `sick`, and hangs with `stuck`.

    Each call of the check adds the name of its host to the file `checked`.
    """
    return (
        "--node-check",
        f"uname -n >> {folder}/checked; "
        f"if [ -e {folder}/stuck.$(uname -n) ]; then sleep 1000 & sleep 1000; fi; "
        f"if [ -e {folder}/sick.$(uname -n) ]; then echo GPU 3 has fallen off the bus; exit 4; fi",
    )


def num_checks(folder: Path, host: Host) -> int:
    return (folder / "checked").read_text().split().count(host.name)


def start_agents(cluster: Cluster, hosts: list[Host], *flags: str) -> dict[str, Node]:
    common = (*cluster.start_rendezvous("tcp"), *node_check(cluster.job.folder), *flags)
    return {host.name: host.start_agent(*common) for host in hosts}


def event_files(host: Host) -> list[Path]:
    return sorted(host.temporary.glob("*/*/events.jsonl"))


def read_events(host: Host) -> list[Event]:
    (path,) = event_files(host)
    return [decode(line) for line in path.read_bytes().splitlines()]


def wait_until_idle(host: Host) -> None:
    wait_until("no process to be left on the host", lambda: not host.namespaces.processes())


def finish(cluster: Cluster, *nodes: Node) -> None:
    cluster.job.finish()
    assert [node.exit_code() for node in nodes] == [0] * len(nodes)


def test_the_job_starts_without_a_node_that_fails_its_check(cluster: Cluster) -> None:
    hosts, folder = cluster.add_hosts(3), cluster.job.folder
    (folder / "sick.h3").touch()
    nodes = start_agents(cluster, hosts, "--nnodes", "2:3", "--rdzv-conf", CONF)
    assert nodes["h3"].exit_code() == UNFIT
    reason = "exited with code 4: GPU 3 has fallen off the bus; this node stays out"
    assert reason in nodes["h3"].text
    assert "the job goes on while 2 or more others are there" in nodes["h3"].text
    reports = cluster.job.wait_for_world(2)
    check_consistent_world(reports)
    assert [report["node"] for report in reports] == ["h1", "h2"]
    assert {report["TORCHELASTIC_RESTART_COUNT"] for report in reports} == {"0"}
    finish(cluster, nodes["h1"], nodes["h2"])
    assert generation_of(reports) == 1


def test_a_node_whose_check_hangs_stays_out_and_nothing_of_the_check_is_left(
    cluster: Cluster,
) -> None:
    hosts, folder = cluster.add_hosts(3), cluster.job.folder
    (folder / "stuck.h3").touch()
    flags = ("--nnodes", "2:3", "--rdzv-conf", CONF, "--node-check-timeout", "1")
    nodes = start_agents(cluster, hosts, *flags)
    assert nodes["h3"].exit_code() == UNFIT
    assert "did not end within 1 s (--node-check-timeout)" in nodes["h3"].text
    wait_until_idle(hosts[2])
    assert [report["node"] for report in cluster.job.wait_for_world(2)] == ["h1", "h2"]
    finish(cluster, nodes["h1"], nodes["h2"])


def test_a_node_that_fails_its_check_after_a_failure_leaves_and_no_restart_is_counted(
    cluster: Cluster,
) -> None:
    hosts, folder = cluster.add_hosts(3), cluster.job.folder
    nodes = start_agents(
        cluster, hosts, "--nnodes", "2:3", "--max-restarts", "1", "--rdzv-conf", CONF
    )
    before = cluster.job.wait_for_world(3)
    (folder / "sick.h3").touch()
    (folder / "fail.h3").touch()
    assert nodes["h3"].exit_code() == UNFIT
    assert "GPU 3 has fallen off the bus" in nodes["h3"].text
    after = cluster.job.wait_for_world(2, after=generation_of(before))
    check_consistent_world(after)
    assert {report["node"] for report in after} == {"h1", "h2"}
    assert {report["TORCHELASTIC_RESTART_COUNT"] for report in after} == {"0"}
    # The workers of the other nodes did not fail, so these nodes are not checked again.
    assert [num_checks(folder, host) for host in hosts] == [1, 1, 2]
    finish(cluster, nodes["h1"], nodes["h2"])
    last = read_events(hosts[2])[-1]
    assert (last.kind, last.data["exit_code"]) == ("run.finished", UNFIT)
    assert "GPU 3 has fallen off the bus" in last.data["reason"]
    assert last.data["expelled"]


def test_a_spare_replaces_a_node_that_fails_its_check_after_a_failure(cluster: Cluster) -> None:
    hosts, folder = cluster.add_hosts(3), cluster.job.folder
    flags = ("--nnodes", "2", "--spares", "1", "--rdzv-conf", CONF)
    common = (*cluster.start_rendezvous("tcp"), *node_check(folder), *flags)
    nodes = {host.name: host.start_agent(*common) for host in hosts[:2]}
    before = cluster.job.wait_for_world(2)
    spare = hosts[2].start_agent(*common)
    wait_until("the spare to be checked", lambda: num_checks(folder, hosts[2]) == 1)
    (folder / "sick.h2").touch()
    (folder / "fail.h2").touch()
    assert nodes["h2"].exit_code() == UNFIT
    assert "it goes on once a spare or another node takes its place" in nodes["h2"].text
    after = cluster.job.wait_for_world(2, after=generation_of(before))
    assert [report["node"] for report in after] == ["h1", "h3"]
    assert {report["TORCHELASTIC_RESTART_COUNT"] for report in after} == {"0"}
    finish(cluster, nodes["h1"], spare)


def test_a_job_without_a_node_to_spare_reports_which_node_left(cluster: Cluster) -> None:
    hosts, folder = cluster.add_hosts(2), cluster.job.folder
    flags = ("--nnodes", "2", "--max-restarts", "1", "--rdzv-conf", f"{CONF},join_timeout=5")
    nodes = start_agents(cluster, hosts, *flags)
    cluster.job.wait_for_world(2)
    (folder / "sick.h2").touch()
    (folder / "fail.h2").touch()
    assert nodes["h2"].exit_code() == UNFIT
    assert "this node stays out, and the job needs 2 nodes" in nodes["h2"].text
    assert nodes["h1"].exit_code() == 1
    assert "1 of at least 2 nodes are here; h2 left" in nodes["h1"].text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2, signal.SIGKILL])
def test_a_signal_during_the_check_ends_the_check_at_once(
    cluster: Cluster, number: signal.Signals
) -> None:
    (host,), folder = cluster.add_hosts(1), cluster.job.folder
    (folder / "stuck.h1").touch()
    nodes = start_agents(cluster, [host], "--nnodes", "1", "--rdzv-conf", CONF)
    wait_until("the check to run", lambda: (folder / "checked").exists())
    agent = nodes["h1"]
    if number is signal.SIGKILL:
        agent.kill()
    else:
        agent.signal(number)
        codes = {signal.SIGTERM: 128 + signal.SIGTERM, signal.SIGUSR2: 75}
        assert agent.exit_code() == codes[number]
    wait_until_idle(host)


# Memory of bad nodes


def start_with_a_bad_node(cluster: Cluster, *flags: str) -> dict[str, Node]:
    """Start an agent on each of three hosts. The workers of `h3` fail immediately."""
    hosts = cluster.add_hosts(3)
    (cluster.job.folder / "fail.h3").touch()
    common = (*cluster.start_rendezvous("tcp"), "--max-restarts", "10", "--rdzv-conf", CONF, *flags)
    return {host.name: host.start_agent(*common) for host in hosts}


WHY = "its workers failed first in 3 of the last 5 generations"


def test_a_node_whose_workers_keep_failing_is_excluded_and_the_job_finishes_on_the_others(
    cluster: Cluster,
) -> None:
    nodes = start_with_a_bad_node(cluster, "--nnodes", "2:3")
    assert nodes["h3"].exit_code() == UNFIT
    assert f"the job continues without this host, because {WHY}" in nodes["h3"].text
    reports = cluster.job.wait_for_world(2, after=3)
    check_consistent_world(reports)
    assert [report["node"] for report in reports] == ["h1", "h2"]
    # The third failure led to the exclusion, which is not a restart.
    assert {report["TORCHELASTIC_RESTART_COUNT"] for report in reports} == {"2"}
    check_status(cluster)
    again = start_again(cluster)
    assert again.exit_code() == UNFIT
    assert f"{WHY} (bad_node_failures, --rdzv-conf); no workers ran on this node" in again.text
    finish(cluster, nodes["h1"], nodes["h2"])
    assert f"generation {generation_of(reports)} after a failure" in nodes["h1"].text
    assert "h3 is excluded, because its workers failed first" in nodes["h1"].text
    history = read_history([path for host in cluster.hosts.values() for path in event_files(host)])
    assert f"h3 is excluded, because {WHY}" in history.generations[-1].reason


def check_status(cluster: Cluster) -> None:
    """Check that `elasticlib status` names the excluded host and the reason."""
    endpoint = f"{cluster.hosts['store'].address}:{PORT}"
    command = (sys.executable, "-m", "elasticlib.launch.cli", "status", endpoint)
    host = cluster.hosts["h1"]
    text = host.start("status", *command)
    text.exit_code()
    assert f"excluded: h3, because {WHY}" in text.text
    document = host.start("status-json", *command, "--json")
    document.exit_code()
    (excluded,) = json.loads(document.text)["excluded"]
    assert excluded["host"] == "h3"
    assert excluded["reason"].startswith(WHY)


def start_again(cluster: Cluster) -> Node:
    host, endpoint = cluster.hosts["h3"], f"{cluster.hosts['store'].address}:{PORT}"
    flags = ("--rdzv-backend", "tcp", "--rdzv-endpoint", endpoint, "--rdzv-id", "job")
    flags = (*flags, "--max-restarts", "10", "--rdzv-conf", CONF, "--nnodes", "2:3")
    return host.start_agent(*flags, name="again")


def test_a_bad_node_that_no_other_can_replace_stays_and_the_reason_is_reported(
    cluster: Cluster,
) -> None:
    nodes = start_with_a_bad_node(cluster, "--nnodes", "3")
    nodes["h1"].wait_for_log(rf"h3 stays in the job although {WHY}.*2 of at least 3 nodes")
    (cluster.job.folder / "fail.h3").unlink()
    reports = cluster.job.wait_for_world(3, after=3)
    assert [report["node"] for report in reports] == ["h1", "h2", "h3"]
    finish(cluster, *nodes.values())


def test_a_limit_of_0_excludes_no_node(cluster: Cluster) -> None:
    nodes = start_with_a_bad_node(cluster, "--nnodes", "2:3", "--rdzv-conf", "bad_node_failures=0")
    nodes["h1"].wait_for_log(r"restarts 3/10")
    (cluster.job.folder / "fail.h3").unlink()
    assert len(cluster.job.wait_for_world(3, after=3)) == 3
    finish(cluster, *nodes.values())
