"""What SkyPilot's variables say of a job: a function of the environment.

All recoveries of a managed job bear one SKYPILOT_TASK_ID, which is the run's id.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

from ..endpoint import join_endpoint
from ..errors import ConfigError
from .slurm import PORTS

Told = dict[str, tuple[str, str]]
_SIZES = {"nnodes": "SKYPILOT_NUM_NODES", "node_rank": "SKYPILOT_NODE_RANK"}


def read_skypilot(environment: Mapping[str, str]) -> Told | None:
    """Settings by name, each as text with the variable it is from; None outside of its tasks.

    Raises:
        ConfigError: the variables contradict each other.
    """
    listed = environment.get("SKYPILOT_NODE_IPS", "").split()
    if not listed:
        return None
    told: Told = {"nnodes": (str(len(listed)), "SKYPILOT_NODE_IPS")}
    for setting, name in _SIZES.items():
        if environment.get(name):
            told[setting] = (environment[name], name)
    if told["nnodes"][0] != str(len(listed)):
        raise ConfigError(
            f"SKYPILOT_NUM_NODES={told['nnodes'][0]}, and SKYPILOT_NODE_IPS has "
            f"{len(listed)} addresses: {', '.join(listed)}"
        )
    if environment.get("SKYPILOT_NUM_GPUS_PER_NODE") not in (None, "", "0"):
        gpus = "SKYPILOT_NUM_GPUS_PER_NODE"
        told["nproc_per_node"] = (environment[gpus], gpus)
    task = environment.get("SKYPILOT_TASK_ID")
    if task:
        told["rdzv_id"] = (task, "SKYPILOT_TASK_ID")
    # Several tasks may run at once on one cluster, and meet at its first node.
    port = PORTS[zlib.crc32((task or "").encode()) % len(PORTS)]
    told["rdzv_endpoint"] = (join_endpoint(listed[0], port), "SKYPILOT_NODE_IPS")
    return told
