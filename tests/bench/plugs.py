"""What happens under stock torchrun with torch's own rendezvous, c10d, and with each of ours.

    python tests/bench/plugs.py [--backends el-tcp,el-file,el-etcd] [--repeat 1] [--kills 3]
        [--stories members,host,stock,newcomer]

Jobs of `torchrun --nnodes 1:2` with one worker a node, gloo, and a last call of 2 s. Ours meet in
an `elasticlib store`, a folder and an etcd; c10d meets in the store that its first agent serves,
with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1. `c10d by default` is without it: workers then meet in the
agents' store, where they read what the attempt before them wrote. The time is taken until a new
group of workers has finished an all_reduce.

- A second node is started while the first trains, until they are a group of two.
- The worker of one node is killed with SIGKILL, until both are in a group again.
- A node is lost: its agent is killed with its worker, while the other worker is busy and looks at
  nothing, until that one's group of one works. With ours its lease has to end, 5 s, unless a broken
  connection shows it (`el-tcp`).
- The same with the first node, which serves c10d's store, and none of ours.

What did not happen within 20 s is counted as failed, and what would follow it in that job is not
tried.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from figures import Row, run
from launched import Job, Server, Times, free_port, in_turn, job_of

TORCHRUN = ("torch.distributed.run",)
OURS = ("el-tcp", "el-file", "el-etcd")
STOCK = "c10d by default"
SHARES = {STOCK: {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0"}}
"""Its variables; for all others launched.py's are good."""
WHAT = {
    "later": "a second node is started, to a group of 2",
    "restart": "a worker is killed, to a group of 2",
    "loss": "a node is lost, to the survivor's group",
    "host": "the first node is lost, to the survivor's group",
}


@contextlib.contextmanager
def endpoint_of(backend: str) -> Iterator[str]:
    """Where nodes of this backend meet; none of ours depends on a node of the job."""
    with contextlib.ExitStack() as stack:
        if backend not in OURS:
            yield f"127.0.0.1:{free_port()}"
        elif backend == "el-tcp":
            yield f"127.0.0.1:{stack.enter_context(Server())}"
        elif backend == "el-file":
            yield stack.enter_context(tempfile.TemporaryDirectory())
        else:
            from etcd_server import EtcdServer

            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            yield stack.enter_context(EtcdServer(folder)).endpoint


@contextlib.contextmanager
def job_in(backend: str) -> Iterator[Job]:
    with endpoint_of(backend) as endpoint:
        meeting = (f"--rdzv-backend={backend.split()[0]}", f"--rdzv-endpoint={endpoint}")
        last_call = ("--rdzv-conf=last_call_timeout=2",)
        with job_of(TORCHRUN, (*meeting, *last_call), **SHARES.get(backend, {})) as running:
            yield running


def grow(times: Times, backend: str, running: Job) -> int:
    """The pid of the second node's worker."""
    running.join()
    running.up(1)
    running.join()
    return int(times.group("later", backend, running, 2)[-1]["pid"])


def kill(times: Times, backend: str, running: Job, worker: int, kills: int) -> None:
    for _ in range(kills):
        os.kill(worker, signal.SIGKILL)
        worker = int(times.group("restart", backend, running, 2)[-1]["pid"])


def members(times: Times, kills: int, backend: str) -> None:
    with job_in(backend) as running:
        kill(times, backend, running, grow(times, backend, running), kills)
        running.lose(running.agents.pop())
        times.group("loss", backend, running, 1)


def host(times: Times, backend: str) -> None:
    with job_in(backend) as running:
        grow(times, backend, running)
        running.lose(running.agents.pop(0))
        times.group("host", backend, running, 1)


def stock(times: Times, kills: int, backend: str) -> None:
    """Without the variable no second node is let in: both begin together."""
    with job_in(backend) as running:
        running.join()
        running.join()
        kill(times, backend, running, int(running.up(2)[-1]["pid"]), kills)


def newcomer(times: Times, backend: str) -> None:
    with job_in(backend) as running:
        grow(times, backend, running)


def missing(backend: str) -> str:
    """Why it cannot be run here; nothing if it can."""
    points = importlib.metadata.entry_points(group="torchrun.handlers")
    if backend not in {point.name for point in points}:
        return "torchrun does not find it: install elasticlib again"
    if backend == "el-etcd" and shutil.which("etcd") is None:
        return "no etcd here: install etcd-server"
    return ""


def measure(
    *,
    backends: str = ",".join(OURS),
    stories: str = "members,host,stock,newcomer",
    repeat: int = 1,
    kills: int = 3,
) -> Iterator[Row | str]:
    """repeat: of each story and backend; kills: of workers, in each job for it."""
    times, usable = Times(), [name for name in backends.split(",") if not missing(name)]
    ways: dict[str, tuple[list[str], Callable[[str], None]]] = {
        "members": (["c10d", *usable], partial(members, times, kills)),
        "host": (["c10d", *usable], partial(host, times)),
        "stock": ([STOCK], partial(stock, times, kills)),
        "newcomer": ([STOCK], partial(newcomer, times)),
    }
    for story in stories.split(","):
        who, play = ways[story]
        in_turn(who, repeat, play)
    for what, words in WHAT.items():
        for backend in usable:
            mine, said = times.of(what, backend), f"{words} (`{backend}`)"
            yield Row(f"{what}.{backend}", said, mine, times.of(what, "c10d"), "c10d")
        default = times.of(what, STOCK)
        if usable and (default.values or default.failed):
            yield Row(f"{what}.default", said, mine, default, STOCK)
    for backend in sorted(set(backends.split(",")) - set(usable)):
        yield f"{backend} was not measured: {missing(backend)}."


if __name__ == "__main__":
    run(measure, __doc__)
