"""Jobs of stock torchrun that meet through our entry points, and where their workers stand."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from jobs import BOUND, PROGRAMS, Job, Node, alive, until

ALLREDUCE = str(PROGRAMS / "allreduce.py")
QUICK = "keep_alive_interval=0.3,keep_alive_max_attempt=4,last_call_timeout=0.5"


def need_our_entry_points() -> None:
    """Fails, saying what to do, where elasticlib is installed as it was before it had them."""
    found = {point.name for point in entry_points(group="torchrun.handlers")}
    missing = {"el-tcp", "el-file", "el-etcd"} - found
    if missing:
        pytest.fail(
            f"the installed elasticlib has no entry points {', '.join(sorted(missing))} in "
            "torchrun.handlers: its setup.cfg has, so install it again (make does)"
        )


def torchrun(job: Job, name: str, *flags: str, worker: Iterable[str] = (), **extra: str) -> Node:
    """One node; its workers reduce until the job's `finish`, unless `worker` says otherwise."""
    logs = ("--log-dir", str(job.folder / f"logs-{name}"))
    script = tuple(worker) or (ALLREDUCE, str(job.folder))
    command = (sys.executable, "-m", "torch.distributed.run", *logs, *flags, *script)
    return job.start(name, *command, **extra)


def place_flags(backend: str, endpoint: str | Path, nodes: str, *conf: str) -> tuple[str, ...]:
    place = ("--rdzv-backend", backend, "--rdzv-endpoint", str(endpoint), "--rdzv-id", "job")
    return ("--nnodes", nodes, *place, "--rdzv-conf", ",".join((QUICK, *conf)))


def world(job: Job, size: int, but: Iterable[int] = ()) -> dict[int, int]:
    """Waits for a whole world of living workers, none of them among `but`; pids by rank."""
    old = frozenset(but)

    def look() -> dict[int, int]:
        said = [json.loads(file.read_text()) for file in job.folder.glob("place.*.json")]
        here: list[dict[str, Any]] = [s for s in said if s["pid"] not in old and alive(s["pid"])]
        if {s["WORLD_SIZE"] for s in here} != {str(size)} or len(here) != size:
            return {}
        found = {int(s["RANK"]): int(s["pid"]) for s in here}
        return found if sorted(found) == list(range(size)) else {}

    try:
        return until(f"a new world of {size}", look, BOUND)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{job.logs}") from None
