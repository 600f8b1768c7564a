"""How each kind of fault is done to the job, and how it is known to have taken effect.

Each returns once it has: when it struck, after which generation the job must go on in another
one, and what showed it. What showed nothing raises NoEffect.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import attrs
from jobs import is_alive

from elasticlib.observe.event import Event

from .board import Rank, View
from .campaign import EXCEPTION, EXIT, SEGFAULT, SLOW, WHERE, Fault
from .nodes import LEASE
from .stage import Stage, now


class NoEffect(Exception):
    """The fault was injected, and did nothing that could be seen."""


@attrs.frozen
class Effect:
    """at: when it struck, on the monotonic clock; 0 for what begins when the training pauses.
    restarts: whether another generation must follow. damaged: a step whose checkpoint is. step:
    in which it struck, where that is known."""

    at: float
    shown: str
    restarts: bool = True
    damaged: int = 0
    step: int = 0


def strike(stage: Stage, fault: Fault, view: View) -> Effect:
    """Do it now, to a job that is whole.

    Raises:
        NoEffect: nothing came of it. AssertionError: what should follow did not, in time.
    """
    return _DOERS[fault.kind](stage, fault, view)


def _victim(fault: Fault, view: View) -> tuple[int, Rank]:
    number = fault.which % len(view.ranks)
    return number, view.ranks[number]


# -- workers --------------------------------------------------------------------------------------


def _ended(stage: Stage, view: View, rank: int, code: int, since: float) -> Event:
    """Waits for the node's own word that this worker ended so since then, by itself."""

    def wanted(event: Event) -> bool:
        of_it = event.kind == "worker.exited" and event.rank == rank
        return of_it and event.generation == view.generation

    event = stage.event(f"rank {rank} to end with code {code}", since, wanted)
    if event.data["exit_code"] != code or event.data["stopped"]:
        raise NoEffect(f"rank {rank} ended otherwise: {event.data['description']}")
    return event


def _kill(stage: Stage, fault: Fault, view: View) -> Effect:
    number, rank = _victim(fault, view)
    # Steps begin when the soak looks; a kill comes at any time in them.
    time.sleep(fault.parameters["delay_ms"] / 1000)
    at = now()
    try:
        os.kill(rank.pid, signal.SIGKILL)
    except ProcessLookupError:
        raise NoEffect(f"rank {number} had ended") from None
    event = _ended(stage, view, number, -signal.SIGKILL, at)
    return Effect(at, f"rank {number}: {event.data['description']}")


def _by_itself(what: int, code: int | None) -> Callable[[Stage, Fault, View], Effect]:
    def strike(stage: Stage, fault: Fault, view: View) -> Effect:
        number, _ = _victim(fault, view)
        where = fault.parameters["where"]
        expected = fault.parameters["code"] if code is None else code
        argument = fault.parameters.get("code", 0)
        since = now()
        stage.board.ask(view.generation, number, what, WHERE.index(where), argument)
        met = stage.line(
            f"rank {number} to meet it",
            view.generation,
            since,
            lambda line: line.get("meets") == what,
        )
        event = _ended(stage, view, number, expected, met["at"])
        return Effect(met["at"], f"rank {number} in {where}: {event.data['description']}")

    return strike


def _slow(stage: Stage, fault: Fault, view: View) -> Effect:
    number, _ = _victim(fault, view)
    milliseconds = int(1000 * fault.parameters["seconds"])
    since, generation = now(), view.generation
    stage.board.ask(generation, number, SLOW, 0, milliseconds)
    met = stage.line("the slow step", generation, since, lambda line: line.get("meets") == SLOW)
    slept = stage.line("the slow step's end", generation, met["at"], lambda line: "slept" in line)
    stage.wait_for_world(0, stage.board_step() + 1)
    _nothing_restarted(stage, view, since)
    shown = f"rank {number} took {slept['at'] - met['at']:.2f} s"
    return Effect(met["at"], shown, restarts=False, step=met["during"])


def _nothing_failed(stage: Stage, since: float) -> None:
    stage.hear()
    failed = next((e for e in stage.events if e.kind == "failure" and e.monotonic >= since), None)
    if failed is not None:
        raise NoEffect(f"a worker failed of it: {failed.data['reason']}")


def _nothing_restarted(stage: Stage, view: View, since: float) -> None:
    _nothing_failed(stage, since)
    after = stage.board.view()
    if after is None or after.generation != view.generation:
        raise NoEffect("the workers were restarted, which nothing asked for")


def _hang(stage: Stage, fault: Fault, view: View) -> Effect:
    _, rank = _victim(fault, view)
    at = now()
    os.kill(rank.pid, signal.SIGSTOP)

    def hung(event: Event) -> bool:
        return event.kind == "failure" and "hung" in event.data["reason"]

    event = stage.event("the hang to be noticed", at, hung, 30.0)
    stage.pids_gone({rank.pid})
    return Effect(at, event.data["reason"])


# -- nodes ----------------------------------------------------------------------------------------


def _agent(stage: Stage, fault: Fault, view: View) -> Effect:
    node = stage.node(fault.which)
    pids = {rank.pid for rank in view.ranks if rank.node == node.number}
    at = now()
    node.kill()
    stage.nodes.leave(node)
    come = stage.nodes.come()
    stage.pids_gone(pids)
    stage.holds(node, lambda v: v.generation > view.generation)
    return Effect(at, f"node {node.number} and its {len(pids)} workers; {come.number} came")


def _join(stage: Stage, fault: Fault, view: View) -> Effect:
    del fault
    node = stage.nodes.come()
    after = stage.wait_for_world(view.generation)
    return Effect(0.0, f"node {node.number}: world {len(view.ranks)} to {len(after.ranks)}")


