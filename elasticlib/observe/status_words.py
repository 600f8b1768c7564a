"""A job's status as a JSON document, as lines and tables for people, and as an exit code.

A job of many nodes is folded: who is unlike the others, and whose workers have been silent for
longest, stand by themselves, and all others share a line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from ..visible import visible_line
from .history import JobState
from .status import JobStatus, NodeEntry
from .story import WorkerStatus

VERSION = 1
FIELDS: Mapping[str, str] = {
    "v": "the version of this document; a new version only ever adds, or has another number",
    "run": "the job's id",
    "state": "WAITING, RENDEZVOUS, RUNNING, RESTARTING, RESIZING, DRAINING, SUCCEEDED, FAILED, "
    "PREEMPTED or STOPPED; null where nobody is left to tell",
    "reason": "why, in words",
    "source": "nodes: they were asked just now; store: none of them answered, and it is what the "
    "job's store holds; events: nor did that, and it is what was written down on this machine",
    "age": "seconds since the newest of it was written, null where nodes were asked",
    "since": "seconds for which the state has lasted, null if not known",
    "generation": "the number of the settled membership, 0 before the first",
    "minimum": "of nodes (--nnodes), null if not known",
    "maximum": "of nodes, null if not known",
    "world": "workers in the generation",
    "restarts": "after failures, so far",
    "max_restarts": "how many there may be, null if not known",
    "step": "the smallest that a worker told of last, null if none does",
    "per_second": "steps of the slowest worker or node, null if not known",
    "saved": "step of the last checkpoint, null if none was told of",
    "snapshot": "the newest step that is whole in the memory of all nodes which keep it, or null",
    "nodes": "one object each, members first, by rank, as below",
    "exit_code": "of this command",
}
NODE_FIELDS: Mapping[str, str] = {
    "node": "its id",
    "host": "its name",
    "rank": "among the members; null for who joins or, as a spare, waits to be let in",
    "lives": "whether its lease in the store stands, or its agent is there where events tell of it",
    "answers": "whether it answered; where its events tell of it, it did not",
    "state": "its own, in the same words; null if it does not answer",
    "since": "seconds for which it has been in that state; until its last event, where these tell",
    "up": "seconds since its agent began; the same",
    "heard": "seconds since the store last took its word, null if not known",
    "draining": "why it is about to leave, empty if it is not",
    "slots": "workers that it can run",
    "pid": "of its agent",
    "workers": "one object each: rank, local_rank, name (such as pid 123), running, step, "
    "per_second, silent (seconds since its last sign of life), saved; null where it does not tell",
}
EXIT_CODES: Mapping[int, str] = {
    0: "it runs, or has succeeded",
    1: "it has failed",
    2: "the command line makes no sense",
    3: "it is between: WAITING, RENDEZVOUS, RESTARTING, RESIZING or DRAINING",
    4: "there is no such run, or nobody answers or can be asked",
    5: "it ended before it was done: STOPPED by a signal, or PREEMPTED",
}
NOBODY = 4
MOST_NODES = 24
"""Lines for nodes, before they are folded."""
MOST_RANKS = 32
"""Workers that have a line each."""
QUIETEST = 5


def exit_code(status: JobStatus) -> int:
    """For scripts: see EXIT_CODES."""
    state = status.state
    if state is None:
        return NOBODY
    if not state.over:
        running = state is JobState.RUNNING
        if status.starting:
            return 3
        # Files, or the store, say that it ran; nobody said that it does.
        heard = status.age is None and not status.unanswered
        return NOBODY if not heard else 0 if running else 3
    return {JobState.SUCCEEDED: 0, JobState.FAILED: 1}.get(state, 5)


def as_document(status: JobStatus) -> dict[str, Any]:
    """With the keys of FIELDS."""
    taken = ("run", "reason", "age", "since", "generation", "minimum", "maximum", "world")
    more = ("restarts", "max_restarts", "step", "per_second", "saved", "snapshot")
    return {
        "v": VERSION,
        "state": None if status.state is None else status.state.value,
        "source": _source(status),
        **{name: getattr(status, name) for name in (*taken, *more)},
        "nodes": [_node_document(node, status.age is None) for node in status.nodes],
        "exit_code": exit_code(status),
    }


def _source(status: JobStatus) -> str:
    if status.age is not None:
        return "events"
    return "store" if status.unanswered else "nodes"


def _node_document(node: NodeEntry, asked: bool) -> dict[str, Any]:
    answer, status = node.answer, node.status
    return {
        **{name: getattr(node, name) for name in ("node", "host", "rank", "lives", "draining")},
        "slots": node.slots,
        "answers": asked and answer is not None,
        "state": None if status is None else status.state.value,
        "since": None if answer is None else answer.state_seconds,
        "up": None if answer is None else answer.up_seconds,
        "heard": None if answer is None else answer.heard,
        "pid": None if status is None else status.pid,
        "workers": [] if status is None else [attrs.asdict(w) for w in status.workers],
    }


# -- for people ------------------------------------------------------------------------------------

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""A head, and rows."""
NODE_HEAD = ("node", "host", "state", "heard", "ranks", "step", "steps/s", "silent")
RANK_HEAD = ("rank", "host", "process", "step", "steps/s", "silent", "saved")


