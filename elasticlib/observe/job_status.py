"""Status of a job: what its store and its nodes report, as a value, JSON, text and exit code.

Whether a node is alive is decided only by its lease. Ages may depend on the wall clocks of two
machines, so nothing is decided by them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

import attrs

from ..options import RendezvousSettings
from ..rendezvous.bad_nodes import ExcludedHost
from ..rendezvous.blame import FailureKind
from ..rendezvous.membership import (
    GenerationTrigger,
    JobPhase,
    LeaderStatus,
    Membership,
    NodeRecord,
)
from ..rendezvous.store_layout import JobListing, StoreKeys
from ..rendezvous.store_layout import decode as decode_record
from ..sanitize import escape_to_one_line
from ..stores.interface import Store
from .aggregate import NodeStatus, WorkerStatus, finished_state
from .event import Event
from .formatting import (
    LOST_SNAPSHOT_TEXT,
    TERMINATED_TEXT,
    UNKNOWN,
    format_cell,
    format_duration,
    format_list,
    format_number,
    format_ranges,
    plural,
)
from .history import ACTIVE_STATES, JobState, NodeParticipation, job_state
from .node_status import STATUS_TTL_S, NodeReport, StatusReader

# -- reading ---------------------------------------------------------------------------------------


@attrs.frozen
class JobReading:
    """Content of the store of a job."""

    run: str
    document: Membership | None
    alive_nodes: tuple[NodeRecord, ...]
    note: LeaderStatus
    reports: Mapping[str, NodeReport]  # by node id
    is_final: bool = False  # the reports are known not to be renewed any more

    @property
    def looks_stale(self) -> bool:
        """True if all reports of live nodes are older than their time to live.

        It can be wrong if the clocks of the machines differ. In a shared directory, a node
        that is gone counts as live until a reader has watched its lease for the lease's ttl.
        """
        nodes = (node for node in self.alive_nodes if node.id in self.reports)
        ages = [self.reports[node.id].age_seconds for node in nodes]
        return bool(ages) and all(age is not None and age > STATUS_TTL_S for age in ages)


_JOB_KEYS = re.compile(r"([^/?]+)/(?:head/membership|node/.*)")


def jobs_in(store: Store) -> tuple[list[str], list[str]]:
    """Return the ids of the jobs in a store, and of those that have a live node."""
    has_node: dict[str, bool] = {}
    for entry in store.list("").entries:
        match = _JOB_KEYS.fullmatch(entry.key)
        if match is not None:
            run_id = unquote(match.group(1))
            has_node[run_id] = has_node.get(run_id, False) or "/node/" in entry.key
    return sorted(has_node), sorted(run_id for run_id, alive in has_node.items() if alive)


def read_job(store: Store, run_id: str, statuses: StatusReader | None = None) -> JobReading:
    """Read a job and all its nodes, in three requests.

    Args:
        store: the store of the job.
        run_id: id of the job.
        statuses: the reader that has read the statuses before, if any.

    Raises:
        StoreError: the store cannot be read.
        RendezvousConfigError: the job was written by another version.
    """
    keys = StoreKeys(run_id)
    stored = JobListing(keys, store.list(keys.job_prefix))
    if stored.state_error is not None:
        raise stored.state_error
    note = store.get(keys.leader_status)
    return JobReading(
        run=run_id,
        document=stored.membership(None)[0],
        alive_nodes=stored.live_nodes(),
        note=LeaderStatus()
        if note is None
        else decode_record(LeaderStatus, note.value, "the note"),
        reports=(statuses or StatusReader(store, run_id)).read(),
    )


@attrs.frozen
class NodeEntry:
    """A node of a job."""

    node: str
    host: str
    rank: int | None  # among the members; None if it waits or has left
    slots: int
    alive: bool  # its lease is valid
    draining: str = ""  # why it is about to leave, empty if it is not
    report: NodeReport | None = None
    is_final: bool = False  # the report is known not to be renewed any more

    @property
    def status(self) -> NodeStatus | None:
        return None if self.report is None else self.report.status

    @property
    def reporting(self) -> bool:
        """True if the store has a status of the node. It expires a minute after the last write."""
        return self.report is not None and not self.is_final

    def values(self, name: str) -> list[Any]:
        """Return the known values of a field of the workers or, if there are none, of the node."""
        if self.status is None:
            return []
        values = [getattr(worker, name) for worker in self.status.workers]
        values = [value for value in values if value is not None] or [getattr(self.status, name)]
        return [value for value in values if value is not None]

    @property
    def state_text(self) -> str:
        if self.status is None:
            return "no status" if self.alive else "gone"
        # A node that was killed had no time to write its last status.
        last = self.status.state
        return last.value if self.alive or last.is_finished else "gone"


@attrs.frozen
class JobStatus:
    """Status of a job."""

    run: str
    state: JobState | None  # None if it is not known
    reason: str = ""
    is_recorded: bool = False  # the result of a finished run, from its last events
    generation: int = 0
    settings: RendezvousSettings | None = None  # None if only a node is known
    world_size: int = 0
    restarts: int = 0
    state_seconds: float | None = None
    nodes: tuple[NodeEntry, ...] = ()
    excluded: tuple[ExcludedHost, ...] = ()  # hosts that the job continues without

    @property
    def min_nodes(self) -> int | None:
        return None if self.settings is None else self.settings.min_nodes

    @property
    def max_nodes(self) -> int | None:
        return None if self.settings is None else self.settings.max_nodes

    @property
    def max_restarts(self) -> int | None:
        """The restart budget, or None if it is not known. The settings or else a node know it."""
        if self.settings is not None:
            return self.settings.max_restarts
        reports = (node.report for node in self.nodes if node.report is not None)
        return next((report.status.max_restarts for report in reports), None)

    @property
    def members(self) -> tuple[NodeEntry, ...]:
        return tuple(node for node in self.nodes if node.rank is not None)

    @property
    def spares(self) -> tuple[NodeEntry, ...]:
        return tuple(node for node in self.nodes if node.rank is None and node.alive)

    @property
    def not_reporting(self) -> tuple[NodeEntry, ...]:
        """Live nodes without a current status."""
        return tuple(node for node in self.nodes if node.alive and not node.reporting)

    @property
    def has_no_reports(self) -> bool:
        return bool(self.nodes) and not any(node.reporting for node in self.nodes)

    @property
    def was_terminated(self) -> bool:
        """True if no agent of the job is alive, and none has reported how the job finished."""
        is_known = self.is_recorded or bool(self.nodes)
        return self.state is None and is_known and not any(node.alive for node in self.nodes)

    @property
    def source(self) -> str:
        return "events" if self.is_recorded else "store" if self.has_no_reports else "nodes"

    @property
    def uptime_seconds(self) -> float | None:
        uptimes = (n.report.current_uptime_seconds for n in self.nodes if n.report is not None)
        return max(uptimes, default=None)

    @property
    def step(self) -> int | None:
        return min(self._values("step"), default=None)

    @property
    def steps_per_second(self) -> float | None:
        return min(self._values("steps_per_second"), default=None)

    @property
    def checkpoint_step(self) -> int | None:
        steps = [status.checkpoint_step for status in self._statuses()]
        steps += [w.checkpoint_step for status in self._statuses() for w in status.workers]
        return max((step for step in steps if step is not None), default=None)

    @property
    def snapshot_step(self) -> int | None:
        steps = (status.snapshot_step for status in self._statuses())
        return min((step for step in steps if step is not None), default=None)

    def _values(self, name: str) -> list[Any]:
        return [value for node in self.nodes for value in node.values(name)]

    def _statuses(self) -> Iterable[NodeStatus]:
        return (node.status for node in self.nodes if node.status is not None)


def status_of(reading: JobReading) -> JobStatus | None:
    """Return the status of a job, or None if there is no such job."""
    document = reading.document
    if document is None and not reading.alive_nodes:
        return None
    nodes = _node_entries(reading)
    members = [node for node in nodes if node.rank is not None]
    state, reason = _find_state(reading, [n.status for n in members if n.alive and n.status])
    if document is None:
        return JobStatus(reading.run, state, reason, nodes=nodes)
    reports = (node.report for node in members if node.report is not None)
    ages = (report.current_state_seconds for report in reports if report.status.state is state)
    return JobStatus(
        reading.run,
        state,
        reason,
        generation=document.generation,
        settings=document.settings,
        world_size=sum(node.slots for node in document.members),
        restarts=document.restarts,
        state_seconds=min(ages, default=None),
        nodes=nodes,
        excluded=document.excluded_hosts,
    )


def _node_entries(reading: JobReading) -> tuple[NodeEntry, ...]:
    """Return the members in their order, then waiting nodes in the order in which they joined."""
    members = () if reading.document is None else reading.document.members
    is_settled = reading.document is None or reading.document.phase is JobPhase.ACTIVE
    alive = {node.id: node for node in reading.alive_nodes}
    member_ids = {node.id for node in members}
    ranked: list[tuple[int | None, NodeRecord]] = [
        (rank, alive.get(node.id, node)) for rank, node in enumerate(members)
    ]
    ranked += [(None, node) for node in reading.alive_nodes if node.id not in member_ids]
    reports = {id: _as_of_now(r, is_alive=id in alive) for id, r in reading.reports.items()}
    if members:
        # Only steps of members count; those of lost members only if no other member is left.
        counted = (member_ids & alive.keys()) or member_ids
        reports |= {id: _without_progress(r) for id, r in reports.items() if id not in counted}
    return tuple(
        NodeEntry(
            node=node.id,
            host=node.host,
            rank=rank,
            slots=node.slots,
            alive=node.id in alive,
            draining=node.drain_reason,
            report=reports.get(node.id),
            is_final=reading.is_final,
        )
        for rank, node in ranked
        # Lost members of a generation that has finished do not belong to the next one.
        if node.id in alive or is_settled
    )


def _as_of_now(report: NodeReport, *, is_alive: bool) -> NodeReport:
    """Add the age of a report to its durations; a node that is gone completes no steps."""
    status, age = report.status, report.age_seconds or 0.0
    no_rate: dict[str, Any] = {}
    if not is_alive and not status.state.is_finished:
        no_rate = {"steps_per_second": None}
    workers = []
    for worker in status.workers:
        silence = worker.seconds_since_heartbeat
        silence = None if silence is None else round(silence + age, 3)
        workers.append(attrs.evolve(worker, seconds_since_heartbeat=silence, **no_rate))
    status = attrs.evolve(status, workers=tuple(workers), **no_rate)
    return attrs.evolve(report, status=status)


def _without_progress(report: NodeReport) -> NodeReport:
    """Remove the progress of a node that is no member any more; its checkpoints still exist."""
    status = report.status
    steps = (status.checkpoint_step, *(worker.checkpoint_step for worker in status.workers))
    status = attrs.evolve(
        status,
        checkpoint_step=max((step for step in steps if step is not None), default=None),
        workers=(),
        step=None,
        steps_per_second=None,
        snapshot_step=None,
    )
    return attrs.evolve(report, status=status)


_FINISHED_PHASES = {
    JobPhase.SUCCEEDED: JobState.SUCCEEDED,
    JobPhase.FAILED: JobState.FAILED,
    JobPhase.ABORTED: JobState.STOPPED,
    JobPhase.STOPPED: JobState.STOPPED,
}


def _find_state(reading: JobReading, statuses: Iterable[NodeStatus]) -> tuple[JobState | None, str]:
    """Return the state of a job and the reason."""
    document, alive = reading.document, reading.alive_nodes
    if document is None:
        return JobState.WAITING, reading.note.reason
    if document.phase.is_terminal:
        reporter = (
            "" if document.job_end is None else f" (reported by {document.job_end.written_by})"
        )
        return _FINISHED_PHASES[document.phase], f"{document.reason}{reporter}"
    if not alive:
        return None, f"no node is alive; last known reason: {document.reason}"
    if document.phase is JobPhase.FORMING:
        return _rendezvous_state(document, alive), document.reason or reading.note.reason
    by_state = {status.state: status for status in statuses}
    for state in ACTIVE_STATES[:-1]:  # all except RUNNING
        if state in by_state:
            return state, by_state[state].reason or document.reason
    finished = [state for state in by_state if state.is_finished]
    if finished and len(finished) == len(by_state):
        # The document is updated as soon as the nodes without a status have finished.
        worst = max(finished, key=lambda state: (state is JobState.FAILED, state.value))
        return worst, by_state[worst].reason
    return JobState.RUNNING, document.reason


def _rendezvous_state(document: Membership, alive: tuple[NodeRecord, ...]) -> JobState:
    if len(alive) < document.settings.min_nodes:
        return JobState.WAITING
    verdict = document.verdict
    has_failed = verdict is not None and verdict.kind is not FailureKind.LOST
    if has_failed or document.trigger is GenerationTrigger.RESTART:
        return JobState.RESTARTING
    if any(node.drain_reason for node in alive):
        return JobState.DRAINING
    return JobState.RESIZING if document.is_planned else JobState.RENDEZVOUS


def result_of(run: str, last_events: Iterable[Event], now: float) -> JobStatus:
    """Return the status of a run that has ended, by the last events of its agents.

    Args:
        run: id of the run.
        last_events: the last event of each of its agents; at least one.
        now: seconds since 1970.
    """
    last_events = list(last_events)
    newest = max(last_events, key=lambda event: event.timestamp)
    # A node that has left before, because it was drained for example, did not end the job.
    last_generation = max(event.generation for event in last_events)
    last_events = [event for event in last_events if event.generation == last_generation]
    parts = [
        NodeParticipation(_end_state(event), is_alive=False, expelled=event.is_true("expelled"))
        for event in last_events
    ]
    state = job_state(parts)
    age = round(max(0.0, now - newest.timestamp), 3)
    if state is None:
        reason = f"none of its agents is alive on this machine; the last event is {newest.kind}"
        return JobStatus(run, None, reason, is_recorded=True, state_seconds=age)
    pairs = zip(last_events, parts, strict=True)
    matching = [event for event, part in pairs if part.state is state]
    end = min(matching, key=lambda event: event.is_true("expelled"))
    return JobStatus(run, state, end.text("reason"), is_recorded=True, state_seconds=age)


def _end_state(last: Event) -> JobState:
    is_end = last.kind == "run.finished"
    return finished_state(last.text("state")) if is_end else JobState.RUNNING


# -- health ----------------------------------------------------------------------------------------

MAX_LOOP_BLOCKED_S = 15.0  # longer than any action of the loop, even the start of many workers


@attrs.frozen
class Health:
    """The health of a node."""

    is_healthy: bool
    message: str


def check_health(state: JobState, reason: str, loop_blocked_seconds: float) -> Health:
    """Return the health of a node in a state, given how long its agent's event loop is blocked."""
    if state is JobState.FAILED:
        return Health(False, f"the node has failed: {reason}")
    if loop_blocked_seconds > MAX_LOOP_BLOCKED_S and not state.is_finished:
        seconds = f"{loop_blocked_seconds:.1f} s"
        return Health(False, f"the agent's event loop has been blocked for {seconds}")
    return Health(True, state.value)


