"""Elastic jobs on a Ray cluster: the agents are Ray actors, one a node, placed and replaced.

`ray_launch` is `elastic_launch` for a whole cluster. A setting that Ray or the driver decides is
rejected by name.
"""

from __future__ import annotations

import importlib
import os
import pickle
from collections.abc import Callable, Mapping
from typing import Any

from ...agent.interface import RunResult
from ...errors import ConfigError, ElasticError, format_error
from ...launch.elastic_launch import values_of, with_args
from ...launch.launch_config import LaunchConfig
from ...workers.spec import Entrypoint, Function, entrypoint_name
from .driver import run_on

__all__ = ["ENDPOINT", "ray_launch"]

ENDPOINT = "ray"
"""The `rdzv_endpoint` of a job of several nodes: they meet at the driver, wherever that runs."""
_ALIKE = "all agents are started alike"
_TAKEN: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "rdzv_backend": (("tcp", "c10d"), "the nodes meet in a tcp store of the driver"),
    "rdzv_endpoint": (("", ENDPOINT), f"the nodes meet at the driver, so give {ENDPOINT!r}"),
    "node_rank": ((None,), _ALIKE),
    "local_addr": ((None,), _ALIKE),
    "topology": (("",), _ALIKE),
    "spares": ((None,), "no more than max_nodes agents are started"),
}
"""What fields of a config may say on Ray, and why nothing else."""


class ray_launch:
    """`ray_launch(config, entrypoint)(*args)` returns `{global rank: value}` of all nodes.

    Args:
        config: as for `elastic_launch`; a job of several nodes has `rdzv_endpoint="ray"`. Agents
            run on `min_nodes` to `max_nodes` nodes of the cluster, one on each.
        entrypoint: a function (of any module, also of the program's own, or a notebook's), the
            name of a program, or an entry point of `elasticlib.workers.spec`.
        resources: what Ray reserves for each agent on its node, by Ray's names, such as
            `{"CPU": 8, "GPU": 2}`. The default for `"CPU"` is one for each worker. Workers see
            the GPUs of their agent and no others.

    The program may call `ray.init` before, with an address and a `runtime_env`, which holds for
    agents and workers too. Otherwise the cluster of `RAY_ADDRESS`, or of this machine, is used.

    Raises:
        ChildFailedError: the job failed; `failures` holds those of all nodes whose agents came
            back.
        SignalException: it was stopped or drained.
        ConfigError: it cannot be started as configured.
        ElasticError: an agent broke, or the job succeeded and some of its values were lost.
    """

    def __init__(
        self,
        config: LaunchConfig,
        entrypoint: Callable[..., Any] | str | Entrypoint,
        resources: Mapping[str, float] | None = None,
    ) -> None:
        check(config)
        self._config = config
        self._entrypoint = entrypoint
        self._resources = read_resources(resources or {}, config.nproc_per_node)

    def __call__(self, *args: Any) -> dict[int, Any]:
        entrypoint = with_args(self._entrypoint, args)
        name = entrypoint_name(entrypoint)
        if isinstance(entrypoint, Function):
            entrypoint = _sent(entrypoint)
        values = values_of(name, _run(self._config, entrypoint, self._resources))
        return read_values(values) if isinstance(entrypoint, Function) else values


def read_resources(resources: Mapping[str, float], workers: int) -> dict[str, float]:
    """Return what each agent takes of its node.

    Raises:
        ConfigError: an amount is not a number from 0.
    """
    for name, amount in resources.items():
        if not isinstance(amount, (int, float)) or not 0 <= amount < float("inf"):
            raise ConfigError(f"resources[{name!r}] must be a number from 0, got {amount!r}")
    return {"CPU": float(workers), **{name: float(amount) for name, amount in resources.items()}}


def _run(config: LaunchConfig, entrypoint: Entrypoint, resources: Mapping[str, float]) -> RunResult:
    """Run the job on Ray to its end, and return the result over all nodes."""
    ray = find_ray()
    connected = ray.is_initialized()
    if not connected:
        try:
            ray.init(address="auto")
        except ConnectionError as error:
            raise ConfigError(
                f"there is no Ray cluster: {error}; start one with `ray start --head`, or call "
                "ray.init before"
            ) from error
    try:
        if ray.util.client.ray.is_connected():
            raise ConfigError(
                "the program hosts the job's store, so it runs on a node of the cluster and not as "
                "a Ray client: start it there, or with `ray job submit`"
            )
        return run_on(ray, config, entrypoint, resources)
    finally:
        if not connected:
            ray.shutdown()


def check(config: LaunchConfig) -> None:
    """Raises ConfigError for what has no meaning where Ray places and the driver hosts."""
    for field, (taken, why) in _TAKEN.items():
        value = getattr(config, field)
        if value not in taken:
            raise ConfigError(f"{field} has no meaning on Ray, got {value!r}: {why}")
    for key in ("is_host", "secret_file", "launch"):
        if key in config.rdzv_configs:
            raise ConfigError(
                f"{key} of rdzv_configs has no meaning on Ray: the driver hosts the store, with a "
                "secret that it draws for the job"
            )


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


# -- a function's way to the workers and back ------------------------------------------------------
#
# The driver's own `__main__` is not theirs, so a function goes as Ray's cloudpickle has it. The
# agents hand both on as bytes: only a worker calls it, and only the driver reads what it returned.


def _sent(function: Function) -> Function:
    """The worker's function that calls this one."""
    cloudpickle = find_ray().cloudpickle
    try:
        return Function(call, (bytes(cloudpickle.dumps((function.target, function.args))),))
    except Exception as error:
        # Whatever an argument's own __reduce__ raises, the cause is the same to the caller.
        what = f"cannot send {function.target!r} to a worker"
        raise ConfigError(f"{what}: {format_error(error)}") from error


def call(work: bytes) -> tuple[int, bytes]:
    """In the worker: how many workers there are, and the value that the function returned."""
    target, args = pickle.loads(work)
    value = target(*args)
    try:
        returned = pickle.dumps(value)
    except Exception:
        # Importing Ray takes a second, and what the driver's own script defines needs it.
        returned = bytes(importlib.import_module("ray.cloudpickle").dumps(value))
    return int(os.environ["WORLD_SIZE"]), returned


def read_values(returned: Mapping[int, Any]) -> dict[int, Any]:
    """What `call` returned on each rank, as the values of the whole job.

    Raises:
        ElasticError: some of them were lost on their way, or cannot be read here.
    """
    world = max((size for size, _ in returned.values()), default=1)
    lost = sorted(set(range(world)) - set(returned))
    if lost:
        ranks = ", ".join(map(str, lost[:10])) + (", ..." if len(lost) > 10 else "")
        raise ElasticError(
            f"the job succeeded, and the values of {len(lost)} of {world} workers were lost with "
            f"their nodes before they got here: rank {ranks}"
        )
    values = {}
    for rank, (_, value) in sorted(returned.items()):
        try:
            values[rank] = pickle.loads(value)
        except Exception as error:
            raise ElasticError(
                f"the value that rank {rank} returned cannot be read here: {format_error(error)}"
            ) from error
    return values
