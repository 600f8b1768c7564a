"""What a job is doing, put together from what its store holds and what its nodes have published of
themselves, and the result of a job that is over: as one JSON document, as lines and tables for
people, and as an exit code.

A node measures its ages itself; what has passed since it wrote them may be by the wall clocks of
two machines, and nothing is decided by these: a node lives for as long as its lease stands.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

import attrs

from ..rendezvous.membership import JobPhase, LeaderStatus, Membership, Node
from ..rendezvous.store_layout import JobListing, StoreKeys
from ..rendezvous.store_layout import decode as decode_record
from ..stores.interface import Store
from ..visible import visible_line
from .event import Event
from .history import BUSY, JobState, Part, job_state
from .published import STANDS_SECONDS, Published, StatusReader
from .story import NodeStatus, WorkerStatus, end_state
from .wording import KILLED, LOST_SNAPSHOT, UNKNOWN, cell, duration, plural, rate, some, spans


@attrs.frozen
class JobView:
    """What was read of a job in its store. published: by node id. still: whether these are known
    not to be renewed any more."""

    run: str
    document: Membership | None
    live: tuple[Node, ...]
    note: LeaderStatus
    published: Mapping[str, Published]
    still: bool = False

    @property
    def looks_old(self) -> bool:
        """Whether all is older than statuses become, by clocks that may differ. In a folder that is
        the store, a job of which all nodes are gone has leases until somebody has looked for
        long."""
        ages = [self.published[node.id].age for node in self.live if node.id in self.published]
        return bool(ages) and all(age is not None and age > STANDS_SECONDS for age in ages)


_JOBS = re.compile(r"([^/?]+)/(?:head/membership|node/.*)")


def jobs_in(store: Store) -> tuple[list[str], list[str]]:
    """The run ids of the jobs in a store, and of those in which a node lives."""
    found: dict[str, bool] = {}
    for entry in store.list("").entries:
        named = _JOBS.fullmatch(entry.key)
        if named is not None:
            run_id = unquote(named.group(1))
            found[run_id] = found.get(run_id, False) or "/node/" in entry.key
    return sorted(found), sorted(run_id for run_id, lives in found.items() if lives)


def read_job(store: Store, run_id: str, statuses: StatusReader | None = None) -> JobView:
    """All that the store holds of a job and its nodes, however many they are, in three calls.
    statuses: who reads these, if it has read them before.

    Raises:
        StoreError: the store did not answer. RendezvousConfigError: another version's job.
    """
    keys = StoreKeys(run_id)
    read = JobListing(keys, store.list(keys.job_prefix))
    note = store.get(keys.leader_status)
    return JobView(
        run=run_id,
        document=read.membership(None)[0],
        live=read.live_nodes(),
        note=LeaderStatus()
        if note is None
        else decode_record(LeaderStatus, note.value, "the note"),
        published=(statuses or StatusReader(store, run_id)).read(),
    )


@attrs.frozen
class NodeEntry:
    """rank: among the members, None for one that waits or has left. lives: whether its lease
    stands. published: what is known of it; None if that is nothing. still: whether that is known
    not to be renewed any more."""

    node: str
    host: str
    rank: int | None
    slots: int
    lives: bool
    draining: str = ""
    published: Published | None = None
    still: bool = False

    @property
    def status(self) -> NodeStatus | None:
        return None if self.published is None else self.published.status

    @property
    def answers(self) -> bool:
        """Whether its status is in the store, from which it goes a minute after its last word."""
        return self.published is not None and not self.still

    def values(self, name: str) -> list[Any]:
        """The step or per_second of each of its workers; if none has any, as its events have it."""
        if self.status is None:
            return []
        found = [getattr(worker, name) for worker in self.status.workers]
        found = [value for value in found if value is not None] or [getattr(self.status, name)]
        return [value for value in found if value is not None]

    @property
    def state(self) -> str:
        """A word for it."""
        if self.status is None:
            return "no status" if self.lives else "gone"
        # Its last status may be older than its end, where it had no time to write another.
        last = self.status.state
        return last.value if self.lives or last.over else "gone"


@attrs.frozen
class JobStatus:
    """state: None where it is not known any more. recorded: whether this is the result of a run
    that is over, from its last events, and not from the job's store. minimum, maximum: how many
    nodes there may be. since: seconds for which the state has lasted."""

    run: str
    state: JobState | None
    reason: str = ""
    recorded: bool = False
    generation: int = 0
    minimum: int | None = None
    maximum: int | None = None
    world: int = 0
    restarts: int = 0
    max_restarts: int | None = None
    since: float | None = None
    nodes: tuple[NodeEntry, ...] = ()

    @property
    def members(self) -> tuple[NodeEntry, ...]:
        return tuple(node for node in self.nodes if node.rank is not None)

    @property
    def spares(self) -> tuple[NodeEntry, ...]:
        """Those that live and wait to be let in."""
        return tuple(node for node in self.nodes if node.rank is None and node.lives)

    @property
    def silent(self) -> tuple[NodeEntry, ...]:
        """Those that live, and have published nothing of late."""
        return tuple(node for node in self.nodes if node.lives and not node.answers)

    @property
    def unanswered(self) -> bool:
        """Whether there are nodes, and none of them has published anything of late."""
        return bool(self.nodes) and not any(node.answers for node in self.nodes)

    @property
    def killed(self) -> bool:
        """Whether none of its agents lives, and none has said how it ended."""
        known = self.recorded or bool(self.nodes)
        return self.state is None and known and not any(n.lives for n in self.nodes)

    @property
    def source(self) -> str:
        """What tells this, as FIELDS has it."""
        return "events" if self.recorded else "store" if self.unanswered else "nodes"

    @property
    def up(self) -> float | None:
        """Seconds since the first of the agents began whose status is known."""
        return max((n.published.up for n in self.nodes if n.published is not None), default=None)

    @property
    def step(self) -> int | None:
        """The smallest of all workers' last steps."""
        return min(self._values("step"), default=None)

    @property
    def per_second(self) -> float | None:
        """Steps of the slowest worker."""
        return min(self._values("per_second"), default=None)

    @property
    def saved(self) -> int | None:
        """The step of the last checkpoint that any node knows of."""
        kept = [status.saved for status in self._statuses()]
        kept += [worker.saved for status in self._statuses() for worker in status.workers]
        return max((step for step in kept if step is not None), default=None)

    @property
    def snapshot(self) -> int | None:
        """The newest step that all nodes which keep snapshots have whole in their memory."""
        return min((s.snapshot for s in self._statuses() if s.snapshot is not None), default=None)

    def _values(self, name: str) -> list[Any]:
        return [value for node in self.nodes for value in node.values(name)]

    def _statuses(self) -> Iterable[NodeStatus]:
        return (node.status for node in self.nodes if node.status is not None)


