"""The process that starts an agent's workers, and cleans up when the agent has ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import is_alive
from test_local import Run, shell

from elasticlib.errors import WorkerStartError
from elasticlib.event_loop import EventLoop
from elasticlib.testing.waiting import wait_until
from elasticlib.workers import cleanup
from elasticlib.workers.supervisor_client import SupervisorClient

HAS_A_CHILD = "set -m; sleep 600 & echo $! > {file}.part; mv {file}.part {file}; exec sleep 600"


def start_with_child(run: Run, local_rank: int = 0, attempt: int = 0) -> tuple[int, int]:
    """Return the pids of a worker and of its child, which has a process group of its own."""
    file = run.folder / f"child-{attempt}"
    run.start(shell(HAS_A_CHILD.format(file=file)), attempt=attempt)
    wait_until("the child of the worker", file.exists)
    return pid_of(run, local_rank), int(file.read_text())


def pid_of(run: Run, local_rank: int = 0) -> int:
    return int(run.workers.running()[local_rank].removeprefix("pid "))


def find_supervisor(run: Run) -> int:
    return run.workers._supervisor.pid


def test_workers_end_with_a_killed_supervisor_and_others_start(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    worker, child = start_with_child(run)
    killed = find_supervisor(run)
    os.kill(killed, signal.SIGKILL)
    assert run.end().returncode == -signal.SIGKILL
    assert "the supervisor process was lost" in caplog.text
    # Its successor kills what the worker has left before it starts another one.
    run.start(shell("exit 3"), attempt=1)
    assert not is_alive(worker)
    assert not is_alive(child)
    assert find_supervisor(run) != killed
    assert run.end().returncode == 3


def test_a_supervisor_that_ends_is_replaced_while_no_worker_runs(run: Run) -> None:
    run.start(shell("exit 0"))
    assert run.end().succeeded
    killed = find_supervisor(run)
    os.kill(killed, signal.SIGKILL)
    wait_until("another supervisor", lambda: find_supervisor(run) != killed)
    run.start(shell("exit 3"), attempt=1)
    assert run.end().returncode == 3


def test_a_supervisor_that_does_not_answer_fails_the_request_and_no_healthy_worker(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elasticlib.workers.supervisor_client.REQUEST_TIMEOUT_S", 0.5)
    file = run.folder / "end"
    waits = shell(f"until [ -e {file} ]; do sleep 0.05; done; exit 4")
    run.start(waits)
    healthy = pid_of(run)
    stopped = find_supervisor(run)
    os.kill(stopped, signal.SIGSTOP)
    try:
        with pytest.raises(WorkerStartError, match="did not answer"):
            run.start(waits, count=2)
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert is_alive(healthy)
    # The request is undone when the supervisor runs again, and the next one is served.
    run.start(waits, count=2, attempt=1)
    assert pid_of(run) == healthy
    wait_until("two workers alone", lambda: len(sessions_below(stopped)) == 2)
    file.touch()
    assert [run.end().returncode, run.end().returncode] == [4, 4]


def sessions_below(pid: int) -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = cleanup.stat_fields(int(name))
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != b"Z" and int(fields[3]) == int(name):
            found.append(int(name))
    return found


def test_a_supervisor_that_never_answers_is_killed_once_it_has_no_worker(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elasticlib.workers.supervisor_client.REQUEST_TIMEOUT_S", 0.5)
    run.start(shell("exit 0"))
    assert run.end().succeeded
    stopped = find_supervisor(run)
    os.kill(stopped, signal.SIGSTOP)
    with pytest.raises(WorkerStartError, match="did not answer"):
        run.start(shell("exit 0"), attempt=1)
    run.start(shell("exit 3"), attempt=2)
    assert run.end().returncode == 3
    assert not is_alive(stopped)


@pytest.fixture
def supervisor() -> Iterator[SupervisorClient]:
    loop = EventLoop()
    client = SupervisorClient(loop, close_timeout=0.2)
    yield client
    client.close()
    loop.close()


def test_a_supervisor_that_stands_still_does_not_block_its_agent(
    supervisor: SupervisorClient, tmp_path: Path
) -> None:
    pid = supervisor.pid
    os.kill(pid, signal.SIGSTOP)
    for number in range(1000):  # more messages than the socket accepts
        supervisor.add_directory(str(tmp_path / f"none {number}"))
    os.kill(pid, signal.SIGCONT)


def test_a_registered_directory_is_removed_at_the_end_and_a_forgotten_one_stays(
    tmp_path: Path,
) -> None:
    loop = EventLoop()
    client = SupervisorClient(loop, close_timeout=30.0)
    for name in ("registered", "forgotten"):
        (tmp_path / name).mkdir()
        client.add_directory(str(tmp_path / name))
    client.remove_directory(str(tmp_path / "forgotten"))
    client.close()
    loop.close()
    assert [path.name for path in tmp_path.iterdir()] == ["forgotten"]


def test_a_supervisor_ignores_signals_from_its_first_moment(supervisor: SupervisorClient) -> None:
    pid = supervisor.pid
    for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(pid, number)
    assert supervisor.pid == pid
    assert is_alive(pid)


AGENT = """
import os, sys, signal, subprocess
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from test_local import Run, shell
from elasticlib.testing.waiting import wait_until
from elasticlib.workers.local_workers import LocalWorkers
"""
KILLED_AS_IT_REPLACES = f"""{AGENT}
folder = Path(sys.argv[2])
run = Run(folder)
run.workers = LocalWorkers(os.environ, start_method="spawn")
run.start(shell(sys.argv[3]))
wait_until("the child", (folder / "child").exists)
(folder / "run_dir").write_text(str(run.workers.run_dir))

