"""What a launch on Ray is told beside its `LaunchConfig`, and what of that has no meaning there.

Nothing is accepted and ignored: a setting that Ray, or the driver, decides is refused by name.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import attrs

from ...errors import ConfigError
from ...launch.config import LaunchConfig

ENDPOINT = "ray"
"""The `rdzv_endpoint` of a job of several nodes: they meet at the driver, wherever that runs."""


def _positive(name: str, value: float | None) -> None:
    if value is not None and not 0 <= value < float("inf"):
        raise ConfigError(f"{name} is a number from 0, got {value!r}")


@attrs.frozen(kw_only=True)
class RayOptions:
    """Where Ray is, and what each node's agent takes of its node.

    address: of the cluster, for a program that has not called `ray.init`; which one that is
    connected to is used otherwise. num_cpus: Ray's logical CPUs (default: one a worker). num_gpus:
    usually as many as there are workers on a node; they see these GPUs and no others. memory: bytes
    that Ray reserves. resources: custom ones, by name. runtime_env: Ray's, for the agents and so
    for their workers: env_vars, working_dir, pip and what else Ray knows.
    """

    address: str = "auto"
    num_cpus: float | None = None
    num_gpus: float = 0
    memory: float | None = None
    resources: Mapping[str, float] = attrs.field(factory=dict)
    runtime_env: Mapping[str, Any] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        for name in ("num_cpus", "num_gpus", "memory"):
            _positive(name, getattr(self, name))
        for name, amount in self.resources.items():
            if name in ("CPU", "GPU", "memory"):
                raise ConfigError(f"resources are custom ones: give {name} by an option of its own")
            _positive(f"resources[{name!r}]", amount)

    def cpus(self, nproc_per_node: int) -> float:
        """The CPUs of one agent."""
        return float(nproc_per_node) if self.num_cpus is None else float(self.num_cpus)

    def demand(self, nproc_per_node: int) -> dict[str, float]:
        """What one agent takes, under Ray's names."""
        asked = {
            "CPU": self.cpus(nproc_per_node),
            "GPU": float(self.num_gpus),
            "memory": float(self.memory or 0),
            **self.resources,
        }
        return {name: amount for name, amount in asked.items() if amount}

    def of_actor(self, nproc_per_node: int) -> dict[str, Any]:
        """The same as options of a Ray actor."""
        asked: dict[str, Any] = {
            "num_cpus": self.cpus(nproc_per_node),
            "num_gpus": self.num_gpus,
            "resources": dict(self.resources),
        }
        if self.memory:
            asked["memory"] = self.memory
        return asked


def check(config: LaunchConfig) -> None:
    """Raises ConfigError for what has no meaning where Ray places and the driver hosts."""
    refused = {
        "--rdzv-backend": (config.rdzv_backend, ("tcp", "c10d")),
        "--rdzv-endpoint": (config.rdzv_endpoint, ("", ENDPOINT)),
        "--node-rank": (config.node_rank, (None,)),
        "--local-addr": (config.local_addr, (None,)),
        "--topology": (config.topology, ("",)),
        "--spares": (config.spares, (None,)),
    }
    for flag, (value, taken) in refused.items():
        if value not in taken:
            raise ConfigError(f"{flag} has no meaning on Ray, got {value!r}: {_WHY[flag]}")
    for key in ("is_host", "secret_file", "launch"):
        if key in config.rdzv_configs:
            raise ConfigError(
                f"--rdzv-conf {key} has no meaning on Ray: the driver hosts the store, with a "
                "secret that it draws for the job"
            )


_WHY = {
    "--rdzv-backend": "the nodes meet in a tcp store of the driver",
    "--rdzv-endpoint": f"the nodes meet at the driver, so give {ENDPOINT!r}",
    "--node-rank": "all agents are started alike",
    "--local-addr": "all agents are started alike",
    "--topology": "all agents are started alike",
    "--spares": "no more than max_nodes agents are started",
}


def find_ray() -> Any:
    """The module `ray`.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        ray = importlib.import_module("ray")
        importlib.import_module("ray.util.scheduling_strategies")
    except ImportError as error:
        raise ConfigError(
            "elasticlib.integrations.ray needs Ray: install the extra, "
            f"pip install 'elasticlib[ray]' ({error})"
        ) from error
    return ray
