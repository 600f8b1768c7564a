"""Record the jobs of the README's picture: the same kills under elasticrun and under torchrun.

`make picture` runs both jobs, one after the other, for about 50 seconds each. It writes what they
did to docs/pictures/survives.json, and draws docs/pictures/survives.svg. The report of the job
under elasticrun is the example that the guide links to.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import attrs

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent
if __name__ == "__main__":
    sys.path.insert(0, str(DOCS))

from making.timeline import Fault, Run, Span, draw, runs_from_json, runs_to_json  # noqa: E402

RECORD, PICTURE, REPORT = (
    DOCS / "pictures" / name for name in ("survives.json", "survives.svg", "report.html")
)
NODE_A, NODE_B = "node A", "node B"
DURATION_S = 45.0  # from the first step to the end of the run
START_TIMEOUT_S = 120.0
EXIT_TIMEOUT_S = 60.0

# Both launchers get these flags. Without them, torchrun would wait 30 s for a second node before
# each start of the workers, and notice the loss of a node after 15 s instead of 5 s.
RENDEZVOUS = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=5"
FLAGS = ("--nnodes=1:2", "--max-restarts=20", "--monitor-interval=0.1", f"--rdzv-conf={RENDEZVOUS}")


@attrs.frozen
class Launcher:
    """A launcher, and the training script that it runs."""

    name: str
    module: str  # for `python -m`
    script: str
    variables: dict[str, str] = attrs.Factory(dict)


LAUNCHERS = (
    Launcher("elasticrun", "elasticlib.launch", "elastic_training.py"),
    Launcher(
        "torchrun",
        "torch.distributed.run",
        "plain_training.py",
        # Otherwise restarted workers read what earlier workers have written, and hang.
        {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    ),
)


class Job:
    """A job of two nodes on this machine. Node A hosts the store."""

    def __init__(self, launcher: Launcher, directory: Path) -> None:
        self._launcher = launcher
        self._directory = directory
        self._endpoint = f"127.0.0.1:{_free_port()}"
        self._agents: dict[str, subprocess.Popen[bytes]] = {}

    def start_node(self, node: str, num_workers: int) -> None:
        launcher = self._launcher
        command = [sys.executable, "-m", launcher.module, *FLAGS, f"--nproc-per-node={num_workers}"]
        command += ["--rdzv-backend=c10d", "--rdzv-id=picture", f"--rdzv-endpoint={self._endpoint}"]
        own = {"NODE": node, "OMP_NUM_THREADS": "1", "TMPDIR": str(self._directory)}
        with (self._directory / f"{node}.log").open("wb") as log:
            self._agents[node] = subprocess.Popen(
                [*command, str(HERE / launcher.script), str(self._directory)],
                env={**os.environ, **own, **launcher.variables},
                stdout=log,
                stderr=log,
            )

    def wait_for_first_step(self) -> float:
        """Return the time of the first step."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not (spans := self.read_spans(0.0)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no step within {START_TIMEOUT_S:g} s: {self.read_logs()}")
            time.sleep(0.01)
        return min(span.start_s for span in spans)

    def kill_worker(self, node: str, local_rank: int) -> bool:
        """Kill a worker. Return False if it is not running."""
        files = (self._directory / "steps").glob(f"{node}.{local_rank}.*")
        pids = [int(path.name.rpartition(".")[2]) for path in files]
        alive = [pid for pid in pids if _is_running(pid)]
        for pid in alive:
            os.kill(pid, signal.SIGKILL)
        return bool(alive)

    def kill_node(self, node: str) -> bool:
        """Kill the agent of a node and all its processes. Return False if it is not running."""
        agent = self._agents[node]
        if agent.poll() is not None:
            return False
        for pid in (agent.pid, *_descendants(agent.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.wait()
        return True

    def finish(self) -> bool:
        """Let the script end. Return True if node A succeeds."""
        (self._directory / "finish").touch()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._agents[NODE_A].wait(EXIT_TIMEOUT_S) == 0
        return False

    def close(self) -> None:
        for node in self._agents:
            self.kill_node(node)

    def read_spans(self, zero: float) -> list[Span]:
        """Return the steps of each worker in each generation, with times since `zero`."""
        spans = []
        for path in sorted((self._directory / "steps").glob("*")):
            node, local_rank, generation, _ = path.name.split(".")
            lines = [line.split() for line in path.read_text().splitlines()]
            steps = [(int(line[0]), float(line[1]) - zero) for line in lines if len(line) == 2]
            if steps:
                (first, start), (last, end) = steps[0], steps[-1]
                times = round(start, 3), round(end, 3)
                spans.append(Span(node, int(local_rank), int(generation), first, last, *times))
        return spans

    def read_logs(self) -> str:
        return "\n".join(path.read_text() for path in self._directory.glob("*.log"))


# The time of each fault in seconds since the first step, its label, and the method that causes it,
# which returns False if there is nothing to kill.
SCHEDULE: Sequence[tuple[float, str, Callable[[Job], bool | None]]] = (
    (5.0, "kill a worker", lambda job: job.kill_worker(NODE_A, 1)),
    (12.0, "start node B", lambda job: job.start_node(NODE_B, 1)),
    (26.0, "kill node B", lambda job: job.kill_node(NODE_B)),
    (36.0, "kill a worker", lambda job: job.kill_worker(NODE_A, 0)),
)


def play(launcher: Launcher, directory: Path, *, slowdown: float = 1.0) -> Run:
    """Run the job, and cause the faults of the schedule.

    Args:
        launcher: The launcher of the job.
        directory: An empty directory.
        slowdown: A factor of all times, for a machine that is too busy for the schedule.

    Raises:
        TimeoutError: no step was completed at the start.
    """
    duration_s = slowdown * DURATION_S
    job, faults, load = Job(launcher, directory), [], round(os.getloadavg()[0], 1)
    try:
        job.start_node(NODE_A, 2)
        zero = job.wait_for_first_step()
        for at, label, cause in SCHEDULE:
            time.sleep(max(0.0, zero + slowdown * at - time.monotonic()))
            happened_at = round(time.monotonic() - zero, 3)
            faults.append(Fault(happened_at, label, is_missed=cause(job) is False))
        time.sleep(max(0.0, zero + duration_s - time.monotonic()))
        spans = job.read_spans(zero)
        has_succeeded = job.finish()
        if launcher.name == "elasticrun" and not has_succeeded:
            raise RuntimeError(f"the job failed: {job.read_logs()}")
    finally:
        job.close()
    return Run(launcher.name, duration_s, load, faults, spans)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:1]
    return False


def _descendants(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            yield int(child)
            yield from _descendants(int(child))


def main() -> None:
    runs = []
    for launcher in LAUNCHERS:
        with tempfile.TemporaryDirectory(prefix="picture-") as directory:
            runs.append(play(launcher, Path(directory)))
            if launcher.name == "elasticrun":
                report = (sys.executable, "-m", "elasticlib.launch.cli", "report", "picture")
                environment = {**os.environ, "TMPDIR": directory}
                subprocess.run([*report, "--output", str(REPORT)], env=environment, check=True)
        print(f"{launcher.name}: {runs[-1].summary()}", flush=True)
    RECORD.write_text(json.dumps(runs_to_json(runs)) + "\n")
    PICTURE.write_text(draw(runs_from_json(json.loads(RECORD.read_text()))))


if __name__ == "__main__":
    main()
