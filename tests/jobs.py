"""Real jobs for fault tests: started through the command line, killed by pid, and counted."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from getpass import getuser
from pathlib import Path
from typing import Any

import pytest
from ports import reserved_port
from processes import describe_process, find_processes, is_alive

from elasticlib.dir_lock import LOCK_FILE
from elasticlib.launch.cli import main
from elasticlib.observe.event import KINDS, Event, decode
from elasticlib.observe.runs import find_runs, runs_dir
from elasticlib.testing.waiting import DEFAULT_TIMEOUT_S, wait_until

PROGRAMS = Path(__file__).with_name("programs")
WORKER = str(PROGRAMS / "fault_worker.py")
# PYTHONPATH of agents whose workers use no torch: they need not wait two seconds for it either.
_PATHS = (str(PROGRAMS / "stub_torch"), os.environ.get("PYTHONPATH"))
WITHOUT_TORCH = os.pathsep.join(filter(None, _PATHS))
TAG = "ELASTICLIB_TEST_TAG"
PATIENT = ("--timeout", "30")
"""Of a question that all answer, which is over as soon as they have."""
CRASHES = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)
"""Signals of a process's own faults, by which a launcher ends only if a test sent them."""


def leftover_files(folder: Path) -> list[Path]:
    """What is there, but for the records that agents leave of their runs, and the folder that torch
    makes when what it compiles with is imported, as an optimizer's first step does."""
    found = folder.iterdir() if folder.exists() else ()
    stays = {runs_dir().name, f"torchinductor_{getuser()}"}
    return [path for path in found if path.name not in stays]


def forget_own_records(folder: Path, since: float) -> None:
    """Remove the records that runs in this process have left there since then."""
    for lock in folder.glob(f"*/{LOCK_FILE}"):
        with contextlib.suppress(OSError):  # whoever starts a run removes old ones, too
            if lock.stat().st_mtime >= since and lock.read_text() == f"{os.getpid()}\n":
                shutil.rmtree(lock.parent)


@pytest.fixture(autouse=True)
def _records() -> Iterator[None]:
    """A launch in this process leaves a record, where only the records of people's runs belong."""
    folder = runs_dir()
    before, since = _changed(folder), time.time()
    yield
    if _changed(folder) != before:
        forget_own_records(folder, since - 1.0)


def _changed(folder: Path) -> int:
    return folder.stat().st_mtime_ns if folder.exists() else 0


class Node:
    """One `elasticrun` (or other) process of a job."""

    def __init__(self, job: Job, name: str, command: list[str], extra: Mapping[str, str]) -> None:
        self.name = name
        self.log = job.folder / f"{name}.log"
        own = {TAG: job.tag, "NODE": name, "TMPDIR": str(job.shortcut), "PYTHONFAULTHANDLER": "1"}
        self._environment = {**os.environ, **own, **extra}
        self._sent: set[int] = set()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def signal(self, number: int) -> None:
        self._sent.add(number)
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL to this process alone: what it started must end by other means."""
        self.signal(signal.SIGKILL)
        self.process.wait(DEFAULT_TIMEOUT_S)

    def exit_code(self, seconds: float = DEFAULT_TIMEOUT_S) -> int:
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            told = f"{self.name} did not end:\n{self.text}\n{self.stacks()}"
            raise AssertionError(told) from None
        self.check_no_crash()
        return code

    def check_no_crash(self) -> None:
        """Fails if the process ended by a fault of its own; where, its log says."""
        number = -(self.process.poll() or 0)
        if number in CRASHES and number not in self._sent:
            name = signal.Signals(number).name
            raise AssertionError(f"{self.name} ended by {name}, which nobody sent:\n{self.text}")

    def stacks(self) -> str:
        """Where the job's workers are, if they can be asked."""
        command = (sys.executable, "-m", "elasticlib.launch.cli", "stacks")
        asked = subprocess.run(
            command, env=self._environment, capture_output=True, text=True, timeout=60, check=False
        )
        return asked.stdout + asked.stderr

    def wait_for_log(self, pattern: str) -> re.Match[str]:
        """Waits for a line in its log."""
        return wait_until(pattern, lambda: re.search(pattern, self.text), details=lambda: self.text)


