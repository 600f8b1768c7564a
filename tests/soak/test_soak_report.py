"""Whose the steps are that are done again."""

from __future__ import annotations

from soak.report import charged
from soak.storm import Played


def played(kind: str, generation: int, struck: int) -> Played:
    return Played(0, kind, 0, 0, 2, generation, "", struck, (), None)


def test_steps_done_again_are_charged_to_the_fault_that_ended_the_generation_before() -> None:
    story = [
        played("kill", 1, 0),
        played("slow", 2, 0),
        played("corrupt", 2, 1),
        played("drain", 3, 20),
        played("kill", 4, 0),
    ]
    assert [(one.kind, one.struck) for one in charged(story)] == [
        ("kill", 1),
        ("slow", 0),
        ("corrupt", 20),
        ("drain", 0),
        ("kill", 0),
    ]