# -- JSON and exit code ----------------------------------------------------------------------------

VERSION = 3
FIELDS: Mapping[str, str] = {
    "version": "schema version (3); it does not change when fields are added",
    "run": "id of the job",
    "state": "WAITING, RENDEZVOUS, RUNNING, RESTARTING, RESIZING, DRAINING, SUCCEEDED, FAILED, "
    "DRAINED or STOPPED; null if it is not known",
    "reason": "reason of the state, as text",
    "source": "nodes: their published status; store: no node has published one, so the data is "
    "from the store; events: the run has finished, and state, reason and state_seconds are from "
    "the last events on this machine",
    "state_seconds": "seconds in this state, null if not known",
    "uptime_seconds": "seconds since the first agent started, null if not known",
    "generation": "number of the current generation, 0 before the first",
    "min_nodes": "minimum number of nodes (--nnodes), null if not known",
    "max_nodes": "maximum number of nodes, null if not known",
    "world_size": "workers in the generation",
    "restarts": "restarts after failures so far",
    "max_restarts": "restart budget, null if not known",
    "step": "smallest last step of all workers, null if they report none",
    "steps_per_second": "rate of the slowest worker or node, null if not known",
    "checkpoint_step": "step of the last checkpoint, null if none is known",
    "snapshot_step": "newest step of which all nodes that take snapshots have one, or null",
    "nodes": "one object per node, members first, by rank, as below",
    "excluded": "one object per host that the job has excluded: host, reason",
    "exit_code": "exit code of elasticlib status",
}
NODE_FIELDS: Mapping[str, str] = {
    "node": "id of the node",
    "host": "name of the host",
    "rank": "rank among the members; null for a node that joins or waits as a spare",
    "alive": "true if its lease in the store is valid",
    "reporting": "true if its status is in the store (it expires one minute after the last write)",
    "age_seconds": "seconds since it wrote its status: up to 20 if nothing changes, 2 to 10 while "
    "its workers complete steps; depends on the clocks of two machines until --watch has seen "
    "another write; null if not read from a store",
    "state": "state of the node, with the same words; null without a status",
    "healthy": "true if its /healthz answers 200; null without a status",
    "health_message": "what /healthz answers; null without a status",
    "state_seconds": "seconds in this state; null without a status",
    "uptime_seconds": "seconds since its agent started; null without a status",
    "store_contact_age_seconds": "seconds since it last reached the store; null if not known",
    "draining": "why it is about to leave, empty if it is not",
    "slots": "number of workers that it can run",
    "pid": "process id of its agent",
    "workers": "one object per worker: rank, local_rank, name (such as pid 123), running, step, "
    "steps_per_second (0 if it is stalled), seconds_since_heartbeat, checkpoint_step; null if not "
    "known",
}
EXIT_CODES: Mapping[int, str] = {
    0: "running or succeeded",
    1: "failed",
    2: "invalid command line",
    3: "in transition: WAITING, RENDEZVOUS, RESTARTING, RESIZING or DRAINING",
    4: "no such run, or its state is unknown",
    5: "stopped or drained before completion",
}
EXIT_UNKNOWN = 4


