"""The supervisor process, which starts the workers of an agent and cleans up after the agent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import find_children, is_alive
from worker_groups import GroupRunner, shell

from elasticlib.clock import monotonic
from elasticlib.errors import WorkerStartError
from elasticlib.event_loop import EventLoop
from elasticlib.testing.waiting import wait_until
from elasticlib.workers import cleanup
from elasticlib.workers.spec import Command
from elasticlib.workers.supervisor_client import SupervisorClient

CLIENT = "elasticlib.workers.supervisor_client"
# Writes the pid of a child to a file. `timeout` gives itself a process group of its own, in the
# session of the worker.
WORKER_WITH_CHILD = (
    "timeout 600 sleep 600 & echo $! > {file}.part; mv {file}.part {file}; exec sleep 600"
)


def start_with_child(runner: GroupRunner, local_rank: int = 0, attempt: int = 0) -> tuple[int, int]:
    """Return the pids of a worker and of its child, which has a process group of its own."""
    file = runner.directory / f"child-{attempt}"
    runner.start(shell(WORKER_WITH_CHILD.format(file=file)), attempt=attempt)
    wait_until("the child of the worker", file.exists)
    child = int(file.read_text())
    wait_until("a process group of the child's own", lambda: os.getpgid(child) == child)
    return runner.pid(local_rank), child


def find_supervisor(runner: GroupRunner) -> int:
    return runner.workers._supervisor.pid


def test_workers_exit_with_a_killed_supervisor_and_new_ones_can_start(
    runner: GroupRunner, caplog: pytest.LogCaptureFixture
) -> None:
    worker, child = start_with_child(runner)
    killed = find_supervisor(runner)
    os.kill(killed, signal.SIGKILL)
    assert runner.wait_for_exit().returncode == -signal.SIGKILL
    assert "the supervisor process was lost" in caplog.text
    # The next supervisor kills the remaining processes of the worker before it starts another one.
    runner.start(shell("exit 3"), attempt=1)
    assert not is_alive(worker)
    assert not is_alive(child)
    assert find_supervisor(runner) != killed
    assert runner.wait_for_exit().returncode == 3


def test_child_of_a_worker_is_killed_at_the_end_of_an_agent_whose_supervisor_was_killed(
    runner: GroupRunner,
) -> None:
    worker, child = start_with_child(runner)
    os.kill(find_supervisor(runner), signal.SIGKILL)
    os.kill(worker, signal.SIGKILL)
    runner.workers.close()
    assert not is_alive(child)


@pytest.mark.timeout(300)
def test_child_of_a_worker_is_killed_although_the_process_that_kills_it_is_killed_first(
    runner: GroupRunner,
) -> None:
    worker, child = start_with_child(runner)
    supervisor = find_supervisor(runner)
    others = set(find_children(supervisor))
    # On the same processor, the idle class lets the supervisor run only while this process waits,
    # so its child process is killed before it can list the processes.
    own_processors = os.sched_getaffinity(0)
    for pid in (0, supervisor):
        os.sched_setaffinity(pid, {min(own_processors)})
    os.sched_setscheduler(supervisor, os.SCHED_IDLE, os.sched_param(0))
    try:
        os.kill(worker, signal.SIGKILL)
        # In the idle class it gets little of a busy processor.
        limit = monotonic() + 200
        while not (killers := set(find_children(supervisor)) - others) and monotonic() < limit:
            os.sched_yield()
        (killer,) = killers
        os.kill(killer, signal.SIGKILL)
        assert is_alive(child)
    finally:
        os.sched_setscheduler(supervisor, os.SCHED_OTHER, os.sched_param(0))
        for pid in (0, supervisor):
            os.sched_setaffinity(pid, own_processors)
    assert runner.wait_for_exit().returncode == -signal.SIGKILL
    wait_until("the end of the child", lambda: not is_alive(child))


def test_killed_supervisor_is_replaced_while_no_worker_runs(runner: GroupRunner) -> None:
    runner.start(shell("exit 0"))
    assert runner.wait_for_exit().succeeded
    killed = find_supervisor(runner)
    os.kill(killed, signal.SIGKILL)
    wait_until("another supervisor", lambda: find_supervisor(runner) != killed)
    runner.start(shell("exit 3"), attempt=1)
    assert runner.wait_for_exit().returncode == 3


def start_without_answer(
    runner: GroupRunner, monkeypatch: pytest.MonkeyPatch, command: Command, **options: int
) -> None:
    """Start workers while the supervisor is suspended; the call must fail."""
    with monkeypatch.context() as patch:
        patch.setattr(f"{CLIENT}.REQUEST_TIMEOUT_S", 0.5)
        with pytest.raises(WorkerStartError, match="did not answer"):
            runner.start(command, **options)


def test_suspended_supervisor_fails_the_request_and_no_healthy_worker(
    runner: GroupRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = runner.directory / "end"
    wait_for_file = shell(f"until [ -e {file} ]; do sleep 0.05; done; exit 4")
    runner.start(wait_for_file)
    healthy = runner.pid()
    stopped = find_supervisor(runner)
    os.kill(stopped, signal.SIGSTOP)
    try:
        start_without_answer(runner, monkeypatch, wait_for_file, count=2)
        # A supervisor that did not answer has less time for the next request.
        monkeypatch.setattr(f"{CLIENT}.SHORT_REQUEST_TIMEOUT_S", 30.0)
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert is_alive(healthy)
    # The request is undone when the supervisor runs again, and the next one is served.
    runner.start(wait_for_file, count=2, attempt=1)
    assert runner.pid() == healthy
    wait_until("exactly two workers", lambda: len(find_child_sessions(stopped)) == 2)
    file.touch()
    assert [runner.wait_for_exit().returncode, runner.wait_for_exit().returncode] == [4, 4]


def find_child_sessions(pid: int) -> list[int]:
    """Return the children of a process that lead a session."""
    leaders = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = cleanup.stat_fields(int(name))
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != b"Z" and int(fields[3]) == int(name):
            leaders.append(int(name))
    return leaders


def test_supervisor_that_never_answers_is_killed_once_it_has_no_worker(
    runner: GroupRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner.start(shell("exit 0"))
    assert runner.wait_for_exit().succeeded
    stopped = find_supervisor(runner)
    os.kill(stopped, signal.SIGSTOP)
    start_without_answer(runner, monkeypatch, shell("exit 0"), attempt=1)
    runner.start(shell("exit 3"), attempt=2)
    assert runner.wait_for_exit().returncode == 3
    assert not is_alive(stopped)


@pytest.fixture
def supervisor() -> Iterator[SupervisorClient]:
    loop = EventLoop()
    client = SupervisorClient(loop, close_timeout=0.2)
    yield client
    client.close()
    loop.close()


def test_suspended_supervisor_does_not_block_its_agent_and_gets_all_messages_later(
    tmp_path: Path,
) -> None:
    (directory := tmp_path / "registered").mkdir()
    loop = EventLoop()
    client = SupervisorClient(loop, close_timeout=30.0)
    os.kill(client.pid, signal.SIGSTOP)
    start = monotonic()
    for number in range(1000):  # more messages than the socket accepts
        client.add_directory(str(tmp_path / f"missing {number}"))
    client.add_directory(str(directory))
    assert monotonic() - start < 10.0
    os.kill(client.pid, signal.SIGCONT)
    connection = client._connection
    assert connection is not None

    def send_queued_messages() -> bool:
        # Each later message also sends the queued ones.
        client.add_directory(str(directory))
        return not connection.has_unsent

    wait_until("all queued messages to be sent", send_queued_messages)
    client.close()
    loop.close()
    assert not directory.exists()


def test_only_registered_directories_are_removed_at_the_end(tmp_path: Path) -> None:
    loop = EventLoop()
    client = SupervisorClient(loop, close_timeout=30.0)
    for name in ("registered", "unregistered"):
        (tmp_path / name).mkdir()
        client.add_directory(str(tmp_path / name))
    client.remove_directory(str(tmp_path / "unregistered"))
    client.close()
    loop.close()
    assert [path.name for path in tmp_path.iterdir()] == ["unregistered"]


def test_supervisor_ignores_signals_directly_after_its_start(supervisor: SupervisorClient) -> None:
    pid = supervisor.pid
    for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(pid, number)
    assert supervisor.pid == pid
    assert is_alive(pid)


AGENT = """
import os, sys, signal, subprocess
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from worker_groups import GroupRunner, shell
from elasticlib.testing.waiting import wait_until
from elasticlib.workers.local_workers import LocalWorkers
"""
KILL_AGENT_DURING_REPLACEMENT = f"""{AGENT}
directory = Path(sys.argv[2])
runner = GroupRunner(directory)
runner.workers = LocalWorkers(os.environ, start_method="spawn")
runner.start(shell(sys.argv[3]))
wait_until("the child", (directory / "child").exists)
(directory / "run_dir").write_text(str(runner.workers.run_dir))

