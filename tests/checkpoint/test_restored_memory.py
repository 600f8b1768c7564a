"""A small value that a program keeps of a restored state does not keep the memory of that state."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import gc, sys
import torch
from elasticlib import CheckpointManager, load_checkpoint, save_checkpoint

LARGE = 32 << 20  # elements of 4 bytes


class WithExtraState(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.extra = torch.nn.Parameter(torch.zeros(LARGE)), torch.zeros(1)

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


class WithBuffer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(LARGE))
        self.register_buffer("one", torch.zeros(1))

    def load_state_dict(self, state, strict=True, assign=False):
        return super().load_state_dict(state, strict, assign=True)


def resident():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def load(folder):
    return CheckpointManager(folder).load(1)["model"]["one"]


def load_file(folder):
    return load_checkpoint(folder + "/file")["model"]["one"]


def restore(folder):
    state = {"model": {}}
    CheckpointManager(folder).restore(state)
    return state["model"]["one"]


def restore_module(kind, name):
    def act(folder):
        state = {"model": kind()}
        CheckpointManager(folder).restore(state)
        return getattr(state["model"], name)

    return act


plain = lambda: {"large": torch.ones(LARGE), "one": torch.ones(1)}
make, keep = {
    "load": (plain, load),
    "load_file": (plain, load_file),
    "restore": (plain, restore),
    "extra state": (WithExtraState, restore_module(WithExtraState, "extra")),
    "buffer": (WithBuffer, restore_module(WithBuffer, "one")),
}[sys.argv[1]]
folder = sys.argv[2]
with CheckpointManager(folder) as manager:
    manager.save(1, {"model": make()})
save_checkpoint(folder + "/file", {"model": plain()})
keep(folder)  # The libraries and caches that a restore needs are in memory from now on.
before = resident()
kept = keep(folder)
print(resident() - before)
"""


@pytest.mark.parametrize("way", ["load", "load_file", "restore", "extra state", "buffer"])
def test_one_element_does_not_keep_the_memory_of_a_whole_state(tmp_path: Path, way: str) -> None:
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, way, str(tmp_path)],
        check=True,
        timeout=300,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert int(process.stdout) < 32 << 20, "the state has 128 MiB"
