"""Elastic jobs on a Ray cluster: `ray_launch` is `elastic_launch` for all nodes of the cluster.

The agents are Ray actors, at most one on each node. `driver` creates and watches them.
"""

from __future__ import annotations

import importlib
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...agent.interface import RunResult
from ...errors import ConfigError, ElasticError, OptionError, format_error
from ...launch.elastic_launch import values_of, with_args
from ...launch.torch_config import LaunchConfig, to_options
from ...options import LaunchOptions, RendezvousOptions, RendezvousSettings
from ...workers.spec import Entrypoint, Function, entrypoint_name
from .driver import run_driver

__all__ = ["RAY_ENDPOINT", "ray_launch"]

RAY_ENDPOINT = "ray"  # the endpoint of a job with several nodes

_SAME = "all agents get the same options"
_SECRET = "the driver hosts the store, and generates the secret of the job"
# Options that Ray or the driver decides: class, field, allowed values, and the reason.
_ALLOWED_VALUES: Sequence[tuple[type, str, tuple[Any, ...], str]] = (
    (RendezvousOptions, "backend", ("tcp", "c10d"), "the driver hosts a TCP store"),
    (RendezvousOptions, "endpoint", ("", RAY_ENDPOINT), "the driver hosts the store"),
    (RendezvousOptions, "node_rank", (None,), _SAME),
    (RendezvousOptions, "local_addr", (None,), _SAME),
    (RendezvousOptions, "topology", ("",), _SAME),
    (RendezvousOptions, "is_host", (None,), _SECRET),
    (RendezvousOptions, "secret_file", (None,), _SECRET),
    (RendezvousSettings, "spares", (None,), "the driver starts at most max_nodes agents"),
)


class ray_launch:
    """Launcher of functions or programs on a Ray cluster.

    `ray_launch(config, entrypoint)(*args)` blocks until the job ends, and returns
    `{global rank: return value}` of all nodes. The values of programs are None.

    The calling program must run on a node of the cluster. It may call `ray.init` before, with an
    address and a `runtime_env`, which is used for agents and workers too. Otherwise, the cluster is
    that of `RAY_ADDRESS`, or the one on this machine.

    Args:
        config: The options, as for `elastic_launch`. The job uses `min_nodes` to `max_nodes` nodes
            of the cluster. With several nodes, the endpoint must be `"ray"`.
        entrypoint: A function, which may be defined in the program itself or in a notebook; the
            name of a program; or an entry point of `elasticlib.workers.spec`.
        resources: The resources that Ray reserves for each agent, with Ray's names, for example
            `{"CPU": 8, "GPU": 2}`. By default, one CPU for each worker. Workers see only the GPUs
            of their agent.

    Raises:
        ChildFailedError: The job failed. `failures` has the failures of all nodes whose agents
            have returned a result.
        SignalException: A signal stopped or drained the job.
        ConfigError: The options cannot work.
        ElasticError: An agent raised an exception, or the job succeeded but return values are lost.
    """

    def __init__(
        self,
        config: LaunchOptions | LaunchConfig,
        entrypoint: Callable[..., Any] | str | Entrypoint,
        resources: Mapping[str, float] | None = None,
    ) -> None:
        self._options = to_options(config)
        check_options(self._options)
        self._entrypoint = entrypoint
        self._resources = agent_resources(resources or {}, self._options.workers.count)

    def __call__(self, *args: Any) -> dict[int, Any]:
        entrypoint = with_args(self._entrypoint, args)
        name = entrypoint_name(entrypoint)
        if isinstance(entrypoint, Function):
            entrypoint = _pickle_function(entrypoint)
        values = values_of(name, _run(self._options, entrypoint, self._resources))
        return unpickle_values(values) if isinstance(entrypoint, Function) else values


def check_options(options: LaunchOptions) -> None:
    """Check that the options set nothing that Ray or the driver decides.

    Raises:
        OptionError: They set such a field.
    """
    for owner, field, allowed, reason in _ALLOWED_VALUES:
        holder = options.rendezvous if owner is RendezvousOptions else options.job
        value = getattr(holder, field)
        if value not in allowed:
            rule = f"must be {' or '.join(map(repr, allowed))} on Ray, because {reason}"
            raise OptionError(owner, field, rule, value)


def agent_resources(resources: Mapping[str, float], num_workers: int) -> dict[str, float]:
    """Return the resources of each agent: the given ones, and by default one CPU per worker.

    Raises:
        ConfigError: An amount is not a non-negative, finite number.
    """
    for name, amount in resources.items():
        if not isinstance(amount, int | float) or not 0 <= amount < float("inf"):
            raise ConfigError(
                f"resources[{name!r}] must be a non-negative, finite number, got {amount!r}"
            )
    given = {name: float(amount) for name, amount in resources.items()}
    return {"CPU": float(num_workers), **given}


def _run(
    options: LaunchOptions, entrypoint: Entrypoint, resources: Mapping[str, float]
) -> RunResult:
    """Run the job. If the program is not connected to Ray, connect it for that time."""
    ray = import_ray()
    was_connected = ray.is_initialized()
    if not was_connected:
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
                "this program is a Ray client, but it hosts the store of the job and must run on a "
                "node of the cluster: start it there, or with `ray job submit`"
            )
        return run_driver(ray, options, entrypoint, resources)
    finally:
        if not was_connected:
            ray.shutdown()


def import_ray() -> Any:
    """Return the module `ray`.

    Raises:
        ConfigError: Ray is not installed.
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


# -- sending a function to the workers, and its return values back -----------------------------
#
# Workers cannot import the driver's __main__, so functions are pickled with Ray's cloudpickle.
# Agents only forward the bytes: a worker unpickles the function, and the driver the values.


def _pickle_function(function: Function) -> Function:
    """Return an entry point that unpickles and calls the function in the worker."""
    cloudpickle = import_ray().cloudpickle
    try:
        pickled = bytes(cloudpickle.dumps((function.target, function.args)))
    except Exception as error:  # the __reduce__ method of an argument may raise any exception
        raise ConfigError(
            f"cannot send {function.target!r} to a worker: {format_error(error)}"
        ) from error
    return Function(call_pickled, (pickled,))


def call_pickled(pickled: bytes) -> tuple[int, bytes]:
    """Call the function in a worker, and return the world size and the pickled return value."""
    target, args = pickle.loads(pickled)
    value = target(*args)
    try:
        pickled_value = pickle.dumps(value)
    except Exception:
        # Values of classes in the driver's __main__ need cloudpickle. Importing it takes a second.
        pickled_value = bytes(importlib.import_module("ray.cloudpickle").dumps(value))
    return int(os.environ["WORLD_SIZE"]), pickled_value


def unpickle_values(values: Mapping[int, tuple[int, bytes]]) -> dict[int, Any]:
    """Return the return values of all ranks.

    Args:
        values: The results of `call_pickled`, by global rank.

    Raises:
        ElasticError: Values are missing, or cannot be unpickled in this process.
    """
    world_size = max((size for size, _ in values.values()), default=1)
    missing = sorted(set(range(world_size)) - set(values))
    if missing:
        ranks = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
        raise ElasticError(
            f"the job succeeded, but the return values of {len(missing)} of {world_size} workers "
            f"were lost with their nodes: rank {ranks}"
        )
    unpickled = {}
    for rank, (_, value) in sorted(values.items()):
        try:
            unpickled[rank] = pickle.loads(value)
        except Exception as error:
            raise ElasticError(
                f"the return value of rank {rank} cannot be unpickled: {format_error(error)}"
            ) from error
    return unpickled
