"""Worker process: follows a worker of this machine from its start to the report of its exit.

Three threads use a worker, each with methods of its own: the agent's loop requests stops and reads
the worker's state; the output thread opens and reads its files, because their file system may hang;
and the thread `workers` does the rest. A lock guards what the loop and the thread `workers` share.
"""

from __future__ import annotations

import enum
import logging
import os
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from ..clock import monotonic, wall
from ..errors import ConfigError, require_not_none
from ..options import OutputOptions
from ..rendezvous.blame import find_cause
from ..threads import daemon_thread, start_thread
from .cleanup import signal_worker, stat_fields
from .error_file import FailureReport, message_and_traceback, read_error_file
from .exits import WorkerExit
from .interface import StopHow, StopNotice, WorkerView
from .node_resources import oom_kill_count_rose, read_oom_kill_count
from .output import OutputThread, WorkerOutput
from .output_plan import files_of
from .process_keeper import ProcessKeeper
from .process_setup import Job
from .run_dirs import RunDir
from .run_program import read_result
from .spec import (
    ASSIGNMENT_VARIABLES,
    Command,
    Function,
    Worker,
    WorkerSpec,
    make_program,
)
from .worker_channel import CHANNEL_ENV, WorkerChannel

log = logging.getLogger("elasticlib.workers")

FILES_TIMEOUT_S = 5.0  # for the files of an exited worker
VALUE_TIMEOUT_S = 120.0  # for the return value of a function, which may be large
ERROR_FILE, PAYLOAD_FILE, RESULT_FILE = "error.json", "payload.pickle", "result.pickle"
NEVER = float("inf")
_STAT_FLAGS = 6  # position of the flags in `stat_fields`
_PF_EXITING = 0x4  # the flag of a process that ends


class Stage(enum.Enum):
    """The stage of a worker's life."""

    OPENING_FILES = "opening files"  # in the output thread
    STARTING = "starting"  # its process is requested
    RUNNING = "running"
    EXITED = "exited"  # its process has exited, and its files are read
    REPORTED = "reported"


@attrs.define(eq=False)
class WorkerServices:
    """The objects and values that all workers of a node share."""

    lock: threading.RLock  # guards the fields of a worker that the agent's loop uses
    keeper: ProcessKeeper
    output_thread: OutputThread
    output_options: OutputOptions
    # The job of a worker, from its program, its variables and its local rank.
    make_job: Callable[[tuple[str, ...], dict[str, str], int], Job]
    may_fork: bool  # workers that run Python are forked
    run_dir: RunDir
    others: Callable[[], list[WorkerProcess]]  # all workers that have not been reported
    on_started: Callable[[], object]  # a worker has a process
    on_gone: Callable[[WorkerProcess], object]  # called with the lock before an exit is reported
    are_files_slow: bool = False  # the files of a worker could not be read in time
    oom_kill_count: int | None = None  # of this machine or cgroup at the last start

    def note_start(self) -> None:
        """Note that workers start now."""
        self.oom_kill_count = read_oom_kill_count()


@attrs.frozen
class Launch:
    """The values that all workers of one call of `LocalWorkers.start` share."""

    spec: WorkerSpec
    attempt: int
    payload: bytes  # of a function
    on_exit: Callable[[WorkerExit, str], object]


class WorkingDirectory:
    """The working directory of the agent at a start, open until all workers have been started."""

    def __init__(self) -> None:
        self.fd = os.open(".", os.O_PATH | os.O_DIRECTORY)

    def __del__(self) -> None:
        os.close(self.fd)


