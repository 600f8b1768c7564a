"""Detection of the scheduler that started this node: Slurm (tested with 22.05) and SkyPilot.

A detector is a pure function of the environment. It returns None if its scheduler did not start
this process, else the settings of the job: the text of each setting, as on the command line, with
the name of the variable that it is from.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from math import prod

from ..endpoint import join_endpoint
from ..errors import ConfigError

SchedulerSettings = Mapping[str, tuple[str, str]]
SchedulerDetector = Callable[[Mapping[str, str]], "SchedulerSettings | None"]

# Ports of the rendezvous. They are below the ephemeral ports of Linux (32768 and up), and exclude
# the defaults 29400 and 29500 of jobs that choose no port.
PORTS = range(20000, 29000)
# Distance between the ports of two steps of one Slurm job. Jobs with adjacent ids, such as those of
# an array, have adjacent ports.
PORT_OFFSET_PER_STEP = 1000
DRAIN_SIGNALS = "SIGUSR1,SIGUSR2"
_MIN_SPECIAL_STEP = 0xFFFFFFF0  # step ids from here on mean a batch script or an interactive shell


def detect_scheduler(name: str, environment: Mapping[str, str]) -> tuple[str, SchedulerSettings]:
    """Return the name of the scheduler that started this process, and its settings.

    Args:
        name: `none`, `auto` or the name of a scheduler.
        environment: the environment of this process.

    Returns:
        The name of the scheduler, or `none`, and the settings.

    Raises:
        ConfigError: the scheduler did not start this process, or its variables contradict each
            other.
    """
    if name == "none":
        return "none", {}
    for candidate in DETECTORS if name == "auto" else (name,):
        settings = DETECTORS[candidate](environment)
        if settings is not None:
            return candidate, settings
    if name == "auto":
        return "none", {}
    variable = {"slurm": "SLURM_JOB_ID", "skypilot": "SKYPILOT_NODE_IPS"}[name]
    raise ConfigError(
        f"--scheduler {name}: {variable} is not set, so {name} did not start this process; run "
        f"elasticrun in a {name} job, or remove the option"
    )


# -- Slurm -----------------------------------------------------------------------------------------


def read_slurm(environment: Mapping[str, str]) -> SchedulerSettings | None:
    """Return the settings of a Slurm job whose agents `srun` starts, one per node.

    Each step is a job of its own. The job keeps its id when Slurm requeues it.

    Raises:
        ConfigError: the variables do not describe one job with one agent per node.
    """
    job_id = environment.get("SLURM_JOB_ID", "")
    if not job_id:
        return None
    _check_one_agent_per_node(environment)
    step = _step(environment)
    size, nodelist = _size_and_nodelist_variables(environment, step)
    # The last task of an array has the id of the whole array, so the name contains the index.
    array, task = (environment.get(f"SLURM_ARRAY_{part}_ID") for part in ("JOB", "TASK"))
    name = f"{array}_{task}" if array and task else job_id
    settings = {
        # The step is part of the name, in Slurm's notation, so that a later step is a new job.
        "rdzv_id": (name if step is None else f"{name}.{step}", "SLURM_JOB_ID"),
        "drain_signals": (DRAIN_SIGNALS, "SLURM_JOB_ID"),
        **_given(environment, nnodes=size, node_rank="SLURM_NODEID"),
        **_nproc_per_node(environment, "SLURM_GPUS_ON_NODE"),
    }
    if environment.get(nodelist):
        offset = PORT_OFFSET_PER_STEP * (step or 0)
        port = PORTS[(_integer(job_id, "SLURM_JOB_ID") + offset) % len(PORTS)]
        first = expand_nodelist(environment[nodelist])[0]
        settings["rdzv_endpoint"] = (join_endpoint(first, port), nodelist)
    # The switches above this node, if the site has configured them.
    switches, _, _ = environment.get("SLURM_TOPOLOGY_ADDR", "").rpartition(".")
    kinds, _, last = environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").rpartition(".")
    if switches and last == "node" and switches.count(".") == kinds.count("."):
        settings["topology"] = (switches, "SLURM_TOPOLOGY_ADDR")
    return settings


def _step(environment: Mapping[str, str]) -> int | None:
    """Return the step that `srun` created, or None in a batch script or an interactive shell."""
    text = environment.get("SLURM_STEP_ID", "")
    step = _integer(text, "SLURM_STEP_ID") if text else _MIN_SPECIAL_STEP
    return step if step < _MIN_SPECIAL_STEP else None


def _size_and_nodelist_variables(
    environment: Mapping[str, str], step: int | None
) -> tuple[str, str]:
    """Return the names of two variables: the number of nodes, and the list of nodes.

    Raises:
        ConfigError: `srun` did not start this process in a job of several nodes.
    """
    if step is not None:
        return "SLURM_STEP_NUM_NODES", "SLURM_STEP_NODELIST"
    size = "SLURM_JOB_NUM_NODES"
    if environment.get(size, "1") != "1":
        raise ConfigError(
            f"{size}={environment[size]}, but srun did not start elasticrun: use srun "
            "--ntasks-per-node=1 elasticrun ..., or --scheduler none"
        )
    return size, "SLURM_JOB_NODELIST"


def _check_one_agent_per_node(environment: Mapping[str, str]) -> None:
    parts = environment.get("SLURM_HET_SIZE")
    if parts:
        raise ConfigError(
            f"SLURM_HET_SIZE={parts}: each component of a heterogeneous job would be a separate "
            "job; use --scheduler none and give --nnodes, --rdzv-id and --rdzv-endpoint"
        )
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", "1")
    if any(count != "1" for count in re.sub(r"\(x[0-9]+\)", "", tasks).split(",")):
        raise ConfigError(
            f"SLURM_STEP_TASKS_PER_NODE={tasks}: one elasticrun per node starts all of the node's "
            "workers; use srun --ntasks-per-node=1, and --nproc-per-node"
        )


def _given(environment: Mapping[str, str], **variables: str) -> dict[str, tuple[str, str]]:
    """Return the settings whose variables are set.

    Args:
        environment: the environment of this process.
        variables: the name of the variable of each setting.
    """
    return {
        setting: (environment[variable], variable)
        for setting, variable in variables.items()
        if environment.get(variable)
    }


def _nproc_per_node(environment: Mapping[str, str], variable: str) -> dict[str, tuple[str, str]]:
    """Return nproc_per_node, one worker per GPU, or no setting if the node has no GPUs."""
    if environment.get(variable) == "0":
        return {}
    return _given(environment, nproc_per_node=variable)


def _integer(text: str, variable: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{variable} must be an integer, got {text!r}")
    return int(text)


MAX_HOSTNAMES = 65536  # more than Slurm supports in one cluster
_RANGE = "[0-9]+(?:-[0-9]+)?"
_NAME = rf"(?:[^\s,\[\]]|\[{_RANGE}(?:,{_RANGE})*\])+"
_PIECE = r"\[[^\]]*\]|[^\[\]]+"


def expand_nodelist(text: str) -> list[str]:
    """Return the names in a Slurm node list, in the order of `scontrol show hostnames`.

    `n[01-03,7],m2` is n01, n02, n03, n7 and m2. A number is padded to the width of the first number
    of its range. Containers often lack scontrol, so the list is expanded here.

    Raises:
        ConfigError: the text is no node list, or has more than `MAX_HOSTNAMES` names.
    """
    if re.fullmatch(rf"{_NAME}(?:,{_NAME})*", text) is None:
        raise ConfigError(
            f"a Slurm node list must be names with numbers in brackets, such as n[01-03,7],m2, "
            f"got {text!r}"
        )
    names: list[str] = []
    for entry in re.findall(_NAME, text):
        pieces = [
            _numbers(piece[1:-1]) if piece.startswith("[") else [piece]
            for piece in re.findall(_PIECE, entry)
        ]
        if len(names) + prod(map(len, pieces)) > MAX_HOSTNAMES:
            raise ConfigError(
                f"a Slurm node list must have at most {MAX_HOSTNAMES} names, got {text!r}"
            )
        names += _combine_pieces(pieces)
    return names


def _combine_pieces(pieces: list[list[str]]) -> Iterator[str]:
    """Yield all combinations of the pieces in Slurm's order.

    The last bracket varies fastest, and the first one next, because Slurm reads from both ends.
    """
    *first, last = pieces
    if len(last) == 1 and first:
        *first, numbers = first
        last = [number + last[0] for number in numbers]
    for chosen in product(*reversed(first)):
        head = "".join(reversed(chosen))
        yield from (head + tail for tail in last)


def _numbers(text: str) -> list[str]:
    """Return the numbers between one pair of brackets."""
    numbers: list[str] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        low, high = int(first), int(last or first)
        if low > high or high - low >= MAX_HOSTNAMES:
            raise ConfigError(
                f"a range of a Slurm node list must ascend and have at most {MAX_HOSTNAMES} "
                f"numbers, got [{text}]"
            )
        numbers += (str(number).zfill(len(first)) for number in range(low, high + 1))
    return numbers


# -- SkyPilot --------------------------------------------------------------------------------------


def read_skypilot(environment: Mapping[str, str]) -> SchedulerSettings | None:
    """Return the settings of a SkyPilot task.

    All recoveries of a managed job have the same SKYPILOT_TASK_ID, which is the job's id here.

    Raises:
        ConfigError: the variables contradict each other.
    """
    addresses = environment.get("SKYPILOT_NODE_IPS", "").split()
    if not addresses:
        return None
    size = environment.get("SKYPILOT_NUM_NODES")
    if size and size != str(len(addresses)):
        raise ConfigError(
            f"SKYPILOT_NUM_NODES={size}, but SKYPILOT_NODE_IPS has "
            f"{len(addresses)} addresses: {', '.join(addresses)}"
        )
    # Several tasks of one cluster may run at once, and all of them use its first node.
    task = environment.get("SKYPILOT_TASK_ID", "")
    port = PORTS[zlib.crc32(task.encode()) % len(PORTS)]
    return {
        "nnodes": (str(len(addresses)), "SKYPILOT_NUM_NODES" if size else "SKYPILOT_NODE_IPS"),
        "rdzv_endpoint": (join_endpoint(addresses[0], port), "SKYPILOT_NODE_IPS"),
        **_given(environment, node_rank="SKYPILOT_NODE_RANK", rdzv_id="SKYPILOT_TASK_ID"),
        **_nproc_per_node(environment, "SKYPILOT_NUM_GPUS_PER_NODE"),
    }


# In the order in which `auto` tries them.
DETECTORS: Mapping[str, SchedulerDetector] = {"slurm": read_slurm, "skypilot": read_skypilot}
