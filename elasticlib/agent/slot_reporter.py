"""Report to the rendezvous how many workers this node offers for the next generation."""

from __future__ import annotations

from ..errors import ConfigError
from ..rendezvous.interface import RankAssignment, RendezvousHandler, RendezvousInfo
from ..workers.interface import Workers
from ..workers.spec import choose_local_ranks
from .policy import AgentState, SupervisorState


class SlotReporter:
    """Reports slots and the ability to regroup to the handler, if they have changed.

    A node offers all of its workers while it joins, and its current members while it runs. Standby
    workers are added once all of them are ready, so that one resize admits them together.
    """

    def __init__(self, handler: RendezvousHandler, workers: Workers, local_world_size: int) -> None:
        self._handler = handler
        self._workers = workers
        self._local_world_size = local_world_size  # workers when all of them run
        self._reported = (local_world_size, False)  # slots and retained, as the handler knows them
        self._is_accepted = False  # the handler has accepted a report
        self._has_reported_regroup = False  # the handler knows that workers here can regroup
        self._peers_can_regroup = False  # workers of other nodes train, and can regroup

    def set_peers_can_regroup(self, peers_can_regroup: bool) -> None:
        """Record, before the first generation, whether other nodes' workers can regroup."""
        self._peers_can_regroup = peers_can_regroup

    def report_can_regroup(self) -> None:
        """Report once that workers of this node can continue in another generation."""
        if not self._has_reported_regroup:
            self._has_reported_regroup = True
            self._handler.report_can_regroup()

    def can_regroup(self) -> bool:
        """Return True if a member of the group can regroup, or only standby workers are running."""
        running, standby = set(self._workers.running()), set(self._workers.standby_ranks())
        members = running - standby
        if not members:
            return bool(running)
        return bool(members & set(self._workers.regroupable_ranks()))

    def should_prestart(self, last: RendezvousInfo | None) -> bool:
        """Return True if this node can start its workers while the other nodes train.

        In that case, report 0 slots, so that this node is not admitted before they are ready.

        Args:
            last: the generation that this node was in, or None before the first.
        """
        if last is not None:
            # A group gives the state of the job to its new members before its first step. Until
            # then, the newest snapshot may be in the memory of this node alone.
            heartbeats = self._workers.final_heartbeats().values()
            has_stepped = any(heartbeat.num_steps for heartbeat in heartbeats)
            self._peers_can_regroup = (
                self._has_reported_regroup and last.world_size > 1 and has_stepped
            )
        is_none_ready = not any(self._workers.standby_ranks().values())
        return self._peers_can_regroup and is_none_ready and self._report_slots(0, retained=False)

    def update(self, now: SupervisorState, num_members: int) -> None:
        """Report the slots and the ability to regroup, if they have changed.

        Args:
            now: the state of the agent.
            num_members: workers of this node in the current generation.
        """
        is_running = now.state is AgentState.RUNNING
        if is_running and not self._has_reported_regroup and self.can_regroup():
            self.report_can_regroup()
        standby = self._workers.standby_ranks()
        num_ready, retained = sum(standby.values()), self._reported[1]
        if now.state is AgentState.JOINING:
            slots, retained = num_ready or self._local_world_size, num_ready > 0
            if now.is_prestarting:
                slots, retained = slots if num_ready == len(standby) else 0, False
        elif is_running and now.standby_ranks:
            can_all_join = num_ready == len(now.standby_ranks)
            are_members_running = len(now.running_ranks) == num_members
            slots = num_members + (num_ready if can_all_join and are_members_running else 0)
        else:
            return
        self._report_slots(slots, retained=retained)

    def _report_slots(self, slots: int, *, retained: bool) -> bool:
        """Report the slots if they have changed. Return True if the handler accepts reports."""
        is_new = (slots, retained) != self._reported
        if is_new and self._handler.report_slots(slots, retained=retained):
            self._reported, self._is_accepted = (slots, retained), True
        return self._is_accepted

    def members(self, assignment: RankAssignment) -> frozenset[int]:
        """Return the local ranks of the workers that get the ranks of this node's assignment.

        Raises:
            ConfigError: the assignment has more workers than the spec, or none, or fewer although
                the handler has accepted no report of slots.
        """
        slots, local_world_size = assignment.local_world_size, self._local_world_size
        is_partial = slots < local_world_size
        if not 1 <= slots <= local_world_size or (is_partial and not self._is_accepted):
            raise ConfigError(
                f"the rendezvous registered this node with {slots} slots, but its worker spec "
                f"has {local_world_size} workers: give both the same number"
            )
        standby = self._workers.standby_ranks()
        return frozenset(choose_local_ranks(slots, standby, local_world_size))
