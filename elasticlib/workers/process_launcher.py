"""Starting the worker processes of an agent: through the fork server, or as new interpreters."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ..clock import monotonic
from ..errors import ConfigError
from .cleanup import CleanupProcess, signals_blocked
from .event_loop import EventLoop
from .fork_server import ForkedWorker, ForkServer, ForkServerLost, has_stdin
from .node_resources import CpuSet, bind_cpus
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

log = logging.getLogger("elasticlib.workers")

FIRST_SECONDS = 120.0
_PROCESS_ENTRY = str(Path(__file__).with_name("process_entry.py"))


class ProcessLauncher:
    """Starts the processes of one agent's workers; see `LocalWorkers` for the arguments.

    Python workers are forked from a fork server. One that has ended is replaced, and workers are
    started as new interpreters until the next one is ready.
    """

    def __init__(
        self,
        cleanup_process: CleanupProcess,
        loop: EventLoop,
        *,
        python: str,
        start_method: str,
        preload: Sequence[str],
        ignored_signals: Iterable[int],
        cpu_sets: Sequence[CpuSet],
    ) -> None:
        check_start_method(start_method, tuple(preload))
        self._cleanup_process = cleanup_process
        self._loop = loop
        self._python = python
        self._warm = start_method != SPAWN
        self._preload = tuple(preload)
        self._ignored = tuple(sorted(ignored_signals))
        self._processors = dict(enumerate(cpu_sets))
        self._like: tuple[list[str], dict[str, str]] = ([], {})
        self._server: ForkServer | None = None
        # Those that were replaced; each stays until all of its workers have been reaped.
        self._replaced: list[ForkServer] = []
        self._first: ForkServer | None = None
        self._first_deadline = 0.0
        self._told = False

    def prepare(self, spec: WorkerSpec, inherited: Mapping[str, str], cores: int) -> None:
        """Begin a fork server for workers of this kind, if they are to be forked and have none.

        Raises:
            ConfigError: the user's modules cannot be looked for.
            OSError: the fork server's process cannot be started.
        """
        check_preload(self._preload, spec.entrypoint)
        if not self._warm or isinstance(spec.entrypoint, Command):
            return
        environment = common_environment(spec, inherited, cores)
        folder = _module_search_dir(spec.entrypoint) if self._preload else ""
        what = self._python_command(
            "", "fork_server", "{first}", "{second}", folder, *self._preload
        )
        registry_fd = self._cleanup_process.open()
        like = (self._tied_command(environment, registry_fd, what), environment)
        if self._like == like and self._server is not None:
            return
        self._like, self._told = like, False
        server = self._begin()
        if self._first is None:
            self._first, self._first_deadline = server, monotonic() + FIRST_SECONDS

    def _begin(self) -> ForkServer:
        """Start a fork server in place of the one that there is, whose workers live on."""
        if self._server is not None:
            self._replaced.append(self._server)
            self._server = None
        registry_fd = self._cleanup_process.open()
        with signals_blocked(self._ignored):
            self._server = server = ForkServer(*self._like, registry_fd, self._loop)
        return server

    def await_prepared(self) -> None:
        """Wait until the first fork server can or cannot be used, within bounds; for any thread.

        A worker that is started as a new interpreter meanwhile would take as long. `close` ends
        the waiting.
        """
        if self._first is not None:
            self._first.wait(max(0.0, self._first_deadline - monotonic()))

    def start(
        self,
        what: tuple[str, ...],
        environment: dict[str, str],
        targets: tuple[int | None, int | None],
        local_rank: int,
    ) -> subprocess.Popen[bytes] | ForkedWorker:
        """A worker's process; what: as `program` says it; targets: its stdout and stderr, None for
        ours. Raises OSError or an ElasticError."""
        registry_fd = self._cleanup_process.open()
        python = what[0] != "command"
        if python:
            what = (environment["TORCHELASTIC_ERROR_FILE"], *what)
        with bind_cpus(self._processors.get(local_rank)), signals_blocked(self._ignored):
            server = self._usable() if python else None
            if server is not None:
                try:
                    return server.fork(what, environment, registry_fd, targets)
                except ForkServerLost:
                    self._replace()
            return subprocess.Popen(
                self._tied_command(
                    environment, registry_fd, self._python_command(*what) if python else what[1:]
                ),
                env=environment,
                pass_fds=[registry_fd],
                stdin=None if has_stdin() else subprocess.DEVNULL,
                stdout=targets[0],
                stderr=targets[1],
                start_new_session=True,
            )

    def _usable(self) -> ForkServer | None:
        """Return the fork server, or None if a worker has to be started as a new interpreter.

        Raises:
            ConfigError: the modules that the user asked for cannot be imported.
        """
        self._close_replaced()
        server = self._server
        if server is None:
            return None
        if server.unusable_reason:
            if self._preload:
                raise ConfigError(server.unusable_reason)
            if not self._told:
                log.warning(
                    "workers are started without the fork server: %s", server.unusable_reason
                )
                self._told = True
            return None
        if server.ended:
            server = self._replace()
        return server if server.ready else None

    def _replace(self) -> ForkServer:
        log.warning(
            "the workers' fork server has ended; workers are started without it until the next "
            "one is ready"
        )
        return self._begin()

    def _close_replaced(self) -> None:
        for server in self._replaced:
            if not server.workers:
                self._close(server)
        self._replaced = [server for server in self._replaced if server.workers]

    def _close(self, server: ForkServer) -> None:
        server.close()
        self._cleanup_process.remove(server.pid)

    def close(self) -> None:
        """End the fork servers; their workers have ended."""
        servers = [*self._replaced, *([] if self._server is None else [self._server])]
        self._replaced, self._server = [], None
        for server in servers:
            self._close(server)

    def _python_command(self, *what: str) -> tuple[str, ...]:
        return (self._python, "-u", _PROCESS_ENTRY, *what)

    def _tied_command(
        self, environment: Mapping[str, str], registry_fd: int, program: tuple[str, ...]
    ) -> list[str]:
        """Return the command that ties a program to this process and registers its session."""
        # Python gives itself an LC_CTYPE in a bare environment; the program is to have none.
        locale = environment.get("LC_CTYPE", "")
        ignored = ",".join(map(str, self._ignored))
        # By our own interpreter: the workers' may be a script that starts one in its own way.
        tie = ("tie", str(os.getpid()), str(registry_fd), locale, ignored)
        return [sys.executable, "-I", "-S", _PROCESS_ENTRY, *tie, *program]


def _module_search_dir(entrypoint: Entrypoint) -> str:
    """Return where Python looks first for the modules of this program. Raises ConfigError."""
    try:
        if isinstance(entrypoint, Script):
            return os.path.dirname(os.path.realpath(entrypoint.path))
        return os.getcwd()
    except FileNotFoundError as error:
        raise ConfigError(
            "preload (--preload) needs the working directory, which was removed: "
            "start the job in a directory that exists"
        ) from error
