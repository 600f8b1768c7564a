"""`elasticrun --dry-run`: what it says is what a launch would do, and nothing is started for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from elasticlib.launch.elasticrun import command

ELASTICRUN = [sys.executable, "-m", "elasticlib.launch"]


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(
        "import json, os, sys\n"
        "json.dump(dict(os.environ), open(f'{sys.argv[1]}/{os.environ[\"RANK\"]}', 'w'))\n"
    )
    return str(path)


# Where they are is known when they are made.
PLACES = {
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE"),
    *("ELASTICLIB_CHANNEL", "ELASTICLIB_SNAPSHOTS"),
}


def dry(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, dict[str, list[str]]]:
    """The exit code, and each line's cells by its first."""
    code = command(["--dry-run", *args])
    rows: dict[str, list[str]] = {}
    for line in capsys.readouterr().out.splitlines():
        cells = [cell.strip() for cell in line.strip().split("  ") if cell.strip()]
        if line.startswith("  ") and cells:
            rows[cells[0]] = cells
    return code, rows


def test_each_setting_stands_beside_its_origin(
    script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_MAX_RESTARTS", "4")
    monkeypatch.setenv("PET_STANDALONE", "")
    monkeypatch.setenv("PET_RDZV_ENDPOINT", "elsewhere")
    code, rows = dry(capsys, "--nproc-per-node", "2", script, "--max-restarts", "9")
    assert code == 0
    assert rows["--max-restarts"][1:] == ["4", "PET_MAX_RESTARTS"]
    assert rows["--standalone"][1:] == ["yes", "PET_STANDALONE"]
    assert rows["--nproc-per-node"][1:] == ["2", "--nproc-per-node"]
    assert rows["--drain-exit-code"][1:] == ["75", "default"]
    assert rows["--drain-signals"][1:] == ["SIGUSR2", "default"]
    assert rows["run"][1] == f"script {script} --max-restarts 9, start method forkserver"
    assert "ignoring PET_RDZV_ENDPOINT=elsewhere: PET_STANDALONE runs a single-node job" in rows


@pytest.mark.faults
def test_workers_find_in_their_environment_what_was_foretold(
    script: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--standalone", "--nproc-per-node", "2", "--start-method", "spawn", "--rdzv-id", "j"]
    code, rows = dry(capsys, *flags, script)
    assert code == 0
    subprocess.run(
        [*ELASTICRUN, *flags, script, str(tmp_path)], check=True, timeout=60, env=os.environ
    )
    for rank in (0, 1):
        seen = json.loads((tmp_path / str(rank)).read_text())
        told = {name for name, text in seen.items() if os.environ.get(name) != text}
        assert not told - rows.keys()
        for name in told & rows.keys():
            value = rows[name][1]
            if name in PLACES:
                continue
            if value != "set by the rendezvous":
                assert value == seen[name] or f"{seen[name]} (local rank {rank})" in value, name


def test_an_elastic_job_says_what_only_the_meeting_can_tell(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, rows = dry(capsys, "--nnodes", "1:4", "--rdzv-endpoint", "127.0.0.1:1", script)
    assert code == 0
    assert rows["RANK"][1] == rows["WORLD_SIZE"][1] == "set by the rendezvous"
    _, rows = dry(capsys, "--nnodes", "2", "--node-rank", "1", "--master-addr", "::1", script)
    assert (rows["RANK"][1], rows["WORLD_SIZE"][1]) == ("1", "2")


def test_a_command_line_that_cannot_work_is_refused_as_ever(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["--dry-run", "--nnodes", "3:1", script]) == 2
    assert "--nnodes must be MIN:MAX with 1 <= MIN <= MAX" in capsys.readouterr().err


def test_it_imports_no_torch(script: str) -> None:
    code = (
        "import sys; from elasticlib.launch.elasticrun import command\n"
        f"assert command(['--dry-run', '--standalone', {script!r}]) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100, stdout=subprocess.DEVNULL)
