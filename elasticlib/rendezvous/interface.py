"""What a rendezvous handler promises to the agent that uses it.

The names are those of torch.distributed.elastic, so that a handler written for it ports in
minutes; what is new here has a default, so that such a handler needs none of it.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs

from ..errors import ConfigError
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
    """Where the workers of one generation find torch's store."""

    master_addr: str
    master_port: int


@attrs.frozen
class RendezvousInfo:
    """One settled generation, as one of its nodes sees it.

    seat: this node's place, from which its workers' ranks follow; `deal_seats` gives all nodes
    of a generation theirs. restarts and max_restarts: the job's budget, None where the rendezvous
    keeps none. cause: why this generation was sought, in words; why: the same for programs, None
    where the rendezvous does not say. store: the job's, where there is one that
    others may use. board: what the keys in it begin with under which the nodes of this generation
    tell one another things; empty for nowhere. incarnation: names this start of the job, whose
    generations count from 1 again; the same on all nodes, and empty where nobody knows.
    """

    run_id: str
    generation: int
    assignment: RankAssignment
    bootstrap_store_info: RendezvousStoreInfo
    restarts: int = 0
    max_restarts: int | None = None
    reason: str = ""
    store: Store | None = None
    exchange_prefix: str = ""
    incarnation: str = ""
    trigger: GenerationTrigger | None = None

    @property
    def rank(self) -> int:
        """This node's, among the nodes."""
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
    """Brings the nodes of a job together, as often as their number changes."""

    @abc.abstractmethod
    def get_backend(self) -> str:
        """The name of the backend, as given to --rdzv-backend."""

    @abc.abstractmethod
    def get_run_id(self) -> str:
        """The id that all nodes of the job were given."""

    def check_agent(self, *, slots: int, max_restarts: int | None) -> None:  # noqa: B027 - optional
        """Reject an agent whose settings contradict this handler's own.

        Each `ElasticAgent` calls this once, before anything starts. The default accepts all.

        Args:
            slots: The number of workers that the agent starts.
            max_restarts: The restart budget that the agent was given; None if it was given none.

        Raises:
            ConfigError: The settings contradict each other.
        """

    def prepare(self) -> None:  # noqa: B027 - most have nothing to prepare
        """Do what takes its time and needs no other node, such as a long import.

        The agent calls it once, in a thread, before it asks for its first generation: the other
        nodes go on meanwhile."""

    def mark_progress(self, allowance_s: float = 0.0) -> None:  # noqa: B027 - optional
        """Record that the agent's loop makes progress.

        The agent calls this in each iteration of its loop, before the first rendezvous as well. A
        handler that keeps a lease for its node in a thread of its own ends the lease if the calls
        stop, so that the other nodes do not wait for an agent that does not react. The default
        does nothing.

        Args:
            allowance_s: Seconds that the next call may take longer than usual.
        """

    @abc.abstractmethod
    def next_rendezvous(self) -> RendezvousInfo:
        """Block until this node is a member of a generation later than its last one.

        Calling it says that no workers here are at work in the last generation any more.

        Raises:
            RendezvousTimeoutError: no such generation within the join timeout.
            RendezvousClosedError: the job is over, or goes on without this node, or `shutdown` was
                called.
            RendezvousConfigError: this node's settings contradict the job's.
            RendezvousError: this node cannot serve torch's store.
            StoreError: the store was out of reach for too long.
        """

    @abc.abstractmethod
    def is_closed(self) -> bool:
        """Whether there will be no further generation for this node: the job is over, or goes on
        without it."""

    @abc.abstractmethod
    def set_closed(self) -> None:
        """End the job for all nodes.

        An agent calls this when its workers have failed more often than `max_restarts` allows, if
        `report_failure` is unsupported. It should not block for long.
        """

    @abc.abstractmethod
    def num_nodes_waiting(self) -> int:
        """How many nodes wait for the held generation to end, and find room in the next one.

        As with torch's, an agent that has nothing else to go by asks this again and again, and
        where it is above 0 stops its workers and calls `next_rendezvous`. So it counts a newcomer
        until it is let in, and a member that waits for the others once it has stopped its own
        workers; not a spare beyond the maximum, for which nobody need stop.
        """

    @abc.abstractmethod
    def shutdown(self) -> bool:
        """Leave, and free what is held; a blocked next_rendezvous raises RendezvousClosedError.

        Returns whether all could be freed in time. Calling it twice is harmless.
        """

    def start_join(self, callback: Callable[[RendezvousInfo | Change | Exception], None]) -> bool:
        """Like `next_rendezvous`, and then `wait_for_change` until the held generation is over,
        without a thread that waits.

        `put` is called, from any thread, with the RendezvousInfo once this node is a member, or
        with what `next_rendezvous` would raise; and after the RendezvousInfo with each Change in
        turn. It must not block. A new call takes the place of the one before, whose `put` is not
        called again. False, and nothing is called: this handler has only the blocking calls.
        """
        del callback
        return False

    @property
    def use_agent_store(self) -> bool:
        """Whether the bootstrap store is served outside the workers already."""
        return True

    def wait_for_change(self, timeout: float) -> Change | None:
        """What has become of the held generation; None if nothing within `timeout` seconds.

        The default looks once and returns at once: its caller paces the polls.
        """
        del timeout
        if self.is_closed():
            return Change(ChangeKind.ABORTED, "the rendezvous was closed")
        waiting = self.num_nodes_waiting()
        if waiting > 0:
            return Change(ChangeKind.RESIZE, f"{waiting} nodes wait to be let in")
        return None

    def report_failure(self, reason: str, *, killed: bool = False) -> bool:
        """Take note that this node's workers failed.

        Args:
            reason: Why they failed, for people.
            killed: A signal from outside ended the worker. Its restart needs no delay.

        Returns:
            False if this is unsupported, as by default: the agent keeps a restart budget of its
            own. True if the job will be reopened or ended, and `wait_for_change` reports which.
        """
        del reason, killed
        return False

    def report_slots(self, slots: int, *, retained: bool = False) -> bool:
        """This node comes to the next generation with so many workers, or would. False:
        unsupported, it always has as many as it was registered with. kept: these workers have run
        in the last one, and go on.

        True: its seat in the next generation is for so many, and where the held one stands with
        another number, all members are told to stop at a step that they agree on. With 0, which is
        said while it joins, it has no seat until it says another number: where others come with
        kept workers these go on meanwhile, and else they wait for it.
        """
        del slots, retained
        return False

    def report_can_regroup(self) -> None:  # noqa: B027 - where slots are not reported it is no news
        """All workers of this node can go on in another generation."""

    def peers_can_regroup(self) -> bool:
        """Whether the job goes on already, with workers that can go on in another generation: a
        node that joins starts its own before it is let in, then. Before the first rendezvous, in
        any thread; waits for the store's first answer, for a few seconds at most."""
        return False

    def report_drain(self, reason: str) -> bool:
        """This node leaves as soon as its workers have saved. False: unsupported, it just leaves.

        True: the members of its generation are told to stop at a step that they agree on, this
        node among them, and the next generation waits until it has left.
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
