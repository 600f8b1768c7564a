"""Where the workers of the agents' suite act, and from where they are watched.

The suite asks three things of a stage and nothing else: an entry point for a scene, what the
workers have told so far, and whether anything of them is left.
"""

from __future__ import annotations

import os
from pathlib import Path

import attrs

from ..workers.spec import Command, Entrypoint, Function, WorkerGroup
from .agent_acts import CUE, SHELL_LINE, Act, perform
from .waiting import wait_until

GENERATIONS = range(1, 9)
"""More than any test of the suite comes to."""


@attrs.frozen
class Scene:
    """What each worker does, by its global rank: in the job's first generation, and later."""

    first: tuple[Act, ...]
    later: tuple[Act, ...]

    @classmethod
    def of(cls, *first: Act, later: tuple[Act, ...] | None = None) -> Scene:
        """A scene in which all succeed later, if it is not said what they do."""
        return cls(first, (Act.SUCCEED,) * len(first) if later is None else later)


def place(group: WorkerGroup, local_rank: int) -> tuple[str, ...]:
    """What a worker of this group should have been told, as `PLACE` has it."""
    worker = group.worker(local_rank)
    told = (
        *(worker.rank, local_rank, worker.world_size, group.spec.local_world_size),
        *(group.group_rank, group.group_world_size, group.master_addr, group.master_port),
        *(group.run_id, group.restarts),
    )
    return tuple(str(value) for value in told)


class Stage:
    """For workers that can open a named pipe in `folder`; subclass it for those that cannot.

    functions: the workers are Python functions, and not shell commands.
    """

    def __init__(self, folder: Path, patience: float, *, functions: bool = False) -> None:
        self.functions = functions
        self._folder = folder
        self._patience = patience
        self._heard = dict.fromkeys(GENERATIONS, b"")
        for number in GENERATIONS:
            os.mkfifo(folder / str(number))
        # Opened for good before a worker is there: one that opens a pipe never waits.
        flags = os.O_RDONLY | os.O_NONBLOCK
        self._pipes = {number: os.open(folder / str(number), flags) for number in GENERATIONS}

    def entrypoint(self, scene: Scene) -> Entrypoint:
        """What is run as each worker."""
        first, later = ([act.value for act in acts] for acts in (scene.first, scene.later))
        if self.functions:
            return Function(perform, (str(self._folder), first, later))
        words = ("-c", SHELL_LINE, "worker", str(self._folder), " ".join(first), " ".join(later))
        return Command("/bin/sh", words)

    def missing(self) -> Entrypoint:
        """What is nowhere to be found."""
        return Command(str(self._folder / "nothing"))

    def value(self, rank: int) -> object:
        """What a worker that succeeds returns."""
        return rank if self.functions else None

    def up(self, generation: int) -> list[tuple[str, ...]]:
        """What each worker that has come up was told of its place."""
        return [words[1:] for words in self._told(generation) if words[0] == "up"]

    def kept(self, generation: int) -> dict[tuple[str, ...], str]:
        """The process of each worker that goes on from group to group, by its place in this."""
        told = [words[1:] for words in self._told(generation) if words[0] == "kept"]
        return {words[:-1]: words[-1] for words in told}

    def until_kept(self, generation: int, count: int) -> dict[tuple[str, ...], str]:
        """Wait until so many of these have taken their place."""
        what = f"{count} workers to have a place in generation {generation}"
        wait_until(what, lambda: len(self.kept(generation)) >= count, self._patience)
        return self.kept(generation)

    def cue(self) -> None:
        """Those that die on a cue do so now."""
        (self._folder / CUE).touch()

    def asked(self, generation: int) -> set[int]:
        """The ranks of those that were asked to stop."""
        return {int(words[1]) for words in self._told(generation) if words[0] == "asked"}

    def busy(self, generation: int) -> bool:
        """Whether a worker of this generation is left, or anything that one has started."""
        while True:
            try:
                news = os.read(self._pipes[generation], 65536)
            except BlockingIOError:
                return True
            if not news:
                return False
            self._heard[generation] += news

    def until_up(self, generation: int, count: int) -> None:
        """Wait until so many workers have come up."""
        what = f"{count} workers of generation {generation} to be up"
        wait_until(what, lambda: len(self.up(generation)) >= count, self._patience)

    def left(self) -> list[int]:
        """The generations of which something is left."""
        return [number for number in GENERATIONS if self.busy(number)]

    def close(self) -> None:
        for pipe in self._pipes.values():
            os.close(pipe)

    def _told(self, generation: int) -> list[tuple[str, ...]]:
        self.busy(generation)
        whole = self._heard[generation].rpartition(b"\n")[0].decode()
        return [tuple(line.split(" ")) for line in whole.splitlines()]
