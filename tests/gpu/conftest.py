"""Tests that need a GPU: one is enough. Where there is none each is skipped with a sentence.

GPU_TESTS_ON=cpu runs those of them that can be shown on a CPU there, to try the tests themselves.
"""

from __future__ import annotations

import os

import pytest

NONE_HERE = "torch sees no CUDA device here: `make test-gpu` is for a machine that has one"


@pytest.fixture
def device() -> str:
    """Where the test's workers compute."""
    import torch

    asked = os.environ.get("GPU_TESTS_ON", "cuda")
    if asked == "cuda" and not torch.cuda.is_available():
        pytest.skip(NONE_HERE)
    return asked


@pytest.fixture
def cuda(device: str) -> str:
    """The same, for what no CPU can show."""
    if device != "cuda":
        pytest.skip("this is shown by a GPU alone")
    return device