def headline(status: JobStatus) -> list[str]:
    """What is to be said before the tables."""
    state = "not answering, or no longer there" if status.state is None else status.state.value
    lasted = "" if status.since is None else f" for {duration(status.since)}"
    lines = [f"{status.run}: {state}{lasted}"]
    if status.age is not None:
        over = status.state is not None and status.state.over
        said = "as its events tell" if over else "nobody answered, and its events tell this"
        if status.starting:
            said = "it is starting, as its events tell"
        lines.append(f"  {said}, the last of {duration(status.age)} ago")
    elif status.unanswered:
        lines.append("  none of its nodes answers, and its store tells this")
    lines += [f"  {line}" for line in _facts(status)]
    if status.reason:
        lines.append(f"  why: {status.reason}")
    # Peers, and files that anybody may have written, have told most of it.
    return [visible_line(line) for line in lines]


def _facts(status: JobStatus) -> list[str]:
    least = "" if status.minimum is None else f" (of {status.minimum} to {status.maximum})"
    here = sum(node.lives for node in status.nodes)
    counted = status.members if status.generation and status.members else status.nodes
    nodes = f"{len(counted)} node{'s' * (len(counted) != 1)}{least}"
    if status.state is JobState.WAITING:
        nodes = f"{here} of at least {status.minimum or '?'} nodes are here"
    budget = "" if status.max_restarts is None else f" of {status.max_restarts}"
    first = [f"generation {status.generation}", nodes, f"{status.world} workers"]
    lines = [", ".join([*first, f"{status.restarts}{budget} restarts"])]
    told = {
        "step": status.step,
        "steps/s": None if status.per_second is None else number(status.per_second),
        "checkpoint": status.saved,
        "snapshot": status.snapshot,
    }
    known = [f"{name} {value}" for name, value in told.items() if value is not None]
    if known:
        lines.append(", ".join(known))
    for name, found in (("spares", status.spares), ("not answering", status.silent)):
        if found and status.generation:
            lines.append(f"{name}: {_named(found)}")
    return lines


def _named(nodes: Sequence[NodeEntry]) -> str:
    names = ", ".join(node.host for node in nodes[:MOST_NODES])
    more = len(nodes) - MOST_NODES
    return f"{names} and {more} more" if more > 0 else names