def exit_code(status: JobStatus) -> int:
    """Return the exit code for a status, see EXIT_CODES."""
    state = status.state
    if state is None:
        return EXIT_UNKNOWN
    if not state.is_finished:
        if status.has_no_reports:
            return EXIT_UNKNOWN  # the store only shows that the job was running
        return 0 if state is JobState.RUNNING else 3
    return {JobState.SUCCEEDED: 0, JobState.FAILED: 1}.get(state, 5)


def as_document(status: JobStatus) -> dict[str, Any]:
    """Return the JSON document of a status, with the keys of FIELDS."""
    special = {
        "version": VERSION,
        "state": None if status.state is None else status.state.value,
        "nodes": [_node_document(node) for node in status.nodes],
        "excluded": [attrs.asdict(host) for host in status.excluded],
        "exit_code": exit_code(status),
    }
    return {name: special[name] if name in special else getattr(status, name) for name in FIELDS}


def _node_document(node: NodeEntry) -> dict[str, Any]:
    known = ("node", "host", "rank", "slots", "alive", "draining", "reporting")
    document: dict[str, Any] = dict.fromkeys(NODE_FIELDS)
    document |= {"workers": [], **{name: getattr(node, name) for name in known}}
    if node.report is None:
        return document
    report, status = node.report, node.report.status
    health = check_health(status.state, status.reason, report.loop_blocked_seconds)
    return {
        **document,
        "age_seconds": report.age_seconds,
        "state": status.state.value,
        "healthy": health.is_healthy,
        "health_message": health.message,
        "state_seconds": report.current_state_seconds,
        "uptime_seconds": report.current_uptime_seconds,
        "store_contact_age_seconds": report.store_contact_age_seconds,
        "pid": status.pid,
        "workers": [attrs.asdict(worker) for worker in status.workers],
    }


