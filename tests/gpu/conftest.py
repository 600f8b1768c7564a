"""Fixtures of the tests that need one GPU. Without a GPU, each of these tests is skipped.

GPU_TESTS_ON=cpu runs the tests that also work on a CPU, to try the tests themselves.
"""

from __future__ import annotations

import os

import pytest

SKIP_REASON = "torch sees no CUDA device here: `make test-gpu` is for a machine that has one"


@pytest.fixture
def device() -> str:
    """The device on which the workers of the test compute."""
    import torch

    device = os.environ.get("GPU_TESTS_ON", "cuda")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip(SKIP_REASON)
    return device


@pytest.fixture
def cuda(device: str) -> str:
    """The same device, for a test that needs a GPU."""
    if device != "cuda":
        pytest.skip("only a GPU can show this")
    return device
