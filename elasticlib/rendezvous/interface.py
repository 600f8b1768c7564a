"""The interface between an agent and a rendezvous handler.

Methods that torch.distributed.elastic has keep their names. All additions have defaults, so a
handler that was written for torch needs only another base class.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

import attrs

from ..errors import ConfigError
from ..options import RendezvousSettings
from .blame import Evidence as Evidence
from .blame import FailureDetails as FailureDetails
from .blame import FailureKind as FailureKind
from .blame import Verdict as Verdict
from .membership import Change as Change
from .membership import ChangeKind as ChangeKind
from .membership import GenerationTrigger
from .membership import Node as Node
from .rank_assignment import RankAssignment as RankAssignment
from .rank_assignment import assign_ranks as assign_ranks

if TYPE_CHECKING:
    from ..stores.interface import Store


@attrs.frozen
class RendezvousStoreInfo:
    """The endpoint of torch's store for the workers of one generation."""

    master_addr: str
    master_port: int


@attrs.frozen
class RendezvousInfo:
    """A generation as one of its nodes sees it."""

    run_id: str
    generation: int
    assignment: RankAssignment  #: this node's ranks; `assign_ranks` computes those of all nodes
    bootstrap_store_info: RendezvousStoreInfo
    restarts: int = 0  #: restarts that the job has used
    max_restarts: int | None = None  #: restart budget; None if the rendezvous has none
    reason: str = ""  #: why this generation was formed, for messages
    store: Store | None = None  #: the job's store, if others may use it
    #: Prefix of the keys through which the nodes of this generation exchange messages, or empty.
    exchange_prefix: str = ""
    incarnation: str = ""  #: identifies this run of the job id; empty if unknown
    trigger: GenerationTrigger | None = None  #: the kind of `reason`; None if unknown
    verdict: Verdict | None = None  #: the failure or loss that ended the last generation, if any
    use_agent_store: bool = True  #: an agent serves torch's store, and no worker does

    @property
    def rank(self) -> int:
        """The group rank of this node."""
        return self.assignment.group_rank

    @property
    def world_size(self) -> int:
        """The number of nodes."""
        return self.assignment.num_nodes


# -- messages between a membership and its agent -----------------------------------------------


class Topic(enum.Enum):
    """A topic under which the nodes of a generation publish values for each other."""

    STOP = "stop"  # the call of `should_stop` at which a node's workers can stop
    OVER = "over"  # the node's workers leave their group at once, because a collective failed
    HANG = "hang"  # the progress of the node's ranks, once a worker hangs
    NOTICES = "notices"  # a worker of the node has called `should_stop`


class ReportKind(enum.Enum):
    """The kind of a report of the agent to the rendezvous."""

    FAILURE = "failure"
    SLOTS = "slots"
    CAN_REGROUP = "can_regroup"
    TAKES_NOTICES = "takes_notices"
    SUCCESS = "success"
    DRAIN = "drain"
    STOP = "stop"
    RESTART = "restart"


@attrs.frozen
class Report:
    """Tell the rendezvous what has happened here."""

    kind: ReportKind
    reason: str = ""
    slots: int = 0  #: workers that this node offers
    is_retained: bool = False  #: they have run in the last generation, and can continue
    #: What happened to the workers, with any kind of report. Of several reports of a generation,
    #: the evidence that most likely caused the others is kept. A FAILURE without it means RAISED.
    evidence: Evidence | None = None
    details: FailureDetails | None = None  #: about the evidence; 3 KB of it are kept


@attrs.frozen
class Publish:
    """Publish a value for the other nodes of the generation. A later value replaces it."""

    topic: Topic
    value: bytes


@attrs.frozen
class Joined:
    """This node is a member of a generation."""

    attempt: int
    generation: RendezvousInfo


@attrs.frozen
class MembershipChanged:
    """The generation or the job is over, or this node could not join one."""

    attempt: int
    change: Change
    error: Exception | None = None  # what `RendezvousHandler.next_rendezvous` raises, if not closed


@attrs.frozen
class PeerMessages:
    """All that the nodes of the generation have published under a topic."""

    attempt: int
    topic: Topic
    by_rank: Mapping[int, bytes] | None  # by node rank; None: the nodes cannot be reached


class Membership(Protocol):
    """The rendezvous as an agent's loop uses it: no method blocks, except `prepare` and `close`.

    The loop calls the methods. Events come through `post`, from any thread.
    """

    @property
    def store(self) -> Store | None:
        """The job's store, if others may use it."""
        ...

    takes_slots: bool
    """Whether this node may offer fewer workers than its specification has."""

    run_id: str
    """The job's id."""

    def prepare(self) -> tuple[bool, bool]:
        """Do slow preparation before the first join. Another thread calls this once.

        Returns:
            Whether other nodes train with workers that can regroup, and whether a worker of another
            node is known to call `should_stop`.
        """
        ...

    def open(
        self,
        post: Callable[[Joined | MembershipChanged | PeerMessages], None],
        turned_at: Callable[[], float],
    ) -> None:
        """Begin. `turned_at` returns when the loop last made progress, on the handler's clock.

        If that is long ago, the lease of this node is withdrawn, so that the other nodes do not
        wait for an agent that does not react.
        """
        ...

    def join(self, attempt: int) -> None:
        """Join the next generation. A Joined or a MembershipChanged with this number follows."""
        ...

    def report(self, report: Report) -> None:
        """Take note of what has happened on this node."""
        ...

    def publish(self, message: Publish) -> None:
        """Publish a value for the other nodes of the generation.

        All values under a topic, those of this node included, come as PeerMessages, whenever they
        change.
        """
        ...

    def close(self, timeout_s: float | None = None) -> bool:
        """Leave the job. Return whether this has ended in time. A second call does nothing.

        Args:
            timeout_s: the limit of the wait; by default, that of the membership's own settings.
        """
        ...