def _drain(stage: Stage, fault: Fault, view: View) -> Effect:
    node = stage.node(fault.which)
    stage.nodes.present.remove(node)  # it may end now
    node.send(signal.SIGUSR2)
    code = node.process.wait(30.0)
    stage.nodes.present.append(node)
    stage.nodes.leave(node)
    if code != 75:
        raise NoEffect(f"node {node.number} left with exit code {code}, not 75")
    after = stage.wait_for_world(view.generation)
    return Effect(0.0, f"node {node.number}: world {len(view.ranks)} to {len(after.ranks)}")


def _stopped(stage: Stage, fault: Fault, view: View) -> Effect:
    node = stage.node(fault.which)
    at = now()
    node.send(signal.SIGSTOP)
    try:
        without = stage.holds(node, lambda v: v.generation > view.generation)
    finally:
        slept = now() - at
        node.send(signal.SIGCONT)
    _is_back(stage, node.number, without.generation)
    return Effect(at, f"node {node.number} stood still for {slept:.1f} s")


def _partition(stage: Stage, fault: Fault, view: View) -> Effect:
    node = stage.node(fault.which)
    if not node.proxy.open_connections():
        raise NoEffect(f"node {node.number} has no connection to cut")
    at = now()
    node.proxy.set_cut(True)
    try:
        without = stage.holds(node, lambda v: v.generation > view.generation)
    finally:
        lasted = now() - at
        node.proxy.set_cut(False)
    if lasted < LEASE / 2:
        raise NoEffect(f"the others did not wait for a lease: {lasted:.2f} s")
    _is_back(stage, node.number, without.generation)
    return Effect(at, f"node {node.number} was cut off for {lasted:.1f} s")


def _is_back(stage: Stage, number: int, after: int) -> None:
    stage.wait_for_world(after)
    if number not in stage.nodes.numbers:
        raise NoEffect(f"node {number} is gone")


# -- the store, the disk --------------------------------------------------------------------------


def _store(stage: Stage, fault: Fault, view: View) -> Effect:
    del fault
    store, at = stage.nodes.store, now()
    old = store.process.pid
    store.kill()
    stage.wait_until(
        "the nodes to lose the store",
        lambda: not any(node.proxy.open_connections() for node in stage.nodes.present),
    )
    store.start()
    stage.wait_until(
        "the nodes to find the store again",
        lambda: all(node.proxy.open_connections() for node in stage.nodes.present),
    )
    if is_alive(old):
        raise NoEffect("the store did not die")
    after = stage.wait_for_world(0, stage.board_step() + 2)
    _nothing_failed(stage, at)
    changed = after.generation - view.generation
    how = f"{changed} resizes" if changed else "no worker was touched"
    return Effect(at, f"away for {now() - at:.1f} s, {how}", restarts=False)


def _full(stage: Stage, fault: Fault, view: View) -> Effect:
    del fault
    at, filler = now(), stage.checkpoints / "filler"
    try:
        _fill(filler)
        failed = stage.line(
            "a save to fail", view.generation, at, lambda line: line.get("save_failed", "") != ""
        )
    finally:
        filler.unlink(missing_ok=True)
    if os.strerror(errno.ENOSPC) not in failed["save_failed"]:
        raise NoEffect(f"the save failed otherwise: {failed['save_failed']}")
    stage.wait_until("the next save to succeed", lambda: stage.committed() > failed["step"])
    _nothing_restarted(stage, view, at)
    return Effect(at, f"told at step {failed['step']}: {failed['save_failed']}", restarts=False)


def _fill(path: Path) -> None:
    """Take all that is left, also what is given back meanwhile."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            while True:
                try:
                    if file.write(bytes(size)) < size:
                        break
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    break


def _corrupt(stage: Stage, fault: Fault, view: View) -> Effect:
    stage.wait_until("a checkpoint to damage", lambda: stage.committed() > 0)
    pids = {rank.pid for rank in view.ranks}
    at = now()
    for node in tuple(stage.nodes.present):
        node.kill()
        stage.nodes.leave(node)
    stage.pids_gone(pids)
    damaged, path = stage.committed(), stage.newest_checkpoint()
    middle = fault.which % path.stat().st_size
    with path.open("r+b") as file:
        file.seek(middle)
        byte = file.read(1)
        file.seek(middle)
        file.write(bytes([byte[0] ^ 0x55]))
    for _ in range(2):
        stage.nodes.come()
    view = stage.wait_for_world(view.generation)
    line = stage.line("the restore", view.generation, at, lambda found: "resumed" in found)
    passed = [text for text in line["skipped"] if str(damaged) in text]
    if not passed or line["resumed"] >= damaged:
        raise NoEffect(
            f"step {damaged} was damaged at {middle}, and the job went on from "
            f"{line['resumed']} and skipped {line['skipped']}"
        )
    return Effect(at, f"went on from {line['resumed']}: {passed[0]}", damaged=damaged)


_DOERS: Mapping[str, Callable[[Stage, Fault, View], Effect]] = {
    "kill": _kill,
    "exception": _by_itself(EXCEPTION, 1),
    "exit": _by_itself(EXIT, None),
    "segfault": _by_itself(SEGFAULT, -signal.SIGSEGV),
    "slow": _slow,
    "hang": _hang,
    "agent": _agent,
    "join": _join,
    "drain": _drain,
    "stopped": _stopped,
    "partition": _partition,
    "store": _store,
    "full": _full,
    "corrupt": _corrupt,
}
