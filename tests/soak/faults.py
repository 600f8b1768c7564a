"""Injection of each kind of fault, and the check that it had its effect.

Each function returns only after the fault had its effect. It returns when the fault occurred, and
whether the workers must be restarted. A fault without a visible effect raises NoEffectError.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
from jobs import is_alive

from elasticlib.observe.event import Event

from .campaign import EXCEPTION, EXIT, SEGFAULT, SLOW, STEP_PARTS, Fault
from .nodes import LEASE_S
from .shared_page import JobView, RankState
from .soak_job import SoakJob, now

DRAIN_EXIT_CODE = 75
NODE_EXIT_TIMEOUT_S = 30.0
HANG_DETECTION_TIMEOUT_S = 30.0


class NoEffectError(Exception):
    """The fault was injected and had no visible effect."""


@attrs.frozen
class Effect:
    """The effect of a fault."""

    at: float  # the monotonic time of the fault; 0 if it starts when training pauses
    description: str  # what showed the effect
    restarts: bool = True  # another generation must follow
    damaged_step: int = 0  # the step of the checkpoint that was damaged
    step: int = 0  # the step in which the fault occurred, if it is known


def inject(job: SoakJob, fault: Fault, view: JobView) -> Effect:
    """Inject a fault into a job all of whose nodes train, and wait for its effect.

    Raises:
        NoEffectError: The fault had no visible effect.
        AssertionError: An expected consequence did not happen within its time limit.
    """
    return _INJECTORS[fault.kind](job, fault, view)


def _select_rank(fault: Fault, view: JobView) -> tuple[int, RankState]:
    number = fault.victim % len(view.ranks)
    return number, view.ranks[number]


# -- workers --------------------------------------------------------------------------------------


def _wait_for_exit(job: SoakJob, view: JobView, rank: int, code: int, since: float) -> Event:
    """Wait until the agent records that this worker exited by itself with this code."""

    def is_match(event: Event) -> bool:
        is_exit = event.kind == "worker.exited" and event.rank == rank
        return is_exit and event.generation == view.generation

    event = job.wait_for_event(f"rank {rank} to exit with code {code}", since, is_match)
    if event.data["exit_code"] != code or event.data["stopped"]:
        raise NoEffectError(f"rank {rank} exited otherwise: {event.data['description']}")
    return event


def _kill_worker(job: SoakJob, fault: Fault, view: JobView) -> Effect:
    number, rank = _select_rank(fault, view)
    # The soak polls at the start of a step. The delay spreads the kills over the whole step.
    time.sleep(fault.parameters["delay_ms"] / 1000)
    at = now()
    try:
        os.kill(rank.pid, signal.SIGKILL)
    except ProcessLookupError:
        raise NoEffectError(f"rank {number} had exited") from None
    event = _wait_for_exit(job, view, number, -signal.SIGKILL, at)
    return Effect(at, f"rank {number}: {event.data['description']}")


def _request_from_worker(
    request: int, code: int | None
) -> Callable[[SoakJob, Fault, JobView], Effect]:
    """Return the injector of a fault that a worker causes on request.

    Args:
        request: The number of the fault.
        code: The exit code of the worker, or None if it is a parameter of the fault.
    """

    def inject_into_worker(job: SoakJob, fault: Fault, view: JobView) -> Effect:
        number, _ = _select_rank(fault, view)
        part = fault.parameters["part"]
        expected = fault.parameters["code"] if code is None else code
        argument = fault.parameters.get("code", 0)
        since = now()
        job.page.request_fault(view.generation, number, request, STEP_PARTS.index(part), argument)
        line = _wait_for_request(job, f"rank {number} to cause the fault", view, since, request)
        event = _wait_for_exit(job, view, number, expected, line["at"])
        return Effect(line["at"], f"rank {number} in {part}: {event.data['description']}")

    return inject_into_worker


def _wait_for_request(
    job: SoakJob, description: str, view: JobView, since: float, request: int
) -> dict[str, Any]:
    """Wait until a worker of this generation causes the fault that was requested from it."""

    def find_line() -> dict[str, Any] | None:
        after = job.page.view()
        line = job.find_line(view.generation, since, lambda line: line.get("fault") == request)
        if line is None and after is not None and after.generation > view.generation:
            # The view was old, for example because the fault before had another effect.
            raise NoEffectError(f"generation {view.generation} had ended")
        return line

    return job.wait_until(description, find_line)


def _slow_step(job: SoakJob, fault: Fault, view: JobView) -> Effect:
    number, _ = _select_rank(fault, view)
    milliseconds = int(1000 * fault.parameters["seconds"])
    since, generation = now(), view.generation
    job.page.request_fault(generation, number, SLOW, 0, milliseconds)
    start = _wait_for_request(job, "the slow step", view, since, SLOW)
    end = job.wait_for_line(
        "the end of the slow step", generation, start["at"], lambda line: "slept" in line
    )
    job.wait_for_world(0, job.current_step() + 1)
    _check_not_restarted(job, view, since)
    description = f"rank {number} took {end['at'] - start['at']:.2f} s"
    return Effect(start["at"], description, restarts=False, step=start["during"])


def _check_no_failure(job: SoakJob, since: float) -> None:
    job.read_events()
    failure = next((e for e in job.events if e.kind == "failure" and e.monotonic >= since), None)
    if failure is not None:
        raise NoEffectError(f"a worker failed: {failure.data['reason']}")


def _check_not_restarted(job: SoakJob, view: JobView, since: float) -> None:
    _check_no_failure(job, since)
    after = job.page.view()
    if after is None or after.generation != view.generation:
        raise NoEffectError("the workers were restarted, although the fault requires no restart")


def _hang_worker(job: SoakJob, fault: Fault, view: JobView) -> Effect:
    _, rank = _select_rank(fault, view)
    at = now()
    os.kill(rank.pid, signal.SIGSTOP)

    def is_hang(event: Event) -> bool:
        return event.kind == "failure" and "hung" in event.data["reason"]

    event = job.wait_for_event("the hang to be detected", at, is_hang, HANG_DETECTION_TIMEOUT_S)
    job.wait_until_exited({rank.pid})
    return Effect(at, event.data["reason"])


# -- nodes ----------------------------------------------------------------------------------------


def _kill_agent(job: SoakJob, fault: Fault, view: JobView) -> Effect:
    node = job.select_node(fault.victim)
    pids = {rank.pid for rank in view.ranks if rank.node == node.number}
    at = now()
    node.kill()
    job.nodes.remove(node)
    replacement = job.nodes.admit()
    job.wait_until_exited(pids)
    job.wait_without_node(node, lambda v: v.generation > view.generation)
    description = f"node {node.number} and its {len(pids)} workers exited"
    return Effect(at, f"{description}; node {replacement.number} replaces it")


def _join(job: SoakJob, fault: Fault, view: JobView) -> Effect:
    del fault
    node = job.nodes.admit()
    after = job.wait_for_world(view.generation)
    return Effect(0.0, f"node {node.number}: {len(view.ranks)} to {len(after.ranks)} ranks")


def _drain(job: SoakJob, fault: Fault, view: JobView) -> Effect:
    node = job.select_node(fault.victim)
    job.nodes.present.remove(node)  # from now on, it may exit
    node.send(signal.SIGUSR2)
    code = node.process.wait(NODE_EXIT_TIMEOUT_S)
    job.nodes.present.append(node)
    job.nodes.remove(node)
    if code != DRAIN_EXIT_CODE:
        raise NoEffectError(f"node {node.number} exited with code {code}, not {DRAIN_EXIT_CODE}")
    after = job.wait_for_world(view.generation)
    return Effect(0.0, f"node {node.number}: {len(view.ranks)} to {len(after.ranks)} ranks")


def _suspend_agent(job: SoakJob, fault: Fault, view: JobView) -> Effect:
    node = job.select_node(fault.victim)
    at = now()
    node.send(signal.SIGSTOP)
    try:
        without = job.wait_without_node(node, lambda v: v.generation > view.generation)
    finally:
        duration = now() - at
        node.send(signal.SIGCONT)
    _wait_until_rejoined(job, node.number, without.generation)
    return Effect(at, f"node {node.number} was suspended for {duration:.1f} s")


def _partition_node(job: SoakJob, fault: Fault, view: JobView) -> Effect:
    node = job.select_node(fault.victim)
    if not node.proxy.open_connections():
        raise NoEffectError(f"node {node.number} has no connection to the store")
    at = now()
    node.proxy.set_cut(True)
    try:
        without = job.wait_without_node(node, lambda v: v.generation > view.generation)
    finally:
        duration = now() - at
        node.proxy.set_cut(False)
    if duration < LEASE_S / 2:
        raise NoEffectError(f"the others did not wait for the lease: {duration:.2f} s")
    _wait_until_rejoined(job, node.number, without.generation)
    return Effect(at, f"node {node.number} had no connection for {duration:.1f} s")


def _wait_until_rejoined(job: SoakJob, number: int, after: int) -> None:
    job.wait_for_world(after)
    if number not in job.nodes.numbers:
        raise NoEffectError(f"node {number} is no longer in the job")


# -- the store and the disk -----------------------------------------------------------------------


def _restart_store(job: SoakJob, fault: Fault, view: JobView) -> Effect:
    del fault
    store, at = job.nodes.store, now()
    old = store.process.pid
    store.kill()
    job.wait_until(
        "the nodes to lose the store",
        lambda: not any(node.proxy.open_connections() for node in job.nodes.present),
    )
    store.start()
    job.wait_until(
        "the nodes to reconnect to the store",
        lambda: all(node.proxy.open_connections() for node in job.nodes.present),
    )
    if is_alive(old):
        raise NoEffectError("the store did not exit")
    after = job.wait_for_world(0, job.current_step() + 2)
    _check_no_failure(job, at)
    resizes = after.generation - view.generation
    effect = f"{resizes} resizes" if resizes else "no worker was restarted"
    return Effect(at, f"unreachable for {now() - at:.1f} s, {effect}", restarts=False)


def _fill_disk(job: SoakJob, fault: Fault, view: JobView) -> Effect:
    del fault
    at, filler = now(), job.checkpoints / "filler"
    try:
        _write_until_full(filler)
        failed = job.wait_for_line(
            "a save to fail", view.generation, at, lambda line: line.get("save_failed", "") != ""
        )
    finally:
        filler.unlink(missing_ok=True)
    if os.strerror(errno.ENOSPC) not in failed["save_failed"]:
        raise NoEffectError(f"the save failed otherwise: {failed['save_failed']}")
    job.wait_until("the next save to succeed", lambda: job.newest_committed_step() > failed["step"])
    _check_not_restarted(job, view, at)
    description = f"the save of step {failed['step']} failed: {failed['save_failed']}"
    return Effect(at, description, restarts=False)


def _write_until_full(path: Path) -> None:
    """Use all space of the disk, including space that is freed during the call."""
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


def _corrupt_checkpoint(job: SoakJob, fault: Fault, view: JobView) -> Effect:
    job.wait_until("a checkpoint to damage", lambda: job.newest_committed_step() > 0)
    pids = {rank.pid for rank in view.ranks}
    at = now()
    for node in tuple(job.nodes.present):
        node.kill()
        job.nodes.remove(node)
    job.wait_until_exited(pids)
    damaged = job.newest_committed_step()
    offset = _change_one_byte(job.newest_checkpoint_file(), fault.victim)
    for _ in range(2):
        job.nodes.admit()
    view = job.wait_for_world(view.generation)
    line = job.wait_for_line("the restore", view.generation, at, lambda line: "resumed" in line)
    skipped = [text for text in line["skipped"] if str(damaged) in text]
    if not skipped or line["resumed"] >= damaged:
        raise NoEffectError(
            f"the checkpoint of step {damaged} was damaged at byte {offset}, but the job resumed "
            f"from step {line['resumed']} and skipped {line['skipped']}"
        )
    description = f"resumed from step {line['resumed']}: {skipped[0]}"
    return Effect(at, description, damaged_step=damaged)


def _change_one_byte(path: Path, position: int) -> int:
    """Change a byte of the file; return its offset, which is the position modulo the size."""
    offset = position % path.stat().st_size
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0x55]))
    return offset


_INJECTORS: Mapping[str, Callable[[SoakJob, Fault, JobView], Effect]] = {
    "kill": _kill_worker,
    "exception": _request_from_worker(EXCEPTION, 1),
    "exit": _request_from_worker(EXIT, None),
    "segfault": _request_from_worker(SEGFAULT, -signal.SIGSEGV),
    "slow": _slow_step,
    "hang": _hang_worker,
    "agent": _kill_agent,
    "join": _join,
    "drain": _drain,
    "stopped": _suspend_agent,
    "partition": _partition_node,
    "store": _restart_store,
    "full": _fill_disk,
    "corrupt": _corrupt_checkpoint,
}
