"""Whose state a group goes on from."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as some

from elasticlib.in_place.decide import Takeover, Word, choose

WORDS = some.lists(
    some.builds(Word, some.none() | some.integers(0, 3), some.booleans()), min_size=1, max_size=6
)


def test_the_newest_step_wins_and_the_lowest_rank_gives_it() -> None:
    words = [Word(4, True), Word(5, False), Word(5, True), Word(5, True), Word()]
    assert choose(words) == Takeover(5, 2, (0, 1, 4))


def test_what_nobody_has_whole_is_looked_for_elsewhere() -> None:
    assert choose([Word(), Word()]) is None
    assert choose([Word(5, False), Word(5, False), Word()]) is None
    assert choose([Word(5, False), Word(4, True)]) is None
    assert choose([Word(5, False), Word(4, True)], any_step=True) == Takeover(4, 1, (0,))


@given(WORDS, some.booleans())
def test_all_end_with_the_state_of_one_step(words: list[Word], any_step: bool) -> None:
    found = choose(words, any_step=any_step)
    if found is None:
        return
    assert words[found.source] == Word(found.step, whole=True)
    for rank, word in enumerate(words):
        assert (rank in found.takers) == (word != Word(found.step, whole=True))
    if not any_step:
        assert all(word.step is None or word.step <= found.step for word in words)
