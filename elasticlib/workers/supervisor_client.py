"""The agent's side of the supervisor process: starts it, sends requests, and receives exits."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from ..clock import monotonic, wall
from ..errors import WorkerStartError, require_not_none
from ..event_loop import EventLoop
from .cleanup import session_processes
from .fork_server import DEFERRED_IMPORTS
from .supervisor_protocol import Connection, Message, socket_pair, write_job

log = logging.getLogger("elasticlib.workers")

REQUEST_TIMEOUT_S = 10.0  # longer than the supervisor waits for a fork server
SHORT_REQUEST_TIMEOUT_S = 1.0  # after a request has timed out, until the supervisor answers again
CLOSE_TIMEOUT_S = 5.0
RESTART_DELAY_S = 0.2  # bounds the cost if each supervisor process is killed at once
# -I and -S: neither files in the working directory nor site-packages affect the program.
_PROGRAM = (
    "import sys; sys.path.append({root!r}); "
    "import elasticlib.workers.supervisor as supervisor; supervisor.main({agent}, {link})"
)
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class SupervisedProcess:
    """A worker's process. It is not a child of the agent."""

    def __init__(self, request_id: int, pid: int, start_ticks: int) -> None:
        self.id = request_id
        self.pid = pid
        self.start_ticks = start_ticks  # see `process_start_ticks`
        self.returncode: int | None = None  # as Popen has it; None until the process has exited
        self.exited_at = float("inf")  # by the wall clock
        self.on_exit: Callable[[], object] | None = None

    @property
    def has_exited(self) -> bool:
        return self.returncode is not None


class _Request:
    def __init__(self) -> None:
        self.is_answered = False
        self.process: SupervisedProcess | None = None
        self.error = ""


