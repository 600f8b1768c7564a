"""Precedence of options, PET_* variables and scheduler variables, and warnings about the rest."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import pytest

from elasticlib.errors import ConfigError
from elasticlib.launch.arguments import LaunchRequest, parse_launch
from elasticlib.launch.flags import DEFAULTS, FLAGS
from elasticlib.launch.launch_config import LaunchConfig
from elasticlib.launch.settings import Source


def launch(script: str, line: str = "", **variables: str) -> LaunchRequest:
    return parse_launch([*line.split(), script], variables)


def test_variable_sets_an_option_and_the_command_line_takes_precedence(script: str) -> None:
    request = launch(script, "--max-restarts 2", PET_MAX_RESTARTS="7", PET_NPROC_PER_NODE="3")
    assert (request.config.max_restarts, request.config.nproc_per_node) == (2, 3)
    origins = {name: request.settings.settings[name].origin for name in ("max_restarts", "role")}
    assert origins == {"max_restarts": "--max-restarts", "role": "default"}
    assert request.settings.settings["nproc_per_node"].origin == "PET_NPROC_PER_NODE"
    assert not request.settings.warnings


@pytest.mark.parametrize(
    ("text", "is_on"), [("", True), ("1", True), ("2", True), ("0", False), ("false", False)]
)
def test_empty_variable_turns_a_switch_on_as_kubeflow_expects(
    text: str, is_on: bool, script: str
) -> None:
    assert launch(script, PET_STANDALONE=text).settings["standalone"] is is_on


def test_empty_variable_of_an_option_with_a_value_is_ignored(script: str) -> None:
    request = launch(script, PET_NNODES="", PET_RDZV_ENDPOINT="", PET_MAX_RESTARTS="")
    assert (request.config.max_nodes, request.config.max_restarts) == (1, 0)


def test_old_variable_of_kubeflow_sets_the_number_of_workers(script: str) -> None:
    assert launch(script, PET_N_PROC_PER_NODE="2").config.nproc_per_node == 2
    both = launch(script, PET_N_PROC_PER_NODE="2", PET_NPROC_PER_NODE="3")
    assert both.config.nproc_per_node == 3


def test_shutdown_timeout_is_read_from_the_variable_of_torch(script: str) -> None:
    assert launch(script, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="7").config.shutdown_timeout == 7.0
    both = launch(script, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="7", PET_SHUTDOWN_TIMEOUT="8")
    assert both.config.shutdown_timeout == 8.0


def test_options_without_an_equivalent_in_torchrun_have_a_variable_too(script: str) -> None:
    switches = {o.dest for o in FLAGS.values() if o.is_switch}
    assert switches >= {"standalone", "module", "no_python", "virtual_local_rank"}
    assert launch(script, PET_SPARES="1", PET_NNODES="1:2", PET_RDZV_ENDPOINT="h").config.spares


def test_defaults_are_the_same_on_the_command_line_and_in_python(script: str) -> None:
    flags, python = launch(script).config, LaunchConfig()
    other = {
        *("max_restarts", "role"),  # torchrun and torch's LaunchConfig have different defaults
        "shutdown_timeout",  # a config without a value uses the one of torch's variable
        "run_id",  # the id of a single-node job is generated
    }
    for name in attrs.fields_dict(LaunchConfig):
        assert (getattr(flags, name) == getattr(python, name)) is (name not in other), name
    for options in (python, python.supervision, python.supervision.agent):
        for name in set(attrs.fields_dict(type(options))) & set(FLAGS) - other:
            if isinstance(DEFAULTS[name], (int, float)):
                assert getattr(options, name) == DEFAULTS[name], name


def test_unknown_pet_variable_gets_a_warning(script: str) -> None:
    (warning,) = launch(script, PET_NNODE="4").settings.warnings
    assert warning == "ignoring PET_NNODE: elasticrun has no such option (did you mean PET_NNODES?)"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"PET_MAX_RESTARTS": "x"}, r"PET_MAX_RESTARTS \(--max-restarts\) must be an integer"),
        ({"PET_STANDALONE": "maybe"}, "PET_STANDALONE .* must be 1 or 0, got 'maybe'"),
        (
            {"PET_RDZV_BACKEND": "zeus"},
            r"one of tcp.* \(--rdzv-backend is set by PET_RDZV_BACKEND\)",
        ),
        (
            {"PET_NNODES": "4:1"},
            r"--nnodes must be MIN:MAX with 1 <= MIN <= MAX.*\(--nnodes is set by PET_NNODES\)",
        ),
        ({"PET_NPROC_PER_NODE": "0"}, r"--nproc-per-node is set by PET_NPROC_PER_NODE"),
        # Otherwise, each of the two nodes would run the same single-node job without a warning.
        ({"PET_STANDALONE": "", "PET_NNODES": "2"}, "single-node job.*PET_STANDALONE"),
    ],
)
def test_invalid_value_of_a_variable_is_rejected_by_name(
    variables: Mapping[str, str], message: str, script: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        launch(script, **variables)


STATIC = {"PET_MASTER_ADDR": "m", "PET_MASTER_PORT": "7", "PET_NODE_RANK": "1"}
ENDPOINT_CASES = [
    # The variables of an operator have the same meaning as for torchrun.
    ("--nnodes 2", STATIC, ("static", "m:7", 1), 0),
    # The node rank remains as a hint.
    ("--nnodes 2 --rdzv-endpoint h:9 --rdzv-id j", STATIC, ("tcp", "h:9", 1), 2),
    ("--nnodes 1:4 --rdzv-backend c10d", STATIC, ("c10d", "m:7", 1), 0),
    ("--nnodes 1:4", STATIC, ("tcp", "m:7", 1), 0),
    (
        "",
        {**STATIC, "PET_NNODES": "2", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "h"},
        ("c10d", "h", 1),
        2,
    ),
    ("--nnodes 2 --rdzv-backend file --rdzv-endpoint /x --rdzv-id j", STATIC, ("file", "/x", 1), 2),
    (
        "--nnodes 2 --master-addr f --node-rank 0",
        {"PET_RDZV_ENDPOINT": "h", "PET_RDZV_BACKEND": "etcd"},
        ("static", "f:29500", 0),
        2,
    ),
    ("--standalone", {**STATIC, "PET_NNODES": "4", "PET_RDZV_ENDPOINT": "h"}, ("tcp", "", None), 5),
    ("--nnodes 2 --rdzv-endpoint h", {"PET_STANDALONE": ""}, ("tcp", "h", None), 1),
    ("--rdzv-backend c10d --rdzv-endpoint localhost:0", {}, ("c10d", "", None), 0),
    (
        "--nnodes 2 --rdzv-backend static --rdzv-endpoint h:1 --node-rank 0",
        {"PET_MASTER_ADDR": "m"},
        ("static", "h:1", 0),
        1,
    ),
    # A single node without a port for others is a single-node job, and two equal endpoints agree.
    ("--node-rank 0", {}, ("tcp", "", None), 0),
    ("--rdzv-backend static --node-rank 5 --master-addr m", {}, ("tcp", "", None), 3),
    ("", {"PET_NODE_RANK": "5", "PET_MASTER_PORT": "0"}, ("tcp", "", None), 1),
    ("--master-port 0", {}, ("tcp", "", None), 0),
    ("--standalone --node-rank 0 --master-port 0", {}, ("tcp", "", None), 0),
    ("--node-rank 0 --master-port 0", {"PET_STANDALONE": ""}, ("tcp", "", None), 0),
    ("--rdzv-backend static --rdzv-endpoint localhost:0", {}, ("tcp", "", 0), 0),
    ("--master-addr 0.0.0.0 --master-port 7", {}, ("static", "127.0.0.1:7", 0), 0),
    ("--rdzv-backend static --rdzv-endpoint H:9 --master-addr h", {}, ("static", "H:9", 0), 0),
    # The rank hint of a spare node has no effect.
    ("--nnodes 1:2 --rdzv-endpoint h --node-rank 2", {}, ("tcp", "h", None), 1),
]


@pytest.mark.parametrize(("line", "variables", "expected", "num_ignored"), ENDPOINT_CASES)
def test_most_direct_setting_selects_the_rendezvous_and_the_ignored_ones_are_named(
    line: str,
    variables: dict[str, str],
    expected: tuple[object, ...],
    num_ignored: int,
    script: str,
) -> None:
    request = launch(script, line, **variables)
    config = request.config
    assert (config.rdzv_backend, config.rdzv_endpoint, config.node_rank) == expected
    assert len(request.settings.warnings) == num_ignored
    assert all(warning.startswith("ignoring ") for warning in request.settings.warnings)


def test_contradicting_options_of_the_command_line_are_rejected(script: str) -> None:
    with pytest.raises(ConfigError, match="cannot be used with --standalone"):
        launch(script, "--standalone --rdzv-endpoint h")
    with pytest.raises(ConfigError, match="--master-addr applies only to the static backend"):
        launch(script, "--master-addr m --rdzv-endpoint h --nnodes 2")


def test_scheduler_sets_only_options_that_are_not_set_otherwise(script: str) -> None:
    job = {"SKYPILOT_NODE_IPS": "10.0.0.1", "SKYPILOT_TASK_ID": "j9", "SKYPILOT_NUM_NODES": "1"}
    job["SKYPILOT_NUM_GPUS_PER_NODE"] = "2"
    request = launch(script, "--scheduler skypilot", **job, PET_RDZV_ID="mine")
    assert request.scheduler == "skypilot"
    assert (request.config.run_id, request.config.nproc_per_node) == ("mine", 2)
    assert request.settings.source("nproc_per_node") is Source.SCHEDULER
    assert request.settings.settings["nproc_per_node"].origin == "SKYPILOT_NUM_GPUS_PER_NODE"
    assert launch(script, "--scheduler auto", **job).scheduler == "skypilot"
    assert launch(script, "--scheduler auto").scheduler == "none"
    assert launch(script, **job).scheduler == "none"
    with pytest.raises(ConfigError, match="one of none, auto, slurm, skypilot, got 'pbs'"):
        launch(script, PET_SCHEDULER="pbs")
    with pytest.raises(ConfigError, match="--scheduler slurm: SLURM_JOB_ID is not set"):
        launch(script, "--scheduler slurm")
