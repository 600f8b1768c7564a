"""Entry points of the workers in the agent contract suite, and the pipes through which they report.

The suite uses a `WorkerHarness` for three things: to get an entry point for a `Scenario`, to read
the reports of the workers, and to see whether a process of a generation is still running.
"""

from __future__ import annotations

import os
from pathlib import Path

import attrs

from ..workers.spec import Command, Entrypoint, Function, WorkerGroup
from .waiting import wait_until
from .worker_behavior import KILL_FILE, SHELL_SCRIPT, WorkerBehavior, run_behavior

GENERATIONS = range(1, 9)  # more than any test of the suite has


@attrs.frozen
class Scenario:
    """The behaviors of all workers by global rank."""

    first: tuple[WorkerBehavior, ...]  # in the first generation
    later: tuple[WorkerBehavior, ...]  # in all later ones

    @classmethod
    def of(
        cls, *first: WorkerBehavior, later: tuple[WorkerBehavior, ...] | None = None
    ) -> Scenario:
        """Return a scenario. By default, all workers succeed in later generations."""
        return cls(first, (WorkerBehavior.SUCCEED,) * len(first) if later is None else later)


def expected_variables(group: WorkerGroup, local_rank: int) -> tuple[str, ...]:
    """Return the values of REPORTED_VARIABLES that a worker of this group must have."""
    worker, info = group.worker(local_rank), group.info
    store = info.bootstrap_store_info
    values = (
        *(worker.rank, local_rank, worker.world_size, group.spec.local_world_size),
        *(info.rank, info.world_size, store.master_addr, store.master_port),
        *(info.run_id, info.restarts),
    )
    return tuple(str(value) for value in values)


class WorkerHarness:
    """Runs workers that report through named pipes.

    Subclass it for workers that cannot open these pipes.

    Args:
        pipe_dir: Existing directory in which the pipes are created.
        timeout_s: Seconds after which a report counts as missing.
        use_functions: Use Python functions as entry points instead of shell scripts.
    """

    def __init__(self, pipe_dir: Path, timeout_s: float, *, use_functions: bool = False) -> None:
        self.use_functions = use_functions
        self._pipe_dir = pipe_dir
        self._timeout_s = timeout_s
        self._received = dict.fromkeys(GENERATIONS, b"")  # bytes read from each pipe
        for number in GENERATIONS:
            os.mkfifo(pipe_dir / str(number))
        # A worker that opens a pipe does not block, because the harness has it open for reading.
        flags = os.O_RDONLY | os.O_NONBLOCK
        self._pipes = {number: os.open(pipe_dir / str(number), flags) for number in GENERATIONS}

    def entrypoint(self, scenario: Scenario) -> Entrypoint:
        """Return the entry point of every worker."""
        first = [behavior.value for behavior in scenario.first]
        later = [behavior.value for behavior in scenario.later]
        if self.use_functions:
            return Function(run_behavior, (str(self._pipe_dir), first, later))
        behaviors = (" ".join(first), " ".join(later))
        return Command("/bin/sh", ("-c", SHELL_SCRIPT, "worker", str(self._pipe_dir), *behaviors))

    def missing_entrypoint(self) -> Entrypoint:
        """Return an entry point whose program does not exist."""
        return Command(str(self._pipe_dir / "missing"))

    def return_value(self, rank: int) -> object:
        """Return the value that a worker returns if it succeeds."""
        return rank if self.use_functions else None

    def started_workers(self, generation: int) -> list[tuple[str, ...]]:
        """Return the values of REPORTED_VARIABLES of each started worker of a generation."""
        return [words[1:] for words in self._read_reports(generation) if words[0] == "started"]

    def wait_until_started(self, generation: int, count: int) -> None:
        """Wait until `count` workers of this generation have started."""
        description = f"{count} workers of generation {generation} to start"
        wait_until(
            description, lambda: len(self.started_workers(generation)) >= count, self._timeout_s
        )

    def regrouped_workers(self, generation: int) -> dict[tuple[str, ...], str]:
        """Return the pid of each worker that can regroup, by its reported variables."""
        reports = [words[1:] for words in self._read_reports(generation) if words[0] == "regrouped"]
        return {words[:-1]: words[-1] for words in reports}

    def wait_until_regrouped(self, generation: int, count: int) -> dict[tuple[str, ...], str]:
        """Wait until `count` workers that can regroup are in this generation, and return them."""
        description = f"{count} workers to join generation {generation}"
        wait_until(
            description, lambda: len(self.regrouped_workers(generation)) >= count, self._timeout_s
        )
        return self.regrouped_workers(generation)

    def create_kill_file(self) -> None:
        """Kill the workers whose behavior is KILL_SELF_ON_FILE."""
        (self._pipe_dir / KILL_FILE).touch()

    def terminated_ranks(self, generation: int) -> set[int]:
        """Return the ranks of the workers that received SIGTERM."""
        return {int(words[1]) for words in self._read_reports(generation) if words[0] == "sigterm"}

    def is_running(self, generation: int) -> bool:
        """Return True if a worker of this generation, or a process that it started, is running."""
        while True:
            try:
                data = os.read(self._pipes[generation], 65536)
            except BlockingIOError:
                return True
            if not data:
                return False
            self._received[generation] += data

    def running_generations(self) -> list[int]:
        """Return the generations with processes that are still running."""
        return [number for number in GENERATIONS if self.is_running(number)]

    def close(self) -> None:
        for pipe in self._pipes.values():
            os.close(pipe)

    def _read_reports(self, generation: int) -> list[tuple[str, ...]]:
        self.is_running(generation)  # reads the pipe
        complete_lines = self._received[generation].rpartition(b"\n")[0].decode()
        return [tuple(line.split(" ")) for line in complete_lines.splitlines()]
