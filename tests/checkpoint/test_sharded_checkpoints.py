"""Sharded state is committed by all ranks at once, and read at any other world size."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAMS = Path(__file__).parent.parent / "programs"
PROGRAM = PROGRAMS / "sharding_worker.py"


def test_a_fresh_optimizer_of_a_sharded_model_goes_on_bit_for_bit_at_two_ranks_and_at_one(
    tmp_path: Path,
) -> None:
    ended = subprocess.run(
        [sys.executable, str(PROGRAMS / "sharded_resume.py"), str(tmp_path)],
        timeout=115,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert ended.stdout.endswith("done\n"), ended.stdout


def test_fsdp2_and_dtensors_saved_at_two_ranks_are_loaded_at_two_and_at_one(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path)],
        timeout=100,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert ended.stdout.endswith("done\n"), ended.stdout
    assert "rank 0: step 4 was not saved: rank 1 failed, and says why" in ended.stdout
    assert "rank 1: 'NoneType' object has no attribute" in ended.stdout
    assert "sharded state needs one folder that all ranks see" in ended.stdout
    folder = tmp_path / "checkpoints"
    steps = ["step-0000000002", "step-0000000003"]
    assert [name for name in sorted(os.listdir(folder)) if name.startswith("step")] == steps
    files = sorted(name.partition(".")[0] for name in os.listdir(folder / steps[1]))
    assert files == ["manifest", "part-00000", "part-00001"]
