"""Signals from the first line of the launcher to its last one.

Early signals are kept or end the command; late ones do not change its exit code.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jobs import NAMESPACE, TAG, lacks_pid_namespaces
from processes import find_children, find_processes

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


def block_end(directory: Path) -> dict[str, str]:
    """Return an environment in which a launch waits for the gate at its end, after its summary."""
    (directory / "sitecustomize.py").write_text(
        "import atexit, sys\n"
        "def wait():\n"
        f"    open({str(directory / 'reached')!r}, 'w').close()\n"
        f"    open({str(directory / 'gate')!r}).readline()\n"
        "if 'elasticlib.launch' in sys.orig_argv:\n"
        "    atexit.register(wait)\n"
    )
    return {**os.environ, "PYTHONPATH": str(directory)}


def signal_during_import(module: str, directory: Path, number: int, *flags: str) -> tuple[int, str]:
    """Send a signal to a launch while it imports this module; return its exit code and stderr."""
    environment = block_import(module, directory)
    return signal_at_gate(directory, environment, number, command=(*RUN, *flags, *WORKER))


def signal_at_gate(
    directory: Path,
    environment: dict[str, str],
    *numbers: int,
    command: tuple[str, ...],
    find_target: Callable[[int], int] = lambda pid: pid,
) -> tuple[int, str]:
    """Send signals to a process that waits for the gate; return its exit code and stderr."""
    tag = uuid.uuid4().hex
    node = subprocess.Popen(
        command, env={**environment, TAG: tag}, stderr=subprocess.PIPE, text=True
    )
    # With O_RDWR, neither this open nor the write blocks if the launch has already exited.
    import_gate = os.open(directory / "gate", os.O_RDWR)
    try:
        wait_until("the gate to be reached", (directory / "reached").exists)
        for number in numbers:
            os.kill(find_target(node.pid), number)
        os.write(import_gate, b"\n")
        stderr = node.communicate(timeout=100)[1]
        wait_until("all processes to exit", lambda: not find_processes(TAG, tag))
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


@pytest.mark.parametrize(
    "module",
    [
        "elasticlib.launch.elasticrun",  # before the command line is read
        "elasticlib.launch.arguments",
        "elasticlib.launch.elastic_launch",  # while the workers' processes are prepared
    ],
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_stop_signal_before_the_job_ends_the_command_with_one_line(
    module: str, number: signal.Signals, import_gate: Path
) -> None:
    code, stderr = signal_during_import(module, import_gate, number)
    assert code == 128 + number, stderr
    assert stderr == f"elasticrun: {number.name} ended the command before the job began\n"


def test_sigterm_that_the_command_line_makes_a_drain_signal_drains_the_node(
    import_gate: Path,
) -> None:
    flag = "--drain-signals=SIGTERM"
    module = "elasticlib.launch.elasticrun"
    code, stderr = signal_during_import(module, import_gate, signal.SIGTERM, flag)
    assert code == 75, stderr
    assert "DRAINED: received SIGTERM" in stderr


def test_signal_that_was_blocked_at_the_start_acts(import_gate: Path) -> None:
    module = "elasticlib.launch.elastic_launch"
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # which is inherited
    try:
        code, stderr = signal_during_import(module, import_gate, signal.SIGTERM)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert code == 128 + signal.SIGTERM, stderr


@pytest.mark.skipif(lacks_pid_namespaces(), reason="PID namespaces are not available")
def test_process_1_keeps_a_signal_from_its_first_line_on(import_gate: Path) -> None:
    # The kernel discards a signal to process 1 that has no handler.
    code, stderr = signal_at_gate(
        import_gate,
        block_import("elasticlib.launch.elasticrun", import_gate),
        signal.SIGTERM,
        command=(*NAMESPACE, *RUN, *WORKER),
        find_target=lambda pid: find_children(pid)[0],
    )
    assert code == 128 + signal.SIGTERM, stderr


@pytest.mark.parametrize(("program", "code"), [("true", 0), ("false", 1)])
def test_signals_during_the_end_of_the_command_do_not_change_its_exit_code(
    program: str, code: int, import_gate: Path
) -> None:
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
    command = (*RUN, "--no-python", program)
    environment = block_end(import_gate)
    result, stderr = signal_at_gate(import_gate, environment, *signals, command=command)
    assert result == code, stderr
    assert "Traceback" not in stderr
