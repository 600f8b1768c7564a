"""Which scheduler started this node, and what its variables say of the job: Slurm (tried on 22.05)
and SkyPilot.

A detector is a function of the environment: None where it is not that scheduler's, else a `Job`:
settings by name (`nnodes`, `rdzv_endpoint`, ...), each as text, as on the command line, with the
name of the variable it is from. All here is pure.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from math import prod

from ..endpoint import join_endpoint
from ..errors import ConfigError

Job = Mapping[str, tuple[str, str]]
Detector = Callable[[Mapping[str, str]], "Job | None"]

PORTS = range(20000, 29000)
"""Where the nodes of a job meet. Below those that systems give out (32768 and up, on Linux), and
not the 29400 and 29500 of jobs that choose none."""
STEP_APART = 1000
"""From the port of a step of Slurm's to the next one's of the same job; jobs with ids next to each
other, as of an array, have ports next to each other."""
DRAIN_SIGNALS = "SIGUSR1,SIGUSR2"
_NO_STEP = 0xFFFFFFF0
"""From here on a step's id means a batch script or an interactive shell."""


def read_cluster(name: str, environment: Mapping[str, str]) -> tuple[str, Job]:
    """The scheduler's name and what it says; `none` where `auto` finds none.

    name: `none`, `auto` or the name of a scheduler.

    Raises:
        ConfigError: it did not start this process, or its variables contradict each other.
    """
    if name == "none":
        return "none", {}
    for candidate in OURS if name == "auto" else (name,):
        job = OURS[candidate](environment)
        if job is not None:
            return candidate, job
    if name == "auto":
        return "none", {}
    needed = {"slurm": "SLURM_JOB_ID", "skypilot": "SKYPILOT_NODE_IPS"}[name]
    raise ConfigError(
        f"--from-env {name}: this is not a job of {name}: {needed} is not set; "
        "start elasticrun in one of its jobs, or leave the flag out"
    )


# Slurm


def read_slurm(environment: Mapping[str, str]) -> Job | None:
    """One agent a node, started by `srun`; each step is a job of its own, which keeps its name when
    Slurm requeues it.

    Raises:
        ConfigError: the variables are of what cannot be one job of one agent a node.
    """
    number = environment.get("SLURM_JOB_ID", "")
    if not number:
        return None
    _refuse_several(environment)
    step = _step(environment)
    size, listed = _size_and_list(environment, step)
    # The last task of an array has the id of the whole array, so the name contains the index.
    array, task = (environment.get(f"SLURM_ARRAY_{part}_ID") for part in ("JOB", "TASK"))
    name = f"{array}_{task}" if array and task else number
    found = {
        # As Slurm writes it. A later step is not to be taken for one that came late to an earlier.
        "rdzv_id": (name if step is None else f"{name}.{step}", "SLURM_JOB_ID"),
        "drain_signals": (DRAIN_SIGNALS, "SLURM_JOB_ID"),
        **_given(environment, nnodes=size, node_rank="SLURM_NODEID"),
        **_gpus(environment, "SLURM_GPUS_ON_NODE"),
    }
    if environment.get(listed):
        port = PORTS[(_number(number, "SLURM_JOB_ID") + STEP_APART * (step or 0)) % len(PORTS)]
        first = expand_nodelist(environment[listed])[0]
        found["rdzv_endpoint"] = (join_endpoint(first, port), listed)
    # The switches above this node, where the site has told Slurm of them.
    switches, _, _ = environment.get("SLURM_TOPOLOGY_ADDR", "").rpartition(".")
    kinds, _, last = environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").rpartition(".")
    if switches and last == "node" and switches.count(".") == kinds.count("."):
        found["topology"] = (switches, "SLURM_TOPOLOGY_ADDR")
    return found


def _step(environment: Mapping[str, str]) -> int | None:
    """The step that `srun` made; None in a batch script or an interactive shell."""
    text = environment.get("SLURM_STEP_ID", "")
    number = _number(text, "SLURM_STEP_ID") if text else _NO_STEP
    return number if number < _NO_STEP else None


def _size_and_list(environment: Mapping[str, str], step: int | None) -> tuple[str, str]:
    """The names of the variables with the number of nodes and with their list."""
    if step is not None:
        return "SLURM_STEP_NUM_NODES", "SLURM_STEP_NODELIST"
    size = "SLURM_JOB_NUM_NODES"
    if environment.get(size, "1") != "1":
        raise ConfigError(
            f"{size}={environment[size]}, and elasticrun was not started by srun: "
            "start it with srun --ntasks-per-node=1 elasticrun ..., or take --from-env none"
        )
    return size, "SLURM_JOB_NODELIST"


