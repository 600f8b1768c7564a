"""Help texts, and the suggestions for misspelt options and commands."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from elasticlib.launch.cli import main
from elasticlib.launch.command_line import parse_command_line

HEAVY = {"torch", "elasticlib.launch.arguments", "elasticlib.stores.interface"}


def test_help_imports_neither_torch_nor_the_modules_of_a_job() -> None:
    code = (
        "import sys\n"
        "from elasticlib.launch.elasticrun import command\n"
        "try:\n    command(['--help'])\n"
        f"finally:\n    print(*{HEAVY} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "\n")
    assert "--rdzv-endpoint" in done.stdout


def test_a_command_line_is_parsed_without_attrs() -> None:
    code = (
        "import sys\n"
        "from elasticlib.launch.command_line import parse_command_line\n"
        "parse_command_line(['--max-restarts', '3', 'train.py'])\n"
        f"sys.exit(bool({HEAVY | {'attrs'}} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=100).returncode == 0


@pytest.mark.parametrize(("command", "limit"), [("elasticrun", 80), ("cli", 24)])
def test_help_fits_a_screen(command: str, limit: int) -> None:
    """80 lines of the most used options, and one screen of the commands."""
    words = (sys.executable, "-m", f"elasticlib.launch.{command}", "--help")
    environment = {**os.environ, "COLUMNS": "80"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0
    assert done.stdout.count("\n") <= limit


@pytest.mark.parametrize(
    ("line", "suggestion"),
    [
        ("--max-restart 3 train.py", "--max-restarts"),
        ("--nproc=3 train.py", "--nproc-per-node"),
        ("--rdzv_endpont h train.py", "--rdzv-endpoint"),
        ("--endpoint h train.py", "--rdzv-endpoint"),
        ("--lr 3 train.py", ""),
    ],
)
def test_misspelt_option_is_rejected_with_the_most_similar_one(
    line: str, suggestion: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parse_command_line(line.split())
    stderr = capsys.readouterr().err
    assert exit_info.value.code == 2
    hint = (
        f"did you mean {suggestion}?"
        if suggestion
        else "options of the training script go after the script name"
    )
    assert stderr.endswith(f" ({hint})\n")


def test_command_line_without_a_script_reports_only_the_missing_script(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        parse_command_line([])
    assert capsys.readouterr().err.endswith("are required: training_script\n")


@pytest.mark.parametrize(
    ("line", "suggestion"),
    [("statsu", "status"), ("status --jsno", "--json"), ("checkpoints . --verfy", "--verify")],
)
def test_misspelt_command_is_rejected_with_the_most_similar_one(
    line: str, suggestion: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(line.split())
    assert exit_info.value.code == 2
    assert capsys.readouterr().err.endswith(f" (did you mean {suggestion}?)\n")


def test_help_describes_the_script_and_its_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_command_line(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("  training_script ") for line in lines)
    assert any(line.startswith("  training_script_args ") for line in lines)
