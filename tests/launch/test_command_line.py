"""What --help costs, and what is said of a misspelt flag."""

from __future__ import annotations

import subprocess
import sys

import pytest

from elasticlib.launch.cli import main
from elasticlib.launch.command_line import parse_command_line

HEAVY = {"attrs", "torch", "elasticlib.launch.launch_config", "elasticlib.stores.interface"}


def test_help_is_answered_before_what_a_job_needs_is_imported() -> None:
    code = (
        "import sys\n"
        "from elasticlib.launch.elasticrun import command\n"
        "try:\n    command(['--help'])\n"
        f"finally:\n    print(*{HEAVY} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "\n")
    assert "--rdzv-endpoint" in done.stdout


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("--max-restart 3 train.py", "--max-restarts"),
        ("--nproc=3 train.py", "--nproc-per-node"),
        ("--rdzv_endpont h train.py", "--rdzv-endpoint"),
        ("--endpoint h train.py", "--rdzv-endpoint"),
        ("--lr 3 train.py", ""),
    ],
)
def test_a_misspelt_flag_is_answered_with_the_one_that_is_like_it(
    line: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_command_line(line.split())
    said = capsys.readouterr().err
    assert ended.value.code == 2
    hint = (
        f"did you mean {meant}?"
        if meant
        else "options of the training script go after the script name"
    )
    assert said.endswith(f" ({hint})\n")


def test_of_a_command_line_without_a_script_the_script_alone_is_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        parse_command_line([])
    assert capsys.readouterr().err.endswith("are required: training_script\n")


@pytest.mark.parametrize(
    ("line", "meant"),
    [("statsu", "status"), ("status --jsno", "--json"), ("checkpoints . --verfy", "--verify")],
)
def test_so_is_a_misspelt_command_and_a_flag_of_one(
    line: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f" (did you mean {meant}?)\n")


def test_help_names_the_script_and_its_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_command_line(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("  training_script ") for line in lines)
    assert any(line.startswith("  training_script_args ") for line in lines)