def document_of_node(report: NodeReport) -> dict[str, Any]:
    """Return the document of `as_document` for what one agent knows: the status of its node."""
    status = report.status
    entry = NodeEntry(
        node=status.node,
        host=status.host,
        rank=status.node_rank,
        slots=status.slots,
        alive=not status.state.is_finished,
        report=report,
    )
    job = JobStatus(
        status.run,
        status.state,
        status.reason,
        generation=status.generation,
        world_size=status.world_size,
        restarts=status.restarts,
        state_seconds=report.current_state_seconds,
        nodes=(entry,),
    )
    return as_document(job)


# -- text ------------------------------------------------------------------------------------------

TableData = tuple[Sequence[str], Sequence[Sequence[str]]]  # head and rows
NODE_HEAD = ("node", "host", "state", "updated", "ranks", "step", "steps/s", "last heartbeat")
RANK_HEAD = ("rank", "host", "process", "step", "steps/s", "last heartbeat", "checkpoint")
MAX_NODE_ROWS = 24  # more nodes are summarized
MAX_RANK_ROWS = 32
MAX_QUIET_NODES = 5


def headline(status: JobStatus) -> list[str]:
    """Return the lines above the tables."""
    state = "unreachable or terminated" if status.state is None else status.state.value
    lines = [f"{status.run}: {TERMINATED_TEXT if status.was_terminated else state}"]
    if status.state_seconds is not None:
        duration = format_duration(status.state_seconds)
        lines[0] += f", {duration} ago" if status.is_recorded else f" for {duration}"
    if _is_active(status) and status.uptime_seconds is not None:
        lines[0] += f", started {format_duration(status.uptime_seconds)} ago"
    if status.has_no_reports and not status.was_terminated:
        lines.append(
            "  no agent publishes a status (custom launcher without elasticlib.observe_node?); "
            "showing the store's data"
        )
    if not status.is_recorded:
        lines += [f"  {line}" for line in _summary_lines(status)]
    if status.reason:
        lines.append(f"  reason: {status.reason}")
    # Texts originate from other machines, and from files that anyone may have written.
    return [escape_to_one_line(line) for line in lines]


