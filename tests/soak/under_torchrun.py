"""The same campaign under torchrun, as far as it gets: how many faults until the job is dead.

The script is the same, its checkpoints too; snapshots need an agent of ours, and are not made.
torchrun meets at the c10d store of its first node, and gets TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1,
without which no restart of it works. It is given the kinds in `GIVEN`; a job that is dead, or
makes no step for a minute, is started again from its checkpoint, and goes on with the next fault.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from .board import Board, View
from .campaign import (
    EXCEPTION,
    EXIT,
    FIRST_NODES,
    MOST_NODES,
    SEGFAULT,
    SLOW,
    WHERE,
    Campaign,
    Fault,
)
from .nodes import SCRIPT, SIZES, TESTS, SoakFailed, until
from .phases import quantile
from .proof import TAG, processes

GIVEN = ("kill", "exception", "exit", "segfault", "slow", "agent", "join", "drain")
STUCK = 60.0
LIVES = 100
BETWEEN = 15
"""Steps of a generation before the next fault."""
# Whole numbers are all that it takes.
_CONF = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1"
_ASKED = {"exception": EXCEPTION, "exit": EXIT, "segfault": SEGFAULT, "slow": SLOW}


@attrs.define
class Life:
    """One start of the job. faults: that it survived; end: what it was after the last."""

    faults: int = 0
    end: str = "it was alive at the end"


@attrs.define
class Told:
    lives: list[Life] = attrs.field(factory=list)
    seconds: dict[str, list[float]] = attrs.field(factory=dict)

    def as_json(self) -> dict[str, Any]:
        every = [one for found in self.seconds.values() for one in found]
        by_kind = {kind: _quantiles(found) for kind, found in self.seconds.items()}
        lives = [attrs.asdict(life) for life in self.lives]
        return {"lives": lives, "by_kind": by_kind, "all": _quantiles(every)}


def _quantiles(seconds: list[float]) -> dict[str, Any]:
    found = {name: round(quantile(seconds, q), 3) for name, q in (("p50", 0.5), ("p99", 0.99))}
    return {"count": len(seconds), **found}


class Torchrun:
    """The nodes of one life, by number."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self.nodes: dict[int, subprocess.Popen[bytes]] = {}
        self._started = 0

    def come(self) -> None:
        self._started += 1
        size = SIZES[(self._started - 1) % len(SIZES)]
        place = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self._port}")
        flags = ("--nnodes", f"1:{MOST_NODES}", "--nproc-per-node", str(size), *place)
        flags += ("--rdzv-id", self._name, "--rdzv-conf", _CONF, "--max-restarts", "1000000")
        here = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "SOAK_NODE": str(self._started)}
        here["PYTHONPATH"] = os.pathsep.join(filter(None, (TESTS, os.environ.get("PYTHONPATH"))))
        command = (sys.executable, "-m", "torch.distributed.run", *flags)
        with (self._folder / "torchrun.log").open("ab") as log:
            self.nodes[self._started] = subprocess.Popen(
                (*command, SCRIPT, str(self._folder), str(10**9)),
                env={**os.environ, **here},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def lose(self, number: int, view: View) -> None:
        """A node with all that runs on it."""
        node = self.nodes.pop(number)
        node.kill()
        for rank in view.ranks:
            if rank.node == number:
                _kill(rank.pid)
        node.wait(10.0)

    @property
    def dead(self) -> bool:
        return all(node.poll() is not None for node in self.nodes.values())

    def end(self) -> None:
        for node in self.nodes.values():
            node.kill()
            node.wait(10.0)
        for pid in processes(os.environ[TAG]):
            _kill(pid)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class Trial:
    """A campaign on one life of the job after another."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder, self._say = folder, say
        (folder / "trace").mkdir(exist_ok=True)
        self._board = Board(folder / "board", create=True)
        self.told = Told()

    def play(self, campaign: Campaign, seconds: float) -> Told:
        faults = [fault for fault in campaign.faults if fault.kind in GIVEN]
        over = time.monotonic() + seconds
        while faults and time.monotonic() < over and len(self.told.lives) < LIVES:
            job, life = Torchrun(self._folder, f"soak-{len(self.told.lives)}"), Life()
            self.told.lives.append(life)
            for _ in range(FIRST_NODES):
                job.come()
            try:
                self._live(job, life, faults, over)
            except SoakFailed as error:
                life.end = str(error)
                self._say(f"life {len(self.told.lives)}: {life.faults} faults, then {life.end}")
            finally:
                job.end()
        return self.told

    def _live(self, job: Torchrun, life: Life, faults: list[Fault], over: float) -> None:
        view = self._training(job, 0, "it was started")
        while faults and time.monotonic() < over:
            view = self._training(job, view.generation - 1, "nothing", BETWEEN)
            fault = faults.pop(0)
            began = time.monotonic()
            shown = self._strike(job, fault, view)
            later = view.generation if fault.kind != "slow" else view.generation - 1
            view = self._training(job, later, fault.kind)
            life.faults += 1
            took = time.monotonic() - began
            if fault.kind != "slow":  # which needs no recovery
                self.told.seconds.setdefault(fault.kind, []).append(took)
            self._say(f"{fault.kind:9} {took:6.2f} s  {shown}")

    def _training(self, job: Torchrun, after: int, what: str, steps: int = 1) -> View:
        """Waits for a whole world of a generation past `after` that has made so many steps."""

        def look() -> View | None:
            if job.dead:
                raise SoakFailed(f"dead after {what}")
            view = self._board.view()
            if view is None or view.generation <= after:
                return None
            made = view.done and min(rank.steps for rank in view.ranks) > steps
            return view if made else None

        began = time.monotonic()
        try:
            view = until(f"{what}", look, STUCK)
        except SoakFailed:
            if time.monotonic() - began < STUCK:
                raise
            raise SoakFailed(f"stuck for {STUCK:g} s after {what}") from None
        for path in (self._folder / "trace").iterdir():
            if int(path.name.split(".")[0]) < view.generation:
                path.unlink()
        return view

    def _strike(self, job: Torchrun, fault: Fault, view: View) -> str:
        number = fault.which % len(view.ranks)
        if fault.kind == "kill":
            _kill(view.ranks[number].pid)
        elif fault.kind in _ASKED:
            where = fault.parameters.get("where", WHERE[0])
            seconds = int(1000 * fault.parameters.get("seconds", 0))
            argument = seconds or fault.parameters.get("code", 0)
            place = WHERE.index(where)
            self._board.ask(view.generation, number, _ASKED[fault.kind], place, argument)
        elif fault.kind == "join":
            job.come()
        else:
            victim = sorted(job.nodes)[fault.which % len(job.nodes)]
            if fault.kind == "agent":
                job.lose(victim, view)
                job.come()
            else:
                job.nodes.pop(victim).terminate()
            host = " (its store's host)" if victim == 1 else ""
            return f"node {victim}{host}"
        return f"rank {number}"
