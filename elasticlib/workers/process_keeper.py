"""Keeper of an agent's processes: starts them, reports their exits, and kills what they leave.

All of it happens in one thread, because the kernel kills a process when the thread ends that has
started it. Each worker leads a session of its own, and is reaped when nothing is left of that
session. So its pid, which is also the number of its session and of its group, is not reused before.
The session of a worker that has succeeded is kept, because what the worker has started, such as an
upload, may still have work to do: until workers start again, or until the end.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import attrs

from ..clock import monotonic
from ..threads import daemon_thread, only_logged, start_thread
from .cleanup import (
    kill_sessions,
    process_start_ticks,
    session_processes,
    signal_group,
    wait_for_exit,
)
from .fork_client import ForkServer, ForkServers, Release
from .guardian import start_guardian
from .ledger import HELPERS, WORKERS, Ledger, read_sessions
from .loop_thread import LoopThread
from .process_setup import Job, write_job

log = logging.getLogger("elasticlib.workers")

CLEAN_TIMEOUT_S = 10.0  # limit for killing what exited workers have left before others start
PREPARE_TIMEOUT_S = 120.0  # limit for the imports of the first fork server
SERVER_END_TIMEOUT_S = 2.0  # in which a fork server ends by itself and reaps its children
GUARDIAN_DELAY_S = 0.2  # bounds the cost if each guardian is killed at once
EXIT_POLL_S = 0.1  # between looks at a program whose exit cannot be watched
NEVER = float("inf")


PROCESS_ENTRY = str(Path(__file__).with_name("process_entry.py"))
Streams = tuple[int | None, ...]
"""Descriptors of stdin, stdout and stderr. None for those of this process."""


class Owner(Protocol):
    """The object that has requested a process. The methods are called in the keeper's thread."""

    def on_started(self, pid: int) -> None:
        """The process exists."""

    def on_start_failed(self, error: str) -> None:
        """There is no process."""

    def on_exited(self, code: int, reason: str) -> None:
        """The process has exited. The reason is empty if the code says all that is known."""


@attrs.define(eq=False)
class _Session:
    """The session of a process that has exited, or that is about to end."""

    slot: int  # in the ledger
    release: Release  # lets the parent of the leader reap it
    server_pid: int = 0  # of a fork server that is a child of this process
    patience_s: float = 0.0  # in which the fork server may end by itself


@attrs.define(eq=False)
class _Process:
    """A process that was requested, for the parent that reports it."""

    _keeper: ProcessKeeper
    owner: Owner
    job: Job  # without a slot until the process is about to start
    outputs: tuple[int | None, int | None]
    directory: int
    may_fork: bool
    _release: Release = lambda: None
    _has_exited: bool = False

    def take_slot(self) -> None:
        """Reserve a slot in the ledger. Raises OSError."""
        self.job = {**self.job, "slot": self._keeper.ledger.take()}

    def on_started(self, pid: int, release: Release) -> None:
        self._release = release
        self.owner.on_started(pid)

    def on_start_failed(self, error: str) -> None:
        if not error:
            return self._keeper.execute_program(self)
        self._keeper.ledger.free(self.job["slot"])
        return self.owner.on_start_failed(error)

    def on_exited(self, code: int, reason: str = "") -> None:
        if not self._has_exited:
            self._has_exited = True
            session = _Session(self.job["slot"], self._release)
            self._keeper.add_session(session, lingers=code == 0)
            self.owner.on_exited(code, reason)


