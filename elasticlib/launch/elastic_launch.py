"""Runs one node's part of a job from Python: compose the parts, run the agent, hand back values.

This is where the library's own parts meet. A launcher of your own does the same with others.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs

from ..agent.elastic_agent import ElasticAgent
from ..agent.interface import RunResult, SnapshotService
from ..agent.options import AgentOptions, SignalObserver
from ..checkpoint.snapshot_service import NodeSnapshotService
from ..compat.launching import TorchrunOptions, ours, read_torchrun_variables
from ..compat.launching import values_of as values_of
from ..endpoint import STORE_PORT, join_endpoint, split_endpoint
from ..errors import ConfigError
from ..workers.interface import Workers
from ..workers.local_workers import LocalWorkers
from ..workers.run_program import check_not_importing, pickled
from ..workers.spec import (
    Command,
    Entrypoint,
    Function,
    StopTimeouts,
    WorkerState,
    entrypoint_name,
)
from .addresses import is_literal, is_localhost, is_loopback
from .endpoints import read_secret
from .exit_report import summary, write_failure
from .flags import FLAGS
from .launch_config import TCP_BACKENDS, LaunchConfig, check_seconds
from .launcher_process import DEFERRED_SIGNALS, SignalBuffer
from .observed import Observed, answering, kept_logs, open_journal
from .own_workers import check_machine, local_workers, spec_of
from .rendezvous_setup import Meeting, open_meeting

log = logging.getLogger("elasticlib.launch")


class elastic_launch:
    """`elastic_launch(config, entrypoint)(*args)` returns `{global rank: value}` of this node.

    config: a `LaunchConfig`, torch's too. entrypoint is a picklable function (args are its
    arguments, and it may return a value), the name of a program, or an entry point of
    `elasticlib.workers.spec` (args are strings).

    Raises:
        ChildFailedError: the job failed; it carries the first failure.
        SignalException: a signal stopped or drained this node.
        ConfigError: the config cannot work.
    """

    def __init__(
        self,
        config: LaunchConfig,
        entrypoint: Callable[..., Any] | str | Entrypoint,
        health_check_server: None = None,
    ) -> None:
        if health_check_server is not None:
            raise ConfigError(
                "health_check_server is torch's, for its own agent, which is not here: leave it "
                "out, and use observe_port of the config or TORCHELASTIC_HEALTH_CHECK_PORT"
            )
        self._config = ours(config, LaunchConfig)
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
    """What is run, with these as its last arguments.

    Raises:
        ConfigError: it is nothing that can be run.
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
    began: Callable[[ElasticAgent], object] = lambda _: None,
    summed: Callable[[str], object] = lambda _: None,
) -> RunResult:
    """Run this node's agent to its end; the result tells what that was, whatever it was.

    workers: what runs them, if not processes of this machine as the config has them. began:
    called with the agent before it runs, for a thread that sends it something later.
    summed: called with the lines on what the run lost and where to read more.
    """
    config = heeding(config, os.environ)
    options = config.supervision.agent
    with contextlib.ExitStack() as stack:
        # From here to the end: a node that drains often gets the signal again.
        held = (
            DEFERRED_SIGNALS
            if DEFERRED_SIGNALS.is_active
            else stack.enter_context(SignalBuffer(options.drain_signals))
        )
        check_machine(config, entrypoint, os.environ)
        secret = read_secret(os.environ, config.options.secret_file, "--rdzv-conf secret_file")
        runners = workers or local_workers(config, os.environ)
        memory = _memory(config, runners, secret)
        meeting = open_meeting(config, secret)
        stack.callback(meeting.close)
        observed = stack.enter_context(contextlib.closing(Observed(config, os.environ)))
        journal = stack.enter_context(
            open_journal(config, runners, meeting.me, endpoint=meeting.serves_at)
        )
        shown = f": elasticlib status {shlex.quote(journal.found_by)} shows it{_elsewhere(config)}"
        log.info("run %s begins%s", config.run_id, shown if journal.found_by else "")
        agent = ElasticAgent(
            spec_of(config, entrypoint),
            meeting.handler,
            runners,
            max_restarts=config.max_restarts,
            stop_timeouts=StopTimeouts(shutdown_timeout=shutdown_seconds(config)),
            monitor_interval=config.monitor_interval,
            options=options,
            snapshot_service=memory,
            journal=journal,
        )
        observed.begin(agent, journal)
        held.forward_to(agent.handle_signal)
        began(agent)
        stack.enter_context(answering(meeting, journal, agent))
        result = agent.run()
        write_failure(runners, result)
        _depart(meeting, config, result)
    summed(summary(journal, kept_logs(runners)))
    return result


