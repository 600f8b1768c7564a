"""Workers as processes of this machine, each in a session of its own.

An end is noticed by a thread that blocks in the kernel until it happens and leaves the process
unreaped, so that its number cannot pass to another before its session has been swept.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import attrs

from ..errors import ConfigError, ElasticError, WorkerStartError
from . import session
from .exits import WorkerExit, read_failure
from .function import read_result, write_payload
from .guardian import Guardian
from .interface import Workers
from .output import Output, OutputPlan
from .spec import (
    Command,
    Entrypoint,
    Function,
    Module,
    Script,
    Worker,
    WorkerGroup,
    WorkerSpec,
    check_start,
    common_environment,
    with_local_rank,
    worker_environment,
)
from .streams import Streams
from .warm import Warm, WarmStart

log = logging.getLogger("elasticlib.workers")

REAP_SECONDS = 5.0
_ENTER = str(Path(__file__).with_name("enter.py"))
_START = str(Path(__file__).with_name("start.py"))


@attrs.define
class _Process:
    worker: Worker
    popen: subprocess.Popen[bytes] | Warm
    output: Output
    folder: Path


class LocalWorkers(Workers):
    """Processes of their own for each generation.

    Args:
        environment: what the workers inherit, before what they are told.
        log_dir: where the folder of this run goes. Without, a temporary one, which is removed
            at the end unless output was sent there.
        run_id: names that folder.
        python: the interpreter of scripts, modules and functions.
        start_method: `warm` to fork these from a process that has torch imported, or `spawn`
            to start an interpreter for each.
        preload: modules that this process imports besides.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        *,
        output: OutputPlan | None = None,
        log_dir: str | None = None,
        run_id: str = "none",
        python: str = sys.executable,
        start_method: str = "warm",
        preload: Sequence[str] = (),
    ) -> None:
        check_start(start_method, tuple(preload))
        self._warm = start_method == "warm"
        self._preload = tuple(preload)
        self._warm_start: WarmStart | None = None
        self._environment = dict(environment)
        self._output = output or OutputPlan()
        self._log_dir = log_dir
        self._run_id = run_id
        self._python = python
        self._guardian = Guardian()
        self._folder: Path | None = None
        self._processes: dict[int, _Process] = {}

    @property
    def folder(self) -> Path:
        """This run's folder, `<log_dir>/<run_id>_<random>`; made when first asked for."""
        if self._folder is None:
            if self._log_dir is not None:
                os.makedirs(self._log_dir, exist_ok=True)
            safe = self._run_id.replace(os.sep, "_")
            made = tempfile.mkdtemp(prefix=f"{safe}_", dir=self._log_dir)
            self._folder = Path(made)
            if not self._kept:
                self._guardian.add_folder(made)
        return self._folder

    @property
    def _kept(self) -> bool:
        """Whether the folder is somebody's to look at when the run is over."""
        return self._log_dir is not None or self._output.any

    def prepare(self, spec: WorkerSpec) -> None:
        if isinstance(spec.entrypoint, Command):
            if self._preload:
                raise ConfigError("--preload is for Python workers, and this is another program")
            return
        if not self._warm:
            return
        environment = common_environment(spec, self._environment, len(os.sched_getaffinity(0)))
        folder = _folder_of(spec.entrypoint) if self._preload else ""
        template = ("", "template", "{link}", folder, *self._preload)
        command = self._entered(environment, self._started(template))
        if self._warm_start is not None:
            if self._warm_start.serves(command, environment):
                return
            self._warm_start.close()
        self._warm_start = WarmStart(command, environment, self._preload, self._guardian)

    def await_prepared(self) -> None:
        if self._warm_start is not None:
            self._warm_start.wait()

    def start(self, group: WorkerGroup, ended: Callable[[int], None]) -> None:
        _heed_children()
        self._prepare_late(group.spec)
        self._processes = {}
        for worker in group.workers:
            try:
                self._start_one(group, worker, ended)
            except OSError as error:
                raise WorkerStartError(
                    f"cannot start the worker of rank {worker.rank}: {error}"
                ) from error

    def _prepare_late(self, spec: WorkerSpec) -> None:
        """Whoever has not called these before gets them now."""
        try:
            self.prepare(spec)
        except OSError as error:
            raise WorkerStartError(f"cannot start the workers' template: {error}") from error
        self.await_prepared()

    def _start_one(self, group: WorkerGroup, worker: Worker, ended: Callable[[int], None]) -> None:
        self._guardian.open()
        process = self._spawn(group, worker)
        pid = process.popen.pid
        self._processes[worker.local_rank] = process
        self._guardian.add(pid)
        args = (pid, worker.local_rank, ended)
        name = f"worker-{worker.local_rank}-end"
        threading.Thread(target=_await_end, args=args, name=name, daemon=True).start()
        process.output.attach(process.popen)

    def _spawn(self, group: WorkerGroup, worker: Worker) -> _Process:
        folder = self.folder / f"attempt_{group.attempt}" / str(worker.local_rank)
        folder.mkdir(parents=True, exist_ok=True)
        environment = worker_environment(
            group,
            worker,
            self._environment,
            error_file=str(folder / "error.json"),
            cores=len(os.sched_getaffinity(0)),
        )
        what = self._what(group.spec.entrypoint, worker.local_rank, folder)
        prefix = f"[{group.spec.role}{worker.rank}]:"
        output = Output(self._output, worker.local_rank, folder, prefix).open()
        try:
            popen = self._begin(what, environment, output)
        except (OSError, ElasticError):
            output.abandon()
            raise
        return _Process(worker, popen, output, folder)

    def _begin(
        self, what: tuple[str, ...], environment: dict[str, str], output: Output
    ) -> subprocess.Popen[bytes] | Warm:
        targets = (output.target(Streams.OUT), output.target(Streams.ERR))
        if what[0] != "command":
            what = (environment["TORCHELASTIC_ERROR_FILE"], *what)
            if self._warm_start is not None:
                warm = self._warm_start.fork(what, environment, targets)
                if warm is not None:
                    return warm
        program = what[1:] if what[0] == "command" else self._started(what)
        return subprocess.Popen(
            self._entered(environment, program),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=targets[0],
            stderr=targets[1],
            start_new_session=True,
        )

    def _started(self, what: tuple[str, ...]) -> tuple[str, ...]:
        return (self._python, "-u", _START, *what)

    def _entered(self, environment: Mapping[str, str], program: tuple[str, ...]) -> list[str]:
        """The program behind the one that ties it to this process's life."""
        # Python gives itself an LC_CTYPE in a bare environment; the program is to have none.
        locale = environment.get("LC_CTYPE", "")
        return [self._python, "-I", "-S", _ENTER, str(os.getpid()), locale, *program]

    def _what(self, entrypoint: Entrypoint, local_rank: int, folder: Path) -> tuple[str, ...]:
        """The kind of a program, its name and its arguments, as `become` takes them."""
        if isinstance(entrypoint, Function):
            payload = folder / "payload.pickle"
            write_payload(payload, entrypoint)
            return ("function", str(payload), str(folder / "result.pickle"))
        args = with_local_rank(entrypoint.args, local_rank)
        if isinstance(entrypoint, Script):
            return ("script", entrypoint.path, *args)
        if isinstance(entrypoint, Module):
            return ("module", entrypoint.name, *args)
        assert isinstance(entrypoint, Command)
        return ("command", entrypoint.program, *args)

    def collect(self, local_rank: int) -> WorkerExit:
        process = self._processes.pop(local_rank)
        pid = process.popen.pid
        session.end(pid)
        returncode = process.popen.wait()
        self._guardian.remove(pid)
        process.output.close()
        found = WorkerExit(local_rank, process.worker.rank, pid, returncode)
        error_file = process.folder / "error.json"
        if returncode == 0:
            value, unreadable = read_result(process.folder / "result.pickle")
            return attrs.evolve(found, value=value, unreadable=unreadable)
        if error_file.exists():
            message, trace = read_failure(error_file.read_bytes())
            return attrs.evolve(found, message=message, traceback=trace)
        return found

    def running(self) -> dict[int, str]:
        return {local: f"pid {p.popen.pid}" for local, p in self._processes.items()}

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        for process in self._processes.values():
            session.signal_group(process.popen.pid, number)

    def close(self) -> None:
        self.kill()
        for local_rank, process in list(self._processes.items()):
            if session.ends_within(process.popen.pid, REAP_SECONDS):
                self.collect(local_rank)
            else:
                # The guardian has it listed, and goes on trying when we are gone.
                log.error("pid %d would not die, even of SIGKILL", process.popen.pid)
                del self._processes[local_rank]
        if self._warm_start is not None:
            self._warm_start.close()
            self._warm_start = None
        if self._folder is not None and not self._kept:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._guardian.remove_folder(str(self._folder))
            self._folder = None
        self._guardian.close()


def _folder_of(entrypoint: Entrypoint) -> str:
    """Where Python looks first for the modules of this program."""
    if isinstance(entrypoint, Script):
        return os.path.dirname(os.path.realpath(entrypoint.path))
    return os.getcwd()


def _await_end(pid: int, local_rank: int, ended: Callable[[int], None]) -> None:
    try:
        session.ends_within(pid, None)
    finally:
        ended(local_rank)


def _heed_children() -> None:
    """Where SIGCHLD is ignored, which is inherited, the kernel tells nobody how a child ended."""
    if signal.getsignal(signal.SIGCHLD) is not signal.SIG_IGN:
        return
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    except ValueError as error:
        raise WorkerStartError(
            "SIGCHLD is ignored in this process, so no worker's end can be learnt, and only the "
            "main thread can change that: set it to SIG_DFL there"
        ) from error
