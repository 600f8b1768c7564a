"""The Python code and the commands of docs/guide/checkpoints.md work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from pages import read_page

from elasticlib import CheckpointManager, ElasticDistributedSampler
from elasticlib.launch.cli import main

_, BLOCKS = read_page("guide/checkpoints.md")
PYTHON = [code for language, code in BLOCKS if language == "python"]
PROGRAM, HANDLE, GOING_ON, BY_RANK, SEEDING, EXPORT = PYTHON


def test_program_runs_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trained: list[int] = []
    for last in (150, 230):
        model = torch.nn.Linear(2, 2)
        names: dict[str, Any] = {
            "model": model,
            "optimizer": torch.optim.AdamW(model.parameters()),
            "sampler": ElasticDistributedSampler(range(9), 1, 0),
            "last": last,
            "train": lambda step: trained.append(step) or 1 / step,
        }
        exec(PROGRAM, names)
    assert trained == [*range(1, 231)]
    assert CheckpointManager("checkpoints").steps() == [150, 200, 230]
    with CheckpointManager("checkpoints") as manager:
        manager.restore(names.get("state", {"model": model}))
        names |= {"manager": manager, "step": 1300, "best_step": 200}
        exec(HANDLE, names)
        assert manager.steps() == [200, 230, 1300]
        exec(GOING_ON, names)
    assert names["found"].step == 1300
    assert torch.equal(names["loaded"]["model"]["bias"], model.bias)
    assert manager.steps(pinned_only=True) == [1300]


def test_a_generator_continues_where_it_was_or_is_seeded_at_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"torch": torch, "CheckpointManager": CheckpointManager, "state": {}}
    exec(BY_RANK, names)
    manager, state = names["manager"], names["state"]
    with manager:
        manager.save(1, state).wait()
        expected = torch.rand(3)
        assert manager.restore(state).step == 1
        assert torch.equal(torch.rand(3), expected)
    drawn = []
    for step, rank in ((5, 1), (5, 1), (5, 0), (6, 1)):
        exec(SEEDING, {"torch": torch, "step": step, "rank": rank})
        drawn.append(float(torch.rand(1)))
    assert drawn[0] == drawn[1]
    assert len({*drawn}) == 3


@pytest.mark.filterwarnings("ignore::UserWarning")  # DCP warns that it runs in one process.
def test_torch_reads_the_exported_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(2, 2)
    with CheckpointManager("checkpoints") as manager:
        manager.save(1300, {"model": model, "note": ["anything", 1]})
    exec(EXPORT, {"CheckpointManager": CheckpointManager})
    loaded = torch.load("state.pt", weights_only=True)
    assert loaded["note"] == ["anything", 1]
    assert torch.equal(loaded["model"]["weight"], model.weight)
    into = {"model": torch.nn.Linear(2, 2).state_dict()}
    dcp.load(into, checkpoint_id="state.dcp", no_dist=True)
    assert torch.equal(into["model"]["weight"], model.weight)


def test_commands_of_the_page_succeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with CheckpointManager("checkpoints") as manager:
        manager.save(1, {"w": torch.ones(2)}, pin=True)
    (commands,) = (code for language, code in BLOCKS if language == "sh")
    for line in commands.splitlines():
        program, *arguments = line.split()
        assert program == "elasticlib"
        assert main(arguments) == 0
