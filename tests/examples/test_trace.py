"""`traces.read_traces` detects samples that were lost or used twice."""

from __future__ import annotations

import json
import os

import pytest
from traces import TraceError, read_traces

from elasticlib.examples.train_text import append_trace


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    for name in ("ELASTICLIB_INCARNATION", "ELASTICLIB_GENERATION", "RANK"):
        monkeypatch.delenv(name, raising=False)


def write_as(generation, rank, launch="0"):
    """Let `append_trace` write as this rank from now on."""
    os.environ.update(
        ELASTICLIB_INCARNATION=launch, ELASTICLIB_GENERATION=str(generation), RANK=str(rank)
    )


def write_generation(prefix, generation, world, resumed, steps, **start):
    """Write the traces of a generation that uses two samples in each step.

    Step k uses the samples 2 * k - 2 and 2 * k - 1: a single rank both, two ranks one each.
    """
    for rank in range(world):
        write_as(generation, rank, start.get("launch", "0"))
        append_trace(str(prefix), resumed=resumed, at=start.get("at", 0.0))
        for step in steps:
            pair = [2 * step - 2, 2 * step - 1]
            indices = pair if world == 1 else [pair[rank]]
            append_trace(str(prefix), step=step, epoch=0, indices=indices, world_size=world)


def test_steps_that_are_redone_after_a_crash_are_discarded(tmp_path):
    prefix = tmp_path / "run"
    write_generation(prefix, 1, 2, 0, range(1, 8))
    write_generation(prefix, 2, 1, 4, range(5, 7))
    write_generation(prefix, 10, 2, 6, range(7, 10))
    summary = read_traces(prefix)
    assert summary.used_exactly_once(18)
    assert (summary.steps, summary.redone) == (9, 3)


def test_a_second_resume_in_one_generation_discards_steps_too(tmp_path):
    prefix = tmp_path / "run"
    write_generation(prefix, 1, 2, 0, range(1, 8))
    write_generation(prefix, 1, 2, 4, range(5, 10))
    summary = read_traces(prefix)
    assert summary.used_exactly_once(18)
    assert (summary.steps, summary.redone) == (9, 3)


def test_generations_of_different_launches_are_distinguished(tmp_path):
    """Launches are ordered by their times, not by their names or world sizes."""
    prefix = tmp_path / "run"
    for launch, started, world, resumed in (("f.1", 5, 2, 0), ("c.2", 7, 1, 4), ("e.1", 9, 2, 8)):
        start = {"launch": launch, "at": started}
        write_generation(prefix, 1, world, resumed, range(resumed + 1, resumed + 5), **start)
        write_generation(prefix, 2, 1, resumed + 2, range(resumed + 3, resumed + 6), **start)
    summary = read_traces(prefix)
    assert (summary.steps, summary.redone) == (13, 8)
    assert summary.used_exactly_once(26)


def test_a_generation_without_steps_discards_steps_after_its_resume(tmp_path):
    prefix = tmp_path / "run"
    write_generation(prefix, 1, 2, 0, range(1, 8))
    write_generation(prefix, 2, 2, 4, [])
    write_generation(prefix, 3, 2, 4, range(5, 10))
    assert read_traces(prefix).used_exactly_once(18)


def test_of_two_concurrent_launches_the_one_with_the_continued_state_counts(tmp_path):
    """A launch continues while another restarts from an old checkpoint; then they join."""
    prefix = tmp_path / "run"
    for launch, generation, world, resumed, steps in (
        ("first", 1, 2, 0, range(1, 3)),
        ("first", 2, 1, 2, range(3, 10)),
        ("second", 1, 1, 4, range(5, 7)),
        ("second", 2, 2, 8, range(9, 12)),
    ):
        started = {"first": 5, "second": 7}[launch]
        write_generation(prefix, generation, world, resumed, steps, launch=launch, at=started)
    summary = read_traces(prefix)
    assert (summary.steps, summary.redone) == (11, 3)
    assert summary.used_exactly_once(22)


def test_a_lost_sample_and_a_repeated_one_are_detected(tmp_path):
    prefix = tmp_path / "run"
    write_generation(prefix, 1, 1, 0, range(1, 4))
    assert read_traces(prefix).used_exactly_once(6)
    assert not read_traces(prefix).used_exactly_once(7)
    write_as(1, 0)
    append_trace(str(prefix), step=4, epoch=0, indices=[5], world_size=1)
    assert not read_traces(prefix).used_exactly_once(6)


def test_a_missing_step_and_a_missing_rank_are_errors(tmp_path):
    write_generation(tmp_path / "gap", 1, 1, 0, [1, 2, 4])
    with pytest.raises(TraceError, match=r"need steps 1 to 3, got \[1, 2, 4\]"):
        read_traces(tmp_path / "gap")
    write_generation(tmp_path / "rank", 1, 2, 0, [1])
    (tmp_path / "rank.0.1.1.jsonl").unlink()
    with pytest.raises(TraceError, match=r"step 1 has lines of 1 ranks, world \[2\]"):
        read_traces(tmp_path / "rank")


def test_a_trace_consists_of_json_lines(tmp_path):
    write_generation(tmp_path / "run", 3, 1, 0, [1], launch="a1", at=7.5)
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


def test_without_a_prefix_no_trace_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    append_trace(None, resumed=3)
    assert list(tmp_path.iterdir()) == []
