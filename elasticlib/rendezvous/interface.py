"""The interface between an agent and a rendezvous handler.

Methods that torch.distributed.elastic has keep their names. All additions have defaults, so a
handler that was written for torch needs only another base class.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs

from ..errors import ConfigError
from .blame import FailureKind as FailureKind
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
    assignment: RankAssignment  # this node's ranks; `assign_ranks` computes those of all nodes
    bootstrap_store_info: RendezvousStoreInfo
    restarts: int = 0  # restarts that the job has used
    max_restarts: int | None = None  # restart budget; None if the rendezvous has none
    reason: str = ""  # why this generation was formed, for messages
    store: Store | None = None  # the job's store, if others may use it
    # Prefix of the keys through which the nodes of this generation exchange messages, or empty.
    exchange_prefix: str = ""
    incarnation: str = ""  # identifies this run of the job id; empty if unknown
    trigger: GenerationTrigger | None = None  # the kind of `reason`; None if unknown

    @property
    def rank(self) -> int:
        """The group rank of this node."""
        return self.assignment.group_rank

    @property
    def world_size(self) -> int:
        """The number of nodes."""
        return self.assignment.num_nodes


def check_restart_budget(of_agent: int | None, of_job: int | None) -> None:
    """Reject a restart budget of an agent that contradicts the job's.

    Args:
        of_agent: The `max_restarts` that the agent was given; None if it was given none.
        of_job: The budget that the rendezvous keeps for the job; None if it keeps none.

    Raises:
        ConfigError: Both are given, and they differ.
    """
    if None not in (of_agent, of_job) and of_agent != of_job:
        raise ConfigError(
            f"the agent has max_restarts={of_agent}, but its rendezvous handler counts restarts "
            f"for the whole job and has max_restarts={of_job}: leave out the agent's, or give "
            "both the same number"
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
                or `shutdown` was called.
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
        `report_failure` is unsupported.
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

    def check_agent(self, *, slots: int, max_restarts: int | None) -> None:  # noqa: B027 - optional
        """Reject an agent whose settings contradict this handler's own.

        Each `ElasticAgent` calls this once, before anything starts. The default accepts all.

        Args:
            slots: The number of workers that the agent starts.
            max_restarts: The restart budget that the agent was given; None if it was given none.

        Raises:
            ConfigError: The settings contradict each other.
        """

    def prepare(self) -> None:  # noqa: B027 - optional
        """Do slow preparation that needs no other node, such as importing a large module.

        The agent calls this once, in a thread, before the first rendezvous.
        """

    def mark_progress(self, allowance_s: float = 0.0) -> None:  # noqa: B027 - optional
        """Record that the agent's loop makes progress.

        The agent calls this in each iteration of its loop, before the first rendezvous as well. A
        handler that keeps a lease for its node in a thread of its own ends the lease if the calls
        stop, so that the other nodes do not wait for an agent that does not react. The default
        does nothing.

        Args:
            allowance_s: Seconds that the next call may take longer than usual.
        """

    def start_join(self, callback: Callable[[RendezvousInfo | Change | Exception], None]) -> bool:
        """Start what `next_rendezvous` and then `wait_for_change` do, without blocking a thread.

        A new call replaces the previous call, whose callback is not called again.

        Args:
            callback: Called from any thread, and must not block. It gets the RendezvousInfo once
                this node is a member, or the exception that `next_rendezvous` would raise; and
                after the RendezvousInfo each Change.

        Returns:
            False if this is unsupported, as by default: the callback is never called, and the agent
            uses the blocking methods.
        """
        del callback
        return False

    @property
    def use_agent_store(self) -> bool:
        """True if an agent serves torch's store and no worker does, as by default."""
        return True

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

    def report_failure(
        self, reason: str, *, kind: FailureKind = FailureKind.RAISED, hung_node_rank: int = -1
    ) -> bool:
        """Take note that this node's workers failed. The agent calls it once in a generation.

        Args:
            reason: Why they failed, for messages.
            kind: What happened to them. Only `kind.names_host` is evidence against a host. The
                restart after FailureKind.KILLED needs no delay.
            hung_node_rank: The group rank of the node whose worker hangs, if the kind is HUNG.

        Returns:
            False if this is unsupported, as by default: the agent keeps a restart budget of its
            own. True if the generation or the job will end, and `wait_for_change` reports which.
        """
        del reason, kind, hung_node_rank
        return False

    def report_evidence(self, reason: str, *, kind: FailureKind, hung_node_rank: int = -1) -> None:
        """Take note of stronger evidence about a failure than `report_failure` had.

        The agent calls this after the failure was reported by any node, while the workers are
        being stopped. The failure counts only once. The default does nothing.

        Args:
            reason: As for `report_failure`.
            kind: As for `report_failure`.
            hung_node_rank: As for `report_failure`.
        """
        del reason, kind, hung_node_rank

    def report_slots(self, slots: int, *, retained: bool = False) -> bool:
        """Take note of how many workers this node offers for the next generation.

        If the number differs from the current generation's, all members are asked to stop at a
        step that they agree on. A node that offers 0 is left out of a generation until it offers
        more. The next generation waits for a returning member that offers 0, unless other members
        have retained workers: the other members then continue without that node.

        Args:
            slots: The number of workers.
            retained: The workers have run in the last generation and can continue in the next.

        Returns:
            False if this is unsupported, as by default: the node always has the number of workers
            that it was constructed with.
        """
        del slots, retained
        return False

    def report_can_regroup(self) -> None:  # noqa: B027 - optional
        """Take note that workers of this node can continue in another generation."""

    def peers_can_regroup(self) -> bool:
        """Return whether the job has workers that can continue in another generation.

        A joining node then starts its own workers before it is admitted. The agent calls this
        before the first rendezvous, in any thread. The call may wait for some seconds.
        """
        return False

    def report_takes_notices(self) -> None:  # noqa: B027 - optional
        """Take note that a worker of this node has called `should_stop`."""

    def peers_take_notices(self) -> bool:
        """Return whether a worker of another node is known to have called `should_stop`.

        Then SIGTERM drains this node also before its own workers make that call. The call must not
        block. The default is False.
        """
        return False

    def report_drain(self, reason: str) -> None:  # noqa: B027 - optional
        """Take note that this node leaves as soon as its workers have saved.

        The members of the generation are then asked to stop at a step that they agree on, and the
        next generation waits until this node has left. With the default, the other nodes are not
        told: this node leaves without them.

        Args:
            reason: Why it leaves, for messages.
        """

    def report_stop(self, reason: str) -> None:
        """Take note that this node leaves as by `report_drain`, and that the job shall end.

        No further generation is formed. With the default, this node only drains.

        Args:
            reason: Why the job ends, for messages.
        """
        self.report_drain(reason)

    def report_restart(self, reason: str) -> bool:
        """Take note that all workers of the current generation shall be restarted.

        The members are asked to stop at a step that they agree on, and then form a new generation.
        This counts as no failure.

        Args:
            reason: Why they are restarted, for messages.

        Returns:
            False if this is unsupported, as by default: nothing happens. True if the generation
            will end with a RESTART.
        """
        del reason
        return False

    def report_success(self) -> bool:
        """Take note that this node's workers succeeded.

        A handler for several nodes should override this. With the default, the agent leaves at
        once: it does not wait for the other nodes, and if their workers fail later, they cannot be
        restarted together with this node.

        Returns:
            False if this is unsupported, as by default. True if `wait_for_change` reports when all
            nodes have succeeded (SUCCEEDED), or that this node's workers must start again.
        """
        return False
