"""The number of workers for each value of --nproc-per-node, by the devices that torch finds."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from elasticlib.errors import ConfigError
from elasticlib.launch.devices import worker_count

REGISTERED = torch._C._get_privateuse1_backend_name()
"""The name of torch's backend for third-party devices, until a package renames it."""


@pytest.fixture
def three_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register a third-party backend with three devices, as its package would."""
    devices = SimpleNamespace(is_available=lambda: True, device_count=lambda: 3)
    monkeypatch.setattr(torch, REGISTERED, devices, raising=False)


@pytest.mark.usefixtures("three_devices")
def test_devices_of_a_registered_backend_are_counted_by_its_name() -> None:
    assert worker_count(REGISTERED) == 3
    with pytest.raises(
        ConfigError, match=f"finds no XPU on this machine .found: .*3 {REGISTERED}, "
    ):
        worker_count("xpu")


def test_cpu_counts_the_processors_in_the_affinity_mask() -> None:
    before = os.sched_getaffinity(0)
    assert 1 <= worker_count("cpu") <= len(before)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert worker_count("cpu") == 1
    finally:
        os.sched_setaffinity(0, before)


def test_auto_counts_the_accelerators_of_torch_or_else_the_processors() -> None:
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    assert worker_count("auto") == (count or worker_count("cpu"))
    assert worker_count("7") == 7


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")
def test_gpu_counts_the_gpus_that_torch_finds() -> None:
    assert worker_count("gpu") == torch.cuda.device_count() == worker_count("auto")
