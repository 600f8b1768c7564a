"""`LaunchConfig` is torch's, field for field: each works, or is refused with a sentence."""

from __future__ import annotations

import dataclasses
import inspect
import os
import signal
from pathlib import Path
from typing import Any

import attrs
import pytest
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher import LaunchConfig as TorchConfig
from torch.distributed.launcher import elastic_launch as torch_launch
from torch.numa.binding import AffinityMode, NumaOptions

from elasticlib import AgentOptions, LaunchConfig, SupervisionOptions, elastic_launch
from elasticlib.compat.launching import ours
from elasticlib.errors import ConfigError
from elasticlib.launch.arguments import read_launch
from elasticlib.launch.elastic_launch import shutdown_seconds
from elasticlib.launch.own_workers import _processors

# On this machine no worker could be bound, so these never go further than the config.
NODE = NumaOptions(affinity_mode=AffinityMode.NODE)


def test_the_fields_are_torchs_in_torchs_order_and_ours_are_by_keyword() -> None:
    theirs = [field.name for field in dataclasses.fields(TorchConfig)]
    mine = attrs.fields(LaunchConfig)
    assert [field.name for field in mine if not field.kw_only] == theirs
    assert list(inspect.signature(elastic_launch).parameters) == list(
        inspect.signature(torch_launch).parameters
    )


def test_the_defaults_are_torchs_but_for_those_that_are_named_here() -> None:
    other = {
        "rdzv_backend",  # theirs is an etcd of version 2, which nobody has
        "run_id",  # theirs is drawn at random on each node, so that nodes never meet
        "start_method",  # spawn works as well, and costs the import of torch at each start
        "signals_to_handle",  # None means the same
        "shutdown_timeout",
        *("duplicate_stdout_filters", "duplicate_stderr_filters"),  # () for None
    }
    mine = LaunchConfig(1, 1, 1)
    theirs = TorchConfig(1, 1, 1, DefaultLogsSpecs(os.devnull), rdzv_backend="c10d")
    for field in dataclasses.fields(TorchConfig)[3:]:
        if field.name not in other:
            drawn = field.default is dataclasses.MISSING
            assert getattr(mine, field.name) == ({} if drawn else field.default), field.name
    assert ours(theirs, LaunchConfig).supervision == mine.supervision


def test_a_config_of_torch_is_read_field_by_field(tmp_path: Path) -> None:
    theirs = TorchConfig(
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
    mine = ours(theirs, LaunchConfig)
    assert (mine.min_nodes, mine.max_nodes, mine.nproc_per_node) == (2, 4, 8)
    assert (mine.run_id, mine.role, mine.max_restarts) == ("job", "trainer", 9)
    said = "--nproc-per-node 2 --redirects 1:1 --tee 3"
    flags = read_launch([*said.split(), __file__], {}).config
    assert (mine.log_dir, mine.redirects, mine.tee) == (str(tmp_path), flags.redirects, flags.tee)
    assert mine.local_ranks_filter == frozenset({0, 1})
    assert mine.timing.join == 7  # torch has added a timeout of 900, which its c10d does not read
    assert mine.supervision.agent.signals == (signal.SIGTERM, signal.SIGUSR2)
    assert mine.supervision.agent.drain_signals == ()
    assert (mine.start_method, mine.numa_binding) == ("forkserver", "node")
    assert (mine.duplicate_stdout_filters, mine.shutdown_timeout) == (("loss",), 4)
    assert attrs.evolve(mine) == mine


def test_a_field_that_a_newer_torch_has_is_refused_where_it_says_something() -> None:
    @dataclasses.dataclass
    class Newer(TorchConfig):
        cooling: str = "none"

    place = {"logs_specs": DefaultLogsSpecs(os.devnull), "rdzv_backend": "c10d"}
    assert ours(Newer(1, 1, 6, **place), LaunchConfig).nproc_per_node == 6
    with pytest.raises(ConfigError, match="the field cooling of torch's LaunchConfig"):
        ours(Newer(1, 1, 1, cooling="water", **place), LaunchConfig)


def test_one_node_at_port_0_of_its_own_meets_nobody() -> None:
    for endpoint in ("localhost:0", "127.0.0.1:0", "[::1]:0"):
        assert LaunchConfig(rdzv_endpoint=endpoint, rdzv_backend="c10d").alone
        static = {"rdzv_backend": "static", "rdzv_configs": {"rank": 0, "timeout": 5}}
        assert LaunchConfig(rdzv_endpoint=endpoint, **static).alone
    with pytest.raises(ConfigError, match="cannot meet at port 0"):
        LaunchConfig(1, 2, rdzv_endpoint="localhost:0")


def test_an_empty_run_id_is_a_new_one_for_a_node_alone_and_refused_for_others() -> None:
    drawn = {LaunchConfig(run_id="").run_id for _ in range(2)}
    assert len(drawn) == 2
    with pytest.raises(ConfigError, match="--rdzv-id is a name of 1 to 256 bytes"):
        LaunchConfig(1, 2, run_id="", rdzv_endpoint="node0")


def test_a_static_rank_and_a_timeout_are_had_by_torchs_names() -> None:
    config = LaunchConfig(
        2,
        2,
        rdzv_backend="static",
        rdzv_endpoint="node0:29500",
        rdzv_configs={"rank": 1},
        rdzv_timeout=5,
    )
    assert (config.node_rank, config.timing.join) == (1, 5)


def test_torchs_variable_says_how_long_a_stop_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shutdown_seconds(LaunchConfig()) == 30
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "7")
    assert shutdown_seconds(LaunchConfig()) == 7
    assert shutdown_seconds(LaunchConfig(shutdown_timeout=3)) == 3
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "soon")
    with pytest.raises(ConfigError, match="TORCH_ELASTIC_SHUTDOWN_TIMEOUT='soon' is seconds"):
        shutdown_seconds(LaunchConfig())


