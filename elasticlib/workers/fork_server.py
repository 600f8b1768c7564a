"""The process that Python workers are forked from, and the agent's end of it.

It has imported what workers need, and does nothing else. It has one thread and has never touched a
GPU, else it says so and is not used. It leaves each worker that ended unreaped until it is told
otherwise, so that the number stays the worker's until its session has been swept. It ends when its
agent does, and its workers with it.

It is started anew and never forked from the agent, whose threads and locks would come along.
Whatever goes wrong with it costs warmth only: workers are started cold, and another one begins. The
one exception is a module that the user asked for and that cannot be imported: the job would look
warm and not be, and its script is likely to fail on it as well.
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
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ElasticError, WorkerStartError
from .bootstrap import die_with, list_session

if TYPE_CHECKING:
    from .loop import Loop

log = logging.getLogger("elasticlib.workers")

TORCH = ("torch", "torch.distributed.nn", "torch.nn.parallel", "torch.utils.data")
LATER = ("elasticlib.in_place.steps", "torch.distributed.tensor.debug", "torch._dynamo")
"""What scripts use of elasticlib, a fifth of a second; what a worker needs to join others that go
on; and what the first optimizer of a program imports, which takes as long as torch itself does. The
first workers are not kept waiting for them: they are imported once nobody has asked for a worker
for so long:
"""
IDLE_SECONDS = 1.0
UNASKED_SECONDS = 10.0
"""The same until the first request: on a busy machine the agent is ready much later than this."""
DESCRIPTORS = 5
"""That come with a request: what is asked for, the guardian's list, and the worker's streams."""
MOST_SAID = 2048
# torch sets it as it is imported, and anew whenever it looks: a script that imports it later may
# set it first.
SET_ANEW = ("TORCHINDUCTOR_CACHE_DIR",)
# Those whose default action ends or stops a process, but for its own faults.
MEANT_FOR_WORKERS = (
    *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGTSTP),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGXCPU),
)


def serve(descriptor: int, folder: str, preload: Sequence[str]) -> list[str]:
    """Import, then fork a worker at each request; returns in the workers, with what to become.

    Says `ready` first, or why it cannot be used. The folder is where the program's own modules
    are looked for.
    """
    link = socket.socket(fileno=descriptor)
    name = _name("fork-server")
    before = dict(os.environ)
    dispositions = _deaf()
    # What the user asked for is looked at before the seconds that torch takes.
    problem = _import_all(folder, preload) or _unclean() or _import_these(TORCH)
    changed = _changed_since(before)
    _say(link, problem.encode()[:MOST_SAID] if problem else b"ready")
    _share()
    later: Sequence[str] = LATER
    patience = UNASKED_SECONDS
    while True:
        if later and not select.select([link], [], [], patience)[0]:
            problem = problem or _import_these(later)
            later, changed = (), _changed_since(before)
            _share()
        try:
            message, descriptors, _, _ = socket.recv_fds(link, 64, DESCRIPTORS)
        except OSError:
            os._exit(1)
        if not message:
            os._exit(0)
        patience = IDLE_SECONDS
        if message.startswith(b"reap "):
            link.send(str(_reap(int(message[5:]))).encode())
            continue
        job = None
        try:
            if len(descriptors) < DESCRIPTORS:
                raise OSError("the workers' fork server has too many files open")
            if problem:
                link.send(f"?{problem}".encode()[:MOST_SAID])
            else:
                job = _fork(link, descriptors, dispositions)
        except OSError as error:
            link.send(f"!{error}".encode())
        if job is not None:
            _name(name)
            return _enter(job, before, changed)
        for descriptor in descriptors:
            os.close(descriptor)


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


def _deaf() -> dict[int, Any]:
    """Ignore what is meant for workers: some schedulers signal every process that they find."""
    found = {number: signal.getsignal(number) for number in MEANT_FOR_WORKERS}
    heard: dict[int, Any] = {
        number: was for number, was in found.items() if was is not signal.SIG_IGN
    }
    for number in heard:
        signal.signal(number, signal.SIG_IGN)
    return heard


def _import_all(folder: str, preload: Sequence[str]) -> str:
    """Why a module that was asked for cannot be imported."""
    sys.path.insert(0, folder)
    # Whatever these imports print is not a worker's: it goes where the agent's own words go.
    for module in preload:
        try:
            importlib.import_module(module)
        except BaseException as error:
            return (
                f"preload (--preload): {module} cannot be imported: {type(error).__name__}: {error}"
            )
    sys.path.remove(folder)
    return ""


def _import_these(modules: Sequence[str]) -> str:
    """Why no worker should be forked any more; nothing is wrong where some of them are missing."""
    for module in modules:
        # An older torch, or none: its workers import what there is.
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    return _unclean()


def _changed_since(before: dict[str, str]) -> dict[str, str]:
    """The variables that modules have set, but for those that each script may set first."""
    return {
        key: text
        for key, text in os.environ.items()
        if before.get(key) != text and key not in SET_ANEW
    }


def _share() -> None:
    """What is there by now is shared, and looked at by no collection in any worker."""
    gc.collect()
    gc.freeze()


def _unclean() -> str:
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
    link: socket.socket, descriptors: list[int], dispositions: dict[int, Any]
) -> dict[str, Any] | None:
    """None in the fork server. The agent hears of a worker once that leads its own session."""
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
            die_with(server)
            list_session(descriptors.pop(1))
            job = _take_over(descriptors, dispositions)
        except BaseException as error:
            # What catches it further up would go on as a second server.
            os.write(writing, f"!{type(error).__name__}: {error}".encode()[:MOST_SAID])
            os._exit(1)
        os.write(writing, b"+")
        for descriptor in (*descriptors, reading, writing, link.detach()):
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
    link.send(str(pid).encode())
    return None


def _take_over(descriptors: list[int], dispositions: dict[int, Any]) -> dict[str, Any]:
    """The worker's own streams and signals, and what it is to be."""
    request, *streams = descriptors
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
    os.chdir(str(job["folder"]))
    if set(processors) != os.sched_getaffinity(0):
        os.sched_setaffinity(0, processors)
    os.environ.clear()
    os.environ.update({**own, **environment, **wrapped, **changed})
    for name in unset:
        os.environ.pop(name, None)
    _open_stdin()
    _draw_anew()
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


