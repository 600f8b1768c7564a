"""Fork server: forks Python workers from a process that has already imported torch.

The fork server is a child of the agent, and never a fork of it, because a fork would inherit the
threads and locks of the agent. It has one thread and has never opened a GPU; otherwise it reports
that, and no worker is forked from it. It reports exits, and reaps a worker only when the agent
requests that, so the worker's pid is not reused before its session has been cleaned up. The kernel
kills the fork server if the agent exits, and the workers if their fork server exits.

The first workers do not wait for DEFERRED_IMPORTS. Once the fork server is idle, the agent lets it
fork a second fork server, which imports these modules and forks all later workers. The first one
still answers requests during the imports, and stays the parent of the workers that it has forked.
So a deferred import that is slow, fails or ends its process affects no worker.

The stdin of a fork server is its connection to the agent, a SOCK_SEQPACKET socket. A message is a
JSON object in one packet. Its kinds:

    fork     to the server: fork a process (number), with descriptors: the job (see
             `process_setup`), the working directory, stdin, and for a worker stdout and stderr
    reap     to the server: the number of a process whose pid the agent does not use any more
    ping     to the server, which sends it back
    ready    to the agent: the pid of a server that can fork workers, or the problem
    started  to the agent: the number of a process, and its pid or an error
    exited   to the agent: the number of a process, and its exit code as Popen has it
"""

from __future__ import annotations

import array
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections import deque
from collections.abc import Sequence
from typing import Any, NoReturn

from ..numpy_warning import missing_numpy_ignored
from .forked_interpreter import become_like_new_interpreter, record_reads
from .import_timer import open_gpu
from .process_setup import EXEC_FAILED, Job, begin

FORK, REAP, PING, READY, STARTED, EXITED = "fork", "reap", "ping", "ready", "started", "exited"
MAX_DESCRIPTORS = 5
MAX_MESSAGE_BYTES = 65536
MAX_REASON_CHARS = 2000

TORCH = ("torch", "torch.distributed.nn", "torch.nn.parallel", "torch.utils.data")
# Scripts use elasticlib's own modules, a worker that joins a running group needs the second one,
# and the first optimizer of a program imports the third one. Together they take as long as torch.
DEFERRED_IMPORTS = (
    "elasticlib.in_place.step_loop",
    "torch.distributed.tensor",
    "torch._dynamo",
)
# Signals whose default action ends or stops a process, except those that report a fault.
WORKER_SIGNALS = (
    *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGTSTP),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGXCPU),
)

Message = dict[str, Any]


