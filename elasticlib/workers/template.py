"""The process that workers are forked from: it has imported what they need, and does nothing else.

It has one thread and has never touched a GPU, else it says so and is not used. It leaves each
worker that ended unreaped until it is told otherwise, so that the number stays the worker's until
its session has been swept. It ends when its agent does, and its workers with it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from typing import Any

from .enter import die_with

TORCH = ("torch", "torch.distributed.nn", "torch.nn.parallel", "torch.utils.data")
LATER = ("torch._dynamo",)
"""The first optimizer of a program imports it, which takes as long as torch itself does. The first
workers are not kept waiting for it: it is imported once nobody has asked for a worker for so long:
"""
IDLE_SECONDS = 1.0
STREAMS = 3
MOST_SAID = 2048
# torch sets it as it is imported, and anew whenever it looks: a script that imports it later may
# set it first.
SET_ANEW = ("TORCHINDUCTOR_CACHE_DIR",)
# Those whose default action ends or stops a process, but for its own faults.
MEANT_FOR_WORKERS = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
    signal.SIGXCPU,
    signal.SIGTSTP,
)


def serve(descriptor: int, folder: str, preload: Sequence[str]) -> list[str]:
    """Import, then fork a worker at each request; returns in the workers, with what to become.

    Says `ready` first, or why it cannot be used. The folder is where the program's own modules
    are looked for.
    """
    link = socket.socket(fileno=descriptor)
    name = _name("worker-template")
    before = dict(os.environ)
    dispositions = _deaf()
    # What the user asked for is looked at before the seconds that torch takes.
    problem = _import_all(folder, preload) or _unclean() or _import_these(TORCH)
    changed = _changed_since(before)
    link.send(problem.encode()[:MOST_SAID] if problem else b"ready")
    _share()
    later = LATER
    while True:
        if later and not select.select([link], [], [], IDLE_SECONDS)[0]:
            problem = problem or _import_these(later)
            later, changed = (), _changed_since(before)
            _share()
        try:
            message, descriptors, _, _ = socket.recv_fds(link, 64, STREAMS + 1)
        except OSError:
            os._exit(1)
        if not message:
            os._exit(0)
        if message.startswith(b"reap "):
            link.send(str(_reap(int(message[5:]))).encode())
            continue
        job = None
        try:
            if len(descriptors) <= STREAMS:
                raise OSError("the template has too many files open")
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
            return f"--preload {module} cannot be imported: {type(error).__name__}: {error}"
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
    """None in the template. The agent hears of a worker once that leads its own session."""
    reading, writing = os.pipe()
    # A signal that comes before the worker is itself waits until it is.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, dispositions)
    template = os.getpid()
    try:
        pid = os.fork()
    except OSError:
        # The template lives on, and its next worker has this one's mask.
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(reading)
        os.close(writing)
        raise
    if pid == 0:
        try:
            os.setsid()
            die_with(template)
            job = _take_over(descriptors, dispositions)
        except BaseException as error:
            # What catches it further up would go on as a second template.
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
    """Leave nothing in this process by which it could be told from a fresh interpreter.

    before: the template's variables as its interpreter began. changed: those that modules have set
    since, for whoever imports them.
    """
    environment, processors, told = job["environment"], job["processors"], job["template"]
    what: list[str] = job["what"]
    # A Python in a bare locale gives itself one, which the template did for its workers.
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
    """As an interpreter does: what there was has asked the template's whether it can be sought."""
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