class KillAgentAfterStart(subprocess.Popen):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

subprocess.Popen = KillAgentAfterStart
os.kill(runner.workers._supervisor.pid, signal.SIGKILL)
signal.pause()
"""


def test_supervisor_whose_agent_is_killed_while_starting_it_cleans_up(tmp_path: Path) -> None:
    script = WORKER_WITH_CHILD.format(file=tmp_path / "child")
    tests = str(Path(__file__).parent)
    agent = [sys.executable, "-c", KILL_AGENT_DURING_REPLACEMENT, tests, str(tmp_path), script]
    assert subprocess.run(agent, timeout=120).returncode == -signal.SIGKILL
    child = int((tmp_path / "child").read_text())
    run_dir = Path((tmp_path / "run_dir").read_text())
    wait_until("the child to end", lambda: not is_alive(child))
    wait_until("the directory to be removed", lambda: not run_dir.exists())


KILL_AGENT = f"""{AGENT}
directory = Path(sys.argv[2])
runner = GroupRunner(directory).start(shell(sys.argv[3]))
wait_until("the child", (directory / "child").exists)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_worker_and_its_children_exit_with_a_killed_agent(tmp_path: Path) -> None:
    script = WORKER_WITH_CHILD.format(file=tmp_path / "child")
    tests = str(Path(__file__).parent)
    agent = [sys.executable, "-c", KILL_AGENT, tests, str(tmp_path), script]
    assert subprocess.run(agent, timeout=120).returncode == -signal.SIGKILL
    child = int((tmp_path / "child").read_text())
    wait_until("the child to end", lambda: not is_alive(child))


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
