"""Record of what the job trained on. Steps that no later generation builds on are discarded.

The record is in memory, so that the files from which it was read can be deleted during the job.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs


@attrs.define
class Step:
    """A step, as its ranks recorded it."""

    epoch: int
    world: int  # the number of ranks
    ranks: dict[int, Sequence[int]] = attrs.field(factory=dict)  # sample indices by rank
    started_at: float = 0.0
    done_at: float = 0.0  # 0 if it was not finished


@attrs.define
class Generation:
    """The contents of the trace files of one generation."""

    number: int
    started_at: list[float] = attrs.field(factory=list)  # one per rank
    restores: list[Mapping[str, Any]] = attrs.field(factory=list)  # one per rank
    steps: dict[int, Step] = attrs.field(factory=dict)
    digests: dict[int, str] = attrs.field(factory=dict)  # of the weights, by step
    final_digests: set[str] = attrs.field(factory=set)  # of the weights at the end of the job
    waited_s: float = 0.0  # how long the job waited for the campaign
    other_lines: list[Mapping[str, Any]] = attrs.field(factory=list)


def read_generation(number: int, files: Mapping[int, Iterable[Mapping[str, Any]]]) -> Generation:
    """Return a generation from the lines of the file of each rank."""
    generation = Generation(number)
    for rank, lines in files.items():
        for line in lines:
            _add_line(generation, rank, line)
    return generation


def _add_line(generation: Generation, rank: int, line: Mapping[str, Any]) -> None:
    if "indices" in line:
        step = Step(line["epoch"], line["world"], started_at=line["at"])
        generation.steps.setdefault(line["step"], step).ranks[rank] = line["indices"]
    elif "done" in line and line["done"] in generation.steps:
        generation.steps[line["done"]].done_at = line["at"]
    elif "resumed" in line:
        generation.restores.append(line)
    elif "started" in line:
        generation.started_at.append(line["started"])
    elif "digest" in line:
        generation.digests[line["step"]] = line["digest"]
    elif "waited" in line:
        generation.waited_s += line["waited"]
    elif "final_digest" in line:
        generation.final_digests.add(line["final_digest"])
    else:
        generation.other_lines.append({**line, "rank": rank})


@attrs.define
class TrainingHistory:
    """The steps that the current state of the job builds on."""

    steps: dict[int, Step] = attrs.field(factory=dict)
    digests: dict[int, str] = attrs.field(factory=dict)  # of the weights, by step
    discarded: int = 0  # steps that were started and that no later generation builds on
    newest: int = 0  # the number of the last generation that was added
    waited_s: float = 0.0  # how long the job waited for the campaign
    final_digests: set[str] = attrs.field(factory=set)
    violations: list[str] = attrs.field(factory=list)

    def add(self, generation: Generation) -> int:
        """Add a finished generation that is newer than all before it.

        Returns:
            The number of steps of earlier generations that it discarded.
        """
        self.newest = generation.number
        self.waited_s += generation.waited_s
        resumed = {line["resumed"] for line in generation.restores}
        if len(resumed) > 1:
            self.violations.append(
                f"generation {generation.number}: ranks resumed from different steps, "
                f"{sorted(resumed)}"
            )
        if not resumed:
            return 0
        discarded = [step for step in self.steps if step > min(resumed)]
        for step in discarded:
            del self.steps[step]
            self.digests.pop(step, None)
        self.steps |= generation.steps
        self.digests |= generation.digests
        self.final_digests = generation.final_digests
        self.discarded += len(discarded)
        return len(discarded)

    def useful_seconds(self) -> float:
        """Return the time of all steps that count, each from its start to its end."""
        return sum(step.done_at - step.started_at for step in self.steps.values() if step.done_at)

    def check(self, steps: int, samples: int, batch: int) -> list[str]:
        """Return what is wrong with a finished job; nothing if each sample was used once.

        Args:
            steps: The number of steps of the job.
            samples: The number of samples of an epoch.
            batch: The global batch size.
        """
        violations = list(self.violations)
        if sorted(self.steps) != list(range(1, steps + 1)):
            missing = sorted(set(range(1, steps + 1)) - set(self.steps))
            violations.append(f"steps 1 to {steps} must count, but {missing[:5]} do not")
        for number, step in self.steps.items():
            if sorted(step.ranks) != list(range(step.world)):
                violations.append(f"step {number} has ranks {sorted(step.ranks)} of {step.world}")
        return violations + self._check_samples(steps, samples, batch)

    def _check_samples(self, steps: int, samples: int, batch: int) -> list[str]:
        used: dict[int, Counter[int]] = defaultdict(Counter)
        for step in self.steps.values():
            for indices in step.ranks.values():
                used[step.epoch].update(indices)
        violations = []
        epoch_steps = -(-samples // batch)
        for epoch in range(-(-steps // epoch_steps)):
            is_complete = (epoch + 1) * epoch_steps <= steps
            expected = samples if is_complete else (steps - epoch * epoch_steps) * batch
            repeated = [sample for sample, count in used[epoch].items() if count > 1]
            invalid = [sample for sample in used[epoch] if not 0 <= sample < samples]
            if repeated or invalid or len(used[epoch]) != expected:
                violations.append(
                    f"epoch {epoch}: {len(used[epoch])} of {expected} samples were used, "
                    f"{repeated[:3]} more than once, {invalid[:3]} do not exist"
                )
        return violations
