"""Decisions of a final save: which state is written, and what an agent does next. Pure functions.

See `final_save` for the rules.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs

from ..errors import CheckpointError
from ..untrusted import read_fields, read_object
from .boxes import TensorShard, describe_missing, format_numbers
from .catalog import DataFile, append_checksum, strip_checksum

UNSHARDED = "unsharded"  # the share of a state that is the same on all ranks
COMMIT = "commit"  # the task after all shares are written; no share has this name


# -- which state is written ------------------------------------------------------------------------


@attrs.frozen(order=True)
class SnapshotState:
    """Identity of a state. Parts of one state fit together.

    A step that was trained twice, before and after a failure, is two states.
    """

    generation: int
    step: int
    num_parts: int = 1  # ranks that hold a part; 1 if the state is the same on all ranks
    is_sharded: bool = False


@attrs.frozen
class PartOffer:
    """A part of a state that an agent can write or has written."""

    state: SnapshotState
    part: int
    share: str = UNSHARDED  # digest of its boxes; parts with equal shares are interchangeable
    num_elements: int = 0  # in its boxes
    total_elements: int = 0  # in the whole tensors that its boxes belong to
    is_replica: bool = False  # it was made by a worker of another node
    file: DataFile | None = None  # its data file, once it is durable
    values: str = ""  # see `SnapshotHeader.values`


@attrs.frozen
class SavePlan:
    """The state to write, and its shares in the order of their files in the manifest."""

    state: SnapshotState
    shares: tuple[str, ...]


LoadChunks = Callable[[str], Sequence[TensorShard] | None]
"""Returns the tensor shards that the parts with this `PartOffer.share` contain: names and boxes,
without the bytes. None if they are not available.
"""


def offer_part(
    state: SnapshotState, part: int, chunks: Sequence[TensorShard], *, is_replica: bool = False
) -> PartOffer:
    """Return the offer of a part of a sharded state that contains `chunks`."""
    boxes = {(c.name, c.dtype, c.shape, c.box, c.mesh) for c in chunks}
    share = hashlib.sha256(json.dumps(sorted(boxes)).encode()).hexdigest()[:32]
    num_elements = sum(math.prod(sizes) for _, _, _, (_, sizes), _ in boxes)
    total_elements = sum(math.prod(shape) for shape in {c.name: c.shape for c in chunks}.values())
    return PartOffer(state, part, share, num_elements, total_elements, is_replica)


def newest_complete(offers: Iterable[PartOffer], load_chunks: LoadChunks) -> SavePlan | str:
    """Choose the newest state whose offered parts contain every element.

    Args:
        offers: the offers of all agents.
        load_chunks: called only for a state that lacks a part but may be complete all the same.

    Returns:
        The plan, or the reason why the newest state is incomplete, as the end of an error message.
    """
    states: dict[SnapshotState, dict[str, PartOffer]] = {}
    parts: dict[SnapshotState, dict[int, str]] = {}
    for offer in sorted(offers, key=lambda offer: (offer.state, -offer.part), reverse=True):
        states.setdefault(offer.state, {}).setdefault(offer.share, offer)
        parts.setdefault(offer.state, {})[offer.part] = offer.share
    reasons = []
    for state, by_share in states.items():
        reason = _describe_missing_parts(parts[state], by_share, load_chunks)
        if not reason:
            return SavePlan(state, tuple(by_share))
        reasons.append(reason)
    return reasons[0] if reasons else "is not available: no agent can write a part of it"


def _describe_missing_parts(
    share_of_part: Mapping[int, str],
    offer_of_share: Mapping[str, PartOffer],
    load_chunks: LoadChunks,
) -> str:
    """Return what a state lacks, or an empty string if it is complete.

    Args:
        share_of_part: the share of each part that is offered.
        offer_of_share: one offer of each share.
        load_chunks: see `newest_complete`.
    """
    num_parts = next(iter(offer_of_share.values())).state.num_parts
    missing = [part for part in range(num_parts) if part not in share_of_part]
    if not missing:
        return ""
    total_elements = max(offer.total_elements for offer in offer_of_share.values())
    if sum(offer.num_elements for offer in offer_of_share.values()) >= total_elements:
        chunks = {
            share: rows for share in offer_of_share if (rows := load_chunks(share)) is not None
        }
        try:
            if len(chunks) == len(offer_of_share):
                by_part = {part: chunks[share] for part, share in share_of_part.items()}
                return describe_missing(by_part, num_parts)
        except CheckpointError as error:
            return f"is not consistent: {error}"
    return f"is not complete: no agent holds {format_numbers(missing, 'part')} of {num_parts}"


def describe_difference(offers: Iterable[PartOffer], step: int | None) -> str:
    """Describe the loss if ranks had different values in a state that was written.

    Args:
        offers: the offers of all agents.
        step: the step that the final save has written, or None.

    Returns:
        A sentence, or an empty text if the ranks had the same values.
    """
    values = {offer.values for offer in offers if offer.values and offer.state.step == step}
    if len(values) < 2:
        return ""
    return (
        f"step {step} was written with the values of one rank only. Other ranks had other plain "
        "values or generators, which are lost: make them equal on all ranks, or name them in "
        "CheckpointManager(..., per_rank=(...))"
    )


# -- what an agent does next -----------------------------------------------------------------------


@attrs.frozen
class Task:
    """Writing one share of a state, or committing the state if the share is `COMMIT`."""

    state: SnapshotState
    share: str

    def is_for(self, offer: PartOffer) -> bool:
        return (offer.state, offer.share) == (self.state, self.share)


@attrs.frozen
class Finish:
    """The end of a final save."""

    step: int | None = None  # the committed step
    problem: str = ""  # why the snapshots were not written


@attrs.frozen
class AgentReport:
    """The status that an agent publishes to the other agents of its generation."""

    offers: tuple[PartOffer, ...] = ()  # newest first, and parts of its workers before replicas
    task: Task | None = None  # what it is doing
    committed: tuple[SnapshotState, ...] = ()  # states that it has committed or found committed
    can_write: bool = True  # False: only its data files count
    is_finished: bool = False  # it reads no reports any more
    problem: str = ""  # why it could not write something
    node: int = 0  # rank of its node in the generation
    is_withdrawn: bool = False  # it was stopped while it helped, and its node may report again


def count_nodes(reports: Iterable[AgentReport]) -> int:
    """Return how many nodes have a report that is not withdrawn.

    A node has two reports if it helped other nodes before its own run was over.
    """
    return len({report.node for report in reports if not report.is_withdrawn})


def next_action(
    agent: str,
    reports: Mapping[str, AgentReport],
    load_chunks: LoadChunks,
    *,
    is_settled: bool,
    has_all_reports: bool,
) -> Task | Finish | None:
    """Decide what an agent does next.

    Args:
        agent: the id of the agent.
        reports: the reports of all agents by agent id. Those of lost agents have `can_write=False`.
        load_chunks: see `newest_complete`.
        is_settled: all agents have reported, or `settle_s` has passed since the start.
        has_all_reports: all agents have reported, or `peers_s` has passed since the start.

    Returns:
        A task, the end of the final save, or None to wait for other agents.
    """
    writers = {other: report for other, report in reports.items() if report.can_write}
    offers = [o for a, r in reports.items() for o in r.offers if o.file or a in writers]
    plan = newest_complete(offers, load_chunks)
    # The parts of a committed state may not be offered any more.
    complete = {state for report in reports.values() for state in report.committed}
    committed = max(complete, default=None)
    if isinstance(plan, SavePlan):
        complete.add(plan.state)
    if complete:
        newest = max(complete)
        offered = {offer.state for report in reports.values() for offer in report.offers}
        if not is_settled and any(state > newest for state in offered):
            return None
        if newest == committed:
            return Finish(newest.step)
    if isinstance(plan, SavePlan):
        if agent in writers:
            return _next_task(agent, writers, offers, plan, is_settled=is_settled)
        if writers:
            return None
    # If no agent can write any more, only an agent that reports late could help.
    if not (has_all_reports or (is_settled and not writers)):
        return None
    problems = sorted({report.problem for report in reports.values() if report.problem})
    reason = plan if isinstance(plan, str) else "was not committed"
    return Finish(problem="; ".join(problems) or f"it {reason}")


def _next_task(
    agent: str,
    writers: Mapping[str, AgentReport],
    offers: Iterable[PartOffer],
    plan: SavePlan,
    *,
    is_settled: bool,
) -> Task | None:
    """Return the share that this agent writes next, the commit, or None to wait for others."""
    written = {offer.share for offer in offers if offer.state == plan.state and offer.file}
    others = [report for other, report in writers.items() if other != agent]
    for offer in writers[agent].offers:
        task = Task(offer.state, offer.share)
        if offer.state != plan.state or offer.share in written or _is_task_of_any(task, others):
            continue
        # A replica is written only if no node whose workers made the part can write it.
        has_owner = any(task.is_for(o) and not o.is_replica for r in others for o in r.offers)
        if not offer.is_replica or (is_settled and not has_owner):
            return task
    commit = Task(plan.state, COMMIT)
    is_complete = written.issuperset(plan.shares)
    return commit if is_complete and not _is_task_of_any(commit, others) else None


def _is_task_of_any(task: Task, others: Iterable[AgentReport]) -> bool:
    return any(report.task == task for report in others)


# -- the file of a report --------------------------------------------------------------------------


def encode_report(report: AgentReport) -> bytes:
    """Encode a report as one line of JSON and a line with its checksum."""
    return append_checksum(json.dumps(attrs.asdict(report)).encode("ascii"))


def decode_report(data: bytes) -> AgentReport | None:
    """Decode a report. Return None if it is incomplete or corrupt."""
    body = strip_checksum(data)
    try:
        fields = read_object(body or b"")
        offers = tuple(
            read_fields(
                PartOffer,
                {name: row[name] for name in row if name not in ("state", "file")},
                state=read_fields(SnapshotState, row["state"]),
                file=read_fields(DataFile, row["file"]) if row["file"] else None,
            )
            for row in fields.pop("offers")
        )
        committed = tuple(read_fields(SnapshotState, row) for row in fields.pop("committed"))
        row = fields.pop("task")
        task = Task(read_fields(SnapshotState, row["state"]), str(row["share"])) if row else None
        return read_fields(AgentReport, fields, offers=offers, committed=committed, task=task)
    except (KeyError, TypeError, ValueError):
        return None
