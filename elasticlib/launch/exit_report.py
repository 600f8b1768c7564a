"""What a run says at its end: what it lost and where to read more, then how it ended.

The last lines on the screen are what people read, so they name the first cause, whichever node it
was on, after what merely followed from it; the same stands in failure.json, where the run has a
folder that is kept. What was lost is folded while the run goes on: no file is read for it.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
from collections.abc import Iterator

import attrs

from ..agent.interface import RootCause, RunResult
from ..observe.formatting import NO_STEPS_TEXT, format_duration, format_percent, plural
from ..observe.history import Generation, GenerationTrigger, RecoveryCost
from ..observe.journal import NodeJournal
from ..observe.totals import MAX_LISTED_GENERATIONS, NodeTotals, totals_of
from ..workers.interface import Workers
from ..workers.local_workers import LocalWorkers
from ..workers.spec import WorkerState

log = logging.getLogger("elasticlib.launch")

FAILURE = "failure.json"
NAME = "elasticrun"
LONGEST_CAUSE = 100


# -- what it lost ----------------------------------------------------------------------------------


def summary(journal: NodeJournal, logs: str) -> str:
    """All lines, once the run is over; none where no workers were run here. logs: where these are
    kept."""
    totals = totals_of(journal.aggregate)
    if not totals.num_generations:
        return ""
    events = journal.path if os.path.exists(journal.path) else ""
    return "".join(
        f"{line}\n"
        for line in (*summary_lines(totals), *_places(journal.run_selector, logs, events))
    )


def summary_lines(totals: NodeTotals) -> Iterator[str]:
    """What a run came to on this node: one line, and some more if there was anything to lose."""
    count = totals.num_generations
    said = [f"{format_duration(totals.seconds)} in {plural(count, 'generation')}"]
    launch = totals.startup
    if totals.first_step_seconds is not None:
        parts = f" ({_phases(launch)})" if launch.phases else ""
        said.append(f"first step after {format_duration(totals.first_step_seconds)}{parts}")
    elif launch.rendezvous is not None:
        waited = RecoveryCost(imports=launch.imports, rendezvous=launch.rendezvous)
        said.append(f"first workers started after {_phases(waited)}")
    if totals.goodput is not None:
        said.append(f"goodput {format_percent(totals.goodput)} (this node)")
    if totals.checkpoint_step is not None:
        said.append(f"last checkpoint: step {totals.checkpoint_step}")
    if totals.snapshot_step is not None:
        said.append(f"last snapshot: step {totals.snapshot_step}")
    yield ", ".join(said)
    if count > 1 + MAX_LISTED_GENERATIONS:
        counts = (
            f"{n} {why.phrase}"
            for why, n in totals.triggers.items()
            if why is not GenerationTrigger.START
        )
        yield f"  {', '.join(counts)}; most expensive:"
    stepless = totals.productive_seconds is None
    yield from (_generation(made, stepless=stepless) for made in totals.most_expensive)
    if count > 1 or totals.lost.seconds:
        unknown = f"; {NO_STEPS_TEXT}" if stepless else ""
        yield f"  time lost on this node: {_phases(totals.lost)}{unknown}"


def _generation(made: Generation, *, stepless: bool) -> str:
    cause = " ".join(made.reason.split())
    if len(cause) > LONGEST_CAUSE:
        cause = f"{cause[:LONGEST_CAUSE]}..."
    cost = f"{format_duration(made.cost.seconds)} lost"
    if stepless:
        phases = (made.cost.shutdown, made.cost.imports, made.cost.rendezvous)
        waited = sum(seconds or 0.0 for seconds in phases)
        cost = f"workers started after {format_duration(waited)}"
    return f"  generation {made.number} {made.trigger.phrase}, {cost}{cause and ': '}{cause}"


def _phases(lost: RecoveryCost) -> str:
    said = {name: f"{name} {format_duration(seconds)}" for name, seconds in lost.phases.items()}
    if "repeated" in said:
        steps = plural(lost.repeated_steps, "step")
        said["repeated"] = f"{steps} repeated in {format_duration(lost.repeated or 0.0)}"
    return ", ".join(said.values()) or "none recorded"


def _places(name: str, logs: str, events: str) -> Iterator[str]:
    if logs and os.path.dirname(events) == logs:
        said = [f"logs and events in {logs}"]
    else:
        said = [f"{name} in {path}" for name, path in (("logs", logs), ("events", events)) if path]
    if events:
        said.append(f"more: elasticlib report {shlex.quote(name)}")
    if said:
        yield "; ".join(said)


# -- how it ended ----------------------------------------------------------------------------------


def result_text(result: RunResult) -> str:
    """All that is said at the end of a run, as lines."""
    word = result.state.value.upper()
    cause = "" if result.root_cause is None else _explained(result.root_cause)
    return f"{cause}{NAME}: {word}: {' '.join(result.reason.split())}\n"


def write_failure(workers: Workers, result: RunResult) -> None:
    """The same for programs, if the run failed and has a folder that stays."""
    folder = workers.kept_run_dir if isinstance(workers, LocalWorkers) else None
    if folder is None or result.state is not WorkerState.FAILED:
        return
    said = {
        "state": result.state.value,
        "reason": result.reason,
        "generation": result.generation,
        "restarts": result.restarts,
        "root_cause": None if result.root_cause is None else attrs.asdict(result.root_cause),
    }
    try:
        (folder / FAILURE).write_bytes(json.dumps(said, indent=2).encode() + b"\n")
    except OSError as error:
        log.warning("the report is not written to %s: %s", folder, error)


def error_file(result: RunResult, now: float) -> bytes:
    """The first failure, or else the reason, as a launcher's error.json in torch's shape; now:
    seconds since 1970."""
    cause = result.root_cause
    for exit_ in result.failures.values():
        first = exit_.root_failure
        if cause is not None and first.rank == cause.rank and first.error_data:
            # As the worker itself wrote it, with all that it says.
            return json.dumps(_with_code(dict(first.error_data), cause.returncode)).encode()
    message = result.reason if cause is None else cause.message or cause.summary
    trace = "" if cause is None else cause.traceback or cause.stderr_tail
    said: dict[str, object] = {
        "message": message,
        "extraInfo": {"py_callstack": trace, "timestamp": str(int(now))},
    }
    if cause is not None:
        said["errorCode"] = cause.returncode
    return json.dumps({"message": said}).encode()


def _with_code(data: dict[str, object], code: int) -> dict[str, object]:
    said = data.get("message")
    return {**data, "message": {**said, "errorCode": code}} if isinstance(said, dict) else data


def _explained(cause: RootCause) -> str:
    head = f"{NAME}: root cause in generation {cause.generation}, on {cause.host}"
    if cause.subsequent_ranks:
        ranks = ", ".join(str(rank) for rank in cause.subsequent_ranks)
        noun = "failures of ranks" if len(cause.subsequent_ranks) > 1 else "failure of rank"
        head += f" (followed by {noun} {ranks})"
    lines = [f"{head}:", f"  {cause.summary}"]
    if cause.log_dir:
        lines.append(f"  logs: {cause.log_dir} on {cause.host}")
    evidence = cause.traceback or cause.stderr_tail
    if evidence and not cause.traceback:
        lines.append("  the last lines of its stderr:")
    lines += [f"    {line}" for line in evidence.rstrip().splitlines()]
    return "".join(f"{line}\n" for line in lines)
