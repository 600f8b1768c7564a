"""The fixed scenarios, each played by real agents through the command line."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import records
from records import Walk

HERE = Path(__file__).parent
BOUND = 120.0
JOINS = ("next_rendezvous", "join")
QUIET_SECONDS = 2.5
"""How long nothing happens before the start event."""
SAFE_PATH = "-P" if sys.version_info >= (3, 11) else ""
WRAPPER = f"""#!/bin/sh
# Python, but never isolated (-I, -S, -E): it would not import the probe.
safe_path=
while :; do
    case "$1" in
        -I) safe_path={SAFE_PATH}; shift ;;
        -S|-E) shift ;;
        *) break ;;
    esac
done
exec {shlex.quote(sys.executable)} $safe_path "$@"
"""

Found = TypeVar("Found")


def probed(folder: Path, of: Path, written: Path) -> dict[str, str]:
    """The environment of programs whose interpreters write down their calls of a checkout."""
    wrapper = folder / "python"
    wrapper.write_text(WRAPPER)
    wrapper.chmod(0o700)
    return {
        **os.environ,
        "WALK_RECORDS": str(written),
        "WALK_OF": str(of / "elasticlib"),
        "WALK_PYTHON": str(wrapper),
        "PYTHONPATH": os.pathsep.join([str(HERE / "probe"), str(of)]),
    }


class Stage:
    """One run's folder and agents, all of whose processes are under the probe."""

    def __init__(self, folder: Path, of: Path) -> None:
        self.folder = folder
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.records = folder / "records"
        self.records.mkdir()
        (folder / "tmp").mkdir()
        self._environment = probed(folder, of, self.records) | {"TMPDIR": str(folder / "tmp")}

    def agent(self, name: str, mode: str, *flags: str) -> None:
        """Start one, whose workers do what `worker.py` says of this mode."""
        program = (str(HERE / "worker.py"), str(self.folder), mode)
        with (self.folder / f"{name}.log").open("wb") as log:
            self.agents[name] = subprocess.Popen(
                (sys.executable, "-m", "elasticlib.launch", *flags, *program),
                env={**self._environment, "WALK_NODE": name},
                cwd=self.folder,
                stdout=log,
                stderr=log,
            )

    def said(self, what: str, count: int = 1) -> list[dict[str, Any]]:
        """What workers said, once it was said so often."""

        def look() -> list[dict[str, Any]]:
            path = self.folder / "said"
            lines = path.read_text().splitlines() if path.exists() else []
            found = [said for said in map(json.loads, lines) if said["what"] == what]
            return found if len(found) >= count else []

        return self.until(f"workers say {what!r} {count} times", look)

    def joins(self, name: str) -> int:
        """When an agent first called its rendezvous handler to join."""

        def look() -> list[int]:
            return [
                call.at
                for call in records.read(self.records)
                if call.process == self.agents[name].pid
                and call.function in JOINS
                and call.file.startswith("rendezvous/")
            ]

        return self.until(f"agent {name} joins", look)[0]

    def keeps_a_replica(self, agent: int) -> bool:
        """Whether an agent's memory has a whole snapshot of another node's."""
        return any(
            (call.process, call.file, call.function) == (agent, "checkpoint/replicas.py", "_end")
            for call in records.read(self.records)
        )

    def until(self, what: str, look: Callable[[], Found]) -> Found:
        deadline = time.monotonic() + BOUND
        while not (found := look()):
            if time.monotonic() > deadline:
                logs = "\n".join(path.read_text() for path in self.folder.glob("*.log"))
                raise SystemExit(f"not within {BOUND:g} s: {what}; the agents wrote:\n{logs}")
            time.sleep(0.02)
        return found

    def walk(self, start: int, end: int) -> Walk:
        names = {said["pid"]: f"worker on {said['node']}" for said in self.said("began")}
        names |= {agent.pid: f"agent {name}" for name, agent in self.agents.items()}
        agents = [agent.pid for agent in self.agents.values()]
        return records.walk(records.read(self.records), start, end, agents=agents, names=names)

    def close(self) -> None:
        (self.folder / "finish").touch()
        for agent in self.agents.values():
            agent.terminate()  # one whose other node has left would wait for it
        for agent in self.agents.values():
            try:
                agent.wait(BOUND)
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait()


