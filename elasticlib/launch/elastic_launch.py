"""Runs one node's part of a job from Python: compose the parts, run the agent, hand back values.

This is where the library's own parts meet. A launcher of your own does the same with others.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from ..agent.elastic import LocalElasticAgent
from ..agent.interface import Memory, RunResult
from ..agent.observers import SignalObserver
from ..agent.options import AgentOptions
from ..checkpoint.keeper import SnapshotKeeper
from ..checkpoint.persist import persist
from ..checkpoint.persisting import Persist
from ..errors import ConfigError, ElasticError
from ..workers.exits import WorkerExit
from ..workers.function import pickled
from ..workers.interface import Workers
from ..workers.ladder import Ladder
from ..workers.local import LocalWorkers
from ..workers.processors import bindings
from ..workers.spec import Command, Entrypoint, Function, WorkerSpec, WorkerState, own_device
from . import report
from .config import TCP_BACKENDS, LaunchConfig
from .meeting import Meeting, open_meeting
from .requeue import Requeue, check_requeue, find_requeue, requeue_if_last
from .secret import read_secret

log = logging.getLogger("elasticlib.launch")


class ChildFailedError(ElasticError):
    """The job failed, or this node was stopped or drained.

    `failures` holds this node's own, by global rank; `cause` is the first one over all nodes, and
    None where no worker's failure was the reason.
    """

    def __init__(self, name: str, result: RunResult) -> None:
        self.name = name
        self.result = result
        self.failures = result.failures
        self.cause = result.cause
        trace = "" if self.cause is None else self.cause.traceback
        super().__init__(f"{name}: {result.reason}" + (f"\n{trace}" if trace else ""))

    def get_first_failure(self) -> WorkerExit | None:
        """The first worker of this node that failed; None where another node's did."""
        found = next(iter(self.failures.values()), None)
        return None if found is None else found.root


class elastic_launch:
    """`elastic_launch(config, entrypoint)(*args)` returns `{global rank: value}` of this node.

    entrypoint is a picklable function (args are its arguments, and it may return a value), the
    name of a program, or an entry point of `elasticlib.workers.spec` (args are strings).

    Raises:
        ChildFailedError: the job failed, or this node was stopped or drained; it carries the
            first failure.
        ConfigError: it cannot be started as configured.
    """

    def __init__(self, config: LaunchConfig, entrypoint: Callable[..., Any] | str | Entrypoint):
        self._config = config
        self._entrypoint = entrypoint

    def __call__(self, *args: Any) -> dict[int, Any]:
        entrypoint = _with_args(self._entrypoint, args)
        if isinstance(entrypoint, Function):
            pickled(entrypoint)
        result = run_node(self._config, entrypoint)
        if result.state is not WorkerState.SUCCEEDED:
            raise ChildFailedError(_name(entrypoint), result)
        return result.values


def _with_args(entrypoint: Callable[..., Any] | str | Entrypoint, args: tuple[Any, ...]) -> Any:
    if isinstance(entrypoint, str):
        return Command(entrypoint, tuple(str(arg) for arg in args))
    if isinstance(entrypoint, Entrypoint):
        return attrs.evolve(entrypoint, args=(*entrypoint.args, *args))
    return Function(entrypoint, args)


def _name(entrypoint: Entrypoint) -> str:
    if isinstance(entrypoint, Function):
        return getattr(entrypoint.target, "__qualname__", repr(entrypoint.target))
    return str(attrs.astuple(entrypoint, recurse=False)[0])


