"""Blame: what is evidence against a host, and which failure ended a generation. Pure.

Evidence against a host is only what happened to its own workers by themselves: a signal that the
agent did not send, a crash, an exception, or the verdict of hang detection. A failed, timed-out or
closed collective is evidence against no host: the ranks that notice it first are often the healthy
ones. With less evidence, no host is named and none is excluded.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

# A process may take this long to die after its peers have noticed its death. So a death is the
# cause of an exception on the same host that is earlier by less.
DEATH_NOTICE_S = 1.0


class FailureKind(enum.Enum):
    """The kind of a failure of a node's workers. The first four kinds name a host."""

    KILLED = "killed"  # a signal from outside ended a worker; the agent did not send it
    CRASHED = "crashed"  # a signal that a process causes itself, such as SIGSEGV
    RAISED = "raised"  # an exception or exit code of the worker's own, or it could not be started
    HUNG = "hung"  # hang detection has found the rank that hangs
    STALLED = "stalled"  # no rank makes progress, and no rank stands out
    COLLECTIVE = "collective"  # a collective failed, timed out or lost its connection
    STOPPED = "stopped"  # the agent had stopped the worker

    @property
    def names_host(self) -> bool:
        """True if this is evidence against a host."""
        return self.strength > _STRENGTHS[FailureKind.COLLECTIVE]

    @property
    def strength(self) -> int:
        """The strength of this evidence, compared with that of other workers and hosts."""
        return _STRENGTHS[self]


_STRENGTHS = {
    FailureKind.KILLED: 4,
    FailureKind.CRASHED: 4,
    FailureKind.RAISED: 3,
    FailureKind.HUNG: 2,
    FailureKind.STALLED: 1,
    FailureKind.COLLECTIVE: 1,
    FailureKind.STOPPED: 0,
}


class Failure(Protocol):
    """A failure of a worker."""

    @property
    def failure_kind(self) -> FailureKind: ...

    @property
    def failed_at(self) -> float: ...


class Evidence(Protocol):
    """The evidence of one host."""

    @property
    def kind(self) -> FailureKind: ...


AnyFailure = TypeVar("AnyFailure", bound=Failure)
AnyEvidence = TypeVar("AnyEvidence", bound=Evidence)


def find_cause(failures: Sequence[AnyFailure]) -> AnyFailure:
    """Return the failure on one host that most likely caused the others.

    Args:
        failures: at least one failure; their times are of the same clock.
    """
    own = [one for one in failures if one.failure_kind.strength >= FailureKind.RAISED.strength]
    if own:
        # A worker that failed long before another one died was not a victim of that death.
        earliest = min(one.failed_at for one in own)
        own = [one for one in own if not one.failed_at - earliest > DEATH_NOTICE_S]
    return min(own or failures, key=lambda one: (-one.failure_kind.strength, one.failed_at))


def find_strongest(found: Iterable[AnyEvidence]) -> AnyEvidence | None:
    """Return the strongest evidence of all hosts, the first of several; None if there is none.

    Args:
        found: the evidence of each host, the host that reported first in front.
    """
    return max(found, key=lambda one: one.kind.strength, default=None)
