"""The agent's side of its fork servers: requests, exits, and servers that do not answer.

All of it belongs to the thread `workers` of `LocalWorkers`. A server that does not answer a request
or a ping is continued, in case that it was stopped, and killed if that does not help. The kernel
then kills its workers, and their exits say why.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from ..clock import monotonic
from ..threads import do_nothing
from . import fork_server as protocol
from .cleanup import signal_group
from .fork_server import DEFERRED_IMPORTS, Connection, Message
from .ledger import HELPERS, Ledger
from .process_setup import write_job

log = logging.getLogger("elasticlib.workers")

PING_INTERVAL_S = 5.0
CONTINUE_AFTER_S = 1.0  # without an answer
KILL_AFTER_S = 10.0
IDLE_S = 1.0  # after the last request, before a second fork server is forked
IDLE_BEFORE_FIRST_REQUEST_S = 10.0  # on a busy machine, the first request may be much later
NEVER = float("inf")
LOST = "its fork server was lost"
_SECOND_SERVER = 0  # the number of the request for a second fork server; workers count from 1
Release = Callable[[], object]
"""Lets the parent of a process reap it."""
Executes = Callable[[Mapping[str, Any], tuple[int | None, ...]], tuple[int, Release]]
"""Executes the program of a job with these standard streams; returns the pid of the process."""


class Child(Protocol):
    """A process that is forked. The methods are called in the thread `workers`."""

    def on_started(self, pid: int, release: Release) -> None:
        """The process exists."""

    def on_start_failed(self, error: str) -> None:
        """There is no process. The text is empty if another way to start one may succeed."""

    def on_exited(self, code: int, reason: str = "") -> None:
        """The process has exited. It is not reaped before it is released."""


class ForkServer:
    """A process that forks workers, and the connection to it."""

    def __init__(self, connection: Connection, slot: int) -> None:
        self.connection, self.slot = connection, slot
        self.session = 0  # that the process leads, if it is a child of this process
        self.release: Release = do_nothing
        self.pid = 0  # of the process; 0 before it is ready
        self.problem: str | None = None  # why it cannot be used; empty once it is ready
        self.is_lost = False  # the process has exited
        self.end = LOST  # what happened to workers that are killed with the process
        self.pending: dict[int, Child] = {}  # requests without an answer
        self.children: dict[int, Child] = {}  # by the number of the request
        self.unanswered_since: float | None = None  # the time of a request without an answer
        self.is_continued = False  # during this wait
        self.ping_at = NEVER

    @property
    def is_ready(self) -> bool:
        return self.problem == "" and not self.is_lost

    @property
    def is_used(self) -> bool:
        return bool(self.pending or self.children)

    def fork(self, now: float, number: int, child: Child, descriptors: Sequence[int]) -> None:
        count = len(descriptors)
        self.request(now, protocol.FORK, descriptors, number=number, num_descriptors=count)
        self.pending[number] = child

    def request(self, now: float, kind: str, fds: Sequence[int] = (), **fields: Any) -> None:
        self.connection.send(kind, fds, **fields)
        self.unanswered_since = now if self.unanswered_since is None else self.unanswered_since
        self.ping_at = now + PING_INTERVAL_S

    def on_message(self, now: float) -> None:
        """Note that the process runs."""
        self.unanswered_since = now if self.pending else None
        self.is_continued = False
        self.ping_at = now + PING_INTERVAL_S

    @property
    def due_at(self) -> float:
        if not self.is_ready:
            return NEVER
        if self.unanswered_since is None:
            return self.ping_at
        return self.unanswered_since + (KILL_AFTER_S if self.is_continued else CONTINUE_AFTER_S)

    def watch(self, now: float) -> None:
        """Send a ping, or continue or kill a process that does not answer, if that is due."""
        if now < self.due_at:
            return
        if self.unanswered_since is None:
            self.request(now, protocol.PING)
        elif not self.is_continued:
            self.is_continued = True
            self._signal(signal.SIGCONT)
        else:
            self.end = f"its fork server did not answer for {KILL_AFTER_S:g} s"
            log.error("a fork server did not answer for %g s, and is killed", KILL_AFTER_S)
            self.unanswered_since, self.ping_at = None, NEVER
            self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


class _SecondServer:
    """A second fork server as a child of the first one."""

    def __init__(self, servers: ForkServers, server: ForkServer) -> None:
        self._servers, self._server = servers, server

    def on_started(self, pid: int, release: Release) -> None:
        del pid
        self._server.release = release

    def on_start_failed(self, error: str) -> None:
        self._servers.drop_second(self._server, error)

    def on_exited(self, code: int, reason: str = "") -> None:
        del code, reason
        self._servers.on_lost(self._server)


class ForkServers:
    """All fork servers of an agent: those for new workers, and earlier ones that have workers.

    The second fork server is a child of the first one. A server that is not for new workers is
    ended once it has no child.

    Args:
        ledger: the agent's ledger.
        execute: starts a server.
        watch: called with a descriptor and a function to call when it is readable.
        unwatch: called with such a descriptor before it is closed.
        on_exited: called with a server whose process has exited or is about to, and which is to be
            reaped.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        execute: Executes,
        watch: Callable[[int, Callable[[], object]], object],
        unwatch: Callable[[int], object],
        on_exited: Callable[[ForkServer], object],
    ) -> None:
        self._ledger, self._execute = ledger, execute
        self._watch, self._unwatch, self._on_exited = watch, unwatch, on_exited
        self._job: Mapping[str, Any] | None = None  # starts a server, again if it is lost
        self._current: list[ForkServer] = []  # for new workers: the first, and then the second one
        self._idle_at = NEVER  # when the second one is forked
        self._servers: list[ForkServer] = []  # all that have not exited
        self._num_forks = 0
        self.problem = ""  # why no worker can be forked; empty if one can, or it is not known yet
        self.is_known = True  # whether workers can be forked

    def prepare(self, job: Mapping[str, Any]) -> None:
        """Start a server for all later workers; its predecessor stays while it has workers."""
        self._drop_current()
        self._job, self.problem = job, ""
        self._start()

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables that the current server was given."""
        return {} if self._job is None else self._job["environment"]

    def fork(self, now: float, child: Child, descriptors: Sequence[int]) -> bool:
        """Request a worker; return False if no server is ready."""
        if not self._current and self._job is not None and not self.problem:
            # The server was lost. Only a request starts another one, so that a server that exits
            # each time does not keep the machine busy.
            self._start()
        # The second server has imported more modules than the first one.
        server = next((one for one in reversed(self._current) if one.is_ready), None)
        if server is None or server.is_continued:
            return False
        self._num_forks += 1
        server.fork(now, self._num_forks, child, descriptors)
        self._postpone_second(now)
        return True

    def tick(self, now: float, late_s: float) -> float:
        """Do what is due, and return when this must be called again.

        Args:
            now: the time.
            late_s: for so many seconds, this process has not run.
        """
        for server in self._servers:
            if late_s and server.unanswered_since is not None:
                # The servers may have been paused as well.
                server.unanswered_since += late_s
            server.watch(now)
            if server.connection.has_unsent:
                server.connection.flush()
        if now >= self._idle_at:
            self._fork_second(now)
        return min([self._idle_at, *(server.due_at for server in self._servers)])

    def close(self) -> None:
        """End all servers."""
        self._job, self._current = None, []
        self._idle_at, self.is_known = NEVER, True
        for server in reversed(self._servers):
            self._end(server)

    # -- the start -------------------------------------------------------------------------------

    def _start(self) -> None:
        job = self._job
        if job is None:
            return
        self.is_known, self._idle_at = False, NEVER
        try:
            with self._new_server() as (server, end):
                own = {"slot": server.slot, "keeps_ledger": True}
                streams = (end.fileno(), None, None)
                server.session, server.release = self._execute({**job, **own}, streams)
        except OSError as error:
            self._set_problem(protocol.as_reason(error))

    @contextlib.contextmanager
    def _new_server(self) -> Iterator[tuple[ForkServer, socket.socket]]:
        """Yield a server whose process is to be started, and its end of the connection.

        Raises:
            OSError: there is no descriptor, or no slot.
        """
        agent_end, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as undo, server_end:
            undo.callback(agent_end.close)
            server = ForkServer(Connection(agent_end), self._ledger.take(HELPERS))
            undo.callback(self._ledger.free, server.slot)
            yield server, server_end
            undo.pop_all()
        self._current.append(server)
        self._servers.append(server)
        self._watch(agent_end.fileno(), partial(self._read, server))

    def _postpone_second(self, now: float) -> None:
        """Note that the first server is not idle."""
        if len(self._current) == 1 and self._current[0].is_ready:
            self._idle_at = now + IDLE_S

    def _fork_second(self, now: float) -> None:
        """Let the first server fork a second one."""
        self._idle_at = NEVER
        try:
            with self._new_server() as (second, end), contextlib.ExitStack() as stack:
                job = write_job({**(self._job or {}), "slot": second.slot})
                stack.callback(os.close, job)
                directory = os.open(".", os.O_PATH | os.O_DIRECTORY)
                stack.callback(os.close, directory)
                child, descriptors = _SecondServer(self, second), [job, directory, end.fileno()]
                self._current[0].fork(now, _SECOND_SERVER, child, descriptors)
        except OSError as error:
            _warn_of_second_server(str(error))

    def drop_second(self, server: ForkServer, error: str) -> None:
        """Forget a second server, because it was not forked."""
        self._disconnect(server)
        if server in self._servers:
            self._servers.remove(server)
            self._ledger.free(server.slot)
        if error:
            _warn_of_second_server(error)

    def _set_problem(self, problem: str) -> None:
        self.problem, self.is_known = problem, True
        if problem:
            # It would have the same problem if it was started again.
            self._drop_current()

    # -- messages --------------------------------------------------------------------------------

    def _read(self, server: ForkServer) -> None:
        try:
            while not server.is_lost and (received := server.connection.receive()) is not None:
                self._on_message(server, received[0])
        except ConnectionError:
            self.on_lost(server)

    def _on_message(self, server: ForkServer, message: Message) -> None:
        kind, number = message["kind"], message.get("number", 0)
        if kind == protocol.STARTED:
            child = server.pending.pop(number)
            if "error" in message:
                child.on_start_failed(message["error"])
            else:
                server.children[number] = child
                child.on_started(message["pid"], lambda: self._release(server, number))
        elif kind == protocol.EXITED and number in server.children:
            server.children[number].on_exited(message["code"])
        elif kind == protocol.READY:
            server.pid, server.problem = message["pid"], message["problem"]
            self._on_ready(server, message["problem"])
        server.on_message(monotonic())

    def _on_ready(self, server: ForkServer, problem: str) -> None:
        if server in self._current[:1]:
            self._idle_at = NEVER if problem else monotonic() + IDLE_BEFORE_FIRST_REQUEST_S
            self._set_problem(problem)
        elif server in self._current and problem:
            _warn_of_second_server(problem)

    def _release(self, server: ForkServer, number: int) -> bool:
        del server.children[number]
        if not server.is_lost:
            server.connection.send(protocol.REAP, number=number)
        self._postpone_second(monotonic())
        self._end_unused(server)
        return True

    # -- the end ---------------------------------------------------------------------------------

    def _drop_current(self) -> None:
        """Use the current servers for no new worker."""
        servers, self._current, self._idle_at = self._current, [], NEVER
        for server in reversed(servers):
            self._end_unused(server)

    def _end_unused(self, server: ForkServer) -> None:
        if server in self._servers and server not in self._current and not server.is_used:
            self._end(server)

    def _end(self, server: ForkServer) -> None:
        """Let a server exit, with all of its children."""
        self._disconnect(server)
        if server.session:
            signal_group(server.session, signal.SIGCONT)
        self._remove(server)

    def _disconnect(self, server: ForkServer) -> None:
        if not server.is_lost:
            server.is_lost = True
            self._unwatch(server.connection.fileno())
            server.connection.close()

    def _remove(self, server: ForkServer) -> None:
        if server in self._servers:
            self._servers.remove(server)
            self._on_exited(server)

    def on_lost(self, server: ForkServer) -> None:
        """Note that the process of a server has exited."""
        if server.is_lost:
            return
        self._disconnect(server)
        if server in self._current[:1]:
            self._current, self._idle_at, self.is_known = [], NEVER, True
            log.warning(
                "the workers' fork server has exited; workers are started without it until the "
                "next one is ready"
            )
        elif server in self._current and server.problem is None:
            # The second process was not the cause if the first one has exited, too.
            first = self._current[0]
            self._read(first)
            if first.is_ready:
                _warn_of_second_server("its process ended while it imported them")
        pending, server.pending = list(server.pending.values()), {}
        for child in pending:
            child.on_start_failed("")
        for child in list(server.children.values()):
            # The kernel kills the children together with their fork server.
            child.on_exited(-signal.SIGKILL, server.end)
        self._remove(server)


def _warn_of_second_server(problem: str) -> None:
    log.warning(
        "the second fork server cannot be used, so workers are forked without %s, and import what "
        "they need of these themselves: %s",
        ", ".join(DEFERRED_IMPORTS),
        problem,
    )