def _is_active(status: JobStatus) -> bool:
    return status.state is not None and not status.state.is_finished


def _summary_lines(status: JobStatus) -> list[str]:
    limits = "" if status.min_nodes is None else f" (of {status.min_nodes} to {status.max_nodes})"
    counted = status.members if status.generation and status.members else status.nodes
    nodes = f"{plural(len(counted), 'node')}{limits}"
    if status.state is JobState.WAITING:
        present = sum(node.alive for node in status.nodes)
        nodes = f"{present} of at least {status.min_nodes or '?'} nodes present"
    budget = "" if status.max_restarts is None else f" of {status.max_restarts}"
    counts = [f"generation {status.generation}", nodes, plural(status.world_size, "worker")]
    lines = [", ".join([*counts, f"{status.restarts}{budget} restarts"])]
    speed = format_cell(status.steps_per_second, format_number)
    values = {
        "step": status.step,
        "steps/s" if _is_active(status) else "last steps/s": None if speed == UNKNOWN else speed,
        "checkpoint": status.checkpoint_step,
        "snapshot": status.snapshot_step,
    }
    known = [f"{name} {value}" for name, value in values.items() if value is not None]
    snapshot = status.snapshot_step
    if status.was_terminated and snapshot is not None and snapshot > (status.checkpoint_step or 0):
        known[-1] += f" ({LOST_SNAPSHOT_TEXT})"
    if known:
        lines.append(", ".join(known))
    groups = {"spares": status.spares}
    if not status.has_no_reports:
        groups["not reporting"] = status.not_reporting
    for name, group in groups.items():
        if group and status.generation:
            lines.append(f"{name}: {format_list([node.host for node in group], MAX_NODE_ROWS)}")
    excluded = status.excluded[:MAX_NODE_ROWS]
    return [*lines, *(f"excluded: {item.host}, because {item.reason}" for item in excluded)]


