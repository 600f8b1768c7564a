"""Time of `elasticlib status`: what a job of 10,000 nodes costs an operator.

    python tests/bench/status.py [--nodes 100,1000,10000] [--runs 5]

The time is that of a whole process, from its start until its exit, in an environment where the
files are in memory. One TCP store on loopback, in a process of its own, holds the records of the
nodes, their summaries and their details, as their agents write them. Each node has eight workers.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

from results import Row, Samples, run_command_line
from timed_jobs import StoreServer

from elasticlib import TcpStore
from elasticlib.observe.aggregate import NodeStatus, WorkerStatus
from elasticlib.observe.history import JobState
from elasticlib.observe.summary import (
    NodeReport,
    StatusKeys,
    detail_of,
    encode_detail,
    encode_summary,
    summarize,
)
from elasticlib.rendezvous.membership import (
    Membership,
    NodeRecord,
    RendezvousSettings,
    form_generation,
)
from elasticlib.rendezvous.rank_assignment import shard_members
from elasticlib.rendezvous.store_layout import StoreKeys, encode, encode_shard, encode_state

TTL_S = 3600.0
REASON = "gpu-node-00007.cluster.example joined; the job has grown from 9,999 to 10,000 nodes"


def write_job(store: TcpStore, count: int) -> None:
    """Write the keys of a job whose nodes are alive and train."""
    keys, statuses = StoreKeys("job"), StatusKeys("job")
    nodes = [
        NodeRecord(
            f"gpu-node-{n:05}.cluster.example-{n + 1000}-{n:08x}",
            f"gpu-node-{n:05}.cluster.example",
            f"10.0.{n // 250}.{n % 250}",
            slots=8,
            topology=f"rack-{n // 16}",
        )
        for n in range(count)
    ]
    waiting = Membership(RendezvousSettings(1, count), "run")
    membership = form_generation(waiting, nodes, charged=False, nonce="m")
    for number, rows in shard_members(membership).items():
        store.set(keys.shard(membership.membership_id, number), encode_shard(rows))
    for rank, node in enumerate(nodes):
        store.set(keys.node(node.id), encode(node), ttl=TTL_S)
        workers = tuple(
            WorkerStatus(8 * rank + n, n, f"pid {5000 + n}", True, 123456, 1.25, 0.75, 123000)
            for n in range(8)
        )
        status = NodeStatus(
            "job", node.id, state=JobState.RUNNING, generation=1, reason=REASON, workers=workers
        )
        report = NodeReport(status, 12345.678, 23456.789, 0.5)
        summary = encode_summary(summarize(report, time.time()))
        store.set(f"{statuses.details}{node.id}", encode_detail(detail_of(status)), ttl=TTL_S)
        store.set(f"{statuses.summaries}{node.id}", summary, ttl=TTL_S)
    store.set(keys.job_name, b"")
    store.set(keys.state, encode_state(membership))


def time_status(name: str) -> float:
    """Return the seconds that `elasticlib status NAME` takes."""
    command = [sys.executable, "-m", "elasticlib.launch.cli", "status", "--timeout", "30", name]
    started_at = time.monotonic()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True, timeout=120)
    return time.monotonic() - started_at


def measure(*, nodes: str = "100,1000,10000", runs: int = 5) -> Iterator[Row]:
    """Measure jobs of these sizes, and yield one row for each.

    Args:
        nodes: The numbers of nodes, separated by commas.
        runs: The number of samples.
    """
    for count in map(int, nodes.split(",")):
        with StoreServer() as port, TcpStore("127.0.0.1", port, timeout=60.0) as store:
            write_job(store, count)
            name = f"tcp://127.0.0.1:{port}/job"
            time_status(name)
            samples = Samples("s", [time_status(name) for _ in range(runs)])
        yield Row(f"status{count}", f"`elasticlib status`, {count:,} nodes", samples)


if __name__ == "__main__":
    run_command_line(measure, __doc__)