class Last(subprocess.Popen):
    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        os.kill(os.getpid(), signal.SIGKILL)

subprocess.Popen = Last
os.kill(run.workers._supervisor.pid, signal.SIGKILL)
signal.pause()
"""


def test_a_supervisor_whose_agent_is_killed_as_it_starts_it_cleans_up_all(tmp_path: Path) -> None:
    waits = HAS_A_CHILD.format(file=tmp_path / "child")
    here = str(Path(__file__).parent)
    agent = [sys.executable, "-c", KILLED_AS_IT_REPLACES, here, str(tmp_path), waits]
    assert subprocess.run(agent, timeout=120).returncode == -signal.SIGKILL
    child = int((tmp_path / "child").read_text())
    run_dir = Path((tmp_path / "run_dir").read_text())
    wait_until("the child to end", lambda: not is_alive(child))
    wait_until("the directory to be removed", lambda: not run_dir.exists())


KILLED = f"""{AGENT}
folder = Path(sys.argv[2])
run = Run(folder).start(shell(sys.argv[3]))
wait_until("the child", (folder / "child").exists)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_worker_and_its_children_end_with_a_killed_agent(tmp_path: Path) -> None:
    waits = HAS_A_CHILD.format(file=tmp_path / "child")
    here = str(Path(__file__).parent)
    agent = [sys.executable, "-c", KILLED, here, str(tmp_path), waits]
    assert subprocess.run(agent, timeout=120).returncode == -signal.SIGKILL
    child = int((tmp_path / "child").read_text())
    wait_until("the child to end", lambda: not is_alive(child))


def test_a_session_whose_number_was_reused_is_left_alone() -> None:
    stranger = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        start_ticks = cleanup.process_start_ticks(stranger.pid)
        assert cleanup.kill_sessions({stranger.pid: start_ticks - 1}) == []
        assert stranger.poll() is None
        assert cleanup.kill_sessions({stranger.pid: start_ticks}) == []
        assert stranger.wait(30) == -signal.SIGKILL
    finally:
        stranger.kill()
        stranger.wait()
