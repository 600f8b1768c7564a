"""With how many workers a node comes to the next generation, and what others need know of them."""

from __future__ import annotations

from ..errors import ConfigError
from ..rendezvous.interface import RankAssignment, RendezvousHandler, RendezvousInfo
from ..workers.interface import Workers
from ..workers.spec import choose_local_ranks
from .policy import AgentState, SupervisorState


class SlotReporter:
    """What a node says of its slots to its handler, each thing once; whole: its workers, if all of
    them run."""

    def __init__(self, handler: RendezvousHandler, workers: Workers, whole: int) -> None:
        self._handler = handler
        self._workers = workers
        self._whole = whole
        self._said, self._is_heard = (whole, False), False
        self._has_kept = self._others_keep = False

    def set_peers_can_regroup(self, *, others_keep: bool) -> None:
        """Before the first generation: whether the job has workers elsewhere that are kept."""
        self._others_keep = others_keep

    def report_can_regroup(self) -> None:
        """Workers of this node can go on in another generation."""
        if not self._has_kept:
            self._has_kept = True
            self._handler.report_can_regroup()

    def can_regroup(self) -> bool:
        """Whether a worker of the group can go on in another, or only newcomers are running."""
        running, spare = {*self._workers.running()}, {*self._workers.standby_ranks()}
        members = running - spare
        return bool(members & {*self._workers.regroupable_ranks()}) if members else bool(running)

    def should_prestart(self, last: RendezvousInfo | None) -> bool:
        """Whether the others go on while this node starts its workers; last: the generation that
        it was in."""
        if last is not None:
            # A group gives the state of the job to its new members before its first step. Until
            # then, the newest snapshot may be in the memory of this node alone.
            has_stepped = any(beat.num_steps for beat in self._workers.final_heartbeats().values())
            self._others_keep = self._has_kept and last.world_size > 1 and has_stepped
        has_none = not any(self._workers.standby_ranks().values())
        return self._others_keep and has_none and self._say(0, kept=False)

    def update(self, now: SupervisorState, members: int) -> None:
        """While the node is in no generation, it comes with all that wait for a place, or as many
        as it can start; while it is in one, with its members, and with its newcomers once all of
        them are ready, to let them in. Also whether its workers can be kept, once they can."""
        if now.state is AgentState.RUNNING and not self._has_kept and self.can_regroup():
            self.report_can_regroup()
        spare = self._workers.standby_ranks()
        ready, kept = sum(spare.values()), self._said[1]
        if now.state is AgentState.JOINING:
            slots, kept = ready or self._whole, ready > 0 and not now.is_prestarting
            if now.is_prestarting and ready < len(spare):
                slots = 0
        elif now.state is AgentState.RUNNING and now.standby_ranks:
            all_in = ready == len(now.standby_ranks) and len(now.running_ranks) == members
            slots = members + ready * all_in
        else:
            return
        self._say(slots, kept=kept)

    def _say(self, slots: int, *, kept: bool) -> bool:
        """Whether the handler knows with how many workers this node comes."""
        if (slots, kept) != self._said and self._handler.report_slots(slots, retained=kept):
            self._said, self._is_heard = (slots, kept), True
        return self._is_heard

    def members(self, seat: RankAssignment) -> frozenset[int]:
        """The local ranks of the workers that are in the generation of this seat.

        Raises:
            ConfigError: it is for more workers than there are, or for fewer than were registered.
        """
        slots, whole = seat.local_world_size, self._whole
        if not 1 <= slots <= whole or (slots < whole and not self._is_heard):
            raise ConfigError(
                f"the rendezvous registered this node with {slots} slots, but its worker spec "
                f"has {whole} workers: give both the same number"
            )
        return frozenset(choose_local_ranks(slots, self._workers.standby_ranks(), whole))
