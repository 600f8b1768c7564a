"""Many nodes in several processes over one real store.

    python crowd.py PORT NODES FIRST STEP

runs the nodes FIRST, FIRST + STEP, ... below NODES. It reads commands from its standard input:
`join`; `change LEAVE JOIN`, with the numbers of nodes that leave and join before the next
generation; and `end`. For each command it prints one line, a JSON list of the results of its nodes.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from elasticlib.rendezvous.handler import DynamicRendezvousHandler
from elasticlib.rendezvous.membership import Node, RendezvousSettings, RendezvousTimeouts
from elasticlib.stores.tcp_client import TcpStore
from elasticlib.testing.rendezvous_cluster import FakeBootstrapStore

BOUND = 900.0
SWITCH_SECONDS = 0.1
"""Threads by the thousand would else ask for the interpreter's lock, and get nothing done."""
# All of these nodes share the cores that the store runs on, where real ones have their own.
TIMING = RendezvousTimeouts(
    join_timeout=BOUND, lease_ttl=60.0, keep_alive_interval=15.0, close_timeout=60.0
)

Told = list[Any]


class Member:
    """A node and its current generation: number, rank, number of nodes, master and reason."""

    def __init__(self, port: int, name: str, limits: RendezvousSettings) -> None:
        self._store = TcpStore("127.0.0.1", port, timeout=BOUND)
        self.handler = DynamicRendezvousHandler(
            self._store,
            "crowd",
            Node(id=f"{name}-1", host=name, address="127.0.0.1", slots=1),
            limits,
            timeouts=TIMING,
            open_bootstrap_store=FakeBootstrapStore,
        )

    def join(self) -> Told:
        info = self.handler.next_rendezvous()
        return [info.generation, info.rank, info.world_size, info.bootstrap_store_info.master_port]

    def follow(self) -> Told:
        self._change()
        return self.join()

    def end(self) -> Told:
        self.handler.report_success()
        return [self._change()]

    def leave(self) -> Told:
        freed = self.handler.shutdown()
        self._store.close()
        return [freed]

    def _change(self) -> str:
        change = self.handler.wait_for_change(BOUND)
        assert change is not None
        return change.kind.value


class Part:
    """Some of the nodes, in this process."""

    def __init__(self, port: int, nodes: int, first: int, step: int) -> None:
        self._make = partial(
            Member, port, limits=RendezvousSettings(1, nodes, last_call_timeout=BOUND)
        )
        self._members = [self._make(f"n{number}") for number in range(first, nodes, step)]
        self._first = first

    def do(self, order: str, *counts: int) -> list[Told]:
        if order != "change":
            return self._all([getattr(member, order) for member in self._members])
        leave, come = counts
        gone, stay = self._members[:leave], self._members[leave:]
        new = [self._make(f"new{self._first}.{number}") for number in range(come)]
        self._members = [*stay, *new]
        acts = [*(m.leave for m in gone), *(m.follow for m in stay), *(m.join for m in new)]
        return self._all(acts)[leave:]

    def _all(self, acts: Sequence[Callable[[], Told]]) -> list[Told]:
        # Each in a thread: none returns before the others have done what it waits for.
        with ThreadPoolExecutor(len(acts)) as pool:
            return [future.result(BOUND) for future in [pool.submit(act) for act in acts]]


class Crowd:
    """All of the nodes, as the processes that hold them."""

    def __init__(self, parts: list[subprocess.Popen[str]]) -> None:
        self._parts = parts

    def ask(self, first: str, others: str) -> tuple[list[Told], float]:
        """Send a command to the first process and one to the others.

        Returns:
            The results of all nodes, and the duration in seconds.
        """
        began = time.monotonic()
        for number, part in enumerate(self._parts):
            assert part.stdin is not None
            part.stdin.write((others if number else first) + "\n")
            part.stdin.flush()
        told = [one for part in self._parts for one in json.loads(self._line(part))]
        return told, time.monotonic() - began

    def _line(self, part: subprocess.Popen[str]) -> str:
        assert part.stdout is not None
        line = part.stdout.readline()
        assert line, f"a process of the crowd has ended: {part.wait(BOUND)}"
        return line


@contextmanager
def crowd(port: int, nodes: int, processes: int) -> Iterator[Crowd]:
    """Start the processes, and stop them at the end of the block."""
    with ExitStack() as stack:
        parts = []
        for first in range(processes):
            command = [sys.executable, __file__, *map(str, (port, nodes, first, processes))]
            part = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=Path(__file__).parent,
            )
            stack.enter_context(part)
            stack.callback(part.kill)
            parts.append(part)
        for part in parts:
            assert part.stdout is not None
            assert part.stdout.readline() == "ready\n"
        yield Crowd(parts)


def main() -> None:
    sys.setswitchinterval(SWITCH_SECONDS)
    threading.stack_size(512 * 1024)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    part = Part(*map(int, sys.argv[1:]))
    print("ready", flush=True)
    for line in sys.stdin:
        order, *counts = line.split()
        print(json.dumps(part.do(order, *map(int, counts))), flush=True)


if __name__ == "__main__":
    main()
