"""Single checkpoint files: atomic saves, verification, and the choice of the latest file."""

from __future__ import annotations

import logging
import os
import re
import resource
import signal
import stat

import pytest
import sample_states
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from elasticlib import (
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from elasticlib.checkpoint import safetensors_header
from elasticlib.checkpoint.storage import temp_name, temp_target
from elasticlib.errors import CheckpointCorruptError, CheckpointError


def training_state():
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}


def test_load_returns_the_saved_state(tmp_path):
    path, state = tmp_path / "new" / "step-7.pt", training_state()
    expected = sample_states.describe(state)
    save_checkpoint(path, state)
    assert sample_states.describe(load_checkpoint(path)) == expected
    assert (
        sample_states.describe(load_checkpoint(str(path), map_location=torch.device("cpu")))
        == expected
    )
    assert os.listdir(path.parent) == ["step-7.pt"]


def test_an_object_with_state_dict_is_saved_as_its_state(tmp_path):
    model, optimizer = sample_states.create_trained()
    save_checkpoint(tmp_path / "a.pt", {"model": model, "more": [optimizer]})
    loaded = load_checkpoint(tmp_path / "a.pt")
    expected = {"model": model.state_dict(), "more": [optimizer.state_dict()]}
    assert sample_states.describe(loaded) == sample_states.describe(expected)


def test_damage_at_the_end_of_a_large_file_is_detected(tmp_path):
    path, wide = tmp_path / "a.pt", torch.arange(5 << 20)
    save_checkpoint(path, {"w": wide})
    assert torch.equal(load_checkpoint(path)["w"], wide)
    with open(path, "r+b") as file:
        file.seek(30 << 20)
        file.write(b"\1")
    with pytest.raises(CheckpointCorruptError, match="checksum"):
        load_checkpoint(path)


def test_a_file_of_torch_save_is_rejected_with_the_call_that_loads_it(tmp_path):
    path, state = tmp_path / "it's plain.pt", {"w": torch.ones(2)}
    torch.save(state, path)
    with pytest.raises(CheckpointError, match=r"torch\.save") as refused:
        load_checkpoint(path)
    assert not isinstance(refused.value, CheckpointCorruptError)
    (command,) = re.findall(r"torch\.load\(.*\)", str(refused.value))
    assert sample_states.describe(eval(command)) == sample_states.describe(state)


def test_latest_skips_a_file_of_torch_save_with_its_reason(tmp_path, caplog):
    torch.save({}, tmp_path / "step-2.pt")
    save_checkpoint(tmp_path / "step-1.pt", {})
    with caplog.at_level(logging.WARNING, "elasticlib.checkpoint"):
        assert latest_checkpoint(tmp_path) == tmp_path / "step-1.pt"
    assert "step-2.pt is a zip archive, as torch.save writes it" in caplog.text


def test_files_of_other_programs_are_rejected(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "foreign.pt")
    with pytest.raises(CheckpointCorruptError, match="not written by elasticlib"):
        load_checkpoint(tmp_path / "foreign.pt")
    with pytest.raises(FileNotFoundError):
        load_checkpoint(tmp_path / "absent.pt")


def test_the_file_has_the_permissions_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        save_checkpoint(tmp_path / "a.pt", {})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.pt").stat().st_mode) == 0o640


def test_a_state_that_cannot_be_read_back_is_rejected_and_not_written(tmp_path):
    path = tmp_path / "a.pt"
    save_checkpoint(path, "old")
    with pytest.raises(CheckpointError) as refused:
        save_checkpoint(path, {"a": [1, (2, {"b": object()})]})
    assert f"{path} was not written: state['a'][1][1]['b'] is an object" in str(refused.value)
    assert load_checkpoint(path) == "old"
    assert os.listdir(tmp_path) == ["a.pt"]


def test_latest_compares_the_numbers_in_names(tmp_path):
    assert latest_checkpoint(tmp_path / "nowhere") is None
    assert latest_checkpoint(tmp_path) is None
    for step in (9, 10, 2):
        save_checkpoint(tmp_path / f"step-{step}.pt", step)
    save_checkpoint(tmp_path / "step-9-2.pt", 9)
    save_checkpoint(tmp_path / "other-99.pt", 99)
    assert latest_checkpoint(tmp_path, "step-*.pt") == tmp_path / "step-10.pt"


def test_latest_skips_damaged_files_with_their_reason(tmp_path, caplog):
    for step in (8, 9, 10, 11, 12):
        save_checkpoint(tmp_path / f"step-{step}.pt", step)
    (tmp_path / "step-12.pt").write_bytes(b"")
    os.truncate(tmp_path / "step-11.pt", (tmp_path / "step-11.pt").stat().st_size - 1)
    (tmp_path / "step-10.pt").unlink()
    (tmp_path / "step-10.pt").mkdir()
    with caplog.at_level(logging.WARNING, "elasticlib.checkpoint"):
        assert latest_checkpoint(tmp_path) == tmp_path / "step-9.pt"
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 3
    for step, (message, why) in zip(
        (12, 11, 10),
        zip(messages, ("truncated", "truncated", "not a regular file"), strict=True),
        strict=True,
    ):
        assert f"step-{step}.pt" in message
        assert why in message


def test_latest_raises_if_there_are_files_and_none_is_a_complete_checkpoint(tmp_path):
    (tmp_path / "a.pt").write_bytes(b"PK")
    torch.save({"step": 10}, tmp_path / "step-10.pt")
    with pytest.raises(CheckpointError, match=r"none of the 2 files \*\.pt in .*step-10\.pt is"):
        latest_checkpoint(tmp_path)
    assert latest_checkpoint(tmp_path, "epoch-*.pt") is None


