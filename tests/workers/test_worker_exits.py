"""Detection of worker exits under resource limits, and the processes that workers leave."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator

import attrs
import pytest
from processes import is_alive
from worker_groups import GroupRunner, shell

from elasticlib.clock import monotonic
from elasticlib.errors import WorkerStartError
from elasticlib.testing.waiting import wait_until
from elasticlib.workers import cleanup
from elasticlib.workers.interface import StopHow
from elasticlib.workers.local_workers import LocalWorkers
from elasticlib.workers.spec import Command, WorkerSpec


def test_process_that_cannot_be_checked_counts_as_running() -> None:
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        assert not cleanup.wait_for_exit(process.pid, 0.0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        process.kill()
        assert cleanup.wait_for_exit(process.pid, 20.0)
        process.wait()
    assert cleanup.wait_for_exit(process.pid, 20.0)


@pytest.mark.parametrize("name", ["workers", "workers-output"])
def test_start_that_fails_for_lack_of_threads_leaves_no_worker_and_can_be_repeated(
    runner: GroupRunner, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    runner.set_output("0", "3")
    reason = r"can't start new thread.*raise that limit"
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(WorkerStartError, match=reason):
            runner.start(shell("exec sleep 600"), count=2)
        begin = monotonic()
        unused = LocalWorkers(os.environ)
        with contextlib.suppress(WorkerStartError):
            unused.start_fork_server(WorkerSpec(Command("true")))
        unused.close()
        assert monotonic() - begin < 5.0
    assert not runner.workers.view()
    runner.start(shell("exit 0"), attempt=1)
    assert runner.wait_for_exit().succeeded


def test_exits_are_seen_by_a_kernel_that_has_no_pidfds(
    runner: GroupRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSYS, "a kernel or a container without this system call")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    runner.start(shell("exit $RANK"), count=2)
    assert sorted(runner.wait_for_exit().returncode for _ in range(2)) == [0, 1]


def test_close_leaves_no_thread_and_no_open_file(runner: GroupRunner) -> None:
    def open_resources() -> set[str]:
        names = {thread.name for thread in threading.enumerate()}
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
                names.add(f"{number}: {os.readlink(f'/proc/self/fd/{number}')}")
        return names

    before = open_resources()
    runner.set_output("0", "3").start(shell("echo out; echo err >&2"), count=2)
    assert all(runner.wait_for_exit().succeeded for _ in range(2))
    assert {"workers", "workers-output"} <= open_resources()
    runner.workers.close()
    # Resources of earlier tests may be closed during this test, so only new ones are compared.
    wait_until("all new resources to be closed", lambda: not open_resources() - before)


# -- reads of /proc to find the processes that workers leave ---------------------------------------


@attrs.define
class ProcReads:
    """The reads of /proc by this process, from the audit events of the interpreter."""

    listings: list[str] = attrs.field(factory=list)  # names of threads that listed all processes
    files: list[str] = attrs.field(factory=list)  # paths of the files that were opened

    def record(self, event: str, args: tuple[object, ...]) -> None:
        path = str(args[0]) if args else ""
        if event == "os.listdir" and path == "/proc":
            self.listings.append(threading.current_thread().name)
        elif event == "open" and path.startswith("/proc/"):
            self.files.append(path)


@pytest.fixture
def reads() -> Iterator[ProcReads]:
    reads = ProcReads()
    is_recording = True

    def record(event: str, args: tuple[object, ...]) -> None:
        if is_recording:
            reads.record(event, args)

    sys.addaudithook(record)  # an audit hook cannot be removed
    yield reads
    is_recording = False


@pytest.fixture
def unrelated_pid() -> Iterator[int]:
    """The pid of a process in a session that does not belong to a worker."""
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as process:
        yield process.pid
        process.kill()


# A child in a process group of its own, which the signal to the worker's group does not reach.
# Other shells than bash need a terminal for this.
CHILD_IN_OWN_GROUP = ("bash", "-c", "set -m; sleep 600 & echo up; exec sleep 600")


def start_session_with_child() -> subprocess.Popen[bytes]:
    process = subprocess.Popen(CHILD_IN_OWN_GROUP, start_new_session=True, stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == b"up\n"
    assert len(cleanup.session_processes({process.pid})) == 2
    return process


def test_sessions_are_killed_together_with_two_listings_and_no_read_of_unrelated_processes(
    reads: ProcReads, unrelated_pid: int
) -> None:
    processes = [start_session_with_child() for _ in range(4)]
    reads.listings.clear()
    reads.files.clear()
    assert cleanup.kill_sessions({process.pid: 0 for process in processes}) == []
    # The first listing finds the children, and the second one finds no process any more.
    assert len(reads.listings) <= 2
    assert not [path for path in reads.files if path.startswith(f"/proc/{unrelated_pid}/")]
    assert not any(cleanup.session_processes({process.pid}) for process in processes)
    for process in processes:
        process.wait()


END_FIRST_THREAD = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def test_process_whose_first_thread_has_exited_still_belongs_to_its_session() -> None:
    command = [sys.executable, "-c", END_FIRST_THREAD]
    with subprocess.Popen(command, start_new_session=True) as process:
        wait_until("the first thread to end", lambda: cleanup.stat_fields(process.pid)[0] == b"Z")
        assert cleanup.session_processes({process.pid}) == [(process.pid, process.pid)]
        assert cleanup.kill_sessions({process.pid: 0}) == []
    assert cleanup.session_processes({process.pid}) == []


def test_agent_lists_processes_only_in_a_thread_of_its_own_when_workers_exit(
    runner: GroupRunner, reads: ProcReads, unrelated_pid: int
) -> None:
    runner.start(Command(CHILD_IN_OWN_GROUP[0], CHILD_IN_OWN_GROUP[1:]), count=4)
    pids = [runner.pid(local) for local in range(4)]
    wait_until(
        "each worker to have a child",
        lambda: all(len(cleanup.session_processes({pid})) == 2 for pid in pids),
    )
    reads.listings.clear()
    reads.files.clear()
    runner.stop(StopHow.KILL)
    assert {runner.wait_for_exit().signal for _ in pids} == {"SIGKILL"}
    wait_until("the sessions to be killed", lambda: not any(map(is_alive, pids)))
    assert set(reads.listings) <= {"workers-clean"}
    assert not [path for path in reads.files if path.startswith(f"/proc/{unrelated_pid}/")]
    runner.workers.close()
    assert not any(cleanup.session_processes({pid}) for pid in pids)
