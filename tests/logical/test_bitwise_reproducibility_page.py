"""The program of docs/bitwise_reproducibility.md has the described result at each world size."""

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


def is_equal(one: object, other: object) -> bool:
    """Return True if two states have the same structure and bitwise equal tensors."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_equal(one[key], other[key]) for key in one)
    return one == other


def parse_command(command: str) -> tuple[int, list[str]]:
    """Return the world size and the arguments in a command; the size is 0 without a launcher."""
    match = re.fullmatch(r"elasticrun --nproc-per-node (\d) train.py (.*)", command)
    single = re.fullmatch(r"python train.py (.*)", command)
    if match is None:
        assert single is not None, command
        return 0, single[1].split()
    return int(match[1]), match[2].split()


def run_program(program: Path, arguments: list[str]) -> None:
    sys.argv = [str(program), *arguments]
    runpy.run_path(str(program), run_name="__main__")


def test_each_block_of_the_page_has_a_test() -> None:
    assert list(FILES) == ["train.py"]
    assert len(BLOCKS) == 2


def test_the_program_of_the_page_has_equal_results_with_and_without_a_resize(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "train.py"
    program.write_text(FILES["train.py"])
    (single_process,) = re.findall(r"^`(python train.py .*?)`", TEXT, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    for command in (*COMMANDS, single_process):
        world, arguments = parse_command(command)
        ranks.run(run_program, max(1, world), program, arguments, backend="", launched=world > 0)
    resized, undisturbed = (
        load_checkpoint(tmp_path / name / "step-10.pt") for name in ("checkpoints", "elsewhere")
    )
    assert is_equal(resized, undisturbed)
    assert undisturbed["sampler"]["epoch"] == 1
    assert not is_equal(resized, load_checkpoint(tmp_path / "checkpoints" / "step-9.pt"))
