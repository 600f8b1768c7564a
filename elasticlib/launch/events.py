"""torchrun's events, for `--event-log-handler console`: a line of JSON on stderr for each.

The shape is that of torch's `Event`, so what reads those reads these. Each is one of the node's own
events, shown in that shape; nothing that happens depends on whether it could be written.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable
from typing import Any

import attrs

from ..clock import monotonic
from ..observe.event import Event
from ..observe.journal import View
from ..rendezvous.interface import RendezvousHandler
from ..workers.spec import Entrypoint, Function

AGENT, WORKER = "AGENT", "WORKER"
STDERR = 2


def entry_name(entrypoint: Entrypoint) -> str:
    """What is run, as a person would call it."""
    if isinstance(entrypoint, Function):
        return getattr(entrypoint.target, "__qualname__", repr(entrypoint.target))
    return str(attrs.astuple(entrypoint, recurse=False)[0])


def to_stderr(line: str) -> None:
    """In one write, so that lines of several processes do not run into one another."""
    with contextlib.suppress(OSError):
        os.write(STDERR, line.encode())


class TorchsEvents(View):
    """Says what happens to the workers, and how the run ended.

    Of each worker: START, then SUCCEEDED, FAILED, or TERMINATED if this agent ended it. Of the
    agent: RENDEZVOUS with its duration, and in the end the `WorkerState` of its run.

    Args:
        entrypoint: what is run.
        role: whose workers they are.
        handler: of the job, whose id and backend are told.
    """

    def __init__(
        self,
        entrypoint: Entrypoint,
        role: str,
        handler: RendezvousHandler,
        write: Callable[[str], None] = to_stderr,
    ) -> None:
        self._entry_point = entry_name(entrypoint)
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
        return {
            "local_rank": local,
            "role_rank": first + local,
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
        said = {
            "name": f"torchelastic.worker.status.{state}",
            "source": source,
            "timestamp": int(event.wall * 1000),
            "metadata": {**metadata, **known},
        }
        self._write(json.dumps(said) + "\n")


def _as_torchs(error: str) -> str | None:
    """As what a worker leaves in its error.json, which torch puts here."""
    return json.dumps({"message": error}) if error else None
