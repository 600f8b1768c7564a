"""What a rendezvous costs: to settle, to stand idle, and when a node dies; beside torch's own.

    python tests/bench/rendezvous.py [--nodes 2,16,128,256,1000] [--torch-up-to 128]
        [--apart 1000] [--processes 8] [--repeat 3] [--idle 10]

All nodes are in one process, where they take turns at one interpreter; those of --apart are ours in
several processes, as real ones are; over loopback. They start at once and the maximum is N, so no
last call is waited for. Ours meet over one `elasticlib store`, torch's over one TCPStore (whose
server is no Python, and takes no turn of this process's), each node with a client of its own. At
rest: store operations and CPU, per node, while a generation stands. Death: from the end of rank 0's
connection to the survivors' next generation; torch's handler does not notice one while nobody waits
to join, so there is none to compare with. A thousand nodes in one process wait for each other's
turn at the interpreter most of the time.
"""

from __future__ import annotations

import argparse
import collections
import logging
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from functools import partial
from typing import Any, ClassVar

from figures import Row, Samples, parser_of, tell
from launched import Server

from elasticlib import (
    DynamicRendezvousHandler,
    Limits,
    Node,
    RendezvousHandler,
    TcpStore,
    Timing,
)
from elasticlib.testing.rendezvous_over_store import Listener

BOUND = 60.0
SWITCH_SECONDS = 1.0


def settle(meet: Sequence[Callable[[], object]]) -> float | None:
    """Seconds until all have met; None if not within the bound."""
    pool = futures.ThreadPoolExecutor(len(meet))
    # Their threads are there before the time is taken.
    there = threading.Barrier(len(meet))
    for waiting in [pool.submit(there.wait) for _ in meet]:
        waiting.result(BOUND)
    began = time.monotonic()
    joined = [pool.submit(join) for join in meet]
    try:
        for future in joined:
            future.result(max(0.0, BOUND - (time.monotonic() - began)))
    except futures.TimeoutError:  # another than the builtin one until Python 3.11
        return None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return time.monotonic() - began


class Counted(TcpStore):
    """A client that counts what it asks."""

    asked: ClassVar[collections.Counter[str]] = collections.Counter()

    def _request(self, op: str, *args: Any, **more: Any) -> Any:
        self.asked[op] += 1
        return super()._request(op, *args, **more)


class Nodes:
    """Nodes number `first`, every `step` further, of so many, over the server at this port."""

    def __init__(self, count: int, port: int, first: int = 0, step: int = 1) -> None:
        mine = range(first, count, step)
        self.stores = [Counted("127.0.0.1", port) for _ in mine]
        limits, timing = Limits(1, count, last_call=BOUND), Timing(join=BOUND, close=5.0)
        self.handlers: list[RendezvousHandler] = [
            DynamicRendezvousHandler(
                store,
                "bench",
                Node(f"n{i}", f"n{i}", "127.0.0.1", 1),
                limits,
                timing=timing,
                open_bootstrap=Listener,
            )
            for i, store in zip(mine, self.stores, strict=True)
        ]

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *error: object) -> None:
        for handler in self.handlers:
            handler.shutdown()
        for store in self.stores:
            store.close()

    def settle(self) -> float | None:
        return settle([handler.next_rendezvous for handler in self.handlers])

    def idle(self, seconds: float) -> tuple[float, float]:
        """Operations and CPU seconds, for each node and second, while nothing happens."""
        Counted.asked.clear()
        cpu = time.process_time()
        time.sleep(seconds)
        share = seconds * len(self.handlers)
        return sum(Counted.asked.values()) / share, (time.process_time() - cpu) / share

    def lose_first(self) -> float | None:
        """Seconds from the end of the first node's connection to the next generation."""

        def again(handler: RendezvousHandler) -> object:
            while handler.wait_for_change(BOUND) is None:
                pass
            return handler.next_rendezvous()

        survivors = [partial(again, handler) for handler in self.handlers[1:]]
        return settle([*survivors, self.stores[0].close])


def ours(count: int) -> float | None:
    with Server() as port, Nodes(count, port) as nodes:
        return nodes.settle()