class SupervisorClient:
    """Starts workers through the supervisor process of this agent. Thread-safe.

    The supervisor is started when it is first needed, and again if it exits. The event loop reads
    its messages. A method that waits for a message runs the loop meanwhile.
    """

    def __init__(self, loop: EventLoop, *, close_timeout: float = CLOSE_TIMEOUT_S) -> None:
        self._loop = loop
        self._close_timeout_s = close_timeout
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._ids = itertools.count(1)
        self._requests: dict[int, _Request] = {}  # that have not been answered, by id
        self._processes: dict[int, SupervisedProcess] = {}  # that exist or are not clean, by id
        self._directories: set[str] = set()  # to be removed when the agent exits
        self._is_responsive = True  # the last request was answered in time
        self._server_job: Mapping[str, Any] | None = None  # starts the fork server
        self._server_problem: str | None = None  # empty once the fork server is ready
        self._is_server_known = False  # the fork server is ready or cannot be used

    # -- directories -------------------------------------------------------------------------------

    def add_directory(self, path: str) -> None:
        """Let the supervisor remove this directory when the agent exits.

        Args:
            path: the absolute path of the directory.

        Raises:
            OSError: the supervisor process cannot be started.
        """
        with self._lock:
            self._directories.add(path)
            self._connect().send({"op": "add_directory", "path": path})

    def remove_directory(self, path: str) -> None:
        """Cancel `add_directory`: the supervisor does not remove the directory any more."""
        with self._lock:
            self._directories.discard(path)
            if self._connection is not None:
                self._connection.send({"op": "remove_directory", "path": path})

    # -- the fork server ---------------------------------------------------------------------------

    def start_fork_server(self, job: Mapping[str, Any]) -> None:
        """Start a fork server for all later workers; its predecessor stays while it has workers.

        Raises:
            OSError: the supervisor process cannot be started, or too many files are open.
        """
        with self._lock:
            connection = self._connect()
            self._server_job, self._server_problem = job, None
            self._is_server_known = False
            _send_job(connection, {"op": "prepare"}, job, _standard_streams(stdin=False))

    def wait_for_fork_server(self, timeout: float) -> None:
        """Wait until the fork server is ready or cannot be used. `close` ends the wait."""
        self._loop.run_until(lambda: self._is_server_known, timeout)

    @property
    def fork_server_problem(self) -> str:
        """Why the fork server cannot be used; empty if it can, or if that is not known yet."""
        return self._server_problem or ""

    # -- workers -----------------------------------------------------------------------------------

    def start(
        self, job: Mapping[str, Any], outputs: Sequence[int | None], *, may_fork: bool
    ) -> SupervisedProcess:
        """Start a process as the leader of a new session.

        Args:
            job: see `supervisor_protocol`.
            outputs: descriptors of stdout and stderr; None for those of the agent.
            may_fork: use the fork server if it is ready.

        Raises:
            WorkerStartError: the supervisor does not answer, or cannot start the process.
            OSError: the supervisor process cannot be started, or too many files are open.
        """
        request, request_id = _Request(), next(self._ids)
        streams = _standard_streams(stdin=True, outputs=outputs)
        with self._lock:
            if not self._is_responsive and not any(self._running()):
                self._kill_supervisor()
            connection = self._connect()
            message = {"op": "start", "id": request_id, "fork": may_fork}
            _send_job(connection, message, job, streams)
            self._requests[request_id] = request
        timeout = REQUEST_TIMEOUT_S if self._is_responsive else SHORT_REQUEST_TIMEOUT_S
        self._loop.run_until(lambda: request.is_answered, timeout)
        with self._lock:
            self._requests.pop(request_id, None)
            self._is_responsive = request.is_answered
            if request.process is not None:
                return request.process
            if not self._is_responsive:
                connection.send({"op": "cancel", "id": request_id})
                request.error = f"the supervisor process did not answer within {timeout:g} s"
        raise WorkerStartError(request.error)

    def call_on_exit(self, process: SupervisedProcess, callback: Callable[[], object]) -> None:
        """Call a function in the event loop once the process has exited."""
        with self._lock:
            process.on_exit = callback
            if process.has_exited:
                self._loop.call_at(monotonic(), callback)

    def wait_for_exit(self, process: SupervisedProcess, timeout: float) -> bool:
        """Wait until the process has exited; return whether it has."""
        return self._loop.run_until(lambda: process.has_exited, timeout)

    def release(self, process: SupervisedProcess) -> None:
        """Let the supervisor reap the process. The agent must not use its pid any more."""
        with self._lock:
            if self._connection is not None:
                self._connection.send({"op": "release", "id": process.id})

    def wait_until_clean(self, timeout: float) -> bool:
        """Wait until the sessions of exited workers have no processes.

        Those of workers that have succeeded go on until `kill_background_processes`.

        Returns:
            True if they have none, False after the timeout in seconds.
        """
        return self._loop.run_until(
            lambda: not any(one.has_exited for one in list(self._processes.values())), timeout
        )

    def background_processes(self) -> list[int]:
        """Return the pids of running processes that workers have started which have succeeded."""
        sessions = {process.pid for process in self._succeeded()}
        return [pid for pid, _ in session_processes(sessions)] if sessions else []

    def kill_background_processes(self) -> list[int]:
        """Kill the `background_processes`, and return them; `wait_until_clean` waits for their end.

        A worker that has left none is not waited for.
        """
        with self._lock:
            succeeded = self._succeeded()
            left = session_processes({one.pid for one in succeeded}) if succeeded else []
            for process in succeeded:
                if self._connection is not None:
                    self._connection.send({"op": "clean", "id": process.id})
                if process.pid not in {session for _, session in left}:
                    del self._processes[process.id]
        return [pid for pid, _ in left]

    def _succeeded(self) -> list[SupervisedProcess]:
        """Return the workers that have succeeded and whose sessions may have processes left."""
        return [one for one in list(self._processes.values()) if one.returncode == 0]

    def _running(self) -> Iterator[SupervisedProcess]:
        return (one for one in self._processes.values() if not one.has_exited)

    # -- the supervisor process --------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """The pid of the supervisor process, which is started if there is none. Raises OSError."""
        with self._lock:
            self._connect()
            return require_not_none(self._process, "the supervisor process").pid

    def _connect(self) -> Connection:
        """Return the connection to the supervisor process, which is started if there is none."""
        if self._connection is not None:
            return self._connection
        link, end = socket_pair()
        with end:
            connection = Connection(link)
            try:
                # The messages are there before the process, in case the agent is killed now.
                for path in self._directories:
                    connection.send({"op": "add_directory", "path": path})
                for one in self._processes.values():
                    ids = {"id": one.id, "pid": one.pid, "start_ticks": one.start_ticks}
                    connection.send({"op": "adopt", **ids})
                if self._server_job is not None:
                    streams = _standard_streams(stdin=False)
                    _send_job(connection, {"op": "prepare"}, self._server_job, streams)
                self._process = _start_supervisor(end.fileno())
            except BaseException:
                connection.close()
                raise
        self._connection, self._is_responsive = connection, True
        self._loop.add_reader(link.fileno(), partial(self._read, connection))
        return connection

    def _read(self, connection: Connection) -> None:
        messages, is_lost = [], False
        with self._lock:
            if connection is not self._connection:
                return  # Another thread has closed it.
            try:
                while (received := connection.receive()) is not None:
                    messages.append(received[0])
                connection.flush()
            except ConnectionError:
                is_lost = True
        for message in messages:
            self._on_message(message)
        if is_lost:
            self._on_lost(connection)

    def _on_message(self, message: Message) -> None:
        event = message.get("event")
        if event is None:
            self._on_answer(message)
        elif event == "exited":
            with self._lock:
                process = self._processes.get(message["id"])
            if process is not None:
                self._on_exit(process, message["code"], message["at"])
        elif event == "clean":
            self._on_clean(message["id"])
        elif event == "fork_server":
            self._server_problem = message["problem"]
            self._is_server_known = True
        elif event == "fork_server_lost":
            self._is_server_known = True
            log.warning(
                "the workers' fork server has ended; workers are started without it until the "
                "next one is ready"
            )
        elif event == "second_fork_server":
            log.warning(
                "the second fork server cannot be used, so workers are forked without %s, and "
                "import what they need of these themselves: %s",
                ", ".join(DEFERRED_IMPORTS),
                message["problem"],
            )
        elif event == "failed":
            log.error("the supervisor process failed: %s", message["reason"])

    def _on_answer(self, message: Message) -> None:
        with self._lock:
            request = self._requests.get(message["id"])
            if request is None:
                return
            if "error" in message:
                request.error = message["error"]
            else:
                request.process = SupervisedProcess(
                    message["id"], message["pid"], message["start_ticks"]
                )
                self._processes[message["id"]] = request.process
            request.is_answered = True

    def _on_exit(self, process: SupervisedProcess, code: int, exited_at: float) -> None:
        with self._lock:
            if process.has_exited:
                return
            process.returncode, process.exited_at = code, exited_at
            callback = process.on_exit
        if callback is not None:
            callback()

    def _on_clean(self, request_id: int) -> None:
        with self._lock:
            self._processes.pop(request_id, None)

    def _on_lost(self, connection: Connection) -> None:
        """Replace a supervisor that has exited. The kernel has killed the workers with it."""
        with self._lock:
            if connection is not self._connection:
                return
            log.warning("the supervisor process was lost: the kernel killed all workers with it")
            self._connection = None
            self._disconnect(connection)
            if self._process is not None:
                self._process.wait()
            for request in self._requests.values():
                request.error = "the supervisor process has ended"
                request.is_answered = True
            killed = list(self._running())
        self._loop.call_at(monotonic() + RESTART_DELAY_S, self._restart)
        for process in killed:
            self._on_exit(process, -signal.SIGKILL, wall())

    def _restart(self) -> None:
        with self._lock:
            if self._connection is None and self._process is not None:
                try:
                    self._connect()
                except OSError as error:
                    log.warning(
                        "cannot start another supervisor process, so no worker can start, and the "
                        "processes that workers have started may be left: %s",
                        error,
                    )

    def _kill_supervisor(self) -> None:
        """Kill a supervisor that does not answer; all workers end with it."""
        if self._process is not None and self._connection is not None:
            connection, self._connection = self._connection, None
            self._process.kill()
            self._process.wait()
            self._disconnect(connection)

    def _disconnect(self, connection: Connection) -> None:
        self._loop.remove_reader(connection.fileno())
        connection.close()

    def close(self) -> None:
        """End the supervisor process, which kills all workers and removes all directories.

        If the supervisor was killed, another one is started for this. The call takes at most twice
        the `close_timeout`.
        """
        with self._lock:
            self._is_server_known = True
            self._server_job = None
            self._loop.wake()
            if self._end_supervisor() != 0 and (self._processes or self._directories):
                self._restart()
                self._end_supervisor()
            self._process = None
            self._processes.clear()
            self._loop.wake()

    def _end_supervisor(self) -> int:
        """End the supervisor process; return 0 if there was none, or if it has cleaned up."""
        process, connection, self._connection = self._process, self._connection, None
        if process is None:
            return 0
        if connection is not None:
            # A process that was forked from this one may hold the socket open.
            connection.send({"op": "end"})
            process.send_signal(signal.SIGCONT)  # It may have been stopped.
        try:
            process.wait(self._close_timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if connection is not None:
            self._disconnect(connection)
        return process.returncode


def _start_supervisor(link: int) -> subprocess.Popen[bytes]:
    program = _PROGRAM.format(root=_ROOT, agent=os.getpid(), link=link)
    # All signals are blocked until the supervisor ignores them.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", program],
            pass_fds=[link],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _standard_streams(
    *, stdin: bool, outputs: Sequence[int | None] = (None, None)
) -> tuple[int | None, int, int]:
    """Return the descriptors that a new process gets as its standard streams.

    Args:
        stdin: whether the process inherits the stdin of this process, if there is one.
        outputs: descriptors for stdout and stderr; None for those of this process.

    Returns:
        The descriptors for stdin, stdout and stderr. The first is None for an empty stdin.
    """
    stdout, stderr = (own if out is None else out for own, out in enumerate(outputs, 1))
    return (0 if stdin and _has_stdin() else None, stdout, stderr)


def _has_stdin() -> bool:
    """Return whether this process has a stdin that its workers can inherit."""
    try:
        # If stdin was closed, another file may have its number. Such a file is not inheritable.
        return os.get_inheritable(0)
    except OSError:
        return False


def _send_job(
    connection: Connection,
    message: Message,
    job: Mapping[str, Any],
    streams: tuple[int | None, int, int],
) -> None:
    with contextlib.ExitStack() as stack:
        request = write_job(job)
        stack.callback(os.close, request)
        directory = os.open(".", os.O_PATH | os.O_DIRECTORY)
        stack.callback(os.close, directory)
        stdin, *outputs = streams
        if stdin is None:
            stdin = os.open(os.devnull, os.O_RDONLY)
            stack.callback(os.close, stdin)
        connection.send(message, [request, directory, stdin, *outputs])