def test_latest_advises_to_start_from_the_beginning_only_if_all_files_are_damaged(tmp_path):
    for name in ("step-2.pt", "step-1.pt"):
        (tmp_path / name).write_bytes(b"PK")
    with pytest.raises(CheckpointError, match="To start from the beginning, move them away"):
        latest_checkpoint(tmp_path)
    torch.save({}, tmp_path / "step-1.pt")
    with pytest.raises(CheckpointError, match=r"step-1\.pt is a zip archive") as error:
        latest_checkpoint(tmp_path)
    assert "from the beginning" not in str(error.value)


def test_partial_files_are_never_the_latest_and_the_next_save_removes_them(tmp_path):
    save_checkpoint(tmp_path / "step-1.pt", 1)
    data = (tmp_path / "step-1.pt").read_bytes()
    left = [tmp_path / temp_name(name, 7) for name in ("step-2.pt", "step-2.pt.pt", "2.pt")]
    for path in left:
        path.write_bytes(data)
    assert latest_checkpoint(tmp_path, "*") == tmp_path / "step-1.pt"
    assert latest_checkpoint(tmp_path, "*.partial") is None
    save_checkpoint(tmp_path / "step-2.pt", 2)
    assert [path.exists() for path in left] == [False, True, True]


def test_an_existing_file_is_replaced_and_never_written_to(tmp_path):
    """A process that has the old file open reads its old contents."""
    path = tmp_path / "a.pt"
    save_checkpoint(path, {"step": 1})
    before = path.read_bytes()
    with open(path, "rb") as old:
        save_checkpoint(path, {"step": 2})
        assert old.read() == before
    assert load_checkpoint(path) == {"step": 2}


def save_repeatedly(path, turn, pipe):
    """Save repeatedly, and write each finished step to a pipe."""
    step = turn * 10**6
    while True:
        step += 1
        save_checkpoint(path, {"step": step, "w": torch.full((1 << 15,), step)})
        os.write(pipe, step.to_bytes(8, "big"))


def kill_writers(path):
    """Kill writers at random times. Return how many partial files they have left."""
    partial = 0
    for turn in range(25):
        reads, pipe = os.pipe()
        writer = os.fork()
        if not writer:
            save_repeatedly(path, turn, pipe)
        os.close(pipe)
        saved = os.read(reads, 8)
        for _ in range(turn % 7):  # The kill is not synchronized with the writer.
            state = load_checkpoint(path)
            assert torch.equal(state["w"], torch.full((1 << 15,), state["step"]))
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        while more := os.read(reads, 8):
            saved = more
        os.close(reads)
        partial += len(os.listdir(path.parent)) - 1
        state = load_checkpoint(path)
        assert torch.equal(state["w"], torch.full((1 << 15,), state["step"]))
        # A save that has returned is durable; the file has its step or the next one.
        assert state["step"] - int.from_bytes(saved, "big") in (0, 1)
        assert latest_checkpoint(path.parent, "*") == path
    return partial


def test_a_kill_at_any_time_leaves_a_complete_file(ranks, tmp_path):
    path = tmp_path / "step.pt"
    [partial] = ranks.run(kill_writers, 1, path, backend="")
    assert partial, "no kill fell into a save: this test has shown nothing"
    save_checkpoint(path, "after")
    assert os.listdir(tmp_path) == ["step.pt"]


def save_past_limits(path):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    save_checkpoint(path, {"step": 1, "w": torch.zeros(4096)})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (1, 100, 600, 2000, 10000, 16384, 17000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        with pytest.raises(CheckpointError) as refused:
            save_checkpoint(path, {"step": 2, "w": torch.ones(8192)})
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert "could not be written: [Errno 27] File too large" in str(refused.value)


def test_a_failed_write_leaves_the_old_file_and_reports_the_cause(ranks, tmp_path):
    path = tmp_path / "a.pt"
    ranks.run(save_past_limits, 1, path, backend="")
    assert load_checkpoint(path)["step"] == 1
    assert os.listdir(tmp_path) == ["a.pt"]


def test_a_directory_that_cannot_be_created_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/a\.pt"):
        save_checkpoint(tmp_path / "file" / "a.pt", 1)


def test_a_save_whose_partial_file_another_save_removed_reports_it(tmp_path, monkeypatch):
    path, sync, started = tmp_path / "a.pt", os.fsync, []

    def sync_and_save(file):
        sync(file)
        if not started:
            started.append(path)
            save_checkpoint(path, {"number": 2})

    monkeypatch.setattr(os, "fsync", sync_and_save)
    with pytest.raises(CheckpointError, match="another save to the same path has removed"):
        save_checkpoint(path, {"number": 1})
    assert load_checkpoint(path) == {"number": 2}


def test_a_file_of_a_newer_format_is_not_reported_as_damaged(tmp_path, monkeypatch):
    with monkeypatch.context() as newer:
        newer.setattr(safetensors_header, "FORMAT", safetensors_header.FORMAT + 1)
        save_checkpoint(tmp_path / "a.pt", {"w": torch.ones(1)})
    with pytest.raises(
        CheckpointError, match=r"a\.pt cannot be read: the pack has format"
    ) as raised:
        load_checkpoint(tmp_path / "a.pt")
    assert not isinstance(raised.value, CheckpointCorruptError)


@given(st.text(min_size=1), st.integers(0))
def test_the_name_of_a_partial_file_contains_its_target(target, token):
    assert temp_target(temp_name(target, token)) == target


@pytest.mark.parametrize("name", ["a.pt", ".a.pt", ".a.partial", "a.0123abcd.partial", ".hidden"])
def test_other_names_are_not_partial_files(name):
    assert temp_target(name) is None