class Connection:
    """A connection over a socket. `send` and `receive` never block."""

    def __init__(self, link: socket.socket) -> None:
        link.setblocking(False)
        self._link = link
        # Messages that wait for space in the socket's buffer, with duplicates of the descriptors.
        self._unsent: deque[tuple[bytes, list[int]]] = deque()

    def fileno(self) -> int:
        return self._link.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, kind: str, descriptors: Sequence[int] = (), **fields: Any) -> None:
        """Send a message, or queue it until the next `send` or `flush`; a lost peer is ignored."""
        data = json.dumps({"kind": kind, **fields}).encode()
        if self._unsent or not self._try_send(data, descriptors):
            self._unsent.append((data, [os.dup(number) for number in descriptors]))
            self.flush()

    def flush(self) -> None:
        """Send as many of the queued messages as the socket accepts."""
        while self._unsent and self._try_send(*self._unsent[0]):
            for number in self._unsent.popleft()[1]:
                os.close(number)

    def _try_send(self, data: bytes, descriptors: Sequence[int]) -> bool:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        try:
            self._link.sendmsg([data], rights if descriptors else ())
        except BlockingIOError:
            return False
        except OSError:
            pass  # The peer has exited, which `receive` reports.
        return True

    def receive(self) -> tuple[Message, list[int]] | None:
        """Return a message with its descriptors, or None if there is none.

        Raises:
            ConnectionError: the peer has exited.
        """
        try:
            data, descriptors, _, _ = socket.recv_fds(
                self._link, MAX_MESSAGE_BYTES, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        if not data:
            raise ConnectionResetError("the peer has exited")
        return json.loads(data), descriptors

    def close(self) -> None:
        """Close the socket. Messages that have not been sent are dropped."""
        while self._unsent:
            for number in self._unsent.popleft()[1]:
                os.close(number)
        self._link.close()


def as_reason(error: BaseException) -> str:
    """Return the type and the text of an exception, limited in length."""
    return f"{type(error).__name__}: {error}"[:MAX_REASON_CHARS]


def serve(ledger: int, *, directory: str, preload: Sequence[str]) -> list[str]:
    """Import modules, then fork a process for each request. Return only in the workers.

    Args:
        ledger: descriptor of the agent's ledger.
        directory: where the program's own modules are found.
        preload: modules that the user wants to be imported.

    Returns:
        The arguments of `run_program` for the worker.
    """
    process_name = _rename_process("fork-server")
    os.set_inheritable(ledger, False)
    at_start = dict(os.environ)
    server = _ForkServer(ledger, _ignore_worker_signals())
    read_variables: set[str] = set()
    with record_reads(read_variables):
        # An error in the user's modules is reported before torch is imported, which takes seconds.
        with missing_numpy_ignored():
            problem = _import_preload(directory, preload) or _fork_safety_error()
            problem = problem or _import_modules(TORCH)
        server.report_ready(problem)
        job = server.answer_requests()
        if "program" not in job:
            # This process is the second fork server.
            server.report_ready(_import_modules(DEFERRED_IMPORTS))
            job = server.answer_requests()
    _rename_process(process_name)
    become_like_new_interpreter(job, at_start, read_variables)
    program: list[str] = job["program"]
    return program


class _ForkServer:
    """The part of a fork server that answers requests. It has one thread."""

    def __init__(self, ledger: int, dispositions: dict[int, Any]) -> None:
        self._agent = _take_connection()
        self._pid = os.getpid()
        self._ledger = ledger
        self._dispositions = dispositions  # what the signals that are ignored here do in workers
        self._children: dict[int, int] = {}  # pid of each running child by number of the request
        self._exited: dict[int, int] = {}  # the same for children that have exited
        self._wakeup = (-1, -1)  # a pipe that is readable after SIGCHLD

    def report_ready(self, problem: str) -> None:
        """Report that this process can fork workers, or report the problem and exit.

        Args:
            problem: why this process cannot fork workers; empty if it can.
        """
        self._agent.send(READY, pid=os.getpid(), problem=problem[:MAX_REASON_CHARS])
        if problem:
            os._exit(0)
        # Garbage collection in the workers then does not copy the memory that they share.
        gc.collect()
        gc.freeze()

    def answer_requests(self) -> Job:
        """Answer requests until the agent exits; return the job in each forked process."""
        self._watch_children()
        while True:
            writing = [self._agent] if self._agent.has_unsent else []
            reading: list[Any] = [self._agent, self._wakeup[0]]
            select.select(reading, writing, [])
            with contextlib.suppress(BlockingIOError):
                os.read(self._wakeup[0], 4096)
            self._agent.flush()
            self._report_exits()
            try:
                received = self._agent.receive()
            except ConnectionError:
                self._end()
            if received is not None:
                job = self._execute(*received)
                if job is not None:
                    return job

    def _execute(self, message: Message, descriptors: list[int]) -> Job | None:
        """Execute a request. Return the job in a forked process, None in the server."""
        number = message.get("number", 0)
        if message["kind"] == PING:
            self._agent.send(PING)
            return None
        if message["kind"] == REAP:
            pid = self._exited.pop(number, 0)
            if pid:
                os.waitpid(pid, 0)
            return None
        try:
            if len(descriptors) < message["num_descriptors"]:
                raise OSError("the workers' fork server has too many files open")
            job = self._fork(number, descriptors)
        except OSError as error:
            self._agent.send(STARTED, number=number, error=as_reason(error))
            job = None
        for descriptor in descriptors:
            os.close(descriptor)
        return job

    def _end(self) -> NoReturn:
        """Exit, after all children have exited."""
        for pid in (*self._children.values(), *self._exited.values()):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os._exit(0)

    def _watch_children(self) -> None:
        self._wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup[1], warn_on_full_buffer=False)

    def _stop_watching_children(self) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in self._wakeup:
            os.close(number)

    def _report_exits(self) -> None:
        for number, pid in list(self._children.items()):
            status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if status is not None:
                was_killed = status.si_code != os.CLD_EXITED
                code = -status.si_status if was_killed else status.si_status
                self._exited[number] = self._children.pop(number)
                self._agent.send(EXITED, number=number, code=code)

    def _fork(self, number: int, descriptors: list[int]) -> Job | None:
        """Fork a process; return its job in the process, and None in the fork server.

        Raises OSError if no process can be forked.
        """
        # A signal that arrives before the worker has its own handlers is delivered afterwards.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._dispositions)
        try:
            pid = os.fork()
        except OSError:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            raise
        if pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            self._children[number] = pid
            self._agent.send(STARTED, number=number, pid=pid)
            return None
        try:
            job = self._begin_child(descriptors)
        except BaseException:
            # A caller that caught the exception would continue as another fork server.
            with contextlib.suppress(OSError):
                os.write(2, traceback.format_exc().encode())
            os._exit(EXEC_FAILED)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return job

    def _begin_child(self, descriptors: list[int]) -> Job:
        """Take the first steps of a forked process, in that process."""
        os.setsid()
        job_file, directory, *streams = descriptors
        for target, stream in enumerate(streams):
            os.dup2(stream, target, inheritable=True)
        job = begin(self._pid, self._ledger, job_file, directory)
        self._stop_watching_children()
        self._agent.close()
        if "program" not in job:
            self._agent, self._pid = _take_connection(), os.getpid()
            self._children, self._exited = {}, {}
            return job
        for number, handler in self._dispositions.items():
            signal.signal(number, handler)
        os.close(self._ledger)
        return job


