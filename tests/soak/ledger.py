"""What the job trained on, generation by generation: steps that were not built on are struck out.

It is kept in memory alone, so that the files which it was read from can go while the job runs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs


@attrs.define
class Step:
    """One step as its ranks wrote it down. world: how many they were; began, done: seconds."""

    epoch: int
    world: int
    ranks: dict[int, Sequence[int]] = attrs.field(factory=dict)
    began: float = 0.0
    done: float = 0.0


@attrs.define
class Generation:
    """What the files of one generation say."""

    number: int
    began: list[float] = attrs.field(factory=list)
    resumed: list[Mapping[str, Any]] = attrs.field(factory=list)
    steps: dict[int, Step] = attrs.field(factory=dict)
    digests: dict[int, str] = attrs.field(factory=dict)
    over: set[str] = attrs.field(factory=set)
    held: float = 0.0
    others: list[Mapping[str, Any]] = attrs.field(factory=list)


def read_generation(number: int, files: Mapping[int, Iterable[Mapping[str, Any]]]) -> Generation:
    """The lines of each rank's file."""
    found = Generation(number)
    for rank, lines in files.items():
        for line in lines:
            if "indices" in line:
                step = Step(line["epoch"], line["world"], began=line["at"])
                found.steps.setdefault(line["step"], step).ranks[rank] = line["indices"]
            elif "done" in line and line["done"] in found.steps:
                found.steps[line["done"]].done = line["at"]
            elif "resumed" in line:
                found.resumed.append(line)
            elif "began" in line:
                found.began.append(line["began"])
            elif "digest" in line:
                found.digests[line["step"]] = line["digest"]
            elif "held" in line:
                found.held += line["held"]
            elif "over" in line:
                found.over.add(line["over"])
            else:
                found.others.append({**line, "rank": rank})
    return found


@attrs.define
class Ledger:
    """steps: those that the job rests on. struck: how many were begun and not built on; redone:
    those of them that all ranks had done. wrong: sentences."""

    steps: dict[int, Step] = attrs.field(factory=dict)
    digests: dict[int, str] = attrs.field(factory=dict)
    struck: int = 0
    newest: int = 0
    held: float = 0.0
    over: set[str] = attrs.field(factory=set)
    wrong: list[str] = attrs.field(factory=list)

    def fold(self, generation: Generation) -> int:
        """Take in one that is over, later than all before it; how many steps it struck out."""
        self.newest = generation.number
        self.held += generation.held
        resumed = {line["resumed"] for line in generation.resumed}
        if len(resumed) > 1:
            self.wrong.append(
                f"generation {generation.number}: ranks went on from {sorted(resumed)}"
            )
        if not resumed:
            return 0
        again = [step for step in self.steps if step > min(resumed)]
        for step in again:
            del self.steps[step]
            self.digests.pop(step, None)
        self.steps |= generation.steps
        self.digests |= generation.digests
        self.over = generation.over
        self.struck += len(again)
        return len(again)

    def useful_seconds(self) -> float:
        """What the steps that count took, each from its begin to its end."""
        return sum(s.done - s.began for s in self.steps.values() if s.done)

    def check(self, steps: int, samples: int, batch: int) -> list[str]:
        """What is wrong with a job that has come to its end after so many steps; sentences."""
        wrong = list(self.wrong)
        if sorted(self.steps) != list(range(1, steps + 1)):
            missing = sorted(set(range(1, steps + 1)) - set(self.steps))
            wrong.append(f"steps 1 to {steps} should count, and {missing[:5]} do not")
        for number, step in self.steps.items():
            if sorted(step.ranks) != list(range(step.world)):
                wrong.append(f"step {number} has ranks {sorted(step.ranks)} of {step.world}")
        return wrong + self._samples(steps, samples, batch)

    def _samples(self, steps: int, samples: int, batch: int) -> list[str]:
        used: dict[int, Counter[int]] = defaultdict(Counter)
        for step in self.steps.values():
            for indices in step.ranks.values():
                used[step.epoch].update(indices)
        wrong = []
        an_epoch = -(-samples // batch)
        for epoch in range(-(-steps // an_epoch)):
            whole = (epoch + 1) * an_epoch <= steps
            many = samples if whole else (steps - epoch * an_epoch) * batch
            twice = [sample for sample, count in used[epoch].items() if count > 1]
            strange = [sample for sample in used[epoch] if not 0 <= sample < samples]
            if twice or strange or len(used[epoch]) != many:
                wrong.append(
                    f"epoch {epoch}: {len(used[epoch])} of {many} samples were used, "
                    f"{twice[:3]} more than once, {strange[:3]} are none"
                )
        return wrong
