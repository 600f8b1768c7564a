"""Workers as processes of this machine, each the leader of a session.

The supervisor process starts the workers, reports their exits and kills the processes that they
leave; see `supervisor`. Whether a worker is forked from a process that has imported torch or is
started as a new interpreter, it gets the same environment, and runs the same code up to the user's
own.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from ..clock import monotonic, wall
from ..errors import WorkerStartError, require_not_none
from ..event_loop import EventLoop
from ..rendezvous.blame import find_cause
from ..threads import daemon_thread
from . import stack_dump
from .cleanup import process_name, signal_worker, stat_fields
from .error_file import FailureReport, read_failure_report, remove_exit_file
from .exits import WorkerExit
from .interface import Heartbeat, StopNotice, Workers
from .node_resources import CpuSet, count_usable_cpus, oom_kill_count_rose, read_oom_kill_count
from .output import OutputThread, WorkerOutput
from .output_plan import OutputPlan
from .process_launcher import ProcessLauncher
from .run_dirs import RunDir, SnapshotDir
from .run_program import read_result, write_payload
from .spec import (
    ASSIGNMENT_VARIABLES,
    SNAPSHOTS_ENV,
    Command,
    Entrypoint,
    Function,
    Module,
    Script,
    Worker,
    WorkerGroup,
    WorkerSpec,
    substitute_local_rank,
    worker_environment,
)
from .supervisor_client import SupervisedProcess, SupervisorClient
from .worker_channel import CHANNEL_ENV, WorkerChannels

log = logging.getLogger("elasticlib.workers")

KILL_TIMEOUT_S = 5.0  # limit for the exits of workers after SIGKILL
# Limit for killing the children of exited workers before others are started. The supervisor needs
# up to 2 s for workers that exited together, and as long for those that exited before.
CLEAN_TIMEOUT_S = 10.0
BACKGROUND_POLL_INTERVAL_S = 0.1  # between two lists of what succeeded workers have started
RESULT_FILE = "result.pickle"
_STAT_FLAGS = 6  # position of the flags in `stat_fields`
_PF_EXITING = 0x4  # the flag of a process that ends


@attrs.define
class _Process:
    worker: Worker
    process: SupervisedProcess
    output: WorkerOutput
    directory: Path
    error_file: Path
    ending: WorkerExit | None = None  # what is known while it exits; None until its program ends
    # The value of a function, and why it cannot be read; None until it has been read.
    result: tuple[Any, str] | None = None

    @property
    def pid(self) -> int:
        return self.process.pid

    def read_result(self) -> tuple[Any, str]:
        """Return the return value of the function, and why it cannot be read; empty if it can.

        The file is read once. This may run code of the value's class.
        """
        if self.result is None:
            self.result = read_result(self.directory / RESULT_FILE)
        return self.result


def program_of(entrypoint: Entrypoint, local_rank: int, directory: Path) -> tuple[str, ...]:
    """Return the kind of a worker's program, its name and its arguments; see `run_program`."""
    if isinstance(entrypoint, Function):
        payload = directory / "payload.pickle"
        write_payload(payload, entrypoint)
        return ("function", str(payload), str(directory / RESULT_FILE))
    args = substitute_local_rank(entrypoint.args, local_rank)
    if isinstance(entrypoint, Script):
        return ("script", entrypoint.path, *args)
    if isinstance(entrypoint, Module):
        return ("module", entrypoint.name, *args)
    if not isinstance(entrypoint, Command):
        raise TypeError(f"a worker is a script, module, function or command: {entrypoint!r}")
    return ("command", entrypoint.program, *args)


def _is_exiting(pid: int) -> bool:
    """Return whether the kernel is ending this process, which takes long if it has much memory."""
    try:
        return bool(int(stat_fields(pid)[_STAT_FLAGS]) & _PF_EXITING)
    except OSError:
        return True


