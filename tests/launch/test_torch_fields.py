"""`LaunchConfig` has the fields of torch's class; each takes effect or is rejected."""

from __future__ import annotations

import dataclasses
import inspect
import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from jobs import WITHOUT_TORCH
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher import LaunchConfig as TorchConfig
from torch.distributed.launcher import elastic_launch as torch_launch
from torch.numa.binding import AffinityMode, NumaOptions

from elasticlib import AgentOptions, LaunchConfig, LocalWorkers, SupervisionOptions, elastic_launch
from elasticlib.compat.torch_launch import to_launch_config
from elasticlib.errors import ConfigError
from elasticlib.launch.arguments import parse_launch
from elasticlib.launch.elastic_launch import shutdown_timeout_of
from elasticlib.launch.run_id import with_run_id
from elasticlib.launch.worker_setup import create_local_workers
from elasticlib.workers.spec import Function, Module, Script, WorkerSpec

# These options are used only in configs, because torch.numa may be unable to bind workers here.
NODE = NumaOptions(affinity_mode=AffinityMode.NODE)


def test_positional_fields_are_those_of_torch_in_the_same_order() -> None:
    torchs = [field.name for field in dataclasses.fields(TorchConfig)]
    config = attrs.fields(LaunchConfig)
    assert [field.name for field in config if not field.kw_only] == torchs
    assert list(inspect.signature(elastic_launch).parameters) == list(
        inspect.signature(torch_launch).parameters
    )


def test_defaults_equal_those_of_torch_with_listed_exceptions() -> None:
    other = {
        "rdzv_backend",  # torch's default is the version 2 API of etcd, which new etcd servers lack
        "run_id",  # torch draws a random id on each node, so that several nodes never agree
        "start_method",  # torch's default imports torch at each start of a worker
        "signals_to_handle",  # None has the same meaning
        "shutdown_timeout",
        *("duplicate_stdout_filters", "duplicate_stderr_filters"),  # () instead of None
    }
    config = LaunchConfig(1, 1, 1)
    torchs = TorchConfig(1, 1, 1, DefaultLogsSpecs(os.devnull), rdzv_backend="c10d")
    for field in dataclasses.fields(TorchConfig)[3:]:
        if field.name not in other:
            default = {} if field.default is dataclasses.MISSING else field.default
            assert getattr(config, field.name) == default, field.name
    assert to_launch_config(torchs, LaunchConfig).supervision == config.supervision


def test_config_of_torch_is_converted_field_by_field(tmp_path: Path) -> None:
    torchs = TorchConfig(
        2,
        4,
        8,
        DefaultLogsSpecs(str(tmp_path), {1: Std.OUT}, Std.ALL, {0, 1}),
        "job",
        "trainer",
        "node0:29400",
        "c10d",
        {"join_timeout": 7, "read_timeout": 5},
        max_restarts=9,
        start_method="forkserver",
        signals_to_handle="SIGTERM,SIGUSR2",
        duplicate_stdout_filters=["loss"],
        shutdown_timeout=4,
        numa_options=NODE,
    )
    config = to_launch_config(torchs, LaunchConfig)
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (2, 4, 8)
    assert (config.run_id, config.role, config.max_restarts) == ("job", "trainer", 9)
    line = "--nproc-per-node 2 --redirects 1:1 --tee 3"
    flags = parse_launch([*line.split(), __file__], {}).config
    assert (config.log_dir, config.redirects, config.tee) == (
        str(tmp_path),
        flags.redirects,
        flags.tee,
    )
    assert config.local_ranks_filter == frozenset({0, 1})
    # torch has added timeout=900 to the rendezvous configs, but its c10d backend ignores it.
    assert config.rendezvous_timeouts.join_timeout == 7
    assert config.supervision.agent.stop_signals == (signal.SIGTERM, signal.SIGUSR2)
    assert config.supervision.agent.drain_signals == ()
    assert (config.start_method, config.numa_binding) == ("forkserver", "node")
    assert (config.duplicate_stdout_filters, config.shutdown_timeout) == (("loss",), 4)
    assert attrs.evolve(config) == config


def test_field_of_a_newer_torch_is_rejected_only_if_it_is_not_the_default() -> None:
    @dataclasses.dataclass
    class Newer(TorchConfig):
        cooling: str = "none"

    settings = {"logs_specs": DefaultLogsSpecs(os.devnull), "rdzv_backend": "c10d"}
    assert to_launch_config(Newer(1, 1, 6, **settings), LaunchConfig).nproc_per_node == 6
    with pytest.raises(ConfigError, match="the field cooling of torch's LaunchConfig"):
        to_launch_config(Newer(1, 1, 1, cooling="water", **settings), LaunchConfig)


