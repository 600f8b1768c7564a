"""Ranks for tests: forks of one warm process, in which torch is loaded, with a group between them.

    def saves(folder: Path) -> int:  # of a module, so that it can be pickled by its name
        ...
        return dist.get_rank()

    def test_all_save(ranks: Ranks, tmp_path: Path) -> None:
        assert ranks.run(saves, 2, tmp_path) == [0, 1]

The warm process is forked once all tests are collected and before the first one runs: no thread is
running, and no test has changed anything. Each rank takes the environment, the current folder,
standard output and standard error of the test that asks for it.
"""

from __future__ import annotations

import ctypes
import datetime
import faulthandler
import importlib
import os
import pickle
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from ports import free_port
from processes import find_children

SECONDS = 100.0
"""How long a rank may run unless its test says otherwise."""
GRACE = 10.0
"""What a rank that reports its stacks and ends may take for it before it is killed."""
LOADED = ("torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp")
"""What an optimizer or a sharded model would import in each rank anew."""
PR_SET_CHILD_SUBREAPER = 36


@attrs.frozen
class RankResult:
    """How a rank ended."""

    status: int
    """Its exit code; of a signal, the negative number."""
    value: Any = None
    error: str = ""
    """Its traceback, or what it ended with instead of a value; empty if it has a value."""


@attrs.frozen
class _Request:
    call: bytes  # pickled: only ranks import what it names
    world: int
    backend: str
    seconds: float
    group_seconds: float
    environment: dict[str, str]
    folder: str
    launched: bool


