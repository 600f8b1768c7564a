"""Fork server: forks Python workers from a process that has already imported torch.

The first part of this module runs in the fork server, the second part in the agent. The fork server
is a new process, never a fork of the agent, because the agent's threads and locks would come along.
It has one thread and has never opened a GPU; otherwise it says so, and the agent does not use it.
It does not reap an exited worker before the agent asks for that, so the worker's pid cannot be
reused before the worker's session has been cleaned up. It ends with its agent, and its workers end
with it.

The first workers do not wait for DEFERRED_IMPORTS. Once the fork server is idle, it forks a second
fork server, which imports these modules and forks all later workers. The first one keeps answering
requests meanwhile, and stays the parent of the workers that it has forked. So a deferred import
that is slow, fails or ends its process affects no worker.

If the fork server fails, workers are started as new interpreters instead, and another fork server
begins. There is one exception: if a module that the user asked for (`--preload`) cannot be
imported, the start fails, because the script would probably fail on it as well.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ElasticError, WorkerStartError, present
from .process_entry import register_session, set_parent_death_signal

if TYPE_CHECKING:
    from .event_loop import EventLoop

log = logging.getLogger("elasticlib.workers")

TORCH = ("torch", "torch.distributed.nn", "torch.nn.parallel", "torch.utils.data")
# Scripts use elasticlib's own modules, a worker that joins a running group needs the second one,
# and the first optimizer of a program imports the third one. Together they take as long as torch.
DEFERRED_IMPORTS = (
    "elasticlib.in_place.step_loop",
    "torch.distributed.tensor.debug",
    "torch._dynamo",
)
# The deferred imports begin when nobody has asked for a worker for this long.
IDLE_SECONDS = 1.0
# The same before the first request: on a busy machine the agent is ready much later than this.
UNASKED_SECONDS = 10.0
# A fork request carries the request itself, the guardian's list, the working directory, and the
# worker's stdin, stdout and stderr.
DESCRIPTORS = 6
MOST_SAID = 2048
READY = "ready"
# torch sets it as it is imported, and anew whenever it looks: a script that imports it later may
# set it first.
TORCH_MANAGED_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR",)
# Those whose default action ends or stops a process, but for its own faults.
WORKER_SIGNALS = (
    *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGTSTP),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGXCPU),
)


def serve(first: int, second: int, folder: str, preload: Sequence[str]) -> list[str]:
    """Import modules, then fork a worker at each request; return in the workers alone.

    Args:
        first: the descriptor of the socket on which this process says that it is ready, or why it
            cannot be used, and then answers requests.
        second: the same for the second fork server, which is forked once this one is idle.
        folder: where the program's own modules are found.
        preload: modules that the user wants to be imported.

    Returns:
        What the worker is to run, as `run_program` takes it.
    """
    link, second_link = socket.socket(fileno=first), socket.socket(fileno=second)
    name = _name("fork-server")
    before = dict(os.environ)
    dispositions = _ignore_worker_signals()
    # The user's modules come first: an error there is known before the seconds that torch takes.
    _report_ready(
        link, _import_preload(folder, preload) or _fork_safety_error() or _import_modules(TORCH)
    )
    job = _answer(link, dispositions, second_link=second_link)
    if job is None:
        link, second_server = _fork_second_server(link, second_link)
        job = _answer(link, dispositions, second_server=second_server)
    _name(name)
    return _enter(present(job, "the job of a worker"), before, _changed_since(before))


def _answer(
    link: socket.socket,
    dispositions: dict[int, Any],
    *,
    second_link: socket.socket | None = None,
    second_server: int = 0,
) -> dict[str, Any] | None:
    """Answer requests; return in a forked worker, with its job, or when it is time to import more.

    Args:
        link: the socket of the requests.
        dispositions: what the signals that this process ignores do in a worker.
        second_link: the socket of a second fork server that is still to be forked: None is returned
            when this process is idle.
        second_server: the pid of the second fork server, where this process is its parent.
    """
    idle_s = UNASKED_SECONDS
    while True:
        if second_link is not None and not select.select([link], [], [], idle_s)[0]:
            return None
        idle_s = IDLE_SECONDS
        try:
            message, descriptors, _, _ = socket.recv_fds(link, 64, DESCRIPTORS)
        except OSError:
            os._exit(1)
        if not message:
            os._exit(0)
        if second_server and os.waitpid(second_server, os.WNOHANG)[0]:
            second_server = 0
        if message.startswith(b"reap "):
            _say(link, str(_reap(int(message[5:]))).encode())
            continue
        job = None
        try:
            if len(descriptors) < DESCRIPTORS:
                raise OSError("the workers' fork server has too many files open")
            job = _fork(link, second_link, descriptors, dispositions)
        except OSError as error:
            _say(link, f"!{error}".encode()[:MOST_SAID])
        if job is not None:
            return job
        for descriptor in descriptors:
            os.close(descriptor)


def _fork_second_server(
    link: socket.socket, second_link: socket.socket
) -> tuple[socket.socket, int]:
    """Fork the second fork server, and import DEFERRED_IMPORTS in it.

    Returns:
        In each of the two processes, the socket on which it answers requests; and the child's pid,
        which is 0 in the child.
    """
    server = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        _say(second_link, f"the second fork server cannot be forked: {error}".encode())
        pid = 0
    else:
        if pid == 0:
            link.close()
            set_parent_death_signal(server)
            _report_ready(second_link, _import_modules(DEFERRED_IMPORTS))
            return second_link, 0
    second_link.close()
    return link, pid


def _report_ready(link: socket.socket, problem: str) -> None:
    """Tell the agent that this process can fork workers, or end it because of the problem."""
    _say(link, (problem or READY).encode()[:MOST_SAID])
    if problem:
        os._exit(0)
    # What has been imported is shared with all workers, and no collection there visits it.
    gc.collect()
    gc.freeze()


def _say(link: socket.socket, word: bytes) -> None:
    """The agent may have ended meanwhile; then nobody needs this process."""
    try:
        link.send(word)
    except OSError:
        os._exit(1)


def _name(new: str) -> str:
    """Change what ps shows for this process; returns what it showed."""
    with open("/proc/self/comm", "r+") as file:
        old = file.read().strip()
        file.seek(0)
        file.write(new)
    return old


def _ignore_worker_signals() -> dict[int, Any]:
    """Ignore what is meant for workers: some schedulers signal every process that they find."""
    found = {number: signal.getsignal(number) for number in WORKER_SIGNALS}
    heard: dict[int, Any] = {
        number: was for number, was in found.items() if was is not signal.SIG_IGN
    }
    for number in heard:
        signal.signal(number, signal.SIG_IGN)
    return heard


def _import_preload(folder: str, preload: Sequence[str]) -> str:
    """Import the user's modules; return why one of them cannot be imported, or ''."""
    sys.path.insert(0, folder)
    # Whatever these imports print is not a worker's: it goes where the agent's own words go.
    for module in preload:
        try:
            importlib.import_module(module)
        except BaseException as error:
            return f"preload (--preload): {_import_failure(module, error)}"
    sys.path.remove(folder)
    return ""


