"""Workers as processes of this machine, each the leader of a session.

Whether a worker is forked from a process that has imported torch or is started as a new
interpreter, it gets the same environment, and runs the same code up to the user's own. `keeper`
starts and ends the processes, and a `WorkerProcess` follows one worker from its start to its exit.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from ..clock import monotonic
from ..constants import SPAWN
from ..errors import ConfigError, WorkerStartError
from ..options import NO_ID, OutputOptions, WorkerOptions
from ..threads import daemon_thread, do_nothing, start_thread
from . import stack_dump
from .cleanup import process_name, session_processes
from .exits import WorkerExit
from .interface import StopHow, StopNotice, Workers, WorkerView
from .ledger import Ledger
from .node_resources import CpuSet, count_usable_cpus
from .output import OutputThread
from .process_keeper import PROCESS_ENTRY, ProcessKeeper
from .process_setup import Job
from .run_dirs import RunDir, SnapshotDir
from .run_program import make_payload
from .spec import (
    SNAPSHOTS_ENV,
    Command,
    Entrypoint,
    Function,
    Script,
    Worker,
    WorkerGroup,
    WorkerSpec,
    check_preload,
    common_environment,
    worker_environment,
)
from .worker_channel import CALLS_SETTLE_S, WorkerChannel
from .worker_process import Launch, WorkerProcess, WorkerServices, WorkingDirectory

log = logging.getLogger("elasticlib.workers")

KILL_TIMEOUT_S = 10.0  # limit for the exits of workers after SIGKILL, and for reading their files
CLOSE_TIMEOUT_S = 15.0  # limit for killing what workers have left, and for ending helper processes
FREE_MEMORY_TIMEOUT_S = 10.0  # limit for removing what killed agents have left in memory
BACKGROUND_POLL_INTERVAL_S = 0.1  # between two lists of what succeeded workers have started
UNKNOWN_CALL_INTERVAL_S = 0.005  # a worker is inside a call of `should_stop` for microseconds
NEVER = float("inf")


class LocalWorkers(Workers):
    """Workers that are processes of this machine.

    A worker that can regroup keeps its process in the next generation. Others are started again.

    Args:
        environment: variables that the workers inherit.
        options: how the workers are started: `start_method`, `preload` and `python`. How many
            there are is up to the `WorkerSpec`.
        output: which output of the workers is shown and which is written to files.
        run_id: part of the name of this run's directory.
        cpu_sets: processors of each worker by local rank. By default, workers use any processor.
        ignored_signals: signals that workers and their children ignore unless they set a handler.
    """

    reports_progress = True

    def __init__(
        self,
        environment: Mapping[str, str],
        *,
        options: WorkerOptions | None = None,
        output: OutputOptions | None = None,
        run_id: str = NO_ID,
        cpu_sets: Sequence[CpuSet] = (),
        ignored_signals: Iterable[int] = (),
    ) -> None:
        options, output = options or WorkerOptions(), output or OutputOptions()
        self._preload = options.preload
        self._environment = dict(environment)
        self._python, self._cpu_sets = options.python or sys.executable, tuple(cpu_sets)
        self._ignored_signals = tuple(sorted(ignored_signals))
        self._ledger = Ledger()
        kept = output.log_dir is not None or output.writes_files
        self._run_dir = RunDir(self._ledger, output.log_dir, run_id, kept=kept)
        self.snapshot_dir = SnapshotDir(self._ledger)
        self._keeper = ProcessKeeper(
            self._ledger,
            must_fork=bool(self._preload),
            on_tick=self._tick,
            on_error=self._on_error,
        )
        self._lock = threading.RLock()  # guards the fields below, and those of the workers
        self._changed = threading.Condition(self._lock)  # notified after each turn of the keeper
        self._common = WorkerServices(
            lock=self._lock,
            keeper=self._keeper,
            output_thread=OutputThread(self._on_error),
            output_options=output,
            make_job=self._make_worker_job,
            may_fork=options.start_method != SPAWN,
            run_dir=self._run_dir,
            others=self._alive_processes,
            on_started=lambda: self._on_change(),
            on_gone=self._remove,
        )
        self._alive: dict[int, WorkerProcess] = {}  # whose exits were not reported, by local rank
        self._wake_pipe: tuple[int, int] | None = None  # the pipe in which workers announce changes
        self._server_job: Job | None = None  # of the fork server for the next workers
        self._on_ready: Callable[[str], None] | None = None  # until it is called
        self._ready_by = NEVER
        self._on_change: Callable[[], None] = do_nothing
        self._has_called_should_stop = False  # a worker that has exited or regrouped did
        self._notice_deadline = NEVER  # of the last notice
        self._calls_at = NEVER  # when the calls of notified workers are looked at
        self._finish_until = -NEVER
        self._has_logged_wait = False  # for processes that succeeded workers have started
        self._on_finished: list[Callable[[], None]] = []  # to be called at the end of the wait
        self._failure = ""  # why no worker can be started any more
        self._is_closed = False
        # A step of `close` in the thread: whether it is done, and what is set then.
        self._step: tuple[Callable[[], bool], threading.Event] = (lambda: False, threading.Event())

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

    def start_fork_server(self, spec: WorkerSpec) -> None:
        """Start the fork server for these workers early, while the agent is still being made.

        Raises:
            ConfigError: these workers cannot be started on this node.
            WorkerStartError: no process can be started now.
        """
        try:
            self._start_threads()
            job = self._make_server_job(spec)
        except OSError as error:
            raise WorkerStartError(f"cannot prepare the start of workers: {error}") from error
        fields = ("command", "environment")
        before = self._server_job
        if job is None or (before is not None and all(before[n] == job[n] for n in fields)):
            return
        self._server_job = job
        self._keeper.post(lambda: self._keeper.prepare(job))

    def _make_server_job(self, spec: WorkerSpec) -> Job | None:
        """Return the job of the fork server for these workers, or None if they are not forked.

        Raises:
            ConfigError: these workers cannot be started with the modules of --preload.
            OSError: there is no memory for the ledger.
        """
        check_preload(self._preload, spec.entrypoint)
        if not self._common.may_fork or isinstance(spec.entrypoint, Command):
            return None
        # An interpreter or a library that reads a variable only at its start gets the value that
        # all workers have in common.
        environment = common_environment(spec, self._environment, count_usable_cpus())
        directory = _module_search_dir(spec.entrypoint) if self._preload else ""
        args = ("", "fork_server", str(self._ledger.fd), directory, *self._preload)
        return self._make_job(self._python_command(*args), environment, cpu_set=None)

    def _make_worker_job(
        self, program: tuple[str, ...], environment: dict[str, str], local_rank: int
    ) -> Job:
        cpu_set = self._cpu_sets[local_rank] if local_rank < len(self._cpu_sets) else None
        if program[0] == "command":
            return self._make_job(program[1:], environment, cpu_set)
        program = (environment["TORCHELASTIC_ERROR_FILE"], *program)
        job = self._make_job(self._python_command(*program), environment, cpu_set)
        return {**job, "program": program}

    def _make_job(
        self, command: tuple[str, ...], environment: dict[str, str], cpu_set: CpuSet | None
    ) -> Job:
        return {
            "command": command,
            "environment": environment,
            "cpu_set": sorted(os.sched_getaffinity(0) if cpu_set is None else cpu_set),
            "ignored": self._ignored_signals,
        }

    def _python_command(self, *args: str) -> tuple[str, ...]:
        return (self._python, "-u", PROCESS_ENTRY, *args)

    def prepare(
        self, spec: WorkerSpec, on_ready: Callable[[str], None], on_change: Callable[[], None]
    ) -> None:
        self._on_change = on_change
        try:
            self.start_fork_server(spec)
            self.snapshot_dir.start_cleaning(lambda: self._keeper.post(do_nothing))
        except ConfigError as error:
            return on_ready(str(error))
        except (OSError, WorkerStartError):
            return on_ready("")  # The start of the workers reports the same error.

        def wait() -> None:
            self._on_ready, self._ready_by = on_ready, monotonic() + FREE_MEMORY_TIMEOUT_S

        return self._keeper.post(wait)

    def _start_threads(self) -> None:
        """Start what all workers need. Raises OSError, WorkerStartError."""
        with self._lock:
            if self._is_closed or self._failure:
                raise WorkerStartError(self._failure or "these workers were closed")
            if self._wake_pipe is None:
                self._wake_pipe = pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
                self._keeper.post(lambda: self._keeper.thread.watch(pipe[0], self._on_woken))
        self._common.output_thread.start()
        self._keeper.start()

    def start(self, group: WorkerGroup, on_exit: Callable[[WorkerExit, str], None]) -> None:
        self.start_fork_server(group.spec)
        entrypoint = group.spec.entrypoint
        payload = make_payload(entrypoint) if isinstance(entrypoint, Function) else b""
        launch = Launch(group.spec, group.attempt, payload, on_exit)
        self._keeper.post(
            lambda: self._keeper.kill_background_processes("before workers start again")
        )
        with self._lock, ExitStack() as undo:
            try:
                new = self._make_processes(group, launch, undo)
            except OSError as error:
                raise WorkerStartError(f"cannot prepare the start of workers: {error}") from error
            undo.pop_all()
            self._common.note_start()
            self._notice_deadline = NEVER
            members = {worker.local_rank for worker in group.workers}
            for local, process in self._alive.items():
                process.note_start(is_member=local in members)
            self._alive.update((process.local_rank, process) for process in new)
            for process in new:
                process.begin()
        self._common.output_thread.call(lambda: self._remove_attempts(group.attempt))

    def _make_processes(
        self, group: WorkerGroup, launch: Launch, undo: ExitStack
    ) -> list[WorkerProcess]:
        """Give the running workers their assignments, and return those that are to be started.

        Raises:
            OSError: there is no memory or no descriptor for their channels.
        """
        snapshots = str(self.snapshot_dir.attempt_dir(group.attempt) or "")
        directory, wake_fd = WorkingDirectory(), (self._wake_pipe or (0, 0))[1]
        everyone = (*group.workers, *group.standby_workers)
        environments = {
            one.local_rank: self._environment_of(group, one, snapshots) for one in everyone
        }
        new = {}
        for worker in everyone:
            local = worker.local_rank
            if local not in self._alive:
                channel = WorkerChannel.create(wake_fd)
                undo.callback(channel.close)
                new[local] = WorkerProcess(
                    self._common,
                    launch,
                    worker,
                    channel,
                    environment=environments[local],
                    working_directory=directory,
                )
        for worker in group.workers:
            local = worker.local_rank
            process = new.get(local) or self._alive[local]
            self._has_called_should_stop |= process.channel.has_called_should_stop
            process.assign(worker, environments[local])
        return list(new.values())

    def _environment_of(self, group: WorkerGroup, worker: Worker, snapshots: str) -> dict[str, str]:
        environment = worker_environment(
            group, worker, self._environment, cores=count_usable_cpus()
        )
        # With an empty value, a retained worker does not use its previous directory.
        return {**environment, SNAPSHOTS_ENV: snapshots}

    def _remove_attempts(self, attempt: int) -> None:
        """Remove the directories of earlier attempts, in the output thread."""
        used = [process.directory for process in self._alive_processes()]
        kept = {self._run_dir.attempt_dir(attempt)}
        self._run_dir.remove_attempts(keep=kept | {path.parent for path in used if path})

    # -- running workers -------------------------------------------------------------------------

    def _alive_processes(self) -> list[WorkerProcess]:
        with self._lock:
            return list(self._alive.values())

    def view(self) -> Mapping[int, WorkerView]:
        with self._lock:
            has_called = self._has_called_should_stop
            return {
                local: process.view(has_called_should_stop=has_called)
                for local, process in self._alive.items()
            }

    def notify(self, notice: StopNotice, call: int | None = None) -> None:
        with self._lock:
            deadline = monotonic() + notice.grace_s
            if call is not None:
                deadline = min(self._notice_deadline, deadline)
            self._notice_deadline = deadline
            for process in self._alive.values():
                if process.is_member:
                    process.notify(notice, call, deadline)
        if call is None:
            self._keeper.post(self._look_at_calls)

    def _look_at_calls(self) -> None:
        self._calls_at = monotonic() + CALLS_SETTLE_S

    def stop(self, local_ranks: Collection[int], how: StopHow) -> None:
        with self._lock:
            for local_rank in local_ranks:
                if local_rank in self._alive:
                    self._alive[local_rank].stop(how)

    def dump_stacks(
        self,
        local_ranks: Collection[int],
        on_done: Callable[[Mapping[int, str]], None],
        *,
        save: bool = False,
    ) -> None:
        with self._lock:
            processes = {n: one for n, one in self._alive.items() if n in local_ranks}
            dumpers = {n: one.stack_dumper for n, one in processes.items()}

        def collect() -> None:
            found = {n: dumper for n, dumper in dumpers.items() if dumper is not None}
            stacks = stack_dump.collect_stacks(found)
            on_done(stacks)
            if save:
                self._common.output_thread.call(lambda: save_stacks(stacks))

        def save_stacks(stacks: Mapping[int, str]) -> None:
            for local, text in stacks.items():
                if (directory := processes[local].directory) is not None:
                    stack_dump.append_to_stack_file(directory, text)

        try:
            start_thread(daemon_thread(collect, "workers-stacks", lambda _: on_done({})))
        except OSError as error:
            log.warning("the stacks of the workers cannot be collected: %s", error)
            on_done({})

    # -- the thread `workers` --------------------------------------------------------------------

    def _tick(self, now: float, late_s: float) -> float:
        due = [NEVER, *(process.tick(now, late_s) for process in self._alive_processes())]
        if now >= self._calls_at:
            members = [one for one in self.view().values() if one.takes_notices]
            are_known = all(one.stop_call is not None for one in members)
            self._calls_at = NEVER if are_known else now + UNKNOWN_CALL_INTERVAL_S
            if are_known:
                self._on_change()
        if self._on_ready is not None and self._is_ready(now):
            on_ready, self._on_ready = self._on_ready, None
            problem = self._keeper.fork_problem if self._preload else ""
            on_ready(problem)
        with self._changed:
            self._changed.notify_all()
        is_done, done = self._step
        if is_done():
            done.set()
        if self._on_ready is not None and self._ready_by > now:
            due.append(self._ready_by)
        return min(*due, self._calls_at, self._wait_for_background(now))

    def _is_ready(self, now: float) -> bool:
        is_memory_free = not self.snapshot_dir.is_cleaning or now >= self._ready_by
        return is_memory_free and self._keeper.is_prepared

    def _on_woken(self) -> None:
        if self._wake_pipe is not None:
            with suppress(BlockingIOError):
                os.read(self._wake_pipe[0], 4096)
            self._on_change()

    def _remove(self, process: WorkerProcess) -> None:
        """Forget a worker whose exit is about to be reported. The caller has the lock."""
        self._has_called_should_stop |= process.channel.has_called_should_stop
        if self._alive.get(process.local_rank) is process:
            del self._alive[process.local_rank]

    def _on_error(self, reason: str) -> None:
        """Report that all workers end, because a thread has failed that they need."""
        with self._lock:
            self._failure = reason
            on_ready, self._on_ready = self._on_ready, None
        self._keeper.thread.end(0.0)
        for process in self._alive_processes():
            process.fail_with_thread(reason)
        self._report_finished()
        if on_ready is not None:
            on_ready(reason)

    # -- the end ---------------------------------------------------------------------------------

    def finish(self, until: float, on_done: Callable[[], None]) -> None:
        with self._lock:
            self._finish_until = until
            self._on_finished.append(on_done)
            is_running = self._keeper.thread.has_started and not (self._failure or self._is_closed)
        if is_running:
            self._keeper.post(do_nothing)  # wakes the thread
        else:
            self._report_finished()

    def _wait_for_background(self, now: float) -> float:
        """Report when succeeded workers have left no process; return when to look again."""
        if not self._on_finished:
            return NEVER
        sessions = self._keeper.background_sessions()
        left = [pid for pid, _ in session_processes(sessions)] if sessions else []
        if not left or now >= self._finish_until:
            self._report_finished()
            return NEVER
        if not self._has_logged_wait:
            self._has_logged_wait = True
            log.info(
                "the workers of this node have succeeded; waiting up to %.0f s for processes that "
                "they have started: %s",
                self._finish_until - now,
                ", ".join(f"{pid} ({process_name(pid)})" for pid in left),
            )
        return now + BACKGROUND_POLL_INTERVAL_S

    def _report_finished(self) -> None:
        with self._lock:
            callbacks, self._on_finished = self._on_finished, []
        for on_done in callbacks:
            on_done()

    def close(self, grace_s: float = 0.0) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        if self._keeper.thread.has_started:
            self._end_processes(grace_s)
        self._common.output_thread.close()
        self.snapshot_dir.remove()
        self._run_dir.remove()
        if self._keeper.thread.has_started:
            self._end_keeper()
        with self._lock:
            processes, self._alive = self._alive, {}
            for process in processes.values():
                process.channel.close()
            for fd in self._wake_pipe or ():
                os.close(fd)
            self._wake_pipe = None
        self._ledger.close()
        self._report_finished()

    def _end_processes(self, grace_s: float) -> None:
        """End all workers, what they have left, and the fork servers."""
        if grace_s > 0:
            self.stop(list(self._alive), StopHow.TERM)
            self._wait_for(lambda: not self._alive, grace_s)
        self.stop(list(self._alive), StopHow.KILL)
        self._wait_for(lambda: not self._alive, KILL_TIMEOUT_S)
        for process in self._alive_processes():
            # The guardian continues to kill it when the agent has exited.
            log.error(
                "worker of rank %d (%s) survived SIGKILL and may still use its GPU",
                *(process.worker.rank, process.name),
            )
        self._take_step(self._keeper.close_sessions, lambda: self._keeper.is_clean)
        self._take_step(self._keeper.close_servers, lambda: self._keeper.is_clean)

    def _end_keeper(self) -> None:
        """End the guardian and the thread."""
        self._take_step(self._keeper.end_guardian, lambda: self._keeper.is_guardian_done)
        self._keeper.thread.end(CLOSE_TIMEOUT_S)
        if self._failure:
            self._keeper.clean_up_after_failure()

    def _take_step(self, step: Callable[[], object], is_done: Callable[[], bool]) -> None:
        """Let the thread take a step of `close`, and wait until it is done after a turn."""
        done = threading.Event()

        def take() -> None:
            step()
            self._step = (is_done, done)

        self._keeper.post(take)
        if not self._failure:
            done.wait(CLOSE_TIMEOUT_S)

    def _wait_for(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Wait until a condition holds after a turn of the thread; return whether it holds."""
        with self._changed:
            return self._changed.wait_for(lambda: condition() or bool(self._failure), timeout)


def _module_search_dir(entrypoint: Entrypoint) -> str:
    """Return where Python looks first for the modules of a program. Raises ConfigError."""
    try:
        if isinstance(entrypoint, Script):
            return os.path.dirname(os.path.realpath(entrypoint.path))
        return os.getcwd()
    except FileNotFoundError as error:
        raise ConfigError(
            "preload (--preload) needs the working directory, which was removed: "
            "start the job in a directory that exists"
        ) from error
