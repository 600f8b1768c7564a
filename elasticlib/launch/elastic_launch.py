"""Runs one node's part of a job from Python: compose the parts, run the agent, hand back values.

This is where the library's own parts meet. A launcher of your own does the same with others.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
from collections.abc import Callable, Iterator
from typing import Any

import attrs

from ..agent.interface import RunResult
from ..agent.local import SIGNALS, LocalElasticAgent
from ..agent.observers import SignalObserver
from ..errors import ConfigError, ElasticError
from ..workers.exits import WorkerExit
from ..workers.function import pickled
from ..workers.ladder import Ladder
from ..workers.local import LocalWorkers
from ..workers.output import OutputPlan
from ..workers.spec import Command, Entrypoint, Function, WorkerSpec, WorkerState
from .config import LaunchConfig
from .meeting import open_meeting
from .secret import read_secret


class ChildFailedError(ElasticError):
    """The job failed, or was stopped. `failures` holds this node's own, by global rank."""

    def __init__(self, name: str, result: RunResult) -> None:
        self.name = name
        self.result = result
        self.failures = result.failures
        super().__init__(f"{name}: {result.reason}{_trace(self.get_first_failure())}")

    def get_first_failure(self) -> WorkerExit | None:
        """The first worker of this node that failed; None where another node's did."""
        return next(iter(self.failures.values()), None)


def _trace(failure: WorkerExit | None) -> str:
    return f"\n{failure.traceback}" if failure is not None and failure.traceback else ""


class elastic_launch:
    """`elastic_launch(config, entrypoint)(*args)` returns `{global rank: value}` of this node.

    entrypoint is a picklable function (args are its arguments, and it may return a value), the
    name of a program, or an entry point of `elasticlib.workers.spec` (args are strings).

    Raises:
        ChildFailedError: the job failed or was stopped; it carries the first failure.
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


def run_node(config: LaunchConfig, entrypoint: Entrypoint) -> RunResult:
    """Run this node's agent to its end; the result tells what that was, whatever it was."""
    _check_log_dir(config.log_dir)
    if config.preload and isinstance(entrypoint, Command):
        raise ConfigError(
            f"--preload is for Python workers, and {entrypoint.program!r} is another program"
        )
    secret = read_secret(os.environ, config.options.secret_file, "--rdzv-conf secret_file")
    meeting = open_meeting(config, secret)
    try:
        agent = LocalElasticAgent(
            WorkerSpec(entrypoint, config.nproc_per_node, config.role),
            meeting.handler,
            LocalWorkers(
                os.environ,
                output=OutputPlan(config.redirects, config.tee),
                log_dir=config.log_dir,
                run_id=config.run_id,
                python=sys.executable,
                start_method=config.start_method,
                preload=config.preload,
            ),
            max_restarts=config.max_restarts,
            ladder=Ladder(grace=config.shutdown_timeout),
            interval=config.monitor_interval,
        )
        result = agent.run()
        with _signals() as stopped:
            if result.state is WorkerState.STOPPED:
                meeting.hand_over(stopped, config.timing)
            else:
                meeting.serve_others(stopped)
        return result
    finally:
        meeting.close()


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
def _signals() -> Iterator[Callable[[], bool]]:
    """Whether a signal has asked us to end since."""
    heard: queue.SimpleQueue[int] = queue.SimpleQueue()
    with SignalObserver(SIGNALS, heard.put):
        yield lambda: not heard.empty()
