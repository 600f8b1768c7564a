"""The exit summary of elasticrun: what the run lost, and its result.

The root cause is printed last, because users read the last lines. It may be a failure of another
node. The result of a failed run is also written to failure.json if the run's directory is kept. The
losses are aggregated while the run continues, so that no file is read at the end.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
from collections.abc import Iterator

import attrs

from ..agent.interface import RootCause, RunResult
from ..observe.aggregate import NodeAggregate, finished_state
from ..observe.formatting import NO_STEPS_TEXT, format_duration, format_percent, plural
from ..observe.history import Generation, GenerationTrigger, JobState, RecoveryCost
from ..observe.journal import NodeJournal
from ..observe.totals import MAX_LISTED_GENERATIONS, NodeTotals, totals_of
from ..sanitize import shorten
from ..workers.interface import Workers
from ..workers.local_workers import LocalWorkers
from ..workers.spec import WorkerState

log = logging.getLogger("elasticlib.launch")

FAILURE_FILE = "failure.json"
NAME = "elasticrun"
MAX_REASON_CHARS = 100
MAX_COMMAND_CHARS = 500
# --preload is suggested if it saves this time of each start, and this share of it.
MIN_SAVED_S, MIN_SAVED_SHARE = 1.0, 1 / 3


# -- what the run lost -----------------------------------------------------------------------------


def format_summary(journal: NodeJournal, log_dir: str) -> str:
    """Return the summary of a finished run, or an empty string if no workers ran on this node.

    Args:
        journal: the journal of this node.
        log_dir: the directory of the logs, or an empty string if it is removed with the run.
    """
    totals = totals_of(journal.aggregate)
    if not totals.num_generations:
        return ""
    events = journal.path if os.path.exists(journal.path) else ""
    lines = (
        *summary_lines(totals),
        *_file_lines(journal.run_selector, log_dir, events),
        *_command_lines(journal.aggregate),
    )
    return "".join(f"{line}\n" for line in lines)


def summary_lines(totals: NodeTotals) -> Iterator[str]:
    """Yield one line about the run on this node, and more lines if it lost time."""
    yield ", ".join(_overview(totals))
    count = totals.num_generations
    if count > 1 + MAX_LISTED_GENERATIONS:
        triggers = (
            f"{number} {trigger.phrase}"
            for trigger, number in totals.triggers.items()
            if trigger is not GenerationTrigger.START
        )
        yield f"  {', '.join(triggers)}; most expensive:"
    has_no_steps = totals.productive_seconds is None
    for generation in totals.most_expensive:
        yield _generation_line(generation, has_no_steps=has_no_steps)
    if count > 1 or totals.lost.seconds:
        suffix = f"; {NO_STEPS_TEXT}" if has_no_steps else ""
        yield f"  time lost on this node: {_format_phases(totals.lost)}{suffix}"
        yield from _preload_lines(totals)


def _preload_lines(totals: NodeTotals) -> Iterator[str]:
    """Suggest --preload if the start of workers was most of the lost time, and imports of that."""
    startup = totals.lost.startup or 0.0
    per_restart = startup / max(1, totals.num_generations - 1)
    saved = sum(totals.slow_imports.values())
    is_worth_it = saved >= max(MIN_SAVED_S, MIN_SAVED_SHARE * per_restart)
    if is_worth_it and startup > totals.lost.seconds / 2:
        yield (
            "  most of the lost time was the start of workers: add "
            f"{','.join(sorted(totals.slow_imports))} to --preload to import "
            f"{format_duration(saved)} of each start in advance"
        )


def _overview(totals: NodeTotals) -> Iterator[str]:
    startup = totals.startup
    generations = plural(totals.num_generations, "generation")
    yield f"{format_duration(totals.seconds)} in {generations}"
    if totals.first_step_seconds is not None:
        phases = f" ({_format_phases(startup)})" if startup.phases else ""
        yield f"first step after {format_duration(totals.first_step_seconds)}{phases}"
    elif startup.rendezvous is not None:
        waited = RecoveryCost(imports=startup.imports, rendezvous=startup.rendezvous)
        yield f"first workers started after {_format_phases(waited)}"
    if totals.goodput is not None:
        yield f"goodput {format_percent(totals.goodput)} (this node)"
    if totals.checkpoint_step is not None:
        yield f"last checkpoint: step {totals.checkpoint_step}"
    if totals.snapshot_step is not None:
        yield f"last snapshot: step {totals.snapshot_step}"


def _generation_line(generation: Generation, *, has_no_steps: bool) -> str:
    reason = " ".join(generation.reason.split())
    if len(reason) > MAX_REASON_CHARS:
        reason = f"{reason[:MAX_REASON_CHARS]}..."
    cost = f"{format_duration(generation.cost.seconds)} lost"
    if has_no_steps:
        phases = (
            generation.cost.shutdown,
            generation.cost.imports,
            generation.cost.rendezvous,
        )
        waited = sum(seconds or 0.0 for seconds in phases)
        cost = f"workers started after {format_duration(waited)}"
    suffix = f": {reason}" if reason else ""
    return f"  generation {generation.number} {generation.trigger.phrase}, {cost}{suffix}"


def _format_phases(cost: RecoveryCost) -> str:
    texts = {name: f"{name} {format_duration(seconds)}" for name, seconds in cost.phases.items()}
    if "repeated" in texts:
        steps = plural(cost.repeated_steps, "step")
        texts["repeated"] = f"{steps} repeated in {format_duration(cost.repeated or 0.0)}"
    return ", ".join(texts.values()) or "none recorded"


def _file_lines(run: str, log_dir: str, events: str) -> Iterator[str]:
    if log_dir and os.path.dirname(events) == log_dir:
        parts = [f"logs and events in {log_dir}"]
    else:
        files = (("logs", log_dir), ("events", events))
        parts = [f"{name} in {path}" for name, path in files if path]
    if events:
        parts.append(f"more: elasticlib report {shlex.quote(run)}")
    if parts:
        yield "; ".join(parts)


def _command_lines(aggregate: NodeAggregate) -> Iterator[str]:
    """Yield the command line of the run if the run failed."""
    end = aggregate.end
    if end is not None and finished_state(end.state) is JobState.FAILED:
        yield f"command: {shorten(aggregate.start.command, MAX_COMMAND_CHARS)}"


# -- result of the run -----------------------------------------------------------------------------


def format_result(result: RunResult) -> str:
    """Return the last lines of a run: the root cause, then the state and its reason."""
    reason = " ".join(result.reason.split())
    cause = "" if result.root_cause is None else _describe(result.root_cause, reason)
    return f"{cause}{NAME}: {result.state.value.upper()}: {reason}\n"


def write_failure_json(workers: Workers, result: RunResult) -> None:
    """Write failure.json if the run has failed and its directory is kept."""
    run_dir = workers.kept_run_dir if isinstance(workers, LocalWorkers) else None
    if run_dir is None or result.state is not WorkerState.FAILED:
        return
    content = {
        "state": result.state.value,
        "reason": result.reason,
        "generation": result.generation,
        "restarts": result.restarts,
        "root_cause": None if result.root_cause is None else attrs.asdict(result.root_cause),
    }
    try:
        (run_dir / FAILURE_FILE).write_bytes(json.dumps(content, indent=2).encode() + b"\n")
    except OSError as error:
        log.warning("cannot write %s to %s: %s", FAILURE_FILE, run_dir, error)


def encode_error_file(result: RunResult, now: float) -> bytes:
    """Return a launcher's error.json in torch's shape, with the root cause or the reason.

    Args:
        result: the result of the run.
        now: seconds since the epoch.
    """
    cause = result.root_cause
    for exit_ in result.failures.values():
        root = exit_.root_failure
        if cause is not None and root.rank == cause.rank and root.error_data:
            # The worker's own record has more than what this node knows.
            return json.dumps(_with_error_code(dict(root.error_data), cause.returncode)).encode()
    text = result.reason if cause is None else cause.message or cause.summary
    traceback = "" if cause is None else cause.traceback or cause.stderr_tail
    message: dict[str, object] = {
        "message": text,
        "extraInfo": {"py_callstack": traceback, "timestamp": str(int(now))},
    }
    if cause is not None:
        message["errorCode"] = cause.returncode
    return json.dumps({"message": message}).encode()


def _with_error_code(record: dict[str, object], code: int) -> dict[str, object]:
    message = record.get("message")
    if not isinstance(message, dict):
        return record
    return {**record, "message": {**message, "errorCode": code}}


def _describe(cause: RootCause, reason: str) -> str:
    """Return the lines about the root cause that stand before the reason of the result."""
    head = f"{NAME}: root cause in generation {cause.generation}, on {cause.host}"
    if cause.subsequent_ranks:
        ranks = ", ".join(str(rank) for rank in cause.subsequent_ranks)
        noun = "failures of ranks" if len(cause.subsequent_ranks) > 1 else "failure of rank"
        head += f" (followed by {noun} {ranks})"
    lines = [f"{head}:"]
    # The reason usually contains the summary, and is the line below.
    if " ".join(cause.summary.split()) not in reason:
        lines.append(f"  {cause.summary}")
    if cause.log_dir:
        lines.append(f"  logs: {cause.log_dir} on {cause.host}")
    evidence = cause.traceback or cause.stderr_tail
    if evidence and not cause.traceback:
        lines.append("  the last lines of its stderr:")
    lines += [f"    {line}" for line in evidence.rstrip().splitlines()]
    return "".join(f"{line}\n" for line in lines)
