"""`ray_launch`: `elastic_launch`, with the agents as actors of a Ray cluster.

The values, the error and the meaning of the config are the same; the job is run as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...agent.interface import RunResult
from ...errors import ConfigError
from ...launch.config import LaunchConfig
from ...launch.elastic_launch import values_of, with_args
from ...workers.spec import Entrypoint, Function, entry_name
from .driver import run_on
from .function import read_values, sent
from .options import RayOptions, check, find_ray


class ray_launch:
    """`ray_launch(config, entrypoint)(*args)` returns `{global rank: value}` of all nodes.

    Args:
        config: as for `elastic_launch`; a job of several nodes has `rdzv_endpoint="ray"`. Agents
            run on `min_nodes` to `max_nodes` nodes of the cluster, one on each.
        entrypoint: a function (of any module, also of the program's own, or a notebook's), the
            name of a program, or an entry point of `elasticlib.workers.spec`.
        options: where Ray is and what each agent takes.

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
        options: RayOptions | None = None,
    ) -> None:
        check(config)
        self._config = config
        self._entrypoint = entrypoint
        self._options = options or RayOptions()

    def __call__(self, *args: Any) -> dict[int, Any]:
        entrypoint = with_args(self._entrypoint, args)
        name = entry_name(entrypoint)
        if isinstance(entrypoint, Function):
            entrypoint = sent(find_ray().cloudpickle, entrypoint.target, entrypoint.args)
        values = values_of(name, run_job(self._config, entrypoint, self._options))
        return read_values(values) if isinstance(entrypoint, Function) else values


def run_job(config: LaunchConfig, entrypoint: Entrypoint, options: RayOptions) -> RunResult:
    """Run the job on Ray to its end; the result tells what that was, over all nodes.

    Raises:
        ConfigError: it cannot be started as configured, or there is no Ray.
        ElasticError: an agent broke.
    """
    check(config)
    ray = find_ray()
    connected = ray.is_initialized()
    if not connected:
        try:
            ray.init(address=options.address)
        except ConnectionError as error:
            raise ConfigError(
                f"there is no Ray cluster at {options.address!r}: {error}; "
                "`ray start --head` begins one"
            ) from error
    try:
        if ray.util.client.ray.is_connected():
            raise ConfigError(
                "the program hosts the job's store, so it runs on a node of the cluster and not as "
                "a Ray client: start it there, or with `ray job submit`"
            )
        return run_on(ray, config, entrypoint, options)
    finally:
        if not connected:
            ray.shutdown()
