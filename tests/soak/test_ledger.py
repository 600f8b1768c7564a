"""The ledger of a soak finds a sample that was used twice, or never, and a step that is missing."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from soak.ledger import Ledger, read_generation

SAMPLES, BATCH = 8, 4


def generation(number: int, resumed: int, steps: Iterable[int], world: int = 2):
    files = {}
    for rank in range(world):
        lines: list[dict[str, object]] = [{"resumed": resumed, "seconds": 0.0, "at": 0.0}]
        for step in steps:
            epoch, place = divmod(step - 1, SAMPLES // BATCH)
            batch = list(range(place * BATCH, (place + 1) * BATCH))
            share = batch[rank * BATCH // world : (rank + 1) * BATCH // world]
            lines.append(
                {"step": step, "epoch": epoch, "indices": share, "world": world, "at": 1.0 * step}
            )
            if rank == 0:
                lines.append({"done": step, "at": step + 0.5})
        files[rank] = lines
    return read_generation(number, files)


@pytest.fixture
def ledger() -> Ledger:
    """Of five steps, of which the third was begun twice."""
    ledger = Ledger()
    assert ledger.fold(generation(1, 0, (1, 2, 3))) == 0
    assert ledger.fold(generation(3, 2, (3, 4, 5), world=1)) == 1
    return ledger


def test_a_job_that_struck_out_what_it_did_again_is_right(ledger: Ledger) -> None:
    assert ledger.check(5, SAMPLES, BATCH) == []
    assert ledger.struck == 1
    assert ledger.useful_seconds() == 2.5


def test_steps_that_were_begun_and_never_done_again_do_not_count(ledger: Ledger) -> None:
    assert ledger.fold(generation(4, 2, (3,))) == 3
    assert sorted(ledger.steps) == [1, 2, 3]
    assert any("[4, 5] do not" in wrong for wrong in ledger.check(5, SAMPLES, BATCH))


def test_a_step_that_is_missing_is_named(ledger: Ledger) -> None:
    del ledger.steps[4]
    assert any("[4] do not" in wrong for wrong in ledger.check(5, SAMPLES, BATCH))


def test_a_sample_that_was_used_twice_is_named(ledger: Ledger) -> None:
    ledger.steps[4].ranks[0] = [0, 1, 6, 7]
    (wrong,) = ledger.check(5, SAMPLES, BATCH)
    assert "epoch 1: 6 of 8 samples were used, [0, 1] more than once" in wrong


def test_a_rank_that_wrote_nothing_down_is_missed(ledger: Ledger) -> None:
    del ledger.steps[1].ranks[1]
    assert any("step 1 has ranks [0] of 2" in wrong for wrong in ledger.check(5, SAMPLES, BATCH))


def test_ranks_that_went_on_from_different_steps_are_told_of(ledger: Ledger) -> None:
    odd = generation(4, 5, (6,))
    odd.resumed[1] = {**odd.resumed[1], "resumed": 4}
    ledger.fold(odd)
    assert any("went on from [4, 5]" in wrong for wrong in ledger.check(6, SAMPLES, BATCH))
