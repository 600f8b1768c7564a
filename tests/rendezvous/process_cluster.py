"""Thousands of nodes in several processes over one TCP store.

    python process_cluster.py PORT NODES FIRST STEP

runs the nodes FIRST, FIRST + STEP, ... below NODES. Each node is a `DynamicRendezvousHandler` with
its own connection to the store. The process reads commands from its standard input: `join`; `change
LEAVE JOIN`, with the numbers of nodes that leave and join before the next generation; and `finish`.
For each command it prints one line, a JSON list with the result of each of its nodes.
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

from elasticlib.options import RendezvousSettings, RendezvousTimeouts
from elasticlib.rendezvous.handler import DynamicRendezvousHandler
from elasticlib.rendezvous.interface import Report, ReportKind
from elasticlib.rendezvous.membership import Node
from elasticlib.stores.tcp_client import TcpStore
from elasticlib.testing.rendezvous_cluster import FakeBootstrapStore

TIMEOUT_S = 900.0
# With the default of 5 ms, thousands of threads spend most of the time on switches of the GIL.
SWITCH_INTERVAL_S = 0.1
# The intervals are long, because all nodes share the cores of one machine with the store.
TIMEOUTS = RendezvousTimeouts(
    join_timeout=TIMEOUT_S, lease_ttl=60.0, keep_alive_interval=15.0, close_timeout=60.0
)

# After a join: generation, rank, number of nodes, and master port. Otherwise one value.
NodeResult = list[Any]


class ClusterNode:
    """A node. Each public method blocks until the other nodes have made their calls."""

    def __init__(self, port: int, name: str, settings: RendezvousSettings) -> None:
        self._store = TcpStore("127.0.0.1", port, timeout=TIMEOUT_S)
        self.handler = DynamicRendezvousHandler(
            self._store,
            "large",
            Node(id=f"{name}-1", host=name, address="127.0.0.1", slots=1),
            settings,
            timeouts=TIMEOUTS,
            open_bootstrap_store=FakeBootstrapStore,
        )

    def join(self) -> NodeResult:
        info = self.handler.next_rendezvous()
        return [info.generation, info.rank, info.world_size, info.bootstrap_store_info.master_port]

    def rejoin(self) -> NodeResult:
        """Wait for the end of the current generation, and join the next one."""
        self._wait_for_change()
        return self.join()

    def finish(self) -> NodeResult:
        """Report success, and return the kind of the next change."""
        self.handler.report(Report(ReportKind.SUCCESS))
        return [self._wait_for_change()]

    def leave(self) -> NodeResult:
        has_left = self.handler.shutdown()
        self._store.close()
        return [has_left]

    def _wait_for_change(self) -> str:
        change = self.handler.wait_for_change(TIMEOUT_S)
        assert change is not None
        return change.kind.value


class NodeGroup:
    """The nodes of this process."""

    def __init__(self, port: int, num_nodes: int, first: int, step: int) -> None:
        self._create_node = partial(
            ClusterNode,
            port,
            settings=RendezvousSettings(1, num_nodes, last_call_timeout=TIMEOUT_S),
        )
        self._nodes = [self._create_node(f"n{number}") for number in range(first, num_nodes, step)]
        self._first = first

    def execute(self, command: str, *counts: int) -> list[NodeResult]:
        """Execute a command, and return the results of the nodes that remain."""
        if command == "join":
            return self._call_all([node.join for node in self._nodes])
        if command == "finish":
            return self._call_all([node.finish for node in self._nodes])
        num_leaving, num_joining = counts
        leaving, staying = self._nodes[:num_leaving], self._nodes[num_leaving:]
        joining = [self._create_node(f"new{self._first}.{n}") for n in range(num_joining)]
        self._nodes = [*staying, *joining]
        calls = [node.leave for node in leaving]
        calls += [node.rejoin for node in staying]
        calls += [node.join for node in joining]
        return self._call_all(calls)[num_leaving:]

    def _call_all(self, calls: Sequence[Callable[[], NodeResult]]) -> list[NodeResult]:
        with ThreadPoolExecutor(len(calls)) as pool:
            return [future.result(TIMEOUT_S) for future in [pool.submit(call) for call in calls]]


class ProcessCluster:
    """The processes that run the nodes."""

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self._processes = processes

    def send(self, first: str, others: str) -> tuple[list[NodeResult], float]:
        """Send a command to the first process and one to the others.

        Returns:
            The results of all nodes, and the duration in seconds.
        """
        started_at = time.monotonic()
        for number, process in enumerate(self._processes):
            assert process.stdin is not None
            process.stdin.write((others if number else first) + "\n")
            process.stdin.flush()
        results = [result for process in self._processes for result in self._read(process)]
        return results, time.monotonic() - started_at

    def _read(self, process: subprocess.Popen[str]) -> list[NodeResult]:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"a process of the cluster has exited: {process.wait(TIMEOUT_S)}"
        results: list[NodeResult] = json.loads(line)
        return results


@contextmanager
def start_cluster(port: int, num_nodes: int, num_processes: int) -> Iterator[ProcessCluster]:
    """Start the processes, and kill them at the end of the block."""
    with ExitStack() as stack:
        processes = []
        for first in range(num_processes):
            arguments = map(str, (port, num_nodes, first, num_processes))
            process = subprocess.Popen(
                [sys.executable, __file__, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=Path(__file__).parent,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        yield ProcessCluster(processes)


def main() -> None:
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    threading.stack_size(512 * 1024)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    group = NodeGroup(*map(int, sys.argv[1:]))
    print("ready", flush=True)
    for line in sys.stdin:
        command, *counts = line.split()
        print(json.dumps(group.execute(command, *map(int, counts))), flush=True)


if __name__ == "__main__":
    main()
