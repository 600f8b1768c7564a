"""Blame: decide from the evidence of all nodes which failure ended a generation. Pure.

`blame` is the only place that answers "who is to blame". The root cause of a job, the verdict of
hang detection, the memory of bad nodes and an eviction read its answer.

Evidence against a host is only what happened to its own workers by themselves. A collective that
failed, timed out or lost its connection is evidence against no host: the ranks that notice it first
are often the healthy ones. With less evidence, no host is named and none is excluded.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

import attrs

from ..sanitize import shorten

# A process may take this long to die after its peers have noticed its death. So a death is the
# cause of an exception on the same host that is earlier by less.
DEATH_NOTICE_S = 1.0

MAX_TEXT_BYTES = 900  # of evidence against a host, encoded: with the other fields it is below 1 KB
MIN_TEXT_BYTES = 64  # of evidence against nobody, in a job of any size
# The texts of all nodes whose evidence is against nobody. The leader lists them with the records.
ALL_TEXTS_BYTES = 640_000
MAX_FOLLOWERS = 16  # ranks that a verdict lists
MAX_DETAILS = 16  # nodes that write the details of a failure
MAX_TRACE_BYTES = 2048  # of a traceback or of the end of stderr, in the details
MAX_LINE_BYTES = 300  # of a message or of a path, in the details


class FailureKind(enum.Enum):
    """The kind of a failure of a node's workers, or the loss of the node."""

    LOST = "lost"  #: the lease of the node has ended, and the node has not left on purpose
    KILLED = "killed"  #: a signal from outside ended a worker; the agent did not send it
    CRASHED = "crashed"  #: a signal that a process causes itself, such as SIGSEGV
    RAISED = "raised"  #: an exception or exit code of the worker's own, or it could not be started
    ELSEWHERE = "elsewhere"  #: in a hang, a worker is not where the others wait for it
    LEFT = "left"  #: a worker exited with code 0 while others report a failed collective
    COLLECTIVE = "collective"  #: a collective failed, or a worker waits in one
    STOPPED = "stopped"  #: the agent had stopped the worker

    @property
    def is_own(self) -> bool:
        """True if this happened to a worker by itself. One host with such evidence is named."""
        return self in _OWN

    @property
    def names_host(self) -> bool:
        """True if this may be held against a host, at least if it holds for one host only."""
        return self not in (FailureKind.COLLECTIVE, FailureKind.STOPPED)


_STRENGTHS = {kind: number for number, kind in enumerate(reversed(FailureKind))}
# A death is a death: which of two hosts is named does not depend on the signal.
_STRENGTHS[FailureKind.CRASHED] = _STRENGTHS[FailureKind.KILLED]
_OWN = (FailureKind.KILLED, FailureKind.CRASHED, FailureKind.RAISED)
_IF_ON_ONE_HOST = (FailureKind.ELSEWHERE, FailureKind.LEFT)


@attrs.frozen
class Evidence:
    """A failure of the workers of one node, or the loss of the node."""

    kind: FailureKind
    text: str = ""  #: one line for messages
    rank: int = -1  #: global rank of the worker; -1: it is about no single worker
    failed_at_s: float = 0.0  #: on the clock of the host, and compared within that host only
    step: int = -1  #: the last step that the worker has reported; -1: none
    #: The node that this is about. The rendezvous fills it in: no node speaks about another one.
    node: str = ""
    host: str = ""

    def bounded(self, num_nodes: int) -> Evidence:
        """Return the evidence with a text that fits the record of a node.

        Args:
            num_nodes: the number of nodes of the job, whose records must fit one listing.
        """
        limit = MAX_TEXT_BYTES
        if not self.kind.names_host:
            share = ALL_TEXTS_BYTES // max(1, num_nodes)
            limit = min(max(MIN_TEXT_BYTES, share), MAX_TEXT_BYTES)
        return attrs.evolve(self, text=cut_text(self.text, limit))


@attrs.frozen
class FailureDetails:
    """The details of a failed worker that a node adds to its evidence, for the end of the job."""

    rank: int = -1  # global rank
    local_rank: int = -1
    pid: int = 0
    returncode: int = 1
    message: str = ""
    traceback: str = ""
    stderr_tail: str = ""  # only without a traceback
    log_dir: str = ""  # directory of the worker's files on its host

    def bounded(self) -> FailureDetails:
        """Return the details with texts of at most 3 KB together."""
        return attrs.evolve(
            self,
            message=_shorten(self.message, MAX_LINE_BYTES),
            traceback=_shorten(self.traceback, MAX_TRACE_BYTES),
            stderr_tail="" if self.traceback else _shorten(self.stderr_tail, MAX_TRACE_BYTES),
            log_dir=cut_text(self.log_dir, MAX_LINE_BYTES),
        )


