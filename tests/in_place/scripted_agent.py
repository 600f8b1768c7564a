"""An agent that a test controls, with real worker processes: it assigns ranks and kills workers.

    with ScriptedAgent(tmp_path) as agent:
        agent.start(train, 3)
        agent.wait_for_step([0, 1, 2], 10)
        agent.kill(2)
        agent.regroup([0, 1])
        agent.wait_for_success([0, 1])

It communicates with the workers through their `WorkerChannel`, as the agent of a node does.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from ports import free_port

from elasticlib.testing.waiting import wait_until
from elasticlib.workers.interface import RESIZE, WorkerView
from elasticlib.workers.spec import SNAPSHOTS_ENV
from elasticlib.workers.worker_channel import CHANNEL_ENV, WorkerChannel

EXTRA_STEPS = 15  # steps after the last action of a test; workers are fewer steps apart
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["training", "torch._dynamo", "torch.distributed.nn"])


def see(channel: WorkerChannel) -> WorkerView:
    """Return what an agent knows of a worker that is a member of a group."""
    return channel.view("worker", is_member=True, has_called_should_stop=False)


class ScriptedAgent:
    """The agent of one node. A worker is identified by the order in which it was started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.generation = 0
        self.channels: list[WorkerChannel] = []
        self.processes: list[Any] = []
        self._stores: list[Any] = []
        # The directory of its socket must exist until multiprocessing exits.
        multiprocessing.current_process()._config.setdefault("tempdir", tempfile.gettempdir())

    def __enter__(self) -> ScriptedAgent:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for channel in self.channels:
            channel.close()

    def start(self, train: Callable[..., None], count: int, *args: Any) -> None:
        """Start the first group, whose members have their ranks from the start."""
        self._begin_generation()
        for rank in range(count):
            self._start(train, rank, self._create_variables(rank, count), args, has_assignment=True)

    def start_replacement(self, train: Callable[..., None], *args: Any) -> int:
        """Start a worker without a rank, and return its number."""
        number = len(self.processes)
        self._start(
            train, number, self._create_variables(number, number + 1), args, has_assignment=False
        )
        return number

    def _start(
        self,
        train: Callable[..., None],
        number: int,
        variables: dict[str, str],
        args: tuple[Any, ...],
        *,
        has_assignment: bool,
    ) -> None:
        channel = WorkerChannel.create()
        if has_assignment:
            channel.publish_assignment(variables)
        environment = {
            CHANNEL_ENV: channel.path,
            "LOCAL_RANK": str(number),
            "ELASTICLIB_LOCAL_RANK": str(number),
            "TORCHELASTIC_RUN_ID": "run",
            "ELASTICLIB_INCARNATION": "launch",
            **variables,
        }
        process = _CONTEXT.Process(
            target=_run, args=(train, str(self.folder), environment, number, args), daemon=True
        )
        process.start()
        channel.set_worker_pid(process.pid)
        self.channels.append(channel)
        self.processes.append(process)

    def _begin_generation(self) -> None:
        self.generation += 1
        self._stores.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
        (self.folder / "memory" / str(self.generation)).mkdir(parents=True)

    def _create_variables(self, rank: int, world: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._stores[-1].port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "ELASTICLIB_GENERATION": str(self.generation),
            SNAPSHOTS_ENV: str(self.folder / "memory" / str(self.generation)),
        }

    def kill(self, number: int) -> None:
        self.processes[number].kill()
        self.processes[number].join()

    def request_leave(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.channels[number].request_leave()

    def regroup(self, numbers: Sequence[int], *, leave: bool = True) -> float:
        """Form the next group of these workers in this order.

        Args:
            numbers: the workers in rank order.
            leave: request that the workers leave their group. Otherwise they leave it anyway.

        Returns:
            Seconds until all workers had left their group.
        """
        started_at = time.monotonic()
        if leave:
            self.request_leave(numbers)
        self.wait_until_left(numbers)
        duration_s = time.monotonic() - started_at
        self.assign(numbers)
        return duration_s

    def assign(self, numbers: Sequence[int], *, reachable: bool = True) -> None:
        """Assign ranks of a new generation.

        Args:
            numbers: the workers in rank order.
            reachable: False for a store to which no worker can connect.
        """
        self._begin_generation()
        if not reachable:
            del self._stores[-1]
            self._stores.append(SimpleNamespace(port=free_port()))
        for rank, number in enumerate(numbers):
            self.channels[number].publish_assignment(self._create_variables(rank, len(numbers)))

    def request_resize(self, numbers: Sequence[int]) -> None:
        """Make all of these workers leave their group after the same step."""
        channels = [self.channels[number] for number in numbers]
        deadline = time.monotonic() + 30
        for channel in channels:
            channel.request_stop(RESIZE, deadline)
        stop_call = 0
        for channel in channels:
            wait_until("a call of should_stop", lambda c=channel: see(c).stop_call is not None)
            stop_call = max(stop_call, see(channel).stop_call or 0)
        for channel in channels:
            channel.set_stop_call(stop_call, RESIZE, deadline)

    def wait_until_left(self, numbers: Sequence[int]) -> None:
        """Wait until these workers have left their group."""

        def condition(number: int) -> bool:
            assert self.processes[number].is_alive(), f"worker {number} has exited"
            return see(self.channels[number]).is_ready

        for number in numbers:
            wait_until(f"worker {number} has left its group", partial(condition, number))

    def wait_until_accepted(self, numbers: Sequence[int]) -> None:
        """Wait until these workers have accepted their assignments, so they form their group."""
        for number in numbers:
            channel = self.channels[number]
            wait_until(
                f"worker {number} has accepted its assignment",
                lambda c=channel: not c._is_between_groups,
            )

    def lines(self, number: int) -> list[dict[str, Any]]:
        """Return what a worker has recorded."""
        with contextlib.suppress(FileNotFoundError):
            text = (self.folder / f"worker-{number}.jsonl").read_text()
            return [json.loads(line) for line in text.splitlines(keepends=True) if "\n" in line]
        return []

    def steps(self, numbers: Sequence[int]) -> int:
        """Return the last step that all of these workers have committed."""
        return min(
            max((line["step"] for line in self.lines(n) if "step" in line), default=0)
            for n in numbers
        )

    def wait_for_step(self, numbers: Sequence[int], step: int) -> None:
        wait_until(f"workers {numbers} at step {step}", lambda: self.steps(numbers) >= step)

    def wait_until_applied(self, number: int, step: int) -> None:
        """Wait until the optimizer of a worker has applied a step."""

        def condition() -> bool:
            return any(line.get("applied", 0) >= step for line in self.lines(number))

        wait_until(f"worker {number} has applied step {step}", condition)

    def wait_until_reducing(self, numbers: Sequence[int], step: int) -> None:
        """Wait until these workers have computed the gradients of a step and reduce them."""

        def condition(number: int) -> bool:
            return any(line.get("reducing") == step for line in self.lines(number))

        for number in numbers:
            wait_until(f"worker {number} reduces step {step}", partial(condition, number))

    def wait_for_success(self, numbers: Sequence[int]) -> None:
        """Let these workers make a few more steps, and wait until they have finished."""
        last = self.folder / "last"
        if not last.exists():
            steps = [line.get("step", 0) for n in numbers for line in self.lines(n)]
            (self.folder / "new").write_text(str(max(steps, default=0) + EXTRA_STEPS))
            os.replace(self.folder / "new", last)
        for number in numbers:
            self.processes[number].join(60)
            assert self.processes[number].exitcode == 0, f"worker {number}"


def _run(
    train: Callable[..., None],
    folder: str,
    environment: dict[str, str],
    number: int,
    args: tuple[Any, ...],
) -> None:
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo", **environment})
    train(Path(folder), number, *args)


def write_record(folder: Path, number: int, **line: Any) -> None:
    """Append a line to the record of a worker. The line is in the file when the call returns."""
    with open(folder / f"worker-{number}.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
