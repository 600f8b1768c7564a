"""Ranks for tests: processes with a process group, forked from a server that has loaded torch.

    def saves(folder: Path) -> int:  # at module level, so that it can be pickled by its name
        ...
        return dist.get_rank()

    def test_all_save(ranks: Ranks, tmp_path: Path) -> None:
        assert ranks.run(saves, 2, tmp_path) == [0, 1]

The server is forked after all tests are collected and before the first test runs. No thread is
running then, and no test has changed the state of the process. Each rank gets the environment, the
current directory, the standard output and the standard error of the test that starts it.
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

RANK_TIMEOUT_S = 100.0  # default time limit of a rank
EXIT_TIMEOUT_S = 10.0  # a rank that has printed its stack gets so long to exit before it is killed
# The first optimizer or sharded model would otherwise import these in each rank.
PRELOADED = ("torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp")
PR_SET_CHILD_SUBREAPER = 36


@attrs.frozen
class RankResult:
    """The result of a rank."""

    status: int  # the exit code, or the negative number of the signal that killed it
    value: Any = None  # the return value of its function
    error: str = ""  # the traceback, or how it exited without a value; empty if it has a value


@attrs.frozen
class _Request:
    call: bytes  # pickled function and arguments; only the ranks import their modules
    world: int
    backend: str
    seconds: float
    group_seconds: float
    environment: dict[str, str]
    folder: str
    launched: bool


class Ranks:
    """Client of the server from which the ranks are forked."""

    def __init__(self) -> None:
        self._control, server_side = socket.socketpair()
        with warnings.catch_warnings():
            # No thread is running yet, except that of xdist, which does not matter here.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if not self.pid:
            try:
                self._control.close()
                _serve(server_side)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        server_side.close()

    def run(self, function: Callable[..., Any], world: int, *args: Any, **options: Any) -> Any:
        """Run `function(*args)` in `world` ranks, and return the values of all.

        If a rank fails, the assertion error contains the failures of all ranks. The options are
        those of `results`.
        """
        results = self.results(function, world, *args, **options)
        errors = [f"rank {rank}: {one.error}" for rank, one in enumerate(results) if one.error]
        headline = f"{len(errors)} of {world} ranks of {function} failed:"
        assert not errors, "\n".join([headline, *errors])
        return [one.value for one in results]

    def results(
        self,
        function: Callable[..., Any],
        world: int,
        *args: Any,
        backend: str = "gloo",
        launched: bool = False,
        seconds: float = RANK_TIMEOUT_S,
        group_seconds: float = 60.0,
    ) -> list[RankResult]:
        """Run `function(*args)` in `world` ranks, and return the result of each rank.

        Args:
            function: a function at the module level of its module.
            world: number of ranks.
            *args: arguments of the function.
            backend: backend of the process group; "" for ranks without a group.
            launched: start the ranks without a group, but with the environment variables that a
                launcher sets, so that the function can create the group.
            seconds: time limit. A rank that runs longer prints its stack and exits with code 1.
            group_seconds: timeout of the process group.
        """
        call = pickle.dumps((function, args))
        environment = dict(os.environ)
        if launched:
            backend, port = "", str(free_port())
            variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world)}
            environment.update(variables)
        settings = (world, backend, seconds, group_seconds)
        request = _Request(call, *settings, environment, os.getcwd(), launched)
        sys.stdout.flush()
        sys.stderr.flush()
        _send(self._control, request, 1, 2)
        self._control.settimeout(seconds + 3 * EXIT_TIMEOUT_S)
        answers, _ = _receive(self._control)
        return [_rank_result(status, data) for status, data in answers]

    def close(self) -> int:
        """Stop the server, and return its exit code: 0 if it did not have to be killed."""
        self._control.close()
        _wait_for({self.pid}, EXIT_TIMEOUT_S)
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


def _rank_result(status: int, data: bytes) -> RankResult:
    if data:
        return RankResult(status, *pickle.loads(data))
    how = signal.Signals(-status).name if status < 0 else f"exit code {status}"
    return RankResult(status, error=f"exited with {how} without a result: see standard error")


def _send(control: socket.socket, value: object, *descriptors: int) -> None:
    """Send a message and file descriptors. The message is sent as a file in memory, of any size."""
    with open(os.memfd_create("message"), "w+b") as memory:
        pickle.dump(value, memory)
        memory.flush()
        socket.send_fds(control, [b"."], [memory.fileno(), *descriptors])


def _receive(control: socket.socket) -> tuple[Any, list[int]]:
    data, descriptors, _, _ = socket.recv_fds(control, 1, 3)
    if not data:
        raise EOFError("the other side has closed the connection")
    with open(descriptors[0], "rb") as memory:
        memory.seek(0)
        return pickle.load(memory), descriptors[1:]


def _serve(control: socket.socket) -> None:
    """Run requests until the client closes the connection."""
    os.setsid()
    # Modules that ranks import may emit warnings, as in any other program.
    warnings.simplefilter("default")
    # Processes that a rank leaves become children of this process, which kills them.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    is_preloaded = False
    while True:
        try:
            request, streams = _receive(control)
            if not is_preloaded:
                for module in PRELOADED:
                    importlib.import_module(module)
                is_preloaded = True
            _send(control, _run_ranks(request, streams, control))
        except (EOFError, BrokenPipeError):
            return
        for descriptor in streams:
            os.close(descriptor)


def _run_ranks(
    request: _Request, streams: list[int], control: socket.socket
) -> list[tuple[int, bytes]]:
    files = [os.memfd_create(f"rank {rank}") for rank in range(request.world)]
    with tempfile.TemporaryDirectory(dir=request.environment.get("TMPDIR")) as folder:
        pids = []
        for rank, file in enumerate(files):
            pid = os.fork()
            if not pid:
                control.close()
                _run_rank(request, rank, Path(folder), streams, file)
            pids.append(pid)
        _wait_for(set(pids), request.seconds + EXIT_TIMEOUT_S, control)
        statuses = _kill_all_children()
    answers = []
    for pid, file in zip(pids, files, strict=True):
        with open(file, "rb") as result:
            result.seek(0)
            answers.append((statuses[pid], result.read()))
    return answers


def _wait_for(pids: set[int], seconds: float, control: socket.socket | None = None) -> None:
    """Wait until these children have exited, the time is over, or `control` is closed."""
    poll, deadline = select.poll(), time.monotonic() + seconds
    waiting = {os.pidfd_open(pid) for pid in pids}
    for descriptor in waiting:
        poll.register(descriptor, select.POLLIN)
    if control is not None:
        poll.register(control, select.POLLIN)
    running = set(waiting)
    while running and (remaining_s := deadline - time.monotonic()) > 0:
        for descriptor, _ in poll.poll(1000 * remaining_s):
            if descriptor not in waiting:  # the client has closed the connection
                running.clear()
                break
            running.discard(descriptor)
            poll.unregister(descriptor)
    for descriptor in waiting:
        os.close(descriptor)


def _kill_all_children() -> dict[int, int]:
    """Kill all children and their descendants, and return the exit codes of all by pid."""
    codes: dict[int, int] = {}
    while True:
        for child in find_children(os.getpid()):
            os.kill(child, signal.SIGKILL)
        try:
            pid, status = os.waitpid(-1, 0)
        except ChildProcessError:
            return codes
        codes[pid] = os.waitstatus_to_exitcode(status)


def _run_rank(request: _Request, rank: int, folder: Path, streams: list[int], file: int) -> None:
    faulthandler.dump_traceback_later(request.seconds, exit=True)
    result: tuple[Any, str] = (None, "")  # value and error
    try:
        _take_over_process_state(request, streams)
        if request.launched:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        result = (_call(request, rank, folder), "")
        pickle.dumps(result)  # raises here if the value cannot be pickled
    except BaseException:
        result = (None, traceback.format_exc())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.pwrite(file, pickle.dumps(result), 0)
        os._exit(bool(result[1]))


def _take_over_process_state(request: _Request, streams: list[int]) -> None:
    """Set the environment, directory and streams of the test."""
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
        # A rank may have connected to all others while they still connect. It must not exit then.
        if request.backend == "gloo":  # other backends may have no barrier on a CPU
            dist.barrier()
        return function(*args)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
