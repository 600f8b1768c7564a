"""A flipped bit of a checkpoint is detected, or does not change the restored state."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from managers import step_folder
from sample_states import describe

from elasticlib import CheckpointManager

FLIPS = [40, pytest.param(1000, marks=pytest.mark.long)]


def state(step: int) -> dict[str, Any]:
    return {
        "w": torch.arange(3000.0) + step,
        "gaps": (torch.arange(40.0) + step).view(5, 8).t()[::2],
        "text": f"step {step}",
        "more": [step, {"loss": step / 7, 1: None}],
    }


def is_state_of(loaded: dict[str, Any], step: int) -> bool:
    """Return True if this is exactly the state of a step."""
    return bool(describe(loaded) == describe(state(step)))


def flip_bits(path: Path, count: int) -> Iterator[str]:
    """Flip random bits of a file one at a time, and restore each. Yield which bit is flipped."""
    rng = random.Random(17)
    for _ in range(count):
        at, bit = rng.randrange(path.stat().st_size), 1 << rng.randrange(8)
        for is_restored in (False, True):
            with path.open("r+b", buffering=0) as file:
                (byte,) = os.pread(file.fileno(), 1, at)
                os.pwrite(file.fileno(), bytes([byte ^ bit]), at)
            if not is_restored:
                yield f"bit {bit:#x} of byte {at} of {path.name}"


@pytest.mark.parametrize("count", FLIPS)
@pytest.mark.parametrize("kind", ["state", "manifest"])
def test_a_flipped_bit_on_the_disk_is_detected_or_changes_nothing(
    tmp_path: Path, kind: str, count: int
) -> None:
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, state(step))
    num_detected = 0
    (path,) = step_folder(tmp_path, 2).glob(f"{kind}.*")
    for flipped in flip_bits(path, count):
        manager = CheckpointManager(tmp_path)
        loaded = manager.load()
        damaged = 2 in manager.skipped
        assert is_state_of(loaded, 1 if damaged else 2), flipped
        assert list(manager.verify()) == [2] * damaged, flipped
        num_detected += damaged
    assert num_detected > count * 0.9
    assert CheckpointManager(tmp_path).verify() == {}
