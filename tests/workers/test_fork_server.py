"""The fork server: its requests, and the workers of an agent that are forked from it."""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
from jobs import WITHOUT_TORCH
from processes import find_children, is_alive
from worker_groups import GroupRunner

from elasticlib.errors import ConfigError
from elasticlib.testing.waiting import wait_until
from elasticlib.workers import fork_server, process_entry
from elasticlib.workers.local_workers import LocalWorkers
from elasticlib.workers.spec import Script
from elasticlib.workers.supervisor_protocol import socket_pair


@pytest.fixture
def links() -> Iterator[tuple[socket.socket, ...]]:
    """The supervisor's end of the socket of a fork server, and the two ends of the fork server."""
    supervisor_end, first = socket_pair()
    other, second = socket_pair()
    with supervisor_end, first, other, second:
        yield supervisor_end, first, second


def server_command(*server_ends: socket.socket) -> list[str]:
    numbers = [str(link.fileno()) for link in server_ends]
    return [sys.executable, "-u", process_entry.__file__, "", "fork_server", *numbers, ""]


def test_failed_fork_leaves_no_descriptor_and_no_blocked_signal_in_the_fork_server(
    links: tuple[socket.socket, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> int:
        raise BlockingIOError(errno.EAGAIN, "limit of processes reached")

    monkeypatch.setattr(os, "fork", fail)
    _, *server_ends = links
    server = fork_server._ForkServer(*server_ends, {signal.SIGUSR1: signal.SIG_DFL})
    gc.collect()  # Otherwise, garbage of other tests may close its descriptors during this test.
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(BlockingIOError):
        server._fork(1, [])
    assert signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert len(os.listdir("/proc/self/fd")) == before


def test_forked_process_that_cannot_start_reports_the_reason_and_exits(
    links: tuple[socket.socket, ...],
) -> None:
    supervisor_end, *server_ends = links
    numbers = [link.fileno() for link in server_ends]
    environment = {**os.environ, "PYTHONPATH": WITHOUT_TORCH}
    with subprocess.Popen(
        server_command(*server_ends), pass_fds=numbers, env=environment
    ) as process:
        for link in server_ends:
            link.close()
        supervisor_end.settimeout(60)
        assert json.loads(supervisor_end.recv(4096)) == {"problem": ""}
        # A pipe instead of a file in memory has no size and no position to read from.
        reading, writing = os.pipe()
        directory = os.open(".", os.O_PATH)
        for number in (1, 2, 3):
            request = json.dumps({"op": "fork", "number": number}).encode()
            socket.send_fds(supervisor_end, [request], [reading, directory, 0, 1, 2])
            answers = [json.loads(supervisor_end.recv(4096)) for _ in range(2)]
            assert answers[0]["number"] == number
            assert "the worker's process did not begin: " in answers[0]["error"]
            assert answers[1] == {"number": number, "code": 1}
            supervisor_end.send(json.dumps({"op": "reap", "number": number}).encode())
        wait_until("all forks to be reaped", lambda: find_children(process.pid) == [])
        for descriptor in (reading, writing, directory):
            os.close(descriptor)
        supervisor_end.shutdown(socket.SHUT_RDWR)
        assert process.wait(60) == 0


def test_fork_server_without_a_supervisor_exits_without_output(
    links: tuple[socket.socket, ...],
) -> None:
    supervisor_end, *server_ends = links
    supervisor_end.close()
    done = subprocess.run(
        server_command(*server_ends),
        pass_fds=[link.fileno() for link in server_ends],
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
            log_dir=str(self.directory / "logs"),
            preload=preload,
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
        return exit_.returncode


@pytest.fixture
def forked(tmp_path: Path) -> Iterator[ForkedWorkers]:
    """Workers of a fork server; after the test, no process of them may be alive."""
    forked = ForkedWorkers(tmp_path)
    before = set(find_children(os.getpid()))
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
    assert "fork server has ended" not in caplog.text
    assert is_alive(first.pid)
    ranks = range(count)
    assert [forked.end_worker(rank) for rank in ranks] == [0] * count


def test_suspended_fork_server_is_replaced_and_affects_no_running_worker(
    forked: ForkedWorkers,
) -> None:
    first = forked.grow(1)
    os.kill(first.parent, signal.SIGSTOP)
    try:
        second = forked.grow(2)
        assert second.parent != first.parent
        assert is_alive(first.pid)
    finally:
        os.kill(first.parent, signal.SIGCONT)
    assert [forked.end_worker(rank) for rank in (0, 1)] == [0, 0]


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
        assert forked.grow(count).parent == forked.workers._supervisor.pid
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
    with pytest.raises(ConfigError, match=message):
        forked.start(Script(str(forked.script)))


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
