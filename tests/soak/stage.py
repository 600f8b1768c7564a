"""The job as the soak sees it: who is there, how far they are, what they have written down."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from jobs import is_alive

from elasticlib.checkpoint.catalog import CheckpointCatalog
from elasticlib.checkpoint.storage import open_storage
from elasticlib.observe.event import Event
from elasticlib.testing.waiting import DEFAULT_TIMEOUT_S, wait_until

from .board import Board, View
from .campaign import AHEAD
from .ledger import Generation, Ledger, read_generation
from .nodes import NodeProcess, Nodes, SoakFailed

Found = TypeVar("Found")


class Stage:
    """A job under a folder of its own. events: of the fault under way."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps = folder, steps
        self.checkpoints, self.trace = folder / "checkpoints", folder / "trace"
        self.trace.mkdir()
        self.board = Board(folder / "board", create=True)
        self.nodes = Nodes(folder, steps)
        self.ledger = Ledger()
        self.events: list[Event] = []

    def close(self) -> None:
        self.nodes.close()

    # -- waiting ------------------------------------------------------------------------------

    def wait_until(
        self,
        description: str,
        condition: Callable[[], Found | None],
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Found:
        """Wait for the condition, and fail at once if a node ends that should still run."""

        def watch() -> Found | None:
            found = condition()
            if not found:
                self._all_live()
            return found

        return wait_until(description, watch, timeout_s)

    def _all_live(self) -> None:
        for node in self.nodes.present:
            code = node.process.poll()
            if code is not None and not (code == 0 and self.board_step() >= self.steps):
                tail = node.log.read_text(errors="replace")[-3000:]
                raise SoakFailed(f"node {node.number} ended with exit code {code}:\n{tail}")

    def board_step(self) -> int:
        view = self.board.view()
        return 0 if view is None else view.step

    def whole(self, after: int = 0) -> View | None:
        """The generation in which all nodes train that should, if it is later than `after`."""
        view = self.board.view()
        if view is None or view.generation <= after:
            return None
        same = view.nodes == self.nodes.numbers and len(view.ranks) == self.nodes.world
        return view if same else None

    def wait_for_world(self, after: int = 0, done: int = 0) -> View:
        """Waits for that, and until all ranks have done this step."""

        def look() -> View | None:
            view = self.whole(after)
            return view if view is not None and view.done >= max(done, 1) else None

        what = f"nodes {sorted(self.nodes.numbers)} to train in a generation after {after}"
        return self.wait_until(f"{what}, step {done} done", look)

    def due(self, step: int, nodes: int) -> View:
        """Waits until the job has come to this step and is whole, and so many nodes can come.

        While these are awaited the job stands still where it would go too far; but only while it
        is whole, as who stands still cannot recover.
        """
        far = max(step, self.board_step()) + AHEAD

        def look() -> View | None:
            waiting = self.nodes.waiting[:nodes]
            come = len(waiting) == nodes and all(node.ready for node in waiting)
            view = self.whole()
            self.board.let(self.steps - 1 if view is None else min(far, self.steps - 1))
            good = view is not None and view.step >= step and view.done
            return view if good and come else None

        found = self.wait_until(f"step {step}", look)
        self.board.let(self.steps - 1)
        return found

    # -- what was written down ----------------------------------------------------------------

    def event(
        self, what: str, since: float, wanted: Callable[[Event], bool], seconds: float = 20.0
    ) -> Event:
        """Waits for an event of the fault under way, which began then: what came before, or comes
        late, is another's."""

        def look() -> Event | None:
            self.hear()
            return next((e for e in self.events if e.monotonic >= since and wanted(e)), None)

        return self.wait_until(what, look, seconds)

    def hear(self) -> None:
        self.events += self.nodes.new_events()

    def line(
        self, what: str, generation: int, since: float, wanted: Callable[[dict[str, Any]], bool]
    ) -> dict[str, Any]:
        """Waits for a line of a worker of this generation or a later one, written since then: a
        generation may meet several faults of a kind."""

        def look() -> dict[str, Any] | None:
            lines = (line for _, _, line in self._lines(generation) if line["at"] >= since)
            return next((line for line in lines if wanted(line)), None)

        return self.wait_until(what, look)

    def generations(self, since: int) -> list[Generation]:
        """Those from `since` on, as far as they are written down."""
        found: dict[int, dict[int, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
        for number, rank, line in self._lines(since):
            found[number][rank].append(line)
        return [read_generation(number, found[number]) for number in sorted(found)]

    def _lines(self, since: int) -> Iterator[tuple[int, int, dict[str, Any]]]:
        for path in sorted(self.trace.iterdir()):
            number, rank = (int(part) for part in path.name.split(".")[:2])
            if number >= since:
                for line in path.read_text().split("\n")[:-1]:
                    yield number, rank, json.loads(line)

    def fold(self, before: int) -> dict[int, int]:
        """Put all generations before this one into the ledger; how many steps each of them struck
        out. Their files go, and so does what was left by nodes that are gone."""
        struck = {}
        for generation in self.generations(self.ledger.newest + 1):
            if generation.number < before:
                struck[generation.number] = self.ledger.fold(generation)
        for path in self.trace.iterdir():
            if int(path.name.split(".")[0]) < before:
                path.unlink()
        self.hear()
        self.nodes.tidy()
        return struck

    def committed(self) -> int:
        """The newest step on the disk."""
        folder = CheckpointCatalog(open_storage(self.checkpoints))
        return max((found.step for found in folder.list_entries() if found.manifest), default=0)

    def newest_checkpoint(self) -> Path:
        """Its largest file."""
        folders = sorted(self.checkpoints.glob("step-*/manifest.json"))
        return max(folders[-1].parent.glob("*.pack"), key=lambda path: path.stat().st_size)

    # -- who is there -------------------------------------------------------------------------

    def node(self, which: int) -> NodeProcess:
        return self.nodes.present[which % len(self.nodes.present)]

    def holds(self, node: NodeProcess, look: Callable[[View], bool]) -> View:
        """Waits until the others train without this node, and `look` is content."""

        def found() -> View | None:
            view = self.board.view()
            good = view is not None and node.number not in view.nodes and view.done
            return view if good and view is not None and look(view) else None

        return self.wait_until(f"the others to go on without node {node.number}", found)

    def pids_gone(self, pids: set[int], seconds: float = 5.0) -> None:
        def gone() -> bool:
            return not any(is_alive(pid) for pid in pids)

        wait_until(f"processes {sorted(pids)} to be gone", gone, seconds)


def now() -> float:
    return time.monotonic()
