"""How many workers a kind of device means, by what torch sees of it."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from elasticlib.errors import ConfigError
from elasticlib.launch.arguments import worker_count

OWN = torch._C._get_privateuse1_backend_name()
"""What torch calls a backend that it was given, until somebody renames it."""


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch was given a backend with three devices, in the way in which it is given one."""
    devices = SimpleNamespace(is_available=lambda: True, device_count=lambda: 3)
    monkeypatch.setattr(torch, OWN, devices, raising=False)


@pytest.mark.usefixtures("three")
def test_a_backend_that_torch_was_given_is_counted_by_its_name() -> None:
    assert worker_count(OWN) == 3
    with pytest.raises(ConfigError, match=f"finds no XPU on this machine .found: .*3 {OWN}, "):
        worker_count("xpu")


def test_processors_are_those_that_we_may_use() -> None:
    before = os.sched_getaffinity(0)
    assert 1 <= worker_count("cpu") <= len(before)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert worker_count("cpu") == 1
    finally:
        os.sched_setaffinity(0, before)


def test_auto_is_what_torch_prefers_and_processors_without() -> None:
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    assert worker_count("auto") == (count or worker_count("cpu"))
    assert worker_count("7") == 7


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")
def test_gpus_are_counted_as_torch_sees_them() -> None:
    assert worker_count("gpu") == torch.cuda.device_count() == worker_count("auto")
