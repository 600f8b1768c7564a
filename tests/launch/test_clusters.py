"""What Slurm's and SkyPilot's variables say, as they were seen on a real one, and what not."""

from __future__ import annotations

import itertools
import re
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.errors import ConfigError
from elasticlib.launch.arguments import LaunchRequest, parse_launch
from elasticlib.launch.flags import SCHEDULERS
from elasticlib.launch.schedulers import (
    DETECTORS,
    MAX_HOSTNAMES,
    PORTS,
    expand_nodelist,
    read_skypilot,
    read_slurm,
)

BATCH = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_NODEID": "0",
}
STEP = {
    **BATCH,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_NODEID": "1",
    "SLURM_TOPOLOGY_ADDR": "n2",
    "SLURM_TOPOLOGY_ADDR_PATTERN": "node",
}
ALONE = {"SLURM_JOB_ID": "5", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "gpu7"}
SKY = {
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_TASK_ID": "sky-managed-2026-11-21-06-21-18-563597_job_1-0",
}


def launch(script: str, line: str, variables: Mapping[str, str]) -> LaunchRequest:
    return parse_launch(["--scheduler", "auto", *line.split(), script], variables)


def values(told: Mapping[str, tuple[str, str]] | None) -> dict[str, str]:
    assert told is not None
    return {name: value for name, (value, _) in told.items()}


def test_a_step_is_a_job_of_its_own_that_keeps_its_name() -> None:
    assert values(read_slurm(STEP)) == {
        "rdzv_id": "4711.0",
        "drain_signals": "SIGUSR1,SIGUSR2",
        "nnodes": "2",
        "node_rank": "1",
        "rdzv_endpoint": f"n1:{PORTS.start + 4711}",
    }
    again = values(read_slurm({**STEP, "SLURM_RESTART_COUNT": "3"}))
    assert again["rdzv_id"] == "4711.0"
    second = values(read_slurm({**STEP, "SLURM_STEP_ID": "1"}))
    assert (second["rdzv_id"], second["rdzv_endpoint"]) == ("4711.1", f"n1:{PORTS.start + 5711}")


def test_a_task_of_an_array_is_told_from_the_array() -> None:
    # The last task bears the array's own id.
    array = {**STEP, "SLURM_ARRAY_JOB_ID": "4711", "SLURM_ARRAY_TASK_ID": "9"}
    assert values(read_slurm(array))["rdzv_id"] == "4711_9.0"


def test_ports_are_of_the_range_and_those_of_neighbours_differ() -> None:
    ports = {
        values(read_slurm({**STEP, "SLURM_JOB_ID": str(job)}))["rdzv_endpoint"]
        for job in range(10**9, 10**9 + 500)
    }
    assert len(ports) == 500
    assert all(int(port.partition(":")[2]) in PORTS for port in ports)


