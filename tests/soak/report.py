"""Results of a soak, as JSON and as Markdown for the documentation."""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import attrs

from .campaign import FAULT_KINDS, Campaign
from .campaign_runner import CampaignResult, FaultResult
from .phases import PHASES, quantile


@attrs.frozen
class Baseline:
    """The run of the same steps without faults."""

    final_digest: str  # of the weights at the end
    digests: dict[int, str]  # of the weights, by step
    seconds: float


@attrs.frozen
class Rates:
    """The speed of the job."""

    steps: int
    useful_s: float  # the time of all steps that count
    wall_s: float  # from the first step to the end of the last, without waits for the campaign
    baseline_s: float  # the time of the baseline

    @property
    def goodput(self) -> float:
        """The share of the time that was spent in steps that count."""
        return self.useful_s / self.wall_s if self.wall_s else 0.0

    @property
    def relative_speed(self) -> float:
        """The steps per second as a share of those of the baseline."""
        return self.baseline_s / self.wall_s if self.wall_s else 0.0


def as_json(
    campaign: Campaign,
    result: CampaignResult,
    rates: Rates,
    violations: Sequence[str],
    notes: Sequence[str],
) -> dict[str, Any]:
    """Return all results as JSON values."""
    faults, repeated = result.faults, repeated_steps(result.faults)
    return {
        "seed": campaign.seed,
        "mix": dict(campaign.mix),
        "spacing": campaign.spacing,
        "faults": len(faults),
        "steps": rates.steps,
        "seconds": round(rates.wall_s, 3),
        "seconds_per_fault": round(rates.wall_s / max(1, len(faults)), 3),
        "goodput": round(rates.goodput, 4),
        "relative_speed": round(rates.relative_speed, 4),
        "baseline_seconds": round(rates.baseline_s, 3),
        "restarts": result.restarts,
        "ineffective_attempts": sum(len(fault.ineffective_attempts) for fault in faults),
        "repeated_steps": sum(repeated.values()),
        "by_kind": {kind: _summary(of, repeated) for kind, of in _by_kind(faults).items()},
        "all": _summary(faults, repeated),
        "violations": list(violations),
        "notes": list(notes),
        "versions": {"torch": version("torch"), "python": platform.python_version()},
    }


def repeated_steps(faults: Sequence[FaultResult]) -> dict[int, int]:
    """Return the number of repeated steps that each fault caused, by the number of the fault.

    Steps that a generation discards are the cost of the last fault before that generation. They are
    known when the generation has ended, which is during a later fault.
    """
    repeated = dict.fromkeys((fault.number for fault in faults), 0)
    for generation, steps in ((g, s) for fault in faults for g, s in fault.discarded.items()):
        causes = [fault.number for fault in faults if fault.generation < generation]
        if causes:
            repeated[causes[-1]] += steps
    return repeated


def _by_kind(faults: Sequence[FaultResult]) -> dict[str, list[FaultResult]]:
    by_kind: dict[str, list[FaultResult]] = defaultdict(list)
    for fault in faults:
        by_kind[fault.kind].append(fault)
    return {kind: by_kind[kind] for kind in FAULT_KINDS if kind in by_kind}


def _summary(faults: Sequence[FaultResult], repeated: Mapping[int, int]) -> dict[str, Any]:
    recoveries = [fault.recovery for fault in faults if fault.recovery is not None]
    steps = [repeated[fault.number] for fault in faults]
    columns = {
        "total": [r.total for r in recoveries],
        "pause": [r.pause for r in recoveries],
        **{phase: [r.seconds[phase] for r in recoveries if r.seconds] for phase in PHASES},
    }
    return {
        "count": len(faults),
        "repeated_steps": {"sum": sum(steps), "max": max(steps, default=0), **_quantiles(steps)},
        **{name: _quantiles(values) for name, values in columns.items()},
    }


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    return {"p50": round(quantile(values, 0.5), 4), "p99": round(quantile(values, 0.99), 4)}


def as_markdown(results: dict[str, Any]) -> str:
    """Return a summary and a table of all kinds of fault.

    Times are in seconds, as p50 / p99. A cell is empty if no fault of the kind had the phase.
    """
    lines = [
        f"{results['faults']} faults (seed {results['seed']}) in {results['seconds'] / 60:.0f} "
        f"minutes and {results['steps']} steps: one fault in {results['seconds_per_fault']:.2f} s. "
        f"{results['ineffective_attempts']} attempts had no effect. "
        f"Goodput {100 * results['goodput']:.1f} %; "
        f"{100 * results['relative_speed']:.1f} % of the steps per second of the run without "
        f"faults. {results['repeated_steps']} steps were repeated, {results['restarts']} restarts "
        f"were used. torch {results['versions']['torch']}, "
        f"Python {results['versions']['python']}.",
        "",
        "| fault | count | training paused | " + " | ".join(PHASES) + " | repeated steps |",
        "|---|---|---|" + "---|" * len(PHASES) + "---|",
    ]
    for kind, summary in (*results["by_kind"].items(), ("all", results["all"])):
        cells = [_cell(summary[name]) for name in ("pause", *PHASES)]
        steps = "{p50} / {p99}".format_map(summary["repeated_steps"])
        description = FAULT_KINDS[kind].description if kind in FAULT_KINDS else "all"
        lines.append(f"| {description} | {summary['count']} | {' | '.join(cells)} | {steps} |")
    lines += ["", "Times are in seconds, p50 / p99.", *results["notes"]]
    return "\n".join(lines + [f"WRONG: {violation}" for violation in results["violations"]]) + "\n"


def _cell(times: Mapping[str, float]) -> str:
    return f"{times['p50']:.2f} / {times['p99']:.2f}" if times["p99"] else ""
