"""Guardian process: cleans up after an agent that has exited or was killed.

Each agent has one guardian. It waits for the end of the agent, and reads no messages. Then it kills
the sessions of all processes in the agent's ledger, and removes the directories that the ledger
lists. It leads a session of its own and blocks all signals, so it outlives what ends an agent. No
process depends on it: if it is killed, the agent starts another one. It uses only the standard
library, so no module of the user can block it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from typing import NoReturn

from ..clock import monotonic, sleep
from .cleanup import has_exited, kill_sessions, process_start_ticks
from .ledger import HELPERS, WORKERS, read_directories, read_sessions
from .process_setup import set_parent_death_signal

NAME = "guardian"  # of the process
HELPER_EXIT_TIMEOUT_S = 10.0  # a killed fork server has to free its memory
POLL_INTERVAL_S = 0.01
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# -I and -S: neither files in the working directory nor site-packages affect the program.
_PROGRAM = (
    "import sys; sys.path.append({root!r}); "
    "import elasticlib.workers.guardian as guardian; guardian.main({agent}, {ledger})"
)


def start_guardian(ledger: int) -> tuple[subprocess.Popen[bytes], int]:
    """Start the guardian of this process.

    The calling thread must live as long as this process, and block all signals.

    Args:
        ledger: the descriptor of the agent's ledger.

    Returns:
        The process, and a descriptor that is readable once the process has exited.

    Raises:
        OSError: the process cannot be started.
    """
    program = _PROGRAM.format(root=_ROOT, agent=os.getpid(), ledger=ledger)
    reading, writing = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", program],
            pass_fds=[ledger, writing],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    return process, reading


def main(agent: int, ledger: int) -> NoReturn:
    """Run the guardian of an agent.

    Args:
        agent: the pid of the agent, which is the parent of this process.
        ledger: the descriptor of its ledger.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    os.chdir("/")
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as file:
        file.write(NAME)
    # The kernel sends the signal whenever this process gets another parent or another thread of
    # the agent adopts it. It stays pending until it is waited for.
    set_parent_death_signal(agent, signal.SIGUSR1)
    while os.getppid() == agent:
        signal.sigwait({signal.SIGUSR1})
    clean_up(ledger)
    os._exit(0)


def clean_up(ledger: int) -> None:
    """Kill what is in the ledger of an agent that has exited, and remove the directories."""
    # Until a fork server has exited, another of its workers may enter itself.
    helpers = read_sessions(ledger, HELPERS)
    for pid, ticks in helpers.items():
        with contextlib.suppress(ProcessLookupError):
            if process_start_ticks(pid) == ticks:
                os.kill(pid, signal.SIGKILL)
    limit = monotonic() + HELPER_EXIT_TIMEOUT_S
    while monotonic() < limit and any(_is_running(*one) for one in helpers.items()):
        sleep(POLL_INTERVAL_S)
    kill_sessions({**helpers, **read_sessions(ledger, WORKERS)})
    # Processes may write into the directories until they have been killed.
    for path in read_directories(ledger):
        shutil.rmtree(path, ignore_errors=True)


def _is_running(pid: int, ticks: int) -> bool:
    return process_start_ticks(pid) == ticks and not has_exited(pid)
