"""Starting the worker processes of an agent: from the fork server, or as new programs."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..clock import monotonic
from ..errors import ConfigError
from .node_resources import CpuSet
from .spec import (
    SPAWN,
    Command,
    Entrypoint,
    Script,
    WorkerSpec,
    check_preload,
    check_start_method,
    common_environment,
)
from .supervisor_client import SupervisedProcess, SupervisorClient

log = logging.getLogger("elasticlib.workers")

FORK_SERVER_TIMEOUT_S = 120.0  # limit for the import of torch and of the user's modules
_PROCESS_ENTRY = str(Path(__file__).with_name("process_entry.py"))


class ProcessLauncher:
    """Starts the processes of one agent's workers; see `LocalWorkers` for the arguments."""

    def __init__(
        self,
        supervisor: SupervisorClient,
        *,
        python: str,
        start_method: str,
        preload: Sequence[str],
        ignored_signals: Iterable[int],
        cpu_sets: Sequence[CpuSet],
    ) -> None:
        check_start_method(start_method, tuple(preload))
        self._supervisor = supervisor
        self._python = python
        self._may_fork = start_method != SPAWN
        self._preload = tuple(preload)
        self._ignored_signals = tuple(sorted(ignored_signals))
        self._cpu_sets = tuple(cpu_sets)
        self._server_job: dict[str, Any] = {}  # of the current fork server; empty if there is none
        self._first_deadline = 0.0  # when the agent stops waiting for the first fork server
        self._has_warned = False  # about a fork server that cannot be used

    def prepare(self, spec: WorkerSpec, inherited: Mapping[str, str], cores: int) -> None:
        """Start a fork server for these workers, unless they are not forked.

        The current fork server is kept if it has the same command and the same environment.

        Raises:
            ConfigError: the directory of the user's modules does not exist.
            OSError: the supervisor process cannot be started.
        """
        check_preload(self._preload, spec.entrypoint)
        if not self._may_fork or isinstance(spec.entrypoint, Command):
            return
        # An interpreter or a library that reads a variable only at its start gets the value that
        # all workers have in common.
        environment = common_environment(spec, inherited, cores)
        directory = _module_search_dir(spec.entrypoint) if self._preload else ""
        command = self._python_command(
            "", "fork_server", "{first}", "{second}", directory, *self._preload
        )
        job = self._make_job(command, environment, cpu_set=None)
        if all(self._server_job.get(key) == job[key] for key in ("command", "environment")):
            return
        self._supervisor.start_fork_server(job)
        self._server_job, self._has_warned = job, False
        if not self._first_deadline:
            self._first_deadline = monotonic() + FORK_SERVER_TIMEOUT_S

    def wait_prepared(self) -> None:
        """Wait until the fork server is ready or cannot be used. Thread-safe.

        The wait ends FORK_SERVER_TIMEOUT_S after the start of the first fork server. A worker in a
        new interpreter would not be faster, because it has to import torch as well.
        """
        if self._server_job:
            self._supervisor.wait_for_fork_server(max(0.0, self._first_deadline - monotonic()))

    def start(
        self,
        program: tuple[str, ...],
        environment: dict[str, str],
        outputs: tuple[int | None, int | None],
        local_rank: int,
    ) -> SupervisedProcess:
        """Start the process of a worker.

        Args:
            program: the kind of the program, its name and its arguments.
            environment: all variables of the worker.
            outputs: descriptors of stdout and stderr; None for those of the agent.
            local_rank: the worker's local rank, which selects its processors.

        Raises:
            ConfigError: a module of --preload cannot be imported.
            OSError, WorkerStartError: the process cannot be started.
        """
        cpu_set = self._cpu_sets[local_rank] if local_rank < len(self._cpu_sets) else None
        if program[0] == "command":
            job = self._make_job(program[1:], environment, cpu_set)
            return self._supervisor.start(job, outputs, may_fork=False)
        program = (environment["TORCHELASTIC_ERROR_FILE"], *program)
        job = self._make_job(self._python_command(*program), environment, cpu_set)
        job["program"] = program
        job["server_environment"] = self._server_job.get("environment", {})
        return self._supervisor.start(job, outputs, may_fork=self._can_use_fork_server())

    def _can_use_fork_server(self) -> bool:
        """Return whether workers may be forked; log a warning if the fork server cannot be used.

        Raises:
            ConfigError: a module of --preload cannot be imported.
        """
        if not self._server_job:
            return False
        problem = self._supervisor.fork_server_problem
        if problem and self._preload:
            # The script would probably fail on that module, too.
            raise ConfigError(problem)
        if problem and not self._has_warned:
            log.warning("workers are started without the fork server: %s", problem)
            self._has_warned = True
        return not problem

    def _make_job(
        self, command: tuple[str, ...], environment: dict[str, str], cpu_set: CpuSet | None
    ) -> dict[str, Any]:
        return {
            "command": command,
            "environment": environment,
            "cpu_set": sorted(os.sched_getaffinity(0) if cpu_set is None else cpu_set),
            "ignored": self._ignored_signals,
        }

    def _python_command(self, *args: str) -> tuple[str, ...]:
        return (self._python, "-u", _PROCESS_ENTRY, *args)


def _module_search_dir(entrypoint: Entrypoint) -> str:
    """Return where Python looks first for the modules of a program. Raises ConfigError."""
    try:
        if isinstance(entrypoint, Script):
            return os.path.dirname(os.path.realpath(entrypoint.path))
        return os.getcwd()
    except FileNotFoundError as error:
        raise ConfigError(
            "preload (--preload) needs the working directory, which was removed: "
            "start the job in a directory that exists"
        ) from error
