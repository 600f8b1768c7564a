"""`elasticrun --dry-run`: it prints what a launch would use, and starts nothing."""

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


# A launch chooses the values of these variables when it creates the resources that they name.
CHOSEN_AT_START = {
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE"),
    *("ELASTICLIB_CHANNEL", "ELASTICLIB_SNAPSHOTS"),
}


def dry_run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, dict[str, list[str]]]:
    """Return the exit code, and the cells of each line by the first cell."""
    code = command(["--dry-run", *args])
    rows: dict[str, list[str]] = {}
    for line in capsys.readouterr().out.splitlines():
        cells = [cell.strip() for cell in line.strip().split("  ") if cell.strip()]
        if line.startswith("  ") and cells:
            rows[cells[0]] = cells
    return code, rows


def test_each_setting_is_printed_with_its_origin(
    script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_MAX_RESTARTS", "4")
    monkeypatch.setenv("PET_STANDALONE", "")
    monkeypatch.setenv("PET_RDZV_ENDPOINT", "node0")
    code, rows = dry_run(capsys, "--nproc-per-node", "2", script, "--max-restarts", "9")
    assert code == 0
    assert rows["--max-restarts"][1:] == ["4", "PET_MAX_RESTARTS"]
    assert rows["--standalone"][1:] == ["yes", "PET_STANDALONE"]
    assert rows["--nproc-per-node"][1:] == ["2", "--nproc-per-node"]
    assert rows["--drain-exit-code"][1:] == ["75", "default"]
    assert rows["--drain-signals"][1:] == ["SIGUSR2", "default"]
    assert rows["run"][1] == f"script {script} --max-restarts 9, start method forkserver"
    assert "ignoring PET_RDZV_ENDPOINT=node0: PET_STANDALONE runs a single-node job" in rows


@pytest.mark.faults
def test_workers_of_a_launch_have_the_printed_environment(
    script: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--standalone", "--nproc-per-node", "2", "--start-method", "spawn", "--rdzv-id", "j"]
    code, rows = dry_run(capsys, *flags, script)
    assert code == 0
    subprocess.run(
        [*ELASTICRUN, *flags, script, str(tmp_path)], check=True, timeout=60, env=os.environ
    )
    for rank in (0, 1):
        seen = json.loads((tmp_path / str(rank)).read_text())
        changed = {name for name, text in seen.items() if os.environ.get(name) != text}
        assert not changed - rows.keys()
        for name in changed & rows.keys():
            value = rows[name][1]
            if name in CHOSEN_AT_START:
                continue
            if value != "set by the rendezvous":
                assert value == seen[name] or f"{seen[name]} (local rank {rank})" in value, name


def test_values_that_only_the_rendezvous_determines_are_marked(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, rows = dry_run(capsys, "--nnodes", "1:4", "--rdzv-endpoint", "127.0.0.1:1", script)
    assert code == 0
    assert rows["RANK"][1] == rows["WORLD_SIZE"][1] == "set by the rendezvous"
    _, rows = dry_run(capsys, "--nnodes", "2", "--node-rank", "1", "--master-addr", "::1", script)
    assert (rows["RANK"][1], rows["WORLD_SIZE"][1]) == ("1", "2")


def test_invalid_command_line_is_rejected_as_in_a_launch(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["--dry-run", "--nnodes", "3:1", script]) == 2
    assert "--nnodes must be MIN:MAX with 1 <= MIN <= MAX" in capsys.readouterr().err


def test_dry_run_does_not_import_torch(script: str) -> None:
    code = (
        "import sys; from elasticlib.launch.elasticrun import command\n"
        f"assert command(['--dry-run', '--standalone', {script!r}]) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100, stdout=subprocess.DEVNULL)
