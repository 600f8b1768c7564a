"""Flags, PET_* variables and a scheduler's: which goes first, and what is said of the others."""

from __future__ import annotations

import re
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


def test_a_variable_stands_in_for_a_flag_and_the_flag_goes_before_it(script: str) -> None:
    told = launch(script, "--max-restarts 2", PET_MAX_RESTARTS="7", PET_NPROC_PER_NODE="3")
    assert (told.config.max_restarts, told.config.nproc_per_node) == (2, 3)
    origins = {name: told.settings.settings[name].origin for name in ("max_restarts", "role")}
    assert origins == {"max_restarts": "--max-restarts", "role": "default"}
    assert told.settings.settings["nproc_per_node"].origin == "PET_NPROC_PER_NODE"
    assert not told.settings.warnings


@pytest.mark.parametrize(
    ("text", "on"), [("", True), ("1", True), ("2", True), ("0", False), ("false", False)]
)
def test_a_switch_may_be_set_to_nothing_as_kubeflow_does(text: str, on: bool, script: str) -> None:
    assert launch(script, PET_STANDALONE=text).settings["standalone"] is on


def test_an_empty_variable_says_nothing(script: str) -> None:
    told = launch(script, PET_NNODES="", PET_RDZV_ENDPOINT="", PET_MAX_RESTARTS="")
    assert (told.config.max_nodes, told.config.max_restarts) == (1, 0)


def test_kubeflows_old_spelling_counts_workers_too(script: str) -> None:
    assert launch(script, PET_N_PROC_PER_NODE="2").config.nproc_per_node == 2
    both = launch(script, PET_N_PROC_PER_NODE="2", PET_NPROC_PER_NODE="3")
    assert both.config.nproc_per_node == 3


def test_torchs_variable_for_the_shutdown_is_read(script: str) -> None:
    assert launch(script, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="7").config.shutdown_timeout == 7.0
    both = launch(script, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="7", PET_SHUTDOWN_TIMEOUT="8")
    assert both.config.shutdown_timeout == 8.0


def test_every_flag_has_a_variable(script: str) -> None:
    switches = {o.dest for o in FLAGS.values() if o.is_switch}
    assert switches >= {"standalone", "module", "no_python", "virtual_local_rank"}
    assert launch(script, PET_SPARES="1", PET_NNODES="1:2", PET_RDZV_ENDPOINT="h").config.spares


def test_what_nobody_says_is_the_same_from_the_command_line_and_from_python(script: str) -> None:
    flags, python = launch(script).config, LaunchConfig()
    other = {
        *("max_restarts", "role"),  # which torchrun and torch's LaunchConfig call otherwise
        "shutdown_timeout",  # a config that does not say it leaves it to torch's variable
        "run_id",  # of a node by itself: drawn
    }
    for name in attrs.fields_dict(LaunchConfig):
        assert (getattr(flags, name) == getattr(python, name)) is (name not in other), name
    for holder in (python, python.supervision, python.supervision.agent):
        for name in set(attrs.fields_dict(type(holder))) & set(FLAGS) - other:
            if isinstance(DEFAULTS[name], (int, float)):
                assert getattr(holder, name) == DEFAULTS[name], name


def test_an_unknown_variable_of_the_kind_is_named(script: str) -> None:
    (note,) = launch(script, PET_NNODE="4").settings.warnings
    assert note == "ignoring PET_NNODE: elasticrun has no such option (did you mean PET_NNODES?)"


@pytest.mark.parametrize(
    ("variables", "sentence"),
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
        # Two nodes, each by itself, would train the same twice and say nothing.
        ({"PET_STANDALONE": "", "PET_NNODES": "2"}, "single-node job.*PET_STANDALONE"),
    ],
)
def test_a_variable_that_cannot_work_is_named(
    variables: Mapping[str, str], sentence: str, script: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        launch(script, **variables)


STATIC = {"PET_MASTER_ADDR": "m", "PET_MASTER_PORT": "7", "PET_NODE_RANK": "1"}
PLACES = [
    # What the variables of an operator say is what torchrun would do.
    ("--nnodes 2", STATIC, ("static", "m:7", 1), 0),
    # The rank stays, as a wish.
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
    # One node without a port for others is by itself, and one place may be named twice.
    ("--node-rank 0", {}, ("tcp", "", None), 0),
    ("--rdzv-backend static --node-rank 5 --master-addr m", {}, ("tcp", "", None), 3),
    ("", {"PET_NODE_RANK": "5", "PET_MASTER_PORT": "0"}, ("tcp", "", None), 1),
    ("--master-port 0", {}, ("tcp", "", None), 0),
    ("--standalone --node-rank 0 --master-port 0", {}, ("tcp", "", None), 0),
    ("--node-rank 0 --master-port 0", {"PET_STANDALONE": ""}, ("tcp", "", None), 0),
    ("--rdzv-backend static --rdzv-endpoint localhost:0", {}, ("tcp", "", 0), 0),
    ("--master-addr 0.0.0.0 --master-port 7", {}, ("static", "127.0.0.1:7", 0), 0),
    ("--rdzv-backend static --rdzv-endpoint H:9 --master-addr h", {}, ("static", "H:9", 0), 0),
    # A spare node's wish, which nothing comes of.
    ("--nnodes 1:2 --rdzv-endpoint h --node-rank 2", {}, ("tcp", "h", None), 1),
]


@pytest.mark.parametrize(("line", "variables", "place", "passed_over"), PLACES)
def test_what_is_said_more_directly_tells_where_nodes_meet_and_the_rest_is_named(
    line: str, variables: dict[str, str], place: tuple[object, ...], passed_over: int, script: str
) -> None:
    told = launch(script, line, **variables)
    config = told.config
    assert (config.rdzv_backend, config.rdzv_endpoint, config.node_rank) == place
    assert len(told.settings.warnings) == passed_over
    assert all(note.startswith("ignoring ") for note in told.settings.warnings)
    assert not any(re.search(r" and \S+ says$", note) for note in told.settings.warnings)


def test_two_flags_that_contradict_each_other_are_refused_as_before(script: str) -> None:
    with pytest.raises(ConfigError, match="cannot be used with --standalone"):
        launch(script, "--standalone --rdzv-endpoint h")
    with pytest.raises(ConfigError, match="--master-addr applies only to the static backend"):
        launch(script, "--master-addr m --rdzv-endpoint h --nnodes 2")


def test_a_scheduler_says_what_nobody_else_does(script: str) -> None:
    job = {"SKYPILOT_NODE_IPS": "10.0.0.1", "SKYPILOT_TASK_ID": "j9", "SKYPILOT_NUM_NODES": "1"}
    job["SKYPILOT_NUM_GPUS_PER_NODE"] = "2"
    told = launch(script, "--scheduler skypilot", **job, PET_RDZV_ID="mine")
    assert told.scheduler == "skypilot"
    assert (told.config.run_id, told.config.nproc_per_node) == ("mine", 2)
    assert told.settings.source("nproc_per_node") is Source.SCHEDULER
    assert told.settings.settings["nproc_per_node"].origin == "SKYPILOT_NUM_GPUS_PER_NODE"
    assert launch(script, "--scheduler auto", **job).scheduler == "skypilot"
    assert launch(script, "--scheduler auto").scheduler == "none"
    assert launch(script, **job).scheduler == "none"
    with pytest.raises(ConfigError, match="one of none, auto, slurm, skypilot, got 'pbs'"):
        launch(script, PET_SCHEDULER="pbs")
    with pytest.raises(ConfigError, match="--scheduler slurm: SLURM_JOB_ID is not set"):
        launch(script, "--scheduler slurm")
