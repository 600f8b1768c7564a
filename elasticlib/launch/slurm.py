"""What Slurm's variables say of a job: a function of the environment, tried on Slurm 22.05.

One agent a node, started by `srun`; each step is a job of its own, which keeps its name when Slurm
requeues it. Where the variables cannot mean one job of one agent a node, that is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..endpoint import join_endpoint
from ..errors import ConfigError
from .nodelist import expand_nodelist

PORTS = range(20000, 29000)
"""Where the nodes of a job meet. Below those that systems give out (32768 and up, on Linux), and
not the 29400 and 29500 of jobs that choose none."""
STEP_APART = 1000
"""From the port of a step to the next one's of the same job; jobs with ids next to each other, as
of an array, have ports next to each other."""
DRAIN_SIGNALS = "SIGUSR1,SIGUSR2"
_NO_STEP = 0xFFFFFFF0
"""From here on a step's id means a batch script or an interactive shell."""

Told = dict[str, tuple[str, str]]


def read_slurm(environment: Mapping[str, str]) -> Told | None:
    """Settings by name, each as text with the variable it is from; None outside of Slurm's jobs.

    Raises:
        ConfigError: they are of what cannot be one job of one agent a node.
    """
    job = environment.get("SLURM_JOB_ID", "")
    if not job:
        return None
    _refuse_several(environment)
    step = _step(environment)
    size, listed = _size_and_list(environment, step)
    told: Told = {
        "rdzv_id": (_run_id(environment, step), "SLURM_JOB_ID"),
        "rdzv_conf": (f"launch={_launch(environment)}", "SLURM_RESTART_COUNT"),
        "drain_signals": (DRAIN_SIGNALS, "SLURM_JOB_ID"),
    }
    _add(told, "nnodes", environment, size)
    _add(told, "node_rank", environment, "SLURM_NODEID")
    if environment.get("SLURM_GPUS_ON_NODE") not in (None, "", "0"):
        _add(told, "nproc_per_node", environment, "SLURM_GPUS_ON_NODE")
    if environment.get(listed):
        first = expand_nodelist(environment[listed])[0]
        told["rdzv_endpoint"] = (join_endpoint(first, _port(job, step)), listed)
    topology = _topology(environment)
    if topology:
        told["topology"] = (topology, "SLURM_TOPOLOGY_ADDR")
    return told


def requeue_target(environment: Mapping[str, str]) -> str:
    """What `scontrol requeue` is to be told: the job, or one task of an array.

    Raises:
        ConfigError: this is no job of Slurm's.
    """
    job = environment.get("SLURM_JOB_ID", "")
    if not job:
        raise ConfigError(
            "--requeue slurm is for jobs of Slurm's, and SLURM_JOB_ID is not set: leave it out"
        )
    return _name_of(environment)


def _add(told: Told, setting: str, environment: Mapping[str, str], name: str) -> None:
    if environment.get(name):
        told[setting] = (environment[name], name)


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
            f"{size}={environment[size]}, and this is not a step of srun's on these nodes: "
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


def _name_of(environment: Mapping[str, str]) -> str:
    """An array's last task bears the id of the whole array, and is told from it by its index."""
    array, task = (environment.get(f"SLURM_ARRAY_{part}_ID") for part in ("JOB", "TASK"))
    return f"{array}_{task}" if array and task else environment["SLURM_JOB_ID"]


def _run_id(environment: Mapping[str, str], step: int | None) -> str:
    """As Slurm writes it. A later step is not to be taken for one that came late to an earlier."""
    name = _name_of(environment)
    return name if step is None else f"{name}.{step}"


def _launch(environment: Mapping[str, str]) -> str:
    """Each start of the job is to be a new one wherever a store remembers the last."""
    return f"restart-{environment.get('SLURM_RESTART_COUNT') or '0'}"


def _port(job: str, step: int | None) -> int:
    number = _number(job, "SLURM_JOB_ID") + STEP_APART * (step or 0)
    return PORTS[number % len(PORTS)]


def _topology(environment: Mapping[str, str]) -> str:
    """The switches above this node, where the site has told Slurm of them."""
    address = environment.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    kinds = environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    if len(address) != len(kinds) or kinds[-1] != "node":
        return ""
    return ".".join(address[:-1])


def _number(text: str, name: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{name} is a whole number, got {text!r}")
    return int(text)
