"""docs/same_weights.md: its program, at the world sizes of its commands, ends as the page says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from pages import blocks_of, by_name

from elasticlib import load_checkpoint

TEXT, BLOCKS = blocks_of("same_weights.md")
(COMMANDS,) = (code.strip().splitlines() for kind, code in BLOCKS if kind == "sh")
FILES = by_name([code for kind, code in BLOCKS if kind == "python"])
RANKS = str(Path(__file__).parent.parent / "programs" / "logical_training.py")


def equal(one: object, other: object) -> bool:
    """Of states: the same structure, and the same bits in each tensor."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return one == other


def segment(command: str, program: Path) -> dict[str, Any]:
    """What a command line of the page asks for."""
    found = re.fullmatch(r"elasticrun --nproc-per-node (\d) train.py (.*)", command)
    alone = re.fullmatch(r"python train.py (.*)", command)
    if found is None:
        assert alone is not None, command
        return {"world": 0, "program": str(program), "args": alone[1].split()}
    return {"world": int(found[1]), "program": str(program), "args": found[2].split()}


def test_every_block_of_the_page_is_known_to_a_test() -> None:
    assert list(FILES) == ["train.py"]
    assert len(BLOCKS) == 2


def test_the_pages_program_ends_alike_with_a_resize_and_without(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(FILES["train.py"])
    (alone,) = re.findall(r"^`(python train.py .*?)`", TEXT, re.MULTILINE)
    jobs = {"job": [segment(command, program) for command in (*COMMANDS, alone)]}
    folder = tmp_path / "ranks"
    folder.mkdir()
    subprocess.run(
        [sys.executable, RANKS, str(folder)],
        input=json.dumps(jobs),
        text=True,
        timeout=110,
        check=True,
    )
    resized, undisturbed = (
        load_checkpoint(folder / "job" / name / "step-10.pt")
        for name in ("checkpoints", "elsewhere")
    )
    assert equal(resized, undisturbed)
    assert undisturbed["sampler"]["epoch"] == 1
    assert not equal(resized, load_checkpoint(folder / "job" / "checkpoints" / "step-9.pt"))
