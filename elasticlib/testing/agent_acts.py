"""Behavior of the workers in the agent contract suite, as a shell script and a Python function.

Workers report through named pipes, one per generation. Processes that a worker starts inherit its
end of the pipe, so the kernel knows whether a process of a generation is left.
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
CUE_FILE = "cue"  # created in the directory of the pipes, see Act.DIE_ON_CUE


class Act(enum.Enum):
    """Behavior of a worker."""

    SUCCEED = "succeed"
    FAIL = "fail"  # exit with FAIL_EXIT_CODE
    DIE = "die"  # SIGKILL to itself
    STAY = "stay"  # run until SIGTERM
    STAY_DEAF = "deaf"  # run until SIGKILL
    LEAVE_CHILD = "child"  # succeed, and leave a child process
    KEEP = "keep"  # regroup, and succeed in the third generation; for functions only
    DIE_ON_CUE = "die-on-cue"  # SIGKILL to itself once CUE_FILE exists; for functions only


# Environment variables that a worker reports, in this order.
REPORTED_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
)

# Arguments: the directory of the pipes, the acts of all ranks in the first generation, and later.
SHELL_SCRIPT = f"""
acts=$2; [ "$ELASTICLIB_GENERATION" = 1 ] || acts=$3
exec 9>"$1/$ELASTICLIB_GENERATION"
set -- $acts; shift "$RANK"
case $1 in
stay) trap 'echo "sigterm $RANK" >&9; exit 0' TERM ;;
deaf) trap 'echo "sigterm $RANK" >&9' TERM ;;
esac
echo "up {" ".join(f"${name}" for name in REPORTED_VARIABLES)}" >&9
case $1 in
succeed) exit 0 ;;
fail) exit {FAIL_EXIT_CODE} ;;
die) kill -KILL $$ ;;
child) sleep 600 & exit 0 ;;
esac
while :; do sleep 600 & wait $!; done
"""


def perform(pipe_dir: str, first: Sequence[str], later: Sequence[str]) -> int:
    """Do in Python what SHELL_SCRIPT does. A worker that succeeds returns its rank."""
    generation, rank = os.environ["ELASTICLIB_GENERATION"], int(os.environ["RANK"])
    acts = [Act(name) for name in (first if generation == "1" else later)]
    if all(act is Act.KEEP for act in acts[rank:]):
        return _regroup_until_third_generation(pipe_dir)  # standby workers have a higher rank
    act = acts[rank]
    pipe = os.open(f"{pipe_dir}/{generation}", os.O_WRONLY)

    def on_sigterm(*_: Any) -> None:
        os.write(pipe, f"sigterm {rank}\n".encode())
        if act is Act.STAY:
            os._exit(0)

    if act in (Act.STAY, Act.STAY_DEAF):
        signal.signal(signal.SIGTERM, on_sigterm)
    os.write(pipe, f"up {' '.join(os.environ[name] for name in REPORTED_VARIABLES)}\n".encode())
    if act is Act.LEAVE_CHILD:
        subprocess.Popen(["sleep", "600"], pass_fds=(pipe,))
    elif act is not Act.SUCCEED:
        _run_until_killed(act, f"{pipe_dir}/{CUE_FILE}")
    return rank


def _regroup_until_third_generation(pipe_dir: str) -> int:
    """Report each assignment, and leave each group when it is over."""
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
        os.write(pipe, f"kept {' '.join(values)}\n".encode())
        if os.environ["ELASTICLIB_GENERATION"] == "3":
            return int(os.environ["RANK"])
        while not worker.should_leave_group() and worker.should_stop() is None:
            pause.wait(0.005)
        os.close(pipe)


def _run_until_killed(act: Act, cue_file: str) -> NoReturn:
    if act is Act.FAIL:
        os._exit(FAIL_EXIT_CODE)
    # signal.pause would not run the handler of a signal that arrives just before it.
    pause = threading.Event()
    while True:
        if act is Act.DIE or (act is Act.DIE_ON_CUE and os.path.exists(cue_file)):
            os.kill(os.getpid(), signal.SIGKILL)
        pause.wait(0.05)
