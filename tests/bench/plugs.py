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

import argparse
import contextlib
import importlib.metadata
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from figures import Row, Samples, parser_of, tell
from launched import Ended, Job, Server, free_port, job_of

TORCHRUN = ("torch.distributed.run",)
OURS = ("el-tcp", "el-file", "el-etcd")
BOUND = 20.0
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
            sys.path.append(str(Path(__file__).parent.parent))
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


class Measured:
    """Times by what was done and by backend, and what did not come."""

    def __init__(self) -> None:
        self.taken: dict[tuple[str, str], list[float]] = defaultdict(list)
        self.failed: dict[tuple[str, str], list[str]] = defaultdict(list)

    def take(self, what: str, backend: str, running: Job, world: int) -> int:
        """Notes how long it is until a new group of so many; the pid of its last worker.

        Raises:
            TimeoutError: there was none.
        """
        began = time.monotonic()
        try:
            workers = running.up(world, BOUND)
        except TimeoutError as error:
            why = "its agents ended" if isinstance(error, Ended) else f"not within {BOUND:g} s"
            self.failed[what, backend].append(why)
            raise
        self.taken[what, backend].append(time.monotonic() - began)
        return int(workers[-1]["pid"])

    def of(self, what: str, backend: str) -> Samples:
        taken, failed = self.taken[what, backend], self.failed[what, backend]
        why = ", ".join(dict.fromkeys(failed)) or ("" if taken else "not tried")
        return Samples("s", taken, len(failed), why)


def two_nodes(found: Measured, backend: str, running: Job) -> int:
    running.join()
    running.up(1)
    running.join()
    return found.take("later", backend, running, 2)


def members(found: Measured, backend: str, kills: int) -> None:
    with job_in(backend) as running:
        worker = two_nodes(found, backend, running)
        for _ in range(kills):
            os.kill(worker, signal.SIGKILL)
            worker = found.take("restart", backend, running, 2)
        running.lose(running.agents.pop())
        found.take("loss", backend, running, 1)


def host(found: Measured, backend: str, kills: int) -> None:
    del kills
    with job_in(backend) as running:
        two_nodes(found, backend, running)
        running.lose(running.agents.pop(0))
        found.take("host", backend, running, 1)


def stock(found: Measured, backend: str, kills: int) -> None:
    """Without the variable no second node is let in: both begin together."""
    with job_in(backend) as running:
        running.join()
        running.join()
        worker = int(running.up(2)[-1]["pid"])
        for _ in range(kills):
            os.kill(worker, signal.SIGKILL)
            worker = found.take("restart", backend, running, 2)


def newcomer(found: Measured, backend: str, kills: int) -> None:
    del kills
    with job_in(backend) as running:
        two_nodes(found, backend, running)


STORIES = {story.__name__: story for story in (members, host, stock, newcomer)}


def told(found: Measured, stories: list[str], given: argparse.Namespace) -> Measured:
    """All stories, each backend in turn; who did not come through one is not tried in it again."""
    for story in stories:
        here = [STOCK] if story in ("stock", "newcomer") else ["c10d", *given.backends]
        for _ in range(given.repeat):
            for backend in list(here):
                try:
                    STORIES[story](found, backend, given.kills)
                except TimeoutError as error:
                    print(f"{story}, {backend}: {str(error)[:200]}", flush=True)
                    here.remove(backend)
    return found


def usable(asked: list[str]) -> tuple[list[str], list[str]]:
    """Those of our backends that can be run here, and a sentence for each that cannot."""
    points = importlib.metadata.entry_points(group="torchrun.handlers")
    missing = {
        backend: "torchrun does not find it: install elasticlib again"
        for backend in asked
        if backend not in {point.name for point in points}
    }
    if "el-etcd" in asked and shutil.which("etcd") is None:
        missing["el-etcd"] = "no etcd here: install etcd-server"
    notes = [f"{backend} was not measured: {why}." for backend, why in missing.items()]
    return [backend for backend in asked if backend not in missing], notes


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--backends", default=",".join(OURS), help="of ours, with commas")
    parser.add_argument("--stories", default=",".join(STORIES), help="any of these, with commas")
    parser.add_argument("--repeat", type=int, default=1, help="of each story and backend")
    parser.add_argument("--kills", type=int, default=3, help="of workers, in each job for it")
    given = parser.parse_args()
    given.backends, notes = usable(given.backends.split(","))
    found = told(Measured(), given.stories.split(","), given)
    rows = []
    for what, words in WHAT.items():
        beside = found.of(what, "c10d"), found.of(what, STOCK)
        for backend in given.backends:
            mine, said = found.of(what, backend), f"{words} (`{backend}`)"
            rows.append(Row(f"{what}.{backend}", said, mine, beside[0], "c10d"))
        if given.backends and (beside[1].values or beside[1].failed):
            rows.append(Row(f"{what}.default", said, mine, beside[1], STOCK))
    tell(given, rows, notes)


if __name__ == "__main__":
    main()