def test_single_node_at_port_0_of_localhost_needs_no_rendezvous() -> None:
    for endpoint in ("localhost:0", "127.0.0.1:0", "[::1]:0"):
        assert LaunchConfig(rdzv_endpoint=endpoint, rdzv_backend="c10d").is_single_node
        static = {"rdzv_backend": "static", "rdzv_configs": {"rank": 0, "timeout": 5}}
        assert LaunchConfig(rdzv_endpoint=endpoint, **static).is_single_node
    with pytest.raises(ConfigError, match="must have a fixed port"):
        LaunchConfig(1, 2, rdzv_endpoint="localhost:0")


@pytest.mark.parametrize(
    "place",
    [
        {},
        {"rdzv_endpoint": "node0:29400"},
        {"rdzv_endpoint": "node0:29400,node1:29400"},
        {"rdzv_endpoint": "node0:29400", "rdzv_backend": "static", "node_rank": 0},
        {"rdzv_endpoint": "a/folder", "rdzv_backend": "file"},
    ],
)
def test_a_single_node_with_an_empty_run_id_gets_a_new_one_at_its_launch(
    place: dict[str, Any],
) -> None:
    config, program = LaunchConfig(run_id="", **place), Script("train.py")
    run_ids = {with_run_id(config, program).run_id for _ in range(20)}
    assert len(run_ids) > 1
    assert all(run_id.startswith("train-") for run_id in run_ids)


def test_several_nodes_with_an_empty_run_id_use_the_default_unless_jobs_may_share_the_store() -> (
    None
):
    for backend in ("c10d", "static"):
        rank = {"node_rank": 0} if backend == "static" else {}
        nodes = (2, 2) if backend == "static" else (1, 2)
        config = LaunchConfig(
            *nodes, run_id="", rdzv_endpoint="node0", rdzv_backend=backend, **rank
        )
        assert config.run_id == "none"
    with pytest.raises(ConfigError, match="give each job a unique run_id"):
        LaunchConfig(1, 2, run_id="", rdzv_endpoint="a/folder", rdzv_backend="file")


def test_static_rank_and_timeout_are_accepted_under_the_names_of_torch() -> None:
    config = LaunchConfig(
        2,
        2,
        rdzv_backend="static",
        rdzv_endpoint="node0:29500",
        rdzv_configs={"rank": 1},
        rdzv_timeout=5,
    )
    assert (config.node_rank, config.rendezvous_timeouts.join_timeout) == (1, 5)


def test_shutdown_timeout_of_torch_is_read_from_its_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert shutdown_timeout_of(LaunchConfig()) == 30
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "7")
    assert shutdown_timeout_of(LaunchConfig()) == 7
    assert shutdown_timeout_of(LaunchConfig(shutdown_timeout=3)) == 3
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "soon")
    with pytest.raises(ConfigError, match=r"TORCH_ELASTIC_SHUTDOWN_TIMEOUT .*'soon'"):
        shutdown_timeout_of(LaunchConfig())


