"""What a soak has to say: as JSON, and as a fragment of Markdown for people and the docs."""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import attrs

from .campaign import KINDS, Campaign
from .phases import PHASES, quantile
from .storm import Played, Told


@attrs.frozen
class Calm:
    """The undisturbed run: its weights by step, and how long its steps took."""

    digest: str
    digests: dict[int, str]
    seconds: float


@attrs.frozen
class Rates:
    """useful: seconds of steps that count; wall: from the first step to the end of the last, but
    for what the job was held for; calm: of the undisturbed run."""

    steps: int
    useful: float
    wall: float
    calm: float

    @property
    def goodput(self) -> float:
        return self.useful / self.wall if self.wall else 0.0

    @property
    def of_undisturbed(self) -> float:
        """The storm's steps a second as a share of the undisturbed run's."""
        return self.calm / self.wall if self.wall else 0.0


def as_json(
    campaign: Campaign, told: Told, rates: Rates, wrong: Sequence[str], asides: Sequence[str]
) -> dict[str, Any]:
    """All of it, for programs."""
    played, struck = told.played, charged(told.played)
    return {
        "seed": campaign.seed,
        "mix": dict(campaign.mix),
        "spacing": campaign.spacing,
        "faults": len(told.played),
        "steps": rates.steps,
        "seconds": round(rates.wall, 3),
        "seconds_a_fault": round(rates.wall / max(1, len(told.played)), 3),
        "goodput": round(rates.goodput, 4),
        "of_undisturbed": round(rates.of_undisturbed, 4),
        "undisturbed_seconds": round(rates.calm, 3),
        "restarts": told.restarts,
        "missed": sum(len(played.missed) for played in told.played),
        "struck": sum(struck.values()),
        "by_kind": {kind: _times(found, struck) for kind, found in _by_kind(played).items()},
        "all": _times(played, struck),
        "wrong": list(wrong),
        "asides": list(asides),
        "versions": {"torch": version("torch"), "python": platform.python_version()},
    }


def charged(played: Sequence[Played]) -> dict[int, int]:
    """The steps that each fault struck out, by its number: what a generation did not build on is
    the cost of the last fault of those before it. (It is known when that generation is over, one
    fault later at least, and beside what another, which that later fault began, has cost.)"""
    found = dict.fromkeys((one.number for one in played), 0)
    for generation, steps in ((g, s) for one in played for g, s in one.struck.items()):
        owner = [one.number for one in played if one.generation < generation]
        if owner:
            found[owner[-1]] += steps
    return found


def _by_kind(played: Sequence[Played]) -> dict[str, list[Played]]:
    found: dict[str, list[Played]] = defaultdict(list)
    for one in played:
        found[one.kind].append(one)
    return {kind: found[kind] for kind in KINDS if kind in found}


def _times(played: Sequence[Played], struck: Mapping[int, int]) -> dict[str, Any]:
    recoveries = [one.recovery for one in played if one.recovery is not None]
    again = [struck[one.number] for one in played]
    columns = {
        "total": [r.total for r in recoveries],
        "pause": [r.pause for r in recoveries],
        **{phase: [r.seconds[phase] for r in recoveries if r.seconds] for phase in PHASES},
    }
    return {
        "count": len(played),
        "struck": sum(again),
        "most_struck": max(again, default=0),
        "struck_quantiles": _quantiles(again),
        **{name: _quantiles(values) for name, values in columns.items()},
    }


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    return {"p50": round(quantile(values, 0.5), 4), "p99": round(quantile(values, 0.99), 4)}


def as_markdown(found: dict[str, Any]) -> str:
    """Seconds are p50 / p99; there is nothing where there was no such phase."""
    lines = [
        f"{found['faults']} faults (seed {found['seed']}) in {found['seconds'] / 60:.0f} minutes "
        f"and {found['steps']} steps: one in {found['seconds_a_fault']:.2f} s; {found['missed']} "
        f"tries took no effect. Goodput {100 * found['goodput']:.1f} %, and "
        f"{100 * found['of_undisturbed']:.1f} % of the undisturbed run's steps a second. "
        f"{found['struck']} steps done again, {found['restarts']} restarts charged; torch "
        f"{found['versions']['torch']}, Python {found['versions']['python']}.",
        "",
        "| fault | times | training stood | " + " | ".join(PHASES) + " | steps again |",
        "|---|---|---|" + "---|" * len(PHASES) + "---|",
    ]
    for kind, times in (*found["by_kind"].items(), ("all", found["all"])):
        cells = [_cell(times[name]) for name in ("pause", *PHASES)]
        again = "{p50} / {p99}".format_map(times["struck_quantiles"])
        what = KINDS[kind].what if kind in KINDS else "all"
        lines.append(f"| {what} | {times['count']} | {' | '.join(cells)} | {again} |")
    lines += ["", "Seconds, p50 / p99.", *found["asides"]]
    return "\n".join(lines + [f"WRONG: {sentence}" for sentence in found["wrong"]]) + "\n"


def _cell(times: Mapping[str, float]) -> str:
    return f"{times['p50']:.2f} / {times['p99']:.2f}" if times["p99"] else ""
