"""A node that is told to leave while it still starts leaves as one that was told later."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticlib.testing.waiting import wait_until

pytestmark = pytest.mark.faults

RUN = (sys.executable, "-m", "elasticlib.launch", "--standalone", "--start-method=spawn")
WORKER = ("--no-python", "sleep", "600")


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Path]:
    """A folder in front of the path, with a module of ours that stops the import of another."""
    pipe = tmp_path / "gate"
    os.mkfifo(pipe)
    return tmp_path


def stopped_at(module: str, folder: Path) -> dict[str, str]:
    """An environment in which whoever first imports this module says so, and waits to go on."""
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "class Gate:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        "            sys.meta_path.remove(self)\n"
        f"            open({str(folder / 'reached')!r}, 'w').close()\n"
        f"            open({str(folder / 'gate')!r}).readline()\n"
        "sys.meta_path.insert(0, Gate())\n"
    )
    return {**os.environ, "PYTHONPATH": str(folder)}


def told_at(module: str, folder: Path, number: int, *flags: str) -> tuple[int, str]:
    """The exit code, and what was said, of a launch told by a signal while it imports that."""
    command = (*RUN, *flags, *WORKER)
    node = subprocess.Popen(
        command, env=stopped_at(module, folder), stderr=subprocess.PIPE, text=True
    )
    # Open for both: nobody who has ended is waited for.
    gate = os.open(folder / "gate", os.O_RDWR)
    try:
        wait_until(f"{module} to be imported", (folder / "reached").exists)
        node.send_signal(number)
        os.write(gate, b"\n")
        said = node.communicate(timeout=100)[1]
    finally:
        node.kill()
        node.wait()
        os.close(gate)
    return node.returncode, said


@pytest.mark.parametrize(
    "module",
    [
        "elasticlib.launch.arguments",
        "elasticlib.launch.elastic_launch",
        "elasticlib.launch.exit_summary",
    ],
)
def test_a_drain_that_comes_while_the_launcher_is_imported_drains_the_node(
    module: str, gate: Path
) -> None:
    code, said = told_at(module, gate, signal.SIGUSR2)
    assert code == 75, said
    assert "DRAINED: received SIGUSR2" in said


def test_one_that_the_command_line_names_is_held_as_well(gate: Path) -> None:
    number = signal.SIGRTMIN + 3
    flags = ("--drain-signals=SIGRTMIN+3", "--drain-exit-code=9")
    code, said = told_at("elasticlib.launch.arguments", gate, number, *flags)
    assert code == 9, said
    assert "DRAINED: received SIGRTMIN+3" in said


def test_one_that_means_nothing_to_the_launch_does_what_it_always_did(gate: Path) -> None:
    code, said = told_at("elasticlib.launch.arguments", gate, signal.SIGUSR1)
    assert code == -signal.SIGUSR1, said
