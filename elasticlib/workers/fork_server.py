"""Fork server: forks Python workers from a process that has already imported torch.

The fork server is a child of the supervisor process, and never a fork of the agent, whose threads
and locks it would inherit. It has one thread and has never opened a GPU; otherwise it reports that,
and no worker is forked from it. It reaps a worker only when the supervisor requests that, so the
worker's pid is not reused before its session has been cleaned up. The kernel kills the fork server
if the supervisor exits, and the workers if their fork server exits.

The first workers do not wait for DEFERRED_IMPORTS. Once the fork server is idle, it forks a second
fork server, which imports these modules and forks all later workers. The first one still answers
requests during the imports, and stays the parent of the workers that it has forked. So a deferred
import that is slow, fails or ends its process affects no worker.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Any

from ..numpy_warning import missing_numpy_ignored
from .import_timer import open_gpu, start_import_timer
from .late_variables import record_reads, warn_about_late_changes
from .supervisor_protocol import (
    MAX_REASON_CHARS,
    NUM_DESCRIPTORS,
    Connection,
    Message,
    as_reason,
    enter_session,
    set_parent_death_signal,
)

TORCH = ("torch", "torch.distributed.nn", "torch.nn.parallel", "torch.utils.data")
# Scripts use elasticlib's own modules, a worker that joins a running group needs the second one,
# and the first optimizer of a program imports the third one. Together they take as long as torch.
DEFERRED_IMPORTS = (
    "elasticlib.in_place.step_loop",
    "torch.distributed.tensor",
    "torch._dynamo",
)
IDLE_S = 1.0  # The deferred imports begin after this long without a request.
IDLE_BEFORE_FIRST_REQUEST_S = 10.0  # On a busy machine, the agent may be ready much later.
# torch sets it when it is imported and whenever it is needed. A script that imports torch later may
# set it first, so it is not passed on from the fork server.
TORCH_MANAGED_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR",)
# Signals whose default action ends or stops a process, except those that report a fault.
WORKER_SIGNALS = (
    *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGTSTP),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGXCPU),
)


def serve(first: int, second: int, directory: str, preload: Sequence[str]) -> list[str]:
    """Import modules, then fork a worker for each request. Return only in the workers.

    Args:
        first: descriptor of the socket on which this process reports that it is ready, or why it
            cannot be used, and then answers requests.
        second: the same for the second fork server, which is forked once this one is idle.
        directory: where the program's own modules are found.
        preload: modules that the user wants to be imported.

    Returns:
        The arguments of `run_program` for the worker.
    """
    process_name = _rename_process("fork-server")
    for descriptor in (first, second):
        os.set_inheritable(descriptor, False)
    before = dict(os.environ)
    dispositions = _ignore_worker_signals()
    server = _ForkServer(socket.socket(fileno=first), socket.socket(fileno=second), dispositions)
    read_variables: set[str] = set()
    with record_reads(read_variables):
        # An error in the user's modules is reported before torch is imported, which takes seconds.
        with missing_numpy_ignored():
            problem = _import_preload(directory, preload) or _fork_safety_error()
            problem = problem or _import_modules(TORCH)
        server.report_ready(problem)
        job = server.answer_requests()
    _rename_process(process_name)
    program = _become_like_new_interpreter(job, before, _variables_changed_since(before))
    warn_about_late_changes(read_variables)
    start_import_timer()
    return program


class _ForkServer:
    """The part of a fork server that answers requests. It has one thread."""

    def __init__(
        self, link: socket.socket, second_link: socket.socket, dispositions: dict[int, Any]
    ) -> None:
        self._pid = os.getpid()
        self._supervisor = Connection(link)
        # The connection of the second fork server until that has been forked.
        self._second: Connection | None = Connection(second_link)
        self._second_pid = 0  # of the second fork server, if it is a child of this process
        self._dispositions = dispositions  # what the signals that are ignored here do in workers
        self._workers: dict[int, int] = {}  # pid of each running worker by number of the request
        self._exited: dict[int, int] = {}  # the same for workers that have exited
        self._wakeup = (-1, -1)  # a pipe that is readable after SIGCHLD

    def report_ready(self, problem: str) -> None:
        """Report that this process can fork workers, or report the problem and exit.

        Args:
            problem: why this process cannot fork workers; empty if it can.
        """
        self._supervisor.send({"problem": problem[:MAX_REASON_CHARS]})
        if problem:
            os._exit(0)
        # Garbage collection in the workers then does not copy the memory that they share.
        gc.collect()
        gc.freeze()

    def answer_requests(self) -> Message:
        """Answer requests until the supervisor ends; return the job in each forked worker."""
        self._watch_children()
        idle_s = IDLE_BEFORE_FIRST_REQUEST_S
        while True:
            writing = [self._supervisor] if self._supervisor.has_unsent else []
            reading: list[Any] = [self._supervisor, self._wakeup[0]]
            limit = None if self._second is None else idle_s
            ready, writable, _ = select.select(reading, writing, [], limit)
            if not ready and not writable:
                self._fork_second_server()
                continue
            with contextlib.suppress(BlockingIOError):
                os.read(self._wakeup[0], 4096)
            self._supervisor.flush()
            self._report_exits()
            try:
                received = self._supervisor.receive()
            except ConnectionError:
                os._exit(0)
            if received is not None:
                idle_s = IDLE_S
                job = self._handle_request(*received)
                if job is not None:
                    return job

    def _handle_request(self, message: Message, descriptors: list[int]) -> Message | None:
        """Fork or reap a worker. Return its job in the forked child, None in the server."""
        number = message["number"]
        if message["op"] == "reap":
            pid = self._exited.pop(number, 0)
            if pid:
                os.waitpid(pid, 0)
            return None
        try:
            if len(descriptors) < NUM_DESCRIPTORS:
                raise OSError("the workers' fork server has too many files open")
            job = self._fork(number, descriptors)
        except OSError as error:
            self._supervisor.send({"number": number, "error": as_reason(error)})
            job = None
        if job is None:
            for descriptor in descriptors:
                os.close(descriptor)
        return job

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
        for number, pid in list(self._workers.items()):
            status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if status is not None:
                was_killed = status.si_code != os.CLD_EXITED
                code = -status.si_status if was_killed else status.si_status
                self._exited[number] = self._workers.pop(number)
                self._supervisor.send({"number": number, "code": code})
        if self._second_pid and os.waitpid(self._second_pid, os.WNOHANG)[0]:
            self._second_pid = 0

    def _fork_second_server(self) -> None:
        """Fork the second fork server.

        In the child, this object becomes the second server: it imports DEFERRED_IMPORTS before this
        method returns. The parent continues as the first server.
        """
        second = self._second
        self._second = None
        if second is None:
            return
        first_pid = self._pid
        try:
            self._second_pid = os.fork()
        except OSError as error:
            second.send({"problem": f"the second fork server cannot be forked: {error}"})
            second.close()
            return
        if self._second_pid:
            second.close()
            return
        self._stop_watching_children()
        set_parent_death_signal(first_pid)
        self._supervisor.close()
        self._supervisor, self._pid = second, os.getpid()
        self._workers, self._exited = {}, {}
        self.report_ready(_import_modules(DEFERRED_IMPORTS))
        self._watch_children()

    def _fork(self, number: int, descriptors: list[int]) -> Message | None:
        """Fork a worker; return its job in the worker, and None in the fork server.

        The worker reports itself before it runs anything of the user. Raises OSError.
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
            self._workers[number] = pid
            return None
        try:
            job = enter_session(self._pid, descriptors)
            for signal_number, handler in self._dispositions.items():
                signal.signal(signal_number, handler)
            self._stop_watching_children()
            self._supervisor.send({"number": number, "pid": os.getpid()})
            if self._supervisor.has_unsent:
                raise OSError("the supervisor process reads no messages")
        except BaseException as error:
            reason = f"the worker's process did not begin: {as_reason(error)}"
            self._supervisor.send({"number": number, "error": reason})
            # A caller that caught the exception would continue as another fork server.
            os._exit(1)
        for descriptor in descriptors:
            os.close(descriptor)
        self._supervisor.close()
        if self._second is not None:
            self._second.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return job


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