def _draw_anew() -> None:
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

ANSWER_SECONDS = 30.0


class ForkServerGone(ElasticError):
    """It does not answer, or has ended; so have its workers."""


class ForkServerUnfit(ElasticError):
    """What the server imported later is such that no worker should be forked from it."""


class Forked:
    """A worker of a fork server, as far as it looks like a Popen."""

    def __init__(self, pid: int, server: ForkServer) -> None:
        self.pid = pid
        self._server = server

    def wait(self) -> int:
        """Reap it, which has ended and whose session is swept; its returncode as Popen's."""
        return self._server.reap(self.pid)


class ForkServer:
    """One such process, which can be used once it says that it is ready.

    command: how it is started; `{link}` stands for the descriptor of its socket. environment: what
    all its workers have in common, so that what is read but once, when an interpreter or a library
    starts, is as they were told. listed: the guardian's list.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], listed: int, loop: Loop
    ) -> None:
        self._loop = loop
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [part.format(link=theirs.fileno()) for part in command],
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), listed],
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._environment = dict(environment)
        self._said = ""
        self._heard = threading.Event()
        # Until it has said its first word nobody else reads from the link.
        self._ear = self._link.dup()
        loop.read(self._ear.fileno(), self._hear)

    def _hear(self) -> None:
        with contextlib.suppress(OSError):
            self._said = self._ear.recv(4096).decode()
        self._heard.set()
        self._loop.forget(self._ear.fileno(), self._ear.close)

    def wait(self, seconds: float) -> bool:
        """Whether it has said within these seconds if it can be used; any thread may wait."""
        return self._heard.wait(seconds)

    @property
    def ready(self) -> bool:
        """Whether it can fork workers now."""
        return self._said == "ready" and not self.ended

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def complaint(self) -> str:
        """Why it cannot be used, in its own words; empty if it has none, or not yet."""
        return "" if self._said == "ready" else self._said

    def fork(
        self,
        what: Sequence[str],
        environment: Mapping[str, str],
        listed: int,
        targets: Sequence[int | None],
    ) -> Forked:
        """A worker in a session of its own; listed: the guardian's list. targets: the worker's
        stdout and stderr, None for our own.

        Raises:
            ForkServerGone: there is no worker, and the server is of no further use.
            ForkServerUnfit: there is none, and `complaint` says why there will be no other.
            WorkerStartError: it could not fork.
            OSError: this process could not open what it takes.
        """
        with contextlib.ExitStack() as opened:
            request = opened.enter_context(open(os.memfd_create("worker"), "w"))
            job = {
                "what": list(what),
                "environment": dict(environment),
                "server": self._environment,
                "folder": os.getcwd(),
                "processors": sorted(os.sched_getaffinity(0)),
            }
            json.dump(job, request)
            request.flush()
            stdin = 0 if has_stdin() else opened.enter_context(open(os.devnull, "rb")).fileno()
            outputs = [own if file is None else file for own, file in enumerate(targets, 1)]
            descriptors = [request.fileno(), listed, stdin, *outputs]
            pid = self._ask(lambda: socket.send_fds(self._link, [b"fork"], descriptors))
        return Forked(pid, self)

    def reap(self, pid: int) -> int:
        try:
            return self._ask(lambda: self._link.send(b"reap %d" % pid))
        except ForkServerGone:
            # The kernel has ended its workers with it.
            return -signal.SIGKILL

    def _ask(self, send: Callable[[], object]) -> int:
        try:
            self._link.settimeout(ANSWER_SECONDS)
            send()
            said = self._link.recv(4096).decode()
            if said.startswith("!"):
                raise WorkerStartError(said[1:])
            if said.startswith("?"):
                self._said = said[1:]
                raise ForkServerUnfit(self._said)
            return int(said)
        except (OSError, ValueError) as error:
            # One that is late would give its answer to the next question.
            self.close(0.0)
            raise ForkServerGone("the workers' fork server is gone") from error

    def close(self, seconds: float = 2.0) -> None:
        """End it; what is left of it after these seconds is killed."""
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)
        if not self._heard.is_set():
            # It hears nothing while it imports.
            seconds = 0.0
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._link.close()


def has_stdin() -> bool:
    """Whether this process has one to hand on to its workers."""
    try:
        # Where it was closed, another file may stand there, and none that is opened is inherited.
        return os.get_inheritable(0)
    except OSError:
        return False
