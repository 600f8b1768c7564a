"""Stage: the entry points of the contract suite's workers, and the pipes through which they report.

The suite uses a stage for three things: an entry point for a scene, the reports of the workers, and
whether a process of them is left.
"""

from __future__ import annotations

import os
from pathlib import Path

import attrs

from ..workers.spec import Command, Entrypoint, Function, WorkerGroup
from .agent_acts import CUE_FILE, SHELL_SCRIPT, Act, perform
from .waiting import wait_until

GENERATIONS = range(1, 9)  # more than any test of the suite has


@attrs.frozen
class Scene:
    """The acts of all workers by global rank: in the first generation, and in later ones."""

    first: tuple[Act, ...]
    later: tuple[Act, ...]

    @classmethod
    def of(cls, *first: Act, later: tuple[Act, ...] | None = None) -> Scene:
        """Return a scene. By default, all workers succeed in later generations."""
        return cls(first, (Act.SUCCEED,) * len(first) if later is None else later)


def place(group: WorkerGroup, local_rank: int) -> tuple[str, ...]:
    """Return the values of REPORTED_VARIABLES that a worker of this group must have."""
    worker = group.worker(local_rank)
    values = (
        *(worker.rank, local_rank, worker.world_size, group.spec.local_world_size),
        *(group.group_rank, group.group_world_size, group.master_addr, group.master_port),
        *(group.run_id, group.restarts),
    )
    return tuple(str(value) for value in values)


class Stage:
    """Runs workers that report through named pipes in `folder`.

    Subclass it for workers that cannot open these pipes.

    Args:
        folder: the directory of the pipes.
        patience: seconds after which a report counts as missing.
        functions: use Python functions instead of shell scripts.
    """

    def __init__(self, folder: Path, patience: float, *, functions: bool = False) -> None:
        self.functions = functions
        self._folder = folder
        self._patience = patience
        self._received = dict.fromkeys(GENERATIONS, b"")  # bytes of each pipe
        for number in GENERATIONS:
            os.mkfifo(folder / str(number))
        # A worker that opens a pipe does not block, because the stage has it open for reading.
        flags = os.O_RDONLY | os.O_NONBLOCK
        self._pipes = {number: os.open(folder / str(number), flags) for number in GENERATIONS}

    def entrypoint(self, scene: Scene) -> Entrypoint:
        """Return the entry point of every worker."""
        first, later = ([act.value for act in acts] for acts in (scene.first, scene.later))
        if self.functions:
            return Function(perform, (str(self._folder), first, later))
        words = ("-c", SHELL_SCRIPT, "worker", str(self._folder), " ".join(first), " ".join(later))
        return Command("/bin/sh", words)

    def missing(self) -> Entrypoint:
        """Return an entry point that does not exist."""
        return Command(str(self._folder / "nothing"))

    def value(self, rank: int) -> object:
        """Return the return value of a worker that succeeds."""
        return rank if self.functions else None

    def up(self, generation: int) -> list[tuple[str, ...]]:
        """Return the reported variables of each worker that has started."""
        return [words[1:] for words in self._reports(generation) if words[0] == "up"]

    def kept(self, generation: int) -> dict[tuple[str, ...], str]:
        """Return the pid of each worker that can regroup, by its reported variables."""
        reports = [words[1:] for words in self._reports(generation) if words[0] == "kept"]
        return {words[:-1]: words[-1] for words in reports}

    def until_kept(self, generation: int, count: int) -> dict[tuple[str, ...], str]:
        """Wait until `count` of these workers have an assignment, and return them."""
        what = f"{count} workers to have a place in generation {generation}"
        wait_until(what, lambda: len(self.kept(generation)) >= count, self._patience)
        return self.kept(generation)

    def cue(self) -> None:
        """Kill the workers that wait for the cue."""
        (self._folder / CUE_FILE).touch()

    def asked(self, generation: int) -> set[int]:
        """Return the ranks that received SIGTERM."""
        return {int(words[1]) for words in self._reports(generation) if words[0] == "sigterm"}

    def busy(self, generation: int) -> bool:
        """Return True if a worker of this generation is left, or a process that it started."""
        while True:
            try:
                data = os.read(self._pipes[generation], 65536)
            except BlockingIOError:
                return True
            if not data:
                return False
            self._received[generation] += data

    def until_up(self, generation: int, count: int) -> None:
        """Wait until `count` workers have started."""
        what = f"{count} workers of generation {generation} to be up"
        wait_until(what, lambda: len(self.up(generation)) >= count, self._patience)

    def left(self) -> list[int]:
        """Return the generations with processes that are left."""
        return [number for number in GENERATIONS if self.busy(number)]

    def close(self) -> None:
        for pipe in self._pipes.values():
            os.close(pipe)

    def _reports(self, generation: int) -> list[tuple[str, ...]]:
        self.busy(generation)
        whole = self._received[generation].rpartition(b"\n")[0].decode()
        return [tuple(line.split(" ")) for line in whole.splitlines()]
