"""Supervisor process: starts the processes of one agent, reports their exits, and outlives it.

There is one supervisor per agent. It is a small program of one thread that uses only the
standard library, so no module of the user can block it. It ignores all signals.

- **Starting.** For each request of the agent, it lets a fork server fork a Python worker, or
  executes a program if there is no fork server that is ready. A fork server is a child process
  that imports torch. If it does not answer in time, the request is served by a new interpreter
  instead; no other worker is affected.
- **Exits.** It reports an exit code to the agent at once. A child process then kills the rest of
  the worker's session, because it has to list all processes of the machine. The session of a worker
  that has succeeded is left until the agent requests its end, because what the worker has started,
  such as an upload, may still have work to do. The worker is reaped when its session is clean and
  the agent has released it, so its pid is not reused before.
- **Cleanup.** When the agent has exited or was killed, the supervisor kills the sessions of all
  remaining processes, and removes the directories that the agent has registered.
- **Parent-death signals.** The kernel kills the fork servers and executed programs if the
  supervisor exits, and forked workers if their fork server exits. So killing the supervisor or the
  agent always kills the workers. If the supervisor is killed, the agent starts another one, which
  kills the remaining processes of the sessions.

An agent may be killed a moment after a worker was started. A forked worker therefore reports itself
to the supervisor before it runs any code of the user. The supervisor reads these reports after it
has killed the fork servers, because no new reports can be written then.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import traceback
from collections.abc import Sequence

from ..clock import monotonic, wall
from .cleanup import kill_sessions, process_start_ticks, signal_group, signal_worker
from .supervisor_protocol import (
    NUM_DESCRIPTORS,
    Connection,
    Message,
    adopt_orphans,
    as_reason,
    enter_session,
    socket_pair,
)

FORK_TIMEOUT_S = 5.0  # A fork server does nothing but fork, so one that needs longer is stuck.
AGENT_CHECK_INTERVAL_S = 1.0  # how often the parent is checked if the kernel has no pidfds
FORK_SERVER_EXIT_TIMEOUT_S = 1.0
REAP_TIMEOUT_S = 1.0  # for killed processes to exit, at the end
REAP_POLL_INTERVAL_S = 0.05
EXEC_FAILED = 127  # the shell's exit code for a program that cannot be executed
IGNORED_SIGNALS = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}


class _Worker:
    """A worker that has not been reaped."""

    def __init__(self, request_id: int, pid: int, start_ticks: int = 0) -> None:
        self.id = request_id
        self.pid = pid
        self.start_ticks = start_ticks or process_start_ticks(pid)
        self.is_child = True  # of the supervisor, and not of a fork server
        self.has_exited = False
        self.is_lingering = False  # it has succeeded, and its session may go on
        self.is_clean = False  # nothing is left of its session
        self.is_released = False  # the agent does not use its number any more


class _ForkLink:
    """The connection to one process that forks workers."""

    def __init__(self, link: socket.socket) -> None:
        self.connection = Connection(link)
        self.problem: str | None = None  # why it cannot be used; empty once it is ready
        self.is_lost = False  # the process has exited
        self.is_slow = False  # it has not answered a request in time, nor anything since
        # Requests that have not been answered: the agent's id, descriptors and the time limit.
        self.pending: dict[int, tuple[int, list[int], float]] = {}
        self.workers: dict[int, _Worker] = {}  # by the number of the fork request

    @property
    def is_ready(self) -> bool:
        return self.problem == "" and not self.is_lost


class _ForkServer:
    """A fork server, and the second one that it forks once it is idle."""

    def __init__(self, pid: int, first: socket.socket, second: socket.socket) -> None:
        self.pid = pid
        self.start_ticks = process_start_ticks(pid)
        self.first = _ForkLink(first)
        self.second = _ForkLink(second)
        self.links = (self.first, self.second)

    @property
    def usable_link(self) -> _ForkLink | None:
        """The link to a process that can fork workers now, or None.

        The second process has imported more modules than the first one, so it is preferred.
        """
        return next((link for link in reversed(self.links) if link.is_ready), None)

    @property
    def is_in_use(self) -> bool:
        return any(link.workers or link.pending for link in self.links)


class Supervisor:
    """The state of a supervisor process, which ends after `run`."""

    def __init__(self, agent_pid: int, agent_link: socket.socket) -> None:
        self._pid = os.getpid()
        self._agent_pid = agent_pid
        self._agent = Connection(agent_link)
        self._is_ending = False  # the agent has exited or requested the end
        self._workers: dict[int, _Worker] = {}  # by the id of the request
        self._directories: set[str] = set()
        self._server: _ForkServer | None = None  # the one that forks new workers
        self._servers: list[_ForkServer] = []  # all that have not been reaped
        self._server_request: list[int] = []  # descriptors, to start the server again if it is lost
        self._num_forks = 0
        self._unclean: list[tuple[int, int, _Worker | None]] = []  # sessions: pid, start ticks
        self._being_cleaned: list[tuple[int, int, _Worker | None]] = []  # of `_cleaner_pid`
        self._cleaner_pid = 0  # of the child process that kills sessions, if there is one
        self._wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)  # readable after SIGCHLD
        self._signals: dict[int, signal.Handlers] = {}  # what each signal does in a new process

    def run(self) -> None:
        """Serve the agent until it exits or requests the end, and then clean up."""
        self._set_signals()
        try:
            agent_pidfd = os.pidfd_open(self._agent_pid)
        except OSError:
            agent_pidfd = -1
        while not self._is_ending and os.getppid() == self._agent_pid:
            ready = self._wait(agent_pidfd)
            if agent_pidfd in ready:
                break
            self._check_children()
            for server in list(self._servers):
                for link in server.links:
                    self._read_fork_link(server, link)
            self._replace_overdue_forks()
            self._read_agent()
            self._fork_session_killer()
        self._clean_up()

    def _set_signals(self) -> None:
        for number in IGNORED_SIGNALS:
            with contextlib.suppress(OSError):  # The C library uses some of them itself.
                ignored = signal.getsignal(number) is signal.SIG_IGN
                # Python ignores these two in each interpreter; a program is to have the defaults.
                kept = ignored and number not in (signal.SIGPIPE, signal.SIGXFSZ)
                signal.signal(number, signal.SIG_IGN)
                self._signals[number] = signal.SIG_IGN if kept else signal.SIG_DFL
        self._signals[signal.SIGCHLD] = signal.SIG_DFL
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup[1], warn_on_full_buffer=False)
        # The agent has blocked all signals while it started this process.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    def _wait(self, agent_pidfd: int) -> set[int]:
        poll = select.poll()
        timeout_s = None if agent_pidfd >= 0 else AGENT_CHECK_INTERVAL_S
        connections = [self._agent]
        for link in [link for server in self._servers for link in server.links]:
            for _, _, limit in link.pending.values():
                left = max(0.0, limit - monotonic())
                timeout_s = left if timeout_s is None else min(timeout_s, left)
            if not link.is_lost:
                connections.append(link.connection)
        for connection in connections:
            wanted = select.POLLIN | (select.POLLOUT if connection.has_unsent else 0)
            poll.register(connection.fileno(), wanted)
        poll.register(self._wakeup[0], select.POLLIN)
        if agent_pidfd >= 0:
            poll.register(agent_pidfd, select.POLLIN)
        ready = {number for number, _ in poll.poll(None if timeout_s is None else timeout_s * 1e3)}
        for connection in connections:
            connection.flush()
        with contextlib.suppress(BlockingIOError):
            os.read(self._wakeup[0], 4096)
        return ready

    # -- requests of the agent ---------------------------------------------------------------------

    def _read_agent(self) -> None:
        try:
            while (received := self._agent.receive()) is not None:
                self._execute(*received)
        except ConnectionError:
            self._is_ending = True

    def _execute(self, message: Message, descriptors: list[int]) -> None:
        if self._is_ending and descriptors:
            _close(descriptors)  # Nothing is started any more.
            return
        match message["op"]:
            case "start":
                self._start(message["id"], message["fork"], descriptors)
            case "prepare":
                _close(self._server_request)
                self._server_request = descriptors
                self._start_fork_server()
            case "cancel":
                self._cancel(message["id"])
            case "release":
                if worker := self._workers.get(message["id"]):
                    worker.is_released = True
                    self._reap_if_done(worker)
            case "clean":
                worker = self._workers.get(message["id"])
                if worker is not None and worker.is_lingering:
                    self._kill_session(worker)
            case "adopt":
                worker = _Worker(message["id"], message["pid"], message["start_ticks"])
                worker.is_child = False
                self._workers[worker.id] = worker
                self._on_exit(worker, -signal.SIGKILL)
            case "add_directory":
                self._directories.add(message["path"])
            case "remove_directory":
                self._directories.discard(message["path"])
            case "end":
                self._is_ending = True

    def _start(self, request_id: int, may_fork: bool, descriptors: list[int]) -> None:
        if len(descriptors) < NUM_DESCRIPTORS:
            _close(descriptors)
            reason = "the supervisor process has too many files open"
            self._agent.send({"id": request_id, "error": reason})
            return
        link = self._usable_link() if may_fork else None
        if link is None:
            self._execute_program(request_id, descriptors)
            return
        self._num_forks += 1
        limit = monotonic() + FORK_TIMEOUT_S
        link.pending[self._num_forks] = (request_id, descriptors, limit)
        link.connection.send({"op": "fork", "number": self._num_forks}, descriptors)

    def _usable_link(self) -> _ForkLink | None:
        if self._server is None and self._server_request:
            # The server was lost. Only a request starts another one, so that a server that ends
            # each time does not keep the machine busy.
            self._start_fork_server()
        link = None if self._server is None else self._server.usable_link
        return None if link is None or link.is_slow else link

    def _execute_program(self, request_id: int, descriptors: list[int]) -> None:
        try:
            pid = self._spawn(descriptors)
        except OSError as error:
            self._agent.send({"id": request_id, "error": as_reason(error)})
            return
        finally:
            _close(descriptors)
        self._add_worker(_Worker(request_id, pid))

    def _add_worker(self, worker: _Worker) -> None:
        self._workers[worker.id] = worker
        reply = {"id": worker.id, "pid": worker.pid, "start_ticks": worker.start_ticks}
        self._agent.send(reply)

    def _spawn(self, descriptors: Sequence[int], inherited: Sequence[int] = ()) -> int:
        """Execute the program of a job in a child process; return its pid. Raises OSError."""
        everything = signal.valid_signals()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, everything)
        try:
            pid = os.fork()
            if pid == 0:
                self._become_program(descriptors, inherited)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return pid

    def _become_program(self, descriptors: Sequence[int], inherited: Sequence[int]) -> None:
        program = ""
        try:
            signal.set_wakeup_fd(-1)
            job = enter_session(self._pid, descriptors)
            dispositions = {**self._signals, **dict.fromkeys(job["ignored"], signal.SIG_IGN)}
            for number, handler in dispositions.items():
                signal.signal(number, handler)
            for number in inherited:
                os.set_inheritable(number, True)
            numbers = dict(zip(("{first}", "{second}"), map(str, inherited), strict=False))
            command = [numbers.get(part, part) for part in job["command"]]
            program = command[0]
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            os.execvpe(program, command, job["environment"])
        except OSError as error:
            with contextlib.suppress(OSError):
                os.write(2, f"elasticlib: cannot run {program!r}: {error.strerror}\n".encode())
        except BaseException:
            with contextlib.suppress(OSError):
                os.write(2, traceback.format_exc().encode())
        os._exit(EXEC_FAILED)

    def _cancel(self, request_id: int) -> None:
        """Undo a request for which the agent does not wait any longer."""
        for link in [link for server in self._servers for link in server.links]:
            for number, (pending_id, descriptors, _) in list(link.pending.items()):
                if pending_id == request_id:
                    del link.pending[number]
                    _close(descriptors)
        if worker := self._workers.get(request_id):
            worker.is_released = True
            if not worker.has_exited:
                # A child that was just forked does not lead a group yet.
                os.kill(worker.pid, signal.SIGKILL)

    # -- fork servers ------------------------------------------------------------------------------

    def _start_fork_server(self) -> None:
        self._drop_fork_server()
        first, first_end = socket_pair()
        second, second_end = socket_pair()
        try:
            with first_end, second_end:
                ends = (first_end.fileno(), second_end.fileno())
                pid = self._spawn(self._server_request, ends)
        except OSError as error:
            first.close()
            second.close()
            self._report_server(as_reason(error))
            return
        self._server = _ForkServer(pid, first, second)
        self._servers.append(self._server)

    def _drop_fork_server(self) -> None:
        """Use the current fork server for no new worker, and end it once it has no workers."""
        server, self._server = self._server, None
        if server is not None:
            self._end_if_unused(server)

    def _end_if_unused(self, server: _ForkServer) -> None:
        if server is not self._server and server in self._servers and not server.is_in_use:
            with contextlib.suppress(ProcessLookupError):
                os.kill(server.pid, signal.SIGKILL)

    def _report_server(self, problem: str) -> None:
        self._agent.send({"event": "fork_server", "problem": problem})

    def _read_fork_link(self, server: _ForkServer, link: _ForkLink) -> None:
        try:
            while not link.is_lost:
                received = link.connection.receive()
                if received is None:
                    return
                link.is_slow = False
                self._on_fork_message(server, link, received[0])
        except ConnectionError:
            self._on_link_lost(server, link)

    def _on_fork_message(self, server: _ForkServer, link: _ForkLink, message: Message) -> None:
        number = message.get("number", 0)
        if "problem" in message:
            self._on_problem(server, link, message["problem"])
        elif "code" in message:
            if worker := link.workers.get(number):
                self._on_exit(worker, message["code"])
            else:
                # The process was never a worker, because it could not begin.
                link.connection.send({"op": "reap", "number": number})
        else:
            self._on_fork_answer(link, number, message)

    def _on_problem(self, server: _ForkServer, link: _ForkLink, problem: str) -> None:
        link.problem = problem
        if link is server.second:
            if problem:
                self._agent.send({"event": "second_fork_server", "problem": problem})
        elif server is self._server:
            self._report_server(problem)
            if problem:
                # It would have the same problem if it was started again.
                self._server_request, unused = [], self._server_request
                _close(unused)
                self._drop_fork_server()

    def _on_fork_answer(self, link: _ForkLink, number: int, message: Message) -> None:
        request_id, descriptors, _ = link.pending.pop(number, (0, [], 0.0))
        _close(descriptors)
        if "error" in message:
            if request_id:
                self._agent.send({"id": request_id, "error": message["error"]})
            return
        worker = _Worker(request_id, message["pid"])
        worker.is_child = False
        link.workers[number] = worker
        if request_id:
            self._add_worker(worker)
        else:
            # The answer is late: the request was cancelled, or served by a new interpreter.
            worker.is_released = True
            signal_worker(worker.pid, signal.SIGKILL)

    def _on_link_lost(self, server: _ForkServer, link: _ForkLink) -> None:
        link.is_lost = True
        link.connection.close()
        if link is server.first and server is self._server:
            self._agent.send({"event": "fork_server_lost"})
            self._server = None
        elif link is server.second and link.problem is None:
            # The second process was not the cause if the first one has exited, too.
            self._read_fork_link(server, server.first)
            if server.first.is_ready:
                problem = "its process ended while it imported them"
                self._agent.send({"event": "second_fork_server", "problem": problem})
        for request_id, descriptors, _ in link.pending.values():
            self._execute_program(request_id, descriptors)
        link.pending.clear()
        for worker in link.workers.values():
            # The kernel kills the workers together with their fork server.
            if not worker.has_exited:
                self._on_exit(worker, -signal.SIGKILL)

    def _replace_overdue_forks(self) -> None:
        """Start a new interpreter for each fork request that was not answered in time."""
        for link in [link for server in self._servers for link in server.links]:
            for number, (request_id, descriptors, limit) in list(link.pending.items()):
                if monotonic() >= limit:
                    link.is_slow = True
                    del link.pending[number]
                    self._execute_program(request_id, descriptors)

    # -- exits -------------------------------------------------------------------------------------

    def _check_children(self) -> None:
        for worker in list(self._workers.values()):
            if worker.is_child and not worker.has_exited:
                status = os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if status is not None:
                    was_killed = status.si_code != os.CLD_EXITED
                    self._on_exit(worker, -status.si_status if was_killed else status.si_status)
        for server in list(self._servers):
            # A socket ends when all processes have ended that may still report on it.
            if all(link.is_lost for link in server.links) and os.waitpid(server.pid, os.WNOHANG)[0]:
                self._unclean.append((server.pid, server.start_ticks, None))
                self._servers.remove(server)
        if self._cleaner_pid:
            pid, exit_status = os.waitpid(self._cleaner_pid, os.WNOHANG)
            if pid:
                self._on_cleaner_exit(exit_status)

    def _on_cleaner_exit(self, status: int) -> None:
        sessions, self._being_cleaned, self._cleaner_pid = self._being_cleaned, [], 0
        if status:
            # It was killed before it had killed all processes, so another one begins again.
            self._unclean += sessions
            return
        for _, _, worker in sessions:
            if worker is not None:
                worker.is_clean = True
                self._agent.send({"event": "clean", "id": worker.id})
                self._reap_if_done(worker)

    def _on_exit(self, worker: _Worker, code: int) -> None:
        worker.has_exited = True
        worker.is_lingering = code == 0
        self._agent.send({"event": "exited", "id": worker.id, "code": code, "at": wall()})
        if not worker.is_lingering:
            self._kill_session(worker)

    def _kill_session(self, worker: _Worker) -> None:
        worker.is_lingering = False
        if process_start_ticks(worker.pid) == worker.start_ticks:
            signal_group(worker.pid, signal.SIGKILL)
        self._unclean.append((worker.pid, worker.start_ticks, worker))

    def _fork_session_killer(self) -> None:
        """Fork a child process that kills what is left of the sessions of exited processes.

        There is at most one such child at a time.
        """
        if self._cleaner_pid or not self._unclean:
            return
        sessions, self._unclean = self._unclean, []
        try:
            self._cleaner_pid = os.fork()
        except OSError:
            self._unclean = sessions
            return
        self._being_cleaned = sessions
        if self._cleaner_pid == 0:
            with contextlib.suppress(BaseException):
                # The agent must notice the end of the supervisor, even while this process runs.
                self._agent.close()
                kill_sessions({pid: start_ticks for pid, start_ticks, _ in sessions})
            os._exit(0)

    def _reap_if_done(self, worker: _Worker) -> None:
        if not (worker.is_clean and worker.is_released):
            return
        if worker.is_child:
            os.waitpid(worker.pid, 0)
        self._workers.pop(worker.id, None)
        for server in self._servers:
            for link in server.links:
                for number in [n for n, one in link.workers.items() if one is worker]:
                    del link.workers[number]
                    link.connection.send({"op": "reap", "number": number})
            self._end_if_unused(server)

    # -- the end -----------------------------------------------------------------------------------

    def _clean_up(self) -> None:
        self._is_ending = True
        self._read_agent()
        # The workers of a killed fork server become children of this process, which reaps them: no
        # process of an agent, not even a zombie, remains after the agent has closed its workers.
        adopt_orphans()
        sessions = {worker.pid: worker.start_ticks for worker in self._workers.values()}
        for worker in self._workers.values():
            if worker.is_child:
                # It may not lead its session yet.
                os.kill(worker.pid, signal.SIGKILL)
        for server in self._servers:
            sessions[server.pid] = server.start_ticks
            os.kill(server.pid, signal.SIGKILL)
        for server in self._servers:
            for link in server.links:
                sessions.update(_start_ticks_by_pid(link))
        kill_sessions(sessions)
        self._reap_children()
        # Processes may write into the directories until they have been killed.
        if self._directories:
            import shutil

            for path in self._directories:
                shutil.rmtree(path, ignore_errors=True)

    def _reap_children(self) -> None:
        limit = monotonic() + REAP_TIMEOUT_S
        with contextlib.suppress(ChildProcessError):
            while monotonic() < limit:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    select.select([self._wakeup[0]], [], [], REAP_POLL_INTERVAL_S)
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wakeup[0], 4096)


def _start_ticks_by_pid(link: _ForkLink) -> dict[int, int]:
    """Wait for the exit of a killed fork server, and return its workers as {pid: start ticks}.

    The socket is closed when the fork server and all of its unfinished workers have exited, so no
    report can be missed.
    """
    found = {worker.pid: worker.start_ticks for worker in link.workers.values()}
    limit = monotonic() + FORK_SERVER_EXIT_TIMEOUT_S
    with contextlib.suppress(ConnectionError, OSError):
        while not link.is_lost and (left := limit - monotonic()) > 0:
            select.select([link.connection], [], [], left)
            if received := link.connection.receive():
                pid = received[0].get("pid", 0)
                if pid:
                    found[pid] = process_start_ticks(pid)
    return found


def _close(descriptors: Sequence[int]) -> None:
    for number in descriptors:
        os.close(number)


def main(agent_pid: int, link: int) -> None:
    """Run the supervisor process of an agent, which is the parent of this process."""
    os.chdir("/")
    with open("/proc/self/comm", "w") as file:
        file.write("supervisor")
    # The agent notices the end of this process only if no child process has the socket.
    os.set_inheritable(link, False)
    agent_link = socket.socket(fileno=link)
    try:
        Supervisor(agent_pid, agent_link).run()
    except BaseException:
        message = {"event": "failed", "reason": traceback.format_exc()[-4000:]}
        Connection(agent_link).send(message)
        raise