def _take_connection() -> Connection:
    """Return the connection to the agent, which is the stdin of a fork server."""
    connection = Connection(socket.socket(fileno=os.dup(0)))
    with open(os.devnull, "rb") as file:
        os.dup2(file.fileno(), 0)
    return connection


def _rename_process(new: str) -> str:
    """Set the name of this process that ps shows, and return the previous one."""
    with open("/proc/self/comm", "r+") as file:
        old = file.read().strip()
        file.seek(0)
        file.write(new)
    return old


def _ignore_worker_signals() -> dict[int, Any]:
    """Ignore signals that schedulers send to every process.

    Returns:
        The previous dispositions of the signals that were not ignored before.
    """
    dispositions: dict[int, Any] = {}
    for number in WORKER_SIGNALS:
        previous = signal.signal(number, signal.SIG_IGN)
        if previous is not signal.SIG_IGN:
            dispositions[number] = previous
    return dispositions


def _import_preload(directory: str, preload: Sequence[str]) -> str:
    """Import the user's modules; return why one of them cannot be imported, or ''."""
    sys.path.insert(0, directory)
    for module in preload:
        try:
            importlib.import_module(module)
        except BaseException as error:
            return f"preload (--preload): {_import_failure(module, error)}"
    sys.path.remove(directory)
    return ""


def _import_modules(modules: Sequence[str]) -> str:
    """Import modules; return why no worker should be forked from this process now, or ''.

    A module that is not installed is skipped. After any other error, parts of the module stay
    imported, and a worker that imports it again gets a different error than a new interpreter.
    """
    for module in modules:
        try:
            importlib.import_module(module)
        except BaseException as error:
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            if missing is None or not _may_be_missing(missing, module):
                return _import_failure(module, error)
    return _fork_safety_error()


def _may_be_missing(missing: str, module: str) -> bool:
    """Return whether an import failed because torch is not installed, or does not have `module`.

    Args:
        missing: the name of the module that was not found.
        module: the module whose import failed.
    """
    if f"{module}.".startswith(f"{missing}."):
        return True
    return module != "torch" and missing.split(".")[0] == "torch"


def _import_failure(module: str, error: BaseException) -> str:
    """Return a text with the module, the error, and the line that raised the error."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [f for f in frames if not f.filename.startswith("<frozen") and f.filename != __file__]
    # The first frame is importlib's call.
    where = f" (raised in {places[-1].filename}, line {places[-1].lineno})" if places[1:] else ""
    return f"{module} cannot be imported: {type(error).__name__}: {error}{where}"


def _fork_safety_error() -> str:
    """Return why no worker should be forked from this process, or ''."""
    # Libraries such as OpenBLAS end their threads at a fork, so fork once before counting threads.
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    if len(os.listdir("/proc/self/task")) > 1:
        names = ", ".join(t.name for t in threading.enumerate() if t is not threading.main_thread())
        return f"what was imported has started threads ({names or 'not of Python'})"
    path = open_gpu()
    return f"what was imported has opened a GPU ({path})" if path else ""
