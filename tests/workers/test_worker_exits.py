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
from worker_groups import GroupRunner, shell

from elasticlib.errors import WorkerStartError
from elasticlib.testing.waiting import wait_until
from elasticlib.workers import cleanup
from elasticlib.workers.spec import Command


def raise_enosys(*_: object) -> int:
    raise OSError(errno.ENOSYS, "a kernel or a container without this system call")


def test_process_that_cannot_be_checked_counts_as_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    monkeypatch.setattr(os, "pidfd_open", raise_enosys)
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


@pytest.mark.parametrize("prefix", ["event-loop", "workers-output"])
def test_start_that_fails_for_lack_of_threads_leaves_no_worker_and_can_be_repeated(
    runner: GroupRunner, monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(prefix):
            raise RuntimeError("can't start new thread")
        start(thread)

    runner.set_output("0", "3")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(WorkerStartError, match=r"can't start new thread.*raise that limit"):
            runner.start(shell("exec sleep 600"), count=2)
    assert not runner.workers.running()
    runner.start(shell("exit 0"), attempt=1)
    assert runner.wait_for_exit().succeeded


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
    assert "event-loop" in open_resources()
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


def test_agent_reads_no_files_of_other_processes_when_workers_exit(
    runner: GroupRunner, reads: ProcReads
) -> None:
    runner.start(Command(CHILD_IN_OWN_GROUP[0], CHILD_IN_OWN_GROUP[1:]), count=4)
    pids = [int(name.removeprefix("pid ")) for name in runner.workers.running().values()]
    wait_until(
        "each worker to have a child",
        lambda: all(len(cleanup.session_processes({pid})) == 2 for pid in pids),
    )
    reads.listings.clear()
    reads.files.clear()
    runner.workers.stop(runner.workers.running(), force=True)
    assert {runner.wait_for_exit().signal for _ in pids} == {"SIGKILL"}
    assert runner.workers._supervisor.wait_until_clean(60)
    assert not reads.listings
    processes = [path.split("/")[2] for path in reads.files]
    assert not [name for name in processes if name.isdigit() and int(name) not in pids]
    assert not any(cleanup.session_processes({pid}) for pid in pids)