def _import_modules(modules: Sequence[str]) -> str:
    """Import modules; return why no worker should be forked from this process now, or ''.

    A module that is not installed is no problem. After any other error parts of the module stay
    imported, and a worker that imports it again gets another error than in a new interpreter.
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
    """Whether `module` is not there because there is no torch, or one that lacks some modules."""
    if f"{module}.".startswith(f"{missing}."):
        return True
    return module != "torch" and missing.split(".")[0] == "torch"


def _import_failure(module: str, error: BaseException) -> str:
    """Say in one sentence which module cannot be imported, why, and where the error was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [f for f in frames if not f.filename.startswith("<frozen") and f.filename != __file__]
    # The first place is importlib's own, by which the module is imported here.
    where = f" (raised in {places[-1].filename}, line {places[-1].lineno})" if places[1:] else ""
    return f"{module} cannot be imported: {type(error).__name__}: {error}{where}"


def _changed_since(before: dict[str, str]) -> dict[str, str]:
    """The variables that modules have set, but for those that each script may set first."""
    return {
        key: text
        for key, text in os.environ.items()
        if before.get(key) != text and key not in TORCH_MANAGED_VARIABLES
    }


def _fork_safety_error() -> str:
    """Why no worker should be forked from this process."""
    # Libraries that hide their threads from a fork, as OpenBLAS does, have done so now.
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    if len(os.listdir("/proc/self/task")) > 1:
        names = ", ".join(t.name for t in threading.enumerate() if t is not threading.main_thread())
        return f"what was imported has started threads ({names or 'not of Python'})"
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{name}")
            if path.startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri")):
                return f"what was imported has opened a GPU ({path})"
    return ""


