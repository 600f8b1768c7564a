"""How a job ended, from how it ended on each of the nodes whose agents came back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from ...agent.interface import RunResult
from ...workers.exit import WorkerExit
from ...workers.spec import WorkerState

# What one node knows of the whole job goes before what it knows of itself.
_WEIGHT = (WorkerState.SUCCEEDED, WorkerState.FAILED, WorkerState.DRAINED, WorkerState.STOPPED)


def merged(results: Sequence[RunResult], asked: int = 0, failure: str = "") -> RunResult:
    """One result of all: values and failures by global rank.

    asked: the signal that the driver passed on to the agents. failure: why the job was given up,
    where none of them knows.
    """
    if not results:
        if asked and not failure:
            reason = f"signal {asked} came before any agent ran"
            return RunResult(WorkerState.STOPPED, reason, signal=asked)
        return RunResult(WorkerState.FAILED, failure or "no agent came back")
    best = min(results, key=lambda result: _WEIGHT.index(result.state))
    if failure and best.state is not WorkerState.SUCCEEDED:
        best = attrs.evolve(best, state=WorkerState.FAILED, reason=failure)
    values: dict[int, Any] = {}
    failures: dict[int, WorkerExit] = {}
    for result in sorted(results, key=lambda result: result is not best):
        values.update(result.values)
        failures = {**result.failures, **failures}
    first = -1 if best.cause is None else best.cause.rank
    ordered = dict(sorted(failures.items(), key=lambda item: (item[0] != first, item[0])))
    cause = best.cause or next((r.cause for r in results if r.cause is not None), None)
    return attrs.evolve(best, values=dict(sorted(values.items())), failures=ordered, cause=cause)
