"""The fork server: its requests, and the workers of an agent that are forked from it."""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
from jobs import WITHOUT_TORCH
from processes import count_waits, find_children, is_alive, read_state
from worker_groups import GroupRunner

from elasticlib.errors import ConfigError
from elasticlib.options import OutputOptions, WorkerOptions
from elasticlib.testing.waiting import wait_until
from elasticlib.workers import fork_client, fork_server, local_workers, process_entry
from elasticlib.workers.ledger import HELPERS, Ledger
from elasticlib.workers.local_workers import LocalWorkers
from elasticlib.workers.spec import Script, WorkerSpec


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    """The ledger of an agent that has not started any process."""
    ledger = Ledger()
    yield ledger
    ledger.close()


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The two ends of the connection between an agent and its fork server."""
    agent_end, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with agent_end, server_end:
        yield agent_end, server_end


def server_command(ledger: Ledger) -> list[str]:
    entry = process_entry.__file__
    return [sys.executable, "-u", entry, "", "fork_server", str(ledger.fd), ""]


def test_failed_fork_leaves_no_descriptor_and_no_blocked_signal_in_the_fork_server(
    ends: tuple[socket.socket, socket.socket], ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> int:
        raise BlockingIOError(errno.EAGAIN, "limit of processes reached")

    connection = fork_server.Connection(ends[1])
    monkeypatch.setattr(fork_server, "_take_connection", lambda: connection)
    monkeypatch.setattr(os, "fork", fail)
    server = fork_server._ForkServer(ledger.fd, {signal.SIGUSR1: signal.SIG_DFL})
    gc.collect()  # Otherwise, garbage of other tests may close its descriptors during this test.
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(BlockingIOError):
        server._fork(1, [])
    assert signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert len(os.listdir("/proc/self/fd")) == before


def test_forked_process_that_cannot_begin_exits_with_the_reason(
    ends: tuple[socket.socket, socket.socket], ledger: Ledger, tmp_path: Path
) -> None:
    agent_end, server_end = ends
    environment = {**os.environ, "PYTHONPATH": WITHOUT_TORCH}
    with (
        open(tmp_path / "stderr", "w+b") as stderr,
        subprocess.Popen(
            server_command(ledger), stdin=server_end, pass_fds=[ledger.fd], env=environment
        ) as process,
    ):
        server_end.close()
        agent_end.settimeout(60)
        ready = {"kind": "ready", "pid": process.pid, "problem": ""}
        assert json.loads(agent_end.recv(4096)) == ready
        # A pipe instead of a file in memory has no size and no position to read from.
        reading, writing = os.pipe()
        directory = os.open(".", os.O_PATH)
        for number in (1, 2, 3):
            request = {"kind": "fork", "number": number, "num_descriptors": 5}
            descriptors = [reading, directory, 0, 1, stderr.fileno()]
            socket.send_fds(agent_end, [json.dumps(request).encode()], descriptors)
            started, exited = (json.loads(agent_end.recv(4096)) for _ in range(2))
            assert (started["kind"], started["number"]) == ("started", number)
            assert exited == {"kind": "exited", "number": number, "code": 127}
            assert ledger.session(HELPERS[1]) == {}
            agent_end.send(json.dumps({"kind": "reap", "number": number}).encode())
        wait_until("all forks to be reaped", lambda: find_children(process.pid) == [])
        for descriptor in (reading, writing, directory):
            os.close(descriptor)
        agent_end.shutdown(socket.SHUT_RDWR)
        assert process.wait(60) == 0
        assert (tmp_path / "stderr").read_text().count("OSError") == 3


def test_fork_server_without_an_agent_exits_without_output(
    ends: tuple[socket.socket, socket.socket], ledger: Ledger
) -> None:
    agent_end, server_end = ends
    agent_end.close()
    done = subprocess.run(
        server_command(ledger),
        stdin=server_end,
        pass_fds=[ledger.fd],
        env={**os.environ, "PYTHONPATH": WITHOUT_TORCH},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")


# -- with the workers of an agent ------------------------------------------------------------------

# Reports itself in the file report.RANK, and exits when the file exit.RANK exists.
REPORT_AND_WAIT = """
import os, sys, time
from pathlib import Path
directory, rank = Path(__file__).parent, os.environ["LOCAL_RANK"]
part = directory / f"part.{rank}"
part.write_text(f"{os.getpid()} {os.getppid()} {'torch._dynamo' in sys.modules}")
part.rename(directory / f"report.{rank}")
while not (directory / f"exit.{rank}").exists():
    time.sleep(0.01)