def test_one_node_needs_no_step() -> None:
    told = values(read_slurm(ALONE))
    assert (told["nnodes"], told["rdzv_id"]) == ("1", "5")
    # Of an interactive shell, not of a step that srun made.
    shell = {**ALONE, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NODELIST": "login"}
    assert values(read_slurm(shell)) == told


def test_gpus_and_switches_are_told_where_there_are_any(script: str) -> None:
    more = {
        "SLURM_GPUS_ON_NODE": "4",
        "SLURM_TOPOLOGY_ADDR": "core.leaf3.n2",
        "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node",
    }
    config = launch(script, "", {**STEP, **more}).config
    assert (config.nproc_per_node, config.topology) == (4, "core.leaf3")
    none = launch(script, "", {**STEP, "SLURM_GPUS_ON_NODE": "0"}).config
    assert (none.nproc_per_node, none.topology) == (1, "")


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        (BATCH, "SLURM_JOB_NUM_NODES=2, but srun did not start elasticrun"),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, "use srun --ntasks-per-node=1"),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "1(x2),2"}, "use srun --ntasks-per-node=1"),
        (
            {**STEP, "SLURM_HET_SIZE": "2"},
            "SLURM_HET_SIZE=2: each component of a heterogeneous job",
        ),
        ({**STEP, "SLURM_JOB_ID": "x"}, "SLURM_JOB_ID must be an integer, got 'x'"),
        ({**STEP, "SLURM_STEP_NODELIST": "n[1"}, r"got 'n\[1'"),
        ({**SKY, "SKYPILOT_NUM_NODES": "3"}, "SKYPILOT_NUM_NODES=3.*has 2 addresses"),
        ({**STEP, "SLURM_GPUS_ON_NODE": "gpu:2"}, "--nproc-per-node is set by SLURM_GPUS_ON_NODE"),
    ],
)
def test_what_cannot_be_one_agent_a_node_is_refused(
    variables: dict[str, str], sentence: str, script: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        launch(script, "", variables)


def test_what_the_user_says_goes_before_slurm_and_beside_it(script: str) -> None:
    line = "--nnodes 1:2 --rdzv-id mine --rdzv-conf join_timeout=7"
    config = launch(script, line, STEP).config
    assert (config.min_nodes, config.run_id) == (1, "mine")
    assert config.options.join_timeout == 7.0


def test_slurms_signals_drain_and_sigterm_is_as_ever(script: str) -> None:
    agent = launch(script, "", STEP).config.supervision.agent
    assert agent.drain_signals == (signal.SIGUSR1, signal.SIGUSR2)
    assert agent.notice_signals == (signal.SIGTERM,)
    # Of a job that has torchrun end on SIGUSR1.
    ends = launch(script, "--signals-to-handle SIGTERM,SIGUSR1", STEP).config.supervision.agent
    assert ends.stop_signals == (signal.SIGTERM, signal.SIGUSR1)
    assert ends.drain_signals == (signal.SIGUSR2,)


def test_what_does_not_fit_a_place_of_the_users_is_left_out(script: str, tmp_path: Path) -> None:
    switched = {"SLURM_TOPOLOGY_ADDR": "s.n2", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.node"}
    variables = {**STEP, **switched}
    alone = launch(script, "--standalone", variables).config
    assert (alone.max_nodes, alone.is_single_node, alone.topology) == (1, True, "")
    static = launch(script, "--rdzv-backend static", variables).config
    assert (static.node_rank, static.rdzv_endpoint) == (1, f"n1:{PORTS.start + 4711}")
    shared = launch(script, f"--rdzv-backend file --rdzv-endpoint {tmp_path}", variables).config
    assert (shared.rdzv_endpoint, shared.topology) == (str(tmp_path), "s")
    with pytest.raises(ConfigError, match="a job with 2 nodes requires"):
        launch(script, "--rdzv-backend file", variables)
    spare = launch(script, "--nnodes 1:1 --spares 1", variables)
    assert spare.config.node_rank is None
    assert spare.settings.warnings == ("ignoring SLURM_NODEID=1: the job has up to 1 nodes",)


def test_skypilots_task_is_the_run_over_all_recoveries(script: str) -> None:
    told = launch(script, "", SKY)
    config = told.config
    assert (told.scheduler, config.run_id) == ("skypilot", SKY["SKYPILOT_TASK_ID"])
    assert (config.max_nodes, config.node_rank, config.nproc_per_node) == (2, 1, 8)
    host, _, port = config.rdzv_endpoint.partition(":")
    assert (host, int(port) in PORTS) == ("10.0.0.1", True)
    elsewhere = {**SKY, "SKYPILOT_NODE_IPS": "10.9.9.9\n10.9.9.8", "SKYPILOT_NODE_RANK": "0"}
    recovered = launch(script, "", elsewhere).config
    assert (recovered.run_id, recovered.rdzv_endpoint) == (config.run_id, f"10.9.9.9:{port}")


def test_each_scheduler_has_a_name_of_the_flag() -> None:
    assert ("none", "auto", *DETECTORS) == SCHEDULERS


def test_nothing_is_said_elsewhere_and_slurm_is_asked_first(script: str) -> None:
    assert read_slurm({}) is None
    assert read_skypilot({"SKYPILOT_NODE_IPS": ""}) is None
    assert launch(script, "", {}).scheduler == "none"
    assert launch(script, "", {**SKY, **STEP}).scheduler == "slurm"
    assert values(read_skypilot({"SKYPILOT_NODE_IPS": "h", "SKYPILOT_NUM_GPUS_PER_NODE": "0"})) == {
        "nnodes": "1",
        "rdzv_endpoint": values(read_skypilot({"SKYPILOT_NODE_IPS": "h"}))["rdzv_endpoint"],
    }


WORDS = st.from_regex("[a-z]{1,3}-?", fullmatch=True)
NUMBERS = st.lists(
    st.tuples(st.integers(0, 120), st.integers(0, 4), st.integers(1, 3)), min_size=1, max_size=3
)


def compressed(ranges: list[tuple[int, int, int]]) -> tuple[str, list[str]]:
    """Brackets, and what they stand for: (first, how many more, width) each."""
    texts, numbers = [], []
    for first, more, width in ranges:
        low = f"{first:0{width}d}"
        texts.append(low if more == 0 else f"{low}-{first + more:0{width}d}")
        numbers += [f"{number:0{width}d}" for number in range(first, first + more + 1)]
    return f"[{','.join(texts)}]", numbers


@given(st.lists(st.tuples(WORDS, st.lists(NUMBERS, max_size=2)), min_size=1, max_size=3))
def test_a_list_of_nodes_is_what_was_compressed(entries: list[tuple[str, list]]) -> None:
    texts, names = [], []
    for word, brackets in entries:
        parts = [compressed(ranges) for ranges in brackets]
        texts.append(word + "x".join(text for text, _ in parts))
        for numbers in itertools.product(*(found for _, found in parts)):
            names.append(word + "x".join(numbers))
    assert expand_nodelist(",".join(texts)) == names


def test_lists_of_nodes_that_slurm_never_wrote_still_have_one_meaning() -> None:
    assert expand_nodelist("n[1-2]-ib,m") == ["n1-ib", "n2-ib", "m"]
    assert expand_nodelist("n[08-11]") == ["n08", "n09", "n10", "n11"]
    for text in ("", ",", "n1,,n2", "n[", "n]", "n[]", "n[1-]", "n[a]", "n[1 2]", "n[[1]]", "n 1"):
        with pytest.raises(ConfigError, match=re.escape(f"got {text!r}")):
            expand_nodelist(text)
    for text in ("n[2-1]", f"n[1-{MAX_HOSTNAMES + 1}]", "n[1-300]m[1-300]"):
        with pytest.raises(ConfigError, match=r"a range of a Slurm|at most \d+ names"):
            expand_nodelist(text)