def status_of(view: JobView) -> JobStatus | None:
    """None where there is no such job."""
    document = view.document
    if document is None and not view.live:
        return None
    nodes = _nodes(view)
    statuses = [
        node.status for node in nodes if node.rank is not None and node.lives and node.status
    ]
    state, reason = _state(view, statuses)
    ages = [
        node.published.lasted
        for node in nodes
        if node.rank is not None and node.published and node.published.status.state is state
    ]
    if document is None:
        return JobStatus(view.run, state, reason, nodes=nodes)
    return JobStatus(
        view.run,
        state,
        reason,
        generation=document.generation,
        minimum=document.settings.min_nodes,
        maximum=document.settings.max_nodes,
        world=sum(node.slots for node in document.members),
        restarts=document.restarts,
        max_restarts=document.settings.max_restarts,
        since=min(ages, default=None),
        nodes=nodes,
    )


def _nodes(view: JobView) -> tuple[NodeEntry, ...]:
    """The members in their order, then who waits in the order in which they came."""
    members = () if view.document is None else view.document.members
    over = view.document is not None and view.document.phase is not JobPhase.ACTIVE
    living = {node.id: node for node in view.live}
    ids = {node.id for node in members}
    found = [(rank, living.get(node.id, node)) for rank, node in enumerate(members)]
    found += [(None, node) for node in view.live if node.id not in ids]  # type: ignore[misc]
    published = {id: _by_now(it, lives=id in living) for id, it in view.published.items()}
    if members:
        # Only members' steps count; of members that are gone only where nobody else is left.
        counted = (ids & living.keys()) or ids
        published |= {
            id: _without_progress(it) for id, it in published.items() if id not in counted
        }
    return tuple(
        NodeEntry(
            node=node.id,
            host=node.host,
            rank=rank,
            slots=node.slots,
            lives=node.id in living,
            draining=node.drain_reason,
            published=published.get(node.id),
            still=view.still,
        )
        for rank, node in found
        # Of a generation that is over, those who have gone are none of the next one's.
        if node.id in living or not over
    )