def _refuse_several(environment: Mapping[str, str]) -> None:
    parts = environment.get("SLURM_HET_SIZE")
    if parts:
        raise ConfigError(
            f"SLURM_HET_SIZE={parts}: each part of a heterogeneous job would be a job by itself; "
            "take --from-env none and give --nnodes, --rdzv-id and --rdzv-endpoint"
        )
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", "1")
    if any(count != "1" for count in re.sub(r"\(x[0-9]+\)", "", tasks).split(",")):
        raise ConfigError(
            f"SLURM_STEP_TASKS_PER_NODE={tasks}: one elasticrun a node starts all of the node's "
            "workers; give srun --ntasks-per-node=1, and elasticrun --nproc-per-node"
        )


def _given(environment: Mapping[str, str], **names: str) -> dict[str, tuple[str, str]]:
    """Settings that a variable says as they are, if it is set."""
    return {
        setting: (environment[name], name)
        for setting, name in names.items()
        if environment.get(name)
    }


def _gpus(environment: Mapping[str, str], name: str) -> dict[str, tuple[str, str]]:
    """A worker for each GPU; a node without any is for the user to divide."""
    return {} if environment.get(name) == "0" else _given(environment, nproc_per_node=name)


def _number(text: str, name: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{name} is a whole number, got {text!r}")
    return int(text)


MOST = 65536
"""Names of one list; more than any Slurm has nodes."""
_RANGE = "[0-9]+(?:-[0-9]+)?"
_NAME = rf"(?:[^\s,\[\]]|\[{_RANGE}(?:,{_RANGE})*\])+"
_PIECE = r"\[[^\]]*\]|[^\[\]]+"


def expand_nodelist(text: str) -> list[str]:
    """Slurm's list of nodes as names, in the order of `scontrol show hostnames`, which containers
    often lack: `n[01-03,7],m2` is n01, n02, n03, n7 and m2.

    Numbers are as wide as the first of their range: `n[08-10]` is n08, n09, n10.

    Raises:
        ConfigError: it is no such list, or one of more than `MOST` names.
    """
    if re.fullmatch(rf"{_NAME}(?:,{_NAME})*", text) is None:
        raise ConfigError(
            f"a list of Slurm's nodes is names with numbers in brackets, as n[01-03,7],m2, "
            f"got {text!r}"
        )
    names: list[str] = []
    for entry in re.findall(_NAME, text):
        pieces = [
            _numbers(piece[1:-1]) if piece.startswith("[") else [piece]
            for piece in re.findall(_PIECE, entry)
        ]
        if len(names) + prod(map(len, pieces)) > MOST:
            raise ConfigError(f"a list of nodes has at most {MOST} names, got {text!r}")
        names += _names(pieces)
    return names


def _names(pieces: list[list[str]]) -> Iterator[str]:
    """The last bracket runs fastest, and before it the first one: Slurm reads from both ends."""
    *first, last = pieces
    if len(last) == 1 and first:
        *first, numbers = first
        last = [number + last[0] for number in numbers]
    for chosen in product(*reversed(first)):
        head = "".join(reversed(chosen))
        yield from (head + tail for tail in last)


def _numbers(text: str) -> list[str]:
    """What stands in one pair of brackets."""
    found: list[str] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        low, high = int(first), int(last or first)
        if low > high or high - low >= MOST:
            raise ConfigError(
                f"a range of Slurm's nodes goes up, and over at most {MOST}, got [{text}]"
            )
        found += (str(number).zfill(len(first)) for number in range(low, high + 1))
    return found


# SkyPilot


def read_skypilot(environment: Mapping[str, str]) -> Job | None:
    """All recoveries of a managed job bear one SKYPILOT_TASK_ID, which is the run's id.

    Raises:
        ConfigError: the variables contradict each other.
    """
    listed = environment.get("SKYPILOT_NODE_IPS", "").split()
    if not listed:
        return None
    size = environment.get("SKYPILOT_NUM_NODES")
    if size and size != str(len(listed)):
        raise ConfigError(
            f"SKYPILOT_NUM_NODES={size}, and SKYPILOT_NODE_IPS has "
            f"{len(listed)} addresses: {', '.join(listed)}"
        )
    # Several tasks may run at once on one cluster, and meet at its first node.
    task = environment.get("SKYPILOT_TASK_ID", "")
    port = PORTS[zlib.crc32(task.encode()) % len(PORTS)]
    return {
        "nnodes": (str(len(listed)), "SKYPILOT_NUM_NODES" if size else "SKYPILOT_NODE_IPS"),
        "rdzv_endpoint": (join_endpoint(listed[0], port), "SKYPILOT_NODE_IPS"),
        **_given(environment, node_rank="SKYPILOT_NODE_RANK", rdzv_id="SKYPILOT_TASK_ID"),
        **_gpus(environment, "SKYPILOT_NUM_GPUS_PER_NODE"),
    }


OURS: Mapping[str, Detector] = {"slurm": read_slurm, "skypilot": read_skypilot}
"""In the order in which `auto` asks them."""
