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

from elasticlib import (
    AgentOptions,
    LaunchConfig,
    LaunchOptions,
    OutputOptions,
    RendezvousOptions,
    RendezvousSettings,
    RendezvousTimeouts,
    WorkerOptions,
    elastic_launch,
)
from elasticlib.errors import ConfigError
from elasticlib.launch.arguments import parse_launch
from elasticlib.launch.run_id import with_run_id
from elasticlib.launch.torch_config import to_options, with_environment
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
    assert to_options(torchs).agent.stop_signals == AgentOptions().stop_signals


def test_defaults_mean_those_of_the_options_with_two_exceptions() -> None:
    """torch itself has two defaults for these: torchrun has 0 and `default`."""
    options = LaunchConfig().options()
    assert (options.job.max_restarts, options.workers.role) == (3, "default_role")
    job = attrs.evolve(options.job, max_restarts=0)
    workers = attrs.evolve(options.workers, role="default")
    assert attrs.evolve(options, job=job, workers=workers) == LaunchOptions()


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
    options = to_options(torchs)
    assert (options.job.min_nodes, options.job.max_nodes, options.workers.count) == (2, 4, 8)
    assert (options.rendezvous.run_id, options.workers.role) == ("job", "trainer")
    assert options.job.max_restarts == 9
    line = "--nproc-per-node 2 --redirects 1:1 --tee 3"
    flags = parse_launch([*line.split(), __file__], {}).options
    output = options.output
    assert (output.log_dir, output.redirect, output.tee) == (
        str(tmp_path),
        flags.output.redirect,
        flags.output.tee,
    )
    assert output.shown_ranks == frozenset({0, 1})
    # torch has added timeout=900 to the rendezvous configs, but its c10d backend ignores it.
    assert options.rendezvous.timeouts.join_timeout == 7
    assert options.agent.stop_signals == (signal.SIGTERM, signal.SIGUSR2)
    assert options.agent.drain_signals == ()
    assert (options.workers.start_method, options.workers.numa_binding) == ("forkserver", "node")
    assert (output.stdout_filters, options.agent.shutdown_timeout) == (("loss",), 4)
    assert to_options(options) is options


def test_field_of_a_newer_torch_is_rejected_only_if_it_is_not_the_default() -> None:
    @dataclasses.dataclass
    class Newer(TorchConfig):
        cooling: str = "none"

    settings = {"logs_specs": DefaultLogsSpecs(os.devnull), "rdzv_backend": "c10d"}
    assert to_options(Newer(1, 1, 6, **settings)).workers.count == 6
    with pytest.raises(ConfigError, match="the field cooling of torch's LaunchConfig"):
        to_options(Newer(1, 1, 1, cooling="water", **settings))


def test_single_node_at_port_0_of_localhost_needs_no_rendezvous() -> None:
    for endpoint in ("localhost:0", "127.0.0.1:0", "[::1]:0"):
        config = LaunchConfig(rdzv_endpoint=endpoint, rdzv_backend="c10d")
        assert config.options().rendezvous.is_single_node
        static = {"rdzv_backend": "static", "rdzv_configs": {"rank": 0, "timeout": 5}}
        config = LaunchConfig(rdzv_endpoint=endpoint, **static)
        assert config.options().rendezvous.is_single_node
    with pytest.raises(ConfigError, match="rdzv_endpoint must have a fixed port"):
        LaunchConfig(1, 2, rdzv_endpoint="localhost:0").options()


@pytest.mark.parametrize(
    "place",
    [
        {},
        {"rdzv_endpoint": "node0:29400"},
        {"rdzv_endpoint": "node0:29400,node1:29400"},
        {
            "rdzv_endpoint": "node0:29400",
            "rdzv_backend": "static",
            "rdzv_configs": {"rank": 0},
        },
        {"rdzv_endpoint": "a/folder", "rdzv_backend": "file"},
    ],
)
def test_a_single_node_with_an_empty_run_id_gets_a_new_one_at_its_launch(
    place: dict[str, Any],
) -> None:
    options, program = LaunchConfig(run_id="", **place).options(), Script("train.py")
    run_ids = {with_run_id(options, program).rendezvous.run_id for _ in range(20)}
    assert len(run_ids) > 1
    assert all(run_id.startswith("train-") for run_id in run_ids)


def test_several_nodes_with_an_empty_run_id_use_the_default_unless_jobs_may_share_the_store() -> (
    None
):
    for backend in ("c10d", "static"):
        config = LaunchConfig(
            *((2, 2) if backend == "static" else (1, 2)),
            run_id="",
            rdzv_endpoint="node0",
            rdzv_backend=backend,
            rdzv_configs={"rank": 0} if backend == "static" else {},
        )
        assert config.options().rendezvous.run_id == "none"
    with pytest.raises(ConfigError, match="run_id must be given and unique"):
        LaunchConfig(1, 2, run_id="", rdzv_endpoint="a/folder", rdzv_backend="file").options()


def test_static_rank_and_timeout_are_accepted_under_the_names_of_torch() -> None:
    config = LaunchConfig(
        2,
        2,
        rdzv_backend="static",
        rdzv_endpoint="node0:29500",
        rdzv_configs={"rank": 1},
        rdzv_timeout=5,
    )
    rendezvous = config.options().rendezvous
    assert (rendezvous.node_rank, rendezvous.timeouts.join_timeout) == (1, 5)


def test_a_list_of_endpoints_needs_a_quorum_and_the_static_backend_fixes_the_ranks() -> None:
    several = LaunchConfig(1, 2, rdzv_endpoint="a,b").options().job
    assert (several.quorum, several.has_fixed_ranks) == (True, False)
    settings = {"rdzv_endpoint": "a", "rdzv_backend": "static", "rdzv_configs": {"rank": 0}}
    static = LaunchConfig(2, 2, **settings).options().job
    assert (static.quorum, static.has_fixed_ranks) == (None, True)


