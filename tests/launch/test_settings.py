"""Precedence of options, PET_* variables and scheduler variables, and warnings about the rest."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticlib import LaunchOptions, RendezvousTimeouts
from elasticlib.errors import ConfigError
from elasticlib.launch.arguments import Launch, parse_launch
from elasticlib.launch.endpoint import decide
from elasticlib.launch.flags import CONF, FLAGS, ROWS, label_of
from elasticlib.launch.layers import Setting, Source
from elasticlib.options import value_at


def launch(script: str, line: str = "", **variables: str) -> Launch:
    return parse_launch([*line.split(), script], variables)


def test_variable_sets_an_option_and_the_command_line_takes_precedence(script: str) -> None:
    request = launch(script, "--max-restarts 2", PET_MAX_RESTARTS="7", PET_NPROC_PER_NODE="3")
    assert (request.options.job.max_restarts, request.options.workers.count) == (2, 3)
    origins = {name: setting.origin for name, setting in request.settings.items()}
    assert origins == {"max_restarts": "--max-restarts", "nproc_per_node": "PET_NPROC_PER_NODE"}
    assert not request.warnings


def test_text_without_effect_is_no_error(script: str) -> None:
    request = launch(script, "--max-restarts 2", PET_MAX_RESTARTS="many")
    assert request.options.job.max_restarts == 2


@pytest.mark.parametrize(
    ("text", "is_on"), [("", True), ("1", True), ("2", True), ("0", False), ("false", False)]
)
def test_empty_variable_turns_a_switch_on_as_kubeflow_expects(
    text: str, is_on: bool, script: str
) -> None:
    options = launch(script, PET_VIRTUAL_LOCAL_RANK=text).options
    assert options.workers.virtual_local_rank is is_on


def test_empty_variable_of_an_option_with_a_value_is_ignored(script: str) -> None:
    options = launch(script, PET_NNODES="", PET_RDZV_ENDPOINT="", PET_MAX_RESTARTS="").options
    assert (options.job.max_nodes, options.job.max_restarts) == (1, 0)


def test_old_variable_of_kubeflow_sets_the_number_of_workers(script: str) -> None:
    assert launch(script, PET_N_PROC_PER_NODE="2").options.workers.count == 2
    both = launch(script, PET_N_PROC_PER_NODE="2", PET_NPROC_PER_NODE="3")
    assert both.options.workers.count == 3


def test_shutdown_timeout_is_read_from_the_variable_of_torch(script: str) -> None:
    options = launch(script, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="7").options
    assert options.agent.shutdown_timeout == 7.0
    both = launch(script, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="7", PET_SHUTDOWN_TIMEOUT="8")
    assert both.options.agent.shutdown_timeout == 8.0


def test_options_without_an_equivalent_in_torchrun_have_a_variable_too(script: str) -> None:
    switches = {flag.dest for flag in FLAGS.values() if flag.is_switch}
    assert switches >= {"standalone", "module", "no_python", "virtual_local_rank"}
    variables = {"PET_SPARES": "1", "PET_NNODES": "1:2", "PET_RDZV_ENDPOINT": "h"}
    assert launch(script, **variables).options.job.spares == 1


def test_a_command_line_without_flags_has_the_defaults_of_the_options(script: str) -> None:
    options = launch(script).options
    named = attrs.evolve(options.rendezvous, run_id="none")  # the id is generated
    assert attrs.evolve(options, rendezvous=named) == LaunchOptions()


def test_each_row_names_fields_of_the_options_and_has_no_default() -> None:
    options = LaunchOptions()
    for row in (*ROWS.values(), *CONF.values()):
        assert row.fields or row.is_joint, row.usage
        for path in row.fields:
            value_at(options, path)
    filled = [path for row in (*ROWS.values(), *CONF.values()) for path in row.fields]
    assert len(filled) == len(set(filled)), "two rows fill one field"


def test_each_rule_of_an_option_names_its_flag_on_the_command_line() -> None:
    """A new field without a row is listed here, so that it is left out on purpose."""
    without_flag = {
        *("agent.kill_timeout", "agent.regroup_grace", "agent.notice_signals"),
        *("job.has_fixed_ranks", "observe.events", "rendezvous.timeouts"),
        *("rendezvous.timeouts.loop_timeout", "workers.may_run_unbound"),
    }
    kinds = {**attrs.asdict(LaunchOptions(), recurse=False)}
    kinds["rendezvous.timeouts"] = RendezvousTimeouts()
    paths = {
        f"{name}.{field.name}" for name, kind in kinds.items() for field in attrs.fields(type(kind))
    }
    assert {path for path in paths if not label_of(path)[0]} == without_flag


def test_unknown_pet_variable_gets_a_warning(script: str) -> None:
    (warning,) = launch(script, PET_NNODE="4").warnings
    assert warning == "ignoring PET_NNODE: elasticrun has no such option (did you mean PET_NNODES?)"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"PET_MAX_RESTARTS": "x"}, r"PET_MAX_RESTARTS \(--max-restarts\) must be an integer"),
        ({"PET_STANDALONE": "maybe"}, "PET_STANDALONE .* must be 1 or 0, got 'maybe'"),
        (
            {"PET_RDZV_BACKEND": "zeus"},
            r"one of tcp.* got 'zeus' \(--rdzv-backend is set by PET_RDZV_BACKEND\)",
        ),
        (
            {"PET_NNODES": "4:1"},
            r"PET_NNODES \(--nnodes\) must be MIN:MAX with 1 <= MIN <= MAX, got '4:1'",
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
    rendezvous = request.options.rendezvous
    assert (rendezvous.backend, rendezvous.endpoint, rendezvous.node_rank) == expected
    assert len(request.warnings) == num_ignored
    assert all(warning.startswith("ignoring ") for warning in request.warnings)


REJECTED_PLACES = [
    ("--standalone --rdzv-endpoint h", "--rdzv-endpoint cannot be used with --standalone"),
    ("--standalone --master-addr h", "--master-addr cannot be used with --standalone"),
    ("--standalone --node-rank 1", "--node-rank cannot be used with --standalone"),
    ("--standalone --rdzv-backend etcd", "remove --rdzv-backend etcd or --standalone"),
    ("--master-addr m --rdzv-endpoint h --nnodes 2", "--master-addr applies only to the static"),
    ("--master-addr m --rdzv-backend c10d --nnodes 2", "--master-addr applies only to the static"),
    ("--master-port 7 --rdzv-backend file", "--master-port applies only to the static backend"),
    ("--rdzv-backend static --rdzv-endpoint h:9 --master-addr m", "disagree: give only one"),
    ("--nnodes 1:2 --node-rank 0 --master-addr m", "--nnodes must be a fixed number of nodes"),
]


@pytest.mark.parametrize(("line", "message"), REJECTED_PLACES)
def test_contradicting_flags_of_the_command_line_are_rejected(
    line: str, message: str, script: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        launch(script, line)


def test_an_endpoint_and_an_equal_master_address_agree(script: str) -> None:
    line = "--nnodes 2 --rdzv-endpoint h:9 --master-addr H --master-port 9 --rdzv-id j"
    assert launch(script, line).options.rendezvous.endpoint == "h:9"


PLACES = st.fixed_dictionaries(
    {},
    optional={
        "rdzv_backend": st.sampled_from(["tcp", "c10d", "static", "file", "etcd", ""]),
        "rdzv_endpoint": st.sampled_from(["h", "h:9", "localhost:0", ""]),
        "master_addr": st.sampled_from(["h", "m", ""]),
        "master_port": st.sampled_from(["0", "9"]),
        "standalone": st.sampled_from(["1", "0"]),
        "node_rank": st.sampled_from(["0", "1", "5"]),
        "nnodes": st.sampled_from(["1", "2", "1:2"]),
    },
)


@given(flags=PLACES, variables=PLACES, scheduler=PLACES)
def test_any_layers_give_one_place_and_a_warning_for_each_setting_that_is_ignored(
    flags: dict[str, str], variables: dict[str, str], scheduler: dict[str, str]
) -> None:
    sources = zip(Source, (flags, variables, scheduler), strict=True)
    layers = [
        {name: Setting(text, source, f"{source.name}.{name}") for name, text in texts.items()}
        for source, texts in sources
    ]
    try:
        found = decide(layers)
    except ConfigError:
        return
    values = found.values
    assert values["rendezvous.backend"] in ("tcp", "c10d", "static", "file", "etcd")
    names = [name for layer in layers for name in layer]
    assert len(found.warnings) <= len(names)
    # The endpoint is what a layer names, or what its master address means.
    named = {
        layer[n].text for layer in layers for n in ("rdzv_endpoint", "master_addr") if n in layer
    }
    host = values["rendezvous.endpoint"].partition(":")[0]
    assert host in {"", "127.0.0.1", *(text.partition(":")[0] for text in named)}
    if "standalone" in found.settings:
        assert (values["rendezvous.endpoint"], values["rendezvous.backend"]) == ("", "tcp")


def test_scheduler_sets_only_options_that_are_not_set_otherwise(script: str) -> None:
    job = {"SKYPILOT_NODE_IPS": "10.0.0.1", "SKYPILOT_TASK_ID": "j9", "SKYPILOT_NUM_NODES": "1"}
    job["SKYPILOT_NUM_GPUS_PER_NODE"] = "2"
    request = launch(script, "--scheduler skypilot", **job, PET_RDZV_ID="mine")
    assert request.scheduler == "skypilot"
    assert (request.options.rendezvous.run_id, request.options.workers.count) == ("mine", 2)
    count = request.settings["nproc_per_node"]
    assert (count.source, count.origin) == (Source.SCHEDULER, "SKYPILOT_NUM_GPUS_PER_NODE")
    assert launch(script, "--scheduler auto", **job).scheduler == "skypilot"
    assert launch(script, "--scheduler auto").scheduler == "none"
    assert launch(script, **job).scheduler == "none"
    with pytest.raises(ConfigError, match="one of none, auto, slurm, skypilot, got 'pbs'"):
        launch(script, PET_SCHEDULER="pbs")
    with pytest.raises(ConfigError, match="--scheduler slurm: SLURM_JOB_ID is not set"):
        launch(script, "--scheduler slurm")
