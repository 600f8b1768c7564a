"""What the workers of the agents' suite do, as a shell line and as a Python function.

Both tell of themselves through a named pipe, one for each generation. Whatever a worker starts
inherits its end of it, so the kernel knows whether anything of a generation is left.
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

CODE = 7


class Act(enum.Enum):
    """SUCCEED: ends with code 0, FAIL: with code 7. DIE: kills itself. STAY: until it is asked to
    stop. STAY_DEAF: whatever it is asked. LEAVE_CHILD: succeeds, with a child that would stay.
    KEEP: goes on from group to group, and succeeds in the third. DIE_ON_CUE: kills itself once the
    stage says so. These two are for functions alone."""

    SUCCEED = "succeed"
    FAIL = "fail"
    DIE = "die"
    STAY = "stay"
    STAY_DEAF = "deaf"
    LEAVE_CHILD = "child"
    KEEP = "keep"
    DIE_ON_CUE = "die-on-cue"


CUE = "cue"
"""The file in the folder of the pipes that is awaited by those that die on a cue."""

PLACE = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
)
"""The variables whose values a worker tells, in this order."""

SHELL_LINE = f"""
acts=$2; [ "$ELASTICLIB_GENERATION" = 1 ] || acts=$3
exec 9>"$1/$ELASTICLIB_GENERATION"
set -- $acts; shift "$RANK"
case $1 in
stay) trap 'echo "asked $RANK" >&9; exit 0' TERM ;;
deaf) trap 'echo "asked $RANK" >&9' TERM ;;
esac
echo "up {" ".join(f"${name}" for name in PLACE)}" >&9
case $1 in
succeed) exit 0 ;;
fail) exit {CODE} ;;
die) kill -KILL $$ ;;
child) sleep 600 & exit 0 ;;
esac
while :; do sleep 600 & wait $!; done
"""
"""Arguments: the folder of the pipes; what each rank does in the first generation, and later."""


def perform(folder: str, first: Sequence[str], later: Sequence[str]) -> int:
    """The same in Python; a worker that succeeds returns its rank."""
    generation, rank = os.environ["ELASTICLIB_GENERATION"], int(os.environ["RANK"])
    acts = [Act(name) for name in (first if generation == "1" else later)]
    if all(act is Act.KEEP for act in acts[rank:]):
        return _outlive(folder)  # also as a newcomer, whose rank is nobody's
    act = acts[rank]
    pipe = os.open(f"{folder}/{generation}", os.O_WRONLY)

    def asked(*_: Any) -> None:
        os.write(pipe, f"asked {rank}\n".encode())
        if act is Act.STAY:
            os._exit(0)

    if act in (Act.STAY, Act.STAY_DEAF):
        signal.signal(signal.SIGTERM, asked)
    os.write(pipe, f"up {' '.join(os.environ[name] for name in PLACE)}\n".encode())
    if act is Act.LEAVE_CHILD:
        subprocess.Popen(["sleep", "600"], pass_fds=(pipe,))
    elif act is not Act.SUCCEED:
        _go_on(act, f"{folder}/{CUE}")
    return rank


def _outlive(folder: str) -> int:
    """Each place is told once it is taken, and each group left when that is over."""
    here, pause = context(), threading.Event()
    here.set_can_regroup()
    while True:
        place = here.accept_assignment()
        if place is None:
            here.report_left_group()
            pause.wait(0.005)
            continue
        os.environ.update(place)
        pipe = os.open(f"{folder}/{os.environ['ELASTICLIB_GENERATION']}", os.O_WRONLY)
        told = (*(os.environ[name] for name in PLACE), str(os.getpid()))
        os.write(pipe, f"kept {' '.join(told)}\n".encode())
        if os.environ["ELASTICLIB_GENERATION"] == "3":
            return int(os.environ["RANK"])
        while not here.should_leave_group() and here.should_stop() is None:
            pause.wait(0.005)
        os.close(pipe)


def _go_on(act: Act, cue: str) -> NoReturn:
    if act is Act.FAIL:
        os._exit(CODE)
    # Not signal.pause: a signal that comes just before that runs no handler.
    pause = threading.Event()
    while True:
        if act is Act.DIE or (act is Act.DIE_ON_CUE and os.path.exists(cue)):
            os.kill(os.getpid(), signal.SIGKILL)
        pause.wait(0.05)
