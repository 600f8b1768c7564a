"""The end of a run in words: what merely followed first, the first cause last.

The last lines on the screen are what people read, so they name the cause, whichever node it was
on; the same stands in failure.json, where the run has a folder that is kept.
"""

from __future__ import annotations

import json

import attrs

from ..agent.interface import Cause, RunResult

FILE = "failure.json"
NAME = "elasticrun"


def told(result: RunResult) -> str:
    """All that is said at the end of a run, as lines."""
    word = result.state.value.upper()
    cause = "" if result.cause is None else _explained(result.cause)
    return f"{cause}{NAME}: {word}: {result.reason}\n"


def as_json(result: RunResult) -> bytes:
    """The same, for programs."""
    said = {
        "state": result.state.value,
        "reason": result.reason,
        "generation": result.generation,
        "restarts": result.restarts,
        "cause": None if result.cause is None else attrs.asdict(result.cause),
    }
    return json.dumps(said, indent=2).encode() + b"\n"


def as_error_file(result: RunResult, now: float) -> bytes:
    """The first failure, or else the reason, as a launcher's error.json in torch's shape; now:
    seconds since 1970."""
    cause = result.cause
    for exit_ in result.failures.values():
        first = exit_.root
        if cause is not None and first.rank == cause.rank and first.error_data:
            # As the worker itself wrote it, with all that it says.
            return json.dumps(_with_code(dict(first.error_data), cause.returncode)).encode()
    message = result.reason if cause is None else cause.message or cause.sentence
    trace = "" if cause is None else cause.traceback or cause.tail
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


def _explained(cause: Cause) -> str:
    lines = [f"{NAME}: first failure of generation {cause.generation}, on {cause.host}:"]
    lines.append(f"  {cause.sentence}")
    if cause.followed:
        ranks = ", ".join(str(rank) for rank in cause.followed)
        lines.append(f"  failed as well, afterwards: rank{'s' * (len(cause.followed) > 1)} {ranks}")
    if cause.log:
        lines.append(f"  logs: {cause.log} on {cause.host}")
    evidence = cause.traceback or cause.tail
    if evidence and not cause.traceback:
        lines.append("  the last lines of its stderr:")
    lines += [f"    {line}" for line in evidence.rstrip().splitlines()]
    return "".join(f"{line}\n" for line in lines)