"""
# Texts of a deferred import.
FAIL = "raise RuntimeError('a file of the user has the name of a module')"
BLOCK = "open(__file__ + '.pipe').read()"
START_THREAD = """
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
"""
SHADOWING_MODULE = "class Profile: pass  # a module of the user with the name of one of Python's"


@attrs.frozen
class WorkerReport:
    """The report of a worker about itself."""

    pid: int
    parent: int
    has_deferred_imports: bool


class ForkedWorkers(GroupRunner):
    """Workers of a fork server that run until a test ends them; their torch is a fake module."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.script = directory / "script.py"
        self.script.write_text(REPORT_AND_WAIT)
        self.torch = directory / "modules" / "torch"
        self.torch.mkdir(parents=True)
        self.write_deferred_module("")
        (self.torch / "__init__.py").touch()
        os.mkfifo(self.torch / "_dynamo.py.pipe")
        self.set_preload()

    def set_preload(self, *preload: str) -> None:
        """Use another `LocalWorkers`, whose fork server preloads these modules."""
        self.workers = LocalWorkers(
            # The default of OMP_NUM_THREADS depends on the number of workers, which grows here.
            {**os.environ, "PYTHONPATH": str(self.torch.parent), "OMP_NUM_THREADS": "1"},
            output=OutputOptions(log_dir=str(self.directory / "logs")),
            options=WorkerOptions(preload=preload),
        )

    def write_deferred_module(self, text: str) -> None:
        """Let the last of the deferred imports run this text, after it has created a file."""
        create = f"open({str(self.directory / 'deferred')!r}, 'w').close()\n"
        (self.torch / "_dynamo.py").write_text(create + text)

    def grow(self, count: int) -> WorkerReport:
        """Start one more worker without stopping the others, and return its report."""
        rank = count - 1
        self.start(Script(str(self.script)), count, attempt=rank)
        report = self.directory / f"report.{rank}"
        wait_until(f"worker {rank} to start", report.exists)
        pid, parent, has_deferred_imports = report.read_text().split()
        return WorkerReport(int(pid), int(parent), has_deferred_imports == "True")

    def wait_for_deferred_imports(self) -> None:
        """Wait until an idle fork server has started the deferred imports."""
        wait_until("the deferred imports to start", (self.directory / "deferred").exists)

    def grow_until_second_server(self) -> tuple[int, WorkerReport]:
        """Return the number of workers and the first one that the second fork server started.

        One worker must run before the call. The second server imports the deferred modules; while
        it is not ready, the first server starts the next worker.
        """
        self.wait_for_deferred_imports()
        for count in range(2, 1000):
            report = self.grow(count)
            if report.has_deferred_imports:
                return count, report
        raise AssertionError("the second fork server never started a worker")

    def end_worker(self, rank: int) -> int:
        """Let a worker exit, and return its exit code."""
        (self.directory / f"exit.{rank}").touch()
        exit_ = self.wait_for_exit()
        assert exit_.local_rank == rank
        assert exit_.succeeded, exit_.describe()
        return exit_.returncode


@pytest.fixture
def forked(tmp_path: Path) -> Iterator[ForkedWorkers]:
    """Workers of a fork server; after the test, no process of them may be alive."""
    before = set(find_children(os.getpid()))
    forked = ForkedWorkers(tmp_path)
    yield forked
    forked.workers.close()
    remaining = set(find_children(os.getpid())) - before
    assert not any(map(is_alive, remaining))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (FAIL, "torch._dynamo cannot be imported: RuntimeError: a file of the user"),
        ("raise SystemExit(3)", "torch._dynamo cannot be imported: SystemExit: 3"),
        ("import os; os._exit(3)", "its process ended while it imported them"),
        (START_THREAD, "what was imported has started threads"),
        (BLOCK, ""),
    ],
    ids=["raises", "exits", "ends the process", "starts a thread", "does not end"],
)
def test_deferred_import_that_fails_or_blocks_affects_no_worker(
    forked: ForkedWorkers, caplog: pytest.LogCaptureFixture, text: str, reason: str
) -> None:
    forked.write_deferred_module(text)
    first = forked.grow(1)
    forked.wait_for_deferred_imports()
    with caplog.at_level(logging.INFO, "elasticlib.workers"):
        wait_until("the reason in the log", lambda: reason in caplog.text)
        second = forked.grow(2)
    assert is_alive(first.pid)
    assert second.parent == first.parent
    assert not second.has_deferred_imports
    assert [forked.end_worker(rank) for rank in (0, 1)] == [0, 0]
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == bool(reason), caplog.text


