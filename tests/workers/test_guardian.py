"""The guardian process and the ledger: nothing of an agent is left when it is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import find_guardian, is_alive
from worker_groups import GroupRunner, shell

from elasticlib.testing.waiting import wait_until
from elasticlib.workers import cleanup, guardian
from elasticlib.workers.ledger import HELPERS, WORKERS, Ledger, enter, read_directories
from elasticlib.workers.run_dirs import SnapshotDir

# Writes the pid of a child to a file. `timeout` gives itself a process group of its own, in the
# session of the worker.
WORKER_WITH_CHILD = (
    "timeout 600 sleep 600 & echo $! > {file}.part; mv {file}.part {file}; exec sleep 600"
)


def start_with_child(runner: GroupRunner, attempt: int = 0) -> tuple[int, int]:
    """Return the pids of a worker and of its child, which has a process group of its own."""
    file = runner.directory / f"child-{attempt}"
    runner.start(shell(WORKER_WITH_CHILD.format(file=file)), attempt=attempt)
    wait_until("the child of the worker", file.exists)
    child = int(file.read_text())
    wait_until("a process group of the child's own", lambda: os.getpgid(child) == child)
    return runner.pid(), child


def wait_for_guardian(other_than: int = 0) -> int:
    """Return the pid of the guardian of this process."""

    def find() -> int:
        found = find_guardian(os.getpid())
        return found if found != other_than and is_alive(found) else 0

    return wait_until("a guardian", find)


def test_killed_guardian_harms_no_worker_and_is_replaced(runner: GroupRunner) -> None:
    worker, child = start_with_child(runner)
    killed = wait_for_guardian()
    os.kill(killed, signal.SIGKILL)
    wait_for_guardian(other_than=killed)
    assert is_alive(worker)
    assert is_alive(child)
    runner.workers.close()
    assert runner.wait_for_exit().signal == "SIGKILL"
    assert not is_alive(child)
    assert not find_guardian(os.getpid())


def test_suspended_guardian_delays_nothing(runner: GroupRunner) -> None:
    runner.start(shell("exit 3"))
    assert runner.wait_for_exit().returncode == 3
    os.kill(wait_for_guardian(), signal.SIGSTOP)
    runner.start(shell("exit 4"), attempt=1)
    assert runner.wait_for_exit().returncode == 4
    runner.workers.close()
    assert not find_guardian(os.getpid())


def test_guardian_ignores_signals_directly_after_its_start(runner: GroupRunner) -> None:
    runner.start(shell("exit 0"))
    pid = wait_for_guardian()
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(pid, number)
    assert runner.wait_for_exit().succeeded
    assert is_alive(pid)


AGENT = """
import os, sys, signal, subprocess
sys.path[:0] = sys.argv[1:3]
from pathlib import Path
from processes import find_guardian
from worker_groups import GroupRunner, shell
from elasticlib.testing.waiting import wait_until
from elasticlib.workers.local_workers import LocalWorkers
directory = Path(sys.argv[3])
runner = GroupRunner(directory)
runner.workers = LocalWorkers(os.environ, options=WorkerOptions(start_method="spawn"))
runner.start(shell(sys.argv[4]))
wait_until("the child", (directory / "child").exists)
(directory / "run_dir").write_text(str(runner.workers.run_dir))
"""
KILL_AGENT = f"{AGENT}\nos.kill(os.getpid(), signal.SIGKILL)"
KILL_AGENT_WITH_FORK = f"""{AGENT}
if os.fork() == 0:
    signal.alarm(60)
    signal.pause()  # the fork has all open files of its parent
os.kill(os.getpid(), signal.SIGKILL)
"""
KILL_AGENT_DURING_REPLACEMENT = f"""{AGENT}
guardian = wait_until("the guardian", lambda: find_guardian(os.getpid()))

class KillAgentAfterStart(subprocess.Popen):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

subprocess.Popen = KillAgentAfterStart
os.kill(guardian, signal.SIGKILL)
signal.pause()
"""


@pytest.mark.parametrize(
    "program",
    [KILL_AGENT, KILL_AGENT_WITH_FORK, KILL_AGENT_DURING_REPLACEMENT],
    ids=["alone", "with a fork of it", "while it starts a guardian"],
)
def test_workers_their_children_and_directories_go_with_a_killed_agent(
    tmp_path: Path, program: str
) -> None:
    script = WORKER_WITH_CHILD.format(file=tmp_path / "child")
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    agent = [sys.executable, "-c", program, *paths, str(tmp_path), script]
    assert subprocess.run(agent, timeout=120).returncode == -signal.SIGKILL
    child = int((tmp_path / "child").read_text())
    run_dir = Path((tmp_path / "run_dir").read_text())
    wait_until("the child to end", lambda: not is_alive(child))
    wait_until("the directory to be removed", lambda: not run_dir.exists())


def test_ledger_has_what_was_entered_and_not_removed(tmp_path: Path) -> None:
    ledger = Ledger()
    assert ledger.is_empty
    slots = [ledger.take(), ledger.take(HELPERS)]
    assert slots == [WORKERS.start, HELPERS.start]
    assert ledger.session(slots[0]) == {}
    enter(ledger.fd, slots[0])
    own = {os.getpid(): cleanup.process_start_ticks(os.getpid())}
    assert ledger.session(slots[0]) == own
    for name in ("a", "a directory\nof two lines", "c"):
        ledger.add_directory(str(tmp_path / name))
    ledger.remove_directory(str(tmp_path / "a"))
    ledger.add_directory(str(tmp_path / "d"))
    assert {Path(path).name for path in read_directories(ledger.fd)} == {
        *("a directory\nof two lines", "c", "d")
    }
    with pytest.raises(OSError, match="no place for this directory"):
        ledger.add_directory("/" + 5000 * "x")
    with pytest.raises(PermissionError):
        os.ftruncate(ledger.fd, 10)
    for slot in slots:
        ledger.free(slot)
    assert ledger.session(slots[0]) == {}
    assert ledger.take() == slots[0]
    ledger.close()


def test_only_directories_in_the_ledger_are_removed_at_the_end(tmp_path: Path) -> None:
    ledger = Ledger()
    for name in ("registered", "unregistered"):
        (tmp_path / name).mkdir()
        ledger.add_directory(str(tmp_path / name))
    ledger.remove_directory(str(tmp_path / "unregistered"))
    guardian.clean_up(ledger.fd)
    ledger.close()
    assert [path.name for path in tmp_path.iterdir()] == ["unregistered"]


def test_snapshot_directory_is_in_the_ledger_while_it_is_in_use() -> None:
    snapshots = SnapshotDir(ledger := Ledger())
    attempt_dir = snapshots.attempt_dir(0)
    assert attempt_dir is not None
    assert read_directories(ledger.fd) == [str(attempt_dir.parent)]
    snapshots.remove()
    assert read_directories(ledger.fd) == []
    ledger.close()


def test_session_of_another_process_with_the_same_pid_is_not_killed() -> None:
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        start_ticks = cleanup.process_start_ticks(process.pid)
        assert cleanup.kill_sessions({process.pid: start_ticks - 1}) == []
        assert process.poll() is None
        assert cleanup.kill_sessions({process.pid: start_ticks}) == []
        assert process.wait(30) == -signal.SIGKILL
    finally:
        process.kill()
        process.wait()
