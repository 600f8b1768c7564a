"""Whether an agent is well: a stuck loop is found out, and one that is done is not blamed."""

from __future__ import annotations

import pytest

from elasticlib.observe.health import PATIENCE, judge
from elasticlib.observe.history import JobState


@pytest.mark.parametrize("state", JobState)
def test_only_a_failed_node_and_a_stuck_one_are_not_well(state: JobState) -> None:
    good = judge(state, "rank 0 raised", 0.0)
    assert good.good is (state is not JobState.FAILED)
    assert good.good or "rank 0 raised" in good.sentence
    stuck = judge(state, "", PATIENCE + 1)
    assert stuck.good is (state.over and state is not JobState.FAILED)


def test_how_long_the_loop_has_stood_still_is_told() -> None:
    found = judge(JobState.RUNNING, "", PATIENCE + 1)
    assert found.sentence == "the agent's loop has not turned for 16.0 s"
