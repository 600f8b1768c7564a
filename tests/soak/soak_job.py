"""The job of a soak: its nodes, its progress, and what its workers and agents record."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from jobs import is_alive

from elasticlib.checkpoint.catalog import CheckpointCatalog
from elasticlib.checkpoint.refs import StateRef
from elasticlib.checkpoint.storage import open_storage
from elasticlib.observe.event import Event
from elasticlib.testing.waiting import DEFAULT_TIMEOUT_S, wait_until

from .campaign import MAX_STEPS_AHEAD
from .nodes import NodeProcess, Nodes, SoakError
from .shared_page import JobView, SharedPage
from .training_history import Generation, TrainingHistory, read_generation

Result = TypeVar("Result")


class SoakJob:
    """A job in a directory of its own.

    Args:
        directory: The directory of the job.
        steps: The number of its training steps.
    """

    def __init__(self, directory: Path, steps: int) -> None:
        self.directory, self.steps = directory, steps
        self.checkpoints, self.trace = directory / "checkpoints", directory / "trace"
        self.trace.mkdir()
        self.page = SharedPage(directory / "page", create=True)
        self.nodes = Nodes(directory, steps)
        self.history = TrainingHistory()
        self.events: list[Event] = []  # since the start of the current fault

    def close(self) -> None:
        """Kill all processes of the job."""
        self.nodes.close()

    # -- waiting ------------------------------------------------------------------------------

    def wait_until(
        self,
        description: str,
        condition: Callable[[], Result | None],
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Result:
        """Wait for the condition, and fail at once if a node exits that should still run."""

        def check() -> Result | None:
            result = condition()
            if not result:
                self._check_nodes()
            return result

        return wait_until(description, check, timeout_s)

    def _check_nodes(self) -> None:
        for node in self.nodes.present:
            code = node.process.poll()
            if code is not None and not (code == 0 and self.current_step() >= self.steps):
                tail = node.log.read_text(errors="replace")[-3000:]
                raise SoakError(f"node {node.number} exited with code {code}:\n{tail}")

    def current_step(self) -> int:
        """Return the last step that a rank has started, or 0 unless all ranks train."""
        view = self.page.view()
        return 0 if view is None else view.step

    def complete_view(self, after: int = 0) -> JobView | None:
        """Return the current generation if all nodes of the job train in it.

        Args:
            after: The generation must be newer than this one.
        """
        view = self.page.view()
        if view is None or view.generation <= after:
            return None
        is_complete = view.nodes == self.nodes.numbers and len(view.ranks) == self.nodes.world
        return view if is_complete else None

    def wait_for_world(self, after: int = 0, done: int = 0) -> JobView:
        """Wait until all nodes train in a generation after this one, and have done this step."""

        def find_view() -> JobView | None:
            view = self.complete_view(after)
            return view if view is not None and view.done >= max(done, 1) else None

        description = f"nodes {sorted(self.nodes.numbers)} to train in a generation after {after}"
        return self.wait_until(f"{description}, step {done} done", find_view)

    def wait_until_due(self, step: int, num_nodes: int) -> JobView:
        """Wait until all nodes have reached this step and this number of nodes can be admitted.

        While nodes start, the job may wait so that it does not train too far. It only waits while
        all of its nodes train, because a job that waits cannot recover.
        """
        limit = max(step, self.current_step()) + MAX_STEPS_AHEAD

        def find_view() -> JobView | None:
            waiting = self.nodes.waiting[:num_nodes]
            has_nodes = len(waiting) == num_nodes and all(node.is_ready for node in waiting)
            view = self.complete_view()
            self.page.set_step_limit(self.steps - 1 if view is None else min(limit, self.steps - 1))
            is_due = view is not None and view.step >= step and view.done
            return view if is_due and has_nodes else None

        view = self.wait_until(f"step {step}", find_view)
        self.page.set_step_limit(self.steps - 1)
        return view

    # -- records ------------------------------------------------------------------------------

    def wait_for_event(
        self,
        description: str,
        since: float,
        is_match: Callable[[Event], bool],
        timeout_s: float = 20.0,
    ) -> Event:
        """Wait for an event of the current fault.

        Args:
            description: What is awaited.
            since: The start of the fault. An earlier event belongs to another fault.
            is_match: Returns whether an event is the awaited one.
            timeout_s: The time limit.
        """

        def find_event() -> Event | None:
            self.read_events()
            return next((e for e in self.events if e.monotonic >= since and is_match(e)), None)

        return self.wait_until(description, find_event, timeout_s)

    def read_events(self) -> None:
        """Read the events that the agents have written since the last call."""
        self.events += self.nodes.new_events()

    def wait_for_line(
        self,
        description: str,
        generation: int,
        since: float,
        is_match: Callable[[dict[str, Any]], bool],
    ) -> dict[str, Any]:
        """Wait for a line of the trace.

        Args:
            description: What is awaited.
            generation: The line is of a worker of this generation or of a later one.
            since: The line is not older, because a generation may meet several faults of a kind.
            is_match: Returns whether a line is the awaited one.
        """

        return self.wait_until(description, lambda: self.find_line(generation, since, is_match))

    def find_line(
        self, generation: int, since: float, is_match: Callable[[dict[str, Any]], bool]
    ) -> dict[str, Any] | None:
        """Return the first such line of the trace, if there is one. Arguments as above."""
        lines = (line for _, _, line in self._lines(generation) if line["at"] >= since)
        return next((line for line in lines if is_match(line)), None)

    def read_generations(self, first: int) -> list[Generation]:
        """Return the generations from this number on, as far as the trace has them."""
        lines: dict[int, dict[int, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
        for number, rank, line in self._lines(first):
            lines[number][rank].append(line)
        return [read_generation(number, lines[number]) for number in sorted(lines)]

    def _lines(self, first: int) -> Iterator[tuple[int, int, dict[str, Any]]]:
        for path in sorted(self.trace.iterdir()):
            number, rank = (int(part) for part in path.name.split(".")[:2])
            if number >= first:
                for line in path.read_text().split("\n")[:-1]:
                    yield number, rank, json.loads(line)

    def add_to_history(self, before: int) -> dict[int, int]:
        """Add all generations before this one to the history, and delete their files.

        Returns:
            The number of steps that each of these generations discarded.
        """
        discarded = {}
        for generation in self.read_generations(self.history.newest + 1):
            if generation.number < before:
                discarded[generation.number] = self.history.add(generation)
        for path in self.trace.iterdir():
            if int(path.name.split(".")[0]) < before:
                path.unlink()
        self.read_events()
        self.nodes.delete_old_files()
        return discarded

    def list_checkpoints(self) -> list[StateRef]:
        """Return the usable checkpoints of the line that the job is on, the newest first."""
        catalog = CheckpointCatalog(open_storage(self.checkpoints))
        return [ref for ref in catalog.live_refs() if ref.is_usable]

    def newest_committed_step(self) -> int:
        """Return the step of the newest checkpoint on the disk, or 0."""
        return max((ref.step for ref in self.list_checkpoints()), default=0)

    def newest_checkpoint_file(self) -> Path:
        """Return the largest file of the newest checkpoint."""
        folder = self.checkpoints / self.list_checkpoints()[0].place
        return max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)

    # -- nodes and processes --------------------------------------------------------------------

    def select_node(self, number: int) -> NodeProcess:
        """Return one of the nodes, modulo their number."""
        return self.nodes.present[number % len(self.nodes.present)]

    def wait_without_node(self, node: NodeProcess, is_match: Callable[[JobView], bool]) -> JobView:
        """Wait until the other nodes train without this one, in a generation that matches."""

        def find_view() -> JobView | None:
            view = self.page.view()
            if view is None or node.number in view.nodes or not view.done:
                return None
            return view if is_match(view) else None

        return self.wait_until(f"the others to train without node {node.number}", find_view)

    def wait_until_exited(self, pids: set[int], timeout_s: float = 5.0) -> None:
        """Wait until none of these processes runs."""

        def have_exited() -> bool:
            return not any(is_alive(pid) for pid in pids)

        wait_until(f"processes {sorted(pids)} to exit", have_exited, timeout_s)


def now() -> float:
    """Return the monotonic time in seconds."""
    return time.monotonic()