def _reap(pid: int) -> int:
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return -signal.SIGKILL


def _fork(
    link: socket.socket,
    second_link: socket.socket | None,
    descriptors: list[int],
    dispositions: dict[int, Any],
) -> dict[str, Any] | None:
    """Fork a worker; return its job in the worker, and None in the fork server.

    The agent is told of the worker once that leads its own session. A worker keeps neither of the
    fork server's sockets: the agent would not notice the end of the fork server.
    """
    reading, writing = os.pipe()
    # A signal that comes before the worker is itself waits until it is.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, dispositions)
    server = os.getpid()
    try:
        pid = os.fork()
    except OSError:
        # The server lives on, and its next worker has this one's mask.
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(reading)
        os.close(writing)
        raise
    if pid == 0:
        try:
            os.setsid()
            set_parent_death_signal(server)
            register_session(descriptors.pop(1))
            job = _take_over(descriptors, dispositions)
        except BaseException as error:
            # What catches it further up would go on as a second server.
            os.write(writing, f"!{type(error).__name__}: {error}".encode()[:MOST_SAID])
            os._exit(1)
        os.write(writing, b"+")
        links = [one.detach() for one in (link, second_link) if one is not None]
        for descriptor in (*descriptors, reading, writing, *links):
            os.close(descriptor)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return job
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.close(writing)
    said = os.read(reading, MOST_SAID)
    os.close(reading)
    if said.startswith(b"!"):
        os.waitpid(pid, 0)
        raise OSError(f"the worker's process did not begin: {said[1:].decode(errors='replace')}")
    _say(link, str(pid).encode())
    return None


def _take_over(descriptors: list[int], dispositions: dict[int, Any]) -> dict[str, Any]:
    """Take over the worker's working directory, streams and signals; return its job."""
    request, folder, *streams = descriptors
    # By its descriptor: the directory may have been removed.
    os.fchdir(folder)
    for number, handler in dispositions.items():
        signal.signal(number, handler)
    for target, stream in enumerate(streams):
        os.dup2(stream, target, inheritable=True)
    with open(request, closefd=False) as file:
        file.seek(0)
        job: dict[str, Any] = json.load(file)
    return job


def _enter(job: dict[str, Any], before: dict[str, str], changed: dict[str, str]) -> list[str]:
    """Make this process look like a fresh interpreter.

    before: the server's variables as its interpreter began. changed: those that modules have set
    since, for the programs that import them.
    """
    environment, processors, told = job["environment"], job["processors"], job["server"]
    what: list[str] = job["what"]
    # A Python in a bare locale gives itself one, which the server did for its workers.
    own = {key: text for key, text in before.items() if key == "LC_CTYPE"}
    # What starts the interpreter (PYTHON_EXEC may be a script) has its own say.
    wrapped = {k: text for k, text in before.items() if told.get(k) != text and k not in own}
    unset = told.keys() - before.keys()
    if set(processors) != os.sched_getaffinity(0):
        os.sched_setaffinity(0, processors)
    os.environ.clear()
    os.environ.update({**own, **environment, **wrapped, **changed})
    for name in unset:
        os.environ.pop(name, None)
    _open_stdin()
    _reseed_generators()
    return what


