"""Jobs of two workers or nodes on this machine, whose process groups can be waited for and timed.

A job runs under elasticrun or torchrun. Both launchers run the same worker program.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from results import Samples

from elasticlib.testing.waiting import wait_until

TESTS = Path(__file__).resolve().parent.parent
sys.path.append(str(TESTS))
from ports import free_port  # noqa: E402
from processes import find_children, is_alive  # noqa: E402

ALLREDUCE = str(TESTS / "programs" / "allreduce.py")
# Without the first variable, workers that torchrun restarts read values of the workers before them.
LAUNCHER_ENVIRONMENT = {
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
TIMEOUT_S = 60.0
# A change of membership that takes longer than this is counted as one that never happens.
MEMBERSHIP_TIMEOUT_S = 20.0

ELASTICRUN = ("elasticlib.launch",)
# The module of each launcher, and its flags.
LAUNCHERS = {
    "elasticrun": ELASTICRUN,
    "elasticrun, spawn": (*ELASTICRUN, "--start-method=spawn"),
    "torchrun": ("torch.distributed.run",),
}
# Each launcher has its own protocol, and the shortest last call that it accepts. torchrun only
# accepts whole seconds.
RENDEZVOUS_FLAGS = {
    "elasticrun": ("--rdzv-conf=last_call_timeout=0.1",),
    "elasticrun, spawn": ("--rdzv-conf=last_call_timeout=0.1",),
    "torchrun": ("--rdzv-backend=c10d", "--rdzv-conf=last_call_timeout=1"),
}


class JobError(TimeoutError):
    """A job did not form the expected group; `reason` is the text for the table."""

    def __init__(self, reason: str, details: str = "") -> None:
        super().__init__(f"{reason} {details}")
        self.reason = reason


class Job:
    """The nodes of one job, in a directory of their own.

    Args:
        launcher: The module of the launcher, and its flags.
        rendezvous_flags: The flags of all nodes that join the rendezvous.
        directory: The directory of the job, into which its workers write.
    """

    def __init__(
        self, launcher: tuple[str, ...], rendezvous_flags: tuple[str, ...], directory: Path
    ) -> None:
        self.directory = directory
        self.agents: list[subprocess.Popen[bytes]] = []  # the launcher processes, oldest first
        self._launcher, self._rendezvous_flags = launcher, rendezvous_flags
        self._environment = {**os.environ, **LAUNCHER_ENVIRONMENT, "TMPDIR": str(directory)}
        self._seen: set[str] = set()  # the files of groups that were returned before
        self._log = (directory / "log").open("wb")

    def start(self, *flags: str, program: str = ALLREDUCE, args: tuple[str, ...] = ()) -> None:
        """Start one more launcher process."""
        launch = [sys.executable, "-m", *self._launcher, *flags]
        command = [*launch, program, str(self.directory), *args]
        self.agents.append(
            subprocess.Popen(command, env=self._environment, stdout=self._log, stderr=self._log)
        )

    def start_node(self, *flags: str) -> None:
        """Start one more node of up to two, with one worker that runs a single all-reduce."""
        flags = ("--nnodes=1:2", "--rdzv-id=bench", "--local-addr=127.0.0.1", *flags)
        self.start(*flags, *self._rendezvous_flags, "--max-restarts=3", args=("once",))

    def wait_for_group(self, world: int, timeout_s: float = TIMEOUT_S) -> list[dict[str, Any]]:
        """Wait for a new process group of this size.

        Returns:
            The report of each rank, in the order of ranks.

        Raises:
            JobError: There is no such group within the timeout, or all launchers have exited.
        """

        def find_group() -> list[dict[str, Any]]:
            files = {path.name: path for path in self.directory.glob("report.*.json")}
            reports = [json.loads(files[name].read_text()) for name in files.keys() - self._seen]
            ranks = [r for r in reports if r["WORLD_SIZE"] == str(world) and is_alive(r["pid"])]
            ranks.sort(key=lambda report: int(report["RANK"]))
            if [int(report["RANK"]) for report in ranks] == list(range(world)):
                self._seen |= files.keys()
                return ranks
            if all(agent.poll() is not None for agent in self.agents):
                raise JobError("all launchers exited")
            return []

        try:
            return wait_until(f"a group of {world}", find_group, timeout_s)
        except JobError as error:
            raise JobError(error.reason, self._end_of_log()) from None
        except AssertionError as error:
            details = f"{error}\n{self._end_of_log()}"
            raise JobError(f"not within {timeout_s:g} s", details) from None

    def _end_of_log(self) -> str:
        return (self.directory / "log").read_text(errors="replace")[-2000:]

    def stop(self, timeout_s: float = 10.0) -> None:
        """Let the workers finish, and kill the nodes that still run after the timeout."""
        (self.directory / "finish").touch()
        deadline = time.monotonic() + timeout_s
        for agent in self.agents:
            try:
                agent.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.kill_node(agent)
        self._log.close()

    @staticmethod
    def kill_node(agent: subprocess.Popen[bytes]) -> None:
        """Kill a launcher and all of its descendants with SIGKILL.

        The guardian process of elasticrun is not killed, because it removes the files of a killed
        agent.
        """
        pids = [agent.pid]
        for pid in pids:
            with suppress(OSError):
                pids += find_children(pid)
        for pid in [pid for pid in pids if not _is_guardian(pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.wait()


def _is_guardian(pid: int) -> bool:
    try:
        return b"elasticlib.workers.guardian" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@contextmanager
def open_job(launcher: str) -> Iterator[Job]:
    """Yield a job without nodes, and stop it at the end of the block.

    Args:
        launcher: A key of LAUNCHERS. The first node that is started hosts the rendezvous store.
    """
    endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    flags = (*RENDEZVOUS_FLAGS[launcher], endpoint)
    with tempfile.TemporaryDirectory() as directory:
        job = Job(LAUNCHERS[launcher], flags, Path(directory))
        try:
            yield job
        finally:
            job.stop()


class Timings:
    """Samples by measurement and launcher, and the reasons of failed attempts."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str], list[float]] = defaultdict(list)
        self._failures: dict[tuple[str, str], list[str]] = defaultdict(list)

    def add(self, name: str, launcher: str, value: float) -> None:
        """Add one sample."""
        self._values[name, launcher].append(value)

    def add_elapsed(self, started_at: float, name: str, launcher: str) -> None:
        """Add the time from `started_at` until now."""
        self.add(name, launcher, time.monotonic() - started_at)

    @contextmanager
    def counting_failures(self, launcher: str, *names: str) -> Iterator[None]:
        """Count a JobError of the block as a failed attempt of these measurements, and raise it."""
        try:
            yield
        except JobError as error:
            for name in names:
                self._failures[name, launcher].append(error.reason)
            raise

    def time_group(
        self,
        name: str,
        launcher: str,
        job: Job,
        world: int,
        timeout_s: float = MEMBERSHIP_TIMEOUT_S,
    ) -> list[dict[str, Any]]:
        """Add the time from now until a new group of this size; return the reports of its ranks."""
        started_at = time.monotonic()
        with self.counting_failures(launcher, name):
            reports = job.wait_for_group(world, timeout_s)
        self.add_elapsed(started_at, name, launcher)
        return reports

    def samples(self, name: str, launcher: str, unit: str = "s") -> Samples:
        """Return the samples of one measurement of one launcher."""
        values, failures = self._values[name, launcher], self._failures[name, launcher]
        reason = ", ".join(dict.fromkeys(failures)) or ("" if values else "not tried")
        return Samples(unit, values, len(failures), reason)


def run_in_turns(launchers: Iterable[str], rounds: int, run: Callable[[str], None]) -> None:
    """Call `run` with each launcher in each round. A launcher that failed is not tried again."""
    remaining = list(launchers)
    for _ in range(rounds):
        for name in list(remaining):
            try:
                run(name)
            except JobError as error:
                print(f"{name}: {str(error)[:200]}", flush=True)
                remaining.remove(name)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that the current threads of a process have used so far."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


class StoreServer:
    """An `elasticlib store` process that runs during a `with` block, which receives its port."""

    def __enter__(self) -> int:
        command = [sys.executable, "-m", "elasticlib.launch.cli", "store"]
        self._process = subprocess.Popen(
            [*command, "--bind", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        return int(self._process.stdout.readline().split()[2].rpartition(":")[2])

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        self._process.communicate(timeout=TIMEOUT_S)