class ProcessKeeper:
    """Keeps the processes of one agent. `post` and `start` are thread-safe; use others by `post`.

    Args:
        ledger: the agent's ledger.
        must_fork: a worker that cannot be forked is not started in another way.
        on_tick: called in the thread after each wake-up, with the time and the seconds for which
            the thread was paused; returns when it must be called again.
        on_error: receives the error message if the thread has failed.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        must_fork: bool,
        on_tick: Callable[[float, float], float],
        on_error: Callable[[str], object],
    ) -> None:
        self.ledger, self._must_fork, self._on_tick = ledger, must_fork, on_tick
        self.thread = LoopThread("workers", self._tick, on_error)
        self.post = self.thread.post
        self._servers = ForkServers(
            ledger,
            execute=self._execute_here,
            watch=self.thread.watch,
            unwatch=self.thread.unwatch,
            on_exited=self._on_server_exited,
        )
        self._has_warned = False  # that workers cannot be forked
        self._prepared_by = NEVER  # when the agent stops waiting for the first fork server
        self._requests: list[_Process] = []  # that wait for a fork server or for clean sessions
        self._clean_by = NEVER  # when requests stop waiting for clean sessions
        self._lingering: list[_Session] = []  # of workers that have succeeded
        self._unclean: list[_Session] = []  # to be killed
        self._num_cleaned = 0  # sessions that a thread is killing
        self._programs: set[subprocess.Popen[bytes]] = set()  # that have not been reaped
        self._polled: dict[int, _Process] = {}  # programs whose exits cannot be watched, by pid
        self._guardian: subprocess.Popen[bytes] | None = None
        self._guardian_at = NEVER  # when another guardian is started
        self._is_closing = False  # nothing is started any more

    def start(self) -> None:
        """Start the thread, unless it runs. Raises OSError."""
        _let_children_be_waited_for()
        self.ledger.fd  # noqa: B018 - raises if there is no memory for it
        self.post(self._start_guardian)
        self.thread.start()

    # -- fork servers ----------------------------------------------------------------------------

    def prepare(self, job: Job) -> None:
        """Start a fork server for all later workers."""
        self._servers.prepare(job)
        self._has_warned = False
        if self._prepared_by == NEVER:
            self._prepared_by = monotonic() + PREPARE_TIMEOUT_S

    @property
    def is_prepared(self) -> bool:
        """True if it is known whether workers can be forked, or if that takes too long.

        A worker in a new interpreter would not be faster, because it has to import torch as well.
        """
        return self._servers.is_known or monotonic() >= self._prepared_by

    @property
    def fork_problem(self) -> str:
        """Why no worker can be forked; empty if one can, or if that is not known."""
        return self._servers.problem

    def _execute_here(self, job: Mapping[str, Any], streams: Streams) -> tuple[int, Release]:
        """Execute the program of a job in the present working directory of the agent."""
        directory = os.open(".", os.O_PATH | os.O_DIRECTORY)
        try:
            program = _execute(self.ledger.fd, directory, job, streams)
        finally:
            os.close(directory)
        self._programs.add(program)
        return program.pid, partial(self._reap, program)

    def _reap(self, program: subprocess.Popen[bytes]) -> int | None:
        """Reap a program that has exited, and return its exit code; None if it has not exited."""
        code = program.poll()
        if code is not None:
            self._programs.discard(program)
        return code

    def _on_server_exited(self, server: ForkServer) -> None:
        # One that is still importing does not notice that it is to exit.
        patience_s = 0.0 if server.problem is None else SERVER_END_TIMEOUT_S
        session = _Session(server.slot, server.release, server.session, patience_s)
        self._unclean.append(session)

    # -- the start of a process ------------------------------------------------------------------

    def request(
        self,
        owner: Owner,
        job: Job,
        *,
        outputs: tuple[int | None, int | None],
        directory: int,
        may_fork: bool,
    ) -> None:
        """Start a process once the fork server is known, and exited workers are clean.

        Args:
            owner: gets the results.
            job: the job, without a slot.
            outputs: descriptors of stdout and stderr; None for the agent's.
            directory: the descriptor of the working directory.
            may_fork: a fork server may fork the process.
        """
        if not self._requests:
            self._clean_by = monotonic() + CLEAN_TIMEOUT_S
        self._requests.append(_Process(self, owner, job, outputs, directory, may_fork))

    def drop(self, owner: Owner) -> bool:
        """Drop the request of an owner; return False if there is none, as it was started."""
        before = len(self._requests)
        self._requests = [one for one in self._requests if one.owner is not owner]
        return len(self._requests) < before

    def _start_requested(self, now: float) -> None:
        if not self._requests or not self.is_prepared:
            return
        if not self.is_clean:
            if now < self._clean_by:
                return
            log.error(
                "processes that exited workers had started survived SIGKILL; new workers start, "
                "but GPUs or ports may still be in use"
            )
        requests, self._requests = self._requests, []
        for process in requests:
            try:
                process.take_slot()
            except OSError as error:
                process.owner.on_start_failed(str(error))
                continue
            if not process.may_fork or not self._fork(now, process):
                self.execute_program(process)

    def _fork(self, now: float, process: _Process) -> bool:
        """Let a fork server fork a process; return False if none is ready."""
        problem = self._servers.problem
        if problem and self._must_fork:
            # The script would probably fail on that module, too.
            process.on_start_failed(problem)
            return True
        if problem:
            if not self._has_warned:
                log.warning("workers are started without the fork server: %s", problem)
            self._has_warned = True
            return False
        with contextlib.ExitStack() as stack:
            try:
                job = write_job({**process.job, "server_environment": self._servers.environment})
                stack.callback(os.close, job)
                stdin = _own_stdin()
                if stdin == subprocess.DEVNULL:
                    stdin = os.open(os.devnull, os.O_RDONLY)
                    stack.callback(os.close, stdin)
                outputs = enumerate(process.outputs, 1)
                streams = [stdin, *(own if out is None else out for own, out in outputs)]
                if not all(map(_is_open, streams)):
                    return False  # A new program starts with a closed stream, as the agent has it.
                return self._servers.fork(now, process, [job, process.directory, *streams])
            except OSError as error:
                process.on_start_failed(str(error))
                return True

    def execute_program(self, process: _Process) -> None:
        """Start a process as a new program, and watch for its exit."""
        try:
            streams = (_own_stdin(), *process.outputs)
            program = _execute(self.ledger.fd, process.directory, process.job, streams)
        except OSError as error:
            return process.on_start_failed(str(error))
        self._programs.add(program)
        process.on_started(program.pid, partial(self._reap, program))
        return self._watch_exit(program.pid, process)

    def _watch_exit(self, pid: int, process: _Process) -> None:
        """Report the exit of a child that is no fork server's."""
        try:
            exit_fd = os.pidfd_open(pid)
        except OSError:
            # The kernel does not know it, or a limit of this process is reached.
            self._polled[pid] = process
            return

        def check() -> None:
            found = _exit_of(pid)
            if found is not None:
                self.thread.unwatch(exit_fd)
                os.close(exit_fd)
                process.on_exited(*found)

        self.thread.watch(exit_fd, check)

    def _poll_exits(self) -> float:
        """Report the exits that cannot be watched; return how soon to poll again, in seconds."""
        for pid, process in [*self._polled.items()]:
            found = _exit_of(pid)
            if found is not None:
                del self._polled[pid]
                process.on_exited(*found)
        return EXIT_POLL_S if self._polled else NEVER

    # -- sessions --------------------------------------------------------------------------------

    def add_session(self, session: _Session, *, lingers: bool) -> None:
        """Take over the session of a process that has exited."""
        if lingers:
            self._lingering.append(session)
            return
        for pid, ticks in self.ledger.session(session.slot).items():
            # Its children get no time to continue without it.
            if process_start_ticks(pid) == ticks:
                signal_group(pid, signal.SIGKILL)
        self._unclean.append(session)

    @property
    def is_clean(self) -> bool:
        """True if nothing is left of the processes that have failed or were killed."""
        return not self._unclean and not self._num_cleaned

    def background_sessions(self) -> dict[int, int]:
        """Return the sessions of workers that have succeeded, as {pid: start ticks}."""
        return read_sessions(self.ledger.fd, [session.slot for session in self._lingering])

    def kill_background_processes(self, when: str) -> None:
        """Kill what workers have started that have succeeded.

        Args:
            when: for the log, such as "at the end".
        """
        sessions = self.background_sessions()
        killed = [pid for pid, _ in session_processes(sessions)] if sessions else []
        if killed:
            log.warning(
                "killed processes that workers of this node had started, and that still ran %s: "
                "%s; a script that waits for them before it ends loses none of their work",
                *(when, ", ".join(map(str, killed))),
            )
        lingering, self._lingering = self._lingering, []
        left = {session for pid, session in session_processes(sessions)} if killed else set()
        for session in lingering:
            if left & self.ledger.session(session.slot).keys():
                self._unclean.append(session)
            else:
                self._release(session)

    def _clean(self) -> None:
        """Start a thread that kills the sessions of exited processes, if there are any."""
        if self._num_cleaned or not self._unclean:
            return
        sessions, self._unclean = self._unclean, []
        self._num_cleaned = len(sessions)
        found = read_sessions(self.ledger.fd, [session.slot for session in sessions])

        def kill() -> None:
            left = [*found]
            try:
                for session in sessions:
                    if session.server_pid:
                        wait_for_exit(session.server_pid, session.patience_s)
                        found.setdefault(session.server_pid, 0)
                left = kill_sessions(found)
            finally:
                self.post(lambda: self._on_cleaned(sessions, left))

        # An error is logged, and what is left is killed by the guardian in the end.
        thread = daemon_thread(kill, "workers-clean", only_logged)
        try:
            start_thread(thread)
        except OSError:
            kill()

    def _on_cleaned(self, sessions: Sequence[_Session], left: Sequence[int]) -> None:
        self._num_cleaned = 0
        for session in sessions:
            self._release(session, is_clean=not left)

    def _release(self, session: _Session, *, is_clean: bool = True) -> None:
        """Let the leader of a session be reaped."""
        if session.release() is None and session.server_pid:
            self._unclean.append(session)  # It has been killed, and still frees its memory.
        elif is_clean:
            self.ledger.free(session.slot)

    # -- the guardian ----------------------------------------------------------------------------

    def _start_guardian(self) -> None:
        if self._guardian is not None or self._is_closing:
            return
        self._guardian_at = NEVER
        try:
            self._guardian, alive = start_guardian(self.ledger.fd)
        except OSError as error:
            log.warning("cannot start the guardian process, trying again: %s", error)
            self._guardian_at = monotonic() + 1.0
            return
        self.thread.watch(alive, partial(self._on_guardian_exited, alive))

    def _on_guardian_exited(self, alive: int) -> None:
        self.thread.unwatch(alive)
        os.close(alive)
        if self._guardian is not None:
            self._guardian.wait()
            self._guardian = None
        if not self._is_closing:
            log.info("the guardian process has exited, and another one is started")
            self._guardian_at = monotonic() + GUARDIAN_DELAY_S

    # -- the end ---------------------------------------------------------------------------------

    def close_sessions(self) -> None:
        """End the sessions of workers that have succeeded. No process is started any more."""
        self._is_closing = True
        self.kill_background_processes("at the end")

    def close_servers(self) -> None:
        """End the fork servers, after they have reaped their workers."""
        self._servers.close()

    def end_guardian(self) -> None:
        """End the guardian, unless something is left that it has to clean up."""
        if self._guardian is not None and self.ledger.is_empty:
            self._guardian.kill()

    def clean_up_after_failure(self) -> None:
        """End all processes in the calling thread, because the keeper's thread has failed."""
        kill_sessions(read_sessions(self.ledger.fd, (*HELPERS, *WORKERS)))
        programs = [*self._programs]
        if self._guardian is not None:
            self._guardian.kill()
            programs.append(self._guardian)
        for program in programs:
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(SERVER_END_TIMEOUT_S)

    @property
    def is_guardian_done(self) -> bool:
        """True if the guardian has exited, or still has something to clean up."""
        return self._guardian is None or not self.ledger.is_empty

    def _tick(self, now: float, late_s: float) -> float:
        if late_s:
            self._clean_by += late_s
            self._prepared_by += late_s
        if now >= self._guardian_at:
            self._start_guardian()
        self._clean()
        self._start_requested(now)
        due = [self._on_tick(now, late_s), self._servers.tick(now, late_s), self._guardian_at]
        due.append(now + self._poll_exits())
        if self._requests or not self._servers.is_known:
            due += [at for at in (self._clean_by, self._prepared_by) if at > now]
        return min(due)


