"""Checkpoints of tensors that lie on a GPU: what a step waits for, what is kept, what it takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PROGRAM = str(Path(__file__).with_name("checkpointing.py"))


def played(scene: str, device: str) -> dict[str, Any]:
    command = [sys.executable, PROGRAM, scene, device]
    # cuBLAS gives the same bits only so.
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=110, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_save_holds_up_a_step_for_little_more_than_a_page_locked_copy(device: str) -> None:
    found = played("stall", device)
    assert len(found["save"]) == len(found["link"]) == 3
    if device == "cuda":
        # Copies into memory that is not locked run at a third of the link's speed, or less.
        assert min(found["save"]) <= 2 * min(found["link"]) + 0.05, found


def test_a_fused_optimizer_in_channels_last_goes_on_bit_by_bit(device: str) -> None:
    found = played("fused", device)
    assert found == {"tensors": 16, "same": True, "places": True, "strides": True}


def test_a_restore_takes_no_more_of_a_gpu_than_the_state_once_more(cuda: str) -> None:
    found = played("memory", cuda)
    assert found["growth"] <= found["state"], found
    # And nothing of it stays.
    assert found["kept"] <= found["state"] // 100, found
