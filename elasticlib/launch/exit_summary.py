"""The few lines at the end of a run on what it lost and where to read more, success or not.

They are of what this node's agent knows, and folded while it goes on: no file is read for them.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator

from ..observe.history import Cost, Generation, Why
from ..observe.journal import NodeJournal
from ..observe.story import DEAREST, Sums

LONGEST_CAUSE = 100


def summary(journal: NodeJournal, logs: str) -> str:
    """All lines, once the run is over; none where no workers were run here. logs: where these are
    kept."""
    sums = journal.story.sums()
    if not sums.generations:
        return ""
    events = journal.path if os.path.exists(journal.path) else ""
    return "".join(f"{line}\n" for line in (*told(sums), *_places(journal.found_by, logs, events)))


def told(sums: Sums) -> Iterator[str]:
    """What a run came to on this node: one line, and some more if there was anything to lose."""
    count = sums.generations
    said = [f"{duration(sums.seconds)} in {count} generation{'s' * (count > 1)}"]
    if sums.first_step is not None:
        said.append(f"the first step done after {duration(sums.first_step)}")
    if sums.goodput is not None:
        said.append(f"goodput {100 * sums.goodput:.1f} % on this node")
    if sums.saved is not None:
        said.append(f"last checkpoint of step {sums.saved}")
    if sums.snapshot is not None:
        said.append(f"last snapshot of step {sums.snapshot}")
    yield ", ".join(said)
    if count == 1:
        return
    if count > 1 + DEAREST:
        counts = (f"{n} {why.words}" for why, n in sums.counts.items() if why is not Why.START)
        yield f"  {', '.join(counts)}; those that cost most:"
    yield from map(_generation, sums.dearest)
    yield f"  lost on this node: {_phases(sums.lost)}"


def _generation(made: Generation) -> str:
    cause = " ".join(made.cause.split())
    if len(cause) > LONGEST_CAUSE:
        cause = f"{cause[:LONGEST_CAUSE]}..."
    cost = f"{duration(made.cost.seconds)} lost"
    return f"  generation {made.number} {made.why.words}, {cost}{cause and ': '}{cause}"


def _phases(lost: Cost) -> str:
    names = ("detect", "stop", "rendezvous", "start", "restore")
    told = [(name, getattr(lost, name)) for name in names]
    said = [f"{name} {duration(seconds)}" for name, seconds in told if seconds is not None]
    if lost.redone:
        steps = f"{lost.redone} step{'s' * (lost.redone > 1)}"
        said.append(f"{steps} redone in {duration(lost.redone_seconds)}")
    return ", ".join(said) or "nothing that was told"


def _places(name: str, logs: str, events: str) -> Iterator[str]:
    if logs and os.path.dirname(events) == logs:
        said = [f"logs and events in {logs}"]
    else:
        said = [f"{name} in {path}" for name, path in (("logs", logs), ("events", events)) if path]
    if events:
        said.append(f"more: elasticlib report {shlex.quote(name)}")
    if said:
        yield "; ".join(said)


def duration(seconds: float) -> str:
    """For people: `0.53 s`, `12.3 s`, `4 min 2 s`, `3 h 20 min`, `2 d 3 h`."""
    if seconds < 99.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"