def _variables_changed_since(before: dict[str, str]) -> dict[str, str]:
    """Return the environment variables that imported modules have set or changed."""
    return {
        key: text
        for key, text in os.environ.items()
        if before.get(key) != text and key not in TORCH_MANAGED_VARIABLES
    }


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


def _become_like_new_interpreter(
    job: Message, start_environment: dict[str, str], set_by_modules: dict[str, str]
) -> list[str]:
    """Give this process the environment and the state of a new interpreter.

    Args:
        job: the worker's job. `server_environment` are the variables that the agent gave to the
            fork server.
        start_environment: the variables that the fork server had when its interpreter was started.
        set_by_modules: the variables that modules have set since then.

    Returns:
        The arguments of `run_program`.
    """
    given = job["server_environment"]
    # In a bare locale, Python sets LC_CTYPE for itself, and a new interpreter would do the same.
    own = {key: text for key, text in start_environment.items() if key == "LC_CTYPE"}
    # If PYTHON_EXEC is a script that starts the interpreter, its changes apply to workers too.
    wrapped = {
        k: text for k, text in start_environment.items() if given.get(k) != text and k not in own
    }
    os.environ.clear()
    os.environ.update({**own, **job["environment"], **wrapped, **set_by_modules})
    for name in given.keys() - start_environment.keys():
        os.environ.pop(name, None)
    _rebuild_sys_stdin()
    _reseed_generators()
    program: list[str] = job["program"]
    return program


def _rebuild_sys_stdin() -> None:
    """Replace `sys.stdin` in a worker, because it has the properties of the fork server's stdin."""
    previous = sys.__stdin__
    if previous is None or sys.stdin is not previous:
        return  # An imported module has replaced it.
    raw = io.FileIO(0, closefd=False)
    raw.name = previous.name
    stdin = io.TextIOWrapper(
        io.BufferedReader(raw),
        previous.encoding,
        previous.errors,
        newline="\n",
        write_through=previous.write_through,
    )
    stdin.mode = previous.mode  # type: ignore[misc]
    sys.stdin = sys.__stdin__ = stdin  # type: ignore[misc]


def _reseed_generators() -> None:
    """Give NumPy, torch and multiprocessing new random seeds, as a new interpreter does.

    `random` and OpenSSL reseed themselves after a fork.
    """
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed()
    generator = getattr(sys.modules.get("torch"), "default_generator", None)
    if generator is not None:
        generator.seed()
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None:
        processes.current_process().authkey = os.urandom(32)