def _by_now(published: Published, *, lives: bool) -> Published:
    """With what has passed since it was written. A node that is gone makes no steps."""
    status, age = published.status, published.age or 0.0
    rates: dict[str, Any] = {} if lives or status.state.over else {"per_second": None}
    workers = []
    for worker in status.workers:
        silent = None if worker.silent is None else round(worker.silent + age, 3)
        workers.append(attrs.evolve(worker, silent=silent, **rates))
    return attrs.evolve(published, status=attrs.evolve(status, workers=tuple(workers), **rates))


def _without_progress(published: Published) -> Published:
    """Of a node that is no member any more: how far its workers were counts no longer, and the
    checkpoints that they wrote are there still."""
    status = published.status
    steps = (status.saved, *(worker.saved for worker in status.workers))
    saved = max((step for step in steps if step is not None), default=None)
    status = attrs.evolve(
        status, saved=saved, workers=(), step=None, per_second=None, snapshot=None
    )
    return attrs.evolve(published, status=status)


_PHASES = {
    JobPhase.SUCCEEDED: JobState.SUCCEEDED,
    JobPhase.FAILED: JobState.FAILED,
    JobPhase.ABORTED: JobState.STOPPED,
}


def _state(view: JobView, statuses: Iterable[NodeStatus]) -> tuple[JobState | None, str]:
    """The state, and a sentence of why."""
    document, live = view.document, view.live
    if document is None:
        return JobState.WAITING, view.note.reason
    if document.phase.is_terminal:
        ending = "" if document.job_end is None else f" (said by {document.job_end.written_by})"
        return _PHASES[document.phase], f"{document.reason}{ending}"
    if not live:
        return None, f"no node lives any more; before that: {document.reason}"
    if document.phase is JobPhase.FORMING:
        return _opening(document, live), document.reason or view.note.reason
    by_state = {status.state: status for status in statuses}
    for state in BUSY[:-1]:  # all but RUNNING
        if state in by_state:
            return state, by_state[state].reason or document.reason
    ends = [state for state in by_state if state.over]
    if ends and len(ends) == len(by_state):
        # All whose status is known are through; the document says so as soon as the others are.
        worst = max(ends, key=lambda state: (state is JobState.FAILED, state.value))
        return worst, by_state[worst].reason
    return JobState.RUNNING, document.reason


def _opening(document: Membership, live: tuple[Node, ...]) -> JobState:
    if len(live) < document.settings.min_nodes:
        return JobState.WAITING
    if document.failure is not None:
        return JobState.RESTARTING
    if any(node.drain_reason for node in live):
        return JobState.DRAINING
    return JobState.RESIZING if document.is_planned else JobState.RENDEZVOUS


def result_of(run: str, last: Iterable[Event], now: float) -> JobStatus:
    """Return the result of a run that is over.

    Args:
        run: the run's id.
        last: the last event of each of its agents; there is one at least.
        now: seconds since 1970.
    """
    last = list(last)
    newest = max(last, key=lambda event: event.wall)
    parts = [Part(_end(event), lives=False, expelled=event.says("expelled")) for event in last]
    state = job_state(parts)
    since = round(max(0.0, now - newest.wall), 3)
    if state is None:
        reason = f"no agent of it is alive on this machine; the last event is {newest.kind}"
        return JobStatus(run, None, reason, recorded=True, since=since)
    ends = [event for event, part in zip(last, parts, strict=True) if part.state is state]
    end = min(ends, key=lambda event: event.says("expelled"))
    return JobStatus(run, state, end.text("reason"), recorded=True, since=since)


