"""Status of a job: what its store and its nodes report, as a value, JSON, text and exit code.

Whether a node is alive is decided only by its lease. Ages may depend on the wall clocks of two
machines, so nothing is decided by them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from ..options import RendezvousSettings
from ..rendezvous.bad_nodes import ExcludedHost
from ..rendezvous.blame import FailureKind
from ..rendezvous.membership import (
    GenerationTrigger,
    JobPhase,
    LeaderStatus,
    MembershipState,
)
from ..rendezvous.overview import (
    JobOverview,
    SeenNode,
    read_leader_status,
    read_overview,
)
from ..sanitize import escape_to_one_line
from ..stores.interface import Store
from .aggregate import NodeStatus, WorkerStatus, finished_state
from .event import Event
from .event_kinds import RunFinished
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
from .summary import (
    STATUS_TTL_S,
    AgedSummary,
    NodeDetail,
    NodeReport,
    NodeSummary,
    StatusReader,
    detail_of,
    summarize,
)

# -- reading ---------------------------------------------------------------------------------------

MAX_NODE_ROWS = 24  # more nodes are summarized, and their details are not read


@attrs.frozen
class JobReading:
    """What the store of a job shows of it."""

    run: str
    job: JobOverview
    note: LeaderStatus
    summaries: Mapping[str, AgedSummary]  # by node id
    details: Mapping[str, NodeDetail] = attrs.field(factory=dict)  # by node id, of shown nodes
    is_final: bool = False  # the summaries are known not to be renewed any more

    @property
    def looks_stale(self) -> bool:
        """True if all summaries of live nodes are older than their time to live.

        It can be wrong if the clocks of the machines differ. In a shared directory, a node
        that is gone counts as live until a reader has watched its lease for the lease's ttl.
        """
        nodes = (node for node in self.job.live_nodes if node.id in self.summaries)
        ages = [self.summaries[node.id].age_s for node in nodes]
        return bool(ages) and all(age > STATUS_TTL_S for age in ages)


def read_job(store: Store, run_id: str, statuses: StatusReader | None = None) -> JobReading:
    """Read a job and all its nodes: the keys that are needed, and never all keys of the job.

    Args:
        store: the store of the job.
        run_id: id of the job.
        statuses: the reader that has read the statuses before, if any.

    Raises:
        StoreError: the store cannot be read.
        RendezvousConfigError: the job was written by another version.
    """
    statuses = statuses or StatusReader(store, run_id)
    job = read_overview(store, run_id)
    note = read_leader_status(store, run_id)
    reading = JobReading(run_id, job, note, statuses.read())
    nodes = {node.id for node in (*job.members, *job.live_nodes)} & reading.summaries.keys()
    if len(nodes) > MAX_NODE_ROWS:
        return reading
    return attrs.evolve(reading, details=statuses.read_details(sorted(nodes)))


@attrs.frozen
class NodeEntry:
    """A node of a job."""

    node: str
    host: str
    rank: int | None  # among the members; None if it waits or has left
    slots: int
    alive: bool  # its lease is valid
    draining: str = ""  # why it is about to leave, empty if it is not
    summary: NodeSummary | None = None
    age_s: float | None = None  # since the summary was written; None if not read from a store
    workers: tuple[WorkerStatus, ...] | None = None  # None if the details were not read
    is_final: bool = False  # the summary is known not to be renewed any more

    def value(self, name: str) -> Any:
        """Return a field of the summary, as of now if it is a duration; None if not known."""
        value = None if self.summary is None else getattr(self.summary, name)
        if value is None or name not in _DURATIONS or self.age_s is None:
            return value
        return round(value + self.age_s, 3)

    @property
    def reporting(self) -> bool:
        """True if the store has a status of the node. It expires a minute after the last write."""
        return self.summary is not None and not self.is_final

    @property
    def state_text(self) -> str:
        if self.summary is None:
            return "no status" if self.alive else "gone"
        # A node that was killed had no time to write its last status.
        last = self.summary.state
        return last.value if self.alive or last.is_finished else "gone"

    @property
    def ranks(self) -> range:
        """The ranks of its workers, as far as they are known."""
        summary = self.summary
        if summary is None or summary.first_rank is None:
            return range(0)
        return range(summary.first_rank, summary.first_rank + summary.num_workers)


@attrs.frozen
class JobStatus:
    """Status of a job."""

    run: str
    state: JobState | None  # None if it is not known
    reason: str = ""
    is_recorded: bool = False  # the result of a finished run, from its last events
    generation: int = 0
    settings: RendezvousSettings | None = None  # None if only a node is known
    only_node: NodeStatus | None = None  # if only this node is known
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
        """The restart budget, or None if it is not known."""
        if self.settings is not None:
            return self.settings.max_restarts
        return None if self.only_node is None else self.only_node.max_restarts

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
        return max(self._values("uptime_s"), default=None)

    @property
    def step(self) -> int | None:
        return min(self._values("step"), default=None)

    @property
    def steps_per_second(self) -> float | None:
        return min(self._values("rate"), default=None)

    @property
    def checkpoint_step(self) -> int | None:
        return max(self._values("checkpoint_step"), default=None)

    @property
    def snapshot_step(self) -> int | None:
        return min(self._values("snapshot_step"), default=None)

    def _values(self, name: str) -> list[Any]:
        return _known_values(self.nodes, name)


_DURATIONS = ("state_s", "uptime_s", "silence_s")  # go on after a summary was written


def _known_values(nodes: Iterable[NodeEntry], name: str) -> list[Any]:
    """Return the known values of a field of the nodes' summaries."""
    values = (node.value(name) for node in nodes)
    return [value for value in values if value is not None]


