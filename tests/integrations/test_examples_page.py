"""docs/examples.md: the files that it names exist, and its commands run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from pages import DOCS, read_page

from elasticlib.examples import imagenet
from elasticlib.launch.command_line import build_parser

TEXT, BLOCKS = read_page("examples.md")
COMMANDS = [code.strip() for _, code in BLOCKS]
TEXT_RUN, IMAGES_RUN, CLUSTER_RUN, EVALUATION, DEMO = COMMANDS
DONE = r"^done: .*\bsteps \d+\b"


def run(command: str, folder: Path) -> str:
    """Run a command of the page with this Python, and return its output."""
    words = shlex.split(command)
    module = {"elasticrun": ["-m", "elasticlib.launch"], "python": []}[words[0]]
    process = subprocess.run(
        [sys.executable, *module, *words[1:]],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_page_names_exactly_the_example_programs() -> None:
    named = {(DOCS / path).resolve() for path in re.findall(r"\]\((\S+\.py)\)", TEXT)}
    folder = DOCS.parent / "elasticlib/examples"
    own = {"demo.py", "imagenet.py", "train_text.py"}
    assert named >= {folder / name for name in own}
    programs = {path for path in folder.glob("*.py") if "__main__" in path.read_text()}
    programs |= {folder / "in_place.py", *folder.glob("with_*.py")}
    assert named == programs


def test_commands_of_the_page_train_on_text_and_images(tmp_path: Path) -> None:
    assert re.search(DONE, run(TEXT_RUN, tmp_path), re.MULTILINE)
    # Both commands use the default checkpoint directory, so the test runs them in two directories.
    # In one directory, the second command would restore the state of the first.
    other = tmp_path / "images"
    other.mkdir()
    trained = run(IMAGES_RUN, other)
    assert re.search(DONE, trained, re.MULTILINE)
    validated = r"^step \d validated: loss \S+ top-1 \S+ on 16 images\n"
    ends = re.findall(validated, trained, re.MULTILINE)
    assert len(ends) == 2, trained
    (best,) = re.findall(r"^done: .* the best after step (\d)$", trained, re.MULTILINE)
    assert run(EVALUATION, other) == ends[int(best) // 4 - 1]


def test_launcher_and_script_accept_the_command_for_a_cluster() -> None:
    agent = build_parser().parse_args(shlex.split(CLUSTER_RUN)[1:])
    assert agent.training_script == "elasticlib.examples.imagenet"
    script = imagenet.parse_args(agent.training_script_args)
    assert (script.arch, script.batch_size, script.max_micro_batch) == ("resnet50", 1024, 128)


def test_the_demo_is_a_target_of_the_makefile() -> None:
    assert DEMO == "make demo"
    makefile = (DOCS.parent / "Makefile").read_text()
    assert re.search(r"^demo: .*\n.* -m elasticlib\.examples\.demo$", makefile, re.MULTILINE)


@pytest.mark.parametrize("name", re.findall(r"`(--[\w-]+)", TEXT))
def test_each_flag_that_the_page_names_exists(name: str) -> None:
    folder = DOCS.parent / "elasticlib/examples"
    assert any(f'"{name}"' in path.read_text() for path in folder.glob("*.py")), name
