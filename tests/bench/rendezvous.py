"""Rendezvous of up to 1,000 nodes: time to settle, idle cost, and time after the loss of a node.

    python tests/bench/rendezvous.py [--nodes 2,16,128,256,1000] [--torch-up-to 128]
        [--apart 1000] [--processes 8] [--repeat 3] [--idle 10]

A rendezvous has settled when every node knows its rank in the new generation. All nodes start at
the same time. The maximum is the number of nodes, so no node waits for late ones. The rows measure:

- settle: the time from the start until all nodes have their ranks. All nodes are threads of one
  process, so they share one interpreter lock. 1,000 threads wait for this lock most of the time.
  The nodes of `--apart` are divided among several processes, like nodes of a real job.
- idle: store operations and CPU per node, while a generation is active and nothing changes.
- rank 0 is lost: the time from the close of its connection until all other nodes have their ranks
  in the next generation. torch's handler does not detect this loss while no node waits to join, so
  there is nothing to compare with.

The nodes of elasticlib use one `elasticlib store`, and torch's c10d handlers use one TCPStore. Each
node has its own client. The server of TCPStore is not written in Python and does not need the
interpreter lock. All connections use loopback.
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

from results import Row, Samples, run_command_line
from timed_jobs import StoreServer

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

TIMEOUT_S = 60.0
# By default, each of the threads would ask for the interpreter lock 200 times per second, and 1,000
# threads would do nothing else.
THREAD_SWITCH_INTERVAL_S = 1.0


def time_all(calls: Sequence[Callable[[], object]]) -> float | None:
    """Run all calls at the same time, each in its own thread.

    Returns:
        The seconds until the last call has returned, or None if this takes longer than TIMEOUT_S.
    """
    pool = futures.ThreadPoolExecutor(len(calls))
    # All threads exist before the time starts.
    barrier = threading.Barrier(len(calls))
    for waiting in [pool.submit(barrier.wait) for _ in calls]:
        waiting.result(TIMEOUT_S)
    started_at = time.monotonic()
    pending = [pool.submit(call) for call in calls]
    try:
        for future in pending:
            future.result(max(0.0, TIMEOUT_S - (time.monotonic() - started_at)))
    except futures.TimeoutError:  # another class than the builtin one until Python 3.11
        return None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return time.monotonic() - started_at


OPERATIONS = frozenset({*Store.__abstractmethods__, "watch"})


class CountingTcpStore(TcpStore):
    """A store client that counts the operations of all its instances, by name."""

    counts: ClassVar[collections.Counter[str]] = collections.Counter()

    def __getattribute__(self, name: str) -> Any:
        if name in OPERATIONS:
            CountingTcpStore.counts[name] += 1
        return super().__getattribute__(name)


class Nodes:
    """The nodes of one process, with one rendezvous handler and one store client each.

    Args:
        count: The number of nodes of the job.
        port: The port of the `elasticlib store` on this machine.
        first: The number of the first node of this process.
        step: The distance to the number of the next node of this process.
    """

    def __init__(self, count: int, port: int, first: int = 0, step: int = 1) -> None:
        numbers = range(first, count, step)
        self.stores = [CountingTcpStore("127.0.0.1", port) for _ in numbers]
        settings = RendezvousSettings(1, count, last_call_timeout=TIMEOUT_S)
        timeouts = RendezvousTimeouts(join_timeout=TIMEOUT_S, close_timeout=5.0)
        self.handlers: list[RendezvousHandler] = [
            DynamicRendezvousHandler(
                store,
                "bench",
                Node(f"n{number}", f"n{number}", "127.0.0.1", 1),
                settings,
                timeouts=timeouts,
                open_bootstrap_store=FakeBootstrapStore,
            )
            for number, store in zip(numbers, self.stores, strict=True)
        ]

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *error: object) -> None:
        for handler in self.handlers:
            handler.shutdown()
        for store in self.stores:
            store.close()

    def settle(self) -> float | None:
        """Join the rendezvous with all nodes; return the seconds until all have their ranks."""
        return time_all([handler.next_rendezvous for handler in self.handlers])

    def idle_cost(self, duration_s: float) -> tuple[float, float]:
        """Return store operations and CPU seconds, per node and second, while nothing changes."""
        if not CountingTcpStore.counts:
            raise RuntimeError("no operation was counted while the nodes settled")
        CountingTcpStore.counts.clear()
        cpu = time.process_time()
        time.sleep(duration_s)
        share = duration_s * len(self.handlers)
        operations = sum(CountingTcpStore.counts.values())
        return operations / share, (time.process_time() - cpu) / share

    def lose_first(self) -> float | None:
        """Close the connection of the first node; return the seconds until the others settle."""

        def join_next(handler: RendezvousHandler) -> object:
            while handler.wait_for_change(TIMEOUT_S) is None:
                pass
            return handler.next_rendezvous()

        survivors = [partial(join_next, handler) for handler in self.handlers[1:]]
        return time_all([*survivors, self.stores[0].close])


def settle_in_one_process(count: int) -> float | None:
    """Return the seconds until this number of nodes has settled, or None after the timeout."""
    with StoreServer() as port, Nodes(count, port) as nodes:
        return nodes.settle()


def settle_in_processes(count: int, processes: int) -> float | None:
    """Return the same for nodes in several processes, which exist before the time starts."""
    spawn = multiprocessing.get_context("spawn")
    with StoreServer() as port:
        connections, workers = [], []
        for first in range(processes):
            connection, remote = spawn.Pipe()
            connections.append(connection)
            args = (count, port, first, processes, remote)
            workers.append(spawn.Process(target=run_nodes, args=args))
            workers[-1].start()
            remote.close()
        for connection in connections:
            connection.recv()  # the process is ready
        started_at = time.monotonic()
        for connection in connections:
            connection.send("settle")
        # All processes of a machine share one monotonic clock.
        settled = [connection.recv() for connection in connections]
        for connection, worker in zip(connections, workers, strict=True):
            connection.send("exit")
            worker.join(TIMEOUT_S)
        return None if None in settled else max(settled) - started_at


def run_nodes(count: int, port: int, first: int, step: int, connection: Connection) -> None:
    """Run the nodes of one process: send when they have settled, on request."""
    set_process_limits()
    with Nodes(count, port, first, step) as nodes:
        connection.send("ready")
        connection.recv()
        elapsed = nodes.settle()
        connection.send(None if elapsed is None else time.monotonic())
        connection.recv()


def set_process_limits() -> None:
    """Prepare this process for 1,000 threads and connections."""
    sys.setswitchinterval(THREAD_SWITCH_INTERVAL_S)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def settle_torch(count: int) -> float | None:
    """Return the seconds until this number of torch's c10d handlers has settled."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it warns about each lost connection
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
    elapsed = time_all([handler.next_rendezvous for handler in handlers])
    for handler in handlers:
        handler._stop_heartbeats()
    return elapsed


