"""`elasticrun --dry-run`: what it says is what a launch would do, and nothing is started for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from elasticlib import TcpStoreServer
from elasticlib.launch import looks
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


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the look that imports torch, which takes seconds, but where a process does it all."""
    monkeypatch.setattr(looks, "look_at_versions", lambda: ())


# Where they are is known when they are made.
PLACES = {
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_TIMER_FILE"),
    *("ELASTICLIB_CHANNEL", "ELASTICLIB_SNAPSHOTS"),
}


def dry(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, dict[str, list[str]]]:
    """The exit code, and each line's cells by its first."""
    code = command(["--dry-run", *args])
    rows: dict[str, list[str]] = {}
    for line in capsys.readouterr().out.splitlines():
        cells = [cell.strip() for cell in line.strip().split("  ") if cell.strip()]
        if line.startswith("  ") and cells:
            key = cells[1] if cells[0] in ("ok", "BAD", "note") else cells[0]
            # A check's row bears the name of the flag that it is about.
            rows[key if key not in rows else f"check {key}"] = cells
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
    assert rows["run"][1] == f"script {script} --max-restarts 9, started warm"
    assert "PET_RDZV_ENDPOINT=elsewhere is ignored: PET_STANDALONE is one node by itself" in rows


@pytest.mark.faults
def test_workers_find_in_their_environment_what_was_foretold(
    script: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = ["--standalone", "--nproc-per-node", "2", "--start-method", "spawn", "--rdzv-id", "j"]
    monkeypatch.setenv("TORCHELASTIC_ENABLE_FILE_TIMER", "1")
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
            if value != "settled when the nodes meet":
                assert value == seen[name] or f"{seen[name]} (local rank {rank})" in value, name


def test_an_elastic_job_says_what_only_the_meeting_can_tell(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with TcpStoreServer("127.0.0.1", 0).start() as server:
        place = server.address
        code, rows = dry(capsys, "--nnodes", "1:4", "--rdzv-endpoint", place, script)
        assert code == 0
        assert rows["RANK"][1] == rows["WORLD_SIZE"][1] == "settled when the nodes meet"
        assert "an elasticlib store answers" in rows["reach"][2]
    code, rows = dry(capsys, "--nnodes", "1:4", "--rdzv-endpoint", place, script)
    assert "this node would serve the store" in rows["reach"][2]
    code = command(
        ["--dry-run", "--nnodes", "2", "--node-rank", "1", "--master-addr", "::1", script]
    )
    out = capsys.readouterr().out
    notes = sum(line.startswith("  note") for line in out.splitlines())
    assert code == 0
    assert notes
    assert f"all checks passed, {notes} note{'s' * (notes > 1)}" in out.splitlines()
    _, rows = dry(capsys, "--nnodes", "2", "--node-rank", "1", "--master-addr", "::1", script)
    assert rows["RANK"][1] == "1"
    assert rows["reach"][0] == "note"
    anothers = ("--rdzv-endpoint", "192.0.2.1", "--rdzv-conf", "is_host=true")
    _, rows = dry(capsys, "--nnodes", "2", *anothers, script)
    assert "serve the store, at all of its own addresses" in rows["reach"][2]


@pytest.mark.parametrize(
    ("flags", "check", "words"),
    [
        ("--log-dir /proc/1/no", "--log-dir", "cannot be written to"),
        ("--preload no_such_module_here", "--preload", "is not found"),
        ("--no-python", "program", "not to be executed"),
        ("--no-python --preload json", "--preload", "is another program"),
        ("-m", "module", "is not found"),
        ("--nnodes 2 --rdzv-endpoint host.invalid", "resolve", "resolves to nothing"),
        (
            "--nnodes 2 --rdzv-endpoint 127.0.0.1:1 --rdzv-backend etcd --rdzv-id j",
            "meeting place",
            "etcd does not answer",
        ),
        ("--nnodes 2 --rdzv-backend file --rdzv-endpoint /proc/no --rdzv-id j", "meeting", "not"),
        ("--rdzv-conf secret_file=/no/such", "secret", "cannot be read"),
    ],
)
def test_what_would_fail_is_found_and_is_in_the_exit_code(
    flags: str, check: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "nothing.here"
    program.touch()
    named = "nothing_here" if flags == "-m" else str(program)
    code, rows = dry(capsys, *flags.split(), named)
    bad = [cells for key, cells in rows.items() if check in key and cells[0] == "BAD"]
    assert code == 1
    assert words in bad[0][2]


def test_a_machines_own_name_is_tried_where_its_store_would_be_served(
    script: str, capsys: pytest.CaptureFixture[str], own_name: str
) -> None:
    with TcpStoreServer("127.0.0.1", 0).start() as server:
        place = f"{own_name}:{server.port}"
        _, rows = dry(capsys, "--nnodes", "2", "--rdzv-endpoint", place, script)
    assert "an elasticlib store answers" in rows["reach"][2]


def test_a_secret_is_said_to_be_asked_for_where_it_is(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--nnodes", "2", "--rdzv-id", "j", "--rdzv-endpoint")
    monkeypatch.setenv("ELASTICLIB_SECRET", "sixteen or more bytes")
    _, rows = dry(capsys, *flags, "127.0.0.1:1", script)
    assert rows["secret"] == ["ok", "secret", "nodes must prove to know it"]
    file = (*flags, str(tmp_path / "store"), "--rdzv-backend", "file", script)
    _, rows = dry(capsys, *file)
    assert rows["secret"][0] == "note"
    assert rows["secret"][2] == "the secret is not used: it is not for file"
    monkeypatch.setenv("ELASTICLIB_SECRET", "")
    _, rows = dry(capsys, *file)
    assert rows["secret"][0] == "BAD"
    monkeypatch.delenv("ELASTICLIB_SECRET")
    _, rows = dry(capsys, *file)
    assert "secret" not in rows


@pytest.mark.parametrize(
    ("variable", "words"),
    [
        ("LOGLEVEL=bogus", "LOGLEVEL is DEBUG, INFO, WARNING or ERROR, got 'bogus'"),
        ("TORCHELASTIC_TIMER_FILE=/no/t", "no pipe can be made at /no/t: there is no /no"),
        ("TORCHELASTIC_HEALTH_CHECK_PORT=x", "TORCHELASTIC_HEALTH_CHECK_PORT is [HOST:]PORT"),
        ("CUDA_VISIBLE_DEVICES=none", "CUDA_VISIBLE_DEVICES has 'none'"),
    ],
)
def test_what_a_variable_would_be_refused_for_is_found(
    variable: str,
    words: str,
    script: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ENABLE_FILE_TIMER", "1")
    monkeypatch.setenv(*variable.split("="))
    code, rows = dry(capsys, "--numa-binding", "node", script)
    assert code == 1
    assert any(words in cells[-1] for cells in rows.values() if cells[0] == "BAD")


def test_of_a_module_only_what_was_looked_at_is_said_to_be_found(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, rows = dry(capsys, "-m", "json.nope")
    assert code == 0
    assert rows["module"][2].startswith("json is found; whether it has json.nope is not looked at")


def test_a_command_line_that_cannot_work_is_refused_as_ever(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["--dry-run", "--nnodes", "3:1", script]) == 2
    assert "--nnodes needs 1 <= MIN <= MAX" in capsys.readouterr().err


def test_it_imports_no_torch(script: str) -> None:
    code = (
        "import sys; from elasticlib.launch.elasticrun import command\n"
        f"assert command(['--dry-run', '--standalone', {script!r}]) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100, stdout=subprocess.DEVNULL)