def _open_stdin() -> None:
    """As an interpreter does: what there was has asked the server's whether it can be sought."""
    was = sys.__stdin__
    if was is None or sys.stdin is not was:
        return  # what was imported has put something else there
    raw = io.FileIO(0, closefd=False)
    raw.name = was.name
    now = io.TextIOWrapper(
        io.BufferedReader(raw),
        was.encoding,
        was.errors,
        newline="\n",
        write_through=was.write_through,
    )
    now.mode = was.mode  # type: ignore[misc]
    sys.stdin = sys.__stdin__ = now  # type: ignore[misc]


def _reseed_generators() -> None:
    """What each interpreter draws for itself at its start; `random` and OpenSSL see to theirs."""
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed()
    generator = getattr(sys.modules.get("torch"), "default_generator", None)
    if generator is not None:
        generator.seed()
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None:
        processes.current_process().authkey = os.urandom(32)


# -- the agent's end --------------------------------------------------------------------------

# The agent's event loop waits for this long at most. A fork server does nothing but fork and reap,
# so one that does not answer in this time has been stopped or cannot run.
FORK_REQUEST_TIMEOUT_S = 10.0
CLOSE_SECONDS = 2.0


class ForkServerLost(ElasticError):
    """The fork server does not answer or has ended, and so have its workers."""


class ForkedWorker:
    """A worker of a fork server, with the part of Popen's interface that is needed."""

    def __init__(self, pid: int, server: ForkServer, link: socket.socket) -> None:
        self.pid = pid
        self._server = server
        self._link = link

    def wait(self) -> int:
        """Reap the worker, whose session is gone; return what Popen would return."""
        return self._server.reap(self.pid, self._link)