def take_samples(run: Callable[[], float | None], repeat: int) -> Samples:
    """Run a measurement several times. One that does not end in time is not tried again."""
    values: list[float] = []
    for _ in range(repeat):
        value = run()
        if value is None:
            return Samples("s", values, 1, f"not within {TIMEOUT_S:g} s")
        values.append(value)
    return Samples("s", values)


def settle_rows(counts: Sequence[int], torch_up_to: int, repeat: int) -> Iterator[Row]:
    """Yield the time to settle for each number of nodes in one process."""
    for count in counts:
        has_torch = count <= torch_up_to
        torch = take_samples(partial(settle_torch, count), repeat) if has_torch else None
        samples = take_samples(partial(settle_in_one_process, count), repeat)
        name, text = f"settle.{count}", f"{count} nodes settle"
        yield Row(name, text, samples, torch, "torch's c10d handler")


def idle_rows(count: int, duration_s: float, repeat: int) -> Iterator[Row]:
    """Yield the cost of idle nodes, and the time after the loss of rank 0."""
    operations, cpu, recoveries = [], [], []
    for _ in range(repeat):
        with StoreServer() as port, Nodes(count, port) as nodes:
            nodes.settle()
            operations_per_s, cpu_share = nodes.idle_cost(duration_s)
            operations.append(operations_per_s)
            cpu.append(cpu_share)
            if count > 1:
                recoveries.append(nodes.lose_first())
    values = [value for value in recoveries if value is not None]
    failed = len(recoveries) - len(values)
    recovery = Samples("s", values, failed, f"not within {TIMEOUT_S:g} s")
    torch = Samples("s", reason="never detected")
    idle = f"{count} idle nodes"
    per_second = Samples("a second", operations)
    yield Row(f"operations.{count}", f"{idle}: store operations per node", per_second)
    yield Row(f"cpu.{count}", f"{idle}: CPU per node", Samples("of a core", cpu))
    text = f"{count} nodes: loss of rank 0 until the next generation"
    yield Row(f"death.{count}", text, recovery, torch, "torch's c10d handler")


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
    """Measure rendezvous of several sizes, and yield their rows.

    Args:
        nodes: The numbers of nodes in one process, separated by commas.
        torch_up_to: The largest number of nodes that torch's handler is measured with.
        apart: The numbers of nodes in several processes.
        processes: The number of these processes.
        standing: The numbers of nodes whose idle cost and recovery are measured.
        idle: The duration of one measurement of idle nodes in seconds.
        repeat: The number of samples.
    """
    set_process_limits()
    yield from settle_rows(parse_numbers(nodes), torch_up_to, repeat)
    for count in parse_numbers(apart):
        samples = take_samples(partial(settle_in_processes, count, processes), repeat)
        yield Row(f"apart.{count}", f"{count} nodes in {processes} processes settle", samples)
    for count in parse_numbers(standing):
        yield from idle_rows(count, idle, repeat)


def parse_numbers(text: str) -> list[int]:
    """Return the numbers of a comma-separated list, which may be empty."""
    return [int(number) for number in text.split(",") if number]


if __name__ == "__main__":
    run_command_line(measure, __doc__)
