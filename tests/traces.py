"""The proof that a run used each sample exactly once, from what its ranks have written down.

A rank writes a step's line before it takes part in that step (`train_text.write_down`), so whatever
a checkpoint holds has been written down by every rank. Steps that a later generation, or one of a
later launch, did not build on are struck out.
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
    """The surviving history is not whole: a step is missing, or ranks are missing in it."""


@attrs.frozen
class Survey:
    """What the surviving history of a run used."""

    steps: int
    """Steps that the last state rests on, numbered 1 to this."""
    redone: int
    """Steps that were begun and struck out, since a later generation resumed before them."""
    uses: dict[int, Counter[int]]
    """Of each epoch, how often each sample was used."""

    def exactly_once(self, length: int) -> bool:
        """Whether each epoch used each of `length` samples once and nothing else."""
        return all(used == Counter(range(length)) for used in self.uses.values())


def survey(prefix: str | Path) -> Survey:
    """Read all traces of a run that has ended, and strike out what did not survive.

    A step's line survives unless a later line of its file, or any file of a later generation,
    says that it resumed from an earlier step. A generation that never came to the step from which
    a later one resumed is none that this rests on: two launches of a job that cannot see each other
    may go on side by side until they meet, and then the further one's state is taken.

    Raises:
        TraceError: steps 1, 2, ... have a gap, or a step has not one line of each of its ranks.
    """
    surviving: list[dict[str, Any]] = []
    struck: set[tuple[int, int]] = set()
    resumed_later: list[int] = []
    for number, files in enumerate(reversed(_files_by_generation(prefix))):
        told = {line["step"] for lines in files for line in lines if "step" in line}
        own = {line["resumed"] for lines in files for line in lines if "resumed" in line}
        if resumed_later and max(told | own, default=0) < min(resumed_later):
            struck |= {(number, step) for step in told}
            continue
        for lines in files:
            resumed = list(resumed_later)
            for line in reversed(lines):
                if "resumed" in line:
                    resumed.append(line["resumed"])
                elif any(step < line["step"] for step in resumed):
                    struck.add((number, line["step"]))
                else:
                    surviving.append(line)
        resumed_later += own
    return _count(surviving, len(struck))


def _files_by_generation(prefix: str | Path) -> list[list[list[dict[str, Any]]]]:
    """The lines of each file, in the order of launches, and of generations in each."""
    prefix = Path(prefix)
    generations: dict[tuple[str, int], list[list[dict[str, Any]]]] = defaultdict(list)
    began: dict[str, float] = {}
    for path in prefix.parent.glob(f"{prefix.name}.*.*.*.jsonl"):
        # A launch's name may have dots itself.
        launch, generation, _, _ = path.name.removeprefix(f"{prefix.name}.").rsplit(".", 3)
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        generations[launch, int(generation)].append(lines)
        # Names of launches do not sort. Clocks of machines may differ by less than what lies
        # between two launches; within one, generations are counted and need no clock.
        times = [line["at"] for line in lines if "resumed" in line]
        began[launch] = min([*times, began.get(launch, math.inf)])
    order = sorted(generations, key=lambda one: (began[one[0]], one))
    return [generations[one] for one in order]


def _count(lines: Iterable[dict[str, Any]], redone: int) -> Survey:
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
    return Survey(len(by_step), redone, dict(uses))