def node_table(status: JobStatus) -> TableData:
    """Return the head and a row per node.

    Of many nodes, those with an unusual state or the oldest heartbeats have a row each. The others
    share a row per state.
    """
    nodes = status.nodes
    unranked = "spare" if status.generation else "joining"
    if len(nodes) <= MAX_NODE_ROWS:
        return NODE_HEAD, [_node_row((node,), unranked) for node in nodes]
    common = Counter(node.state_text for node in nodes).most_common(1)[0][0]
    unusual = [node for node in nodes if node.state_text != common]
    unusual = unusual[: MAX_NODE_ROWS - MAX_QUIET_NODES - 1]
    usual = [node for node in nodes if node.state_text == common]
    quiet = sorted(usual, key=lambda node: -_seconds_since_heartbeat(node))[:MAX_QUIET_NODES]
    shown = {node.node for node in (*unusual, *quiet)}
    rows = [_node_row((node,), unranked) for node in (*unusual, *quiet)]
    for state in dict.fromkeys(node.state_text for node in nodes):
        rest = [node for node in nodes if node.state_text == state and node.node not in shown]
        if rest:
            rows.append(_node_row(rest, unranked))
    return NODE_HEAD, rows


def rank_table(status: JobStatus) -> TableData:
    """Return the head and a row per worker.

    There are no rows if there are more than MAX_RANK_ROWS workers, or if all have exited and have
    reported nothing.
    """
    workers = [(node.host, w) for node in status.nodes if node.status for w in node.status.workers]
    if len(workers) > MAX_RANK_ROWS or not any(_is_worth_a_row(worker) for _, worker in workers):
        return RANK_HEAD, []
    rows = [
        (
            str(worker.rank),
            escape_to_one_line(host),
            escape_to_one_line(worker.name if worker.running else f"{worker.name} (exited)"),
            format_cell(worker.step),
            format_cell(worker.steps_per_second, format_number),
            format_cell(worker.seconds_since_heartbeat, format_duration),
            format_cell(worker.checkpoint_step),
        )
        for host, worker in workers
    ]
    return RANK_HEAD, rows