class Job:
    """The nodes of one job, the folder in which its workers report, and its clean end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        self.tag = uuid.uuid4().hex
        # Sockets of loader workers lie there, whose paths must be short.
        self.shortcut = Path(tempfile.gettempdir()) / f"job-{self.tag[:8]}"
        self.shortcut.symlink_to(self.temporary)
        self.nodes: list[Node] = []
        self._held = contextlib.ExitStack()

    def start(self, name: str, *command: str, **extra: str) -> Node:
        node = Node(self, name, list(command), extra)
        self.nodes.append(node)
        return node

    def start_agent(
        self, name: str, *flags: str, worker: tuple[str, ...] = (), **extra: str
    ) -> Node:
        """An agent with these flags, running the fault worker."""
        return self.start(name, *self.agent_command(*flags, worker=worker), **extra)

    def agent_command(
        self,
        *flags: str,
        program: str = WORKER,
        worker: tuple[str, ...] = (),
        fields: Mapping[str, Any] | None = None,
    ) -> tuple[str, ...]:
        """The command line of an agent that runs a program which reports to this job; fields: of
        its config, beside what the flags say."""
        script = (program, str(self.folder), *worker)
        if program == WORKER and not any(flag.startswith("--start-method") for flag in flags):
            # It has no use for torch, which a fork server would import for two seconds.
            flags = ("--start-method=spawn", *flags)
        launch = ("-m", "elasticlib.launch")
        if fields is not None:
            launch = (str(PROGRAMS / "launch_with.py"), json.dumps(fields))
        return (sys.executable, *launch, *flags, *script)

    def reserve_port(self) -> int:
        """One that the kernel gives to nobody else until the job is closed, so that a server may
        come back to it."""
        return int(self._held.enter_context(reserved_port()).getsockname()[1])

    def start_store(self, *flags: str, at: int = 0) -> str:
        """A store of its own process, so that any node may die; returns its endpoint."""
        command = (sys.executable, "-m", "elasticlib.launch.cli")
        node = self.start("store", *command, "store", "--bind", f"127.0.0.1:{at}", *flags)
        return node.wait_for_log(r"(127\.0\.0\.1:\d+)").group(1)

    def reports(self, generation: int) -> list[dict[str, Any]]:
        """What the workers of a generation said, by rank."""
        files = self.folder.glob(f"report.{generation}.*.json")
        said = [json.loads(file.read_text()) for file in files]
        return sorted(said, key=lambda report: int(report["RANK"]))

    def wait_for_world(
        self, world: int, after: int = 0, seconds: float = DEFAULT_TIMEOUT_S
    ) -> list[dict[str, Any]]:
        """Waits for a generation past `after` in which `world` workers run."""

        def look() -> list[dict[str, Any]]:
            found = {int(f.name.split(".")[1]) for f in self.folder.glob("report.*.json")}
            for generation in sorted(found, reverse=True):
                reports = self.reports(generation)
                if (
                    generation > after
                    and [int(p["WORLD_SIZE"]) for p in reports] == [world] * world
                ):
                    return reports
            return []

        what = f"a world of {world} after generation {after}"
        return wait_until(what, look, seconds, details=lambda: self.logs)

    def check_unchanged(self, reports: list[dict[str, Any]], seconds: float) -> None:
        """These workers run for so long, and nobody starts others."""
        said = set(self.folder.glob("report.*.json"))
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert all(is_alive(int(report["pid"])) for report in reports), self.logs
            time.sleep(0.05)
        assert set(self.folder.glob("report.*.json")) == said, self.logs

    @property
    def logs(self) -> str:
        return "\n".join(f"-- {node.name}\n{node.text}" for node in self.nodes)

    def events(self, run: str = "") -> list[list[Event]]:
        """What each agent of the run with this id, or of the newest, has told, the one that began
        first in front; every line of it."""
        found = []
        for path in find_runs(run, directory=self.temporary / runs_dir().name):
            lines = path.read_bytes().splitlines()
            events = [decode(line) for line in lines]
            for event in events:
                assert set(event.data) == set(KINDS[event.kind]), event
            assert [event.monotonic for event in events] == sorted(
                event.monotonic for event in events
            )
            found.append(events)
        return found

    def run_command(self, *arguments: str, code: int | None = 0) -> tuple[str, str]:
        """What an `elasticlib` command, which ends with this code, says on stdout and stderr."""
        out, err = io.StringIO(), io.StringIO()
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            # Where the job's own processes keep their records.
            patch.setattr(tempfile, "tempdir", str(self.shortcut))
            try:
                found = main(arguments)
            except SystemExit as error:
                found = int(error.code or 0)
        assert code in (None, found), (found, out.getvalue(), err.getvalue())
        return out.getvalue(), err.getvalue()

    def status(self, *arguments: str, code: int | None = 0) -> dict[str, Any]:
        """What `elasticlib status` finds, once all have answered."""
        out, _ = self.run_command("status", "--json", *PATIENT, *arguments, code=code)
        found: dict[str, Any] = json.loads(out)
        return found

    def finish(self) -> None:
        """Tell all workers to end with success."""
        (self.folder / "finish").touch()

    def processes(self) -> set[int]:
        """All living processes that descend from this job, whoever their parent is now."""
        return find_processes(TAG, self.tag)

    def wait_until_gone(self, seconds: float = DEFAULT_TIMEOUT_S) -> None:
        """Waits until no process of the job is left."""

        def remaining() -> str:
            return "\n".join(describe_process(pid) for pid in sorted(self.processes()))

        what = "the job's processes to be gone"
        wait_until(what, lambda: not self.processes(), seconds, details=remaining)

    def reap(self) -> None:
        """Take note of the processes that have ended."""
        for node in self.nodes:
            node.process.poll()

    def close(self) -> None:
        """End what the test left; a test that ends well leaves its agents ended."""
        for node in self.nodes:
            if node.process.poll() is None:
                node.kill()
        # A failed test is one failure: the supervisors may first remove what the agents had.
        with contextlib.suppress(AssertionError):
            self.wait_until_gone(seconds=5.0)
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.shortcut.unlink(missing_ok=True)
        self._held.close()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """A job of which nothing is left, no process and no temporary file, however it ended."""
    job = Job(tmp_path)
    yield job
    job.close()
    job.wait_until_gone()
    for node in job.nodes:
        node.check_no_crash()
    assert not leftover_files(job.temporary)


def generation_of(reports: list[dict[str, Any]]) -> int:
    """The one generation that all of these workers are in."""
    (generation,) = {int(report["ELASTICLIB_GENERATION"]) for report in reports}
    return generation


def check_consistent_world(reports: list[dict[str, Any]]) -> None:
    """All agree on generation, master and size, hold the ranks 0..n-1, and replace the old."""
    generation_of(reports)
    assert [int(report["RANK"]) for report in reports] == list(range(len(reports)))
    assert len({(report["MASTER_ADDR"], report["MASTER_PORT"]) for report in reports}) == 1
    assert {int(report["WORLD_SIZE"]) for report in reports} == {len(reports)}
    assert not any(report["still_running"] for report in reports)