class LocalWorkers(Workers):
    """Workers that are processes of this machine.

    A worker that can regroup keeps its process in the next generation. Others are started again.

    Args:
        environment: variables that the workers inherit.
        output: which output of the workers is shown and which is written to files.
        log_dir: parent of this run's directory. By default, the directory is temporary, and is
            removed at the end unless output is written to it.
        run_id: part of the name of this run's directory.
        python: the interpreter of scripts, modules and functions.
        cpu_sets: processors of each worker by local rank. By default, workers use any processor.
        ignored_signals: signals that workers and their children ignore unless they set a handler.
        start_method: `forkserver` to fork Python workers from a process that has imported torch, or
            `spawn` to start an interpreter for each.
        preload: modules that the fork server imports besides torch.
    """

    event_loop: EventLoop

    def __init__(
        self,
        environment: Mapping[str, str],
        *,
        output: OutputPlan | None = None,
        log_dir: str | None = None,
        run_id: str = "none",
        python: str = sys.executable,
        cpu_sets: Sequence[CpuSet] = (),
        ignored_signals: Iterable[int] = (),
        start_method: str = "forkserver",
        preload: Sequence[str] = (),
    ) -> None:
        self._environment = dict(environment)
        self._output = output or OutputPlan()
        self.event_loop = EventLoop()
        self._output_thread = OutputThread()
        self._supervisor = SupervisorClient(self.event_loop)
        kept = log_dir is not None or self._output.any
        self._run_dir = RunDir(self._supervisor, log_dir, run_id, kept=kept)
        self._launcher = ProcessLauncher(
            self._supervisor,
            python=python,
            start_method=start_method,
            preload=preload,
            ignored_signals=ignored_signals,
            cpu_sets=cpu_sets,
        )
        self._channels = WorkerChannels()
        self.snapshot_dir = SnapshotDir(self._supervisor)
        self._processes: dict[int, _Process] = {}  # that have not been reaped, by local rank
        # When each worker was first asked to stop, by local rank, by the wall clock; infinity if it
        # was already exiting. Since the last start.
        self._stop_requested_at: dict[int, float] = {}
        self._sent_signals: set[tuple[int, int]] = set()  # local rank and signal, since then
        self._oom_kill_count: int | None = None  # of this machine or cgroup at the last start

    @property
    def run_dir(self) -> Path:
        """The directory `<log_dir>/<run_id>_<random>` of this run, created when first needed."""
        return self._run_dir.path

    @property
    def kept_run_dir(self) -> Path | None:
        """The directory of this run if it is kept and has been created, or None."""
        return self._run_dir.kept_path

    @property
    def keeps_run_dir(self) -> bool:
        """Return whether the directory of this run is kept at the end."""
        return self._run_dir.kept

    # -- the start -------------------------------------------------------------------------------

    def prepare(self, spec: WorkerSpec) -> None:
        self.snapshot_dir.start_cleaning()
        self._launcher.prepare(spec, self._environment, count_usable_cpus())

    def wait_until_prepared(self) -> None:
        self._launcher.wait_prepared()

    def start(self, group: WorkerGroup, on_exit: Callable[[int], None]) -> None:
        try:
            self.event_loop.start_thread()
            self.prepare(group.spec)
            self.wait_until_prepared()
            self._kill_background_processes("before workers start again")
            is_clean = self._supervisor.wait_until_clean(CLEAN_TIMEOUT_S)
        except OSError as error:
            raise WorkerStartError(f"cannot prepare the start of workers: {error}") from error
        if not is_clean:
            log.error(
                "processes that exited workers had started survived SIGKILL; new workers start, "
                "but GPUs or ports may still be in use"
            )
        everyone = (*group.workers, *group.standby_workers)
        stay = {worker.local_rank for worker in everyone}
        self._processes = {n: one for n, one in self._processes.items() if n in stay}
        self._stop_requested_at.clear()
        self._sent_signals.clear()
        self._channels.start_group()
        self._oom_kill_count = read_oom_kill_count()
        try:
            for worker in group.workers:
                if worker.local_rank in self._processes:
                    self._assign_running_worker(group, worker)
            new = [one for one in everyone if one.local_rank not in self._processes]
            directories = {
                worker.local_rank: self._run_dir.create_worker_dir(group.attempt, worker.local_rank)
                for worker in new
            }
        except OSError as error:
            raise WorkerStartError(f"cannot prepare the start of the workers: {error}") from error
        for worker in new:
            try:
                self._spawn(group, worker, directories[worker.local_rank], on_exit)
            except OSError as error:
                raise WorkerStartError(
                    f"cannot start the worker of rank {worker.rank}: {error}"
                ) from error
        self._run_dir.remove_attempts(
            keep={process.directory.parent for process in self._processes.values()}
        )

    def _assign_running_worker(self, group: WorkerGroup, worker: Worker) -> None:
        """Give a running worker its assignment in this group."""
        process = self._processes[worker.local_rank]
        process.worker = worker
        environment = self._environment_of(group, worker, str(process.error_file))
        self._publish_assignment(worker.local_rank, environment)

    def _publish_assignment(self, local_rank: int, environment: Mapping[str, str]) -> None:
        place = {name: environment[name] for name in ASSIGNMENT_VARIABLES if name in environment}
        self._channels.publish_assignment(local_rank, place)

    def _environment_of(
        self, group: WorkerGroup, worker: Worker, error_file: str
    ) -> dict[str, str]:
        environment = worker_environment(
            group, worker, self._environment, error_file=error_file, cores=count_usable_cpus()
        )
        # An empty value tells a retained worker not to use its previous directory.
        environment[SNAPSHOTS_ENV] = str(self.snapshot_dir.attempt_dir(group.attempt) or "")
        return environment

    def _spawn(
        self, group: WorkerGroup, worker: Worker, directory: Path, on_exit: Callable[[int], None]
    ) -> None:
        local = worker.local_rank
        is_standby = worker in group.standby_workers
        channel = self._channels.open(local, is_standby=is_standby)
        try:
            self._start_process(group, worker, directory, channel, on_exit)
        except BaseException:
            if local not in self._processes:
                self._channels.close(local)
            raise

    def _start_process(
        self,
        group: WorkerGroup,
        worker: Worker,
        directory: Path,
        channel: str,
        on_exit: Callable[[int], None],
    ) -> None:
        local = worker.local_rank
        files = self._output.files_of(local, str(directory))
        environment = self._environment_of(group, worker, files.error_file)
        environment[CHANNEL_ENV] = channel
        if worker not in group.standby_workers:
            self._publish_assignment(local, environment)
        program = program_of(group.spec.entrypoint, local, directory)
        output = WorkerOutput(self._output, worker, group.spec.role, files, self._output_thread)
        try:
            started = self._launcher.start(program, environment, output.targets, local)
        except BaseException:
            output.abandon()
            raise
        if program[0] != "command":
            self._channels.set_worker_pid(local, started.pid)
        process = _Process(worker, started, output, directory, Path(files.error_file))
        if not isinstance(group.spec.entrypoint, Function):
            process.result = (None, "")
        self._processes[local] = process
        output.attach()
        self._supervisor.call_on_exit(started, partial(self._on_exit, process, on_exit))

    # -- the end ---------------------------------------------------------------------------------

    def _on_exit(self, process: _Process, on_exit: Callable[[int], None]) -> None:
        """Report a worker's exit; called by the event loop.

        The result of a function is read in another thread, because unpickling runs code of the
        user.
        """
        local = process.worker.local_rank

        def read() -> None:
            process.read_result()
            on_exit(local)

        if process.result is None:
            try:
                return daemon_thread(
                    read, f"worker-{local}-value", lambda _: on_exit(local)
                ).start()
            except RuntimeError:
                log.warning(
                    "cannot start a thread that reads the return value of rank %d, which is lost",
                    process.worker.rank,
                )
        return on_exit(local)

    def reap(self, local_rank: int) -> WorkerExit:
        process = self._processes.pop(local_rank)
        self._channels.close(local_rank)
        returncode = require_not_none(process.process.returncode, "the exit code of the worker")
        self._supervisor.release(process.process)
        process.output.wait_flushed()
        report = read_failure_report(process.error_file)
        remove_exit_file(process.error_file)
        is_stopped = self._stopped_before_failure(process, report)
        found = WorkerExit(
            local_rank,
            process.worker.rank,
            process.pid,
            returncode=returncode,
            stop_was_requested=is_stopped,
            failed_before_stop=not is_stopped,
            code_in_progress=report.exit_code,
            signal_sent_by_agent=(local_rank, -returncode) in self._sent_signals,
        )
        if returncode == 0:
            value, unreadable = process.read_result()
            return attrs.evolve(found, value=value, value_error=unreadable)
        return self._with_cause(found, process, report)

    def _with_cause(
        self, found: WorkerExit, process: _Process, report: FailureReport
    ) -> WorkerExit:
        """Return the exit with all that is known about the cause of the failure."""
        found = attrs.evolve(
            self._with_message(found, process, report),
            stderr_tail=process.output.tail(),
            out_of_memory=oom_kill_count_rose(self._oom_kill_count, read_oom_kill_count()),
            failed_at=min(report.failed_at, process.process.exited_at),
        )
        if found.stop_was_requested:
            return found
        cause = find_cause((found, *self._failures_in_progress()))
        return found if cause is found else attrs.evolve(found, preceding_failure=cause)

    def _stopped_before_failure(self, process: _Process, report: FailureReport) -> bool:
        """Return whether the agent had asked the worker to stop before it failed or exited."""
        requested_at = self._stop_requested_at.get(process.worker.local_rank, float("inf"))
        failed_at = report.failed_at if report.ends_process else float("inf")
        return requested_at <= min(failed_at, process.process.exited_at)

    def _failures_in_progress(self) -> list[WorkerExit]:
        """Return the failures that workers have reported and still exit from.

        A failing process needs time to exit. Its peers may notice the failure and exit before it.
        """
        found = []
        for process in self._processes.values():
            report = read_failure_report(process.error_file)
            if report.ends_process:
                found.append(self._failure_in_progress(process, report))
        return found

    def _failure_in_progress(self, process: _Process, report: FailureReport) -> WorkerExit:
        exit_ = WorkerExit(
            process.worker.local_rank,
            process.worker.rank,
            process.pid,
            returncode=report.exit_code or 1,
            failed_at=report.failed_at,
            is_still_exiting=True,
        )
        return self._with_message(exit_, process, report)

    def ending_workers(self) -> Mapping[int, WorkerExit]:
        ending = {}
        for local, has_failed in self._channels.ended_programs().items():
            process = self._processes.get(local)
            if process is None:
                continue
            if process.ending is None and has_failed:
                report = read_failure_report(process.error_file)
                process.ending = self._failure_in_progress(process, report)
            elif process.ending is None:
                who = (local, process.worker.rank, process.pid)
                process.ending = WorkerExit(*who, returncode=0, is_still_exiting=True)
            ending[local] = process.ending
        return ending

    def _with_message(
        self, found: WorkerExit, process: _Process, report: FailureReport
    ) -> WorkerExit:
        message, traceback = report.message_and_traceback
        # Paths are reported only if the files remain after the end of the run.
        is_kept = self._run_dir.kept or process.error_file.parent != process.directory
        return attrs.evolve(
            found,
            message=message,
            traceback=traceback,
            log_dir=str(process.error_file.parent) if is_kept else "",
            error_file=str(process.error_file) if is_kept and report.has_error_file else "",
            error_data=report.record,
        )

    def running(self) -> dict[int, str]:
        return {local: f"pid {p.pid}" for local, p in self._processes.items()}

    # -- messages between workers and agent ------------------------------------------------------

    supports_coordinated_stop = reports_heartbeats = True

    def regroupable_ranks(self) -> Collection[int]:
        return self._channels.regroupable_ranks()

    def leave_group(self) -> None:
        self._channels.leave_group()

    def has_group_failure(self) -> bool:
        return self._channels.has_group_failure()

    def standby_ranks(self) -> Mapping[int, bool]:
        return self._channels.standby_ranks()

    def notify(self, notice: StopNotice) -> bool:
        is_received = self._channels.notify(notice)
        if is_received:
            self._note_stop(self._processes)
        return is_received

    def takes_notices(self) -> bool:
        return self._channels.takes_notices()

    def earliest_stop_call(self) -> int | None:
        return self._channels.earliest_stop_call()

    def stop_at_call(self, call: int, notice: StopNotice) -> None:
        self._channels.stop_at_call(call, notice)

    def heartbeats(self) -> Mapping[int, Heartbeat]:
        return self._channels.heartbeats()

    def final_heartbeats(self) -> Mapping[int, Heartbeat]:
        return self._channels.final_heartbeats()

    def dump_stacks(self, local_ranks: Collection[int], *, save: bool = False) -> Mapping[int, str]:
        dumpers, processes = self._channels.stack_dumpers(), dict(self._processes)
        pids = {n: processes[n].pid for n in dumpers if n in processes and n in local_ranks}
        stacks = stack_dump.collect_stacks(
            {local: (pid, *dumpers[local]) for local, pid in pids.items()}
        )
        if save:
            for local, text in stacks.items():
                stack_dump.append_to_stack_file(processes[local].error_file.parent, text)
        return stacks

    def stop(self, local_ranks: Collection[int], *, force: bool = False) -> None:
        self._note_stop(local_ranks)
        # A worker that is stopped (SIGSTOP, a debugger) receives SIGTERM only after SIGCONT.
        for number in (signal.SIGKILL,) if force else (signal.SIGTERM, signal.SIGCONT):
            for local_rank in local_ranks:
                if local_rank in self._processes:
                    self._sent_signals.add((local_rank, number))
                    signal_worker(self._processes[local_rank].pid, number)

    def _note_stop(self, local_ranks: Iterable[int]) -> None:
        """Note that these workers are asked to stop, except those that are exiting already."""
        for local_rank in local_ranks:
            if local_rank in self._processes and local_rank not in self._stop_requested_at:
                is_exiting = _is_exiting(self._processes[local_rank].pid)
                self._stop_requested_at[local_rank] = float("inf") if is_exiting else wall()

    def kill_and_wait(self) -> None:
        self.stop(list(self._processes), force=True)
        deadline = monotonic() + KILL_TIMEOUT_S
        for local_rank, process in list(self._processes.items()):
            timeout = max(0.0, deadline - monotonic())
            if self._supervisor.wait_for_exit(process.process, timeout):
                self.reap(local_rank)
            else:
                # The supervisor continues to kill it when the agent has exited.
                log.error(
                    "worker of rank %d (pid %d) survived SIGKILL and may still use its GPU",
                    *(process.worker.rank, process.pid),
                )
                del self._processes[local_rank]

    def wait_for_background_processes(
        self, timeout_s: float, is_cancelled: Callable[[], object]
    ) -> None:
        deadline = monotonic() + timeout_s
        left = self._supervisor.background_processes()
        if left:
            log.info(
                "the workers of this node have succeeded; waiting up to %g s for processes that "
                "they have started: %s",
                *(timeout_s, ", ".join(f"{pid} ({process_name(pid)})" for pid in left)),
            )
        while left and monotonic() < deadline:
            if self.event_loop.run_until(is_cancelled, BACKGROUND_POLL_INTERVAL_S):
                return
            left = self._supervisor.background_processes()

    def _kill_background_processes(self, when: str) -> None:
        if killed := self._supervisor.kill_background_processes():
            log.warning(
                "killed processes that workers of this node had started, and that still ran %s: "
                "%s; a script that waits for them before it ends loses none of their work",
                *(when, ", ".join(map(str, killed))),
            )

    def close(self) -> None:
        self.kill_and_wait()
        self._kill_background_processes("at the end")
        self._output_thread.close()
        self._channels.close_all()
        self.snapshot_dir.remove()
        self._run_dir.remove()
        self._supervisor.close()
        self.event_loop.close()