def check_restart_budget(of_agent: RendezvousSettings | None, of_job: int | None) -> None:
    """Reject a restart budget of an agent that contradicts the job's.

    Args:
        of_agent: The settings that the agent was given; None if it was given none.
        of_job: The budget that the rendezvous keeps for the job; None if it keeps none.

    Raises:
        ConfigError: Both are given, and they differ.
    """
    if of_agent is not None and of_job is not None and of_agent.max_restarts != of_job:
        raise ConfigError(
            f"the agent has max_restarts={of_agent.max_restarts}, but its rendezvous handler "
            f"counts restarts for the whole job and has max_restarts={of_job}: "
            "leave out the agent's, or give both the same number"
        )


class RendezvousHandler(abc.ABC):
    """Forms the generations of a job for one node."""

    @abc.abstractmethod
    def get_run_id(self) -> str:
        """Return the job id, which is equal on all nodes of the job."""

    def get_backend(self) -> str:
        """Return the name of the backend, for messages. The default is the name of the class."""
        return type(self).__name__

    @abc.abstractmethod
    def next_rendezvous(self) -> RendezvousInfo:
        """Block until this node is a member of a generation later than its last one.

        A call means that no workers of the last generation run on this node any more.

        Returns:
            The generation.

        Raises:
            RendezvousTimeoutError: No such generation formed within the join timeout.
            RendezvousClosedError: The job is in a terminal phase or continues without this node,
                or `shutdown` was called. Its `change` is the result of the agent.
            RendezvousConfigError: This node's settings contradict the job's.
            RendezvousError: This node cannot serve torch's store.
            StoreError: The store was unreachable for too long.
        """

    @abc.abstractmethod
    def is_closed(self) -> bool:
        """Return whether there is no further generation for this node."""

    @abc.abstractmethod
    def set_closed(self) -> None:
        """End the job for all nodes. The call should not block for long.

        An agent calls this when its workers have failed more often than `max_restarts` allows, if
        `report` does not support failures.
        """

    @abc.abstractmethod
    def num_nodes_waiting(self) -> int:
        """Return how many nodes wait for the current generation to end and fit into the next one.

        Joining nodes count until they are admitted. Members that have stopped their workers count
        while they wait for other members. Spares beyond the maximum do not count. An agent that
        gets changes in no other way polls this, and stops its workers if the number is above 0.
        """

    @abc.abstractmethod
    def shutdown(self) -> bool:
        """Leave the job and free all resources. A second call is harmless.

        A `next_rendezvous` that blocks in another thread raises RendezvousClosedError.

        Returns:
            Whether all resources could be freed in time.
        """

    def wait_for_change(self, timeout: float) -> Change | None:
        """Wait until the current generation ends.

        The default checks `is_closed` and `num_nodes_waiting` once and does not wait.

        Args:
            timeout: Seconds to wait at most.

        Returns:
            The change, or None if there was none.
        """
        del timeout
        if self.is_closed():
            return Change(ChangeKind.ABORTED, "the rendezvous was closed")
        waiting = self.num_nodes_waiting()
        if waiting > 0:
            return Change(ChangeKind.RESIZE, f"{waiting} nodes are waiting to join")
        return None

    def report(self, report: Report) -> bool:
        """Take note of what has happened on this node. The call should not block for long.

        What each kind of report asks for:

        - FAILURE: the workers failed. The generation or the job ends, and `wait_for_change` reports
          which. Its evidence counts with that of all nodes; the failure counts once.
        - SLOTS: this node offers so many workers for the next generation. If the number differs
          from the current generation's, all members are asked to stop at a step that they agree
          on. A node that offers 0 is left out of a generation until it offers more. The next
          generation waits for a returning member that offers 0, unless other members have retained
          workers: the other members then continue without that node.
        - CAN_REGROUP: the workers can continue in another generation.
        - TAKES_NOTICES: a worker has called `should_stop`.
        - SUCCESS: the workers succeeded. `wait_for_change` reports when those of all nodes have
          (SUCCEEDED), or that this node's workers must start again.
        - DRAIN: this node leaves as soon as its workers have saved. The members are asked to stop
          at a step that they agree on, and the next generation waits until this node has left.
        - STOP: the same, and no further generation is formed.
        - RESTART: all workers are restarted in a new generation. This counts as no failure.

        Returns:
            False if such a report is unsupported, as by default for all. The agent then keeps a
            restart budget of its own, and calls `set_closed` when it is used up; it always has the
            number of workers that it was constructed with; and it leaves after a SUCCESS, a DRAIN
            or a STOP without waiting for the other nodes.
        """
        del report
        return False