def test_what_torchs_agent_reads_from_variables_is_used_unless_an_option_sets_it() -> None:
    variables = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7", "USE_LIBUV": "0"}
    options = with_environment(LaunchOptions(), variables)
    assert (options.agent.shutdown_timeout_s, options.workers.use_libuv) == (7, False)
    given = LaunchOptions(
        agent=AgentOptions(shutdown_timeout=3), workers=WorkerOptions(use_libuv=True)
    )
    assert with_environment(given, variables) == given
    assert with_environment(LaunchOptions(), {}).agent.shutdown_timeout_s == 30
    for text in ("soon", "-1"):
        with pytest.raises(ConfigError, match=f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT .*{text}"):
            with_environment(LaunchOptions(), {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": text})


def test_numa_fallback_runs_workers_that_cannot_be_bound(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # The stub of torch has no torch.numa.
    environment = {**os.environ, "PYTHONPATH": WITHOUT_TORCH}
    with pytest.raises(ConfigError, match=r"node: torch\.numa cannot bind 1 workers"):
        create_local_workers(LaunchConfig(numa_options=NODE).options(), environment)
    fall_back = NumaOptions(AffinityMode.NODE, should_fall_back_if_binding_fails=True)
    create_local_workers(LaunchConfig(numa_options=fall_back).options(), environment).close()
    assert "workers are not bound to CPUs: --numa-binding node" in caplog.text


class CustomLogsSpecs(DefaultLogsSpecs):
    """A class of a user, which may write the output of workers anywhere."""


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"metrics_cfg": {"a": "b"}}, "metrics_cfg must be empty"),
        ({"event_log_handler": "console"}, "event_log_handler must be 'null', got 'console': "),
        ({"logs_specs": 3}, "logs_specs must be torch's DefaultLogsSpecs or None, got 3: "),
        (
            {"logs_specs": CustomLogsSpecs(os.devnull)},
            "must be torch's DefaultLogsSpecs .*: use OutputOptions instead",
        ),
        (
            {"logs_specs": DefaultLogsSpecs(os.devnull, tee=Std.ALL)},
            "logs_specs writes output to files, so its log_dir must not be /dev/null",
        ),
        ({"numa_options": "node"}, "numa_options must be torch's NumaOptions"),
        ({"signals_to_handle": "SIGWHAT"}, "signals_to_handle must be signal names"),
        ({"signals_to_handle": "SIGKILL"}, "signals_to_handle cannot contain SIGKILL"),
        ({"rdzv_timeout": 0}, "rdzv_configs join_timeout must be seconds above 0 and up to"),
        (
            {"start_method": "forks"},
            r"^start_method must be one of forkserver, spawn, fork, got 'forks'",
        ),
        ({"shutdown_timeout": -1}, "^shutdown_timeout must be seconds from 0"),
        (
            {"duplicate_stdout_filters": "loss"},
            "duplicate_stdout_filters must be a tuple of strings, got 'loss'",
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
            "rank cannot be set: .* node_rank; .* store_type .*unknown .* key 'colour', 'hue'",
        ),
        ({"rdzv_backend": "etcd"}, "rdzv_endpoint must be given for the etcd backend"),
    ],
    ids=lambda given: "-".join(given) if isinstance(given, dict) else "",
)
def test_field_without_an_equivalent_is_rejected_with_a_message(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        elastic_launch(LaunchConfig(**fields), print)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WorkerOptions(count="2"), "count must be an integer of at least 1, got '2'"),
        (lambda: RendezvousTimeouts(store_grace="5"), "store_grace must be seconds from 0"),
        (lambda: WorkerOptions(virtual_local_rank="no"), "virtual_local_rank must be True or"),
        (lambda: WorkerOptions(preload="torch"), "preload must be a tuple .* got 'torch'"),
        (lambda: RendezvousOptions(run_id=7), "run_id must be a string, got 7"),
        (lambda: OutputOptions(tee="3"), "tee must be a StreamChoice, got '3'"),
        (lambda: RendezvousOptions(conf="is_host=1"), "conf must be a dict, got"),
        (lambda: RendezvousSettings(restart_window="60"), "restart_window must be seconds"),
        (lambda: LaunchOptions(job=WorkerOptions()), "job must be RendezvousSettings, got"),
        (lambda: LaunchConfig(rdzv_configs="x").options(), "rdzv_configs must be a dict, got 'x'"),
        (lambda: LaunchConfig("1").options(), "min_nodes must be an integer of at least 1"),
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
    ],
)
def test_value_of_a_wrong_type_is_rejected_by_its_field(
    make: Callable[[], object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_paths_numbers_and_lists_are_accepted_where_text_is_expected(tmp_path: Path) -> None:
    assert OutputOptions(log_dir=tmp_path).log_dir == str(tmp_path)
    assert WorkerOptions(preload=["json"]).preload == ("json",)
    script = Script(tmp_path / "train.py", ["--epochs", 3])
    assert (script.path, script.args) == (f"{tmp_path}/train.py", ("--epochs", "3"))


def test_an_error_names_the_field_of_the_options_of_torch_or_the_flag() -> None:
    rule = "must be HOST:PORT in a job with up to 2 nodes"
    with pytest.raises(ConfigError, match=f"^endpoint {rule}") as error:
        LaunchOptions(job=RendezvousSettings(1, 2))
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)
    with pytest.raises(ConfigError, match=f"^rdzv_endpoint {rule}"):
        LaunchConfig(max_nodes=2).options()
    with pytest.raises(ConfigError, match=f"^--rdzv-endpoint {rule}"):
        parse_launch(["--nnodes", "1:2", __file__], {})
