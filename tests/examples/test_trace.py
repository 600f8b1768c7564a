"""The proof that a history used each sample once: it must fail when one is lost or repeated."""

from __future__ import annotations

import json
import os

import pytest
from traces import TraceError, read_traces

from elasticlib.examples.train_text import append_trace


@pytest.fixture(autouse=True)
def _restored(monkeypatch):
    for name in ("ELASTICLIB_INCARNATION", "ELASTICLIB_GENERATION", "RANK"):
        monkeypatch.delenv(name, raising=False)


def become(generation, rank, launch="0"):
    """From here on this process writes as that rank."""
    os.environ.update(
        ELASTICLIB_INCARNATION=launch, ELASTICLIB_GENERATION=str(generation), RANK=str(rank)
    )


def play(prefix, generation, world, resumed, steps, **start):
    """One generation: at each step k, rank r uses sample k * 2 + r (or both, alone)."""
    for rank in range(world):
        become(generation, rank, start.get("launch", "0"))
        append_trace(str(prefix), resumed=resumed, at=start.get("at", 0.0))
        for step in steps:
            pair = [2 * step - 2, 2 * step - 1]
            indices = pair if world == 1 else [pair[rank]]
            append_trace(str(prefix), step=step, epoch=0, indices=indices, world_size=world)


def test_steps_redone_after_a_crash_are_struck_out(tmp_path):
    prefix = tmp_path / "run"
    play(prefix, 1, 2, 0, range(1, 8))
    play(prefix, 2, 1, 4, range(5, 7))
    play(prefix, 10, 2, 6, range(7, 10))
    told = read_traces(prefix)
    assert told.used_exactly_once(18)
    assert (told.steps, told.redone) == (9, 3)


def test_a_restart_within_a_generation_counts_too(tmp_path):
    prefix = tmp_path / "run"
    play(prefix, 1, 2, 0, range(1, 8))
    play(prefix, 1, 2, 4, range(5, 10))
    told = read_traces(prefix)
    assert told.used_exactly_once(18)
    assert (told.steps, told.redone) == (9, 3)


def test_generations_that_count_from_1_in_each_launch_are_told_apart(tmp_path):
    """Launches are in the order of their clocks, whatever their names and worlds."""
    prefix = tmp_path / "run"
    for launch, began, world, resumed in (("f.1", 5, 2, 0), ("c.2", 7, 1, 4), ("e.1", 9, 2, 8)):
        from_when = {"launch": launch, "at": began}
        play(prefix, 1, world, resumed, range(resumed + 1, resumed + 5), **from_when)
        play(prefix, 2, 1, resumed + 2, range(resumed + 3, resumed + 6), **from_when)
    told = read_traces(prefix)
    assert (told.steps, told.redone) == (13, 8)
    assert told.used_exactly_once(26)


def test_a_generation_that_trained_nothing_strikes_out_what_it_did_not_see(tmp_path):
    prefix = tmp_path / "run"
    play(prefix, 1, 2, 0, range(1, 8))
    play(prefix, 2, 2, 4, [])
    play(prefix, 3, 2, 4, range(5, 10))
    assert read_traces(prefix).used_exactly_once(18)


def test_of_two_launches_side_by_side_the_one_counts_whose_state_is_taken(tmp_path):
    """One goes on alone while the other begins anew from an old checkpoint; then they meet."""
    prefix = tmp_path / "run"
    for launch, generation, world, resumed, steps in (
        ("first", 1, 2, 0, range(1, 3)),
        ("first", 2, 1, 2, range(3, 10)),
        ("second", 1, 1, 4, range(5, 7)),
        ("second", 2, 2, 8, range(9, 12)),
    ):
        began = {"first": 5, "second": 7}[launch]
        play(prefix, generation, world, resumed, steps, launch=launch, at=began)
    told = read_traces(prefix)
    assert (told.steps, told.redone) == (11, 3)
    assert told.used_exactly_once(22)


def test_a_lost_sample_and_a_repeated_one_are_noticed(tmp_path):
    prefix = tmp_path / "run"
    play(prefix, 1, 1, 0, range(1, 4))
    assert read_traces(prefix).used_exactly_once(6)
    assert not read_traces(prefix).used_exactly_once(7)
    become(1, 0)
    append_trace(str(prefix), step=4, epoch=0, indices=[5], world_size=1)
    assert not read_traces(prefix).used_exactly_once(6)


def test_a_missing_step_and_a_missing_rank_are_errors(tmp_path):
    play(tmp_path / "gap", 1, 1, 0, [1, 2, 4])
    with pytest.raises(TraceError, match=r"need steps 1 to 3, got \[1, 2, 4\]"):
        read_traces(tmp_path / "gap")
    play(tmp_path / "rank", 1, 2, 0, [1])
    (tmp_path / "rank.0.1.1.jsonl").unlink()
    with pytest.raises(TraceError, match=r"step 1 has lines of 1 ranks, world \[2\]"):
        read_traces(tmp_path / "rank")


def test_the_lines_are_plain_json(tmp_path):
    play(tmp_path / "run", 3, 1, 0, [1], launch="a1", at=7.5)
    lines = [json.loads(line) for line in (tmp_path / "run.a1.3.0.jsonl").read_text().splitlines()]
    assert lines == [
        {"generation": 3, "resumed": 0, "at": 7.5},
        {
            "generation": 3,
            "step": 1,
            "epoch": 0,
            "indices": [0, 1],
            "world_size": 1,
        },
    ]


def test_without_a_prefix_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    append_trace(None, resumed=3)
    assert list(tmp_path.iterdir()) == []
