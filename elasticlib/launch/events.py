"""torchrun's events, for `--event-log-handler console`: a line of JSON on stderr for each.

The shape is that of torch's `Event`, so what reads those reads these. Each is built from what the
agent knows anyway, and nothing that happens depends on whether it could be written.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
from collections.abc import Callable
from typing import Any

import attrs

from ..agent.interface import RunResult
from ..agent.loop import ElasticAgent
from ..clock import monotonic, wall
from ..errors import describe, present
from ..rendezvous.interface import RendezvousHandler
from ..threads import Aside
from ..workers.exit import WorkerExit
from ..workers.interface import Workers
from ..workers.spec import Entrypoint, Function, Worker, WorkerGroup, WorkerSpec, WorkerState

log = logging.getLogger("elasticlib.launch")

AGENT, WORKER = "AGENT", "WORKER"
STDERR = 2
CLOSE_SECONDS = 2.0


def entry_name(entrypoint: Entrypoint) -> str:
    """What is run, as a person would call it."""
    if isinstance(entrypoint, Function):
        return getattr(entrypoint.target, "__qualname__", repr(entrypoint.target))
    return str(attrs.astuple(entrypoint, recurse=False)[0])


def to_stderr(line: str) -> None:
    """In one write, so that lines of several processes do not run into one another."""
    with contextlib.suppress(OSError):
        os.write(STDERR, line.encode())


class RecordingAgent(ElasticAgent):
    """Says what happens to the workers, and how the run ended.

    Of each worker: START, then SUCCEEDED, FAILED, or TERMINATED if this agent ended it. Of the
    agent: RENDEZVOUS with its duration, and in the end the `WorkerState` of its run.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        handler: RendezvousHandler,
        workers: Workers,
        *,
        write: Callable[[str], None] = to_stderr,
        **rest: Any,
    ) -> None:
        super().__init__(spec, handler, workers, **rest)
        self._events = _Events(spec, handler, write)

    def run(self) -> RunResult:
        result = super().run()
        error = None if result.state is WorkerState.SUCCEEDED else result.reason
        self._events.record(
            AGENT, result.state.name, self.get_worker_group(), {}, raw_error=_as_torchs(error)
        )
        self._events.close()
        return result

    def start(self, group: WorkerGroup, ended: Callable[[int], None]) -> None:
        self._events.met(group)
        super().start(group, ended)
        named = self.workers.running()
        for worker in group.workers:
            # Others than processes of this machine are named otherwise.
            pid = named.get(worker.local_rank, "").removeprefix("pid ")
            self._events.record(WORKER, "START", group, _place(worker, pid=_number(pid)))

    def collect(self, local_rank: int) -> WorkerExit:
        found = super().collect(local_rank)
        group = present(self.get_worker_group(), "the group of a worker that has ended")
        state = "SUCCEEDED" if found.ok else "TERMINATED" if found.stopped else "FAILED"
        place = _place(group.worker(local_rank), pid=found.pid, code=found.returncode)
        error = None if found.ok else found.message or found.how
        self._events.record(WORKER, state, group, place, raw_error=_as_torchs(error))
        self._events.parted()
        return found


class _Events:
    """What all events of a run have in common, and how long it has been running."""

    def __init__(
        self, spec: WorkerSpec, handler: RendezvousHandler, write: Callable[[str], None]
    ) -> None:
        self._spec = spec
        self._handler = handler
        self._write = write
        # Who reads them may stand still, and the agent does not.
        self._aside = Aside("agent-events", _told_no_more)
        self._began = self._parted = monotonic()

    def parted(self) -> None:
        """The time from here to the next meeting is spent on it."""
        self._parted = monotonic()

    def met(self, group: WorkerGroup) -> None:
        waited = (monotonic() - self._parted) * 1000
        self.record(AGENT, "RENDEZVOUS", group, {}, duration_ms=waited)

    def record(
        self,
        source: str,
        state: str,
        group: WorkerGroup | None,
        place: dict[str, Any],
        **known: Any,
    ) -> None:
        """place: what is known of the worker, if it is one's."""
        at, running = wall(), monotonic() - self._began
        self._aside.call(
            lambda: self._write(self._line((source, state), group, place, known, at, running))
        )

    def close(self) -> None:
        """All has been written, unless that takes too long."""
        if not self._aside.close(CLOSE_SECONDS):
            log.warning("torch's events are not all written within %g s", CLOSE_SECONDS)

    def _line(
        self,
        what: tuple[str, str],
        group: WorkerGroup | None,
        place: dict[str, Any],
        known: dict[str, Any],
        *now: float,
    ) -> str:
        """now: seconds since 1970, and since the run began."""
        source, state = what
        nodes = None if group is None else group.group_world_size
        more = {"group_world_size": nodes, "entry_point": entry_name(self._spec.entrypoint)}
        rank = place.pop("global_rank", None)
        metadata = {
            "run_id": self._handler.get_run_id(),
            "global_rank": rank,
            "group_rank": None if group is None else group.group_rank,
            "worker_id": None if rank is None else str(place.get("worker_pid")),
            "role": self._spec.role,
            "hostname": socket.gethostname(),
            "state": state,
            "total_run_time": int(now[1]),
            "rdzv_backend": self._handler.get_backend(),
            "raw_error": None,
            "metadata": json.dumps({**more, **place}),
            "agent_restarts": 0 if group is None else group.restarts,
            "duration_ms": None,
        }
        said = {
            "name": f"torchelastic.worker.status.{state}",
            "source": source,
            "timestamp": int(now[0] * 1000),
            "metadata": {**metadata, **known},
        }
        return json.dumps(said) + "\n"


def _told_no_more(error: BaseException) -> None:
    log.warning("torch's events are not written any more: %s", describe(error), exc_info=error)


def _place(worker: Worker, *, pid: int | None, code: int | None = None) -> dict[str, Any]:
    return {
        "global_rank": worker.rank,
        "local_rank": worker.local_rank,
        "role_rank": worker.role_rank,
        "role_world_size": worker.role_world_size,
        "exit_code": code,
        "worker_pid": pid,
    }


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _as_torchs(error: str | None) -> str | None:
    """As what a worker leaves in its error.json, which torch puts here."""
    return None if error is None else json.dumps({"message": error})