def quiet() -> None:
    time.sleep(QUIET_SECONDS)


def two_nodes() -> tuple[str, ...]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return ("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}")


def exit_to_start(stage: Stage) -> Walk:
    """A worker's exit code to the next worker's first line: one node, one worker, one restart."""
    stage.agent("a", "exit", "--standalone", "--max-restarts", "1")
    stage.said("began")
    quiet()
    (stage.folder / "go").touch()
    end = stage.said("began", 2)[1]["at"]
    return stage.walk(stage.said("exits")[0]["at"], end)


def join_to_worker(stage: Stage) -> Walk:
    """The call by which the second of two nodes joins, while the first one waits for it, to the
    first line of the second one's worker."""
    flags = two_nodes()
    stage.agent("a", "stay", *flags)
    stage.joins("a")
    quiet()
    stage.agent("b", "stay", *flags)
    began = stage.said("began", 2)
    (end,) = (said["at"] for said in began if said["node"] == "b")
    return stage.walk(stage.joins("b"), end)


def stop_to_ranks(stage: Stage) -> Walk:
    """The signal that drains one of two nodes, to should_stop() having said so on both."""
    flags = two_nodes()
    stage.agent("a", "stop", *flags)
    stage.agent("b", "stop", *flags)
    stage.said("began", 2)
    quiet()
    start = time.monotonic_ns()
    stage.agents["b"].send_signal(signal.SIGUSR2)
    end = max(said["at"] for said in stage.said("stopped", 2))
    return stage.walk(start, end)


def disk_and_back(stage: Stage) -> Walk:
    """A checkpoint's bytes to the disk and back: a worker saves a state and restores it."""
    stage.agent("a", "disk", "--standalone")
    (end,) = stage.said("restored")
    return stage.walk(stage.said("saves")[0]["at"], end["at"])


def snapshot_to_disk(stage: Stage) -> Walk:
    """A snapshot to another node's memory and, as the job is told to end, to the disk."""
    flags = (*two_nodes(), "--snapshot-replicas", "1")
    stage.agent("a", "lost", *flags)
    stage.agent("b", "lost", *flags)
    stage.said("ready", 2)
    (stage.folder / "go").touch()
    (kept,) = stage.said("keeps")
    other = stage.agents["b" if kept["node"] == "a" else "a"]
    stage.until("the other node keeps it", lambda: stage.keeps_a_replica(other.pid))
    for agent in stage.agents.values():
        agent.terminate()
    for agent in stage.agents.values():
        agent.wait(BOUND)
    if not list((stage.folder / "checkpoints").glob("*1*")):
        raise SystemExit("the snapshot did not reach the disk")
    return stage.walk(kept["at"], time.monotonic_ns())


SCENARIOS: dict[str, tuple[Callable[[Stage], Walk], int]] = {
    "exit": (exit_to_start, 15),
    "join": (join_to_worker, 12),
    "stop": (stop_to_ranks, 10),
    "disk": (disk_and_back, 10),
    "lost": (snapshot_to_disk, 10),
}
"""Each with its goal: at most so many files."""
THREADS_GOAL = 3
"""Of the agent, in the first one."""


@contextlib.contextmanager
def staged(of: Path) -> Iterator[Stage]:
    # Short, as the paths of sockets begin with it.
    with tempfile.TemporaryDirectory(prefix="walk", ignore_cleanup_errors=True) as folder:
        stage = Stage(Path(folder), of)
        try:
            yield stage
        finally:
            stage.close()
