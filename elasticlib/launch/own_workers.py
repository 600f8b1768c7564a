"""The workers of a launch as processes of this machine, as its config has them.

Kept apart from `elastic_launch`, so that the process that they are forked from is begun before the
rest of a launch is imported: it takes longer than all that.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence

from ..compat.launching import may_go_unbound
from ..errors import ConfigError, ElasticError
from ..workers.local_workers import LocalWorkers
from ..workers.node_resources import numa_cpu_sets
from ..workers.spec import Entrypoint, WorkerSpec, check_preload, visible_device_for
from .launch_config import LaunchConfig

log = logging.getLogger("elasticlib.launch")


@contextlib.contextmanager
def begun(
    config: LaunchConfig, entrypoint: Entrypoint, environment: Mapping[str, str]
) -> Iterator[LocalWorkers]:
    """They are prepared already, and closed at the end if nobody else has.

    Raises:
        ConfigError: this machine cannot give what the config asks for.
    """
    check_machine(config, entrypoint, environment)
    found = local_workers(config, environment)
    try:
        # What cannot work is said by the start, to which it belongs.
        with contextlib.suppress(ElasticError, OSError):
            found.prepare(spec_of(config, entrypoint))
        yield found
    finally:
        found.close()


def spec_of(config: LaunchConfig, entrypoint: Entrypoint) -> WorkerSpec:
    return WorkerSpec(entrypoint, config.nproc_per_node, config.role, config.virtual_local_rank)


def check_machine(
    config: LaunchConfig, entrypoint: Entrypoint, environment: Mapping[str, str]
) -> None:
    """Raises ConfigError for what this machine cannot give."""
    _check_log_dir(config.log_dir)
    if config.virtual_local_rank:
        # Asked for the last one before anything starts, so that too few GPUs are refused at once.
        visible_device_for(config.nproc_per_node - 1, environment)
    check_preload(config.preload, entrypoint)


def local_workers(config: LaunchConfig, environment: Mapping[str, str]) -> LocalWorkers:
    """Processes of this machine, as a launch has them."""
    return LocalWorkers(
        environment,
        output=config.output,
        log_dir=config.log_dir,
        run_id=config.run_id,
        python=config.torchrun.python or sys.executable,
        cpu_sets=_processors(config, environment),
        ignored_signals=config.supervision.agent.agent_only_signals,
        start_method=config.start_method,
        preload=config.preload,
    )


def _processors(config: LaunchConfig, environment: Mapping[str, str]) -> Sequence[frozenset[int]]:
    if config.numa_binding is None:
        return ()
    try:
        return numa_cpu_sets(config.numa_binding, config.nproc_per_node, environment)
    except ConfigError as error:
        if not may_go_unbound(config):
            raise
        log.warning("workers run on any processors: %s", error)
        return ()


def _check_log_dir(path: str | None) -> None:
    if path is None:
        return
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--log-dir {path!r} cannot be made: {error.strerror}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"--log-dir {path!r} cannot be written to")
