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

import collections
import logging
import multiprocessing
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, ClassVar

from figures import Row, Samples, run
from launched import Server

from elasticlib import (
    DynamicRendezvousHandler,
    Node,
    RendezvousHandler,
    RendezvousSettings,
    RendezvousTimeouts,
    Store,
    TcpStore,
)
from elasticlib.testing.rendezvous_cluster import FakeBootstrapStore

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


OPERATIONS = frozenset({*Store.__abstractmethods__, "watch"})


class Counted(TcpStore):
    """A client that counts what it asks, by the names of a store's operations."""

    asked: ClassVar[collections.Counter[str]] = collections.Counter()

    def __getattribute__(self, name: str) -> Any:
        if name in OPERATIONS:
            Counted.asked[name] += 1
        return super().__getattribute__(name)


class Nodes:
    """Nodes number `first`, every `step` further, of so many, over the server at this port."""

    def __init__(self, count: int, port: int, first: int = 0, step: int = 1) -> None:
        mine = range(first, count, step)
        self.stores = [Counted("127.0.0.1", port) for _ in mine]
        limits, timing = (
            RendezvousSettings(1, count, last_call_timeout=BOUND),
            RendezvousTimeouts(join_timeout=BOUND, close_timeout=5.0),
        )
        self.handlers: list[RendezvousHandler] = [
            DynamicRendezvousHandler(
                store,
                "bench",
                Node(f"n{i}", f"n{i}", "127.0.0.1", 1),
                limits,
                timeouts=timing,
                open_bootstrap_store=FakeBootstrapStore,
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
        if not Counted.asked:
            raise RuntimeError("no operation was counted while the nodes settled")
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
    spawn = multiprocessing.get_context("spawn")
    with Server() as port:
        ends, parts = [], []
        for first in range(processes):
            ours, theirs = spawn.Pipe()
            ends.append(ours)
            parts.append(spawn.Process(target=part, args=(count, port, first, processes, theirs)))
            parts[-1].start()
            theirs.close()
        for end in ends:
            end.recv()  # it is ready
        began = time.monotonic()
        for end in ends:
            end.send("go")
        # The monotonic clock is one for all processes of a machine.
        settled = [end.recv() for end in ends]
        for end, process in zip(ends, parts, strict=True):
            end.send("end")
            process.join(BOUND)
        return None if None in settled else max(settled) - began


def part(count: int, port: int, first: int, step: int, told: Connection) -> None:
    bend_limits()
    with Nodes(count, port, first, step) as nodes:
        told.send("ready")
        told.recv()
        settled = nodes.settle()
        told.send(None if settled is None else time.monotonic())
        told.recv()


def bend_limits() -> None:
    # As many threads as nodes would otherwise ask for the interpreter's lock 200 times a second
    # each, and get nothing done for asking.
    sys.setswitchinterval(SWITCH_SECONDS)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


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


def at_rest(count: int, seconds: float, repeat: int) -> Iterator[Row]:
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


def measure(
    *,
    nodes: str = "2,16,128,256,1000",
    torch_up_to: int = 128,
    apart: str = "1000",
    processes: int = 8,
    standing: str = "128",
    idle: float = 10.0,
    repeat: int = 3,
) -> Iterator[Row]:
    """apart: of our nodes, in several processes. standing: nodes at rest, for `idle` seconds, and
    one of them dies."""
    bend_limits()
    yield from settling(numbers(nodes), torch_up_to, repeat)
    for count in numbers(apart):
        mine = tried(partial(spread, count, processes), repeat)
        yield Row(f"apart.{count}", f"{count} nodes settle, in {processes} processes", mine)
    for count in numbers(standing):
        yield from at_rest(count, idle, repeat)


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


if __name__ == "__main__":
    run(measure, __doc__)
