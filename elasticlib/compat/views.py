"""What happens on a node, for those who read torch's events and metrics.

Each event of torch's shape is one of the node's own: a line of JSON on stderr, for
`--event-log-handler console`. The numbers that torch's agent puts into the group `torchelastic`
are put there by the same names, for programs that have configured a handler and launch from Python.
Nothing that happens depends on whether any of it was taken.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

from ..clock import monotonic
from ..observe.event import Event
from ..observe.journal import View
from ..rendezvous.interface import RendezvousHandler

log = logging.getLogger("elasticlib.launch")

AGENT, WORKER = "AGENT", "WORKER"
STDERR = 2
METRICS = "torch.distributed.elastic.metrics.api"
GROUP = "torchelastic"


def to_stderr(line: str) -> None:
    """In one write, so that lines of several processes do not run into one another."""
    with contextlib.suppress(OSError):
        os.write(STDERR, line.encode())


class TorchsEvents(View):
    """Of each worker: START, then SUCCEEDED, FAILED, or TERMINATED if this agent ended it. Of the
    agent: RENDEZVOUS with its duration, and in the end the `WorkerState` of its run.

    Args:
        name: of what is run.
        role: whose workers they are.
        handler: of the job, for its id and backend.
    """

    def __init__(
        self,
        name: str,
        role: str,
        handler: RendezvousHandler,
        write: Callable[[str], None] = to_stderr,
    ) -> None:
        self._entry_point = name
        self._role = role
        self._handler = handler
        self._write = write
        self._began = monotonic()
        self._group: Event | None = None
        self._pids: dict[int, int | None] = {}

    def hear(self, event: Event) -> None:
        if event.kind == "generation.began":
            self._group = event
            waited = (event.seconds("seconds") or 0.0) * 1000
            self._record(event, AGENT, "RENDEZVOUS", {}, duration_ms=waited)
        elif event.kind == "worker.began":
            # Others than processes of this machine are named otherwise.
            pid = event.text("name").removeprefix("pid ")
            self._pids[event.rank or 0] = int(pid) if pid.isdigit() else None
            self._record(event, WORKER, "START", self._place(event))
        elif event.kind == "worker.ended":
            stopped = "TERMINATED" if event.says("stopped") else "FAILED"
            state = "SUCCEEDED" if event.says("ok") else stopped
            error = _as_torchs(event.text("error"))
            self._record(event, WORKER, state, self._place(event), raw_error=error)
        elif event.kind == "run.ended":
            state = event.text("state")
            error = _as_torchs("" if state == "succeeded" else event.text("reason"))
            self._record(event, AGENT, state.upper(), {}, raw_error=error)

    def _place(self, event: Event) -> dict[str, Any]:
        """Whose event it is."""
        local = event.count("local_rank") or 0
        first, size = (0, 0) if self._group is None else self._group.pair("role") or (0, 0)
        ranks = (0, 0) if self._group is None else self._group.pair("ranks") or (0, 0)
        return {
            "local_rank": local,
            "role_rank": first + (event.rank or 0) - ranks[0],
            "role_world_size": size,
            "exit_code": event.facts.get("code"),
            "worker_pid": self._pids.get(event.rank or 0),
        }

    def _record(
        self, event: Event, source: str, state: str, place: dict[str, Any], **known: Any
    ) -> None:
        """place: what is known of the worker, if it is one's."""
        group, rank = self._group, event.rank
        nodes = None if group is None else group.count("nodes")
        more = {"group_world_size": nodes, "entry_point": self._entry_point}
        metadata = {
            "run_id": self._handler.get_run_id(),
            "global_rank": rank,
            "group_rank": None if group is None else group.count("node_rank"),
            "worker_id": None if rank is None else str(place["worker_pid"]),
            "role": self._role,
            "hostname": socket.gethostname(),
            "state": state,
            "total_run_time": int(event.at - self._began),
            "rdzv_backend": self._handler.get_backend(),
            "raw_error": None,
            "metadata": json.dumps({**more, **place}),
            "agent_restarts": 0 if group is None else group.count("restarts"),
            "duration_ms": None,
        }
        record = {
            "name": f"torchelastic.worker.status.{state}",
            "source": source,
            "timestamp": int(event.wall * 1000),
            "metadata": {**metadata, **known},
        }
        self._write(json.dumps(record) + "\n")


def _as_torchs(error: str) -> str | None:
    """As what a worker leaves in its error.json, which torch puts here."""
    return json.dumps({"message": error}) if error else None


def _is_taken() -> bool:
    """Whether the program has configured a handler, for which it has imported torch's module."""
    if METRICS not in sys.modules:
        return False
    from torch.distributed.elastic.metrics.api import NullMetricHandler, getStream

    return not isinstance(getStream(GROUP).handler, NullMetricHandler)


class PutMetrics(View):
    """role: whose workers they are."""

    def __init__(self, role: str) -> None:
        self._role = role
        self._restarts = self._left = self._most = 0

    @property
    def prompt(self) -> bool:
        """A program's own handler may wait; where there is none, nothing does."""
        return not _is_taken()

    def hear(self, event: Event) -> None:
        if event.kind == "generation.began":
            self._restarts = event.count("restarts") or 0
            self._most = event.count("max_restarts") or 0
            self._left = max(0, self._most - self._restarts)
            self._put("remaining_restarts", self._left)
        elif event.kind == "run.ended":
            state = event.text("state")
            how = "failed" if state == "failed" else "success"
            retries = "with" if self._restarts else "no"
            good = int(100.0 - 100.0 * (self._left + 1) / (self._most + 1))
            self._put("flakiness", 100 if how == "failed" else good)
            self._put("run_total", 1)
            self._put(state, 1)
            for end in itertools.product(("success", "failed"), ("with", "no")):
                self._put("run_{}_{}_retries".format(*end), int(end == (how, retries)))

    def _put(self, name: str, value: int) -> None:
        if not _is_taken():
            return
        from torch.distributed.elastic.metrics.api import put_metric

        try:
            put_metric(f"workers.{self._role}.{name}", value, GROUP)
        except Exception:
            # A program's own handler: what it does wrong is no end of its job.
            log.exception("the metric %s is not taken", name)