def _elsewhere(config: LaunchConfig) -> str:
    """How it is seen from a machine that has no record of it, such as a login node."""
    if config.max_nodes == 1 or config.is_single_node or config.rdzv_backend not in TCP_BACKENDS:
        return ""
    host, port = split_endpoint(config.endpoints[0], STORE_PORT)
    if is_localhost(host) or (is_literal(host) and is_loopback(host)):
        return ""
    where = shlex.quote(join_endpoint(host, port))
    return f" (on other machines: elasticlib status {where})"


def heeding(config: LaunchConfig, environment: Mapping[str, str]) -> LaunchConfig:
    """The same, with what torch's agent takes from variables, where the config does not say it.

    Raises:
        ConfigError: one of them cannot work.
    """
    # Which interpreter workers have is torchrun's affair, and not its agent's.
    said, _ = read_torchrun_variables(environment, python=False)
    plain, found = TorchrunOptions(), config.torchrun
    heard = {n: v for n, v in said.items() if getattr(found, n) == getattr(plain, n)}
    return attrs.evolve(config, torchrun=attrs.evolve(found, **heard))


def _depart(meeting: Meeting, config: LaunchConfig, result: RunResult) -> None:
    """Stay for as long as the others need this node, or the store that it serves."""
    options = config.supervision.agent
    ladder = StopTimeouts(shutdown_timeout=shutdown_seconds(config))
    with _signals(options) as stopped:
        if result.state in (WorkerState.DRAINED, WorkerState.STOPPED):
            # Of several places the others find the next, however few they are.
            needed = 1 if len(config.endpoints) > 1 else config.min_nodes
            stopping = options.checkpoint_grace + ladder.shutdown_timeout + ladder.kill_timeout
            meeting.hand_over(stopped, config.timing, needed=needed, stopping=stopping)
        else:
            meeting.serve_others(stopped)


def _memory(config: LaunchConfig, runners: Workers, secret: bytes | None) -> SnapshotService | None:
    """What the agent keeps of its workers' snapshots, where these are processes of its machine."""
    replicas = config.supervision.agent.snapshot_replicas
    if not isinstance(runners, LocalWorkers):
        if replicas:
            raise ConfigError(
                "snapshot_replicas needs workers that are processes of this machine, got "
                f"{type(runners).__name__}"
            )
        return None
    # Only nodes that meet in a TCP store have shown each other that they know the secret.
    asked = config.rdzv_backend in TCP_BACKENDS
    address = config.local_addr or ""
    return keep_snapshots(
        runners, replicas=replicas, secret=secret if asked else None, address=address
    )


def keep_snapshots(
    workers: LocalWorkers, *, replicas: int = 0, secret: bytes | None = None, address: str = ""
) -> NodeSnapshotService:
    """Return the `memory` of an `ElasticAgent`.

    It keeps the snapshots that its workers make with `CheckpointManager.snapshot`, and writes them
    to the disk if the job ends before its work is done.

    Args:
        workers: The workers of the agent.
        replicas: The number of other nodes that store each snapshot.
        secret: What the nodes of the job prove to know to each other, if anything.
        address: Where the other nodes reach this one. Empty for the address that this node has in
            the network of the generation's first node.
    """
    return NodeSnapshotService(
        workers.snapshot_dir.attempt_dir, replicas=replicas, secret=secret, address=address
    )


def shutdown_seconds(config: LaunchConfig) -> float:
    """Seconds; torch's variable counts where the config says nothing."""
    if config.shutdown_timeout is not None:
        return config.shutdown_timeout
    flag = FLAGS["shutdown_timeout"]
    name = str(flag.variable)
    text = os.environ.get(name)
    seconds = flag.default if text is None else flag.parse(text, name)
    check_seconds("shutdown_timeout", seconds)
    return float(seconds)


@contextlib.contextmanager
def _signals(options: AgentOptions) -> Iterator[Callable[[], bool]]:
    """Whether a signal has asked us to end since."""
    heard: queue.SimpleQueue[int] = queue.SimpleQueue()
    with SignalObserver(options.stop_signals, heard.put):
        yield lambda: not heard.empty()
