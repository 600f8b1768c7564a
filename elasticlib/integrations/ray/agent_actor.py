"""Ray actor that runs the agent of one node."""

from __future__ import annotations

import importlib
import logging
import os
import socket
import sys
import threading

import attrs

from ...agent.elastic_agent import ElasticAgent
from ...agent.interface import RunResult
from ...errors import ElasticError
from ...launch.console import start_logging
from ...launch.elastic_launch import run_node
from ...options import LaunchOptions
from ...stores.authentication import SECRET_ENV
from ...workers.spec import Entrypoint

log = logging.getLogger("elasticlib.integrations")

RAY_BREAKPOINT = "ray.util.rpdb.set_trace"


@attrs.frozen(kw_only=True)
class AgentConfig:
    """Settings that the driver sends to every agent."""

    options: LaunchOptions
    entrypoint: Entrypoint
    secret: str  # of the job's store
    working_dir: str  # of the driver
    argv: tuple[str, ...]  # sys.argv of the driver
    log_level: int  # of the driver's logger "elasticlib"
    threads_per_worker: int


class NodeAgent:
    """Actor that runs the agent of one node. Ray kills it when the driver exits.

    Ray calls the methods in several threads of the actor, which receive no signals. The driver
    calls `handle_signal` instead.
    """

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._signals: list[int] = []  # received before the agent was created, or later
        self._agent: ElasticAgent | None = None

    def ping(self) -> str:
        """Return the host and pid. The call returns as soon as Ray has started the actor."""
        return f"{socket.gethostname()}, pid {os.getpid()}"

    def run(self) -> RunResult | ElasticError:
        """Run the agent until the job ends, and return its result or an error in its settings."""
        start_logging(self._config.log_level, "%(asctime)s elasticlib: %(message)s")
        self._apply_driver_environment()
        try:
            return run_node(
                self._config.options, self._config.entrypoint, on_start=self._on_agent_start
            )
        except ElasticError as error:
            return error

    def handle_signal(self, number: int) -> None:
        """Let the agent act as if it had received this signal."""
        with self._lock:
            self._signals.append(number)
            if self._agent is not None:
                self._agent.handle_signal(number)

    def _on_agent_start(self, agent: ElasticAgent) -> None:
        with self._lock:
            self._agent = agent
            for number in self._signals:
                agent.handle_signal(number)

    def _apply_driver_environment(self) -> None:
        """Make this process similar to the driver's, because workers inherit its environment."""
        runtime_env = importlib.import_module("ray").get_runtime_context().runtime_env
        # Ray's dashboard shows the environment of an actor's options, so it must not be there.
        os.environ[SECRET_ENV] = self._config.secret
        if "OMP_NUM_THREADS" not in runtime_env.get("env_vars", {}):
            # Ray sets this variable to the CPUs of the whole actor.
            os.environ["OMP_NUM_THREADS"] = str(self._config.threads_per_worker)
        if os.environ.get("PYTHONBREAKPOINT") == RAY_BREAKPOINT:
            # Ray's debugger works only in processes that Ray has started.
            del os.environ["PYTHONBREAKPOINT"]
        sys.argv = list(self._config.argv)
        # With this attribute, multiprocessing would import Ray's main module in every worker.
        vars(sys.modules["__main__"]).pop("__file__", None)
        if "working_dir" not in runtime_env:
            self._change_to_working_dir()

    def _change_to_working_dir(self) -> None:
        try:
            os.chdir(self._config.working_dir)
        except OSError as error:
            log.warning(
                "cannot change to the driver's working directory %s (%s), so the workers run in %s;"
                " let Ray copy it with ray.init(runtime_env={'working_dir': ...})",
                self._config.working_dir,
                error.strerror,
                os.getcwd(),
            )
