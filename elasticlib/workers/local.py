"""Workers as processes of this machine, each in a session of its own.

An end is noticed by a thread that blocks in the kernel until it happens and leaves the process
unreaped, so that its number cannot pass to another before its session has been swept.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from ..clock import monotonic, wall
from ..errors import ElasticError, WorkerStartError
from . import ends, session, stacks
from .beat import Beat
from .channel import VARIABLE as CHANNEL
from .channels import Channels
from .error_file import read_failure, read_record
from .exits import UNKNOWN, WorkerExit
from .function import read_result
from .guardian import Guardian
from .interface import Workers
from .last_word import forget_exit, read_last_word
from .logs import ask
from .memory import killed_for_memory, oom_kills
from .notice import Notice
from .output import Output
from .output_plan import OutputPlan
from .places import ERROR_FILE, Places, planned
from .processors import Processors, count_cores
from .run_folder import RunFolder
from .shared_folder import SharedFolder
from .spec import SNAPSHOTS, Worker, WorkerGroup, WorkerSpec, worker_environment
from .starting import Starter, program
from .timer_server import VARIABLE as TIMERS
from .timer_server import TimerServer
from .warm import Warm

log = logging.getLogger("elasticlib.workers")

REAP_SECONDS = 5.0
DRAIN_SECONDS = 5.0
PATIENCE, LEAST_PATIENCE = 0.5, 0.02
"""Seconds for the output of all workers of one start to be shown, and of each of them."""


@attrs.define
class _Process:
    worker: Worker
    popen: subprocess.Popen[bytes] | Warm
    output: Output
    folder: Path
    error_file: Path
    ended_at: float = float("inf")
    result: tuple[Any, str] | None = None

    def read_result(self) -> tuple[Any, str]:
        """What its function returned, and why it is unreadable; a value's own code runs here."""
        if self.result is None:
            self.result = read_result(self.folder / "result.pickle")
        return self.result


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
        self._guardian = Guardian()
        # Whoever else says where output goes has a folder for it, and ours is our own affair.
        log_dir = log_dir if self._output.specs is None else None
        kept = log_dir is not None or (self._output.any and self._output.specs is None)
        self._folder = RunFolder(self._guardian, log_dir, run_id, kept=kept)
        self._starter = Starter(
            self._guardian,
            python=python,
            start_method=start_method,
            preload=preload,
            ignored=ignored,
            processors=processors,
        )
        listed = (self._guardian.add_folder, self._guardian.remove_folder)
        self._channels = Channels()
        self.memory = SharedFolder(*listed)
        """Where the workers keep what outlives them, and not their agent."""
        self._processes: dict[int, _Process] = {}
        self._stopped = False
        self._channels.begin()
        self._kills: int | None = None
        self._late: list[Output] = []
        self._patience = PATIENCE
        self._timers: TimerServer | None = None

    def serve_timers(self, path: str) -> None:
        """Before the first start: workers may set timers by torch's `FileTimerClient`, and are sent
        the signal they asked for when one runs out. path: of the pipe, empty for one of its own,
        which it has as well where somebody else listens.
        """
        self._timers = TimerServer(path, self._guardian, self._leaders)

    def _leaders(self) -> list[int]:
        return [process.popen.pid for process in dict(self._processes).values()]

    @property
    def folder(self) -> Path:
        """This run's folder, `<log_dir>/<run_id>_<random>`; made when first asked for."""
        return self._folder.path

    @property
    def kept_folder(self) -> Path | None:
        """This run's folder, where there is one that stays."""
        return self._folder.kept_path

    @property
    def keeps_folder(self) -> bool:
        """Whether this run's folder, made or not, stays when the run is over."""
        return self._folder.kept

    def prepare(self, spec: WorkerSpec) -> None:
        self._starter.prepare(spec, self._environment, count_cores())

    def await_prepared(self) -> None:
        self._starter.await_prepared()

    def start(self, group: WorkerGroup, ended: Callable[[int], None]) -> None:
        ends.heed_children()
        self._prepare_late(group.spec)
        self._processes = {}
        self._stopped = False
        self._patience = PATIENCE
        self._channels.begin()
        self._kills = oom_kills()
        worker = group.workers[0]
        if self._timers is not None:
            self._timers.open()
        try:
            environments, places = self._lay_out(group)
            for worker in group.workers:
                local = worker.local_rank
                process = self._spawn(group, worker, environments[local], places[local])
                self._watch(process, ended)
        except OSError as error:
            raise WorkerStartError(
                f"cannot start the worker of rank {worker.rank}: {error}"
            ) from error
        self._folder.forget(but=group.attempt)

    def _prepare_late(self, spec: WorkerSpec) -> None:
        """Whoever has not called these before gets them now."""
        try:
            self.prepare(spec)
        except OSError as error:
            raise WorkerStartError(f"cannot start the workers' template: {error}") from error
        self.await_prepared()

    def _lay_out(self, group: WorkerGroup) -> tuple[dict[int, dict[str, str]], dict[int, Places]]:
        """Each worker's environment, and where its output goes."""
        folders = {
            w.local_rank: str(self._folder.of(group.attempt, w.local_rank)) for w in group.workers
        }
        environments = {
            worker.local_rank: worker_environment(
                group,
                worker,
                self._environment,
                error_file=f"{folders[worker.local_rank]}/{ERROR_FILE}",
                cores=count_cores(),
            )
            for worker in group.workers
        }
        if self._output.specs is not None:
            return environments, ask(self._output.specs, environments, self._output)
        return environments, {
            local: planned(self._output, local, folder) for local, folder in folders.items()
        }

    def _watch(self, process: _Process, ended: Callable[[int], None]) -> None:
        pid, local_rank = process.popen.pid, process.worker.local_rank
        self._processes[local_rank] = process
        self._guardian.add(pid)

        def noticed(local_rank: int) -> None:
            process.ended_at = wall()
            # Here and not where it is collected: a value may be large, and its code takes its time.
            process.read_result()
            ended(local_rank)

        try:
            process.output.attach(process.popen)
            ends.watch(pid, local_rank, noticed)
        except RuntimeError as error:
            # Nobody would notice its end.
            self.collect(local_rank)
            raise WorkerStartError(
                f"cannot watch the worker of rank {process.worker.rank}: {error}; threads count "
                "as processes (ulimit -u, pids.max of the cgroup): raise that limit"
            ) from error

    def _spawn(
        self, group: WorkerGroup, worker: Worker, environment: dict[str, str], places: Places
    ) -> _Process:
        self._guardian.open()
        folder = self._folder.of(group.attempt, worker.local_rank)
        environment[CHANNEL] = self._channels.open(worker.local_rank)
        if self._timers is not None:
            environment[TIMERS] = self._timers.path
        environment[SNAPSHOTS] = str(self.memory.era(group.attempt))
        what = program(group.spec.entrypoint, worker.local_rank, folder)
        output = Output(self._output, worker, group.spec.role, places).open()
        try:
            popen = self._starter.start(what, environment, output, worker.local_rank)
        except (OSError, ElasticError):
            output.abandon()
            raise
        if what[0] != "command":
            self._channels.assign(worker.local_rank, popen.pid)
        return _Process(worker, popen, output, folder, Path(places.error_file))

    def collect(self, local_rank: int) -> WorkerExit:
        process = self._processes.pop(local_rank)
        self._channels.close(local_rank)
        pid = process.popen.pid
        session.end(pid)
        returncode = ends.reap(process.popen)
        self._guardian.remove(pid)
        self._close_output(process.output)
        found = WorkerExit(
            local_rank,
            process.worker.rank,
            pid,
            returncode=UNKNOWN if returncode is None else returncode,
            code_known=returncode is not None,
            stopped=self._stopped,
        )
        if returncode == 0:
            value, unreadable = process.read_result()
            return attrs.evolve(found, value=value, unreadable=unreadable)
        return self._explained(found, process)

    def _close_output(self, output: Output) -> None:
        began = monotonic()
        if not output.close(self._patience):
            self._late.append(output)
            # A console that stands still does so for the next worker, too.
            self._patience = max(LEAST_PATIENCE, self._patience - (monotonic() - began))

    def _explained(self, found: WorkerExit, process: _Process) -> WorkerExit:
        """With all that is known of why it failed."""
        said = read_last_word(process.error_file)
        forget_exit(process.error_file)
        data, at = said.data, min(said.at, process.ended_at)
        message, trace = read_failure(data)
        return attrs.evolve(
            found,
            message=message,
            traceback=trace,
            tail=process.output.tail(),
            log=self._log_of(process),
            out_of_memory=killed_for_memory(self._kills, oom_kills()),
            at=at,
            error_file=self._error_file_of(process) if data else "",
            error_data=read_record(data),
            # Others may have noticed a killed one, and have said so, before we have.
            after=None if self._stopped or found.by_itself else self._failing(before=at),
        )

    def _failing(self, before: float) -> WorkerExit | None:
        """Who wrote of a failure earlier and has not ended yet: tearing down takes its time, in
        which others notice that their peer is gone, and may end first."""
        found = []
        for local_rank, process in self._processes.items():
            said = read_last_word(process.error_file)
            if said.ends_process and said.at < before:
                message, trace = read_failure(said.data)
                who = (local_rank, process.worker.rank, process.popen.pid)
                found.append(
                    WorkerExit(
                        *who,
                        returncode=said.code or 1,
                        message=message,
                        traceback=trace,
                        log=self._log_of(process),
                        at=said.at,
                        error_file=self._error_file_of(process) if said.data else "",
                        error_data=read_record(said.data),
                        ending=True,
                    )
                )
        return min(found, key=lambda exit_: exit_.at, default=None)

    def _log_of(self, process: _Process) -> str:
        """The folder in which people find what is left of a worker; empty if that goes with us."""
        return str(process.error_file.parent) if self._stays(process) else ""

    def _error_file_of(self, process: _Process) -> str:
        return str(process.error_file) if self._stays(process) else ""

    def _stays(self, process: _Process) -> bool:
        return self._folder.kept or process.error_file.parent != process.folder

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

    def last_beats(self) -> Mapping[int, Beat]:
        return self._channels.last_beats()

    def dump_stacks(self) -> Mapping[int, str]:
        processes = dict(self._processes)
        found = self.dump_stacks_of(processes)
        for local, text in found.items():
            stacks.keep(processes[local].error_file.parent, text)
        return found

    def dump_stacks_of(self, local_ranks: Collection[int]) -> Mapping[int, str]:
        asked, here = self._channels.dumpers(), dict(self._processes)
        ours = {n: here[n].popen.pid for n in asked if n in here and n in local_ranks}
        return stacks.dump({local: (pid, *asked[local]) for local, pid in ours.items()})

    def terminate(self) -> None:
        self._stopped = True
        self._signal(signal.SIGTERM)
        # A worker that stands still (SIGSTOP, a debugger) would not hear of it.
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        self._stopped = True
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        for process in self._processes.values():
            session.signal_group(process.popen.pid, number)

    def end(self) -> None:
        self.kill()
        deadline = monotonic() + REAP_SECONDS
        for local_rank, process in list(self._processes.items()):
            if session.ends_within(process.popen.pid, max(0.0, deadline - monotonic())):
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
        if self._timers is not None:
            self._timers.close()
        self.memory.remove()
        self._starter.close()
        self._folder.remove()
        self._guardian.close()
