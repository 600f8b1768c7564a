"""What a launch on Ray takes and refuses, and what its nodes' ends come to; without Ray."""

from __future__ import annotations

import importlib.util
import pickle
from typing import Any

import pytest

from elasticlib import LaunchConfig, RunResult, WorkerState
from elasticlib.errors import ConfigError, ElasticError
from elasticlib.integrations.ray import (
    ENDPOINT,
    check,
    find_ray,
    ray_launch,
    read_resources,
    read_values,
)
from elasticlib.integrations.ray.driver import actor_options, merged
from elasticlib.workers.exits import WorkerExit


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"rdzv_backend": "file", "rdzv_endpoint": "/tmp", "run_id": "x"}, "rdzv_backend"),
        ({"rdzv_endpoint": "node0:29400"}, "rdzv_endpoint has no .* 'node0:29400'"),
        ({"rdzv_endpoint": "ray", "node_rank": 0}, "node_rank"),
        ({"rdzv_endpoint": "ray", "local_addr": "127.0.0.1"}, "local_addr"),
        ({"rdzv_endpoint": "ray", "topology": "rack1"}, "topology"),
        ({"rdzv_endpoint": "ray", "spares": 0}, "spares"),
        ({"rdzv_endpoint": "ray", "rdzv_configs": {"is_host": "true"}}, "is_host"),
        ({"rdzv_endpoint": "ray", "rdzv_configs": {"secret_file": "/x"}}, "secret_file"),
    ],
)
def test_what_ray_or_the_driver_decides_is_refused_by_name(
    settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        ray_launch(LaunchConfig(max_nodes=2, **settings), print)


def test_one_node_and_several_that_meet_at_ray_are_taken() -> None:
    check(LaunchConfig())
    check(LaunchConfig(min_nodes=1, max_nodes=9, rdzv_endpoint=ENDPOINT))


def test_agent_takes_one_cpu_for_each_worker_by_default() -> None:
    assert read_resources({}, 4) == {"CPU": 4.0}
    resources = read_resources({"CPU": 1, "GPU": 4, "memory": 1e9, "fast": 1}, 4)
    assert resources == {"CPU": 1.0, "GPU": 4.0, "memory": 1e9, "fast": 1.0}
    options = actor_options(resources)
    assert (options["num_cpus"], options["num_gpus"], options["memory"]) == (1.0, 4.0, 1e9)
    assert options["resources"] == {"fast": 1.0}


@pytest.mark.parametrize("amount", [-1, float("nan"), "2"])
def test_amount_that_ray_cannot_reserve_is_rejected(amount: Any) -> None:
    with pytest.raises(ConfigError, match=r"resources\['GPU'\] must be a number from 0"):
        ray_launch(LaunchConfig(), print, {"GPU": amount})


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_where_ray_is_not_installed_the_extra_is_named() -> None:
    with pytest.raises(ConfigError, match=r"pip install 'elasticlib\[ray\]'"):
        find_ray()


def failed(rank: int) -> dict[int, WorkerExit]:
    return {rank: WorkerExit(0, rank, pid=1, returncode=1)}


def test_the_nodes_values_and_failures_are_the_jobs() -> None:
    done = WorkerState.SUCCEEDED
    both = merged([RunResult(done, "ok", {2: "c"}), RunResult(done, "ok", {0: "a", 1: "b"})])
    assert (both.state, list(both.return_values.items())) == (done, [(0, "a"), (1, "b"), (2, "c")])
    broken = WorkerState.FAILED
    ends = [
        RunResult(broken, "no", failures=failed(3)),
        RunResult(broken, "no", failures=failed(0)),
    ]
    assert list(merged(ends).failures) == [0, 3]


def test_what_the_job_came_to_goes_before_how_one_node_was_stopped() -> None:
    stopped = RunResult(WorkerState.STOPPED, "SIGINT", signal=2)
    won = RunResult(WorkerState.SUCCEEDED, "all done")
    assert merged([stopped, won], asked=2).state is WorkerState.SUCCEEDED
    assert merged([stopped, stopped], asked=2).exit_code == 130
    assert merged([], asked=2).exit_code == 130
    assert merged([stopped], failure="no room").reason == "no room"
    assert merged([], failure="no room").state is WorkerState.FAILED


def test_values_that_were_lost_with_their_node_are_an_error_and_not_left_out() -> None:
    here = {rank: (3, pickle.dumps(rank * 10)) for rank in range(3)}
    assert read_values(here) == {0: 0, 1: 10, 2: 20}
    del here[1]
    with pytest.raises(ElasticError, match=r"values of 1 of 3 workers .*: rank 1"):
        read_values(here)
    with pytest.raises(ElasticError, match="rank 0"):
        read_values({})
    with pytest.raises(ElasticError, match="rank 0 returned cannot be read here"):
        read_values({0: (1, b"nonsense")})
