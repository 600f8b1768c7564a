"""Jobs with the manifests of docs/kubernetes: pods are evicted, recreated and scaled.

The tests need no cluster. A pod is a set of namespaces with the command and variables of the
manifest, and `manifests` adds what a controller would add.
"""

from __future__ import annotations

import attrs
import pytest

pytest.importorskip("yaml", reason="needs PyYAML: make test-integrations")

from hosts import NETWORK, PORT, Cluster
from jobs import check_consistent_world
from manifests import (
    Container,
    indexed_job,
    of_kind,
    pytorch_job,
    runai_job,
    train_job,
    with_master,
)
from pods import Pods
from traces import read_traces

from elasticlib.testing.waiting import wait_until

pytestmark = pytest.mark.timeout(480)

SAMPLES = 2000  # 125 steps of at least 0.3 s, which is longer than the faults of each test
DRAINED = 75


@pytest.fixture
def pods(cluster: Cluster) -> Pods:
    return Pods(cluster)


def shorten_last_call(container: Container) -> Container:
    """Return the container with a shorter last call, which waits for DNS."""
    old, new = "last_call_timeout=30", "last_call_timeout=4"
    texts = (*container.command, *container.environment.values())
    assert sum(old in text for text in texts) == 1
    return attrs.evolve(
        container,
        command=tuple(argument.replace(old, new) for argument in container.command),
        environment={k: v.replace(old, new) for k, v in container.environment.items()},
    )


