"""Real jobs for fault tests: agents, started through the command line, and their workers."""

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

from elasticlib.checkpoint.refs import StateRef
from elasticlib.dir_lock import LOCK_FILE
from elasticlib.launch.cli import main
from elasticlib.observe.event import Event, decode
from elasticlib.observe.event_kinds import KINDS
from elasticlib.observe.runs import find_runs, runs_dir
from elasticlib.testing.waiting import DEFAULT_TIMEOUT_S, wait_until

PROGRAMS = Path(__file__).with_name("programs")
WORKER = str(PROGRAMS / "fault_worker.py")
# PYTHONPATH of agents whose workers do not use torch, so that the agents need not import it either.
_PATHS = (str(PROGRAMS / "stub_torch"), os.environ.get("PYTHONPATH"))
WITHOUT_TORCH = os.pathsep.join(filter(None, _PATHS))
TAG = "ELASTICLIB_TEST_TAG"
# Flags of commands that query all nodes. The commands return earlier if all nodes answer.
PATIENT = ("--timeout", "30")
# Signals that a launcher gets only because of a bug, unless a test sent them.
CRASHES = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)

NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc")  # runs a command as process 1


def lacks_pid_namespaces() -> bool:
    """Return True if this machine cannot run a command with NAMESPACE."""
    if shutil.which(NAMESPACE[0]) is None:
        return True
    return subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode != 0


def leftover_files(folder: Path) -> list[Path]:
    """Return the files in a directory, except those that may stay there after a job.

    These are the records of runs, and the cache directory that torch creates when its compiler is
    imported (for example by the first step of an optimizer).
    """
    paths = folder.iterdir() if folder.exists() else ()
    expected = {runs_dir().name, f"torchinductor_{getuser()}"}
    return [path for path in paths if path.name not in expected]


def remove_own_records(folder: Path, since: float) -> None:
    """Remove the records of runs of this process that are newer than `since`."""
    for lock in folder.glob(f"*/{LOCK_FILE}"):
        with contextlib.suppress(OSError):  # a new run may remove it at the same time
            if lock.stat().st_mtime >= since and lock.read_text() == f"{os.getpid()}\n":
                shutil.rmtree(lock.parent)


@pytest.fixture(autouse=True)
def _run_records() -> Iterator[None]:
    """Remove the records of launches in this process from the directory of the user's runs."""
    folder = runs_dir()
    before, since = _modified_at(folder), time.time()
    yield
    if _modified_at(folder) != before:
        remove_own_records(folder, since - 1.0)


def _modified_at(folder: Path) -> int:
    return folder.stat().st_mtime_ns if folder.exists() else 0


def owner_of(ref: StateRef) -> str:
    """Return the node that sent a snapshot, or an empty text if a worker of this node wrote it."""
    return ".".join(Path(ref.place).name.split(".")[1:-2])


class Node:
    """A process of a job: `elasticrun` or another program."""

    def __init__(self, job: Job, name: str, command: list[str], extra: Mapping[str, str]) -> None:
        self.name = name
        self.log = job.folder / f"{name}.log"
        variables = {
            TAG: job.tag,
            "NODE": name,
            "TMPDIR": str(job.shortcut),
            "PYTHONFAULTHANDLER": "1",
        }
        self._environment = {**os.environ, **variables, **extra}
        self._sent: set[int] = set()  # signals that the test has sent to it
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def text(self) -> str:
        """The log so far."""
        return self.log.read_text(errors="replace")

    def signal(self, number: int) -> None:
        self._sent.add(number)
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill only this process. Its children have to exit for another reason."""
        self.signal(signal.SIGKILL)
        self.process.wait(DEFAULT_TIMEOUT_S)

    def exit_code(self, seconds: float = DEFAULT_TIMEOUT_S) -> int:
        """Wait until the process exits, and return its exit code. A crash fails the test."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            message = f"{self.name} did not exit:\n{self.text}\n{self.stacks()}"
            raise AssertionError(message) from None
        self.check_no_crash()
        return code

    def check_no_crash(self) -> None:
        """Fail if the process crashed. The message contains its log, which shows the stack."""
        number = -(self.process.poll() or 0)
        if number in CRASHES and number not in self._sent:
            name = signal.Signals(number).name
            raise AssertionError(f"{self.name} crashed with {name}:\n{self.text}")

    def stacks(self) -> str:
        """Return the output of `elasticlib stacks` for the job."""
        command = (sys.executable, "-m", "elasticlib.launch.cli", "stacks")
        result = subprocess.run(
            command, env=self._environment, capture_output=True, text=True, timeout=60, check=False
        )
        return result.stdout + result.stderr

    def wait_for_log(self, pattern: str) -> re.Match[str]:
        """Wait until the log matches the pattern, and return the match."""
        return wait_until(pattern, lambda: re.search(pattern, self.text), details=lambda: self.text)


