"""Checkpoints of tensors on a GPU: stall of training, equality after a restore, memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PROGRAM = str(Path(__file__).with_name("checkpointing.py"))


def run_scenario(scenario: str, device: str) -> dict[str, Any]:
    """Run a scenario of checkpointing.py, and return its results."""
    command = [sys.executable, PROGRAM, scenario, device]
    # cuBLAS is deterministic only with this setting.
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    process = subprocess.run(
        command, capture_output=True, text=True, timeout=110, env=environment, check=False
    )
    assert process.returncode == 0, process.stderr
    results: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return results


def test_save_blocks_training_for_little_more_than_a_page_locked_copy(device: str) -> None:
    times = run_scenario("stall", device)
    assert len(times["save"]) == len(times["copy"]) == 3
    if device == "cuda":
        # A copy into memory that is not page-locked has at most a third of the speed.
        assert min(times["save"]) <= 2 * min(times["copy"]) + 0.05, times


def test_fused_optimizer_in_channels_last_continues_bitwise_after_a_restore(device: str) -> None:
    results = run_scenario("fused", device)
    equal = {"values_equal": True, "devices_equal": True, "strides_equal": True}
    assert results == {"tensors": 16, **equal}


def test_restore_needs_at_most_the_size_of_the_state_in_gpu_memory(cuda: str) -> None:
    results = run_scenario("memory", cuda)
    assert results["peak_growth"] <= results["state"], results
    # The memory is free again after the restore.
    assert results["final_growth"] <= results["state"] // 100, results
