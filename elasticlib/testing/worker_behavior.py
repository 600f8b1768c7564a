"""Behavior of the workers in the agent contract suite, as a shell script and a Python function.

Workers report through named pipes, one per generation. Processes that a worker starts inherit its
end of the pipe, so the kernel knows whether a process of a generation is still running.
"""

from __future__ import annotations

import enum
import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from typing import Any, NoReturn

from ..workers.context import context

FAIL_EXIT_CODE = 7
KILL_FILE = "kill"  # created in the directory of the pipes, see WorkerBehavior.KILL_SELF_ON_FILE


class WorkerBehavior(enum.Enum):
    """Behavior of a worker. The values are the words that the shell script reads."""

    SUCCEED = "succeed"
    FAIL = "fail"  # exit with FAIL_EXIT_CODE
    KILL_SELF = "kill-self"  # SIGKILL
    RUN = "run"  # until SIGTERM
    IGNORE_SIGTERM = "ignore-sigterm"  # run until SIGKILL
    LEAVE_CHILD = "leave-child"  # succeed, and leave a child process
    # The following are for Python functions only.
    REGROUP = "regroup"  # join new groups, and succeed in the third generation
    KILL_SELF_ON_FILE = "kill-self-on-file"  # SIGKILL as soon as KILL_FILE exists


# Environment variables that a worker reports, in this order.
REPORTED_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
)

# Arguments: the directory of the pipes, and the behaviors of all ranks in the first generation and
# in later ones.
SHELL_SCRIPT = f"""
behaviors=$2; [ "$ELASTICLIB_GENERATION" = 1 ] || behaviors=$3
exec 9>"$1/$ELASTICLIB_GENERATION"
set -- $behaviors; shift "$RANK"
case $1 in
run) trap 'echo "sigterm $RANK" >&9; exit 0' TERM ;;
ignore-sigterm) trap 'echo "sigterm $RANK" >&9' TERM ;;
esac
echo "started {" ".join(f"${name}" for name in REPORTED_VARIABLES)}" >&9
case $1 in
succeed) exit 0 ;;
fail) exit {FAIL_EXIT_CODE} ;;
kill-self) kill -KILL $$ ;;
leave-child) sleep 600 & exit 0 ;;
esac
while :; do sleep 600 & wait $!; done
"""


def run_behavior(pipe_dir: str, first: Sequence[str], later: Sequence[str]) -> int:
    """Do in Python what SHELL_SCRIPT does. A worker that succeeds returns its rank."""
    generation, rank = os.environ["ELASTICLIB_GENERATION"], int(os.environ["RANK"])
    behaviors = [WorkerBehavior(name) for name in (first if generation == "1" else later)]
    # A standby worker has a higher rank than all others.
    if all(behavior is WorkerBehavior.REGROUP for behavior in behaviors[rank:]):
        return _regroup_until_third_generation(pipe_dir)
    behavior = behaviors[rank]
    pipe = os.open(f"{pipe_dir}/{generation}", os.O_WRONLY)

    def on_sigterm(*_: Any) -> None:
        os.write(pipe, f"sigterm {rank}\n".encode())
        if behavior is WorkerBehavior.RUN:
            os._exit(0)

    if behavior in (WorkerBehavior.RUN, WorkerBehavior.IGNORE_SIGTERM):
        signal.signal(signal.SIGTERM, on_sigterm)
    values = " ".join(os.environ[name] for name in REPORTED_VARIABLES)
    os.write(pipe, f"started {values}\n".encode())
    if behavior is WorkerBehavior.LEAVE_CHILD:
        subprocess.Popen(["sleep", "600"], pass_fds=(pipe,))
    elif behavior is not WorkerBehavior.SUCCEED:
        _run_until_killed(behavior, f"{pipe_dir}/{KILL_FILE}")
    return rank


def _regroup_until_third_generation(pipe_dir: str) -> int:
    """Report each assignment, and leave each group when the worker is asked to."""
    worker, pause = context(), threading.Event()
    worker.set_can_regroup()
    while True:
        assignment = worker.accept_assignment()
        if assignment is None:
            worker.report_left_group()
            pause.wait(0.005)
            continue
        os.environ.update(assignment)
        pipe = os.open(f"{pipe_dir}/{os.environ['ELASTICLIB_GENERATION']}", os.O_WRONLY)
        values = (*(os.environ[name] for name in REPORTED_VARIABLES), str(os.getpid()))
        os.write(pipe, f"regrouped {' '.join(values)}\n".encode())
        if os.environ["ELASTICLIB_GENERATION"] == "3":
            return int(os.environ["RANK"])
        while not worker.should_leave_group() and worker.should_stop() is None:
            pause.wait(0.005)
        os.close(pipe)


def _run_until_killed(behavior: WorkerBehavior, kill_file: str) -> NoReturn:
    if behavior is WorkerBehavior.FAIL:
        os._exit(FAIL_EXIT_CODE)
    # signal.pause would not run the handler of a signal that arrives just before the call.
    pause = threading.Event()
    while True:
        if behavior is WorkerBehavior.KILL_SELF or (
            behavior is WorkerBehavior.KILL_SELF_ON_FILE and os.path.exists(kill_file)
        ):
            os.kill(os.getpid(), signal.SIGKILL)
        pause.wait(0.05)
