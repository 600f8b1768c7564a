"""Runs one node's part of a job from Python.

`run_node` composes the parts of the library. A custom launcher composes its own parts in the same
way.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import attrs

from ..agent.elastic_agent import ElasticAgent
from ..agent.interface import RunResult, SnapshotService
from ..agent.options import AgentOptions, StopTimeouts
from ..checkpoint.snapshot_service import NodeSnapshotService
from ..compat.torch_launch import TorchrunOptions, read_torchrun_variables, to_launch_config
from ..compat.torch_launch import values_of as values_of
from ..endpoint import STORE_PORT, join_endpoint, split_endpoint
from ..errors import ConfigError
from ..signal_inbox import PROCESS_SIGNALS, SignalInbox
from ..stores.authentication import SECRET_ENV
from ..workers.interface import Workers
from ..workers.local_workers import LocalWorkers
from ..workers.run_program import check_not_importing, pickled
from ..workers.spec import (
    Command,
    Entrypoint,
    Function,
    WorkerState,
    entrypoint_name,
)
from .addresses import is_literal, is_localhost, is_loopback
from .endpoints import read_secret
from .exit_summary import format_summary, write_failure_json
from .flags import FLAGS, SettingError
from .launch_config import TCP_BACKENDS, LaunchConfig, check_seconds
from .node_check import make_node_check
from .observability import (
    ObservabilityServer,
    make_node_observer,
    open_journal,
    persistent_log_dir,
)
from .preemption import watch_for_preemption
from .rendezvous_setup import RendezvousSetup, open_rendezvous
from .run_id import with_run_id
from .target import run_name
from .worker_setup import check_local_resources, create_local_workers, worker_spec

log = logging.getLogger("elasticlib.launch")


class elastic_launch:
    """Runs this node's part of a job: `elastic_launch(config, entrypoint)(*args)`.

    Args:
        config: a `LaunchConfig`, elasticlib's or torch's.
        entrypoint: a picklable function, which gets `args` and may return a value; the name of a
            program; or an entry point of `elasticlib.workers.spec`. The arguments of the last two
            are strings.
        health_check_server: not supported; use the config's `observe_port`.

    Returns:
        A call returns the values of this node's workers by global rank.

    Raises:
        ChildFailedError: the job failed; the error carries the first failure.
        SignalException: a signal stopped or drained this node.
        ConfigError: the configuration cannot work.
    """

    def __init__(
        self,
        config: LaunchConfig,
        entrypoint: Callable[..., Any] | str | Entrypoint,
        health_check_server: None = None,
    ) -> None:
        if health_check_server is not None:
            raise ConfigError(
                "health_check_server must be None, because it works only with torch's agent: use "
                "observe_port of the config or TORCHELASTIC_HEALTH_CHECK_PORT"
            )
        self._config = to_launch_config(config, LaunchConfig)
        self._entrypoint = entrypoint

    def __call__(self, *args: Any) -> dict[int, Any]:
        check_not_importing()
        entrypoint = with_args(self._entrypoint, args)
        if isinstance(entrypoint, Function):
            pickled(entrypoint)
        result = run_node(self._config, entrypoint)
        return values_of(entrypoint_name(entrypoint), result)


def with_args(
    entrypoint: Callable[..., Any] | str | Entrypoint, args: tuple[Any, ...]
) -> Entrypoint:
    """Return an entry point with these arguments after its own.

    Raises:
        ConfigError: the entry point is neither a function nor a program.
    """
    if not isinstance(entrypoint, Entrypoint | str) and not callable(entrypoint):
        raise ConfigError(f"the entrypoint must be a function or a program, got {entrypoint!r}")
    if isinstance(entrypoint, str):
        return Command(entrypoint, tuple(str(arg) for arg in args))
    if isinstance(entrypoint, Entrypoint):
        return attrs.evolve(entrypoint, args=(*entrypoint.args, *args))
    return Function(entrypoint, args)


def run_node(
    config: LaunchConfig,
    entrypoint: Entrypoint,
    workers: Workers | None = None,
    *,
    on_start: Callable[[ElasticAgent], object] = lambda _: None,
    on_summary: Callable[[str], object] = lambda _: None,
) -> RunResult:
    """Run this node's agent until the job ends. Return the result, also if the job failed.

    Args:
        config: the configuration of this node.
        entrypoint: the program of the workers.
        workers: the workers to supervise; by default processes of this machine.
        on_start: receives the agent before it runs, for a thread that sends requests to it later.
        on_summary: receives the summary of what the run lost and where its logs are.

    Raises:
        ConfigError: the configuration cannot work.
    """
    config = with_run_id(with_torch_environment(config, os.environ), entrypoint)
    options = config.supervision.agent
    with contextlib.ExitStack() as stack:
        signals = _open_signal_inbox(options, stack)
        check_local_resources(config, entrypoint, os.environ)
        secret = read_secret(os.environ, config.options.secret_file, "--rdzv-conf secret_file")
        workers = workers or create_local_workers(config, os.environ)
        snapshot_service = _make_snapshot_service(config, workers, secret)
        rendezvous = open_rendezvous(config, secret)
        stack.callback(rendezvous.close)
        server = stack.enter_context(contextlib.closing(ObservabilityServer(config, os.environ)))
        journal = stack.enter_context(
            open_journal(config, workers, rendezvous.node_id, endpoint=rendezvous.serves_at)
        )
        # A handler that a plug-in opened has no store from which a status can be read.
        _log_start(config, "" if rendezvous.store is None else journal.run_selector)
        if secret is None:
            _log_who_may_control(config, rendezvous)
        agent = ElasticAgent(
            worker_spec(config, entrypoint),
            rendezvous.handler,
            workers,
            max_restarts=config.max_restarts,
            stop_timeouts=StopTimeouts(shutdown_timeout=shutdown_timeout_of(config)),
            monitor_interval=config.monitor_interval,
            options=attrs.evolve(options, check_node=make_node_check(config) or options.check_node),
            snapshot_service=snapshot_service,
            journal=journal,
        )
        if rendezvous.own_server is not None:
            rendezvous.own_server.report_failure_to(agent.fail)
        # Until the end of this call, because a node that leaves often gets a second signal.
        signals.capture(options.handled_signals)
        signals.forward_to(agent.handle_signal)
        server.start(agent, journal)
        on_start(agent)
        stack.enter_context(
            watch_for_preemption(
                config.preemption_notice,
                lambda source, left_s: agent.request_drain(source, time_left_s=left_s),
            )
        )
        # At its end, the last status and answers are written, before the store may be gone.
        with make_node_observer(rendezvous, journal, agent, secret) or contextlib.nullcontext():
            result = agent.run()
        write_failure_json(workers, result)
        lost = _serve_store_for_others(rendezvous, config, result, agent.signals)
        if lost:
            result = attrs.evolve(result, reason=f"{result.reason}; {lost}")
    on_summary(format_summary(journal, persistent_log_dir(workers)))
    return result


def _open_signal_inbox(options: AgentOptions, stack: contextlib.ExitStack) -> SignalInbox:
    """Return the inbox that has captured the signals of this command, or one of its own."""
    if PROCESS_SIGNALS.is_active:
        return PROCESS_SIGNALS
    # Another program handles its stop signals itself until the agent exists.
    signals = SignalInbox()
    stack.callback(signals.release, options.handled_signals)
    signals.capture(options.drain_signals)
    return signals


def _log_start(config: LaunchConfig, found_by: str) -> None:
    hint = ""
    if found_by:
        hint = f'; status: "elasticlib status {shlex.quote(found_by)}"{_remote_status_hint(config)}'
    log.info("run %s started%s", config.run_id, hint)


def _remote_status_hint(config: LaunchConfig) -> str:
    """Return the command that shows the status on other machines; empty if there is none."""
    is_tcp = config.rdzv_backend in TCP_BACKENDS
    if config.max_nodes == 1 or config.is_single_node or not is_tcp:
        return ""
    host, port = split_endpoint(config.endpoints[0], STORE_PORT)
    if is_localhost(host) or (is_literal(host) and is_loopback(host)):
        return ""
    name = shlex.quote(run_name("tcp", join_endpoint(host, port), config.run_id))
    return f' (from other machines: "elasticlib status {name}")'


def _log_who_may_control(config: LaunchConfig, rendezvous: RendezvousSetup) -> None:
    """Log who may stop the job, because it has no secret."""
    if rendezvous.store is None:
        return  # Nobody may: requests need the store.
    if config.is_single_node:
        who = f"every user of this machine who reaches {rendezvous.serves_at}"
    elif config.rdzv_backend in TCP_BACKENDS:
        who = f"everyone who reaches {config.rdzv_endpoint}"
    else:
        who = f"everyone who can write to {config.rdzv_endpoint}"
    log.info("%s can stop this job: set %s on all nodes to prevent that", who, SECRET_ENV)


def with_torch_environment(config: LaunchConfig, environment: Mapping[str, str]) -> LaunchConfig:
    """Return the configuration with the settings that torch's agent reads from variables.

    A setting that the configuration sets itself is kept.

    Raises:
        ConfigError: a variable has an invalid value.
    """
    # The interpreter of the workers is read by torchrun, and not by its agent.
    variables, _ = read_torchrun_variables(environment, python=False)
    defaults, options = TorchrunOptions(), config.torchrun
    unset = {
        name: value
        for name, value in variables.items()
        if getattr(options, name) == getattr(defaults, name)
    }
    return attrs.evolve(config, torchrun=attrs.evolve(options, **unset))


def _serve_store_for_others(
    rendezvous: RendezvousSetup, config: LaunchConfig, result: RunResult, signals: SignalInbox
) -> str:
    """Serve the store for as long as the other nodes need it from this node.

    Returns:
        Why the store was given up while other nodes still needed it, or an empty string.
    """
    work = "serving the store to the other nodes"
    give_up_reason = partial(signals.reason_to_give_up, work, log.warning)
    if result.state not in (WorkerState.DRAINED, WorkerState.STOPPED):
        return rendezvous.serve_until_nodes_left(give_up_reason)
    # With several endpoints, even a single other node finds the next store.
    min_nodes = 1 if len(config.endpoints) > 1 else config.min_nodes
    timeouts = StopTimeouts(shutdown_timeout=shutdown_timeout_of(config))
    grace_s = config.supervision.agent.checkpoint_grace
    return rendezvous.serve_until_handover(
        give_up_reason,
        config.rendezvous_timeouts,
        min_remaining_nodes=min_nodes,
        stop_timeout=grace_s + timeouts.shutdown_timeout + timeouts.kill_timeout,
    )


def _make_snapshot_service(
    config: LaunchConfig, workers: Workers, secret: bytes | None
) -> SnapshotService | None:
    """Return the service that holds the snapshots of workers on this machine, or None."""
    replicas = config.supervision.agent.snapshot_replicas
    if not isinstance(workers, LocalWorkers):
        if replicas:
            raise SettingError(
                "{snapshot_replicas} requires workers that are processes of this machine, got {0}",
                type(workers).__name__,
            )
        return None
    # Only nodes that use a TCP store have proved to each other that they know the secret.
    is_authenticated = config.rdzv_backend in TCP_BACKENDS
    return create_snapshot_service(
        workers,
        replicas=replicas,
        secret=secret if is_authenticated else None,
        address=config.local_addr or "",
    )


def create_snapshot_service(
    workers: LocalWorkers, *, replicas: int = 0, secret: bytes | None = None, address: str = ""
) -> NodeSnapshotService:
    """Return the `snapshot_service` of an `ElasticAgent`.

    The service stores the snapshots that workers make with `CheckpointManager.snapshot`, and writes
    them to the disk if the job ends early.

    Args:
        workers: The workers of the agent.
        replicas: The number of other nodes that store each snapshot.
        secret: The secret that the nodes of the job prove to each other, if there is one.
        address: The address at which other nodes reach this one. If it is empty, the service uses
            this node's address in the network of the generation's first node.
    """
    return NodeSnapshotService(
        workers.snapshot_dir.attempt_dir, replicas=replicas, secret=secret, address=address
    )


def shutdown_timeout_of(config: LaunchConfig) -> float:
    """Return the seconds between SIGTERM and SIGKILL.

    torch's variable is used if the configuration does not set the timeout.

    Raises:
        ConfigError: the variable has an invalid value.
    """
    if config.shutdown_timeout is not None:
        return config.shutdown_timeout
    flag = FLAGS["shutdown_timeout"]
    name = str(flag.variable)
    text = os.environ.get(name)
    seconds = flag.default if text is None else flag.parse(text, name)
    check_seconds("shutdown_timeout", seconds)
    return float(seconds)