class WorkerProcess:
    """A worker. The sections of its methods name the threads that call them."""

    def __init__(
        self,
        common: WorkerServices,
        launch: Launch,
        worker: Worker,
        channel: WorkerChannel,
        *,
        environment: dict[str, str],
        working_directory: WorkingDirectory,
    ) -> None:
        self.worker, self.channel = worker, channel
        self.is_member = False
        self.stage = Stage.OPENING_FILES
        self._common = common
        self._launch: Launch = launch
        self._environment = environment
        # None once the process exists.
        self._working_directory: WorkingDirectory | None = working_directory
        self.directory: Path | None = None  # of its files, once they are open
        self._output: WorkerOutput | None = None
        self._pid = 0
        self._must_not_run = False  # it was stopped before it had a process
        # The wall-clock time of the first request to stop; infinity if it was already exiting.
        self._stop_requested_at: float | None = None
        self._sent_signals: set[int] = set()
        self._returncode, self._exited_at = 0, NEVER
        self._reason = ""  # what the agent knows of the cause of the exit
        self._reported = FailureReport()  # the failure that it has reported, once it has exited
        self._found: WorkerExit | None = None  # the exit, with the content of its files
        self._value: tuple[Any, str] | None = (None, "")  # None until it was read
        self._files_by = self._value_by = NEVER  # when the agent stops waiting for them

    @property
    def local_rank(self) -> int:
        return self.worker.local_rank

    @property
    def name(self) -> str:
        """The name of the process for logs. It is empty until there is a process."""
        return f"pid {self._pid}" if self._pid else ""

    # -- the agent's loop, with the lock ---------------------------------------------------------

    def assign(self, worker: Worker, environment: Mapping[str, str]) -> None:
        """Make the worker a member of a group. Raises OSError if its assignment is too long."""
        place = {name: environment[name] for name in ASSIGNMENT_VARIABLES if name in environment}
        try:
            self.channel.publish_assignment(place)
        except ValueError as error:
            raise OSError(str(error)) from error
        self.worker = worker
        self.note_start(is_member=True)

    def note_start(self, *, is_member: bool) -> None:
        """Note that a new group starts, and that no stop of this worker was requested since."""
        self.is_member, self._stop_requested_at = is_member, None
        self._sent_signals.clear()

    def begin(self) -> None:
        """Begin to start the process."""
        self._common.output_thread.call(self._open_files)

    def view(self, *, has_called_should_stop: bool) -> WorkerView:
        return self.channel.view(
            self.name, is_member=self.is_member, has_called_should_stop=has_called_should_stop
        )

    def notify(self, notice: StopNotice, call: int | None, deadline: float) -> None:
        """Request a save and an exit, or that the worker leaves its group."""
        if call is None:
            self.channel.request_stop(notice.reason, deadline)
        else:
            self.channel.set_stop_call(call, notice.reason, deadline)
        self._note_stop()

    def stop(self, how: StopHow) -> None:
        """Stop the worker by a way that is stronger than a notice."""
        if how is StopHow.LEAVE:
            return self.channel.request_leave()
        self._note_stop()
        if self.stage in (Stage.OPENING_FILES, Stage.STARTING):
            self._must_not_run = True
            self._sent_signals.add(signal.SIGKILL)
            self._common.keeper.post(self._cancel)
        elif self.stage is Stage.RUNNING:
            # A worker that is stopped (SIGSTOP, a debugger) receives SIGTERM only after SIGCONT.
            is_kill = how is StopHow.KILL
            for number in (signal.SIGKILL,) if is_kill else (signal.SIGTERM, signal.SIGCONT):
                self._sent_signals.add(number)
                signal_worker(self._pid, number)
        return None

    def _note_stop(self) -> None:
        if self._stop_requested_at is None:
            is_exiting = self.stage is Stage.EXITED or (self._pid and _is_exiting(self._pid))
            self._stop_requested_at = NEVER if is_exiting else wall()

    @property
    def stack_dumper(self) -> tuple[int, int, int] | None:
        """Session, process and descriptor for the stacks; None if the worker cannot write them."""
        pid, fd = self.channel.stack_dumper
        return (self._pid, pid, fd) if pid and self.stage is Stage.RUNNING else None

    # -- the output thread -----------------------------------------------------------------------

    def _open_files(self) -> None:
        common, launch, local = self._common, self._launch, self.local_rank
        if self._must_not_run:
            return
        try:
            directory = common.run_dir.create_worker_dir(launch.attempt, local)
            files = files_of(common.output_options, local, str(directory))
            if isinstance(launch.spec.entrypoint, Function):
                (directory / PAYLOAD_FILE).write_bytes(launch.payload)
            output = WorkerOutput(
                common.output_options, self.worker, launch.spec.role, files, common.output_thread
            )
        except Exception as error:
            text, is_unfit = str(error), isinstance(error, ConfigError)
            common.keeper.post(lambda: self._fail(text, is_unfit=is_unfit))
            return
        common.keeper.post(lambda: self._on_files_open(output, directory))

    def _read_files(self) -> None:
        """Read what the worker has written, and make the description of its exit."""
        if self._output is not None:
            self._output.drain()
        report = self._reported
        if self.directory is not None:
            report = read_error_file(self.directory / ERROR_FILE, report)
        found = self._describe(report)
        if found.returncode and not found.stop_was_requested:
            # A failing process needs time to exit. Its peers may notice the failure, and exit
            # before it.
            others = [one for one in self._common.others() if one is not self]
            in_progress = [one._failure_in_progress() for one in others]
            cause = find_cause((found, *(one for one in in_progress if one is not None)))
            found = found if cause is found else attrs.evolve(found, preceding_failure=cause)
        self._common.keeper.post(lambda: self._on_files_read(found))

    def _failure_in_progress(self) -> WorkerExit | None:
        """Return the failure that this worker has recorded, if it still exits from it."""
        with self._common.lock:
            directory = self.directory
            if directory is None or self.stage not in (Stage.RUNNING, Stage.EXITED):
                return None
            reported = FailureReport(*self.channel.failure)
        report = read_error_file(directory / ERROR_FILE, reported)
        if not report.ends_process:
            return None
        exit_ = WorkerExit(
            self.local_rank,
            self.worker.rank,
            self._pid,
            returncode=report.exit_code or 1,
            failed_at=report.failed_at,
            is_still_exiting=True,
        )
        return self._with_message(exit_, report)

    def _describe(self, report: FailureReport) -> WorkerExit:
        """Return the exit with all that is known of its cause."""
        code = self._returncode
        requested_at = NEVER if self._stop_requested_at is None else self._stop_requested_at
        failed_at = report.failed_at if report.ends_process else NEVER
        is_stopped = requested_at <= min(failed_at, self._exited_at) < NEVER
        found = WorkerExit(
            self.local_rank,
            self.worker.rank,
            self._pid,
            returncode=code,
            reason=self._reason,
            stop_was_requested=is_stopped,
            failed_before_stop=not is_stopped,
            code_in_progress=report.exit_code,
            signal_sent_by_agent=-code in self._sent_signals,
        )
        if code == 0 or not self._pid:
            return found
        oom_before = self._common.oom_kill_count
        return attrs.evolve(
            self._with_message(found, report),
            stderr_tail="" if self._output is None else self._output.tail(),
            out_of_memory=oom_kill_count_rose(oom_before, read_oom_kill_count()),
            failed_at=min(report.failed_at, self._exited_at),
        )

    def _with_message(self, found: WorkerExit, report: FailureReport) -> WorkerExit:
        message, traceback = message_and_traceback(report.record)
        # Paths are reported only if the files remain after the end of the run.
        directory = str(self.directory) if self.directory and self._common.run_dir.kept else ""
        return attrs.evolve(
            found,
            message=message,
            traceback=traceback,
            log_dir=directory,
            error_file=f"{directory}/{ERROR_FILE}" if directory and report.has_error_file else "",
            error_data=report.record,
        )

    # -- the thread `workers` --------------------------------------------------------------------

    def _on_files_open(self, output: WorkerOutput, directory: Path) -> None:
        working_directory = self._working_directory
        if self.stage is not Stage.OPENING_FILES or working_directory is None:
            return output.abandon()
        common, environment = self._common, self._environment
        common.are_files_slow = False
        self._output, self.directory = output, directory
        environment["TORCHELASTIC_ERROR_FILE"] = str(directory / ERROR_FILE)
        environment[CHANNEL_ENV] = self.channel.path
        payload, result = str(directory / PAYLOAD_FILE), str(directory / RESULT_FILE)
        program = make_program(self._launch.spec.entrypoint, self.local_rank, payload, result)
        job = common.make_job(program, environment, self.local_rank)
        self.stage = Stage.STARTING
        return common.keeper.request(
            self,
            job,
            outputs=output.targets,
            directory=working_directory.fd,
            may_fork=common.may_fork and program[0] != "command",
        )

    def on_started(self, pid: int) -> None:
        """Note that the process exists; called by the keeper."""
        with self._common.lock:
            self._pid, self.stage = pid, Stage.RUNNING
            if not isinstance(self._launch.spec.entrypoint, Command):
                self.channel.set_worker_pid(pid)
            if self._must_not_run:
                signal_worker(pid, signal.SIGKILL)
        self._working_directory = None
        if self._output is not None:
            self._output.attach()
        self._common.on_started()

    def on_start_failed(self, error: str) -> None:
        """Note that no process can be started; called by the keeper."""
        problem = self._common.keeper.fork_problem
        self._fail(error, is_unfit=bool(problem) and error == problem)

    def on_exited(self, code: int, reason: str) -> None:
        """Note that the process has exited; called by the keeper."""
        common, now = self._common, monotonic()
        with common.lock:
            self.stage = Stage.EXITED
        self._returncode, self._exited_at, self._reason = code, wall(), reason
        self._reported = FailureReport(*self.channel.failure)
        self._files_by = now + (0.0 if common.are_files_slow else FILES_TIMEOUT_S)
        common.output_thread.call(self._read_files)
        if code == 0 and isinstance(self._launch.spec.entrypoint, Function):
            self._read_value(now)

    def _read_value(self, now: float) -> None:
        """Read the value of a function in a thread, because unpickling runs code of the user."""
        self._value, self._value_by = None, now + VALUE_TIMEOUT_S
        path = require_not_none(self.directory, "the directory of the worker") / RESULT_FILE

        def read() -> None:
            value = read_result(path)
            self._common.keeper.post(lambda: self._on_value_read(value))

        def fail(error: str) -> None:
            self._common.keeper.post(lambda: self._on_value_read((None, error)))

        try:
            start_thread(daemon_thread(read, f"worker-{self.local_rank}-value", fail))
        except OSError as error:
            self._value = (None, str(error))

    def _on_value_read(self, value: tuple[Any, str]) -> None:
        self._value = self._value or value
        self._report_if_complete()

    def _on_files_read(self, found: WorkerExit) -> None:
        self._common.are_files_slow = False
        self._found = self._found or found
        self._report_if_complete()

    def _cancel(self) -> None:
        """Give up a worker that has no process, unless it is being forked."""
        if self.stage is Stage.OPENING_FILES or (
            self.stage is Stage.STARTING and self._common.keeper.drop(self)
        ):
            self._fail("")

    def _fail(self, reason: str, *, is_unfit: bool = False) -> None:
        """Report the exit of a worker that has no process."""
        if self.stage is Stage.REPORTED:
            return
        if self._output is not None:
            self._output.abandon()
        self._working_directory = None
        self._reason, self._exited_at = reason, wall()
        self._returncode = -signal.SIGKILL if self._must_not_run else 1
        self._found = self._describe(self._reported)
        self._report(reason if is_unfit else "")

    def fail_with_thread(self, reason: str) -> None:
        """Kill the worker and report that, because the thread has failed that watches it."""
        if self.stage is Stage.RUNNING:
            # The kernel does the same, unless the process was started only a moment ago.
            signal_worker(self._pid, signal.SIGKILL)
        if self.stage is not Stage.REPORTED:
            self._returncode, self._exited_at, self._reason = -signal.SIGKILL, wall(), reason
            self._found = self._describe(self._reported)
            self._report(reason)

    def tick(self, now: float, late_s: float) -> float:
        """Stop waiting for files if that is due; return when this must be called again."""
        if self.stage is not Stage.EXITED:
            return NEVER
        self._files_by += late_s
        self._value_by += late_s
        if self._found is None and now >= self._files_by:
            if not self._common.are_files_slow:
                log.warning(
                    "the files of rank %d could not be read within %g s; until their file system "
                    "answers, failures are reported without what workers have written",
                    *(self.worker.rank, FILES_TIMEOUT_S),
                )
            self._common.are_files_slow = True
            self._found = self._describe(self._reported)
        if self._value is None and now >= self._value_by:
            self._value = (None, f"it was not read within {VALUE_TIMEOUT_S:g} s")
        if self._report_if_complete():
            return NEVER
        return min(
            self._files_by if self._found is None else NEVER,
            self._value_by if self._value is None else NEVER,
        )

    def _report_if_complete(self) -> bool:
        if self.stage is Stage.EXITED and self._found is not None and self._value is not None:
            self._report("")
        return self.stage is Stage.REPORTED

    def _report(self, unfit: str) -> None:
        found = require_not_none(self._found, "the description of the exit")
        common, (value, unreadable) = self._common, self._value or (None, "")
        with common.lock:
            self.stage = Stage.REPORTED
            common.on_gone(self)
            heartbeat = self.channel.heartbeat()
            self.channel.close()
        exit_ = attrs.evolve(found, value=value, value_error=unreadable, heartbeat=heartbeat)
        self._launch.on_exit(exit_, unfit)


def _is_exiting(pid: int) -> bool:
    """Return whether the kernel is ending this process, which takes long if it has much memory."""
    try:
        return bool(int(stat_fields(pid)[_STAT_FLAGS]) & _PF_EXITING)
    except OSError:
        return True
