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
from ..observe.history import Cost, Generation, GenerationTrigger
from ..observe.journal import NodeJournal
from ..observe.story import DEAREST, Sums
from ..observe.wording import STEPLESS, duration, percentage, plural
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
    sums = journal.story.sums()
    if not sums.generations:
        return ""
    events = journal.path if os.path.exists(journal.path) else ""
    return "".join(
        f"{line}\n" for line in (*summary_lines(sums), *_places(journal.found_by, logs, events))
    )


def summary_lines(sums: Sums) -> Iterator[str]:
    """What a run came to on this node: one line, and some more if there was anything to lose."""
    count = sums.generations
    said = [f"{duration(sums.seconds)} in {plural(count, 'generation')}"]
    launch = sums.launch
    if sums.first_step is not None:
        parts = f" ({_phases(launch)})" if launch.phases else ""
        said.append(f"the first step done after {duration(sums.first_step)}{parts}")
    elif launch.rendezvous is not None:
        waited = Cost(imports=launch.imports, rendezvous=launch.rendezvous)
        said.append(f"the first workers started after {_phases(waited)}")
    if sums.goodput is not None:
        said.append(f"goodput {percentage(sums.goodput)} on this node")
    if sums.saved is not None:
        said.append(f"last checkpoint of step {sums.saved}")
    if sums.snapshot is not None:
        said.append(f"last snapshot of step {sums.snapshot}")
    yield ", ".join(said)
    if count > 1 + DEAREST:
        counts = (
            f"{n} {why.phrase}"
            for why, n in sums.counts.items()
            if why is not GenerationTrigger.START
        )
        yield f"  {', '.join(counts)}; those that cost most:"
    stepless = sums.trained is None
    yield from (_generation(made, stepless=stepless) for made in sums.dearest)
    if count > 1 or sums.lost.seconds:
        unknown = f"; {STEPLESS}" if stepless else ""
        yield f"  lost on this node: {_phases(sums.lost)}{unknown}"


def _generation(made: Generation, *, stepless: bool) -> str:
    cause = " ".join(made.cause.split())
    if len(cause) > LONGEST_CAUSE:
        cause = f"{cause[:LONGEST_CAUSE]}..."
    cost = f"{duration(made.cost.seconds)} lost"
    if stepless:
        phases = (made.cost.stop, made.cost.imports, made.cost.rendezvous)
        waited = sum(seconds or 0.0 for seconds in phases)
        cost = f"workers started after {duration(waited)}"
    return f"  generation {made.number} {made.why.phrase}, {cost}{cause and ': '}{cause}"


def _phases(lost: Cost) -> str:
    said = {name: f"{name} {duration(seconds)}" for name, seconds in lost.phases.items()}
    if "redone" in said:
        steps = plural(lost.redone, "step")
        said["redone"] = f"{steps} redone in {duration(lost.redone_seconds)}"
    return ", ".join(said.values()) or "nothing that is known"


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
    head = f"{NAME}: first failure of generation {cause.generation}, on {cause.host}"
    if cause.subsequent_ranks:
        ranks = ", ".join(str(rank) for rank in cause.subsequent_ranks)
        head += f" (rank{'s' * (len(cause.subsequent_ranks) > 1)} {ranks} failed after it)"
    lines = [f"{head}:", f"  {cause.summary}"]
    if cause.log_dir:
        lines.append(f"  logs: {cause.log_dir} on {cause.host}")
    evidence = cause.traceback or cause.stderr_tail
    if evidence and not cause.traceback:
        lines.append("  the last lines of its stderr:")
    lines += [f"    {line}" for line in evidence.rstrip().splitlines()]
    return "".join(f"{line}\n" for line in lines)
