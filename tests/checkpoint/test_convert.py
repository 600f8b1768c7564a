"""Checkpoints to and from what torch writes itself, read back by torch's own readers."""

from __future__ import annotations

import io
import json
import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import sharding
import torch
import torch.distributed.checkpoint as dcp
from ranks import Ranks
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

from elasticlib import CheckpointManager, save_checkpoint
from elasticlib.launch.commands import main

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
"""DCP's own, of which there are many."""

DTYPES = (torch.float64, torch.bfloat16, torch.int16, torch.bool, torch.complex64)


def model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def trained() -> dict[str, Any]:
    model, optimizer = model_and_optimizer()
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "more": [torch.arange(6).view(2, 3).t(), {"kinds": torch.tensor(float("nan"))}],
        "dtypes": {str(kind): torch.ones(3, dtype=kind) for kind in DTYPES},
        "epoch": 3,
        "note": "as it was",
        "random": torch.get_rng_state(),
    }


def same(a: Any, b: Any) -> bool:
    """Bit by bit, whatever kind of dict it is."""
    if isinstance(a, torch.Tensor):
        bits = a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
        return bool((a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(*bits))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(part, b[key]) for key, part in a.items())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def convert(*words: object) -> int:
    return main(["checkpoints", "convert", *map(str, words)])