def test_workers_that_cannot_be_bound_run_all_the_same_where_that_is_asked_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match="--numa-binding node binds each worker near its GPU"):
        _processors(LaunchConfig(numa_options=NODE), {})
    anywhere = NumaOptions(AffinityMode.NODE, should_fall_back_if_binding_fails=True)
    assert _processors(LaunchConfig(numa_options=anywhere), {}) == ()
    assert "workers run on any processors: --numa-binding node" in caplog.text


class Elsewhere(DefaultLogsSpecs):
    """A class of the user's own, which may send the files anywhere."""


def test_specs_of_ones_own_class_say_where_output_goes() -> None:
    specs = Elsewhere(os.devnull)
    assert LaunchConfig(1, 1, 1, specs).logs_specs is specs
    assert LaunchConfig(1, 1, 1, DefaultLogsSpecs(os.devnull)).logs_specs is None


SIGUSR1_ENDS = SupervisionOptions(agent=AgentOptions(signals=(signal.SIGUSR1,)))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"metrics_cfg": {"a": "b"}}, "metrics_cfg has no effect in torch either"),
        ({"event_log_handler": "syslog"}, "--event-log-handler is null or console, got 'syslog'"),
        ({"logs_specs": 3}, "logs_specs is one of torch's LogsSpecs, or the name .* got 3"),
        ({"logs_specs": "nobodys"}, "--logs-specs names an entry point .* got 'nobodys'"),
        (
            {"logs_specs": DefaultLogsSpecs(os.devnull, tee=Std.ALL)},
            "logs_specs sends output to files, and its log_dir is /dev/null",
        ),
        (
            {
                "logs_specs": DefaultLogsSpecs("/", redirects=Std.OUT),
                "redirects": read_launch(["--redirects", "2", __file__], {}).config.redirects,
            },
            "logs_specs says redirects=.*: say it in one of them",
        ),
        ({"numa_options": "node"}, "numa_options is torch's NumaOptions"),
        ({"numa_options": NODE, "numa_binding": "socket"}, "numa_options says numa_binding='node'"),
        ({"signals_to_handle": "SIGWHAT"}, "signals_to_handle is names of signals"),
        ({"signals_to_handle": "SIGKILL"}, "signals_to_handle: SIGKILL cannot mean that"),
        (
            {"signals_to_handle": "SIGHUP", "supervision": SIGUSR1_ENDS},
            "signals_to_handle says SIGHUP, and supervision something else",
        ),
        ({"rdzv_timeout": 0}, "timeout is a positive number of seconds"),
        ({"start_method": "forks"}, "--start-method is one of warm, spawn, fork, forkserver, got"),
        ({"shutdown_timeout": -1}, "--shutdown-timeout is seconds from 0"),
        ({"duplicate_stdout_filters": "loss"}, "filters are a list of texts, got the text 'loss'"),
        (
            {
                "rdzv_backend": "static",
                "rdzv_endpoint": "node0:29500",
                "rdzv_configs": {"rank": "first"},
            },
            "rdzv_configs rank is a whole number, got 'first'",
        ),
        ({"rdzv_backend": "etcd"}, "--rdzv-backend etcd needs an --rdzv-endpoint"),
    ],
    ids=lambda given: "-".join(given) if isinstance(given, dict) else "",
)
def test_what_cannot_be_heeded_is_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        LaunchConfig(**fields)
