"""What a launch on Ray takes and refuses, and what its nodes' ends come to; without Ray."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticlib import LaunchConfig, RunResult, WorkerExit, WorkerState
from elasticlib.errors import ConfigError, ElasticError
from elasticlib.integrations.ray import (
    ENDPOINT,
    RayOptions,
    check,
    find_ray,
    ray_launch,
    read_values,
)
from elasticlib.integrations.ray.__main__ import main, split
from elasticlib.integrations.ray.driver import merged


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


def test_an_agent_takes_a_cpu_for_each_worker_unless_told_otherwise() -> None:
    assert RayOptions().demand(4) == {"CPU": 4.0}
    options = RayOptions(num_cpus=1, num_gpus=4, memory=1e9, resources={"fast": 1})
    assert options.demand(4) == {"CPU": 1.0, "GPU": 4.0, "memory": 1e9, "fast": 1}


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: RayOptions(num_cpus=-1), "num_cpus"),
        (lambda: RayOptions(num_gpus=float("nan")), "num_gpus"),
        (lambda: RayOptions(resources={"GPU": 1}), "GPU by an option of its own"),
        (lambda: RayOptions(resources={"fast": -1}), "fast"),
    ],
)
def test_amounts_that_cannot_be_are_refused(make: Callable[[], object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make()


def test_rays_flags_come_first_and_a_scripts_own_are_its_own() -> None:
    line = "--address auto --num_gpus=2 --nnodes 1:4 train.py --address here --num-cpus 3"
    ours, rest = split(line.split())
    assert ours == ["--address", "auto", "--num-gpus=2"]
    assert rest == ["--nnodes", "1:4", "train.py", "--address", "here", "--num-cpus", "3"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--nproc-per-node gpu {script}", "give a number"),
        ("--resources [1] {script}", "--resources is JSON"),
        ("--working-dir /nowhere {script}", "/nowhere"),
        ("--rdzv-endpoint node0 {script}", "--rdzv-endpoint has no meaning on Ray"),
        ("--rdzv-backend etcd --rdzv-id x {script}", "--rdzv-backend has no meaning on Ray"),
        ("--dry-run {script}", "see `elasticrun --dry-run`"),
    ],
)
def test_a_command_line_that_cannot_work_is_answered_with_2(
    line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.format(script=__file__).split()) == 2
    assert said in capsys.readouterr().err


def test_torchs_variables_for_a_launcher_are_heeded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[LaunchConfig] = []

    def run(config: LaunchConfig, *_: object) -> RunResult:
        told.append(config)
        return RunResult(WorkerState.FAILED, "the machines are gone")

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "<${rank}> ")
    monkeypatch.setattr("elasticlib.integrations.ray.__main__.run_job", run)
    with its_own_log():
        assert main([__file__]) == 1
    assert told[0].log_line_prefix_template == "<${rank}> "
    error = json.loads((tmp_path / "error.json").read_text())
    assert error["message"]["message"] == "the machines are gone"


@contextlib.contextmanager
def its_own_log() -> Iterator[None]:
    """What a program says of its log is forgotten after it."""
    logger = logging.getLogger("elasticlib")
    before = logger.handlers, logger.level, logger.propagate
    yield
    logger.handlers, logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_where_ray_is_not_installed_the_extra_is_named() -> None:
    with pytest.raises(ConfigError, match=r"pip install 'elasticlib\[ray\]'"):
        find_ray()


def failed(rank: int) -> dict[int, WorkerExit]:
    return {rank: WorkerExit(0, rank, pid=1, returncode=1)}


def test_the_nodes_values_and_failures_are_the_jobs() -> None:
    done = WorkerState.SUCCEEDED
    both = merged([RunResult(done, "ok", {2: "c"}), RunResult(done, "ok", {0: "a", 1: "b"})])
    assert (both.state, list(both.values.items())) == (done, [(0, "a"), (1, "b"), (2, "c")])
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