def test_later_workers_have_the_deferred_imports_and_earlier_ones_keep_their_parent(
    forked: ForkedWorkers,
) -> None:
    first = forked.grow(1)
    assert not first.has_deferred_imports
    count, later = forked.grow_until_second_server()
    assert later.parent != first.parent
    assert all(is_alive(pid) for pid in (first.pid, first.parent, later.pid))
    assert [forked.end_worker(rank) for rank in range(count)] == [0] * count
    forked.workers.close()
    assert not is_alive(later.parent)
    assert not is_alive(first.parent)


def test_killed_second_fork_server_ends_only_its_own_workers(
    forked: ForkedWorkers, caplog: pytest.LogCaptureFixture
) -> None:
    first = forked.grow(1)
    count, later = forked.grow_until_second_server()
    (forked.directory / f"report.{count - 1}").unlink()
    os.kill(later.parent, signal.SIGKILL)
    assert forked.wait_for_exit().returncode == -signal.SIGKILL
    # The first fork server still runs, and forks the next worker.
    replacement = forked.grow(count)
    assert replacement.parent == first.parent
    assert "fork server has exited" not in caplog.text
    assert is_alive(first.pid)
    ranks = range(count)
    assert [forked.end_worker(rank) for rank in ranks] == [0] * count


def test_earlier_fork_servers_exit_with_their_last_worker(
    forked: ForkedWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers of another environment need another fork server."""
    monkeypatch.setattr(local_workers, "count_usable_cpus", lambda: 8)
    monkeypatch.delitem(forked.workers._environment, "OMP_NUM_THREADS")
    first = forked.grow(1)
    forked.wait_for_deferred_imports()
    (second_server,) = set(find_children(first.parent)) - {first.pid}
    later = forked.grow(2)
    assert later.parent not in (first.parent, second_server)
    wait_until("the unused server to exit", lambda: not is_alive(second_server))
    assert is_alive(first.pid)
    os.kill(first.pid, signal.SIGKILL)
    assert forked.wait_for_exit().returncode == -signal.SIGKILL
    wait_until("the earlier server to exit", lambda: not is_alive(first.parent))
    assert forked.end_worker(1) == 0


def test_suspended_fork_server_is_continued(forked: ForkedWorkers) -> None:
    first = forked.grow(1)
    os.kill(first.parent, signal.SIGSTOP)
    second = forked.grow(2)
    assert second.parent == first.parent
    assert [forked.end_worker(rank) for rank in (0, 1)] == [0, 0]
    # Its pings notice the same while nothing is requested.
    os.kill(first.parent, signal.SIGSTOP)
    wait_until("the fork server to run", lambda: read_state(first.parent) != "T", timeout_s=30.0)


def test_fork_server_that_never_answers_is_killed_and_the_reason_says_so(
    forked: ForkedWorkers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def kill(pid: int, number: int) -> None:
        """Send a signal, except for SIGCONT: as if a debugger or a freezer held the process."""
        signals.append(number)
        if number != signal.SIGCONT:
            send(pid, number)

    signals: list[int] = []
    send = os.kill
    monkeypatch.setattr(fork_client, "KILL_AFTER_S", 2.0)
    first = forked.grow(1)
    with monkeypatch.context() as patched:
        patched.setattr(os, "kill", kill)
        send(first.parent, signal.SIGSTOP)
        exit_ = forked.wait_for_exit()
    assert signals[:2] == [signal.SIGCONT, signal.SIGKILL]
    reason = "its fork server did not answer for 2 s"
    assert exit_.exit_description == f"was killed by SIGKILL, because {reason}"
    assert exit_.has_failed
    wait_until("the worker to end", lambda: not is_alive(first.pid))
    assert "a fork server did not answer for 2 s, and is killed" in caplog.text
    (forked.directory / "report.0").unlink()
    assert is_alive(forked.grow(1).pid)
    assert forked.end_worker(0) == 0


PAUSED_AGENT = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[1:3]
from elasticlib.testing.waiting import wait_until
from elasticlib.workers import fork_client
from test_fork_server import ForkedWorkers

fork_client.KILL_AFTER_S, fork_client.PING_INTERVAL_S = 1.5, 0.2
forked = ForkedWorkers(Path(sys.argv[3]))
print(forked.grow(1).parent, flush=True)
exit_ = forked.wait_for_exit()
forked.workers.close()
print(exit_.describe(), flush=True)
"""


def test_pause_of_an_agent_is_not_held_against_its_fork_server(tmp_path: Path) -> None:
    """A freezer or `scontrol suspend` pauses both, and one of them runs first afterwards."""
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    command = [sys.executable, "-c", PAUSED_AGENT, *paths, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        server = int(agent.stdout.readline())
        wait_until("some pings", lambda: count_waits(server) > 0)
        for pid in (server, agent.pid):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(4.0)
        os.kill(agent.pid, signal.SIGCONT)
        time.sleep(0.3)
        os.kill(server, signal.SIGCONT)
        time.sleep(2.0)
        (tmp_path / "exit.0").touch()
        assert "exited with code 0" in agent.stdout.readline()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"torch/__init__.py": "import broken", "broken.py": "1 / 0"}, "ZeroDivisionError"),
        (
            {"torch/__init__.py": "import cProfile", "profile.py": SHADOWING_MODULE},
            "'profile' has no",
        ),
        ({"torch/__init__.py": "import no_such_module"}, "No module named 'no_such_module'"),
    ],
)
def test_workers_start_without_a_fork_server_if_torch_cannot_be_imported(
    forked: ForkedWorkers, caplog: pytest.LogCaptureFixture, files: dict[str, str], message: str
) -> None:
    for name, text in files.items():
        (forked.torch.parent / name).write_text(text)
    for count in (1, 2):
        assert forked.grow(count).parent == os.getpid()
    (record,) = (r for r in caplog.records if r.levelno >= logging.WARNING)
    warning = record.getMessage()
    prefix = "workers are started without the fork server: torch cannot be imported:"
    assert warning.startswith(prefix)
    assert message in warning
    assert "(raised in " in warning
    assert [forked.end_worker(rank) for rank in (0, 1)] == [0, 0]


