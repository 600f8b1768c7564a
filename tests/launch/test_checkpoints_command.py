"""`elasticlib checkpoints`: what people and programs see, and what the exit status says."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch

from elasticlib import CheckpointManager
from elasticlib.checkpoint.commit import Committer, Writer, Writers
from elasticlib.checkpoint.folder import CheckpointFolder, Retention
from elasticlib.checkpoint.place import LocalPlace
from elasticlib.launch.checkpoints import Progress
from elasticlib.launch.commands import main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With three checkpoints of a job."""
    writer = Writer("job7", "l", 2, "0" * 16)
    writers = Writers(Committer(CheckpointFolder(LocalPlace(tmp_path)), writer, Retention(5)))
    writers.write(8, memoryview(bytes(3000)))
    for step in (9, 10):
        writers.write(step, memoryview(bytes(3000)), {"loss": 1 / step, "top1": 77}, 4)
    return tmp_path


def damage(folder: Path, step: int) -> None:
    (path,) = (folder / f"step-{step:010d}").glob("state.*")
    path.write_bytes(bytes(2999) + b"\1")


def test_a_list_shows_each_one_and_the_cut_one_as_damaged(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = (folder / "step-0000000009").glob("state.*")
    os.truncate(path, 100)
    assert main(["checkpoints", "ls", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["STEP", "SIZE", "SAVED", "AGE", "WORLD", "METRICS", "BY", "STATE"]
    date, age = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", r"(?:under )?[\d.]+ s"
    row = rf"10    2.9 KiB  {date}  {age}  4      loss=0.1 top1=77  job7 generation 2  complete"
    assert re.fullmatch(row, lines[1])
    assert lines[2].endswith(f"damaged: {path.name} should have 3000 bytes, and has 100")
    assert main(["checkpoints", "ls", str(folder), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    states = [(row["step"], row["status"]) for row in rows]
    assert states == [(10, "complete"), (9, "damaged"), (8, "complete")]
    assert rows[0]["bytes"] == 3000
    assert (rows[0]["world"], rows[0]["metrics"]) == (4, {"loss": 0.1, "top1": 77.0})
    assert (rows[2]["world"], rows[2]["metrics"]) == (None, {})


def test_only_verify_says_verified_and_ls_says_complete_of_bytes_that_it_does_not_read(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(folder, 9)
    for act, good, flawed in (("ls", "complete", "complete"), ("verify", "verified", "damaged")):
        main(["checkpoints", act, str(folder)])
        lines = capsys.readouterr().out.splitlines()[1:]
        assert [good in line for line in lines] == [True, flawed == good, True]
        main(["checkpoints", act, str(folder), "--json"])
        rows = json.loads(capsys.readouterr().out)
        assert [row["status"] for row in rows] == [good, flawed, good]


def test_verify_ends_with_1_and_names_what_is_damaged(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoints", "verify", str(folder)]) == 0
    assert capsys.readouterr().out.count("verified") == 3
    damage(folder, 9)
    assert main(["checkpoints", "verify", str(folder), "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)
    assert [row["step"] for row in rows if row["status"] == "damaged"] == [9]
    assert main(["checkpoints", "verify", str(folder)]) == 1
    assert re.search(r"^9 .*damaged: state.* should have CRC-32", capsys.readouterr().out, re.M)
    assert main(["checkpoints", "verify", str(folder), "--step", "10"]) == 0
    assert main(["checkpoints", "verify", str(folder), "--step", "11"]) == 1
    assert "there is no checkpoint" in capsys.readouterr().err


def test_prune_deletes_what_it_says_and_never_the_last_good_one_or_newer_damaged_ones(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(folder, 10)
    prune = ["checkpoints", "prune", str(folder), "--keep-last", "1", "--keep-every", "4"]
    assert main([*prune, "--dry-run"]) == 0
    assert capsys.readouterr().out == "would delete none; kept 8, 9, 10\n"
    assert len(list(folder.glob("step-*"))) == 3
    assert main([*prune[:-2], "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"kept": [9, 10], "deleted": [8]}
    damage(folder, 9)
    assert main(prune) == 1
    assert "nothing goes: none is known to be good" in capsys.readouterr().err
    assert len(list(folder.glob("step-*"))) == 2


def test_prune_keeps_the_best_by_a_metric(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prune = ["checkpoints", "prune", str(folder), "--keep-last", "1", "--keep-best"]
    assert main([*prune, "loss:max:2", "--dry-run"]) == 0
    assert capsys.readouterr().out == "would delete 8; kept 9, 10\n"
    for bad in ("loss", "loss:least", ":min", "loss:min:x", "loss:min:1:2"):
        with pytest.raises(SystemExit):
            main([*prune, bad])
        assert "METRIC:min or METRIC:max:3" in capsys.readouterr().err
    assert main([*prune, "loss:min:0"]) == 2
    assert "keep_best" in capsys.readouterr().err
    assert main([*prune, "loss:min"]) == 0
    assert capsys.readouterr().out == "deleted 8, 9; kept 10\n"


STATE = {
    "model": OrderedDict({"0.weight": torch.ones(3, 4), "0.half": torch.ones(2, dtype=torch.half)}),
    "views": [torch.ones(4, 3).t(), torch.tensor(True)],
    "array": np.zeros((2, 5)),
    "note": ("any\x1b[2Jthing", 1, None, range(3)),
    7: {},
    ("a", (1, b"x")): {b"key": None},
}
SHOWN = [
    ("model", "OrderedDict of 2"),
    ("  0.weight", "float32 [3, 4]"),
    ("  0.half", "float16 [2]"),
    ("views", "list of 2"),
    ("  0", "float32 [3, 4]"),
    ("  1", "bool []"),
    ("array", "<f8 [2, 5]"),
    ("note", "tuple of 4"),
    ("  0", r"'any\x1b[2Jthing'"),
    ("  1", "1"),
    ("  2", "None"),
    ("  3", "range [0, 3, 1]"),
    ("7", "dict of 0"),
    ("('a', (1, 'bytes'))", "dict of 1"),
    ("  bytes", "None"),
]


def test_show_prints_the_tree_of_a_state_and_reads_no_tensor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, STATE, {"loss": 0.5})
    (path,) = (tmp_path / "step-0000000002").glob("state.*")
    # What is damaged behind the head is not read; what is in the head, is.
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"\1")
    assert main(["checkpoints", "show", str(tmp_path)]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"step 2: .* KiB, saved .* by -, world 1, metrics loss=0.5", first)
    width = max(len(name) for name, _ in SHOWN)
    assert lines == [f"{name.ljust(width)}  {about}" for name, about in SHOWN]
    assert main(["checkpoints", "show", str(tmp_path), "--step", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["state"][0]["path"]) == (1, [])
    weight = {"path": ["model", "0.weight"], "kind": "tensor", "dtype": "float32"}
    assert found["state"][2] == {**weight, "shape": [3, 4], "about": ""}
    assert main(["checkpoints", "show", str(tmp_path), "--step", "3"]) == 1
    assert "there is no checkpoint" in capsys.readouterr().err
    path.write_bytes(whole[:200] + b"\1" + whole[201:])
    assert main(["checkpoints", "show", str(tmp_path)]) == 1
    assert "the pack's head was changed or cut short" in capsys.readouterr().err


def test_what_is_no_folder_and_what_cannot_be_kept_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoints", "ls", str(tmp_path)]) == 0
    assert main(["checkpoints", "ls", str(tmp_path / "absent")]) == 1
    assert "there is no folder" in capsys.readouterr().err
    assert main(["checkpoints", "prune", str(tmp_path), "--keep-last", "0"]) == 2
    assert "keep_last >= 1" in capsys.readouterr().err


def test_what_a_manifest_says_is_shown_and_not_obeyed_by_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = Writer("job\x1b]0;title\x07\ud800", "l", 2, "0" * 16)
    commits = Committer(CheckpointFolder(LocalPlace(tmp_path)), writer, Retention(5))
    Writers(commits).write(1, memoryview(bytes(30)))
    assert main(["checkpoints", "ls", str(tmp_path)]) == 0
    assert r"job\x1b]0;title\x07\ud800 generation 2" in capsys.readouterr().out


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_progress_is_shown_in_place_or_line_by_line(stream: io.StringIO) -> None:
    with Progress("verified", 2048, stream, every=0) as progress:
        progress.seen(memoryview(bytes(1024)))
        progress.seen(memoryview(bytes(1024)))
    text = stream.getvalue()
    assert "verified 1.0 KiB of 2.0 KiB, " in text
    assert "verified 2.0 KiB of 2.0 KiB, " in text
    assert text.count("\r") == (3 if stream.isatty() else 0)
    assert text.count("\n") == (0 if stream.isatty() else 2)


def test_torch_is_not_needed(folder: Path) -> None:
    code = (
        "import sys; from elasticlib.launch.commands import main; "
        "status = main(['checkpoints', *sys.argv[1:]]); "
        "sys.exit(status or 10 * ('torch' in sys.modules))"
    )
    for words in (("verify", str(folder)),):
        done = subprocess.run(
            [sys.executable, "-c", code, *words], timeout=100, stdout=subprocess.DEVNULL
        )
        assert done.returncode == 0, words