class Wrapper:
    """An object that returns a whole state, so that its optimizers' state dicts are accepted."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def saved(folder: Path, state: Any, step: int = 7) -> Path:
    with CheckpointManager(folder) as manager:
        manager.save(step, Wrapper(state))
    return folder


def test_a_checkpoint_becomes_a_file_that_torch_load_reads_and_comes_back(tmp_path: Path) -> None:
    state, file = trained(), tmp_path / "state.pt"
    assert convert(saved(tmp_path / "c", state), file, "--to", "torch") == 0
    assert same(torch.load(file, weights_only=True), state)
    assert convert(file, tmp_path / "back", "--to", "folder", "--step", 7) == 0
    with CheckpointManager(tmp_path / "back") as manager:
        assert manager.steps() == [7]
        assert same(manager.load(), state)
        model, optimizer = model_and_optimizer()
        rest = {name: state[name] for name in ("more", "dtypes", "epoch", "note", "random")}
        manager.restore({"model": model, "optimizer": optimizer, **rest})
        assert same(optimizer.state_dict(), state["optimizer"])


@pytest.mark.parametrize("legacy", [False, True])
def test_a_file_of_plain_torch_save_becomes_a_checkpoint(tmp_path: Path, legacy: bool) -> None:
    state, file = trained(), tmp_path / "plain.pt"
    torch.save(state, file, _use_new_zipfile_serialization=not legacy)
    assert convert(file, tmp_path / "c", "--to", "folder", "--step", 3) == 0
    assert same(CheckpointManager(tmp_path / "c").load(3), state)
    save_checkpoint(tmp_path / "sealed.pt", state)
    assert convert(tmp_path / "sealed.pt", tmp_path / "d", "--to", "folder", "--step", 4) == 0
    assert same(CheckpointManager(tmp_path / "d").load(4), state)
    whole = (tmp_path / "sealed.pt").read_bytes()
    (tmp_path / "sealed.pt").write_bytes(whole[:1000] + b"\1" + whole[1001:])
    assert convert(tmp_path / "sealed.pt", tmp_path / "e", "--to", "folder", "--step", 4) == 1


def test_a_checkpoint_becomes_dcps_folder_as_dcp_would_have_saved_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {**trained(), "nothing": {"in": {}}}
    assert convert(saved(tmp_path / "c", state), tmp_path / "dcp", "--to", "dcp") == 0
    assert "without nothing.in: DCP keeps no empty containers" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["c", "dcp"]
    # As DCP itself saves this state, and reads it.
    dcp.save(state, checkpoint_id=tmp_path / "torchs", no_dist=True)
    for name in ("dcp", "torchs"):
        dcp_to_torch_save(tmp_path / name, tmp_path / f"{name}.pt")
    ours, torchs = (torch.load(tmp_path / f"{name}.pt") for name in ("dcp", "torchs"))
    assert same(ours, torchs)
    model, _ = model_and_optimizer()
    into = {"model": model.state_dict(), "epoch": 0}
    dcp.load(into, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert same(into, {"model": state["model"], "epoch": 3})


def test_dcps_folder_becomes_a_checkpoint_that_an_optimizer_goes_on_from(tmp_path: Path) -> None:
    state = trained()
    torch.save(state, tmp_path / "state.pt")
    torch_save_to_dcp(tmp_path / "state.pt", tmp_path / "dcp")
    assert convert(tmp_path / "dcp", tmp_path / "c", "--to", "folder", "--step", 5) == 0
    found = CheckpointManager(tmp_path / "c").load(5)
    assert same(found, state)
    model, optimizer = model_and_optimizer()
    rest = {name: state[name] for name in ("more", "dtypes", "epoch", "note", "random")}
    with CheckpointManager(tmp_path / "c") as manager:
        assert manager.restore({"model": model, "optimizer": optimizer, **rest}).step == 5
    # DCP makes strings of the numbers of parameters: they would find nobody.
    assert same(optimizer.state_dict(), state["optimizer"])
    fresh = torch.optim.SGD(model.parameters(), lr=0.1)
    dcp.save({"sgd": fresh.state_dict()}, checkpoint_id=tmp_path / "sgd", no_dist=True)
    assert convert(tmp_path / "sgd", tmp_path / "s", "--to", "folder", "--step", 1) == 0
    assert same(CheckpointManager(tmp_path / "s").load()["sgd"], fresh.state_dict())


def whole(value: Any) -> Any:
    if hasattr(value, "full_tensor"):
        return value.full_tensor()
    if isinstance(value, dict):
        return {key: whole(part) for key, part in value.items()}
    return [whole(part) for part in value] if isinstance(value, list) else value


def save_sharded(folder: Path) -> Any:
    parts = sharding.trained()
    state = {name: parts[name].state_dict() for name in ("model", "optimizer")} | {"epoch": 3}
    saved(folder / "c", state)
    dcp.save(dict(state), checkpoint_id=folder / "dcp")
    found = io.BytesIO()
    torch.save(whole(state), found)
    return found.getvalue()


def test_a_sharded_checkpoint_is_shown_and_converted_whole_in_both_directions(
    ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, _ = ranks.run(save_sharded, 2, tmp_path)
    assert main(["checkpoints", "show", str(tmp_path / "c")]) == 0
    shown = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert ["0.weight", "float32 [7, 5], sharded in 2 pieces"] in shown
    assert ["exp_avg", "float32 [3], sharded in 2 pieces"] in shown
    assert ["epoch", "3"] in shown
    want = torch.load(io.BytesIO(one), weights_only=True)
    assert convert(tmp_path / "c", tmp_path / "state.pt", "--to", "torch") == 0
    assert same(torch.load(tmp_path / "state.pt", weights_only=True), want)
    assert convert(tmp_path / "c", tmp_path / "made", "--to", "dcp") == 0
    for name in ("made", "dcp"):
        dcp_to_torch_save(tmp_path / name, tmp_path / f"{name}.pt")
    made, dcps = (torch.load(tmp_path / f"{name}.pt") for name in ("made", "dcp"))
    assert same(made, dcps)
    assert convert(tmp_path / "dcp", tmp_path / "back", "--to", "folder", "--step", 7) == 0
    assert same(CheckpointManager(tmp_path / "back").load(), want)


class Runs:
    def __reduce__(self) -> Any:
        return os.mkdir, (f"{os.environ['HERE']}/it-ran",)


def test_nothing_that_is_converted_runs_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HERE", str(tmp_path))
    torch.save({"a": Runs()}, tmp_path / "state.pt")
    dcp.save({"a": Runs(), "w": torch.ones(2)}, checkpoint_id=tmp_path / "value", no_dist=True)
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "list", no_dist=True)
    (tmp_path / "list" / ".metadata").write_bytes(pickle.dumps(Runs()))
    for source in ("state.pt", "value", "list"):
        assert convert(tmp_path / source, tmp_path / "c", "--to", "folder", "--step", 1) == 1
        said = capsys.readouterr().err
        assert said.startswith("elasticlib checkpoints convert: ")
        assert "mkdir" in said
        assert "Traceback" not in said
    assert not (tmp_path / "it-ran").exists()
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("cut", [".metadata", "data"])
def test_what_is_cut_short_is_told_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cut: str
) -> None:
    dcp.save({"w": torch.ones(2000), "n": 1}, checkpoint_id=tmp_path / "d", no_dist=True)
    (data,) = (tmp_path / "d").glob("*.distcp")
    path = tmp_path / "d" / ".metadata" if cut == ".metadata" else data
    path.write_bytes(path.read_bytes()[:100])
    assert convert(tmp_path / "d", tmp_path / "c", "--to", "folder", "--step", 1) == 1
    assert is_told(capsys.readouterr().err)


def is_told(said: str) -> bool:
    return said.startswith("elasticlib checkpoints convert: ") and "cannot be read as DCP's" in said


def test_what_cannot_be_converted_is_told_and_nothing_is_written_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "c", [1, range(3)])
    saved(tmp_path / "d", OrderedDict({1: torch.ones(1), "1": torch.ones(1)}))
    (tmp_path / "there.pt").write_text("mine")
    for words, status, said in (
        (("c", "there.pt", "--to", "torch"), 1, "there.pt is there already"),
        (("c", "d", "--to", "dcp"), 1, "is there already"),
        (("c", "new", "--to", "folder"), 2, "a folder of checkpoints already"),
        (
            ("c", "new", "--to", "torch"),
            1,
            "not read it back: Unsupported global: GLOBAL range",
        ),
        (("c", "new", "--to", "torch", "--step", "8"), 1, "step-0000000008"),
        (("c", "new", "--to", "dcp"), 1, "DCP saves a dict of names"),
        (("d", "new", "--to", "dcp"), 1, "duplicated flatten key"),
        (("there.pt", "new", "--to", "folder"), 2, "needs --step"),
        (
            ("there.pt", "new", "--to", "folder", "--step", "1"),
            1,
            "there.pt is not a complete checkpoint",
        ),
        (("absent", "new", "--to", "torch"), 1, "absent"),
    ):
        places = [str(tmp_path / word) for word in words[:2]]
        assert main(["checkpoints", "convert", *places, *words[2:]]) == status, words
        assert said in capsys.readouterr().err
        assert sorted(os.listdir(tmp_path)) == ["c", "d", "there.pt"]
    assert (tmp_path / "there.pt").read_text() == "mine"


def test_programs_are_told_what_was_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "c", {"a": torch.ones(2), "b": {}}, 12)
    assert convert(tmp_path / "c", tmp_path / "d", "--to", "dcp", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["lost"], found["target"]) == (12, ["b"], str(tmp_path / "d"))
