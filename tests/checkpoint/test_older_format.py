"""Checkpoints that earlier versions wrote are read for ever: `format_1` is of version 0335914,
`format_2` of 2147ac4 (see `older_state`)."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections import Counter, OrderedDict
from operator import getitem
from pathlib import Path
from typing import Any

import older_state
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from elasticlib import CheckpointManager, load_checkpoint
from elasticlib.checkpoint.folder import decode_manifest
from elasticlib.checkpoint.pack import lay_out
from elasticlib.launch.commands import main

FORMAT_1 = Path(__file__).parent / "format_1"
FORMAT_2 = Path(__file__).parent / "format_2"


def check(found: dict[str, Any]) -> None:
    tied = torch.arange(6.0).view(2, 3)
    one, same, turned, small, none = found["tensors"]
    assert one is same
    assert torch.equal(one, tied)
    assert torch.equal(turned, tied.t())
    assert (small.dtype, small.item(), none.shape) == (torch.int16, 3, (0, 3))
    assert found["complex"].tolist() == [1 + 2j, 3 - 4j]
    assert found["half"].dtype is torch.bfloat16
    assert [type(p).__name__ for p in found["parameters"]] == ["Parameter", "Parameter", "Tensor"]
    assert [p.requires_grad for p in found["parameters"]] == [True, False, True]
    assert [p.tolist() for p in found["parameters"]] == [[5, 5], [6, 6], [7]]
    assert found["plain"] == [None, True, 2**100, -0.5, "text \udc80 \u20ac", b"bytes", 1 + 2j]
    assert found["kinds"] == [
        OrderedDict(b=1, a=2),
        Counter("aab"),
        {1, 2},
        torch.Size([2, 3]),
        torch.float8_e4m3fn,
        torch.device("cuda:1"),
        {(1, "x"): 2, None: 3},
    ]


def test_a_state_of_format_1_is_loaded_and_restored(tmp_path: Path) -> None:
    shutil.copytree(FORMAT_1 / "whole", tmp_path / "c")
    with CheckpointManager(tmp_path / "c") as manager:
        assert manager.verify() == {}
        check(manager.load())
        state: dict[str, Any] = dict.fromkeys(manager.load())
        assert manager.restore(state).step == 7
        check(state)
        # And goes on in today's.
        manager.save(8, state)
        manager.wait()
        check(manager.load())
    manifest = (tmp_path / "c" / "step-0000000008" / "manifest.json").read_bytes()
    assert manifest.startswith(b'{"format":3,')
    assert decode_manifest(manifest).step == 8


def test_a_file_of_before_is_loaded() -> None:
    assert load_checkpoint(FORMAT_1 / "whole" / "one.pt")[2].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_sharded_parts_of_format_1_are_put_together_and_cut_up_anew(tmp_path: Path) -> None:
    shutil.copytree(FORMAT_1 / "sharded", tmp_path / "c")
    want = torch.arange(15.0).view(3, 5)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        like = distribute_tensor(torch.zeros(3, 5), mesh, [Replicate()])
        with CheckpointManager(tmp_path / "c") as manager:
            whole = manager.load()
            cut = manager.load(like={"rows": like, "columns": [like], "note": ""})
    finally:
        dist.destroy_process_group()
    for found in (whole["rows"], whole["columns"][0], cut["rows"].to_local()):
        assert torch.equal(found, want)
    assert whole["note"] == "text"


def test_a_state_of_format_2_is_what_it_was_to_the_bit(tmp_path: Path) -> None:
    shutil.copytree(FORMAT_2 / "whole", tmp_path / "c")
    want = older_state.in_words(older_state.everything())
    with CheckpointManager(tmp_path / "c") as manager:
        assert manager.verify() == {}
        found = manager.load()
        assert older_state.in_words(found) == want
        model, optimizer = older_state.trained()
        optimizer.state.clear()
        state = {**dict.fromkeys(found), "model": model, "optimizer": optimizer}
        manager.restore(state)
        # And goes on in today's.
        manager.save(8, state)
        manager.wait()
        state |= {name: state[name].state_dict() for name in ("model", "optimizer")}
        assert older_state.in_words(state) == want
        assert older_state.in_words(manager.load(8)) == want


def test_a_file_of_format_2_is_loaded_to_the_bit() -> None:
    found = older_state.in_words(load_checkpoint(FORMAT_2 / "one.pt"))
    assert found == older_state.in_words(older_state.in_one_file())


def test_sharded_parts_of_format_2_are_put_together_and_cut_up_anew(tmp_path: Path) -> None:
    shutil.copytree(FORMAT_2 / "sharded", tmp_path / "c")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        like = older_state.sharded(1)
        with CheckpointManager(tmp_path / "c") as manager:
            whole, cut = manager.load(), manager.load(like=like)
    finally:
        dist.destroy_process_group()
    for path in (["rows"], ["more", 0], ["turned"], ["same"]):
        states: list[Any] = [like, whole, cut]
        want, one, other = (functools.reduce(getitem, path, state) for state in states)
        local = want.to_local()
        assert older_state.in_words(other.to_local()) == older_state.in_words(local), path
        assert (one.dtype, one.stride()) == (want.dtype, want.stride()), path
        assert torch.equal(one, local), path
    for found in (whole, cut):
        assert older_state.in_words(found["plain"]) == older_state.in_words(like["plain"])
        assert found["more"][1] == "text"


def test_saved_sets_are_the_same_bytes_in_every_process() -> None:
    """Ranks compare what they hold, and strings have an order of each process's own in a set."""
    outline = "lay_out([set('abcdefgh'), frozenset(('x', n) for n in range(9))]).head.hex()"
    program = f"from elasticlib.checkpoint.pack import lay_out; print({outline})"
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    other = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": seed},
        check=True,
        timeout=100,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout.strip() == eval(outline, {"lay_out": lay_out})


@pytest.mark.parametrize("folder", [FORMAT_1, FORMAT_2])
def test_the_tree_of_a_state_of_before_is_not_shown_if_it_was_changed(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder / "whole", tmp_path / "c")
    assert main(["checkpoints", "show", str(tmp_path / "c")]) == 0
    assert "tensors" in capsys.readouterr().out
    (path,) = (tmp_path / "c").glob("step-*/state.*")
    data = bytearray(path.read_bytes())
    data[data.index(b'"tensors"') + 1] ^= 1
    path.write_bytes(data)
    assert main(["checkpoints", "show", str(tmp_path / "c")]) == 1
    assert "outline was changed or cut short" in capsys.readouterr().err
