"""The store of torch that the first node of a generation serves."""

from __future__ import annotations

import os
from typing import Any

import pytest

from elasticlib.rendezvous.bootstrap_store import TorchBootstrapStore


def test_a_bootstrap_store_that_fails_to_start_leaves_no_open_descriptor() -> None:
    refused: Any = "neither true nor false"  # as if another torch took other arguments

    def fail() -> set[str]:
        with pytest.raises(TypeError, match="incompatible constructor arguments"):
            TorchBootstrapStore("127.0.0.1", use_libuv=refused)
        return set(os.listdir("/proc/self/fd"))

    after_first = fail()
    assert [fail() for _ in range(3)] == [after_first] * 3
