"""A job that was drained is put back into its scheduler's queue, once, by the last node to leave.

Not sooner: requeueing ends whatever of the job still runs, and another node may be saving. Not
where other nodes go on, and not after SIGTERM: that is how a user cancels a job, and Slurm would
start again what was cancelled.
"""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence

import attrs

from ..clock import monotonic
from ..errors import ConfigError, ElasticError, present
from ..rendezvous.document import Node
from ..rendezvous.layout import Keys, StoredJob
from ..stores.interface import ABSENT, Store
from .rendezvous_setup import Meeting, goes_on_without
from .schedulers import requeue_target

log = logging.getLogger("elasticlib.launch")

ANSWER_SECONDS = 60.0
"""For scontrol, which waits for a controller that is busy."""
LOOK_SECONDS = 10.0
"""The same at the start, where a job can do without the answer."""


@attrs.frozen
class Requeue:
    """scontrol: its path. target: the job as it is to be told. start: names this start of it."""

    scontrol: str
    target: str
    start: str

    def ask(self, refused: int = logging.ERROR) -> None:
        """Have it requeued; what keeps it from that is told, and changes no exit code.

        refused: how loudly it is told that Slurm does not.
        """
        try:
            code, said = self._call(ANSWER_SECONDS, "requeue")
        except (OSError, subprocess.TimeoutExpired) as error:
            log.error("not requeued: %s", error)
            return
        if code and "pending execution" in said:
            log.info("already requeued by another node")
        elif code:
            command = f"{self.scontrol} requeue {self.target}"
            log.log(refused, "not requeued: %s says: %s", command, said)
        else:
            log.info("requeued as %s", self.target)

    def check(self) -> None:
        """Raises ConfigError if Slurm is not going to requeue it."""
        try:
            code, said = self._call(LOOK_SECONDS, "show", "job")
        except (OSError, subprocess.TimeoutExpired) as error:
            code, said = 1, str(error)
        if code:
            log.warning("it is not known whether Slurm may requeue this job: %s", said)
        elif re.search(r"\bRequeue=0\b", said):
            raise ConfigError(
                f"--requeue slurm: Slurm may not requeue job {self.target} (Requeue=0): submit it "
                "with --requeue, or leave the flag out"
            )

    def _call(self, seconds: float, *what: str) -> tuple[int, str]:
        command = (self.scontrol, *what, self.target)
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
        return done.returncode, " ".join(f"{done.stderr} {done.stdout}".split())


def find_requeue(scheduler: str, environment: Mapping[str, str]) -> Requeue | None:
    """What does it; None for `none`.

    Raises:
        ConfigError: it could not be done when the time comes.
    """
    if scheduler == "none":
        return None
    target = requeue_target(environment)
    scontrol = shutil.which("scontrol", path=environment.get("PATH"))
    if scontrol is None:
        raise ConfigError(
            "--requeue slurm calls scontrol, which is not here (a container?): leave it out, and "
            "have the batch script requeue when srun's exit code is --drain-exit-code"
        )
    found = Requeue(scontrol, target, environment.get("SLURM_RESTART_COUNT", "0"))
    found.check()
    return found


def check_requeue(requeue: Requeue | None, meeting: Meeting, backend: str) -> None:
    """Raises ConfigError where it cannot be seen that all nodes have left."""
    if requeue is not None and meeting.store is None:
        raise ConfigError(
            f"--requeue waits until all nodes have left, and --rdzv-backend {backend} shows no "
            "store to see that in: leave it out, and have the batch script requeue"
        )


@attrs.frozen
class Last:
    """Whether a node is the last of its job to leave: None while that is open, and why."""

    is_last: bool | None
    reason: str


def decide(others: Sequence[Node], *, go_on: bool, overdue: bool) -> Last:
    """Of a node that was drained. others: whose leases stand. go_on: a generation without it has
    met. overdue: they have had all the time that a drain is given."""
    names = ", ".join(sorted(node.host for node in others))
    if not others:
        return Last(True, "all nodes have left")
    if go_on:
        return Last(False, f"the others go on: {names}")
    if not overdue:
        return Last(None, f"others are still there: {names}")
    if all(node.draining for node in others):
        return Last(True, f"drained, and still there when their time was over: {names}")
    return Last(False, f"others were not drained: {names}")


def requeue_if_last(
    requeue: Requeue, meeting: Meeting, seconds: float, stopped: Callable[[], bool]
) -> None:
    """Once this node was drained. seconds: what the others have to save and leave.

    Where the store is lost meanwhile, its host has left and has asked, or was killed and has not:
    so this node asks too. Slurm requeues a job once, however often it is asked.
    """
    store = present(meeting.store, "the store of a job on several nodes")
    try:
        last = _await_last(meeting, store, seconds, stopped)
        # Two may see at once that nobody else is left. The key is not among the job's own, all of
        # which a rendezvous reads.
        key = f"requeued/{Keys(meeting.run_id).job}{requeue.start}"
        if last.is_last and not store.compare_set(key, meeting.me.encode(), expected=ABSENT).won:
            last = Last(False, "another node does it")
    except ElasticError as error:
        log.info("the store is gone, so this node also asks to requeue: %s", error)
        requeue.ask(refused=logging.INFO)
        return
    if last.is_last:
        log.info("to be requeued: %s", last.reason)
        requeue.ask()
    else:
        log.info("not requeued by this node: %s", last.reason)


def _await_last(
    meeting: Meeting, store: Store, seconds: float, stopped: Callable[[], bool]
) -> Last:
    keys, deadline = Keys(meeting.run_id), monotonic() + seconds
    while True:
        read = StoredJob(keys, store.list(keys.job))
        last = decide(
            [node for node in read.live(set()) if node.id != meeting.me],
            go_on=goes_on_without(meeting.me, read),
            overdue=monotonic() > deadline,
        )
        if last.is_last is not None:
            return last
        if stopped():
            return Last(False, f"told to end by a signal while {last.reason}")
        store.wait(keys.job, after=read.version, timeout=0.2)
