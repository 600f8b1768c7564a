"""Jobs under either launcher, on this machine, whose process groups can be waited for."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAMS = Path(__file__).parent.parent / "programs"
ALLREDUCE = str(PROGRAMS / "allreduce.py")
QUIET = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
BOUND = 60.0

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


class Ended(TimeoutError):
    """Nobody is left of whom the awaited could come."""


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
        command = [sys.executable, "-m", *self._launcher, *flags, program]
        self.agents.append(
            subprocess.Popen(
                [*command, str(self.folder), *args],
                env=self._environment,
                stdout=self._log,
                stderr=self._log,
            )
        )

    def join(self) -> None:
        """One more node of up to two, with one worker, which reduces but once."""
        flags = ("--nnodes=1:2", "--rdzv-id=bench", "--local-addr=127.0.0.1", *self._meeting)
        self.start(*flags, "--max-restarts=3", args=("once",))

    def up(self, world: int, seconds: float = BOUND) -> list[dict[str, Any]]:
        """Waits for a group of this size that was not there yet; what its ranks said, in order."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            files = {p.name: p for p in self.folder.glob("place.*.json")}
            places = [json.loads(files[name].read_text()) for name in files.keys() - self._seen]
            here = [p for p in places if p["WORLD_SIZE"] == str(world) and _alive(p["pid"])]
            if sorted(int(place["RANK"]) for place in here) == list(range(world)):
                self._seen |= files.keys()
                return sorted(here, key=lambda place: int(place["RANK"]))
            if all(agent.poll() is not None for agent in self.agents):
                raise Ended(f"no group of {world}, as all agents have ended")
            time.sleep(0.002)
        said = (self.folder / "log").read_text(errors="replace")
        raise TimeoutError(f"no group of {world} within {seconds:g} s: {said[-2000:]}")

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
        guardian, which removes the files of a killed agent."""
        below = [agent.pid]
        for pid in below:
            below += [child for child in children(pid) if not _is_guardian(child)]
        for pid in below:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        agent.wait()


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


def children(pid: int) -> list[int]:
    """Of all its threads; none if it is gone."""
    try:
        tasks = [task / "children" for task in Path(f"/proc/{pid}/task").iterdir()]
        return [int(child) for task in tasks for child in task.read_text().split()]
    except OSError:
        return []


def _is_guardian(pid: int) -> bool:
    try:
        return b"elasticlib.workers.session" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def cpu_seconds(pid: int) -> float:
    """What the threads that a process has now have used so far."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def gone(pid: int, seconds: float) -> None:
    """Waits for the end of a process."""
    deadline = time.monotonic() + seconds
    while _alive(pid):
        if time.monotonic() > deadline:
            raise TimeoutError(f"pid {pid} does not end within {seconds:g} s")
        time.sleep(0.002)


def _alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """An `elasticlib store` in a process of its own, for as long as the block lasts."""

    def __enter__(self) -> int:
        command = [sys.executable, "-m", "elasticlib.launch.commands", "store"]
        self._process = subprocess.Popen(
            [*command, "--bind", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        return int(self._process.stdout.readline().split()[2].rpartition(":")[2])

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        self._process.communicate(timeout=BOUND)
