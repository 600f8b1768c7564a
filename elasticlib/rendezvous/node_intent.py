"""The intent of one node, and the meaning of the job's state for that node. Pure code."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs

from ..errors import require_not_none
from .blame import Evidence, blame
from .membership import (
    Change,
    ChangeKind,
    GenerationTrigger,
    JobAction,
    JobPhase,
    JobRequest,
    Leader,
    MembershipState,
    NodeRecord,
    has_live_node,
    is_replaceable,
)
from .rank_assignment import RankAssignment


@attrs.frozen
class NodeIntent:
    """The record that a node publishes, and what its agent has requested.

    A node requests a generation only when no workers of an earlier one run on it. It withdraws its
    record rather than claim workers that the other nodes have continued without.
    """

    node: NodeRecord  # the record to publish
    has_not_joined: bool = True  # the agent has not requested a generation yet
    remembered_state: MembershipState | None = None  # last state that the node was a member of
    finished_membership_id: str = ""  # the generation whose workers have succeeded here
    close_reason: str = ""  # why the agent ends the job; empty once that is written, or if not
    # The incarnation that had finished when this node started. The node gets its result, and is not
    # announced, as it would keep the finished run alive for nodes that start after it.
    inactive_incarnation: str = ""

    @property
    def is_joining(self) -> bool:
        """True if the node is in no generation, or wants a later one than it was in."""
        return not self.node.may_run_workers

    @property
    def current_generation(self) -> int:
        """The number of the last generation that the node was a member of, or 0."""
        return 0 if self.remembered_state is None else self.remembered_state.generation

    @property
    def incarnation(self) -> str:
        """The incarnation of the last generation that the node was a member of, or ""."""
        return "" if self.remembered_state is None else self.remembered_state.incarnation

    def with_node_fields(self, **fields: Any) -> NodeIntent:
        """Return the intent with other values in the node's record."""
        return attrs.evolve(self, node=attrs.evolve(self.node, **fields))

    # -- requests of the agent ---------------------------------------------------------------------

    def request_join(self) -> NodeIntent:
        """Ask for the generation after the current one, whose workers have all stopped here."""
        stopped = self.with_node_fields(
            may_run_workers=False, stopped_membership_id=self.node.membership_id
        )
        return attrs.evolve(stopped, has_not_joined=False, finished_membership_id="")

    def receive_result(self) -> NodeIntent:
        """Record that the agent has received the final change.

        A node that started after its run had finished then takes part in no later run, unless the
        agent requests a generation again.
        """
        has_not_joined = self.has_not_joined or bool(self.inactive_incarnation)
        return attrs.evolve(self, has_not_joined=has_not_joined)

    def enter_generation(self, state: MembershipState, assignment: RankAssignment) -> NodeIntent:
        """Become a member of this generation, whose workers may run from now on."""
        member = self.with_node_fields(
            membership_id=state.membership_id,
            group_rank=assignment.group_rank,
            may_run_workers=True,
            inactive_incarnation="",
        )
        return attrs.evolve(member, remembered_state=state)

    def record_evidence(self, evidence: Evidence) -> NodeIntent:
        """Publish what happened to the workers of the current generation.

        The record has only the evidence of the failure that most likely caused the others here.
        """
        of, num_nodes = self.node.membership_id, 1
        if self.remembered_state is not None:
            num_nodes = self.remembered_state.num_nodes
        before = self.node.evidence if self.node.evidence_of == of else None
        new = attrs.evolve(evidence.bounded(num_nodes), node="", host="")
        verdict = blame([new] if before is None else [before, new])
        decisive = require_not_none(verdict, "the verdict").evidence
        return self.with_node_fields(evidence=decisive, evidence_of=of)

    def request_stop(self, reason: str) -> NodeIntent:
        """Publish that this node leaves once its workers have saved, and that the job ends."""
        request = JobRequest(JobAction.STOP, reason, self.node.membership_id)
        return self.with_node_fields(drain_reason=reason, request=request)

    def request_restart(self, reason: str) -> NodeIntent:
        """Publish that all workers of the current generation shall be restarted."""
        request = JobRequest(JobAction.RESTART, reason, self.node.membership_id)
        return self.with_node_fields(request=request)

    def record_success(self) -> NodeIntent:
        """Publish that the workers of the current generation succeeded."""
        return attrs.evolve(self, finished_membership_id=self.node.membership_id)

    # -- what the node reads in the store ----------------------------------------------------------

    def on_first_read(
        self,
        state: MembershipState | None,
        assignment: RankAssignment | None,
        nodes: Iterable[NodeRecord | Leader],
    ) -> NodeIntent:
        """Find out whether the node is part of the run that is in the store when it starts.

        Args:
            state: the state in the store.
            assignment: this node's assignment in it. If there is one, an earlier process had this
                node's id, and its workers exited with it.
            nodes: all live nodes, or only the leader.
        """
        if state is None:
            return self
        if assignment is not None:
            return self.with_node_fields(
                membership_id=state.membership_id,
                group_rank=assignment.group_rank,
                stopped_membership_id=state.membership_id,
            )
        outside = self.with_node_fields(inactive_incarnation=state.incarnation)
        return outside.check_run_alive(state, nodes)

    def on_read(self, state: MembershipState | None) -> NodeIntent:
        """Update the remembered state. A joining node forgets a run that was replaced."""
        if state is None:
            return self
        if state.membership_id and state.membership_id == self.node.membership_id:
            return attrs.evolve(self, remembered_state=state)
        is_same_run = state.incarnation == self.incarnation
        if not self.current_generation or not self.is_joining or is_same_run:
            return self
        if is_replaceable(state, self.incarnation):
            return self
        outside = self.with_node_fields(membership_id="", group_rank=0, stopped_membership_id="")
        return attrs.evolve(outside, remembered_state=None)

    def check_run_alive(
        self, state: MembershipState | None, nodes: Iterable[NodeRecord | Leader]
    ) -> NodeIntent:
        """Become part of the run if one of its nodes is alive after all.

        Such a node may have lost its lease while it was stopped, and have returned since.

        Args:
            state: the state in the store.
            nodes: nodes that are known to be alive.
        """
        if state is None or self.node.inactive_incarnation != state.incarnation:
            return self
        if not has_live_node(state, nodes):
            return self
        terminal_incarnation = state.incarnation if state.phase.is_terminal else ""
        return attrs.evolve(
            self.with_node_fields(inactive_incarnation=""),
            inactive_incarnation=terminal_incarnation,
        )

    def node_record(self, state: MembershipState | None) -> NodeRecord | None:
        """Return the record to publish, or None to publish nothing."""
        is_inactive = state is not None and state.incarnation == self.inactive_incarnation
        if self.has_not_joined or is_inactive:
            return None
        if self.is_joining:
            if state is None or state.phase is not JobPhase.FORMING:
                return self.node
            # The node has no workers of a generation that formed and finished while it was
            # suspended. It must publish that, or the others would wait for it to stop them.
            return attrs.evolve(self.node, stopped_membership_id=state.membership_id)
        is_current = state is not None and state.membership_id == self.node.membership_id
        return self.node if is_current or is_replaceable(state, self.incarnation) else None

    def final_change(self, state: MembershipState | None) -> Change | None:
        """Return why there is no further generation for this node, or None if there may be."""
        if state is None:
            return None
        node_id = self.node.id
        if state.phase.is_terminal and self.node.inactive_incarnation != state.incarnation:
            return Change(ChangeKind(state.phase.value), state.reason, state.verdict)
        if node_id in state.evicted:
            spent = f"{state.restarts} of {state.settings.max_restarts} restarts used"
            reason = f"this node's workers failed and the job continues without it ({spent})"
            return Change(ChangeKind.EVICTED, reason, state.verdict)
        exclusion = state.exclusion_of(self.node.host)
        if exclusion is not None and self.node.inactive_incarnation != state.incarnation:
            reason = f"the job continues without this host, because {exclusion.reason}"
            return Change(ChangeKind.EXCLUDED, reason, state.verdict)
        if node_id in state.rejected_spares:
            settings = state.settings
            wanted = f"{settings.max_nodes} nodes and {settings.spares} spares (--spares)"
            reason = f"the job has all the nodes it wants, {wanted}"
            return Change(ChangeKind.NOT_NEEDED, reason)
        return None

    def change(self, state: MembershipState | None) -> Change | None:
        """Return the change that ends this node's generation, or None while it is current.

        A store that has lost the generation is no change: the nodes that remember it restore it.
        """
        final = self.final_change(state)
        if final is not None or self.is_joining or state is None:
            return final
        if is_replaceable(state, self.incarnation):
            return None
        if state.incarnation != self.incarnation:
            reason = "a new run of the job started while this node was not connected to the store"
            return Change(ChangeKind.GENERATION_ENDED, reason)
        if state.membership_id != self.node.membership_id:
            return Change(ChangeKind.GENERATION_ENDED, state.reason)
        if state.phase is JobPhase.ACTIVE:
            return None
        if not state.is_planned:
            return Change(ChangeKind.GENERATION_ENDED, state.reason)
        is_restart = state.trigger is GenerationTrigger.RESTART
        return Change(ChangeKind.RESTART if is_restart else ChangeKind.RESIZE, state.reason)
