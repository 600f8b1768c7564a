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
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import attrs

from ..clock import monotonic, wall
from ..errors import ElasticError, WorkerStartError
from . import session, stacks
from .beat import Beat
from .channel import VARIABLE as CHANNEL
from .channels import Channels
from .error_file import ends_process, read_failure, read_record
from .exits import WorkerExit
from .function import read_result
from .guardian import Guardian
from .interface import Workers
from .memory import killed_for_memory, oom_kills
from .notice import Notice
from .output import Output
from .output_plan import OutputPlan
from .processors import Processors, count_cores
from .shared_folder import SharedFolder
from .spec import SNAPSHOTS, Worker, WorkerGroup, WorkerSpec, worker_environment
from .starting import Starter, program
from .warm import Warm

log = logging.getLogger("elasticlib.workers")

REAP_SECONDS = 5.0
DRAIN_SECONDS = 5.0
ERROR_FILE = "error.json"
LONGEST_RECORD = 1 << 20
"""Bytes of an error.json that are looked at: it may be anything that the user's code writes."""


@attrs.define
class _Process:
    worker: Worker
    popen: subprocess.Popen[bytes] | Warm
    output: Output
    folder: Path
    ended_at: float = float("inf")


class LocalWorkers(Workers):
    """Processes started afresh for each generation.

    Args:
        environment: what the workers inherit, before what they are told.
        log_dir: where the folder of this run goes. Without, a temporary one, which is removed
            at the end unless output was sent there.
        run_id: names that folder.
        python: the interpreter of scripts, modules and functions.
        processors: what each worker runs on, by local rank; any without.
        start_method: `warm` to fork Python workers from a process that has torch imported, or
            `spawn` to start an interpreter for each.
        preload: modules that this process imports besides.
        ignored: signals that a worker ignores, and its children with it, until it says otherwise.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        *,
        output: OutputPlan | None = None,
        log_dir: str | None = None,
        run_id: str = "none",
        python: str = sys.executable,
        processors: Sequence[Processors] = (),
        ignored: Iterable[int] = (),
        start_method: str = "warm",
        preload: Sequence[str] = (),
    ) -> None:
        self._environment = dict(environment)
        self._output = output or OutputPlan()
        self._log_dir = log_dir
        self._run_id = run_id
        self._guardian = Guardian()
        self._starter = Starter(
            self._guardian,
            python=python,
            start_method=start_method,
            preload=preload,
            ignored=ignored,
            processors=processors,
        )
        kept = (self._guardian.add_folder, self._guardian.remove_folder)
        self._channels = Channels(*kept)
        self.memory = SharedFolder(*kept)
        """Where the workers keep what outlives them, and not their agent."""
        self._folder: Path | None = None
        self._processes: dict[int, _Process] = {}
        self._stopped = False
        self._channels.begin()
        self._kills: int | None = None
        self._late: list[Output] = []

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
    def kept_folder(self) -> Path | None:
        """This run's folder, where there is one that stays."""
        return self._folder if self._kept else None

    @property
    def _kept(self) -> bool:
        """Whether the folder is somebody's to look at when the run is over."""
        return self._log_dir is not None or self._output.any

    def prepare(self, spec: WorkerSpec) -> None:
        self._starter.prepare(spec, self._environment, count_cores())

    def await_prepared(self) -> None:
        self._starter.await_prepared()

    def start(self, group: WorkerGroup, ended: Callable[[int], None]) -> None:
        _heed_children()
        self._prepare_late(group.spec)
        self._processes = {}
        self._stopped = False
        self._channels.begin()
        self._kills = oom_kills()
        for worker in group.workers:
            try:
                self._start_one(group, worker, ended)
            except OSError as error:
                raise WorkerStartError(
                    f"cannot start the worker of rank {worker.rank}: {error}"
                ) from error
        self._forget_attempts(but=group.attempt)

    def _forget_attempts(self, but: int) -> None:
        """Remove what earlier ones left in a folder that is not for people to look at."""
        if not self._kept:
            for path in self.folder.glob("attempt_*"):
                if path.name != f"attempt_{but}":
                    shutil.rmtree(path, ignore_errors=True)

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

        def noticed(local_rank: int) -> None:
            process.ended_at = wall()
            ended(local_rank)

        args = (pid, worker.local_rank, noticed)
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
            error_file=str(folder / ERROR_FILE),
            cores=count_cores(),
        )
        environment[CHANNEL] = self._channels.open(worker.local_rank)
        environment[SNAPSHOTS] = str(self.memory.era(group.attempt))
        what = program(group.spec.entrypoint, worker.local_rank, folder)
        output = Output(self._output, worker, group.spec.role, folder).open()
        try:
            popen = self._starter.start(what, environment, output, worker.local_rank)
        except (OSError, ElasticError):
            output.abandon()
            raise
        if what[0] != "command":
            self._channels.assign(worker.local_rank, popen.pid)
        return _Process(worker, popen, output, folder)

    def collect(self, local_rank: int) -> WorkerExit:
        process = self._processes.pop(local_rank)
        self._channels.close(local_rank)
        pid = process.popen.pid
        session.end(pid)
        returncode = process.popen.wait()
        self._guardian.remove(pid)
        if not process.output.close():
            self._late.append(process.output)
        found = WorkerExit(local_rank, process.worker.rank, pid, returncode, stopped=self._stopped)
        if returncode == 0:
            value, unreadable = read_result(process.folder / "result.pickle")
            return attrs.evolve(found, value=value, unreadable=unreadable)
        return self._explained(found, process)

    def _explained(self, found: WorkerExit, process: _Process) -> WorkerExit:
        """With all that is known of why it failed."""
        data, wrote_at = _read_error(process.folder)
        message, trace = read_failure(data)
        at = min(wrote_at, process.ended_at)
        return attrs.evolve(
            found,
            message=message,
            traceback=trace,
            tail=process.output.tail(),
            log=str(process.folder) if self._kept else "",
            out_of_memory=killed_for_memory(self._kills, oom_kills()),
            at=at,
            error_file=str(process.folder / ERROR_FILE) if data and self._kept else "",
            error_data=read_record(data),
            after=None if self._stopped else self._failing(before=at),
        )

    def _failing(self, before: float) -> WorkerExit | None:
        """Who wrote of a failure earlier and has not ended yet: tearing down takes its time, in
        which others notice that their peer is gone, and may end first."""
        found = []
        for local_rank, process in self._processes.items():
            data, at = _read_error(process.folder)
            if ends_process(data) and at < before:
                message, trace = read_failure(data)
                who = (local_rank, process.worker.rank, process.popen.pid)
                found.append(
                    WorkerExit(
                        *who,
                        returncode=1,
                        message=message,
                        traceback=trace,
                        log=str(process.folder) if self._kept else "",
                        at=at,
                        error_file=str(process.folder / ERROR_FILE) if self._kept else "",
                        error_data=read_record(data),
                        ending=True,
                    )
                )
        return min(found, key=lambda exit_: exit_.at, default=None)

    def running(self) -> dict[int, str]:
        return {local: f"pid {p.popen.pid}" for local, p in self._processes.items()}

    agrees = tell_steps = True

    def notify(self, notice: Notice) -> bool:
        self._stopped = self._channels.notify(notice) or self._stopped
        return self._stopped

    def earliest_stop(self, *, now: bool) -> int | None:
        return self._channels.earliest_stop(now=now)

    def stop_at(self, call: int, notice: Notice) -> None:
        self._channels.stop_at(call, notice)

    def beats(self) -> Mapping[int, Beat]:
        return self._channels.beats()

    def dump_stacks(self) -> Mapping[int, str]:
        asked, processes = self._channels.dumpers(), dict(self._processes)
        # A number that has passed to another process is in another session.
        return stacks.dump(
            {
                local: (pid, processes[local].folder)
                for local, pid in asked.items()
                if local in processes and session.holds(processes[local].popen.pid, pid)
            }
        )

    def terminate(self) -> None:
        self._stopped = True
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._stopped = True
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        for process in self._processes.values():
            session.signal_group(process.popen.pid, number)

    def end(self) -> None:
        self.kill()
        for local_rank, process in list(self._processes.items()):
            if session.ends_within(process.popen.pid, REAP_SECONDS):
                self.collect(local_rank)
            else:
                # The guardian has it listed, and goes on trying when we are gone.
                log.error("pid %d would not die, even of SIGKILL", process.popen.pid)
                del self._processes[local_rank]

    def close(self) -> None:
        self.end()
        deadline = monotonic() + DRAIN_SECONDS
        for output in self._late:
            output.drain(deadline)
        self._late.clear()
        self._channels.close_all()
        self.memory.remove()
        self._starter.close()
        if self._folder is not None and not self._kept:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._guardian.remove_folder(str(self._folder))
            self._folder = None
        self._guardian.close()


def _read_error(folder: Path) -> tuple[bytes, float]:
    """What is in a worker's error.json, and when that was written; nothing, and never."""
    try:
        with (folder / ERROR_FILE).open("rb") as file:
            return file.read(LONGEST_RECORD), os.fstat(file.fileno()).st_mtime
    except OSError:
        return b"", float("inf")


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