def spread(count: int, processes: int) -> float | None:
    """The same with the nodes in several processes, which are ready before the time is taken."""
    with Server() as port:
        parts = [
            subprocess.Popen(
                [sys.executable, __file__, "--part", f"{count},{port},{first},{processes}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for first in range(processes)
        ]
        for part in parts:
            assert part.stdout is not None
            assert part.stdout.readline() == "ready\n"
        began = time.monotonic()
        for part in parts:
            assert part.stdin is not None
            part.stdin.write("go\n")
            part.stdin.flush()
        # The monotonic clock is one for all processes of a machine.
        ends = [part.stdout.readline().strip() for part in parts if part.stdout]
        for part in parts:
            part.communicate("end\n", timeout=BOUND)
        return None if "" in ends else max(map(float, ends)) - began


def play_part(count: int, port: int, first: int, step: int) -> None:
    with Nodes(count, port, first, step) as nodes:
        print("ready", flush=True)
        sys.stdin.readline()
        settled = nodes.settle()
        print("" if settled is None else time.monotonic(), flush=True)
        sys.stdin.readline()


def torchs(count: int) -> float | None:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it warns of each lost connection
    from torch.distributed import TCPStore
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    logging.disable(logging.CRITICAL)
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    handlers = []
    for _ in range(count):
        store = TCPStore("127.0.0.1", server.port, is_master=False)
        parameters = RendezvousParameters(
            "c10d", f"127.0.0.1:{server.port}", "bench", count, count, local_addr="127.0.0.1"
        )
        handlers.append(create_handler(store, C10dRendezvousBackend(store, "bench"), parameters))
    taken = settle([handler.next_rendezvous for handler in handlers])
    for handler in handlers:
        handler._stop_heartbeats()
    return taken


def tried(measure: Callable[[], float | None], repeat: int) -> Samples:
    """One that does not end in time is not tried again."""
    taken: list[float] = []
    for _ in range(repeat):
        one = measure()
        if one is None:
            return Samples("s", taken, 1, f"not within {BOUND:g} s")
        taken.append(one)
    return Samples("s", taken)


def settling(counts: Sequence[int], torch_up_to: int, repeat: int) -> Iterator[Row]:
    for count in counts:
        theirs = tried(partial(torchs, count), repeat) if count <= torch_up_to else None
        mine = tried(partial(ours, count), repeat)
        yield Row(f"settle.{count}", f"{count} nodes settle", mine, theirs, "torch's c10d")


def standing(count: int, seconds: float, repeat: int) -> Iterator[Row]:
    """At rest, and when rank 0 dies."""
    asked, used, again = [], [], []
    for _ in range(repeat):
        with Server() as port, Nodes(count, port) as nodes:
            nodes.settle()
            operations, cpu = nodes.idle(seconds)
            asked.append(operations)
            used.append(cpu)
            if count > 1:
                again.append(nodes.lose_first())
    never = Samples("s", why="never noticed")
    what = f"{count} nodes: rank 0 dies, to the next generation"
    lost = [one for one in again if one is not None]
    death = Samples("s", lost, len(again) - len(lost), f"not within {BOUND:g} s")
    rest = f"{count} nodes at rest, each"
    yield Row(f"operations.{count}", f"{rest}: store operations", Samples("a second", asked))
    yield Row(f"cpu.{count}", f"{rest}: CPU", Samples("of a core", used))
    yield Row(f"death.{count}", what, death, never, "torch's c10d")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--nodes", default="2,16,128,256,1000")
    parser.add_argument("--torch-up-to", type=int, default=128)
    parser.add_argument("--apart", default="1000", help="of our nodes, in several processes")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--standing", default="128", help="nodes at rest, and one of them dies")
    parser.add_argument("--idle", type=float, default=10.0, help="seconds at rest")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    # As many threads as nodes would otherwise ask for the interpreter's lock 200 times a second
    # each, and get nothing done for asking.
    sys.setswitchinterval(SWITCH_SECONDS)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if args.part:
        play_part(*map(int, args.part.split(",")))
        return
    rows = [*settling(numbers(args.nodes), args.torch_up_to, args.repeat)]
    for count in numbers(args.apart):
        mine = tried(partial(spread, count, args.processes), args.repeat)
        what = f"{count} nodes settle, in {args.processes} processes"
        rows.append(Row(f"apart.{count}", what, mine))
    for count in numbers(args.standing):
        rows += standing(count, args.idle, args.repeat)
    tell(args, rows)


def numbers(text: str) -> list[int]:
    return [int(number) for number in filter(None, text.split(","))]


if __name__ == "__main__":
    main()