def status_of(reading: JobReading) -> JobStatus | None:
    """Return the status of a job, or None if there is no such job."""
    state = reading.job.state
    if state is None and not reading.job.live_nodes:
        return None
    nodes = _node_entries(reading)
    members = [node for node in nodes if node.rank is not None and node.summary is not None]
    found, reason = _find_state(reading, [n.summary for n in members if n.alive and n.summary])
    if state is None:
        return JobStatus(reading.run, found, reason, nodes=nodes)
    ages = (n.value("state_s") for n in members if n.summary and n.summary.state is found)
    return JobStatus(
        reading.run,
        found,
        reason,
        generation=state.generation,
        settings=state.settings,
        world_size=sum(node.slots for node in reading.job.members),
        restarts=state.restarts,
        state_seconds=min(ages, default=None),
        nodes=nodes,
        excluded=state.excluded_hosts,
    )


def _node_entries(reading: JobReading) -> tuple[NodeEntry, ...]:
    """Return the members in their order, then waiting nodes in the order in which they joined."""
    job = reading.job
    is_settled = job.state is None or job.state.phase is JobPhase.ACTIVE
    alive = {node.id: node for node in job.live_nodes}
    member_ids = job.member_ids
    ranked: list[tuple[int | None, SeenNode]] = [
        (rank, alive.get(node.id, node)) for rank, node in enumerate(job.members)
    ]
    ranked += [(None, node) for node in job.live_nodes if node.id not in member_ids]
    # Only steps of members count; those of lost members only if no other member is left.
    counted = (member_ids & alive.keys()) or member_ids
    return tuple(
        _node_entry(reading, node, rank, node.id in alive, not counted or node.id in counted)
        for rank, node in ranked
        # Lost members of a generation that has finished do not belong to the next one.
        if node.id in alive or is_settled
    )


def _node_entry(
    reading: JobReading, node: SeenNode, rank: int | None, is_alive: bool, is_counted: bool
) -> NodeEntry:
    """Return the entry of a node. One that is gone completes no steps."""
    found = reading.summaries.get(node.id)
    if found is None:
        return NodeEntry(node.id, node.host, rank, node.slots, is_alive, node.drain_reason)
    summary, age_s = found.summary, found.age_s
    detail = reading.details.get(node.id)
    is_gone = not is_alive and not summary.state.is_finished
    workers: tuple[WorkerStatus, ...] | None = None if detail is None else ()
    if detail is not None and detail.generation == summary.generation:
        summary = attrs.evolve(summary, reason=detail.reason)
        if is_counted:
            workers = tuple(_worker_as_of_now(w, age_s, is_gone=is_gone) for w in detail.workers)
    if is_gone:
        summary = attrs.evolve(summary, rate=None, best_rate=None)
    if not is_counted:
        summary = _without_progress(summary)
    return NodeEntry(
        node.id,
        node.host,
        rank,
        node.slots,
        is_alive,
        node.drain_reason,
        summary,
        age_s,
        workers,
        is_final=reading.is_final,
    )


