"""Settings that are read from the variables of Slurm and SkyPilot, as real clusters set them."""

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
from elasticlib.launch.arguments import Launch, parse_launch
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
ONE_NODE = {"SLURM_JOB_ID": "5", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "gpu7"}
SKY = {
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_TASK_ID": "sky-managed-2026-11-21-06-21-18-563597_job_1-0",
}


def launch(script: str, line: str, variables: Mapping[str, str]) -> Launch:
    return parse_launch(["--scheduler", "auto", *line.split(), script], variables)


def values_of(settings: Mapping[str, tuple[str, str]] | None) -> dict[str, str]:
    assert settings is not None
    return {name: value for name, (value, _) in settings.items()}


def test_slurm_step_is_a_job_whose_id_survives_a_requeue() -> None:
    assert values_of(read_slurm(STEP)) == {
        "rdzv_id": "4711.0",
        "drain_signals": "SIGUSR1,SIGUSR2",
        "nnodes": "2",
        "node_rank": "1",
        "rdzv_endpoint": f"n1:{PORTS.start + 4711}",
    }
    requeued = values_of(read_slurm({**STEP, "SLURM_RESTART_COUNT": "3"}))
    assert requeued["rdzv_id"] == "4711.0"
    second = values_of(read_slurm({**STEP, "SLURM_STEP_ID": "1"}))
    assert (second["rdzv_id"], second["rdzv_endpoint"]) == ("4711.1", f"n1:{PORTS.start + 5711}")


def test_run_id_of_an_array_task_names_the_array_and_the_task() -> None:
    # The job id of the last task is the id of the array.
    array = {**STEP, "SLURM_ARRAY_JOB_ID": "4711", "SLURM_ARRAY_TASK_ID": "9"}
    assert values_of(read_slurm(array))["rdzv_id"] == "4711_9.0"


def test_ports_are_in_the_range_and_differ_between_adjacent_jobs() -> None:
    ports = {
        values_of(read_slurm({**STEP, "SLURM_JOB_ID": str(job)}))["rdzv_endpoint"]
        for job in range(10**9, 10**9 + 500)
    }
    assert len(ports) == 500
    assert all(int(port.partition(":")[2]) in PORTS for port in ports)


