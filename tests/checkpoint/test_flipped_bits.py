"""Of bits that flip, on a disk or in memory, each is found out or was of no use to anybody."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sample_states import in_words

from elasticlib import CheckpointManager

FLIPS = [40, pytest.param(1000, marks=pytest.mark.long)]


def state(step: int) -> dict[str, Any]:
    return {
        "w": torch.arange(3000.0) + step,
        "gaps": (torch.arange(40.0) + step).view(5, 8).t()[::2],
        "text": f"step {step}",
        "more": [step, {"loss": step / 7, ("a", 1): None}],
    }


def same(found: dict[str, Any], step: int) -> bool:
    """Whether this is the state of a step, to the last bit."""
    return bool(in_words(found) == in_words(state(step)))


def flips(path: Path, count: int) -> Iterator[str]:
    """One bit of this file after the other, and back; what is flipped, in words."""
    drawn = random.Random(17)
    for _ in range(count):
        at, bit = drawn.randrange(path.stat().st_size), 1 << drawn.randrange(8)
        for done in (False, True):
            with path.open("r+b", buffering=0) as file:
                (byte,) = os.pread(file.fileno(), 1, at)
                os.pwrite(file.fileno(), bytes([byte ^ bit]), at)
            if not done:
                yield f"bit {bit:#x} of byte {at} of {path.name}"


@pytest.mark.parametrize("count", FLIPS)
@pytest.mark.parametrize("kind", ["state", "manifest"])
def test_a_bit_that_flips_on_the_disk_is_found_out_or_changes_nothing(
    tmp_path: Path, kind: str, count: int
) -> None:
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, state(step))
    found_out = 0
    (path,) = (tmp_path / "step-0000000002").glob(f"{kind}.*")
    for what in flips(path, count):
        manager = CheckpointManager(tmp_path)
        found = manager.load()
        damaged = 2 in manager.skipped
        assert same(found, 1 if damaged else 2), what
        assert list(manager.verify()) == [2] * damaged, what
        found_out += damaged
    assert found_out > count * 0.9
    assert CheckpointManager(tmp_path).verify() == {}