def _worker_as_of_now(worker: WorkerStatus, age_s: float, *, is_gone: bool) -> WorkerStatus:
    silence_s = worker.seconds_since_heartbeat
    return attrs.evolve(
        worker,
        seconds_since_heartbeat=None if silence_s is None else round(silence_s + age_s, 3),
        steps_per_second=None if is_gone else worker.steps_per_second,
    )


def _without_progress(summary: NodeSummary) -> NodeSummary:
    """Remove the progress of a node that is no member any more; its checkpoints still exist."""
    steps: dict[str, Any] = dict.fromkeys(("step", "last_step", "rate", "best_rate"))
    return attrs.evolve(
        summary, num_workers=0, first_rank=None, silence_s=None, snapshot_step=None, **steps
    )


_FINISHED_PHASES = {
    JobPhase.SUCCEEDED: JobState.SUCCEEDED,
    JobPhase.FAILED: JobState.FAILED,
    JobPhase.ABORTED: JobState.STOPPED,
    JobPhase.STOPPED: JobState.STOPPED,
}


def _find_state(
    reading: JobReading, summaries: Iterable[NodeSummary]
) -> tuple[JobState | None, str]:
    """Return the state of a job and the reason."""
    job, alive = reading.job.state, reading.job.live_nodes
    if job is None:
        return JobState.WAITING, reading.note.reason
    if job.phase.is_terminal:
        reporter = "" if job.job_end is None else f" (reported by {job.job_end.written_by})"
        return _FINISHED_PHASES[job.phase], f"{job.reason}{reporter}"
    if not alive:
        return None, f"no node is alive; last known reason: {job.reason}"
    if job.phase is JobPhase.FORMING:
        return _rendezvous_state(job, alive), job.reason or reading.note.reason
    by_state = {summary.state: summary for summary in summaries}
    for state in ACTIVE_STATES[:-1]:  # all except RUNNING
        if state in by_state:
            return state, by_state[state].reason or job.reason
    finished = [state for state in by_state if state.is_finished]
    if finished and len(finished) == len(by_state):
        # The state is updated as soon as the nodes without a status have finished.
        worst = max(finished, key=lambda state: (state is JobState.FAILED, state.value))
        return worst, by_state[worst].reason
    return JobState.RUNNING, job.reason


def _rendezvous_state(job: MembershipState, alive: tuple[SeenNode, ...]) -> JobState:
    if len(alive) < job.settings.min_nodes:
        return JobState.WAITING
    verdict = job.verdict
    has_failed = verdict is not None and verdict.kind is not FailureKind.LOST
    if has_failed or job.trigger is GenerationTrigger.RESTART:
        return JobState.RESTARTING
    if any(node.drain_reason for node in alive):
        return JobState.DRAINING
    return JobState.RESIZING if job.is_planned else JobState.RENDEZVOUS


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
    last = (event.body for event in last_events if event.generation == last_generation)
    ends = [body if isinstance(body, RunFinished) else None for body in last]
    parts = [
        NodeParticipation(
            _end_state(end), is_alive=False, expelled=end is not None and end.expelled
        )
        for end in ends
    ]
    state = job_state(parts)
    age = round(max(0.0, now - newest.timestamp), 3)
    if state is None:
        reason = f"none of its agents is alive on this machine; the last event is {newest.kind}"
        return JobStatus(run, None, reason, is_recorded=True, state_seconds=age)
    matching = [end for end in ends if end is not None and _end_state(end) is state]
    reason = min(matching, key=lambda end: end.expelled).reason
    return JobStatus(run, state, reason, is_recorded=True, state_seconds=age)


