"""Settings of a launch on Ray, and the results of its nodes, without Ray."""

from __future__ import annotations

import importlib.util
import pickle
from typing import Any

import pytest

from elasticlib import (
    LaunchConfig,
    LaunchOptions,
    RendezvousOptions,
    RendezvousSettings,
    RunResult,
    WorkerState,
)
from elasticlib.errors import ConfigError, ElasticError
from elasticlib.integrations.ray import (
    RAY_ENDPOINT,
    agent_resources,
    check_options,
    import_ray,
    ray_launch,
    unpickle_values,
)
from elasticlib.integrations.ray.driver import actor_options, merge_results
from elasticlib.workers.exits import WorkerExit


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backend": "file", "endpoint": "/tmp", "run_id": "x"}, "backend must be"),
        ({"endpoint": "node0:29400"}, "endpoint must be '' or 'ray' on Ray"),
        ({"node_rank": 0}, "node_rank"),
        ({"local_addr": "127.0.0.1"}, "local_addr"),
        ({"topology": "rack1"}, "topology"),
        ({"spares": 0}, "spares"),
        ({"is_host": True}, "is_host"),
        ({"secret_file": "/x"}, "secret_file"),
    ],
)
def test_a_setting_that_ray_or_the_driver_decides_is_rejected_by_name(
    settings: dict[str, Any], message: str
) -> None:
    job = RendezvousSettings(max_nodes=2, spares=settings.pop("spares", None))
    rendezvous = RendezvousOptions(**{"endpoint": RAY_ENDPOINT, **settings})
    with pytest.raises(ConfigError, match=message):
        ray_launch(LaunchOptions(job=job, rendezvous=rendezvous), print)


def test_jobs_of_one_node_and_of_several_nodes_are_accepted() -> None:
    check_options(LaunchOptions())
    config = LaunchConfig(min_nodes=1, max_nodes=9, rdzv_endpoint=RAY_ENDPOINT)
    check_options(config.options())


def test_an_agent_gets_one_cpu_for_each_worker_by_default() -> None:
    assert agent_resources({}, 4) == {"CPU": 4.0}
    resources = agent_resources({"CPU": 1, "GPU": 4, "memory": 1e9, "fast": 1}, 4)
    assert resources == {"CPU": 1.0, "GPU": 4.0, "memory": 1e9, "fast": 1.0}
    options = actor_options(resources)
    assert (options["num_cpus"], options["num_gpus"], options["memory"]) == (1.0, 4.0, 1e9)
    assert options["resources"] == {"fast": 1.0}


@pytest.mark.parametrize("amount", [-1, float("nan"), "2"])
def test_an_amount_that_ray_cannot_reserve_is_rejected(amount: Any) -> None:
    with pytest.raises(ConfigError, match=r"resources\['GPU'\] must be a non-negative"):
        ray_launch(LaunchConfig(), print, {"GPU": amount})


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_the_error_names_the_extra_if_ray_is_not_installed() -> None:
    with pytest.raises(ConfigError, match=r"pip install 'elasticlib\[ray\]'"):
        import_ray()


def failure(rank: int) -> dict[int, WorkerExit]:
    return {rank: WorkerExit(0, rank, pid=1, returncode=1)}


def test_merged_result_has_the_values_and_failures_of_all_nodes() -> None:
    succeeded, failed = WorkerState.SUCCEEDED, WorkerState.FAILED
    result = merge_results(
        [RunResult(succeeded, "ok", {2: "c"}), RunResult(succeeded, "ok", {0: "a", 1: "b"})]
    )
    assert result.state is succeeded
    assert list(result.return_values.items()) == [(0, "a"), (1, "b"), (2, "c")]
    results = [
        RunResult(failed, "no", failures=failure(3)),
        RunResult(failed, "no", failures=failure(0)),
    ]
    assert list(merge_results(results).failures) == [0, 3]


def test_the_state_of_the_job_outweighs_a_node_that_was_stopped() -> None:
    stopped = RunResult(WorkerState.STOPPED, "SIGINT", signal=2)
    succeeded = RunResult(WorkerState.SUCCEEDED, "all workers succeeded")
    result = merge_results([stopped, succeeded], signal_number=2)
    assert result.state is WorkerState.SUCCEEDED
    assert merge_results([stopped, stopped], signal_number=2).exit_code == 130
    assert merge_results([], signal_number=2).exit_code == 130
    assert merge_results([stopped], failure="no resources").reason == "no resources"
    assert merge_results([], failure="no resources").state is WorkerState.FAILED


def test_lost_or_unreadable_return_values_are_an_error() -> None:
    values = {rank: (3, pickle.dumps(rank * 10)) for rank in range(3)}
    assert unpickle_values(values) == {0: 0, 1: 10, 2: 20}
    del values[1]
    with pytest.raises(ElasticError, match=r"values of 1 of 3 workers .*: rank 1"):
        unpickle_values(values)
    with pytest.raises(ElasticError, match="rank 0"):
        unpickle_values({})
    with pytest.raises(ElasticError, match="value of rank 0 cannot be unpickled"):
        unpickle_values({0: (1, b"nonsense")})
