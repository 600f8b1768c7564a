"""The local workers of a launch, as its configuration describes them.

This module is separate from `elastic_launch`, so that the fork server can start before the rest of
a launch is imported. Its start takes longer than these imports.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence

from ..compat.torch_launch import allows_unbound_workers
from ..errors import ConfigError, ElasticError
from ..workers.local_workers import LocalWorkers
from ..workers.node_resources import numa_cpu_sets
from ..workers.spec import Entrypoint, WorkerSpec, check_preload, visible_device_for
from .flags import SettingError
from .launch_config import LaunchConfig

log = logging.getLogger("elasticlib.launch")


@contextlib.contextmanager
def prepared_local_workers(
    config: LaunchConfig, entrypoint: Entrypoint, environment: Mapping[str, str]
) -> Iterator[LocalWorkers]:
    """Yield workers whose fork server is starting, and close them at the end.

    Raises:
        ConfigError: this machine lacks a resource that the configuration requires.
    """
    check_local_resources(config, entrypoint, environment)
    workers = create_local_workers(config, environment)
    try:
        # The start of the workers reports the same error.
        with contextlib.suppress(ElasticError, OSError):
            workers.start_fork_server(worker_spec(config, entrypoint))
        yield workers
    finally:
        workers.close()


def worker_spec(config: LaunchConfig, entrypoint: Entrypoint) -> WorkerSpec:
    """Return the worker spec of a configuration."""
    return WorkerSpec(entrypoint, config.nproc_per_node, config.role, config.virtual_local_rank)


def check_local_resources(
    config: LaunchConfig, entrypoint: Entrypoint, environment: Mapping[str, str]
) -> None:
    """Check that this machine has the resources that the configuration requires.

    Raises:
        ConfigError: a resource is missing.
    """
    _check_log_dir(config.log_dir)
    if config.virtual_local_rank:
        # The last worker's device, so that too few GPUs are found before a worker starts.
        visible_device_for(config.nproc_per_node - 1, environment)
    check_preload(config.preload, entrypoint)


def create_local_workers(config: LaunchConfig, environment: Mapping[str, str]) -> LocalWorkers:
    """Return workers that are processes of this machine."""
    return LocalWorkers(
        environment,
        output=config.output,
        log_dir=config.log_dir,
        run_id=config.run_id,
        python=config.torchrun.python or sys.executable,
        cpu_sets=_cpu_sets(config, environment),
        ignored_signals=config.supervision.agent.agent_only_signals,
        start_method=config.start_method,
        preload=config.preload,
    )


def _cpu_sets(config: LaunchConfig, environment: Mapping[str, str]) -> Sequence[frozenset[int]]:
    if config.numa_binding is None:
        return ()
    try:
        return numa_cpu_sets(config.numa_binding, config.nproc_per_node, environment)
    except ConfigError as error:
        if not allows_unbound_workers(config):
            raise
        log.warning("workers are not bound to CPUs: %s", error)
        return ()


def _check_log_dir(path: str | None) -> None:
    if path is None:
        return
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise SettingError(
            "{log_dir} {0!r} cannot be created: {1}", path, error.strerror
        ) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise SettingError("{log_dir} {0!r} is not writable", path)