def run_node(
    config: LaunchConfig,
    entrypoint: Entrypoint,
    workers: Workers | None = None,
    *,
    persist: Persist = persist,
) -> RunResult:
    """Run this node's agent to its end; the result tells what that was, whatever it was.

    workers: what runs them, if not processes of this machine as the config has them. persist:
    writes the newest snapshots when the job drains or fails for good.
    """
    _check_log_dir(config.log_dir)
    if config.virtual_local_rank:
        # Asked for the last one before anything starts, so that too few GPUs are refused at once.
        own_device(config.nproc_per_node - 1, os.environ)
    if config.preload and isinstance(entrypoint, Command):
        raise ConfigError(
            f"--preload is for Python workers, and {entrypoint.program!r} is another program"
        )
    secret = read_secret(os.environ, config.options.secret_file, "--rdzv-conf secret_file")
    spec = WorkerSpec(entrypoint, config.nproc_per_node, config.role, config.virtual_local_rank)
    options = config.supervision.agent
    requeue = find_requeue(config.supervision.requeue, os.environ)
    runners = workers or local_workers(config, options)
    memory = _memory(config, runners, secret, persist)
    meeting = open_meeting(config, secret)
    try:
        if requeue is not None:
            check_requeue(meeting, config.rdzv_backend)
        agent = LocalElasticAgent(
            spec,
            meeting.handler,
            runners,
            max_restarts=config.max_restarts,
            ladder=Ladder(grace=config.shutdown_timeout),
            interval=config.monitor_interval,
            options=options,
            memory=memory,
        )
        # A node that has saved and leaves is often told so again, and must not die of it.
        with SignalObserver(options.drain_signals, lambda _: None):
            result = agent.run()
            if isinstance(runners, LocalWorkers):
                _write_report(runners.kept_folder, result)
            with _signals(options) as stopped:
                _leave(result, meeting, requeue, config, stopped)
        return result
    finally:
        meeting.close()


def _leave(
    result: RunResult,
    meeting: Meeting,
    requeue: Requeue | None,
    config: LaunchConfig,
    stopped: Callable[[], bool],
) -> None:
    """What the other nodes of the job still need of one whose own run is over."""
    drained = result.state is WorkerState.DRAINED
    # Only after a signal that means it: SIGTERM is how jobs are cancelled as well.
    meant = result.signal in config.supervision.agent.drain_signals
    if requeue is not None and drained and meant:
        requeue_if_last(requeue, meeting, _longest_drain(config), stopped)
    if drained or result.state is WorkerState.STOPPED:
        meeting.hand_over(stopped, config.timing)
    else:
        meeting.serve_others(stopped)


def _longest_drain(config: LaunchConfig) -> float:
    """Seconds after which a node that drains has left, or cannot."""
    grace = config.supervision.agent.drain_grace + config.shutdown_timeout
    return grace + config.timing.close


def local_workers(config: LaunchConfig, options: AgentOptions) -> LocalWorkers:
    """Processes of this machine, as a launch has them."""
    return LocalWorkers(
        os.environ,
        output=config.output,
        log_dir=config.log_dir,
        run_id=config.run_id,
        python=sys.executable,
        processors=_processors(config),
        ignored=options.kept_from_workers,
        start_method=config.start_method,
        preload=config.preload,
    )


def _memory(
    config: LaunchConfig, runners: Workers, secret: bytes | None, persist: Persist
) -> Memory | None:
    """What the agent keeps of its workers' snapshots, where these are processes of its machine."""
    replicas = config.supervision.agent.snapshot_replicas
    if not isinstance(runners, LocalWorkers):
        if replicas:
            raise ConfigError(
                "--snapshot-replicas needs workers that are processes of this machine, got "
                f"{type(runners).__name__}"
            )
        return None
    # Only nodes that meet in a TCP store have shown each other that they know the secret.
    asked = config.rdzv_backend in TCP_BACKENDS
    return SnapshotKeeper(
        runners.memory.era,
        replicas=replicas,
        secret=secret if asked else None,
        address=config.local_addr or "",
        persist=persist,
    )


def _processors(config: LaunchConfig) -> Sequence[frozenset[int]]:
    if config.numa_binding is None:
        return ()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return bindings(config.numa_binding, config.nproc_per_node, visible)


def _write_report(folder: Path | None, result: RunResult) -> None:
    if folder is None or result.state is not WorkerState.FAILED:
        return
    try:
        (folder / report.FILE).write_bytes(report.as_json(result))
    except OSError as error:
        log.warning("the report is not written to %s: %s", folder, error)


def _check_log_dir(path: str | None) -> None:
    if path is None:
        return
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--log-dir {path!r} cannot be made: {error.strerror}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"--log-dir {path!r} cannot be written to")


@contextlib.contextmanager
def _signals(options: AgentOptions) -> Iterator[Callable[[], bool]]:
    """Whether a signal has asked us to end since."""
    heard: queue.SimpleQueue[int] = queue.SimpleQueue()
    with SignalObserver(options.signals, heard.put):
        yield lambda: not heard.empty()
