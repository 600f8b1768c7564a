"""How the end of a worker is learnt where the machine, or who hosts the agent, makes it hard."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
import threading

import pytest
from test_local import Run, poll, shell

from elasticlib.errors import WorkerStartError
from elasticlib.workers import session


def refused(*_: object) -> int:
    raise OSError(errno.ENOSYS, "as if the kernel, or a container, had none")


def test_a_worker_is_not_taken_for_ended_where_it_can_only_be_looked_at(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pidfd_open", refused)
    end = run.folder / "end"
    # What it started is ended with it.
    run.start(shell(f"sleep 600 & until [ -e {end} ]; do sleep 0.01; done; exit 3"))
    (name,) = run.workers.running().values()
    pid = int(name.removeprefix("pid "))
    assert not session.ends_within(pid, 0.15)
    assert run.ends.empty()
    end.touch()
    assert run.end().returncode == 3
    assert session.members(pid) == []


def test_what_cannot_be_looked_at_for_now_has_not_been_seen_to_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    monkeypatch.setattr(os, "pidfd_open", refused)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        assert not session.ends_within(process.pid, 0.0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        process.kill()
        assert session.ends_within(process.pid, 20.0)
        process.wait()
    assert session.ends_within(process.pid, 20.0)


def test_a_worker_whose_exit_code_somebody_else_took_has_not_succeeded(run: Run) -> None:
    run.start(shell("exit 0"))
    (name,) = run.workers.running().values()
    os.waitpid(int(name.removeprefix("pid ")), 0)
    exit_ = run.end()
    assert (exit_.ok, exit_.failed, exit_.returncode) == (False, True, 1)
    assert "ended, but other code in the agent's process took its exit code" in exit_.describe()


@pytest.mark.parametrize("prefix", ["workers-loop", "workers-stderr"])
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
    assert run.end().ok


def test_workers_that_are_closed_leave_no_thread_and_no_open_file(run: Run) -> None:
    def held() -> set[str]:
        names = {thread.name for thread in threading.enumerate()}
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # that of the listing itself
                names.add(f"{number}: {os.readlink(f'/proc/self/fd/{number}')}")
        return names

    before = held()
    run.writing("0", "3").start(shell("echo out; echo err >&2"), count=2)
    assert all(run.end().ok for _ in range(2))
    assert "workers-loop" in held()
    run.workers.close()
    # What other tests left may end meanwhile, so it is asked for what has come.
    poll(lambda: not held() - before)