def node_table(status: JobStatus) -> Table:
    """A line a node, or where they are many, one each for those that are unlike the others."""
    nodes = status.nodes
    unranked = "spare" if status.generation else "joining"
    if len(nodes) <= MOST_NODES:
        return NODE_HEAD, [_node_row((node,), unranked) for node in nodes]
    common = Counter(node.state for node in nodes).most_common(1)[0][0]
    odd = [node for node in nodes if node.state != common][: MOST_NODES - QUIETEST - 1]
    same = [node for node in nodes if node.state == common]
    quiet = sorted(same, key=lambda node: -(_silence(node) or 0.0))[:QUIETEST]
    shown = {node.node for node in (*odd, *quiet)}
    rows = [_node_row((node,), unranked) for node in (*odd, *quiet)]
    for state in dict.fromkeys(node.state for node in nodes):
        rest = [node for node in nodes if node.state == state and node.node not in shown]
        if rest:
            rows.append(_node_row(rest, unranked))
    return NODE_HEAD, rows


def rank_table(status: JobStatus) -> Table:
    """A line a worker; none where they are many, or have all ended and tell nothing."""
    statuses = [node.status for node in status.nodes if node.status is not None]
    if not any(_is_worth_a_line(worker) for one in statuses for worker in one.workers):
        return RANK_HEAD, []
    rows = [
        (
            str(worker.rank),
            visible_line(node.host),
            visible_line(worker.name if worker.running else f"{worker.name} (ended)"),
            _known(worker.step),
            _known(worker.per_second, number),
            _known(worker.silent, duration),
            _known(worker.saved),
        )
        for node in status.nodes
        if node.status is not None
        for worker in node.status.workers
    ]
    return RANK_HEAD, rows if len(rows) <= MOST_RANKS else []


def _is_worth_a_line(worker: WorkerStatus) -> bool:
    told = (worker.step, worker.per_second, worker.silent, worker.saved)
    return worker.running or any(value is not None for value in told)


def _node_row(nodes: Sequence[NodeEntry], unranked: str) -> Sequence[str]:
    """unranked: what one is that lives and has no rank."""
    first = nodes[0]
    workers = [w for node in nodes if node.status is not None for w in node.status.workers]
    ranks = [node.rank for node in nodes if node.rank is not None]
    place = spans(ranks) if ranks else unranked if first.lives else "-"
    heard = [n.answer.heard for n in nodes if n.answer is not None and n.answer.heard is not None]
    return (
        place,
        visible_line(first.host) if len(nodes) == 1 else f"{len(nodes)} others",
        f"{first.state}, draining" if first.draining and len(nodes) == 1 else first.state,
        _known(max(heard, default=None), duration),
        spans(worker.rank for worker in workers) or "-",
        _range(nodes, "step", str),
        _range(nodes, "per_second", number),
        _known(max((w.silent for w in workers if w.silent is not None), default=None), duration),
    )


def _silence(node: NodeEntry) -> float | None:
    workers = () if node.status is None else node.status.workers
    return max((w.silent for w in workers if w.silent is not None), default=None)


def _range(nodes: Iterable[NodeEntry], name: str, shown: Callable[[Any], str]) -> str:
    found = [value for node in nodes for value in node.told(name)]
    if not found:
        return "-"
    least, most = shown(min(found)), shown(max(found))
    return least if least == most else f"{least} to {most}"


def _known(value: Any, shown: Callable[[Any], str] = str) -> str:
    return "-" if value is None else shown(value)


def lines(table: Table) -> list[str]:
    """A table as text; nothing where there is no row."""
    head, rows = table
    if not rows:
        return []
    widths = [max(len(row[at]) for row in (head, *rows)) for at in range(len(head))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]


def number(value: float) -> str:
    """With three digits that count."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """For people: 0.3 s, 42 s, 3 min 12 s, 2 h 5 min, 3 d 4 h."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    for big, small, unit, rest in ((60, 1, "min", "s"), (3600, 60, "h", "min")):
        if whole < big * (60 if unit == "min" else 48):
            return f"{whole // big} {unit} {whole % big // small} {rest}"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def spans(numbers: Iterable[int]) -> str:
    """Numbers as people write them: 0-3, 7."""
    found: list[list[int]] = []
    for one in sorted(set(numbers)):
        if found and one == found[-1][1] + 1:
            found[-1][1] = one
        else:
            found.append([one, one])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in found)