def _end(last: Event) -> JobState:
    """Return the state in which an agent ended, or RUNNING if it did not say that it ended."""
    return end_state(last.text("state")) if last.kind == "run.ended" else JobState.RUNNING


# -- whether a node is well ------------------------------------------------------------------------

PATIENCE = 15.0
"""Seconds: longer than any one act of the loop takes, even the start of many workers."""


@attrs.frozen
class Health:
    """The answer, and why, in a line."""

    good: bool
    sentence: str


def judge(state: JobState, reason: str, silent: float) -> Health:
    """Of a node in this state, whose agent's loop has been silent for so many seconds."""
    if state is JobState.FAILED:
        return Health(False, f"the node has failed: {reason}")
    if silent > PATIENCE and not state.over:
        return Health(False, f"the agent's loop has not turned for {silent:.1f} s")
    return Health(True, state.value)


# -- as one document, and as an exit code ----------------------------------------------------------

VERSION = 2
FIELDS: Mapping[str, str] = {
    "v": "the version of this document: 2; what only adds to it leaves the number as it is",
    "run": "the job's id",
    "state": "WAITING, RENDEZVOUS, RUNNING, RESTARTING, RESIZING, DRAINING, SUCCEEDED, FAILED, "
    "DRAINED or STOPPED; null where it is not known any more",
    "reason": "why, in words",
    "source": "nodes: what they publish of themselves; store: none of them has, and it is what the "
    "job's store holds; events: the run is over, and state, reason and since are from the last "
    "events on this machine",
    "since": "seconds for which the state has lasted, null if not known",
    "up": "seconds since the first of its agents began, null if not known",
    "generation": "the number of the settled membership, 0 before the first",
    "minimum": "of nodes (--nnodes), null if not known",
    "maximum": "of nodes, null if not known",
    "world": "workers in the generation",
    "restarts": "after failures, so far",
    "max_restarts": "how many there may be, null if not known",
    "step": "the smallest of all workers' last steps, null if they name none",
    "per_second": "steps of the slowest worker or node, null if not known",
    "saved": "step of the last checkpoint, null if none is known",
    "snapshot": "the newest step that is whole in the memory of all nodes which keep it, or null",
    "nodes": "one object each, members first, by rank, as below",
    "exit_code": "that elasticlib status has for this",
}
NODE_FIELDS: Mapping[str, str] = {
    "node": "its id",
    "host": "its name",
    "rank": "among the members; null for who joins or, as a spare, waits to be let in",
    "lives": "whether its lease in the store stands",
    "answers": "whether its status is in the store, from which it goes a minute after it was last "
    "written",
    "age": "seconds since it wrote its status: up to 20 where nothing changes, 2 to 10 while its "
    "workers make steps; by its wall clock and this machine's, and with --watch by this machine's "
    "alone, once another has come; null if not read in a store",
    "state": "its own, in the same words; null without a status",
    "healthy": "whether its /healthz answers 200; null without a status",
    "health": "what /healthz says; the same",
    "since": "seconds for which it has been in that state; null without a status",
    "up": "seconds since its agent began; the same",
    "heard": "seconds for which the store had not heard from it then, null if not known",
    "draining": "why it is about to leave, empty if it is not",
    "slots": "workers that it can run",
    "pid": "of its agent",
    "workers": "one object each: rank, local_rank, name (such as pid 123), running, step, "
    "per_second (0 if it is stalled), silent (seconds since its last sign of life), saved; null if "
    "not known",
}
EXIT_CODES: Mapping[int, str] = {
    0: "it runs, or has succeeded",
    1: "it has failed",
    2: "the command line is wrong",
    3: "in transition: WAITING, RENDEZVOUS, RESTARTING, RESIZING or DRAINING",
    4: "there is no such run, or nothing says that it runs or how it ended",
    5: "it ended before it was done: STOPPED by a signal, or DRAINED",
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
        # If no node answers, the store only says that the job ran.
        return NOBODY if status.unanswered else 0 if state is JobState.RUNNING else 3
    return {JobState.SUCCEEDED: 0, JobState.FAILED: 1}.get(state, 5)


def as_document(status: JobStatus) -> dict[str, Any]:
    """With the keys of FIELDS."""
    made = {
        "v": VERSION,
        "state": None if status.state is None else status.state.value,
        "nodes": [_node_document(node) for node in status.nodes],
        "exit_code": exit_code(status),
    }
    return {name: made[name] if name in made else getattr(status, name) for name in FIELDS}


def _node_document(node: NodeEntry) -> dict[str, Any]:
    known = ("node", "host", "rank", "slots", "lives", "draining")
    found: dict[str, Any] = dict.fromkeys(NODE_FIELDS)
    found |= {"answers": False, "workers": [], **{name: getattr(node, name) for name in known}}
    if node.published is None:
        return found
    published, status = node.published, node.published.status
    health = judge(status.state, status.reason, published.loop_silent)
    return {
        **found,
        "answers": node.answers,
        "age": published.age,
        "state": status.state.value,
        "healthy": health.good,
        "health": health.sentence,
        "since": published.lasted,
        "up": published.up,
        "heard": published.heard,
        "pid": status.pid,
        "workers": [attrs.asdict(worker) for worker in status.workers],
    }


def document_of_node(published: Published) -> dict[str, Any]:
    """The same document, of what one agent knows of its own node."""
    status = published.status
    entry = NodeEntry(
        node=status.node,
        host=status.host,
        rank=status.node_rank,
        slots=status.slots,
        lives=not status.state.over,
        published=published,
    )
    found = JobStatus(
        status.run,
        status.state,
        status.reason,
        generation=status.generation,
        world=status.world,
        restarts=status.restarts,
        max_restarts=status.max_restarts,
        since=published.lasted,
        nodes=(entry,),
    )
    return as_document(found)


# -- for people ------------------------------------------------------------------------------------

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""A head, and rows."""
NODE_HEAD = ("node", "host", "state", "updated", "ranks", "step", "steps/s", "silent")
RANK_HEAD = ("rank", "host", "process", "step", "steps/s", "silent", "saved")


def headline(status: JobStatus) -> list[str]:
    """What is to be said before the tables."""
    killed = status.killed
    state = "not answering, or no longer there" if status.state is None else status.state.value
    lasted = "" if status.since is None else f" for {duration(status.since)}"
    if status.recorded and status.since is not None:
        lasted = f", {duration(status.since)} ago"
    began = (
        f", started {duration(status.up)} ago" if _is_live(status) and status.up is not None else ""
    )
    lines = [f"{status.run}: {KILLED if killed else state}{lasted}{began}"]
    if status.unanswered and not killed:
        said = "its agents publish no status (a launcher without a journal?)"
        lines.append(f"  {said}; this is from its store")
    if not status.recorded:
        lines += [f"  {line}" for line in _facts(status)]
    if status.reason:
        lines.append(f"  why: {status.reason}")
    # Most of it is from peers, and from files that anybody may have written.
    return [visible_line(line) for line in lines]


def _is_live(status: JobStatus) -> bool:
    return status.state is not None and not status.state.over


def _facts(status: JobStatus) -> list[str]:
    least = "" if status.minimum is None else f" (of {status.minimum} to {status.maximum})"
    here = sum(node.lives for node in status.nodes)
    counted = status.members if status.generation and status.members else status.nodes
    nodes = f"{plural(len(counted), 'node')}{least}"
    if status.state is JobState.WAITING:
        nodes = f"{here} of at least {status.minimum or '?'} nodes are here"
    budget = "" if status.max_restarts is None else f" of {status.max_restarts}"
    first = [f"generation {status.generation}", nodes, plural(status.world, "worker")]
    lines = [", ".join([*first, f"{status.restarts}{budget} restarts"])]
    live = _is_live(status)
    speed = None if status.per_second is None else rate(status.per_second)
    values = {
        "step": status.step,
        "steps/s" if live else "last steps/s": speed,
        "checkpoint": status.saved,
        "snapshot": status.snapshot,
    }
    known = [f"{name} {value}" for name, value in values.items() if value is not None]
    if status.killed and status.snapshot is not None and status.snapshot > (status.saved or 0):
        known[-1] += f" ({LOST_SNAPSHOT})"
    if known:
        lines.append(", ".join(known))
    for name, found in (("spares", status.spares), ("not answering", status.silent)):
        if found and status.generation and not (name == "not answering" and status.unanswered):
            lines.append(f"{name}: {some([node.host for node in found], MOST_NODES)}")
    return lines


def node_table(status: JobStatus) -> Table:
    """A line a node, or where they are many, one each for those that are unlike the others."""
    nodes = status.nodes
    unranked = "spare" if status.generation else "joining"
    if len(nodes) <= MOST_NODES:
        return NODE_HEAD, [_node_row((node,), unranked) for node in nodes]
    common = Counter(node.state for node in nodes).most_common(1)[0][0]
    odd = [node for node in nodes if node.state != common][: MOST_NODES - QUIETEST - 1]
    same = [node for node in nodes if node.state == common]
    quiet = sorted(same, key=lambda node: -_silence(node))[:QUIETEST]
    shown = {node.node for node in (*odd, *quiet)}
    rows = [_node_row((node,), unranked) for node in (*odd, *quiet)]
    for state in dict.fromkeys(node.state for node in nodes):
        rest = [node for node in nodes if node.state == state and node.node not in shown]
        if rest:
            rows.append(_node_row(rest, unranked))
    return NODE_HEAD, rows


def rank_table(status: JobStatus) -> Table:
    """A line a worker; none where they are many, or have all ended and nothing is known of them."""
    workers = [(node.host, w) for node in status.nodes if node.status for w in node.status.workers]
    if len(workers) > MOST_RANKS or not any(_is_worth_a_line(worker) for _, worker in workers):
        return RANK_HEAD, []
    rows = [
        (
            str(worker.rank),
            visible_line(host),
            visible_line(worker.name if worker.running else f"{worker.name} (ended)"),
            cell(worker.step),
            cell(worker.per_second, rate),
            cell(worker.silent, duration),
            cell(worker.saved),
        )
        for host, worker in workers
    ]
    return RANK_HEAD, rows


def _is_worth_a_line(worker: WorkerStatus) -> bool:
    values = (worker.step, worker.per_second, worker.silent, worker.saved)
    return worker.running or any(value is not None for value in values)


def _node_row(nodes: Sequence[NodeEntry], unranked: str) -> Sequence[str]:
    """unranked: what one is that lives and has no rank."""
    first = nodes[0]
    workers = [w for node in nodes if node.status is not None for w in node.status.workers]
    ranks = [node.rank for node in nodes if node.rank is not None]
    place = spans(ranks) if ranks else unranked if first.lives else UNKNOWN
    ages = [node.published.age for node in nodes if node.published is not None]
    return (
        place,
        visible_line(first.host) if len(nodes) == 1 else f"{len(nodes)} others",
        f"{first.state}, draining" if first.draining and len(nodes) == 1 else first.state,
        cell(_most(ages), duration),
        spans(worker.rank for worker in workers) or UNKNOWN,
        _range(nodes, "step", str),
        _range(nodes, "per_second", rate),
        cell(_most(worker.silent for worker in workers), duration),
    )


def _silence(node: NodeEntry) -> float:
    workers = () if node.status is None else node.status.workers
    return _most(worker.silent for worker in workers) or 0.0


def _most(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _range(nodes: Iterable[NodeEntry], name: str, shown: Callable[[Any], str]) -> str:
    found = [value for node in nodes for value in node.values(name)]
    if not found:
        return UNKNOWN
    least, most = shown(min(found)), shown(max(found))
    return least if least == most else f"{least} to {most}"
