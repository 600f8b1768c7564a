"""How the end of a worker is learnt where the machine, or who hosts the agent, makes it hard."""

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
from test_local import Run, shell

from elasticlib.errors import WorkerStartError
from elasticlib.testing.waiting import wait_until
from elasticlib.workers import cleanup


def refused(*_: object) -> int:
    raise OSError(errno.ENOSYS, "as if the kernel, or a container, had none")


def test_what_cannot_be_looked_at_for_now_has_not_been_seen_to_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    monkeypatch.setattr(os, "pidfd_open", refused)
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
def test_where_no_thread_can_wait_for_workers_none_is_left_and_the_start_can_be_tried_again(
    run: Run, monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(prefix):
            raise RuntimeError("can't start new thread")
        start(thread)

    run.writing("0", "3")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(WorkerStartError, match=r"can't start new thread.*raise that limit"):
            run.start(shell("exec sleep 600"), count=2)
    assert not run.workers.running()
    run.start(shell("exit 0"), attempt=1)
    assert run.end().succeeded


def test_workers_that_are_closed_leave_no_thread_and_no_open_file(run: Run) -> None:
    def held() -> set[str]:
        names = {thread.name for thread in threading.enumerate()}
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # that of the listing itself
                names.add(f"{number}: {os.readlink(f'/proc/self/fd/{number}')}")
        return names

    before = held()
    run.writing("0", "3").start(shell("echo out; echo err >&2"), count=2)
    assert all(run.end().succeeded for _ in range(2))
    assert "event-loop" in held()
    run.workers.close()
    # What other tests left may end meanwhile, so it is asked for what has come.
    wait_until("all that was opened to be closed", lambda: not held() - before)


# -- what is read of /proc to find what workers have left ------------------------------------------


@attrs.define
class Reads:
    """What this process reads of /proc, as the interpreter's audit events tell it."""

    listings: list[str] = attrs.field(factory=list)
    """The names of the threads that have listed all processes."""
    files: list[str] = attrs.field(factory=list)

    def hear(self, event: str, args: tuple[object, ...]) -> None:
        path = str(args[0]) if args else ""
        if event == "os.listdir" and path == "/proc":
            self.listings.append(threading.current_thread().name)
        elif event == "open" and path.startswith("/proc/"):
            self.files.append(path)


@pytest.fixture
def reads() -> Iterator[Reads]:
    found = Reads()
    counting = True

    def hear(event: str, args: tuple[object, ...]) -> None:
        if counting:
            found.hear(event, args)

    sys.addaudithook(hear)  # which nobody can remove
    yield found
    counting = False


@pytest.fixture
def stranger() -> Iterator[int]:
    """The pid of a process that no session here is of."""
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as process:
        yield process.pid
        process.kill()


# A child in a process group of its own, which the signal to the worker's group does not reach.
HAS_A_CHILD = "set -m; sleep 600 & echo up; exec sleep 600"


def session_with_a_child() -> subprocess.Popen[bytes]:
    started = subprocess.Popen(
        ["sh", "-c", HAS_A_CHILD], start_new_session=True, stdout=subprocess.PIPE
    )
    assert started.stdout is not None
    with started.stdout:
        assert started.stdout.readline() == b"up\n"
    assert len(cleanup.session_processes({started.pid})) == 2
    return started


def test_sessions_are_ended_together_by_two_looks_that_open_no_strangers_file(
    reads: Reads, stranger: int
) -> None:
    started = [session_with_a_child() for _ in range(4)]
    reads.listings.clear()
    reads.files.clear()
    assert cleanup.kill_sessions({process.pid: 0 for process in started}) == []
    # One finds the children, and one that nobody is left.
    assert len(reads.listings) <= 2
    assert not [path for path in reads.files if path.startswith(f"/proc/{stranger}/")]
    assert not any(cleanup.session_processes({process.pid}) for process in started)
    for process in started:
        process.wait()


FIRST_THREAD_ENDS = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_process_whose_first_thread_has_ended_is_still_of_its_session() -> None:
    command = [sys.executable, "-c", FIRST_THREAD_ENDS]
    with subprocess.Popen(command, start_new_session=True) as process:
        wait_until("the first thread to end", lambda: cleanup.stat_fields(process.pid)[0] == b"Z")
        assert cleanup.session_processes({process.pid}) == [(process.pid, process.pid)]
        assert cleanup.kill_sessions({process.pid: 0}) == []
    assert cleanup.session_processes({process.pid}) == []


def test_an_agent_reads_nothing_of_other_processes_when_workers_exit(
    run: Run, reads: Reads
) -> None:
    run.start(shell(HAS_A_CHILD), count=4)
    pids = [int(name.removeprefix("pid ")) for name in run.workers.running().values()]
    wait_until(
        "each worker to have a child",
        lambda: all(len(cleanup.session_processes({pid})) == 2 for pid in pids),
    )
    reads.listings.clear()
    reads.files.clear()
    run.workers.stop(run.workers.running(), force=True)
    assert {run.end().signal for _ in pids} == {"SIGKILL"}
    assert run.workers._supervisor.wait_until_clean(60)
    assert not reads.listings
    assert not [path for path in reads.files if path.split("/")[2].isdigit()]
    assert not any(cleanup.session_processes({pid}) for pid in pids)
