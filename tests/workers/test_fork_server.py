"""The process that workers are forked from: by its parts, and with the workers of an agent."""

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
from test_local import Run

from elasticlib.errors import ConfigError
from elasticlib.testing.waiting import wait_until
from elasticlib.workers import fork_server, process_entry
from elasticlib.workers.local_workers import LocalWorkers
from elasticlib.workers.spec import Script
from elasticlib.workers.supervisor_protocol import socket_pair


@pytest.fixture
def links() -> Iterator[tuple[socket.socket, ...]]:
    """The supervisor's end of a fork server's socket, and both ends of the fork server."""
    ours, first = socket_pair()
    other, second = socket_pair()
    with ours, first, other, second:
        yield ours, first, second


def command(*theirs: socket.socket) -> list[str]:
    numbers = [str(link.fileno()) for link in theirs]
    return [sys.executable, "-u", process_entry.__file__, "", "fork_server", *numbers, ""]


def test_a_fork_that_fails_changes_nothing_in_the_fork_server(
    links: tuple[socket.socket, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> int:
        raise BlockingIOError(errno.EAGAIN, "as if at a limit of processes")

    monkeypatch.setattr(os, "fork", fail)
    _, *theirs = links
    server = fork_server._ForkServer(*theirs, {signal.SIGUSR1: signal.SIG_DFL})
    gc.collect()  # Garbage of other tests must not close its descriptors in between.
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(BlockingIOError):
        server._fork(1, [])
    assert signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_fork_that_cannot_begin_reports_why_and_ends(links: tuple[socket.socket, ...]) -> None:
    ours, *theirs = links
    numbers = [link.fileno() for link in theirs]
    environment = {**os.environ, "PYTHONPATH": WITHOUT_TORCH}
    with subprocess.Popen(command(*theirs), pass_fds=numbers, env=environment) as process:
        for link in theirs:
            link.close()
        ours.settimeout(60)
        assert json.loads(ours.recv(4096)) == {"problem": ""}
        # A pipe instead of a file in memory has no size and no position to read from.
        reading, writing = os.pipe()
        directory = os.open(".", os.O_PATH)
        for number in (1, 2, 3):
            request = json.dumps({"op": "fork", "number": number}).encode()
            socket.send_fds(ours, [request], [reading, directory, 0, 1, 2])
            answers = [json.loads(ours.recv(4096)) for _ in range(2)]
            assert answers[0]["number"] == number
            assert "the worker's process did not begin: " in answers[0]["error"]
            assert answers[1] == {"number": number, "code": 1}
            ours.send(json.dumps({"op": "reap", "number": number}).encode())
        wait_until("all forks to be reaped", lambda: find_children(process.pid) == [])
        for descriptor in (reading, writing, directory):
            os.close(descriptor)
        ours.shutdown(socket.SHUT_RDWR)
        assert process.wait(60) == 0


def test_a_fork_server_without_a_supervisor_ends_in_silence(
    links: tuple[socket.socket, ...],
) -> None:
    ours, *theirs = links
    ours.close()
    done = subprocess.run(
        command(*theirs),
        pass_fds=[link.fileno() for link in theirs],
        env={**os.environ, "PYTHONPATH": WITHOUT_TORCH},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")


# -- with the workers of an agent ------------------------------------------------------------------

STAYS = """
import os, sys, time
from pathlib import Path
folder, rank = Path(__file__).parent, os.environ["LOCAL_RANK"]
part = folder / f"part.{rank}"
part.write_text(f"{os.getpid()} {os.getppid()} {'torch._dynamo' in sys.modules}")
part.rename(folder / f"place.{rank}")
while not (folder / f"end.{rank}").exists():
    time.sleep(0.01)
"""
FAILS = "raise RuntimeError('as if a file of the user had the name of a module')"
BLOCKS = "open(__file__ + '.pipe').read()"
STARTS_A_THREAD = """
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
"""
SHADOWED = "class Profile: pass  # a module of the user that is named like one of Python's"


@attrs.frozen
class Place:
    pid: int
    parent: int
    has_deferred_imports: bool


class Fleet(Run):
    """Workers that stay until they are told to end; they find a torch that tests can spoil."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.script = folder / "script.py"
        self.script.write_text(STAYS)
        self.torch = folder / "modules" / "torch"
        self.torch.mkdir(parents=True)
        self.defer("")
        (self.torch / "__init__.py").touch()
        os.mkfifo(self.torch / "_dynamo.py.pipe")
        self.warm()

    def warm(self, preload: tuple[str, ...] = ()) -> Fleet:
        self.workers = LocalWorkers(
            # What all workers have in common does not depend on their number, which grows.
            {**os.environ, "PYTHONPATH": str(self.torch.parent), "OMP_NUM_THREADS": "1"},
            log_dir=str(self.folder / "logs"),
            preload=preload,
        )
        return self

    def defer(self, text: str) -> None:
        """The last one of the deferred imports runs this text, once it has said that it begins."""
        begins = f"open({str(self.folder / 'begun')!r}, 'w').close()\n"
        (self.torch / "_dynamo.py").write_text(begins + text)

    def grow(self, count: int) -> Place:
        """Start one worker more, and keep the others; the place of the new one."""
        rank = count - 1
        self.start(Script(str(self.script)), count, attempt=rank)
        place = self.folder / f"place.{rank}"
        wait_until(f"worker {rank} to start", place.exists)
        pid, parent, deferred = place.read_text().split()
        return Place(int(pid), int(parent), deferred == "True")

    def await_deferred_imports(self) -> None:
        """Until they have begun, which they do in a fork server that is idle."""
        wait_until("the deferred imports to begin", (self.folder / "begun").exists)

    def grow_until_second_server(self) -> tuple[int, Place]:
        """Return the number of workers and the first one that the second fork server started.

        One worker must run before the call. The second server imports the deferred modules; while
        it is not ready, the first server starts the next worker.
        """
        self.await_deferred_imports()
        for count in range(2, 1000):
            place = self.grow(count)
            if place.has_deferred_imports:
                return count, place
        raise AssertionError("the second fork server never started a worker")

    def end_one(self, rank: int) -> int:
        """Tell a worker to end; its exit code."""
        (self.folder / f"end.{rank}").touch()
        exit_ = self.end()
        assert exit_.local_rank == rank
        return exit_.returncode


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path)
    before = set(find_children(os.getpid()))
    yield fleet
    fleet.workers.close()
    left = set(find_children(os.getpid())) - before
    assert not any(map(is_alive, left))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (FAILS, "torch._dynamo cannot be imported: RuntimeError: as if a file of the user"),
        ("raise SystemExit(3)", "torch._dynamo cannot be imported: SystemExit: 3"),
        ("import os; os._exit(3)", "its process ended while it imported them"),
        (STARTS_A_THREAD, "what was imported has started threads"),
        (BLOCKS, ""),
    ],
    ids=["raises", "exits", "ends the process", "starts a thread", "does not end"],
)
def test_a_deferred_import_that_fails_or_blocks_affects_no_worker(
    fleet: Fleet, caplog: pytest.LogCaptureFixture, text: str, reason: str
) -> None:
    fleet.defer(text)
    first = fleet.grow(1)
    fleet.await_deferred_imports()
    with caplog.at_level(logging.INFO, "elasticlib.workers"):
        # A request that the server cannot answer would be given up after this time.
        wait_until("the reason in the log", lambda: reason in caplog.text)
        second = fleet.grow(2)
    assert is_alive(first.pid)
    assert second.parent == first.parent
    assert not second.has_deferred_imports
    assert [fleet.end_one(rank) for rank in (0, 1)] == [0, 0]
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == bool(reason), caplog.text


def test_deferred_imports_are_for_later_workers_and_the_first_ones_keep_their_parent(
    fleet: Fleet,
) -> None:
    first = fleet.grow(1)
    assert not first.has_deferred_imports
    count, later = fleet.grow_until_second_server()
    assert later.parent != first.parent
    assert all(is_alive(pid) for pid in (first.pid, first.parent, later.pid))
    assert [fleet.end_one(rank) for rank in range(count)] == [0] * count
    fleet.workers.close()
    assert not is_alive(later.parent)
    assert not is_alive(first.parent)


def test_a_second_fork_server_that_is_killed_ends_only_its_own_workers(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    first = fleet.grow(1)
    count, later = fleet.grow_until_second_server()
    (fleet.folder / f"place.{count - 1}").unlink()
    os.kill(later.parent, signal.SIGKILL)
    assert fleet.end().returncode == -signal.SIGKILL
    # The first fork server, which still runs, forks the next worker.
    again = fleet.grow(count)
    assert again.parent == first.parent
    assert "fork server has ended" not in caplog.text
    assert is_alive(first.pid)
    ranks = range(count)
    assert [fleet.end_one(rank) for rank in ranks] == [0] * count


def test_a_fork_server_that_does_not_answer_delays_the_worker_that_is_started_and_no_other(
    fleet: Fleet,
) -> None:
    first = fleet.grow(1)
    os.kill(first.parent, signal.SIGSTOP)
    try:
        second = fleet.grow(2)
        assert second.parent != first.parent
        assert is_alive(first.pid)
    finally:
        os.kill(first.parent, signal.SIGCONT)
    assert [fleet.end_one(rank) for rank in (0, 1)] == [0, 0]


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"torch/__init__.py": "import broken", "broken.py": "1 / 0"}, "ZeroDivisionError"),
        ({"torch/__init__.py": "import cProfile", "profile.py": SHADOWED}, "'profile' has no"),
        ({"torch/__init__.py": "import no_such_module"}, "No module named 'no_such_module'"),
    ],
)
def test_a_torch_that_cannot_be_imported_is_named_with_its_error_and_workers_start_without_it(
    fleet: Fleet, caplog: pytest.LogCaptureFixture, files: dict[str, str], sentence: str
) -> None:
    for name, text in files.items():
        (fleet.torch.parent / name).write_text(text)
    for count in (1, 2):
        assert fleet.grow(count).parent == fleet.workers._supervisor.pid
    (record,) = (r for r in caplog.records if r.levelno >= logging.WARNING)
    said = record.getMessage()
    assert said.startswith("workers are started without the fork server: torch cannot be imported:")
    assert sentence in said
    assert "(raised in " in said
    assert [fleet.end_one(rank) for rank in (0, 1)] == [0, 0]


def test_a_preload_that_meets_a_file_of_the_user_by_a_modules_name_says_so(fleet: Fleet) -> None:
    (fleet.folder / "mine.py").write_text("import cProfile")
    (fleet.folder / "profile.py").write_text(SHADOWED)
    fleet.warm(("mine",))
    sentence = r"preload \(--preload\): mine cannot be imported: AttributeError: .*'profile'"
    with pytest.raises(ConfigError, match=sentence):
        fleet.start(Script(str(fleet.script)))


def test_workers_start_in_a_working_directory_that_was_removed(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    places = [fleet.grow(1)]
    (tmp_path / "gone").rmdir()
    places.append(fleet.grow(2))
    assert places[0].parent == places[1].parent
    for place in places:
        assert os.readlink(f"/proc/{place.pid}/cwd") == f"{tmp_path / 'gone'} (deleted)"
    assert [fleet.end_one(rank) for rank in (0, 1)] == [0, 0]


def test_a_preload_is_refused_in_a_working_directory_that_was_removed(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    fleet.warm(("mine",))
    with pytest.raises(ConfigError, match=r"working directory.*was removed"):
        fleet.start(Script("script.py"))
