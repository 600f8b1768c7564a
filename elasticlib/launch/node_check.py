"""Node check: runs a command that decides whether this node is fit to run workers.

The agent calls the check before the node first joins, and before it rejoins after its own workers
failed. `--node-check builtin` runs `builtin_check.py`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shlex
import signal
import subprocess
from collections.abc import Callable, Sequence
from typing import IO

import attrs

from ..clock import monotonic
from ..errors import require_not_none
from ..options import LaunchOptions
from ..python_command import python_command
from ..sanitize import escape_control_chars, escape_to_one_line, shorten
from ..signals import signal_name
from ..workers.spec import AGENT_ONLY_VARIABLES
from .backends import etcd_of

log = logging.getLogger("elasticlib.launch")

BUILTIN = "builtin"
POLL_INTERVAL_S = 0.05
KILL_TIMEOUT_S = 3.0  # after SIGKILL
READ_BYTES = 64 * 1024  # a pipe holds no more, so that one read takes all that was written
MAX_OUTPUT_BYTES = 4096  # the last bytes of the output are kept
MAX_LINE_CHARS = 300  # of the output, in the reason
MAX_COMMAND_CHARS = 100  # of the command, in the reason

# The shell runs the command in a process group of its own. Another process of the group waits for
# the end of a pipe that only the agent holds, so that the check does not outlive a killed agent.
_SCRIPT = """
exec 3<&0 </dev/null
(read -r _ <&3; kill -KILL 0) >/dev/null 2>&1 &
exec 3<&-
eval "$1"
"""


@attrs.frozen
class NodeCheck:
    """A check of this node by a command: the `check_node` of an `ElasticAgent`."""

    command: str  # for the shell; the node is fit if it exits with 0
    timeout_s: float  # a command that takes longer is killed, and the node is not fit
    name: str  # the command as messages show it
    consequence: str = ""  # what it means for the job if the node stays out, for messages

    def __call__(self, is_cancelled: Callable[[], bool]) -> str:
        """Run the command, and return why the node is not fit, or an empty text.

        When the call returns, SIGKILL has been sent to all processes of the command's group.

        Args:
            is_cancelled: returns True once the check must end. It is called several times a second.
        """
        try:
            problem, output = _run_shell_command(self.command, self.timeout_s, is_cancelled)
        except OSError as error:
            problem, output = f"cannot be started: {error.strerror or error}", ""
        if not problem:
            return ""
        if output:
            log.warning("the last output of %s:\n%s", self.name, escape_control_chars(output))
        lines = [line for line in output.splitlines() if line.strip()]
        last = shorten(escape_to_one_line(lines[-1].strip()), MAX_LINE_CHARS) if lines else ""
        details = f": {last}" if last else ""
        consequence = f"; {self.consequence}" if self.consequence else ""
        return f"{self.name} {problem}{details}{consequence}"


def make_node_check(options: LaunchOptions) -> NodeCheck | None:
    """Return the node check of a launch, or None if it has none."""
    command = options.agent.node_check
    if command is None:
        return None
    name = f"the node check {escape_to_one_line(shorten(command, MAX_COMMAND_CHARS))!r}"
    if command == BUILTIN:
        command, name = builtin_command(options), "the built-in node check"
    consequence = describe_consequence(options.job.min_nodes, options.job.max_nodes)
    return NodeCheck(command, options.agent.node_check_timeout, name, consequence)


def builtin_command(options: LaunchOptions) -> str:
    """Return the shell command of the built-in check, with the store and directories to check."""
    rendezvous, log_dir = options.rendezvous, options.output.log_dir
    endpoints: Sequence[str] = ()
    args: list[str] = []
    if (etcd := etcd_of(rendezvous)) is not None:
        endpoints = [member.address for member in etcd.members]
    elif rendezvous.is_tcp and not rendezvous.is_single_node:
        endpoints = rendezvous.endpoints
    elif rendezvous.backend == "file":
        args += ["--directory", os.path.expanduser(rendezvous.endpoint)]
    args += [text for endpoint in endpoints for text in ("--endpoint", endpoint)]
    if log_dir is not None:
        args += ["--directory", os.path.expanduser(log_dir)]
    return shlex.join(python_command("elasticlib.launch.builtin_check", *args))


def describe_consequence(min_nodes: int, max_nodes: int) -> str:
    """Return what it means for a job of this size that a node stays out."""
    if max_nodes == 1:
        return "the job has no other node, and cannot run"
    if min_nodes == max_nodes:
        return (
            f"this node stays out, and the job needs {min_nodes} nodes: it goes on once a spare or "
            "another node takes its place"
        )
    return f"this node stays out, and the job goes on while {min_nodes} or more others are there"


def _run_shell_command(
    command: str, timeout_s: float, is_cancelled: Callable[[], bool]
) -> tuple[str, str]:
    """Run a command of the shell.

    Returns:
        What is wrong, empty after exit code 0, and the last part of the output.
    """
    deadline, problem = monotonic() + timeout_s, ""
    process = subprocess.Popen(
        ["/bin/sh", "-c", _SCRIPT, "sh", command],
        env={n: text for n, text in os.environ.items() if n not in AGENT_ONLY_VARIABLES},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    stdin = require_not_none(process.stdin, "stdin")
    with stdin, require_not_none(process.stdout, "stdout") as pipe:
        output = OutputTail(pipe)
        try:
            while not _has_exited(process.pid) and not problem:
                output.read(POLL_INTERVAL_S)
                if is_cancelled():
                    problem = "was ended together with the agent"
                elif monotonic() >= deadline:
                    problem = f"did not end within {timeout_s:g} s (--node-check-timeout)"
        finally:
            # The group also has what the command has started and left. It has this id until its
            # leader is reaped.
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            # A process in a system call that the kernel cannot interrupt does not end yet.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(KILL_TIMEOUT_S)
        output.read(0.0)
    return problem or _describe_exit(process.returncode), output.text


class OutputTail:
    """The last part of what a process writes to a pipe."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._descriptor = pipe.fileno()
        self._data = b""
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)
        self._is_open = True  # the end of the output has not been read
        os.set_blocking(self._descriptor, False)

    @property
    def text(self) -> str:
        return self._data.decode(errors="replace")

    def read(self, timeout_s: float) -> None:
        """Read what has been written. Wait for output for up to `timeout_s` if there is none."""
        if not self._poll.poll(timeout_s * 1000) or not self._is_open:
            return
        data = b""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._descriptor, READ_BYTES)
            if not data:
                self._is_open = False
                self._poll.unregister(self._descriptor)
        self._data = (self._data + data)[-MAX_OUTPUT_BYTES:]


def _has_exited(pid: int) -> bool:
    """Return whether a child has exited. It is not reaped, so that no other process gets its id."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _describe_exit(returncode: int) -> str:
    if returncode < 0:
        return f"was killed by {signal_name(-returncode)}"
    return f"exited with code {returncode}" if returncode else ""
