"""Fixtures for tests of checkpoints: a small disk, disks that do not sync, and agent memory."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 200 KiB."""
    place = tmp_path / "mounted"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.fixture(scope="module", autouse=True)
def _unsynced() -> Iterator[None]:
    """Replace fsync by a function without effect, because it is slow on a disk with other writers.

    `test_power_loss.py` tests when a commit calls it. The disk of that test only records calls.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture
def generation_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create the directory of attempt 1 in the memory of an agent, and set its variable."""
    folder = tmp_path / "memory" / "1"
    folder.mkdir(parents=True)
    monkeypatch.setenv("ELASTICLIB_SNAPSHOTS", str(folder))
    monkeypatch.setenv("ELASTICLIB_GENERATION", "1")
    monkeypatch.setenv("ELASTICLIB_INCARNATION", "launch")
    return folder


@pytest.fixture
def agent_memory(generation_memory: Path) -> Path:
    """Return the memory directory of the agent, which has a directory for each attempt."""
    return generation_memory.parent