def test_single_node_job_needs_no_slurm_step() -> None:
    settings = values_of(read_slurm(ONE_NODE))
    assert (settings["nnodes"], settings["rdzv_id"]) == ("1", "5")
    # Slurm sets this step id in an interactive shell, which is not a step of srun.
    shell = {**ONE_NODE, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NODELIST": "login"}
    assert values_of(read_slurm(shell)) == settings


def test_gpus_and_switches_set_the_worker_count_and_the_topology(script: str) -> None:
    hardware = {
        "SLURM_GPUS_ON_NODE": "4",
        "SLURM_TOPOLOGY_ADDR": "core.leaf3.n2",
        "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node",
    }
    options = launch(script, "", {**STEP, **hardware}).options
    assert (options.workers.count, options.rendezvous.topology) == (4, "core.leaf3")
    none = launch(script, "", {**STEP, "SLURM_GPUS_ON_NODE": "0"}).options
    assert (none.workers.count, none.rendezvous.topology) == (1, "")


@pytest.mark.parametrize(
    ("variables", "message"),
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
        (
            {**STEP, "SLURM_GPUS_ON_NODE": "gpu:2"},
            r"SLURM_GPUS_ON_NODE \(--nproc-per-node\) must be a number",
        ),
    ],
)
def test_job_that_cannot_have_one_agent_per_node_is_rejected(
    variables: dict[str, str], message: str, script: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        launch(script, "", variables)


def test_options_of_the_user_take_precedence_over_slurm(script: str) -> None:
    line = "--nnodes 1:2 --rdzv-id mine --rdzv-conf join_timeout=7"
    options = launch(script, line, STEP).options
    assert (options.job.min_nodes, options.rendezvous.run_id) == (1, "mine")
    assert options.rendezvous.timeouts.join_timeout == 7.0


def test_signals_of_slurm_drain_a_node_and_sigterm_does_not(script: str) -> None:
    agent = launch(script, "", STEP).options.agent
    assert agent.drain_signals == (signal.SIGUSR1, signal.SIGUSR2)
    assert agent.notice_signals == (signal.SIGTERM,)
    # A command line written for torchrun may stop the job on SIGUSR1.
    agent = launch(script, "--signals-to-handle SIGTERM,SIGUSR1", STEP).options.agent
    assert agent.stop_signals == (signal.SIGTERM, signal.SIGUSR1)
    assert agent.drain_signals == (signal.SIGUSR2,)


def test_slurm_settings_that_contradict_the_users_endpoint_are_ignored(
    script: str, tmp_path: Path
) -> None:
    switched = {"SLURM_TOPOLOGY_ADDR": "s.n2", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.node"}
    variables = {**STEP, **switched}
    standalone = launch(script, "--standalone", variables).options
    assert standalone.job.max_nodes == 1
    assert (standalone.rendezvous.endpoint, standalone.rendezvous.topology) == ("", "")
    static = launch(script, "--rdzv-backend static", variables).options.rendezvous
    assert (static.node_rank, static.endpoint) == (1, f"n1:{PORTS.start + 4711}")
    line = f"--rdzv-backend file --rdzv-endpoint {tmp_path}"
    shared = launch(script, line, variables).options.rendezvous
    assert (shared.endpoint, shared.topology) == (str(tmp_path), "s")
    with pytest.raises(ConfigError, match="--rdzv-endpoint must be given for the file backend"):
        launch(script, "--rdzv-backend file", variables)
    spare = launch(script, "--nnodes 1:1 --spares 1", variables)
    assert spare.options.rendezvous.node_rank is None
    assert spare.warnings == ("ignoring SLURM_NODEID=1: the job has up to 1 nodes",)


def test_run_id_of_a_skypilot_task_survives_its_recoveries(script: str) -> None:
    request = launch(script, "", SKY)
    options = request.options
    assert (request.scheduler, options.rendezvous.run_id) == ("skypilot", SKY["SKYPILOT_TASK_ID"])
    assert (options.job.max_nodes, options.rendezvous.node_rank, options.workers.count) == (2, 1, 8)
    host, _, port = options.rendezvous.endpoint.partition(":")
    assert (host, int(port) in PORTS) == ("10.0.0.1", True)
    other_nodes = {**SKY, "SKYPILOT_NODE_IPS": "10.9.9.9\n10.9.9.8", "SKYPILOT_NODE_RANK": "0"}
    recovered = launch(script, "", other_nodes).options.rendezvous
    assert (recovered.run_id, recovered.endpoint) == (
        options.rendezvous.run_id,
        f"10.9.9.9:{port}",
    )


def test_scheduler_option_accepts_each_scheduler() -> None:
    assert ("none", "auto", *DETECTORS) == SCHEDULERS


def test_no_scheduler_is_detected_elsewhere_and_slurm_takes_precedence(script: str) -> None:
    assert read_slurm({}) is None
    assert read_skypilot({"SKYPILOT_NODE_IPS": ""}) is None
    assert launch(script, "", {}).scheduler == "none"
    assert launch(script, "", {**SKY, **STEP}).scheduler == "slurm"
    assert values_of(
        read_skypilot({"SKYPILOT_NODE_IPS": "h", "SKYPILOT_NUM_GPUS_PER_NODE": "0"})
    ) == {
        "nnodes": "1",
        "rdzv_endpoint": values_of(read_skypilot({"SKYPILOT_NODE_IPS": "h"}))["rdzv_endpoint"],
    }


WORDS = st.from_regex("[a-z]{1,3}-?", fullmatch=True)
NUMBERS = st.lists(
    st.tuples(st.integers(0, 120), st.integers(0, 4), st.integers(1, 3)), min_size=1, max_size=3
)


def compress(ranges: list[tuple[int, int, int]]) -> tuple[str, list[str]]:
    """Return ranges of (first, how many more, width) in brackets, and the numbers in them."""
    texts, numbers = [], []
    for first, more, width in ranges:
        low = f"{first:0{width}d}"
        texts.append(low if more == 0 else f"{low}-{first + more:0{width}d}")
        numbers += [f"{number:0{width}d}" for number in range(first, first + more + 1)]
    return f"[{','.join(texts)}]", numbers


@given(st.lists(st.tuples(WORDS, st.lists(NUMBERS, max_size=2)), min_size=1, max_size=3))
def test_expanding_a_compressed_list_of_nodes_returns_their_names(
    entries: list[tuple[str, list]],
) -> None:
    texts, names = [], []
    for prefix, brackets in entries:
        parts = [compress(ranges) for ranges in brackets]
        texts.append(prefix + "x".join(text for text, _ in parts))
        for numbers in itertools.product(*(expanded for _, expanded in parts)):
            names.append(prefix + "x".join(numbers))
    assert expand_nodelist(",".join(texts)) == names


def test_unusual_lists_of_nodes_are_expanded_or_rejected() -> None:
    assert expand_nodelist("n[1-2]-ib,m") == ["n1-ib", "n2-ib", "m"]
    assert expand_nodelist("n[08-11]") == ["n08", "n09", "n10", "n11"]
    for text in ("", ",", "n1,,n2", "n[", "n]", "n[]", "n[1-]", "n[a]", "n[1 2]", "n[[1]]", "n 1"):
        with pytest.raises(ConfigError, match=re.escape(f"got {text!r}")):
            expand_nodelist(text)
    for text in ("n[2-1]", f"n[1-{MAX_HOSTNAMES + 1}]", "n[1-300]m[1-300]"):
        with pytest.raises(ConfigError, match=r"a range of a Slurm|at most \d+ names"):
            expand_nodelist(text)
