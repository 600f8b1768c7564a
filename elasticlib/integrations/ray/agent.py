"""The Ray actor that is one node's agent: it runs `run_node` as a launcher of that node would.

Its methods are called from threads of Ray's, where no signal arrives: what the driver wants of
the agent comes in as a call instead.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
import sys
import threading

import attrs

from ...agent.interface import RunResult
from ...agent.loop import ElasticAgent
from ...errors import ElasticError
from ...launch.config import LaunchConfig
from ...launch.console import start_logging
from ...launch.elastic_launch import run_node
from ...stores.secret import VARIABLE as SECRET
from ...workers.spec import Entrypoint

log = logging.getLogger("elasticlib.integrations")

CALLS = 4
"""At one time: `run`, which lasts as long as the job does, and others beside it."""
BREAKPOINT = "ray.util.rpdb.set_trace"


@attrs.frozen(kw_only=True)
class Told:
    """What the driver tells every agent: its part in the job, and how things are at the driver.

    folder, argv: where the driver runs and what as. level: of what it logs. threads: of each
    worker.
    """

    config: LaunchConfig
    entrypoint: Entrypoint
    secret: str
    folder: str
    argv: tuple[str, ...]
    level: int
    threads: int


class NodeAgent:
    """One node's agent, as an actor. It dies with its driver, and its workers with it."""

    def __init__(self, told: Told) -> None:
        self._told = told
        self._lock = threading.Lock()
        self._asked: list[int] = []
        self._agent: ElasticAgent | None = None

    def hello(self) -> str:
        """Where it is, which answers once Ray has found room for it."""
        return f"{socket.gethostname()}, pid {os.getpid()}"

    def run(self) -> RunResult | ElasticError:
        """Take part in the job until it is over for this node; an error is one of its settings."""
        start_logging(self._told.level, "%(asctime)s elasticlib: %(message)s")
        self._settle_in()
        try:
            return run_node(self._told.config, self._told.entrypoint, began=self._began)
        except ElasticError as error:
            return error

    def heed(self, number: int) -> None:
        """As if this signal had come."""
        with self._lock:
            self._asked.append(number)
            if self._agent is not None:
                self._agent.heed(number)

    def _began(self, agent: ElasticAgent) -> None:
        with self._lock:
            self._agent = agent
            for number in self._asked:
                agent.heed(number)

    def _settle_in(self) -> None:
        """Make this process one that workers can be started from as at the driver."""
        ray = importlib.import_module("ray")
        given = ray.get_runtime_context().runtime_env
        # Not in the actor's description, which Ray's dashboard shows.
        os.environ[SECRET] = self._told.secret
        if "OMP_NUM_THREADS" not in given.get("env_vars", {}):
            # Ray gives each worker what is meant for all of them together.
            os.environ["OMP_NUM_THREADS"] = str(self._told.threads)
        if os.environ.get("PYTHONBREAKPOINT") == BREAKPOINT:
            # The workers are no processes of Ray's.
            del os.environ["PYTHONBREAKPOINT"]
        sys.argv = list(self._told.argv)
        # Else multiprocessing has every worker import this process's, which is all of Ray.
        vars(sys.modules["__main__"]).pop("__file__", None)
        if "working_dir" not in given:
            try:
                os.chdir(self._told.folder)
            except OSError as error:
                log.warning(
                    "the workers run in %s: the driver's folder %s is not here (%s); "
                    "runtime_env={'working_dir': ...} has Ray bring it",
                    os.getcwd(),
                    self._told.folder,
                    error.strerror,
                )
