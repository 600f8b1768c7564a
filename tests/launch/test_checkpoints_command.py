"""`elasticlib checkpoints`: its table, its JSON output and its exit status."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from elasticlib.checkpoint.catalog import CheckpointCatalog
from elasticlib.checkpoint.commit import Committer
from elasticlib.checkpoint.refs import KeepLast, Writer, begin
from elasticlib.checkpoint.storage import LocalStorage
from elasticlib.checkpoint.writer import write_alone
from elasticlib.launch.checkpoints_command import Progress
from elasticlib.launch.cli import main


def create_committer(folder: Path, run: str) -> Committer:
    writer = Writer(run, "l", 2)
    catalog = CheckpointCatalog(LocalStorage(folder))
    return Committer(catalog, writer, begin(None, writer), KeepLast(5))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory with three checkpoints of a job."""
    committer = create_committer(tmp_path, "job7")
    write_alone(committer, 8, memoryview(bytes(3000)))
    for step in (9, 10):
        data = memoryview(bytes(3000))
        write_alone(committer, step, data, world_size=4, is_pinned=step == 10)
    return tmp_path


def step_folder(directory: Path, step: int) -> Path:
    (path,) = directory.glob(f"step-{step:010d}.*")
    return path


def damage(directory: Path, step: int) -> None:
    path = step_folder(directory, step) / "state.safetensors"
    path.write_bytes(bytes(2999) + b"\1")


def test_list_shows_each_checkpoint_and_a_truncated_one_as_corrupt(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = step_folder(directory, 9) / "state.safetensors"
    os.truncate(path, 100)
    assert main(["checkpoints", str(directory)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["STEP", "SIZE", "SAVED", "AGE", "WORLD", "PINNED", "RUN", "STATE"]
    date, age = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", r"(?:under )?[\d.]+ s"
    row = rf"10    2.9 KiB  {date}  {age}  4      pinned  job7 generation 2  complete"
    assert re.fullmatch(row, lines[1])
    assert lines[2].endswith(f"corrupt: {path.name} must have 3000 bytes, but has 100")
    assert main(["checkpoints", str(directory), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    states = [(row["step"], row["status"]) for row in rows]
    assert states == [(10, "complete"), (9, "corrupt"), (8, "complete")]
    assert rows[0]["bytes"] == 3000
    assert (rows[0]["world"], rows[0]["pinned"]) == (4, True)
    assert (rows[2]["world"], rows[2]["pinned"]) == (None, False)


def test_only_verify_reads_the_data_and_detects_a_wrong_checksum(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(directory, 9)
    for flags, intact, damaged in (
        ([], "complete", "complete"),
        (["--verify"], "verified", "corrupt"),
    ):
        main(["checkpoints", str(directory), *flags])
        lines = capsys.readouterr().out.splitlines()[1:]
        assert [intact in line for line in lines] == [True, damaged == intact, True]
        main(["checkpoints", str(directory), *flags, "--json"])
        rows = json.loads(capsys.readouterr().out)
        assert [row["status"] for row in rows] == [intact, damaged, intact]


def test_verify_exits_with_1_and_names_the_corrupt_checkpoint(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoints", str(directory), "--verify"]) == 0
    assert capsys.readouterr().out.count("verified") == 3
    damage(directory, 9)
    assert main(["checkpoints", str(directory), "--verify", "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)
    assert [row["step"] for row in rows if row["status"] == "corrupt"] == [9]
    assert main(["checkpoints", str(directory), "--verify"]) == 1
    assert re.search(
        r"^9 .*corrupt: state.*, which is not the checksum", capsys.readouterr().out, re.M
    )


def test_missing_directory_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", str(tmp_path)]) == 0
    assert main(["checkpoints", str(tmp_path / "absent")]) == 1
    assert "does not exist" in capsys.readouterr().err


def test_control_characters_in_a_manifest_are_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    committer = create_committer(tmp_path, "job\x1b]0;title\x07\ud800")
    write_alone(committer, 1, memoryview(bytes(30)))
    assert main(["checkpoints", str(tmp_path)]) == 0
    assert r"job\x1b]0;title\x07\ud800 generation 2" in capsys.readouterr().out


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_progress_rewrites_one_line_on_a_terminal_and_prints_lines_elsewhere(
    stream: io.StringIO,
) -> None:
    with Progress("verified", 2048, stream, interval_s=0) as progress:
        progress.add(memoryview(bytes(1024)))
        progress.add(memoryview(bytes(1024)))
    text = stream.getvalue()
    assert "verified 1.0 KiB of 2.0 KiB, " in text
    assert "verified 2.0 KiB of 2.0 KiB, " in text
    assert text.count("\r") == (3 if stream.isatty() else 0)
    assert text.count("\n") == (0 if stream.isatty() else 2)


def test_command_does_not_import_torch(directory: Path) -> None:
    code = (
        "import sys; from elasticlib.launch.cli import main; "
        "status = main(['checkpoints', *sys.argv[1:]]); "
        "sys.exit(status or 10 * ('torch' in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(directory), "--verify"],
        timeout=100,
        stdout=subprocess.DEVNULL,
    )
    assert done.returncode == 0
