"""docs/bitwise_reproducibility.md: its program prints what the page shows, at each world size."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from pages import name_blocks, read_page
from ranks import Ranks

from elasticlib import load_checkpoint

TEXT, BLOCKS = read_page("bitwise_reproducibility.md")
(COMMANDS,) = (code.strip().splitlines() for kind, code in BLOCKS if kind == "sh")
FILES = name_blocks([code for kind, code in BLOCKS if kind == "python"])


def equal(one: object, other: object) -> bool:
    """Of states: the same structure, and the same bits in each tensor."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return one == other


def world_and_arguments(command: str) -> tuple[int, list[str]]:
    """What a command line of the page asks for; a world of 0 without a launcher."""
    found = re.fullmatch(r"elasticrun --nproc-per-node (\d) train.py (.*)", command)
    alone = re.fullmatch(r"python train.py (.*)", command)
    if found is None:
        assert alone is not None, command
        return 0, alone[1].split()
    return int(found[1]), found[2].split()


def run_program(program: Path, arguments: list[str]) -> None:
    sys.argv = [str(program), *arguments]
    runpy.run_path(str(program), run_name="__main__")


def test_each_block_of_the_page_has_a_test() -> None:
    assert list(FILES) == ["train.py"]
    assert len(BLOCKS) == 2


def test_the_pages_program_ends_alike_with_a_resize_and_without(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "train.py"
    program.write_text(FILES["train.py"])
    (alone,) = re.findall(r"^`(python train.py .*?)`", TEXT, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    for command in (*COMMANDS, alone):
        world, arguments = world_and_arguments(command)
        ranks.run(run_program, max(1, world), program, arguments, backend="", launched=world > 0)
    resized, undisturbed = (
        load_checkpoint(tmp_path / name / "step-10.pt") for name in ("checkpoints", "elsewhere")
    )
    assert equal(resized, undisturbed)
    assert undisturbed["sampler"]["epoch"] == 1
    assert not equal(resized, load_checkpoint(tmp_path / "checkpoints" / "step-9.pt"))
