"""Signals that arrive while the launcher is still being imported take effect afterwards."""

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
def import_gate(tmp_path: Path) -> Iterator[Path]:
    """A directory with a pipe that an import waits for, see `block_import`."""
    os.mkfifo(tmp_path / "gate")
    return tmp_path


def block_import(module: str, directory: Path) -> dict[str, str]:
    """Return an environment in which the first import of this module waits for the gate.

    The import creates the file `reached` and then waits for a line in the pipe `gate`.
    """
    (directory / "sitecustomize.py").write_text(
        "import sys\n"
        "class Gate:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        "            sys.meta_path.remove(self)\n"
        f"            open({str(directory / 'reached')!r}, 'w').close()\n"
        f"            open({str(directory / 'gate')!r}).readline()\n"
        "sys.meta_path.insert(0, Gate())\n"
    )
    return {**os.environ, "PYTHONPATH": str(directory)}


def signal_during_import(module: str, directory: Path, number: int, *flags: str) -> tuple[int, str]:
    """Send a signal to a launch while it imports this module; return its exit code and stderr."""
    command = (*RUN, *flags, *WORKER)
    node = subprocess.Popen(
        command, env=block_import(module, directory), stderr=subprocess.PIPE, text=True
    )
    # With O_RDWR, neither this open nor the write blocks if the launch has already exited.
    import_gate = os.open(directory / "gate", os.O_RDWR)
    try:
        wait_until(f"{module} to be imported", (directory / "reached").exists)
        node.send_signal(number)
        os.write(import_gate, b"\n")
        stderr = node.communicate(timeout=100)[1]
    finally:
        node.kill()
        node.wait()
        os.close(import_gate)
    return node.returncode, stderr


@pytest.mark.parametrize(
    "module",
    [
        "elasticlib.launch.arguments",
        "elasticlib.launch.elastic_launch",
        "elasticlib.launch.exit_summary",
    ],
)
def test_drain_signal_during_the_import_of_the_launcher_drains_the_node(
    module: str, import_gate: Path
) -> None:
    code, stderr = signal_during_import(module, import_gate, signal.SIGUSR2)
    assert code == 75, stderr
    assert "DRAINED: received SIGUSR2" in stderr


def test_signal_chosen_on_the_command_line_is_also_handled_after_the_import(
    import_gate: Path,
) -> None:
    number = signal.SIGRTMIN + 3
    flags = ("--drain-signals=SIGRTMIN+3", "--drain-exit-code=9")
    code, stderr = signal_during_import("elasticlib.launch.arguments", import_gate, number, *flags)
    assert code == 9, stderr
    assert "DRAINED: received SIGRTMIN+3" in stderr


def test_signal_that_the_launcher_does_not_handle_has_its_default_effect(import_gate: Path) -> None:
    code, stderr = signal_during_import("elasticlib.launch.arguments", import_gate, signal.SIGUSR1)
    assert code == -signal.SIGUSR1, stderr