def assert_all_used_once(pods: Pods, samples: int = SAMPLES) -> None:
    traces = read_traces(pods.volume / "trace")
    assert traces.steps == -(-samples // 16)
    assert traces.used_exactly_once(samples), pods.read_logs()


def test_a_pytorchjob_continues_after_each_worker_is_evicted_and_recreated(
    pods: Pods,
) -> None:
    job = of_kind("pytorchjob.yaml", "PyTorchJob")
    containers = [shorten_last_call(pytorch_job(job, index)) for index in range(3)]
    zero, one, _ = (pods.start(container, f"--samples={SAMPLES}") for container in containers)
    pods.publish()
    before = pods.wait_for_step(3)
    # The pod serves the store, so the others learn that it leaves before it exits, and continue.
    assert zero.evict() == DRAINED, pods.read_logs()
    without = pods.wait_for_step(2, after=before)
    zero = pods.start(containers[0], f"--samples={SAMPLES}")
    # The pod knows its new address, and the other pods still resolve its name to the old one.
    zero.node.wait_for_log("this node hosts the store")
    pods.publish()
    again = pods.wait_for_step(3, after=without)
    # The pod is lost before it can save, and its connections remain open.
    assert one.evict(grace=0.0) not in (0, DRAINED)
    less = pods.wait_for_step(2, after=again)
    pods.start(containers[1], f"--samples={SAMPLES}")
    pods.publish()
    pods.wait_for_step(3, after=less)
    assert pods.finish() == [0, 0, 0], pods.read_logs()
    assert_all_used_once(pods)
    # The job was started only once.
    assert len(pods.launches()) == 1


def test_a_first_pod_without_a_dns_entry_restarts_and_the_others_find_it(
    pods: Pods,
) -> None:
    job = of_kind("pytorchjob.yaml", "PyTorchJob")
    containers = [shorten_last_call(pytorch_job(job, index)) for index in range(2)]
    zero, _ = (pods.start(container, f"--samples={SAMPLES}") for container in containers)
    pods.publish()
    before = pods.wait_for_step(2)
    assert zero.evict() == DRAINED
    pods.wait_for_step(1, after=before)
    (first,) = pods.launches()
    pods.start(containers[0], f"--samples={SAMPLES}")
    wait_until("a second start", lambda: len(pods.launches()) == 2, details=pods.read_logs)
    (second,) = pods.launches() - {first}
    pods.wait_for_step(1, launch=second)
    pods.publish()
    pods.wait_for_step(2, launch=second)
    assert pods.finish() == [0, 0], pods.read_logs()
    assert_all_used_once(pods)


def test_an_indexed_job_is_scaled_from_one_pod_to_three_and_back(pods: Pods) -> None:
    job = of_kind("indexed-job.yaml", "Job")
    containers = [shorten_last_call(indexed_job(job, index)) for index in range(3)]
    first = pods.start(containers[0], f"--samples={SAMPLES}")
    # The service has not published the pod, whose own /etc/hosts has only its long name.
    first.node.wait_for_log("cannot resolve the host of train-0.train:29400")
    first.node.wait_for_log(
        r"the store is unreachable: .* retries for 600 s \(join_timeout\): "
        r"train-0.train:29400 could not be reached"
    )
    pods.publish()
    first_generation = pods.wait_for_step(1)
    two, three = (pods.start(container, f"--samples={SAMPLES}") for container in containers[1:])
    pods.publish()
    second_generation = pods.wait_for_step(3, after=first_generation)
    assert three.evict() == DRAINED
    fewer = pods.wait_for_step(2, after=second_generation)
    assert two.evict() == DRAINED
    pods.publish()
    pods.wait_for_step(1, after=fewer)
    assert pods.finish() == [0], pods.read_logs()
    assert_all_used_once(pods)


def test_a_trainjob_continues_after_its_first_node_is_rescheduled(
    pods: Pods,
) -> None:
    runtime, job = (of_kind("trainjob.yaml", k) for k in ("ClusterTrainingRuntime", "TrainJob"))
    containers = [shorten_last_call(train_job(runtime, job, index)) for index in range(3)]
    zero, *_ = (pods.start(container, f"--samples={SAMPLES}") for container in containers)
    pods.publish()
    before = pods.wait_for_step(3)
    zero.lose()
    zero = pods.start(containers[0], f"--samples={SAMPLES}")
    zero.node.wait_for_log("cannot resolve the host|waiting for the store at ")
    pods.publish()
    pods.wait_for_step(3, after=before)
    assert pods.finish() == [0, 0, 0], pods.read_logs()
    assert_all_used_once(pods)


def test_a_runai_job_runs_with_any_master_variables_of_the_operator(pods: Pods) -> None:
    for index in range(2):
        container = with_master(shorten_last_call(pytorch_job(runai_job(), index)), index, 7)
        pods.start(container, "--samples=320")
    pods.publish()
    pods.wait_for_step(2)
    assert pods.finish() == [0, 0], pods.read_logs()
    assert_all_used_once(pods, 320)


def test_is_host_selects_the_host_of_a_name_with_several_addresses(cluster: Cluster) -> None:
    one, two = cluster.add_hosts(2)
    for host in (one, two):
        host.add_host_lines(f"{one.address} train", f"{two.address} train")
    flags = ("--nnodes", "2", "--rdzv-endpoint", f"train:{PORT}")
    nodes = [two.start_agent(*flags, "--rdzv-conf=is_host=true")]
    nodes.append(one.start_agent(*flags, "--rdzv-conf=is_host=false"))
    check_consistent_world(cluster.job.wait_for_world(2))
    cluster.job.finish()
    assert [node.exit_code() for node in nodes] == [0, 0]


def test_is_host_with_a_translated_address_listens_on_all_addresses(
    cluster: Cluster,
) -> None:
    """The name resolves to an address of no host, like that of a Service, and is translated."""
    one, two = cluster.add_hosts(2)
    one.set_known_names({"train": f"{NETWORK}.99"})
    two.set_known_names({"train": one.address})
    flags = ("--nnodes", "2", "--rdzv-endpoint", f"train:{PORT}")
    nodes = [one.start_agent(*flags, "--rdzv-conf=is_host=true"), two.start_agent(*flags)]
    nodes[0].wait_for_log("this node hosts the store on all of its addresses")
    reports = cluster.job.wait_for_world(2)
    check_consistent_world(reports)
    cluster.check_reachable(reports)
    cluster.job.finish()
    assert [node.exit_code() for node in nodes] == [0, 0]
