"""Choose the rank that broadcasts its training state to a new process group. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

import attrs


@attrs.frozen
class MemberStatus:
    """The status that each worker reports to the other members of a new group."""

    step: int | None = None  # last committed step; None if the worker has no state of this job
    is_complete: bool = False  # the state is exactly that of `step`, with no step half applied
    is_in_step_loop: bool = False  # False while the script is still starting up
    node: str = ""  # id of the worker's node


@attrs.frozen
class BroadcastPlan:
    """A transfer of the state of `step` from one rank to the ranks that lack it."""

    step: int
    source: int
    receivers: tuple[int, ...]


def plan_broadcast(
    members: Sequence[MemberStatus], *, allow_older_step: bool = False
) -> BroadcastPlan | None:
    """Choose the newest committed step and the lowest rank that has it complete.

    Args:
        members: the status of each rank of the group, in rank order.
        allow_older_step: accept a step that is older than the newest committed one, if no rank has
            the newest one complete.

    Returns:
        The plan, without receivers if all ranks have the state, or None if no member can provide
        it. The group must then restore the state from snapshots or checkpoints.
    """
    complete = {
        rank: member.step
        for rank, member in enumerate(members)
        if member.is_complete and member.step is not None
    }
    if not complete:
        return None
    newest_complete = max(complete.values())
    newest_committed = max(member.step for member in members if member.step is not None)
    if newest_complete < newest_committed and not allow_older_step:
        return None
    holders = [rank for rank, step in complete.items() if step == newest_complete]
    receivers = tuple(rank for rank in range(len(members)) if rank not in holders)
    return BroadcastPlan(newest_complete, source=holders[0], receivers=receivers)