def _execute(
    ledger: int, directory: int, job: Mapping[str, Any], streams: Streams
) -> subprocess.Popen[bytes]:
    """Execute the program of a job as the leader of a new session.

    The calling thread must live as long as the process: the kernel kills the process with it.

    Args:
        ledger: the descriptor of the agent's ledger.
        directory: the descriptor of the working directory.
        job: see `process_setup`.
        streams: the standard streams.

    Raises:
        OSError: the process cannot be started.
    """
    job_file = write_job(job)
    try:
        numbers = (os.getpid(), ledger, job_file, directory)
        # -I and -S: neither files in the working directory nor site-packages affect the first
        # steps, nor does the environment of the program.
        command = [sys.executable, "-I", "-S", PROCESS_ENTRY, "execute", *map(str, numbers)]
        stdin, stdout, stderr = streams
        return subprocess.Popen(
            command,
            pass_fds=numbers[1:],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
    finally:
        os.close(job_file)


def _own_stdin() -> int:
    """Return the descriptor that workers get as stdin, for `subprocess`."""
    try:
        # If stdin was closed, another file may have its number. Such a file is not inheritable.
        return 0 if os.get_inheritable(0) else subprocess.DEVNULL
    except OSError:
        return subprocess.DEVNULL


def _let_children_be_waited_for() -> None:
    """Undo that this process ignores SIGCHLD, because the kernel then drops all exit codes."""
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        # `signal.signal` works in the main thread only.
        ctypes.CDLL(None).signal(int(signal.SIGCHLD), 0)


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _exit_of(pid: int) -> tuple[int, str] | None:
    """Return the exit code of a child, and why that is not known; None if it has not exited."""
    try:
        status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:
        return -signal.SIGKILL, "another part of the agent's process has reaped it"
    if status is None:
        return None
    return (status.si_status if status.si_code == os.CLD_EXITED else -status.si_status), ""