def test_error_of_a_preload_names_the_module_that_a_file_of_the_user_shadows(
    forked: ForkedWorkers,
) -> None:
    (forked.directory / "user_module.py").write_text("import cProfile")
    (forked.directory / "profile.py").write_text(SHADOWING_MODULE)
    forked.set_preload("user_module")
    message = r"preload \(--preload\): user_module cannot be imported: AttributeError: .*'profile'"
    ready: queue.SimpleQueue[str] = queue.SimpleQueue()
    script = Script(str(forked.script))
    forked.workers.prepare(WorkerSpec(script), ready.put, lambda: None)
    assert re.search(message, ready.get(timeout=60))
    forked.start(script)
    assert re.search(message, forked.wait_until_unfit())


def test_workers_start_in_a_working_directory_that_was_removed(
    forked: ForkedWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "removed").mkdir()
    monkeypatch.chdir(tmp_path / "removed")
    reports = [forked.grow(1)]
    (tmp_path / "removed").rmdir()
    reports.append(forked.grow(2))
    assert reports[0].parent == reports[1].parent
    for report in reports:
        assert os.readlink(f"/proc/{report.pid}/cwd") == f"{tmp_path / 'removed'} (deleted)"
    assert [forked.end_worker(rank) for rank in (0, 1)] == [0, 0]


def test_preload_is_rejected_in_a_working_directory_that_was_removed(
    forked: ForkedWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "removed").mkdir()
    monkeypatch.chdir(tmp_path / "removed")
    (tmp_path / "removed").rmdir()
    forked.set_preload("user_module")
    with pytest.raises(ConfigError, match=r"working directory.*was removed"):
        forked.start(Script("script.py"))
