"""The code of docs/checkpoints.md runs, and what it names is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import blocks_of

from elasticlib import CheckpointManager, ElasticDistributedSampler
from elasticlib.launch.commands import main

TEXT, BLOCKS = blocks_of("checkpoints.md")


def test_the_pages_program_runs_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    [code] = [code for language, code in BLOCKS if language == "python"]
    trained: list[int] = []
    for last in (150, 230):
        model = torch.nn.Linear(2, 2)
        names: dict[str, Any] = {
            "model": model,
            "optimizer": torch.optim.AdamW(model.parameters()),
            "sampler": ElasticDistributedSampler(range(9), 1, 0),
            "last": last,
            "train": trained.append,
        }
        exec(code, names)
    assert trained == [*range(1, 151), *range(101, 231)]
    assert CheckpointManager("checkpoints").steps() == [100, 200]


def test_the_pages_commands_are_there(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, [1])
    lines = re.findall(r"^elasticlib (checkpoints .*?)(?:  .*)?$", TEXT, re.MULTILINE)
    assert len(lines) == 3
    for line in lines:
        command = re.sub(r"\[.*?\]", "", line).replace("DIR", str(tmp_path))
        assert main(command.split()) == 0