class Job:
    """The processes of a job, and the directory for the reports of its workers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        self.tag = uuid.uuid4().hex
        # The paths of sockets of data loaders must be short.
        self.shortcut = Path(tempfile.gettempdir()) / f"job-{self.tag[:8]}"
        self.shortcut.symlink_to(self.temporary)
        self.nodes: list[Node] = []
        self._reserved_ports = contextlib.ExitStack()

    def start(self, name: str, *command: str, **extra: str) -> Node:
        """Start a process. `extra` are environment variables."""
        node = Node(self, name, list(command), extra)
        self.nodes.append(node)
        return node

    def start_agent(
        self, name: str, *flags: str, worker: tuple[str, ...] = (), **extra: str
    ) -> Node:
        """Start an agent with these flags that runs fault_worker.py."""
        return self.start(name, *self.agent_command(*flags, worker=worker), **extra)

    def agent_command(
        self,
        *flags: str,
        program: str = WORKER,
        worker: tuple[str, ...] = (),
        fields: Mapping[str, Any] | None = None,
    ) -> tuple[str, ...]:
        """Return the command line of an agent whose workers report to this job.

        Args:
            *flags: flags of elasticrun.
            program: the script of the workers; its first argument is the directory of the job.
            worker: further arguments of the script.
            fields: values of LaunchOptions by path, which override those of the flags.
        """
        script = (program, str(self.folder), *worker)
        if program == WORKER and not any(flag.startswith("--start-method") for flag in flags):
            # The fork server would import torch, which takes two seconds and is not needed.
            flags = ("--start-method=spawn", *flags)
        launch = ("-m", "elasticlib.launch")
        if fields is not None:
            launch = (str(PROGRAMS / "launch_with_fields.py"), json.dumps(fields))
        return (sys.executable, *launch, *flags, *script)

    def reserve_port(self) -> int:
        """Return a port that no other program gets until the job is closed.

        A server can be stopped and started again at this port.
        """
        return int(self._reserved_ports.enter_context(reserved_port()).getsockname()[1])

    def start_store(self, *flags: str, at: int = 0) -> str:
        """Start `elasticlib store` for a test that kills any node, and return its endpoint."""
        command = (sys.executable, "-m", "elasticlib.launch.cli")
        node = self.start("store", *command, "store", "--bind", f"127.0.0.1:{at}", *flags)
        return node.wait_for_log(r"(127\.0\.0\.1:\d+)").group(1)

    def reports(self, generation: int) -> list[dict[str, Any]]:
        """Return the reports of the workers of a generation, by rank."""
        files = self.folder.glob(f"report.{generation}.*.json")
        reports = [json.loads(file.read_text()) for file in files]
        return sorted(reports, key=lambda report: int(report["RANK"]))

    def wait_for_world(
        self, world: int, after: int = 0, seconds: float = DEFAULT_TIMEOUT_S
    ) -> list[dict[str, Any]]:
        """Wait until `world` workers run in a generation after `after`; return their reports."""

        def find_generation() -> list[dict[str, Any]]:
            generations = {int(f.name.split(".")[1]) for f in self.folder.glob("report.*.json")}
            for generation in sorted(generations, reverse=True):
                reports = self.reports(generation)
                if (
                    generation > after
                    and [int(p["WORLD_SIZE"]) for p in reports] == [world] * world
                ):
                    return reports
            return []

        what = f"a world of {world} after generation {after}"
        return wait_until(what, find_generation, seconds, details=lambda: self.logs)

    def check_unchanged(self, reports: list[dict[str, Any]], seconds: float) -> None:
        """Check for so many seconds that these workers keep running and no others start."""
        files = set(self.folder.glob("report.*.json"))
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert all(is_alive(int(report["pid"])) for report in reports), self.logs
            time.sleep(0.05)
        assert set(self.folder.glob("report.*.json")) == files, self.logs

    @property
    def logs(self) -> str:
        return "\n".join(f"-- {node.name}\n{node.text}" for node in self.nodes)

    def events(self, run: str = "") -> list[list[Event]]:
        """Return all events of each agent of a run, the agent that started first in front.

        Args:
            run: id of the run. Default: the newest run.
        """
        agents = []
        for path in find_runs(run, directory=self.temporary / runs_dir().name):
            lines = path.read_bytes().splitlines()
            events = [decode(line) for line in lines]
            for event in events:
                assert set(event.data) == set(KINDS[event.kind]().data), event
            assert [event.monotonic for event in events] == sorted(
                event.monotonic for event in events
            )
            agents.append(events)
        return agents

    def run_command(self, *arguments: str, code: int | None = 0) -> tuple[str, str]:
        """Run an `elasticlib` command, check its exit code, and return its stdout and stderr."""
        out, err = io.StringIO(), io.StringIO()
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            # The records of the job's processes are in this temporary directory.
            patch.setattr(tempfile, "tempdir", str(self.shortcut))
            try:
                exit_code = main(arguments)
            except SystemExit as error:
                exit_code = int(error.code or 0)
        assert code in (None, exit_code), (exit_code, out.getvalue(), err.getvalue())
        return out.getvalue(), err.getvalue()

    def status(self, *arguments: str, code: int | None = 0) -> dict[str, Any]:
        """Return the result of `elasticlib status`, after all nodes have answered."""
        out, _ = self.run_command("status", "--json", *PATIENT, *arguments, code=code)
        status: dict[str, Any] = json.loads(out)
        return status

    def finish(self) -> None:
        """Make all workers exit with success."""
        (self.folder / "finish").touch()

    def processes(self) -> set[int]:
        """Return all running processes of the job, including those with another parent now."""
        return find_processes(TAG, self.tag)

    def wait_until_gone(self, seconds: float = DEFAULT_TIMEOUT_S) -> None:
        """Wait until all processes of the job have exited."""

        def describe_remaining() -> str:
            return "\n".join(describe_process(pid) for pid in sorted(self.processes()))

        what = "the processes of the job to exit"
        wait_until(what, lambda: not self.processes(), seconds, details=describe_remaining)

    def reap(self) -> None:
        """Reap the processes that have exited."""
        for node in self.nodes:
            node.process.poll()

    def close(self) -> None:
        """Kill all processes that the test has left."""
        for node in self.nodes:
            if node.process.poll() is None:
                node.kill()
        # After a failed test, the guardians get time to clean up; a second failure does not help.
        with contextlib.suppress(AssertionError):
            self.wait_until_gone(seconds=5.0)
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.shortcut.unlink(missing_ok=True)
        self._reserved_ports.close()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """A job for one test; the fixture checks that it leaves no process and no temporary file."""
    job = Job(tmp_path)
    yield job
    job.close()
    job.wait_until_gone()
    for node in job.nodes:
        node.check_no_crash()
    assert not leftover_files(job.temporary)


def generation_of(reports: list[dict[str, Any]]) -> int:
    """Return the generation of these workers, which must be the same for all."""
    (generation,) = {int(report["ELASTICLIB_GENERATION"]) for report in reports}
    return generation


def check_consistent_world(reports: list[dict[str, Any]]) -> None:
    """Check that the workers agree on generation, master and world size, and have ranks 0 to n-1.

    Their reports also show that the workers of earlier generations had been stopped.
    """
    generation_of(reports)
    assert [int(report["RANK"]) for report in reports] == list(range(len(reports)))
    assert len({(report["MASTER_ADDR"], report["MASTER_PORT"]) for report in reports}) == 1
    assert {int(report["WORLD_SIZE"]) for report in reports} == {len(reports)}
    assert not any(report["still_running"] for report in reports)
