"""Check that a run used each sample exactly once, from the traces of its ranks.

A rank writes the line of a step before it takes part in the step (`train_text.append_trace`), so
the traces contain every step of every checkpoint. Steps are discarded if a later generation, or one
of a later launch, resumed from an earlier step.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs

from elasticlib.errors import ElasticError


class TraceError(ElasticError):
    """The surviving history is incomplete: a step, or the line of a rank, is missing."""


@attrs.frozen
class TraceSummary:
    """Steps and samples of the surviving history of a run."""

    steps: int  # number of steps that led to the last state
    redone: int  # steps that were discarded because a later generation resumed before them
    uses: dict[int, Counter[int]]  # for each epoch, how often each sample was used

    def used_exactly_once(self, length: int) -> bool:
        """Return True if each epoch used each of `length` samples once and nothing else."""
        return all(used == Counter(range(length)) for used in self.uses.values())


def read_traces(prefix: str | Path) -> TraceSummary:
    """Read all traces of a finished run, and discard steps that did not survive.

    The line of a step survives unless a later line of its file, or any file of a later generation,
    resumed from an earlier step. A generation that never reached the step from which a later one
    resumed is discarded: two launches of a job that cannot see each other may run at the same time
    until they meet, and then continue from the state with more steps.

    Raises:
        TraceError: Steps 1, 2, ... have a gap, or a step does not have one line of each rank.
    """
    surviving: list[dict[str, Any]] = []
    discarded: set[tuple[int, int]] = set()
    resumed_later: list[int] = []
    for number, files in enumerate(reversed(_files_by_generation(prefix))):
        steps = {line["step"] for lines in files for line in lines if "step" in line}
        own = {line["resumed"] for lines in files for line in lines if "resumed" in line}
        if resumed_later and max(steps | own, default=0) < min(resumed_later):
            discarded |= {(number, step) for step in steps}
            continue
        for lines in files:
            resumed = list(resumed_later)
            for line in reversed(lines):
                if "resumed" in line:
                    resumed.append(line["resumed"])
                elif any(step < line["step"] for step in resumed):
                    discarded.add((number, line["step"]))
                else:
                    surviving.append(line)
        resumed_later += own
    return _count(surviving, len(discarded))


def _files_by_generation(prefix: str | Path) -> list[list[list[dict[str, Any]]]]:
    """Return the lines of each file, ordered by launch and generation."""
    prefix = Path(prefix)
    generations: dict[tuple[str, int], list[list[dict[str, Any]]]] = defaultdict(list)
    started: dict[str, float] = {}
    for path in prefix.parent.glob(f"{prefix.name}.*.*.*.jsonl"):
        # The name of a launch may contain dots.
        launch, generation, _, _ = path.name.removeprefix(f"{prefix.name}.").rsplit(".", 3)
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        generations[launch, int(generation)].append(lines)
        # Launches are ordered by time. The clocks of machines differ by less than the time between
        # two launches.
        times = [line["at"] for line in lines if "resumed" in line]
        started[launch] = min([*times, started.get(launch, math.inf)])
    order = sorted(generations, key=lambda key: (started[key[0]], key))
    return [generations[key] for key in order]


def _count(lines: Iterable[dict[str, Any]], redone: int) -> TraceSummary:
    by_step: dict[int, list[dict[str, Any]]] = defaultdict(list)
    uses: dict[int, Counter[int]] = defaultdict(Counter)
    for line in lines:
        by_step[line["step"]].append(line)
        uses[line["epoch"]].update(line["indices"])
    if sorted(by_step) != list(range(1, len(by_step) + 1)):
        raise TraceError(f"need steps 1 to {len(by_step)}, got {sorted(by_step)}")
    for step, of_ranks in by_step.items():
        if any(line["world_size"] != len(of_ranks) for line in of_ranks):
            worlds = sorted({line["world_size"] for line in of_ranks})
            raise TraceError(f"step {step} has lines of {len(of_ranks)} ranks, world {worlds}")
    return TraceSummary(len(by_step), redone, dict(uses))