def test_numa_fallback_runs_workers_that_cannot_be_bound(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # The stub of torch has no torch.numa.
    environment = {**os.environ, "PYTHONPATH": WITHOUT_TORCH}
    with pytest.raises(ConfigError, match=r"node: torch\.numa cannot bind 1 workers"):
        create_local_workers(LaunchConfig(numa_options=NODE), environment)
    fall_back = NumaOptions(AffinityMode.NODE, should_fall_back_if_binding_fails=True)
    create_local_workers(LaunchConfig(numa_options=fall_back), environment).close()
    assert "workers are not bound to CPUs: --numa-binding node" in caplog.text


class CustomLogsSpecs(DefaultLogsSpecs):
    """A class of a user, which may write the output of workers anywhere."""


STOP_ON_SIGUSR1 = SupervisionOptions(agent=AgentOptions(stop_signals=(signal.SIGUSR1,)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"metrics_cfg": {"a": "b"}}, "metrics_cfg must be empty"),
        ({"event_log_handler": "console"}, "event_log_handler must be 'null', got 'console': "),
        ({"logs_specs": 3}, "logs_specs must be torch's DefaultLogsSpecs or None, got 3: "),
        (
            {"logs_specs": CustomLogsSpecs(os.devnull)},
            "must be torch's DefaultLogsSpecs .*: set log_dir, redirects, tee and local_ranks",
        ),
        (
            {"logs_specs": DefaultLogsSpecs(os.devnull, tee=Std.ALL)},
            "logs_specs writes output to files, so its log_dir must not be /dev/null",
        ),
        (
            {
                "logs_specs": DefaultLogsSpecs("/", redirects=Std.OUT),
                "redirects": parse_launch(["--redirects", "2", __file__], {}).config.redirects,
            },
            "logs_specs has redirects=.*: give only one of them",
        ),
        ({"numa_options": "node"}, "numa_options must be torch's NumaOptions"),
        ({"numa_options": NODE, "numa_binding": "socket"}, "numa_options has numa_binding='node'"),
        ({"signals_to_handle": "SIGWHAT"}, "signals_to_handle must be signal names"),
        ({"signals_to_handle": "SIGKILL"}, "signals_to_handle cannot contain SIGKILL"),
        (
            {"signals_to_handle": "SIGHUP", "supervision": STOP_ON_SIGUSR1},
            "signals_to_handle .SIGHUP. and supervision disagree",
        ),
        ({"rdzv_timeout": 0}, "timeout must be a positive number of seconds"),
        (
            {"start_method": "forks"},
            r"start_method .* must be one of forkserver, spawn, fork, got",
        ),
        ({"shutdown_timeout": -1}, "shutdown_timeout must be seconds from 0"),
        (
            {"duplicate_stdout_filters": "loss"},
            "filters must be a list of strings",
        ),
        (
            {
                "rdzv_backend": "static",
                "rdzv_endpoint": "node0:29500",
                "rdzv_configs": {"rank": "first"},
            },
            "rdzv_configs rank must be an integer, got 'first'",
        ),
        (
            {"rdzv_configs": {"rank": 1, "store_type": "file", "colour": "red", "hue": "x"}},
            "rank cannot be set: .* use node_rank; .* store_type .*unknown .* key 'colour', 'hue'",
        ),
        ({"rdzv_backend": "etcd"}, "rdzv_backend etcd requires rdzv_endpoint"),
    ],
    ids=lambda given: "-".join(given) if isinstance(given, dict) else "",
)
def test_field_without_an_equivalent_is_rejected_with_a_message(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LaunchConfig(**fields)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LaunchConfig(nproc_per_node="2"), "nproc_per_node must be an integer, got '2'"),
        (lambda: LaunchConfig(store_grace="5"), "store_grace must be a number, got '5'"),
        (lambda: LaunchConfig(virtual_local_rank="no"), "virtual_local_rank must be True or False"),
        (
            lambda: LaunchConfig(preload="torch"),
            "preload must be a tuple of strings, got 'torch'",
        ),
        (lambda: LaunchConfig(run_id=7), "run_id must be a string, got 7"),
        (lambda: LaunchConfig(tee="3"), "tee must be a StreamChoice, got '3'"),
        (lambda: LaunchConfig(rdzv_configs="is_host=1"), "rdzv_configs must be a dict, got"),
        (
            lambda: SupervisionOptions(restart_window="60"),
            "restart_window must be a number, got '60'",
        ),
        (lambda: WorkerSpec(Script("x.py"), "2"), "local_world_size must be a whole number >= 1"),
        (
            lambda: WorkerSpec(print),
            "entrypoint must be a Script, Module, Command or Function, got",
        ),
        (
            lambda: Script("x.py", "--a 1"),
            r"args must be a tuple or a list, .* got '--a 1': give \('--a', '1'\)$",
        ),
        (lambda: Function(print, 4), r"args must be a tuple or a list, .* got 4: give \(4,\)$"),
        (lambda: Module("m", 4), r"args must be a tuple or a list, .* got 4: give \('4',\)$"),
        (lambda: Script("-"), "cannot be standard input or another open file descriptor, got '-'"),
        (
            lambda: LocalWorkers({}, start_method="x"),
            r"start_method \(--start-method\) must be one of",
        ),
        (lambda: LaunchConfig(start_method="x"), "^start_method .* must be one of"),
    ],
)
def test_value_of_a_wrong_type_is_rejected_by_its_field(
    make: Callable[[], object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_paths_numbers_and_lists_are_accepted_where_text_is_expected(tmp_path: Path) -> None:
    assert LaunchConfig(log_dir=tmp_path, preload=["json"]).preload == ["json"]
    script = Script(tmp_path / "train.py", ["--epochs", 3])
    assert (script.path, script.args) == (f"{tmp_path}/train.py", ("--epochs", "3"))


def test_errors_name_fields_of_a_config_and_options_of_a_command_line() -> None:
    fields = "a job with up to 2 nodes requires rdzv_endpoint HOST:PORT .* node_rank"
    with pytest.raises(ConfigError, match=fields) as error:
        LaunchConfig(max_nodes=2)
    assert pickle.loads(pickle.dumps(error.value)).args == error.value.args
    flags = "a job with 2 nodes requires --rdzv-endpoint HOST:PORT .* --node-rank"
    with pytest.raises(ConfigError, match=flags):
        parse_launch(["--nnodes", "2", __file__], {})
