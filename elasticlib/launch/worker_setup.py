"""The local workers of a launch, as its configuration describes them.

This module is separate from `elastic_launch`, so that the fork server can start before the rest of
a launch is imported. Its start takes longer than these imports.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence

from ..errors import ConfigError, ElasticError, OptionError
from ..options import LaunchOptions, OutputOptions
from ..workers.local_workers import LocalWorkers
from ..workers.node_resources import numa_cpu_sets
from ..workers.spec import Entrypoint, WorkerSpec, check_preload, visible_device_for

log = logging.getLogger("elasticlib.launch")


@contextlib.contextmanager
def prepared_local_workers(
    options: LaunchOptions, entrypoint: Entrypoint, environment: Mapping[str, str]
) -> Iterator[LocalWorkers]:
    """Yield workers whose fork server is starting, and close them at the end.

    Raises:
        ConfigError: this machine lacks a resource that the options require.
    """
    check_local_resources(options, entrypoint, environment)
    workers = create_local_workers(options, environment)
    try:
        # The start of the workers reports the same error.
        with contextlib.suppress(ElasticError, OSError):
            workers.start_fork_server(worker_spec(options, entrypoint))
        yield workers
    finally:
        workers.close()


def worker_spec(options: LaunchOptions, entrypoint: Entrypoint) -> WorkerSpec:
    """Return what the agent starts."""
    workers = options.workers
    return WorkerSpec(entrypoint, workers.count, workers.role, workers.virtual_local_rank)


def check_local_resources(
    options: LaunchOptions, entrypoint: Entrypoint, environment: Mapping[str, str]
) -> None:
    """Check that this machine has the resources that the options require.

    Raises:
        ConfigError: a resource is missing.
    """
    _check_log_dir(options.output)
    if options.workers.virtual_local_rank:
        # The last worker's device, so that too few GPUs are found before a worker starts.
        visible_device_for(options.workers.count - 1, environment)
    check_preload(options.workers.preload, entrypoint)


def create_local_workers(options: LaunchOptions, environment: Mapping[str, str]) -> LocalWorkers:
    """Return workers that are processes of this machine."""
    return LocalWorkers(
        environment,
        options=options.workers,
        output=options.output,
        run_id=options.rendezvous.run_id,
        cpu_sets=_cpu_sets(options, environment),
        ignored_signals=options.agent.agent_only_signals,
    )


def _cpu_sets(options: LaunchOptions, environment: Mapping[str, str]) -> Sequence[frozenset[int]]:
    workers = options.workers
    if workers.numa_binding is None:
        return ()
    try:
        return numa_cpu_sets(workers.numa_binding, workers.count, environment)
    except ConfigError as error:
        if not workers.may_run_unbound:
            raise
        log.warning("workers are not bound to CPUs: %s", error)
        return ()


def _check_log_dir(output: OutputOptions) -> None:
    if output.log_dir is None:
        return
    path = os.path.expanduser(output.log_dir)
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        rule = f"must be a directory that can be created ({error.strerror})"
        raise OptionError(OutputOptions, "log_dir", rule, path) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise OptionError(OutputOptions, "log_dir", "must be writable", path)