def _is_worth_a_row(worker: WorkerStatus) -> bool:
    values = (worker.step, worker.steps_per_second, worker.seconds_since_heartbeat)
    return worker.running or any(v is not None for v in (*values, worker.checkpoint_step))


def _node_row(nodes: Sequence[NodeEntry], unranked: str) -> Sequence[str]:
    """Return the row of one node, or of several that are in the same state."""
    first, is_single = nodes[0], len(nodes) == 1
    workers = [w for node in nodes if node.status is not None for w in node.status.workers]
    ranks = [node.rank for node in nodes if node.rank is not None]
    position = format_ranges(ranks) if ranks else unranked if first.alive else UNKNOWN
    ages = [node.report.age_seconds for node in nodes if node.report is not None]
    is_draining = bool(first.draining) and is_single
    return (
        position,
        escape_to_one_line(first.host) if is_single else f"{len(nodes)} others",
        f"{first.state_text}, draining" if is_draining else first.state_text,
        format_cell(_largest(ages), format_duration),
        format_ranges(worker.rank for worker in workers) or UNKNOWN,
        _value_range(nodes, "step", str),
        _value_range(nodes, "steps_per_second", format_number),
        format_cell(_largest(w.seconds_since_heartbeat for w in workers), format_duration),
    )


def _seconds_since_heartbeat(node: NodeEntry) -> float:
    workers = () if node.status is None else node.status.workers
    return _largest(worker.seconds_since_heartbeat for worker in workers) or 0.0


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _value_range(nodes: Iterable[NodeEntry], name: str, shown: Callable[[Any], str]) -> str:
    values = [value for node in nodes for value in node.values(name)]
    if not values:
        return UNKNOWN
    low, high = shown(min(values)), shown(max(values))
    return low if low == high else f"{low} to {high}"
