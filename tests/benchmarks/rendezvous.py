"""How long N nodes take to settle, in one process over loopback, beside torch's own handler.

    python tests/benchmarks/rendezvous.py [--nodes 2,16,64,128] [--torch-up-to 128]

All nodes start at once and the maximum is N, so no last call is waited for. Ours meet over one
TcpStoreServer, torch's over one TCPStore, each node with a client of its own.
"""

from __future__ import annotations

import argparse
import logging
import resource
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from elasticlib import (
    DynamicRendezvousHandler,
    Limits,
    Node,
    RendezvousHandler,
    TcpStore,
    TcpStoreServer,
    Timing,
)

BOUND = 60.0


class Listener:
    """The least that a bootstrap store can be."""

    def __init__(self, address: str) -> None:
        self._socket = socket.create_server((address, 0))
        self.port: int = self._socket.getsockname()[1]

    def close(self) -> None:
        self._socket.close()


def settle(meet: Sequence[Callable[[], object]]) -> float | None:
    """Seconds until all have met; None if not within the bound."""
    start = threading.Barrier(len(meet) + 1)

    def one(join: Callable[[], object]) -> object:
        start.wait()
        return join()

    pool = ThreadPoolExecutor(len(meet))
    futures = [pool.submit(one, join) for join in meet]
    start.wait()
    began = time.monotonic()
    try:
        for future in futures:
            future.result(max(0.0, BOUND - (time.monotonic() - began)))
    except TimeoutError:
        return None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return time.monotonic() - began


def ours(count: int) -> float | None:
    with TcpStoreServer("127.0.0.1", 0).start() as server:
        stores = [TcpStore(server.host, server.port) for _ in range(count)]
        limits, timing = Limits(count, count), Timing(join=BOUND, close=5.0)
        handlers: list[RendezvousHandler] = [
            DynamicRendezvousHandler(
                store,
                "bench",
                Node(f"n{i}", f"n{i}", "127.0.0.1", 1),
                limits,
                timing=timing,
                open_bootstrap=Listener,
            )
            for i, store in enumerate(stores)
        ]
        try:
            return settle([handler.next_rendezvous for handler in handlers])
        finally:
            for handler in handlers:
                handler.shutdown()
            for store in stores:
                store.close()


def torchs(count: int) -> float | None:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", default="2,16,64,128")
    parser.add_argument("--torch-up-to", type=int, default=128)
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(f"{'nodes':>6} {'elasticlib':>11} {'torch':>8}   seconds to settle")
    for count in map(int, args.nodes.split(",")):
        mine = ours(count)
        theirs = torchs(count) if count <= args.torch_up_to else None
        shown = [f"> {BOUND:g}" if t is None else f"{t:.2f}" for t in (mine, theirs)]
        if count > args.torch_up_to:
            shown[1] = "-"
        print(f"{count:6} {shown[0]:>11} {shown[1]:>8}", flush=True)


if __name__ == "__main__":
    main()