@attrs.frozen
class Verdict:
    """The failure that ended a generation, and the node that it is held against."""

    evidence: Evidence  #: the evidence that decides
    named_node: str = ""  #: id of the node that is to blame; empty: the evidence names nobody
    named_host: str = ""  #: its host
    followers: tuple[int, ...] = ()  #: other ranks that failed, at most MAX_FOLLOWERS
    #: Of the named worker, once the job has failed. There are none in all memberships before,
    #: because every node reads those.
    details: FailureDetails | None = None

    @property
    def kind(self) -> FailureKind:
        """The kind of the failure that decides."""
        return self.evidence.kind


def blame(evidence: Iterable[Evidence], lost: Sequence[Evidence] = ()) -> Verdict | None:
    """Return the failure that ended a generation, and the node that it is held against.

    Args:
        evidence: what the nodes of the generation have reported, each with its node and host, the
            node that reported first in front.
        lost: evidence of kind LOST for each member whose lease has ended.

    Returns:
        The verdict; None if there is no evidence.
    """
    found = list(evidence)
    if not found and not lost:
        return None
    decisive, is_named = _decide(found, lost)
    named = (decisive.node, decisive.host) if is_named else ("", "")
    ranks = {one.rank for one in found if one.kind is not FailureKind.STOPPED}
    followers = sorted(ranks - {decisive.rank, -1})[:MAX_FOLLOWERS]
    return Verdict(decisive, *named, tuple(followers))


def _decide(found: Sequence[Evidence], lost: Sequence[Evidence]) -> tuple[Evidence, bool]:
    """Return the evidence that decides, and whether it names its node. The rules, in order."""
    # A lost node explains the failures of the others. A node that had reported what happened to its
    # own workers before it was lost is no such explanation: its report is.
    own = [one for one in found if one.kind.is_own]
    unexplained = [one for one in lost if one.node not in {other.node for other in own}]
    if unexplained:
        return unexplained[0], True
    if own:
        by_host: dict[str, list[Evidence]] = {}
        for one in own:
            by_host.setdefault(one.host, []).append(one)
        # Clocks of different hosts are not compared: between hosts, the strength decides.
        causes = [ones[_find_cause([*map(_kind_and_time, ones)])] for ones in by_host.values()]
        return _strongest(causes), True
    strongest = _strongest(found)
    hosts = {one.host for one in found if one.kind is strongest.kind}
    return strongest, strongest.kind in _IF_ON_ONE_HOST and len(hosts) == 1


def _strongest(found: Iterable[Evidence]) -> Evidence:
    """Return the strongest evidence, the first of several."""
    return max(found, key=lambda one: _STRENGTHS[one.kind])


def _kind_and_time(evidence: Evidence) -> tuple[FailureKind, float]:
    return evidence.kind, evidence.failed_at_s


class Failure(Protocol):
    """A failure of a worker of this host."""

    @property
    def failure_kind(self) -> FailureKind: ...

    @property
    def failed_at(self) -> float: ...


AnyFailure = TypeVar("AnyFailure", bound=Failure)


def find_cause(failures: Sequence[AnyFailure]) -> AnyFailure:
    """Return the failure on one host that most likely caused the others.

    Args:
        failures: at least one failure; their times are of the same clock.
    """
    return failures[_find_cause([(one.failure_kind, one.failed_at) for one in failures])]


def _find_cause(failures: Sequence[tuple[FailureKind, float]]) -> int:
    """Return the index of the failure on one host that most likely caused the others."""
    candidates = [n for n, (kind, _) in enumerate(failures) if kind.is_own]
    if candidates:
        # A worker that failed long before another one died was not a victim of that death.
        earliest = min(failures[n][1] for n in candidates)
        candidates = [n for n in candidates if not failures[n][1] - earliest > DEATH_NOTICE_S]
    return min(
        candidates or range(len(failures)),
        key=lambda n: (-_STRENGTHS[failures[n][0]], failures[n][1]),
    )


def _shorten(text: str, limit: int) -> str:
    """Return the beginning and the end of a text that is encoded in at most `limit` bytes."""
    found, num_chars = text, limit
    while len(json.dumps(found)) > limit + len('""') and num_chars > MIN_TEXT_BYTES:
        num_chars = num_chars * 3 // 4
        found = shorten(text, num_chars)
    return cut_text(found, limit)


def cut_text(text: str, limit: int) -> str:
    """Return the beginning of a text that is encoded in at most `limit` bytes."""
    text = text[:limit]
    while len(json.dumps(text)) > limit + len('""'):
        text = text[: -1 - len(text) // 16]
    return text
