"""Workers as processes of this machine, each the leader of a session.

The supervisor process starts the workers, reports their exits and kills what they leave behind; see
`supervisor`. Whether a worker is forked from a process that has imported torch or is started as a
new interpreter, it gets the same environment, and runs the same code up to the user's own.
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
from ..errors import WorkerStartError
from ..threads import helper
from . import stack_dump
from .cleanup import signal_group
from .error_file import FailureReport, read_failure_report, remove_exit_file
from .event_loop import EventLoop
from .exits import UNKNOWN_RETURNCODE, WorkerExit
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
# Limit for killing what exited workers have left, before others are started. The supervisor needs
# up to 2 s for workers that exited together, and as long for those that exited before.
CLEAN_TIMEOUT_S = 10.0
RESULT = "result.pickle"


@attrs.define
class _Process:
    worker: Worker
    process: SupervisedProcess
    output: WorkerOutput
    folder: Path
    error_file: Path
    ended_at: float = float("inf")
    result: tuple[Any, str] | None = None
    """What its function returned, and why that is unreadable; None until it was read."""

    @property
    def pid(self) -> int:
        return self.process.pid

    def read_result(self) -> tuple[Any, str]:
        """A value's own code runs here."""
        if self.result is None:
            self.result = read_result(self.folder / RESULT)
        return self.result


def program(entrypoint: Entrypoint, local_rank: int, folder: Path) -> tuple[str, ...]:
    """The kind of a worker's program, its name and its arguments, as `run_program` takes them."""
    if isinstance(entrypoint, Function):
        payload = folder / "payload.pickle"
        write_payload(payload, entrypoint)
        return ("function", str(payload), str(folder / RESULT))
    args = substitute_local_rank(entrypoint.args, local_rank)
    if isinstance(entrypoint, Script):
        return ("script", entrypoint.path, *args)
    if isinstance(entrypoint, Module):
        return ("module", entrypoint.name, *args)
    if not isinstance(entrypoint, Command):
        raise TypeError(f"a worker is a script, module, function or command: {entrypoint!r}")
    return ("command", entrypoint.program, *args)