class Ranks:
    """The warm process, seen from the tests."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        with warnings.catch_warnings():
            # Beside xdist's, which touches nothing here, no thread is running yet.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if not self.pid:
            try:
                self._control.close()
                _serve(theirs)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        theirs.close()

    def run(self, function: Callable[..., Any], world: int, *args: Any, **options: Any) -> Any:
        """The values of `function(*args)` in each of `world` ranks; the failures of all, if any
        rank fails. Options are those of `results`."""
        ends = self.results(function, world, *args, **options)
        failed = [f"rank {rank}: {end.error}" for rank, end in enumerate(ends) if end.error]
        assert not failed, f"of {world} ranks of {function}:\n" + "\n".join(failed)
        return [end.value for end in ends]

    def results(
        self,
        function: Callable[..., Any],
        world: int,
        *args: Any,
        backend: str = "gloo",
        launched: bool = False,
        seconds: float = SECONDS,
        group_seconds: float = 60.0,
    ) -> list[RankResult]:
        """How each rank ended. `backend` is empty for processes without a group, and who is
        `launched` has none yet, but the variables by which a launcher's workers make theirs. Who
        has not ended after `seconds` shows its stacks and ends with exit code 1."""
        call = pickle.dumps((function, args))
        environment = dict(os.environ)
        if launched:
            backend, port = "", str(free_port())
            more = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world)}
            environment.update(more)
        settings = (world, backend, seconds, group_seconds)
        request = _Request(call, *settings, environment, os.getcwd(), launched)
        sys.stdout.flush()
        sys.stderr.flush()
        _send(self._control, request, 1, 2)
        self._control.settimeout(seconds + 3 * GRACE)
        answers, _ = _receive(self._control)
        return [_rank_result(status, found) for status, found in answers]

    def close(self) -> int:
        """End the warm process; its exit code, which is 0 where it had not to be killed."""
        self._control.close()
        _wait_for({self.pid}, GRACE)
        os.kill(self.pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


_KEY = pytest.StashKey[Ranks]()


def pytest_collection_finish(session: pytest.Session) -> None:
    if any("ranks" in getattr(item, "fixturenames", ()) for item in session.items):
        session.config.stash[_KEY] = Ranks()


def pytest_unconfigure(config: pytest.Config) -> None:
    if _KEY in config.stash:
        config.stash[_KEY].close()


@pytest.fixture(scope="session")
def ranks(pytestconfig: pytest.Config) -> Ranks:
    return pytestconfig.stash[_KEY]


def _rank_result(status: int, found: bytes) -> RankResult:
    if found:
        return RankResult(status, *pickle.loads(found))
    how = signal.Signals(-status).name if status < 0 else f"exit code {status}"
    return RankResult(status, error=f"it ended with {how} and said nothing: see standard error")


def _send(control: socket.socket, value: object, *descriptors: int) -> None:
    """A message is a file in memory, of any size, and what descriptors go with it."""
    with open(os.memfd_create("message"), "w+b") as memory:
        pickle.dump(value, memory)
        memory.flush()
        socket.send_fds(control, [b"."], [memory.fileno(), *descriptors])


def _receive(control: socket.socket) -> tuple[Any, list[int]]:
    data, descriptors, _, _ = socket.recv_fds(control, 1, 3)
    if not data:
        raise EOFError("the other side is gone")
    with open(descriptors[0], "rb") as memory:
        memory.seek(0)
        return pickle.load(memory), descriptors[1:]


def _serve(control: socket.socket) -> None:
    """Plays what is asked for, until nobody is left to ask."""
    os.setsid()
    # What a rank imports may warn, as it may in a program of a user's.
    warnings.simplefilter("default")
    # What a rank leaves behind becomes a child of this process, which ends it.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    loaded = False
    while True:
        try:
            request, streams = _receive(control)
            if not loaded:
                for module in LOADED:
                    importlib.import_module(module)
                loaded = True
            _send(control, _play(request, streams, control))
        except (EOFError, BrokenPipeError):
            return
        for descriptor in streams:
            os.close(descriptor)


def _play(request: _Request, streams: list[int], control: socket.socket) -> list[tuple[int, bytes]]:
    files = [os.memfd_create(f"rank {rank}") for rank in range(request.world)]
    with tempfile.TemporaryDirectory(dir=request.environment.get("TMPDIR")) as folder:
        pids = []
        for rank, file in enumerate(files):
            pid = os.fork()
            if not pid:
                control.close()
                _be_a_rank(request, rank, Path(folder), streams, file)
            pids.append(pid)
        _wait_for(set(pids), request.seconds + GRACE, control)
        statuses = _end_all_children()
    answers = []
    for pid, file in zip(pids, files, strict=True):
        with open(file, "rb") as found:
            found.seek(0)
            answers.append((statuses[pid], found.read()))
    return answers


def _wait_for(pids: set[int], seconds: float, control: socket.socket | None = None) -> None:
    """Until all these children have ended, the time is over, or nobody is left to tell."""
    poll, deadline = select.poll(), time.monotonic() + seconds
    waiting = {os.pidfd_open(pid) for pid in pids}
    for descriptor in waiting:
        poll.register(descriptor, select.POLLIN)
    if control is not None:
        poll.register(control, select.POLLIN)
    left = set(waiting)
    while left and (more := deadline - time.monotonic()) > 0:
        for descriptor, _ in poll.poll(1000 * more):
            if descriptor not in waiting:  # nothing comes but the end of who asks
                left.clear()
                break
            left.discard(descriptor)
            poll.unregister(descriptor)
    for descriptor in waiting:
        os.close(descriptor)


def _end_all_children() -> dict[int, int]:
    """Kill who is still there, and who was theirs; the exit codes of all, by pid."""
    codes: dict[int, int] = {}
    while True:
        for child in find_children(os.getpid()):
            os.kill(child, signal.SIGKILL)
        try:
            pid, status = os.waitpid(-1, 0)
        except ChildProcessError:
            return codes
        codes[pid] = os.waitstatus_to_exitcode(status)


def _be_a_rank(request: _Request, rank: int, folder: Path, streams: list[int], file: int) -> None:
    faulthandler.dump_traceback_later(request.seconds, exit=True)
    end: tuple[Any, str] = (None, "")
    try:
        _settle(request, streams)
        if request.launched:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        end = (_call(request, rank, folder), "")
        pickle.dumps(end)
    except BaseException:
        end = (None, traceback.format_exc())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.pwrite(file, pickle.dumps(end), 0)
        os._exit(bool(end[1]))


def _settle(request: _Request, streams: list[int]) -> None:
    for number, descriptor in enumerate(streams, 1):
        os.dup2(descriptor, number)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    os.environ.clear()
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo", **request.environment})
    os.chdir(request.folder)
    tempfile.tempdir = None


def _call(request: _Request, rank: int, folder: Path) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    function, args = pickle.loads(request.call)
    if not request.backend:
        return function(*args)
    dist.init_process_group(
        request.backend,
        store=dist.FileStore(str(folder / "group"), request.world),
        rank=rank,
        world_size=request.world,
        timeout=datetime.timedelta(seconds=request.group_seconds),
    )
    try:
        return function(*args)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
