"""What several files of tests of checkpoints need."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 200 KiB."""
    place = tmp_path / "mounted"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.fixture(scope="module", autouse=True)
def _unsynced() -> Iterator[None]:
    """No machine loses its power here, and to sync a disk that others write to takes milliseconds.
    When a commit syncs what is test_power_loss's, whose disk heeds the calls alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture
def generation_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of generation 1 in an agent's snapshot memory; the environment names it as a worker's
    does."""
    folder = tmp_path / "memory" / "1"
    folder.mkdir(parents=True)
    monkeypatch.setenv("ELASTICLIB_SNAPSHOTS", str(folder))
    monkeypatch.setenv("ELASTICLIB_GENERATION", "1")
    return folder


@pytest.fixture
def kept(generation_memory: Path) -> Path:
    """An agent's snapshot memory, with a folder for each generation."""
    return generation_memory.parent