class LocalWorkers(Workers):
    """Processes: those that can go on in another group do, the others are started afresh for each
    generation.

    Args:
        environment: what the workers inherit, before what they are told.
        log_dir: where the folder of this run goes. Without, a temporary one, which is removed
            at the end unless output was sent there.
        run_id: names that folder.
        python: the interpreter of scripts, modules and functions.
        processors: what each worker runs on, by local rank; any without.
        start_method: `forkserver` to fork Python workers from a process that has torch imported, or
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
        cpu_sets: Sequence[CpuSet] = (),
        ignored_signals: Iterable[int] = (),
        start_method: str = "forkserver",
        preload: Sequence[str] = (),
    ) -> None:
        self._environment = dict(environment)
        self._output = output or OutputPlan()
        self._loop = EventLoop()
        self._output_thread = OutputThread()
        self._supervisor = SupervisorClient(self._loop)
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
        """Where the workers keep what outlives them, and not their agent."""
        self._processes: dict[int, _Process] = {}
        self._stopped = False
        self._sent: set[tuple[int, int]] = set()
        """The signals that stopped workers were sent: a local rank, a number."""
        self._kills: int | None = None

    @property
    def run_dir(self) -> Path:
        """This run's folder, `<log_dir>/<run_id>_<random>`; made when first asked for."""
        return self._run_dir.path

    @property
    def kept_run_dir(self) -> Path | None:
        """This run's folder, where there is one that stays."""
        return self._run_dir.kept_path

    @property
    def keeps_run_dir(self) -> bool:
        """Whether this run's folder, made or not, stays when the run is over."""
        return self._run_dir.kept

    # -- the start -------------------------------------------------------------------------------

    def prepare(self, spec: WorkerSpec) -> None:
        self._loop.start()
        self._launcher.prepare(spec, self._environment, count_usable_cpus())

    def wait_until_prepared(self) -> None:
        self._launcher.wait_prepared()

    def start(self, group: WorkerGroup, on_exit: Callable[[int], None]) -> None:
        try:
            self.prepare(group.spec)
        except OSError as error:
            raise WorkerStartError(f"cannot begin to start workers: {error}") from error
        self.wait_until_prepared()
        if not self._supervisor.wait_until_clean(CLEAN_TIMEOUT_S):
            log.error("processes that exited workers have started survived SIGKILL")
        everyone = (*group.workers, *group.standby_workers)
        stay = {worker.local_rank for worker in everyone}
        self._processes = {n: one for n, one in self._processes.items() if n in stay}
        self._stopped = False
        self._sent.clear()
        self._channels.start_group()
        self._kills = read_oom_kill_count()
        try:
            for worker in group.workers:
                if worker.local_rank in self._processes:
                    self._keep(group, worker)
            new = [one for one in everyone if one.local_rank not in self._processes]
            folders = {
                worker.local_rank: self._run_dir.of(group.attempt, worker.local_rank)
                for worker in new
            }
        except OSError as error:
            raise WorkerStartError(f"cannot prepare the start of the workers: {error}") from error
        for worker in new:
            try:
                self._spawn(group, worker, folders[worker.local_rank], on_exit)
            except OSError as error:
                raise WorkerStartError(
                    f"cannot start the worker of rank {worker.rank}: {error}"
                ) from error
        self._run_dir.forget(but={process.folder.parent for process in self._processes.values()})

    def _keep(self, group: WorkerGroup, worker: Worker) -> None:
        """Give a worker that runs its place in this group."""
        process = self._processes[worker.local_rank]
        process.worker = worker
        told = self._environment_of(group, worker, str(process.error_file))
        self._give_place(worker.local_rank, told)

    def _give_place(self, local_rank: int, environment: Mapping[str, str]) -> None:
        place = {name: environment[name] for name in ASSIGNMENT_VARIABLES if name in environment}
        self._channels.publish_assignment(local_rank, place)

    def _environment_of(
        self, group: WorkerGroup, worker: Worker, error_file: str
    ) -> dict[str, str]:
        environment = worker_environment(
            group, worker, self._environment, error_file=error_file, cores=count_usable_cpus()
        )
        # Empty where there is none: a worker that is kept is not to use the folder it had before.
        environment[SNAPSHOTS_ENV] = str(self.snapshot_dir.attempt_dir(group.attempt) or "")
        return environment

    def _spawn(
        self, group: WorkerGroup, worker: Worker, folder: Path, on_exit: Callable[[int], None]
    ) -> None:
        local = worker.local_rank
        is_standby = worker in group.standby_workers
        channel = self._channels.open(local, is_standby=is_standby)
        try:
            self._start_process(group, worker, folder, channel, on_exit)
        except BaseException:
            if local not in self._processes:
                self._channels.close(local)
            raise

    def _start_process(
        self,
        group: WorkerGroup,
        worker: Worker,
        folder: Path,
        channel: str,
        on_exit: Callable[[int], None],
    ) -> None:
        local = worker.local_rank
        files = self._output.files_of(local, str(folder))
        environment = self._environment_of(group, worker, files.error_file)
        environment[CHANNEL_ENV] = channel
        if worker not in group.standby_workers:
            self._give_place(local, environment)
        what = program(group.spec.entrypoint, local, folder)
        output = WorkerOutput(self._output, worker, group.spec.role, files, self._output_thread)
        try:
            started = self._launcher.start(what, environment, output.targets, local)
        except BaseException:
            output.abandon()
            raise
        if what[0] != "command":
            self._channels.set_worker_pid(local, started.pid)
        process = _Process(worker, started, output, folder, Path(files.error_file))
        if not isinstance(group.spec.entrypoint, Function):
            process.result = (None, "")
        self._processes[local] = process
        output.attach()
        self._supervisor.call_on_exit(started, partial(self._on_exit, process, on_exit))

    # -- the end ---------------------------------------------------------------------------------

    def _on_exit(self, process: _Process, on_exit: Callable[[int], None]) -> None:
        """Report a worker's exit; called in the event loop's thread.

        The result of a function is read in another thread, because its own code runs then.
        """
        process.ended_at = wall()
        local = process.worker.local_rank

        def read() -> None:
            process.read_result()
            on_exit(local)

        if process.result is None:
            try:
                return helper(read, f"worker-{local}-value", lambda _: on_exit(local)).start()
            except RuntimeError:
                log.warning("cannot start a thread to read what a worker's function returned")
        return on_exit(local)

    def reap(self, local_rank: int) -> WorkerExit:
        process = self._processes.pop(local_rank)
        self._channels.close(local_rank)
        returncode = process.process.returncode
        self._supervisor.release(process.process)
        process.output.finish()
        said = read_failure_report(process.error_file)
        remove_exit_file(process.error_file)
        found = WorkerExit(
            local_rank,
            process.worker.rank,
            process.pid,
            returncode=UNKNOWN_RETURNCODE if returncode is None else returncode,
            is_returncode_known=returncode is not None,
            stop_was_requested=self._stopped,
            signal_sent_by_agent=returncode is not None and (local_rank, -returncode) in self._sent,
        )
        if returncode == 0:
            value, unreadable = process.read_result()
            return attrs.evolve(found, value=value, value_error=unreadable)
        return self._explained(found, process, said)

    def _explained(self, found: WorkerExit, process: _Process, said: FailureReport) -> WorkerExit:
        """With all that is known of why it failed."""
        at = min(said.failed_at, process.ended_at)
        return attrs.evolve(
            self._with_message(found, process, said),
            stderr_tail=process.output.tail(),
            out_of_memory=oom_kill_count_rose(self._kills, read_oom_kill_count()),
            failed_at=at,
            # Peers may have noticed a killed worker, and have written so, before we noticed.
            preceding_failure=None
            if self._stopped or found.failed_independently
            else self._failing(before=at),
        )

    def _failing(self, before: float) -> WorkerExit | None:
        """The worker that wrote of a failure first, before that time, and has not ended yet: taking
        a process down takes its time, in which its peers notice, and may end first."""
        found = []
        for local_rank, process in self._processes.items():
            said = read_failure_report(process.error_file)
            if said.ends_process and said.failed_at < before:
                who = (local_rank, process.worker.rank, process.pid)
                exit_ = WorkerExit(
                    *who,
                    returncode=said.exit_code or 1,
                    failed_at=said.failed_at,
                    is_still_exiting=True,
                )
                found.append(self._with_message(exit_, process, said))
        return min(found, key=lambda exit_: exit_.failed_at, default=None)

    def _with_message(
        self, found: WorkerExit, process: _Process, said: FailureReport
    ) -> WorkerExit:
        message, traceback = said.message_and_traceback
        # People find what is left of it there, unless that goes with us.
        stays = self._run_dir.kept or process.error_file.parent != process.folder
        return attrs.evolve(
            found,
            message=message,
            traceback=traceback,
            log_dir=str(process.error_file.parent) if stays else "",
            error_file=str(process.error_file) if stays and said.has_error_file else "",
            error_data=said.record,
        )

    def running(self) -> dict[int, str]:
        return {local: f"pid {p.pid}" for local, p in self._processes.items()}

    # -- what they are asked and tell ------------------------------------------------------------

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
        heard = self._channels.notify(notice)
        self._stopped = self._stopped or heard
        return heard

    def earliest_stop_call(self) -> int | None:
        return self._channels.earliest_stop_call()

    def stop_at_call(self, call: int, notice: StopNotice) -> None:
        self._channels.stop_at_call(call, notice)

    def heartbeats(self) -> Mapping[int, Heartbeat]:
        return self._channels.heartbeats()

    def final_heartbeats(self) -> Mapping[int, Heartbeat]:
        return self._channels.final_heartbeats()

    def dump_stacks(self, local_ranks: Collection[int], *, save: bool = False) -> Mapping[int, str]:
        asked, processes = self._channels.stack_dumpers(), dict(self._processes)
        ours = {n: processes[n].pid for n in asked if n in processes and n in local_ranks}
        stacks = stack_dump.collect_stacks(
            {local: (pid, *asked[local]) for local, pid in ours.items()}
        )
        if save:
            for local, text in stacks.items():
                stack_dump.append_to_stack_file(processes[local].error_file.parent, text)
        return stacks

    def stop(self, local_ranks: Collection[int], *, force: bool = False) -> None:
        self._stopped = self._stopped or bool(local_ranks)
        # A worker that stands still (SIGSTOP, a debugger) would not hear of SIGTERM alone.
        for number in (signal.SIGKILL,) if force else (signal.SIGTERM, signal.SIGCONT):
            for local_rank in local_ranks:
                if local_rank in self._processes:
                    self._sent.add((local_rank, number))
                    signal_group(self._processes[local_rank].pid, number)

    def kill_and_wait(self) -> None:
        self.stop(list(self._processes), force=True)
        deadline = monotonic() + KILL_TIMEOUT_S
        for local_rank, process in list(self._processes.items()):
            if process.process.exited.wait(max(0.0, deadline - monotonic())):
                self.reap(local_rank)
            else:
                # The supervisor continues to kill it when the agent has ended.
                log.error("pid %d survived SIGKILL", process.pid)
                del self._processes[local_rank]

    def close(self) -> None:
        self.kill_and_wait()
        self._output_thread.close()
        self._channels.close_all()
        self.snapshot_dir.remove()
        self._run_dir.remove()
        self._supervisor.close()
        self._loop.close()