def _end_state(end: RunFinished | None) -> JobState:
    return JobState.RUNNING if end is None else finished_state(end.state)


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

VERSION = 4
FIELDS: Mapping[str, str] = {
    "version": "schema version (4); it does not change when fields are added",
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
    "age_seconds": "seconds since it wrote its status: up to 20 if nothing changes, 2 to 20 while "
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
    "step": "last step of its slowest worker; null if not known",
    "steps_per_second": "rate of its slowest worker; null if not known",
    "workers": "one object per worker: rank, local_rank, name (such as pid 123), running, step, "
    "steps_per_second (0 if it is stalled), seconds_since_heartbeat, checkpoint_step; empty "
    f"without a status; null if they were not read, as in a job of more than {MAX_NODE_ROWS} nodes",
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
    summary = node.summary
    if summary is None:
        return document
    health = check_health(summary.state, summary.reason, summary.blocked_s)
    workers = None if node.workers is None else [attrs.asdict(worker) for worker in node.workers]
    return {
        **document,
        "age_seconds": node.age_s,
        "state": summary.state.value,
        "healthy": health.is_healthy,
        "health_message": health.message,
        "state_seconds": node.value("state_s"),
        "uptime_seconds": node.value("uptime_s"),
        "store_contact_age_seconds": summary.contact_s,
        "pid": summary.pid,
        "step": summary.step,
        "steps_per_second": summary.rate,
        "workers": workers,
    }


def document_of_node(report: NodeReport) -> dict[str, Any]:
    """Return the document of `as_document` for what one agent knows: the status of its node."""
    status, summary = report.status, summarize(report)
    entry = NodeEntry(
        node=status.node,
        host=status.host,
        rank=status.node_rank,
        slots=status.slots,
        alive=not status.state.is_finished,
        summary=summary,
        workers=detail_of(status).workers,
    )
    job = JobStatus(
        status.run,
        status.state,
        status.reason,
        generation=status.generation,
        only_node=status,
        world_size=status.world_size,
        restarts=status.restarts,
        state_seconds=summary.state_s,
        nodes=(entry,),
    )
    return as_document(job)


# -- text ------------------------------------------------------------------------------------------

TableData = tuple[Sequence[str], Sequence[Sequence[str]]]  # head and rows
NODE_HEAD = ("node", "host", "state", "updated", "ranks", "step", "steps/s", "last heartbeat")
RANK_HEAD = ("rank", "host", "process", "step", "steps/s", "last heartbeat", "checkpoint")
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

    There are no rows if there are more than MAX_RANK_ROWS workers, if their details were not read,
    or if all have exited and have reported nothing.
    """
    workers = [(node.host, worker) for node in status.nodes for worker in node.workers or ()]
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
    group = [node.rank for node in nodes if node.rank is not None]
    position = format_ranges(group) if group else unranked if first.alive else UNKNOWN
    ages = (node.age_s for node in nodes if node.age_s is not None)
    is_draining = bool(first.draining) and is_single
    return (
        position,
        escape_to_one_line(first.host) if is_single else f"{len(nodes)} others",
        f"{first.state_text}, draining" if is_draining else first.state_text,
        format_cell(max(ages, default=None), format_duration),
        format_ranges(rank for node in nodes for rank in node.ranks) or UNKNOWN,
        _value_range(nodes, ("step", "last_step"), str),
        _value_range(nodes, ("rate", "best_rate"), format_number),
        format_cell(max(_known_values(nodes, "silence_s"), default=None), format_duration),
    )


def _seconds_since_heartbeat(node: NodeEntry) -> float:
    return node.value("silence_s") or 0.0


def _value_range(
    nodes: Sequence[NodeEntry], names: tuple[str, str], shown: Callable[[Any], str]
) -> str:
    lows, highs = (_known_values(nodes, name) for name in names)
    if not lows or not highs:
        return UNKNOWN
    low, high = shown(min(lows)), shown(max(highs))
    return low if low == high else f"{low} to {high}"
