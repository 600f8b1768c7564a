"""The choice of the rank that broadcasts its state to a new group."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elasticlib.in_place.takeover import BroadcastPlan, MemberStatus, plan_broadcast

MEMBERS = st.lists(
    st.builds(MemberStatus, st.none() | st.integers(0, 3), st.booleans()), min_size=1, max_size=6
)


def test_the_lowest_rank_with_the_newest_complete_step_broadcasts() -> None:
    members = [
        MemberStatus(4, True),
        MemberStatus(5, False),
        MemberStatus(5, True),
        MemberStatus(5, True),
        MemberStatus(),
    ]
    assert plan_broadcast(members) == BroadcastPlan(5, 2, (0, 1, 4))


def test_there_is_no_plan_if_no_member_has_the_newest_step_complete() -> None:
    assert plan_broadcast([MemberStatus(), MemberStatus()]) is None
    incomplete = MemberStatus(5, False)
    assert plan_broadcast([incomplete, incomplete, MemberStatus()]) is None
    older = MemberStatus(4, True)
    assert plan_broadcast([incomplete, older]) is None
    assert plan_broadcast([incomplete, older], allow_older_step=True) == BroadcastPlan(4, 1, (0,))


@given(MEMBERS, st.booleans())
def test_all_members_end_with_the_state_of_one_step(
    members: list[MemberStatus], allow_older_step: bool
) -> None:
    plan = plan_broadcast(members, allow_older_step=allow_older_step)
    if plan is None:
        return
    complete_member = MemberStatus(plan.step, is_complete=True)
    assert members[plan.source] == complete_member
    for rank, member in enumerate(members):
        assert (rank in plan.receivers) == (member != complete_member)
    if not allow_older_step:
        assert all(member.step is None or member.step <= plan.step for member in members)
