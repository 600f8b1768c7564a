"""Whose the steps are that are done again."""

from __future__ import annotations

from soak.report import charged
from soak.storm import Played


def played(number: int, kind: str, generation: int, struck: dict[int, int]) -> Played:
    return Played(number, kind, 0, 0, 2, generation, "", struck, (), None)


def test_steps_done_again_are_charged_to_the_last_fault_before_the_generation_that_did_them() -> (
    None
):
    story = [
        played(1, "kill", 1, {1: 0}),
        played(2, "slow", 2, {}),
        played(3, "corrupt", 2, {2: 1}),
        played(4, "drain", 3, {3: 20}),
        played(5, "kill", 4, {4: 0}),
    ]
    assert charged(story) == {1: 1, 2: 0, 3: 20, 4: 0, 5: 0}


def test_a_fault_of_two_generations_pays_for_both_and_the_one_before_it_for_neither() -> None:
    """An agent is lost: the others go on without it, and once more when a spare node has come."""
    story = [
        played(1, "drain", 4, {4: 0}),
        played(2, "agent", 5, {5: 0, 6: 2}),
        played(3, "kill", 7, {7: 1}),
    ]
    assert charged(story) == {1: 0, 2: 3, 3: 0}
