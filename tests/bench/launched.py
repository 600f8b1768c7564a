"""Jobs under either launcher, on this machine, whose process groups can be waited for and timed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from figures import Samples

from elasticlib.testing.waiting import wait_until

TESTS = Path(__file__).resolve().parent.parent
sys.path.append(str(TESTS))
from ports import free_port  # noqa: E402
from processes import find_children, is_alive  # noqa: E402

ALLREDUCE = str(TESTS / "programs" / "allreduce.py")
QUIET = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
BOUND = 60.0
PROBABLY_NEVER = 20.0
"""Seconds in which a membership that is going to change has changed, by far."""

OURS = ("elasticlib.launch",)
LAUNCHERS = {
    "elasticrun": OURS,
    "elasticrun, spawn": (*OURS, "--start-method=spawn"),
    "torchrun": ("torch.distributed.run",),
}
# Each by its own protocol, and with a short last call; torchrun's is in whole seconds.
MEETING = {
    "elasticrun": ("--rdzv-conf=last_call_timeout=0.1",),
    "elasticrun, spawn": ("--rdzv-conf=last_call_timeout=0.1",),
    "torchrun": ("--rdzv-backend=c10d", "--rdzv-conf=last_call_timeout=1"),
}


class Late(TimeoutError):
    """It did not come; `why`, as a table says it."""

    def __init__(self, why: str, more: str = "") -> None:
        super().__init__(f"{why} {more}")
        self.why = why


class Job:
    """The nodes of one job, in a folder of its own.

    launcher: a module and its flags. meeting: the flags by which nodes find each other.
    environment: variables beside this process's own.
    """

    def __init__(
        self,
        launcher: tuple[str, ...],
        meeting: tuple[str, ...],
        folder: Path,
        environment: Mapping[str, str],
    ) -> None:
        self.folder = folder
        self.agents: list[subprocess.Popen[bytes]] = []
        self._launcher, self._meeting = launcher, meeting
        self._environment = {**os.environ, **QUIET, "TMPDIR": str(folder), **environment}
        self._seen: set[str] = set()
        self._log = (folder / "log").open("wb")

    def start(self, *flags: str, program: str = ALLREDUCE, args: tuple[str, ...] = ()) -> None:
        """One more agent."""
        command = [sys.executable, "-m", *self._launcher, *flags, program, str(self.folder), *args]
        self.agents.append(
            subprocess.Popen(command, env=self._environment, stdout=self._log, stderr=self._log)
        )

    def join(self) -> None:
        """One more node of up to two, with one worker, which reduces but once."""
        flags = ("--nnodes=1:2", "--rdzv-id=bench", "--local-addr=127.0.0.1", *self._meeting)
        self.start(*flags, "--max-restarts=3", args=("once",))

    def up(self, world: int, seconds: float = BOUND) -> list[dict[str, Any]]:
        """Waits for a group of this size that was not there yet; what its ranks said, in order."""

        def look() -> list[dict[str, Any]]:
            files = {path.name: path for path in self.folder.glob("report.*.json")}
            reports = [json.loads(files[name].read_text()) for name in files.keys() - self._seen]
            here = [p for p in reports if p["WORLD_SIZE"] == str(world) and is_alive(p["pid"])]
            here.sort(key=lambda report: int(report["RANK"]))
            if [int(report["RANK"]) for report in here] == list(range(world)):
                self._seen |= files.keys()
                return here
            if all(agent.poll() is not None for agent in self.agents):
                raise Late("its agents ended")
            return []

        try:
            return wait_until(f"a group of {world}", look, seconds)
        except Late as error:
            raise Late(error.why, self._end_of_log()) from None
        except AssertionError as error:
            raise Late(f"not within {seconds:g} s", f"{error}\n{self._end_of_log()}") from None

    def _end_of_log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-2000:]

    def end(self, seconds: float = 10.0) -> None:
        (self.folder / "finish").touch()
        deadline = time.monotonic() + seconds
        for agent in self.agents:
            try:
                agent.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.lose(agent)
        self._log.close()

    @staticmethod
    def lose(agent: subprocess.Popen[bytes]) -> None:
        """SIGKILL to an agent and its workers, and to whatever else descends from it but our
        supervisor process, which removes the files of a killed agent."""
        below = [agent.pid]
        for pid in below:
            with suppress(OSError):
                below += find_children(pid)
        for pid in [pid for pid in below if not _is_supervisor(pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.wait()


def _is_supervisor(pid: int) -> bool:
    try:
        return b"elasticlib.workers.supervisor" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@contextmanager
def job(launcher: str) -> Iterator[Job]:
    """Of a launcher by its name; its TCP store is served by its first node."""
    endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    with job_of(LAUNCHERS[launcher], (*MEETING[launcher], endpoint)) as running:
        yield running


@contextmanager
def job_of(
    launcher: tuple[str, ...], meeting: tuple[str, ...], **environment: str
) -> Iterator[Job]:
    with tempfile.TemporaryDirectory() as folder:
        running = Job(launcher, meeting, Path(folder), environment)
        try:
            yield running
        finally:
            running.end()


class Times:
    """Samples by what was done and by who did it, and what became of the tries that failed."""

    def __init__(self) -> None:
        self._taken: dict[tuple[str, str], list[float]] = defaultdict(list)
        self._failed: dict[tuple[str, str], list[str]] = defaultdict(list)

    def note(self, what: str, who: str, value: float) -> None:
        self._taken[what, who].append(value)

    def since(self, began: float, what: str, who: str) -> None:
        self.note(what, who, time.monotonic() - began)

    @contextmanager
    def trying(self, who: str, *what: str) -> Iterator[None]:
        """Counts as failed what raises Late in the block, which is raised further."""
        try:
            yield
        except Late as error:
            for one in what:
                self._failed[one, who].append(error.why)
            raise

    def group(
        self, what: str, who: str, running: Job, world: int, seconds: float = PROBABLY_NEVER
    ) -> list[dict[str, Any]]:
        """Takes the time from now to a new group of so many, and returns what its ranks said."""
        began = time.monotonic()
        with self.trying(who, what):
            reports = running.up(world, seconds)
        self.since(began, what, who)
        return reports

    def of(self, what: str, who: str, unit: str = "s") -> Samples:
        taken, failed = self._taken[what, who], self._failed[what, who]
        why = ", ".join(dict.fromkeys(failed)) or ("" if taken else "not tried")
        return Samples(unit, taken, len(failed), why)


def in_turn(who: Iterable[str], rounds: int, one: Callable[[str], None]) -> None:
    """All that are named, in each round; one that is late is not tried again."""
    here = list(who)
    for _ in range(rounds):
        for name in list(here):
            try:
                one(name)
            except Late as error:
                print(f"{name}: {str(error)[:200]}", flush=True)
                here.remove(name)


def cpu_seconds(pid: int) -> float:
    """What the threads that a process has now have used so far."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


class Server:
    """An `elasticlib store` in a process of its own, for as long as the block lasts."""

    def __enter__(self) -> int:
        command = [sys.executable, "-m", "elasticlib.launch.cli", "store"]
        self._process = subprocess.Popen(
            [*command, "--bind", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        return int(self._process.stdout.readline().split()[2].rpartition(":")[2])

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        self._process.communicate(timeout=BOUND)