class ForkServer:
    """A fork server, with the second one that it forks.

    Its methods belong to the agent's thread, but for `wait`, which any thread may call.

    Args:
        command: how it is started. `{first}` and `{second}` stand for descriptors: see `serve`.
        environment: what all workers have in common. An interpreter or a library that reads a
            variable only once, when it starts, has the workers' value.
        listed: the descriptor of the guardian's list.
        loop: reads what the fork servers say of themselves.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        registry_fd: int,
        loop: EventLoop,
    ) -> None:
        self._loop = loop
        self._link, first = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._second, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        numbers = {"{first}": first.fileno(), "{second}": second.fileno()}
        try:
            with first, second:
                self._process = subprocess.Popen(
                    [str(numbers.get(part, part)) for part in command],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    pass_fds=[*numbers.values(), registry_fd],
                    start_new_session=True,
                )
        except BaseException:
            self._link.close()
            self._second.close()
            raise
        self.pid = self._process.pid
        self.workers: set[int] = set()
        """The pids of its workers that have not been reaped."""
        self._environment = dict(environment)
        self._said = ""
        self._second_is_ready = self._closed = False
        self._heard = threading.Event()
        # Nobody else reads from a link until its server has said its first word.
        self._ears = (self._link.dup(), self._second.dup())
        self._listen(self._ears[0], self._hear)

    def _listen(self, ear: socket.socket, hear: Callable[[str], object]) -> None:
        def read() -> None:
            text = ""
            with contextlib.suppress(OSError):
                text = ear.recv(4096).decode(errors="replace")
            self._loop.remove_reader(ear.fileno(), ear.close)
            hear(text)

        self._loop.add_reader(ear.fileno(), read)

    def _hear(self, text: str) -> None:
        self._said = text
        self._heard.set()
        if text == READY:
            self._listen(self._ears[1], self._hear_second)
        else:
            self._ears[1].close()

    def _hear_second(self, text: str) -> None:
        self._second_is_ready = text == READY
        # Where the first server has ended, the second one has ended with it.
        if self._second_is_ready or self._closed or _is_over(self._link):
            return
        log.warning(
            "the second fork server cannot be used, so workers are forked without %s, and import "
            "what they need of these themselves: %s",
            ", ".join(DEFERRED_IMPORTS),
            text or "its process ended while it imported them",
        )

    def wait(self, seconds: float) -> bool:
        """Wait until the server has said whether it can be used; return False if it has not."""
        return self._heard.wait(seconds)

    @property
    def ready(self) -> bool:
        """Whether it can fork workers now."""
        return self._said == READY and not self.ended

    @property
    def ended(self) -> bool:
        """Whether the process that forks new workers has ended."""
        if self._process.poll() is not None:
            return True
        return self._second_is_ready and _is_over(self._second)

    @property
    def unusable_reason(self) -> str:
        """Why it cannot be used, in its own words; empty if it can, or has not said so yet."""
        return "" if self._said == READY else self._said

    def fork(
        self,
        what: Sequence[str],
        environment: Mapping[str, str],
        registry_fd: int,
        targets: Sequence[int | None],
    ) -> ForkedWorker:
        """Fork a worker in a session of its own.

        Args:
            what: the program, as `run_program` takes it.
            environment: the worker's.
            listed: the descriptor of the guardian's list.
            targets: the worker's stdout and stderr; None for those of this process.

        Raises:
            ForkServerGone: there is no worker, and the server is of no further use.
            WorkerStartError: the server cannot fork.
            OSError: this process cannot open what the request takes.
        """
        link = self._second if self._second_is_ready else self._link
        with contextlib.ExitStack() as opened:
            request = opened.enter_context(open(os.memfd_create("worker"), "w"))
            job = {
                "what": list(what),
                "environment": dict(environment),
                "server": self._environment,
                "processors": sorted(os.sched_getaffinity(0)),
            }
            json.dump(job, request)
            request.flush()
            folder = os.open(".", os.O_PATH | os.O_DIRECTORY)
            opened.callback(os.close, folder)
            stdin = 0 if has_stdin() else opened.enter_context(open(os.devnull, "rb")).fileno()
            outputs = [own if file is None else file for own, file in enumerate(targets, 1)]
            descriptors = [request.fileno(), registry_fd, folder, stdin, *outputs]
            pid = self._ask(link, lambda: socket.send_fds(link, [b"fork"], descriptors))
        self.workers.add(pid)
        return ForkedWorker(pid, self, link)

    def reap(self, pid: int, link: socket.socket) -> int:
        """Reap a worker that the server at this link has forked; return Popen's returncode."""
        self.workers.discard(pid)
        try:
            return self._ask(link, lambda: link.send(b"reap %d" % pid))
        except ForkServerLost:
            # The kernel has killed the workers together with their fork server.
            return -signal.SIGKILL

    def _ask(self, link: socket.socket, send: Callable[[], object]) -> int:
        try:
            link.settimeout(FORK_REQUEST_TIMEOUT_S)
            send()
            said = link.recv(4096).decode(errors="replace")
            if said.startswith("!"):
                raise WorkerStartError(said[1:])
            return int(said)
        except TimeoutError as error:
            # A late answer would be taken for the answer to the next request.
            self.close(0.0)
            raise ForkServerLost(
                f"the workers' fork server did not answer in {FORK_REQUEST_TIMEOUT_S:g} s"
            ) from error
        except (OSError, ValueError) as error:
            raise ForkServerLost("the workers' fork server has ended") from error

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """End the servers, and the workers that are left; kill what is there after this time."""
        self._closed = True
        for link, how in ((self._second, socket.SHUT_WR), (self._link, socket.SHUT_RDWR)):
            with contextlib.suppress(OSError):
                link.shutdown(how)
        if not self._heard.is_set():
            # It reads nothing while it imports.
            seconds = 0.0
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        # The second server is killed with the first one at the latest, which ends its link.
        with contextlib.suppress(OSError):
            self._second.settimeout(CLOSE_SECONDS)
            while self._second.recv(4096):
                pass
        self._second.close()
        self._link.close()


def _is_over(link: socket.socket) -> bool:
    """Whether the process at the other end of a link has ended."""
    look = select.poll()
    try:
        look.register(link, select.POLLRDHUP)
    except ValueError:
        return True  # closed at this end
    return bool(look.poll(0))


def has_stdin() -> bool:
    """Whether this process has one to hand on to its workers."""
    try:
        # Where it was closed, another file may stand there, and none that is opened is inherited.
        return os.get_inheritable(0)
    except OSError:
        return False
